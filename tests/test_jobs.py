"""Jobs: what is kept of them, and who does them."""

import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from keras_rub.reproduction import compact, records
from keras_rub.reproduction.cluster import Cluster
from keras_rub.reproduction.context import Context
from keras_rub.reproduction.jobs import Job, LostError, Store, run

# Few characters ---------------------------------------------------------------


@pytest.mark.parametrize(
    "places",
    ([], [0], [9999], [0, 9999], [3, 4, 11], list(range(10_000))),
    ids=lambda places: str(len(places)),
)
def test_places_come_back(places):
    text = compact.pack(places)
    assert compact.unpack(text) == places
    assert len(text) < 1700
    assert json.loads(json.dumps(text)) == text


def test_equal_sets_of_places_are_equal_texts():
    rng = np.random.default_rng(0)
    places = rng.choice(10_000, 500, replace=False)
    text = compact.pack(places)
    assert text == compact.pack(sorted(places)) == compact.pack([*places] * 2)
    assert compact.unpack(text) == sorted(places.tolist())
    assert text != compact.pack(places[1:])
    # It does not depend on how many samples there are.
    assert compact.pack([5000, 5001]) == "5000:wA=="


def test_rows_come_back_from_columns():
    rows = [{"norm": "1", "rho": 0.5}, {"norm": "inf", "rho": 1.0}]
    columns = compact.to_columns(rows)
    assert columns == {"norm": ["1", "inf"], "rho": [0.5, 1.0]}
    assert compact.to_rows(columns) == rows
    assert compact.to_rows(compact.to_columns([])) == []


# The archive ------------------------------------------------------------------


def nothing():
    raise AssertionError("done again")


def stored(folder, archive, **results):
    """A store with these results in files of their own."""
    store = Store(folder, archive)
    for name, result in results.items():
        store.write(Job(name, {"rho": 1.0}, nothing), {"found": result}, 1.26)
    return store


def test_archive(tmp_path):
    folder = tmp_path / "pages" / "jobs" / "laptop"
    path = folder / "a.jsonl"
    results = {"a-second": 2, "a-first": 1, "a-third": 3, "b": 4}
    store = stored(tmp_path / "one", folder, **results)
    first, second, kind = (
        Job(n, {"rho": 1.0}, nothing) for n in ("a-first", "a-second", "b")
    )
    undone = Job("undone", {}, nothing)
    store.archive([second, first, undone, kind])
    # A file a kind.
    assert sorted(x.name for x in folder.iterdir()) == ["a.jsonl", "b.jsonl"]
    assert path.read_text() == (
        '{"name":"a-first","settings":{"rho":1.0},"seconds":1.3,'
        '"result":{"found":1}}\n'
        '{"name":"a-second","settings":{"rho":1.0},"seconds":1.3,'
        '"result":{"found":2}}\n'
    )
    # Elsewhere.
    store = Store(tmp_path / "two", folder)
    run([first, second, kind], store)
    assert store.read(first) == {"found": 1}
    assert store.read(kind) == {"found": 4}
    # Other settings don't take it; done, they take its place.
    other = Job("a-first", {"rho": 2.0}, lambda: {"found": 10})
    assert store.read(other) is None
    run([other], store)
    assert store.read(other) == {"found": 10}
    # A file of its own is asked first, yet the archive still has the other.
    assert store.read(first) == {"found": 1}
    store.archive([other])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(x["name"], x["result"]["found"]) for x in lines] == [
        ("a-first", 10), ("a-second", 2),
    ]  # fmt: skip
    assert store.read(first) is None
    # What another process has added meanwhile stays.
    third = Job("a-third", {"rho": 1.0}, nothing)
    stored(tmp_path / "one", folder).archive([third])
    store.archive([other])
    assert path.read_text().count("\n") == 3


