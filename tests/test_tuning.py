"""Search spaces, oracles, the table of results, and sweeps."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

import keras_rub
from keras_rub import training
from keras_rub.tuning import Results, SearchSpace, Sweep
from keras_rub.tuning.oracles import GridOracle, beat_path
from tests.calling import call, refused

ROOT = pathlib.Path(__file__).parent.parent

SPACE = SearchSpace(
    defense=("nominal", "rub"),
    rho=(0.05, 0.1),
    learning_rate=(1e-2,),
    batch_size=(32,),
)


@pytest.fixture
def small_network(monkeypatch):
    """One hidden layer in the place of three: not the network is tested."""
    monkeypatch.setitem(
        training.ARCHITECTURES,
        "mlp",
        lambda shape, classes: keras_rub.models.mlp(shape, classes, (16,)),
    )


def sweep_of(folder, **kwargs):
    settings = {
        "dataset": "iris",
        "space": SPACE,
        "radii": {1: [0.2], "inf": [0.1]},
        "oracle": "grid",
        "steps": 20,
        "samples": 30,
    }
    return Sweep(folder=folder, **{**settings, **kwargs})


# Recipes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"defense": "rap"}, "`defense` must be one of"),
        ({"architecture": "vit"}, "`architecture` must be one of"),
        ({"head": "tanh"}, "`head` must be one of"),
        ({"defense": "rub", "norm": 2}, "for norm 1 only"),
        ({"defense": "arub", "input_range": True}, "can't respect"),
        ({"rho": -1.0}, "`rho` must be"),
        ({"rho_ramp": 2.0}, "`rho_ramp` must be"),
        ({"steps": 0}, "`steps` must be"),
        ({"learning_rate": 0.0}, "`learning_rate` must be"),
        ({"mix": 1.1}, "`mix` must be"),
        ({"bound": "crown"}, "`bound` must be"),
    ],
)
def test_bad_recipe(kwargs, message):
    with pytest.raises(ValueError, match=message):
        training.Recipe(**kwargs)


@pytest.mark.eager
@pytest.mark.parametrize("defense", list(training.DEFENSES))
def test_every_defence_is_built(defense):
    data = keras_rub.datasets.load("digits")
    ranged = defense in ("fgsm", "pgd", "rub", "coap", "ibp")
    recipe = training.Recipe(defense=defense, rho=0.1, input_range=ranged)
    model = recipe.build(data)
    expected = training.DEFENSES[defense] or keras.Sequential
    assert type(model) is expected
    if ranged:
        assert model.perturbations.input_range is not None
    with pytest.raises(ValueError, match="no valid range"):
        training.Recipe(rho=0.1, input_range=True).build(
            keras_rub.datasets.load("iris")
        )


@pytest.mark.eager
@pytest.mark.medium
def test_training_resumes_after_a_kill(tmp_path, monkeypatch, small_network):
    """Stopped in the middle and begun again, it arrives at the same weights."""
    data = keras_rub.datasets.load("iris")
    recipe = training.Recipe(rho=0.1, steps=40, batch_size=90)
    whole = training.train_in_folder(recipe, data, tmp_path / "a", verbose=0)

    class Stop(Exception):
        pass

    def stop(self, epoch, logs=None):
        if epoch == 7:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(keras.callbacks.CSVLogger, "on_epoch_begin", stop)
        with pytest.raises(Stop):
            training.train_in_folder(recipe, data, tmp_path / "b", verbose=0)
    assert not (tmp_path / "b" / "model.keras").exists()
    path = training.train_in_folder(recipe, data, tmp_path / "b", verbose=0)
    history = (tmp_path / "b" / "history.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in history[1:]] == [
        str(epoch) for epoch in range(20)
    ]
    models = [keras.models.load_model(found) for found in (whole, path)]
    steps = [int(model.optimizer.iterations) for model in models]
    assert steps == [40, 40]
    for one, other in zip(*(m.get_weights() for m in models), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="holds another run: seed differ"):
        training.train_in_folder(
            training.Recipe(rho=0.1, steps=40, batch_size=90, seed=1),
            data,
            tmp_path / "a",
        )
    # A folder of a version without these settings is taken up.
    config = tmp_path / "a" / "config.json"
    known = json.loads(config.read_text())
    for name in training.ADDED:
        del known[name]
    config.write_text(json.dumps(known))
    assert training.train_in_folder(recipe, data, tmp_path / "a") == whole
    moved = dataclasses.replace(recipe, shift=1)
    with pytest.raises(ValueError, match="holds another run: shift differ"):
        training.train_in_folder(moved, data, tmp_path / "a")


# Space and results ------------------------------------------------------------


def test_space_files(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("defense: [rub, pgd-2]\nrho: 0.5\nscaled: false\n")
    space = SearchSpace.read(path)
    assert space.defense == ("rub", "pgd-2") and space.rho == (0.5,)
    assert space.radius(0.5, 1, (64,)) == 0.5
    assert SPACE.radius(0.5, 1, (64,)) == 4.0
    assert SPACE.radius(0.5, "inf", (64,)) == 0.5
    path = tmp_path / "space.json"
    path.write_text(json.dumps(space.to_dict()))
    assert SearchSpace.read(path) == space
    for text, message in (
        ("{", "no search space in YAML or JSON"),
        ('{"lr": [1]}', "a search space has the keys"),
        ('{"defense": ["rub-2"]}', "Received: 'rub-2'"),
        ('{"rho": []}', "rho must hold"),
        ('{"normalization": ["l2"]}', "normalization must be among"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            SearchSpace.read(path)


def test_results_survive_half_a_line(tmp_path):
    results = Results(tmp_path / "results.csv")

    def rows(trial, accuracy):
        return [
            {
                "trial": trial,
                "status": "done",
                "defense": "rub",
                "split": split,
                "criterion": "attacked",
                "norm": 1,
                "radius": 0.5,
                "accuracy": accuracy + (split == "test"),
            }
            for split in ("validation", "test")
        ]

    results.add(rows("0", 0.25))
    with open(results.path, "a") as file:
        file.write("1,tuner0,done,,3")  # killed here
    results.add(rows("2", 0.5))
    results.add(rows("2", 0.5))  # a repeated trial counts once
    assert len(results.read()) == 4
    (best,) = results.best().values()
    assert best["trial"] == "2" and best["accuracy"] == 1.5
    assert best["validation"] == 0.5
    assert "attacked L1 0.5" in results.leaderboard()
    assert "| rub |" in results.tables()


def test_grid_goes_on_where_it_was():
    """keras-tuner's own grid search does not."""
    import keras_tuner

    def oracle():
        return GridOracle(
            objective=keras_tuner.Objective("objective", "max"),
            hyperparameters=SPACE.hyperparameters(),
        )

    first = oracle()
    seen = []
    for number in range(2):
        trial = first.populate_space(str(number))
        seen.append(trial["values"])
        first.trials[str(number)] = keras_tuner.engine.trial.Trial(
            keras_tuner.HyperParameters.from_config(
                {"space": [], "values": trial["values"]}
            ),
            str(number),
        )
    second = oracle()
    second.trials = first.trials
    seen.append(second.populate_space("2")["values"])
    # Nominal training has no radius: 1 + 2 combinations in all.
    assert len({json.dumps(values) for values in seen}) == 3
    assert sum("rho" not in values for values in seen) == 1


