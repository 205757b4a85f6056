"""Trains one network with one defence.

    python tools/train.py --dataset digits --defense rub --rho 1 --out out/rub

Writes to --out: model.keras, history.csv, config.json, TensorBoard logs and
checkpoints. A run that was interrupted goes on where it stopped when the same
command is given again; another command for the same folder is refused. On
several machines that share --out, give the same command on each, with
--strategy multiworker and TF_CONFIG set.
"""

import pathlib

from absl import app, flags

from keras_rub import datasets, distribution, training

_DATASET = flags.DEFINE_string(
    "dataset", "digits", "Name of the data set, or a .csv or .npz file."
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir",
    None,
    "Folder with NAME.npz files; the environment variable KERAS_RUB_DATA by "
    "default.",
)
_LABEL = flags.DEFINE_string(
    "label", None, "Column of a CSV file with the classes; the last by default."
)
_NORMALIZATION = flags.DEFINE_enum(
    "normalization",
    "default",
    list(datasets.NORMALIZATIONS),
    "Inputs in [0, 1], standardised, or raw.",
)
_DEFENSE = flags.DEFINE_enum(
    "defense", "rub", list(training.DEFENSES), "How to train."
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
    "With rub, coap, pgd, fgsm: hold the attacker to the data set's valid "
    "range.",
)
_VERTICES = flags.DEFINE_integer(
    "vertices", 32, "With rub: vertices a sample to evaluate.", lower_bound=1
)
_ATTACK_STEPS = flags.DEFINE_integer(
    "attack_steps", 10, "With pgd: steps of the attack.", lower_bound=1
)
_ARCHITECTURE = flags.DEFINE_enum(
    "architecture",
    "mlp",
    list(training.ARCHITECTURES),
    "The network: three hidden layers of 200, one, or the paper's CNN.",
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
_STRATEGY = flags.DEFINE_enum(
    "strategy",
    "none",
    list(distribution.STRATEGIES),
    "One device, all devices of this machine, or the machines of TF_CONFIG.",
)
_OUT = flags.DEFINE_string("out", None, "Folder for the results.")
flags.mark_flag_as_required("out")


def main(argv):
    del argv
    try:
        # Several machines must be joined before TensorFlow does anything.
        strategy = distribution.make_strategy(_STRATEGY.value)
        recipe = training.Recipe(
            defense=_DEFENSE.value,
            norm=_NORM.value if _NORM.value == "inf" else int(_NORM.value),
            rho=_RHO.value,
            rho_ramp=_RHO_RAMP.value,
            input_range=_INPUT_RANGE.value,
            vertices=_VERTICES.value,
            attack_steps=_ATTACK_STEPS.value,
            architecture=_ARCHITECTURE.value,
            learning_rate=_LEARNING_RATE.value,
            weight_decay=_WEIGHT_DECAY.value,
            batch_size=_BATCH_SIZE.value,
            steps=_STEPS.value,
            seed=_SEED.value,
        )
        data = datasets.load(
            _DATASET.value,
            _DATA_DIR.value,
            normalization=_NORMALIZATION.value,
            label=_LABEL.value,
        )
        folder = pathlib.Path(_OUT.value)
        if (folder / "model.keras").exists():
            print(f"{folder} is finished already")
        else:
            print(f"radius in units of: {data.units}", flush=True)
        path = training.train_in_folder(recipe, data, folder, strategy=strategy)
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    print(f"written to {path}")


if __name__ == "__main__":
    app.run(main)
