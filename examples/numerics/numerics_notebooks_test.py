# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The notebooks are in step with their text, executed, small, and true."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import pathlib
import sys
from unittest import mock

import jupyter_client.kernelspec
import nbclient.exceptions
import nbformat
import numerics_baseline
import numerics_measure
import numerics_notebooks as notebooks
import pytest
from absl.testing import parameterized

from jaxplugin.testing import folders

NAMES = notebooks.NOTEBOOKS
SECTIONS = {name: name.removeprefix("numerics_") for name in NAMES}
NEEDS_MODEL = ("numerics_formats", "numerics_scales", "numerics_training")

# Runs after all cells of a notebook. It compares once more, with a baseline
# that says that one error was smaller.
PLANTED_CELL = """
import json, pathlib
sections = json.loads(tracker._path.read_text())
section = sections[tracker._section]
name = sorted(section)[0]
kind, _ = tracker._allowed[name]
section[name] = section[name] + 0.2 if kind == "sqnr" else section[name] / 3
tracker._path = pathlib.Path({path!r})
tracker._path.write_text(json.dumps(sections))
try:
  tracker.finish()
except numerics_baseline.GrownError as error:
  print(error)
"""


def text_of(cell: nbformat.NotebookNode) -> str:
  return "".join(output.get("text", "") for output in cell.outputs)


class Base(parameterized.TestCase):
  def folder(self) -> pathlib.Path:
    return folders.new(self)

  def notebook_of(self, text: str) -> nbformat.NotebookNode:
    path = self.folder() / "small.py"
    path.write_text(text)
    return notebooks.from_text(path)


