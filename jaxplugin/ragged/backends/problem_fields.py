# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Problems of ragged dots and contractions as rows of a table, and back.

As of the dot. How many rows each group has is not in a problem: what is
measured of one holds for however they are spread.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any
from typing import Final

from jaxplugin.dot.backends import problem_fields
from jaxplugin.ragged import problems
from jaxplugin.tables import records
from jaxplugin.tables import taking

_SIZES: Final = ("groups", "m", "n", "k")
_RAGGED: Final[dict[str, records.Scalar]] = {
  "is_along_blocks": True,
  "global_scale": "none",
  "has_global_power": False,
  "has_bias": False,
  "activation": None,
}
_RAGGED_WORDS: Final = {
  "global_scale": ("none", "scalar", "group", "row"),
  "activation": problems.ACTIVATIONS,
}
_CONTRACTION: Final[dict[str, records.Scalar]] = {"global_scale": "none"}
_CONTRACTION_WORDS: Final = {"global_scale": problem_fields.GLOBAL_SCALES}


@functools.lru_cache(maxsize=4096)
def fields_of(problem: problems.RaggedProblem) -> records.Fields | None:
  """A ragged dot's fields; None where no row can be about it."""
  return _fields_of(problem, _RAGGED)


@functools.lru_cache(maxsize=4096)
def contraction_fields_of(
  problem: problems.ContractionProblem,
) -> records.Fields | None:
  """A contraction's fields; None where no row can be about it."""
  return _fields_of(problem, _CONTRACTION)


def _fields_of(
  problem: problems.RaggedProblem | problems.ContractionProblem,
  defaults: Mapping[str, records.Scalar],
) -> records.Fields | None:
  if not problem.sizes_are_static or problem.is_empty:
    return None
  if problem.out_dtype.name not in taking.DTYPES:
    return None
  lhs = problem_fields.side_fields("lhs", problem.lhs)
  rhs = problem_fields.side_fields("rhs", problem.rhs)
  if lhs is None or rhs is None:
    return None
  fields: dict[str, Any] = {name: getattr(problem, name) for name in _SIZES}
  fields["out"] = problem.out_dtype.name
  fields |= taking.not_default(problem, defaults)
  return records.fields_of("problem", {**fields, **lhs, **rhs})


def problem_of(fields: records.Fields) -> problems.RaggedProblem:
  """The ragged dot of which these are the fields.

  Raises:
    ValueError: of none; says which field, and what it must be.
  """
  what = "the ragged dot"
  found = _problem_of(what, fields, _RAGGED, _RAGGED_WORDS)
  return problems.RaggedProblem(**found)


def contraction_problem_of(
  fields: records.Fields,
) -> problems.ContractionProblem:
  """The contraction of which these are the fields.

  Raises:
    ValueError: of none; says which field, and what it must be.
  """
  what = "the ragged contraction"
  found = _problem_of(what, fields, _CONTRACTION, _CONTRACTION_WORDS)
  return problems.ContractionProblem(**found)


def _problem_of(
  what: str,
  fields: records.Fields,
  defaults: Mapping[str, records.Scalar],
  words: Mapping[str, tuple[str, ...]],
) -> dict[str, Any]:
  taken = taking.Taken(what, fields, (*_SIZES, "out", "lhs", "rhs"))
  found: dict[str, Any] = {name: taken.size(name) for name in _SIZES}
  found["out_dtype"] = taking.DTYPES[taken.text("out", taking.DTYPES)]
  for name in ("lhs", "rhs"):
    found[name] = problem_fields.side_of(name, taken)
  found |= taken.optional(defaults, words)
  taken.finish()
  return found
