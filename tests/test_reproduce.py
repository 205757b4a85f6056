"""tools/reproduce.py in its smallest budget, on embedded data."""

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest
from absl import app

from tests.test_tools import load, run

TOOL = "tools/reproduce.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reproduce")


def reproduce(capsys, folder, what, **flags):
    return run(
        TOOL,
        capsys,
        what=what,
        budget="smoke",
        out=str(folder),
        results=str(folder / "pages"),
        **flags,
    )


# In the order of the file, so that pages share jobs; the summary comes last.
NAMES = (
    "fig_loss",
    "tab_upper_bound",
    "fig_ranks",
    "fig_improvement",
    "tab_speed",
    "tab_fashion",
    "tab_mnist",
    "tab_cifar",
    "tab_bounds_fashion",
    "tab_bounds_mnist",
    "tab_bounds_cifar",
    "tab_cnn_fashion",
    "tab_cnn_mnist",
    "tab_cnn_cifar",
    "summary",
)


@pytest.mark.parametrize("name", NAMES)
def test_every_page(folder, capsys, name):
    assert name in load(TOOL).EXPERIMENTS
    assert "written to" in reproduce(capsys, folder, [name])
    pages = folder / "pages"
    text = (pages / f"{name}.md").read_text()
    for part in (
        f"python tools/reproduce.py --what {name} --budget smoke",
        "Budget: smoke",
        "Inputs: ",
        f"({name}.png)",
    ):
        assert part in text
    if name not in ("summary", "fig_improvement"):
        assert "What differs from the paper" in text
    assert (pages / f"{name}.png").stat().st_size > 10_000
    with open(pages / f"{name}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    if name.startswith("tab_") and name != "tab_speed":
        for key in ("ours", "ours_strong", "ours_rub", "clean"):
            percents = [float(row[key]) for row in rows if row.get(key)]
            assert all(0 <= percent <= 100 for percent in percents)
        assert any(row.get("paper", row.get("paper_rub")) for row in rows)


def test_pages_are_all_tested():
    assert tuple(load(TOOL).EXPERIMENTS) == NAMES


def test_only_what_is_missing_is_repeated(folder, capsys):
    """Of the certified table, whose jobs come in three stages."""
    first = reproduce(capsys, folder, ["tab_bounds_mnist"])
    assert "training" not in first and " s, about" not in first
    page = folder / "pages" / "tab_bounds_mnist.md"
    before = page.read_text()
    lost = "certify-rub-digits-standard-mlp1-rub-L1-0.28-at-0.01"
    (folder / "jobs" / f"{lost}.json").unlink()
    page.unlink()
    again = reproduce(capsys, folder, ["tab_bounds_mnist"])
    repeated = [line for line in again.splitlines() if " s, about" in line]
    assert len(repeated) == 1 and lost in repeated[0]
    assert page.read_text() == before
    # Other settings make a kept result worthless.
    path = folder / "jobs" / f"{lost}.json"
    state = json.loads(path.read_text())
    state["settings"]["rho"] = 1.0
    path.write_text(json.dumps(state))
    again = reproduce(capsys, folder, ["tab_bounds_mnist"])
    assert again.count(" s, about") == 1


def test_what_another_process_did_is_not_repeated(tmp_path, capsys):
    load(TOOL)
    from reproduction.jobs import Job, Store
    from reproduction.jobs import run as run_jobs

    store = Store(tmp_path)

    def fail():
        raise AssertionError("done twice")

    second = Job("second", {}, fail)

    def work():
        store.write(second, {"by": "another"}, 1.0)
        return {"by": "us"}

    run_jobs([Job("first", {}, work), second], store)
    assert store.read(second) == {"by": "another"}
    assert capsys.readouterr().out.count(" s, about") == 1


def test_limits(folder, capsys):
    lost = folder / "jobs" / "above-iris.json"
    lost.unlink()
    printed = reproduce(capsys, folder, ["tab_upper_bound"], minutes=0.0)
    assert "time is up: 1 jobs left" in printed
    assert "no data set is finished yet" in printed
    for what in (["tab_bound"], []):
        with pytest.raises(app.UsageError, match="--what must be"):
            reproduce(capsys, folder, what)
    fresh = folder / "fresh"
    printed = reproduce(capsys, fresh, ["tab_bounds_mnist"], train=False)
    assert "is not trained" in printed and "no network" in printed
    assert not (fresh / "models").exists()


def test_a_network_in_training_elsewhere_is_left_alone(folder, capsys):
    load(TOOL)
    from reproduction import budgets, vision
    from reproduction.context import Context
    from reproduction.jobs import NotNowError

    out = folder / "elsewhere"
    context = Context("smoke", None, out, out / "pages", "")
    network = vision.rub_networks(budgets.VISION["smoke"], "mnist")[0]
    network.folder(context).mkdir(parents=True)
    with pytest.raises(NotNowError, match="seems to be trained"):
        network.train(context)
    marker = out / "models" / f"{network.name}.pid"
    marker.write_text(f"{os.getppid()}\n")
    with pytest.raises(NotNowError, match="being trained by another"):
        network.train(context)
    # Our own training that was killed goes on.
    process = subprocess.Popen([sys.executable, "-c", "input()"])
    process.send_signal(signal.SIGKILL)
    process.wait()
    marker.write_text(f"{process.pid}\n")
    network.train(context)
    assert (network.folder(context) / "model.keras").exists()
    assert not marker.exists()


def test_the_network_of_a_radius():
    load(TOOL)
    from reproduction import budgets, vision

    networks = vision.rub_networks(budgets.VISION["laptop"], "fashion_mnist")
    radii = [
        vision.network_for(networks, rho).recipe.rho
        for rho in (0.0, 0.28, 1.0, 2.8, 9.0, 28.0, 30.0)
    ]
    assert radii == [1.0, 1.0, 1.0, 2.8, 14.0, 28.0, 28.0]
    # Small radii have their own recipe.
    assert {n.recipe.steps for n in networks} == {10_000, 5000}


def test_radii_that_erase_the_image(folder):
    load(TOOL)
    from reproduction import budgets, pages_vision, vision
    from reproduction.context import Context

    context = Context("smoke", None, folder, folder / "pages", "")
    networks = vision.networks(budgets.VISION["smoke"], "mnist")
    # A standardised image of 64 pixels is at 8 from the origin.
    radii = {1: [1.0], 2: [7.9, 8.0, 9.0], "inf": [0.1, 50.0]}
    (text,) = pages_vision.hopeless(context, networks, radii)
    assert "(L2 at 8 and more, Linf at 50 and more)" in text
    radii = {1: [1.0], 2: [7.9], "inf": [0.1]}
    assert pages_vision.hopeless(context, networks, radii) == []


@pytest.mark.parametrize(
    ("bound", "attacked", "above", "nearly"),
    (
        (1.0, 1.0, True, True),
        (1.0, 1.001, False, True),
        (1.0, 1.02, False, False),
        (1e-9, 5e-8, True, True),  # both are zero but for rounding
    ),
)
def test_what_counts_as_above(bound, attacked, above, nearly):
    load(TOOL)
    from reproduction.pages_losses import is_above

    case = {"bound": bound, "attacked": attacked}
    assert is_above(case, 1e-5) == above
    assert is_above(case, 0.01) == nearly


def test_a_network_of_other_settings_is_refused(folder, capsys):
    reproduce(capsys, folder, ["tab_bounds_mnist"])
    load(TOOL)
    from reproduction import budgets, vision
    from reproduction.context import Context

    context = Context("smoke", None, folder, folder / "pages", "")
    network = vision.rub_networks(budgets.VISION["smoke"], "mnist")[0]
    network.train(context)
    other = dataclasses.replace(
        network, recipe=dataclasses.replace(network.recipe, steps=11)
    )
    with pytest.raises(ValueError, match="holds another run: steps differ"):
        other.train(context)
