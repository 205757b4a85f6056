"""Certificates: which predictions no attacker within a set can change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypedDict, Unpack, overload

import keras
import numpy as np
import tensorflow as tf

from keras_rub import checks
from keras_rub.bounds import methods
from keras_rub.bounds.cascade import Cascade
from keras_rub.bounds.certificate import Certificate, CertificateTable
from keras_rub.bounds.compiled import CompiledBounds, compiled_bounds
from keras_rub.perturbations import PerturbationSet, attacker_of, check_rho
from keras_rub.progress import Progress


class Settings(TypedDict, total=False):
    """The settings of `certify` that have a default."""

    perturbations: PerturbationSet | None
    norm: int | str | None
    method: str
    input_range: tuple[Any, Any] | None
    mask: Any
    weights: Any
    perturb: str | None
    categories: Any
    decide_only: bool
    batch_size: int
    memory_budget: int
    widest: int | None
    time_limit: float
    dtype: str
    verbose: int | str


@overload
def certify(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    rho: float | np.ndarray,
    **settings: Unpack[Settings],
) -> Certificate: ...


@overload
def certify(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    rho: list[float] | tuple[float, ...],
    **settings: Unpack[Settings],
) -> CertificateTable: ...


def certify(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    rho: Any,
    perturbations: PerturbationSet | None = None,
    norm: int | str | None = None,
    method: str = "auto",
    input_range: tuple[Any, Any] | None = None,
    mask: Any = None,
    weights: Any = None,
    perturb: str | None = None,
    categories: Any = None,
    decide_only: bool = False,
    batch_size: int = 64,
    memory_budget: int = 2**26,
    widest: int | None = None,
    time_limit: float = 10.0,
    dtype: str = "float32",
    verbose: int | str = "auto",
) -> Certificate | CertificateTable:
    """Says for each sample whether a perturbation can change its class.

    A sample is certified when the bound of every margin `z_k - z_y` is
    below 0 by more than an allowance for rounding: the machine epsilon times
    the sum of the magnitudes of all terms that enter the margin. A tie or a
    NaN is never certified. `dtype="float64"` makes the allowance, and the
    rounding itself, about 1e9 times smaller.

    | method | bound | norms |
    | --- | --- | --- |
    | `"rub"` | convex majorant at the vertices, the paper's slopes | 1 |
    | `"alpha-rub"` | the same, slopes optimised where `"rub"` fails | 1 |
    | `"ibp"` | intervals from layer to layer | 1, 2, inf |
    | `"crown-ibp"` | linear bound of the margins, interval ranges | 1, 2, inf |
    | `"crown"` | linear relaxation, lower slopes 0 or 1 | 1, 2, inf |
    | `"coap"` | linear relaxation, parallel lines | 1, 2, inf |
    | `"alpha-crown"` | `"crown"`, slopes optimised where it fails | 1, 2, inf |
    | `"exact"` | none: a mixed-integer program decides what the methods \
    of `"auto"` leave open; small ReLU networks | 1, inf |
    | `"fast"` | `"rub"`; or `"ibp"`, `"crown-ibp"`, `"crown"` | 1; 2, inf |
    | `"auto"` | `"rub"`, `"crown"`, `"alpha-rub"`; or those of `"fast"` and \
    `"alpha-crown"`: the smallest bound | 1; 2, inf |

    Args:
        model: a robust model, or any Sequential or Functional Keras
            classifier. A final softmax, log_softmax or sigmoid is left out:
            margins are those of logits. One output z counts as two classes
            with the logits [0, z].
        x: array [n, *features], or a `tf.data.Dataset` of batches `x` or
            `(x, y)`; where the model takes several inputs, a dict by name or
            a list of arrays.
        y: class numbers [n] or one-hot rows [n, K], or `None`. The classes
            to certify. Defaults to `None`: those of the data set, else the
            model's own predictions.
        rho: float; a list or tuple of radii, for a table; or an array [n],
            one radius a sample. In the units of the model's input.
        perturbations: `PerturbationSet`, or `None`. The whole attacker.
            Defaults to `None`: that of a robust model, as it was trained;
            for any other model the L1 ball.
        norm: 1, 2 or `"inf"`. Shorthand, as are `input_range`, `mask`,
            `weights`, `perturb` and `categories`: each takes the place of
            that part of the attacker. Defaults to `None`.
        method: see the table. Defaults to `"auto"`.
        input_range: pair `(low, high)`. The valid inputs, which an attack
            can't leave. Defaults to `None`.
        mask: boolean array that broadcasts to one input. The features that
            may change. Defaults to `None`.
        weights: positive array that broadcasts to one input. The cost of
            moving each feature by one unit. Defaults to `None`.
        perturb: string. Where the model takes several inputs, the name of the
            one that the attacker moves; the others are fixed for each sample.
            Defaults to `None`, the only one of floating point.
        categories: list of `keras_rub.Category` and `keras_rub.Ordinal`.
            One-hot and whole-numbered columns, and the price of a switch; see
            `keras_rub.PerturbationSet`. Defaults to `None`.
        decide_only: bool. Stop working on a sample as soon as its
            certificate is decided. `certified` is the same and comes
            faster; a margin is then any upper bound, infinite where a
            vertex that breaks the bound was found. Defaults to `False`.
        batch_size: int. Samples that are worked on together. Defaults to
            `64`.
        memory_budget: int. Bytes that one chunk of vertices, or of rows that
            a linear relaxation substitutes, may take. Defaults to `2**26`
            (64 MiB).
        widest: int, or `None`. For `"crown"`, `"coap"` and `"alpha-crown"`:
            layers with more neurons than this get their ranges from interval
            arithmetic, which is faster and looser; the result names them in
            `interval_layers`. Defaults to `None`, no layer does.
        time_limit: float. For `"exact"`: seconds that the solver may take for
            a sample, which is then not decided. Defaults to `10.0`.
        dtype: `"float32"` or `"float64"`. Defaults to `"float32"`.
        verbose: 0, 1 or `"auto"`, a progress bar for long runs only.
            Defaults to `"auto"`.

    Returns:
        A `Certificate`, or a `CertificateTable` for a list of radii.

    Example:
    ```python
    result = keras_rub.certify(model, x_test, y_test, rho=0.5)
    print(result.certified_accuracy)
    ```
    """
    attacker = attacker_of(
        model,
        perturbations,
        norm=norm,
        mask=mask,
        weights=weights,
        input_range=input_range,
        perturb=perturb,
        categories=categories,
    )
    cascade = _cascade(
        model,
        attacker,
        method,
        dtype,
        memory_budget,
        widest,
        time_limit,
        decide_only,
    )
    several = isinstance(rho, (list, tuple))
    radii = [check_rho(r) for r in rho] if several else [_radius_or_radii(rho)]
    if not radii:
        raise ValueError("`rho` must hold at least one radius.")
    parts: list[list[dict[str, np.ndarray]]] = [[] for _ in radii]
    with checks.clear_errors():
        for batch, labels, where in _batches(
            cascade.bounds, x, y, batch_size, verbose
        ):
            for radius, found in zip(radii, parts, strict=True):
                some = _of_batch(radius, where, cascade.bounds.dtype)
                found.append(cascade.run(batch, labels, some))
    certificates = [
        _join(
            found,
            rho=radius,
            perturbations=attacker,
            method=method,
            interval_layers=cascade.interval_layers,
        )
        for radius, found in zip(radii, parts, strict=True)
    ]
    return CertificateTable(certificates) if several else certificates[0]


def certified_radius(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    perturbations: PerturbationSet | None = None,
    norm: int | str | None = None,
    method: str = "auto",
    tolerance: float = 0.01,
    max_radius: float = 1e3,
    input_range: tuple[Any, Any] | None = None,
    mask: Any = None,
    weights: Any = None,
    perturb: str | None = None,
    categories: Any = None,
    batch_size: int = 64,
    memory_budget: int = 2**26,
    widest: int | None = None,
    time_limit: float = 10.0,
    dtype: str = "float32",
    verbose: int | str = "auto",
) -> np.ndarray:
    """The largest radius, sample by sample, that can be certified.

    The result is that of bisection, with most tests spared: a few vertices
    and values of the bound tell about where the radius is, so that mostly one
    test just below and one just above it are left. Methods of several stages
    search the cheap one first and the others from there. Every radius is
    proved as `keras_rub.certify` with `decide_only=True` proves it.

    With categories the radius is a price, and what it buys grows in jumps: the
    radius returned is proved, and a little above it one was tried that is not.
    `method="exact"` returns the distance of the nearest point of another class,
    within the tolerance, as far as `time_limit` allows, and never less than
    `"auto"`.

    Args:
        model: as in `keras_rub.certify`.
        x: array [n, *features], or a `tf.data.Dataset`.
        y: class numbers [n] or one-hot rows [n, K], or `None`, the model's
            own predictions. Defaults to `None`.
        perturbations: as in `keras_rub.certify`.
        norm: as in `keras_rub.certify`.
        method: as in `keras_rub.certify`. Defaults to `"auto"`.
        tolerance: float. The radius returned is certified, and within this
            fraction of one that is not. Defaults to `0.01`.
        max_radius: float. Radii above it are returned as this. Defaults to
            `1e3`.
        input_range: as in `keras_rub.certify`.
        mask: as in `keras_rub.certify`.
        weights: as in `keras_rub.certify`.
        perturb: as in `keras_rub.certify`.
        categories: as in `keras_rub.certify`.
        batch_size: as in `keras_rub.certify`.
        memory_budget: as in `keras_rub.certify`.
        widest: as in `keras_rub.certify`.
        time_limit: as in `keras_rub.certify`.
        dtype: as in `keras_rub.certify`.
        verbose: as in `keras_rub.certify`.

    Returns:
        Float array [n], 0 for a sample that is misclassified.
    """
    attacker = attacker_of(
        model,
        perturbations,
        norm=norm,
        mask=mask,
        weights=weights,
        input_range=input_range,
        perturb=perturb,
        categories=categories,
    )
    cascade = _cascade(
        model, attacker, method, dtype, memory_budget, widest, time_limit
    )
    check_search(tolerance, max_radius)
    radii = []
    with checks.clear_errors():
        for batch, labels, _ in _batches(
            cascade.bounds, x, y, batch_size, verbose
        ):
            radii.append(cascade.radius(batch, labels, tolerance, max_radius))
    return np.concatenate(radii)


def check_search(tolerance: float, max_radius: float) -> None:
    """Raises if these can't be the settings of `certified_radius`."""
    if not 0.0 < tolerance < 1.0:
        raise ValueError(
            "`tolerance` must be above 0 and below 1. "
            f"Received: `tolerance={tolerance!r}`"
        )
    if not check_rho(max_radius, "max_radius") > 0.0:
        raise ValueError("`max_radius` must be above 0. Received: 0")


