"""The classes that compete with the label, and the order they are kept in."""

from __future__ import annotations

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Competitors:
    """The K - 1 classes that compete with the label, sample by sample.

    Competitor j of a sample with label y is the class (y + 1 + j) mod K. All
    bounds are computed in this order, because the label's own margin is 0 and
    needs no work.
    """

    labels: tf.Tensor  # [batch], int32
    num_classes: int

    @property
    def classes(self) -> tf.Tensor:
        """The class [batch, K - 1] of each competitor."""
        steps = tf.range(1, self.num_classes, dtype=tf.int32)
        return (self.labels[:, None] + steps[None]) % self.num_classes

    @property
    def seeds(self) -> tf.Tensor:
        """Rows `e_k - e_y` of the competitors k: [batch, K - 1, K]."""
        return tf.one_hot(self.classes, self.num_classes) - tf.one_hot(
            self.labels[:, None], self.num_classes
        )

    def to_classes(self, margins: tf.Tensor) -> tf.Tensor:
        """[batch, K - 1] by competitor -> [batch, K] by class, 0 at y."""
        padded = tf.pad(margins, [[0, 0], [1, 0]])
        classes = tf.range(self.num_classes, dtype=tf.int32)
        order = (classes[None] - self.labels[:, None]) % self.num_classes
        return tf.gather(padded, order, batch_dims=1)

    def margins(self, logits: tf.Tensor) -> tf.Tensor:
        """`z_k - z_y` [batch, K - 1] of logits [batch, K]."""
        own = tf.gather(logits, self.labels[:, None], batch_dims=1)
        return tf.gather(logits, self.classes, batch_dims=1) - own
