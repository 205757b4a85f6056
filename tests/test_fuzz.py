"""Files that are cut short or damaged: a clear error or a result.

Never another exception, never a hang, and never a pickle that is run. The
slow suite damages each kind of file many more times; counts are printed.
"""

import json
import pickle
import shutil
import time
import zipfile

import numpy as np
import pytest

import keras_rub
from keras_rub import datasets, serving, training
from keras_rub.files import read_json, write_json
from keras_rub.reproduction.jobs import Job, Store
from keras_rub.resuming import Parts, claim
from keras_rub.serving.metadata import METADATA
from keras_rub.tuning.results import COLUMNS, Results
from keras_rub.tuning.space import SearchSpace

SETTINGS = {"dataset": "iris", "rho": 0.5, "seed": 3}
SECONDS = 5.0  # no loader may take longer on these small files


# Kinds: how a good file is written, and how it is read ------------------------


def write_npz(path):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.random((30, 3)),
        "y_train": np.arange(30) % 3,
        "x_test": rng.random((12, 3)),
        "y_test": np.arange(12) % 3,
    }
    np.savez_compressed(path, **arrays)


def write_csv(path):
    rows = [f"{i},{i / 7:.3f},{'abc'[i % 3]}" for i in range(30)]
    path.write_text("\n".join(["first,second,kind", *rows]))


def write_space(path):
    space = {"defense": ["rub", "arub-1"], "rho": [0.1, 1], "batch_size": 32}
    path.write_text(json.dumps(space, indent=1))


def write_yaml(path):
    path.write_text(
        "defense: [rub, pgd-inf]\nrho:\n  - 0.1\n  - 1e-2\nscaled: true\n"
    )


def write_metadata(path):
    facts = {"signatures": ["certify"], "certificates": {"max_batch_size": 8}}
    write_json(path / METADATA, facts, indent=2)
    return path / METADATA


def write_results(path):
    row = dict.fromkeys(COLUMNS, "1")
    Results(path).add([{**row, "trial": str(i)} for i in range(5)])


def write_evaluation(path):
    shape = keras_rub.Evaluation(
        labels=np.array([0, 1]),
        predicted=np.array([0, 1]),
        radii={"1": [0.1]},
        perturbations=keras_rub.PerturbationSet(1),
        standing={"1": {"pgd": np.array([[True, False]])}},
        certified={"1": np.array([[True, False]])},
        signs=None,
        examples={},
    )
    path.write_text(shape.to_json())


def read_job(path):
    job = Job(path.stem, SETTINGS, lambda: {})
    return Store(path.parent).read(job)


def write_archive(path):
    job = Job("job", SETTINGS, lambda: {})
    store = Store(path.parent / "jobs", path.parent)
    store.write(job, {"accuracy": 0.5}, 1.0)
    store.archive([job])
    (path.parent / "job.jsonl").replace(path)


def read_archive(path):
    archive = path.parent / "archive"
    archive.mkdir(exist_ok=True)
    shutil.copy(path, archive / "job.jsonl")
    return Store(path.parent / "none", archive).read(Job("job", SETTINGS, None))


def config_of(path):
    from keras_rub.serving.development.server import DevelopmentServer

    return DevelopmentServer(None, model_config_file=path)._read_config()


def write_config(path):
    (path.parent / "m" / "1").mkdir(parents=True, exist_ok=True)
    serving.write_config(path.parent).replace(path)


