"""Exported models: their numbers, their files, and how an export fails."""

import ast
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_rub
from keras_rub import serving
from keras_rub.loading import load_model
from tests.calling import call, refused
from tests.test_tools import run as run_loaded

STOCK = ("serving_default", "certify", "certified_radius")


@pytest.fixture(autouse=True)
def no_scripts_left():
    """Scripts share flag names: each is imported anew for the next user."""
    yield
    for name in [name for name in sys.modules if name.startswith("script_")]:
        del sys.modules[name]


def run(path, capsys, **values):
    """Imports a script anew and runs it; returns what it printed."""
    sys.modules.pop(f"script_{pathlib.Path(path).stem}", None)
    return run_loaded(path, capsys, **values)


def small_cnn():
    return keras.Sequential(
        [
            keras.layers.Input((6, 6, 1)),
            keras.layers.Conv2D(3, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dense(3),
        ],
        name="small_cnn",
    )


def small_mlp(features=6):
    return keras_rub.models.mlp((features,), 3, hidden=(12, 8))


# What is exported in this module: name -> model, settings of the certificates.
CASES = {
    "mlp": (lambda: small_mlp(4), {"norm": 1, "method": "rub"}),
    "cnn": (
        small_cnn,
        {"norm": 1, "method": "rub", "input_range": (0.0, 1.0)},
    ),
    "linf": (small_mlp, {"norm": "inf", "method": "crown"}),
}
# Of the bisection; all cases find radii on both sides of it.
LARGEST = 0.3
LARGEST_BATCH = 80


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The models and the folder with all of them exported."""
    keras.utils.set_random_seed(0)
    folder = tmp_path_factory.mktemp("models")
    models = {}
    for name, (make, settings) in CASES.items():
        models[name] = make()
        keras_rub.export(
            models[name],
            folder / name,
            max_radius=LARGEST,
            max_batch_size=LARGEST_BATCH,
            **settings,
        )
    serving.write_config(folder, mounted_at=folder)
    return models, folder


def samples(model, count):
    rng = np.random.default_rng(count)
    x = rng.random((count, *model.input_shape[1:])).astype("float32")
    return x, (rng.random(count) * 0.4).astype("float32")


def expected(model, x, rho, settings, signatures=STOCK):
    """The answers of the signatures by the Python API."""
    logits = np.asarray(model(x))
    result = keras_rub.certify(model, x, rho=rho, verbose=0, **settings)
    others = np.where(
        np.eye(result.margins.shape[1], dtype=bool)[result.labels],
        -np.inf,
        result.margins,
    )
    wanted = {
        "serving_default": {
            "logits": logits,
            "probabilities": np.asarray(tf.nn.softmax(logits)),
            "class": logits.argmax(axis=-1),
        },
        "certify": {
            "class": result.predicted,
            "certified": result.certified,
            "margin": others.max(axis=-1),
        },
    }
    if "certified_radius" in signatures:
        radius = keras_rub.certified_radius(
            model, x, max_radius=LARGEST, verbose=0, **settings
        )
        wanted["certified_radius"] = {
            "class": result.predicted,
            "radius": radius,
        }
    return wanted


def assert_same(found, wanted):
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(
            np.asarray(found[name]), value, rtol=1e-5, atol=1e-5, err_msg=name
        )


def inputs_of(signature, x, rho):
    return {"x": x, "rho": rho} if signature == "certify" else {"x": x}


# Numbers ---------------------------------------------------------------------

WITHOUT_LIBRARY = """
import json, sys
sys.modules["keras_rub"] = None  # an import of it fails from here on
import numpy as np
import tensorflow as tf
folder, cases = sys.argv[1], json.loads(sys.argv[2])
data, found = np.load(folder + "/inputs.npz"), {}
models = {}
for case in cases:
    name, count = case.split("-")
    if name not in models:
        models[name] = tf.saved_model.load(f"{folder}/{name}/1")
    served = models[name]
    x, rho = tf.constant(data[case + "-x"]), tf.constant(data[case + "-rho"])
    for key, function in served.signatures.items():
        inputs = {"x": x, "rho": rho} if key == "certify" else {"x": x}
        for output, value in function(**inputs).items():
            found[f"{case}-{key}-{output}"] = value.numpy()
assert not any(n.split(".")[0] == "keras_rub" and m
               for n, m in sys.modules.items())
np.savez(folder + "/outputs.npz", **found)
"""


def clean_environment():
    return {
        key: value for key, value in os.environ.items() if key != "PYTHONPATH"
    }


@pytest.mark.medium
def test_same_numbers_without_the_library(exported, tmp_path):
    """In a new interpreter; at several batch sizes, a radius a sample."""
    models, folder = exported
    inputs, wanted = {}, {}
    for name, (_, settings) in CASES.items():
        for count in (1, 5, 70):
            x, rho = samples(models[name], count)
            case = f"{name}-{count}"
            inputs[f"{case}-x"], inputs[f"{case}-rho"] = x, rho
            wanted[case] = expected(models[name], x, rho, settings)
    np.savez(folder / "inputs.npz", **inputs)
    subprocess.run(
        [
            sys.executable,
            *("-I", "-c", WITHOUT_LIBRARY),
            *(str(folder), json.dumps(list(wanted))),
        ],
        check=True,
        cwd=tmp_path,
        env=clean_environment(),
    )
    found = np.load(folder / "outputs.npz")
    for case, by_signature in wanted.items():
        assert set(by_signature) == set(STOCK)
        for signature, outputs in by_signature.items():
            assert_same(
                {name: found[f"{case}-{signature}-{name}"] for name in outputs},
                outputs,
            )
    # The radii are not all on one side.
    shares = [found[f"{name}-70-certify-certified"].mean() for name in CASES]
    assert all(0.1 < share < 0.99 for share in shares), shares
    for name in CASES:
        radius = found[f"{name}-70-certified_radius-radius"]
        assert radius.min() < LARGEST and radius.max() <= LARGEST + 1e-6


@pytest.fixture(scope="module")
def served(exported):
    _, folder = exported
    return {
        name: tf.saved_model.load(str(folder / name / "1")) for name in CASES
    }


def test_bad_samples_are_not_certified(exported, served):
    """And change nothing for the others of the batch."""
    models, _ = exported
    x, _ = samples(models["cnn"], 6)
    rho = np.full(6, 1e-4, "float32")
    good = served["cnn"].signatures["certify"](x=x, rho=rho)
    good_radius = served["cnn"].signatures["certified_radius"](x=x)
    assert good["certified"].numpy().all()
    bad_x, bad_rho = x.copy(), rho.copy()
    bad_x[0, 0, 0, 0] = np.nan
    bad_x[1, 1, 1, 0] = np.inf
    bad_x[2, 2, 2, 0] = 1.5  # outside the valid range
    bad_rho[3], bad_rho[4] = -0.1, np.nan
    found = served["cnn"].signatures["certify"](x=bad_x, rho=bad_rho)
    np.testing.assert_array_equal(found["certified"], [False] * 5 + [True])
    np.testing.assert_array_equal(np.isinf(found["margin"]), [True] * 5 + [0])
    np.testing.assert_array_equal(found["class"][:2], [-1] * 2)
    np.testing.assert_array_equal(found["class"][3:], good["class"][3:])
    np.testing.assert_allclose(found["margin"][5], good["margin"][5], 1e-6)
    radius = served["cnn"].signatures["certified_radius"](x=bad_x)["radius"]
    np.testing.assert_array_equal(radius[:3], [0.0] * 3)
    np.testing.assert_allclose(radius[3:], good_radius["radius"][3:], 1e-6)
    predicted = served["cnn"].signatures["serving_default"](x=bad_x)
    np.testing.assert_array_equal(predicted["class"], found["class"])


def test_no_batch_and_infinite_radius(served):
    for name in ("mlp", "cnn"):
        signatures = served[name].signatures
        shape = signatures["serving_default"].structured_input_signature[1]["x"]
        x = tf.zeros([0, *shape.shape[1:]])
        assert signatures["certify"](x=x, rho=tf.zeros([0]))["class"].shape == 0
        assert signatures["certified_radius"](x=x)["radius"].shape == 0
        x = tf.zeros([2, *shape.shape[1:]])
        found = signatures["certify"](x=x, rho=tf.constant([1e38, np.inf]))
        assert not found["certified"].numpy().any()


@pytest.mark.parametrize(
    ("samples", "radii"), [(4, 1), (4, 5), (4, 2), (1, 4), (0, 1), (2, 0)]
)
def test_radii_of_another_length_are_refused(served, samples, radii):
    """Never broadcast, never cut; also where a chunk would fit."""
    certify = served["mlp"].signatures["certify"]
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=rf"`rho` must hold one radius for each sample.*"
        rf"\[{radii}\] \[{samples}\]",
    ):
        certify(x=tf.zeros([samples, 4]), rho=tf.zeros([radii]))


def test_large_batches_are_refused(served):
    """By certificates; a prediction takes any."""
    signatures = served["mlp"].signatures
    x = tf.zeros([LARGEST_BATCH, 4])
    assert signatures["certified_radius"](x=x)["class"].shape == LARGEST_BATCH
    x = tf.zeros([LARGEST_BATCH + 1, 4])
    for name, inputs in (
        ("certify", {"rho": tf.zeros([LARGEST_BATCH + 1])}),
        ("certified_radius", {}),
    ):
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=f"at most {LARGEST_BATCH} samples.*{LARGEST_BATCH + 1}",
        ):
            signatures[name](x=x, **inputs)
    assert signatures["serving_default"](x=x)["class"].shape == len(x)


def test_overflow_is_not_certified(tmp_path):
    """Weights so large that the bound is NaN or infinite."""
    base = small_mlp()
    base.set_weights([w * 1e13 for w in base.get_weights()])
    folder = keras_rub.export(base, tmp_path / "huge", signatures=["certify"])
    loaded = tf.saved_model.load(str(folder))
    x, _ = samples(base, 4)
    found = loaded.signatures["certify"](x=x * 1e10, rho=tf.ones(4))
    assert not found["certified"].numpy().any()
    assert not np.isnan(found["margin"]).any()


def test_only_stock_operations(exported):
    from tensorflow.core.protobuf import saved_model_pb2

    _, folder = exported
    for name in CASES:
        proto = saved_model_pb2.SavedModel()
        proto.ParseFromString((folder / name / "1/saved_model.pb").read_bytes())
        (graph,) = [meta.graph_def for meta in proto.meta_graphs]
        operations = {node.op for node in graph.node}
        for function in graph.library.function:
            operations |= {node.op for node in function.node_def}
        assert len(operations) > 20 and "While" in " ".join(operations)
        assert not any("PyFunc" in operation for operation in operations)
        for operation in operations:
            assert hasattr(tf.raw_ops, operation) or operation in (
                {function.signature.name for function in graph.library.function}
            ), operation


def test_chunks_and_limits(tmp_path):
    """A small memory budget, a mask, weights: the same numbers."""
    base = small_mlp()
    settings = {
        "norm": 1,
        "method": "rub",
        "mask": [True] * 5 + [False],
        "weights": [1.0, 2.0, 1.0, 0.5, 1.0, 1.0],
    }
    folder = keras_rub.export(
        base,
        tmp_path / "limits",
        signatures=["certify"],
        memory_budget=5000,
        **settings,
    )
    x, rho = samples(base, 33)
    wanted = expected(base, x, rho, settings, ["certify"])["certify"]
    certify = tf.saved_model.load(str(folder)).signatures["certify"]
    assert_same(certify(x=x, rho=rho), wanted)
    facts = serving.read_metadata(folder)["certificates"]
    assert facts["mask"] == settings["mask"]
    assert facts["weights"] == settings["weights"]


def test_preprocessing_is_served(tmp_path):
    """The radius is then in the units of what the client sends."""
    model = keras_rub.ARUBModel(small_mlp(), rho=0.2, norm="inf")
    folder = keras_rub.export(
        model,
        tmp_path / "scaled",
        signatures=["serving_default", "certify"],
        preprocessing=keras.layers.Rescaling(1 / 255.0, offset=-0.5),
        input_range=(0.0, 255.0),
    )
    x, rho = samples(model, 5)
    loaded = tf.saved_model.load(str(folder)).signatures
    found = loaded["certify"](x=x * 255.0, rho=rho * 25.5)
    wanted = expected(
        model.base,
        x - 0.5,
        rho / 10,
        {"norm": "inf", "method": "crown", "input_range": (-0.5, 0.5)},
        ["serving_default", "certify"],
    )
    np.testing.assert_allclose(
        found["margin"], wanted["certify"]["margin"], rtol=1e-4, atol=1e-5
    )
    logits = loaded["serving_default"](x=x * 255.0)["logits"]
    np.testing.assert_allclose(
        logits, wanted["serving_default"]["logits"], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(load_model(folder)(x * 255.0), logits, 1e-5)


def test_free_image_size(tmp_path):
    x = keras.Input((None, None, 1))
    h = keras.layers.Conv2D(4, 3, activation="relu")(x)
    h = keras.layers.GlobalAveragePooling2D()(h)
    model = keras.Model(x, keras.layers.Dense(3)(h))
    with pytest.raises(ValueError, match="fixed shape.*None, None, 1"):
        keras_rub.export(model, tmp_path / "free")
    assert not (tmp_path / "free").exists()
    folder = keras_rub.export(model, tmp_path / "free", None, "serving_default")
    predict = tf.saved_model.load(str(folder)).signatures["serving_default"]
    for size in (5, 9):
        image = np.ones((2, size, size, 1), "float32")
        np.testing.assert_allclose(
            predict(x=image)["logits"], model(image), rtol=1e-5, atol=1e-6
        )


# Versions and failures -------------------------------------------------------


def quick_export(path, **settings):
    return keras_rub.export(
        small_mlp(), path, signatures=["serving_default"], **settings
    )


def test_versions(tmp_path):
    path = tmp_path / "deep" / "digits"
    assert quick_export(path).name == "1"
    assert quick_export(path).name == "2"
    assert quick_export(path, version=7).name == "7"
    before = (path / "7" / "saved_model.pb").read_bytes()
    with pytest.raises(ValueError, match="`version` 7 .* exists already"):
        quick_export(path, version=7)
    assert (path / "7" / "saved_model.pb").read_bytes() == before
    assert quick_export(path).name == "8"
    (path / "9").write_text("not a model, but in use")
    assert quick_export(path).name == "10"
    assert sorted(p.name for p in path.iterdir()) == sorted(
        ["1", "2", "7", "8", "9", "10"]
    )
    for wrong in (0, -1, "3", 1.5, True):
        with pytest.raises(ValueError, match="`version` must be a whole"):
            quick_export(path, version=wrong)


def test_two_exports_at_once(tmp_path):
    """Of the same number: one wins, the other is told; or takes the next."""
    from keras_rub.serving import versions

    def publish(version):
        with versions.hidden_folder(tmp_path) as hidden:
            (hidden / "saved_model.pb").write_text("x")
            barrier.wait()
            return versions.publish(hidden, tmp_path, version).name

    barrier = threading.Barrier(8)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        names = list(pool.map(publish, [None] * 8))
    assert sorted(map(int, names)) == list(range(1, 9))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(publish, 20) for _ in range(8)]
    errors = [job.exception() for job in jobs if job.exception()]
    assert len(errors) == 7
    assert all("exists already" in str(error) for error in errors)


def test_failure_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "digits"

    def full_disk(module, folder, **kwargs):
        (pathlib.Path(folder) / "saved_model.pb").write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setattr(tf.saved_model, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        quick_export(path)
    assert list(path.iterdir()) == []
    monkeypatch.undo()
    # Later, when all but the number is there.
    monkeypatch.setattr(os, "fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quick_export(path)
    assert list(path.iterdir()) == []


KILLED = """
import sys, time, pathlib, tensorflow as tf, keras_rub
save = tf.saved_model.save
def slow(module, folder, **kwargs):
    save(module, folder, **kwargs)
    pathlib.Path(sys.argv[2]).write_text(folder)
    time.sleep(600)
tf.saved_model.save = slow
keras_rub.export(keras_rub.models.mlp((4,), 2, (4,)), sys.argv[1],
                 signatures=["serving_default"])
"""


@pytest.mark.medium
def test_killed_export_leaves_no_version(tmp_path):
    path, mark = tmp_path / "digits", tmp_path / "mark"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path), str(mark)]
    )
    try:
        deadline = time.monotonic() + 120
        while not mark.exists() and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = [child.name for child in path.iterdir()]
    assert len(left) == 1 and left[0].startswith(".export-")
    assert not left[0].isdigit()
    with pytest.raises(ValueError, match="no SavedModel"):
        load_model(path)
    with pytest.raises(ValueError, match="not written by keras_rub.export"):
        serving.read_metadata(path)
    # The next one starts at 1, as if nothing had been.
    assert quick_export(path).name == "1"


def test_errors(tmp_path):
    path = tmp_path / "digits"

    def wrong(error, message, model=None, where=path, **settings):
        with pytest.raises(error, match=message):
            keras_rub.export(model or small_mlp(), where, **settings)
        assert not path.exists()

    unbuilt = keras.Sequential([keras.layers.Dense(3)])
    wrong(ValueError, "is not built yet", unbuilt)
    wrong(TypeError, "must be a robust model or a keras.Model", "model")
    (tmp_path / "file").write_text("")
    wrong(
        ValueError,
        "`path` must name a folder that can be written.*Not a directory",
        where=tmp_path / "file" / "digits",
        signatures=["serving_default"],
    )
    wrong(ValueError, "must be a local folder", where="gs://bucket/digits")
    wrong(ValueError, "must be some of.*'explain'", signatures=["explain"])
    wrong(ValueError, "must be some of", signatures=[])
    wrong(ValueError, '`norm` must be 1, 2 or "inf"', norm=3)
    wrong(ValueError, "`rub` can.t do norm 2", norm=2, method="rub")
    wrong(ValueError, "`auto` searches, which a graph can't", method="auto")
    wrong(ValueError, "`method` must be one of .*'lp'", method="lp")
    wrong(ValueError, "low < high", input_range=(1.0, 0.0))
    wrong(ValueError, "`mask` must broadcast", mask=[True, False])
    wrong(ValueError, "`tolerance` must be above 0", tolerance=0.0)
    wrong(ValueError, "`max_radius` must be above 0", max_radius=0.0)
    wrong(ValueError, "`memory_budget` is too small", memory_budget=1)
    wrong(ValueError, "must not hold .'versions'.", metadata={"versions": 1})
    wrong(ValueError, "only what JSON can", metadata={"x": np.zeros(2)})
    wrong(ValueError, "`warmup` must hold inputs", warmup=np.zeros((2, 5)))
    wrong(TypeError, "`preprocessing` must be a Keras", preprocessing=len)
    image = keras.Sequential(
        [keras.layers.Input((4, 4, 1)), keras.layers.Conv2D(2, 3)]
    )
    wrong(ValueError, r"probabilities \[batch, K\]", image)
    two = [keras.Input((4,)), keras.Input((4,))]
    two = keras.Model(two, keras.layers.Dense(3)(keras.layers.Add()(two)))
    wrong(ValueError, "`perturb` must name the one input", two)
    other = {"perturb": two.inputs[0].name, "preprocessing": image}
    wrong(ValueError, "`preprocessing` can stand before", two, **other)


class Subclassed(keras.Model):
    """Its layers can't be read one by one."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(tf.identity(x))


def test_unsupported_layers(tmp_path):
    """Certificates are left out only when asked so."""
    softmax = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(5, "softmax", name="middle"),
            keras.layers.Dense(3),
        ]
    )
    subclassed = Subclassed()
    subclassed(np.zeros((1, 4), "float32"))
    x = np.ones((2, 4), "float32")
    for model, word in ((softmax, "middle"), (subclassed, "Subclassed")):
        path = tmp_path / word
        with pytest.raises(
            keras_rub.UnsupportedLayerError,
            match=rf'{word}.*signatures=\("serving_default",\)',
        ):
            keras_rub.export(model, path)
        assert not path.exists()
        folder = keras_rub.export(model, path, signatures=["serving_default"])
        loaded = tf.saved_model.load(str(folder))
        assert set(loaded.signatures) == {"serving_default"}
        np.testing.assert_allclose(
            loaded.signatures["serving_default"](x=x)["logits"], model(x), 1e-5
        )


