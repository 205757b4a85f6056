"""TensorFlow Serving's gRPC services."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import tensorflow as tf
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from keras_rub.serving.development.answers import Answers, ModelSpec
from keras_rub.serving.development.servable import tensors_of
from keras_rub.serving.development.status import RequestError, invalid


def add_services(server: grpc.Server, answers: Answers) -> None:
    """Lets a gRPC server answer as TensorFlow Serving does."""
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(
        _Predictions(answers), server
    )
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(
        _Models(answers), server
    )


class _Predictions(prediction_service_pb2_grpc.PredictionServiceServicer):
    def __init__(self, answers: Answers):
        self.answers = answers

    def Predict(self, request, context):
        return _reply(context, lambda: self._predict(request))

    def Classify(self, request, context):
        return _reply(context, lambda: self._refuse(request, "classify"))

    def Regress(self, request, context):
        return _reply(context, lambda: self._refuse(request, "regress"))

    def GetModelMetadata(self, request, context):
        return _reply(context, lambda: self._metadata(request))

    def _refuse(self, request, verb):
        self.answers.refuse(_spec(request.model_spec), verb)

    def _predict(self, request):
        spec = request.model_spec
        response = predict_pb2.PredictResponse()
        with self.answers.repository.use(*_spec(spec)) as servable:
            name, _ = servable.signature(spec.signature_name)
            found = self.answers.run(
                servable,
                name,
                tensors_of(request.inputs),
                request.output_filter,
            )
            _fill(response.model_spec, servable, name)
        for key, value in found.items():
            response.outputs[key].CopyFrom(tf.make_tensor_proto(value))
        return response

    def _metadata(self, request):
        if not request.metadata_field:
            raise invalid(
                "GetModelMetadataRequest must specify at least one "
                "metadata_field"
            )
        for field in request.metadata_field:
            if field != "signature_def":
                raise invalid(f"Metadata field {field} is not supported")
        response = get_model_metadata_pb2.GetModelMetadataResponse()
        signatures = get_model_metadata_pb2.SignatureDefMap()
        with self.answers.repository.use(*_spec(request.model_spec)) as found:
            for name, signature in found.signatures.items():
                signatures.signature_def[name].CopyFrom(signature)
            _fill(response.model_spec, found, "")
        response.metadata["signature_def"].Pack(signatures)
        return response


class _Models(model_service_pb2_grpc.ModelServiceServicer):
    def __init__(self, answers: Answers):
        self.answers = answers

    def GetModelStatus(self, request, context):
        return _reply(context, lambda: self._status(request))

    def _status(self, request):
        response = get_model_status_pb2.GetModelStatusResponse()
        states = get_model_status_pb2.ModelVersionStatus.State
        records = self.answers.repository.records(*_spec(request.model_spec))
        for version, record in records.items():
            status = response.model_version_status.add(
                version=version, state=states.Value(record.state)
            )
            if record.error:
                status.status.error_code = grpc.StatusCode.UNKNOWN.value[0]
                status.status.error_message = record.error
        return response


def _reply(context, answer: Callable[[], Any]) -> Any:
    try:
        return answer()
    except RequestError as error:
        context.abort(grpc.StatusCode[error.code], error.message)


def _spec(spec) -> ModelSpec:
    if not spec.name:
        raise invalid("Request must specify a model name")
    version = spec.version.value if spec.HasField("version") else None
    return ModelSpec(spec.name, version, spec.version_label or None)


def _fill(spec, servable, signature_name: str) -> None:
    spec.name = servable.name
    spec.version.value = servable.version
    spec.signature_name = signature_name
