"""A trained classifier as a SavedModel that a server loads."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub.bounds import methods
from keras_rub.bounds.certification import check_search
from keras_rub.classifier import (
    base_of,
    input_shape,
    outputs_of,
)
from keras_rub.inputs import SingleInput, input_names
from keras_rub.loading import KERAS_COPY
from keras_rub.perturbations import PerturbationSet, attacker_of
from keras_rub.serving import server
from keras_rub.serving.metadata import METADATA
from keras_rub.serving.signatures import (
    SIGNATURES,
    Certifier,
    predict,
)
from keras_rub.serving.versions import (
    check_version,
    hidden_folder,
    publish,
)
from keras_rub.tracing import compiled
from keras_rub.version import __version__


def export(
    model: keras.Model,
    path: str | os.PathLike,
    version: int | None = None,
    signatures: Sequence[str] = SIGNATURES,
    *,
    perturbations: PerturbationSet | None = None,
    norm: int | str | None = None,
    method: str | None = None,
    input_range: tuple[Any, Any] | None = None,
    mask: Any = None,
    weights: Any = None,
    perturb: str | None = None,
    categories: Any = None,
    preprocessing: keras.layers.Layer | None = None,
    metadata: Mapping[str, Any] | None = None,
    warmup: Any = None,
    tolerance: float = 0.01,
    max_radius: float = 1e3,
    max_batch_size: int = server.MAX_BATCH_SIZE,
    memory_budget: int = 2**26,
) -> pathlib.Path:
    """Writes a classifier as a SavedModel, with its certificates.

    The result needs TensorFlow only, not keras_rub. It appears under its
    number at once when it is complete, so that a server that polls `path`
    never sees half a model, and a number is never used twice.

    | signature | inputs | outputs |
    | --- | --- | --- |
    | `serving_default` | x | logits, probabilities, class |
    | `certify` | x, rho [batch] | class, certified, margin |
    | `certified_radius` | x | class, radius |

    A model with one output is served as one of two classes: the logits are
    [0, z] and the probabilities those of both.

    All inputs are float32 and all tensors begin with the batch. `rho` must
    have its length, and a certificate takes at most `max_batch_size` samples:
    otherwise the request is refused with a message.
    Where the model takes several inputs, each signature has all of them in
    place of x, by their own names and in their own types.
    Numbers are those of `keras_rub.certify` and
    `keras_rub.certified_radius` for the same norm, method and limits. Where
    these raise for a NaN, a radius below 0 or an input outside
    `input_range`, the sample is served as not certified, with the margin
    infinite and the radius 0.

    Args:
        model: a robust model, or any built Keras classifier.
        path: the folder of all versions, such as `"models/digits"`.
        version: int, or `None`. Defaults to `None`, the next free number.
        signatures: which of the table. Certificates need a Sequential or
            Functional model of supported layers; leave them out for others.
            Defaults to all three.
        perturbations: as in `keras_rub.certify`: that of a robust model is
            the default.
        norm: as in `keras_rub.certify`. Defaults to `None`.
        method: `"rub"` (norm 1), `"crown"`, `"coap"`, `"ibp"`, `"crown-ibp"`
            or `None`. Defaults to `None`: `"rub"` for norm 1, else
            `"crown"`.
        input_range: as in `keras_rub.certify`. Defaults to `None`.
        mask: as in `keras_rub.certify`. Defaults to `None`.
        weights: as in `keras_rub.certify`. Defaults to `None`.
        perturb: as in `keras_rub.certify`. Defaults to `None`.
        categories: as in `keras_rub.certify`. Defaults to `None`.
        preprocessing: layer or model that is put before the classifier, or
            `None`. The radius, the mask, the weights and the valid range
            are then in the units of *its* input, and those of a robust model
            must be said anew. Defaults to `None`.
        metadata: dict that JSON can hold, or `None`. What else
            `read_metadata` shall return, such as the data set and the
            accuracies. Defaults to `None`.
        warmup: array [n, *features], a dict of several inputs, or `None`.
            Inputs of the warm-up requests, which are written if
            tensorflow-serving-api is installed. Defaults to `None`, one input
            in the valid range.
        tolerance: as in `keras_rub.certified_radius`. Defaults to `0.01`.
        max_radius: as in `keras_rub.certified_radius`. Defaults to `1e3`.
        max_batch_size: int. The most samples that one request for
            certificates may hold. With `tolerance` and `max_radius` it bounds
            how long a request can take. Defaults to `1024`.
        memory_budget: int. Bytes that one chunk of work may take; a single
            sample may still need more. Defaults to `2**26` (64 MiB).

    Returns:
        The folder of the new version.

    Example:
    ```python
    folder = keras_rub.export(model, "models/digits", norm=1)
    served = tf.saved_model.load(folder)
    served.signatures["certify"](x=x, rho=tf.fill([len(x)], 0.5))
    ```
    """
    base = base_of(model)
    folder = _local_folder(path)
    check_version(folder, version)
    signatures = _check_signatures(signatures)
    network = _with_preprocessing(base, preprocessing)
    specs, num_classes = _check_shapes(network)
    attacker = attacker_of(
        _with_own_units(model, preprocessing, perturbations),
        perturbations,
        norm=norm,
        mask=mask,
        weights=weights,
        input_range=input_range,
        perturb=perturb,
        categories=categories,
    )
    inputs = SingleInput.of(network, attacker)
    bound = methods.find(method, attacker.norm, in_graph=True)
    facts = {
        **_facts_about(model),
        "input_shape": list(specs[0].shape[1:])
        if inputs.split is None
        else {spec.name: list(spec.shape[1:]) for spec in specs},
        "num_classes": num_classes,
        "signatures": list(signatures),
    }
    certifier = None
    if signatures != ("serving_default",):
        check_search(tolerance, max_radius)
        _check_batch_size(max_batch_size)
        certifier = Certifier(
            network,
            perturbations=attacker,
            method=bound,
            tolerance=tolerance,
            max_radius=float(max_radius),
            max_batch_size=max_batch_size,
            memory_budget=memory_budget,
        )
        facts["certificates"] = {
            **attacker.get_config(),
            "method": bound.name,
            "tolerance": tolerance,
            "max_radius": max_radius,
            "max_batch_size": max_batch_size,
        }
    facts = _merge(facts, metadata)
    samples = _warmup_samples(warmup, specs, inputs, attacker)
    if warmup is not None:
        _check_warmup(samples, max_batch_size)
    with hidden_folder(folder) as hidden:
        _save(network, inputs, specs, signatures, certifier, hidden)
        _add_files(hidden, folder.name, network, facts, signatures, samples)
        return publish(hidden, folder, version)


# Writing ---------------------------------------------------------------------


def _save(network, inputs, specs, signatures, certifier, folder) -> None:
    rho = tf.TensorSpec([None], tf.float32, name="rho")
    module = tf.Module()
    # All that the graph reads must hang on the module. Keras's own variables
    # are wrapped ones.
    module.weights = [variable.value for variable in network.variables]
    functions = {}
    if "serving_default" in signatures:
        functions["serving_default"] = compiled(
            lambda *x: predict(network, inputs, inputs.pack(x)),
            input_signature=specs,
        )
    if "certify" in signatures:
        functions["certify"] = compiled(
            lambda *x: certifier.certify(inputs.pack(x[:-1]), x[-1]),
            input_signature=[*specs, rho],
        )
    if "certified_radius" in signatures:
        functions["certified_radius"] = compiled(
            lambda *x: certifier.certified_radius(inputs.pack(x)),
            input_signature=specs,
        )
    tf.saved_model.save(module, str(folder), signatures=functions)


def _add_files(folder, name, network, facts, signatures, samples) -> None:
    (folder / KERAS_COPY).parent.mkdir(exist_ok=True)
    try:
        network.save(folder / KERAS_COPY)
    except NotImplementedError:
        # A subclass whose arguments Keras can't read has no `get_config`.
        (folder / KERAS_COPY).unlink(missing_ok=True)
        warnings.warn(
            f"Keras can't save model {network.name!r} of type "
            f"{type(network).__name__}, which has no `get_config`: it is "
            "served, and can be attacked from the export, but not certified.",
            stacklevel=3,
        )
    warm = samples is not None and server.can_write_warmup()
    if warm:
        requests = {signature: dict(samples) for signature in signatures}
        if "certify" in requests:
            count = len(next(iter(samples.values())))
            requests["certify"]["rho"] = np.ones(count, "float32")
        server.write_warmup(folder, name, requests)
    facts = {**facts, "warmup_requests": warm}
    (folder / METADATA).write_text(json.dumps(facts, indent=2) + "\n")


def _facts_about(model) -> dict[str, Any]:
    robust = base_of(model) is not model
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(
            timespec="seconds"
        ),
        "versions": {
            "keras_rub": __version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
        },
        "model": base_of(model).name,
        "defense": type(model).__name__ if robust else None,
        "norm": model.norm if robust else None,
        "rho": round(model.rho, 8) if robust else None,
    }


def _merge(facts, metadata) -> dict[str, Any]:
    metadata = {} if metadata is None else dict(metadata)
    taken = sorted(set(facts) & set(metadata))
    if taken:
        raise ValueError(
            f"`metadata` must not hold {taken}, which export writes itself. "
            f"Received: keys {sorted(metadata)}"
        )
    merged = {**facts, **metadata}
    try:
        json.dumps(merged)
    except TypeError as error:
        raise ValueError(
            f"`metadata` must hold only what JSON can: {error}."
        ) from None
    return merged


# Arguments -------------------------------------------------------------------


def _local_folder(path) -> pathlib.Path:
    if "://" in str(path):
        raise ValueError(
            "`path` must be a local folder: elsewhere a model can't appear "
            "at once. Export it here and copy the version. "
            f"Received: `path={str(path)!r}`"
        )
    return pathlib.Path(path)


def _check_signatures(signatures) -> tuple[str, ...]:
    wanted = (signatures,) if isinstance(signatures, str) else signatures
    wanted = tuple(wanted)
    unknown = sorted(set(wanted) - set(SIGNATURES))
    if unknown or not wanted:
        raise ValueError(
            f"`signatures` must be some of {SIGNATURES}. "
            f"Received: `signatures={signatures!r}`"
        )
    return tuple(name for name in SIGNATURES if name in wanted)


def _check_batch_size(size) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(
            "`max_batch_size` must be a whole number of at least 1. "
            f"Received: `max_batch_size={size!r}`"
        )


def _with_preprocessing(base, preprocessing) -> keras.Model:
    if preprocessing is None:
        return base
    if not isinstance(preprocessing, keras.layers.Layer):
        raise TypeError(
            "`preprocessing` must be a Keras layer or model. "
            f"Received: {type(preprocessing).__name__}"
        )
    if len(getattr(base, "inputs", None) or ()) > 1:
        raise ValueError(
            "`preprocessing` can stand before a model of one input only: put "
            "it into the model. Received: model "
            f"{base.name!r} of {len(base.inputs)} inputs"
        )
    shape = input_shape(base)
    if getattr(preprocessing, "inputs", None):
        shape = tuple(preprocessing.inputs[0].shape[1:])
    x = keras.Input(shape, name="x")
    return keras.Model(x, outputs_of(base, preprocessing(x)), name=base.name)


def _check_shapes(network) -> tuple[list[tf.TensorSpec], int]:
    """The inputs and K, if the network can be served at all."""
    if getattr(network, "inputs", None):
        outputs = network.outputs
    else:
        blank = tf.zeros([1, *input_shape(network)])
        outputs = keras.tree.flatten(outputs_of(network, blank))
    shapes = [tuple(output.shape) for output in outputs]
    if len(shapes) != 1 or len(shapes[0]) != 2 or shapes[0][1] is None:
        raise ValueError(
            "`model` must return one tensor of logits or probabilities "
            f"[batch, K]. Received: output shapes {shapes}"
        )
    return _specs_of(network), max(shapes[0][1], 2)


def _specs_of(network) -> list[tf.TensorSpec]:
    """The inputs of the signatures: x, or each of several by its name."""
    if len(getattr(network, "inputs", None) or ()) < 2:
        shape = [None, *input_shape(network)]
        return [tf.TensorSpec(shape, tf.float32, name="x")]
    names = input_names(network)
    if "rho" in names:
        raise ValueError(
            "No input may be called 'rho', which the signature `certify` has "
            f"already. Received: the inputs {names}"
        )
    return [
        tf.TensorSpec(
            [None, *tensor.shape[1:]],
            keras.backend.standardize_dtype(tensor.dtype),
            name=name,
        )
        for name, tensor in zip(names, network.inputs, strict=True)
    ]


def _with_own_units(model, preprocessing, perturbations):
    """Whose attacker is meant where the user names none.

    Behind other preprocessing the units are others, so that only the norm of
    a robust model can be taken over.
    """
    if preprocessing is None or perturbations is not None:
        return model
    own = attacker_of(model)
    if own != PerturbationSet(own.norm):
        raise ValueError(
            "The model's own attacker is in the units behind `preprocessing`: "
            "pass the one that is meant as `perturbations`. "
            f"Received: a model trained with `perturbations={own!r}`"
        )
    return model


def _check_warmup(samples, max_batch_size: int) -> None:
    count = len(next(iter(samples.values())))
    if count > max_batch_size:
        raise ValueError(
            "`warmup` must hold at most `max_batch_size` samples, or the "
            f"server would refuse them. Received: {count} samples, "
            f"`max_batch_size={max_batch_size}`"
        )
    if not server.can_write_warmup():
        warnings.warn(
            "No warm-up requests are written: they need the extra `serving`, "
            'pip install "keras-rub[serving]".',
            stacklevel=3,
        )


def _warmup_samples(
    warmup, specs, inputs: SingleInput, attacker
) -> dict[str, np.ndarray] | None:
    """Inputs of the warm-up requests, by name."""
    names = [spec.name for spec in specs]
    if warmup is None:
        if any(None in spec.shape[1:] for spec in specs):
            return None
        blank = [
            np.zeros([1, *spec.shape[1:]], spec.dtype.as_numpy_dtype)
            for spec in specs
        ]
        found = dict(zip(names, blank, strict=True))
        moved = names[0] if inputs.split is None else inputs.split.moved
        if attacker.input_range is not None:
            inside = np.clip(found[moved], *attacker.input_range)
            found[moved] = inside.astype("float32")
        return found
    if inputs.split is None:
        leaves = {names[0]: inputs.array(warmup)}
    else:
        leaves = inputs.split.leaves(warmup)
    found = {
        spec.name: np.asarray(leaves[spec.name], spec.dtype.as_numpy_dtype)
        for spec in specs
    }
    for spec in specs:
        samples, shape = found[spec.name], tuple(spec.shape[1:])
        fits = samples.ndim == len(shape) + 1 and all(
            wanted in (None, size)
            for wanted, size in zip(shape, samples.shape[1:], strict=True)
        )
        if not fits or not len(samples):
            raise ValueError(
                f"`warmup` must hold inputs [n, {', '.join(map(str, shape))}]. "
                f"Received: shape {samples.shape}"
            )
    return found
