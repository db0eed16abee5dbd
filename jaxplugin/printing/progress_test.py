# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Progress is drawn on a terminal only."""

import contextlib
import io
import os
import re
from unittest import mock

from absl.testing import absltest

from jaxplugin.printing import progress


class Terminal(io.StringIO):
  def isatty(self):
    return True


def drawn(stream, **options):
  """Returns standard output, and standard error without control codes."""
  out = io.StringIO()
  with (
    mock.patch.dict(os.environ, {"TERM": "xterm", "COLUMNS": "80"}),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(stream),
    progress.shown("compiling", 2, **options) as line,
  ):
    line.advance()
    print("a row")
    line.describe("checking [b]")
    line.report(2, 2)
  return out.getvalue(), re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", stream.getvalue())


class ProgressTest(absltest.TestCase):
  def test_terminal_shows_the_step_and_its_number(self):
    out, err = drawn(Terminal())
    self.assertEqual(out, "a row\n")
    self.assertIn("2/2", err)
    self.assertIn("checking [b]", err)
    self.assertLessEqual(max(map(len, re.split(r"[\r\n]", err))), 80)

  def test_file_has_a_line_for_each_step(self):
    err = "compiling\nchecking [b]\n"
    self.assertEqual(drawn(io.StringIO(), prints=True), ("a row\n", err))
    self.assertEqual(drawn(io.StringIO()), ("a row\n", ""))

  def test_caller_decides(self):
    self.assertEqual(drawn(Terminal(), is_shown=False), ("a row\n", ""))
    _, err = drawn(io.StringIO(), is_shown=True, of_bytes=True)
    self.assertIn("2/2 bytes", err)
