#!/bin/sh
# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Compiles every kernel with the oldest Triton that jax-triton accepts:
#
#   tools/oldest_triton.sh .venv/bin/python
#
# It needs the packages of `make test`, and installs Triton into build/.
set -eu
cd "$(dirname "$0")/.."
python=$1
folder=build/triton-3.6.0
[ -d "$folder" ] ||
  "$python" -m pip install --quiet --no-deps --target "$folder" triton==3.6.0
PYTHONPATH=$folder exec "$python" -m pytest -q -n 2 \
  jaxplugin/lab/compilation/every_kernel_test.py
