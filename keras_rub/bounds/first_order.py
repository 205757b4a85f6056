"""The aRUB bound: margins plus the dual norm of their input gradient."""

from __future__ import annotations

import logging
from collections.abc import Callable

import tensorflow as tf

from keras_rub.bounds.competitors import Competitors, draw
from keras_rub.perturbations import PerturbationSet

_LOGGER = logging.getLogger("keras_rub")

# Up to so many gradients are as fast one by one, and much faster to trace.
_FEW_GRADIENTS = 4


def first_order_margins(
    network: Callable[[tf.Tensor], tf.Tensor],
    x: tf.Tensor,
    labels: tf.Tensor,
    rho: tf.Tensor,
    perturbations: PerturbationSet,
    competitors: int | str = "all",
    seed: tf.Tensor | None = None,
) -> tf.Tensor:
    """Worst-case margins of the network's linear model at each input.

    `m_k(x) + rho * ||d m_k / d x||_dual`, for every class k. It holds for the
    network itself only as far as that is linear around x.

    Args:
        network: function from inputs [batch, *features] to logits
            [batch, K], the samples apart from each other.
        x: float tensor [batch, *features].
        labels: int tensor [batch].
        rho: tensor [] or [batch]. The radii.
        perturbations: `PerturbationSet`. Norm, mask and weights.
        competitors: int or `"all"`. How many classes a sample to take a
            gradient of, drawn at random; see `Competitors.lift`. Defaults to
            `"all"`.
        seed: int tensor [2]. Of that draw. Defaults to `None`, another draw
            at each call.

    Returns:
        Tensor [batch, K], 0 at the label.
    """
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        logits = tf.cast(network(x), tf.float32)
        everyone = Competitors(labels, logits.shape[-1])
        margins = everyone.margins(logits)
        drawn = None
        if not isinstance(competitors, str):
            drawn, _ = draw(margins, competitors, replace=False, seed=seed)
        chosen = Competitors(labels, logits.shape[-1], drawn)
        own = margins if drawn is None else chosen.margins(logits)
        rows = tf.unstack(own, axis=1)
    jacobian = _jacobian(tape, own, rows, x)
    steepest = perturbations.support(jacobian, tuple(x.shape[1:]))
    lifts = tf.reshape(tf.cast(rho, steepest.dtype), [-1, 1]) * steepest
    if drawn is None:
        return everyone.to_classes(margins + lifts)
    return everyone.to_classes(chosen.lift(margins, lifts))


def _jacobian(tape, margins, rows, x) -> tf.Tensor:
    """Derivatives [batch, K - 1, M] of the margins by the flat features."""
    size = tf.TensorShape(x.shape[1:]).num_elements()
    shape = [-1, len(rows), size]
    if len(rows) > _FEW_GRADIENTS:
        try:
            return tf.reshape(tape.batch_jacobian(margins, x), shape)
        except (ValueError, NotImplementedError) as error:
            _LOGGER.info(
                "The Jacobian can't be vectorised (%s); one gradient a class "
                "is taken instead.",
                str(error).splitlines()[0],
            )
    gradients = [
        tape.gradient(row, x, unconnected_gradients="zero") for row in rows
    ]
    return tf.reshape(tf.stack(gradients, axis=1), shape)
