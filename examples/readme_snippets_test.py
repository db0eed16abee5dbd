# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The Python in README.md and in the documentation runs, and prints its output.

A block of README.md runs by itself in an empty namespace, as a reader pastes
it. The blocks of a page of docs/ run one after the other, from an empty
namespace. A `text` block that follows a block of Python is its output; `...`
stands for any text.
"""

import ast
import contextlib
import doctest
import io
import pathlib
import re
import sys
import tempfile
import traceback

import pytest
from absl.testing import absltest, parameterized

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
README_LINES = 130
# Modules of jaxplugin and of the packages that it requires.
INSTALLED = {"jax", "jaxplugin", "ml_dtypes", "numpy"}
# Module -> what to install, if the names differ.
DISTRIBUTIONS = {"absl": "testing", "orbax": "orbax-checkpoint"}

BLOCK = re.compile(
  r"^```python\n(?P<source>.*?)^```\n(?:\n?^```text\n(?P<output>.*?)^```$)?",
  re.M | re.S,
)


def blocks(text):
  """Returns (line, source, expected output or None) of each block of Python."""
  return [
    (
      text.count("\n", 0, found.start("source")) + 1,
      found["source"],
      found["output"],
    )
    for found in BLOCK.finditer(text)
  ]


def pages():
  """Returns the pages of docs/ that have a block of Python."""
  found = sorted(DOCS.rglob("*.md"))
  return [p for p in found if "_build" not in p.parts and blocks(p.read_text())]


def run(source, line, page, scope):
  """Runs a block in `scope`; returns what it prints."""
  # So that an error names the page and its line.
  tree = ast.increment_lineno(ast.parse(source), line - 1)
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    exec(compile(tree, str(page), "exec"), scope)  # noqa: S102
  return printed.getvalue()


def imported(source):
  """Returns the top-level modules that a block imports or needs."""
  tree = ast.parse(source)
  found = (
    {"flatbuffers"} if re.search(r"serialize\(|repro\.save", source) else set()
  )
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found |= {name.name.partition(".")[0] for name in node.names}
    elif isinstance(node, ast.ImportFrom):
      found.add(node.module.partition(".")[0])
  return found


def not_named(text):
  """Returns the packages that a page needs before it names `pip install`.

  The packages that jaxplugin installs need no name.
  """
  missing = []
  for line, source, _ in blocks(text):
    before = "\n".join(text.split("\n")[: line - 1])
    commands = " ".join(re.findall(r"pip install ([^`\n]*)", before))
    for module in sorted(imported(source)):
      if module in INSTALLED or module in sys.stdlib_module_names:
        continue
      package = DISTRIBUTIONS.get(module, module)
      if not re.search(rf"\b{re.escape(package)}(?![\w-])", commands):
        missing.append(f"{line}: pip install {package}")
  return missing


def differs(expected, printed):
  """Returns "" if a block printed its output, else both."""
  if expected is None:
    return ""
  if doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS):
    return ""
  return f"expected:\n{expected}\nprinted:\n{printed}"


class SnippetsTest(parameterized.TestCase):
  @parameterized.parameters(*blocks(README.read_text()))
  def test_block_of_readme_runs_in_an_empty_namespace(
    self, line, source, output
  ):
    printed = run(source, line, README, {"__name__": "pasted"})
    self.assertEmpty(differs(output, printed))
    self.assertIsNotNone(output, "a block of README.md prints its result")

  @parameterized.named_parameters(
    (page.relative_to(DOCS).as_posix(), page) for page in pages()
  )
  @pytest.mark.sample(3)
  def test_blocks_of_a_page_run_one_after_the_other(self, page):
    scope = {"__name__": page.stem}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
      for line, source, output in blocks(page.read_text()):
        printed = run(source, line, page, scope)
        self.assertEmpty(differs(output, printed), f"{page}:{line}")

  @parameterized.named_parameters(
    (page.name, page) for page in (README, *pages())
  )
  def test_page_names_the_packages_of_its_blocks(self, page):
    self.assertEmpty(not_named(page.read_text()))

  def test_readme_is_short(self):
    self.assertLessEqual(
      len(README.read_text().splitlines()), README_LINES, "move text to docs/"
    )


class ReaderTest(absltest.TestCase):
  def test_blocks_are_found_with_their_lines_and_outputs(self):
    page = (
      "a\n```python\nx = 1\n```\n```\nno\n```\n```python\ny\nz\n```\n\n"
      "```text\n3\n```\n"
    )
    self.assertEqual(blocks(page), [(3, "x = 1\n", None), (9, "y\nz\n", "3\n")])

  def test_a_package_without_a_name_is_found(self):
    block = "```python\nimport os, flax.nnx\nimport jax\n```\n"
    self.assertEqual(not_named(block), ["2: pip install flax"])
    self.assertEmpty(not_named(f"`pip install optax flax`\n{block}"))
    self.assertLen(not_named(f"`pip install flax-other`\n{block}"), 1)
    self.assertLen(not_named("```python\nx.serialize()\n```\n"), 1)

  def test_another_output_is_found(self):
    self.assertEmpty(differs("a ... c\n", "a b c\n"))
    self.assertIn("printed:\nd", differs("a ... c\n", "d\n"))

  def test_error_names_the_line_of_the_page(self):
    try:
      run("a = 1\nb = a / 0\n", 40, README, {})
    except ZeroDivisionError as error:
      frame = traceback.extract_tb(error.__traceback__)[-1]
      self.assertEqual((frame.filename, frame.lineno), (str(README), 41))
    else:
      self.fail("nothing raised")
