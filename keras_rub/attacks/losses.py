"""What an attack raises: losses of logits, sample by sample."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

_TINY = 1e-12


def cross_entropy(
    logits: tf.Tensor, labels: tf.Tensor, targets: tf.Tensor | None
) -> tf.Tensor:
    """Cross entropy of the label, or minus that of the target.

    Args:
        logits: float32 tensor [batch, K].
        labels: int tensor [batch].
        targets: int tensor [batch], or `None` for any other class.

    Returns:
        Tensor [batch].
    """
    entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
    if targets is None:
        return entropy(labels, logits)
    return -entropy(targets, logits)


def log_odds(
    logits: tf.Tensor, labels: tf.Tensor, targets: tf.Tensor | None
) -> tf.Tensor:
    """Log odds of all other classes, or of the target.

    They grow with the cross entropy and their gradient has its direction, so
    that steps of a given length are the same. But in float32 the cross entropy
    loses its gradient where a class has probability 1, from about 17 logits
    ahead on; this doesn't.

    Args:
        logits: float32 tensor [batch, K].
        labels: int tensor [batch].
        targets: int tensor [batch], or `None` for any other class.

    Returns:
        Tensor [batch].
    """
    one = labels if targets is None else targets
    is_one = tf.one_hot(one, logits.shape[-1], True, False, dtype=bool)
    others = tf.reduce_logsumexp(
        tf.where(is_one, logits.dtype.min, logits), axis=-1
    )
    odds = others - tf.gather(logits, one, batch_dims=1)
    return odds if targets is None else -odds


def margin_ratio(
    logits: tf.Tensor, labels: tf.Tensor, targets: tf.Tensor | None
) -> tf.Tensor:
    """The margin, divided by the spread of the leading logits.

    The quotient does not change when all logits are scaled or shifted, so a
    confident network can't flatten it. With two classes the spread is the
    margin itself, and the margin alone is taken.

    Args:
        logits: float32 tensor [batch, K].
        labels: int tensor [batch].
        targets: int tensor [batch], or `None` for the best other class.

    Returns:
        Tensor [batch]; positive where the attack has won.
    """
    margins = margin(logits, labels, targets)
    num_classes = logits.shape[-1]
    if num_classes < 3:
        return margins
    ranked = tf.math.top_k(logits, min(num_classes, 4)).values
    if targets is None or num_classes == 3:
        spread = ranked[:, 0] - ranked[:, 2]
    else:
        spread = ranked[:, 0] - (ranked[:, 2] + ranked[:, 3]) / 2
    return margins / (spread + _TINY)


def margin(
    logits: tf.Tensor, labels: tf.Tensor, targets: tf.Tensor | None
) -> tf.Tensor:
    """`z_k - z_y` for the target k, or for the best class other than y."""
    if targets is None:
        targets = strongest_rival(logits, labels)
    return tf.gather(logits, targets, batch_dims=1) - tf.gather(
        logits, labels, batch_dims=1
    )


def strongest_rival(logits: tf.Tensor, classes: tf.Tensor) -> tf.Tensor:
    """The class [batch] with the largest logit, other than the given one."""
    given = tf.one_hot(
        classes, logits.shape[-1], on_value=True, off_value=False
    )
    others = tf.where(given, logits.dtype.min, logits)
    return tf.argmax(others, axis=-1, output_type=tf.int32)


def has_won(
    logits: tf.Tensor, labels: tf.Tensor, targets: tf.Tensor | None
) -> tf.Tensor:
    """Whether the prediction is the target, or no longer the label."""
    predicted = tf.argmax(logits, axis=-1, output_type=tf.int32)
    if targets is None:
        return predicted != labels
    return predicted == targets


LOSSES: dict[str, Callable] = {
    "cross_entropy": cross_entropy,
    "log_odds": log_odds,
    "margin_ratio": margin_ratio,
}
