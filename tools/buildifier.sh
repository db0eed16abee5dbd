#!/usr/bin/env bash
# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Checks or fixes the format of Bazel files with npm's buildifier:
#
#   tools/buildifier.sh check | fix
#
# The exit status is 69, "unavailable", if npm cannot run buildifier.
set -euo pipefail
cd "$(dirname "$0")/.."

buildifier=(npm exec --yes --package=@bazel/buildifier@8.2.1 -- buildifier)
"${buildifier[@]}" --version >/dev/null || {
  echo "tools/buildifier.sh: npm is missing or cannot run buildifier" >&2
  exit 69
}
case ${1:-check} in
  check) options=(--mode=check --lint=warn) ;;
  fix) options=(--mode=fix --lint=fix) ;;
  *)
    echo "tools/buildifier.sh: check or fix, got $1" >&2
    exit 2
    ;;
esac
# These files use Bazel's native rules. Newer Bazel versions load the rules from
# other repositories, and buildifier warns about it.
options+=(--warnings=-native-cc-binary,-native-cc-library,-native-cc-test)
options[-1]+=,-native-py,-native-sh-binary
find . \( -name '.?*' -o -path ./build -o -name 'bazel-*' \) -prune -o -type f \
  \( -name BUILD.bazel -o -name '*.bzl' -o -name WORKSPACE \) -print0 |
  xargs -0 "${buildifier[@]}" "${options[@]}"
