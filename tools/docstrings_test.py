# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Each public function and class has an example, which prints its output.

The examples of a docstring run in an empty namespace and in an empty folder.
They import what they use. No option of doctest is set.
"""

from __future__ import annotations

import contextlib
import doctest
import inspect
import re
import tempfile

from absl.testing import absltest, parameterized

import jaxplugin as jp

SUMMARY_LENGTH = 72
WORDS = 250  # without formulas and the example
LITERAL = re.compile(r"(?<=::\n)\n(?:(?: +.*)?(?:\n|$))*")
EXAMPLE = re.compile(r"^Examples?:\n(?:(?:  .*)?(?:\n|$))*", re.M)

# Public functions and classes without an example, with the reason.
NO_EXAMPLE = {
  "backends.Call": "jaxplugin creates it; the example of Backend reads one",
  "backends.DequantizeCall": "jaxplugin creates it",
  "backends.Operand": "an attribute of backends.Call",
  "backends.QuantizeCall": "jaxplugin creates it",
  "backends.RaggedCall": "jaxplugin creates it",
  "checkpoint_policies.quantized_saveable": "an object of JAX",
}


def public():
  """Returns {name: value} of all public names, each value under one name."""
  modules = {"": jp}
  for name in jp.__all__:
    if inspect.ismodule(getattr(jp, name)):
      modules[f"{name}."] = getattr(jp, name)
  found = {}
  for prefix, module in modules.items():
    for name in module.__all__:
      value = getattr(module, name)
      is_again = prefix and getattr(jp, name, None) is value
      if not is_again and not inspect.ismodule(value):
        found[prefix + name] = value
  return found


def is_error(value):
  return inspect.isclass(value) and issubclass(value, BaseException)


# Types of arguments (`Literal`, `Callable`) are callable as well.
CALLABLES = {
  name: value
  for name, value in public().items()
  if inspect.isclass(value) or inspect.isroutine(value) or name in NO_EXAMPLE
}


def examples(name, value):
  """Returns the doctests of a docstring and of the members of a class."""
  found = doctest.DocTestFinder().find(value, name, module=False, globs={})
  return [test for test in found if test.examples]


def report(test):
  """Runs a doctest; returns its report if it fails, else ""."""
  lines = []
  with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
    doctest.DocTestRunner(verbose=False).run(test, out=lines.append)
  return "".join(lines)


def faults_of_form(text):
  """Returns the rules that a docstring breaks."""
  faults = []
  summary, *rest = text.split("\n")
  if len(summary) > SUMMARY_LENGTH or any(rest[:1]) or summary[-1:] != ".":
    faults.append(f"not a sentence of {SUMMARY_LENGTH} characters: {summary}")
  words = len(EXAMPLE.sub("", LITERAL.sub("", text)).split())
  if words > WORDS:
    faults.append(f"{words} words")
  return faults


class ExamplesTest(parameterized.TestCase):
  @parameterized.named_parameters((name, name) for name in CALLABLES)
  def test_example_prints_its_output(self, name):
    for test in examples(name, CALLABLES[name]):
      self.assertEqual(report(test), "", test.name)

  def test_every_function_and_class_has_an_example(self):
    self.assertCountEqual(
      [
        name
        for name, value in CALLABLES.items()
        if not is_error(value)
        and not any(test.name == name for test in examples(name, value))
      ],
      NO_EXAMPLE,
    )

  def test_docstrings_have_a_short_summary_and_few_words(self):
    for name, value in CALLABLES.items():
      if name not in NO_EXAMPLE:
        with self.subTest(name):
          self.assertEmpty(faults_of_form(inspect.getdoc(value) or ""))


class ReaderTest(absltest.TestCase):
  def report_of(self, docstring):
    def function():
      pass

    function.__doc__ = docstring
    (test,) = examples("function", function)
    return report(test)

  def test_another_output_is_found(self):
    self.assertEmpty(self.report_of("F.\n\n>>> 1 + 1\n2\n"))
    self.assertIn("Got:\n    2", self.report_of("F.\n\n>>> 1 + 1\n3\n"))

  def test_example_imports_what_it_uses(self):
    self.assertIn("NameError", self.report_of("F.\n\n>>> jp.MXFP8.name\n''\n"))

  def test_examples_are_those_of_docstrings_that_have_one(self):
    class Class:
      """C."""

      def method(self):
        """F.

        >>> 1
        2
        """

    (test,) = examples("Class", Class)
    self.assertEqual(test.name, "Class.method")

  def test_long_summaries_and_docstrings_are_found(self):
    self.assertEmpty(faults_of_form("Returns x.\n\n" + "a " * 248))
    self.assertLen(faults_of_form("Returns x.\n\n" + "a " * 249), 1)
    self.assertEmpty(
      faults_of_form("Returns x.\n\nExample:\n  >>> " + "a " * 251 + "\n\n  b")
    )
    formula = "Returns x, which is::\n\n  " + "a " * 251 + "\n\n"
    self.assertEmpty(faults_of_form("Returns x.\n\n" + formula))
    self.assertLen(faults_of_form(f"Returns x.\n\n{formula}" + "b " * 251), 1)
    self.assertLen(faults_of_form("Returns " + "x" * 64 + "."), 1)
    self.assertLen(faults_of_form("Returns x\nand y."), 1)
