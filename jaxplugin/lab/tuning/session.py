# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run of the tuner, which writes a row of a table for each problem.

The session writes each row when the row is done. If the process is killed, at
most one row is lost. The choice depends only on the samples of a problem.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from jaxplugin.lab.bench import timing
from jaxplugin.lab.tuning import listing, machine, pool, race, store, workload
from jaxplugin.lab.tuning.operations import operation, registry
from jaxplugin.printing import console
from jaxplugin.tables import records

Status = Literal["done", "kept", "failed"]

_US_PER_MS: Final = 1e3
# Kinds of faults that a later run tries again.
_TRIED_AGAIN: Final = ("spills",)
# Number of problems whose candidates are compiled ahead. Their compilation
# hides behind the measurement even if it takes several times as long.
_PREPARED_PROBLEMS: Final = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """The result of one problem, with the faults and notes of its `Trials`."""

  item: workload.Item
  status: Status  # "kept" from an earlier run
  row: records.Row | None = None  # of the table; None if the problem failed
  faults: Mapping[str, pool.JobOutcome] = dataclasses.field(
    default_factory=dict
  )
  notes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  reason: str = ""  # why the problem failed


Lister = Callable[[operation.Problem], listing.Listing]


class Session:
  """Tunes problems one by one.

  If `is_retrying`, candidates that failed before are tried again.
  """

  def __init__(
    self,
    device: machine.LocalMachine,
    rows: store.Store,
    list_candidates: Lister,
    *,
    is_retrying: bool = False,
  ):
    self._device = device
    self._rows = rows
    self._list = list_candidates
    self._is_retrying = is_retrying
    self._prepared: dict[operation.Problem, listing.Listing] = {}

  def prepare(self, item: workload.Item) -> None:
    """Starts compiling a problem's candidates, unless its row is known."""
    problem = item.problem
    if problem in self._prepared or registry.of(problem).refusal(problem):
      return
    if self._rows.row(problem) is None:
      self._prepared[problem] = self._listed(problem)
      self._device.prepare(problem, self._prepared[problem].candidates)

  def tune(
    self, item: workload.Item, progress: machine.Progress = lambda text: None
  ) -> Result:
    """Tunes one problem, and writes its row.

    Raises:
      FailuresError, TableError: If a file cannot be read or written.
    """
    row = self._rows.row(item.problem)
    if row is not None:
      return Result(item=item, status="kept", row=row)
    result = self._measure(item, progress)
    if result.row is not None:
      self._rows.add(result.row)
    return result

  def _measure(self, item: workload.Item, progress: machine.Progress) -> Result:
    problem = item.problem
    why = registry.of(problem).refusal(problem)
    if why:
      return Result(item=item, status="failed", reason=f"not tuned: {why}")
    self.prepare(item)
    listed = self._prepared[problem]
    checked = self._device.check(problem, listed.candidates, progress)
    faults = dict(checked.faults)
    # They are known to the next run even if this one is killed.
    self._add_failures(problem, listed, faults)
    default = listed.default
    found = Result(item=item, status="failed", notes=checked.notes)
    if default.key not in faults:
      left = [c for c in listed.candidates if c.key not in faults]
      try:
        timed = self._device.time(problem, left, progress)
      except machine.TrialError as error:
        return dataclasses.replace(found, faults=faults, reason=str(error))
      faults |= timed.faults
      self._add_failures(problem, listed, timed.faults)
    if default.key in faults:
      reason = f"the default {default.key} failed: {faults[default.key]}"
      return dataclasses.replace(found, faults=faults, reason=reason)
    fields, rounds = self._rows.fields(problem), self._device.all_rounds
    row = row_of(fields, listed, timed.samples, rounds)
    return dataclasses.replace(found, status="done", row=row, faults=faults)

  def _listed(self, problem: operation.Problem) -> listing.Listing:
    listed = self._list(problem)
    if self._is_retrying:
      return listed
    kernels = {self._rows.kernels(c.implementation) for c in listed.candidates}
    reasons = {
      failure.candidate: f"{failure.kind} before: {failure.reason}"
      for failure in store.read_failures(self._rows.failures)
      if failure.kernels in kernels and failure.problem == str(problem)
    }
    return listed.without(reasons)

  def _add_failures(
    self,
    problem: operation.Problem,
    listed: listing.Listing,
    faults: Mapping[str, pool.JobOutcome],
  ) -> None:
    store.add_failures(
      self._rows.failures,
      [
        store.Failure(
          kernels=self._rows.kernels(candidate.implementation),
          problem=str(problem),
          candidate=candidate.key,
          kind=faults[candidate.key].kind,
          reason=faults[candidate.key].reason,
        )
        for candidate in listed.candidates
        # The default is always tried: other candidates are compared with it.
        if candidate != listed.default
        if candidate.key in faults
        if faults[candidate.key].kind not in _TRIED_AGAIN
      ],
    )


