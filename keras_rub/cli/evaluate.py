r"""Attacks and certifies a trained network, and writes a report.

    keras-rub evaluate --model out/rub/model.keras --norms 1,inf \
        --radii 0.5,1,2 --attacks strong --report out/report.html

Data set, normalization and valid range are those of the training, unless a flag
says otherwise; the default attacks of a table with categories or weights are
the strong ones, because foolbox's know neither. Prints the table and writes
beside the report (one HTML file that refers to no other) the same figures as
.csv, .json and .md. An interrupted run goes on where it stopped when it is
given again; other settings for the same report are refused.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import keras_rub
from keras_rub.attacks.foolbox_attack import can_respect
from keras_rub.cli import command, saved_run, shared
from keras_rub.cli.parsing import parse_norms, parse_radii
from keras_rub.evaluation import html_report
from keras_rub.files import digest, write_atomically
from keras_rub.resuming import Parts

FLAGS = command.Flags()

_MODEL = shared.define_model(FLAGS)
_DATA = shared.DataFlags(FLAGS)
_ATTACKS = shared.define_attacks(FLAGS, "paper")
_NORMS = FLAGS.words(
    "norms",
    "1,2,inf",
    "Norms, with commas; 1 by default where the attacker switches categories.",
)
_RADII = FLAGS.string(
    "radii",
    "0.1,0.5,1",
    "Radii with commas, for all norms; or for each norm its own: "
    "1:0.5,1;inf:0.01,0.05.",
)
_CERTIFICATES = shared.define_certificates(FLAGS, "auto")
_INPUT_RANGE = shared.define_range(FLAGS)
_SAMPLES = shared.define_samples(FLAGS, 1000, "test")
_SEED = shared.define_seed(FLAGS, "random starts")
_REPORT = FLAGS.string(
    "report", "out/report.html", "The report of evaluate, an HTML file."
)

_FLIPS = FLAGS.whole(
    "flips",
    20,
    "With a CSV file, or where it is given with another table, and norm 1: how "
    "many test rows, from the first, whose certified price and cheapest change "
    "the report spells out.",
    lowest=0,
)

_CHUNK = 250  # samples between two savings


def run() -> None:
    """Evaluates as the flags say."""
    parse_radii(_RADII.value, "radii", parse_norms(_NORMS.value, "norms"))
    shared.attack_names(_ATTACKS.value)
    saved = saved_run.SavedRun.load(_MODEL.value)
    data = _DATA.load(saved.settings)
    norms, attacks = _norms_and_attacks(shared.own_attacker(saved, data), data)
    radii = parse_radii(_RADII.value, "radii", norms)
    attackers = shared.attackers(saved, norms, _INPUT_RANGE.value, data)
    x, y = (part[: _SAMPLES.value] for part in data.test)
    x = saved.inputs(x)
    settings = {
        "model": _MODEL.value,
        "model_sha256": digest(_MODEL.value),
        "data": data.name,
        "source": data.source,
        "units": data.units,
        "attacker": "; ".join(map(str, attackers)),
        "radii": {str(norm): found for norm, found in radii.items()},
        "attacks": attacks,
        "certificates": _CERTIFICATES.value,
        "samples": len(x),
        "seed": _SEED.value,
        "flips": _FLIPS.value,
    }
    report = pathlib.Path(_REPORT.value)
    parts = Parts(report.with_suffix(".state.json"), settings, "--report")
    print(shared.header(data, attackers), flush=True)
    jobs = _jobs(saved.model, x, y, radii, attacks, attackers)
    starts = list(jobs)
    rows = min(_FLIPS.value, len(x)) if _can_flip(data, attackers) else 0
    if rows:
        attacker = attackers[norms.index(1)]
        jobs["flips"] = _flips_job(saved.model, x[:rows], data, attacker)
    parts.work_off(jobs)
    result = keras_rub.Evaluation.merge(
        [keras_rub.Evaluation.from_dict(parts[first]) for first in starts]
    )
    flips = keras_rub.Flips.from_dict(parts["flips"]) if rows else None
    print(result)
    if flips is not None:
        print(f"\n{flips}")
    page = html_report(
        result,
        title=f"Robustness of {pathlib.Path(_MODEL.value).name} on {data.name}",
        model=saved.model,
        settings=settings,
        command=command.line("evaluate", FLAGS),
        feature_names=data.feature_names,
        class_names=data.class_names,
        flips=flips,
        units=data.units,
    )
    write_atomically(report, page)
    write_atomically(report.with_suffix(".csv"), result.to_csv())
    write_atomically(report.with_suffix(".json"), result.to_json())
    write_atomically(report.with_suffix(".md"), result.to_markdown())
    parts.remove()
    print(f"written to {report}, .csv, .json and .md")


def _norms_and_attacks(own, data):
    """Those asked for, or else what suits the attacker of a table."""
    norms = parse_norms(_NORMS.value, "norms")
    if own.categories and not _NORMS.present:
        norms = [1]  # prices and moves add up
    attacks = shared.attack_names(_ATTACKS.value)
    table = data.schema is not None
    if table and not _ATTACKS.present and not can_respect(own):
        attacks = "strong"
    return norms, attacks


def _jobs(model, x, y, radii, attacks, attackers):
    """From the name of each part to what evaluates it."""
    certificates = _CERTIFICATES.value

    def job(first):
        def work():
            some = slice(first, first + _CHUNK)
            return keras_rub.evaluate(
                model,
                x[some],
                y[some],
                radii=radii,
                norms=[attacker.norm for attacker in attackers],
                attacks=attacks,
                certificates=False if certificates == "none" else certificates,
                seed=_SEED.value,
                verbose=0,
                perturbations=attackers[0],
            ).to_dict()

        return work

    return {str(first): job(first) for first in range(0, len(x), _CHUNK)}


def _flips_job(model, x, data, attacker):
    """What finds the cheapest changes of rows of a table."""
    method = _CERTIFICATES.value

    def work():
        return keras_rub.flips(
            model,
            x,
            data=data,
            perturbations=attacker,
            method="fast" if method == "none" else method,
            seed=_SEED.value,
        ).to_dict()

    return work


def _can_flip(data, attackers) -> bool:
    """Whether rows of a table are judged by L1, which prices add up in."""
    wanted = data.schema is not None or _FLIPS.present
    table = wanted and len(data.input_shape) == 1
    return table and any(attacker.norm == 1 for attacker in attackers)


def main(argv: Sequence[str] | None = None) -> int:
    """Calls the command; see `keras_rub.cli.command.call`."""
    return command.call("evaluate", FLAGS, run, argv, about=__doc__)
