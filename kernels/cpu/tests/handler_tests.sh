#!/bin/bash
# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Runs the handlers' tests as programs, with the library JAXPLUGIN_CPU_LIBRARY.
# sanitize.sh and emulate.sh call this script.
#   kernels/cpu/tests/handler_tests.sh python [Class | Class.test | --flag]...
# If tests are named, only the files that define their classes run.
# HANDLER_TESTS_PRELOAD: libraries for LD_PRELOAD.
set -eu
cd "$(dirname "$0")"
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1} # as in conftest.py
python=$1
shift
flags=()
names=()
for word; do
  case "$word" in
    -*) flags+=("$word") ;;
    *) names+=("$word") ;;
  esac
done
ran=0
for test in accuracy_test.py checkpoint_formats_test.py dot_config_test.py \
  dot_handler_test.py few_rows_test.py float_mode_test.py fp4_pairs_test.py \
  offsets_handler_test.py operand_handler_test.py prologue_handler_test.py \
  quantize_handlers_test.py quantized_result_test.py quantized_rows_test.py \
  ragged_handler_test.py scales_test.py; do
  here=()
  for name in "${names[@]}"; do
    if grep -q "^class ${name%%.*}(" "$test"; then
      here+=("$name")
    fi
  done
  if [ ${#names[@]} -gt 0 ] && [ ${#here[@]} = 0 ]; then
    continue
  fi
  env ${HANDLER_TESTS_PRELOAD:+LD_PRELOAD="$HANDLER_TESTS_PRELOAD"} \
    "$python" "$test" "${flags[@]}" "${here[@]}"
  ran=$((ran + 1))
done
if [ "$ran" = 0 ]; then
  echo "handler_tests.sh: no file has a class of ${names[*]}" >&2
  exit 2
fi
