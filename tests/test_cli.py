"""The commands: what they do, what they refuse, and in how many words."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_rub
from keras_rub import datasets, tables
from keras_rub.cli import evaluate, main, parsing
from keras_rub.resuming import Parts, claim
from tests.calling import call, refused

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A network for iris, trained by the command."""
    folder = tmp_path_factory.mktemp("trained")
    code = main.main(
        ["train", "--dataset=iris", "--rho=0.2", "--steps=40",
         "--batch_size=32", "--architecture=mlp1", f"--out={folder}"]
    )  # fmt: skip
    assert code == 0
    return folder


# What they do ----------------------------------------------------------------


@pytest.mark.eager
def test_train_and_certify(trained, tmp_path, capsys):
    history = (trained / "history.csv").read_text().splitlines()
    assert len(history) == 21 and "clean_loss" in history[0]
    settings = {
        "dataset": "iris",
        "rho": 0.2,
        "steps": 40,
        "batch_size": 32,
        "architecture": "mlp1",
        "out": trained,
    }
    assert "finished" in call(capsys, "train", **settings)
    line = refused(capsys, "train", **{**settings, "rho": 0.3})
    assert "rho differ" in line

    certified = {
        "model": trained / "model.keras",
        "radii": "0.05,0.3",
        "method": "rub,crown",
        "samples": 30,
        "out": tmp_path,
    }
    printed = call(capsys, "certify", **certified)
    assert "part 2 of 2 (crown:0) done" in printed
    assert "data: iris, normalization standard" in printed
    assert "radius in units of: features standardised" in printed
    assert "attacker: L1\n" in printed
    rows = (tmp_path / "results.csv").read_text().splitlines()
    assert rows[0] == "method,clean,0.05,0.3" and len(rows) == 3
    assert (tmp_path / "certified.png").stat().st_size > 10_000
    # A part that is lost is done again, the others are not.
    state = json.loads((tmp_path / "results.json").read_text())
    del state["done"]["crown:0"]
    (tmp_path / "results.json").write_text(json.dumps(state))
    printed = call(capsys, "certify", **certified)
    assert "1 of 2 parts done" in printed
    assert (tmp_path / "results.csv").read_text().splitlines() == rows
    line = refused(capsys, "certify", **{**certified, "samples": 20})
    assert "samples differ" in line and "another --out" in line


def test_units_and_range_travel_with_the_model(tmp_path, capsys):
    """Standardised digits are certified as such, without a word about it."""
    call(
        capsys,
        "train",
        dataset="digits",
        normalization="standard",
        architecture="mlp1",
        input_range="-999,999",
        defense="pgd",
        attack_steps=1,
        rho=0.2,
        steps=20,
        out=tmp_path / "run",
    )
    model_file = tmp_path / "run" / "model.keras"
    ours = {
        "model": model_file,
        "samples": 40,
        "radii": "0.1",
        "method": "crown",
    }
    printed = call(capsys, "certify", **ours, out=tmp_path / "c")
    assert "digits, normalization standard" in printed
    assert "attacker: L1, inputs in [-999, 999]" in printed
    data = datasets.load("digits", normalization="standard")
    model = keras.models.load_model(model_file)
    x, y = (part[:40] for part in data.test)
    expected = keras_rub.certify(
        model, x, y, rho=0.1, method="crown", input_range=(-999, 999)
    )
    (row,) = (tmp_path / "c" / "results.csv").read_text().splitlines()[1:]
    assert [float(cell) for cell in row.split(",")[1:]] == pytest.approx(
        [expected.clean_accuracy, expected.certified_accuracy]
    )
    assert expected.clean_accuracy > 0.3
    printed = call(
        capsys, "certify", **ours, input_range="none", out=tmp_path / "d"
    )
    assert "attacker: L1\n" in printed
    for flag, value in (("normalization", "unit"), ("dataset", "iris")):
        line = refused(capsys, "certify", **ours, **{flag: value})
        assert f"--{flag} contradicts the model's training" in line


@pytest.mark.eager
def test_mask_and_norm_of_a_robust_model(tmp_path, capsys):
    """Without a saved run the model itself still tells its attacker."""
    keras.utils.set_random_seed(0)
    mask = [True, False, True, False]
    model = keras_rub.ARUBModel(
        keras_rub.models.mlp((4,), 3, hidden=(8,)), norm="inf", mask=mask
    )
    model.save(tmp_path / "masked.keras")
    ours = {"model": tmp_path / "masked.keras", "radii": "0.5", "samples": 30}
    assert "--dataset is needed" in refused(capsys, "certify", **ours)
    ours["dataset"] = "iris"
    printed = call(
        capsys, "certify", **ours, method="crown", out=tmp_path / "c"
    )
    assert "attacker: Linf, 2 of 4 free" in printed
    x, y = (part[:30] for part in datasets.load("iris").test)
    expected = keras_rub.certify(
        model, x, y, rho=0.5, norm="inf", mask=mask, method="crown"
    )
    table = (tmp_path / "c" / "results.csv").read_text().splitlines()
    assert float(table[1].split(",")[2]) == pytest.approx(
        expected.certified_accuracy
    )


