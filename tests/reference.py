"""The published RUB formula, written as plainly as it stands in the paper.

Slow, and on purpose without a line of `keras_rub.bounds`: every vertex is
materialised, U and N are carried side by side, and an affine map is four
products with the positive and negative parts of its matrix.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def l1_vertices(x, rho, mask=None, weights=None):
    """Clean input and vertices [batch, 1 + V, *features]; V = 2M or less."""
    shape = x.shape[1:]
    size = int(np.prod(shape))
    steps = (
        np.ones(size)
        if weights is None
        else 1 / np.broadcast_to(weights, shape).reshape(size)
    )
    moves = np.diag(steps)
    if mask is not None:
        moves = moves[np.broadcast_to(mask, shape).reshape(size)]
    moves = np.concatenate([np.zeros([1, size]), moves, -moves])
    moves = tf.constant(moves.reshape([1, -1, *shape]), x.dtype)
    rho = tf.reshape(tf.cast(rho, x.dtype), [-1] + [1] * len(x.shape))
    return x[:, None] + rho * moves


def vertex_margins(model, x, y, rho, mask=None, weights=None):
    """The majorant of every margin at the clean input and at each vertex.

    Args:
        model: `keras.Sequential` of Dense, Conv2D, Flatten and MaxPooling2D
            layers, the last one a Dense without activation.
        x: array [batch, *features].
        y: class numbers [batch].
        rho: number, or one a sample.
        mask: features that may move.
        weights: cost of moving each feature.

    Returns:
        Tensor [batch, 1 + V, K]. First the clean input, then every free
        feature moved up, then every one moved down.
    """
    x = tf.convert_to_tensor(x, tf.float32)
    points = l1_vertices(x, rho, mask, weights)
    copies = points.shape[1]
    upper = tf.reshape(points, [-1, *x.shape[1:]])
    return from_halfway(model.layers, x, upper, -upper, y, copies)


def plain_margins(model, x, y, rho, mask=None, weights=None):
    """Worst-case margins [batch, K]: the largest over all vertices."""
    return tf.reduce_max(
        vertex_margins(model, x, y, rho, mask, weights), axis=1
    )


def from_halfway(model_layers, clean, upper, negative, y, copies):
    """The margins [batch, copies, K] of a pair (U, N) at any layer.

    Args:
        model_layers: the layers still to come, the last one a Dense.
        clean: tensor [batch, ...]. The value for the clean inputs.
        upper: tensor [batch * copies, ...], the points of a sample side by
            side.
        negative: tensor like `upper`.
        y: class numbers [batch].
        copies: number of points a sample.
    """
    *hidden, last = model_layers
    for layer in hidden:
        if isinstance(layer, layers.InputLayer):
            continue
        if isinstance(layer, layers.Flatten):
            clean, upper, negative = (
                tf.reshape(t, [t.shape[0], -1])
                for t in (clean, upper, negative)
            )
        elif isinstance(layer, layers.MaxPooling2D):
            clean, upper, negative = _max_pool(
                layer, clean, upper, negative, copies
            )
        else:
            clean, upper, negative = _weighted(
                layer, clean, upper, negative, copies
            )
    kernel = tf.convert_to_tensor(last.kernel)
    bias = tf.convert_to_tensor(last.bias)
    own = tf.gather(tf.transpose(kernel), y)  # [batch, H]
    difference = kernel[None] - own[:, :, None]  # [batch, H, K]
    upper, negative = (
        tf.reshape(t, [-1, copies, kernel.shape[0]]) for t in (upper, negative)
    )
    return (
        upper @ tf.maximum(difference, 0)
        + negative @ tf.maximum(-difference, 0)
        + (bias[None] - tf.gather(bias, y)[:, None])[:, None]
    )


def _weighted(layer, clean, upper, negative, copies):
    kernel = tf.convert_to_tensor(layer.kernel)
    plus, minus = tf.maximum(kernel, 0), tf.maximum(-kernel, 0)
    bias = tf.convert_to_tensor(layer.bias)

    def product(t, matrix):
        if isinstance(layer, layers.Dense):
            return t @ matrix
        return tf.nn.conv2d(
            t,
            matrix,
            strides=layer.strides,
            padding=layer.padding.upper(),
            dilations=layer.dilation_rate,
        )

    clean = product(clean, kernel) + bias
    upper, negative = (
        product(upper, plus) + product(negative, minus) + bias,
        product(upper, minus) + product(negative, plus) - bias,
    )
    if layer.activation is keras.activations.relu:
        slope = tf.cast(clean > 0, clean.dtype)
        clean = tf.nn.relu(clean)
        upper = tf.nn.relu(upper)
        negative = tf.repeat(slope, copies, axis=0) * negative
    return clean, upper, negative


def _max_pool(layer, clean, upper, negative, copies):
    window = (layer.pool_size, layer.strides, layer.padding.upper())
    pooled, position = tf.nn.max_pool_with_argmax(clean, *window)
    batch = clean.shape[0]
    position = tf.repeat(tf.reshape(position, [batch, -1]), copies, axis=0)
    negative = tf.gather(
        tf.reshape(negative, [batch * copies, -1]), position, batch_dims=1
    )
    return (
        pooled,
        tf.nn.max_pool2d(upper, *window),
        tf.reshape(negative, [batch * copies, *pooled.shape[1:]]),
    )


def randomise(model, rng):
    """Gives every weight a random value: biases, statistics, both signs."""
    for weight in model.weights:
        normal = rng.normal(size=weight.shape)
        if weight.name in ("kernel", "depthwise_kernel"):
            fan_in = max(np.prod(weight.shape[:-1]), 1)
            value = 1.5 * normal / np.sqrt(fan_in)
        elif weight.name in ("moving_variance", "variance"):
            value = rng.uniform(0.5, 2.0, weight.shape)
        elif weight.name == "gamma":
            value = np.sign(normal) * rng.uniform(0.5, 1.5, weight.shape)
        elif "float" in weight.dtype:
            value = 0.5 * normal
        else:
            continue  # a counter or a seed
        weight.assign(value)
    return model
