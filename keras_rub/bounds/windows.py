"""A first convolution, where one pixel reaches only a window of the values.

What a move of one pixel adds is found where it stands: at each position, for
each entry of the window there. The parts that belong to one pixel are then
summed by the transposed convolution.
"""

from __future__ import annotations

import dataclasses

import keras
import tensorflow as tf

from keras_rub.bounds.first_layer import cut
from keras_rub.bounds.majorant import Relaxation
from keras_rub.bounds.program import Affine, pull_back
from keras_rub.bounds.vertices import VertexBound


@dataclasses.dataclass
class Windows:
    """The windows of a first convolution.

    Attributes:
        before: the maps before it, which only scale or move features.
        layer: the convolution.
        moved: tensor [1, ...]. What a radius of one moves at its input.
        picks: kernel that lists the entries of each window.
        reach: tensor [positions, entries]. The same as `moved`, by window.
        kernel: tensor [entries, channels], with the scales behind the
            convolution.
    """

    before: list[Affine]
    layer: keras.layers.Layer
    moved: tf.Tensor
    picks: tf.Tensor
    reach: tf.Tensor
    kernel: tf.Tensor

    @classmethod
    def of(cls, bound: VertexBound) -> Windows | None:
        """The windows of a network's first layer, or `None`."""
        found = _split(bound.relaxation)
        if found is None or bound.switches is not None:
            return None
        before, layer, after = found
        moved = _moved(bound, before)
        kernel = tf.cast(tf.convert_to_tensor(layer.kernel), moved.dtype)
        entries = tf.TensorShape(kernel.shape[:-1]).num_elements()
        picks = tf.reshape(
            tf.eye(entries, dtype=moved.dtype), [*kernel.shape[:-1], entries]
        )
        reach = layer.convolution_op(moved, picks)  # [1, ..., entries]
        ones = tf.ones(
            [1] * (len(reach.shape) - 1) + [kernel.shape[-1]], moved.dtype
        )
        gain = _chain(after, ones) - _chain(after, tf.zeros_like(ones))
        return cls(
            before,
            layer,
            moved,
            picks,
            tf.reshape(reach, [-1, entries]),
            tf.reshape(kernel, [entries, -1]) * tf.reshape(gain, [1, -1]),
        )

    def gather(self, bound: VertexBound, parts: tf.Tensor) -> tf.Tensor:
        """Sums what all windows that read a feature say of it.

        Args:
            bound: the vertices.
            parts: tensor [batch, 2, positions, entries, C], for moves up and
                down.

        Returns:
            Tensor [batch, V, C].
        """
        competitors = parts.shape[-1]
        batch = tf.shape(parts)[0]
        rows = tf.transpose(parts, [0, 1, 4, 2, 3])
        count = batch * 2 * competitors
        windows = self.layer.compute_output_shape(self.moved.shape)[1:-1]
        rows = tf.reshape(rows, [count, *windows, self.kernel.shape[0]])
        (sums,) = pull_back(
            lambda t: self.layer.convolution_op(t, self.picks),
            rows,
            [self.moved.shape[1:]],
        )
        # Back through the moves before the convolution. Their scale is already
        # in the parts, so it is divided out.
        sums = tf.math.divide_no_nan(sums, self.moved)
        (scores,) = pull_back(
            lambda t: _chain(self.before, t), sums, [bound.x.shape[1:]]
        )
        scores = tf.reshape(
            scores, [batch, 2, competitors, bound.expansion.input_size]
        )
        half = bound.num_vertices // 2
        features, steps = bound.expansion.moves(
            tf.range(half), self.moved.dtype
        )
        scores = tf.gather(scores, features, axis=-1) * steps
        return tf.reshape(
            tf.transpose(scores, [0, 1, 3, 2]), [batch, 2 * half, competitors]
        )


def _split(
    relaxation: Relaxation,
) -> tuple[list[Affine], keras.layers.Layer, list[Affine]] | None:
    """Splits the affine beginning at its one convolution, or returns `None`.

    Before it, maps may only scale or move features; behind it, only scale
    channels.
    """
    found = cut(relaxation)
    if found is None:
        return None
    _, inside, _ = found
    at = [
        (i, op.convolution)
        for i, op in enumerate(inside)
        if op.convolution is not None
    ]
    if len(at) != 1:
        return None
    ((index, layer),) = at
    before, after = inside[:index], inside[index + 1 :]
    if not all(operation.monomial for operation in before):
        return None
    if not all(operation.scaling for operation in after):
        return None
    ones = tf.ones([1] * (layer.rank + 1) + [layer.filters])
    if _chain(after, ones).shape != ones.shape:
        return None  # not the same at every position
    return before, layer, after


def _chain(operations: list[Affine], tensor: tf.Tensor) -> tf.Tensor:
    for operation in operations:
        tensor = operation.apply(tensor)
    return tensor


def _moved(bound: VertexBound, before: list[Affine]) -> tf.Tensor:
    """What a radius of one moves at the convolution's input, [1, ...]."""
    x = bound.x
    features, steps = bound.expansion.moves(
        tf.range(bound.num_vertices // 2), x.dtype
    )
    size = bound.expansion.input_size
    one = tf.reshape(
        tf.scatter_nd(features[:, None], steps, [size]), [1, *x.shape[1:]]
    )
    return _chain(before, one) - _chain(before, tf.zeros_like(one))
