"""Tries many kinds of model with every function, and writes the table.

    python tools/model_table.py

Writes docs/models.json and the page docs/models.md. Each cell is tried with a
model of its own, and is either `works` or the exact error. A run that was
interrupted goes on where it stopped, unless the code has changed meanwhile: a
table is about one state of it.
"""

import hashlib
import pathlib
import re
import tempfile
import warnings
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers, ops

import keras_rub
from keras_rub.classifier import input_structure
from keras_rub.files import read_json, write_atomically, write_json

_OUT = flags.DEFINE_string("out", "docs", "Where the table goes.")

WORKS = "works"
RHO = 0.01
COUNT = 4  # samples

FEATURES, IMAGE = (6,), (6, 6, 1)


def build(*stack, shape=FEATURES, classes=3, head=None):
    """A chain of layers between an input and a last Dense layer."""
    inputs = h = keras.Input(shape)
    for layer in stack:
        h = layer(h)
    if len(h.shape) > 2:
        h = layers.Flatten()(h)
    return keras.Model(inputs, layers.Dense(classes, head)(h))


def dense(activation):
    return build(layers.Dense(5, activation))


def image(*stack):
    return build(*stack, layers.ReLU(), shape=IMAGE)


def several(structure):
    signal = keras.Input(FEATURES, name="signal")
    words = keras.Input((2,), dtype="int32", name="words")
    h = layers.Flatten()(layers.Embedding(5, 2)(words))
    h = layers.Dense(5, "relu")(layers.Concatenate()([signal, h]))
    given = {"signal": signal, "words": words}
    given = given if structure is dict else list(given.values())
    return keras.Model(given, layers.Dense(3)(h))


def squeeze_and_excite(h):
    gate = layers.GlobalAveragePooling2D(keepdims=True)(h)
    gate = layers.Dense(2, "sigmoid", name="gate")(gate)
    return layers.Multiply(name="excite")([layers.Conv2D(2, 3)(h), gate])


def residual(h):
    return layers.Add()([h, layers.Conv2D(1, 3, padding="same")(h)])


def branches(h):
    parts = [layers.Dense(4, name)(h) for name in ("relu", "tanh")]
    return layers.Concatenate()(parts)


def attention(h):
    h = layers.Reshape((3, 2))(h)
    return layers.MultiHeadAttention(1, 2, name="attention")(h, h)


def shared_layer(h):
    layer = layers.Dense(6, "relu")
    return layer(layer(h))


def nested(h):
    inputs = keras.Input(FEATURES)
    return keras.Model(inputs, layers.Dense(4, "relu")(inputs))(h)


def nested_head():
    inputs = keras.Input(FEATURES)
    inner = keras.Model(inputs, dense("relu")(inputs))
    outer = keras.Sequential([keras.Input(FEATURES), inner])
    outer.add(layers.Softmax())
    return outer


class Subclassed(keras.Model):
    """A `call` of Keras layers and operations, or with one that is not."""

    def __init__(self, twist):
        super().__init__(name="subclassed")
        self.hidden, self.last = layers.Dense(5), layers.Dense(3)
        self.twist = twist

    def call(self, x):
        return self.last(self.twist(self.hidden(x)))


def subclassed(twist):
    model = Subclassed(twist)
    model(np.zeros((1, *FEATURES), "float32"))
    return model


@keras.saving.register_keras_serializable("model_table")
def bump(z):
    """A user's own activation."""
    return z / (1.0 + z * z)


keras_rub.register_activation(
    bump,
    keras_rub.BoundedActivation(
        bump,
        shapes=("concave", "convex", "concave", "convex"),
        bends=(-np.sqrt(3.0), 0.0, np.sqrt(3.0)),
    ),
)


def normalization():
    layer = layers.Normalization()
    layer.adapt(np.random.default_rng(0).normal(size=(20, 6)))
    return build(layer, layers.Dense(5, "relu"))


