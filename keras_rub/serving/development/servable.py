"""One version of a model, loaded, and the requests that are in it."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from keras_rub.serving.development.status import RequestError, invalid
from keras_rub.serving.server import WARMUP

_DEFAULT = "serving_default"

_CODES = {
    tf.errors.CANCELLED: "CANCELLED",
    tf.errors.INVALID_ARGUMENT: "INVALID_ARGUMENT",
    tf.errors.DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
    tf.errors.NOT_FOUND: "NOT_FOUND",
    tf.errors.RESOURCE_EXHAUSTED: "RESOURCE_EXHAUSTED",
    tf.errors.FAILED_PRECONDITION: "FAILED_PRECONDITION",
    tf.errors.OUT_OF_RANGE: "OUT_OF_RANGE",
    tf.errors.UNIMPLEMENTED: "UNIMPLEMENTED",
    tf.errors.INTERNAL: "INTERNAL",
    tf.errors.UNAVAILABLE: "UNAVAILABLE",
}


class Servable:
    """A SavedModel that answers requests.

    Args:
        name: of the model on the server.
        version: int, its number.
        folder: the SavedModel.
    """

    def __init__(self, name: str, version: int, folder: pathlib.Path):
        self.name = name
        self.version = version
        proto = saved_model_pb2.SavedModel()
        proto.ParseFromString((folder / "saved_model.pb").read_bytes())
        (graph,) = (
            meta
            for meta in proto.meta_graphs
            if tf.saved_model.SERVING in meta.meta_info_def.tags
        )
        self.signatures = {
            key: signature
            for key, signature in graph.signature_def.items()
            if not key.startswith("__")
        }
        # The loaded object holds the weights.
        self._model = tf.saved_model.load(str(folder))
        self._warm_up(folder / WARMUP)

    def signature(self, name: str) -> tuple[str, Any]:
        """The name and the SignatureDef that a request asks for."""
        name = name or _DEFAULT
        if name not in self.signatures:
            raise RequestError(
                "FAILED_PRECONDITION",
                f'Serving signature key "{name}" not found.',
            )
        return name, self.signatures[name]

    def run(
        self,
        signature_name: str,
        inputs: Mapping[str, tf.Tensor],
        wanted: Sequence[str] = (),
    ) -> dict[str, tf.Tensor]:
        """The outputs of a signature, or the error as a `RequestError`.

        Args:
            signature_name: its name; empty for the default one.
            inputs: tensors by name.
            wanted: names of outputs; none for all.
        """
        name, signature = self.signature(signature_name)
        _check_inputs(signature, inputs)
        for output in wanted:
            if output not in signature.outputs:
                raise invalid(
                    f"output tensor alias not found in signature: {output} "
                    "Outputs expected to be in the set "
                    f"{{{','.join(sorted(signature.outputs))}}}."
                )
        try:
            found = self._model.signatures[name](**inputs)
        except tf.errors.OpError as error:
            code = _CODES.get(error.error_code, "UNKNOWN")
            raise RequestError(code, error.message) from error
        return {key: found[key] for key in wanted or found}

    def _warm_up(self, path: pathlib.Path) -> None:
        """Runs the requests that lie beside the model, as a server does."""
        from tensorflow_serving.apis import prediction_log_pb2

        if not path.exists():
            return
        for record in tf.data.TFRecordDataset(str(path)):
            log = prediction_log_pb2.PredictionLog.FromString(record.numpy())
            request = log.predict_log.request
            self.run(
                request.model_spec.signature_name,
                tensors_of(request.inputs),
                request.output_filter,
            )


def tensors_of(protos: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """The tensors of a request, by name."""
    found = {}
    for name, proto in protos.items():
        try:
            found[name] = tf.constant(tf.make_ndarray(proto))
        except (TypeError, ValueError) as error:
            raise invalid(f"tensor parsing error: {name}") from error
    return found


def _check_inputs(signature, inputs: Mapping[str, tf.Tensor]) -> None:
    """What a session would refuse, before TensorFlow's Python does."""
    sent, needed = set(inputs), set(signature.inputs)
    if sent != needed:
        raise invalid(
            f"input size does not match signature: {len(sent)}!={len(needed)} "
            f"len({{{','.join(sorted(sent))}}}) != "
            f"len({{{','.join(sorted(needed))}}}). Sent extra: "
            f"{{{','.join(sorted(sent - needed))}}}. Missing but required: "
            f"{{{','.join(sorted(needed - sent))}}}."
        )
    for name, info in signature.inputs.items():
        tensor, wanted = inputs[name], tf.as_dtype(info.dtype)
        if tensor.dtype != wanted:
            raise invalid(
                f"Expects arg[{name}] to be {wanted.name} but "
                f"{tensor.dtype.name} is provided"
            )
        shape = tf.TensorShape(info.tensor_shape)
        if not shape.is_compatible_with(tensor.shape):
            raise invalid(
                f"Input {name} has the shape {shape}, so that "
                f"{tensor.shape} does not fit"
            )
