"""The suite on every combination of versions that setup.py allows.

    nox                      all rows, each in an environment of its own
    nox -s "suite(oldest)"   one of them
    nox -l                   what there is

The newest row runs the whole suite, the others the short one. A Python that is
not installed is passed over. Environments are kept in .nox and made again only
with `nox --no-reuse-existing-virtualenvs`.
"""

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True

# Name: Python, TensorFlow, Keras, NumPy, and how the suite is called. The
# corners of the ranges in setup.py, and what lies between. TensorFlow 2.21 asks
# for Keras 3.12, so that 2.20 is the newest beside an old one.
ROWS = {
    "oldest": ("3.11", "2.18", "3.11", "1.26", ["--fast"]),
    "old-keras": ("3.12", "2.20", "3.10", "2", ["--fast"]),
    "middle": ("3.12", "2.19", "3.12", "2", ["--fast"]),
    "late": ("3.13", "2.20", "3.13", "2", ["--fast"]),
    "newest": ("3.13", "2.21", "3.15", "2", ["-m", "not slow"]),
}


@nox.session
@nox.parametrize(
    "python,row",
    [nox.param(row[0], name, id=name) for name, row in ROWS.items()],
)
def suite(session, row):
    """Installs one row and runs the suite there."""
    _, tensorflow, keras, numpy, flags = ROWS[row]
    session.install(
        "-e",
        ".[test]",
        f"tensorflow=={tensorflow}.*",
        f"tensorflow-serving-api=={tensorflow}.*",
        f"keras=={keras}.*",
        f"numpy=={numpy}.*",
        # Newer ones don't say that they need a newer protobuf than these.
        *(["tensorflow-metadata<1.17"] if tensorflow < "2.20" else []),
    )
    session.run(
        "python",
        "-c",
        "import sys, tensorflow as tf, keras, numpy; print(sys.version.split()"
        "[0], tf.__version__, keras.__version__, numpy.__version__)",
    )
    session.run(
        "python", "-m", "pytest", *flags, "-n", "2", "--dist", "loadfile",
        *session.posargs,
    )  # fmt: skip