CASES: dict[str, Callable[[], keras.Model]] = {
    "logits": lambda: dense("relu"),
    "softmax": lambda: build(layers.Dense(5, "relu"), head="softmax"),
    "log_softmax": lambda: build(layers.Dense(5, "relu"), head="log_softmax"),
    "Softmax layer behind a nested model": nested_head,
    "one output, sigmoid": lambda: build(
        layers.Dense(5, "relu"), classes=1, head="sigmoid"
    ),
    "one output, logit": lambda: build(layers.Dense(5, "relu"), classes=1),
    **{
        name: lambda name=name: dense(name)
        for name in (
            "leaky_relu", "elu", "softplus", "exponential", "sigmoid", "tanh",
            "gelu", "silu", "mish", "selu", "relu6", "hard_sigmoid",
            "hard_silu", "hard_tanh", "softsign", "log_sigmoid",
        )
    },
    "ELU(alpha=2)": lambda: build(layers.Dense(5), layers.ELU(2.0)),
    "ReLU(max_value, threshold)": lambda: build(
        layers.Dense(5), layers.ReLU(2.0, threshold=0.5)
    ),
    "PReLU": lambda: build(layers.Dense(5), layers.PReLU()),
    "an activation of one's own": lambda: dense(bump),
    "Conv2D": lambda: image(layers.Conv2D(2, 3)),
    "Conv2D, MaxPooling2D": lambda: image(
        layers.Conv2D(2, 3), layers.MaxPooling2D(2)
    ),
    "Conv2D, BatchNormalization": lambda: image(
        layers.Conv2D(2, 3), layers.BatchNormalization()
    ),
    "Conv1D": lambda: build(
        layers.Reshape((6, 1)), layers.Conv1D(2, 3, activation="relu")
    ),
    "Conv3D": lambda: image(
        layers.Reshape((3, 4, 3, 1)), layers.Conv3D(2, 2)
    ),
    "SeparableConv2D": lambda: image(layers.SeparableConv2D(2, 3)),
    "DepthwiseConv2D": lambda: image(layers.DepthwiseConv2D(3)),
    "Conv2DTranspose, UpSampling2D": lambda: image(
        layers.Conv2DTranspose(1, 2, 2), layers.UpSampling2D(2)
    ),
    "AveragePooling2D": lambda: image(layers.AveragePooling2D(2)),
    "GlobalMaxPooling2D": lambda: image(
        layers.Conv2D(3, 3), layers.GlobalMaxPooling2D()
    ),
    "residual": lambda: image(residual),
    "branches, Concatenate": lambda: build(branches),
    "Maximum": lambda: build(
        lambda h: layers.Maximum()([layers.Dense(4)(h), layers.Dense(4)(h)])
    ),
    "Minimum": lambda: build(
        lambda h: layers.Minimum()([layers.Dense(4)(h), layers.Dense(4)(h)])
    ),
    "arithmetic with constants": lambda: build(
        layers.Dense(5, "relu"), lambda h: 2.0 * h / 3.0 - 1.0
    ),
    "slices and keras.ops": lambda: build(
        lambda h: ops.concatenate([h[:, :3], ops.flip(h[:, 3:], 1)], 1),
        layers.Dense(5, "relu"),
    ),
    "Dropout, RandomFlip, GaussianNoise": lambda: image(
        layers.RandomFlip(), layers.Dropout(0.1), layers.GaussianNoise(0.1)
    ),
    "Rescaling": lambda: build(
        layers.Rescaling(2.0, -1.0), layers.Dense(5, "relu")
    ),
    "Normalization": normalization,
    "shared layer": lambda: build(shared_layer),
    "nested model": lambda: build(nested),
    "subclassed": lambda: subclassed(ops.relu),
    "subclassed, tf.nn inside": lambda: subclassed(lambda h: tf.nn.relu(h)),
    "several inputs, dict": lambda: several(dict),
    "several inputs, list": lambda: several(list),
    "integer input, Embedding": lambda: keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            layers.Embedding(5, 2, name="embedding"),
            layers.Flatten(),
            layers.Dense(3),
        ]
    ),
    "LayerNormalization": lambda: build(
        layers.Dense(5), layers.LayerNormalization(name="norm"), layers.ReLU()
    ),
    "GroupNormalization": lambda: image(
        layers.Conv2D(2, 3), layers.GroupNormalization(2, name="norm")
    ),
    "softmax inside": lambda: build(
        layers.Dense(5), layers.Softmax(name="inside")
    ),
    "squeeze-and-excite": lambda: image(squeeze_and_excite),
    "MultiHeadAttention": lambda: build(attention),
    "LSTM": lambda: build(
        layers.Reshape((3, 2)), layers.LSTM(3, name="memory")
    ),
    "Lambda": lambda: build(layers.Lambda(lambda h: h * h, name="square")),
}  # fmt: skip


