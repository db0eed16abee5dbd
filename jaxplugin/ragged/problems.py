# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Descriptions of ragged dots and contractions that choose a backend."""

from __future__ import annotations

import dataclasses
from typing import Any, Final, Literal, get_args

import numpy as np

from jaxplugin.core import decisions
from jaxplugin.dot import problems

WHO: Final = "ragged_dot"
CONTRACTION_WHO: Final = "ragged_dot_general"

Activation = Literal["relu", "gelu", "silu", "swiglu", "swigluoai"]
GATED: Final = ("swiglu", "swigluoai")
ACTIVATIONS: Final = (*problems.ACTIVATIONS, *GATED)
# "scalar" is one global scale, "group" and "row" one for each group or row.
GlobalScale = Literal["none", "scalar", "group", "row"]
GLOBAL_SCALES: Final = get_args(GlobalScale)


def static(size: Any) -> int | None:
  """Returns a size as an int, or None if it is symbolic."""
  return int(size) if isinstance(size, (int, np.integer)) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Problem:
  """Fields of `RaggedDotProblem` and `ContractionProblem`.

  Attributes:
    groups, m, n, k: sizes. None is a symbolic size.
    lhs, rhs: the operands.
    out_dtype: dtype of the result.
  """

  groups: int | None
  m: int | None
  n: int | None
  k: int | None
  lhs: problems.SideProblem
  rhs: problems.SideProblem
  out_dtype: np.dtype

  def __str__(self) -> str:
    sizes = ("groups", "m", "n", "k")
    return problems.matmul_text(self, self.out_dtype, sizes)

  @property
  def sizes_are_static(self) -> bool:
    return None not in (self.groups, self.m, self.n, self.k)

  @property
  def is_empty(self) -> bool:
    return 0 in (self.groups, self.m, self.n, self.k)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedDotProblem(_Problem):
  """A ragged dot, reduced to the facts that choose a backend.

  lhs is [m, k] and a group's weight [n, k].

  Attributes:
    is_along_blocks: whether rhs is contracted along its blocked dimension.
      False in the gradient of lhs.
    global_scale: kind of the global scale.
    has_global_power: whether the global scale is two factors (`dot.epilogue`).
    has_bias, activation: the epilogue.
    fastest_precision: whether the call has precision="fastest".
    reads_m: as for `dot.problems.DotProblem`.
  """

  is_along_blocks: bool = True
  global_scale: GlobalScale = "none"
  has_global_power: bool = False
  has_bias: bool = False
  activation: Activation | None = None
  fastest_precision: bool = False
  reads_m: bool = False

  @property
  def by_kernel(self) -> decisions.Application:
    """How kernels apply the global scale: they do not fuse one for each row."""
    if self.global_scale == "none":
      return "none"
    return "separate" if self.global_scale == "row" else "fused"

  @property
  def blocks_pair_up(self) -> bool:
    """As for `dot.problems.DotProblem`."""
    return self.is_along_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContractionProblem(_Problem):
  """A ragged contraction, reduced to the facts that choose a backend.

  lhs is [m, n], rhs [m, k], and the result of a group [n, k].

  Attributes:
    global_scale: kind of the global scale. "array" varies over the result.
  """

  global_scale: Literal["none", "scalar", "array"] = "none"

  def __str__(self) -> str:
    return f"{super().__str__()}, contracting m by groups"


Problem = RaggedDotProblem | ContractionProblem
