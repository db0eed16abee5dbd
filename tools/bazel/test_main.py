# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs one test file under Bazel: `test_main.py FILE ARGUMENTS...`.

pytest runs the tests of `make test` that the file has (conftest.py).
`bazel test --test_filter=NAME` is pytest's `-k NAME`.
"""

import os
import sys

# Triton writes its cache there. The user's own folder is read-only.
os.environ["HOME"] = os.environ["TEST_TMPDIR"]
# XLA's own level of optimization; conftest.py has a quicker one.
os.environ.setdefault("XLA_FLAGS", "")

import pytest

NO_TESTS = 5  # pytest's exit status if a file has no test of the leg


def main() -> int:
  root = os.getcwd()  # of the runfiles, where conftest.py is
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