def _cascade(
    model,
    attacker,
    method,
    dtype,
    memory_budget,
    widest,
    time_limit,
    decide_only=False,
) -> Cascade:
    found = methods.find(method, attacker.norm)
    if not check_rho(time_limit, "time_limit") > 0.0:
        raise ValueError("`time_limit` must be above 0. Received: 0")
    if widest is not None and not (int(widest) == widest and widest >= 0):
        raise ValueError(
            "`widest` must be a whole number of at least 0, or None. "
            f"Received: `widest={widest!r}`"
        )
    bounds = compiled_bounds(
        model,
        attacker,
        dtype=dtype,
        memory_budget=memory_budget,
        widest=widest,
    )
    return Cascade(bounds, found, decide_only, float(time_limit))


# Arguments --------------------------------------------------------------------


def _join(parts, rho, **settings) -> Certificate:
    """The certificate of all batches."""
    arrays: dict[str, Any] = {
        name: np.concatenate([part[name] for part in parts])
        for name in parts[0]
    }
    certificate = Certificate(rho=rho, **arrays, **settings)
    if np.ndim(rho) == 1 and len(rho) != len(certificate):
        raise ValueError(
            "`rho` must be a number or hold one radius a sample. "
            f"Received: {len(rho)} radii for {len(certificate)} samples"
        )
    return certificate


