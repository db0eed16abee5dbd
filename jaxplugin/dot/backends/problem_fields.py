# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts problems of matmuls to rows of a tuning table and back.

A row has the fields of a problem that differ from their defaults.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.dot import problems
from jaxplugin.tables import matching
from jaxplugin.tables import records
from jaxplugin.tables import row_fields

GLOBAL_SCALES: Final = ("none", "scalar", "array")

_SIDE_DEFAULTS: Final = row_fields.defaults_of(problems.SideProblem)
_LAYOUTS: Final = (layouts.LINEAR, layouts.SWIZZLED)


def measured(
  kind: type[Any],
  name: str,
  backends: Callable[[], Mapping[str, Any]],
  *,
  what: str,
  sizes: Sequence[str],
  words: Mapping[str, tuple[str, ...]],
  numbers: Mapping[str, int | None] | None = None,
) -> matching.MeasuredOperation[Any]:
  """Returns a matmul whose table rows have the fields of a problem.

  Args:
    kind: class of the problem. It has the attributes `lhs`, `rhs`, `out_dtype`,
      `sizes_are_static` and `is_empty`. Rows leave out its defaults.
    name: name of the public function.
    backends: returns the backends by name.
    what: name of the operation in errors.
    sizes: names of the sizes that every row has.
    words: allowed values of each string field.
    numbers: default of each integer field that rows may leave out.
  """
  numbers = numbers or {}
  defaults = {**row_fields.defaults_of(kind), **numbers}

  @functools.lru_cache(maxsize=4096)
  def fields_of(problem: Any) -> records.Fields | None:
    if not problem.sizes_are_static or problem.is_empty:
      return None
    if problem.out_dtype.name not in row_fields.DTYPES:
      return None
    lhs = _side_fields("lhs", problem.lhs)
    rhs = _side_fields("rhs", problem.rhs)
    if lhs is None or rhs is None:
      return None
    fields: dict[str, Any] = {name: getattr(problem, name) for name in sizes}
    fields["out"] = problem.out_dtype.name
    fields |= row_fields.not_default(problem, defaults)
    return records.fields_of("problem", {**fields, **lhs, **rhs})

  def problem_of(fields: records.Fields) -> Any:
    row = row_fields.RowFields(what, fields, (*sizes, "out", "lhs", "rhs"))
    found: dict[str, Any] = {name: row.size(name) for name in sizes}
    found["out_dtype"] = row.named("out", row_fields.DTYPES)
    for name in ("lhs", "rhs"):
      found[name] = _side_of(name, row)
    found |= row.optional(defaults, words, numbers)
    row.finish()
    return kind(**found)

  return matching.MeasuredOperation(
    name=name, fields_of=fields_of, problem_of=problem_of, backends=backends
  )


def _side_fields(
  name: str, side: problems.SideProblem
) -> dict[str, Any] | None:
  """Returns an operand's fields, or None if its format or dtype has no name."""
  fields: dict[str, Any] = {name: str(side)}
  if side.format is None:
    if side.dtype.name not in row_fields.DTYPES:
      return None
  else:
    named = row_fields.FORMATS.get(side.format.name)
    if named is None or _blocked(named, side.format.block_size) != side.format:
      return None
    if not named.block_size:
      fields[f"{name}_block_size"] = side.format.block_size
    if side.dtype != side.format.array_dtype:
      fields[f"{name}_dtype"] = side.dtype.name
  others = row_fields.not_default(side, _SIDE_DEFAULTS)
  return fields | {f"{name}_{field}": v for field, v in others.items()}


def _blocked(
  named: formats.BlockFormat, block_size: int
) -> formats.BlockFormat:
  """Returns the format of a problem whose operand has the format `named`."""
  return named.along(block_size).of_rows()


def _side_of(name: str, row: row_fields.RowFields) -> problems.SideProblem:
  """Returns the operand `name` from a row's fields."""
  text = row.text(name, (*row_fields.FORMATS, *row_fields.DTYPES))
  format = row_fields.FORMATS.get(text)
  layout = f"{name}_scale_layout"
  found = row.optional(
    {f"{name}_{field}": value for field, value in _SIDE_DEFAULTS.items()},
    {layout: _LAYOUTS},
  )
  changes = {n.removeprefix(f"{name}_"): v for n, v in found.items()}
  if format is None:
    return problems.SideProblem(
      format=None, dtype=row_fields.DTYPES[text], **changes
    )
  size = format.block_size or row.size(f"{name}_block_size")
  format = _blocked(format, size)
  dtype = row.stored_dtype(f"{name}_dtype", format)
  return problems.SideProblem(format=format, dtype=dtype, **changes)
