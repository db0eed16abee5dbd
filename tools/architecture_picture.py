# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws the packages: architecture_picture.svg, next to this file.

  python tools/architecture_picture.py

A package's text is the first sentence of its `__init__`, its modules and its
imports are read from its folder, and the order is that of
`jaxplugin/layering_test.py`.
"""

from __future__ import annotations

import ast
import html
import pathlib
import textwrap
from typing import Final

ROOT: Final = pathlib.Path(__file__).resolve().parents[1]
PICTURE: Final = pathlib.Path(__file__).with_suffix(".svg")

WIDTH: Final = 920
MARGIN: Final = 16
NAME_WIDTH: Final = 150
LINE_HEIGHT: Final = 15
PADDING: Final = 9
GAP: Final = 6
# Characters that fit on a line next to the name.
CHARACTERS: Final = 118
FONT: Final = "font-family='Helvetica,Arial,sans-serif'"
INK, FAINT, LINE, PAPER = "#1f2933", "#616e7c", "#cbd2d9", "#ffffff"
# Packages for users, operations, shared ones, kernels: Okabe and Ito.
SURFACE, OPERATION, GROUND, KERNELS = "#e69f00", "#0072b2", "#009e73", "#d55e00"

# From the top, what users see, down to the kernels; the colour of each.
PACKAGES: Final = {
  "lab": SURFACE,
  "cli": SURFACE,
  "exports": SURFACE,
  "explanation": SURFACE,
  "stablehlo": SURFACE,
  "params": SURFACE,
  "rewriting": SURFACE,
  "dropin": SURFACE,
  "training": SURFACE,
  "ragged": OPERATION,
  "dot": OPERATION,
  "checkpoints": OPERATION,
  "quantization": OPERATION,
  "operation": OPERATION,
  "tables": GROUND,
  "runtime": GROUND,
  "arrays": GROUND,
  "core": GROUND,
  "printing": GROUND,
  "jaxext": GROUND,
  "kernels/gpu": KERNELS,
  "kernels/cpu": KERNELS,
  "kernels/interpreter": KERNELS,
}


def folder(package: str) -> pathlib.Path:
  is_kernels = package.startswith("kernels")
  return ROOT / package if is_kernels else ROOT / "jaxplugin" / package


def sentence(package: str) -> str:
  """Returns the summary of a package."""
  tree = ast.parse((folder(package) / "__init__.py").read_text())
  text = ast.get_docstring(tree) or ""
  return text.partition("\n\n")[0].replace("\n", " ").replace("`", "")


def imports(package: str) -> list[str]:
  """Returns the packages that a package imports, the topmost first."""
  found = set()
  for path in folder(package).rglob("*.py"):
    if path.stem.endswith(("_test", "testing")) or "tests" in path.parts:
      continue
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
      elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      else:
        continue
      for name in names:
        first, *rest = name.removeprefix("jaxplugin.").split(".")
        is_kernels = first == "kernels" and rest
        found.add(f"{first}/{rest[0]}" if is_kernels else first)
  return [name for name in PACKAGES if name in found - {package}]


def modules(package: str) -> list[str]:
  """Returns the modules and folders of a package, with folders' modules."""
  root = folder(package)
  names = sorted(
    path.stem
    for path in root.glob("*.py")
    if not path.name.startswith("__")
    and not path.stem.endswith(("_test", "testing"))
  )
  for path in sorted(root.glob("*/__init__.py")):
    inner = sorted(
      other.stem
      for other in path.parent.glob("*.py")
      if not other.name.startswith("__") and not other.stem.endswith("_test")
    )
    if inner:
      names.append(f"{path.parent.name} ({', '.join(inner)})")
  return names


def picture() -> str:
  """Returns the whole file."""
  parts = []
  top = MARGIN
  for package, color in PACKAGES.items():
    rows = textwrap.wrap(sentence(package), CHARACTERS)
    first = len(rows)
    rows += textwrap.wrap(", ".join(modules(package)), CHARACTERS)
    if imported := imports(package):
      rows += textwrap.wrap(f"\u2192 {', '.join(imported)}", CHARACTERS)
    height = len(rows) * LINE_HEIGHT + 2 * PADDING
    parts.append(
      f"<rect x='{MARGIN}' y='{top}' width='{WIDTH - 2 * MARGIN}'"
      f" height='{height}' fill='{PAPER}' stroke='{LINE}'/>"
      f"<rect x='{MARGIN}' y='{top}' width='5' height='{height}'"
      f" fill='{color}'/>"
    )
    baseline = top + PADDING + 11
    parts.append(_text(MARGIN + 16, baseline, package, INK, "bold"))
    for i, row in enumerate(rows):
      ink = INK if i < first else FAINT
      y = baseline + i * LINE_HEIGHT
      parts.append(_text(MARGIN + NAME_WIDTH, y, row, ink, "normal"))
    top += height + GAP
  height = top - GAP + MARGIN
  return (
    f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}'"
    f" height='{height}' viewBox='0 0 {WIDTH} {height}'>\n"
    "<title>The packages of jaxplugin, and after an arrow those that each"
    " imports</title>\n"
    f"<rect width='100%' height='100%' fill='{PAPER}'/>\n"
    + "\n".join(parts)
    + "\n</svg>\n"
  )


def _text(x: int, y: int, text: str, ink: str, weight: str) -> str:
  return (
    f"<text x='{x}' y='{y}' {FONT} font-size='12' font-weight='{weight}'"
    f" fill='{ink}'>{html.escape(text)}</text>"
  )


if __name__ == "__main__":
  PICTURE.write_text(picture())