# Files -----------------------------------------------------------------------


def test_metadata(tmp_path):
    model = keras_rub.RUBModel(small_mlp(), rho=0.25)
    rows = [{"norm": 1, "rho": 0.2, "clean": 0.9, "certified": 0.5}]
    folder = keras_rub.export(
        model,
        tmp_path / "iris",
        signatures=["certify"],
        metadata={"dataset": "iris", "accuracy": rows},
        max_radius=2.0,
    )
    facts = serving.read_metadata(tmp_path / "iris")
    assert facts == serving.read_metadata(folder)
    assert facts["defense"] == "RUBModel"
    assert (facts["norm"], facts["rho"]) == (1, 0.25)
    assert facts["dataset"] == "iris" and facts["accuracy"] == rows
    assert facts["versions"] == {
        "keras_rub": keras_rub.__version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }
    assert facts["signatures"] == ["certify"]
    assert facts["input_shape"] == [6] and facts["num_classes"] == 3
    assert facts["certificates"]["method"] == "rub"
    assert facts["certificates"]["max_radius"] == 2.0


def test_warmup_requests_can_be_replayed(exported, served):
    prediction_log_pb2 = pytest.importorskip(
        "tensorflow_serving.apis.prediction_log_pb2"
    )
    _, folder = exported
    path = folder / "mlp/1/assets.extra/tf_serving_warmup_requests"
    names = []
    for record in tf.data.TFRecordDataset(str(path)):
        log = prediction_log_pb2.PredictionLog.FromString(record.numpy())
        request = log.predict_log.request
        assert request.model_spec.name == "mlp"
        names.append(request.model_spec.signature_name)
        inputs = {
            key: tf.constant(tf.make_ndarray(value))
            for key, value in request.inputs.items()
        }
        outputs = served["mlp"].signatures[names[-1]](**inputs)
        assert len(outputs["class"]) == 1 and outputs["class"][0] >= 0
    assert names == list(STOCK)
    assert serving.read_metadata(folder / "mlp")["warmup_requests"]


