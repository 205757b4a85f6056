"""Projected gradient ascent, compiled, for the three norms."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from keras_rub.attacks.projections import project
from keras_rub.uncertainty import PerturbationSet

# With L1, the share of the features that one step moves.
_L1_SHARE = 0.05


def steepest_step(
    gradient: tf.Tensor,
    x: tf.Tensor,
    d: tf.Tensor,
    perturbations: PerturbationSet,
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
    round_ = perturbations.scale_gradient(flat, shape)
    if perturbations.norm == "inf":
        step = tf.sign(round_)
    elif perturbations.norm == 2:
        length = tf.norm(round_, axis=1, keepdims=True)
        step = tf.math.divide_no_nan(round_, length)
    else:
        count = max(1, round(_L1_SHARE * size))
        magnitude = tf.abs(round_)
        smallest = tf.math.top_k(magnitude, count).values[:, -1:]
        chosen = tf.cast((magnitude >= smallest) & (magnitude > 0), flat.dtype)
        number = tf.reduce_sum(chosen, axis=1, keepdims=True)
        step = tf.math.divide_no_nan(tf.sign(round_) * chosen, number)
    return tf.reshape(
        perturbations.scale_gradient(step, shape), tf.shape(gradient)
    )


def random_perturbation(
    x: tf.Tensor, rho: tf.Tensor, perturbations: PerturbationSet
) -> tf.Tensor:
    """A random point of the set, as a perturbation of each x."""
    size = tf.TensorShape(x.shape[1:]).num_elements()
    shape = [tf.shape(x)[0], size]
    if perturbations.norm == "inf":
        flat = tf.random.uniform(shape, -1.0, 1.0, x.dtype)
    else:
        # Gaussian (or Laplacian) coordinates have a uniform direction on the
        # L2 (or L1) sphere.
        flat = tf.random.normal(shape, dtype=x.dtype)
        if perturbations.norm == 1:
            sign = tf.sign(flat)
            uniform = tf.random.uniform(shape, 1e-7, 1.0, x.dtype)
            flat = -sign * tf.math.log(uniform)
            length = tf.reduce_sum(tf.abs(flat), axis=1, keepdims=True)
        else:
            length = tf.norm(flat, axis=1, keepdims=True)
        radius = tf.random.uniform([shape[0], 1], dtype=x.dtype)
        flat = flat / length * radius ** (1.0 / size)
    flat = perturbations.scale_gradient(flat, tuple(x.shape[1:]))
    d = tf.reshape(flat, tf.shape(x)) * _per_sample(rho, x)
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

    Returns:
        Tensor like `x`: points of the set around each x.
    """
    start = (
        random_perturbation(x, rho, perturbations)
        if random_start
        else tf.zeros_like(x)
    )
    size = step_size * _per_sample(rho, x)

    def step(count, d):
        with tf.GradientTape() as tape:
            tape.watch(d)
            value = loss(x + d)
        gradient = tape.gradient(value, d)
        d += size * steepest_step(gradient, x, d, perturbations)
        return count + 1, project(d, x, rho, perturbations)

    _, d = tf.while_loop(
        lambda count, d: count < steps,
        step,
        (tf.constant(0), start),
        parallel_iterations=1,
    )
    return tf.stop_gradient(x + d)


def _per_sample(rho, x):
    shape = [-1] + [1] * (len(x.shape) - 1)
    return tf.reshape(tf.cast(rho, x.dtype), shape)
