"""Measures training steps and memory as ratios, in one run.

    python tools/benchmark.py --out docs/results/benchmark.json

Every time is the median over rounds in which all cases of a group take turns,
so that a busy machine slows them alike. Memory is the peak of a process of its
own that takes a few steps, less that of one that takes nominal ones; that of a
certificate is read from /proc (Linux).
"""

import ctypes
import functools
import gc
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import keras_rub
from keras_rub import datasets, models, tables
from keras_rub.files import read_json, write_json

_OUT = flags.DEFINE_string(
    "out", "out/benchmark.json", "Where to write the figures, as JSON."
)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 7, "How many times each case is measured.", lower_bound=1
)
_GROUPS = flags.DEFINE_list(
    "groups",
    ["mnist", "cifar", "classes", "uci", "cnn", "memory", "screening"]
    + ["certify", "small_cnn", "linear", "certify_memory", "export", "serving"]
    + ["radius"],
    "Which groups of cases to run.",
)
_MODEL = flags.DEFINE_string(
    "model",
    None,
    "For the groups certify and radius: a model.keras file, on the MNIST "
    "test set. Without it, a small one is trained on embedded digits.",
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder with mnist.npz, for --model."
)
_MEMORY_CASE = flags.DEFINE_string(
    "memory_case", None, "Internal: take a few steps and print peak memory."
)

_FOOLBOX = "pgd-inf, 40 steps, foolbox"
# Samples whose radii are measured.
_RADII = 128

# Samples that linear bounds certify together, and the radius (Linf).
_BATCH, _SMALL_RADIUS = 64, 0.02

_LOSS = "sparse_categorical_crossentropy"


def plain_rub_margins(base, x, y, rho):
    """The paper's formula as it is written: what RUBModel is compared with.

    Four products a layer, every vertex at once, gradients through all of it.
    """
    dense = [layer for layer in base.layers if layer.weights]
    slopes, value = [], x
    for layer in dense[:-1]:
        value = layer(value)
        slopes.append(tf.cast(value > 0, x.dtype)[:, None])
    first, last = dense[0], dense[-1]
    batch, classes = x.shape[0], last.units
    differences = (
        tf.eye(classes)[None] - tf.one_hot(y, classes)[:, None]
    )  # [batch, K, K]
    bounds = []
    for radius in (rho, -rho):
        moved = radius * first.kernel[None] + (
            x @ first.kernel + first.bias
        )[:, None]  # fmt: skip
        up, down = moved, -moved
        for layer, slope in zip(dense[1:-1], slopes, strict=False):
            plus, minus = tf.nn.relu(layer.kernel), tf.nn.relu(-layer.kernel)
            width = layer.kernel.shape[0]
            upper = tf.reshape(tf.nn.relu(up), [-1, width])
            lower = tf.reshape(down * slope, [-1, width])
            up = upper @ plus + lower @ minus + layer.bias
            down = upper @ minus + lower @ plus - layer.bias
            up = tf.reshape(up, [batch, -1, layer.units])
            down = tf.reshape(down, [batch, -1, layer.units])
        rows = tf.einsum("bkj,hj->bkh", differences, last.kernel)
        bounds.append(
            tf.matmul(tf.nn.relu(up), tf.nn.relu(rows), transpose_b=True)
            + tf.matmul(down * slopes[-1], tf.nn.relu(-rows), transpose_b=True)
            + tf.einsum("bkj,j->bk", differences, last.bias)[:, None]
        )
    return tf.reduce_max(tf.concat(bounds, axis=1), axis=1)


class PlainRUBModel(keras_rub.defenses.robust_model.MarginModel):
    """RUB by the plain formula, all else equal."""

    def __init__(self, base, rho):
        super().__init__(base, rho, perturbations=keras_rub.PerturbationSet(1))
        self.setup()

    def robust_outputs(self, x, labels, rho, found):
        return plain_rub_margins(self.base, x, labels, rho)


def batch_of(size, shape, classes, seed=0):
    """Random inputs in [0, 1] and labels; a step costs the same on any."""
    rng = np.random.default_rng(seed)
    return (
        tf.constant(rng.random((size, *shape)), tf.float32),
        tf.constant(rng.integers(0, classes, size), tf.int32),
    )


