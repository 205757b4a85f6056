"""The rules of Keras's own layers.

Weights are read when a rule's map runs, and cast to the type of what it is
applied to: a float64 certificate or a float32 bound of a float16 model needs
nothing else.
"""

from __future__ import annotations

import functools

import keras
import tensorflow as tf
from keras import layers, ops

from keras_rub.bounds import activations
from keras_rub.bounds.lowering import register_rule, unsupported
from keras_rub.bounds.program import Symbol, affine
from keras_rub.keras_internals import operation_of


def _like(weight, tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(weight), tensor.dtype)


def _activate(layer, x: Symbol, activation) -> Symbol:
    known = activations.from_keras(activation)
    if known is None:
        function = getattr(activation, "activation", activation)
        name = getattr(function, "__name__", type(function).__name__)
        raise unsupported(layer, f"with activation {name!r}")
    return x.activate(known)


# Layers with a kernel ------------------------------------------------------


def _add_bias(layer, y: tf.Tensor) -> tf.Tensor:
    if layer.bias is None:
        return y
    bias = _like(layer.bias, y)
    if getattr(layer, "data_format", None) == "channels_first":
        bias = tf.reshape(bias, [-1] + [1] * (len(y.shape) - 2))
    return y + bias


def _linear_with_kernel(layer, x: Symbol, product, **structure) -> Symbol:
    def apply(t):
        return _add_bias(layer, product(t, _like(layer.kernel, t)))

    def magnitude(r):
        return product(r, tf.abs(_like(layer.kernel, r)))

    y = x.affine(apply, magnitude, **structure)
    return _activate(layer, y, layer.activation)


@register_rule(layers.Dense)
def _dense(layer, x):
    return _linear_with_kernel(
        layer,
        x,
        tf.linalg.matmul,
        matrix=lambda dtype: tf.cast(tf.convert_to_tensor(layer.kernel), dtype),
    )


@register_rule(layers.Conv1D, layers.Conv2D, layers.Conv3D)
def _conv(layer, x):
    if layer.padding == "causal":
        return _linear_with_kernel(layer, x, _causal_product(layer))
    return _linear_with_kernel(
        layer,
        x,
        layer.convolution_op,
        convolution=layer if layer.groups == 1 else None,
    )


def _causal_product(layer):
    # Keras pads in `call`, not in `convolution_op`.
    past = layer.dilation_rate[0] * (layer.kernel_size[0] - 1)
    time = 1 if layer.data_format == "channels_last" else 2
    paddings = [[past if axis == time else 0, 0] for axis in range(3)]

    def product(t, kernel):
        return ops.conv(
            tf.pad(t, paddings),
            kernel,
            strides=list(layer.strides),
            padding="valid",
            dilation_rate=layer.dilation_rate,
            data_format=layer.data_format,
        )

    return product


@register_rule(layers.DepthwiseConv1D, layers.DepthwiseConv2D)
def _depthwise_conv(layer, x):
    return _linear_with_kernel(layer, x, _depthwise_product(layer))


def _depthwise_product(layer):
    return functools.partial(
        ops.depthwise_conv,
        strides=tuple(layer.strides),
        padding=layer.padding,
        dilation_rate=layer.dilation_rate,
        data_format=layer.data_format,
    )


@register_rule(layers.SeparableConv1D, layers.SeparableConv2D)
def _separable_conv(layer, x):
    depthwise = _depthwise_product(layer)

    def pointwise(t, kernel):
        return ops.conv(
            t, kernel, padding="valid", data_format=layer.data_format
        )

    if layer.padding == "causal":
        raise unsupported(layer, "with padding 'causal'")
    y = x.affine(
        lambda t: depthwise(t, _like(layer.depthwise_kernel, t)),
        lambda r: depthwise(r, tf.abs(_like(layer.depthwise_kernel, r))),
    ).affine(
        lambda t: _add_bias(
            layer, pointwise(t, _like(layer.pointwise_kernel, t))
        ),
        lambda r: pointwise(r, tf.abs(_like(layer.pointwise_kernel, r))),
    )
    return _activate(layer, y, layer.activation)


@register_rule(
    layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose
)
def _conv_transpose(layer, x):
    def product(t, kernel):
        return ops.conv_transpose(
            t,
            kernel,
            strides=list(layer.strides),
            padding=layer.padding,
            output_padding=layer.output_padding,
            dilation_rate=layer.dilation_rate,
            data_format=layer.data_format,
        )

    return _linear_with_kernel(layer, x, product)


# Scaling of single features ------------------------------------------------


def _scale_and_shift(x: Symbol, scale_and_shift) -> Symbol:
    def apply(t):
        scale, shift = scale_and_shift(t)
        return t * scale + shift

    def magnitude(r):
        scale, _ = scale_and_shift(r)
        return r * tf.abs(scale)

    return x.affine(apply, magnitude, scaling=True)


