"""Steps, starts and plain projected ascent for the three norms."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from keras_rub import checks
from keras_rub.attacks.projections import project
from keras_rub.perturbations import PerturbationSet

# With L1, the share of the features that one step moves.
_L1_SHARE = 0.05


def steepest_step(
    gradient: tf.Tensor,
    x: tf.Tensor,
    d: tf.Tensor,
    perturbations: PerturbationSet,
    share: tf.Tensor | None = None,
) -> tf.Tensor:
    """The move of norm one that raises a linear function the most.

    For L2 the normalised gradient, for Linf its signs. For L1 that would be a
    single feature; a few of the best share the move instead, which gets
    further in as many steps. Features that stand at the end of the valid
    range are left alone.

    Args:
        gradient: tensor [batch, *features].
        x: tensor [batch, *features]. The clean inputs.
        d: tensor [batch, *features]. The perturbation so far.
        perturbations: `PerturbationSet`.
        share: tensor [batch], or `None`. With L1, the part of the features
            that share the move. Defaults to `None`, one in twenty.

    Returns:
        Tensor like `gradient`.
    """
    shape = tuple(x.shape[1:])
    size = tf.TensorShape(shape).num_elements()
    flat = tf.reshape(gradient, [-1, size])
    room = perturbations.room(x + d)
    if room is not None:
        up, down = (tf.reshape(part, [-1, size]) for part in room)
        blocked = ((flat > 0) & (up <= 0)) | ((flat < 0) & (down <= 0))
        flat = tf.where(blocked, 0.0, flat)
    # Dividing by the weights once makes the ball round, twice scales back.
    reach = tf.constant(perturbations.reach(shape), flat.dtype)
    round_ = flat * reach
    if perturbations.norm == "inf":
        step = tf.sign(round_)
    elif perturbations.norm == 2:
        length = tf.norm(round_, axis=1, keepdims=True)
        step = tf.math.divide_no_nan(round_, length)
    else:
        magnitude = tf.abs(round_)
        if share is None:
            count = max(1, round(_L1_SHARE * size))
            smallest = tf.math.top_k(magnitude, count).values[:, -1:]
        else:
            count = tf.cast(tf.math.ceil(share * size), tf.int32)
            count = tf.clip_by_value(count, 1, size)
            # Sorting all of them would take most of an attack's time.
            largest = tf.math.top_k(magnitude, tf.reduce_max(count)).values
            smallest = tf.gather(largest, count[:, None] - 1, batch_dims=1)
        chosen = tf.cast((magnitude >= smallest) & (magnitude > 0), flat.dtype)
        number = tf.reduce_sum(chosen, axis=1, keepdims=True)
        step = tf.math.divide_no_nan(tf.sign(round_) * chosen, number)
    return tf.reshape(step * reach, tf.shape(gradient))


def random_perturbation(
    x: tf.Tensor,
    rho: tf.Tensor,
    perturbations: PerturbationSet,
    seed: tf.Tensor | None = None,
) -> tf.Tensor:
    """A random point of the set, as a perturbation of each x.

    Args:
        x: float tensor [batch, *features].
        rho: tensor [] or [batch].
        perturbations: `PerturbationSet`.
        seed: int tensor [2], or `None` for another point at each call.

    Returns:
        Tensor like `x`.
    """
    size = tf.TensorShape(x.shape[1:]).num_elements()
    shape = [tf.shape(x)[0], size]
    if seed is None:
        seed = tf.random.uniform([2], maxval=tf.int32.max, dtype=tf.int32)
    seeds = tf.unstack(tf.random.experimental.stateless_split(seed, 3))
    uniform = tf.random.stateless_uniform
    if perturbations.norm == "inf":
        flat = uniform(shape, seeds[0], -1.0, 1.0, x.dtype)
    else:
        # Gaussian (or Laplacian) coordinates have a uniform direction on the
        # L2 (or L1) sphere.
        flat = tf.random.stateless_normal(shape, seeds[0], dtype=x.dtype)
        if perturbations.norm == 1:
            size_of = -tf.math.log(uniform(shape, seeds[1], 1e-7, 1.0, x.dtype))
            flat = tf.sign(flat) * size_of
            length = tf.reduce_sum(size_of, axis=1, keepdims=True)
        else:
            length = tf.norm(flat, axis=1, keepdims=True)
        radius = uniform([shape[0], 1], seeds[2], dtype=x.dtype)
        flat = flat / length * radius ** (1.0 / size)
    flat *= tf.constant(perturbations.reach(tuple(x.shape[1:])), x.dtype)
    d = tf.reshape(flat, tf.shape(x)) * per_sample(rho, x)
    return project(d, x, rho, perturbations)


def ascend(
    loss: Callable[[tf.Tensor], tf.Tensor],
    x: tf.Tensor,
    rho: tf.Tensor,
    perturbations: PerturbationSet,
    *,
    steps: int,
    step_size: float,
    random_start: bool,
    seed: tf.Tensor | None = None,
) -> tf.Tensor:
    """Adversarial inputs by projected gradient ascent.

    Args:
        loss: function from inputs [batch, *features] to what is to be
            raised: any shape, the samples apart from each other.
        x: float tensor [batch, *features]. The clean inputs.
        rho: tensor [] or [batch]. The radii.
        perturbations: `PerturbationSet`.
        steps: int. Number of steps.
        step_size: float. Length of a step, as a multiple of `rho`.
        random_start: bool. Whether to start at a random point of the set.
        seed: int tensor [2], or `None` for another start at each call.

    Returns:
        Tensor like `x`: points of the set around each x.
    """
    start = (
        random_perturbation(x, rho, perturbations, seed)
        if random_start
        else tf.zeros_like(x)
    )
    size = step_size * per_sample(rho, x)

    def step(count, d):
        with tf.GradientTape() as tape:
            tape.watch(d)
            value = loss(x + d)
        gradient = gradient_of(tape, value, d)
        d += size * steepest_step(gradient, x, d, perturbations)
        return count + 1, project(d, x, rho, perturbations)

    _, d = tf.while_loop(
        lambda count, d: count < steps,
        step,
        (tf.constant(0), start),
        parallel_iterations=1,
    )
    return tf.stop_gradient(x + d)


def per_sample(rho: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Radii [] or [batch] in a shape that multiplies x."""
    shape = [-1] + [1] * (len(x.shape) - 1)
    return tf.reshape(tf.cast(rho, x.dtype), shape)


def gradient_of(
    tape: tf.GradientTape, value: tf.Tensor, points: tf.Tensor
) -> tf.Tensor:
    """The gradient by the points, or an error if the model has none."""
    gradient = tape.gradient(value, points)
    if gradient is None:
        raise checks.no_gradient()
    return tf.convert_to_tensor(gradient)
