# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans next to each other: a table in Markdown, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Final

from jaxplugin.lab.planning import collectives
from jaxplugin.lab.planning import plans
from jaxplugin.printing import console

_MEGA: Final = 1e6
_GIGA: Final = 1e9
# Smaller sizes, such as the amax of a tensor, are not printed.
_LEAST_MB: Final = 0.05


def key_of(one: collectives.Collective) -> tuple[str, str, str]:
  """Returns the key of a row of the table: (axes, kind, element type)."""
  return " and ".join(one.axes), one.kind, one.dtype


def by_key(plan: plans.ModelPlan) -> dict[tuple[str, str, str], float]:
  """Returns the megabytes that a device receives, by `key_of`."""
  found: dict[tuple[str, str, str], float] = {}
  for one in plan.collectives:
    key = key_of(one)
    found[key] = found.get(key, 0) + one.total / _MEGA
  return found


def table(found: Sequence[plans.ModelPlan]) -> str:
  """Returns a table with a column for each plan of one layout.

  A row is an axis, kind and element type, in MB that a device receives. Columns
  that do not fit in `console.WIDTH` follow in another table.
  """
  rows = [["MB received", *(plan.format for plan in found)], *_rows(found)]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  groups: list[list[int]] = [[]]
  room = console.WIDTH - widths[0] - len("|  |")
  for i, width in enumerate(widths[1:], start=1):
    used = sum(widths[k] + len(" | ") for k in groups[-1])
    if groups[-1] and used + width + len(" | ") > room:
      groups.append([])
    groups[-1].append(i)
  return "\n\n".join(_lines(rows, widths, group) for group in groups)


def _lines(
  rows: Sequence[Sequence[str]], widths: Sequence[int], columns: Sequence[int]
) -> str:
  """Returns the first column and some others as a table in Markdown."""
  rule = "-" * widths[0], *("-" * (widths[i] - 1) + ":" for i in columns)
  lines = [
    (row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in columns))
    for row in rows
  ]
  lines.insert(1, rule)
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rows(found: Sequence[plans.ModelPlan]) -> Iterator[list[str]]:
  columns = [by_key(plan) for plan in found]
  keys = sorted({key for column in columns for key in column})
  for key in keys:
    sizes = [column.get(key, 0) for column in columns]
    if max(sizes) >= _LEAST_MB:
      axes, kind, dtype = key
      cells = [f"{size:.1f}" if size >= _LEAST_MB else "" for size in sizes]
      yield [f"{axes}: {kind} {dtype}", *cells]
  totals = [plan.received / _MEGA for plan in found]
  yield ["all", *(f"{total:.1f}" for total in totals)]
  if totals[0]:
    yield ["to the first", *(f"{total / totals[0]:.2f}" for total in totals)]
  for name, memory in (
    ("temporary, GB", [plan.temp_bytes for plan in found]),
    ("arguments, GB", [plan.argument_bytes for plan in found]),
  ):
    yield [name, *(f"{size / _GIGA:.3g}" for size in memory)]


def text(found: Sequence[plans.ModelPlan], *, times: bool = True) -> str:
  """Returns a table for each name and layout, in the order of the plans.

  Args:
    found: plans.
    times: whether to print how long compiling took, which varies between runs.
  """
  groups: dict[tuple[str, str], list[plans.ModelPlan]] = {}
  for plan in found:
    groups.setdefault((plan.name, plan.layout), []).append(plan)
  parts = []
  for (name, layout), group in groups.items():
    title = f"{name}, {layout}: {group[0].devices} x {group[0].target}"
    lines = [title, "", table(group)]
    if any(one.is_bound for plan in group for one in plan.collectives):
      lines.append("\nLoops without a known count are counted once.")
    if times:
      seconds = ", ".join(f"{p.seconds:.1f} s ({p.format})" for p in group)
      lines.append(f"\ncompiled in {seconds}")
    parts.append("\n".join(lines))
  return "\n\n".join(parts)


def to_json(found: Sequence[plans.ModelPlan]) -> str:
  """Returns a JSON object for each plan, with the fields of `ModelPlan`."""
  return json.dumps([plan.to_dict() for plan in found], indent=1)


def from_json(data: str) -> list[plans.ModelPlan]:
  """Reads the output of `to_json`."""
  found = []
  for fields in json.loads(data):
    del fields["received_bytes"]
    moved = tuple(
      collectives.Collective(**{**one, "axes": tuple(one["axes"])})
      for one in fields.pop("collectives")
    )
    found.append(plans.ModelPlan(collectives=moved, **fields))
  return found
