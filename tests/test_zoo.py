"""The zoo: its files are what the index says, and lies are found."""

import json
import shlex
import shutil
import zipfile

import keras
import numpy as np
import pytest

import keras_rub
from keras_rub import datasets, models, training, zoo
from keras_rub.cli import leaderboard, main, train
from keras_rub.cli import zoo as command
from keras_rub.files import digest
from keras_rub.resuming import claim
from tests.calling import call, refused
from tests.test_tools import ROOT

ZOO = ROOT / "zoo"
INDEX = zoo.read_index(ZOO)
EMBEDDED = ["breast_cancer-l1-0.5", "digits-l1-1"]
TABLE = "breast_cancer-l1-0.5"  # the fastest


@pytest.fixture
def copy(tmp_path):
    """A zoo of one network that may be spoilt, and its index."""
    folder = tmp_path / "zoo"
    folder.mkdir()
    shutil.copy(ZOO / INDEX[TABLE]["file"], folder)
    zoo.write_index(folder, {TABLE: INDEX[TABLE]})
    return folder


def alter(folder, change, name=TABLE):
    """Changes what the index says of one network."""
    index = zoo.read_index(folder)
    change(index[name])
    zoo.write_index(folder, index)


# What is kept -----------------------------------------------------------------


def test_files_are_few_small_and_listed():
    files = {path.name for path in ZOO.iterdir()} - {"index.json"}
    assert files == {e["file"] for e in INDEX.values() if e["file"]}
    assert len(files) <= zoo.MOST_FILES
    assert all((ZOO / f).stat().st_size < zoo.MOST_BYTES for f in files)
    assert list(INDEX) == sorted(INDEX) and set(EMBEDDED) <= set(INDEX)


@pytest.mark.parametrize("name", INDEX)
def test_the_index_is_whole(name):
    entry = INDEX[name]
    assert entry["file"] in (None, f"{name}.keras")
    if entry["file"]:
        assert entry["sha256"] == digest(ZOO / entry["file"])
    assert list(entry["certified"]) == entry["radii"]
    assert list(entry.get("attacked", {})) == (
        entry["radii"] if entry["attacks"] else []
    )
    assert entry["attack_samples"] <= entry["samples"]
    counts = [figure["count"] for figure in entry["certified"].values()]
    # In the order of the radii nothing gets better.
    order = np.argsort([float(radius) for radius in entry["radii"]])
    assert np.all(np.diff([entry["clean"]["count"], *np.take(counts, order)])
                  <= 0)  # fmt: skip
    for kind, samples in (
        ("certified", entry["samples"]),
        ("attacked", entry["attack_samples"]),
    ):
        for figure in entry.get(kind, {}).values():
            share = 100 * figure["count"] / samples
            assert figure["percent"] == round(share, 2)
    if entry["attacks"] and entry["attack_samples"] == entry["samples"]:
        for radius in entry["radii"]:
            proved = entry["certified"][radius]["count"]
            assert proved <= entry["attacked"][radius]["count"]


@pytest.mark.parametrize("name", INDEX)
def test_the_recipe_makes_the_settings(name, monkeypatch, tmp_path):
    """The command line, read back, trains as the network was trained."""
    made = {}

    def keep(recipe, data, folder, strategy=None):
        made.update(recipe.to_dict(), dataset=data)
        return folder

    # Fields that are newer than the network stand at their defaults.
    settings = {**training.ADDED, **INDEX[name]["training"]}
    monkeypatch.setattr(training, "train_in_folder", keep)
    # Whatever data is meant: most of it is not here.
    monkeypatch.setattr(
        datasets,
        "load",
        lambda name, *_, normalization, **__: _Named(name, normalization),
    )
    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(INDEX[name]["recipe"])
    assert program == "keras-rub" and main.main(words) == 0
    data = made.pop("dataset")
    made.update(dataset=data.name, normalization=data.normalization)
    assert json.loads(json.dumps(made)) == settings


class _Named:
    units = "none"

    def __init__(self, name, normalization):
        self.name, self.normalization = name, normalization


@pytest.mark.parametrize("name", [n for n in INDEX if INDEX[n]["file"]])
def test_files_name_no_new_argument_of_keras(name):
    """The oldest release of Keras that setup.py allows must read them."""
    with zipfile.ZipFile(ZOO / INDEX[name]["file"]) as file:
        config = file.read("config.json").decode()
        assert "optimizer" not in config
    for argument in ("quantization_config", "input_axes", "output_axes"):
        assert argument not in config


