"""Commands that are killed at random moments, and what they leave.

    KERAS_RUB_KILLS=20 pytest -m slow -s tests/test_kills.py

A child is forked from a server that has imported everything and run nothing,
so that a kill costs no start of TensorFlow. After every kill: no file is half
written, and nothing that was finished is lost or done again. At the end: the
results of a run that nobody disturbed.
"""

import csv
import errno
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest

from keras_rub.serving.versions import list_versions
from keras_rub.tuning.results import Results
from tests.calling import arguments, call, refused

KILLS = int(os.environ.get("KERAS_RUB_KILLS", "5"))
SEED = int(os.environ.get("KERAS_RUB_SEED", "0"))

_TRAIN = {
    "dataset": "iris",
    "defense": "rub",
    "rho": 0.2,
    "steps": 200,
    "architecture": "mlp1",
    "batch_size": 16,
}


def state_of(path, *keys):
    """How much a JSON file of finished parts holds."""
    if not path.exists():
        return 0
    state = json.loads(path.read_text())
    for key in keys:
        state = state[key]
    return len(state)


def epochs_done(out):
    if (out / "model.keras").exists():
        return 20
    files = (out / "backup").glob("[0-9]*.weights.h5")
    whole = [file for file in files if "partial" not in file.name]
    return max((int(file.name.split(".")[0]) for file in whole), default=0)


# Name: flags, where the result is, and how many units are done.
COMMANDS = {
    "train": (lambda model, out: {**_TRAIN, "out": out}, epochs_done),
    "certify": (
        lambda model, out: {
            "model": model,
            "radii": "0.1,0.2",
            "method": "rub,crown",
            "out": out,
        },
        lambda out: state_of(out / "results.json", "done"),
    ),
    "evaluate": (
        lambda model, out: {
            "model": model,
            "norms": "1",
            "radii": "0.1",
            "attacks": "pgd",
            "report": out / "report.html",
        },
        lambda out: (
            1
            if (out / "report.md").exists()
            else state_of(out / "report.state.json", "done")
        ),
    ),
    "tune": (
        lambda model, out: {
            "dataset": "iris",
            "space": model.parent / "space.yaml",
            "radii": "1:0.1",
            "max_trials": 4,
            "steps": 20,
            "samples": 20,
            "oracle": "grid",
            "out": out,
        },
        lambda out: len(Results(out / "results.csv").trials()),
    ),
    "reproduce": (
        lambda model, out: {
            "what": "tab_upper_bound",
            "budget": "smoke",
            "out": out,
        },
        lambda out: len(list((out / "jobs").glob("[!0-9]*.json"))),
    ),
    "export": (
        lambda model, out: {
            "model": model,
            "signatures": "serving_default",
            "version": 1,
            "out": out / "m",
        },
        lambda out: len(list_versions(out / "m")),
    ),
}


def child(words, log):
    """One command, in a process of its own."""
    with open(log, "w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        from keras_rub.cli import main

        os._exit(main.main(words))


@pytest.fixture(scope="module")
def server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tensorflow", "keras_rub", "keras_tuner", "sklearn.model_selection"]
        + [f"keras_rub.cli.{name}" for name in COMMANDS]
    )
    return context


@pytest.fixture(scope="module")
def model(tmp_path_factory, server):
    folder = tmp_path_factory.mktemp("model")
    run = start(server, "train", {**_TRAIN, "out": folder}, folder)
    run.join()
    assert run.exitcode == 0, (folder / "log").read_text()
    (folder / "space.yaml").write_text("defense: [nominal, rub]\nrho: [0.1]\n")
    return folder / "model.keras"


def start(server, name, flags, folder):
    process = server.Process(
        target=child, args=([name, *arguments(flags)], str(folder / "log"))
    )
    process.start()
    return process