@register_rule(layers.BatchNormalization)
def _batch_normalization(layer, x):
    def along_axis(weight, t):
        shape = [1] * len(t.shape)
        shape[layer.axis] = -1
        return tf.reshape(_like(weight, t), shape)

    def scale_and_shift(t):
        scale = tf.math.rsqrt(
            along_axis(layer.moving_variance, t) + layer.epsilon
        )
        if layer.scale:
            scale *= along_axis(layer.gamma, t)
        shift = -along_axis(layer.moving_mean, t) * scale
        if layer.center:
            shift += along_axis(layer.beta, t)
        return scale, shift

    return _scale_and_shift(x, scale_and_shift)


@register_rule(layers.Normalization)
def _normalization(layer, x):
    def scale_and_shift(t):
        mean, variance = _like(layer.mean, t), _like(layer.variance, t)
        deviation = tf.maximum(
            tf.sqrt(variance), tf.cast(keras.config.epsilon(), t.dtype)
        )
        if layer.invert:
            return deviation, mean
        return 1.0 / deviation, -mean / deviation

    return _scale_and_shift(x, scale_and_shift)


@register_rule(layers.Rescaling)
def _rescaling(layer, x):
    return _scale_and_shift(
        x, lambda t: (_like(layer.scale, t), _like(layer.offset, t))
    )


# Layers that only move, copy or average features ---------------------------

_MOVES = (
    layers.Flatten,
    layers.Reshape,
    layers.Permute,
    layers.ZeroPadding1D,
    layers.ZeroPadding2D,
    layers.ZeroPadding3D,
    layers.Cropping1D,
    layers.Cropping2D,
    layers.Cropping3D,
)

_COPIES_AND_MEANS = (
    layers.RepeatVector,
    layers.UpSampling1D,
    layers.UpSampling3D,
    layers.AveragePooling1D,
    layers.AveragePooling2D,
    layers.AveragePooling3D,
    layers.GlobalAveragePooling1D,
    layers.GlobalAveragePooling2D,
    layers.GlobalAveragePooling3D,
)


@register_rule(*_MOVES)
def _move(layer, x):
    # Not layer(t): that would cast to the layer's compute type.
    return x.affine(layer.call, layer.call, monomial=True)


@register_rule(*_COPIES_AND_MEANS)
def _copy_or_mean(layer, x):
    return x.affine(layer.call, layer.call)


@register_rule(layers.UpSampling2D)
def _up_sampling(layer, x):
    if layer.interpolation not in ("nearest", "bilinear"):
        raise unsupported(layer, f"with interpolation {layer.interpolation!r}")
    return x.affine(layer.call, layer.call)


_IDENTITY_AT_INFERENCE = (
    layers.InputLayer,
    layers.Identity,
    layers.Dropout,
    layers.SpatialDropout1D,
    layers.SpatialDropout2D,
    layers.SpatialDropout3D,
    layers.AlphaDropout,
    layers.GaussianDropout,
    layers.GaussianNoise,
    layers.ActivityRegularization,
    layers.AugMix,
    layers.CutMix,
    layers.MixUp,
    layers.RandAugment,
    layers.RandomBrightness,
    layers.RandomColorDegeneration,
    layers.RandomColorJitter,
    layers.RandomContrast,
    layers.RandomElasticTransform,
    layers.RandomErasing,
    layers.RandomFlip,
    layers.RandomGaussianBlur,
    layers.RandomGrayscale,
    layers.RandomHue,
    layers.RandomInvert,
    layers.RandomPerspective,
    layers.RandomPosterization,
    layers.RandomRotation,
    layers.RandomSaturation,
    layers.RandomSharpness,
    layers.RandomShear,
    layers.RandomTranslation,
    layers.RandomZoom,
)


@register_rule(*_IDENTITY_AT_INFERENCE)
def _identity(layer, x):
    return x


@register_rule(layers.RandomCrop)
def _random_crop(layer, x):
    # At inference the image itself, cut or resized: no weight is negative.
    def cropped(t):
        return layer(t, training=False)

    return x.affine(cropped, cropped)


# Activations as layers -----------------------------------------------------


@register_rule(
    layers.ReLU,
    layers.LeakyReLU,
    layers.PReLU,
    layers.ELU,
    layers.Activation,
)
def _activation(layer, x):
    return _activate(layer, x, layer)


# Maxima --------------------------------------------------------------------


