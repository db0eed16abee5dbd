# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Statistics of runs with several seeds: paired differences and intervals.

With d_i the difference of two variants at seed i of n, the mean difference has
the standard error s(d) / sqrt(n), and by Student's t with n - 1 degrees of
freedom an interval that holds the true one with 95 % probability. The table's
sentence about a difference follows from these figures by a rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np
import scipy.stats
import training_runs

CONFIDENCE: Final = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """A variant beside another one, at the seeds that both have.

  Attributes:
    variant, against: names.
    seeds: how many.
    mean, spread: of the variant's final losses; the standard deviation over
      seeds (nan for one seed).
    difference: mean over seeds of (variant - against).
    standard_error: of `difference`; nan for one seed.
    margin: half the interval of `CONFIDENCE`.
    against_spread: the standard deviation of the other's final losses.
    accuracy: mean over seeds.
  """

  variant: str
  against: str
  seeds: int
  mean: float
  spread: float
  difference: float
  standard_error: float
  margin: float
  against_spread: float
  accuracy: float

  @property
  def verdict(self) -> str:
    """What may be said of the difference, by the rule in three lines."""
    if self.variant == self.against:
      return ""
    if not abs(self.difference) > self.margin:
      return "not significant"  # also if margin is nan
    side = "higher" if self.difference > 0 else "lower"
    if abs(self.difference) <= self.against_spread:
      return f"{side}, below the seeds' spread"
    return f"{side}, above the seeds' spread"


def _spread(values: np.ndarray) -> float:
  return float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")


def compare(
  runs: Sequence[training_runs.Run], variant: str, against: str
) -> Comparison:
  """Compares final losses.

  Raises:
    ValueError: the two have no seed in common.
  """
  ours, theirs = (
    {run.seed: run for run in runs if run.variant == name}
    for name in (variant, against)
  )
  seeds = sorted(ours.keys() & theirs.keys())
  if not seeds:
    raise ValueError(f"compare: no seed has both {variant} and {against}")
  finals = np.array([ours[seed].final for seed in seeds])
  others = np.array([theirs[seed].final for seed in seeds])
  error = _spread(finals - others) / len(seeds) ** 0.5
  # A NaN for one seed, which has no degree of freedom.
  quantile = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, len(seeds) - 1)
  return Comparison(
    variant=variant,
    against=against,
    seeds=len(seeds),
    mean=float(finals.mean()),
    spread=_spread(finals),
    difference=float((finals - others).mean()),
    standard_error=error,
    margin=float(quantile * error),
    against_spread=_spread(others),
    accuracy=float(np.mean([ours[seed].accuracy for seed in seeds])),
  )


def variants(runs: Sequence[training_runs.Run]) -> list[str]:
  """Names of the variants that have runs, in their order."""
  return list(dict.fromkeys(run.variant for run in runs))


def table(runs: Sequence[training_runs.Run], against: str) -> str:
  """A Markdown table, a row a variant, and a sentence on how to read it."""
  found = [compare(runs, name, against) for name in variants(runs)]
  lines = [
    f"| variant | seeds | final loss | spread | minus {against} | standard"
    " error | accuracy | verdict |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for c in found:
    same = c.variant == against
    difference = "" if same else f"{c.difference:+.4f}"
    error = "" if same else f"{c.standard_error:.4f}"
    lines.append(
      f"| {c.variant} | {c.seeds} | {c.mean:.4f} | {c.spread:.4f} |"
      f" {difference} | {error} | {100 * c.accuracy:.1f} % | {c.verdict} |"
    )
  apart = [c for c in found if c.verdict and "not" not in c.verdict]
  large = [c for c in apart if "above" in c.verdict]
  lines += [
    "",
    f"{len(apart)} of {len(found) - 1} variants differ significantly from"
    f" {against}: the {CONFIDENCE:.0%} interval of the paired difference is on"
    f" one side of 0. {len(large)} of them differ by more than {against} does"
    " from seed to seed.",
  ]
  return "\n".join(lines)