def test_trial_of_a_dead_worker_is_given_to_another(tmp_path):
    import keras_tuner

    oracle = GridOracle(
        objective=keras_tuner.Objective("objective", "max"),
        hyperparameters=SPACE.hyperparameters(),
        max_trials=1,
    )
    oracle._set_project_dir(str(tmp_path), "tuner")
    oracle.beats = tmp_path
    for worker in ("a", "b"):
        beat_path(tmp_path, worker).parent.mkdir(exist_ok=True)
        beat_path(tmp_path, worker).touch()
    trial = oracle.create_trial("a")
    # There are no more trials, but a's may still come back.
    assert oracle.create_trial("b").status == "IDLE"
    long_ago = time.time() - 1000
    os.utime(beat_path(tmp_path, "a"), (long_ago, long_ago))
    again = oracle.create_trial("b")
    assert again.trial_id == trial.trial_id and again.status == "RUNNING"
    again.status = "COMPLETED"
    oracle.update_trial(again.trial_id, {"objective": 1.0})
    oracle.end_trial(again)
    assert oracle.create_trial("b").status == "STOPPED"
    assert not oracle.tuner_ids and not oracle.ongoing_trials


# Sweeps -----------------------------------------------------------------------


@pytest.mark.eager
@pytest.mark.medium
def test_sweep(tmp_path, capsys, small_network):
    sweep = sweep_of(tmp_path)
    sweep.search(max_trials=2)
    assert len(sweep.results.trials()) == 2
    # The same again does nothing; a larger budget goes on.
    sweep_of(tmp_path).search(max_trials=2)
    assert len(sweep.results.trials()) == 2
    sweep_of(tmp_path).search(max_trials=5)
    trials = sweep.results.trials()
    assert sorted(trials) == ["0", "1", "2"]
    assert {t["defense"] for t in trials.values()} == {"nominal", "rub"}
    rows = sweep.results.read()
    assert {row["criterion"] for row in rows} == {
        "clean",
        "attacked",
        "certified",
    }
    best = sweep.export_best()
    assert set(best) == {
        "clean",
        "attacked-L1-0.2",
        "attacked-Linf-0.1",
        "certified-L1-0.2",
        "certified-Linf-0.1",
    }
    model = keras.models.load_model(best["certified-L1-0.2"])
    data = keras_rub.datasets.load("iris")
    row = sweep.results.best()[("certified", "1", 0.2)]
    found = keras_rub.certify(
        model, *(part[:30] for part in data.test), rho=0.2, method="fast"
    )
    assert found.certified_accuracy == pytest.approx(row["accuracy"], abs=1e-5)
    with pytest.raises(ValueError, match="another run: steps differ"):
        sweep_of(tmp_path, steps=21).search(max_trials=5)


