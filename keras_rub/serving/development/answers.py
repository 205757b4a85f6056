"""What a server answers, apart from the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_rub.serving.development.repository import Repository
from keras_rub.serving.development.servable import Servable
from keras_rub.serving.development.status import invalid

_VERBS = {"classify": "classification", "regress": "regression"}


class ModelSpec(NamedTuple):
    """Which model is asked: its name, and a version or a label."""

    name: str
    version: int | None = None
    label: str | None = None


class Answers:
    """What a server knows about its models.

    Args:
        repository: the models.
        max_batch_size: int, or `None`. With batching, TensorFlow Serving
            refuses a larger request; so does this.
    """

    def __init__(self, repository: Repository, max_batch_size: int | None):
        self.repository = repository
        self.max_batch_size = max_batch_size

    def run(
        self,
        servable: Servable,
        signature_name: str,
        inputs: Mapping[str, tf.Tensor],
        wanted: Sequence[str] = (),
    ) -> dict[str, tf.Tensor]:
        """The outputs of one request."""
        if self.max_batch_size is not None:
            sizes = {
                tensor.shape[0] if tensor.shape.rank else 0
                for tensor in inputs.values()
            }
            if len(sizes) > 1 or 0 in sizes:
                raise invalid(
                    "Batching session Run() input tensors must have equal "
                    "0th-dimension size"
                )
            for size in sizes:
                if size > self.max_batch_size:
                    raise invalid(
                        f"Task size {size} is larger than maximum input batch "
                        f"size {self.max_batch_size}"
                    )
        return servable.run(signature_name, inputs, wanted)

    def status(self, spec: ModelSpec) -> dict[str, Any]:
        """The states of the versions, as REST writes them."""
        return {
            "model_version_status": [
                {
                    "version": str(version),
                    "state": record.state,
                    "status": {
                        "error_code": "UNKNOWN" if record.error else "OK",
                        "error_message": record.error,
                    },
                }
                for version, record in self.repository.records(*spec).items()
            ]
        }

    def metadata(self, spec: ModelSpec) -> dict[str, Any]:
        """The signatures, as REST writes them."""
        from google.protobuf import json_format

        with self.repository.use(*spec) as servable:
            signatures = {
                name: json_format.MessageToDict(
                    signature, preserving_proto_field_name=True
                )
                for name, signature in servable.signatures.items()
            }
            return {
                "model_spec": {
                    "name": servable.name,
                    "signature_name": "",
                    "version": str(servable.version),
                },
                "metadata": {"signature_def": {"signature_def": signatures}},
            }

    def refuse(self, spec: ModelSpec, verb: str) -> None:
        """Raises: no signature is one for `classify` or `regress`.

        Args:
            spec: the model.
            verb: `"classify"` or `"regress"`.
        """
        with self.repository.use(*spec) as servable:
            _, signature = servable.signature("")
            raise invalid(
                f"Expected {_VERBS[verb]} signature method_name to be "
                f"tensorflow/serving/{verb}. Was: {signature.method_name}"
            )
