"""What a server computes, as TensorFlow graph code.

Everything is row by row: a bad sample of a batch (NaN, a negative radius, an
input outside the valid range, a row without its category) is not certified and
leaves the others alone.
A server may put the requests of several clients into one batch, so it must
not make the whole batch fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_rub import checks
from keras_rub.bounds import UnsupportedLayerError, decision, pruning
from keras_rub.bounds.compiled import compiled_bounds
from keras_rub.bounds.methods import Method
from keras_rub.categories import Category
from keras_rub.classifier import (
    head_of,
    input_shape,
    logits_of,
    width_of,
)
from keras_rub.inputs import SingleInput
from keras_rub.perturbations import PerturbationSet

SIGNATURES = ("serving_default", "certify", "certified_radius")

# Samples that are worked on together, if the memory budget allows.
_MOST_SAMPLES = 64

# The same where vertices are pruned: that is many small operations.
_MOST_PRUNED = 256

# Rows that the linear relaxation substitutes at once, at most.
_MOST_ROWS = 1024


def predict(
    network: keras.Model, inputs: SingleInput, x: tf.Tensor
) -> dict[str, tf.Tensor]:
    """Logits and probabilities [batch, K], and the class [batch].

    One output z is served as two classes with the logits [0, z].

    Args:
        network: built classifier.
        inputs: the same as one of a single input.
        x: float32 tensor [batch, *features], that input.

    Returns:
        Dict of tensors. The class is -1 where an input or a logit is not
        finite.
    """
    logits = tf.cast(logits_of(inputs.network, x), tf.float32)
    each_by_itself = head_of(network) == "sigmoid" and width_of(network) != 1
    to_probabilities = tf.nn.sigmoid if each_by_itself else tf.nn.softmax
    return {
        "logits": logits,
        "probabilities": to_probabilities(logits),
        "class": _class_of(x, logits),
    }


class Certifier:
    """Certificates of one network, with numbers as `keras_rub.certify` gives.

    Args:
        network: built classifier of a fixed input shape.
        perturbations: the attacker.
        method: one that can be part of a graph.
        tolerance: as in `keras_rub.certified_radius`.
        max_radius: as in `keras_rub.certified_radius`.
        max_batch_size: int. The most samples of one call.
        memory_budget: int. Bytes that one chunk of work may take.
    """

    def __init__(
        self,
        network: keras.Model,
        *,
        perturbations: PerturbationSet,
        method: Method,
        tolerance: float,
        max_radius: float,
        max_batch_size: int,
        memory_budget: int,
    ):
        _check_fixed_shape(network)
        try:
            self.bounds = compiled_bounds(
                network, perturbations, memory_budget=memory_budget
            )
        except UnsupportedLayerError as error:
            raise UnsupportedLayerError(
                f"{error} To serve the model without certificates, export it "
                'with `signatures=("serving_default",)`.'
            ) from None
        self.bounds.check_memory(method)
        self.method = method
        self.tolerance = tolerance
        self.max_radius = max_radius
        self.max_batch_size = max_batch_size
        self.samples = self._samples_at_once()

    def certify(self, x: tf.Tensor, rho: tf.Tensor) -> dict[str, tf.Tensor]:
        """Whether a perturbation of radius rho can change the class.

        Args:
            x: float32 tensor [batch, *features].
            rho: float32 tensor [batch].

        Returns:
            Dict of tensors [batch]: `class`, as `predict` gives it;
            `certified`; and `margin`, the bound of the largest
            `z_k - z_class`, infinite where there is none.
        """
        radii, samples = tf.shape(rho)[0], tf.shape(x)[0]
        with tf.control_dependencies(
            [
                tf.debugging.Assert(
                    tf.equal(radii, samples),
                    [
                        "`rho` must hold one radius for each sample of the "
                        "batch. Received: radii and samples",
                        radii,
                        samples,
                    ],
                )
            ]
        ):
            rho = tf.identity(rho)
        x = self._limited(x)
        names = ("class", "certified", "margin")
        dtypes = (tf.int64, tf.bool, tf.float32)
        size = self.samples
        if self._prunes():
            # Blocks within the memory budget are made of them later.
            size = max(size, _MOST_PRUNED)
        found = _in_chunks(self._certify, (x, rho), size, dtypes)
        return dict(zip(names, found, strict=True))

    def certified_radius(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        """The largest radius that can be certified.

        Args:
            x: float32 tensor [batch, *features].

        Returns:
            Dict of tensors [batch]: `class` and `radius`.
        """
        x = self._limited(x)
        dtypes = (tf.int64, tf.float32)
        found = _in_chunks(self._radius, (x,), self.samples, dtypes)
        return dict(zip(("class", "radius"), found, strict=True))

    def _limited(self, x):
        """`x`, or an error if the batch is larger than agreed."""
        samples = tf.shape(x)[0]
        with tf.control_dependencies(
            [
                tf.debugging.Assert(
                    samples <= self.max_batch_size,
                    [
                        "A request for certificates may hold at most "
                        f"{self.max_batch_size} samples (`max_batch_size` of "
                        "the export). Received:",
                        samples,
                    ],
                )
            ]
        ):
            return tf.identity(x)

    # One chunk ---------------------------------------------------------------

    def _certify(self, x, rho):
        x, predicted, labels, usable = self._predict(x)
        usable &= tf.math.is_finite(rho) & (rho >= 0)
        rho = tf.where(usable, rho, 0.0)
        found = decision.settle(
            self.bounds.problem, self.method, x, labels, rho
        )
        margins = tf.where(tf.math.is_nan(found.margins), np.inf, found.margins)
        worst = tf.where(usable, tf.reduce_max(margins, axis=-1), np.inf)
        return predicted, found.proved & usable, worst

    def _radius(self, x):
        x, predicted, labels, usable = self._predict(x)
        found = self.bounds.find_radius(self.method)(
            x, labels, self.tolerance, self.max_radius
        )
        radius = tf.where(usable, found.radius, 0.0)
        return predicted, tf.cast(radius, tf.float32)

    def _predict(self, x):
        """Inputs and labels for the bound, and the answer.

        Returns:
            Finite inputs, classes, the labels to bound, and which samples
            may be certified at all.
        """
        # NaN may vanish in a maximum, and would slow the others down.
        finite = tf.reshape(_all_finite(x), [-1] + [1] * (x.shape.rank - 1))
        predicted = _class_of(x, self.bounds.logits(x))
        labels = tf.cast(tf.maximum(predicted, 0), tf.int32)
        usable = (predicted >= 0) & self._is_valid(x)
        return tf.where(finite, x, 0.0), predicted, labels, usable

    def _is_valid(self, x):
        """Which samples the attacker can start from."""
        attacker, valid = self.bounds.perturbations, True
        if attacker.input_range is not None:
            low, high = (
                tf.constant(end, x.dtype) for end in attacker.input_range
            )
            valid = _for_all_features((x >= low) & (x <= high))
        for group in attacker.categories:
            if isinstance(group, Category):
                valid &= checks.is_one_hot(x, group)
        return valid

    # Memory ------------------------------------------------------------------

    def _prunes(self) -> bool:
        if not self.method.uses_vertices:
            return False
        bounds = self.bounds
        return pruning.can_prune(bounds.problem.vertex_bound(*bounds.blank()))

    def _samples_at_once(self) -> int:
        """As many samples as the memory budget holds, but at least one."""
        problem = self.bounds.problem
        if self.method.uses_vertices:
            bytes_ = self.bounds.bytes_of_vertex
        else:
            x, labels, _ = self.bounds.blank()
            widths = [
                tf.TensorShape(value.shape[1:]).num_elements()
                for value in problem.relaxation(x, labels).values.values()
            ]
            rows = max(min(width, _MOST_ROWS) for width in widths)
            # A row before and after an operation, and its positive part.
            bytes_ = 3 * x.dtype.size * rows * max(widths)
        return int(np.clip(problem.memory_budget // bytes_, 1, _MOST_SAMPLES))


def _class_of(x, logits):
    known = _all_finite(x) & _all_finite(logits)
    return tf.where(known, tf.argmax(logits, axis=-1), -1)


def _all_finite(tensor):
    return _for_all_features(tf.math.is_finite(tensor))


def _for_all_features(flags):
    return tf.reduce_all(flags, axis=list(range(1, flags.shape.rank)))


def _in_chunks(
    function: Callable[..., Sequence[tf.Tensor]],
    inputs: Sequence[tf.Tensor],
    size: int,
    dtypes: Sequence[tf.DType],
) -> list[tf.Tensor]:
    """`function` of `size` samples at a time, one chunk below the other.

    Args:
        function: takes tensors [n, ...], returns tensors [n].
        inputs: tensors [batch, ...].
        size: int.
        dtypes: of what `function` returns.

    Returns:
        Tensors [batch], one for each of `dtypes`.
    """
    total = tf.shape(inputs[0])[0]
    # Each begins with a part of no rows, so that there is always one.
    arrays = [
        tf.TensorArray(
            dtype, size=0, dynamic_size=True, infer_shape=False
        ).write(0, tf.zeros([0], dtype))
        for dtype in dtypes
    ]

    def step(first, arrays):
        last = tf.minimum(first + size, total)
        found = function(*(tensor[first:last] for tensor in inputs))
        return last, [
            array.write(array.size(), part)
            for array, part in zip(arrays, found, strict=True)
        ]

    _, arrays = tf.while_loop(
        lambda first, _: first < total,
        step,
        (tf.constant(0), arrays),
        parallel_iterations=1,
    )
    return [tf.ensure_shape(array.concat(), [None]) for array in arrays]


def _check_fixed_shape(network: keras.Model) -> None:
    shape = input_shape(network)
    if None in shape:
        raise ValueError(
            "A certificate needs inputs of a fixed shape. Received: a model "
            f"for inputs of shape {shape}. Build it for one size, or export "
            'it without certificates: `signatures=("serving_default",)`.'
        )
