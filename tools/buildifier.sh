#!/usr/bin/env bash
# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Bazel's files in one form, by npm's buildifier: `buildifier.sh check | fix`.
# Exit status 69, "unavailable", where npm has none.
set -euo pipefail
cd "$(dirname "$0")/.."

buildifier=(npm exec --yes --package=@bazel/buildifier@8.2.1 -- buildifier)
"${buildifier[@]}" --version >/dev/null || {
  echo "tools/buildifier.sh: npm is not here, or has no buildifier" >&2
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
# The rules are Bazel's own here, which newer versions load from elsewhere.
options+=(--warnings=-native-cc-binary,-native-cc-library,-native-cc-test)
options[-1]+=,-native-py,-native-sh-binary
find . \( -name '.?*' -o -path ./build -o -name 'bazel-*' \) -prune -o -type f \
  \( -name BUILD.bazel -o -name '*.bzl' -o -name WORKSPACE \) -print0 |
  xargs -0 "${buildifier[@]}" "${options[@]}"
