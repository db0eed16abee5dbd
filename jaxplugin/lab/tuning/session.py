# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run of the tuner, which writes a row of a table for each problem.

The session writes each row when the row is done. An interruption therefore
loses at most one row. The choice depends only on the samples of a problem.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import Literal

from jaxplugin.lab.bench import timing
from jaxplugin.lab.tuning import failures
from jaxplugin.lab.tuning import store
from jaxplugin.lab.tuning import workload
from jaxplugin.lab.tuning.candidates import listing
from jaxplugin.lab.tuning.operations import operation
from jaxplugin.lab.tuning.operations import registry
from jaxplugin.lab.tuning.trials import machine
from jaxplugin.printing import console
from jaxplugin.tables import lookup
from jaxplugin.tables import records

Status = Literal["done", "kept", "failed"]

_US_PER_MS: Final = 1e3
# Kinds of faults that a later run tries again.
_TRIED_AGAIN: Final = ("spills",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """The result of one problem.

  Attributes:
    item: the problem.
    status: "done", "kept" from an earlier run, or "failed".
    row: the row of the table; None if the problem failed.
    faults: the faults of candidates that failed, by key.
    notes: the checks that were skipped, by key.
    reason: why the problem failed.
  """

  item: workload.Item
  status: Status
  row: records.Row | None = None
  faults: Mapping[str, machine.TrialFault] = dataclasses.field(
    default_factory=dict
  )
  notes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  reason: str = ""


Lister = Callable[[operation.Problem], listing.Listing]


class Session:
  """Tunes problems one by one."""

  def __init__(
    self,
    device: machine.LocalMachine,
    rows: store.Store,
    list_candidates: Lister,
    *,
    is_retrying: bool = False,
  ):
    """Initializes a session.

    Args:
      device: the device that tries candidates.
      rows: the store of rows and failures.
      list_candidates: returns the candidates of a problem.
      is_retrying: whether candidates that failed before are tried again.
    """
    self._device = device
    self._rows = rows
    self._list = list_candidates
    self._is_retrying = is_retrying

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
    listed = self._listed(problem)
    checked = self._device.check(problem, listed.candidates, progress)
    faults = dict(checked.faults)
    default = listed.default
    found = Result(item=item, status="failed", notes=checked.notes)
    if default.key not in faults:
      left = [c for c in listed.candidates if c.key not in faults]
      try:
        timed = self._device.time(problem, left, progress)
      except machine.TrialError as error:
        return dataclasses.replace(found, faults=faults, reason=str(error))
      faults |= timed.faults
    self._add_failures(problem, listed, faults)
    if default.key in faults:
      reason = f"the default {default.key} failed: {faults[default.key]}"
      return dataclasses.replace(found, faults=faults, reason=reason)
    row = row_of(self._rows.fields(problem), listed, timed.samples)
    return dataclasses.replace(found, status="done", row=row, faults=faults)

  def _listed(self, problem: operation.Problem) -> listing.Listing:
    listed = self._list(problem)
    if self._is_retrying:
      return listed
    known = failures.read(self._rows.failures)
    reasons: dict[str, str] = {}
    for name in {c.implementation for c in listed.candidates}:
      reasons |= failures.of(known, self._rows.kernels(name), str(problem))
    return listed.without(reasons)

  def _add_failures(
    self,
    problem: operation.Problem,
    listed: listing.Listing,
    faults: Mapping[str, machine.TrialFault],
  ) -> None:
    failures.add(
      self._rows.failures,
      [
        failures.Failure(
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


def row_of(
  fields: records.Fields,
  listed: listing.Listing,
  samples: Mapping[str, Sequence[float]],
) -> records.Row:
  """Returns the row of a problem.

  Args:
    fields: the fields of the problem.
    listed: the candidates.
    samples: milliseconds of each candidate that ran, including the default.
  """
  measured = {
    candidate: _measured(candidate, samples[candidate.key])
    for candidate in listed.candidates
    if samples.get(candidate.key)
  }
  default = measured[listed.default]
  ordered = sorted(
    measured.values(),
    key=lambda c: (c.median_us, c.implementation, records.order(c.config)),
  )
  # A row has the default and the fastest other candidates.
  others = [c for c in ordered if c is not default]
  kept = others[: records.MAX_CANDIDATES - 1]
  return records.row_of(fields, [default, *kept], default)


def _measured(
  candidate: listing.TrialCandidate, samples: Sequence[float]
) -> records.Candidate:
  stats = timing.stats([_US_PER_MS * sample for sample in samples])
  return records.Candidate(
    implementation=candidate.implementation,
    config=candidate.config,
    median_us=stats.median,
    interval_us=(stats.q1, stats.q3),
  )


LEGEND: Final = (
  "us: median, with its quartiles. ratio: to the time of the default. The"
  " chosen candidate has a *."
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
    low, high = candidate.interval_us
    suffix = " (default)" if candidate is default else ""
    cells.append(
      {
        "": "*" if candidate is row.chosen else "",
        "us": f"{candidate.median_us:.5g}",
        "quartiles": f"[{low:.5g}, {high:.5g}]",
        "ratio": f"{candidate.median_us / default.median_us:.3f}",
        "backend": candidate.implementation + suffix,
      }
    )
  yield from listing.table(
    [
      listing.TrialCandidate(implementation=x.implementation, config=x.config)
      for x in row.candidates
    ],
    cells,
    figures=("us", "quartiles", "ratio"),
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOut:
  """A row that is left out, and the choice of the other rows for its problem.

  Attributes:
    row: the row that is left out.
    neighbour: the row whose choice is used; None if no row has a usable choice.
      The rule then chooses.
    choice: the chosen candidate, as measured in `row`; None if `row` does not
      have this candidate.
  """

  row: records.Row
  neighbour: records.Row | None
  choice: records.Candidate | None

  @property
  def slowdown(self) -> float | None:
    """Time of `choice` / time of the candidate that `row` chose."""
    if self.choice is None:
      return None
    return self.choice.median_us / self.row.chosen.median_us


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slowdown:
  """The slowdowns of all rows of a table; `str` is a report.

  Attributes:
    rows: the rows in order.
  """

  rows: tuple[HeldOut, ...]

  @property
  def slowdowns(self) -> tuple[float, ...]:
    """Slowdowns of rows that have a neighbour and a measured choice."""
    return tuple(
      row.slowdown
      for row in self.rows
      if row.neighbour is not None and row.slowdown is not None
    )

  @property
  def unmeasured(self) -> int:
    """Number of rows that have no measurement of the neighbour's choice."""
    return sum(row.choice is None for row in self.rows)

  def __str__(self) -> str:
    lines = []
    alone = sum(row.neighbour is None for row in self.rows)
    slowdowns = self.slowdowns
    if slowdowns:
      mean = math.exp(sum(map(math.log, slowdowns)) / len(slowdowns))
      lines.append(
        f"{len(slowdowns)} held-out problems: their neighbours' choices take"
        f" {mean:.3f} times as long as their own (geometric mean), at worst"
        f" {max(slowdowns):.3f}"
      )
      worst = max(
        (row for row in self.rows if row.neighbour is not None),
        key=lambda row: row.slowdown or 0.0,
      )
      if max(slowdowns) > 1:
        lines.append(f"the worst: {dict(worst.row.problem)}")
    if self.unmeasured:
      lines.append(
        f"{self.unmeasured} whose neighbour chose a candidate that was not"
        " measured for them"
      )
    if alone:
      lines.append(f"{alone} without a neighbour, for which the rule chooses")
    return "\n".join(lines) if self.rows else "no rows"


def held_out(
  table: records.Table,
  allows: Callable[[records.Row, records.Candidate], bool] = lambda *_: True,
) -> Slowdown:
  """Returns the slowdown of each row if the table does not have the row.

  Args:
    table: measured rows.
    allows: is passed a row and a candidate of another row. Returns whether the
      candidate can compute the row's problem (`BackendRecord.config_error`). If
      not, the next candidate is tried, as in a decision.
  """

  def of_row(row: records.Row) -> HeldOut:
    measured = {candidate.way: candidate for candidate in row.candidates}
    for _, neighbour in lookup.nearest(table, row.problem):
      for candidate in neighbour.preferred if neighbour is not row else ():
        if allows(row, candidate):
          choice = measured.get(candidate.way)
          return HeldOut(row=row, neighbour=neighbour, choice=choice)
    default = row.candidates[row.default]
    return HeldOut(row=row, neighbour=None, choice=default)

  return Slowdown(rows=tuple(map(of_row, table.rows)))
