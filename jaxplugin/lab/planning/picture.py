# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws a bar for each plan: the bytes that a device receives."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Final

from jaxplugin.lab.planning import plans
from jaxplugin.lab.planning import report

_WIDTH: Final = 920
_MARGIN: Final = 16
_LABEL: Final = 190  # left of a bar
_FIGURES: Final = 190  # right of a bar
_BAR: Final = 20
_STEP: Final = 26
_TITLE: Final = 30
_LEGEND: Final = 20
_FONT: Final = "font-family='Helvetica,Arial,sans-serif' font-size='12'"
_INK, _FAINT, _PAPER = "#1f2933", "#616e7c", "#ffffff"
# Okabe and Ito's colours for colour-blind readers. Further parts use the same
# colours in a lighter tone.
_COLORS: Final = (
  "#0072b2",
  "#e69f00",
  "#009e73",
  "#d55e00",
  "#56b4e9",
  "#cc79a7",
  "#7f8c8d",
)
_OPACITY: Final = (1.0, 0.5)
_LEAST: Final = 1e-3  # of the longest bar; shorter parts are not drawn

Part = tuple[str, str]


def draw(found: Sequence[plans.ModelPlan]) -> str:
  """Returns an SVG with a group of bars for each name and layout.

  A bar is a format. Its parts are mesh axes and element types.
  """
  bars = [_parts(plan) for plan in found]
  longest = max((sum(bar.values()) for bar in bars), default=0) or 1.0
  shown = sorted(
    {p for bar in bars for p, size in bar.items() if size > _LEAST * longest}
  )
  scale = (_WIDTH - 2 * _MARGIN - _LABEL - _FIGURES) / longest
  lines, top = [], _MARGIN
  last: tuple[str, str] | None = None
  first: plans.ModelPlan | None = None
  for plan, bar in zip(found, bars, strict=True):
    if (plan.name, plan.layout) != last:
      last, first = (plan.name, plan.layout), plan
      title = f"{plan.name}, {plan.layout}: {plan.devices} x {plan.target}"
      lines.append(_text(_MARGIN, top + 18, title, weight="bold"))
      top += _TITLE
    assert first is not None
    lines.append(_text(_MARGIN, top + 14, plan.format))
    left = float(_MARGIN + _LABEL)
    for part in shown:
      width = bar.get(part, 0) * scale
      lines.append(_box(left, top, width, shown.index(part)))
      left += width
    lines.append(_text(left + 8, top + 14, _figures(plan, first), ink=_FAINT))
    top += _STEP
  top += _LEGEND // 2
  for i, (axes, dtype) in enumerate(shown):
    lines.append(_box(_MARGIN, top, _BAR, i))
    lines.append(_text(_MARGIN + _STEP, top + 14, f"{dtype} over {axes}"))
    top += _STEP
  height = top + _MARGIN
  return (
    f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}'"
    f" height='{height}' viewBox='0 0 {_WIDTH} {height}'>\n"
    "<title>Bytes that a device receives, and its temporary memory</title>\n"
    f"<rect width='100%' height='100%' fill='{_PAPER}'/>\n"
    + "\n".join(lines)
    + "\n</svg>\n"
  )


def _parts(plan: plans.ModelPlan) -> dict[Part, float]:
  found: dict[Part, float] = {}
  for (axes, _, dtype), size in report.by_key(plan).items():
    found[axes, dtype] = found.get((axes, dtype), 0) + size
  return found


def _figures(plan: plans.ModelPlan, first: plans.ModelPlan) -> str:
  size = f"{plan.received / 1e6:.1f} MB"
  if plan is not first and first.received:
    size += f" ({plan.received / first.received:.2f}x)"
  return f"{size}, {plan.temp_bytes / 1e9:.3g} GB"


def _box(left: float, top: float, width: float, index: int) -> str:
  color = _COLORS[index % len(_COLORS)]
  opacity = _OPACITY[index // len(_COLORS) % len(_OPACITY)]
  return (
    f"<rect x='{left:.1f}' y='{top}' width='{width:.1f}' height='{_BAR}'"
    f" fill='{color}' fill-opacity='{opacity}'/>"
  )


def _text(
  left: float, y: float, words: str, ink: str = _INK, weight: str = "normal"
) -> str:
  return (
    f"<text x='{left:.1f}' y='{y}' {_FONT} font-weight='{weight}'"
    f" fill='{ink}'>{html.escape(words)}</text>"
  )
