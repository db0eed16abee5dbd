# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A race of candidates: which ones are timed again, and how their times differ.

All candidates of a race run once in each round. The time of a candidate is
compared with the time of another one in the same round, because most noise of a
machine slows down both. An interval contains the ratio of the two times. It is
the Hodges-Lehmann interval of the Wilcoxon signed-rank test, on logarithms. (M.
Hollander et al., Nonparametric Statistical Methods, sections 3.1 to 3.3.)

The intervals are computed after 5, 8, 12, 16, 24, 32, ... rounds. A candidate
then leaves the race if it cannot be `INDIFFERENCE` faster than the best one.
The risk is shared among all candidates and all looks (Bonferroni). So each of
these statements is wrong in at most 5 % of the races:

* The chosen candidate is faster than the default.
* No candidate that left is more than 1 % faster than the one that beat it.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

CONFIDENCE: Final = 0.95
INDIFFERENCE: Final = 0.01  # a smaller gain is not worth more rounds
MIN_ROUNDS: Final = 5  # in each process
# With too few rounds for the test, all ratios and this margin are the interval.
_FEW_ROUNDS_MARGIN: Final = math.log(1.25)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratio:
  """Logarithm of the ratio of two times, with its interval."""

  estimate: float = 0.0
  low: float = 0.0
  high: float = 0.0

  def __add__(self, other: Ratio) -> Ratio:
    return Ratio(
      estimate=self.estimate + other.estimate,
      low=self.low + other.low,
      high=self.high + other.high,
    )


def looks(rounds: int) -> list[int]:
  """Returns the numbers of rounds after which a race drops candidates."""
  found = {MIN_ROUNDS}
  size = 8
  while size <= rounds:
    found |= {size, size + size // 2}
    size *= 2
  return sorted(n for n in found if n <= rounds)


def ratio_of(
  times: Sequence[float], others: Sequence[float], risk: float
) -> Ratio:
  """Returns the ratio of paired times, with its interval.

  Args:
    times: times of one candidate.
    others: times of another one in the same rounds.
    risk: the probability that the ratio lies above the interval, and the
      probability that the ratio lies below.
  """
  logs = np.log(np.asarray(times) / np.asarray(others))
  n = len(logs)
  means = np.add.outer(logs, logs)[np.tri(n, dtype=bool)] / 2
  deviation = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
  quantile = statistics.NormalDist().inv_cdf(1 - risk)
  cut = math.floor(len(means) / 2 - quantile * deviation - 0.5)
  margin = 0.0 if cut >= 0 else _FEW_ROUNDS_MARGIN
  cut = max(cut, 0)
  middle = (len(means) - 1) // 2, len(means) // 2
  places = [cut, *middle, len(means) - 1 - cut]
  low, *median, high = np.partition(means, places)[places]
  return Ratio(
    estimate=float(np.mean(median)), low=low - margin, high=high + margin
  )


class Race:
  """The state of a race. It depends only on the samples.

  Args:
    samples: times of each candidate, of all rounds until it left the race. If
      rounds are added, call `update`.
    default: the candidate with which the others are compared. It never leaves.
    rounds: maximum number of rounds of the race.

  Attributes:
    active: the candidates that are still in the race, the default first.
    leader: the fastest one that is faster than the default, or the default.
  """

  def __init__(
    self, samples: Mapping[str, Sequence[float]], default: str, rounds: int
  ):
    self._samples, self._default = samples, default
    self._looks = looks(rounds)
    # The last look is that of `ratios`.
    tests = max(1, len(samples) - 1) * (len(self._looks) + 1)
    self._risk = (1 - CONFIDENCE) / tests
    self.active = [default, *(key for key in samples if key != default)]
    self.leader = default
    # The candidate that beat another one, and the ratio to its time.
    self._beaten: dict[str, tuple[str, Ratio]] = {}
    self.update()

  def update(self) -> None:
    """Drops candidates at the looks that the samples have reached."""
    while self._looks and self._looks[0] <= len(self._samples[self._default]):
      self._look(self._looks.pop(0))

  @property
  def is_settled(self) -> bool:
    """Whether further rounds cannot change the choice."""
    return {*self.active} == {self._default, self.leader}

  def ratios(self) -> dict[str, Ratio]:
    """Returns the ratio of each candidate's time to the default's.

    The ratio to a candidate that left is a product: the ratio to the one that
    beat it, times the ratio of that one. So rounds that only the faster one ran
    do not change their order.
    """
    found = {key: self._ratio(key, self._default) for key in self.active}
    for key in reversed(self._beaten):  # the one that beat it comes later
      by, ratio = self._beaten[key]
      found[key] = ratio + found[by]
    return found

  def _ratio(self, key: str, other: str, rounds: int | None = None) -> Ratio:
    if key == other:
      return Ratio()
    times, others = self._samples[key][:rounds], self._samples[other][:rounds]
    size = min(len(times), len(others))
    return ratio_of(times[:size], others[:size], self._risk)

  def _look(self, n: int) -> None:
    others = self.active[1:]
    ratios = {key: self._ratio(key, self._default, n) for key in others}
    faster = [key for key in others if ratios[key].high < 0]
    self.leader = min(
      faster, key=lambda key: ratios[key].estimate, default=self._default
    )
    for key in others:
      if key == self.leader:
        continue
      ratio = ratios[key]
      if self.leader != self._default:
        ratio = self._ratio(key, self.leader, n)
      if ratio.low > math.log1p(-INDIFFERENCE):
        self._beaten[key] = self.leader, ratio
        self.active.remove(key)


def run(
  calls: Mapping[str, Callable[[], float]],
  samples: dict[str, list[float]],
  default: str,
  *,
  rounds: int,
  all_rounds: int,
  seconds: float,
  clock: Callable[[], float] = time.perf_counter,
) -> None:
  """Runs rounds of a race until it is settled, and adds the times to `samples`.

  The order of the candidates differs between rounds, but not between runs.

  Args:
    calls: returns a time of each candidate that can run.
    samples: times of earlier rounds. The new times are appended.
    default, all_rounds: as for `Race`.
    rounds: maximum number of rounds to run now.
    seconds: time limit by `clock`, after `MIN_ROUNDS`.
  """
  first, end = len(samples[default]), clock() + seconds
  race = Race(samples, default, all_rounds)
  for n in range(first, first + rounds):
    race.update()
    if n - first >= MIN_ROUNDS and (race.is_settled or clock() > end):
      break
    running = [key for key in race.active if key in calls]
    for key in random.Random(n).sample(running, len(running)):
      samples[key].append(calls[key]())
