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
from typing import Any
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
  covered: Any = dict(records.key_of(problem))[records.BUCKETED]
  for distance in range(MAX_DISTANCE + 1):
    for size in dict.fromkeys((covered << distance, covered >> distance)):
      key = tuple(sorted({**dict(problem), records.BUCKETED: size}.items()))
      if row := _index(table).get(key):
        yield distance, row


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
      why=_why(row, candidate, distance),
    )
    for distance, row in nearest(table, problem)
    for candidate in row.preferred
  ]


def _why(row: records.Row, candidate: records.Candidate, distance: int) -> str:
  default = row.candidates[row.default]
  text = f"{candidate.median_us:g} us"
  if candidate is not default:
    text += f", the rule's {default.implementation} {default.median_us:g} us"
  else:
    text += ", the rule's own choice"
  if distance:
    text += f", measured at m={row.size(records.BUCKETED)}"
  return text


@functools.lru_cache(maxsize=64)
def _index(table: records.Table) -> Mapping[records.Fields, records.Row]:
  return {row.key: row for row in table.rows}
