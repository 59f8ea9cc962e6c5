# From a clean clone: `make verify` judges every backend, `make test` runs the suite. Each makes .venv first,
# and again only when pyproject.toml or the constraints change.
PYTHON ?= python3
DEVICE ?= cpu
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint .ci/constraints.txt

.PHONY: verify test gate lint types docs tables clean
.DELETE_ON_ERROR:

verify: $(VENV)/.run
	$(BIN)/mla-verify run --device $(DEVICE)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

gate: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m evals check

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.dev
	$(BIN)/mypy

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --config-file .ci/mkdocs.yml

tables: $(VENV)/.dev
	$(BIN)/python -m oracles.tables
	$(BIN)/python tests/docs_blocks.py

clean:
	rm -rf $(VENV) site

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(PIP) pip
	$(PIP) --editable '.[triton]'
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) --editable '.[triton,fuzz,evals,report]' --group dev --group docs
	touch $@