def test_warmup_needs_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(serving.server, "can_write_warmup", lambda: False)
    x = np.zeros((2, 6), "float32")
    with pytest.warns(UserWarning, match=r"keras-rub\[serving\]"):
        folder = quick_export(tmp_path / "digits", warmup=x)
    assert not (folder / "assets.extra/tf_serving_warmup_requests").exists()
    with pytest.raises(ValueError, match="at most `max_batch_size` samples"):
        quick_export(tmp_path / "digits", warmup=x, max_batch_size=1)
    assert not serving.read_metadata(folder)["warmup_requests"]


def test_server_configuration(exported, tmp_path):
    model_server_config_pb2 = pytest.importorskip(
        "tensorflow_serving.config.model_server_config_pb2"
    )
    from google.protobuf import text_format

    _, folder = exported
    config = text_format.Parse(
        (folder / "models.config").read_text(),
        model_server_config_pb2.ModelServerConfig(),
    )
    entries = config.model_config_list.config
    assert [entry.name for entry in entries] == sorted(CASES)
    for entry in entries:
        assert entry.base_path == f"{folder}/{entry.name}"
        assert entry.model_platform == "tensorflow"
    lines = (folder / "batching.config").read_text().splitlines()
    limit = f"max_batch_size {{ value: {LARGEST_BATCH} }}"
    assert limit in lines and len(lines) == 4
    with pytest.raises(ValueError, match="numbered versions"):
        serving.write_config(tmp_path)
    odd = tmp_path / 'a "b"'
    (odd / "1").mkdir(parents=True)
    text = serving.write_config(tmp_path).read_text()
    assert "value: 1024" in (tmp_path / "batching.config").read_text()
    config = text_format.Parse(
        text, model_server_config_pb2.ModelServerConfig()
    )
    assert config.model_config_list.config[0].name == odd.name


