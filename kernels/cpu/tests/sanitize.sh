#!/bin/bash
# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Runs the tests under sanitizers:
#   kernels/cpu/tests/sanitize.sh address,undefined [python] [Class[.test]]...
#       the handlers' tests (handler_tests.sh) with an instrumented library; seven
#       minutes. The sanitizer runtimes are preloaded, because python is not
#       instrumented.
#   kernels/cpu/tests/sanitize.sh thread [python]
#       race_test, a program without Python; two minutes. XLA's thread pool is
#       not instrumented, so ThreadSanitizer would not see its locks and would
#       report every handover between threads as a race.
# With EMULATE_AVX512=ON the emulated AVX-512 kernels are tested too (see
# emulate.sh).
set -eu
sanitize=${1:-address,undefined}
python=${2:-python3}
if [ -x "$python" ]; then python=$(realpath --no-symlinks "$python"); fi
cd "$(dirname "$0")"
shift $(($# < 2 ? $# : 2))
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
include=$("$python" -c "import jax; print(jax.ffi.include_dir())")
cmake -S .. -B "$build" -DJAXPLUGIN_SANITIZE="$sanitize" \
  -DJAXPLUGIN_EMULATE_AVX512="${EMULATE_AVX512:-OFF}" \
  -DJAXPLUGIN_XLA_FFI_INCLUDE_DIR="$include" > /dev/null
cmake --build "$build" --parallel 2 --target all race_test
if [ "$sanitize" = thread ]; then
  TSAN_OPTIONS="halt_on_error=1" "$build/race_test"
  exit
fi
compiler=${CXX:-g++}
preload=""
for runtime in asan ubsan; do
  case "$sanitize,$runtime" in
    *address*,asan | *undefined*,ubsan)
      preload="$preload $("$compiler" -print-file-name=lib$runtime.so)" ;;
  esac
done
# libstdc++ too: the sanitizers look up __cxa_throw when they start.
preload="$preload $("$compiler" -print-file-name=libstdc++.so.6)"
JAXPLUGIN_CPU_LIBRARY=$(echo "$build"/libjaxplugin_cpu*.so)
export JAXPLUGIN_CPU_LIBRARY
export ASAN_OPTIONS="detect_leaks=0:halt_on_error=1"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1"
HANDLER_TESTS_PRELOAD="$preload" ./handler_tests.sh "$python" "$@"