def samples(model):
    """Inputs in the structure that the model takes, and labels."""
    rng = np.random.default_rng(0)

    def one(shape, dtype):
        if "int" in dtype:
            return rng.integers(0, 5, (COUNT, *shape))
        return rng.uniform(size=(COUNT, *shape)).astype("float32")

    if not getattr(model, "inputs", None):
        x = one(FEATURES, "float32")
    else:
        x = keras.tree.map_structure(
            lambda t: one(
                t.shape[1:], keras.backend.standardize_dtype(t.dtype)
            ),
            input_structure(model),
        )
    classes = np.shape(model(x))[-1]
    return x, np.arange(COUNT) % max(classes, 2)


def train(defense, **settings):
    """A column: one step of a defence."""

    def run(model, x, y, folder):
        robust = getattr(keras_rub, defense)(model, rho=RHO, **settings)
        one = np.shape(model(x))[-1] == 1
        loss = "binary" if one else "sparse_categorical"
        robust.compile("sgd", f"{loss}_crossentropy")
        robust.fit(x, y, batch_size=COUNT, verbose=0)

    return run


def _evaluate(model, x, y, folder):
    result = keras_rub.evaluate(
        model, x, y, radii={1: [RHO]}, attacks=["pgd"], diagnosis=False,
        certificates="rub", verbose=0,
    )  # fmt: skip
    if result.notes:
        raise keras_rub.UnsupportedLayerError("; ".join(result.notes))


COLUMNS = {
    "RUB": train("RUBModel"),
    "aRUB": train("ARUBModel"),
    "PGD": train("PGDModel", steps=2),
    "COAP": train("COAPModel"),
    "certify": lambda model, x, y, folder: keras_rub.certify(
        model, x, rho=RHO, verbose=0
    ),
    "radius": lambda model, x, y, folder: keras_rub.certified_radius(
        model, x, method="crown", verbose=0
    ),
    "evaluate": _evaluate,
    "export": lambda model, x, y, folder: keras_rub.export(
        model, folder, method="crown"
    ),
}


def try_cell(name: str, column: str) -> str:
    """`works`, or the exact error, of one model with one function."""
    # Layers are then named alike each time.
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = CASES[name]()
    x, y = samples(model)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            COLUMNS[column](model, x, y, pathlib.Path(folder) / "served")
        except (ValueError, TypeError) as error:
            return re.sub("line [0-9]+ of", "line ... of", str(error))
    return WORKS


_HEAD = """# Models that were tried

{count} small models with every function: a training step of four defences,
`certify` (L1, `method="auto"`), `certified_radius`, `evaluate` with an attack
and certificates, and `export` with all signatures. Made by

```sh
python tools/model_table.py
```

Where it says no, the number leads to the exact error below the table. Where
only the certificate is missing, `evaluate` still attacks and says so in its
`notes`, and `export` writes the model without certificates if asked to.
"""


def page(table: dict[str, dict[str, str]]) -> str:
    """The page of the table, errors below it by number."""
    errors: list[str] = []
    rows = []
    for name, cells in table.items():
        shown = []
        for column in COLUMNS:
            text = cells[column]
            if text != WORKS and text not in errors:
                errors.append(text)
            shown.append(
                "yes" if text == WORKS else f"no ({errors.index(text) + 1})"
            )
        rows.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(
        [
            _HEAD.format(count=len(table)),
            f"| model | {' | '.join(COLUMNS)} |",
            f"| --- |{' --- |' * len(COLUMNS)}",
            *rows,
            "",
            "## Errors",
            "",
            *(f"{i}. {text}" for i, text in enumerate(errors, 1)),
            "",
        ]
    )


def fingerprint() -> str:
    """What stands for the code: of the package, and of this file."""
    package = pathlib.Path(keras_rub.__file__).parent
    found = hashlib.sha256()
    for path in [*sorted(package.rglob("*.py")), pathlib.Path(__file__)]:
        found.update(path.read_bytes())
    return found.hexdigest()


def main(_):
    folder = pathlib.Path(_OUT.value)
    partial, code = folder / "models.partial.json", fingerprint()
    found = {}
    if partial.exists():
        state = read_json(partial)
        found = state["table"] if state["code"] == code else {}
    for name in CASES:
        if name in found:
            continue
        found[name] = {column: try_cell(name, column) for column in COLUMNS}
        print(
            name, [text == WORKS for text in found[name].values()], flush=True
        )
        write_json(partial, {"code": code, "table": found})
    write_json(folder / "models.json", found, indent=1)
    write_atomically(folder / "models.md", page(found))
    partial.unlink(missing_ok=True)


if __name__ == "__main__":
    app.run(main)
