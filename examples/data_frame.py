"""From a data frame to a robust model: who can flip which decision, and how.

    python examples/data_frame.py

The table is scikit-learn's diabetes study, 442 patients in raw units. Sex is
a category of the study itself, coded 1 and 2. Two columns are derived, because
no table of scikit-learn is more mixed: `build`, the body mass index in the
four classes of the WHO, which an attacker moves in whole steps, and the answer,
whether the disease progressed faster than in half of the patients. The age
can't be changed; to swap the sex costs 2, and the blood pressure lies between
30 and 200.

A network is trained against that attacker. The output says for each patient
how much falsification the decision withstands, the cheapest one that flips it,
and which columns such changes use; then the model is exported with the names
of its columns and classes.
"""

import pathlib

import keras
import numpy as np
import pandas as pd
from absl import app, flags, logging
from sklearn.datasets import load_diabetes

import keras_rub
from keras_rub import datasets, models, serving
from keras_rub.evaluation import plots
from keras_rub.files import write_atomically, write_figure

_OUT = flags.DEFINE_string("out", "out/data_frame", "Folder for the results.")
_EPOCHS = flags.DEFINE_integer("epochs", 40, "Epochs of training.")
_SAMPLES = flags.DEFINE_integer("samples", 40, "Test patients to look at.")
_RHO = flags.DEFINE_float("rho", 0.3, "Price to train for.")
_METHOD = flags.DEFINE_string("method", "auto", "The bound to certify by.")

BUILDS = ["under", "normal", "over", "obese"]


def table():
    """The patients as a data frame of mixed columns."""
    bunch = load_diabetes(scaled=False)
    frame = pd.DataFrame(bunch.data, columns=bunch.feature_names)
    frame = frame.drop(columns="s4")  # the quotient of two others
    build = pd.cut(frame.pop("bmi"), [0, 18.5, 25, 30, 100], labels=BUILDS)
    frame["build"] = build
    frame["sex"] = frame["sex"].astype(int).astype(str)
    fast = bunch.target > np.median(bunch.target)
    frame["progress"] = np.where(fast, "fast", "slow")
    return frame


def train(data):
    """A network that withstands the attacker of the table."""
    keras.utils.set_random_seed(0)
    base = models.mlp(
        data.input_shape,
        data.num_classes,
        hidden=(16,),
        preprocessing=data.preprocessing(),  # the inputs stay raw
    )
    model = keras_rub.RUBModel(
        base, rho=_RHO.value, perturbations=data.perturbations
    )
    model.compile(
        keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy"
    )
    ramp = keras_rub.callbacks.RhoSchedule(epochs=max(_EPOCHS.value // 2, 1))
    model.fit(
        *data.train,
        epochs=_EPOCHS.value,
        batch_size=32,
        callbacks=[ramp],
        verbose=0,
    )
    return model


def main(argv):
    del argv
    logging.set_verbosity(logging.WARNING)  # TensorFlow's notes on saving
    folder = pathlib.Path(_OUT.value)
    frame = table()
    data = datasets.load(
        frame,
        label="progress",
        categories={"sex": 2.0},
        immutable=["age"],
        ranges={"bp": (30, 200)},
    )
    print(frame.head(3).to_string(index=False))
    print(
        f"\nattacker: {data.perturbations}\nprice in units of: {data.units}\n"
    )
    model = train(data)
    x, y = (part[: _SAMPLES.value] for part in data.test)
    print(keras_rub.certify(model, x, y, rho=_RHO.value, method=_METHOD.value))

    found = keras_rub.flips(model, x, data=data, method=_METHOD.value)
    print(f"\n{found}")
    write_figure(plots.price_steps(found), folder / "prices.png")
    write_figure(plots.column_usage(found), folder / "columns.png")
    write_atomically(folder / "flips.csv", found.to_csv())

    # A patient of whom something is known, as a row of the table.
    patient = frame.drop(columns="progress").iloc[[0]]
    decision = data.name_classes(model.predict(data.encode(patient), verbose=0))
    print(f"\nthe first patient of the table: {decision[0]}")
    path = keras_rub.export(
        model, folder / "models" / "progress", metadata=data.metadata
    )
    facts = serving.read_metadata(path)
    print(f"exported with the classes {facts['class_names']} and the columns")
    for column in facts["columns"]:
        print(f"  {column}")
    print(f"\nwritten to {folder}")


if __name__ == "__main__":
    app.run(main)
