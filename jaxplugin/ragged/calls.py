# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`Call` is one call of a ragged dot, `Contraction` one of a contraction.

Properties of shapes and dtypes also work if the arrays are abstract.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from typing import Final

import numpy as np
from jax import lax
from jax.extend import core as extend_core

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.dot import sides
from jaxplugin.operation import static_call
from jaxplugin.ragged import problems
from jaxplugin.tables import resolution

# Their rules are registered in `primitive`.
ragged_dot_p: Final = extend_core.Primitive("block_scaled_ragged_dot")
ragged_contraction_p: Final = extend_core.Primitive(
  "block_scaled_ragged_contraction"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(static_call.Call):
  """A call: its arrays, and everything else about it.

  Attributes:
    lhs: (m, k), contracting dimension 1.
    rhs: (groups, n, k), contracting dimension 2, and blocked along it. In the
      gradient of lhs, which is then (m, n), the contracting dimension is 1.
      Values and scales of 8 bits may be bytes, as in a stack that
      `prepare_weights` returns, because a view of all groups as floats would
      copy them (`as_floats`). Only gradients and training have an unquantized
      rhs.
    group_sizes: i32[groups].
    global_scale: f32[], f32[groups] or f32[m, 1], or None.
    global_power: f32 of global_scale's shape, which multiplies after it. It is
      a power of two without a derivative.
    bias: a float[groups, columns], or None.
    preferred_element_type: dtype of the result.
    activation: as for `ragged_dot`.
    implementation: the requested backend, or None to choose.
    overlay: the tuning tables that the call was traced under.
    reduce_dtype: as for `dot.calls.Call`, if k is sharded. A sum over devices
      with other groups only adds zeros, so the result's dtype holds it.
  """

  lhs: sides.Side
  rhs: sides.Side
  group_sizes: Any
  global_scale: Any = None
  global_power: Any = None
  bias: Any = None
  preferred_element_type: np.dtype
  activation: problems.Activation | None = None
  implementation: str | None = None
  overlay: resolution.Overlay | None = None
  reduce_dtype: np.dtype | None = None

  ARRAYS = static_call.paths_of_two_sides(
    "group_sizes", "global_scale", "bias", "global_power"
  )
  PRIMITIVE = ragged_dot_p

  # The same call otherwise.

  def bare(self) -> Call:
    """Returns the call in f32, with only the sums of products."""
    return self.replace(
      preferred_element_type=np.dtype(np.float32),
      global_scale=None,
      global_power=None,
      bias=None,
      activation=None,
    )

  def before_activation(self) -> Call:
    """Returns the call in f32, without its activation."""
    return self.replace(
      preferred_element_type=np.dtype(np.float32), activation=None
    )

  def steps(self) -> tuple[Call, Call]:
    """Splits the call if each device has a part of k.

    Returns:
      (the call for a device's part, a call with the epilogue of the sum).
    """
    if self.reduce_dtype is None:
      return self.bare(), self
    part = self.replace(
      preferred_element_type=self.reduce_dtype, bias=None, activation=None
    )
    return part, self.replace(global_scale=None, global_power=None)

  def in_usual_order(self) -> Call:
    """With values in order, and linear scales without padding."""
    return self.replace(
      lhs=in_usual_order(self.lhs), rhs=in_usual_order(self.rhs)
    )

  # Shapes and dtypes.

  @property
  def num_rows(self) -> Any:
    return self.lhs.shape[0]

  @property
  def num_groups(self) -> Any:
    return self.rhs.shape[0]

  @property
  def columns(self) -> Any:
    """Number of columns before a gated activation halves them."""
    (column_dim,) = {1, 2} - set(self.rhs.contracting)
    return self.rhs.shape[column_dim]

  @property
  def is_gated(self) -> bool:
    return self.activation in problems.GATED

  @property
  def shape(self) -> tuple[Any, Any]:
    """Shape of the result."""
    columns = self.columns
    return self.num_rows, columns // 2 if self.is_gated else columns

  def problem(self) -> problems.RaggedProblem:
    """Reduces the call to the problem that implementations are chosen by."""
    _, n, k = self.rhs.shape
    kinds: tuple[problems.GlobalScale, ...] = ("scalar", "group", "row")
    scale = self.global_scale
    return problems.RaggedProblem(
      groups=problems.static(self.num_groups),
      m=problems.static(self.num_rows),
      n=problems.static(n),
      k=problems.static(k),
      lhs=self.lhs.problem(is_copied=True),
      rhs=self.rhs.problem(is_copied=True),
      out_dtype=self.preferred_element_type,
      is_along_blocks=self.rhs.contracting == (2,),
      global_scale="none" if scale is None else kinds[scale.ndim],
      has_global_power=self.global_power is not None,
      has_bias=self.bias is not None,
      activation=self.activation,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contraction(static_call.Call):
  """A call that contracts the rows of each group.

    result[g] = sum over the rows i of group g of outer(lhs[i], rhs[i])

  Attributes:
    lhs: (m, n), contracting dimension 0, blocked along it or unquantized.
    rhs: (m, k), the same.
    group_sizes: i32[groups].
    global_scale: f32[], or f32[1, n or 1, k or 1], or None.
    global_power: f32 of global_scale's shape, which multiplies after it. It is
      a power of two without a derivative.
    preferred_element_type: dtype of the result, (groups, n, k).
    implementation: the requested backend, or None to choose.
    overlay: the tuning tables that the call was traced under.
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

  ARRAYS = static_call.paths_of_two_sides(
    "group_sizes", "global_scale", "global_power"
  )
  PRIMITIVE = ragged_contraction_p

  def bare(self) -> Contraction:
    """Returns the call in f32, with only the sums of products."""
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
    """Shape of the result."""
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


def plain(
  lhs: Any, rhs: Any, group_sizes: Any, contracting: int, **options: Any
) -> Call:
  """Returns the ragged dot of unquantized arrays, in f32 by default.

  Args:
    lhs, rhs, group_sizes: arrays.
    contracting: dimension of rhs, 1 or 2.
    **options: fields of `Call`. The default `overlay` is that of an enclosing
      `tuning`.
  """
  return Call(
    lhs=sides.Side(name="lhs", values=lhs, contracting=(1,)),
    rhs=sides.Side(name="rhs", values=rhs, contracting=(contracting,)),
    group_sizes=group_sizes,
    **_with_defaults(options),
  )


def plain_contraction(
  lhs: Any, rhs: Any, group_sizes: Any, **options: Any
) -> Contraction:
  """Returns the contraction of unquantized arrays, as `plain` does."""
  return Contraction(
    lhs=sides.Side(name="lhs", values=lhs, contracting=(0,)),
    rhs=sides.Side(name="rhs", values=rhs, contracting=(0,)),
    group_sizes=group_sizes,
    **_with_defaults(options),
  )


def _with_defaults(options: dict[str, Any]) -> dict[str, Any]:
  return {
    "preferred_element_type": np.dtype(np.float32),
    "overlay": resolution.overlay(),
  } | options


def in_usual_order(side: sides.Side) -> sides.Side:
  """Returns the call with values in order and linear scales."""
  if side.scale_layout != layouts.LINEAR:
    side = as_floats(side)  # bytes cannot be unswizzled
  return side.in_usual_order().with_linear_scale()


def as_floats(side: sides.Side) -> sides.Side:
  """Returns a side with bytes viewed as the dtypes of its format."""
  format = side.format
  if format is None:
    return side
  values, scale = side.values, side.scale
  if values.dtype == formats.PACKED and not format.is_fp4:
    values = lax.bitcast_convert_type(values, format.array_dtype)
  if scale.dtype == formats.PACKED:
    scale = lax.bitcast_convert_type(scale, format.scale_dtype)
  return side.replace(values=values, scale=scale)
