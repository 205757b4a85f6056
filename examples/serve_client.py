"""Ask a server for classes, certificates and certified radii.

    python examples/serve_client.py --server localhost:8501 --rho 0.5
    python examples/serve_client.py --server localhost:8500 --grpc --rho 0.5

The server is TensorFlow Serving with a model that keras_rub.export wrote; see
docs/serving.md. This program needs numpy only (with --grpc also
tensorflow-serving-api), and scikit-learn for its default inputs, some digits.
"""

import json
import urllib.error
import urllib.request

import numpy as np
from absl import app, flags

_SERVER = flags.DEFINE_string("server", "localhost:8501", "Host and port.")
_GRPC = flags.DEFINE_bool("grpc", False, "Use gRPC in the place of REST.")
_MODEL = flags.DEFINE_string("model", "digits", "Its name on the server.")
_INPUT = flags.DEFINE_string(
    "input", None, "A .npy file with inputs [n, *features]; digits by default."
)
_RHO = flags.DEFINE_float("rho", 0.5, "The radius to certify.", lower_bound=0)
_SAMPLES = flags.DEFINE_integer("samples", 5, "How many of them to send.")
_TIMEOUT = flags.DEFINE_float("timeout", 60.0, "Seconds to wait.")


def rest_body(signature, inputs) -> bytes:
    """The JSON of one request, in the column format."""
    lists = {name: np.asarray(v).tolist() for name, v in inputs.items()}
    return json.dumps({"signature_name": signature, "inputs": lists}).encode()


def ask_rest(server, model, signature, inputs, timeout=60.0) -> dict:
    """Sends one request by REST; returns arrays by name."""
    request = urllib.request.Request(
        f"http://{server}/v1/models/{model}:predict",
        rest_body(signature, inputs),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from error
    return {name: np.asarray(v) for name, v in found["outputs"].items()}


def grpc_request(model, signature, inputs):
    """The PredictRequest of one question."""
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2

    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    request.model_spec.signature_name = signature
    for name, value in inputs.items():
        value = np.asarray(value, "float32")
        request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
    return request


def grpc_outputs(response) -> dict:
    """The arrays of a PredictResponse, by name."""
    import tensorflow as tf

    return {name: tf.make_ndarray(v) for name, v in response.outputs.items()}


def ask_grpc(server, model, signature, inputs, timeout=60.0) -> dict:
    """Sends one request by gRPC; returns arrays by name."""
    import grpc
    from tensorflow_serving.apis import prediction_service_pb2_grpc

    with grpc.insecure_channel(server) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        request = grpc_request(model, signature, inputs)
        return grpc_outputs(stub.Predict(request, timeout))


def read_inputs() -> np.ndarray:
    """The inputs to send [n, *features]."""
    if _INPUT.value:
        x = np.load(_INPUT.value)
    else:
        from sklearn.datasets import load_digits

        x = load_digits().data / 16.0
    return x[: _SAMPLES.value].astype("float32")


def main(argv):
    del argv
    x = read_inputs()
    ask = ask_grpc if _GRPC.value else ask_rest

    def answer(signature, **inputs):
        return ask(
            _SERVER.value, _MODEL.value, signature, inputs, _TIMEOUT.value
        )

    predicted = answer("serving_default", x=x)
    rho = np.full(len(x), _RHO.value, "float32")
    certified = answer("certify", x=x, rho=rho)
    radius = answer("certified_radius", x=x)["radius"]
    print(
        f"{'class':>6s} {'probability':>12s} {'certified':>10s} {'radius':>8s}"
    )
    for i, label in enumerate(predicted["class"]):
        print(
            f"{label:6d} {predicted['probabilities'][i].max():12.3f} "
            f"{'yes' if certified['certified'][i] else 'no':>10s} "
            f"{radius[i]:8.3f}"
        )


if __name__ == "__main__":
    app.run(main)
