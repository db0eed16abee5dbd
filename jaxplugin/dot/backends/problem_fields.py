# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts problems of the dot to rows of a tuning table and back.

A row has the fields of a `DotProblem` that differ from their defaults.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.dot import problems
from jaxplugin.tables import records
from jaxplugin.tables import row_fields

_SIZES: Final = ("m", "n", "k")
GLOBAL_SCALES: Final = ("none", "scalar", "array")


def defaults_of(kind: type) -> dict[str, records.Scalar]:
  """Returns the fields of a dataclass that have a default.

  Rows leave a field out if it has its default.
  """
  return {
    field.name: field.default
    for field in dataclasses.fields(kind)
    if field.default is not dataclasses.MISSING
  }


_DEFAULTS: Final = {"batch": 1, **defaults_of(problems.DotProblem)}
_WORDS: Final = {
  "global_scale": GLOBAL_SCALES,
  "activation": problems.ACTIVATIONS,
}
_NUMBERS: Final = ("batch", "num_contracting", "blocked_k")
_SIDE_DEFAULTS: Final = defaults_of(problems.SideProblem)
_LAYOUTS: Final = (layouts.LINEAR, layouts.SWIZZLED)


@functools.lru_cache(maxsize=4096)
def fields_of(problem: problems.DotProblem) -> records.Fields | None:
  """Returns a problem's fields; None if a row cannot hold it."""
  return matmul_fields(problem, _SIZES, _DEFAULTS)


def matmul_fields(
  problem: Any, sizes: Sequence[str], defaults: Mapping[str, records.Scalar]
) -> records.Fields | None:
  """Returns the fields of a matmul of two operands.

  The result is None if a size is symbolic or 0, or if a format or dtype has no
  name.

  Args:
    problem: problem with the attributes `lhs`, `rhs`, `out_dtype`, and those
      named in `sizes` and `defaults`.
    sizes: names of the sizes.
    defaults: names of other fields, with the value that rows leave out.
  """
  if not problem.sizes_are_static or problem.is_empty:
    return None
  if problem.out_dtype.name not in row_fields.DTYPES:
    return None
  lhs, rhs = _side_fields("lhs", problem.lhs), _side_fields("rhs", problem.rhs)
  if lhs is None or rhs is None:
    return None
  fields: dict[str, Any] = {name: getattr(problem, name) for name in sizes}
  fields["out"] = problem.out_dtype.name
  fields |= row_fields.not_default(problem, defaults)
  return records.fields_of("problem", {**fields, **lhs, **rhs})


def problem_of(fields: records.Fields) -> problems.DotProblem:
  """Returns the problem that has these fields.

  Raises:
    ValueError: If a field is wrong. The message says what it must be.
  """
  return problems.DotProblem(
    **matmul_of("the dot", fields, _SIZES, _DEFAULTS, _WORDS, _NUMBERS)
  )


def matmul_of(
  what: str,
  fields: records.Fields,
  sizes: Sequence[str],
  defaults: Mapping[str, records.Scalar],
  words: Mapping[str, tuple[str, ...]],
  numbers: Sequence[str] = (),
) -> dict[str, Any]:
  """Returns the constructor arguments of a problem that has these fields.

  Args:
    what: name of the operation in errors.
    fields: fields of a row.
    sizes, defaults: as for `matmul_fields`.
    words: allowed values of each string field.
    numbers: names of the integer fields.

  Raises:
    ValueError: If a field is wrong. The message says what it must be.
  """
  row = row_fields.RowFields(what, fields, (*sizes, "out", "lhs", "rhs"))
  found: dict[str, Any] = {name: row.size(name) for name in sizes}
  found["out_dtype"] = row_fields.DTYPES[row.text("out", row_fields.DTYPES)]
  for name in ("lhs", "rhs"):
    found[name] = _side_of(name, row)
  found |= row.optional(defaults, words, numbers)
  row.finish()
  return found


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
  dtypes = {dtype.name: dtype for dtype in format.storage_dtypes}
  dtype = format.array_dtype
  if f"{name}_dtype" in row:
    dtype = dtypes[row.text(f"{name}_dtype", dtypes)]
  return problems.SideProblem(format=format, dtype=dtype, **changes)
