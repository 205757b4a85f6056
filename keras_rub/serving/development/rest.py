"""TensorFlow Serving's REST API, as a WSGI application."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

import numpy as np
import tensorflow as tf

from keras_rub.serving.development.answers import Answers, ModelSpec
from keras_rub.serving.development.status import RequestError, invalid

_MODEL = r"/v1/models/([^/:]+)(?:/(?:versions/(\d+)|labels/([^/:]+)))?"
_PREDICTION = re.compile(rf"{_MODEL}:(classify|regress|predict)", re.I)
_STATUS = re.compile(rf"{_MODEL}(/metadata)?", re.I)

# The reply to a client that names no length, or a wrong one.
_LARGEST_BODY = 2**30


class RestApplication:
    """Answers REST requests.

    Args:
        answers: what the server knows.
    """

    def __init__(self, answers: Answers):
        self.answers = answers

    def __call__(
        self, environ: Mapping[str, Any], start_response: Callable
    ) -> Iterable[bytes]:
        status = 200
        try:
            answer = self._answer(
                environ["REQUEST_METHOD"],
                environ.get("PATH_INFO", ""),
                environ["wsgi.input"].read(_LARGEST_BODY),
            )
        except RequestError as error:
            status, answer = error.http_status, {"error": error.message}
        except Exception as error:  # the server goes on
            status, answer = 500, {"error": f"{type(error).__name__}: {error}"}
        body = json.dumps(answer, indent=1).encode()
        phrase = (
            HTTPStatus(status).phrase
            if status in set(HTTPStatus)
            else "Client Closed Request"
        )
        start_response(
            f"{status} {phrase}",
            [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
            ],
        )
        return [body]

    def _answer(self, method: str, path: str, body: bytes) -> dict[str, Any]:
        found = _PREDICTION.fullmatch(path)
        if method == "POST" and found is not None:
            *spec, verb = found.groups()
            if verb.lower() != "predict":
                self.answers.refuse(_spec(*spec), verb.lower())
            return self._predict(_spec(*spec), body)
        found = _STATUS.fullmatch(path)
        if method == "GET" and found is not None:
            *spec, metadata = found.groups()
            if metadata:
                return self.answers.metadata(_spec(*spec))
            return self.answers.status(_spec(*spec))
        raise invalid(f"Malformed request: {method} {path}")

    def _predict(self, spec: ModelSpec, body: bytes) -> dict[str, Any]:
        request = _parse(body)
        signature_name = request.get("signature_name", "")
        if not isinstance(signature_name, str):
            raise invalid(
                f"JSON Value: {_short(request)} not formatted correctly. "
                "'signature_name' key must be a string value."
            )
        with self.answers.repository.use(*spec) as servable:
            name = signature_name or "serving_default"
            if name not in servable.signatures:
                raise invalid(
                    f'Serving signature name: "{name}" not found in signature '
                    "def"
                )
            infos = servable.signatures[name].inputs
            by_row = "instances" in request
            if by_row == ("inputs" in request):
                raise invalid(
                    "Request JSON can have either 'instances' or 'inputs', "
                    "and must have one of them"
                )
            inputs = (
                _from_rows(request["instances"], infos)
                if by_row
                else _from_columns(request["inputs"], infos)
            )
            found = self.answers.run(servable, name, inputs)
        outputs = {key: _to_json(value) for key, value in found.items()}
        if not by_row:
            return {"outputs": _alone(outputs)}
        lengths = {len(value) for value in outputs.values()}
        if len(lengths) != 1:
            raise invalid("Tensors of the response differ in their batch size")
        rows = [
            dict(zip(outputs, values, strict=True))
            for values in zip(*outputs.values(), strict=True)
        ]
        return {"predictions": [_alone(row) for row in rows]}


def _spec(name, version, label) -> ModelSpec:
    return ModelSpec(name, None if version is None else int(version), label)


def _alone(values: dict[str, Any]) -> Any:
    """One output is written without its name."""
    return next(iter(values.values())) if len(values) == 1 else values


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else f"{text[:200]}..."


def _parse(body: bytes) -> dict[str, Any]:
    if not body:
        raise invalid("JSON Parse error: The document is empty")
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        where = getattr(error, "pos", 0)
        what = getattr(error, "msg", "Invalid value.")
        raise invalid(f"JSON Parse error: {what} at offset: {where}") from None
    if not isinstance(request, dict):
        raise invalid(f"JSON Value: {_short(request)} Is not object")
    return request


# Tensors ---------------------------------------------------------------------


def _from_columns(value: Any, infos) -> dict[str, tf.Tensor]:
    """The column format: whole tensors, by name where there are several."""
    if not isinstance(value, dict) or _is_base64(value):
        if len(infos) > 1:
            raise invalid(
                "inputs is a plain value/list, but expecting an object as "
                "multiple input tensors required as per tensorinfo_map"
            )
        value = {next(iter(infos)): value}
    for name in infos:
        if name not in value:
            raise invalid(f"Missing named input: {name} in 'inputs' object.")
    return {
        name: tf.constant(_array(value[name], info), tf.as_dtype(info.dtype))
        for name, info in infos.items()
    }


def _from_rows(rows: Any, infos) -> dict[str, tf.Tensor]:
    """The row format: one value, or one object, a sample."""
    if not isinstance(rows, list) or not rows:
        raise invalid(
            "Request JSON: 'instances' must be a list of at least one value"
        )
    named = isinstance(rows[0], dict) and not _is_base64(rows[0])
    if not named and len(infos) > 1:
        raise invalid(
            "instances is a plain list, but expecting list of objects as "
            "multiple input tensors required as per tensorinfo_map"
        )
    columns: dict[str, list] = {name: [] for name in infos}
    for number, row in enumerate(rows):
        if named != (isinstance(row, dict) and not _is_base64(row)):
            got = (
                "object but got list" if named else "value/list but got object"
            )
            raise invalid(f"Expecting {got} at item {number} of input list")
        items = row if named else {next(iter(infos)): row}
        if set(items) != set(infos):
            raise invalid(
                f"Failed to process element: {number} of 'instances' list. "
                f"JSON object: {_short(row)} keys must be equal to: "
                f"{','.join(sorted(infos))}"
            )
        for name, item in items.items():
            try:
                columns[name].append(_array(item, infos[name]))
                if columns[name][-1].shape != columns[name][0].shape:
                    raise invalid(
                        f"Expecting shape {list(columns[name][0].shape)} but "
                        f"got: {list(columns[name][-1].shape)}"
                    )
            except RequestError as error:
                raise invalid(
                    f"Failed to process element: {number} key: {name} of "
                    f"'instances' list. Error: {error.message}"
                ) from None
    return {
        name: tf.constant(np.stack(column), tf.as_dtype(infos[name].dtype))
        for name, column in columns.items()
    }


def _array(value: Any, info) -> np.ndarray:
    dtype = tf.as_dtype(info.dtype)
    shape, inner = [], value
    while isinstance(inner, list):
        shape.append(len(inner))
        if not inner:
            break
        inner = inner[0]
    leaves: list[Any] = []
    _collect(value, 0, shape, dtype, leaves)
    kind = object if dtype == tf.string else dtype.as_numpy_dtype
    return np.array(leaves, kind).reshape(shape)


def _collect(value, level, shape, dtype, leaves) -> None:
    if isinstance(value, list):
        if level >= len(shape):
            raise invalid(
                f"Encountered list at unexpected level: {level} expected < "
                f"{len(shape)}"
            )
        if len(value) != shape[level]:
            raise invalid(
                f"Encountered list at unexpected size: {len(value)} at level: "
                f"{level} expected size: {shape[level]}"
            )
        for item in value:
            _collect(item, level + 1, shape, dtype, leaves)
        return
    if level != len(shape):
        raise invalid(
            f"JSON Value: {_short(value)} found at incorrect level: "
            f"{level + 1} in the JSON DOM. Expected at level: {len(shape)}"
        )
    leaves.append(_leaf(value, dtype))


def _leaf(value: Any, dtype: tf.DType) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if dtype.is_floating and number:
        return value
    if dtype.is_integer and number and isinstance(value, int):
        if dtype.min <= value <= dtype.max:
            return value
    elif dtype.is_bool and isinstance(value, bool):
        return value
    elif dtype == tf.string and isinstance(value, str):
        return value.encode()
    elif dtype == tf.string and _is_base64(value):
        try:
            return base64.b64decode(value["b64"], validate=True)
        except binascii.Error:
            raise invalid("Unable to base64 decode") from None
    raise invalid(
        f"JSON Value: {_short(value)} Type: {type(value).__name__} is not of "
        f"expected type: {dtype.name}"
    )


def _is_base64(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"b64"}
        and isinstance(value["b64"], str)
    )


def _to_json(tensor: tf.Tensor) -> Any:
    """Lists; infinities and NaN as JavaScript writes them."""
    if tensor.dtype == tf.string:
        return np.vectorize(
            lambda text: text.decode(errors="replace"), otypes=[object]
        )(tensor.numpy()).tolist()
    return tensor.numpy().tolist()
