# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the rows of a table that are nearest to a problem.

A row's fields must equal the problem's fields, except one size, which may lie
in a neighbouring bucket. The caller must check that the backend of a proposal
supports the problem with the proposed config.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Final

from jaxplugin.core import decisions
from jaxplugin.tables import records

# Largest distance in buckets. At four times the size something else, for
# example bandwidth, limits the speed.
MAX_DISTANCE: Final = 2


def nearest(
  table: records.Table, problem: records.Fields
) -> Iterator[tuple[int, records.Row]]:
  """Yields rows near a problem with their distance in buckets, nearest first.

  Of two rows at the same distance, the row with the larger size comes first,
  because its config covers the problem.
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
  """Returns a table's proposals for a problem, the best first.

  Args:
    table: a table that matches the operation and the target.
    problem: the problem's fields.
    origin: name of the table in decisions.
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
    text += f", the rule's {default.implementation} {default.median_us:g} us"
  else:
    text += ", the rule's own choice"
  if distance:
    text += f", measured at {bucketed}={row.size(bucketed)}"
  return text


def _apart(
  problem: records.Fields, bucketed: str
) -> tuple[records.Fields, int]:
  """Returns the other fields of a problem, and the bucket of one size."""
  size = dict(problem)[bucketed]
  assert isinstance(size, int)
  others = tuple(field for field in problem if field[0] != bucketed)
  return others, records.bucket(size)


@functools.lru_cache(maxsize=64)
def _index(
  table: records.Table,
) -> Mapping[records.Fields, Mapping[int, records.Row]]:
  """Returns rows by their other fields, then by the bucket of one size."""
  found: dict[records.Fields, dict[int, records.Row]] = {}
  for row in table.rows:
    others, covered = _apart(row.problem, table.header.bucketed)
    found.setdefault(others, {})[covered] = row
  return found