@pytest.mark.eager
@pytest.mark.medium
def test_one_output(tmp_path, small_network):
    """Two classes by one sigmoid: trained, scored, certified, exported."""
    settings = {"dataset": "breast_cancer", "radii": {"inf": [0.05]}}
    space = SearchSpace(
        defense=("ibp-inf",), rho=(0.02,), learning_rate=(0.01,),
        batch_size=(64,), head=("sigmoid",),
    )  # fmt: skip
    sweep = sweep_of(tmp_path, space=space, **settings)
    sweep.search(max_trials=1)
    (trial,) = sweep.results.trials().values()
    assert trial["status"] == "done" and trial["head"] == "sigmoid"
    clean = [r for r in sweep.results.read() if r["criterion"] == "clean"]
    assert all(float(row["accuracy"]) > 0.7 for row in clean) and clean
    model = keras.models.load_model(sweep.export_best()["certified-Linf-0.05"])
    assert model.base.output_shape == (None, 1)
    with pytest.raises(ValueError, match="Received: `head='sigmoid'`"):
        training.Recipe(head="sigmoid").build(keras_rub.datasets.load("iris"))


@pytest.mark.medium
def test_failed_trials_are_recorded(
    tmp_path, monkeypatch, capsys, small_network
):
    real = training.Recipe.fit

    def fail(self, model, *args, **kwargs):
        if self.defense == "nominal":
            raise MemoryError("no more memory")
        history = real(self, model, *args, **kwargs)
        if self.rho < 0.15:
            history.history["loss"][-1] = float("nan")
        return history

    monkeypatch.setattr(training.Recipe, "fit", fail)
    sweep = sweep_of(tmp_path)
    sweep.search(max_trials=3)
    reasons = {
        trial["defense"] + trial["rho"]: trial["reason"]
        for trial in sweep.results.trials().values()
    }
    assert reasons == {
        "nominal": "MemoryError: no more memory",
        "rub0.05": "ArithmeticError: the loss became NaN or infinite",
        "rub0.1": "",
    }
    assert "failed: MemoryError" in sweep.results.leaderboard()


