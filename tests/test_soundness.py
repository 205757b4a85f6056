"""No point of the perturbation set may beat a worst-case margin."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from numpy.testing import assert_allclose
from scipy.optimize import linprog

import keras_rub
from keras_rub import ARUBModel, RUBModel, UnsupportedLayerError
from keras_rub.bounds import activations, lower, lowering, program
from keras_rub.bounds.competitors import Competitors
from keras_rub.bounds.majorant import Relaxation, clean_pass
from keras_rub.bounds.problem import Problem
from tests import sampling
from tests.reference import randomise


def margins_of(logits, y):
    logits = np.asarray(logits)
    return logits - np.take_along_axis(logits, y[:, None], axis=1)


# Tiny networks, solved exactly -----------------------------------------------


def dense_network(features, hidden, classes, rng):
    model = keras.Sequential(
        [
            keras.Input((features,)),
            *(layers.Dense(units, "relu") for units in hidden),
            layers.Dense(classes),
        ]
    )
    return randomise(model, rng)


def exact_margins(model, x, y, rho):
    """The largest margins [K] of one input over the L1 ball around it.

    On each activation pattern the network is affine, so its maximum there is
    a linear program; the variables are the two parts of d = p - q.
    """
    weights = [
        [array.astype("float64") for array in layer.get_weights()]
        for layer in model.layers
    ]
    best = np.full(weights[-1][1].size, -np.inf)

    def visit(depth, slopes, offset, rows, limits):
        """`offset + slopes @ d` where `rows @ d <= limits`."""
        kernel, bias = weights[depth]
        slopes, offset = kernel.T @ slopes, kernel.T @ offset + bias
        if depth == len(weights) - 1:
            maximise(slopes, offset, rows, limits)
            return
        reach = rho * np.abs(slopes).max(axis=1)
        states = [
            [s for s in (0, 1) if reach[i] >= abs(offset[i]) or s == (z > 0)]
            for i, z in enumerate(offset)
        ]
        for pattern in itertools.product(*states):
            on = np.array(pattern)
            sign = 1 - 2 * on[:, None]
            visit(
                depth + 1,
                on[:, None] * slopes,
                on * offset,
                np.vstack([rows, sign * slopes]),
                np.concatenate([limits, -sign[:, 0] * offset]),
            )

    def maximise(slopes, offset, rows, limits):
        for k in np.flatnonzero(np.arange(best.size) != y):
            gain, start = slopes[k] - slopes[y], offset[k] - offset[y]
            if start + rho * np.abs(gain).max() <= best[k]:
                continue
            ones = np.ones([1, 2 * gain.size])
            solution = linprog(
                -np.concatenate([gain, -gain]),
                np.vstack([np.hstack([rows, -rows]), ones]),
                np.append(limits, rho),
            )
            if solution.status == 2:  # the pattern does not occur
                return
            best[k] = max(best[k], start - solution.fun)

    size = x.size
    visit(0, np.eye(size), x.astype("float64"), np.zeros([0, size]), [])
    best[y] = 0.0
    return best


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("features", "hidden", "classes"),
    [(1, [3], 2), (6, [8], 3), (2, [3, 3], 2), (5, [4, 4], 3)],
)
def test_bound_is_above_the_exact_maximum(features, hidden, classes, seed):
    rng = np.random.default_rng(seed)
    base = dense_network(features, hidden, classes, rng)
    x = rng.normal(size=(1, features)).astype("float32")
    y = np.array([seed % classes])
    model = RUBModel(base, vertices="all")
    for rho in (0.3, 2.0):
        bound = model.worst_case_margins(x, y, rho=rho).numpy()[0]
        exact = exact_margins(base, x[0], y[0], rho)
        assert np.all(bound >= exact - 1e-5), rho
        sampled = sampled_margins(base, x, y, [rho], rng, count=200)
        assert np.all(exact >= sampled.max(axis=(0, 1, 2)) - 1e-5), rho


def test_bound_is_exact_where_the_margin_is_convex(rng):
    base = dense_network(5, [8], 2, rng)
    kernel, bias = base.layers[-1].get_weights()
    kernel[:, 1] = kernel[:, 0] + np.abs(kernel[:, 1])
    base.layers[-1].set_weights([kernel, bias])
    x = rng.normal(size=(1, 5)).astype("float32")
    y = np.array([0])
    for rho in (0.5, 3.0):
        bound = RUBModel(base, vertices="all").worst_case_margins(x, y, rho=rho)
        exact = exact_margins(base, x[0], 0, rho)
        assert_allclose(bound[0], exact, rtol=1e-5)


@pytest.mark.parametrize("hidden", [[6], [5, 4]])
def test_rub_and_arub_agree_to_first_order(hidden, rng):
    base = dense_network(4, hidden, 3, rng)
    x = rng.normal(size=(64, 4)).astype("float32")
    y = np.arange(64) % 3
    rho = 0.01
    # Away from kinks: every pre-activation is further from 0 than it can go.
    value, reach, keep = x, rho, np.ones(64, bool)
    for layer in base.layers[:-1]:
        kernel, bias = layer.get_weights()
        reach *= np.abs(kernel).sum(axis=0).max()
        value = value @ kernel + bias
        keep &= np.abs(value).min(axis=1) > reach
        value = np.maximum(value, 0)
    assert keep.sum() > 10
    x, y = x[keep], y[keep]
    clean = margins_of(base(x), y)
    rub, arub = (
        model.worst_case_margins(x, y, rho=rho).numpy() - clean
        for model in (RUBModel(base, vertices="all"), ARUBModel(base, norm=1))
    )
    assert np.median(np.max(rub, axis=1)) > 1e-3
    assert_allclose(rub, arub, rtol=1e-3, atol=1e-6)


# Every layer rule ------------------------------------------------------------


def unit_ball_points(size, count, rng):
    """Points [P, size] of the unit L1 ball: corners, edges and inside."""
    dense = rng.normal(size=(count // 3, size))
    sparse = rng.normal(size=(count // 3, size))
    sparse *= rng.uniform(size=sparse.shape) < 2.5 / size
    inside = rng.normal(size=(count // 3, size))
    for points in (dense, sparse, inside):
        points /= np.maximum(np.abs(points).sum(1, keepdims=True), 1e-9)
    inside *= rng.uniform(size=(len(inside), 1))
    corners = np.eye(size)
    return np.concatenate([corners, -corners, dense, sparse, inside])


def sampled_margins(model, x, y, radii, rng, count=300):
    """Margins [radii, batch, points, K] at points of the L1 balls."""
    points = unit_ball_points(x[0].size, count, rng)
    radii = np.reshape(radii, [-1, 1, 1, 1])
    flat = x.reshape([1, len(x), 1, -1]) + radii * points
    shape = flat.shape[:3]
    logits = model(flat.reshape([-1, *x.shape[1:]]).astype("float32"))
    logits = tf.reshape(logits, [*shape, -1]).numpy()
    return (
        logits
        - logits[:, np.arange(len(y)), :, y].transpose(1, 0, 2)[..., None]
    )


def ascended_margins(model, x, y, radii, rng, classes, steps=4):
    """Margins [radii, batch, K] at the end of a few ascent steps."""
    grid = np.stack(
        np.meshgrid(
            range(len(radii)), range(len(x)), range(classes), indexing="ij"
        ),
        axis=-1,
    ).reshape(-1, 3)
    rho = np.asarray(radii)[grid[:, 0], None]
    clean = x.reshape([len(x), -1])[grid[:, 1]]
    moved = (
        0.1
        * rho
        * unit_ball_points(x[0].size, len(grid) * 3, rng)[-len(grid) :]
    )
    labels, rivals = y[grid[:, 1]], grid[:, 2]
    for _ in range(steps):
        with tf.GradientTape() as tape:
            point = tf.constant((clean + moved).reshape([-1, *x.shape[1:]]))
            point = tf.cast(point, tf.float32)
            tape.watch(point)
            logits = model(point, training=False)
            margin = tf.gather(logits, rivals, batch_dims=1) - tf.gather(
                logits, labels, batch_dims=1
            )
        slope = tape.gradient(margin, point).numpy().reshape(moved.shape)
        # Towards the best corner, then back into the ball by scaling.
        best = np.abs(slope) >= np.abs(slope).max(axis=1, keepdims=True)
        moved = moved + 0.5 * rho * best * np.sign(slope)
        size = np.abs(moved).sum(axis=1, keepdims=True)
        moved *= np.minimum(1.0, rho / np.maximum(size, 1e-9))
    logits = model((clean + moved).reshape([-1, *x.shape[1:]]))
    margin = margins_of(logits, labels)[np.arange(len(grid)), rivals]
    return margin.reshape(len(radii), len(x), classes)


def residual(h):
    return layers.Add()([h, layers.Dense(h.shape[-1], "relu")(h)])


def nested(h):
    inner = keras.Input(h.shape[1:])
    body = layers.Dense(4, "softplus")(inner)
    body = keras.Sequential([layers.Dense(3), layers.ReLU()])(body)
    return keras.Model(inner, body)(h)


def shared_twice(h):
    layer = layers.Dense(h.shape[-1], "relu")
    return layer(layer(h) - 1.0)


def channels_first(layer_type, **kwargs):
    return layer_type(data_format="channels_first", **kwargs)


def dense(*args, **kwargs):
    return layers.Dense(3, *args, **kwargs)


VECTOR, SERIES, IMAGE, VOLUME = (5,), (5, 2), (5, 4, 2), (3, 4, 3, 1)

# name: (shape of the input, a layer or a function of a symbolic tensor)
CASES = {
    "dense": (VECTOR, lambda: dense()),
    "dense without bias": (VECTOR, lambda: dense(use_bias=False)),
    "dense on a series": (SERIES, lambda: dense()),
    "conv1d": (SERIES, lambda: layers.Conv1D(2, 3, strides=2)),
    "conv1d causal": (
        SERIES,
        lambda: layers.Conv1D(2, 2, padding="causal", dilation_rate=2),
    ),
    "conv2d same": (
        IMAGE,
        lambda: layers.Conv2D(2, (3, 2), strides=2, padding="same"),
    ),
    "conv2d dilated": (IMAGE, lambda: layers.Conv2D(2, 2, dilation_rate=2)),
    "conv3d": (VOLUME, lambda: layers.Conv3D(2, 2, padding="same")),
    "depthwise1d": (
        SERIES,
        lambda: layers.DepthwiseConv1D(3, padding="same", depth_multiplier=2),
    ),
    "depthwise2d": (
        IMAGE,
        lambda: layers.DepthwiseConv2D(2, strides=2, depth_multiplier=2),
    ),
    "depthwise2d dilated": (
        IMAGE,
        lambda: layers.DepthwiseConv2D(2, padding="same", dilation_rate=2),
    ),
    "max1d": (SERIES, lambda: layers.MaxPooling1D(3, 2, padding="same")),
    "max2d": (IMAGE, lambda: layers.MaxPooling2D(2)),
    "max2d overlapping": (
        IMAGE,
        lambda: layers.MaxPooling2D((3, 2), 1, padding="same"),
    ),
    "max3d": (VOLUME, lambda: layers.MaxPooling3D(2, 1, padding="same")),
    "mean1d": (SERIES, lambda: layers.AveragePooling1D(2, 1)),
    "mean2d": (IMAGE, lambda: layers.AveragePooling2D(3, 2, padding="same")),
    "mean3d": (VOLUME, lambda: layers.AveragePooling3D(2, padding="same")),
    "global mean1d": (SERIES, lambda: layers.GlobalAveragePooling1D()),
    "global mean2d": (
        IMAGE,
        lambda: layers.GlobalAveragePooling2D(keepdims=True),
    ),
    "global mean3d": (VOLUME, lambda: layers.GlobalAveragePooling3D()),
    "global mean, channels first": (
        IMAGE,
        lambda: channels_first(layers.GlobalAveragePooling2D),
    ),
    "global max1d": (SERIES, lambda: layers.GlobalMaxPooling1D(keepdims=True)),
    "global max2d": (IMAGE, lambda: layers.GlobalMaxPooling2D()),
    "global max2d keepdims": (
        IMAGE,
        lambda: layers.GlobalMaxPooling2D(keepdims=True),
    ),
    "global max3d": (VOLUME, lambda: layers.GlobalMaxPooling3D(keepdims=True)),
    "global max, channels first": (
        IMAGE,
        lambda: channels_first(layers.GlobalMaxPooling2D, keepdims=True),
    ),
    "batch norm": (IMAGE, lambda: layers.BatchNormalization()),
    "batch norm of rows": (IMAGE, lambda: layers.BatchNormalization(axis=1)),
    "batch norm, bare": (
        VECTOR,
        lambda: layers.BatchNormalization(center=False, scale=False),
    ),
    "normalization": (
        IMAGE,
        lambda: layers.Normalization(mean=[0.5, -1.0], variance=[4.0, 0.3]),
    ),
    "normalization inverted": (
        VECTOR,
        lambda: layers.Normalization(None, 0.5, 0.3, invert=True),
    ),
    "rescaling": (VECTOR, lambda: layers.Rescaling(-2.0, 0.5)),
    "rescaling by channel": (
        IMAGE,
        lambda: layers.Rescaling([-2.0, 0.5], [0.1, 0.2]),
    ),
    "flatten": (IMAGE, lambda: layers.Flatten()),
    "flatten, channels first": (IMAGE, lambda: channels_first(layers.Flatten)),
    "reshape": (IMAGE, lambda: layers.Reshape((10, -1))),
    "permute": (IMAGE, lambda: layers.Permute((3, 1, 2))),
    "padding1d": (SERIES, lambda: layers.ZeroPadding1D(2)),
    "padding2d": (IMAGE, lambda: layers.ZeroPadding2D(((1, 0), (0, 2)))),
    "padding3d": (VOLUME, lambda: layers.ZeroPadding3D(1)),
    "cropping1d": (SERIES, lambda: layers.Cropping1D((1, 2))),
    "cropping2d": (IMAGE, lambda: layers.Cropping2D(((1, 0), (0, 2)))),
    "cropping3d": (VOLUME, lambda: layers.Cropping3D(((1, 0), (1, 1), (0, 1)))),
    "separable1d": (
        SERIES,
        lambda: layers.SeparableConv1D(3, 2, depth_multiplier=2),
    ),
    "separable2d": (
        IMAGE,
        lambda: layers.SeparableConv2D(
            3, 2, strides=2, padding="same", activation="gelu"
        ),
    ),
    "transpose1d": (
        SERIES,
        lambda: layers.Conv1DTranspose(2, 3, strides=2, padding="same"),
    ),
    "transpose2d": (
        IMAGE,
        lambda: layers.Conv2DTranspose(2, 2, strides=2, activation="tanh"),
    ),
    "transpose3d": (VOLUME, lambda: layers.Conv3DTranspose(2, 2)),
    "upsampling2d": (IMAGE, lambda: layers.UpSampling2D((1, 2))),
    "upsampling2d bilinear": (
        IMAGE,
        lambda: layers.UpSampling2D(2, interpolation="bilinear"),
    ),
    "upsampling3d": (VOLUME, lambda: layers.UpSampling3D((2, 1, 1))),
    "upsampling1d": (SERIES, lambda: layers.UpSampling1D(2)),
    "repeat vector": (VECTOR, lambda: layers.RepeatVector(2)),
    "dropouts": (
        VECTOR,
        lambda: keras.Sequential(
            [
                layers.Identity(),
                layers.Dropout(0.5),
                layers.AlphaDropout(0.5),
                layers.GaussianDropout(0.5),
                layers.GaussianNoise(0.5),
                layers.ActivityRegularization(0.1),
            ]
        ),
    ),
    "random crop": (IMAGE, lambda: layers.RandomCrop(*IMAGE[:2])),
    "spatial dropout1d": (SERIES, lambda: layers.SpatialDropout1D(0.5)),
    "spatial dropout2d": (IMAGE, lambda: layers.SpatialDropout2D(0.5)),
    "spatial dropout3d": (VOLUME, lambda: layers.SpatialDropout3D(0.5)),
    "relu": (VECTOR, lambda: layers.ReLU(negative_slope=0.4)),
    "leaky relu": (VECTOR, lambda: layers.LeakyReLU(negative_slope=0.1)),
    "elu": (VECTOR, lambda: layers.ELU(0.6)),
    "activation elu": (VECTOR, lambda: layers.Activation("elu")),
    "activation leaky relu": (VECTOR, lambda: dense("leaky_relu")),
    "activation linear": (VECTOR, lambda: layers.Activation("linear")),
    "softplus": (VECTOR, lambda: dense("softplus")),
    "layer as activation": (VECTOR, lambda: dense(layers.LeakyReLU(0.5))),
    "prelu": (IMAGE, lambda: layers.PReLU(shared_axes=[1])),
    "relu with all": (
        VECTOR,
        lambda: layers.ReLU(max_value=1.0, negative_slope=0.3, threshold=0.5),
    ),
    "ops.abs": (VECTOR, lambda: ops.abs),
    "exponential": (VECTOR, lambda: dense("exponential")),
    "gelu, approximate": (
        VECTOR,
        lambda: lambda h: keras.activations.gelu(h, approximate=True),
    ),
    **{
        f"{name} as {where}": (VECTOR, make)
        for name in (
            "sigmoid",
            "log_sigmoid",
            "tanh",
            "softsign",
            "gelu",
            "silu",
            "selu",
            "elu",
            "celu",
            "relu6",
            "squareplus",
            "sparse_plus",
            "sparse_sigmoid",
            "hard_sigmoid",
            "hard_tanh",
            "soft_shrink",
            "hard_shrink",
        )
        for where, make in {
            "activation": lambda name=name: dense(name),
            "operation": lambda name=name: getattr(ops, name),
        }.items()
    },
    "mish": (VECTOR, lambda: dense("mish")),
    "hard_silu": (VECTOR, lambda: dense("hard_silu")),
    "ops.hard_silu": (VECTOR, lambda: ops.hard_silu),
    "elu 2": (VECTOR, lambda: layers.ELU(2.0)),
    "leaky 1.5": (VECTOR, lambda: layers.LeakyReLU(1.5)),
    "tf relu as activation": (VECTOR, lambda: dense(tf.nn.relu)),
    "ops.relu": (VECTOR, lambda: ops.relu),
    "activations.relu": (
        VECTOR,
        lambda: lambda h: keras.activations.relu(h, negative_slope=0.2),
    ),
    "add": (VECTOR, lambda: lambda h: layers.Add()([h, layers.Dense(5)(h), h])),
    "subtract": (
        VECTOR,
        lambda: lambda h: layers.Subtract()([layers.Dense(5)(h), h]),
    ),
    "average": (
        VECTOR,
        lambda: lambda h: layers.Average()([h, -h, layers.Dense(5)(h)]),
    ),
    "concatenate": (
        SERIES,
        lambda: lambda h: layers.Concatenate(axis=1)([h, 2.0 * h, h]),
    ),
    "maximum": (
        VECTOR,
        lambda: lambda h: layers.Maximum()([h, -h, layers.Dense(5)(h)]),
    ),
    "minimum": (
        VECTOR,
        lambda: lambda h: layers.Minimum()([h, layers.Dense(5, "relu")(h)]),
    ),
    "maximum of two widths": (
        VECTOR,
        lambda: lambda h: ops.maximum(h, layers.Dense(1)(h)),
    ),
    "clipped by constants": (
        VECTOR,
        lambda: lambda h: ops.minimum(ops.maximum(h, -0.5), np.arange(5.0)),
    ),
    "multiply by a constant": (
        VECTOR,
        lambda: lambda h: layers.Multiply()([h, np.arange(-2.0, 3.0)[None]]),
    ),
    "sliced and moved": (
        IMAGE,
        lambda: (
            lambda h: ops.concatenate(
                [
                    ops.reshape(h[:, 1:, :, :1], (-1, 16)),
                    ops.mean(ops.transpose(h, (0, 2, 1, 3)), axis=(1, 3)),
                    ops.sum(ops.flip(h, 1), axis=(2, 3)),
                ],
                axis=-1,
            )
        ),
    ),
    "residual": (VECTOR, lambda: residual),
    "nested": (VECTOR, lambda: nested),
    "shared": (VECTOR, lambda: shared_twice),
    "arithmetic": (VECTOR, lambda: lambda h: (1.0 - h * 2.0) / -3.0 + h),
    "minus": (VECTOR, lambda: lambda h: 3.0 - (-h) - 2.0 * h - 1.0),
    "times array": (IMAGE, lambda: lambda h: h * np.array([-1.0, 2.0], "f4")),
    "plus array": (VECTOR, lambda: lambda h: h + np.arange(5, dtype="f4")),
    "plus a wider array": (
        (5, 1),
        lambda: lambda h: h + np.arange(3, dtype="f4"),
    ),
}


def case_model(name, rng):
    """The case twice: right at the input, and behind a hidden layer."""
    shape, make = CASES[name]
    inputs = keras.Input(shape)
    hidden = layers.Dense(shape[-1], "relu")(inputs)
    flat = [layers.Flatten()(make()(h)) for h in (inputs, hidden)]
    joined = layers.Concatenate()(flat)
    outputs = layers.Dense(3)(layers.Dense(4, "relu")(joined))
    return randomise(keras.Model(inputs, outputs), rng)


def check_affine(operation, shapes, rng):
    """Compares `magnitude` and `apply` with the matrix of the map."""
    zeros = [np.zeros([1, *shape], "float32") for shape in shapes]
    offset = operation.apply(*map(tf.constant, zeros)).numpy()
    points = [rng.normal(size=zero.shape).astype("float32") for zero in zeros]
    radii = [np.abs(point) for point in points]
    value, reach = offset.astype("float64"), 0.0
    for position, shape in enumerate(shapes):
        size = int(np.prod(shape))
        inputs = [np.repeat(zero, size, axis=0) for zero in zeros]
        inputs[position] = np.eye(size, dtype="float32").reshape(-1, *shape)
        matrix = operation.apply(*map(tf.constant, inputs)).numpy() - offset
        value = value + np.tensordot(points[position].ravel(), matrix, 1)
        reach = reach + np.tensordot(radii[position].ravel(), abs(matrix), 1)
        if operation.monomial:
            assert np.all(np.count_nonzero(matrix, axis=0) <= 1)
    close = {"rtol": 1e-4, "atol": 1e-5}
    assert_allclose(operation.apply(*map(tf.constant, points)), value, **close)
    found = operation.magnitude(*map(tf.constant, radii)).numpy()
    assert found.shape == offset.shape
    assert_allclose(found[0], reach, **close)


@pytest.mark.eager
@pytest.mark.parametrize("name", CASES)
def test_every_rule_is_right_and_sound(name, rng):
    model = case_model(name, rng)
    x = rng.normal(size=(2, *model.input_shape[1:])).astype("float32")
    y = np.array([0, 2])

    steps = lower(model)
    classes = Competitors(tf.constant(y, tf.int32), 3)
    relaxation = Relaxation(steps, clean_pass(steps, tf.constant(x)), classes)
    clean = model(x, training=False)
    values = relaxation.values
    assert_allclose(values[steps.output], clean, rtol=1e-5, atol=1e-5)
    for operation in steps.operations:
        if isinstance(operation, program.Affine):
            shapes = [values[index].shape[1:] for index in operation.inputs]
            check_affine(operation, shapes, rng)

    radii = [0.1, 1.0, 5.0]
    robust = RUBModel(model, vertices="all")
    bounds = robust.worst_case_margins(
        np.concatenate([x] * 3), np.tile(y, 3), rho=np.repeat(radii, 2)
    ).numpy()
    sampled = sampled_margins(model, x, y, radii, rng).max(axis=2)
    climbed = ascended_margins(model, x, y, radii, rng, classes=3)
    found = np.maximum(sampled, climbed)
    bounds = bounds.reshape(found.shape)
    assert np.all(bounds >= found - 1e-4 - 1e-5 * np.abs(found))


@pytest.mark.slow
def test_a_million_points_of_layers():
    """Every rule, RUB and CROWN, all norms, at many points; not compiled."""
    tried = 0
    for name in CASES:
        rng = np.random.default_rng(len(name))
        model = case_model(name, rng)
        x = rng.normal(size=(2, *model.input_shape[1:])).astype("float32")
        labels = tf.constant([0, 2])
        for norm in (1, 2, "inf"):
            problem = Problem.of(model, keras_rub.PerturbationSet(norm))
            for rho in (0.05, 1.0):
                radii = tf.constant([rho] * 2)
                data = (tf.constant(x), labels, radii)
                found = [problem.linear_margins(*data, "crown")]
                if norm == 1:
                    bound = problem.vertex_bound(*data)
                    found.append(bound.worst_case().margins)
                classes = problem.competitors(labels)
                bounds = np.min([classes.to_classes(m) for m in found], axis=0)
                for i in range(2):
                    points = sampling.reachable(rng, x[i], rho, norm, 900)
                    margins = sampling.margins(model, points, labels[i])
                    slack = 1e-4 + 1e-5 * np.abs(margins)
                    assert np.all(margins <= bounds[i] + slack), (name, norm)
                    tried += len(points)
    print(f"{tried} points, none beyond a bound")
    assert tried >= 1_000_000


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        (activations.leaky_relu(0.0), keras.activations.relu),
        (activations.leaky_relu(0.3), layers.LeakyReLU(0.3)),
        (activations.elu(1.0), keras.activations.elu),
        (activations.elu(0.4), layers.ELU(0.4)),
        (activations.softplus(), keras.activations.softplus),
    ],
)
def test_lines_lie_below_the_activation(activation, function):
    z = tf.linspace(-6.0, 6.0, 241)
    value = activation.function(z).numpy()
    assert_allclose(value, function(z), rtol=1e-5, atol=1e-6)
    slope, height = activation.line(activation.tangent_parameter(z))
    height = 0.0 if height is None else height
    lines = slope[:, None] * z[None] + tf.reshape(height, [-1, 1])
    assert np.all(lines <= value[None] + 1e-5)
    assert_allclose(np.diag(lines), value, atol=1e-5)
    # Any other parameter, once clipped, is sound too.
    parameter = activation.clip_parameter(tf.linspace(-3.0, 3.0, 41))
    slope, height = activation.line(parameter)
    height = 0.0 if height is None else height
    lines = slope[:, None] * z[None] + tf.reshape(height, [-1, 1])
    assert np.all(lines <= value[None] + 1e-5)


# Layers without a rule -------------------------------------------------------


class Gain(layers.Layer):
    """Multiplies by a trained number."""

    def build(self, input_shape):
        self.gain = self.add_weight(shape=(), name="gain")

    def call(self, x):
        return x * self.gain


class SquaredDense(layers.Dense):
    """A subclass of a known layer that does something else."""

    def call(self, inputs):
        return super().call(inputs) ** 2


def with_inside(layer, rng):
    """A classifier with the layer (or function) between two Dense ones."""
    inputs = keras.Input((4,))
    h = layer(layers.Dense(4, "relu")(inputs))
    return randomise(keras.Model(inputs, layers.Dense(3)(h)), rng)


def test_registered_rule_is_used(rng, monkeypatch):
    model = with_inside(Gain(name="my_gain"), rng)
    with pytest.raises(UnsupportedLayerError, match="my_gain.*ARUBModel"):
        RUBModel(model)
    monkeypatch.setattr(lowering, "_RULES", dict(lowering._RULES))

    @keras_rub.register_rule(Gain)
    def gain(layer, x):
        return x.affine(
            lambda t: t * layer.gain,
            lambda r: r * tf.abs(layer.gain),
        )

    x, y = rng.normal(size=(2, 4)).astype("float32"), np.array([0, 1])
    for sign in (1.5, -1.5):
        model.layers[2].gain.assign(sign)
        bound = RUBModel(model, vertices="all").worst_case_margins(
            x, y, rho=1.0
        )
        same = with_inside(layers.Rescaling(sign), rng)
        same.set_weights(
            [w for w in model.get_weights() if np.ndim(w)]  # all but the gain
        )
        expected = RUBModel(same, vertices="all").worst_case_margins(
            x, y, rho=1.0
        )
        assert_allclose(bound, expected, rtol=1e-5)


REFUSED = {
    "softmax": lambda name: layers.Dense(4, "softmax", name=name),
    "layer norm": lambda name: layers.LayerNormalization(name=name),
    "group norm": lambda name: layers.GroupNormalization(2, name=name),
    "lambda": lambda name: layers.Lambda(lambda h: h**2, name=name),
    "bicubic": lambda name: keras.Sequential(
        [
            layers.Reshape((2, 2, 1)),
            layers.UpSampling2D(interpolation="bicubic", name=name),
            layers.Flatten(),
        ]
    ),
    "own call": lambda name: SquaredDense(4, name=name),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_layers_are_refused_by_name(name, rng):
    model = with_inside(REFUSED[name]("the_culprit"), rng)
    with pytest.raises(UnsupportedLayerError, match="the_culprit") as error:
        RUBModel(model)
    assert "ARUBModel" in str(error.value)


@pytest.mark.parametrize(
    "name", ["softmax", "layer norm", "group norm", "lambda"]
)
def test_refused_layers_are_fine_for_arub(name, rng):
    model = with_inside(REFUSED[name]("the_culprit"), rng)
    x, y = rng.normal(size=(2, 4)).astype("float32"), np.array([0, 1])
    margins = ARUBModel(model).worst_case_margins(x, y, rho=0.1)
    assert np.all(np.isfinite(margins))


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h * h,
        lambda h: 1.0 / h,
        lambda h: h**2,
        lambda h: ops.mean(h, axis=0, keepdims=True) + h,
        lambda h: layers.Multiply()([h, h]),
    ],
)
def test_other_operations_are_refused(function, rng):
    with pytest.raises(UnsupportedLayerError, match="ARUBModel"):
        RUBModel(with_inside(function, rng))


def test_all_layers_without_a_rule_are_named_at_once(rng):
    inputs = keras.Input((4,))
    h = layers.LayerNormalization(name="first")(inputs)
    h = keras.Sequential([layers.Dense(4, "softmax", name="second")])(h)
    h = layers.Multiply(name="third")([h, layers.Dense(4, "relu")(h)])
    model = keras.Model(inputs, layers.Dense(3)(h))
    x = np.zeros((1, 4), "float32")
    for bound, use in {
        "the RUB bound": lambda: RUBModel(model),
        "the COAP bound": lambda: keras_rub.COAPModel(model),
        "a certificate": lambda: keras_rub.certify(model, x, rho=0.1),
    }.items():
        with pytest.raises(UnsupportedLayerError) as error:
            use()
        for part in (bound, "'first'", "'second'", "'third'", "spread"):
            assert part in str(error.value)
        assert "this bound" not in str(error.value)


def test_a_mask_given_to_a_layer_is_not_overlooked(rng):
    inputs = keras.Input((4, 2))
    h = layers.Dense(3, "relu")(inputs)
    mask = np.array([[True, False, True, True]])
    h = layers.GlobalAveragePooling1D(name="masked_mean")(h, mask=mask)
    model = randomise(keras.Model(inputs, layers.Dense(3)(h)), rng)
    with pytest.raises(UnsupportedLayerError, match="masked_mean"):
        RUBModel(model)


# Graphs with unusual ends ----------------------------------------------------


def skip_to_logits(h):
    return layers.Dense(3)(h) + layers.Dense(3)(layers.Dense(4, "relu")(h))


def relu_logits(h):
    return layers.Dense(3, "relu")(layers.Dense(4, "relu")(h))


def max_logits(h):
    h = layers.Reshape((2, 3))(layers.Dense(6, "softplus")(h))
    return layers.GlobalMaxPooling1D()(h)


def shared_head(h):
    """One Dense both right at the input and behind a hidden layer."""
    last = layers.Dense(3)
    return last(h) - last(layers.Dense(4, "relu")(h))


@pytest.mark.parametrize(
    "function", [skip_to_logits, relu_logits, max_logits, shared_head]
)
def test_unusual_ends_are_sound(function, rng):
    inputs = keras.Input((4,))
    model = randomise(keras.Model(inputs, function(inputs)), rng)
    x = rng.normal(size=(2, 4)).astype("float32")
    y = np.array([0, 2])
    for rho in (0.0, 0.5, 5.0):
        found = sampled_margins(model, x, y, [rho], rng)[0].max(axis=1)
        for vertices in ("all", 3):
            robust = RUBModel(model, vertices=vertices)
            bound = robust.worst_case_margins(x, y, rho=rho).numpy()
            if rho == 0.0:
                assert_allclose(bound, found, rtol=1e-5, atol=1e-5)
            elif vertices == "all":
                assert np.all(bound >= found - 1e-4)
                exact = bound
            else:
                assert np.all(bound <= exact + 1e-5 * (1 + abs(exact)))


# The valid input range -------------------------------------------------------


def filled_points(x, rho, mask, count, rng):
    """Corners of the ball cut by [0, 1]: features filled up one by one."""
    points = np.repeat(x[None], count, axis=0)
    for point in points:
        left = rho
        for feature in rng.permutation(np.flatnonzero(mask)):
            target = rng.integers(2)
            step = min(left, abs(target - point[feature]))
            point[feature] += step if target else -step
            left -= step
    return points


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rho", [0.5, 2.0, 10.0])
def test_bound_with_valid_range_is_sound(rho, masked, rng):
    shape = (4, 4, 1)
    base = keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv2D(3, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(4, "relu"),
            layers.Dense(3),
        ]
    )
    randomise(base, rng)
    x = rng.uniform(size=(2, 16))
    x[0, :8] = np.round(x[0, :8])  # some features have no room on one side
    y = np.array([0, 1])
    mask = rng.uniform(size=16) < 0.6 if masked else np.ones(16, bool)
    bound = RUBModel(
        base,
        vertices="all",
        input_range=(0, 1),
        mask=mask.reshape(shape) if masked else None,
    ).worst_case_margins(x.reshape(2, *shape), y, rho=rho)
    for sample in range(2):
        moves = rho * unit_ball_points(16, 600, rng) * mask
        points = np.concatenate(
            [
                # Clipping moves no feature further away.
                np.clip(x[sample] + moves, 0, 1),
                filled_points(x[sample], rho, mask, 600, rng),
            ]
        )
        assert np.all(abs(points - x[sample]).sum(1) <= rho + 1e-6)
        logits = base(points.reshape(-1, *shape).astype("float32"))
        found = margins_of(logits, np.repeat(y[sample], len(points)))
        assert np.all(bound[sample] >= found.max(axis=0) - 1e-4)


@pytest.mark.parametrize("norm", [1, 2, "inf"])
def test_coap_gradient_off_the_tape(norm, rng, monkeypatch):
    """Ranges found off the tape give the same margins and gradients."""
    from keras_rub.bounds.linear import LinearRelaxation

    keras.utils.set_random_seed(1)
    base = keras_rub.models.mlp((12,), 3, hidden=(10, 9, 8))
    x = tf.constant(rng.normal(size=(6, 12)), tf.float32)
    labels = tf.constant([0, 1, 2, 0, 1, 2])
    weights = base.trainable_variables

    def look():
        with tf.GradientTape() as tape:
            relaxation = LinearRelaxation(
                lower(base), x, 0.15, keras_rub.PerturbationSet(norm), "coap",
                training=True,
            )  # fmt: skip
            margins = relaxation.margins(Competitors(labels, 3))
            value = tf.reduce_sum(margins)
        return margins, tape.gradient(value, weights)

    margins, gradients = look()
    monkeypatch.setattr(
        LinearRelaxation, "_differentiate", lambda self, index, tight: tight
    )
    known, expected = look()
    np.testing.assert_allclose(margins, known, rtol=1e-5, atol=1e-5)
    for found, right in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-4)


@functools.cache
def coap_model(features, norm, limited):
    """A compiled model, and its first weights: tests set others."""
    keras.utils.set_random_seed(2)
    hidden = (6, 5) if features > 1 else (5, 4, 3)
    base = keras_rub.models.mlp((features,), 3, hidden=hidden)
    limits = {"input_range": (0.0, 1.0)} if limited else {}
    model = keras_rub.COAPModel(base, 0.4, norm, **limits)
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model, limits, base.get_weights()


@pytest.mark.eager
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("norm", [1, 2, "inf"])
@pytest.mark.parametrize("case", ["plain", "rho 0", "constant", "one feature"])
def test_coap_training_is_sound(case, norm, limited, rng):
    """No sampled point beats the margins that COAP trains on."""
    features = 1 if case == "one feature" else 6
    model, limits, weights = coap_model(features, norm, limited)
    base = model.base
    base.set_weights(weights)
    if case == "constant":
        # Every neuron of the second layer is dead: no range lies around 0.
        kernel, _ = base.layers[1].get_weights()
        base.layers[1].set_weights([0 * kernel, np.full(5, -1.0)])
    x = rng.uniform(size=(5, features)).astype("float32")
    y = np.arange(5) % 3
    model.rho = rho = 0.0 if case == "rho 0" else 0.4
    found = np.asarray(model.worst_case_margins(x, y))
    for i in range(5):
        points = sampling.reachable(rng, x[i], rho, norm, count=300, **limits)
        margins = sampling.margins(base, points, y[i])
        assert np.all(margins <= found[i] + 1e-4)
    assert np.isfinite(model.fit(x, y, verbose=0).history["loss"][0])
