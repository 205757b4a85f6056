# `make demo` and `make test` are all that a fresh machine with Python and make
# needs; the rest is for developers.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Quiet TensorFlow's start-up banner.
export TF_CPP_MIN_LOG_LEVEL ?= 3

.PHONY: demo test test-fast test-slow lint benchmark docs package clean

demo: $(VENV)/.installed
	$(BIN)/python examples/quickstart.py

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

benchmark: $(VENV)/.installed
	$(BIN)/python tools/benchmark.py

# A site in build/site; warnings are errors.
docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build

# An sdist and a wheel in dist.
package: $(VENV)/.installed-test
	$(BIN)/python -m build --outdir dist .

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamps make both commands idempotent: an install runs again only when the
# requirements change.
$(VENV)/.installed: setup.py keras_rub/version.py | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-test: setup.py keras_rub/version.py | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test]"
	touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: setup.py keras_rub/version.py | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache out