def check_nothing_torn(folder):
    """Every file that a reader would take up is whole."""
    for path in folder.rglob("*"):
        inside = path.relative_to(folder).parts
        hidden = any(part.startswith(".export-") for part in inside)
        if not path.is_file() or "partial" in path.name or hidden:
            continue
        if "tuner" in str(inside) or path.name == "log":
            continue  # keras-tuner's own; its trials are judged by the table
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".keras":
            assert zipfile.ZipFile(path).testzip() is None
        elif path.suffix == ".csv" and path.name == "results.csv":
            with open(path, newline="") as file:
                list(csv.reader(file))
        elif path.suffix == ".png":
            assert path.read_bytes().endswith(b"IEND\xaeB`\x82")
    for version in list_versions(folder / "m"):
        assert (folder / "m" / str(version) / "saved_model.pb").exists()
        facts = folder / "m" / str(version) / "assets.extra/metadata.json"
        json.loads(facts.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_random_moments(name, server, model, tmp_path):
    flags_of, units_done = COMMANDS[name]
    rng = np.random.default_rng([SEED, sorted(COMMANDS).index(name)])

    def run(folder):
        return start(server, name, flags_of(model, folder / "out"), folder)

    def finish(folder):
        process = run(folder)
        process.join()
        assert process.exitcode == 0, (folder / "log").read_text()

    whole = tmp_path / "whole"
    whole.mkdir()
    started = time.monotonic()
    finish(whole)
    seconds = time.monotonic() - started
    total = units_done(whole / "out")
    assert total

    kills = finished = lost = 0
    while kills < KILLS:
        folder = tmp_path / f"run{finished}"
        folder.mkdir(exist_ok=True)
        before = units_done(folder / "out")
        process = run(folder)
        process.join(rng.uniform(0.0, seconds))
        if process.exitcode is None:
            process.kill()
            process.join()
            kills += 1
        elif process.exitcode == 0:
            assert units_done(folder / "out") == total
            finished += 1
        else:
            raise AssertionError((folder / "log").read_text())
        after = units_done(folder / "out")
        lost += after < before
        check_nothing_torn(folder / "out")
    folder = tmp_path / f"run{finished}"
    folder.mkdir(exist_ok=True)
    finish(folder)
    assert units_done(folder / "out") == total
    check_nothing_torn(folder / "out")
    assert not lost
    for table in ("results.csv", "report.csv"):
        kept = whole / "out" / table
        if kept.exists() and name in ("certify", "evaluate"):
            again = folder / "out" / table
            assert again.read_text() == kept.read_text()
    print(
        f"{name}: {kills} kills, {finished + 1} runs finished, {total} units "
        f"each, none lost, nothing torn; seed {SEED}"
    )


# No room, no rights ----------------------------------------------------------


@pytest.fixture
def full_disk(tmp_path):
    """A file system of a few pages, filled up to the last one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)],
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("no right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder):
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 512)
        except OSError as error:
            assert error.errno == errno.ENOSPC


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A network, trained in this process."""
    from keras_rub import datasets, training

    folder = tmp_path_factory.mktemp("trained")
    recipe = training.Recipe(
        **{k: v for k, v in _TRAIN.items() if k != "dataset"} | {"steps": 20}
    )
    return training.train_in_folder(
        recipe, datasets.load("iris"), folder, verbose=0
    )


@pytest.mark.medium
def test_full_disk(trained, full_disk, capsys):
    """One line, and what was there stays."""
    flags = {"model": trained, "radii": "0.1", "method": "crown"}
    flags |= {"samples": 10}
    call(capsys, "certify", **flags, out=full_disk / "first")
    kept = full_disk / "first" / "results.csv"
    before = kept.read_bytes()
    fill(full_disk)
    for name, more in (
        ("certify", {**flags, "out": full_disk / "second"}),
        ("train", {**_TRAIN, "steps": 20, "out": full_disk / "third"}),
        ("export", {"model": trained, "out": full_disk / "models" / "m",
                    "signatures": "serving_default"}),
    ):  # fmt: skip
        message = refused(capsys, name, **more)
        assert "space" in message.lower(), message
    assert kept.read_bytes() == before
    assert not list_versions(full_disk / "models" / "m")


@pytest.mark.medium
def test_folder_that_is_not_to_be_written(trained, tmp_path):
    """As a user without rights, in a process of its own."""
    folder = tmp_path / "locked"
    folder.mkdir()
    (folder / "kept.txt").write_text("kept")
    folder.chmod(0o555)
    code = (
        "import os, sys\n"
        "os.getuid() == 0 and os.setuid(65534)\n"
        "from keras_rub.serving.versions import hidden_folder\n"
        "from keras_rub.cli import command\n"
        "from keras_rub.files import write_json\n"
        "import pathlib\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "def export():\n"
        "    with hidden_folder(folder / 'm'): pass\n"
        "for act in (export, lambda: write_json(folder / 'a.json', 1)):\n"
        "    try: act()\n"
        "    except (ValueError, OSError) as error: command.fail('x', error)\n"
        "    else: sys.exit('it could be written')\n"
    )
    tmp_path.chmod(0o755)
    parent = tmp_path
    while parent != parent.parent:  # the way there must be open
        if not parent.stat().st_mode & 0o005:
            pytest.skip(f"{parent} is closed to others")
        parent = parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(__file__).parent.parent,
    )
    folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("x:")]
    assert len(lines) == 2
    assert all("ermission denied" in line for line in lines)
    assert (folder / "kept.txt").read_text() == "kept"
    assert len(list(folder.iterdir())) == 1
