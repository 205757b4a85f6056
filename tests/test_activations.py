"""Activations that two lines hold: the lines, and networks of them."""

import resource

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from numpy.testing import assert_allclose
from scipy.special import erfc, expit

import keras_rub
from keras_rub.bounds import activations, lower
from keras_rub.bounds.lines import BoundedActivation, Interval
from keras_rub.bounds.problem import Problem
from keras_rub.bounds.vertices import VertexBound
from tests import sampling
from tests.reference import randomise


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
    z = np.clip(z.astype(dtype).astype("float64"), low, high)
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


# Networks ---------------------------------------------------------------------


def network(activation, features=4, hidden=(6, 5), classes=3):
    def make():
        if isinstance(activation, layers.Layer):
            config = activation.get_config()
            return type(activation).from_config({**config, "name": None})
        return layers.Activation(activation)

    model = keras.Sequential([keras.Input((features,))])
    for units in hidden:
        model.add(layers.Dense(units))
        model.add(make())
    model.add(layers.Dense(classes))
    return model


def try_to_break(model, x, y, found, rho, norm, rng, count, **limits):
    """Asserts that no reachable point is beyond the bounds; counts them."""
    tried = 0
    for i in range(len(x)):
        points = sampling.reachable(rng, x[i], rho, norm, count=count, **limits)
        if not limits:
            climbed = sampling.ascend(model, x[i], y[i], rho, norm, steps=6)
            points = np.concatenate([points, climbed])
        margins = sampling.margins(model, points, y[i])
        # A network that overflows has no margins there, and no certificate.
        finite = np.isfinite(margins).all(axis=1)
        slack = 1e-5 * (1.0 + np.abs(margins[finite]).max(initial=0.0))
        for result in found:
            assert np.all(margins[finite] <= result.margins[i] + slack), (
                result.method
            )
            assert finite.all() or not result.certified[i]
            if result.certified[i]:
                others = np.delete(margins, y[i], axis=1)
                assert np.all(others < 0.0)
        tried += len(points)
    return tried


def bounds_of(model, x, y, rho, norm, methods=None, **limits):
    if methods is None:
        methods = {1: ("rub", "crown"), 2: ("crown",), "inf": ("coap",)}[norm]
    return [
        keras_rub.certify(
            model, x, y, rho=rho, norm=norm, method=method, verbose=0, **limits
        )
        for method in methods
    ]


# One of each kind; the slow test does all of them.
SOME = ["tanh", "gelu", "relu6", "prelu -0.75", "relu with all"]


@pytest.mark.eager
@pytest.mark.parametrize("name", SOME)
def test_networks_are_sound(name, rng):
    model = randomise(network(CURVES[name][0]), rng)
    x = rng.normal(size=(2, 4)).astype("float32")
    y = model.predict(x, verbose=0).argmax(1)
    for norm in (1, 2, "inf"):
        for rho in (0.0, 0.1, 1.0):
            found = bounds_of(model, x, y, rho, norm)
            try_to_break(model, x, y, found, rho, norm, rng, 300)
            if rho == 0.0:
                clean = sampling.margins(model, x, 0)
                clean -= np.take_along_axis(clean, y[:, None], 1)
                for result in found:
                    assert_allclose(result.margins, clean, atol=1e-4)


@pytest.mark.eager
@pytest.mark.parametrize(
    "limits",
    [
        {"input_range": (0.0, 1.0)},
        {"mask": np.array([True, False, True, True])},
        {
            "weights": np.array([0.5, 1.0, 2.0, 1.0]),
            "input_range": (0.0, 1.0),
        },
    ],
)
@pytest.mark.parametrize("name", ["tanh", "silu"])
def test_limits_of_the_attacker_are_respected(name, limits, rng):
    model = randomise(network(CURVES[name][0]), rng)
    x = rng.uniform(size=(2, 4)).astype("float32")
    x[0, 0], x[1, 2] = 0.0, 1.0
    y = model.predict(x, verbose=0).argmax(1)
    for rho in (0.2, 1.5):
        found = bounds_of(model, x, y, rho, 1, **limits)
        try_to_break(model, x, y, found, rho, 1, rng, 300, **limits)


