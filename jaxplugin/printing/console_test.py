# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reports as strings and on terminals."""

import io
import os
from unittest import mock

from absl.testing import absltest

from jaxplugin.printing import console

TABLE = console.table(
  ["name", "k", "backend"],
  [["[bold]a/" * 20, "4096", ("cpu", "green")], ["b", "16", "xla"]],
  names=["name"],
  figures=["k"],
)


class Terminal(io.StringIO):
  def isatty(self):
    return True


def shown(part, *, stream, **environment):
  with mock.patch.dict(os.environ, {"TERM": "xterm", **environment}):
    console.show([part], stream)
  return stream.getvalue()


class TextTest(absltest.TestCase):
  def test_names_wrap_and_figures_do_not(self):
    with mock.patch.dict(os.environ, {"COLUMNS": "200"}):
      text = console.text(["title", TABLE])
    lines = text.splitlines()
    self.assertLessEqual(max(map(len, lines)), console.WIDTH)
    self.assertEqual(lines[0], "title")
    self.assertRegex(lines[1], r"^name +k  backend$")
    self.assertRegex(lines[2], r"^(\[bold\]a/)+\S* +4096  cpu$")
    self.assertRegex(lines[-1], r"^b +  16  xla$")
    names = "".join(line.split()[0] for line in lines[2:-1])
    self.assertEqual(names, "[bold]a/" * 20)

  def test_indented_table_starts_further_right(self):
    text = console.text([console.table(["a"], [["b"]], indent=4)])
    self.assertEqual(text, "    a\n    b")


class ShowTest(absltest.TestCase):
  def test_colors_are_for_terminals_without_no_color(self):
    for stream, environment, expected in (
      (io.StringIO(), {}, False),
      (Terminal(), {}, True),
      (Terminal(), {"NO_COLOR": "1"}, False),
    ):
      text = shown(TABLE, stream=stream, **environment)
      self.assertEqual("\x1b[32mcpu" in text, expected)

  def test_width_is_80_columns_or_columns(self):
    line = "  " + "word " * 30
    with mock.patch.dict(os.environ):
      os.environ.pop("COLUMNS", None)
      text = shown(line, stream=io.StringIO())
    self.assertBetween(max(map(len, text.splitlines())), 76, 80)
    self.assertStartsWith(text.splitlines()[1], "      word")
    for stream in (io.StringIO(), Terminal()):
      text = shown(line, stream=stream, COLUMNS="50")
      self.assertBetween(max(map(len, text.splitlines())), 46, 50)

  def test_long_path_stays_whole_and_a_short_line_keeps_its_spaces(self):
    path = "/a-b" * 30
    self.assertIn(path, shown(f"error: {path}", stream=io.StringIO()))
    self.assertEqual(shown("a  b ", stream=io.StringIO()), "a  b \n")

  def test_row_is_a_line_of_text_on_a_narrow_terminal(self):
    table = console.table(
      ["name", "k", "backend"],
      [["a", "4096", ("cpu", "green")], ["", "16", "xla"]],
      names=["name"],
      indent=4,
    )
    text = shown(table, stream=Terminal(), COLUMNS="28")
    lines = ["    name: a, k: 4096,", "        backend: cpu"]
    self.assertEqual(text, "\n".join([*lines, "    k: 16, backend: xla\n"]))
    for columns in "29", "0":
      text = shown(table, stream=io.StringIO(), COLUMNS=columns)
      self.assertRegex(text, "^ {4}name +k +backend\n    a")

  def test_closed_pipe_is_an_error_that_a_caller_handles(self):
    stream = io.StringIO()
    stream.flush = mock.Mock(side_effect=BrokenPipeError)
    with self.assertRaises(BrokenPipeError):
      console.show([TABLE], stream)

  def test_no_columns_are_an_unknown_width(self):
    line = "word " * 30
    text = shown(line, stream=io.StringIO(), COLUMNS="0")
    self.assertBetween(max(map(len, text.splitlines())), 76, 80)
