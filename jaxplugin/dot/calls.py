# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`DotCall`: one call of a block-scaled dot.

Members that need only shapes and dtypes (`shape`, `problem`, ...) support
arrays, tracers, abstract values and `ShapeDtypeStruct`s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, ClassVar, Final, Self

import jax
import numpy as np
from jax.extend import core as extend_core
from jax.sharding import NamedSharding

from jaxplugin.core import blocking
from jaxplugin.dot import problems, sides
from jaxplugin.operation import primitive
from jaxplugin.tables import resolution

# `dot.primitive` registers the rules of this primitive.
block_scaled_dot_p: Final = extend_core.Primitive("block_scaled_dot")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotCall(primitive.OperationCall):
  """The arrays and parameters of a block-scaled dot.

  Attributes:
    lhs, rhs: the operands.
    global_scale: f32[], or f32 that broadcasts to the result and has its rank.
    bias, residual: floats that broadcast to the result and have its rank.
    global_power: power of two, f32 of global_scale's shape, multiplied after
      global_scale (`epilogue`). It has no derivative.
    first_global_scale, second_global_scale: f32[], the factors of
      global_scale * global_power if these are the product of two numbers. A
      backend may use the factors instead. They have no derivative. In a call
      that is lowered global_scale and global_power may be None
      (`with_scales_alone`).
    preferred_element_type: dtype of the result.
    highest_precision: whether every backend must apply the global scale in f32.
    fastest_precision: whether sums over a block may have fewer bits than f32,
      and rows may be quantized to int8.
    activation: None, "relu", "gelu" or "silu".
    implementation: the requested backend, or None to choose.
    padded_scales: whether scales may be larger than needed.
    overlay: tuning tables in effect when the call was traced.
    out_sharding: requested sharding of the result, on a mesh with explicit
      axes, or None.
    reduce_dtype: dtype of each device's partial sum, which includes the global
      scale. If None, partial sums are f32 and the global scale multiplies the
      total.
  """

  lhs: sides.Side
  rhs: sides.Side
  global_scale: Any = None
  bias: Any = None
  residual: Any = None
  global_power: Any = None
  first_global_scale: Any = None
  second_global_scale: Any = None
  preferred_element_type: np.dtype
  highest_precision: bool = False
  fastest_precision: bool = False
  activation: problems.Activation | None = None
  implementation: str | None = None
  padded_scales: bool = False
  overlay: resolution.Overlay | None = None
  out_sharding: NamedSharding | None = None
  reduce_dtype: np.dtype | None = None

  PRIMITIVE = block_scaled_dot_p
  # Arrays from which values and scales were computed. Backends may read them
  # because that is faster; the result does not depend on them.
  ORIGINS: ClassVar[dict[str, tuple[str, ...]]] = {
    "first_global_scale": ("first_global_scale",),
    "second_global_scale": ("second_global_scale",),
  } | {
    f"{side}_{name}": (side, name)
    for side, names in (
      ("rhs", ("stack", "stack_scale", "layer")),
      ("lhs", ("source", "source_global_scale", "square_scale")),
      ("rhs", ("source", "source_global_scale", "square_scale")),
    )
    for name in names
  }
  ARRAYS = (
    primitive.paths_of_two_sides(
      "global_scale", "bias", "residual", "global_power"
    )
    | ORIGINS
  )

  # Conversions.

  def replace(self, **changes: Any) -> Self:
    """Replaces fields; a new global scale drops its old factors."""
    if not changes.keys().isdisjoint(("global_scale", "global_power")):
      changes = {
        "first_global_scale": None,
        "second_global_scale": None,
      } | changes
    return super().replace(**changes)

  def scales_in_result(self) -> list[jax.Array]:
    """Returns the sides' global scales, reshaped to broadcast to the result."""
    scales = []
    offset = len(self.lhs.batch)
    for side in (self.lhs, self.rhs):
      positions = {d: i for i, d in enumerate(side.batch)}
      positions |= {d: i + offset for i, d in enumerate(side.free)}
      offset += len(side.free)
      scales.append(side.global_scale_in(positions, len(self.shape)))
    return [scale for scale in scales if scale is not None]

  def bare(self) -> DotCall:
    """Returns the same dot in f32, without global scale and epilogue."""
    return self.replace(
      preferred_element_type=np.dtype(np.float32),
      global_scale=None,
      bias=None,
      activation=None,
      residual=None,
      global_power=None,
    )

  def without_origins(self) -> DotCall:
    """Returns the call without the origins of sides and global scales."""
    call = self.without_origins_of_sides()
    # Without a product, the two factors are the call's only global scales.
    if self.global_scale is None:
      return call
    return call.replace(first_global_scale=None, second_global_scale=None)

  def without_origins_of_sides(self) -> DotCall:
    """Returns the call without the origins of its sides."""
    return self.with_sides(sides.Side.without_origin)

  def with_scales_alone(self) -> DotCall:
    """Replaces the product of two global scales by its factors, if known."""
    if self.first_global_scale is None:
      return self
    return self.replace(
      global_scale=None,
      global_power=None,
      first_global_scale=self.first_global_scale,
      second_global_scale=self.second_global_scale,
    )

  def joined(self) -> DotCall:
    """Returns the call with its contracting dimensions merged, if possible.

    Operands with the contracting dimensions last, as `quantize` kernels write
    them, are not moved in memory.
    """
    if len(self.lhs.contracting) < 2:
      return self
    lhs, rhs = self.lhs.joined(), self.rhs.joined()
    if lhs is None or rhs is None:
      return self
    return self.replace(lhs=lhs, rhs=rhs)

  def dense_sides(self) -> tuple[sides.Side, sides.Side]:
    """Returns both sides row-major, [batch, rows, k], with contiguous blocks.

    The blocked contracting dimension comes last in k. It is padded with zeros
    to whole blocks if k merges several dimensions, and to an even size for FP4.
    If the sides are blocked along different dimensions, lhs is dequantized to
    f32, whose subnormals XLA:CPU flushes. Scales are linear, without padding.
    """
    lhs, rhs = self.lhs.with_linear_scale(), self.rhs.with_linear_scale()
    positions = (lhs.blocked_position, rhs.blocked_position)
    if None not in positions and positions[0] != positions[1]:
      lhs = lhs.plain()
    blocked = lhs.blocked_position
    if blocked is None:
      blocked = rhs.blocked_position
    assert blocked is not None
    size = problems.padded_size(
      lhs.shape[lhs.contracting[blocked]],
      (lhs.format, rhs.format),
      num_contracting=len(lhs.contracting),
    )
    dense = [
      side.padded(side.contracting[blocked], size).merged(blocked)
      for side in (lhs, rhs)
    ]
    return dense[0], dense[1]

  # Shapes and dtypes.

  @property
  def dimension_numbers(self) -> sides.DimensionNumbers:
    """Dimension numbers of `lax.dot_general`, in tuples."""
    return (
      (self.lhs.contracting, self.rhs.contracting),
      (self.lhs.batch, self.rhs.batch),
    )

  @property
  def has_epilogue(self) -> bool:
    """Whether anything but a cast follows the sum of products."""
    return self.activation is not None or any(
      x is not None
      for x in (
        self.global_scale,
        self.first_global_scale,
        self.bias,
        self.residual,
      )
    )

  @property
  def is_of_layer(self) -> bool:
    """Whether rhs is a layer that backends may read from its stack."""
    return self.rhs.is_layer and not self.lhs.batch

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the result: [batch..., lhs's free..., rhs's free...]."""
    lhs, rhs = self.lhs.shape, self.rhs.shape
    return (
      *(lhs[d] for d in self.lhs.batch),
      *(lhs[d] for d in self.lhs.free),
      *(rhs[d] for d in self.rhs.free),
    )

  def problem(self) -> problems.DotProblem:
    """Returns the problem that chooses a backend.

    It describes the call after `joined`, which is the call that is emitted.
    """
    return self.joined()._problem()

  def _problem(self) -> problems.DotProblem:
    lhs, rhs = self.lhs.shape, self.rhs.shape
    global_scale: problems.GlobalScale = "none"
    if self.global_scale is not None:
      global_scale = "array" if self.global_scale.ndim else "scalar"
    elif self.first_global_scale is not None:
      global_scale = "scalar"
    k = _product(lhs[d] for d in self.lhs.contracting)
    num_contracting = len(self.lhs.contracting)
    is_copied = problems.are_copied(
      k, (self.lhs.format, self.rhs.format), num_contracting=num_contracting
    )
    positions = {self.lhs.blocked_position, self.rhs.blocked_position} - {None}
    return problems.DotProblem(
      batch=_product(lhs[d] for d in self.lhs.batch),
      m=_product(lhs[d] for d in self.lhs.free),
      n=_product(rhs[d] for d in self.rhs.free),
      k=k,
      lhs=self.lhs.problem(is_copied=is_copied),
      rhs=self.rhs.problem(is_copied=is_copied),
      out_dtype=self.preferred_element_type,
      global_scale=global_scale,
      has_global_power=self.global_power is not None
      or self.first_global_scale is not None,
      highest_precision=self.highest_precision,
      fastest_precision=self.fastest_precision,
      has_bias=self.bias is not None,
      activation=self.activation,
      has_residual=self.residual is not None,
      has_array_bias=self.has_array_bias,
      num_contracting=num_contracting,
      blocked_k=self._blocked_k() if num_contracting > 1 else None,
      blocks_pair_up=len(positions) <= 1,
    )

  @property
  def has_array_bias(self) -> bool:
    """Whether the bias varies over dimensions that rhs does not have."""
    if self.bias is None:
      return False
    num_n = len(self.rhs.free)
    return any(n != 1 for n in self.bias.shape[: self.bias.ndim - num_n])

  def _blocked_k(self) -> int | None:
    """Returns the size of the blocked contracting dimension.

    If the sides are blocked along different dimensions, it is the size for rhs,
    because kernels then read a dequantized lhs.
    """
    side = self.lhs if self.rhs.format is None else self.rhs
    assert side.axis is not None
    return _product([side.shape[side.axis]])


def _product(sizes: Iterable[Any]) -> int | None:
  sizes = tuple(sizes)
  if not blocking.are_static(sizes):
    return None  # symbolic
  return math.prod(sizes)
