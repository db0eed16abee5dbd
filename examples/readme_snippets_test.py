# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The Python in README.md and in the guides runs, each block by itself."""

import ast
import contextlib
import pathlib
import re
import tempfile
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp

README = pathlib.Path(__file__).parent.parent / "README.md"
TRAINING = pathlib.Path(__file__).parent / "training" / "README.md"
GUIDES = sorted((README.parent / "docs").glob("*.md"))

# What a block speaks of and does not make: numbers of a model.
ROWS, K, N, LAYERS = 8, 64, 64, 3


def normal(*shape):
  x = np.random.default_rng(len(shape)).standard_normal(shape)
  return jnp.asarray(x, jnp.float32)


def names():
  """What a block may use beside what it makes itself."""
  return {
    "jax": jax,
    "jnp": jnp,
    "jp": jp,
    "x": normal(ROWS, K),
    "w": normal(N, K),
    "labels": jnp.arange(ROWS) % 10,
    "layers": normal(LAYERS, K, K),
  }


def blocks(text):
  """Line numbers and sources of the blocks of Python in a page."""
  return [
    (text.count("\n", 0, found.start(1)) + 1, found.group(1))
    for found in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
  ]


def run(source, line, page=README, scope=None):
  """Runs a block; returns the names that it has made or been given."""
  # So that an error names the page and its line.
  tree = ast.increment_lineno(ast.parse(source), line - 1)
  scope = names() if scope is None else scope
  exec(compile(tree, str(page), "exec"), scope)  # noqa: S102
  return scope


class SnippetsTest(parameterized.TestCase):
  @parameterized.parameters(*blocks(README.read_text()))
  @pytest.mark.sample(2)
  def test_block_runs(self, line, source):
    run(source, line)

  @parameterized.parameters(*blocks(TRAINING.read_text()))
  @pytest.mark.sample(1)
  def test_block_on_training_runs(self, line, source):
    scope = run(source, line, TRAINING)
    if "train_step" in source:
      # It is a step down, and through the recipe's products.
      again = scope["train_step"](scope["w"], scope["x"], scope["x"], 1)[1]
      self.assertLess(float(again), float(scope["value"]))

  @parameterized.named_parameters((page.stem, page) for page in GUIDES)
  @pytest.mark.sample(2)
  def test_blocks_of_a_guide_run_one_after_the_other(self, page):
    scope = {"__name__": page.stem}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
      for line, source in blocks(page.read_text()):
        run(source, line, page, scope)

  def test_every_guide_is_in_the_list_of_them(self):
    contents = (README.parent / "docs" / "README.md").read_text()
    for page in GUIDES:
      if page.name != "README.md":
        self.assertIn(f"({page.name})", contents)

  def test_first_block_multiplies(self):
    line, source = blocks(README.read_text())[0]
    scope = run(source, line)
    exact = np.asarray(scope["x"], np.float64) @ np.asarray(scope["w"]).T
    y = np.asarray(scope["y"], np.float64)
    # NVFP4 keeps 20 dB of normal data: two of them are off by a seventh.
    self.assertLess(np.linalg.norm(y - exact) / np.linalg.norm(exact), 0.2)


class ReaderTest(absltest.TestCase):
  def test_blocks_are_found_with_their_lines(self):
    page = "a\n```python\nx = 1\n```\n```\nno\n```\n```python\ny\nz\n```\n"
    self.assertEqual(blocks(page), [(3, "x = 1\n"), (9, "y\nz\n")])

  def test_error_names_the_line_of_the_page(self):
    try:
      run("a = 1\nb = a / 0\n", 40)
    except ZeroDivisionError as error:
      frame = traceback.extract_tb(error.__traceback__)[-1]
      self.assertEqual((frame.filename, frame.lineno), (str(README), 41))
    else:
      self.fail("nothing raised")


if __name__ == "__main__":
  absltest.main()
