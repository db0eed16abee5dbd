# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A test format for lit that runs golden files in lit's worker process."""

from __future__ import annotations

import pathlib

import golden
import lit.formats
import lit.Test


class InProcess(lit.formats.FileBasedTest):
  """Runs the RUN lines of a file with `golden.check`."""

  def execute(self, test, lit_config):
    del lit_config
    import tool  # imports JAX, so only in the worker

    path = pathlib.Path(test.getSourcePath())
    try:
      if any(run.needs_compiler for run in golden.runs(path)):
        missing = tool.missing_compiler()
        if missing:
          return lit.Test.UNSUPPORTED, missing
      golden.check(tool.main, path)
    except golden.GoldenError as error:
      return lit.Test.FAIL, str(error)
    return lit.Test.PASS, ""
