# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws the rooms of the house: architecture_picture.svg, beside this file.

  python tools/architecture_picture.py

What a room is for is the first sentence of its `__init__`, what lies in it is
read from its folder, and the order is that of `jaxplugin/layering_test.py`.
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
# Characters that fit on a line beside the name.
CHARACTERS: Final = 118
FONT: Final = "font-family='Helvetica,Arial,sans-serif'"
INK, FAINT, LINE, PAPER = "#1f2933", "#616e7c", "#cbd2d9", "#ffffff"
# Users' names, operations, what serves them all, kernels: Okabe and Ito.
SURFACE, OPERATION, GROUND, KERNELS = "#e69f00", "#0072b2", "#009e73", "#d55e00"

# From the top, what users see, down to the kernels; the colour of each.
ROOMS: Final = {
  "cli": SURFACE,
  "tuner": SURFACE,
  "bench": SURFACE,
  "exports": SURFACE,
  "planning": SURFACE,
  "explanation": SURFACE,
  "stablehlo": SURFACE,
  "params": SURFACE,
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
  "kernels/inspection": KERNELS,
  "kernels/interpreter": KERNELS,
}


def folder(room: str) -> pathlib.Path:
  return (
    ROOT / room if room.startswith("kernels") else ROOT / "jaxplugin" / room
  )


def sentence(room: str) -> str:
  """What the room is for."""
  tree = ast.parse((folder(room) / "__init__.py").read_text())
  text = ast.get_docstring(tree) or ""
  return text.partition("\n\n")[0].replace("\n", " ").replace("`", "")


def modules(room: str) -> list[str]:
  """Names of the modules and folders in a room, each folder's in brackets."""
  root = folder(room)
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
  """The whole file."""
  parts = []
  top = MARGIN
  for room, color in ROOMS.items():
    rows = [
      *textwrap.wrap(sentence(room), CHARACTERS),
      *textwrap.wrap(", ".join(modules(room)), CHARACTERS),
    ]
    first = len(textwrap.wrap(sentence(room), CHARACTERS))
    height = len(rows) * LINE_HEIGHT + 2 * PADDING
    parts.append(
      f"<rect x='{MARGIN}' y='{top}' width='{WIDTH - 2 * MARGIN}'"
      f" height='{height}' fill='{PAPER}' stroke='{LINE}'/>"
      f"<rect x='{MARGIN}' y='{top}' width='5' height='{height}'"
      f" fill='{color}'/>"
    )
    baseline = top + PADDING + 11
    parts.append(_text(MARGIN + 16, baseline, room, INK, "bold"))
    for i, row in enumerate(rows):
      ink = INK if i < first else FAINT
      y = baseline + i * LINE_HEIGHT
      parts.append(_text(MARGIN + NAME_WIDTH, y, row, ink, "normal"))
    top += height + GAP
  height = top - GAP + MARGIN
  return (
    f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}'"
    f" height='{height}' viewBox='0 0 {WIDTH} {height}'>\n"
    f"<title>The rooms of jaxplugin; each imports those below it</title>\n"
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