def saved_model_cli(*arguments):
    script = pathlib.Path(sys.executable).parent / "saved_model_cli"
    return subprocess.run(
        [str(script), *arguments],
        check=True,
        capture_output=True,
        text=True,
        env=clean_environment(),
    ).stdout


def documented_lines(word):
    """The commands of docs/serving.md that begin with this word."""
    text = pathlib.Path("docs/serving.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line for line in lines if line.startswith(f"{word} ")]
    return [shlex.split(line)[1:] for line in found]


@pytest.mark.medium
def test_saved_model_cli(exported, served):
    """The documented lines, as they stand but for the folder."""
    _, folder = exported
    commands = [
        [word.replace("models/iris/1", str(folder / "mlp/1")) for word in words]
        for words in documented_lines("saved_model_cli")
    ]
    assert [words[0] for words in commands] == ["show", "run"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        shown, ran = pool.map(lambda words: saved_model_cli(*words), commands)
    for text in (
        *(f"signature_def['{name}']" for name in STOCK),
        "inputs['rho'] tensor_info",
        "shape: (-1, 4)",
        "outputs['certified'] tensor_info",
        "outputs['probabilities'] tensor_info",
    ):
        assert text in shown, text
    (given,) = (word for word in commands[1] if word.startswith("x="))
    inputs = {
        name: tf.constant(ast.literal_eval(value))
        for name, value in (pair.split("=") for pair in given.split(";"))
    }
    found = served["mlp"].signatures["certify"](**inputs)
    for name, value in found.items():
        assert f"output key {name}:\n{value.numpy()}" in ran


# Tools and the example -------------------------------------------------------


@pytest.mark.medium
def test_commands(tmp_path, capsys):
    """Train, evaluate, export, then certify and evaluate the SavedModel."""
    out = tmp_path / "run"
    call(
        capsys,
        "train",
        dataset="iris",
        defense="rub",
        rho=0.2,
        steps=20,
        architecture="mlp1",
        out=out,
    )
    evaluation = {
        "norms": "1",
        "radii": "0.1",
        "attacks": "pgd",
        "samples": 20,
    }
    call(
        capsys,
        "evaluate",
        model=out / "model.keras",
        report=out / "report.html",
        **evaluation,
    )
    settings = {
        "model": out / "model.keras",
        "out": tmp_path / "models" / "iris",
        "signatures": "serving_default,certify",
        "report": out / "report.json",
        "input_range": "-9,9",
    }
    printed = call(capsys, "export", **settings)
    assert "models/iris/1" in printed and "models.config" in printed
    assert "attacker: L1, inputs in [-9, 9]" in printed
    facts = serving.read_metadata(tmp_path / "models" / "iris")
    assert facts["dataset"] == "iris" and facts["training"]["rho"] == 0.2
    assert facts["normalization"] == "standard"
    assert facts["units"].startswith("features standardised")
    assert facts["certificates"]["input_range"] == [-9.0, 9.0]
    (row,) = facts["accuracy"]
    assert row["rho"] == 0.1 and "certified" in row and "pgd" in row

    # The SavedModel brings data set, units and attacker along.
    tables = []
    for number, model in enumerate((out / "model.keras", settings["out"])):
        folder = tmp_path / f"certified{number}"
        printed = call(
            capsys,
            "certify",
            model=model,
            radii="0.05,0.3",
            method="rub",
            samples=20,
            out=folder,
            **({} if number else {"input_range": "-9,9"}),
        )
        assert "attacker: L1, inputs in [-9, 9]" in printed
        tables.append((folder / "results.csv").read_text())
    assert tables[0] == tables[1]
    call(
        capsys,
        "evaluate",
        model=settings["out"],
        report=tmp_path / "again.html",
        input_range="none",
        **evaluation,
    )
    assert (tmp_path / "again.csv").read_text() == (
        out / "report.csv"
    ).read_text()

    for wrong, message in (
        ({"version": 1}, "exists already"),
        ({"version": 0}, "at least 1"),
        ({"report": "nowhere.json"}, "Can't read nowhere.json"),
        ({"report": out / "config.json"}, "that evaluate wrote"),
        ({"dataset": "wine"}, "contradicts the model's training"),
        ({"normalization": "unit"}, "contradicts the model's training"),
        ({"input_range": "data"}, "no valid range"),
        ({"norm": 2, "method": "rub"}, "can't do norm 2"),
    ):
        assert message in refused(capsys, "export", **{**settings, **wrong})


@pytest.mark.medium
def test_example(tmp_path, capsys, few_samples):
    printed = run(
        "examples/serve.py",
        capsys,
        epochs=2,
        samples=20,
        out=str(tmp_path / "models"),
    )
    assert "digits/1" in printed and "certified:" in printed
    assert f"-v {tmp_path}/models:/models" in printed
    facts = serving.read_metadata(tmp_path / "models" / "digits")
    assert facts["dataset"] == "digits" and "clean_accuracy" in facts