def _radius_or_radii(rho) -> float | np.ndarray:
    array = np.asarray(rho)
    if array.ndim == 0:
        return check_rho(rho)
    if array.ndim != 1 or not np.all(np.isfinite(array) & (array >= 0)):
        raise ValueError(
            "`rho` must be a finite number of at least 0, a list of radii, or "
            "an array of one radius a sample. Received: an array of shape "
            f"{array.shape}"
        )
    return array.astype("float64")


def _of_batch(radius, where: slice, dtype) -> np.ndarray:
    """The radii of one batch, one a sample."""
    count = where.stop - where.start
    part = radius if np.ndim(radius) == 0 else radius[where]
    if np.ndim(part) == 1 and len(part) != count:
        raise ValueError(
            "`rho` must be a number or hold one radius a sample. "
            f"Received: {len(radius)} radii for at least {where.stop} samples"
        )
    return np.broadcast_to(part, [count]).astype(dtype.as_numpy_dtype)


def _batches(
    bounds: CompiledBounds, x, y, batch_size: int, verbose
) -> Iterator[tuple[np.ndarray, np.ndarray, slice]]:
    """Checked batches of inputs and labels, with a progress bar."""
    if batch_size < 1:
        raise ValueError(
            "`batch_size` must be at least 1. "
            f"Received: `batch_size={batch_size}`"
        )
    if isinstance(x, tf.data.Dataset):
        if y is not None:
            raise ValueError(
                "`y` must be None when `x` is a tf.data.Dataset, which holds "
                "its own labels."
            )
        source, total = _from_dataset(bounds, x, batch_size), None
    else:
        x = bounds.problem.inputs.array(x)
        if y is not None and len(np.asarray(y)) != len(x):
            raise ValueError(
                "`x` and `y` must have the same length. "
                f"Received: {len(x)} and {len(np.asarray(y))}"
            )
        source, total = _from_arrays(x, y, batch_size), len(x)
    expected = bounds.input_shape
    progress = Progress(total, verbose)
    done = 0
    for some_x, some_y in source:
        if some_x.shape[1:] != tuple(expected):
            raise ValueError(
                f"`x` must have the shape [n, {', '.join(map(str, expected))}]"
                f". Received: shape {some_x.shape}"
            )
        some_x = some_x.astype(bounds.dtype.as_numpy_dtype)
        checks.require_valid(tf.constant(some_x), bounds.perturbations)
        if some_y is None:
            labels = bounds.logits(some_x).numpy().argmax(axis=-1)
        else:
            labels = checks.class_labels(
                some_y, bounds.problem.program.num_classes
            ).numpy()
        yield some_x, labels.astype("int32"), slice(done, done + len(some_x))
        done += len(some_x)
        progress.update(done)
    if not done:
        raise ValueError("`x` must hold at least one sample. Received: none")


def _from_arrays(x, y, batch_size):
    for first in range(0, len(x), batch_size):
        some = slice(first, first + batch_size)
        yield x[some], None if y is None else np.asarray(y)[some]


def _from_dataset(bounds, dataset, batch_size):
    for element in dataset:
        pair = element if isinstance(element, (tuple, list)) else (element,)
        x = bounds.problem.inputs.array(pair[0])
        y = np.asarray(pair[1]) if len(pair) > 1 else None
        yield from _from_arrays(x, y, batch_size)