def test_the_page_is_made_of_the_index():
    assert (ROOT / "docs" / "zoo.md").read_text() == command.page(INDEX)


# Loading ----------------------------------------------------------------------


@pytest.mark.parametrize("name", EMBEDDED)
def test_certificates_are_those_of_the_index(name):
    entry = models.facts(name)
    model = models.load(name)
    data = datasets.load(entry["training"]["dataset"])
    radius = entry["radii"][0]
    found = keras_rub.certify(
        model, *data.test, rho=float(radius), decide_only=True
    )
    assert found.certified.sum() == entry["certified"][radius]["count"]
    assert found.perturbations.get_config() == entry["attacker"]
    # Nothing of the training is left but what the figures need.
    assert not model.compiled and model.rho == entry["training"]["rho"]
    assert model.base.count_params() == entry["parameters"]


def test_where_the_zoo_is(copy, monkeypatch, tmp_path):
    monkeypatch.delenv(zoo.ENVIRONMENT_VARIABLE, raising=False)
    assert models.names() == sorted(INDEX)
    assert models.names(copy) == [TABLE]
    monkeypatch.setenv(zoo.ENVIRONMENT_VARIABLE, str(copy))
    assert models.names() == [TABLE] and models.names(ZOO) == sorted(INDEX)
    monkeypatch.delenv(zoo.ENVIRONMENT_VARIABLE)
    # As in an installed package.
    monkeypatch.setattr(zoo, "_OF_CLONE", tmp_path / "site-packages" / "zoo")
    with pytest.raises(ValueError, match="environment variable KERAS_RUB_ZOO"):
        models.load(TABLE)


