# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws a roofline of a run's matmuls with matplotlib."""

from __future__ import annotations

import importlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import NamedTuple

import numpy as np

from jaxplugin.lab.bench.report import results

SUFFIXES: Final = (".png", ".svg", ".pdf")

# Each variant of ours has a marker, and each backend has a color. Peers are
# grey. Color-blind readers can distinguish the colors (Okabe and Ito, 2008).
_OURS: Final = {
  "cpu": ("o", "#0072B2"),
  "cpu in scan": ("P", "#0072B2"),
  "triton": ("^", "#D55E00"),
  "triton prepared": ("<", "#D55E00"),
  "triton tma": ("v", "#D55E00"),
  "cudnn": ("D", "#009E73"),
  "cudnn prepared": ("d", "#009E73"),
  "xla": ("s", "#CC79A7"),
  "xla in scan": ("X", "#CC79A7"),
}
_PEERS: Final = ("x", "+", "1", "2", "3", "4", "*", "|")
_GREY: Final = "#767676"
_SIZE_INCHES: Final = (10.5, 6.5)
_DPI: Final = 150
# Columns share a label of at most `_MAX_NAMES` lines if the ratio of their
# intensities is smaller than this.
_NEAR: Final = 1.3
_MAX_NAMES: Final = 3
_LABEL_PART: Final = 0.6  # space for labels / range of points, in decades


def check(path: str | os.PathLike[str]) -> None:
  """Raises ValueError unless a plot can be drawn to `path`."""
  suffix = pathlib.Path(path).suffix.lower()
  if suffix not in SUFFIXES:
    raise ValueError(
      f"bench: --plot must end in {', '.join(SUFFIXES)}, got {path}"
    )
  try:
    importlib.import_module("matplotlib")
  except ImportError as error:
    raise ValueError(
      f"bench: --plot needs matplotlib, which cannot be imported ({error});"
      " pip install 'jaxplugin[bench]'"
    ) from error


def draw(run: results.BenchRun, path: str | os.PathLike[str]) -> None:
  """Draws a column of points for each matmul of a run.

  The x coordinate of a column is the number of operations per byte of quantized
  operands and result. A column's points are the rates of the variants. The
  lines are the limits of memory and arithmetic.

  Raises:
    ValueError: If the run has no timed matmul.
  """
  figure(run).savefig(path, dpi=_DPI)


def figure(run: results.BenchRun) -> Any:
  """Returns the matplotlib figure of `draw`."""
  import matplotlib.figure  # optional, and slow

  columns = [c for row in run.rows if (c := _column(row)) is not None]
  if not columns or run.ceilings is None:
    raise ValueError("bench: --plot needs at least one timed matmul, got none")
  drawn = matplotlib.figure.Figure(figsize=_SIZE_INCHES, layout="constrained")
  axes = drawn.add_subplot()
  _draw_ceilings(axes, run, columns)
  _draw_points(axes, columns)
  axes.set_xscale("log")
  axes.set_yscale("log")
  _label_columns(axes, columns)
  axes.set_xlabel("operations for each byte of quantized operands and result")
  axes.set_ylabel("GFLOP/s (of one product, median)")
  axes.set_title(title(columns), loc="left", fontsize=12, fontweight="bold")
  axes.grid(True, which="major", color="#e4e4e4", linewidth=0.6)
  axes.set_axisbelow(True)
  axes.spines[["top", "right"]].set_visible(False)
  environment = run.environment
  axes.text(
    1,
    -0.1,
    f"{environment['device']}, jax {environment['versions']['jax']},"
    f" {environment['date'][:10]}",
    transform=axes.transAxes,
    ha="right",
    va="top",
    fontsize=8,
    color=_GREY,
  )
  drawn.legend(fontsize=9, frameon=False, loc="outside right upper")
  return drawn


class _Column(NamedTuple):
  """The timed variants of one matmul; see `draw`."""

  row: results.RowResult
  timed: Sequence[results.VariantResult]
  chosen: results.VariantResult

  @property
  def intensity(self) -> float:
    return self.chosen.flops / self.chosen.num_bytes


def _column(row: results.RowResult) -> _Column | None:
  timed = [v for v in row.variants if v.time is not None and v.flops]
  ours = [v for v in timed if v.role == "ours"]
  if not ours:
    return None
  # The chosen variant comes first, if it was measured.
  return _Column(row, timed, ours[0])


