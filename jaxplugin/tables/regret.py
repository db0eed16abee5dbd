# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is lost where a table has no row of a problem: measured by leaving out.

Each row is taken out of its table, and what the rest would have chosen for its
problem is compared with what was chosen by measuring it.
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
  """One row, and what the others say of its problem.

  Attributes:
    row: the row that is left out.
    neighbour: the row whose choice is followed; None where none is near, and
      the rule chooses.
    choice: the candidate of `row` that is chosen so; None where it was not
      measured for this problem.
  """

  row: records.Row
  neighbour: records.Row | None
  choice: records.Candidate | None

  @property
  def slowdown(self) -> float | None:
    """Time of the choice over that of the row's own; None if not measured."""
    if self.choice is None:
      return None
    return self.choice.median_us / self.row.chosen.median_us


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regret:
  """Over all rows of a table; `str` is a report.

  Attributes:
    rows: each of them, in order.
  """

  rows: tuple[HeldOut, ...]

  @property
  def slowdowns(self) -> tuple[float, ...]:
    """Of rows that have a neighbour, and whose choice was measured."""
    return tuple(
      row.slowdown
      for row in self.rows
      if row.neighbour is not None and row.slowdown is not None
    )

  @property
  def unmeasured(self) -> int:
    """Rows whose neighbour chooses what was not measured for them."""
    return sum(row.choice is None for row in self.rows)

  def lines(self) -> Iterator[str]:
    """What a person reads."""
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
) -> Regret:
  """What each row's problem would cost without it.

  Args:
    table: measured rows.
    allows: (row, candidate of another) -> whether that can compute the row's
      problem, as `Backend.config_error` says. Where it cannot, the next one is
      asked, as in a decision.
  """
  return Regret(rows=tuple(_held_out(table, row, allows) for row in table.rows))


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
