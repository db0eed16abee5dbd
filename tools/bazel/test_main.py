# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs one test file under Bazel: `test_main.py FILE ARGUMENTS...`.

It does what pytest does for it elsewhere: takes the settings of conftest.py
before JAX starts, and puts the file's folder on the path if it is no package.
absl, whose main the file runs, serves Bazel's sharding, filter and report.
"""

import os
import runpy
import sys

# Triton's cache is there; the user's own folder cannot be written to.
os.environ["HOME"] = os.environ["TEST_TMPDIR"]
# XLA's own level of optimization: conftest.py has a quicker one.
os.environ.setdefault("XLA_FLAGS", "")

import conftest as conftest


def main() -> None:
  del sys.argv[0]
  # Not resolved: the link's target lies outside of what Bazel gives the test.
  path = os.path.abspath(sys.argv[0])
  folder = os.path.dirname(path)
  if not os.path.exists(os.path.join(folder, "__init__.py")):
    sys.path.insert(0, folder)
  runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
  main()
