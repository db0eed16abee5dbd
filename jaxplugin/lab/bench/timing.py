# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Timing in turns, and what is said of the times."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Final

import numpy as np

# A variant that used up its share of the time goes on to this many rounds.
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
  """Quartiles by linear interpolation; at least one sample."""
  quartiles = np.percentile(samples, [0, 25, 50, 75, 100])
  q0, q1, q2, q3, q4 = (significant(float(x)) for x in quartiles)
  return Stats(median=q2, q1=q1, q3=q3, min=q0, max=q4, count=len(samples))


def significant(x: float) -> float:
  """`x` to six digits, of which a clock and a system leave three."""
  return float(f"{x:.6g}")


def in_turns(
  calls: Mapping[str, Callable[[int], float]],
  *,
  rounds: int,
  seconds: float,
  min_rounds: int = MIN_ROUNDS,
  clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float | None]]:
  """Runs every call once a round, and returns its results by round.

  In an order that is another each round, and the same in every run: what one
  leaves behind (caches, clocks, sleeping threads) meets all others. A call
  whose runs took more than its share of `seconds` sits out (None) once it has
  `min_rounds`; the rest go on in turns.

  Args:
    calls: functions of the round's number.
    rounds: how many at most.
    seconds: for all calls together; `min_rounds` are run in any case.
    min_rounds: of each call.
    clock: in seconds.
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
      samples[name].append(calls[name](i))
      spent[name] += clock() - start
  return samples


def ratio(
  slow: Sequence[float | None], fast: Sequence[float | None]
) -> Stats | None:
  """Statistics of slow / fast, round by round; None without a common round."""
  pairs = zip(slow, fast, strict=True)
  ratios = [s / f for s, f in pairs if s is not None and f is not None]
  return stats(ratios) if ratios else None
