# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares plans in Markdown tables or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Final

from jaxplugin.lab.compilation import traffic
from jaxplugin.lab.planning import collectives, plans
from jaxplugin.printing import console

_MEGA: Final = 1e6
_GIGA: Final = 1e9
# Smaller sizes, such as the amax of a tensor, are not printed.
_LEAST_MB: Final = 0.05


def key_of(one: collectives.Collective) -> tuple[str, str, str]:
  """Returns the key of a table's row: (axes, kind, element type)."""
  return " and ".join(one.axes), one.kind, one.dtype


def by_key(plan: plans.ModelPlan) -> dict[tuple[str, str, str], float]:
  """Returns the megabytes that a device receives, with keys of `key_of`."""
  found: dict[tuple[str, str, str], float] = {}
  for one in plan.collectives:
    key = key_of(one)
    found[key] = found.get(key, 0) + one.total / _MEGA
  return found


def table(found: Sequence[plans.ModelPlan]) -> str:
  """Returns a table with a column for each plan of one layout.

  A row has the MB that a device receives by a kind of collective, over some
  axes, with some element type; or the MB that kernels of some kinds read and
  write. The last rows have totals and memory. Columns that do not fit in
  `console.WIDTH` follow in another table.
  """
  formats = [plan.format for plan in found]
  if found[0].kernels:
    rows = [["MB read and written", *formats], *_traffic_rows(found)]
  else:
    rows = [["MB received", *formats], *_rows(found)]
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
  """Returns a Markdown table of the first column and the given columns."""
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


# Rows of a table of kernels, and their kinds.
_KINDS: Final[dict[str, tuple[traffic.Kind, ...]]] = {
  "matmuls": ("matmul",),
  "norms, activations, quantizing": ("producer", "quantize"),
  "quantizing weights": ("weight",),
  "other": ("other",),
}


def _traffic_rows(found: Sequence[plans.ModelPlan]) -> Iterator[list[str]]:
  tables = [traffic.table(plan.kernels) for plan in found]

  def cells(kinds: tuple[traffic.Kind, ...], i: int) -> list[float]:
    return [sum(t[k][i] for k in kinds if k in t) for t in tables]

  for name, kinds in _KINDS.items():
    sizes = cells(kinds, 1)
    if any(sizes):
      yield [name, *(f"{size / _MEGA:.1f}" for size in sizes)]
  totals = [traffic.num_bytes(plan.kernels) for plan in found]
  yield ["all", *(f"{total / _MEGA:.1f}" for total in totals)]
  yield ["to the first", *(f"{total / totals[0]:.2f}" for total in totals)]
  bandwidth = found[0].bandwidth
  if bandwidth is not None:
    times = (f"{total / bandwidth * 1e6:.0f}" for total in totals)
    yield ["at the bandwidth, us", *times]
  extra = [traffic.quantizing(plan.kernels) for plan in found]
  if any(extra):
    yield ["quantize traffic", *(f"{x / _MEGA:.1f}" for x in extra)]
    separate = {p.format: x for p, x in zip(found, extra, strict=True)}
    names = [plan.format.removesuffix(plans.FUSED) for plan in found]
    yield [
      "to separate",
      *(
        f"{x / separate[name]:.2f}" if separate.get(name) else ""
        for name, x in zip(names, extra, strict=True)
      ),
    ]
  for name, kinds in _KINDS.items():
    counts = cells(kinds, 0)
    if any(counts):
      yield [f"kernels: {name}", *(f"{count}" for count in counts)]


def text(found: Sequence[plans.ModelPlan], *, times: bool = True) -> str:
  """Returns a table for each name and layout, in the order of the plans.

  `times` is whether to print compile times, which vary between runs.
  """
  groups: dict[str, list[plans.ModelPlan]] = {}
  for plan in found:
    groups.setdefault(title_of(plan), []).append(plan)
  parts = []
  for title, group in groups.items():
    lines = [title, "", table(group)]
    if any(plan.is_bound for plan in group):
      lines.append("\nLoops without a known count are counted once.")
    if times:
      seconds = ", ".join(f"{p.seconds:.1f} s ({p.format})" for p in group)
      lines.append(f"\ncompiled in {seconds}")
    parts.append("\n".join(lines))
  return "\n\n".join(parts)


def title_of(plan: plans.ModelPlan) -> str:
  return f"{plan.name}, {plan.layout}: {plan.devices} x {plan.target}"


def to_json(found: Sequence[plans.ModelPlan]) -> str:
  """Returns a JSON array with an object for each plan (`ModelPlan.to_dict`)."""
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
    kernels = [traffic.Kernel(**one) for one in fields.pop("kernels", ())]
    found.append(
      plans.ModelPlan(collectives=moved, kernels=tuple(kernels), **fields)
    )
  return found
