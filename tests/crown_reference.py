"""CROWN in float64, written as plainly as it stands in the paper.

Slow, and on purpose without a line of `keras_rub.bounds`: every layer is a
matrix, every neuron gets a row of its own, one sample after the other.
"""

import keras
import numpy as np
from keras import layers


def operations_of(model):
    """A Sequential model as a list of ("affine", W, b), "relu", ("max", i)."""
    found = []
    for layer in model.layers:
        if isinstance(layer, layers.Dense):
            weights = [np.asarray(w, "float64") for w in layer.weights]
            found.append(("affine", *weights))
        elif isinstance(layer, layers.Conv2D):
            found.append(("affine", *conv_matrix(layer)))
        elif isinstance(layer, layers.MaxPooling2D):
            found.append(("max", windows(layer)))
        elif isinstance(layer, layers.AveragePooling2D):
            index = windows(layer)
            size = int(np.prod(layer.input.shape[1:]))
            matrix = np.zeros((size, len(index)))
            for column, entries in enumerate(index):
                matrix[entries, column] = 1.0 / len(entries)
            found.append(("affine", matrix, np.zeros(len(index))))
        else:
            assert isinstance(layer, layers.Flatten), layer
        if getattr(layer, "activation", None) is keras.activations.relu:
            found.append(("relu",))
    return found


def conv_matrix(layer):
    """The matrix [inputs, outputs] and the bias of a convolution."""
    kernel = np.asarray(layer.kernel, "float64")
    height, width, channels = layer.input.shape[1:]
    rows, columns, filters = layer.output.shape[1:]
    matrix = np.zeros((height, width, channels, rows, columns, filters))
    size, stride = kernel.shape[0], layer.strides[0]
    before = 0
    if layer.padding == "same":
        before = max((rows - 1) * stride + size - height, 0) // 2
    for r in range(rows):
        for c in range(columns):
            for i in range(size):
                for j in range(size):
                    y, x = r * stride + i - before, c * stride + j - before
                    if 0 <= y < height and 0 <= x < width:
                        matrix[y, x, :, r, c, :] = kernel[i, j]
    bias = np.tile(np.asarray(layer.bias, "float64"), rows * columns)
    return matrix.reshape(height * width * channels, -1), bias


def windows(layer):
    """The entries [outputs, window] that a pooling layer reads."""
    height, width, channels = layer.input.shape[1:]
    p = layer.pool_size[0]
    index = np.arange(height * width * channels)
    index = index.reshape(height // p, p, width // p, p, channels)
    return index.transpose(0, 2, 4, 1, 3).reshape(-1, p * p)


def margins(model, x, label, rho, norm, input_range=None):
    """CROWN's bounds [K] of z_k - z_y for one input, 0 at the label."""
    operations = operations_of(model)
    ball = Ball(np.asarray(x, "float64").reshape(-1), rho, norm, input_range)
    lines = []
    low, high = ball.low, ball.high
    for number, operation in enumerate(operations):
        if operation[0] == "affine":
            _, matrix, bias = operation
            center, radius = (low + high) / 2, (high - low) / 2
            middle, reach = center @ matrix + bias, radius @ np.abs(matrix)
            low, high = middle - reach, middle + reach
            lines.append(None)
            continue
        # What a ReLU or a maximum reads: a row for every neuron.
        eye = np.eye(len(low))
        low = np.maximum(low, -upper(operations[:number], lines, -eye, ball))
        high = np.minimum(high, upper(operations[:number], lines, eye, ball))
        if operation[0] == "relu":
            lines.append(relu_lines(low, high))
            low, high = np.maximum(low, 0), np.maximum(high, 0)
        else:
            index = operation[1]
            lines.append(max_lines(low[index], high[index]))
            low, high = low[index].max(axis=1), high[index].max(axis=1)
    rows = np.eye(len(low)) - np.eye(len(low))[label]
    return upper(operations, lines, rows, ball)


class Ball:
    """All points near x, by a norm, perhaps within a valid range."""

    def __init__(self, x, rho, norm, input_range):
        self.x, self.rho, self.norm = x, rho, norm
        self.limited = input_range is not None
        self.low, self.high = x - rho, x + rho
        if self.limited:
            self.low = np.maximum(self.low, input_range[0])
            self.high = np.minimum(self.high, input_range[1])

    def largest(self, rows):
        """The largest values [R] of rows [R, M] times a point."""
        dual = {1: np.inf, 2: 2, "inf": 1}[self.norm]
        found = self.rho * np.linalg.norm(rows, dual, axis=1)
        if self.limited:
            box = np.maximum(rows, 0) @ (self.high - self.x)
            box += np.maximum(-rows, 0) @ (self.x - self.low)
            found = np.minimum(found, box)
        return rows @ self.x + found


def relu_lines(low, high):
    """Slope and height of the upper line, slope of the lower one."""
    off, on = high <= 0, low >= 0
    width = np.where(high > low, high - low, 1.0)
    slope = np.where(on, 1.0, np.where(off, 0.0, high / width))
    height = np.where(on | off, 0.0, -slope * low)
    below = np.where(on, 1.0, np.where(off, 0.0, high > -low))
    return slope, height, below


def max_lines(low, high):
    """The winner [outputs, window], whether it is sure, and the largest.

    The lower line is the entry whose lower end is the highest. There may be
    several: L1 balls that hold all inputs give all windows with the same
    weights the same range. The margin depends on which one is taken, by up to
    1 %. The first is, where others differ by rounding only.
    """
    ends = np.stack([low.max(axis=1), high.max(axis=1)])
    slack = 1e-5 * np.abs(ends).max(axis=0)
    first = (low >= (ends[0] - slack)[:, None]).argmax(axis=1)
    winner = np.eye(low.shape[1])[first]
    others = np.where(winner > 0, -np.inf, high).max(axis=1)
    return winner, (low * winner).sum(axis=1) >= others, ends[1]


def upper(operations, lines, rows, ball):
    """Upper bounds [R] of rows [R, n] of the value after the operations."""
    height = np.zeros(len(rows))
    for operation, line in reversed(list(zip(operations, lines, strict=True))):
        plus, minus = np.maximum(rows, 0), np.minimum(rows, 0)
        if operation[0] == "affine":
            height += rows @ operation[2]
            rows = rows @ operation[1].T
        elif operation[0] == "relu":
            slope, top, below = line
            height += plus @ top
            rows = plus * slope + minus * below
        else:
            winner, sure, top = line
            index = operation[1]
            height += plus @ np.where(sure, 0.0, top)
            wide = np.zeros((len(rows), index.max() + 1))
            part = plus * sure + minus
            for column in range(index.shape[1]):
                wide[:, index[:, column]] += part * winner[:, column]
            rows = wide
    return height + ball.largest(rows)
