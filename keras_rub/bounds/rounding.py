"""How much of a margin floating point may hide.

A computed bound differs from the true one by rounding. The allowance is the
machine epsilon times the sum of the magnitudes of all terms that enter the
margin, over the whole perturbation set.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from keras_rub.bounds.first_layer import WIDEST_MATRIX, cut
from keras_rub.bounds.intervals import Ball, reach_of, size_of
from keras_rub.bounds.majorant import Relaxation
from keras_rub.perturbations import PerturbationSet


def allowance(
    relaxation: Relaxation, rho: tf.Tensor, perturbations: PerturbationSet
) -> tf.Tensor:
    """What a margin must be below 0 by, to be called negative.

    Args:
        relaxation: the network, made ready for a batch.
        rho: tensor [batch]. The radii.
        perturbations: `PerturbationSet`.

    Returns:
        Tensor [batch, K - 1].
    """
    x = relaxation.values[0]
    found = cut(relaxation)
    index = 0 if found is None else found[0]
    clean = relaxation.values[index]
    if found is None or size_of(clean) > WIDEST_MATRIX:
        index, clean = 0, x
        magnitudes = perturbations.magnitudes(tuple(x.shape[1:]))
        moves = tf.constant(magnitudes[None], x.dtype)
    else:
        ball = Ball(x, rho, perturbations)
        moves = tf.reshape(reach_of(found[1], index, clean, ball), [1, -1])
    reach = tf.reshape(rho[:, None] * moves, tf.shape(clean))
    epsilon = float(np.finfo(x.dtype.as_numpy_dtype).eps)
    return epsilon * relaxation.rounding({index: reach})