@pytest.mark.eager
def test_evaluate(trained, tmp_path, capsys, monkeypatch):
    settings = {
        "model": trained / "model.keras",
        "norms": "1,inf",
        "radii": "1:0.2,0.5;inf:0.1",
        "attacks": "pgd",
        "certificates": "crown",
        "report": tmp_path / "report.html",
    }
    monkeypatch.setattr(evaluate, "_CHUNK", 20)
    # Interrupted after the first part, it goes on with the second.
    real, calls = keras_rub.evaluate, []

    def interrupted(*args, **kwargs):
        if calls:
            raise KeyboardInterrupt
        calls.append(1)
        return real(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(keras_rub, "evaluate", interrupted)
        words = [f"--{name}={value}" for name, value in settings.items()]
        assert main.main(["evaluate", *words]) == 130
    assert capsys.readouterr().err == "keras-rub evaluate: interrupted\n"
    line = refused(capsys, "evaluate", **settings, seed=1)
    assert "seed differ" in line and "another --report" in line
    printed = call(capsys, "evaluate", **settings)
    assert "resuming: 1 of 2 parts done" in printed
    assert "worst" in printed and "30 samples" in printed
    assert "attacker: L1; Linf\n" in printed
    page = (tmp_path / "report.html").read_text()
    for text in ("standardised", "keras_rub", "dense", "keras-rub evaluate"):
        assert text in page
    for ending in ("csv", "json", "md"):
        assert (tmp_path / f"report.{ending}").stat().st_size > 100
    assert not (tmp_path / "report.state.json").exists()


def test_evaluate_a_saved_model(tmp_path, capsys):
    """Of any origin: it is attacked, but can't be certified."""
    keras.utils.set_random_seed(0)
    base = keras_rub.models.mlp((4,), 3, hidden=(8,))
    base.export(str(tmp_path / "saved"), verbose=False)
    printed = call(
        capsys,
        "evaluate",
        model=tmp_path / "saved",
        dataset="iris",
        norms="2",
        radii="0.5",
        attacks="pgd",
        report=tmp_path / "report.html",
    )
    assert "note: No certificate" in printed and "30 samples" in printed


@pytest.mark.eager
def test_label_of_a_table_travels(tmp_path, capsys):
    rows = [f"{i % 2},{i % 2 + i / 100},{i / 50}" for i in range(60)]
    (tmp_path / "own.csv").write_text("answer,a,b\n" + "\n".join(rows) + "\n")
    call(
        capsys,
        "train",
        dataset=tmp_path / "own.csv",
        label="answer",
        defense="nominal",
        architecture="mlp1",
        steps=4,
        out=tmp_path / "run",
    )
    ours = {"model": tmp_path / "run" / "model.keras", "radii": "0.1"}
    call(capsys, "certify", **ours, method="rub", out=tmp_path / "c")
    line = refused(capsys, "certify", **ours, label="b")
    assert "--label contradicts" in line and "answer" in line


# What they refuse ------------------------------------------------------------


BAD = [
    ("train", {"dataset": "irsi"}, "Near names: ['iris'"),
    ("train", {"rho": -1}, "--rho=-1"),
    ("train", {"rho": "small"}, "--rho=small"),
    ("train", {"rho": "nan"}, "finite"),
    ("train", {"batch_size": 0}, "--batch_size=0"),
    ("train", {"learning_rate": -1}, "above 0"),
    ("train", {"learning_rate": 0}, "above 0"),
    ("train", {"learning_rate": "inf"}, "finite"),
    ("train", {"steps": 0}, "--steps=0"),
    ("train", {"seed": -1}, "--seed=-1"),
    ("train", {"defense": "rubb"}, "--defense=rubb"),
    ("train", {"competitors": 0}, "--competitors must be all or"),
    ("train", {"competitors": "some"}, "--competitors must be all or"),
    ("train", {"defense": "rub", "norm": 2}, "norm 1 only"),
    ("train", {"norm": 3}, "--norm=3"),
    ("train", {"architecture": "vit"}, "--architecture=vit"),
    ("train", {"normalization": "half"}, "--normalization=half"),
    ("train", {"input_range": "0"}, "LOW,HIGH"),
    ("train", {"input_range": "1,0"}, "LOW below HIGH"),
    ("train", {"input_range": "data"}, "no valid range"),
    ("train", {"defense": "arub", "input_range": "0,1"}, "valid range"),
    ("train", {"data_dir": "nowhere", "dataset": "mnist"}, "nowhere"),
    ("train", {"dataset": "nowhere.csv"}, "does not exist"),
    ("train", {"dataset": "setup.py.csv"}, "does not exist"),
    ("train", {"label": "x", "dataset": "{folder}/table.csv"}, "no column"),
    ("train", {"rhoo": 1}, "Unknown command line flag 'rhoo'"),
    ("train", {"out": "{folder}/file/run"}, "file"),
    ("certify", {"model": "nowhere.keras"}, "no model at nowhere.keras"),
    ("certify", {"model": ""}, "--model must name"),
    ("certify", {"model": "{folder}/broken.keras"}, "no Keras model"),
    ("certify", {"model": "{folder}/table.csv"}, "neither a .keras file"),
    ("certify", {"model": "{folder}/empty"}, "no SavedModel"),
    ("certify", {"method": "lp"}, "--method must be some of auto, fast, rub"),
    ("certify", {"method": "crown,lp"}, "Received: crown,lp"),
    ("certify", {"method": ""}, "--method must be"),
    ("certify", {"radii": "a,b"}, "--radii must be numbers"),
    ("certify", {"radii": ""}, "--radii must be numbers"),
    ("certify", {"radii": "0.1,-1"}, "at least 0"),
    ("certify", {"radii": "inf:1"}, "--radii must be"),
    ("certify", {"rho": "0.1;0.2"}, "--radii must be numbers"),
    ("certify", {"norm": 2, "method": "rub"}, "can't do norm 2"),
    ("certify", {"samples": 0}, "--samples=0"),
    ("certify", {"input_range": "yes"}, "LOW,HIGH"),
    ("certify", {"input_range": "data"}, "no valid range"),
    ("certify", {"input_range": "0,0.1"}, "input_range"),
    ("certify", {"normalization": "none"}, "contradicts"),
    ("certify", {"dataset": "digits"}, "contradicts"),
    ("certify", {"out": "{folder}/claimed"}, "holds no earlier run"),
    ("evaluate", {"model": "nowhere.keras"}, "no model at"),
    ("evaluate", {"model": "{folder}/other.keras"}, "takes inputs of shape"),
    ("evaluate", {"attacks": "best"}, "Unknown attack 'best'"),
    ("evaluate", {"attacks": "none,pgd"}, "Unknown attack 'none'"),
    ("evaluate", {"norms": "1,3"}, "--norms must be"),
    ("evaluate", {"norms": "1,1"}, "each once"),
    ("evaluate", {"norms": ""}, "--norms must be"),
    ("evaluate", {"radii": "a,b"}, "--radii must be"),
    ("evaluate", {"radii": "1:0.5", "norms": "1,2"}, "--radii must be"),
    ("evaluate", {"radii": "1:"}, "--radii must be"),
    ("evaluate", {"radii": "nan"}, "--radii must be"),
    ("evaluate", {"certificates": "lp"}, "--certificates=lp"),
    ("evaluate", {"samples": -3}, "--samples=-3"),
    ("evaluate", {"input_range": "0;1"}, "LOW,HIGH"),
    ("evaluate", {"dataset": "wien"}, "contradicts"),
    ("tune", {"dataset": "irsi"}, "Near names: ['iris'"),
    ("tune", {"radii": "1=3"}, "--radii must be NORM:numbers"),
    ("tune", {"radii": "0.5,1"}, "--radii must be NORM:numbers"),
    ("tune", {"radii": "7:1"}, "--radii must be NORM:numbers"),
    ("tune", {"attacks": "x"}, "Unknown attack"),
    ("tune", {"certificates": "x"}, "--certificates=x"),
    ("tune", {"oracle": "delphi"}, "--oracle=delphi"),
    ("tune", {"objective": "best"}, "`objective` must be"),
    ("tune", {"objective": "attacked:1:9"}, "`objective` must be"),
    ("tune", {"max_trials": 0}, "--max_trials=0"),
    ("tune", {"max_minutes": -1}, "--max_minutes=-1"),
    ("tune", {"space": "none.yaml"}, "no search space"),
    ("tune", {"space": "rho: [small]"}, "rho must hold numbers"),
    ("tune", {"space": "rho: [-1]"}, "rho must hold numbers, at least 0"),
    ("tune", {"space": "rho: [true]"}, "rho must hold numbers"),
    ("tune", {"space": "rho: {a: 1}"}, "rho must hold numbers"),
    ("tune", {"space": "rho:"}, "rho must hold numbers"),
    ("tune", {"space": "rho: []"}, "at least one value"),
    ("tune", {"space": "batch_size: [0]"}, "batch_size must hold numbers"),
    ("tune", {"space": "batch_size: [2.5]"}, "whole"),
    ("tune", {"space": "learning_rate: [-1]"}, "above 0"),
    ("tune", {"space": "defense: [rubb]"}, "'rubb'"),
    ("tune", {"space": "defense: [[rub]]"}, "A defence is one of"),
    ("tune", {"space": "normalization: [[x]]"}, "normalization must be"),
    ("tune", {"space": "scaled: [1]"}, "scaled must be true or false"),
    ("tune", {"space": "depth: [2]"}, "has the keys"),
    ("tune", {"space": "[1, 2"}, "no search space"),
    ("tune", {"space": "just words"}, "has the keys"),
    ("export", {"model": "nowhere.keras"}, "no model at"),
    ("export", {"model": "{folder}/broken.keras"}, "no Keras model"),
    ("export", {"signatures": "predict"}, "signatures"),
    ("export", {"method": "auto"}, "--method=auto"),
    ("export", {"norm": 2, "method": "rub"}, "can't do norm 2"),
    ("export", {"version": -1}, "at least 1"),
    ("export", {"version": "one"}, "--version=one"),
    ("export", {"report": "{folder}/broken.keras"}, "no JSON file"),
    ("export", {"input_range": "0"}, "LOW,HIGH"),
    ("export", {"normalization": "unit"}, "contradicts"),
    ("export", {"out": "{folder}/file"}, "folder that can be written"),
]


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    (folder / "broken.keras").write_bytes(b"no zip file \xff")
    (folder / "file").write_text("a file, not a folder")
    (folder / "empty").mkdir()
    (folder / "claimed").mkdir()
    (folder / "claimed" / "results.json").write_text("[1]")
    (folder / "table.csv").write_text("a,b\n" + "1,0\n2,1\n" * 10)
    base = keras_rub.models.mlp((7,), 3, hidden=(4,))
    base.save(folder / "other.keras")
    return folder


@pytest.mark.parametrize("name, wrong, message", BAD, ids=lambda v: str(v)[:60])
def test_bad_values(
    name, wrong, message, trained, bad_files, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    good = {
        "train": {"dataset": "iris", "steps": 2, "out": "run"},
        "tune": {"dataset": "iris", "steps": 2, "max_trials": 1},
        "evaluate": {"samples": 4},
        "certify": {"samples": 4},
        "export": {"out": "models/iris"},
    }[name]
    if name in ("certify", "evaluate", "export"):
        good["model"] = trained / "model.keras"
    if wrong.get("model") == "{folder}/other.keras":
        good["dataset"] = "iris"
    flags = {
        key: value.format(folder=bad_files)
        if isinstance(value, str) and "{folder}" in value
        else value
        for key, value in wrong.items()
    }
    space = flags.get("space", "")
    if space and space != "none.yaml":
        (tmp_path / "space.yaml").write_text(space)
        flags["space"] = "space.yaml"
    line = refused(capsys, name, **{**good, **flags})
    assert message in line, line
    assert line.startswith(f"keras-rub {name}: ")


@pytest.mark.parametrize("name", list(main.COMMANDS))
def test_words_that_are_no_flags(name, capsys):
    folder = ["models"] if name == "serve" else []  # its one plain word
    line = refused(capsys, name, *folder, "now")
    assert "takes flags only" in line or "must have a value" in line
    assert "Unknown command line flag" in refused(capsys, name, nonsense=1)


def test_missing_flags(capsys):
    assert "--out" in refused(capsys, "train")
    assert "--model must name" in refused(capsys, "certify")
    assert "--model must name" in refused(capsys, "evaluate")
    assert "--out" in refused(capsys, "export")


# How they are called ---------------------------------------------------------


def test_overview(capsys):
    assert main.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, about in main.COMMANDS.items():
        assert f"  {name}" in text and about in text
    assert main.main([]) == 1
    assert capsys.readouterr().out == text
    assert main.main(["trian"]) == 1
    shown = capsys.readouterr()
    assert shown.err == (
        "keras-rub: there is no command 'trian'. Did you mean train?\n"
    )
    assert main.main(["xyz"]) == 1
    assert "Try --help." in capsys.readouterr().err


@pytest.mark.parametrize("name", list(main.COMMANDS))
def test_help_shows_the_flags_of_one_command(name, capsys):
    assert main.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"keras-rub {name} " in text
    assert ("--data_dir" in text) == (name != "serve")
    assert ("--learning_rate" in text) == (name == "train")
    assert ("--max_trials" in text) == (name == "tune")
    assert ("--what" in text) == (name == "reproduce")
    assert ("--model\n" in text) == (
        name in ("certify", "evaluate", "export", "zoo")
    )
    assert "app.py" not in text and "--logtostderr" not in text


def test_flags_of_one_call_are_gone_in_the_next(capsys):
    assert "--samples=0" in refused(capsys, "certify", samples=0)
    assert "--model must name" in refused(capsys, "certify", model="")
    assert "--model must name" in refused(capsys, "certify", radii="1")


def test_tools_are_the_commands():
    """`python tools/NAME.py` works, and its error is one line too."""
    for name in ("train", "certify", "evaluate", "tune", "export", "zoo"):
        text = (ROOT / "tools" / f"{name}.py").read_text()
        assert f"from keras_rub.cli.{name} import main" in text
        assert "sys.exit(main())" in text

    failed = subprocess.run(
        [sys.executable, "tools/tune.py", "--dataset=irsi"],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
    )
    assert failed.returncode == 1
    assert "keras-rub tune: Unknown data set 'irsi'" in failed.stderr
    assert "Traceback" not in failed.stderr


# What they share -------------------------------------------------------------


def test_parsing():
    assert parsing.parse_radii("0.5, 1", "radii", [1, "inf"]) == {
        1: [0.5, 1.0],
        "inf": [0.5, 1.0],
    }
    assert parsing.parse_radii("1:0.5;inf:0", "radii") == {1: [0.5], "inf": [0]}
    assert parsing.parse_radii("1:0.5;inf:0", "radii", ["inf"]) == {"inf": [0]}
    assert parsing.parse_range("none", "input_range") is None
    assert parsing.parse_range("data", "input_range") == "data"
    assert parsing.parse_range("-1,2", "input_range") == (-1.0, 2.0)
    assert parsing.parse_norms(["1", "inf"], "norms") == [1, "inf"]


def test_tables():
    header, rows = ["name", "a<b"], [["x", 1], ["long name", "22&"]]
    assert tables.to_text(header, rows) == (
        "name       a<b\nx            1\nlong name  22&"
    )
    assert tables.to_markdown(header, rows).splitlines() == [
        "| name | a<b |",
        "| --- | ---: |",
        "| x | 1 |",
        "| long name | 22& |",
    ]
    assert tables.to_html(header, rows[1:]) == (
        '<table><thead><tr><th class="name">name</th>'
        '<th class="a&lt;b">a&lt;b</th></tr></thead><tbody>'
        '<tr><td class="name">long name</td><td class="a&lt;b">22&amp;</td>'
        "</tr></tbody></table>"
    )
    assert tables.to_html(None, [["k", 1]], kind="s") == (
        '<table class="s"><tbody><tr><td>k</td><td>1</td></tr></tbody></table>'
    )
    assert tables.to_csv([{"a": 1}, {"a": 2, "b": "x,y"}]) == (
        'a,b\n1,\n2,"x,y"\n'
    )
    assert tables.to_csv([]) == ""
    assert tables.percent(None) == "" and tables.percent(0.123, 0) == "12%"


def test_parts(tmp_path):
    path = tmp_path / "state.json"
    settings = {"a": (1, 2), "b": np.pi}
    parts = Parts(path, settings)
    parts.work_off({"x": lambda: [1]})
    again = Parts(path, {"a": [1, 2], "b": np.pi})
    assert len(again) == 1 and again["x"] == [1]

    def never():
        raise AssertionError

    again.work_off({"x": never, "y": lambda: None})
    assert "y" in Parts(path, settings)
    with pytest.raises(ValueError, match="b, c differ. Choose another --here"):
        Parts(path, {"a": [1, 2], "c": None}, "--here")
    again.remove()
    assert not path.exists() and not list(tmp_path.iterdir())


def test_claim(tmp_path):
    claim(tmp_path, {"a": 1}, facts={"words": "old"})
    claim(tmp_path, {"a": 1}, facts={"words": "new"})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"a": 1, "words": "old"}
    with pytest.raises(ValueError, match="holds another run: a differ"):
        claim(tmp_path, {"a": 2}, facts={"words": "old"})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="no JSON file"):
        claim(tmp_path, {"a": 1})