def step_of(model, data):
    """One compiled training step on fixed data, as a function."""
    model.compile(
        keras.optimizers.Adam(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.optimizer.build(model.trainable_variables)
    function = tf.function(model.train_step)
    return lambda: function(data)


def measure(cases, rounds, steps):
    """Median milliseconds a step for each case, the cases taking turns."""
    for step in cases.values():
        step()
        step()
    times = {name: [] for name in cases}
    for _ in range(rounds):
        for name, step in cases.items():
            step()  # what the case before left in caches and allocator
            start = time.perf_counter()
            for _ in range(steps[name]):
                logs = step()
            float(logs["loss"])
            times[name].append(
                (time.perf_counter() - start) / steps[name] * 1e3
            )
    return {name: float(np.median(values)) for name, values in times.items()}


def mnist_models():
    """The cases of the 784-200-200-200-10 network."""

    def base():
        return models.mlp((784,), 10)

    return {
        "nominal": base,
        "rub, plain formula": lambda: PlainRUBModel(base(), rho=1.0),
        "rub, all vertices": lambda: keras_rub.RUBModel(
            base(), rho=1.0, vertices="all"
        ),
        "rub (default)": lambda: keras_rub.RUBModel(base(), rho=1.0),
        "rub, all competitors": lambda: keras_rub.RUBModel(
            base(), rho=1.0, competitors="all"
        ),
        "arub-inf": lambda: keras_rub.ARUBModel(base(), rho=0.1),
        "arub-1": lambda: keras_rub.ARUBModel(base(), rho=1.0, norm=1),
        "baseline-inf": lambda: keras_rub.BaselineModel(base(), rho=0.1),
        "fgsm-inf": lambda: keras_rub.FGSMModel(base(), rho=0.1),
        "pgd-inf, 40 steps": lambda: keras_rub.PGDModel(
            base(), rho=0.1, steps=40
        ),
        _FOOLBOX: base,
        "coap-inf": lambda: keras_rub.COAPModel(base(), rho=0.01),
        "ibp-inf": lambda: keras_rub.IBPModel(base(), rho=0.1),
        "ibp-inf, crown-ibp": lambda: keras_rub.IBPModel(
            base(), rho=0.1, bound="crown-ibp"
        ),
        "ibp-inf, mtl": lambda: keras_rub.IBPModel(
            base(), rho=0.1, bound_weight=0.5
        ),
    }


def foolbox_step_of(model, data):
    """A training step on what foolbox's LinfPGD finds, all else equal."""
    x, y = data
    attack = keras_rub.attacks.FoolboxAttack(model, "inf", kind="pgd")
    function = tf.function(model.train_step)

    def step():
        points = attack.sweep(x, y, [0.1])[0]
        return function((tf.constant(points), y))

    step_of(model, data)
    return step


def show(title, header, cells):
    """Prints one table."""
    print(f"\n{title}\n{tables.to_text(header, cells)}", flush=True)


def run_steps(title, makers, data, rounds, slow=()):
    """Measures a group and prints it; returns its figures."""
    cases = {
        name: (foolbox_step_of if name == _FOOLBOX else step_of)(make(), data)
        for name, make in makers.items()
    }
    steps = {name: 1 if name in slow else 10 for name in cases}
    times = measure(cases, rounds, steps)
    plain = times.get("rub, plain formula")
    rows, cells = {}, []
    for name, value in times.items():
        rows[name] = {
            "ms": round(value, 3),
            "times_nominal": round(value / times["nominal"], 2),
        }
        faster = ""
        if plain is not None and name.startswith("rub"):
            rows[name]["faster_than_plain"] = round(plain / value, 2)
            faster = f"{plain / value:.1f}x"
        slower = f"{value / times['nominal']:.1f}"
        cells.append([name, f"{value:.2f}", slower, faster])
    show(title, ["case", "ms/step", "x nominal", "x plain"], cells)
    return rows


# Memory ----------------------------------------------------------------------

_MEMORY_CASES = {
    "nominal, 784 inputs": (784, lambda base: base),
    "rub, plain formula, 784 inputs": (
        784,
        lambda base: PlainRUBModel(base, rho=1.0),
    ),
    **{
        f"rub, {name}, {inputs} inputs": (
            inputs,
            lambda base, vertices=vertices: keras_rub.RUBModel(
                base, rho=1.0, vertices=vertices
            ),
        )
        for inputs in (784, 3072)
        for name, vertices in (("all vertices", "all"), ("screened", 32))
    },
    "nominal, 3072 inputs": (3072, lambda base: base),
}


def print_peak_memory(name):
    """Takes three steps and prints this process's peak, in MB."""
    inputs, wrap = _MEMORY_CASES[name]
    model = wrap(models.mlp((inputs,), 10))
    step = step_of(model, batch_of(32, (inputs,), 10))
    for _ in range(3):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def run_memory():
    """Peak memory of each case in a process of its own."""
    peaks = {}
    for name in _MEMORY_CASES:
        (peaks[name],) = in_process(name)
    rows, cells = {}, []
    for name, peak in peaks.items():
        inputs = name.split(", ")[-1]
        extra = peak - peaks[f"nominal, {inputs}"]
        rows[name] = {"peak_mb": round(peak), "extra_mb": round(extra)}
        cells.append([name, f"{peak:.0f}", f"{extra:.0f}"])
    show(
        "Peak memory, batch 32, hidden layers 3x200",
        ["case", "MB", "above nominal"],
        cells,
    )
    return rows


# Memory of certificates ------------------------------------------------------


def certify_wide(method, megabytes):
    """Certifies the paper's CNN, whose layers have 25088 and 12544 neurons."""
    model = models.cnn((28, 28, 1), 10)
    x, y = batch_of(1, (28, 28, 1), 10)
    settings = {"norm": "inf", "rho": 0.005, "memory_budget": megabytes * 2**20}

    def run():
        found = keras_rub.certify(
            model, x, y, method=method, verbose=0, **settings
        )
        assert method == "ibp" or not found.interval_layers

    return model, x, run


def certify_application(name):
    """Certifies one image for a network of `keras.applications`."""
    model = getattr(keras.applications, name)(
        weights=None,
        input_shape=(32, 32, 3),
        classes=10,
        classifier_activation=None,
    )
    x, _ = batch_of(1, (32, 32, 3), 10)
    # Four pixels: the time grows with them, the memory does not.
    mask = np.zeros((32, 32, 3), bool)
    mask[10:12, 10:12] = True
    settings = {"rho": 1e-4, "method": "rub", "mask": mask, "verbose": 0}
    return model, x, lambda: keras_rub.certify(model, x, **settings)


_CERTIFY_MEMORY = {
    **{
        f"{method}, budget {megabytes} MiB": functools.partial(
            certify_wide, method, megabytes
        )
        for method, megabytes in (
            ("ibp", 64),
            ("crown", 16),
            ("crown", 64),
            ("crown", 256),
            ("coap", 64),
        )
    },
    **{
        f"rub, {name}, budget 64 MiB": functools.partial(
            certify_application, name
        )
        for name in ("MobileNetV2", "ResNet50V2", "VGG16")
    },
}


def resident():
    """What this process holds, and its peak since `forget_peak`, in MB."""
    status = pathlib.Path("/proc/self/status").read_text()
    return [
        int(re.search(rf"{key}:\s+(\d+)", status).group(1)) / 1024
        for key in ("VmRSS", "VmHWM")
    ]


def forget_peak():
    """Gives free memory back and starts a new peak; Linux only."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def print_certify_memory(name):
    """Prints what a certificate adds to this process, in MB.

    The first call traces a graph, which stays; the second only computes, and
    that is what `memory_budget` is about.
    """
    model, x, run = _CERTIFY_MEMORY[name]()
    model.predict(x, verbose=0)
    peaks = []
    for _ in range(2):
        forget_peak()
        before, _ = resident()
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        peaks += [before, resident()[1] - before]
    predicting, tracing, _, computing = peaks
    print(predicting, tracing, computing, seconds)


def run_certify_memory():
    """Peak memory of certificates, each in a process of its own."""
    rows, cells = {}, []
    for name in _CERTIFY_MEMORY:
        # oneDNN's allocator keeps what it got: a later call would show nothing.
        before, tracing, computing, seconds = in_process(
            name, TF_ENABLE_ONEDNN_OPTS="0"
        )
        rows[name] = {
            "predict_mb": round(before),
            "first_call_mb": round(tracing),
            "later_call_mb": round(computing),
            "seconds_of_later_call": round(seconds, 1),
        }
        cells.append(
            [
                name,
                f"{before:.0f}",
                f"{tracing:.0f}",
                f"{computing:.0f}",
                f"{seconds:.1f}",
            ]
        )
    show(
        "Peak memory of a certificate: the paper's CNN (Linf), "
        "applications (L1), 1 image",
        ["case", "MB of predicting", "MB more, first call", "later", "s"],
        cells,
    )
    return rows


def in_process(name, **environment):
    """The numbers that a case of memory prints in a process of its own."""
    output = subprocess.run(
        [sys.executable, __file__, f"--memory_case={name}"],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    ).stdout
    return [float(word) for word in output.strip().splitlines()[-1].split()]


# Screening -------------------------------------------------------------------


def large_digits():
    """scikit-learn's digits as 28x28 images, flat."""
    digits = load_digits()
    images = np.kron(digits.images / 16.0, np.ones((3, 3)))
    images = np.pad(images, [(0, 0), (2, 2), (2, 2)])
    return (
        images.reshape(len(images), -1).astype("float32"),
        digits.target.astype("int32"),
    )


@functools.cache
def trained_model():
    """A 784-200-200-200-10 network, trained with RUB on large digits."""
    x, y = large_digits()
    keras.utils.set_random_seed(0)
    model = keras_rub.RUBModel(models.mlp((784,), 10), rho=2.8)
    model.compile(keras.optimizers.Adam(1e-3), _LOSS)
    model.fit(
        x,
        y,
        epochs=12,
        batch_size=64,
        verbose=0,
        callbacks=[keras_rub.callbacks.RhoSchedule(epochs=6)],
    )
    return model


def run_screening():
    """Loss with 32 screened vertices against all, on a RUB-trained net."""
    x, y = large_digits()
    base = trained_model().base
    rows, cells = {}, []
    for rho in (0.28, 1.0, 2.8):
        losses = {}
        for vertices in ("all", 32):
            other = keras_rub.RUBModel(base, rho=rho, vertices=vertices)
            other.compile("sgd", _LOSS)
            losses[vertices] = other.evaluate(
                x[:512], y[:512], verbose=0, return_dict=True
            )["loss"]
        gap = 1.0 - losses[32] / losses["all"]
        rows[str(rho)] = {
            "exact": losses["all"],
            "screened": losses[32],
            "relative_gap": gap,
        }
        exact, screened = f"{losses['all']:.5f}", f"{losses[32]:.5f}"
        cells.append([f"{rho:.2f}", exact, screened, f"{gap:.1e}"])
    show(
        "Screened loss against the exact one, net trained with RUB",
        ["rho", "exact", "screened", "gap"],
        cells,
    )
    return rows


# Certification ---------------------------------------------------------------


def model_and_samples():
    """A trained network, what to certify with it, and its name."""
    if not _MODEL.value:
        return trained_model(), *large_digits(), "large digits"
    model = keras.models.load_model(_MODEL.value)
    x, y = datasets.load("mnist", _DATA_DIR.value).test
    x = x.reshape(len(x), *model.input_shape[1:])
    return model, x, y, f"MNIST test set, {pathlib.Path(_MODEL.value).name}"


def run_certify():
    """Deciding certificates by "rub" against scanning every vertex."""
    model, x, y, source = model_and_samples()
    rows, certified = {}, {}
    for name, decide_only in (("every vertex", False), ("deciding only", True)):
        settings = {"rho": 2.8, "method": "rub", "decide_only": decide_only}
        keras_rub.certify(model, x[:128], y[:128], **settings)  # traces
        start = time.perf_counter()
        result = keras_rub.certify(model, x, y, verbose=0, **settings)
        seconds = time.perf_counter() - start
        certified[name] = result.certified
        rows[name] = {
            "seconds": round(seconds, 2),
            "certified_accuracy": result.certified_accuracy,
            "peak_mb": round(
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            ),
        }
    ratio = rows["deciding only"]["seconds"] / rows["every vertex"]["seconds"]
    same = bool(np.array_equal(*certified.values()))
    rows["ratio"], rows["same_decisions"] = round(ratio, 3), same
    show(
        f"Certification by rub at rho = 2.8, {len(x)} samples ({source})",
        ["case", "seconds"],
        [
            *([name, f"{rows[name]['seconds']:.1f}"] for name in certified),
            ["ratio", f"{ratio:.2f}"],
        ],
    )
    print(f"same decisions: {same}")
    return rows


def run_radius():
    """`certified_radius` in calls of `certify` of the same method."""
    model, x, y, source = model_and_samples()
    x, y = x[:_RADII], y[:_RADII]
    rows, cells = {}, []
    for method in ("rub", "auto"):
        settings = {"method": method, "verbose": 0}
        radius = functools.partial(
            keras_rub.certified_radius, model, x, y, **settings
        )
        certify = functools.partial(keras_rub.certify, model, x, y, **settings)
        cases = {
            "radius": radius,
            "certify, rho = 1": functools.partial(certify, rho=1.0),
            "certify, rho = 2.8": functools.partial(certify, rho=2.8),
            # Where the answer is hardest, and all stages are needed.
            "certify, rho = the radius": functools.partial(
                certify, rho=radius()
            ),
        }
        seconds = {}
        for name, run in cases.items():
            run()  # traces
            start = time.perf_counter()
            run()
            seconds[name] = time.perf_counter() - start
        rows[method] = {
            "seconds": {name: round(s, 3) for name, s in seconds.items()}
        }
        for name, value in seconds.items():
            if name != "radius":
                ratio = seconds["radius"] / value
                rows[method][f"radius: N x {name}"] = round(ratio, 2)
                cells.append([method, name, f"{ratio:.1f}"])
    show(
        f"certified_radius, tolerance 0.01, {len(x)} samples ({source})",
        ["method", "in calls of", "radius: N x certify"],
        cells,
    )
    return rows


# Linear bounds ----------------------------------------------------------------


def run_linear(rounds):
    """Milliseconds a sample of the bounds on a small CNN: Linf, and rub."""
    x, y = large_digits()
    x = x.reshape(-1, 28, 28, 1)
    keras.utils.set_random_seed(0)
    model = models.small_cnn((28, 28, 1), 10)
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(x, y, epochs=3, batch_size=64, verbose=0)
    x, y = x[:_BATCH], y[:_BATCH]
    shares = {}

    def step(method):
        norm, rho = (1, 1.0) if method == "rub" else ("inf", _SMALL_RADIUS)
        found = keras_rub.certify(
            model, x, y, rho=rho, norm=norm, method=method, verbose=0
        )
        shares[method] = found.certified_accuracy
        return {"loss": 0.0}

    cases = {
        method: functools.partial(step, method)
        for method in ("ibp", "crown-ibp", "crown", "coap", "alpha-crown")
        + ("rub",)
    }
    times = measure(cases, min(rounds, 3), dict.fromkeys(cases, 1))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows, cells = {"peak_mb": round(peak)}, []
    for method, value in times.items():
        each = value / _BATCH
        share = shares[method]
        rows[method] = {
            "ms_a_sample": round(each, 2),
            "certified_accuracy": share,
        }
        cells.append([method, f"{each:.2f}", f"{share:.1%}"])
    show(
        f"conv16-conv32-dense100, 28x28x1, Linf {_SMALL_RADIUS} (rub: L1 1), "
        f"batch {_BATCH}, nominal training on large digits",
        ["method", "ms/sample", "certified"],
        cells,
    )
    return rows


# Serving ---------------------------------------------------------------------


def run_export(rounds):
    """Latency of the exported signatures, 30 features, against predicting."""
    keras.utils.set_random_seed(0)
    base = models.mlp((30,), 2)
    rows, cells = {}, []
    with tempfile.TemporaryDirectory() as folder:
        path = keras_rub.export(base, pathlib.Path(folder) / "tabular")
        served = tf.saved_model.load(str(path))
        for size in (1, 64):
            x, _ = batch_of(size, (30,), 2)
            inputs = {"x": x}, {"x": x, "rho": tf.fill([size], 0.1)}, {"x": x}
            cases = {
                name: functools.partial(answer, served.signatures[name], data)
                for name, data in zip(
                    ("serving_default", "certify", "certified_radius"),
                    inputs,
                    strict=True,
                )
            }
            times = measure(cases, rounds, dict.fromkeys(cases, 10))
            for name, value in times.items():
                ratio = value / times["serving_default"]
                case = f"{name}, batch {size}"
                rows[case] = {
                    "ms": round(value, 3),
                    "times_serving_default": round(ratio, 2),
                }
                cells.append([case, f"{value:.2f}", f"{ratio:.1f}"])
    show(
        "Exported signatures, 30 inputs, 3x200, 2 classes, L1, rub",
        ["case", "ms/request", "x serving_default"],
        cells,
    )
    return rows


def run_serving(rounds):
    """Large requests to the exported digits networks, in milliseconds."""
    data = datasets.load("digits")
    digits = np.concatenate([data.test[0], data.train[0]]).astype("float32")
    rows, cells = {}, []
    for hidden in ((100, 100), (200, 200, 200)):
        keras.utils.set_random_seed(0)
        base = models.mlp(data.input_shape, data.num_classes, hidden=hidden)
        model = keras_rub.RUBModel(base, rho=0.5)
        model.compile(keras.optimizers.Adam(1e-3), _LOSS)
        model.fit(
            *data.train,
            epochs=8,
            batch_size=64,
            verbose=0,
            callbacks=[keras_rub.callbacks.RhoSchedule(epochs=4)],
        )
        with tempfile.TemporaryDirectory() as folder:
            path = keras_rub.export(
                model,
                pathlib.Path(folder) / "digits",
                input_range=data.input_range,
            )
            served = tf.saved_model.load(str(path))
            for size in (256, 1024):
                x = tf.constant(digits[:size])
                cases = {
                    name: functools.partial(
                        answer, served.signatures[name], {"x": x, **more}
                    )
                    for name, more in (
                        ("serving_default", {}),
                        ("certify", {"rho": tf.fill([size], 0.5)}),
                        ("certified_radius", {}),
                    )
                }
                times = measure(cases, rounds, dict.fromkeys(cases, 1))
                for name, value in times.items():
                    case = f"{hidden}, {name}, batch {size}"
                    rows[case] = {"ms": round(value, 1)}
                    cells.append([case, f"{value:.0f}"])
    show(
        "Exported digits networks, 64 inputs in [0, 1], L1, rub, tolerance "
        "0.01",
        ["case", "ms/request"],
        cells,
    )
    return rows


def answer(signature, inputs):
    """One request, in the form of a step that `measure` takes."""
    return {"loss": signature(**inputs)["class"][0]}


def run_uci(rounds):
    """Steps at the size of the paper's tables of numbers."""

    def base():
        return models.mlp((33,), 2)

    return run_steps(
        "33 inputs, 3x200, 2 classes, batch 256",
        {
            "nominal": base,
            "arub-inf": lambda: keras_rub.ARUBModel(base()),
            "rub, all vertices": lambda: keras_rub.RUBModel(
                base(), vertices="all"
            ),
            "rub (default)": lambda: keras_rub.RUBModel(base()),
        },
        batch_of(256, (33,), 2),
        rounds,
    )


def run_mnist(rounds):
    """Steps of all defences at MNIST's size."""
    return run_steps(
        "784 inputs, 3x200, 10 classes, batch 32",
        mnist_models(),
        batch_of(32, (784,), 10),
        rounds,
        slow=("rub, plain formula", "rub, all vertices", _FOOLBOX),
    )


def run_classes(rounds):
    """The same steps with ten times as many classes."""

    def base():
        return models.mlp((784,), 100)

    return run_steps(
        "784 inputs, 3x200, 100 classes, batch 32",
        {
            "nominal": base,
            "arub-inf": lambda: keras_rub.ARUBModel(base()),
            "rub (default)": lambda: keras_rub.RUBModel(base()),
        },
        batch_of(32, (784,), 100),
        rounds,
    )


def run_cifar(rounds):
    """Steps at CIFAR-10's size, where the first layer is most of the work."""

    def base():
        return models.mlp((32, 32, 3), 10)

    return run_steps(
        "3072 inputs, 3x200, 10 classes, batch 128",
        {
            "nominal": base,
            "arub-inf": lambda: keras_rub.ARUBModel(base()),
            "pgd-inf, 10 steps": lambda: keras_rub.PGDModel(base(), steps=10),
            "rub (default)": lambda: keras_rub.RUBModel(base(), rho=5.0),
            "rub, all competitors": lambda: keras_rub.RUBModel(
                base(), rho=5.0, competitors="all"
            ),
        },
        batch_of(128, (32, 32, 3), 10),
        rounds,
    )


def run_cnn(rounds):
    """Steps of the paper's convolutional network."""

    def base():
        return models.cnn((28, 28, 1), 10)

    ramp = keras.optimizers.schedules.PolynomialDecay(0.0, 10**6, 0.1)

    return run_steps(
        "the paper's CNN, 28x28x1, 10 classes, batch 32",
        {
            "nominal": base,
            "ibp-inf": lambda: keras_rub.IBPModel(base()),
            "ibp-inf, warm-up": lambda: keras_rub.IBPModel(base(), ramp),
            "arub-inf": lambda: keras_rub.ARUBModel(base()),
            "arub-inf, all competitors": lambda: keras_rub.ARUBModel(
                base(), competitors="all"
            ),
            "rub (default)": lambda: keras_rub.RUBModel(base(), rho=1.0),
            "rub, all competitors": lambda: keras_rub.RUBModel(
                base(), rho=1.0, competitors="all"
            ),
        },
        batch_of(32, (28, 28, 1), 10),
        min(rounds, 3),
        slow=(
            "arub-inf",
            "arub-inf, all competitors",
            "rub (default)",
            "rub, all competitors",
        ),
    )


def run_small_cnn(rounds):
    """Steps of a small CNN, where COAP fits into memory too."""

    def base():
        return models.small_cnn((28, 28, 1), 10)

    return run_steps(
        "conv16-conv32-dense100, 28x28x1, 10 classes, batch 32",
        {
            "nominal": base,
            "ibp-inf": lambda: keras_rub.IBPModel(base()),
            "coap-inf": lambda: keras_rub.COAPModel(base(), rho=0.01),
            "rub (default)": lambda: keras_rub.RUBModel(base(), rho=1.0),
        },
        batch_of(32, (28, 28, 1), 10),
        min(rounds, 3),
        slow=("coap-inf",),
    )


RUNS = {
    "memory": lambda rounds: run_memory(),
    "certify_memory": lambda rounds: run_certify_memory(),
    "mnist": run_mnist,
    "cifar": run_cifar,
    "classes": run_classes,
    "uci": run_uci,
    "cnn": run_cnn,
    "small_cnn": run_small_cnn,
    "screening": lambda rounds: run_screening(),
    "certify": lambda rounds: run_certify(),
    "radius": lambda rounds: run_radius(),
    "linear": run_linear,
    "export": lambda rounds: run_export(rounds),
    "serving": run_serving,
}


def main(argv):
    del argv
    if _MEMORY_CASE.value:
        name = _MEMORY_CASE.value
        certifies = name in _CERTIFY_MEMORY
        (print_certify_memory if certifies else print_peak_memory)(name)
        return
    keras.utils.set_random_seed(0)
    unknown = set(_GROUPS.value) - set(RUNS)
    if unknown:
        raise app.UsageError(
            f"--groups knows {sorted(RUNS)}. Received: {sorted(unknown)}"
        )
    path = pathlib.Path(_OUT.value)
    # Groups that are not run keep the figures of an earlier run.
    results = read_json(path) if path.exists() else {}
    results["versions"] = {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }
    results["cores"] = os.cpu_count()
    for name, run in RUNS.items():
        if name in _GROUPS.value:
            results[name] = run(_ROUNDS.value)
    write_json(path, results, indent=2)
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    app.run(main)
