# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Problems of the dot by short names, and the refusals of a decision."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from jaxplugin.core import decisions, formats
from jaxplugin.dot import problems

_AS_LHS: Final = object()


def operand(kind: Any = None, **fields: Any) -> problems.SideProblem:
  """An operand of a block format, or without one of a dtype, or in bf16."""
  if isinstance(kind, problems.SideProblem):
    return kind
  if isinstance(kind, formats.BlockFormat):
    return problems.SideProblem(
      **{"format": kind, "dtype": kind.array_dtype} | fields
    )
  dtype = np.dtype(formats.BF16 if kind is None else kind)
  return problems.SideProblem(format=None, dtype=dtype, **fields)


def problem(
  lhs: Any = formats.NVFP4, rhs: Any = _AS_LHS, **fields: Any
) -> problems.DotProblem:
  """A problem of two operands as `operand` takes them; rhs may be left out."""
  sizes = {"batch": 1, "m": 128, "n": 256, "k": 512}
  return problems.DotProblem(
    **{
      "lhs": operand(lhs),
      "rhs": operand(lhs if rhs is _AS_LHS else rhs),
      "out_dtype": np.dtype(np.float32),
      **sizes,
      **fields,
    }
  )


def reasons(decision: decisions.Decision) -> dict[str, str]:
  """Why each backend that was not chosen was not, by its name."""
  return {r.implementation: r.reason for r in decision.refusals}
