# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of SVG pictures: text, boxes, arrows, and the document around them."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Final

FONT: Final = "font-family='Helvetica,Arial,sans-serif'"
INK: Final = "#1f2933"
FAINT: Final = "#616e7c"
LINE: Final = "#cbd2d9"
PAPER: Final = "#ffffff"
PALE: Final = "#f0f4f8"
# The palette of Okabe and Ito, which colour-blind readers can tell apart.
BLUE: Final = "#0072b2"
VERMILION: Final = "#d55e00"
GREEN: Final = "#00765a"
ORANGE: Final = "#e69f00"
SKY: Final = "#56b4e9"
PURPLE: Final = "#cc79a7"
GREY: Final = "#7f8c8d"
# The average character of usual fonts is at most this wide, in font sizes.
CHARACTER_WIDTH: Final = 0.62


def text(
  x: float,
  y: float,
  words: str,
  *,
  size: int = 13,
  color: str = INK,
  weight: str = "normal",
  anchor: str = "start",
) -> str:
  """Returns a line of text whose baseline begins at (x, y)."""
  return (
    f"<text x='{x:g}' y='{y:g}' {FONT} font-size='{size}' fill='{color}'"
    f" font-weight='{weight}' text-anchor='{anchor}'>"
    f"{html.escape(words)}</text>"
  )


def box(
  x: float,
  y: float,
  width: float,
  height: float,
  *,
  fill: str,
  stroke: str = "none",
  radius: float = 0,
) -> str:
  """Returns a rectangle whose upper left corner is (x, y)."""
  return (
    f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}'"
    f" rx='{radius:g}' fill='{fill}' stroke='{stroke}'/>"
  )


def line(
  x: float, y: float, x_end: float, y_end: float, *, color: str = LINE
) -> str:
  """Returns a straight line."""
  return f"<path d='M {x:g} {y:g} L {x_end:g} {y_end:g}' stroke='{color}'/>"


def arrow(x: float, y: float, x_end: float, y_end: float) -> str:
  """Returns a straight arrow, its head at (x_end, y_end)."""
  return (
    f"<path d='M {x:g} {y:g} L {x_end:g} {y_end:g}' stroke='{INK}'"
    " stroke-width='1.5' marker-end='url(#arrow)'/>"
  )


def document(
  title: str, description: str, width: int, height: int, parts: Sequence[str]
) -> str:
  """Returns the text of an SVG file.

  Args:
    title: name of the picture, which a screen reader reads first.
    description: content of the picture, for readers who cannot see it.
    width: width in pixels.
    height: height in pixels.
    parts: elements, in drawing order.
  """
  marker = (
    "<defs><marker id='arrow' markerWidth='8' markerHeight='8' refX='4'"
    f" refY='3' orient='auto'><path d='M0,0 L4,3 L0,6 z' fill='{INK}'/>"
    "</marker></defs>"
  )
  return "\n".join(
    (
      "<svg xmlns='http://www.w3.org/2000/svg' role='img'"
      f" aria-labelledby='title desc' viewBox='0 0 {width} {height}'>",
      f"<title id='title'>{html.escape(title)}</title>",
      f"<desc id='desc'>{html.escape(description)}</desc>",
      marker,
      box(0, 0, width, height, fill=PAPER),
      *parts,
      "</svg>\n",
    )
  )
