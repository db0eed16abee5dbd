#!/bin/bash
# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Runs kernels of other machines in emulation:
#   kernels/cpu/tests/emulate.sh avx512 [python] [Class[.test]]...
#       the handlers' tests (handler_tests.sh) on a library whose AVX-512
#       intrinsics are emulated; three minutes.
#   kernels/cpu/tests/emulate.sh aarch64 [python]
#       kernels_test and race_test, compiled for aarch64, in QEMU, on processors
#       with i8mm, with dotprod and without both; one minute. Needs Debian's
#       g++-aarch64-linux-gnu and qemu-user-static, which it installs for root.
# With sanitizers:
#   EMULATE_AVX512=ON kernels/cpu/tests/sanitize.sh address,undefined
#
# The exit status is 69 if the compiler or the emulator is missing.
set -eu
machine=${1:-avx512}
python=${2:-python3}
if [ -x "$python" ]; then python=$(realpath --no-symlinks "$python"); fi
cd "$(dirname "$0")"
shift $(($# < 2 ? $# : 2))

need() {
  command -v "$1" > /dev/null && return
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    apt-get install --quiet --quiet --yes "$2" > /dev/null && return
  fi
  echo "emulate.sh: $1 is missing; install $2" >&2
  exit 69
}

case "$machine" in
  avx512) options=(-DJAXPLUGIN_EMULATE_AVX512=ON) ;;
  aarch64)
    need aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
    need qemu-aarch64-static qemu-user-static
    options=(-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64
      -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++) ;;
  *)
    echo "emulate.sh: avx512 or aarch64, not '$machine'" >&2
    exit 2 ;;
esac
need cmake cmake
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
include=$("$python" -c "import jax; print(jax.ffi.include_dir())")
cmake -S .. -B "$build" "${options[@]}" \
  -DJAXPLUGIN_XLA_FFI_INCLUDE_DIR="$include" > /dev/null
cmake --build "$build" --parallel 2 --target all kernels_test race_test
if [ "$machine" = aarch64 ]; then
  emulated() {
    qemu-aarch64-static -L /usr/aarch64-linux-gnu "$@"
  }
  # kernels_test uses one core.
  running=()
  for processor in max cortex-a76 cortex-a57; do
    emulated -cpu "$processor" "$build/kernels_test" &
    running+=($!)
  done
  for process in "${running[@]}"; do wait "$process"; done
  emulated "$build/race_test"
  exit
fi
"$build/kernels_test" 4000
"$build/race_test"
export JAXPLUGIN_CPU_LIBRARY="$build/libjaxplugin_cpu_emulated.so"
./handler_tests.sh "$python" "$@"