KINDS = {
    "data.npz": (write_npz, lambda path: datasets.load(str(path))),
    "data.csv": (write_csv, lambda path: datasets.load(str(path))),
    "space.yaml": (write_yaml, SearchSpace.read),
    "space.json": (write_space, SearchSpace.read),
    "parts.json": (
        lambda path: Parts(path, SETTINGS).add("a", {"x": [1, 2]}),
        lambda path: Parts(path, SETTINGS),
    ),
    "config.json": (
        lambda path: claim(path.parent, SETTINGS),
        lambda path: claim(path.parent, SETTINGS),
    ),
    "model.json": (
        lambda path: write_json(path, {**SETTINGS, "normalization": "unit"}),
        lambda path: training.read_settings(path.with_suffix(".keras")),
    ),
    "job.json": (
        lambda path: Store(path.parent).write(
            Job(path.stem, SETTINGS, lambda: {}), {"accuracy": 0.5}, 1.0
        ),
        read_job,
    ),
    "jobs.jsonl": (write_archive, read_archive),
    "metadata": (write_metadata, serving.read_metadata),
    "results.csv": (write_results, lambda path: Results(path).read()),
    "report.json": (
        write_evaluation,
        lambda path: keras_rub.Evaluation.from_dict(read_json(path)),
    ),
    "models.config": (write_config, config_of),
}


# Damage ----------------------------------------------------------------------


def damaged(content, rng):
    """One way or another of breaking a file."""
    content = bytearray(content)
    kind = rng.integers(6)
    at = int(rng.integers(len(content)))
    if kind == 0:  # cut short
        return bytes(content[:at])
    if kind == 1:  # a few bytes changed
        for place in rng.integers(len(content), size=rng.integers(1, 5)):
            content[place] = rng.integers(256)
    elif kind == 2:  # a part is missing
        del content[at : at + int(rng.integers(1, 40))]
    elif kind == 3:  # a part is there twice
        content[at:at] = content[at : at + int(rng.integers(1, 40))]
    elif kind == 4:  # something else in between
        content[at:at] = rng.bytes(int(rng.integers(1, 20)))
    else:  # a disk that lost a block
        content[at : at + 64] = bytes(min(64, len(content) - at))
    return bytes(content)


def survives(read, path):
    """Whether a damaged file was read; raises if it did not end well."""
    started = time.process_time()
    try:
        read(path)
    except ValueError as error:
        assert str(error).strip()
        found = False
    else:
        found = True
    assert time.process_time() - started < SECONDS
    return found


def damage(name, folder, count):
    """Breaks one kind of file often; returns how many could be read."""
    write, read = KINDS[name]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    inner = write(path) or path
    read(path)
    content = inner.read_bytes()
    rng = np.random.default_rng(count)
    read_all = 0
    for number in range(count):
        inner.write_bytes(broken := damaged(content, rng))
        try:
            read_all += survives(read, path)
        except Exception as error:
            raise AssertionError(f"{name}, {number}: {broken!r}") from error
    return read_all


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files(name, tmp_path):
    damage(name, tmp_path, 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_often(name, tmp_path):
    count = 2000
    found = damage(name, tmp_path, count)
    print(f"{name}: {count} damaged, {found} read, {count - found} refused")


# Files that mean harm --------------------------------------------------------


class Bomb:
    """Unpickled, it leaves a trace."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return open, (str(self.trace), "w")


def test_no_pickle_is_run(tmp_path):
    trace = tmp_path / "trace"
    path = tmp_path / "data.npz"
    bombs = np.empty(4, object)
    bombs[:] = [Bomb(trace)] * 4
    parts = dict.fromkeys(["x_train", "y_train", "x_test", "y_test"], bombs)
    np.savez(path, **parts)
    assert not survives(lambda p: datasets.load(str(p)), path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x_train.npy", pickle.dumps(Bomb(trace)))
    assert not survives(lambda p: datasets.load(str(p)), path)
    text = tmp_path / "space.yaml"
    text.write_text(f"rho: !!python/object/apply:open ['{trace}', 'w']")
    assert not survives(SearchSpace.read, text)
    assert not trace.exists()


def test_deep_and_wide_files(tmp_path):
    """Nested a hundred thousand times, and a document of aliases."""
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    for read in (SearchSpace.read, read_json):
        assert not survives(read, deep)
    deep.rename(deep.with_suffix(".yaml"))
    assert not survives(SearchSpace.read, deep.with_suffix(".yaml"))
    wide = tmp_path / "wide.yaml"
    names = "abcdefghijklmnop"
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]"
        for before, name in zip(names, names[1:], strict=False)
    ]
    wide.write_text("\n".join(lines))
    assert not survives(SearchSpace.read, wide)
