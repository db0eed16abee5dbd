# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Each mutant fits the source that it changes."""

import ast
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest
import run
from absl.testing import absltest

pytestmark = pytest.mark.smoke

MIN_MUTANTS = 150
MAX_WORDS = 20


class MutantsTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.mutants = run.read()

  def test_there_are_enough(self):
    mutants = [mutant for mutant in self.mutants if not mutant.equivalent]
    self.assertGreaterEqual(len(mutants), MIN_MUTANTS)

  def test_names_are_unique(self):
    counts = collections.Counter(mutant.name for mutant in self.mutants)
    self.assertEqual([name for name, n in counts.items() if n > 1], [])

  def test_text_to_replace_occurs_once(self):
    for mutant in self.mutants:
      text = (run.ROOT / mutant.file).read_text()
      self.assertEqual(text.count(mutant.old), 1, mutant.name)
      self.assertNotEqual(mutant.old, mutant.new, mutant.name)

  def test_mutated_modules_parse(self):
    for mutant in self.mutants:
      if mutant.file.endswith(".py"):
        text = (run.ROOT / mutant.file).read_text()
        with self.subTest(mutant.name):
          ast.parse(text.replace(mutant.old, mutant.new))

  def test_a_short_sentence_describes_the_fault(self):
    for mutant in self.mutants:
      self.assertRegex(mutant.fault, r"^\S.*\.$", mutant.name)
      self.assertLessEqual(len(mutant.fault.split()), MAX_WORDS, mutant.name)


class LinesTest(absltest.TestCase):
  def lines(self, old, text):
    mutant = run.Mutant(name="a", file="a.py", fault="A.", old=old, new="")
    return [*mutant.lines(text)]

  def test_lines_are_those_of_the_replaced_text(self):
    text = "a\nb\n  c\nd\n"
    self.assertEqual(self.lines("b", text), [2])
    self.assertEqual(self.lines("  c\n", text), [3])
    self.assertEqual(self.lines("b\n  c", text), [2, 3])
    self.assertEqual(self.lines("\nb\n", text), [2])


@absltest.skipIf(sys.version_info < (3, 12), "needs sys.monitoring")
class LineCoverageTest(absltest.TestCase):
  def test_each_test_has_the_lines_that_it_runs(self):
    directory = self.enter_context(tempfile.TemporaryDirectory())
    test = "jaxplugin/core/formats_test.py"
    subprocess.run(
      [
        *(sys.executable, "-m", "pytest", "-q", "-p", "line_coverage", test),
        f"--line-coverage={directory}",
      ],
      cwd=run.ROOT,
      env={**os.environ, "PYTHONPATH": str(run.ROOT / "tools/mutants")},
      check=True,
      stdout=subprocess.DEVNULL,
    )
    (path,) = pathlib.Path(directory).iterdir()
    records = [json.loads(line) for line in path.open()]
    self.assertNotEmpty(records)
    for record in records:
      self.assertStartsWith(record["test"], test)
      self.assertGreater(record["seconds"], 0)
    files = set().union(*(record["lines"] for record in records))
    self.assertIn("jaxplugin/core/formats.py", files)
