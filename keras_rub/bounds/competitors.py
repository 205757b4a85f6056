"""The classes that compete with the label, all of them or a few drawn ones."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

# Which competitor matters most is known only roughly before the search, so
# this part of the draws goes to all alike.
_UNIFORM = 0.2


@dataclasses.dataclass(frozen=True)
class Competitors:
    """The classes that compete with the label, sample by sample.

    Competitor j of a sample with label y is the class (y + 1 + j) mod K. All
    bounds are computed in this order, because the label's own margin is 0 and
    needs no work.

    Args:
        labels: int32 tensor [batch].
        num_classes: int. K.
        drawn: int32 tensor [batch, C], or `None`. Numbers j of the
            competitors that count. Defaults to `None`, all K - 1.
    """

    labels: tf.Tensor
    num_classes: int
    drawn: tf.Tensor | None = None

    @property
    def numbers(self) -> tf.Tensor:
        """Which competitors count: [batch or 1, C]."""
        if self.drawn is None:
            return tf.range(self.num_classes - 1, dtype=tf.int32)[None]
        return self.drawn

    @property
    def classes(self) -> tf.Tensor:
        """The class [batch, C] of each competitor."""
        return (self.labels[:, None] + 1 + self.numbers) % self.num_classes

    @property
    def seeds(self) -> tf.Tensor:
        """Rows `e_k - e_y` of the competitors k: [batch, C, K]."""
        return tf.one_hot(self.classes, self.num_classes) - tf.one_hot(
            self.labels[:, None], self.num_classes
        )

    def to_classes(self, margins: tf.Tensor) -> tf.Tensor:
        """[batch, K - 1] of all competitors -> [batch, K] by class, 0 at y."""
        padded = tf.pad(margins, [[0, 0], [1, 0]])
        classes = tf.range(self.num_classes, dtype=tf.int32)
        order = (classes[None] - self.labels[:, None]) % self.num_classes
        return tf.gather(padded, order, batch_dims=1)

    def margins(self, logits: tf.Tensor) -> tf.Tensor:
        """`z_k - z_y` [batch, C] of logits [batch, K]."""
        own = tf.gather(logits, self.labels[:, None], batch_dims=1)
        return tf.gather(logits, self.classes, batch_dims=1) - own

    def spread(self, parts: tf.Tensor) -> tf.Tensor:
        """[batch, C] of the drawn ones -> [batch, K - 1], 0 elsewhere."""
        rows = tf.one_hot(self.numbers, self.num_classes - 1, dtype=parts.dtype)
        return tf.linalg.matvec(rows, parts, transpose_a=True)

    def lift(self, margins: tf.Tensor, lifts: tf.Tensor) -> tf.Tensor:
        """Raises all margins by what is known of the drawn ones.

        Args:
            margins: tensor [batch, K - 1], of all competitors.
            lifts: tensor [batch, C]. By how much the drawn ones can rise.

        Returns:
            Tensor [batch, K - 1]. Each drawn competitor gets its own lift,
            the others the mean of these.
        """
        mean = tf.reduce_mean(lifts, axis=-1, keepdims=True)
        if lifts.shape[-1] == 1:
            return margins + mean
        return margins + mean + self.spread(lifts - mean)


def draw(
    margins: tf.Tensor,
    count: int,
    replace: bool,
    seed: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Draws competitors, those with large margins more often.

    The probabilities are a softmax of the margins, mixed with a uniform part.

    Args:
        margins: tensor [batch, K - 1].
        count: int. How many to draw for each sample.
        replace: bool. Whether one may be drawn twice.
        seed: int tensor [2], or `None` for another draw at each call.

    Returns:
        Numbers [batch, count] of the competitors, and the probability
        [batch, count] with which one draw gives each.
    """
    others = margins.shape[-1]
    share = (1.0 - _UNIFORM) * tf.nn.softmax(margins) + _UNIFORM / others
    logs = tf.math.log(share)
    if seed is None:
        seed = tf.random.uniform([2], maxval=tf.int32.max, dtype=tf.int32)
    if replace:
        drawn = tf.random.stateless_categorical(
            logs, count, seed, dtype=tf.int32
        )
    else:
        # The largest of these are draws without replacement.
        uniform = tf.random.stateless_uniform(
            tf.shape(logs), seed, 1e-20, 1.0, logs.dtype
        )
        noise = -tf.math.log(-tf.math.log(uniform))
        _, drawn = tf.math.top_k(logs + noise, count)
    drawn = tf.ensure_shape(drawn, [None, count])
    return drawn, tf.gather(share, drawn, batch_dims=1)
