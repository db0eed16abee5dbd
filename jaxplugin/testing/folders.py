# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders that are deleted after a test."""

import pathlib
import tempfile
import unittest


def new(test: unittest.TestCase) -> pathlib.Path:
  """Returns an empty folder."""
  return pathlib.Path(test.enterContext(tempfile.TemporaryDirectory()))
