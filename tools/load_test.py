"""Puts a server under load on this machine and checks every answer.

    python tools/load_test.py --seconds 60 --out out/load.json

Starts `keras-rub serve`, lets clients ask for classes, certificates and radii
by gRPC and REST, mixes bad requests in, and exports a new version, with other
weights, every few seconds meanwhile. An answer must be that of
`keras_rub.certify` and `keras_rub.certified_radius` for the version that gave
it. Fails if one is wrong, a connection drops or an old version is not drained.
"""

import collections
import functools
import http.client
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import keras
import numpy as np
from absl import app, flags, logging

import keras_rub
from keras_rub import datasets, models, tables
from keras_rub.files import replacing, write_json

_SECONDS = flags.DEFINE_float("seconds", 60.0, "How long, at most 600.")
_CLIENTS = flags.DEFINE_integer("clients", 16, "How many, at most 64.")
_EVERY = flags.DEFINE_float("every", 5.0, "Seconds from export to export.")
_BAD = flags.DEFINE_float("bad", 0.1, "The share of bad requests.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the order of the requests.")
_OUT = flags.DEFINE_string("out", "out/load.json", "Where to write figures.")
_EXPORTER = flags.DEFINE_string(
    "exporter", None, "Internal: export to this folder until told to stop."
)

_RHO = 0.5
_BATCHES = (1, 4, 16)
_LIMIT = 32
_SETTINGS = {"norm": 1, "method": "rub", "input_range": (0.0, 1.0)}
_KINDS = {
    "predict": "serving_default",
    "certify": "certify",
    "radius": "certified_radius",
}


@functools.cache
def digits():
    """The test digits that are sent."""
    return datasets.load("digits").test[0][: max(_BATCHES)].astype("float32")


def inputs_of(kind, count):
    """The inputs of one request."""
    x = digits()[:count]
    rho = {"rho": np.full(count, _RHO, "float32")} if kind == "certify" else {}
    return {"x": x, **rho}


# A new version every few seconds ---------------------------------------------


def export_versions(folder):
    """Exports versions until standard input ends.

    What a version must answer is written before it appears.
    """
    logging.set_verbosity(logging.WARNING)
    keras.utils.set_random_seed(_SEED.value)
    data = datasets.load("digits")
    base = models.mlp(data.input_shape, data.num_classes, hidden=(32,))
    base.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    stopped = threading.Event()
    threading.Thread(
        target=lambda: (sys.stdin.read(), stopped.set()), daemon=True
    ).start()
    version = 0
    while not stopped.is_set():
        started = time.monotonic()
        version += 1
        base.fit(*data.train, batch_size=64, verbose=0)  # other weights
        with replacing(folder / "expected" / f"{version}.npz") as partial:
            np.savez(partial, **expected_answers(base))
        keras_rub.export(
            base,
            folder / "models" / "digits",
            version,
            max_batch_size=_LIMIT,
            **_SETTINGS,
        )
        stopped.wait(max(_EVERY.value - (time.monotonic() - started), 0.0))
    print(version)


def expected_answers(base):
    """The answers to all requests by the Python functions, by name."""
    x = inputs_of("predict", max(_BATCHES))["x"]
    found = keras_rub.certify(base, x, rho=_RHO, verbose=0, **_SETTINGS)
    radius = keras_rub.certified_radius(base, x, verbose=0, **_SETTINGS)
    return {
        "predict": np.asarray(base(x)),
        "certify": found.certified,
        "radius": radius,
    }


# Clients ---------------------------------------------------------------------

# What an answer is compared by.
_OUTPUT = {"predict": "logits", "certify": "certified", "radius": "radius"}

# From a mistake to what it does to a good certify request.
_MISTAKES = {
    "radii of another length": lambda request: request["inputs"].update(
        rho=[0.5] * (len(request["inputs"]["x"]) + 1)
    ),
    "too many samples": lambda request: request["inputs"].update(
        x=[[0.0] * 64] * (_LIMIT + 1), rho=[0.5] * (_LIMIT + 1)
    ),
    "no such signature": lambda request: request.update(signature_name="best"),
    "too few features": lambda request: request["inputs"].update(
        x=[[0.0]], rho=[0.5]
    ),
    "words": lambda request: request["inputs"].update(x="nonsense"),
}