class CommittedTest(Base):
  @parameterized.parameters(*NAMES)
  def test_notebook_and_text_are_in_step(self, name):
    found = notebooks.differences(
      notebooks.text_path(name), notebooks.notebook_path(name)
    )
    self.assertEqual(
      found, [], f"run: python examples/numerics/numerics_notebooks.py {name}"
    )

  @parameterized.parameters(*NAMES)
  def test_notebook_is_executed_from_top_to_bottom_without_a_warning(
    self, name
  ):
    notebook = nbformat.read(notebooks.notebook_path(name), as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    self.assertEqual(
      [cell.execution_count for cell in code], list(range(1, len(code) + 1))
    )
    outputs = [output for cell in code for output in cell.outputs]
    self.assertNotEmpty(
      [o for o in outputs if "image/png" in o.get("data", {})]
    )
    for output in outputs:
      self.assertNotEqual(output.output_type, "error")
      self.assertNotEqual(output.get("name"), "stderr", output.get("text"))
    self.assertIn("none worse than the baseline", text_of(code[-1]))

  @parameterized.parameters(*NAMES)
  def test_notebook_is_small_and_says_nothing_of_when_and_where(self, name):
    path = notebooks.notebook_path(name)
    self.assertLess(path.stat().st_size, notebooks.MAX_BYTES)
    notebook = nbformat.read(path, as_version=4)
    self.assertEqual(notebook.metadata, notebooks.METADATA)
    for index, cell in enumerate(notebook.cells):
      self.assertEqual(cell.id, f"cell-{index:02}")
      self.assertEqual(cell.metadata, {})
    self.assertNotIn(str(pathlib.Path.home()), path.read_text("utf-8"))


@pytest.mark.full
class ExecutedTest(Base):
  @parameterized.parameters(*NAMES)
  def test_notebook_runs_and_a_smaller_baseline_makes_it_fail(self, name):
    if name in NEEDS_MODEL and not importlib.util.find_spec(
      numerics_measure.minilm.MODEL_PACKAGE
    ):
      self.skipTest(f"{numerics_measure.minilm.MODEL_PACKAGE} is not installed")
    notebook = notebooks.from_text(notebooks.text_path(name))
    planted = str(self.folder() / "planted.json")
    cell = nbformat.v4.new_code_cell(PLANTED_CELL.format(path=planted))
    notebook.cells.append(cell)

    result = notebooks.execute(notebook)

    self.assertIn("none worse than the baseline", text_of(result.cells[-2]))
    section = json.loads(numerics_baseline.BASELINE.read_text("utf-8"))
    first = sorted(section[SECTIONS[name]])[0]
    message = text_of(result.cells[-1])
    self.assertIn(f"1 of {len(section[SECTIONS[name]])} figures", message)
    self.assertIn(f"  {first}: ", message)


class RunnerTest(Base):
  def test_kernel_is_the_running_python_though_jupyter_knows_none(self):
    notebook = self.notebook_of("import sys\nprint(sys.executable)\n")
    with mock.patch.object(
      jupyter_client.kernelspec.KernelSpecManager,
      "get_kernel_spec",
      side_effect=jupyter_client.kernelspec.NoSuchKernel("python3"),
    ):
      result = notebooks.execute(notebook)
    self.assertEqual(text_of(result.cells[0]).strip(), sys.executable)

  @pytest.mark.full
  def test_baseline_that_grew_ends_the_command_with_the_names(self):
    folder = self.folder()
    baseline = folder / "baseline.json"
    baseline.write_text('{"small": {"loss": 1.0}}')
    (folder / "small.py").write_text(
      "import pathlib\n"
      "import numerics_baseline\n"
      f"path = pathlib.Path({str(baseline)!r})\n"
      "tracker = numerics_baseline.Tracker('small', path=path)\n"
      "tracker.error('loss', 3.0)\n"
      "print(tracker.finish())\n"
    )
    with (
      mock.patch.object(notebooks, "NOTEBOOKS", ("small",)),
      mock.patch.object(notebooks, "text_path", lambda n: folder / f"{n}.py"),
      mock.patch.object(
        notebooks, "notebook_path", lambda n: folder / f"{n}.ipynb"
      ),
      contextlib.redirect_stdout(io.StringIO()),
    ):
      with self.assertRaisesRegex(SystemExit, "loss: error 3, was 1"):
        notebooks.main([])
      self.assertFalse((folder / "small.ipynb").exists())
      notebooks.main(["--write-baseline"])
      self.assertEqual(json.loads(baseline.read_text()), {"small": {"loss": 3}})
      text = (folder / "small.ipynb").read_text()
      self.assertIn("none worse than the baseline", text)
      notebooks.main(["--check"])
      source = folder / "small.py"
      source.write_text(source.read_text() + "print('more')\n")
      with self.assertRaisesRegex(SystemExit, "small.ipynb cell 0: differs"):
        notebooks.main(["--check"])
      self.assertEqual((folder / "small.ipynb").read_text(), text)

  def test_raising_cell_raises(self):
    notebook = self.notebook_of("assert 1 == 2, 'planted'\n")
    with self.assertRaisesRegex(
      nbclient.exceptions.CellExecutionError, "planted"
    ):
      notebooks.execute(notebook)

  def test_each_kind_of_difference_is_found(self):
    folder = self.folder()
    text, path = folder / "small.py", folder / "small.ipynb"
    text.write_text("# %%\nx = 1\n\n# %% [markdown]\n# Hello\n")
    notebooks.write(notebooks.from_text(text), path)
    self.assertEqual(notebooks.differences(text, path), [])
    for other, expected in (
      ("# %%\nx = 2\n\n# %% [markdown]\n# Hello\n", "cell 0: differs"),
      ("# %%\nx = 1\n\n# %% [markdown]\n# Hallo\n", "cell 1: differs"),
      ("# %%\nx = 1\n\n# %%\n# Hello\n", "cell 1: differs"),
      ("# %%\nx = 1\n", "has 2 cells, small.py 1"),
    ):
      text.write_text(other)
      (found,) = notebooks.differences(text, path)
      self.assertIn(expected, found)

  def test_notebook_that_is_too_large_is_not_written(self):
    notebook = self.notebook_of("x = 1\n")
    notebook.cells[0].source = "#" * notebooks.MAX_BYTES
    path = self.folder() / "large.ipynb"
    with self.assertRaisesRegex(ValueError, "large.ipynb: .* limit 250000"):
      notebooks.write(notebook, path)
    self.assertFalse(path.exists())

  def test_unknown_name_is_an_error_that_lists_the_known(self):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), self.assertRaises(SystemExit):
      notebooks.main(["numerics"])
    self.assertIn(", ".join(NAMES), errors.getvalue())
