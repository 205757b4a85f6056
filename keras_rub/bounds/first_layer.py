"""The first layer, where moving one feature costs one row and no product."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from keras_rub.bounds.majorant import Majorant, Relaxation
from keras_rub.bounds.program import Affine, Convex, Operation, frontier

# The widest affine map that is written out as a matrix.
WIDEST_MATRIX = 4096


@dataclasses.dataclass
class FirstLayer:
    """The network cut at the one value where it stops being affine.

    Moving feature m by s moves that value by `s * response[m]`, so a vertex
    costs one row to add and no product. Where the map `convolves`, though, the
    matrix itself takes a pass for each of its H columns, which only pays for
    many vertices.
    """

    value: int
    clean: tf.Tensor  # [batch, ...]
    response: tf.Tensor  # [M, H]
    rest: list[Operation]
    convolves: bool = False

    @property
    def is_read_once(self) -> bool:
        """Whether one activation, and nothing else, reads the value."""
        readers = [op for op in self.rest if self.value in op.inputs]
        return readers == self.rest[:1] and isinstance(readers[0], Convex)

    def shifts(
        self,
        features: tf.Tensor,
        steps: tf.Tensor,
        origins: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """What moving single features does to the value: [..., V, H].

        Args:
            features: int tensor [..., V]. Flat indices.
            steps: tensor [..., V]. How far each is moved.
            origins: int tensor [..., V], or `None`. Features that move as far
                the other way; none where this is the number of all features.
        """
        rows = tf.gather(self.response, features)
        if origins is not None:
            padded = tf.pad(self.response, [[0, 1], [0, 0]])
            rows -= tf.gather(padded, origins)
        return steps[..., None] * rows

    def take(self, samples: tf.Tensor) -> FirstLayer:
        """The same for some of the samples."""
        return dataclasses.replace(self, clean=tf.gather(self.clean, samples))

    def at(self, shifts: tf.Tensor) -> dict[int, Majorant]:
        """The value, moved by shifts [batch or 1, V, H], to go on from."""
        flat = tf.reshape(self.clean, [-1, 1, self.response.shape[-1]])
        points = tf.reshape(
            flat + shifts, tf.concat([[-1], tf.shape(self.clean)[1:]], axis=0)
        )
        points = tf.ensure_shape(points, [None, *self.clean.shape[1:]])
        return {self.value: Majorant(points)}


def cut(
    relaxation: Relaxation,
) -> tuple[int, list[Affine], list[Operation]] | None:
    """The single value where the network stops being affine, or `None`.

    Returns:
        The value, the affine operations up to it, and those that follow.
    """
    prefix = relaxation.program.prefix()
    inside = [operation for operation in prefix if operation in relaxation.body]
    rest = [
        operation for operation in relaxation.body if operation not in prefix
    ]
    ends = frontier(
        inside, [*rest, *relaxation.suffix], relaxation.program.output
    )
    if len(ends) != 1 or not inside:
        return None
    return ends[0], inside, rest


def first_layer(relaxation: Relaxation) -> FirstLayer | None:
    """Cuts the network behind a first dense layer, or returns `None`."""
    found = cut(relaxation)
    if found is None:
        return None
    value, inside, rest = found
    clean = relaxation.values[value]
    width = tf.TensorShape(clean.shape[1:]).num_elements()
    if width > WIDEST_MATRIX:
        return None
    response = matrix_of(inside, 0, value, relaxation.values)
    convolves = any(operation.convolution is not None for operation in inside)
    return FirstLayer(value, clean, response, rest, convolves)


def matrix_of(
    operations: list[Affine],
    source: int,
    target: int,
    values: Mapping[int, tf.Tensor],
) -> tf.Tensor:
    """The matrix [inputs, outputs] of a chain of affine operations.

    Row h of the gradient of output h by the input, for a batch of H inputs:
    the whole matrix in one pass backward. It begins behind the last operation,
    or in front of it where the matrix of that one is known.
    """
    width = tf.TensorShape(values[target].shape[1:]).num_elements()
    zeros = tf.zeros([width, *values[source].shape[1:]], values[source].dtype)
    rows = tf.eye(width, dtype=zeros.dtype)
    with tf.GradientTape() as tape:
        tape.watch(zeros)
        found = {source: zeros}
        for operation in operations:
            inputs = [found[index] for index in operation.inputs]
            known = operation.matrix if operation.output == target else None
            if known is not None and inputs[0].shape.rank == 2:
                found[target] = inputs[0]
                rows = tf.transpose(known(zeros.dtype))
                break
            found[operation.output] = operation.apply(*inputs)
        output = tf.reshape(found[target], tf.shape(rows))
    rows = tape.gradient(output, zeros, output_gradients=rows)
    return tf.transpose(tf.reshape(rows, [width, -1]))