@pytest.mark.eager
def test_hopeless_trials_are_cut_short(tmp_path, monkeypatch, capsys):
    """Here: a network that answers the same whatever it is shown."""
    monkeypatch.setitem(
        training.ARCHITECTURES,
        "mlp",
        lambda shape, classes: keras.Sequential(
            [
                keras.layers.Input(shape),
                keras.layers.Rescaling(0.0),
                keras.layers.Dense(classes),
            ]
        ),
    )
    space = SearchSpace(
        defense=("nominal",), learning_rate=(1e-12,), batch_size=(32,)
    )
    sweep = sweep_of(tmp_path, space=space)
    sweep.search(max_trials=1)
    (trial,) = sweep.results.trials().values()
    assert trial["status"] == "done" and trial["reason"] == "stopped early"


@pytest.mark.parametrize("oracle", ["random", "bayesian", "hyperband"])
def test_other_oracles(oracle, tmp_path, monkeypatch, capsys):
    # The search is under test here, not the training.
    monkeypatch.setattr(
        "keras_rub.tuning.sweep._Tuner._train_and_score",
        lambda self, trial, values: (
            [{"criterion": "clean", "accuracy": values["learning_rate"]}],
            values["learning_rate"],
        ),
    )
    sweep = sweep_of(tmp_path, oracle=oracle, space=SearchSpace())
    sweep.search(max_trials=5, max_minutes=0.1)
    assert len(sweep.results.trials()) >= 5


def test_bad_objective(tmp_path):
    rows = [
        {"criterion": "attacked", "norm": 1, "radius": 0.2, "accuracy": 0.5}
    ]
    for wrong in ("attacked:3:1", "attacked:1", "best", "attacked:1:x"):
        sweep = sweep_of(tmp_path, objective=wrong)
        with pytest.raises(ValueError, match="one of .*attacked:1:0.2"):
            sweep.search(max_trials=1)
    assert not list(tmp_path.iterdir())
    named = sweep_of(tmp_path, objective="attacked:1:0.20")
    assert named.objective_of(rows) == 0.5
    absent = sweep_of(tmp_path, objective="certified:1:0.2")
    with pytest.raises(Exception, match="can be scored"):
        absent.objective_of(rows)


@pytest.mark.medium
def test_command(tmp_path, capsys):
    (tmp_path / "space.yaml").write_text(
        "defense: [rub]\nrho: [0.05]\nlearning_rate: [1e-2]\nbatch_size: [32]\n"
        "architecture: mlp1\n"
    )
    settings = {
        "dataset": "iris",
        "space": str(tmp_path / "space.yaml"),
        "oracle": "grid",
        "radii": "1:0.2",
        "steps": 20,
        "out": str(tmp_path / "sweep"),
    }
    printed = call(capsys, "tune", **settings)
    assert "certified L1 0.2" in printed and "| rub |" in printed
    folder = tmp_path / "sweep"
    assert (folder / "accuracy.png").stat().st_size > 8_000
    assert (folder / "tables.md").read_text().startswith("| clean |")
    again = call(capsys, "tune", **settings, report_only=True)
    assert "| rub |" in again and "trial 0 " not in again
    # What the best networks were trained on and how travels with them.
    best = training.read_settings(folder / "best" / "clean.keras")
    assert best["dataset"] == "iris" and best["normalization"] == "standard"
    assert "steps differ" in refused(capsys, "tune", **{**settings, "steps": 9})


# Several processes ------------------------------------------------------------


