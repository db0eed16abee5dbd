# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How the numerics notebooks show things: tables of text, and plots.

Colours are those of Okabe and Ito, which people with any colour vision can tell
apart; lines are labelled at their ends, and differ in their markers too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import matplotlib.axes
import matplotlib.figure
import matplotlib.pyplot as plt

COLORS: Final = {
  "bf16": "#999999",
  "e4m3, tensor": "#56B4E9",
  "e5m2, tensor": "#F0E442",
  "mxfp8": "#0072B2",
  "mxfp8_e5m2": "#E69F00",
  "mxfp6_e2m3": "#332288",
  "mxfp6_e3m2": "#88CCEE",
  "mxfp4": "#D55E00",
  "nvfp4": "#009E73",
}
MARKERS: Final = {
  "mxfp8": "o",
  "mxfp8_e5m2": "s",
  "mxfp6_e2m3": "P",
  "mxfp6_e3m2": "X",
  "mxfp4": "^",
  "nvfp4": "D",
}
NEUTRAL: Final = "#444444"
ACCENT: Final = "#CC79A7"
_SETTINGS: Final = {
  "figure.dpi": 100,
  "figure.constrained_layout.use": True,
  "axes.grid": True,
  "axes.spines.right": False,
  "axes.spines.top": False,
  "axes.titlelocation": "left",
  "axes.titlesize": 11,
  "font.size": 9.5,
  "grid.alpha": 0.3,
  "lines.linewidth": 1.8,
  "lines.markersize": 5,
}


def figure(
  title: str, xlabel: str, ylabel: str, size: tuple[float, float] = (7.2, 3.9)
) -> tuple[matplotlib.figure.Figure, matplotlib.axes.Axes]:
  """Returns a new figure with one pair of axes in the notebooks' style."""
  plt.rcParams.update(_SETTINGS)
  result, axes = plt.subplots(figsize=size)
  axes.set_title(title)
  axes.set_xlabel(xlabel)
  axes.set_ylabel(ylabel)
  return result, axes


def line(
  axes: matplotlib.axes.Axes,
  x: Sequence[float],
  y: Sequence[float],
  label: str,
  color: str,
  *,
  shift: float = 0,
  **settings: Any,
) -> None:
  """Draws a line with its label at the right end, `shift` points higher."""
  axes.plot(x, y, color=color, **settings)
  axes.annotate(
    label,
    (x[-1], y[-1]),
    xytext=(6, shift),
    textcoords="offset points",
    color=color,
    va="center",
    annotation_clip=False,
  )


def table(rows: Sequence[Sequence[object]], decimals: int = 1) -> str:
  """Aligns rows of cells: the first column left, the others right.

  Floats get `decimals` digits after the point; the first row is the heading.
  """

  def text(cell: object) -> str:
    return f"{cell:.{decimals}f}" if isinstance(cell, float) else str(cell)

  cells = [[text(cell) for cell in row] for row in rows]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  lines = [
    "  ".join(
      cell.rjust(width) if index else cell.ljust(width)
      for index, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in cells
  ]
  lines.insert(1, "-" * max(map(len, lines)))
  return "\n".join(lines)
