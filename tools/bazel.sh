#!/usr/bin/env bash
# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Runs Bazel with the Python packages of a virtual environment, and without
# network access:
#
#   tools/bazel.sh test //...
#   tools/bazel.sh test //jaxplugin:dot/api_test --test_filter=DotTest
#
# VENV is the environment (.venv by default), which `make test` creates.
# BAZEL_ROOT is Bazel's output directory, if not the default one. If bazel is
# not on PATH, the script installs Debian's packages. If it cannot, its exit
# status is 69, "unavailable".
set -euo pipefail
cd "$(dirname "$0")/.."

readonly unavailable=69
readonly state="$PWD/build/bazel"
readonly debian=/usr/share/bazel
venv=${VENV:-.venv}

fail() {
  echo "tools/bazel.sh: ${*:2}" >&2
  exit "$1"
}

install_bazel() {
  command -v apt-get >/dev/null ||
    fail $unavailable "no bazel on PATH, and no apt-get to install it with"
  [ "$(id -u)" = 0 ] ||
    fail $unavailable "no bazel on PATH; root can: apt-get install" \
      "bazel-bootstrap"
  { apt-get update && apt-get install --yes --no-install-recommends \
    bazel-bootstrap bazel-rules-java bazel-rules-proto bazel-skylib \
    bazel-platforms; } >"$state/apt.log" 2>&1 ||
    fail $unavailable "no bazel on PATH, nor by apt-get: see $state/apt.log"
}

# Creates $state/python, an environment that imports the packages of $venv but
# not jaxplugin itself. (The import hook of an editable install would put the
# checkout before the files that Bazel built.)
link_python() {
  [ -x "$venv/bin/python" ] ||
    fail 1 "no environment $venv; \`make test\` sets one up (VENV=$venv)"
  "$venv/bin/python" -m venv --clear --without-pip "$state/python"
  local get="import sysconfig; print(sysconfig.get_path('purelib'))"
  local packages
  packages=$("$venv/bin/python" -c "$get")
  echo "$packages" >"$("$state/python/bin/python" -c "$get")/packages.pth"
  # A checksum of the installed packages. It is part of the test environment, so
  # Bazel reruns tests when a package changes.
  installed=$(cd "$packages" && printf '%s\n' *.dist-info | cksum)
  installed=${installed%% *}
}

# Bazel would download these repositories. Some come from Debian's packages; the
# others are stubs, because only their names are used.
override_repositories() {
  local cc="$state/rules_cc" coverage="$state/remote_coverage_tools" rule
  mkdir -p "$cc/cc" "$coverage"
  touch "$cc/WORKSPACE" "$cc/BUILD" "$cc/cc/BUILD" "$coverage/WORKSPACE"
  for rule in cc_binary cc_import cc_library cc_proto_library cc_test \
    cc_toolchain cc_toolchain_suite fdo_prefetch_hints fdo_profile \
    objc_import objc_library; do
    echo "$rule = native.$rule"
  done >"$cc/cc/defs.bzl"
  printf '%s\n' 'filegroup(' '    name = "coverage_report_generator",' \
    '    visibility = ["//visibility:public"],' ')' >"$coverage/BUILD"
  override rules_cc "$cc"
  override remote_coverage_tools "$coverage"
  override rules_java $debian/rules/java
  override rules_proto $debian/rules/proto
  override platforms $debian/tools/platforms
  override bazel_skylib $debian/tools/skylib
}

override() {
  echo "common --override_repository=$1=$2" >>"$state/bazelrc"
}

mkdir -p "$state"
command -v bazel >/dev/null || install_bazel
link_python
{
  echo "build --test_env=PATH"
  echo "build --test_env=JAXPLUGIN_INSTALLED=$installed"
} >"$state/bazelrc"
# A Bazel that is not Debian's downloads its repositories.
if [ -d $debian/rules/java ]; then
  override_repositories
fi
PATH="$state/python/bin:$PATH" exec bazel \
  ${BAZEL_ROOT:+"--output_user_root=$BAZEL_ROOT"} \
  --bazelrc="$state/bazelrc" "$@"
