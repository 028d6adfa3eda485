# Two commands on a fresh machine: `make quickstart` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TESTS ?= tests

.PHONY: help quickstart test test-layouts test-models check format bench clean

help:
	@echo "make quickstart   train a small GPT on text that Python ships, on one process and on two (about two minutes)"
	@echo "make test         run the tests (TESTS=tests/data for a part)"
	@echo "make test-layouts compare about a hundred layouts with one process (about ten minutes)"
	@echo "make test-models  compare every model family with transformers, in layouts, in and out (about ten minutes)"
	@echo "make check        lint, formatting, types, floors"
	@echo "make format       let ruff format the code"
	@echo "make bench        measure against a plain PyTorch loop"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) -e ".[test,chinese,hf,onnx,pictures]"
	@touch $@

quickstart: $(VENV)/.base
	$(BIN)/python examples/quickstart.py

test: $(VENV)/.test
	$(BIN)/python -m pytest $(TESTS)

test-layouts: $(VENV)/.test
	DUFU_LAYOUTS=all $(BIN)/python -m pytest tests/layouts

MODELS := tests/models tests/interchange tests/onnx tests/parallel/test_outside.py tests/parallel/test_encdec_parity.py tests/training/test_t5_runs.py

test-models: $(VENV)/.test
	DUFU_MODELS=all $(BIN)/python -m pytest $(MODELS)

check: $(VENV)/.test
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.test
	$(BIN)/ruff check --fix src tests benchmarks examples
	$(BIN)/ruff format src tests benchmarks examples

bench: $(VENV)/.test
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info output .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