def test_what_can_not_be_loaded(copy):
    with pytest.raises(ValueError, match=f"Did you mean '{TABLE}'.*Known: "):
        models.load("breast_cancer-l1-5", copy)
    path = copy / INDEX[TABLE]["file"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged: its sha256") as caught:
        models.load(TABLE, copy)
    assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(ValueError, match="does not exist"):
        models.load(TABLE, copy)
    alter(copy, lambda entry: entry.update(file=None, sha256=None))
    with pytest.raises(ValueError, match="keras-rub train --dataset breast_c"):
        models.load(TABLE, copy)
    alter(copy, lambda entry: entry.pop("recipe"))
    with pytest.raises(ValueError, match=f"lacks recipe of {TABLE}"):
        models.names(copy)


# Verifying --------------------------------------------------------------------


def test_verify_agrees(copy, capsys):
    printed = call(capsys, "zoo", verify=True, folder=copy)
    assert "4 of 4 figures agree; 0 of 1 networks not checked" in printed
    assert "DIFFERS" not in printed


def test_verify_finds_a_lie(copy, capsys):
    def lie(entry):
        entry["certified"]["0.5"]["count"] += 1

    alter(copy, lie)
    assert main.main(["zoo", "--verify", f"--folder={copy}"]) == 1
    shown = capsys.readouterr()
    assert shown.err.endswith("keras-rub zoo: 1 of 4 figures differ.\n")
    (row,) = (li for li in shown.out.splitlines() if "DIFFERS" in li)
    assert row.split()[1:6] == ["certified", "0.5", "114", "109", "108"]
    # One of 114 is allowed to those who allow a hundredth.
    printed = call(capsys, "zoo", verify=True, folder=copy, tolerance=0.01)
    assert "ok, within 1" in printed


def test_verify_finds_another_attacker_and_a_damaged_file(copy, capsys):
    alter(copy, lambda entry: entry["attacker"].update(input_range=[-9, 9]))
    assert main.main(["zoo", "--verify", f"--folder={copy}"]) == 1
    assert "its attacker is L1, not L1, inputs" in capsys.readouterr().out
    alter(copy, lambda entry: entry.update(sha256="0" * 64))
    assert main.main(["zoo", "--verify", f"--folder={copy}"]) == 1
    shown = capsys.readouterr()
    assert "DAMAGED" in shown.out and "1 of 1 figures differ" in shown.err


def test_what_is_not_checked_is_said(copy, capsys, tmp_path):
    path = copy / INDEX[TABLE]["file"]
    other = {**INDEX[TABLE], "training": {**INDEX[TABLE]["training"],
                                          "dataset": "seeds"}}  # fmt: skip
    by_recipe = {**INDEX[TABLE], "file": None, "sha256": None}
    index = {TABLE: INDEX[TABLE], "absent": other, "recipe": by_recipe}
    zoo.write_index(copy, index)
    flags = {"verify": True, "folder": copy, "data_dir": tmp_path}
    printed = call(capsys, "zoo", **flags)
    assert "not checked: no data" in printed
    assert "not checked: recipe only" in printed
    assert "2 of 3 networks not checked" in printed and path.exists()
    line = refused(capsys, "zoo", **flags, names="absent,recipe")
    assert "Nothing was checked." in line


@pytest.mark.medium
def test_verify_under_attack(copy, capsys):
    printed = call(capsys, "zoo", verify=True, attacked=True, folder=copy)
    assert "7 of 7 figures agree" in printed


# Adding -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """Networks for iris beside their settings, with an optimizer's state."""
    folder = tmp_path_factory.mktemp("untrained")
    data = datasets.load("iris")
    for defense in ("rub", "arub", "nominal"):
        recipe = training.Recipe(defense, rho=0.2, architecture="mlp1")
        model = recipe.build(data)
        model.optimizer.build(model.trainable_variables)
        claim(folder / defense, training.settings_of(recipe, data))
        training.save(model, folder / defense / "model.keras")
    return folder


@pytest.mark.medium
def test_add(untrained, tmp_path, capsys, monkeypatch):
    folder, page = tmp_path / "zoo", tmp_path / "zoo.md"
    flags = {
        "folder": folder,
        "page": page,
        "leaderboard": tmp_path / "board.md",
        "add": "iris-l1-0.2",
        "model": untrained / "rub" / "model.keras",
        "radii": "0.01,0.02",
        "input_range": "-9,9",
        "attacks": "fgm",
        "attack_samples": 10,
    }
    printed = call(capsys, "zoo", **flags)
    assert "part 2 of 2 (attack:0) done" in printed
    (name,) = models.names(folder)
    entry = models.facts(name, folder)
    assert page.read_text() == command.page({name: entry})
    assert (folder / entry["file"]).stat().st_size < flags[
        "model"
    ].stat().st_size
    assert entry["network"] == "mlp1, 4-200-3"
    assert entry["attack_samples"] == 10 and entry["attacks"] == ["fgm"]
    # The range is the model's own from now on.
    model = models.load(name, folder)
    x, y = datasets.load("iris").test
    assert model.rho == pytest.approx(0.2)  # no ramp that begins at 0
    found = keras_rub.certify(model, x, y, rho=[0.01, 0.02])
    assert found[0].perturbations.get_config() == entry["attacker"]
    for radius, certificate in zip(entry["radii"], found, strict=True):
        count = entry["certified"][radius]["count"]
        assert count == certificate.certified.sum()
    np.testing.assert_array_equal(
        model.predict(x, verbose=0),
        keras.models.load_model(flags["model"]).predict(x, verbose=0),
    )
    # Another one beside it, by recipe only; the first stays.
    call(capsys, "zoo", **{**flags, "add": "big"}, recipe_only=True)
    assert models.names(folder) == ["big", name]
    assert "`big`" in page.read_text() and not (folder / "big.keras").exists()
    assert not list((untrained / "rub").glob("*.zoo.json"))
    # Too large, or one too many, is said before the work.
    monkeypatch.setattr(zoo, "MOST_BYTES", 1000)
    line = refused(capsys, "zoo", **{**flags, "add": "c"})
    assert "must be below 0.001: give --recipe_only" in line
    monkeypatch.setattr(zoo, "MOST_FILES", 1)
    line = refused(capsys, "zoo", **{**flags, "add": "c"})
    assert "no more than 1 are allowed" in line


def test_what_can_not_be_added(untrained, tmp_path, capsys):
    flags = {
        "folder": tmp_path / "zoo",
        "page": tmp_path / "zoo.md",
        "leaderboard": tmp_path / "board.md",
    }
    model = untrained / "arub" / "model.keras"

    def line(**others):
        return refused(capsys, "zoo", **{**flags, "model": model, **others})

    assert "--add must be a name" in line(add="../x")
    assert "two tasks" in line(add="x", verify=True)
    assert "--model must name" in line(add="x", model="")
    assert "ARUBModel keeps no valid range" in line(add="x", input_range="0,9")
    alone = tmp_path / "alone.keras"
    shutil.copy(model, alone)
    assert "config.json beside it" in line(add="x", model=alone)
    settings = training.read_settings(model)
    (tmp_path / "alone.json").write_text(
        json.dumps({**settings, "dataset": "my.csv"})
    )
    assert "which others have too. Received: my.csv" in line(
        add="x", model=alone
    )
    assert not (tmp_path / "zoo").exists()


def test_a_plain_network_has_no_attacker(untrained, tmp_path, capsys):
    flags = {
        "folder": tmp_path / "zoo",
        "page": tmp_path / "zoo.md",
        "leaderboard": tmp_path / "board.md",
    }
    model = untrained / "nominal" / "model.keras"
    call(capsys, "zoo", **flags, add="plain", model=model, radii="0.1",
         attacks="none", method="rub", samples=8)  # fmt: skip
    loaded = models.load("plain", tmp_path / "zoo")
    assert isinstance(loaded, keras.Sequential) and not loaded.compiled
    printed = call(capsys, "zoo", folder=tmp_path / "zoo", verify=True)
    assert "2 of 2 figures agree" in printed
    printed = call(capsys, "zoo", folder=tmp_path / "zoo")
    assert "plain  iris, standard  mlp1, 4-200-3" in printed


def test_the_command_of_a_training():
    """Flags are said where they differ; switches have no value."""
    settings = {
        "dataset": "cifar10",
        "normalization": "unit",
        **training.Recipe(
            rho=4.0, steps=8000, shift=2, flip=True, input_range=True
        ).to_dict(),
    }
    line = train.line_of(settings, "out/x")
    assert line == (
        "keras-rub train --dataset cifar10 --defense rub --norm 1 --rho 4 "
        "--steps 8000 --normalization unit --input_range data --shift 2 "
        "--flip --out out/x"
    )


def test_leaderboard(tmp_path, capsys):
    """The page is that of the index; the training radius chooses."""
    path = tmp_path / "board.md"
    call(capsys, "zoo", leaderboard=str(path), page=str(tmp_path / "zoo.md"))
    assert path.read_text() == leaderboard.page(INDEX)
    assert (tmp_path / "images" / "leaderboard.png").stat().st_size > 10_000
    committed = ROOT / "docs" / "leaderboard.md"
    assert committed.read_text() == leaderboard.page(INDEX)
    small = INDEX["digits-l1-1"]
    large = {
        **small,
        "training": {**small["training"], "rho": 3.0},
        "radii": ["0.5", "1", "2", "4"],
        "certified": {
            key: {"count": 1, "percent": 0.28} for key in ("0.5", "1", "2", "4")
        },
    }
    masked = {**small, "attacker": {**small["attacker"], "norm": 2}}
    index = {"small": small, "large": large, "other": masked}
    assert leaderboard.chosen(index) == {
        "digits": {
            0.25: "small", 0.5: "small", 1.0: "small", 2.0: "large",
            4.0: "large",
        }
    }  # fmt: skip


def test_other_seeds_stand_beside_the_first():
    """They are no networks of their own, and choose nothing."""
    first = INDEX["digits-l1-1"]
    assert "flip" not in first["training"]  # its recipe is older than that
    second = {
        **first,
        "training": {**first["training"], "flip": False, "seed": 1},
        "radii": ["0.5", "1"],
        "certified": {
            key: {"count": 352, "percent": 97.78} for key in ("0.5", "1")
        },
    }
    other = {**second, "training": {**second["training"], "steps": 7}}
    # The name of the second comes first.
    index = {"z": first, "a": second, "other-recipe": other}
    found = leaderboard.rows(index)
    assert [(row["rho"], row["method"], row["again"]) for row in found] == [
        (0.25, "z", []),
        (0.5, "z", [97.78]),
        (1.0, "z", [97.78]),
    ]
    assert "| 83.06 | 97.78 |" in leaderboard.page(index)


def test_published_figures_stand_beside_ours():
    """Of the data sets and radii that both have."""
    digits = INDEX["digits-l1-1"]
    cifar = {**digits["training"], "dataset": "cifar10"}
    found = leaderboard.rows({"mine": {**digits, "training": cifar}})
    assert [(row["rho"], row["method"], row["certified"]) for row in found] == [
        (0.25, "mine", 95.83),
        (0.5, "mine", 94.17),
        (0.5, "DSSN", 72.3),
        (1.0, "mine", 83.06),
        (1.0, "DSSN", 63.1),
    ]