def tune_all(
  items: Sequence[workload.Item],
  session_of: Callable[[workload.Item], Session],
  progress: machine.Progress = lambda text: None,
  is_over: Callable[[], bool] = lambda: False,
) -> Iterator[Result]:
  """Tunes problems in order. Yields each result when its row is written.

  While a problem is measured, candidates of the next ones are compiled. If
  `is_over()`, no further problem is started.
  """
  for i, item in enumerate(items):
    if is_over():
      return
    progress(str(item.problem))
    for near in items[i : i + 1 + _PREPARED_PROBLEMS]:
      session_of(near).prepare(near)
    yield session_of(item).tune(item, progress)


def row_of(
  fields: records.Fields,
  listed: listing.Listing,
  samples: Mapping[str, Sequence[float]],
  rounds: int,
) -> records.Row:
  """Returns the row of a problem.

  `samples` has milliseconds of each candidate that ran, including the default,
  in a race of at most `rounds`.
  """
  default_us = _US_PER_MS * timing.stats(samples[listed.default.key]).median
  ratios = race.Race(samples, listed.default.key, rounds).ratios()

  def measured(candidate: listing.TrialCandidate) -> records.Candidate:
    ratio = ratios[candidate.key]
    median, low, high = (
      timing.significant(default_us * math.exp(x))
      for x in (ratio.estimate, ratio.low, ratio.high)
    )
    return records.Candidate(
      implementation=candidate.implementation,
      config=candidate.config,
      median_us=median,
      interval_us=(low, high),
    )

  found = [measured(c) for c in listed.candidates if c.key in ratios]
  default, *others = found  # the default is the first candidate
  others.sort(key=records.pace)
  # A row has the default and the fastest other candidates.
  kept = others[: records.MAX_CANDIDATES - 1]
  return records.row_of(fields, [default, *kept], default)


LEGEND: Final = (
  "us: median. ratio: to the time of the default, with its"
  f" {race.CONFIDENCE:.0%} interval. tie: the interval contains 1. The chosen"
  " candidate has a *."
)


def parts(result: Result) -> Iterator[console.Part]:
  """Yields the report of a problem: measurements, choice, and faults."""
  source = f" ({result.item.source})" if result.item.source else ""
  yield f"{result.item.problem}{source}"
  if result.status == "failed":
    yield f"  failed: {result.reason}"
  if result.row is not None:
    if result.status == "kept":
      yield "  is in the table; --again measures it again"
    yield from _row_parts(result.row)
  for key, fault in result.faults.items():
    yield f"  not chosen: {key}: {fault}"
  for note in dict.fromkeys(itertools.chain(*result.notes.values())):
    yield f"  not checked: {note}"


def _row_parts(row: records.Row) -> Iterator[console.Part]:
  default = row.candidates[row.default]
  cells = []
  for candidate in row.candidates:
    middle, low, high = (
      us / default.median_us
      for us in (candidate.median_us, *candidate.interval_us)
    )
    is_default = candidate is default
    is_tie = low <= 1 <= high and not is_default
    cells.append(
      {
        "": "*" if candidate is row.chosen else "tie" if is_tie else "",
        "us": f"{candidate.median_us:.5g}",
        "ratio": f"{middle:.3f}",
        "interval": f"[{low:.3f}, {high:.3f}]",
        "backend": candidate.implementation + is_default * " (default)",
      }
    )
  yield from listing.table(
    [
      listing.TrialCandidate(implementation=x.implementation, config=x.config)
      for x in row.candidates
    ],
    cells,
    figures=("us", "ratio", "interval"),
  )


def to_json(result: Result) -> dict[str, Any]:
  """Returns a problem's result as a JSON object."""
  return {
    "problem": str(result.item.problem),
    "source": result.item.source,
    "status": result.status,
    "row": result.row and result.row.to_json(),
    "faults": {key: str(fault) for key, fault in result.faults.items()},
    "reason": result.reason,
  }


def summary(results: Sequence[Result]) -> Iterator[str]:
  """Yields lines about all rows."""
  rows = [r.row for r in results if r.row is not None]
  other = [row for row in rows if row.chosen is not row.candidates[row.default]]
  if not rows:
    return
  yield (
    f"{len(rows)} rows; {len(other)} of them choose another candidate than"
    " the default"
  )
  for row in other:
    default = row.candidates[row.default].median_us
    size = " ".join(f"{n}={v}" for n, v in row.problem)
    yield f"  {default / row.chosen.median_us:.3f} times as fast: {size}"
