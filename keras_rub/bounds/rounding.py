"""How much of a margin floating point may hide.

A computed bound differs from the true one by rounding. The allowance is the
machine epsilon times the sum of the magnitudes of all terms that enter the
margin, over the whole perturbation set.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from keras_rub.bounds.first_layer import first_layer
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
    shape = tuple(x.shape[1:])
    start = first_layer(relaxation)
    if start is None:
        moves = tf.constant(perturbations.magnitudes(shape)[None], x.dtype)
        index, clean = 0, x
    else:
        rows = tf.transpose(start.response)
        moves = perturbations.support(rows, shape)[None]
        index, clean = start.value, start.clean
    reach = tf.reshape(rho[:, None] * moves, tf.shape(clean))
    epsilon = float(np.finfo(x.dtype.as_numpy_dtype).eps)
    return epsilon * relaxation.rounding({index: reach})
