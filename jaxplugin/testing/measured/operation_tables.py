# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tuning tables of any operation that match a target, for tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxplugin.core import targets
from jaxplugin.tables import records, resolution
from jaxplugin.testing.measured import measured_tables


def candidate(
  implementation: str, median_us: float, config: records.Fields = ()
) -> records.Candidate:
  return records.Candidate(
    implementation=implementation,
    config=config,
    median_us=median_us,
    interval_us=(median_us, median_us),
  )


def row(
  operation: resolution.MeasuredOperation[Any], problem: Any, *ways: Any
) -> records.Row:
  """The first of (implementation, time, config) is the default."""
  candidates = [candidate(*way) for way in ways]
  fields = operation.fields_of(problem)
  assert fields is not None
  return records.row_of(fields, candidates, candidates[0])


def table(
  operation: resolution.MeasuredOperation[Any],
  target: targets.Target,
  /,
  *rows: records.Row,
  **changes: Any,
) -> records.Table:
  """As if it had been measured here."""
  names = {c.implementation for row in rows for c in row.candidates}
  device = resolution.device_of(target)
  assert device is not None
  header = measured_tables.header(
    operation=operation.name,
    device=device,
    sources=resolution.sources_of(operation, target, names),
    about=(),
  )
  return records.table_of(dataclasses.replace(header, **changes), rows)


def with_xla_first(
  operation: resolution.MeasuredOperation[Any],
  target: targets.Target,
  *problems: Any,
) -> records.Table:
  """A table in which XLA's operations are faster than the rule's choice."""
  rows = []
  for problem in problems:
    default = next(
      name
      for name, backend in operation.backends().items()
      if backend.supports(problem, target) is None
    )
    ways = [(default, 20.0)]
    ways += [] if default == "xla" else [("xla", 10.0)]
    rows.append(row(operation, problem, *ways))
  return table(operation, target, *rows)
