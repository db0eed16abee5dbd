# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs one test file under Bazel: `test_main.py FILE ARGUMENTS...`.

pytest runs those tests of the file that `make test` runs (conftest.py).
`bazel test --test_filter=NAME` becomes pytest's `-k NAME`.
"""

import os
import sys

# Triton writes its cache to $HOME. The user's home is read-only under Bazel.
os.environ["HOME"] = os.environ["TEST_TMPDIR"]
# XLA's default optimization level, instead of the faster one of conftest.py.
os.environ.setdefault("XLA_FLAGS", "")

import pytest

NO_TESTS = 5  # pytest's exit status if a file has no test of the leg


def main() -> int:
  root = os.getcwd()  # the runfiles directory, which contains conftest.py
  arguments = [*sys.argv[1:], "--leg=test", "-p", "no:cacheprovider"]
  arguments += [f"--rootdir={root}", f"--confcutdir={root}"]
  if name := os.environ.get("TESTBRIDGE_TEST_ONLY"):
    arguments += ["-k", name]
  if path := os.environ.get("XML_OUTPUT_FILE"):
    arguments.append(f"--junitxml={path}")
  status = pytest.main(arguments)
  return 0 if status == NO_TESTS else int(status)


if __name__ == "__main__":
  sys.exit(main())
