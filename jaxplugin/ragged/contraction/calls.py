# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`Contraction`: one call of a ragged contraction."""

from __future__ import annotations

import dataclasses
from typing import Any
from typing import ClassVar
from typing import Final

import numpy as np
from jax.extend import core as extend_core

from jaxplugin.core import forms
from jaxplugin.dot import sides
from jaxplugin.ragged import problems
from jaxplugin.tables import resolution

# Its rules are registered in `primitive`.
ragged_contraction_p: Final = extend_core.Primitive(
  "block_scaled_ragged_contraction"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contraction(forms.Call):
  """A call: its arrays, and everything else about it.

  Attributes:
    lhs: (m, n), contracting dimension 0, blocked along it or plain.
    rhs: (m, k), likewise.
    group_sizes: i32[groups].
    global_scale: f32[], or f32[1, n or 1, k or 1], or None.
    global_power: f32 of its shape, multiplied after it: a power of two without
      a derivative.
    preferred_element_type: dtype of the result, (groups, n, k).
    implementation: the one asked for, or None to choose.
    overlay: the tables of measured choices that it was traced under.
    reduce_dtype: dtype of a device's part of sums over devices; None is f32.
  """

  lhs: sides.Side
  rhs: sides.Side
  group_sizes: Any
  global_scale: Any = None
  global_power: Any = None
  preferred_element_type: np.dtype
  implementation: str | None = None
  overlay: resolution.Overlay | None = None
  reduce_dtype: np.dtype | None = None

  ARRAYS = forms.of_two_sides("group_sizes", "global_scale", "global_power")
  PRIMITIVE: ClassVar = ragged_contraction_p

  def bare(self) -> Contraction:
    """The same sums of products in f32."""
    return self.replace(
      preferred_element_type=np.dtype(np.float32),
      global_scale=None,
      global_power=None,
    )

  @property
  def num_rows(self) -> Any:
    return self.lhs.shape[0]

  @property
  def num_groups(self) -> Any:
    return self.group_sizes.shape[0]

  @property
  def shape(self) -> tuple[Any, Any, Any]:
    """Of the result."""
    return self.num_groups, self.lhs.shape[1], self.rhs.shape[1]

  def problem(self) -> problems.ContractionProblem:
    """Reduces the call to the problem that implementations are chosen by."""
    groups, n, k = map(problems.static, self.shape)
    scale = self.global_scale
    return problems.ContractionProblem(
      groups=groups,
      m=problems.static(self.num_rows),
      n=n,
      k=k,
      lhs=self.lhs.problem(is_copied=True),
      rhs=self.rhs.problem(is_copied=True),
      out_dtype=self.preferred_element_type,
      global_scale=(
        "none" if scale is None else "array" if scale.ndim else "scalar"
      ),
    )


def plain(lhs: Any, rhs: Any, group_sizes: Any, **options: Any) -> Contraction:
  """The contraction of plain arrays, in f32 unless options say another.

  Of an enclosing `tuning`, unless options have the overlay of another call.
  """
  lhs_side, rhs_side = (
    sides.Side(name=name, values=x, contracting=(0,))
    for name, x in (("lhs", lhs), ("rhs", rhs))
  )
  options.setdefault("preferred_element_type", np.dtype(np.float32))
  options.setdefault("overlay", resolution.overlay())
  return Contraction(
    lhs=lhs_side, rhs=rhs_side, group_sizes=group_sizes, **options
  )


def rows(side: sides.Side) -> Any:
  """f32 of a side that is block-scaled; a plain one as it is."""
  return side.in_usual_order().with_linear_scale().dequantized()
