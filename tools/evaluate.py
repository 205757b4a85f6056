"""Attacks and certifies a trained model, and writes a report.

    python tools/evaluate.py --model out/rub/model.keras --dataset digits \
        --norms 1,inf --radii 0.5,1,2 --attacks strong --report out/report.html

Prints the table and writes beside the report (one HTML file that refers to no
other) the same figures as .csv, .json and .md. An interrupted run goes on
where it stopped when it is given again; other settings for the same report
are refused.
"""

import json
import pathlib
import shlex
import sys
import time

from absl import app, flags

import keras_rub
from keras_rub import datasets
from keras_rub.attacks.suite import names_of
from keras_rub.evaluation import html_report
from keras_rub.files import digest, write_atomically
from keras_rub.loading import load_model

_MODEL = flags.DEFINE_string(
    "model", None, "A .keras file or a SavedModel folder."
)
_DATASET = flags.DEFINE_string("dataset", None, "Name of the data set.")
_DATA = flags.DEFINE_string(
    "data", None, "A .csv or .npz file, instead of --dataset."
)
_LABEL = flags.DEFINE_string(
    "label", None, "Column of a CSV file with the classes; the last by default."
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir",
    None,
    "Folder with NAME.npz files; the environment variable KERAS_RUB_DATA by "
    "default.",
)
_NORMALIZATION = flags.DEFINE_enum(
    "normalization",
    "default",
    list(datasets.NORMALIZATIONS),
    "As in training.",
)
_ATTACKS = flags.DEFINE_list(
    "attacks",
    ["paper"],
    "paper, strong, none, or names with commas: "
    + ", ".join(keras_rub.attacks.NAMES),
)
_NORMS = flags.DEFINE_list("norms", ["1", "2", "inf"], "Norms, with commas.")
_RADII = flags.DEFINE_string(
    "radii",
    "0.1,0.5,1",
    "Radii with commas, for all norms; or for each norm its own: "
    "'1:0.5,1;inf:0.01,0.05'.",
)
_CERTIFICATES = flags.DEFINE_enum(
    "certificates",
    "auto",
    ["none", "auto", "rub", "alpha-rub", "crown", "coap"],
    "How to certify.",
)
_INPUT_RANGE = flags.DEFINE_bool(
    "input_range",
    True,
    "Hold the attacker to the data set's valid range, if it has one.",
)
_SAMPLES = flags.DEFINE_integer(
    "samples", 1000, "How many test samples, from the first.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "Of random starts.")
_REPORT = flags.DEFINE_string(
    "report", "out/report.html", "Where to write the HTML report."
)

_CHUNK = 250  # samples between two savings


def parse_radii(text: str, norms: list[str]) -> dict[str, list[float]]:
    """The radii of each norm."""
    try:
        if ":" not in text:
            return dict.fromkeys(norms, [float(r) for r in text.split(",")])
        pairs = (part.split(":") for part in text.split(";"))
        return {n.strip(): [float(r) for r in rs.split(",")] for n, rs in pairs}
    except ValueError:
        raise app.UsageError(
            "--radii must be numbers with commas, or NORM:numbers with "
            f"semicolons between. Received: {text}"
        ) from None


def resume(path: pathlib.Path, settings: dict) -> dict:
    """The state of an earlier run of the same settings, or a new one."""
    if path.exists():
        state = json.loads(path.read_text())
        if state["settings"] == settings:
            return state
        changed = sorted(
            key
            for key in settings
            if state["settings"].get(key) != settings[key]
        )
        raise app.UsageError(
            f"{path} holds another evaluation: {', '.join(changed)} differ. "
            "Choose another --report."
        )
    return {"settings": settings, "parts": []}


def run(model, x, y, settings, state, path, input_range):
    """Evaluates chunk by chunk, saving after each."""
    starts = list(range(0, len(x), _CHUNK))
    done = len(state["parts"])
    if done:
        print(f"resuming: {done} of {len(starts)} parts done")
    begin = time.monotonic()
    for number, first in enumerate(starts[done:], start=1):
        some = slice(first, first + _CHUNK)
        result = keras_rub.evaluate(
            model,
            x[some],
            y[some],
            radii=settings["radii"],
            norms=settings["norms"],
            attacks=settings["attacks"],
            certificates=settings["certificates"],
            input_range=input_range,
            seed=settings["seed"],
            verbose=0,
        )
        state["parts"].append(result.to_dict())
        write_atomically(path, json.dumps(state))
        spent = time.monotonic() - begin
        left = spent / number * (len(starts) - done - number)
        end = min(first + _CHUNK, len(x))
        print(f"{end}/{len(x)} samples, {left:.0f} s left", flush=True)
    return keras_rub.Evaluation.merge(
        [keras_rub.Evaluation.from_dict(part) for part in state["parts"]]
    )


def read_settings(data) -> dict:
    """Everything that decides the figures."""
    attacks = _ATTACKS.value
    if attacks == ["none"]:
        attacks = []
    elif attacks in (["paper"], ["strong"]):
        (attacks,) = attacks
    names_of(attacks)
    norms = [n if n == "inf" else int(n) for n in _NORMS.value]
    return {
        "model": _MODEL.value,
        "model_sha256": digest(pathlib.Path(_MODEL.value)),
        "data": _DATA.value or _DATASET.value or "digits",
        "source": data.source,
        "units": data.units,
        "norms": norms,
        "radii": parse_radii(_RADII.value, _NORMS.value),
        "attacks": attacks,
        "certificates": (
            False if _CERTIFICATES.value == "none" else _CERTIFICATES.value
        ),
        "input_range": bool(_INPUT_RANGE.value and data.input_range),
        "samples": min(_SAMPLES.value, len(data.test[0])),
        "seed": _SEED.value,
    }


def main(argv):
    del argv
    if not _MODEL.value:
        raise app.UsageError("--model must name a .keras file or SavedModel.")
    if _DATA.value and _DATASET.value:
        raise app.UsageError("Give --dataset or --data, not both.")
    report = pathlib.Path(_REPORT.value)
    state_path = report.with_suffix(".state.json")
    try:
        model = load_model(_MODEL.value)
        data = datasets.load(
            _DATA.value or _DATASET.value or "digits",
            _DATA_DIR.value,
            normalization=_NORMALIZATION.value,
            label=_LABEL.value,
        )
        settings = read_settings(data)
        state = resume(state_path, settings)
        x, y = (part[: settings["samples"]] for part in data.test)
        x = x.reshape(len(x), *model.input_shape[1:])
        input_range = data.input_range if settings["input_range"] else None
        result = run(model, x, y, settings, state, state_path, input_range)
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    print(result)
    command = shlex.join(["python", *sys.argv])
    page = html_report(
        result,
        title=f"Robustness of {pathlib.Path(_MODEL.value).name} on "
        f"{settings['data']}",
        model=model,
        settings=settings,
        command=command,
        feature_names=data.feature_names,
    )
    write_atomically(report, page)
    write_atomically(report.with_suffix(".csv"), result.to_csv())
    write_atomically(report.with_suffix(".json"), result.to_json())
    write_atomically(report.with_suffix(".md"), result.to_markdown())
    state_path.unlink()
    print(f"written to {report}, .csv, .json and .md")


if __name__ == "__main__":
    app.run(main)
