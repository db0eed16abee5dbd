# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts problems of ragged dots and contractions to table rows and back.

Group sizes are not part of a problem, so a row applies to all group sizes.
"""

from __future__ import annotations

import functools
from typing import Final

from jaxplugin.dot.backends import problem_fields
from jaxplugin.ragged import problems
from jaxplugin.tables import records

_SIZES: Final = ("groups", "m", "n", "k")
_RAGGED: Final = problem_fields.defaults_of(problems.RaggedDotProblem)
_RAGGED_WORDS: Final = {
  "global_scale": ("none", "scalar", "group", "row"),
  "activation": problems.ACTIVATIONS,
}
_CONTRACTION: Final = problem_fields.defaults_of(problems.ContractionProblem)
_CONTRACTION_WORDS: Final = {"global_scale": problem_fields.GLOBAL_SCALES}


@functools.lru_cache(maxsize=4096)
def fields_of(problem: problems.RaggedDotProblem) -> records.Fields | None:
  """Returns a ragged dot's fields; None if a row cannot hold it."""
  return problem_fields.matmul_fields(problem, _SIZES, _RAGGED)


@functools.lru_cache(maxsize=4096)
def contraction_fields_of(
  problem: problems.ContractionProblem,
) -> records.Fields | None:
  """Returns a contraction's fields; None if a row cannot hold it."""
  return problem_fields.matmul_fields(problem, _SIZES, _CONTRACTION)


def problem_of(fields: records.Fields) -> problems.RaggedDotProblem:
  """Returns the ragged dot that has these fields, or raises ValueError."""
  return problems.RaggedDotProblem(
    **problem_fields.matmul_of(
      "the ragged dot", fields, _SIZES, _RAGGED, _RAGGED_WORDS
    )
  )


def contraction_problem_of(
  fields: records.Fields,
) -> problems.ContractionProblem:
  """Returns the contraction that has these fields, or raises ValueError."""
  return problems.ContractionProblem(
    **problem_fields.matmul_of(
      "the ragged contraction",
      fields,
      _SIZES,
      _CONTRACTION,
      _CONTRACTION_WORDS,
    )
  )
