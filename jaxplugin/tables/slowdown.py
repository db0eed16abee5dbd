# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of choosing by a neighbouring row of a table.

Each row is left out of its table once. The choice of the remaining rows for its
problem is then compared with the row's own choice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Iterator

from jaxplugin.tables import lookup
from jaxplugin.tables import records


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOut:
  """A row that is left out, and the choice of the other rows for its problem.

  Attributes:
    row: the row that is left out.
    neighbour: the row whose choice is used; None if no row is near and the rule
      chooses.
    choice: the candidate of `row` that is chosen; None if it was not measured
      for this problem.
  """

  row: records.Row
  neighbour: records.Row | None
  choice: records.Candidate | None

  @property
  def slowdown(self) -> float | None:
    """Time of the choice divided by the time of the row's own choice."""
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
    """Slowdowns of rows with a neighbour whose choice was measured."""
    return tuple(
      row.slowdown
      for row in self.rows
      if row.neighbour is not None and row.slowdown is not None
    )

  @property
  def unmeasured(self) -> int:
    """Number of rows whose neighbour's choice was not measured for them."""
    return sum(row.choice is None for row in self.rows)

  def lines(self) -> Iterator[str]:
    """Yields the lines of the report."""
    alone = sum(row.neighbour is None for row in self.rows)
    slowdowns = self.slowdowns
    if slowdowns:
      mean = math.exp(sum(map(math.log, slowdowns)) / len(slowdowns))
      yield (
        f"{len(slowdowns)} held-out problems: their neighbours' choices take"
        f" {mean:.3f} times as long as their own (geometric mean), at worst"
        f" {max(slowdowns):.3f}"
      )
      worst = max(
        (row for row in self.rows if row.neighbour is not None),
        key=lambda row: row.slowdown or 0.0,
      )
      if max(slowdowns) > 1:
        yield f"the worst: {dict(worst.row.problem)}"
    if self.unmeasured:
      yield (
        f"{self.unmeasured} whose neighbour chose a candidate that was not"
        " measured for them"
      )
    if alone:
      yield f"{alone} without a neighbour, for which the rule chooses"
    if not self.rows:
      yield "no rows"

  def __str__(self) -> str:
    return "\n".join(self.lines())


def held_out(
  table: records.Table,
  allows: Callable[[records.Row, records.Candidate], bool] = lambda *_: True,
) -> Slowdown:
  """Returns the slowdown of each row's problem without the row.

  Args:
    table: measured rows.
    allows: called with a row and a candidate of another row; returns whether
      the candidate can compute the row's problem (`Backend.config_error`). If
      it cannot, the next candidate is tried, as in a decision.
  """
  return Slowdown(
    rows=tuple(_held_out(table, row, allows) for row in table.rows)
  )


def _held_out(
  table: records.Table,
  row: records.Row,
  allows: Callable[[records.Row, records.Candidate], bool],
) -> HeldOut:
  measured = {candidate.way: candidate for candidate in row.candidates}
  for _, neighbour in lookup.nearest(table, row.problem):
    if neighbour is row:
      continue
    for candidate in neighbour.preferred:
      if allows(row, candidate):
        return HeldOut(
          row=row, neighbour=neighbour, choice=measured.get(candidate.way)
        )
  default = row.candidates[row.default]
  return HeldOut(row=row, neighbour=None, choice=default)
