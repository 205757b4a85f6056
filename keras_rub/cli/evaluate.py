r"""Attacks and certifies a trained network, and writes a report.

    keras-rub evaluate --model out/rub/model.keras --norms 1,inf \
        --radii 0.5,1,2 --attacks strong --report out/report.html

Data set, normalization and valid range are those of the training, unless a flag
says otherwise. Prints the table and writes beside the report (one HTML file
that refers to no other) the same figures as .csv, .json and .md. An interrupted
run goes on where it stopped when it is given again; other settings for the same
report are refused.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import flags

import keras_rub
from keras_rub.cli import command, saved_run, shared
from keras_rub.cli.parsing import parse_norms, parse_radii
from keras_rub.evaluation import html_report
from keras_rub.files import digest, write_atomically
from keras_rub.resuming import Parts

FLAGS = flags.FlagValues()

_MODEL = shared.define_model(FLAGS)
_DATA = shared.DataFlags(FLAGS)
_ATTACKS = shared.define_attacks(FLAGS, "paper")
_NORMS = flags.DEFINE_list(
    "norms", "1,2,inf", "Norms, with commas.", flag_values=FLAGS
)
_RADII = flags.DEFINE_string(
    "radii",
    "0.1,0.5,1",
    "Radii with commas, for all norms; or for each norm its own: "
    "1:0.5,1;inf:0.01,0.05.",
    flag_values=FLAGS,
)
_CERTIFICATES = shared.define_certificates(FLAGS, "auto")
_INPUT_RANGE = shared.define_range(FLAGS)
_SAMPLES = shared.define_samples(FLAGS, 1000, "test")
_SEED = shared.define_seed(FLAGS, "random starts")
_REPORT = flags.DEFINE_string(
    "report",
    "out/report.html",
    "The report of evaluate, an HTML file.",
    flag_values=FLAGS,
)

_CHUNK = 250  # samples between two savings


def run() -> None:
    """Evaluates as the flags say."""
    norms = parse_norms(_NORMS.value, "norms")
    radii = parse_radii(_RADII.value, "radii", norms)
    attacks = shared.attack_names(_ATTACKS.value)
    report = pathlib.Path(_REPORT.value)
    saved = saved_run.SavedRun.load(_MODEL.value)
    data = _DATA.load(saved.settings)
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
    }
    parts = Parts(report.with_suffix(".state.json"), settings, "--report")
    print(shared.header(data, attackers), flush=True)
    starts = [str(first) for first in range(0, len(x), _CHUNK)]

    def job(first):
        def work():
            some = slice(first, first + _CHUNK)
            return keras_rub.evaluate(
                saved.model,
                x[some],
                y[some],
                radii=radii,
                norms=norms,
                attacks=attacks,
                certificates=(
                    False
                    if _CERTIFICATES.value == "none"
                    else _CERTIFICATES.value
                ),
                seed=_SEED.value,
                verbose=0,
                perturbations=attackers[0],
            ).to_dict()

        return work

    parts.work_off({first: job(int(first)) for first in starts})
    result = keras_rub.Evaluation.merge(
        [keras_rub.Evaluation.from_dict(parts[first]) for first in starts]
    )
    print(result)
    page = html_report(
        result,
        title=f"Robustness of {pathlib.Path(_MODEL.value).name} on {data.name}",
        model=saved.model,
        settings=settings,
        command=command.line("evaluate", FLAGS),
        feature_names=data.feature_names,
    )
    write_atomically(report, page)
    write_atomically(report.with_suffix(".csv"), result.to_csv())
    write_atomically(report.with_suffix(".json"), result.to_json())
    write_atomically(report.with_suffix(".md"), result.to_markdown())
    parts.remove()
    print(f"written to {report}, .csv, .json and .md")


def main(argv: Sequence[str] | None = None) -> int:
    """Calls the command; see `keras_rub.cli.command.call`."""
    return command.call("evaluate", FLAGS, run, argv, about=__doc__)
