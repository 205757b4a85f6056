"""Activations that two lines hold: the lines, and networks of them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from numpy.testing import assert_allclose
from scipy.special import erfc, expit

from keras_rub.bounds import activations
from keras_rub.bounds.lines import BoundedActivation, Interval


def own_bump(z):
    """A user's own function: neither convex nor growing, without f'."""
    return z / (1.0 + z * z)


BUMP = BoundedActivation(
    own_bump,
    shapes=("concave", "convex", "concave", "convex"),
    bends=(-np.sqrt(3.0), 0.0, np.sqrt(3.0)),
)


def prelu(slopes):
    layer = layers.PReLU()
    layer.build((None, len(slopes)))
    layer.alpha.assign(slopes)
    return layer


def softplus(z):
    return np.logaddexp(0.0, z)


def elu(z, alpha):
    return np.where(z > 0, z, alpha * np.expm1(np.minimum(z, 0)))


def gelu_tanh(z):
    return z * expit(2 * np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))


# name: (what Keras calls it, the same in float64)
CURVES = {
    "sigmoid": (keras.activations.sigmoid, expit),
    "log_sigmoid": (keras.activations.log_sigmoid, lambda z: -softplus(-z)),
    "tanh": (keras.activations.tanh, np.tanh),
    "softsign": (keras.activations.softsign, lambda z: z / (1 + abs(z))),
    "gelu": (
        keras.activations.gelu,
        lambda z: 0.5 * z * erfc(-z / np.sqrt(2.0)),
    ),
    "silu": (keras.activations.silu, lambda z: z * expit(z)),
    "mish": (keras.activations.mish, lambda z: z * np.tanh(softplus(z))),
    "selu": (
        keras.activations.selu,
        lambda z: 1.0507009873554805 * elu(z, 1.6732632423543772),
    ),
    "elu 2.5": (layers.ELU(alpha=2.5), lambda z: elu(z, 2.5)),
    "relu6": (keras.activations.relu6, lambda z: np.clip(z, 0, 6)),
    "relu with all": (
        layers.ReLU(max_value=2.0, negative_slope=0.5, threshold=1.0),
        lambda z: np.where(z > 1, np.minimum(z, 2), 0.5 * np.minimum(z - 1, 0)),
    ),
    "relu with max": (layers.ReLU(1.0, 0.1), lambda z: np.clip(z, 0.1 * z, 1)),
    "relu with threshold": (
        layers.ReLU(threshold=0.7),
        lambda z: z * (z.astype("f4") > np.float32(0.7)),
    ),
    "leaky 1.5": (layers.LeakyReLU(1.5), lambda z: np.minimum(z, 1.5 * z)),
    "hard_sigmoid": (
        keras.activations.hard_sigmoid,
        lambda z: np.clip(z / 6 + 0.5, 0, 1),
    ),
    "hard_tanh": (keras.activations.hard_tanh, lambda z: np.clip(z, -1, 1)),
    "hard_silu": (
        keras.activations.hard_silu,
        lambda z: z * np.clip(z / 6 + 0.5, 0, 1),
    ),
    "sparse_sigmoid": (
        keras.activations.sparse_sigmoid,
        lambda z: np.clip(z / 2 + 0.5, 0, 1),
    ),
    "soft_shrink": (
        keras.activations.soft_shrink,
        lambda z: z - np.clip(z, -0.5, 0.5),
    ),
    "hard_shrink": (
        keras.activations.hard_shrink,
        lambda z: z * (abs(z) > 0.5),
    ),
    "prelu -0.75": (prelu([-0.75]), lambda z: np.where(z > 0, z, -0.75 * z)),
    "prelu 0.25": (prelu([0.25]), lambda z: np.where(z > 0, z, 0.25 * z)),
    "prelu 1.75": (prelu([1.75]), lambda z: np.where(z > 0, z, 1.75 * z)),
}


def record(name):
    return activations.from_keras(CURVES[name][0])


def intervals(rng, bends, count, dtype="float32"):
    """Ranges of all widths, also at bends, saturated and of width zero."""
    size = 10.0 ** rng.uniform(-6, 4, count)
    center = rng.normal(size=count) * 10.0 ** rng.uniform(-3, 4, count)
    center[: count // 2] = rng.normal(size=count // 2) * 2
    for bend in bends:
        some = rng.random(count) < 0.2
        center[some] = bend + size[some] * rng.uniform(-1, 1, some.sum())
    low, high = center - size / 2, center + size / 2
    low[:5] = high[:5]
    low[5:8], high[5:8] = -1e4, [1e4, 1e4, 3.0]
    low[8], high[8] = -2.0, 1e4
    ends = np.clip(np.stack([low, high]), -1e4, 1e4).astype(dtype)
    return np.sort(ends, axis=0)


def worst_violation(curve, exact, ends, points, dtype="float32"):
    """How far f leaves the lines, beyond the rounding of f itself."""
    low, high = ends.astype("float64")
    lines = curve.lines(Interval(*map(tf.constant, ends)))
    up, up_height, down, down_height = (
        np.broadcast_to(part.numpy().astype("float64"), low.shape)
        for part in lines
    )
    t = np.linspace(0, 1, points)[:, None]
    # Dense at the ends too, where saturated curves bend.
    z = np.concatenate(
        [
            low + t * (high - low),
            low + t**4 * (high - low),
            high - t**4 * (high - low),
            *(np.clip(bend + 8 * (t - 0.5), low, high) for bend in curve.bends),
        ]
    )
    z = z.astype(dtype).astype("float64")
    value = exact(z)
    above = value - (up * z + up_height)
    below = (down * z + down_height) - value
    # What NumPy rounds: f in the given type, and this check in float64.
    ulp = np.finfo(dtype).eps * (abs(value) + 1e-3)
    ulp += 1e-15 * (abs(up) + abs(down)) * abs(z)
    return (np.maximum(above, below) - ulp).max(), z.size


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CURVES)
def test_lines_hold_the_function(name, dtype, rng):
    curve, exact = record(name), CURVES[name][1]
    assert isinstance(curve, BoundedActivation)
    if "threshold" in name and dtype == "float64":
        pytest.skip("the jump is at the float32 number")
    ends = intervals(rng, curve.bends, 400, dtype)
    excess, _ = worst_violation(curve, exact, ends, 60, dtype)
    assert excess <= 0.0


@pytest.mark.parametrize("name", CURVES)
def test_records_are_the_functions_of_keras(name, rng):
    curve, (function, exact) = record(name), CURVES[name]
    z = np.concatenate(
        [rng.normal(size=300) * 3, [-1e4, -30.0, 0.0, 30.0, 1e4]]
    ).astype("float32")
    value = curve.function(tf.constant(z[:, None])).numpy()[:, 0]
    assert_allclose(value, np.ravel(function(z[:, None])), rtol=2e-5, atol=2e-6)
    assert_allclose(value, exact(z.astype("float64")), rtol=2e-5, atol=1e-6)
    slope = curve.slope_at(tf.constant(z[:, None])).numpy()[:, 0]
    assert np.all(np.isfinite(slope))
    step = 1e-4
    ahead, behind = (exact(z.astype("float64") + s) for s in (step, -step))
    # Off the kinks and jumps.
    smooth = np.all([abs(z - bend) > 2 * step for bend in curve.bends], axis=0)
    assert_allclose(
        slope[smooth],
        ((ahead - behind) / (2 * step))[smooth],
        atol=1e-3,
    )
    steepest = np.max(curve.largest_slope(tf.float32))
    assert np.all(abs(slope) <= steepest * (1 + 1e-6))


def test_a_wrong_shape_is_caught_by_the_check(rng):
    """A planted mistake: the check of the lines can fail."""
    wrong = BoundedActivation(
        tf.tanh, ("concave", "convex"), (0.0,), increasing=True
    )
    excess, _ = worst_violation(wrong, np.tanh, intervals(rng, (0.0,), 400), 60)
    assert excess > 1e-2


@pytest.mark.parametrize("name", ["tanh", "gelu", "relu6", "silu", "softsign"])
def test_lines_are_the_lowest_in_the_middle(name, rng):
    """No line through two points of the graph's hull is lower there."""
    curve, exact = record(name), CURVES[name][1]
    low, high = intervals(rng, curve.bends, 300)[:, 8:]
    keep = (high - low > 0.1) & (high - low < 50)
    low, high = low[keep], high[keep]
    lines = curve.lines(Interval(tf.constant(low), tf.constant(high)))
    low, high = low.astype("float64"), high.astype("float64")
    middle = (low + high) / 2
    t = np.linspace(0, 1, 401)[:, None]
    z = low + t * (high - low)
    value = exact(z)
    # The hull in the middle: the best mean of a left and a right point.
    left, right = z[:200:5], z[200::5]
    share = (right[None] - middle) / (right[None] - left[:, None])
    for sign, slope, height in (
        (1, lines.upper_slope, lines.upper_height),
        (-1, lines.lower_slope, lines.lower_height),
    ):
        mean = share * value[:200:5][:, None] + (1 - share) * value[200::5]
        hull = np.maximum((sign * mean).max((0, 1)), sign * exact(middle))
        found = sign * (slope.numpy() * middle + height.numpy())
        gap = found - hull
        assert np.all(gap >= -1e-5)
        assert np.all(gap <= 2e-3 * (1 + abs(hull)) * np.maximum(1, high - low))


def test_gradient_of_the_lines_is_finite():
    for name in CURVES:
        curve = record(name)
        low = tf.constant([[-1e4], [-2.0], [0.0], [1.0], [5.0]])
        high = tf.constant([[1e4], [3.0], [0.0], [1.0], [1e4]])
        with tf.GradientTape() as tape:
            tape.watch([low, high])
            lines = curve.lines(Interval(low, high))
            total = tf.add_n([tf.reduce_sum(part) for part in lines])
        for gradient in tape.gradient(total, [low, high]):
            assert np.all(np.isfinite(gradient)), name


@pytest.mark.parametrize(
    "settings",
    [
        {"shapes": ("convex",), "bends": (0.0,)},
        {"shapes": ("convex", "bent"), "bends": (0.0,)},
        {"shapes": ("convex",) * 3, "bends": (1.0, 0.0)},
    ],
)
def test_impossible_shapes_are_refused(settings):
    with pytest.raises(ValueError, match="Received: `shapes="):
        BoundedActivation(tf.tanh, **settings)