@pytest.mark.parametrize(
    "line", ("", "<<<<<<< ours", "{}", '{"name": "a"', "[1]", "\xff")
)
def test_damaged_lines(tmp_path, line):
    store = stored(tmp_path / "one", tmp_path / "laptop", first=1)
    job = Job("first", {"rho": 1.0}, nothing)
    store.archive([job])
    path = tmp_path / "laptop" / "first.jsonl"
    path.write_bytes(path.read_bytes() + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match="line 2, holds no result") as error:
        Store(tmp_path / "two", tmp_path / "laptop").read(job)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_job_twice_in_the_archive(tmp_path):
    job = Job("first", {"rho": 1.0}, nothing)
    stored(tmp_path / "one", tmp_path / "laptop", first=1).archive([job])
    path = tmp_path / "laptop" / "first.jsonl"
    path.write_text(path.read_text() * 2)
    with pytest.raises(ValueError, match="line 2, is the second one of first"):
        Store(tmp_path / "two", tmp_path / "laptop").read(job)


@dataclasses.dataclass(frozen=True)
class Old:
    steps: int
    mix: float = 1.0


@dataclasses.dataclass(frozen=True)
class New:
    steps: int
    mix: float = 1.0
    bound: str = "ibp"


@dataclasses.dataclass(frozen=True)
class OtherDefault:
    steps: int
    mix: float = 0.5


def kept(settings):
    record = {"name": "a", "settings": settings, "seconds": 1.0, "result": {}}
    line = records.to_line(record).encode()
    return records.from_line(line, "here")["settings"]


@pytest.mark.parametrize(
    ("old", "new", "equal"),
    (
        (Old(5), Old(5), True),
        (Old(5), Old(6), False),
        (Old(5), New(5), True),  # the field was added since
        (Old(5), New(5, bound="crown-ibp"), False),
        (New(5), Old(5), False),  # it was removed
        (Old(5), OtherDefault(5), False),  # a default was changed
        (Old(5), OtherDefault(5, mix=1.0), True),
        ((1, 2), [1, 2], True),
        ({1: (0.5,)}, {"1": [0.5]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1, "b": 2}, {"a": 1}, False),  # only fields may be added
        (Old(5), 5, False),
        (5, Old(5), False),
    ),
)
def test_same_settings(old, new, equal):
    found = kept({"network": old, "rho": 1.0})
    assert records.same({"network": new, "rho": 1.0}, found) == equal
    assert not records.same({"network": new, "rho": 2.0}, found)


def test_an_added_field_is_settled_by_the_archive(tmp_path):
    path = tmp_path / "laptop" / "a.jsonl"
    old, new = (Job("a", {"plan": kind(5)}, nothing) for kind in (Old, New))
    store = Store(tmp_path / "jobs", path.parent)
    store.write(old, {}, 1.0)
    store.archive([old])
    assert '"bound"' not in path.read_text()
    store.archive([new])
    assert '"bound":"ibp"' in path.read_text()


# Who does them ----------------------------------------------------------------


def test_a_context_is_sent_without_what_it_holds(tmp_path):
    import cloudpickle

    context = Context("smoke", None, tmp_path, tmp_path, engine=object())
    context.models[tmp_path] = open(os.devnull)  # can't be sent
    sent = cloudpickle.dumps(lambda: context)
    again = cloudpickle.loads(sent)()
    assert again is not context
    assert (again.out, again.models, again.engine) == (tmp_path, {}, None)
    # A process keeps it from job to job, with its data and networks.
    assert cloudpickle.loads(sent)() is again