def test_limits_loosen_a_bound_by_other_lines_only(rng):
    """A smaller set has other lines, which can be worse for a margin.

    With the lines of the larger set, which hold as well, it never is.
    """
    limits = (
        {"mask": [True, False, True]},
        {"input_range": (0.0, 1.0)},
        {"weights": [1.0, 2.0, 3.0]},
    )
    looser = 0
    x = tf.constant(rng.uniform(size=(8, 3)))
    labels = tf.constant(rng.integers(0, 2, 8), tf.int32)
    for name in ("tanh", "relu"):
        model = randomise(network(name, 3, (4, 4), 2), rng)
        free = Problem.of(model, keras_rub.PerturbationSet(1))
        for rho in (tf.constant(0.3, x.dtype), tf.constant(1.0, x.dtype)):
            lines = free.lines(x, rho)
            known = free.vertex_bound(x, labels, rho).worst_case().margins
            for some in limits:
                attacker = keras_rub.PerturbationSet(1, **some)
                problem = Problem.of(model, attacker)
                own = problem.vertex_bound(x, labels, rho)
                same = VertexBound(
                    problem.program,
                    problem.expansion,
                    problem.clean(x),
                    problem.competitors(labels),
                    rho,
                    room=attacker.room(x),
                    lines=lines,
                )
                assert np.all(same.worst_case().margins <= known + 1e-9)
                rise = own.worst_case().margins - known
                if name == "relu":  # convex: there are no such lines
                    assert np.all(rise <= 1e-9)
                looser += np.count_nonzero(rise > 1e-3)
    assert looser > 0  # or this says too little


@pytest.mark.eager
@pytest.mark.parametrize("name", ["relu", "tanh"])
def test_float64_agrees_with_float32(name, rng):
    model = randomise(network(name, 3, (4,), 2), rng)
    x = rng.normal(size=(2, 3)).astype("float32")
    for method in ("rub", "crown", "coap"):
        one, two = (
            keras_rub.certify(
                model, x, rho=0.1, method=method, dtype=dtype, verbose=0
            )
            for dtype in ("float32", "float64")
        )
        assert_allclose(one.margins, two.margins, rtol=1e-4, atol=1e-5)


@pytest.mark.medium
def test_alpha_rub_and_decisions_agree(rng):
    model = randomise(network("gelu"), rng)
    x = rng.normal(size=(6, 4)).astype("float32")
    y = model.predict(x, verbose=0).argmax(1)
    for limits in ({}, {"input_range": (-5.0, 5.0)}):
        for rho in (0.02, 0.2):
            rub, alpha = bounds_of(
                model, x, y, rho, 1, ("rub", "alpha-rub"), **limits
            )
            assert np.all(alpha.margins <= rub.margins + 1e-5)
        (quick,) = bounds_of(
            model, x, y, 0.2, 1, ("rub",), decide_only=True, **limits
        )
        assert np.array_equal(quick.certified, rub.certified)
    radius = keras_rub.certified_radius(
        model, x, y, norm=1, method="rub", verbose=0
    )
    assert np.all(radius > 0)
    exact = keras_rub.certify(
        model, x, y, rho=0.1, norm=1, method="rub", dtype="float64", verbose=0
    )
    single = bounds_of(model, x, y, 0.1, 1, ("rub",))[0]
    assert_allclose(single.margins, exact.margins, rtol=1e-3, atol=1e-4)