@register_rule(layers.MaxPooling1D, layers.MaxPooling2D, layers.MaxPooling3D)
def _max_pooling(layer, x):
    rank = len(layer.pool_size)
    if layer.data_format == "channels_first":
        raise unsupported(layer, "with data_format 'channels_first'")

    if tuple(layer.strides) == tuple(layer.pool_size):
        # Windows that do not overlap need no copies: the axes are split.
        windows, axes = _tiles, tuple(-2 - 2 * axis for axis in range(rank))
    else:
        windows, axes = _copies, (-2,)

    def apply(t):
        # Padding must never win, and must not become infinity minus infinity.
        return windows(layer, _pad_same(layer, t, outside=t.dtype.min / 4))

    def magnitude(r):
        return windows(layer, _pad_same(layer, r, outside=0.0))

    is_cut = windows is _tiles and layer.padding == "valid"
    tiles = tuple(layer.pool_size) if is_cut else None
    return x.affine(apply, magnitude, tiles=tiles).max(axes)


def _tiles(layer, t: tf.Tensor) -> tf.Tensor:
    """[n, d, ..., channels] -> [n, d / p, p, ..., channels]."""
    index, shape = [slice(None)], [-1]
    for length, size in zip(t.shape[1:-1], layer.pool_size, strict=True):
        index.append(slice(length // size * size))
        shape += [length // size, size]
    return tf.reshape(t[tuple(index)], [*shape, t.shape[-1]])


def _copies(layer, t: tf.Tensor) -> tf.Tensor:
    """One window's entries become an axis of their own, before the channels."""
    parts = []
    for offset in _offsets(layer.pool_size):
        index = [slice(None)]
        for axis, size in enumerate(layer.pool_size):
            end = offset[axis] + t.shape[axis + 1] - size + 1
            index.append(slice(offset[axis], end, layer.strides[axis]))
        parts.append(t[tuple(index)])
    return tf.stack(parts, axis=-2)


def _offsets(pool_size):
    grid: list[tuple[int, ...]] = [()]
    for size in pool_size:
        grid = [(*head, tail) for head in grid for tail in range(size)]
    return grid


def _pad_same(layer, t: tf.Tensor, outside: float) -> tf.Tensor:
    if layer.padding != "same":
        return t
    paddings = [(0, 0)]
    for axis, (size, stride) in enumerate(
        zip(layer.pool_size, layer.strides, strict=True)
    ):
        length = t.shape[axis + 1]
        total = max((-(-length // stride) - 1) * stride + size - length, 0)
        paddings.append((total // 2, total - total // 2))
    paddings.append((0, 0))
    return tf.pad(t, paddings, constant_values=outside)


@register_rule(
    layers.GlobalMaxPooling1D,
    layers.GlobalMaxPooling2D,
    layers.GlobalMaxPooling3D,
)
def _global_max_pooling(layer, x):
    first = layer.data_format == "channels_first"

    def gather(t):
        channels = t.shape[1] if first else t.shape[-1]
        if first:
            t = tf.transpose(t, [0, *range(2, len(t.shape)), 1])
        positions = int(tf.TensorShape(t.shape[1:-1]).num_elements())
        return tf.reshape(t, [-1, positions, channels])

    out = x.affine(gather, gather).max(axis=-2)
    if not layer.keepdims:
        return out
    rank = layer.input_spec.ndim - 2

    def spread(t):
        ones = [1] * rank
        channels = t.shape[-1]
        shape = [channels, *ones] if first else [*ones, channels]
        return tf.reshape(t, [-1, *shape])

    return out.affine(spread, spread)


# Merging -------------------------------------------------------------------


@register_rule(layers.Add)
def _add(layer, xs):
    return affine(xs, lambda *t: sum(t), lambda *r: sum(r))


@register_rule(layers.Subtract)
def _subtract(layer, xs):
    return affine(xs, lambda a, b: a - b, lambda a, b: a + b)


@register_rule(layers.Average)
def _average(layer, xs):
    def mean(*t):
        return sum(t) / len(t)

    return affine(xs, mean, mean)


@register_rule(layers.Concatenate)
def _concatenate(layer, xs):
    def join(*t):
        return tf.concat(t, axis=layer.axis)

    return affine(xs, join, join)


_PRODUCT = (
    "of two tensors that both move with the input: their product is no "
    "affine map"
)


@register_rule(layers.Multiply)
def _multiply_layer(layer, xs):
    return functools.reduce(lambda a, b: _multiply(layer, a, b), xs)


@register_rule(layers.Maximum)
def _maximum_layer(layer, xs):
    return functools.reduce(_maximum, xs)


@register_rule(layers.Minimum)
def _minimum_layer(layer, xs):
    return functools.reduce(_minimum, xs)


def _maximum(a, b) -> Symbol:
    if isinstance(a, Symbol) and isinstance(b, Symbol):

        def stack(a, b):
            # Each may have to be copied to the shape of the other.
            return tf.stack([a + 0.0 * b, b + 0.0 * a], axis=-1)

        return affine([a, b], stack, stack).max(axis=-1)
    x, constant = (a, b) if isinstance(a, Symbol) else (b, a)
    lifted = x.affine(lambda t: t - _like(constant, t), tf.identity)
    out = lifted.convex(activations.RELU)
    return out.affine(lambda t: t + _like(constant, t), tf.identity)


def _minimum(a, b) -> Symbol:
    return _minus(_maximum(_minus(a), _minus(b)))


def _minus(x):
    if isinstance(x, Symbol):
        return x.affine(lambda t: -t, lambda r: r)
    return -x


_DIVISION = (
    "divides by a spread that moves with the input: no affine map, and no "
    "activation of single features"
)


@register_rule(layers.LayerNormalization, layers.GroupNormalization)
def _sample_normalization(layer, x):
    raise unsupported(layer, f"which {_DIVISION}")


# Plain arithmetic in a functional graph -------------------------------------


def _operation_type(function) -> type:
    """The class under which Keras records an arithmetic operation."""
    tensors = [keras.KerasTensor((None, 2)) for _ in range(2)]
    return type(operation_of(function(*tensors)))


def _binary(signs):
    def rule(operation, a, b):
        symbols = [t for t in (a, b) if isinstance(t, Symbol)]
        constants = [None if isinstance(t, Symbol) else t for t in (a, b)]

        def combine(tensors, signs, with_constants):
            tensors = iter(tensors)
            total = 0.0
            for constant, sign in zip(constants, signs, strict=True):
                if constant is None:
                    total += sign * next(tensors)
                else:
                    # 0 * constant: it may broadcast.
                    total += (sign if with_constants else 0) * constant
            return total

        return affine(
            symbols,
            lambda *t: combine(t, signs, True),
            lambda *r: combine(r, (1, 1), False),
        )

    return rule


register_rule(_operation_type(lambda a, b: a + b))(_binary((1, 1)))
register_rule(_operation_type(lambda a, b: a - b))(_binary((1, -1)))


@register_rule(_operation_type(lambda a, b: a * b))
def _multiply(operation, a, b):
    if isinstance(a, Symbol) and isinstance(b, Symbol):
        raise unsupported(operation, _PRODUCT)
    x, factor = (a, b) if isinstance(a, Symbol) else (b, a)
    return _scale_and_shift(x, lambda t: (_like(factor, t), 0.0))


@register_rule(_operation_type(lambda a, b: a / b))
def _divide(operation, a, b):
    if isinstance(b, Symbol):
        raise unsupported(operation, "by a tensor")
    return _scale_and_shift(a, lambda t: (1.0 / _like(b, t), 0.0))


@register_rule(_operation_type(lambda a, b: -a))
def _negative(operation, x):
    return _minus(x)


@register_rule(_operation_type(ops.maximum))
def _maximum_operation(operation, a, b):
    return _maximum(a, b)


@register_rule(_operation_type(ops.minimum))
def _minimum_operation(operation, a, b):
    return _minimum(a, b)


@register_rule(_operation_type(lambda a, b: a[:, :1]))
def _slice(operation, x, key):
    first = key[0] if isinstance(key, tuple) else key
    if first not in (slice(None), Ellipsis):
        raise unsupported(operation, "of single samples")
    return x.affine(lambda t: t[key], lambda r: r[key], monomial=True)


@register_rule(
    _operation_type(lambda a, b: ops.reshape(a, (-1, 2, 1))),
    _operation_type(lambda a, b: ops.expand_dims(a, -1)),
    _operation_type(lambda a, b: ops.squeeze(ops.expand_dims(a, -1), -1)),
    _operation_type(lambda a, b: ops.transpose(a, (0, 1))),
    _operation_type(lambda a, b: ops.flip(a, 1)),
    _operation_type(lambda a, b: ops.mean(a, 1)),
    _operation_type(lambda a, b: ops.sum(a, 1)),
)
def _linear_operation(operation, x):
    if _mixes_samples(operation):
        raise unsupported(operation, "over the batch axis")
    return x.affine(operation.call, operation.call)


def _mixes_samples(operation) -> bool:
    """Whether an operation does more than keep the batch axis in front."""
    if hasattr(operation, "newshape"):
        return operation.newshape[0] not in (-1, None)
    if hasattr(operation, "axes"):
        return operation.axes is None or operation.axes[0] != 0
    axes = operation.axis
    if axes is None:
        return True
    return 0 in (axes if isinstance(axes, (list, tuple)) else [axes])


@register_rule(_operation_type(lambda a, b: ops.concatenate([a, b], 1)))
def _concatenate_operation(operation, xs):
    return _concatenate(operation, xs)


def _activation_operation(form):
    def rule(operation, x):
        known = form(operation)
        if known is None:
            raise unsupported(operation)
        return x.activate(known)

    return rule


for _type, _form in activations.operation_types().items():
    register_rule(_type)(_activation_operation(_form))
