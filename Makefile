# `make demo` and `make test` are all that a fresh machine with Python and make
# needs; the rest is for developers.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Quiet TensorFlow's start-up banner.
export TF_CPP_MIN_LOG_LEVEL ?= 3

# Errors only: pip's notes and warnings are not about this package.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check \
    --root-user-action=ignore --no-warn-script-location

.PHONY: demo test test-fast test-slow lint verify-zoo benchmark docs matrix \
    package clean

# TensorFlow's banners go to a file, which is shown if the demo fails.
demo: $(VENV)/.installed
	@mkdir -p out
	@$(BIN)/python examples/quickstart.py 2>out/demo.log \
	    || { cat out/demo.log >&2; exit 1; }

test: lint
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

# For the loop at the desk: one case of each test, no commands or examples.
test-fast: $(VENV)/.installed-test
	$(BIN)/python -m pytest --fast -n 2 --dist loadfile

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow -s
	$(BIN)/python -m pytest -m eager --traced -n 2 --dist loadfile
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=thorough

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Recomputes the figures of zoo/index.json from the files; FLAGS="--attacked"
# those under attack too, FLAGS="--data_dir DATA" names the data folder.
verify-zoo: $(VENV)/.installed
	$(BIN)/python tools/zoo.py --verify $(FLAGS)

benchmark: $(VENV)/.installed
	$(BIN)/python tools/benchmark.py

# A site in build/site; warnings are errors.
docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build

# The suite on every combination of versions of noxfile.py. The Pythons must be
# there; environments are made in .nox.
matrix: $(VENV)/.installed-test
	$(BIN)/nox

# An sdist and a wheel in dist, both checked.
package: $(VENV)/.installed-test
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamps make both commands idempotent: an install runs again only when the
# requirements change.
$(VENV)/.installed: setup.py keras_rub/version.py | $(BIN)/python
	@echo "Installing TensorFlow and the rest into $(VENV), once; minutes."
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: setup.py keras_rub/version.py | $(BIN)/python
	$(PIP) -e ".[test]"
	touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: setup.py keras_rub/version.py | $(BIN)/python
	$(PIP) -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) .nox build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache out