@pytest.mark.eager
def test_mixed_network_is_sound(rng):
    """Lines, convex activations, maxima and sums in one network."""
    inputs = keras.Input((6, 6, 1))
    h = layers.Conv2D(3, 3, activation="relu6", padding="same")(inputs)
    h = layers.MaxPooling2D(2)(h)
    h = layers.DepthwiseConv2D(2, padding="same", activation="silu")(h) + h
    h = layers.Conv2D(4, 2, activation="relu")(h)
    h = layers.Flatten()(h)
    h = layers.Maximum()([layers.Dense(5, "tanh")(h), layers.Dense(5)(h)])
    model = randomise(keras.Model(inputs, layers.Dense(3)(h)), rng)
    x = rng.uniform(size=(2, 6, 6, 1)).astype("float32")
    y = model.predict(x, verbose=0).argmax(1)
    for norm, rho in ((1, 0.3), (2, 0.1), ("inf", 0.03)):
        found = bounds_of(model, x, y, rho, norm)
        try_to_break(model, x, y, found, rho, norm, rng, 400)


def exact_margin(model, x, y, rho):
    """The largest margins of a network of one input, on a fine grid."""
    points = np.linspace(x[0] - rho, x[0] + rho, 200001, dtype="float32")
    return sampling.margins(model, points[:, None], y).max(axis=0)


@pytest.mark.eager
@pytest.mark.parametrize("name", ["tanh", "gelu", "mish", "hard_silu"])
def test_one_input_solved_on_a_grid(name, rng):
    """Never below the exact maximum, and equal to it for a single line."""
    function = CURVES[name][0]
    model = randomise(network(function, 1, (4,), 2), rng)
    x = rng.normal(size=(1, 1)).astype("float32")
    y = model.predict(x, verbose=0).argmax(1)
    for rho in (0.01, 0.5, 20.0):
        exact = exact_margin(model, x[0], y[0], rho)
        for result in bounds_of(model, x, y, rho, 1):
            assert np.all(result.margins[0] >= exact - 1e-5)
            if rho == 0.01:
                assert_allclose(result.margins[0], exact, atol=2e-3)


@pytest.mark.eager
def test_saturated_networks_are_sound(rng):
    for name in ("tanh", "sigmoid", "gelu", "relu6", "softsign", "exponential"):
        scale = 5.0 if name == "exponential" else 3e3
        model = randomise(network(name), rng)
        kernel, bias = model.layers[0].get_weights()
        model.layers[0].set_weights([kernel * scale, bias])
        x = rng.normal(size=(2, 4)).astype("float32")
        y = model.predict(x, verbose=0).argmax(1)
        for norm in (1, "inf"):
            found = bounds_of(model, x, y, 1.0, norm)
            for result in found:
                assert not np.any(np.isnan(result.margins)), name
            try_to_break(model, x, y, found, 1.0, norm, rng, 300)


@pytest.mark.eager
def test_a_planted_mistake_breaks_a_bound(rng, monkeypatch):
    """Lines that are a little too low are found by the same harness."""
    model = randomise(network("tanh"), rng)
    x = rng.normal(size=(2, 4)).astype("float32")
    y = model.predict(x, verbose=0).argmax(1)
    right = BoundedActivation.lines

    def too_low(self, interval):
        lines = right(self, interval)
        gap = 0.3 * (interval.high - interval.low)
        return lines._replace(
            upper_height=lines.upper_height - gap,
            lower_height=lines.lower_height + gap,
        )

    monkeypatch.setattr(BoundedActivation, "lines", too_low)
    for method in ("rub", "crown"):
        found = bounds_of(model, x, y, 0.5, 1, (method,))
        with pytest.raises(AssertionError):
            try_to_break(model, x, y, found, 0.5, 1, rng, 300)


# The published relaxation, in NumPy -------------------------------------------


def touching(f, slope, end, inside, outside, sign):
    """Where a tangent through f(end) touches, between two points.

    At `inside` the tangent passes f(end) on the sound side (sign 1: above),
    at `outside` it does not.
    """
    for _ in range(100):
        middle = (inside + outside) / 2
        at_end = f(middle) + slope(middle) * (end - middle)
        holds = sign * (at_end - f(end)) >= 0
        inside = np.where(holds, middle, inside)
        outside = np.where(holds, outside, middle)
    return slope(inside)


