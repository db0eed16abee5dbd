# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes the numerics notebooks, and compares errors with the baseline.

NAME.py (jupytext's py:percent form) is the text of a notebook, which you edit.
This program writes NAME.ipynb: the text and its outputs.

  cd examples/numerics
  python numerics_notebooks.py                   execute, write .ipynb
  python numerics_notebooks.py numerics_scales   only this one
  python numerics_notebooks.py --check           execute, write nothing
  python numerics_notebooks.py --write-baseline  accept new figures

To convert edits made in Jupyter: jupytext --to py:percent NAME.ipynb
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Final

import jupyter_client
import jupyter_client.kernelspec
import jupytext
import nbclient
import nbclient.exceptions
import nbformat
import numerics_baseline
import PIL.Image

FOLDER: Final = pathlib.Path(__file__).resolve().parent
NOTEBOOKS: Final = (
  "numerics_formats",
  "numerics_scales",
  "numerics_contract",
  "numerics_training",
)
MAX_BYTES: Final = 250_000
# Plots are flat areas of few colours, and antialiased text.
PNG_COLORS: Final = 64
CELL_TIMEOUT_S: Final = 300
METADATA: Final = {
  "kernelspec": {
    "display_name": "Python 3",
    "language": "python",
    "name": "python3",
  },
  "language_info": {"name": "python"},
}


class _ThisPython(jupyter_client.AsyncKernelManager):
  """Starts kernels of the running Python, whether Jupyter knows it or not."""

  @property
  def kernel_spec(self) -> jupyter_client.kernelspec.KernelSpec:
    connection = "{connection_file}"
    return jupyter_client.kernelspec.KernelSpec(
      argv=[sys.executable, "-m", "ipykernel_launcher", "-f", connection],
      display_name="the running Python",
      language="python",
    )


def text_path(name: str) -> pathlib.Path:
  return FOLDER / f"{name}.py"


def notebook_path(name: str) -> pathlib.Path:
  return FOLDER / f"{name}.ipynb"


def from_text(path: pathlib.Path) -> nbformat.NotebookNode:
  """Returns the notebook of a py:percent file, without outputs."""
  notebook = jupytext.read(path, fmt="py:percent")
  notebook.metadata = nbformat.from_dict(METADATA)
  notebook.nbformat, notebook.nbformat_minor = 4, 5
  for index, cell in enumerate(notebook.cells):
    cell.id = f"cell-{index:02}"  # else random, and another in every run
    cell.metadata = nbformat.NotebookNode()
  return notebook


def differences(text: pathlib.Path, notebook: pathlib.Path) -> list[str]:
  """Says, a sentence each, where a notebook's cells differ from its text's."""
  expected = from_text(text).cells
  actual = nbformat.read(notebook, as_version=4).cells
  found = [
    f"{notebook.name} cell {index}: differs from {text.name}"
    for index, (ours, theirs) in enumerate(zip(expected, actual, strict=False))
    if (ours.cell_type, ours.source) != (theirs.cell_type, theirs.source)
  ]
  if len(expected) != len(actual):
    found.append(
      f"{notebook.name} has {len(actual)} cells, {text.name} {len(expected)}"
    )
  return found


def _environment(folder: str, write_baseline: bool) -> dict[str, str]:
  """The kernel's environment: CPU, and nothing of the user's IPython."""
  environment = os.environ | {
    "IPYTHONDIR": folder,
    "JAX_PLATFORMS": "cpu",
    # Else a CUDA plugin without a GPU writes warnings into the outputs.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
  }
  environment.pop(numerics_baseline.WRITE_VARIABLE, None)
  # Left to ipykernel, which makes plots outputs of their cells.
  environment.pop("MPLBACKEND", None)
  if write_baseline:
    environment[numerics_baseline.WRITE_VARIABLE] = "1"
  return environment


def execute(
  notebook: nbformat.NotebookNode, *, write_baseline: bool = False
) -> nbformat.NotebookNode:
  """Runs all cells in a fresh kernel and returns the notebook with outputs.

  Raises:
    nbclient.exceptions.CellExecutionError: a cell raised.
  """
  with tempfile.TemporaryDirectory() as folder:
    # Sockets in the folder: no ports, and nothing that others could read.
    manager = _ThisPython(
      transport="ipc", connection_file=os.path.join(folder, "kernel.json")
    )
    client = nbclient.NotebookClient(
      notebook,
      km=manager,
      timeout=CELL_TIMEOUT_S,
      record_timing=False,
      coalesce_streams=True,
      resources={"metadata": {"path": str(FOLDER)}},
    )
    # cleanup_kc: end the kernel, though the client did not make its manager.
    client.execute(cleanup_kc=True, env=_environment(folder, write_baseline))
  # The kernel's description names the version of Python.
  notebook.metadata = nbformat.from_dict(METADATA)
  for cell in notebook.cells:
    cell.metadata = nbformat.NotebookNode()
    for output in cell.get("outputs", []):
      _compress_plot(output)
  return notebook


def _compress_plot(output: nbformat.NotebookNode) -> None:
  """Makes a PNG small, and drops what names the software that wrote it."""
  if "image/png" not in output.get("data", {}):
    return
  image = PIL.Image.open(io.BytesIO(base64.b64decode(output.data["image/png"])))
  image = image.convert("RGB").quantize(PNG_COLORS, dither=0)
  compressed = io.BytesIO()
  image.save(compressed, "PNG", optimize=True)
  output.data["image/png"] = base64.b64encode(compressed.getvalue()).decode()


def write(notebook: nbformat.NotebookNode, path: pathlib.Path) -> None:
  """Writes a notebook.

  Raises:
    ValueError: it is larger than `MAX_BYTES`.
  """
  text = nbformat.writes(notebook) + "\n"
  if len(text) > MAX_BYTES:
    raise ValueError(
      f"{path.name}: {len(text)} bytes, limit {MAX_BYTES}; show less"
    )
  path.write_text(text, "utf-8")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "names",
    nargs="*",
    metavar="NAME",
    help=f"some of {', '.join(NOTEBOOKS)} (default: all)",
  )
  parser.add_argument(
    "--check",
    action="store_true",
    help="execute and compare with the baseline, but write nothing",
  )
  parser.add_argument(
    "--write-baseline",
    action="store_true",
    help=f"write {numerics_baseline.BASELINE.name} from what is measured",
  )
  options = parser.parse_args(arguments)
  if options.check and options.write_baseline:
    parser.error("--check writes nothing, --write-baseline does")
  for name in options.names:
    if name not in NOTEBOOKS:
      parser.error(f"no such notebook: {name}; one of {', '.join(NOTEBOOKS)}")
  options.names = options.names or list(NOTEBOOKS)
  return options


def main(arguments: Sequence[str] | None = None) -> None:
  options = parse_arguments(arguments)
  for name in options.names:
    start = time.perf_counter()
    try:
      notebook = execute(
        from_text(text_path(name)), write_baseline=options.write_baseline
      )
    except nbclient.exceptions.CellExecutionError as error:
      sys.exit(f"{name}: {error}")
    if options.write_baseline:
      # Once more: the committed outputs are those of a comparison.
      notebook = execute(from_text(text_path(name)))
    if options.check:
      outdated = differences(text_path(name), notebook_path(name))
      if outdated:
        sys.exit("\n".join([*outdated, f"run: {sys.argv[0]} {name}"]))
    else:
      write(notebook, notebook_path(name))
    print(f"{name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
  main()