class Client(threading.Thread):
    """One client: asks until the time is over, and keeps a record."""

    def __init__(self, number, folder, ports, deadline):
        super().__init__()
        self.rng = np.random.default_rng([_SEED.value, number])
        self.folder, self.deadline = folder, deadline
        self.rest_port, self.rpc_port = ports
        self.seconds = collections.defaultdict(list)
        self.counts = collections.Counter()
        self.trouble = []
        self.known = {}

    def run(self):
        import grpc
        from tensorflow_serving.apis import prediction_service_pb2_grpc

        self.rest = http.client.HTTPConnection(
            "127.0.0.1", self.rest_port, timeout=60
        )
        with grpc.insecure_channel(f"127.0.0.1:{self.rpc_port}") as channel:
            self.stub = prediction_service_pb2_grpc.PredictionServiceStub(
                channel
            )
            while time.monotonic() < self.deadline:
                try:
                    self.ask()
                except grpc.RpcError as error:
                    self.fail("dropped", error.details())
                except Exception as error:  # whatever it is, it is counted
                    self.fail("dropped", error)
                    self.rest.close()
        self.rest.close()

    def fail(self, kind, what):
        self.counts[kind] += 1
        self.trouble.append(f"{kind}: {what!r}"[:300])

    def ask(self):
        if self.rng.random() < _BAD.value:
            self.ask_badly()
            return
        kind = str(self.rng.choice(list(_KINDS)))
        count = int(self.rng.choice(_BATCHES))
        protocol = str(self.rng.choice(["grpc", "rest"]))
        inputs = inputs_of(kind, count)
        versions = set(self.versions())
        started = time.perf_counter()
        if protocol == "grpc":
            version, found = self.by_grpc(kind, inputs)
        else:
            version, found = None, self.by_rest(kind, inputs)
        self.seconds[kind].append(time.perf_counter() - started)
        # REST doesn't say which version answered: one that was there.
        versions |= set(self.versions())
        allowed = {version} if version is not None else versions
        if any(self.fits(kind, found, number) for number in allowed):
            self.counts["right"] += 1
        else:
            self.fail("wrong", (protocol, kind, count, version))

    def versions(self):
        names = (path.stem for path in (self.folder / "expected").iterdir())
        return (int(name) for name in names if name.isdecimal())

    def fits(self, kind, found, version):
        if version not in self.known:
            path = self.folder / "expected" / f"{version}.npz"
            self.known[version] = dict(np.load(path))
        wanted = self.known[version][kind][: len(found)]
        return np.allclose(found, wanted, rtol=1e-4, atol=1e-4)

    def by_grpc(self, kind, inputs):
        import tensorflow as tf
        from tensorflow_serving.apis import predict_pb2

        request = predict_pb2.PredictRequest()
        request.model_spec.name = "digits"
        request.model_spec.signature_name = _KINDS[kind]
        for name, value in inputs.items():
            request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
        answer = self.stub.Predict(request, 60)
        found = tf.make_ndarray(answer.outputs[_OUTPUT[kind]])
        return answer.model_spec.version.value, found

    def by_rest(self, kind, inputs):
        body = {
            "signature_name": _KINDS[kind],
            "inputs": {name: value.tolist() for name, value in inputs.items()},
        }
        status, answer = self.post(json.dumps(body))
        if status != 200:
            raise http.client.HTTPException(f"{status}: {answer}")
        return np.asarray(answer["outputs"][_OUTPUT[kind]])

    def ask_badly(self):
        name = str(self.rng.choice([*_MISTAKES, "no JSON"]))
        inputs = {k: v.tolist() for k, v in inputs_of("certify", 4).items()}
        request = {"signature_name": "certify", "inputs": inputs}
        if name != "no JSON":
            _MISTAKES[name](request)
        body = "{" if name == "no JSON" else json.dumps(request)
        status, answer = self.post(body)
        if status == 400 and answer.get("error"):
            self.counts["refused"] += 1
        else:
            self.fail("not refused", (name, status, answer))

    def post(self, body):
        self.rest.request("POST", "/v1/models/digits:predict", body)
        answer = self.rest.getresponse()
        return answer.status, json.load(answer)


# The run ---------------------------------------------------------------------


