#!/bin/bash
# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Times the kernels of the working tree against those of another git revision.
# One process runs both, interleaved (compare.cc). They compute a dot of [M, K]
# and [N, K], or, if N is 0, quantize f32[M, K].
#   kernels/cpu/tests/compare/compare.sh REVISION FORMAT M N K [CONFIG]...
#   kernels/cpu/tests/compare/compare.sh HEAD~3 mxfp8 1 4096 4096
#   kernels/cpu/tests/compare/compare.sh HEAD~3 'f32*mxfp8' 1 4096 4096
#   kernels/cpu/tests/compare/compare.sh HEAD~3 nvfp4 4096 0 4096
#   kernels/cpu/tests/compare/compare.sh HEAD mxfp4 8 4096 4096 vnni by_rule:4
#   kernels/cpu/tests/compare/compare.sh HEAD int4_32 1 4096 4096 read
# Each CONFIG adds a run of the working tree; compare.cc describes its syntax.
# The CONFIG `read` only reads the weights.
# Formats: mxfp8, mxfp8_e5m2, mxfp4, nvfp4, mxfp6_e2m3, mxfp6_e3m2; for a dot
# also those of kCheckpoints in compare.cc; for its lhs also f32, bf16, f16. The
# program prints medians, quartiles and ratios to the other revision. It takes a
# few minutes, mostly to compile.
# Environment variables:
#   PYTHON        a Python that imports jax (python3)
#   ONE_THREAD=1  use one thread and measure its CPU time
#   NEW_FLAGS     compiler flags for the working tree only, e.g. -O2
set -eu
if [ $# -lt 5 ]; then
  sed -n 's/^# \{0,1\}//; 4,24p' "$0" >&2
  exit 2
fi
cd "$(dirname "$0")/../.."
revision=$1
shift
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
mkdir "$build/old" "$build/new"
git -C ../.. archive "$revision" kernels/cpu | tar -x -C "$build/old"
# Prints the structs that compare.cc passes to both builds, without comments.
# It does not pass GateArgs. DotConfig is the last field of DotArgs, so older
# revisions may lack it.
structs() {
  sed -n '/^struct Operand/,/^enum class Isa/p' "$1" |
    sed '/^\/\/.*gated/,/^};/d; s# *//.*##; /^ *$/d; /^  DotConfig config;$/d'
}
old=$build/old/kernels/cpu/kernels.h
[ "$(structs kernels.h)" = "$(structs "$old")" ] || {
  echo "compare.sh: kernels.h has other structs in $revision: no comparison" >&2
  exit 1
}
cat > "$build/export.cc" <<'CC'
#include "kernels.h"
extern "C" __attribute__((visibility("default"))) const jaxplugin::Kernels*
jaxplugin_compared_kernels() {
  return jaxplugin::GetKernels(jaxplugin::Isa::kAuto);
}
CC
compiler=${CXX:-g++}
include=$("${PYTHON:-python3}" -c "import jax; print(jax.ffi.include_dir())")
for side in old new; do
  sources=. flags=${NEW_FLAGS:-}
  if [ "$side" = old ]; then sources=$build/old/kernels/cpu flags=; fi
  cmake -S "$sources" -B "$build/$side" -DCMAKE_CXX_COMPILER="$compiler" \
    -DCMAKE_CXX_FLAGS="$flags" \
    -DJAXPLUGIN_XLA_FFI_INCLUDE_DIR="$include" > /dev/null
  cmake --build "$build/$side" --parallel 2 --target jaxplugin_cpu_kernels \
    > /dev/null
  "$compiler" -std=c++17 -shared -fPIC -I. -o "$build/$side.so" \
    "$build/export.cc" -pthread \
    $(find "$build/$side/CMakeFiles/jaxplugin_cpu_kernels.dir" -name '*.o')
done
"$compiler" -std=c++17 -O2 -Wall -Wextra -I. -o "$build/compare" \
  tests/compare/compare.cc parallel.cc -ldl -pthread
problem=("${@:1:4}")
shift 4
configs=()
for config; do
  if [ "$config" = read ]; then
    configs+=(read)
  else
    configs+=("$build/new.so@$config")
  fi
done
"$build/compare" "${problem[@]}" "$build/old.so" "$build/new.so" \
  ${configs[@]+"${configs[@]}"} | sed "s#$build/##"
