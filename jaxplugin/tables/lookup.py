# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a table says of a problem: of its own row, or of the nearest one.

All of a problem but one size must be as measured; that size may lie in a
neighbouring bucket. Who follows a proposal checks whether its config can
compute the problem at hand.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Final

from jaxplugin.core import decisions
from jaxplugin.tables import records

# Buckets between a problem and a row about it. A size four times another is
# bound by something else.
MAX_DISTANCE: Final = 2


def nearest(
  table: records.Table, problem: records.Fields
) -> Iterator[tuple[int, records.Row]]:
  """Rows that say something of a problem, with their distance in buckets.

  The nearest first; of two as near that of more rows, whose config covers them.
  """
  bucketed = table.header.bucketed
  others, covered = _apart(problem, bucketed)
  rows = _index(table).get(others, {})
  near = [
    (abs(size.bit_length() - covered.bit_length()), -size) for size in rows
  ]
  for distance, size in sorted(near):
    if distance <= MAX_DISTANCE:
      yield distance, rows[-size]


def proposals(
  table: records.Table, problem: records.Fields, origin: str
) -> list[decisions.Measured]:
  """What a table proposes for a problem, the best first.

  Args:
    table: one that fits.
    problem: the problem's fields.
    origin: what decisions call the table.
  """
  return [
    decisions.Measured(
      implementation=candidate.implementation,
      config=candidate.config,
      origin=origin,
      why=_why(row, candidate, distance, table.header.bucketed),
    )
    for distance, row in nearest(table, problem)
    for candidate in row.preferred
  ]


def _why(
  row: records.Row, candidate: records.Candidate, distance: int, bucketed: str
) -> str:
  default = row.candidates[row.default]
  text = f"{candidate.median_us:g} us"
  if candidate is not default:
    text += f", {_named(default)} {default.median_us:g} us"
  else:
    text += ", the rule's own choice"
  if distance:
    text += f", measured at {bucketed}={row.size(bucketed)}"
  return text


def _named(candidate: records.Candidate) -> str:
  return f"the rule's {candidate.implementation}"


def _apart(
  problem: records.Fields, bucketed: str
) -> tuple[records.Fields, int]:
  """All of a problem but one size, and the bucket of that."""
  size = dict(problem)[bucketed]
  assert isinstance(size, int)
  others = tuple(field for field in problem if field[0] != bucketed)
  return others, records.bucket(size)


@functools.lru_cache(maxsize=64)
def _index(
  table: records.Table,
) -> Mapping[records.Fields, Mapping[int, records.Row]]:
  """Rows by all of their problem but one size, then by that one's bucket."""
  found: dict[records.Fields, dict[int, records.Row]] = {}
  for row in table.rows:
    others, covered = _apart(row.problem, table.header.bucketed)
    found.setdefault(others, {})[covered] = row
  return found
