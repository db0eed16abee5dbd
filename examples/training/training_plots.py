# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Loss curves with the range over seeds."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any, Final

import matplotlib
import matplotlib.figure
import numpy as np
import training_runs
import training_statistics

# Of Okabe and Ito, which people with any colour vision can tell apart.
_COLORS: Final = (
  *("#000000", "#999999", "#0072B2", "#009E73", "#D55E00", "#E69F00"),
  *("#CC79A7", "#56B4E9", "#332288", "#888800", "#8B4513"),
)
_STYLES: Final = ("-", "--", ":")


def _curves(
  runs: Sequence[training_runs.Run], variant: str
) -> dict[int, np.ndarray]:
  return {
    run.seed: np.array(run.training) for run in runs if run.variant == variant
  }


def _draw_losses(axes: Any, runs: Any, steps: np.ndarray) -> None:
  for index, variant in enumerate(training_statistics.variants(runs)):
    curves = np.array(list(_curves(runs, variant).values()))
    color = _COLORS[index % len(_COLORS)]
    style = _STYLES[index % len(_STYLES)]
    axes.plot(steps, curves.mean(axis=0), style, color=color, label=variant)
    axes.fill_between(
      steps, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.12
    )
  axes.set_title("Loss in training: mean, and from least to largest seed")
  axes.set_ylabel("cross entropy (nats)")
  axes.legend(fontsize=8)


def _draw_differences(
  axes: Any, runs: Any, steps: np.ndarray, against: str
) -> None:
  others = _curves(runs, against)
  # The seeds' own spread, to hold the differences against.
  if len(others) > 1:
    spread = np.std(list(others.values()), axis=0, ddof=1)
    label = f"spread of {against} over seeds"
    axes.fill_between(
      steps, -spread, spread, color="#999999", alpha=0.25, lw=0, label=label
    )
    axes.legend(fontsize=8)
  for index, variant in enumerate(training_statistics.variants(runs)):
    if variant == against:
      continue
    curves = _curves(runs, variant)
    paired = np.array(
      [curves[seed] - others[seed] for seed in curves if seed in others]
    )
    color = _COLORS[index % len(_COLORS)]
    style = _STYLES[index % len(_STYLES)]
    mean = paired.mean(axis=0)
    axes.plot(steps, mean, style, color=color)
    if len(paired) > 1:
      error = paired.std(axis=0, ddof=1) / len(paired) ** 0.5
      axes.fill_between(
        steps, mean - error, mean + error, color=color, alpha=0.12
      )
  # The first steps are all of chaos and none of the format.
  shown = steps > steps[-1] / 6
  top = [
    np.abs(curve - others[seed])[shown].max()
    for variant in training_statistics.variants(runs)
    for seed, curve in _curves(runs, variant).items()
    if seed in others
  ]
  limit = 1.05 * max(top) or 1  # with one variant alone there is none
  axes.set_ylim(-limit, limit)
  axes.axhline(0, color="#000000", lw=0.8)
  axes.set_title(f"The same less {against} of the same seed, ± standard error")
  axes.set_ylabel("difference (nats)")


def draw(
  results: training_runs.Results, title: str, against: str, path: pathlib.Path
) -> None:
  """Writes a picture: losses over steps, and paired differences over steps."""
  runs = results.runs
  points = len(runs[0].training)
  steps = (np.arange(points) + 0.5) * results.settings["steps"] / points
  # Without pyplot, which keeps every figure and asks for a screen.
  figure = matplotlib.figure.Figure(figsize=(11, 4.6), layout="constrained")
  left, right = figure.subplots(1, 2)
  _draw_losses(left, runs, steps)
  _draw_differences(right, runs, steps, against)
  for axes in (left, right):
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
  figure.suptitle(title)
  # Nothing of when and by what it was made.
  figure.savefig(path, dpi=80, metadata={"Software": None})
