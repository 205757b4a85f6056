r"""Trains one network with one defence.

    keras-rub train --dataset digits --defense rub --rho 1 --out out/rub

Writes to --out: model.keras, history.csv, config.json, TensorBoard logs and
checkpoints. A run that was interrupted goes on where it stopped when the same
command is given again; another command for the same folder is refused. The
other commands take their defaults from config.json. On several machines that
share --out, give the same command on each, with --strategy multiworker and
TF_CONFIG set.
"""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Sequence
from typing import Any

from absl import flags

from keras_rub import distribution, training
from keras_rub.cli import command, shared
from keras_rub.cli.parsing import parse_count, parse_range

FLAGS = command.Flags()

_DATA = shared.DataFlags(FLAGS, trained=False)
_DEFENSE = FLAGS.choice(
    "defense", "rub", training.DEFENSES, "How to train; rub is for norm 1 only."
)
_NORM = shared.define_norm(FLAGS, "1")
_RHO = FLAGS.number(
    "rho", 1.0, "Radius, in the units that the network sees.", lowest=0
)
_RHO_RAMP = FLAGS.number(
    "rho_ramp",
    0.5,
    "Part of the training over which the radius grows from 0.",
    lowest=0,
    highest=1,
)
_INPUT_RANGE = shared.define_range(FLAGS, "none")
_VERTICES = FLAGS.whole(
    "vertices", 32, "With rub: vertices a sample to evaluate.", lowest=1
)
_COMPETITORS = FLAGS.string(
    "competitors",
    "1",
    "With rub and arub: competing classes a sample that a step looks at, a "
    "number or all.",
)
_ATTACK_STEPS = FLAGS.whole(
    "attack_steps",
    10,
    "With pgd, and with ibp below --bound_weight 1: steps of the attack.",
    lowest=1,
)
_MIX = FLAGS.number(
    "mix",
    1.0,
    "Weight of the robust loss against the clean one.",
    lowest=0,
    highest=1,
)
_BOUND = FLAGS.choice(
    "bound",
    "ibp",
    ["ibp", "crown-ibp"],
    "With ibp: intervals, or linear bounds on interval ranges.",
)
_BOUND_WEIGHT = FLAGS.number(
    "bound_weight",
    1.0,
    "With ibp: weight of the bound against the loss under attack (the alpha "
    "of MTL-IBP).",
    lowest=0,
    highest=1,
)
_ARCHITECTURE = FLAGS.choice(
    "architecture",
    "mlp",
    training.ARCHITECTURES,
    "The network: three hidden layers of 200, one, three of 512, the paper's "
    "CNN, a small one with strides (conv16-conv32-dense100), or a wider one "
    "(conv32-conv64-dense256).",
)
_HEAD = FLAGS.choice(
    "head",
    "logits",
    training.HEADS,
    "How the network ends; sigmoid is one output, for two classes.",
)
_LEARNING_RATE = FLAGS.number(
    "learning_rate", 1e-3, "Of Adam, at the start of a cosine decay."
)
_WEIGHT_DECAY = FLAGS.number(
    "weight_decay", 0.0, "Decoupled weight decay of Adam.", lowest=0
)
_BATCH_SIZE = FLAGS.whole("batch_size", 128, "Samples a step.", lowest=1)
_STEPS = FLAGS.whole("steps", 2000, "Training steps.", lowest=1)
_SHIFT = FLAGS.whole(
    "shift",
    0,
    "Pixels by which training images are moved at most, in either direction.",
    lowest=0,
)
_FLIP = FLAGS.switch(
    "flip", False, "Mirror training images at random, left to right."
)
_SEED = shared.define_seed(FLAGS, "weights and of the shuffling")
_STRATEGY = FLAGS.choice(
    "strategy",
    "none",
    distribution.STRATEGIES,
    "One device, all devices of this machine, or the machines of TF_CONFIG.",
)
_OUT = shared.define_out(FLAGS, None)
flags.mark_flag_as_required("out", flag_values=FLAGS)


def run() -> None:
    """Trains as the flags say."""
    # Several machines must be joined before TensorFlow does anything.
    strategy = distribution.make_strategy(_STRATEGY.value)
    found = parse_range(_INPUT_RANGE.value, "input_range")
    recipe = training.Recipe(
        defense=_DEFENSE.value,
        norm=_NORM.value if _NORM.value == "inf" else int(_NORM.value),
        rho=_RHO.value,
        rho_ramp=_RHO_RAMP.value,
        input_range=found if isinstance(found, tuple) else found == "data",
        vertices=_VERTICES.value,
        competitors=parse_count(_COMPETITORS.value, "competitors"),
        attack_steps=_ATTACK_STEPS.value,
        mix=_MIX.value,
        bound=_BOUND.value,
        bound_weight=_BOUND_WEIGHT.value,
        architecture=_ARCHITECTURE.value,
        head=_HEAD.value,
        learning_rate=_LEARNING_RATE.value,
        weight_decay=_WEIGHT_DECAY.value,
        batch_size=_BATCH_SIZE.value,
        steps=_STEPS.value,
        shift=_SHIFT.value,
        flip=_FLIP.value,
        seed=_SEED.value,
    )
    data = _DATA.load()
    folder = pathlib.Path(_OUT.value)
    if (folder / "model.keras").exists():
        print(f"{folder} is finished already")
    else:
        print(f"radius in units of: {data.units}", flush=True)
    path = training.train_in_folder(recipe, data, folder, strategy=strategy)
    print(f"written to {path}")


def line_of(settings: dict[str, Any], out: str) -> str:
    """The command line that trains with these settings.

    Args:
        settings: what `keras_rub.training.settings_of` made, of a data set
            that has a name.
        out: the value of --out.
    """
    words = []
    first = ["dataset", "defense", "norm", "rho", "steps"]  # said in any case
    for name in [*first, *(name for name in FLAGS if name not in first)]:
        if name not in settings:
            continue
        value, flag = settings[name], FLAGS[name]
        if flag.boolean:
            if value != flag.default:
                words.append(f"--{name}" if value else f"--no{name}")
        elif name in first or _text(value) != _text(flag.default):
            words += [f"--{name}", _text(value)]
    return shlex.join([command.PROGRAM, "train", *words, "--out", out])


def _text(value) -> str:
    """A setting as its flag takes it."""
    if isinstance(value, bool):  # of --input_range, which is no switch
        return "data" if value else "none"
    if isinstance(value, (list, tuple)):
        return ",".join(map(_text, value))
    if isinstance(value, float) and value == float(f"{value:g}"):
        return f"{value:g}"
    return str(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Calls the command; see `keras_rub.cli.command.call`."""
    return command.call("train", FLAGS, run, argv, about=__doc__)
