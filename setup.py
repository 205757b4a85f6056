"""Packaging of keras_rub: metadata, requirements and extras."""

import pathlib
import re

import setuptools

HERE = pathlib.Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$',
    (HERE / "keras_rub" / "version.py").read_text(),
    flags=re.MULTILINE,
).group(1)

# The ranges begin at the oldest release that passes the tests and end below
# the next one that has not been tried; README.md has the table.
REQUIRED = [
    "tensorflow>=2.18,<2.22",
    # 3.9 has no `keras.activations.sparse_sigmoid`, and 3.6 no `celu` either.
    "keras>=3.10,<3.16",
    "numpy>=1.26,<3",
    "absl-py>=2.1",
    "tensorflow-datasets>=4.9.9,<5",
    # tensorflow-datasets imports it when it prepares a data set, but does
    # not declare it.
    "importlib_resources>=6",
    "keras-tuner>=1.4.8,<2",
    # keras-tuner imports it in every trial, and keras's TensorBoard callback
    # writes through it; TensorFlow 2.21 no longer brings it.
    "tensorboard>=2.18",
    "foolbox>=3.3.4,<4",
    # HiGHS, of the exact method; foolbox imports a module of scipy that is
    # announced to go away in 2.0.
    "scipy>=1.13,<2",
    # Embedded data sets and stratified splits.
    "scikit-learn>=1.5,<2",
    # Search spaces are written in YAML.
    "pyyaml>=6,<7",
    # Plots of the examples, tools and reports.
    "matplotlib>=3.9,<4",
]

# Warm-up requests, clients that use gRPC, and `keras-rub serve`.
SERVING = [
    # The messages of TensorFlow Serving. Each release asks for the TensorFlow
    # of its own number, so that pip finds the one beside it.
    "tensorflow-serving-api>=2.18,<2.22",
    "grpcio>=1.60",
    # REST of the development server. A signature blocks its thread, so that
    # threads are what is wanted; it is pure Python and needs nothing else.
    "waitress>=3,<4",
]

# The site of `make docs`; its API pages come from the docstrings.
DOCS = [
    "mkdocs>=1.6,<2",
    "mkdocs-material>=9.7,<10",
    "mkdocstrings[python]>=1,<2",
]

# Data frames in and out of `keras_rub.datasets`; dicts of columns need none.
PANDAS = [
    "pandas>=2.2,<4",
]

# `keras-rub reproduce` in several processes or on many machines. Releases are
# named after dates; no older one has been tried.
CLUSTER = [
    "distributed>=2026.8,<2027",
]

TEST = [
    *PANDAS,
    *CLUSTER,
    *SERVING,
    *DOCS,
    "build>=1.2",
    # `make package` checks what it built.
    "twine>=5",
    # `make matrix`: an environment for each row of the table in README.md.
    "nox>=2024.4",
    "setuptools>=77",
    "pytest>=8,<10",
    # Two processes: the suite is many small graphs, which one core traces.
    "pytest-xdist>=3.6,<4",
    "hypothesis>=6.100,<7",
    "ruff>=0.14,<0.16",
    "mypy>=1.15,<2",
    "types-PyYAML>=6",
]

setuptools.setup(
    name="keras-rub",
    version=VERSION,
    description="Robust Keras classifiers with certificates",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11,<3.14",
    packages=setuptools.find_packages(include=["keras_rub", "keras_rub.*"]),
    package_data={"keras_rub": ["py.typed", "cli/*.csv", "reproduction/*.csv"]},
    entry_points={
        "console_scripts": ["keras-rub = keras_rub.cli.main:main"],
    },
    install_requires=REQUIRED,
    extras_require={
        "pandas": PANDAS,
        "cluster": CLUSTER,
        "serving": SERVING,
        "docs": DOCS,
        "test": TEST,
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