def published_s_shape(f, slope, low, high):
    """Slopes of CROWN for tanh and sigmoid: chords, and tangents."""
    chord = (f(high) - f(low)) / (high - low)
    middle = slope((low + high) / 2)
    far, near = np.full_like(low, 500.0), np.zeros_like(low)
    up = touching(f, slope, low, far, near, 1)
    down = touching(f, slope, high, -far, near, -1)
    return (
        np.select(
            [high <= 0, low >= 0, chord <= slope(high)],
            [chord, middle, chord],
            up,
        ),
        np.select(
            [high <= 0, low >= 0, chord <= slope(low)],
            [middle, chord, chord],
            down,
        ),
    )


def published_gelu(f, slope, low, high):
    """Slopes of auto_LiRPA for GELU, which bends at -sqrt(2) and sqrt(2)."""
    bend, bottom = np.sqrt(2.0), -0.7517916
    chord = (f(high) - f(low)) / (high - low)
    middle = slope((low + high) / 2)

    def at(value):
        return np.full_like(low, value)

    convex = (low >= -bend) & (high <= bend)
    concave = (low >= bend) | (high <= -bend)
    right, left = low >= 0, high <= 0
    up_right = touching(f, slope, low, at(500.0), at(bend), 1)
    up_left = touching(f, slope, high, at(-500.0), at(-bend), 1)
    down_right = touching(f, slope, high, at(bottom), at(bend), -1)
    down_left = touching(f, slope, low, at(bottom), at(-bend), -1)
    up = np.select(
        [
            convex | ~(right | left),
            concave,
            right & (chord < slope(high)),
            right,
            chord > slope(low),
        ],
        [chord, middle, chord, up_right, chord],
        up_left,
    )
    down = np.select(
        [
            convex,
            concave,
            right & (chord < slope(low)),
            left & (chord > slope(high)),
            right | (high > bend),
        ],
        [middle, chord, chord, chord, down_right],
        down_left,
    )
    return up, down


def gelu_slope(z):
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    return 0.5 * erfc(-z / np.sqrt(2.0)) + z * density


# name: (f, f', the slopes that were published)
PUBLISHED = {
    "tanh": (np.tanh, lambda z: 1 - np.tanh(z) ** 2, published_s_shape),
    "sigmoid": (expit, lambda z: expit(z) * expit(-z), published_s_shape),
    "gelu": (CURVES["gelu"][1], gelu_slope, published_gelu),
}


