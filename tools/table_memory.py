r"""Time and memory of loading a large mixed table.

    python tools/table_memory.py --rows 100000

Makes a table of 20 columns of numbers, 8 of words and 2 of booleans with gaps,
writes it as CSV, and loads it as a file and as a data frame, each in a process
of its own, so that the peak of its memory can be told. That of the imports
alone is taken off.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import app, flags

_ROWS = flags.DEFINE_integer("rows", 100_000, "Rows of the table.")
_LOAD = flags.DEFINE_string("load", None, "How to load: file, frame, nothing.")
_PATH = flags.DEFINE_string("path", None, "The table, with --load.")

NUMBERS, WORDS, TRUTHS = 20, 8, 2


def write(path, rows):
    """A table with a gap in every hundredth row of each column."""
    import pandas as pd

    rng = np.random.default_rng(0)
    columns = {f"number {i}": rng.normal(size=rows) for i in range(NUMBERS)}
    for i in range(WORDS):
        names = np.array([f"value {j}" for j in range(3 + i)])
        columns[f"word {i}"] = rng.choice(names, rows).astype(object)
    for i in range(TRUTHS):
        columns[f"truth {i}"] = rng.random(rows) < 0.5
    answer = np.where(columns["number 0"] > 0, "yes", "no")
    for number, values in enumerate(columns.values()):
        if values.dtype != bool:
            gap = np.nan if values.dtype == float else None
            values[number::100] = gap
    pd.DataFrame({**columns, "answer": answer}).to_csv(path, index=False)


def measure(kind, path):
    """Loads the table once and prints what that took."""
    import pandas as pd

    from keras_rub import datasets

    source = pd.read_csv(path) if kind == "frame" else path
    before = peak()
    start = time.perf_counter()
    data = datasets.load(source, label="answer", missing="median")
    seconds = time.perf_counter() - start
    print(
        json.dumps(
            {
                "seconds": seconds,
                "megabytes": peak() - before,
                "inputs": len(data.feature_names),
                "arrays": sum(
                    part.nbytes
                    for name in ("train", "validation", "test")
                    for part in getattr(data, name)
                )
                / 2**20,
            }
        )
    )


def peak() -> float:
    """The most memory that this process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(argv):
    del argv
    if _LOAD.value:
        measure(_LOAD.value, _PATH.value)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "table.csv")
        write(path, _ROWS.value)
        size = os.path.getsize(path) / 2**20
        print(f"{_ROWS.value} rows, 30 columns, {size:.0f} MiB as CSV")
        for kind in ("file", "frame"):
            done = subprocess.run(
                [sys.executable, __file__, f"--load={kind}", f"--path={path}"],
                check=True,
                capture_output=True,
                text=True,
            )
            found = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{kind}: {found['seconds']:.1f} s, peak "
                f"{found['megabytes']:.0f} MiB above what was there, for "
                f"{found['inputs']} inputs ({found['arrays']:.0f} MiB)"
            )


if __name__ == "__main__":
    app.run(main)
