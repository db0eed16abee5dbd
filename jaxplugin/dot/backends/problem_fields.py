# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A problem of the dot as a row of a table has it, and back.

Every field of a `DotProblem` is there, unless it is what most problems have: a
field that is left out stands for the default. No field is left out of what is
compared.
"""

from __future__ import annotations

import functools
from typing import Any
from typing import Final

from jaxplugin.arrays import layouts
from jaxplugin.dot import problems
from jaxplugin.tables import records
from jaxplugin.tables import taking

_SIZES: Final = ("m", "n", "k")
GLOBAL_SCALES: Final = ("none", "scalar", "array")
# What most problems have, and rows leave out.
_DEFAULTS: Final[dict[str, records.Scalar]] = {
  "batch": 1,
  "global_scale": "none",
  "has_global_power": False,
  "highest_precision": False,
  "has_bias": False,
  "activation": None,
  "has_residual": False,
  "num_contracting": 1,
  "blocked_k": None,
  "blocks_pair_up": True,
}
_WORDS: Final = {
  "global_scale": GLOBAL_SCALES,
  "activation": problems.ACTIVATIONS,
}
_NUMBERS: Final = ("batch", "num_contracting", "blocked_k")
_SIDE_DEFAULTS: Final[dict[str, records.Scalar]] = {
  "contracting_is_minor": True,
  "scale_layout": layouts.LINEAR,
  "scale_is_padded": False,
  "is_interleaved": False,
}
_LAYOUTS: Final = (layouts.LINEAR, layouts.SWIZZLED)


@functools.lru_cache(maxsize=4096)
def fields_of(problem: problems.DotProblem) -> records.Fields | None:
  """A problem's fields; None where no row can be about it.

  That is where a size is symbolic or 0, or a format or dtype has no name.
  """
  if not problem.sizes_are_static or problem.is_empty:
    return None
  if problem.out_dtype.name not in taking.DTYPES:
    return None
  lhs, rhs = side_fields("lhs", problem.lhs), side_fields("rhs", problem.rhs)
  if lhs is None or rhs is None:
    return None
  fields: dict[str, Any] = {name: getattr(problem, name) for name in _SIZES}
  fields["out"] = problem.out_dtype.name
  fields |= taking.not_default(problem, _DEFAULTS)
  return records.fields_of("problem", {**fields, **lhs, **rhs})


def problem_of(fields: records.Fields) -> problems.DotProblem:
  """The problem of which these are the fields.

  Raises:
    ValueError: of none; says which field, and what it must be.
  """
  taken = taking.Taken("the dot", fields, (*_SIZES, "out", "lhs", "rhs"))
  changes: dict[str, Any] = {name: taken.size(name) for name in _SIZES}
  changes["out_dtype"] = taking.DTYPES[taken.text("out", taking.DTYPES)]
  for name in ("lhs", "rhs"):
    changes[name] = side_of(name, taken)
  changes |= taken.optional(_DEFAULTS, _WORDS, _NUMBERS)
  taken.finish()
  return problems.DotProblem(**changes)


def side_fields(
  name: str, side: problems.OperandProblem
) -> dict[str, Any] | None:
  """The fields of an operand; None where its format or dtype has no name."""
  fields: dict[str, Any] = {name: str(side)}
  if side.format is None:
    if side.dtype.name not in taking.DTYPES:
      return None
  elif not side.format.is_known:
    return None
  elif side.dtype != side.format.array_dtype:
    fields[f"{name}_dtype"] = side.dtype.name
  others = taking.not_default(side, _SIDE_DEFAULTS)
  return fields | {f"{name}_{field}": v for field, v in others.items()}


def side_of(name: str, taken: taking.Taken) -> problems.OperandProblem:
  """The operand of that name, whose fields are taken."""
  told = taken.text(name, (*taking.FORMATS, *taking.DTYPES))
  format = taking.FORMATS.get(told)
  layout = f"{name}_scale_layout"
  found = taken.optional(
    {f"{name}_{field}": value for field, value in _SIDE_DEFAULTS.items()},
    {layout: _LAYOUTS},
  )
  changes = {n.removeprefix(f"{name}_"): v for n, v in found.items()}
  if format is None:
    return problems.OperandProblem(
      format=None, dtype=taking.DTYPES[told], **changes
    )
  dtypes = {dtype.name: dtype for dtype in format.storage_dtypes}
  dtype = format.array_dtype
  if f"{name}_dtype" in taken:
    dtype = dtypes[taken.text(f"{name}_dtype", dtypes)]
  return problems.OperandProblem(format=format, dtype=dtype, **changes)
