# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Times functions in turns, and computes statistics of the times."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

# Number of rounds that each variant runs, even if its share of time is used up.
MIN_ROUNDS: Final = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
  """Quartiles and extremes of `count` samples: milliseconds, or ratios."""

  median: float
  q1: float
  q3: float
  min: float
  max: float
  count: int


def stats(samples: Sequence[float]) -> Stats:
  """Returns the statistics of at least one sample, by linear interpolation."""
  quartiles = np.percentile(samples, [0, 25, 50, 75, 100])
  q0, q1, q2, q3, q4 = (significant(float(x)) for x in quartiles)
  return Stats(median=q2, q1=q1, q3=q3, min=q0, max=q4, count=len(samples))


def significant(x: float) -> float:
  """Rounds `x` to six digits. About three digits are above the noise."""
  return float(f"{x:.6g}")


def in_turns(
  calls: Mapping[str, Callable[[], float | None]],
  *,
  rounds: int,
  seconds: float,
  min_rounds: int = MIN_ROUNDS,
  clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float | None]]:
  """Runs every call once per round, and returns its results by round.

  The order of calls differs between rounds, but not between runs. Side effects
  of a call (on caches, clocks and sleeping threads) therefore affect all other
  calls. After `min_rounds`, a call that has used its share of `seconds` does
  not run again; the results of its later rounds are None.

  Args:
    calls: functions that return milliseconds, or None if they failed.
    rounds, min_rounds: limits on the rounds of each call.
    seconds: time limit of all calls together by `clock`.
  """
  names = list(calls)
  share = seconds / max(1, len(names))
  spent = dict.fromkeys(names, 0.0)
  samples: dict[str, list[float | None]] = {name: [] for name in names}
  for i in range(rounds):
    active = [n for n in names if i < min_rounds or spent[n] < share]
    if not active:
      break
    for name in random.Random(i).sample(names, len(names)):
      if name not in active:
        samples[name].append(None)
        continue
      start = clock()
      samples[name].append(calls[name]())
      spent[name] += clock() - start
  return samples


def ratio(
  slow: Sequence[float | None], fast: Sequence[float | None]
) -> Stats | None:
  """Returns statistics of slow / fast per round; None if no round has both."""
  pairs = zip(slow, fast, strict=True)
  ratios = [s / f for s, f in pairs if s is not None and f is not None]
  return stats(ratios) if ratios else None