def title(columns: Sequence[Any]) -> str:
  """Returns the figure's title, with the most important numbers."""
  fractions = [100 * c.chosen.roof_fraction for c in columns]
  names = sorted({c.chosen.name for c in columns})
  text = (
    f"{' and '.join(names)}: {min(fractions):.0f} to {max(fractions):.0f} % of"
    " what the machine allows (the lines)"
  )
  gains = []
  for c in columns:
    peers = [v.gflop_per_s for v in c.timed if v.role == "peer"]
    if peers:
      gains.append(c.chosen.gflop_per_s / max(peers))
  if gains:
    text += (
      ",\n"
      f"{min(gains):.2g} to {max(gains):.2g} times as fast as the best peer"
      " (grey); higher is faster"
    )
  return text


def _draw_ceilings(
  axes: Any, run: results.BenchRun, columns: Sequence[_Column]
) -> None:
  ceilings = run.ceilings
  assert ceilings is not None
  intensities = [c.intensity for c in columns]
  peak = max(ceilings.bf16, ceilings.f32, ceilings.int8) / 1e9
  bandwidth = ceilings.memory / 1e9
  x = np.geomspace(
    min(intensities) / 6, max(*intensities, peak / bandwidth) * 4
  )
  axes.plot(
    x, np.minimum(bandwidth * x, peak), color="black", linewidth=1.6, zorder=1
  )
  kind = "copying" if ceilings.is_gpu else "reading"
  axes.annotate(
    f"{kind} memory:\n{bandwidth:.0f} GB/s",
    (x[0], bandwidth * x[0]),
    xytext=(0, 34),
    textcoords="offset points",
    fontsize=9,
  )
  for name in ("int8", "bf16", "f32"):
    rate = getattr(ceilings, name) / 1e9
    if not rate:
      continue
    if rate < peak:
      axes.plot(
        [rate / bandwidth, x[-1]],
        [rate, rate],
        color="black",
        linewidth=0.8,
        linestyle="--",
        zorder=1,
      )
    axes.annotate(
      f"{name} product:\n{rate:.0f} Gop/s",
      (x[-1], rate),
      xytext=(4, 0),
      textcoords="offset points",
      va="bottom" if rate == peak else "top",
      fontsize=9,
    )


def _draw_points(axes: Any, columns: Sequence[_Column]) -> None:
  names = list(dict.fromkeys(v.name for c in columns for v in c.timed))
  peers = [name for name in names if name not in _OURS]
  for name in sorted(names, key=lambda n: n not in _OURS):
    points = [
      (c.intensity, v.gflop_per_s)
      for c in columns
      for v in c.timed
      if v.name == name
    ]
    x, y = zip(*points, strict=True)
    if name in _OURS:
      marker, color = _OURS[name]
      style = {"s": 52, "edgecolors": "white", "linewidths": 0.6, "zorder": 3}
    else:
      marker = _PEERS[peers.index(name) % len(_PEERS)]
      color = _GREY
      style = {"s": 38, "linewidths": 1.1, "zorder": 2}
    axes.scatter(x, y, marker=marker, c=color, label=name, **style)


def _label_columns(axes: Any, columns: Sequence[_Column]) -> None:
  """Draws sizes and formats below the points. Close columns share a label."""
  clusters: list[list[_Column]] = []
  for column in sorted(columns, key=lambda c: c.intensity):
    near = clusters and column.intensity < clusters[-1][0].intensity * _NEAR
    if near:
      clusters[-1].append(column)
    else:
      clusters.append([column])
  for cluster in clusters:
    names = list(dict.fromkeys(f"{c.row.row} {c.row.formats}" for c in cluster))
    lines = names[:_MAX_NAMES]
    if len(names) > len(lines):
      lines[-1] += f" and {len(names) - len(lines)} more"
    axes.annotate(
      "\n".join(lines),
      (cluster[len(cluster) // 2].intensity, 0.015),
      xycoords=("data", "axes fraction"),
      rotation=90,
      ha="center",
      va="bottom",
      multialignment="left",
      fontsize=7,
      color="#404040",
    )
  # Reserves space for the labels below the lowest point.
  rates = [v.gflop_per_s for c in columns for v in c.timed]
  low = min(rates) / (max(rates) / min(rates)) ** _LABEL_PART
  axes.set_ylim(bottom=low / 1.5)