def tune(folder, env=None, trials=4):
    command = [
        sys.executable,
        "tools/tune.py",
        "--dataset=iris",
        "--oracle=grid",
        f"--space={folder}/space.yaml",
        "--radii=1:0.2",
        "--certificates=none",
        "--steps=60",
        f"--max_trials={trials}",
        "--worker_timeout=8",
        f"--out={folder}/sweep",
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def write_space(folder):
    (folder / "space.yaml").write_text(
        "defense: [rub]\nrho: [0.01, 0.02, 0.03, 0.04]\n"
        "learning_rate: [0.01]\nbatch_size: [32]\n"
    )


def wait_for(condition, seconds=240):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "waited too long"
        time.sleep(0.2)


@pytest.mark.medium
def test_sweep_resumes_after_kill_9(tmp_path):
    write_space(tmp_path)
    results = Results(tmp_path / "sweep" / "results.csv")
    process = tune(tmp_path)
    wait_for(lambda: len(results.trials()) >= 1)
    process.kill()
    process.wait()
    done = set(results.trials())
    assert 1 <= len(done) < 4
    before = {t: row["seconds"] for t, row in results.trials().items()}
    output, _ = tune(tmp_path).communicate(timeout=400)
    assert len(results.trials()) == 4, output
    for trial in done:  # what was done is not done again
        assert results.trials()[trial]["seconds"] == before[trial]
    assert "attacked L1 0.2" in output


@pytest.mark.slow
def test_chief_and_two_workers_one_killed(tmp_path):
    write_space(tmp_path)
    results = Results(tmp_path / "sweep" / "results.csv")

    def start(name):
        return tune(
            tmp_path,
            {
                "KERASTUNER_TUNER_ID": name,
                "KERASTUNER_ORACLE_IP": "127.0.0.1",
                "KERASTUNER_ORACLE_PORT": "23487",
            },
        )

    chief, victim, other = (start(n) for n in ("chief", "worker0", "worker1"))
    try:
        trials = tmp_path / "sweep" / "tuner"
        wait_for(lambda: len(list(trials.glob("trial_*"))) >= 2)
        os.kill(victim.pid, signal.SIGKILL)
        output, _ = chief.communicate(timeout=500)
        other.communicate(timeout=100)
    finally:
        for process in (chief, victim, other):
            process.kill()
    assert len(results.trials()) == 4, output
    assert "attacked L1 0.2" in output


@pytest.mark.slow
def test_two_machines_train_as_one(tmp_path):
    """Two processes on loopback have the losses of one process.

    With all competitors: of a few, each process draws its own.
    """

    def train(name, env=None, *flags):
        return subprocess.Popen(
            [
                sys.executable, "tools/train.py", "--dataset=wine",
                "--defense=rub", "--rho=0.1", "--steps=20", "--batch_size=32",
                "--competitors=all", f"--out={tmp_path}/{name}", *flags,
            ],
            cwd=ROOT,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    workers = ["127.0.0.1:23461", "127.0.0.1:23462"]
    both = [
        train(
            "two",
            {
                "TF_CONFIG": json.dumps(
                    {
                        "cluster": {"worker": workers},
                        "task": {"type": "worker", "index": index},
                    }
                )
            },
            "--strategy=multiworker",
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=400)[0] for process in both]
    assert all(process.returncode == 0 for process in both), outputs
    train("one").communicate(timeout=400)

    def losses(name):
        lines = (tmp_path / name / "history.csv").read_text().splitlines()
        column = lines[0].split(",").index("loss")
        return [float(line.split(",")[column]) for line in lines[1:]]

    assert len(losses("two")) == 20
    assert losses("two") == pytest.approx(losses("one"), rel=1e-4)
    models = [
        keras.models.load_model(tmp_path / name / "model.keras")
        for name in ("one", "two")
    ]
    for one, two in zip(*(m.get_weights() for m in models), strict=True):
        assert abs(one - two).max() < 1e-4


def test_cluster_must_be_described(monkeypatch):
    from keras_rub import distribution

    monkeypatch.setenv("TF_CONFIG", "{}")
    with pytest.raises(ValueError, match="needs the environment variable"):
        distribution.make_strategy("multiworker")
    with pytest.raises(ValueError, match="`strategy` must be one of"):
        distribution.make_strategy("parameter_server")
