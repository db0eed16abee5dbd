# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws the packages: architecture_picture.svg, next to this file.

  python tools/architecture_picture.py

A box has one package or a few. The text of a package is the summary of its
`__init__`. An arrow is an import that no chain of other arrows implies.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import textwrap
from typing import Final

import drawing

ROOT: Final = pathlib.Path(__file__).resolve().parents[1]
PICTURE: Final = pathlib.Path(__file__).with_suffix(".svg")

# A box is a tuple of packages. Boxes of a row do not import each other.
Box = tuple[str, ...]
# Rows from the top, in a grid of three columns: (first column, columns, box).
ROWS: Final[tuple[tuple[tuple[int, int, Box], ...], ...]] = (
  ((0, 3, ("lab",)),),
  ((0, 3, ("cli", "explanation")),),
  ((2, 1, ("repro",)),),
  (
    (0, 1, ("checkpoints",)),
    (1, 1, ("rewriting", "params")),
    (2, 1, ("stablehlo", "exports")),
  ),
  ((1, 2, ("dropin",)),),
  ((1, 2, ("training",)),),
  ((1, 2, ("ragged",)),),
  ((1, 2, ("dot",)),),
  ((0, 3, ("quantization",)),),
  ((0, 3, ("operation", "plugins", "tables")),),
  ((0, 3, ("arrays",)),),
  ((0, 3, ("runtime", "core", "printing", "jaxext")),),
  ((0, 3, ("kernels/gpu", "kernels/cpu")),),
)
BOXES: Final = tuple(box for row in ROWS for _, _, box in row)

WIDTH: Final = 920
MARGIN: Final = 16
GAP: Final = 22
COLUMN: Final = (WIDTH - 2 * MARGIN + GAP) / 3
LINE_HEIGHT: Final = 17
PADDING: Final = 10
SIZE: Final = 12
# Colors of rows: packages for users, operations, shared packages, kernels.
_COLORS: Final = (
  *(drawing.ORANGE,) * 6,
  *(drawing.BLUE,) * 3,
  *(drawing.GREEN,) * 3,
  drawing.VERMILION,
)


def folder(package: str) -> pathlib.Path:
  is_kernels = package.startswith("kernels")
  return ROOT / package if is_kernels else ROOT / "jaxplugin" / package


def sentence(package: str) -> str:
  """Returns the summary of a package."""
  tree = ast.parse((folder(package) / "__init__.py").read_text())
  text = ast.get_docstring(tree) or ""
  return text.partition("\n\n")[0].replace("\n", " ").replace("`", "")


@functools.cache
def imports(package: str) -> list[str]:
  """Returns the packages that a package imports, the topmost first."""
  found = set()
  for path in folder(package).rglob("*.py"):
    folders = path.relative_to(ROOT).parts
    if path.stem.endswith(("_test", "testing")) or "tests" in folders:
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
  return [p for box in BOXES for p in box if p in found - {package}]


@functools.cache
def below(box: Box) -> frozenset[Box]:
  """Returns the boxes that a box imports, directly or through others."""
  imported = {name for package in box for name in imports(package)}
  direct = {other for other in BOXES if other != box and imported & {*other}}
  return frozenset(direct.union(*map(below, direct)))


def arrows(box: Box) -> list[Box]:
  """Returns the boxes below that no box in between imports."""
  implied = frozenset[Box]().union(*map(below, below(box)))
  return [other for other in BOXES if other in below(box) - implied]


def picture() -> str:
  """Returns the whole file."""
  parts: list[str] = []
  places: dict[Box, tuple[float, float, float, float]] = {}
  top = float(MARGIN)
  for row, color in zip(ROWS, _COLORS, strict=True):
    texts = {box: _text(box, columns) for _, columns, box in row}
    height = max(map(len, texts.values())) * LINE_HEIGHT + PADDING
    for first, columns, box in row:
      x, width = MARGIN + first * COLUMN, columns * COLUMN - GAP
      places[box] = (x, x + width, top, top + height)
      outline = drawing.box(
        x, top, width, height, fill=drawing.PALE, stroke=drawing.LINE
      )
      parts += [outline, drawing.box(x, top, 5, height, fill=color)]
      y = top + PADDING + 5
      for name, line in texts[box]:
        parts += [
          drawing.text(x + 14, y, name, size=SIZE, weight="bold"),
          drawing.text(x + 14 + _indent(columns), y, line, size=SIZE),
        ]
        y += LINE_HEIGHT
    top += height + GAP
  for box, (left, right, _, bottom) in places.items():
    for other in arrows(box):
      other_left, other_right, other_top, _ = places[other]
      # Straight down from the middle of the shared columns.
      center = (max(left, other_left) + min(right, other_right)) / 2
      parts.append(drawing.arrow(center, bottom, center, other_top - 2))
  description = "; ".join(
    f"{_name(box)} imports {', '.join(map(_name, arrows(box)))}"
    for box in BOXES
    if arrows(box)
  )
  height = int(top - GAP + MARGIN)
  title = "The packages of jaxplugin"
  return drawing.document(title, description, WIDTH, height, parts)


def _text(box: Box, columns: int) -> list[tuple[str, str]]:
  """Returns (name of a package or "", text) of each line of a box."""
  width = columns * COLUMN - GAP - 20 - _indent(columns)
  characters = int(width / SIZE / drawing.CHARACTER_WIDTH)
  lines = []
  for package in box:
    text = textwrap.wrap(sentence(package), characters)
    names = [package] + [""] * len(text)
    if not _indent(columns):
      text.insert(0, "")  # the name has a separate line
    lines += zip(names, text, strict=False)
  return lines


def _indent(columns: int) -> int:
  """Returns where the text of a package begins, in pixels after its name."""
  return 150 if columns > 1 else 0


def _name(box: Box) -> str:
  return " and ".join(box)


if __name__ == "__main__":
  PICTURE.write_text(picture())
