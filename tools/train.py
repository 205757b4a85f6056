"""Trains one network with one defence.

    python tools/train.py --dataset digits --defense rub --rho 1 --out out/rub

Writes to --out: model.keras, history.csv, config.json, TensorBoard logs. A run
that was interrupted goes on where it stopped when the same command is given
again; another command for the same folder is refused.
"""

import json
import pathlib

import keras
import tensorflow as tf
from absl import app, flags

import keras_rub
from keras_rub import datasets, models
from keras_rub.files import write_atomically

_DATASET = flags.DEFINE_string("dataset", "digits", "Name of the data set.")
_DATA_DIR = flags.DEFINE_string(
    "data_dir",
    None,
    "Folder with NAME.npz files; the environment variable KERAS_RUB_DATA by "
    "default.",
)
_DEFENSE = flags.DEFINE_enum(
    "defense", "rub", ["nominal", "arub", "rub"], "How to train."
)
_NORM = flags.DEFINE_enum(
    "norm", "1", ["1", "2", "inf"], "Norm of the perturbation (rub: 1 only)."
)
_RHO = flags.DEFINE_float(
    "rho", 1.0, "Radius, in the units that the network sees.", lower_bound=0.0
)
_RHO_RAMP = flags.DEFINE_float(
    "rho_ramp",
    0.5,
    "Part of the training over which the radius grows from 0.",
    lower_bound=0.0,
    upper_bound=1.0,
)
_INPUT_RANGE = flags.DEFINE_bool(
    "input_range",
    False,
    "With rub: hold the attacker to the data set's valid range.",
)
_VERTICES = flags.DEFINE_integer(
    "vertices", 32, "With rub: vertices a sample to evaluate.", lower_bound=1
)
_ARCHITECTURE = flags.DEFINE_enum(
    "architecture", "mlp", ["mlp", "mlp1", "cnn"], "The network."
)
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 1e-3, "Of Adam, at the start of a cosine decay."
)
_WEIGHT_DECAY = flags.DEFINE_float(
    "weight_decay", 0.0, "Decoupled weight decay of Adam.", lower_bound=0.0
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 128, "Samples a step.")
_STEPS = flags.DEFINE_integer("steps", 2000, "Training steps.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of weights and of the shuffling.")
_OUT = flags.DEFINE_string("out", None, "Folder for the results.")
flags.mark_flag_as_required("out")

_EPOCHS = 20  # how often progress is saved and shown


def settings() -> dict:
    """Everything that decides the result of the run."""
    return {
        "dataset": _DATASET.value,
        "defense": _DEFENSE.value,
        "norm": _NORM.value,
        "rho": _RHO.value,
        "rho_ramp": _RHO_RAMP.value,
        "input_range": _INPUT_RANGE.value,
        "vertices": _VERTICES.value,
        "architecture": _ARCHITECTURE.value,
        "learning_rate": _LEARNING_RATE.value,
        "weight_decay": _WEIGHT_DECAY.value,
        "batch_size": _BATCH_SIZE.value,
        "steps": _STEPS.value,
        "seed": _SEED.value,
    }


def make_base(data: datasets.Dataset) -> keras.Model:
    """The network, untrained."""
    shape, classes = data.input_shape, data.num_classes
    if _ARCHITECTURE.value == "cnn":
        return models.cnn(shape, classes)
    hidden = (200,) if _ARCHITECTURE.value == "mlp1" else (200, 200, 200)
    return models.mlp(shape, classes, hidden)


def make_model(
    base: keras.Model, data: datasets.Dataset, steps: int
) -> keras.Model:
    """Wraps the network in the defence that was asked for."""
    ramp = round(_RHO_RAMP.value * steps)
    rho = _RHO.value
    if ramp:
        rho = keras.optimizers.schedules.PolynomialDecay(0.0, ramp, rho)
    if _DEFENSE.value == "rub":
        if _NORM.value != "1":
            raise app.UsageError("--defense=rub is for --norm=1 only.")
        if _INPUT_RANGE.value and data.input_range is None:
            raise app.UsageError(
                f"--input_range: {_DATASET.value} has no valid range."
            )
        return keras_rub.RUBModel(
            base,
            rho=rho,
            input_range=data.input_range if _INPUT_RANGE.value else None,
            vertices=_VERTICES.value,
        )
    if _DEFENSE.value == "arub":
        norm = _NORM.value if _NORM.value == "inf" else int(_NORM.value)
        return keras_rub.ARUBModel(base, rho=rho, norm=norm)
    return base


def claim(folder: pathlib.Path, config: dict) -> None:
    """Makes the folder this run's own, or refuses."""
    path = folder / "config.json"
    if path.exists():
        other = json.loads(path.read_text())
        if other != config:
            changed = sorted(
                key for key in config if other.get(key) != config[key]
            )
            raise app.UsageError(
                f"{folder} holds another run: {', '.join(changed)} differ. "
                "Choose another --out."
            )
        return
    write_atomically(path, json.dumps(config, indent=2) + "\n")


def main(argv):
    del argv
    folder, config = pathlib.Path(_OUT.value), settings()
    claim(folder, config)
    if (folder / "model.keras").exists():
        print(f"{folder} is finished: {folder / 'model.keras'}")
        return
    data = datasets.load(_DATASET.value, _DATA_DIR.value)
    keras.utils.set_random_seed(_SEED.value)
    epochs = min(_EPOCHS, _STEPS.value)
    per_epoch = -(-_STEPS.value // epochs)
    steps = epochs * per_epoch
    model = make_model(make_base(data), data, steps)
    model.compile(
        optimizer=keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(_LEARNING_RATE.value, steps),
            weight_decay=_WEIGHT_DECAY.value or None,
            global_clipnorm=5.0,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    train = (
        tf.data.Dataset.from_tensor_slices(data.train)
        .shuffle(len(data.train[0]), seed=_SEED.value)
        .repeat()
        .batch(_BATCH_SIZE.value)
        .prefetch(2)
    )
    model.fit(
        train,
        steps_per_epoch=per_epoch,
        epochs=epochs,
        validation_data=tuple(part[:1000] for part in data.validation),
        verbose=2,
        callbacks=[
            keras.callbacks.BackupAndRestore(str(folder / "backup")),
            keras.callbacks.CSVLogger(str(folder / "history.csv"), append=True),
            keras.callbacks.TensorBoard(str(folder / "tensorboard")),
        ],
    )
    partial = folder / "partial.keras"
    model.save(partial)
    partial.replace(folder / "model.keras")
    print(f"written to {folder / 'model.keras'}")


if __name__ == "__main__":
    app.run(main)
