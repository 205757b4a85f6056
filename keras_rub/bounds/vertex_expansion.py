"""The layer that lists the corners of an L1 ball around each input."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub.perturbations import PerturbationSet, check_rho, flat_size


@keras.saving.register_keras_serializable("keras_rub")
class VertexExpansion(keras.layers.Layer):
    """Expands each input to the vertices of the L1 ball around it.

    The ball `sum_m weights_m |d_m| <= rho` has the vertices
    `x + (rho / weights_m) e_m` and `x - (rho / weights_m) e_m`. A feature
    that the mask holds fixed has none. Vertices are numbered: first every
    free feature moved up, then every free feature moved down.

    Args:
        rho: float. The radius, in the units of the input. Defaults to `0.1`.
        mask: boolean array that broadcasts to one input, or `None`. The
            features that may change. Defaults to `None`, all of them.
        weights: positive array that broadcasts to one input, or `None`. The
            cost of moving each feature by one unit. Defaults to `None`.
        **kwargs: other `keras.layers.Layer` arguments.

    Call arguments:
        x: tensor [batch, *features].
        vertices: int tensor [V] or [batch, V], or `None`. The numbers of the
            vertices wanted. Defaults to `None`, all of them.
        rho: tensor [] or [batch], or `None`. A radius in place of the layer's
            own. Defaults to `None`.

    The result is a tensor [batch, V, *features].

    Example:
    ```python
    x = np.array([[1.0, 2.0]])
    keras_rub.VertexExpansion(rho=0.5)(x)
    # [[[1.5, 2.0], [1.0, 2.5], [0.5, 2.0], [1.0, 1.5]]]
    ```
    """

    def __init__(
        self,
        rho: float = 0.1,
        *,
        mask: Any = None,
        weights: Any = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.rho = check_rho(rho)
        self.perturbations = PerturbationSet(1, mask=mask, weights=weights)

    def build(self, input_shape):
        shape = tuple(input_shape[1:])
        if any(size is None for size in shape):
            raise ValueError(
                "The number of vertices depends on the number of features, so "
                "every axis but the batch must have a known size. "
                f"Received: `input_shape={tuple(input_shape)}`"
            )
        self.input_size = flat_size(shape)
        # Arrays, not tensors: a tensor made while a function is traced could
        # not be used by the next one.
        self.features, self.steps = self.perturbations.vertices(shape)

    @property
    def num_vertices(self) -> int:
        """V, twice the number of free features."""
        return len(self.features)

    def moves(
        self, vertices: tf.Tensor, dtype: tf.DType
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Feature and signed size, for a radius of one, of each vertex."""
        return (
            tf.gather(tf.constant(self.features), vertices),
            tf.gather(tf.constant(self.steps, dtype), vertices),
        )

    def call(self, x, vertices=None, rho=None):
        x = tf.convert_to_tensor(x)
        rho = tf.cast(self.rho if rho is None else rho, x.dtype)
        if vertices is None:
            vertices = tf.constant(np.arange(self.num_vertices, dtype="int32"))
        features, steps = self.moves(vertices, x.dtype)
        moves = steps[..., None] * tf.one_hot(
            features, self.input_size, dtype=x.dtype
        )
        flat = tf.reshape(x, [-1, 1, self.input_size])
        points = flat + tf.reshape(rho, [-1, 1, 1]) * moves
        return tf.reshape(
            points,
            tf.concat([tf.shape(points)[:2], tf.shape(x)[1:]], axis=0),
        )

    def compute_output_spec(self, x, vertices=None, rho=None):
        count = self.num_vertices if vertices is None else vertices.shape[-1]
        return keras.KerasTensor(
            (x.shape[0], count, *x.shape[1:]), dtype=self.compute_dtype
        )

    def get_config(self):
        config = self.perturbations.get_config()
        return {
            **super().get_config(),
            "rho": self.rho,
            "mask": config["mask"],
            "weights": config["weights"],
        }