def published_lines(name, low, high):
    """Lines with the slopes of the literature, as tight as they can be."""
    f, slope, slopes = PUBLISHED[name]
    up, down = slopes(f, slope, low, high)
    grid = low + np.linspace(0, 1, 2001)[:, None] * (high - low)
    rest = f(grid)
    return up, (rest - up * grid).max(0), down, (rest - down * grid).min(0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_lines_are_no_looser_than_published(name, rng):
    """In the middle of the range, which is also the mean of a line's gap."""
    low, high = intervals(rng, record(name).bends, 2000, "float64")[:, 8:]
    keep = (high - low > 1e-3) & (np.abs(low) < 100) & (np.abs(high) < 100)
    low, high = low[keep], high[keep]
    lines = record(name).lines(Interval(tf.constant(low), tf.constant(high)))
    ours = [part.numpy() for part in lines]
    theirs = published_lines(name, low, high)
    middle = (low + high) / 2
    scale = 1e-5 * np.maximum(1.0, high - low)
    above = (ours[0] - theirs[0]) * middle + ours[1] - theirs[1]
    below = (ours[2] - theirs[2]) * middle + ours[3] - theirs[3]
    assert np.all(above <= scale)
    assert np.all(below >= -scale)
    assert len(low) > 500


def published_margins(model, name, x, y, rho):
    """CROWN's bound of one input over an inf ball, by plain substitution."""
    dense = [layer for layer in model.layers if layer.weights]
    weights = [
        [array.astype("float64") for array in layer.get_weights()]
        for layer in dense
    ]
    lines = []

    def highest(rows, depth):
        """Largest values of rows times the output of Dense `depth`."""
        kernel, bias = weights[depth]
        height, rows = rows @ bias, rows @ kernel.T
        for earlier in reversed(range(depth)):
            up, up_height, down, down_height = lines[earlier]
            plus, minus = np.maximum(rows, 0), np.minimum(rows, 0)
            height = height + plus @ up_height + minus @ down_height
            rows = plus * up + minus * down
            kernel, bias = weights[earlier]
            height, rows = height + rows @ bias, rows @ kernel.T
        return height + rows @ x + rho * np.abs(rows).sum(1)

    for depth, (_, bias) in enumerate(weights[:-1]):
        eye = np.eye(bias.size)
        high, low = highest(eye, depth), -highest(-eye, depth)
        lines.append(published_lines(name, low, high))
    eye = np.eye(weights[-1][1].size)
    return highest(eye - eye[y], len(weights) - 1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_crown_is_no_looser_than_published(name):
    """The same networks and samples, by plain substitution in float64."""
    ours, theirs = [], []
    model = network(name, 5, (8, 8), 3)
    for seed in range(3):
        some = np.random.default_rng(seed)
        randomise(model, some)
        x = some.normal(size=(4, 5)).astype("float32")
        y = model.predict(x, verbose=0).argmax(1)
        for rho in (0.02, 0.1, 0.3):
            found = bounds_of(model, x, y, rho, "inf", ("crown",))[0].margins
            known = np.stack(
                [
                    published_margins(model, name, x[i], y[i], rho)
                    for i in range(len(x))
                ]
            )
            keep = np.arange(3) != y[:, None]
            ours.append(found[keep])
            theirs.append(known[keep])
    ours, theirs = np.concatenate(ours), np.concatenate(theirs)
    # Both hold; ours is lower on the whole and never much higher.
    assert ours.mean() <= theirs.mean() + 1e-5
    assert np.mean(ours <= theirs + 1e-4 * (1 + abs(theirs))) > 0.8


# Training, export, and activations of one's own -------------------------------


@pytest.mark.parametrize("name", ["gelu", "tanh"])
@pytest.mark.parametrize("defense", ["RUBModel", "COAPModel"])
def test_training_lowers_the_worst_case(defense, name, rng):
    keras.utils.set_random_seed(3)
    base = network(name, 3, (12,), 2)
    x = rng.normal(size=(96, 3)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")
    settings = {"norm": "inf"} if defense == "COAPModel" else {}
    model = getattr(keras_rub, defense)(base, rho=0.2, **settings)
    model.compile(
        keras.optimizers.Adam(0.03), "sparse_categorical_crossentropy"
    )
    losses = model.fit(x, y, epochs=12, batch_size=32, verbose=0).history[
        "loss"
    ]
    assert np.all(np.isfinite(losses))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("kind", ["rub", "coap"])
@pytest.mark.parametrize("name", ["tanh", "gelu", "relu6"])
def test_gradient_of_the_bound_is_exact(name, kind, rng):
    """Against difference quotients, in float64: ranges and slopes move too."""
    base = randomise(network(name, 3, (4, 4), 2), rng)
    problem = Problem.of(base, keras_rub.PerturbationSet(1))
    x = tf.constant(rng.normal(size=(2, 3)))
    labels = tf.constant([0, 1])
    rho = tf.constant(0.3, tf.float64)

    def value(x):
        if kind == "coap":
            return problem.linear_margins(x, labels, rho, kind, training=True)
        bound = problem.vertex_bound(x, labels, rho)
        return bound.at_worst_case(bound.worst_case())

    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(value(x))
    gradient = tape.gradient(total, x).numpy()
    step = 1e-5
    quotients = np.zeros((2, 3))
    for j in range(3):
        move = step * np.eye(3)[j]
        change = value(x + move) - value(x - move)
        quotients[:, j] = tf.reduce_sum(change, axis=1) / (2 * step)
    # What a search leaves of its bracket is all that they differ by.
    assert_allclose(gradient, quotients, atol=1e-5)
    assert np.abs(gradient).max() > 0.1

    # The same by the weights, along some directions. They are float32, so
    # that a step is what the variables really moved by.
    variables = base.trainable_variables
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(value(x))
    gradients = [part.numpy() for part in tape.gradient(total, variables)]
    start = base.get_weights()
    for _ in range(4):
        move = [rng.normal(size=w.shape).astype("float32") for w in start]
        ends, totals = [], []
        for side in (-1, 1):
            ends.append(
                [
                    w + np.float32(side * 2**-12) * m
                    for w, m in zip(start, move, strict=True)
                ]
            )
            base.set_weights(ends[-1])
            totals.append(float(tf.reduce_sum(value(x))))
        expected = sum(
            np.sum(g * (up.astype("float64") - down))
            for g, down, up in zip(gradients, *ends, strict=True)
        )
        change = totals[1] - totals[0]
        assert abs(change) > 1e-5
        assert_allclose(expected, change, rtol=1e-3, atol=1e-7)


@pytest.mark.eager
def test_an_activation_of_ones_own(rng, monkeypatch):
    known = dict(activations._FUNCTIONS)
    monkeypatch.setattr(activations, "_FUNCTIONS", known)
    model = randomise(network(own_bump), rng)
    x = rng.normal(size=(2, 4)).astype("float32")
    y = model.predict(x, verbose=0).argmax(1)
    with pytest.raises(
        keras_rub.UnsupportedLayerError, match="own_bump.*register_activation"
    ):
        keras_rub.certify(model, x, y, rho=0.1)
    keras_rub.register_activation(own_bump, BUMP)
    for norm in (1, 2, "inf"):
        for rho in (0.1, 1.0):
            found = bounds_of(model, x, y, rho, norm)
            try_to_break(model, x, y, found, rho, norm, rng, 300)


def test_only_records_can_be_registered():
    with pytest.raises(ValueError, match="Received: `activation="):
        keras_rub.register_activation(own_bump, tf.tanh)


# Subclassed models ------------------------------------------------------------


class Block(keras.Model):
    """A residual block, called inside a subclassed model."""

    def __init__(self, units):
        super().__init__()
        self.inner = layers.Dense(units, "gelu")

    def call(self, x):
        return x + self.inner(x)


class Subclassed(keras.Model):
    def __init__(self, twist=None):
        super().__init__()
        self.first = layers.Dense(5)
        self.block = Block(5)
        self.drop = layers.Dropout(0.5)
        self.last = layers.Dense(3)
        self.twist = twist or (lambda h: h)

    def call(self, x, training=False):
        h = keras.ops.tanh(self.first(x))
        h = self.twist(h)
        h = self.drop(self.block(self.block(h)), training=training)
        return self.last(h)


@pytest.mark.eager
def test_subclassed_models_are_traced(rng):
    model = Subclassed()
    x = rng.normal(size=(2, 4)).astype("float32")
    model(x)
    randomise(model, rng)
    y = np.asarray(model(x)).argmax(1)
    inputs = keras.Input((4,))
    same = keras.Model(inputs, model.call(inputs))
    for norm in (1, "inf"):
        found = bounds_of(model, x, y, 0.3, norm)
        known = bounds_of(same, x, y, 0.3, norm)
        for one, other in zip(found, known, strict=True):
            assert_allclose(one.margins, other.margins, rtol=1e-5)
        try_to_break(model, x, y, found, 0.3, norm, rng, 300)


def test_the_line_in_the_way_is_named(rng):
    model = Subclassed(twist=lambda h: tf.nn.relu(h))
    x = rng.normal(size=(2, 4)).astype("float32")
    model(x)
    with pytest.raises(
        keras_rub.UnsupportedLayerError,
        match="line [0-9]+ of test_activations.py, `.*tf.nn.relu",
    ):
        keras_rub.certify(model, x, rho=0.1)
    with pytest.raises(keras_rub.UnsupportedLayerError, match="not seen"):
        lower(Subclassed())


# Many points, and large networks ----------------------------------------------


@pytest.mark.slow
def test_a_million_points_of_lines(rng):
    tried = 0
    for name in CURVES:
        curve, exact = record(name), CURVES[name][1]
        ends = intervals(rng, curve.bends, 1000)
        excess, count = worst_violation(curve, exact, ends, 60)
        assert excess <= 0.0, name
        tried += count
    print(f"{tried} points, none beyond a bound")
    assert tried >= 1_000_000


@pytest.mark.slow
def test_a_million_points_of_networks():
    tried = 0
    for name in [*CURVES, "exponential"]:
        some = np.random.default_rng(len(name))
        function = CURVES[name][0] if name in CURVES else name
        model = randomise(network(function), some)
        x = some.normal(size=(3, 4)).astype("float32")
        y = model.predict(x, verbose=0).argmax(1)
        for norm in (1, 2, "inf"):
            for rho in (0.05, 0.5, 3.0):
                found = bounds_of(model, x, y, rho, norm)
                tried += try_to_break(model, x, y, found, rho, norm, some, 1700)
    print(f"{tried} points, none beyond a bound")
    assert tried >= 1_000_000


def calibrate(model, x):
    """Statistics of a batch, without which untrained values explode."""
    found = [
        layer
        for layer in model.layers
        if isinstance(layer, layers.BatchNormalization)
    ]
    for layer in found:
        layer.momentum = 0.0
    model(x, training=True)


# What a certificate of such a network may take, in gigabytes.
BUDGET = 2.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MobileNetV2", "ResNet50V2", "VGG16"])
def test_applications_are_certified(name, rng):
    keras.utils.set_random_seed(0)
    model = getattr(keras.applications, name)(
        weights=None,
        input_shape=(32, 32, 3),
        classes=10,
        classifier_activation=None,
    )
    x = rng.uniform(size=(1, 32, 32, 3)).astype("float32")
    mask = np.zeros((32, 32, 3), bool)
    mask[10:12, 10:12] = True
    calibrate(model, rng.uniform(size=(16, 32, 32, 3)).astype("float32"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = keras_rub.certify(
        model,
        x,
        rho=1e-4,
        norm=1,
        method="rub",
        mask=mask,
        verbose=0,
    )
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gigabytes = (after - before) / 2**20
    print(f"{name}: {gigabytes:.2f} GB more, margins {result.margins.max():g}")
    assert gigabytes < BUDGET
    assert np.all(np.isfinite(result.margins))
    points = sampling.reachable(rng, x[0], 1e-4, count=20, mask=mask)
    margins = sampling.margins(model, points, result.predicted[0])
    assert np.all(margins <= result.margins[0] + 1e-4 * (1 + abs(margins)))


@pytest.mark.slow
def test_efficient_net_says_why_not():
    model = keras.applications.EfficientNetB0(
        weights=None,
        input_shape=(32, 32, 3),
        classes=10,
        classifier_activation=None,
    )
    with pytest.raises(keras_rub.UnsupportedLayerError) as error:
        keras_rub.certify(model, np.zeros((1, 32, 32, 3)), rho=1e-4)
    assert "block1a_se_excite" in str(error.value)
    assert "block7a_se_excite" in str(error.value)
    assert "both move with the input" in str(error.value)