@pytest.fixture
def loopback(tmp_path):
    """A scheduler and two workers, each a process: the address."""

    def start(*words):
        return subprocess.Popen(
            [sys.executable, "-m", "dask", *words],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    file = tmp_path / "scheduler.json"
    processes = [
        start("scheduler", "--host=127.0.0.1", "--port=0", "--no-dashboard",
              f"--scheduler-file={file}")
    ]  # fmt: skip
    try:
        end = time.monotonic() + 60
        while not file.exists():
            assert time.monotonic() < end
            time.sleep(0.1)
        address = json.loads(file.read_text())["address"]
        for _ in range(2):
            processes.append(
                start("worker", address, "--nthreads=1", "--no-nanny",
                      "--no-dashboard", "--host=127.0.0.1")
            )  # fmt: skip
        yield address
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.medium
def test_a_cluster_that_loses_a_worker(loopback, tmp_path, capsys):
    log = tmp_path / "log"

    def job(name):
        def work():
            with open(log, "a") as file:
                file.write(f"{name} {os.getpid()}\n")
            if name == "4" and log.read_text().count("4 ") == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.2)
            return {
                "pid": os.getpid(),
                "tensorflow": "tensorflow" in sys.modules,
            }

        return Job(name, {"name": name}, work)

    jobs = [job(str(number)) for number in range(10)]
    store = Store(tmp_path / "jobs")
    engine = Cluster(scheduler=loopback)
    try:
        run(jobs, store, engine=engine)
        printed = capsys.readouterr().out
        # No time is left, and none is needed.
        run(jobs, store, minutes=0.0, engine=engine)
        assert "10 of 10 jobs done" in capsys.readouterr().out
        run([job("late")], store, minutes=0.0, engine=engine)
        assert "time is up: 1 jobs left" in capsys.readouterr().out
    finally:
        engine.close()
    found = [store.read(job) for job in jobs]
    assert all(found)
    assert sum(1 for line in printed.splitlines() if " s, about" in line) == 10
    assert len(list((tmp_path / "jobs").glob("*.json"))) == 10
    started = [line.split() for line in log.read_text().splitlines()]
    killed, taken = [pid for name, pid in started if name == "4"]
    assert killed != taken and found[4]["pid"] == int(taken)
    assert {pid for _, pid in started} == {killed, taken}
    assert not any(result["tensorflow"] for result in found)


@pytest.mark.medium
def test_a_worker_draws_no_random_numbers_of_ours(loopback, tmp_path):
    """The same seed gives the same network there as here."""

    def work():
        random.seed(0)
        state = random.getstate()
        time.sleep(2.5)  # a few heartbeats of the worker
        return {"same": random.getstate() == state}

    job = Job("seed", {}, work)
    store = Store(tmp_path / "jobs")
    engine = Cluster(scheduler=loopback)
    try:
        run([job], store, engine=engine)
    finally:
        engine.close()
    assert store.read(job) == {"same": True}


class Flaky:
    """An engine whose processes end at one job again and again."""

    def outcomes(self, jobs):
        def lose():
            raise LostError("4 workers died of it")

        for job in jobs:
            yield job, lose if job.name == "1" else lambda: ({"a": 1}, 0.1)

    def close(self):
        pass


def test_the_others_are_kept_when_a_job_is_lost(tmp_path):
    jobs = [Job(str(number), {}, nothing) for number in range(3)]
    store = Store(tmp_path)
    with pytest.raises(ChildProcessError, match="^1: 4 workers died of it$"):
        run(jobs, store, engine=Flaky())
    assert [store.read(job) for job in jobs] == [{"a": 1}, None, {"a": 1}]


def test_what_is_finished_stays_after_ctrl_c(tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    first = Job("first", {}, lambda: {"a": 1})
    store = Store(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run([first, Job("second", {}, interrupt)], store)
    assert store.read(first) == {"a": 1}


def test_one_of_two_ways():
    for words in ({}, {"processes": 2, "scheduler": "tcp://a:1"}):
        with pytest.raises(ValueError, match="Give one of `processes`"):
            Cluster(**words)


def test_committed_archives_are_in_order():
    results = pathlib.Path(__file__).parent.parent / "docs" / "results"
    files = list(results.glob("jobs/*/*.jsonl"))
    assert files
    for path in files:
        lines = path.read_bytes().splitlines()
        found = [records.from_line(x, f"{path}") for x in lines]
        names = [record["name"] for record in found]
        assert names == sorted(set(names))
        assert {name.split("-")[0] for name in names} == {path.stem}
