"""A server under real requests: the development server, and the real one.

The same tests run against `tensorflow_model_server` where it is on the PATH.
"""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_rub
from keras_rub import serving
from keras_rub.cli import command, serve
from tests.test_export import (
    STOCK,
    assert_same,
    documented_lines,
    inputs_of,
    run,
    small_mlp,
)
from tests.test_tools import load

grpc = pytest.importorskip("grpc")
pytest.importorskip("tensorflow_serving.apis.predict_pb2")
pytest.importorskip("waitress")

from tensorflow_serving.apis import (  # noqa: E402
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from keras_rub.serving.development import DevelopmentServer  # noqa: E402

LIMITS = {"max_radius": 0.3, "max_batch_size": 16}
SERVERS = ["development", "tensorflow_model_server"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two versions of one model; only the first one has certificates."""
    keras.utils.set_random_seed(0)
    folder = tmp_path_factory.mktemp("served")
    model = small_mlp(4)
    keras_rub.export(model, folder / "mlp", norm=1, method="rub", **LIMITS)
    serving.write_config(folder, mounted_at=folder)
    return folder


@pytest.fixture(scope="module")
def local(folder):
    """The first version, loaded here: what the servers must answer."""
    return tf.saved_model.load(str(folder / "mlp/1"))


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def real_server(folder, log):
    rest_port, rpc_port = free_port(), free_port()
    with open(log, "w") as file:
        process = subprocess.Popen(
            [
                "tensorflow_model_server",
                f"--port={rpc_port}",
                f"--rest_api_port={rest_port}",
                f"--model_config_file={folder}/models.config",
                "--enable_batching",
                f"--batching_parameters_file={folder}/batching.config",
            ],
            stdout=file,
            stderr=file,
        )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError, AssertionError):
                assert "AVAILABLE" in str(get(rest_port, "/v1/models/mlp")[1])
                break
            time.sleep(0.2)
        yield rest_port, rpc_port
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module", params=SERVERS)
def ports(request, folder, tmp_path_factory):
    """The REST and gRPC ports of a server of the folder."""
    if request.param == "development":
        with DevelopmentServer(
            folder,
            0,
            0,
            batching_parameters_file=folder / "batching.config",
            poll_seconds=0.1,
        ) as server:
            yield server.rest_api_port, server.port
        return
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not on PATH")
    with real_server(folder, tmp_path_factory.mktemp("log") / "log") as found:
        yield found


def get(port, path, body=None, method=None):
    """Status and JSON of one REST request."""
    data = body.encode() if isinstance(body, str) else body
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def samples(count):
    rng = np.random.default_rng(count)
    x = rng.random((count, 4)).astype("float32")
    return x, (rng.random(count) * 0.4).astype("float32")


def wanted(local, signature, inputs):
    tensors = {name: tf.constant(value) for name, value in inputs.items()}
    return local.signatures[signature](**tensors)


# Answers ---------------------------------------------------------------------


def test_both_protocols(ports, local):
    client = load("examples/serve_client.py")
    rest_port, rpc_port = ports
    for count in (1, 5):
        x, rho = samples(count)
        for signature in STOCK:
            inputs = inputs_of(signature, x, rho)
            for ask, port in (
                (client.ask_rest, rest_port),
                (client.ask_grpc, rpc_port),
            ):
                found = ask(f"127.0.0.1:{port}", "mlp", signature, inputs)
                assert_same(found, wanted(local, signature, inputs))


def test_row_format(ports, local):
    """Objects where there are several inputs, else plain lists."""
    x, rho = samples(3)
    rows = [
        {"x": sample, "rho": radius}
        for sample, radius in zip(x.tolist(), rho.tolist(), strict=True)
    ]
    for signature, instances in (
        ("certify", rows),
        ("certified_radius", x.tolist()),
    ):
        body = {"signature_name": signature, "instances": instances}
        status, answer = get(
            ports[0], "/v1/models/mlp/versions/1:predict", json.dumps(body)
        )
        assert status == 200
        found = {
            key: [row[key] for row in answer["predictions"]]
            for key in answer["predictions"][0]
        }
        inputs = inputs_of(signature, x, rho)
        assert_same(found, wanted(local, signature, inputs))


def test_infinite_numbers(ports):
    body = '{"signature_name": "certify", "inputs": {"x": [[NaN, 0, 0, 0]], \
            "rho": [1]}}'
    status, answer = get(ports[0], "/v1/models/mlp:predict", body)
    assert status == 200
    assert answer["outputs"]["margin"] == [np.inf]
    assert answer["outputs"]["class"] == [-1]


def test_client_example(ports, tmp_path, capsys):
    np.save(tmp_path / "x.npy", samples(3)[0])
    for use_grpc, port in zip((False, True), ports, strict=True):
        printed = run(
            "examples/serve_client.py",
            capsys,
            server=f"127.0.0.1:{port}",
            grpc=use_grpc,
            model="mlp",
            input=str(tmp_path / "x.npy"),
            rho=0.01,
        )
        assert printed.count("yes") + printed.count("no\n") >= 1
        assert len(printed.splitlines()) == 4


def test_status_and_metadata(ports):
    rest_port, rpc_port = ports
    available = {
        "version": "1",
        "state": "AVAILABLE",
        "status": {"error_code": "OK", "error_message": ""},
    }
    for path in ("/v1/models/mlp", "/v1/models/mlp/versions/1"):
        assert get(rest_port, path) == (
            200,
            {"model_version_status": [available]},
        )
    status, answer = get(rest_port, "/v1/models/mlp/metadata")
    assert status == 200 and answer["model_spec"]["version"] == "1"
    signatures = answer["metadata"]["signature_def"]["signature_def"]
    assert set(STOCK) <= set(signatures)
    assert signatures["certify"]["inputs"]["rho"]["dtype"] == "DT_FLOAT"

    with grpc.insecure_channel(f"127.0.0.1:{rpc_port}") as channel:
        models = model_service_pb2_grpc.ModelServiceStub(channel)
        request = get_model_status_pb2.GetModelStatusRequest()
        request.model_spec.name = "mlp"
        (found,) = models.GetModelStatus(request, 60).model_version_status
        assert found.version == 1
        assert found.state == found.AVAILABLE
        predictions = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        request = get_model_metadata_pb2.GetModelMetadataRequest()
        request.model_spec.name = "mlp"
        request.metadata_field.append("signature_def")
        answer = predictions.GetModelMetadata(request, 60)
        signatures = get_model_metadata_pb2.SignatureDefMap()
        assert answer.metadata["signature_def"].Unpack(signatures)
        assert set(STOCK) <= set(signatures.signature_def)
        assert answer.model_spec.version.value == 1


# Errors ----------------------------------------------------------------------

GOOD = '{"inputs": [[0, 0, 0, 0]]}'


def certify_body(x, rho):
    inputs = {"x": [[0.0] * 4] * x, "rho": [0.1] * rho}
    return json.dumps({"signature_name": "certify", "inputs": inputs})


# Path, body, status, and what TensorFlow Serving says.
BAD_REQUESTS = {
    "no such model": ("/v1/models/no:predict", GOOD, 404, "Latest\\(no\\)"),
    "no such version": (
        "/v1/models/mlp/versions/9:predict",
        GOOD,
        404,
        "Specific\\(mlp, 9\\)",
    ),
    "no such label": (
        "/v1/models/mlp/labels/best:predict",
        GOOD,
        400,
        "label: best",
    ),
    "no such verb": ("/v1/models/mlp:guess", GOOD, 400, "Malformed request"),
    "no model of this name": ("/v1/models/no", None, 404, "any versions of"),
    "no body": ("/v1/models/mlp:predict", "", 400, "document is empty"),
    "no JSON": ("/v1/models/mlp:predict", "{x", 400, "JSON Parse error"),
    "no object": ("/v1/models/mlp:predict", "[1]", 400, "[Ii]s not object"),
    "no inputs": ("/v1/models/mlp:predict", "{}", 400, "instances"),
    "no such signature": (
        "/v1/models/mlp:predict",
        '{"signature_name": "best", "inputs": [[0, 0, 0, 0]]}',
        400,
        '"best.?" not found',
    ),
    "words for numbers": (
        "/v1/models/mlp:predict",
        '{"inputs": [["a", 0, 0, 0]]}',
        400,
        "not of expected type",
    ),
    "ragged rows": (
        "/v1/models/mlp:predict",
        '{"inputs": [[0, 0, 0, 0], [0, 0]]}',
        400,
        "list at unexpected size: 2",
    ),
    "too few features": (
        "/v1/models/mlp:predict",
        '{"inputs": [[0]]}',
        400,
        "",
    ),
    "an input is missing": (
        "/v1/models/mlp:predict",
        '{"signature_name": "certify", "inputs": {"x": [[0, 0, 0, 0]]}}',
        400,
        "Missing named input: rho",
    ),
    "a plain list for two inputs": (
        "/v1/models/mlp:predict",
        '{"signature_name": "certify", "instances": [[0, 0, 0, 0]]}',
        400,
        "list of objects",
    ),
    "a radius too few": ("/v1/models/mlp:predict", certify_body(4, 3), 400, ""),
    "one radius for all": (
        "/v1/models/mlp:predict",
        certify_body(4, 1),
        400,
        "",
    ),
    "too many samples": (
        "/v1/models/mlp:predict",
        certify_body(17, 17),
        400,
        "17 is larger than maximum input batch size 16",
    ),
    "classify": ("/v1/models/mlp:classify", '{"examples": []}', 400, ""),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_rest_errors(ports, case):
    path, body, status, message = BAD_REQUESTS[case]
    method = "GET" if body is None else "POST"
    found = get(ports[0], path, body, method)
    assert found[0] == status, found
    assert re.search(message, found[1]["error"]), found


def test_rpc_errors(ports):
    client = load("examples/serve_client.py")
    x, rho = samples(4)

    def refused(model, signature, inputs, version=None):
        request = client.grpc_request(model, signature, inputs)
        if version is not None:
            request.model_spec.version.value = version
        with pytest.raises(grpc.RpcError) as caught:
            stub.Predict(request, 60)
        return caught.value.code().name, caught.value.details()

    with grpc.insecure_channel(f"127.0.0.1:{ports[1]}") as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        for question, code, message in (
            (("no", "certify", {"x": x}), "NOT_FOUND", "Servable not found"),
            (("mlp", "", {"x": x}, 9), "NOT_FOUND", "Specific(mlp, 9)"),
            (("mlp", "best", {"x": x}), "FAILED_PRECONDITION", "not found"),
            (
                ("mlp", "certify", {"x": x}),
                "INVALID_ARGUMENT",
                "does not match",
            ),
            (("mlp", "", {"x": x[:, :2]}), "INVALID_ARGUMENT", ""),
            (
                ("mlp", "certify", {"x": x, "rho": rho[:1]}),
                "INVALID_ARGUMENT",
                "",
            ),
        ):
            found = refused(*question)
            assert found[0] == code and message in found[1], found
        request = client.grpc_request("mlp", "", {"x": x})
        request.inputs["x"].CopyFrom(tf.make_tensor_proto(x.astype("float64")))
        with pytest.raises(grpc.RpcError) as caught:
            stub.Predict(request, 60)
        assert caught.value.code().name == "INVALID_ARGUMENT"
        # And the next request finds all as it was.
        request = client.grpc_request("mlp", "", {"x": x})
        request.output_filter.append("class")
        assert set(stub.Predict(request, 60).outputs) == {"class"}


# Versions --------------------------------------------------------------------


def plain_export(path, **settings):
    return keras_rub.export(
        small_mlp(4), path, signatures=["serving_default"], **settings
    )


def states(server, name):
    records = server.repository.records(name)
    return {version: record.state for version, record in records.items()}


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_versions_come_and_go(tmp_path):
    """A new one takes over; the old one ends what it has, then goes."""
    models = tmp_path / "models"
    plain_export(models / "a")
    with DevelopmentServer(models, 0, 0, poll_seconds=0.05) as server:
        assert server.repository.names() == {"a": [1]}
        with server.repository.use("a") as old:
            plain_export(models / "a")
            until(lambda: states(server, "a").get(2) == "AVAILABLE")
            until(lambda: states(server, "a")[1] == "UNLOADING")
            with server.repository.use("a") as new:
                assert new.version == 2
            x = tf.zeros([1, 4])
            assert old.version == 1 and old.run("", {"x": x})
            assert states(server, "a")[1] == "UNLOADING"
        until(lambda: states(server, "a")[1] == "END")
        # A broken one is passed over, and said to be.
        (models / "a" / "3").mkdir()
        (models / "a" / "3" / "saved_model.pb").write_bytes(b"\x00broken")
        until(lambda: states(server, "a").get(3) == "END")
        assert server.repository.records("a")[3].error
        assert server.repository.names() == {"a": [2]}
        plain_export(models / "b")  # a new model
        until(lambda: "b" in server.repository.names())


def test_configuration_file(tmp_path):
    """Policies, labels, a mount, and a file that is mended later."""
    models = tmp_path / "models"
    for _ in range(2):
        plain_export(models / "a")
    config = serving.write_config(models)  # mounted at /models
    text = config.read_text()
    with DevelopmentServer(models, 0, 0, poll_seconds=0.05) as server:
        assert server.repository.names() == {"a": [2]}
        policy = (
            "    model_version_policy {\n"
            "      specific { versions: 1 versions: 2 }\n"
            "    }\n"
            '    version_labels { key: "stable" value: 1 }\n'
        )
        config.write_text("model_config_list { config {")  # half written
        time.sleep(0.2)
        assert server.repository.names() == {"a": [2]}
        config.write_text(text.replace("  }\n", f"{policy}  }}\n"))
        until(lambda: server.repository.names() == {"a": [1, 2]})
        path = "/v1/models/a/labels/stable"
        status, answer = get(server.rest_api_port, path)
        assert answer["model_version_status"][0]["version"] == "1", status
        assert get(server.rest_api_port, f"{path}:predict", GOOD)[0] == 200
    with pytest.raises(ValueError, match="is no models.config"):
        config.write_text("nonsense")
        DevelopmentServer(models, 0, 0).start()
    with pytest.raises(ValueError, match="`models` must be a folder"):
        DevelopmentServer(tmp_path / "none")


def test_documented_flags(folder, tmp_path, capsys):
    """The server's flags of the Docker commands mean the same to `serve`."""
    commands = documented_lines("docker")
    assert len(commands) == 3
    for words in commands:
        image = words.index("tensorflow/serving")
        mount = words[words.index("-v") + 1]
        assert mount.endswith((":/models", ":/models/iris"))
        command._parse(serve.FLAGS, [f"--models={folder}", *words[image + 1 :]])
    serving.write_config(folder)  # as the documented mount has it
    stopped = threading.Event()
    stopped.set()
    command._parse(
        serve.FLAGS,
        [
            f"--models={folder}",
            *(
                word
                for word in commands[0][
                    commands[0].index("tensorflow/serving") :
                ]
                if word.startswith("--")
            ),
            *("--port=0", "--rest_api_port=0"),
        ],
    )
    serve.run(stopped)
    printed = capsys.readouterr().out
    assert "mlp: version 1" in printed and "for development only" in printed
    serving.write_config(folder, mounted_at=folder)
    assert serve.main([str(tmp_path / "none")]) == 1
    assert "must be a folder" in capsys.readouterr().err


def test_the_extra_is_named(tmp_path, monkeypatch):
    from keras_rub.serving.development import server

    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"waitress.*keras-rub\[serving\]"):
        DevelopmentServer(tmp_path)


def test_predict_response_names_the_version(ports):
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "mlp"
    request.inputs["x"].CopyFrom(tf.make_tensor_proto(samples(2)[0]))
    with grpc.insecure_channel(f"127.0.0.1:{ports[1]}") as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        spec = stub.Predict(request, 60).model_spec
    assert (spec.name, spec.version.value) == ("mlp", 1)
    assert spec.signature_name == "serving_default"
