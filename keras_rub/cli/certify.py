r"""Certifies a trained network on a data set, at several radii.

    keras-rub certify --model out/rub/model.keras --radii 0.25,0.5,1 \
        --out out/certify

Data set, normalization, norm and valid range are those of the training, unless
a flag says otherwise. Prints one table and writes results.json, results.csv and
certified.png to --out. An interrupted run goes on where it stopped when it is
given again; other settings for the same folder are refused.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
from absl import flags

import keras_rub
from keras_rub import tables
from keras_rub.bounds import methods
from keras_rub.cli import command, saved_run, shared
from keras_rub.cli.parsing import parse_radii
from keras_rub.evaluation.plots import line_style, radius_label
from keras_rub.files import digest, write_atomically, write_figure
from keras_rub.resuming import Parts

FLAGS = command.Flags()

_MODEL = shared.define_model(FLAGS)
_DATA = shared.DataFlags(FLAGS)
_RADII = FLAGS.string("radii", "0.1,0.5,1", "Radii, with commas.")
flags.DEFINE_alias("rho", "radii", flag_values=FLAGS)
_NORM = shared.define_norm(FLAGS)
_METHOD = FLAGS.words(
    "method", "auto", f"One or more of {', '.join(methods.names())}."
)
_INPUT_RANGE = shared.define_range(FLAGS)
_SAMPLES = shared.define_samples(FLAGS, 1000, "test")
_OUT = shared.define_out(FLAGS, "out/certify")

_CHUNK = 256  # samples between two savings


def run() -> None:
    """Certifies as the flags say."""
    unknown = sorted(set(_METHOD.value) - set(methods.names()))
    if unknown or not _METHOD.value:
        raise ValueError(
            f"--method must be some of {', '.join(methods.names())}. "
            f"Received: {','.join(_METHOD.value)}"
        )
    saved = saved_run.SavedRun.load(_MODEL.value)
    data = _DATA.load(saved.settings)
    attacker = shared.attackers(
        saved, [_NORM.value] if _NORM.value else None, _INPUT_RANGE.value, data
    )[0]
    radii = parse_radii(_RADII.value, "radii", [attacker.norm])[attacker.norm]
    x, y = (part[: _SAMPLES.value] for part in data.test)
    x = saved.inputs(x)
    folder = pathlib.Path(_OUT.value)
    parts = Parts(
        folder / "results.json",
        {
            "model_sha256": digest(_MODEL.value),
            "dataset": data.name,
            "units": data.units,
            "attacker": attacker.get_config(),
            "methods": _METHOD.value,
            "radii": radii,
            "samples": _SAMPLES.value,
        },
    )
    print(shared.header(data, [attacker]), flush=True)
    parts.work_off(_jobs(saved.model, x, y, radii, attacker))
    rows = _collect(parts, radii, len(x))
    columns = list(rows[0])
    cells = [
        [row["method"], *(tables.percent(row[c], 2) for c in columns[1:])]
        for row in rows
    ]
    print(f"\nCertified accuracy, {attacker}, {data.name}")
    print(tables.to_text(columns, cells))
    write_atomically(folder / "results.csv", tables.to_csv(rows))
    _draw(rows, radii, attacker, data.name, len(x), folder)
    print(f"\nwritten to {folder}")


def _jobs(model, x, y, radii, attacker):
    """From the name of each part to what certifies it."""

    def job(method, first):
        def work():
            some = slice(first, first + _CHUNK)
            table = keras_rub.certify(
                model,
                x[some],
                y[some],
                rho=radii,
                method=method,
                decide_only=True,
                verbose=0,
                perturbations=attacker,
            )
            return {
                "correct": (table[0].predicted == table[0].labels).tolist(),
                "certified": [c.certified.tolist() for c in table],
            }

        return work

    return {
        f"{method}:{first}": job(method, first)
        for method in _METHOD.value
        for first in range(0, len(x), _CHUNK)
    }


def _collect(parts, radii, count):
    """One row a method: clean accuracy, then certified at each radius."""
    rows = []
    for method in _METHOD.value:
        found = [
            parts[f"{method}:{first}"] for first in range(0, count, _CHUNK)
        ]
        correct = np.concatenate([part["correct"] for part in found])
        certified = np.concatenate(
            [np.array(part["certified"]) for part in found], axis=1
        )
        shares = certified.mean(axis=1).tolist()
        names = (f"{rho:g}" for rho in radii)
        rows.append(
            {
                "method": method,
                "clean": float(correct.mean()),
                **dict(zip(names, shares, strict=True)),
            }
        )
    return rows


def _draw(rows, radii, attacker, name, count, folder):
    """Certified accuracy over the radius, a line a method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(rows):
        shares = [row["clean"], *(row[f"{rho:g}"] for rho in radii)]
        axes.plot(
            [0.0, *radii],
            100 * np.array(shares),
            **line_style(number),
            label=row["method"],
        )
    axes.set_xlabel(f"L{attacker.norm}, {radius_label(attacker)}")
    axes.set_ylabel("certified accuracy, %")
    axes.set_ylim(0, 102)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(f"{name}, {count} test samples")
    write_figure(figure, folder / "certified.png")


def main(argv: Sequence[str] | None = None) -> int:
    """Calls the command; see `keras_rub.cli.command.call`."""
    return command.call("certify", FLAGS, run, argv, about=__doc__)