def run_load(folder):
    """Starts all, waits for the end, returns the figures."""
    (folder / "models").mkdir()
    (folder / "expected").mkdir()
    here = pathlib.Path(__file__)
    exporter = subprocess.Popen(
        [
            sys.executable,
            str(here),
            f"--exporter={folder}",
            f"--every={_EVERY.value}",
            f"--seed={_SEED.value}",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    server = None
    try:
        while not (folder / "models" / "digits" / "1").exists():
            if exporter.poll() is not None:
                raise RuntimeError("The exporter ended.")
            time.sleep(0.1)
        server = subprocess.Popen(
            [
                sys.executable,
                str(here.with_name("serve.py")),
                str(folder / "models"),
                "--port=0",
                "--rest_api_port=0",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        ports = ports_of(server)
        digits()  # not in the time of a request
        deadline = time.monotonic() + _SECONDS.value
        clients = [
            Client(number, folder, ports, deadline)
            for number in range(_CLIENTS.value)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        shown, _ = exporter.communicate("", timeout=120)
        newest = int(shown.split()[-1])
        states = wait_until_drained(ports[0], newest)
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    finally:
        for process in (exporter, server):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
    return {"exported": newest, **figures(clients, states, code)}


def ports_of(server):
    """The REST and gRPC ports that the server prints."""
    for line in server.stdout:
        if line.startswith("REST at"):
            rest = line.split("127.0.0.1:")[1].split("/")[0]
            return int(rest), int(line.split("127.0.0.1:")[2].split(";")[0])
    raise RuntimeError("The server did not start.")


def wait_until_drained(port, newest):
    """The states by version, once the newest one alone is available."""
    url = f"http://127.0.0.1:{port}/v1/models/digits"
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(url, timeout=60) as answer:
            rows = json.load(answer)["model_version_status"]
        states = {int(row["version"]): row["state"] for row in rows}
        done = {
            version: "AVAILABLE" if version == newest else "END"
            for version in states
        }
        if (states == done and newest in states) or time.monotonic() > deadline:
            return states
        time.sleep(0.2)


def figures(clients, states, code):
    """What the clients saw, as one record."""
    counts = collections.Counter()
    seconds = collections.defaultdict(list)
    for client in clients:
        counts.update(client.counts)
        for kind, values in client.seconds.items():
            seconds[kind] += values
    newest = max(states)
    return {
        "clients": len(clients),
        "seconds": _SECONDS.value,
        "requests": sum(map(len, seconds.values())) + counts["refused"],
        **{
            name: counts[name]
            for name in ("right", "wrong", "refused", "not refused", "dropped")
        },
        "served_versions": len(states),
        "not_drained": sum(
            state != ("AVAILABLE" if version == newest else "END")
            for version, state in states.items()
        ),
        "server_exit_code": code,
        "latency_ms": {
            kind: {
                "requests": len(values),
                **{
                    name: round(1e3 * float(np.quantile(values, q)), 1)
                    for name, q in (
                        ("median", 0.5),
                        ("p95", 0.95),
                        ("p99", 0.99),
                        ("largest", 1.0),
                    )
                },
            }
            for kind, values in sorted(seconds.items())
        },
        "trouble": [text for client in clients for text in client.trouble][:20],
    }


def main(argv):
    del argv
    if _EXPORTER.value:
        export_versions(pathlib.Path(_EXPORTER.value))
        return
    for flag, largest in ((_SECONDS, 600), (_CLIENTS, 64)):
        if not 0 < flag.value <= largest:
            raise app.UsageError(
                f"--{flag.name} must be above 0 and at most {largest}. "
                f"Received: {flag.value}"
            )
    with tempfile.TemporaryDirectory() as folder:
        found = run_load(pathlib.Path(folder))
    write_json(_OUT.value, found, indent=2)
    for name, value in found.items():
        if not isinstance(value, (dict, list)):
            print(f"{name}: {value}")
    header = ["request", "number", "median", "p95", "p99", "largest"]
    cells = [
        [kind, *map(str, row.values())]
        for kind, row in found["latency_ms"].items()
    ]
    print(f"milliseconds\n{tables.to_text(header, cells)}")
    print("\n".join(found["trouble"]))
    bad = [
        name
        for name in ("wrong", "not refused", "dropped", "not_drained")
        + ("server_exit_code",)
        if found[name]
    ]
    if bad or not found["right"]:
        sys.exit(f"load test failed: {', '.join(bad) or 'no answers'}")
    print(f"written to {_OUT.value}")


if __name__ == "__main__":
    app.run(main)
