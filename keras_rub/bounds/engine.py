"""The compiled bounds of one model, which certify a batch at a time."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub.bounds import pruning, rounding, screening
from keras_rub.bounds.alpha import LineOptimiser
from keras_rub.bounds.linear import LinearRelaxation
from keras_rub.bounds.majorant import Classes, Relaxation
from keras_rub.bounds.rub import VertexBound, VertexNetwork
from keras_rub.classifier import base_of
from keras_rub.tracing import compiled
from keras_rub.uncertainty import PerturbationSet

METHODS = ("auto", "rub", "alpha-rub", "crown", "coap")

# Vertices that are tried first where a valid range is given: most samples that
# can't be certified show it at one of them.
_QUICK = 8

# Vertices of one sample that are evaluated together.
_GROUP = 8

# A certified radius below this is returned as 0.
_SMALLEST_RADIUS = 1e-9


def engine_of(
    model: keras.Model,
    norm: int | str = 1,
    *,
    mask: Any = None,
    weights: Any = None,
    input_range: tuple[Any, Any] | None = None,
    dtype: str = "float32",
    memory_budget: int = 2**26,
) -> Engine:
    """The engine of these settings, made once for each model.

    Args:
        model: a robust model, or any Sequential or Functional Keras
            classifier that returns logits.
        norm: 1, 2 or `"inf"`. Defaults to `1`.
        mask: as in `keras_rub.certify`.
        weights: as in `keras_rub.certify`.
        input_range: as in `keras_rub.certify`.
        dtype: `"float32"` or `"float64"`. Defaults to `"float32"`.
        memory_budget: int. Bytes that one chunk of vertices may take.
            Defaults to `2**26`.
    """
    if dtype not in ("float32", "float64"):
        raise ValueError(
            '`dtype` must be "float32" or "float64". '
            f"Received: `dtype={dtype!r}`"
        )
    base = base_of(model)
    perturbations = PerturbationSet(
        norm, mask=mask, weights=weights, input_range=input_range
    )
    key = (repr(perturbations.get_config()), dtype, int(memory_budget))
    # Kept with the model, past Keras's tracking, so that it lives as long.
    engines = base.__dict__.setdefault("_keras_rub_engines", {})
    if key not in engines:
        engines[key] = Engine(base, perturbations, dtype, int(memory_budget))
    return engines[key]


class Engine:
    """Compiled bounds of one model and one perturbation set.

    All functions take x [batch, *features], labels [batch] and rho [batch],
    and return margins by competitor.
    """

    def __init__(
        self,
        base: keras.Model,
        perturbations: PerturbationSet,
        dtype: str,
        memory_budget: int,
    ):
        # The program and the vertices do not depend on the norm.
        vertices = PerturbationSet(
            1, mask=perturbations.mask, weights=perturbations.weights
        )
        self.network = VertexNetwork.of(base, vertices)
        self.perturbations = perturbations
        perturbations.check_shape(tuple(base.inputs[0].shape[1:]))
        self.dtype = tf.as_dtype(dtype)
        self.memory_budget = memory_budget
        shape = [None, *base.inputs[0].shape[1:]]
        signature = [
            tf.TensorSpec(shape, self.dtype),
            tf.TensorSpec([None], tf.int32),
            tf.TensorSpec([None], self.dtype),
        ]

        def of_batch(function, *more):
            return compiled(function, input_signature=[*signature, *more])

        self.logits = compiled(self._logits, input_signature=[signature[0]])
        self.allowance = of_batch(self._allowance)
        self.rub = of_batch(self._rub)
        self.quick = of_batch(self._quick)
        self.finish = of_batch(
            self._finish, tf.TensorSpec([None, None], self.dtype)
        )
        self.try_vertices = of_batch(
            self._try_vertices, tf.TensorSpec([None, None], tf.int32)
        )
        self.crown = of_batch(lambda *data: self._linear(*data, "crown"))
        self.coap = of_batch(lambda *data: self._linear(*data, "coap"))
        self.lower_line = LineOptimiser(self._bound)
        self._check_memory(shape)

    def _check_memory(self, shape):
        x = tf.zeros([1, *shape[1:]], self.dtype)
        bound = self._bound(x, tf.zeros([1], tf.int32), tf.zeros([1]))
        if bound.row_bytes() > self.memory_budget:
            raise ValueError(
                "`memory_budget` is too small for one vertex of one sample, "
                f"which takes about {bound.row_bytes()} bytes. "
                f"Received: `memory_budget={self.memory_budget}`"
            )

    def check_method(self, method: str) -> None:
        """Raises if the method is unknown or can't do the norm."""
        if method not in METHODS:
            raise ValueError(
                f"`method` must be one of {METHODS}. "
                f"Received: `method={method!r}`"
            )
        norm = self.perturbations.norm
        if method in ("rub", "alpha-rub") and norm != 1:
            raise ValueError(
                f'Method "{method}" works for norm 1 only; use "crown", '
                f'"coap" or "auto". Received: `norm={norm!r}`'
            )

    # Compiled parts -----------------------------------------------------------

    def _bound(self, x, labels, rho, choices=None) -> VertexBound:
        return VertexBound(
            self.network,
            x,
            labels,
            rho,
            room=self.perturbations.room(x),
            memory_budget=self.memory_budget,
            choices=choices,
        )

    def _logits(self, x):
        labels = tf.zeros(tf.shape(x)[:1], tf.int32)
        classes = Classes(labels, self.network.num_classes)
        values = Relaxation(self.network.program, x, classes).values
        return values[self.network.program.output]

    def _allowance(self, x, labels, rho):
        classes = Classes(labels, self.network.num_classes)
        relaxation = Relaxation(self.network.program, x, classes)
        return rounding.allowance(relaxation, rho, self.perturbations)

    def _rub(self, x, labels, rho):
        worst = self._bound(x, labels, rho).worst_case("all")
        return worst.margins, worst.vertices[..., 0]

    def _try_vertices(self, x, labels, rho, vertices):
        bound = self._bound(x, labels, rho)
        if bound.room is not None:
            # In a mixture, a vertex that is listed twice would count twice.
            vertices = vertices[:, :1]
        return bound.worst_case(vertices).margins

    def _linear(self, x, labels, rho, kind):
        relaxation = LinearRelaxation(
            self.network.program, x, rho, self.perturbations, kind
        )
        return relaxation.margins(Classes(labels, self.network.num_classes))

    def decide_rub(self, x, labels, rho) -> tuple[np.ndarray, np.ndarray]:
        """Margins that decide as `rub` would, by less work.

        Returns:
            Upper bounds [batch, K - 1], infinite for a sample with a vertex
            that breaks them, and the worst vertices known [batch, K - 1].
        """
        allowance = self.allowance(x, labels, rho).numpy()
        margins, vertices = (t.numpy() for t in self.quick(x, labels, rho))
        open_ = np.flatnonzero((margins < -allowance).all(axis=-1))
        margins[:] = np.inf
        if len(open_):
            found = self.finish(
                x[open_], labels[open_], rho[open_], allowance[open_]
            )
            margins[open_], vertices[open_] = (t.numpy() for t in found)
        return margins, vertices

    def _quick(self, x, labels, rho):
        """Margins that the bound is certain to reach, and where."""
        bound = self._bound(x, labels, rho)
        if bound.room is None:
            return screening.first_order(bound)
        worst = bound.worst_case(_QUICK)
        return worst.margins, worst.vertices[..., 0]

    def _finish(self, x, labels, rho, allowance):
        """Bounds of samples that no quick look decided."""
        bound = self._bound(x, labels, rho)
        if bound.room is not None or not pruning.can_prune(bound):
            worst = bound.worst_case("all")
            return worst.margins, worst.vertices[..., 0]
        upper = pruning.upper_margins(bound)
        score = tf.reduce_max(upper + allowance[:, None], axis=-1)
        # The negation, so that NaN counts as risky.
        risky = tf.logical_not(score < 0)
        exact = self._at_risky(bound, tf.where(risky, score, -np.inf))
        lowest = tf.cast(self.dtype.min, self.dtype)
        harmless = tf.reduce_max(
            tf.where(risky[..., None], lowest, upper), axis=1
        )
        clean = bound.relaxation.clean_margins
        margins = tf.maximum(tf.maximum(exact, harmless), clean)
        worst = tf.argmax(upper, axis=1, output_type=tf.int32)
        return margins, worst

    def _at_risky(self, bound, score):
        """Largest exact value [batch, K - 1] where `score` is not -inf.

        The risky vertices of a sample are evaluated in small groups, so that
        what belongs to the sample is read once for each of them.
        """
        counts = tf.reduce_sum(tf.cast(score > -np.inf, tf.int32), axis=1)
        groups = -(-tf.reduce_max(counts) // _GROUP)
        _, order = tf.math.top_k(
            score, tf.minimum(groups * _GROUP, bound.num_vertices)
        )
        # The last group may repeat the sample's first vertex.
        missing = groups * _GROUP - tf.shape(order)[1]
        order = tf.concat(
            [order, tf.repeat(order[:, :1], missing, axis=1)], axis=1
        )
        order = tf.reshape(order, [-1, groups, _GROUP])
        first = tf.range(groups) * _GROUP
        wanted = tf.cast(tf.where(first[None] < counts[:, None]), tf.int32)
        values = self._at_groups(bound, order, wanted)
        return tf.math.unsorted_segment_max(
            values, wanted[:, 0], tf.shape(score)[0]
        )

    def _at_groups(self, bound, order, wanted):
        """Largest values [G, K - 1] of groups [G, 2] of sample and number."""
        rows = max(self.memory_budget // bound.row_bytes() // _GROUP, 1)
        total = tf.shape(wanted)[0]
        width = bound.relaxation.constant.shape[-1]
        parts = tf.TensorArray(
            self.dtype, size=0, dynamic_size=True, infer_shape=False
        )

        def step(first, parts):
            last = tf.minimum(first + rows, total)
            some = wanted[first:last]
            vertices = tf.gather_nd(order, some)
            values = bound.take(some[:, 0]).at(vertices)
            values = tf.where(tf.math.is_nan(values), self.dtype.max, values)
            values = tf.reduce_max(values, axis=1)
            return last, parts.write(parts.size(), values)

        # A part with no rows, so that there is always one.
        parts = parts.write(0, tf.zeros([0, width], self.dtype))
        _, parts = tf.while_loop(
            lambda first, parts: first < total,
            step,
            (tf.constant(0), parts),
            parallel_iterations=1,
        )
        return tf.ensure_shape(parts.concat(), [None, width])

    # One batch ----------------------------------------------------------------

    def run(self, x, labels, rho, method, decide_only) -> dict[str, Any]:
        """All arrays of a `Certificate` for one batch."""
        logits = self.logits(x).numpy()
        predicted = logits.argmax(axis=-1)
        predicted[~np.isfinite(logits).all(axis=-1)] = -1
        allowance = self.allowance(x, labels, rho).numpy()
        state = _State(allowance)
        correct = predicted == labels
        for name in self._stages(method):
            self._run_stage(name, state, x, labels, rho, correct, decide_only)
        classes = Classes(tf.constant(labels), self.network.num_classes)
        certified = state.certified & correct
        return {
            "margins": classes.to_classes(tf.constant(state.margins)).numpy(),
            "certified": certified,
            "predicted": predicted,
            "labels": np.asarray(labels),
            "decided_by": np.where(certified, state.decided_by, ""),
        }

    def _stages(self, method: str) -> tuple[str, ...]:
        if method == "alpha-rub":
            return ("rub", "alpha-rub")
        if method != "auto":
            return (method,)
        if self.perturbations.norm == 1:
            return ("rub", "crown", "alpha-rub")
        return ("crown", "coap")

    def _run_stage(
        self, name, state, x, labels, rho, correct, decide_only
    ) -> None:
        if name == "alpha-rub":
            self._run_alpha(state, x, labels, rho, correct, decide_only)
            return
        active = np.arange(len(labels))
        if decide_only:
            active = np.flatnonzero(correct & ~state.certified)
        if not len(active):
            return
        data = (x[active], labels[active], rho[active])
        if name == "rub":
            function = self.decide_rub if decide_only else self.rub
            margins, _ = function(*data)
        else:
            margins = {"crown": self.crown, "coap": self.coap}[name](*data)
        state.lower(active, np.asarray(margins), name)
        if name == "rub":
            state.rub_margins = state.margins.copy()

    def _run_alpha(self, state, x, labels, rho, correct, decide_only) -> None:
        # The margins that "rub" left open, so that the result is never above
        # that of "alpha-rub" alone; or just those that nothing has decided.
        margins = state.margins if decide_only else state.rub_margins
        open_ = ~(margins < -state.allowance)
        wanted = correct & open_.any(axis=-1)
        # Which they are is not known where "rub" stopped early.
        unknown = np.flatnonzero(wanted & np.isinf(margins).any(axis=-1))
        if len(unknown):
            found, _ = self.rub(x[unknown], labels[unknown], rho[unknown])
            state.lower(unknown, found.numpy(), "rub")
            open_ = ~(state.margins < -state.allowance)
        rows, columns = np.nonzero(wanted[:, None] & open_)
        # As many pairs at once as there are samples in a batch.
        for first in range(0, len(rows), len(labels)):
            some = slice(first, first + len(labels))
            found = self.lower_line(
                tf.constant(x[rows[some]]),
                tf.constant(labels[rows[some]]),
                tf.constant(rho[rows[some]]),
                tf.constant(columns[some].astype("int32")),
            )
            state.lower_pairs(
                rows[some], columns[some], found.numpy(), "alpha-rub"
            )

    def radius(self, x, labels, method, tolerance, max_radius) -> np.ndarray:
        """The certified radii [batch] of one batch, by bisection."""
        count = len(labels)
        low, high = np.zeros(count), np.full(count, np.inf)
        correct = self.run(x, labels, _full(0.0, x), method, True)["certified"]
        guess = np.full(count, min(1.0, max_radius))
        witnesses = np.zeros((count, 1), "int32")
        open_ = np.flatnonzero(correct)
        while len(open_):
            rho = guess[open_].astype(x.dtype)
            certified, found = self._certified(
                x[open_], labels[open_], rho, method, witnesses[open_]
            )
            witnesses = _remember(witnesses, open_, found)
            low[open_[certified]] = guess[open_[certified]]
            high[open_[~certified]] = guess[open_[~certified]]
            guess = _next_guess(low, high, max_radius)
            finished = np.where(
                np.isfinite(high),
                (high - low <= tolerance * high) | (high < _SMALLEST_RADIUS),
                low >= max_radius,
            )
            open_ = np.flatnonzero(correct & ~finished)
        return low

    def _certified(self, x, labels, rho, method, witnesses):
        """Whether each sample is certified, and vertices that broke it."""
        count = len(labels)
        result, found = np.zeros(count, bool), witnesses
        todo = np.arange(count)
        if method == "rub":
            allowance = self.allowance(x, labels, rho).numpy()
            tried = self.try_vertices(x, labels, rho, witnesses).numpy()
            broken = (tried >= -allowance).any(axis=-1)
            todo = np.flatnonzero(~broken)
            if not len(todo):
                return result, found
            data = (x[todo], labels[todo], rho[todo])
            margins, vertices = self.decide_rub(*data)
            result[todo] = (margins < -allowance[todo]).all(axis=-1)
            found = np.repeat(witnesses[:, :1], vertices.shape[1], axis=1)
            found[todo] = vertices
            return result, found
        run = self.run(x, labels, rho, method, True)
        return run["certified"], found


class _State:
    """Margins of a batch while methods lower them one after another."""

    def __init__(self, allowance: np.ndarray):
        self.allowance = allowance
        self.margins = np.full_like(allowance, np.inf)
        self.decided_by = np.full(len(allowance), "", dtype="<U9")
        self.rub_margins = self.margins

    @property
    def certified(self) -> np.ndarray:
        # A comparison with NaN is false: NaN certifies nothing.
        return (self.margins < -self.allowance).all(axis=-1)

    def lower(self, rows, margins, name) -> None:
        before = self.certified
        margins = np.where(np.isnan(margins), np.inf, margins)
        self.margins[rows] = np.minimum(self.margins[rows], margins)
        self.decided_by[self.certified & ~before] = name

    def lower_pairs(self, rows, columns, margins, name) -> None:
        before = self.certified
        margins = np.where(np.isnan(margins), np.inf, margins)
        self.margins[rows, columns] = np.minimum(
            self.margins[rows, columns], margins
        )
        self.decided_by[self.certified & ~before] = name


def _next_guess(low, high, max_radius) -> np.ndarray:
    """Doubles until a radius fails, then halves the bracket."""
    ceiling = np.where(np.isfinite(high), high, 0.0)
    # Nothing certified yet: the radius may be many times smaller.
    inside = np.where(low > 0, 0.5 * (low + ceiling), ceiling / 8.0)
    return np.where(
        np.isfinite(high), inside, np.minimum(2.0 * low, max_radius)
    )


def _full(value, x) -> np.ndarray:
    return np.full(len(x), value, x.dtype)


def _remember(witnesses, rows, found) -> np.ndarray:
    if found.shape[1] != witnesses.shape[1]:
        witnesses = np.repeat(witnesses[:, :1], found.shape[1], axis=1)
    witnesses[rows] = found
    return witnesses
