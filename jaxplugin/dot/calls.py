# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`Call`: one call of a block-scaled dot.

As of a `Side`, what needs only shapes and dtypes takes whatever has them.
`rules` has the rules that a call must keep.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable
from typing import Any
from typing import Final

import numpy as np

from jaxplugin.core import striding
from jaxplugin.dot import problems
from jaxplugin.dot import sides

# The arrays of a call, in the order in which the primitive takes them.
ARRAYS: Final = (
  *("lhs", "rhs", "lhs_scale", "rhs_scale"),
  *("global_scale", "bias", "residual", "global_power"),
)


class _Form(enum.Enum):
  """What stands for an array in `Call.form`."""

  ARRAY = "array"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """A call: its arrays, and everything else about it.

  Attributes:
    lhs, rhs: the operands.
    global_scale: f32. It and bias and residual have the rank of the result,
      each dimension either the result's or 1, except that a global_scale that
      is one number has rank 0.
    bias, residual: floats.
    global_power: f32 of global_scale's shape, what multiplies after it
      (`epilogue`): a power of two without a derivative.
    preferred_element_type: dtype of the result.
    highest_precision: apply the global scale in f32 whatever it costs.
    activation: None, "relu", "gelu" or "silu".
    implementation: the one asked for, or None to choose.
    padded_scales: whether scales may be larger than needed.
  """

  lhs: sides.Side
  rhs: sides.Side
  global_scale: Any = None
  bias: Any = None
  residual: Any = None
  global_power: Any = None
  preferred_element_type: np.dtype
  highest_precision: bool = False
  activation: problems.Activation | None = None
  implementation: str | None = None
  padded_scales: bool = False

  def replace(self, **changes: Any) -> Call:
    return dataclasses.replace(self, **changes)

  # Its arrays.

  def arrays(self) -> dict[str, Any]:
    """Those that are there, by their names in `ARRAYS`, in that order."""
    found = (
      *(self.lhs.values, self.rhs.values, self.lhs.scale, self.rhs.scale),
      *(self.global_scale, self.bias, self.residual, self.global_power),
    )
    pairs = zip(ARRAYS, found, strict=True)
    return {name: x for name, x in pairs if x is not None}

  def flatten(self) -> list[Any]:
    return list(self.arrays().values())

  def with_arrays(self, **arrays: Any) -> Call:
    """The same call with other arrays; None takes one out."""
    lhs: dict[str, Any] = {}
    rhs: dict[str, Any] = {}
    others: dict[str, Any] = {}
    fields = {
      "lhs": (lhs, "values"),
      "rhs": (rhs, "values"),
      "lhs_scale": (lhs, "scale"),
      "rhs_scale": (rhs, "scale"),
    }
    for name, x in arrays.items():
      changes, field = fields.get(name, (others, name))
      changes[field] = x
    return self.replace(
      lhs=self.lhs.replace(**lhs), rhs=self.rhs.replace(**rhs), **others
    )

  def form(self) -> Call:
    """The call without its arrays: hashable, equal where all else is."""
    return self.with_arrays(**dict.fromkeys(self.arrays(), _Form.ARRAY))

  def named(self, flat: Iterable[Any]) -> dict[str, Any]:
    """Items that belong to the call's arrays, by their names."""
    return dict(zip(self.arrays(), flat, strict=True))

  def filled(self, flat: Iterable[Any]) -> Call:
    """The call of which this is the `form`, with these arrays."""
    return self.with_arrays(**self.named(flat))

  # The same call otherwise.

  def bare(self) -> Call:
    """The same dot in f32, without global scale and epilogue."""
    return self.replace(
      preferred_element_type=np.dtype(np.float32),
      global_scale=None,
      bias=None,
      activation=None,
      residual=None,
      global_power=None,
    )

  def with_bytes(self) -> Call:
    """With FP4 values that come as words given as their bytes."""
    return self.replace(lhs=self.lhs.with_bytes(), rhs=self.rhs.with_bytes())

  def in_usual_order(self) -> Call:
    """With FP4 values that were interleaved put back in order."""
    return self.replace(
      lhs=self.lhs.in_usual_order(), rhs=self.rhs.in_usual_order()
    )

  def with_linear_scales(self) -> Call:
    """With linear scales without padding."""
    return self.replace(
      lhs=self.lhs.with_linear_scale(),
      rhs=self.rhs.with_linear_scale(),
      padded_scales=False,
    )

  # Of shapes and dtypes.

  @property
  def dimension_numbers(self) -> sides.DimensionNumbers:
    """As `lax.dot_general`'s, in tuples."""
    return (
      (self.lhs.contracting, self.rhs.contracting),
      (self.lhs.batch, self.rhs.batch),
    )

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the result: batch dimensions, then those of lhs, then those of rhs."""
    lhs, rhs = self.lhs.shape, self.rhs.shape
    return (
      *(lhs[d] for d in self.lhs.batch),
      *(lhs[d] for d in self.lhs.free),
      *(rhs[d] for d in self.rhs.free),
    )

  def problem(self) -> problems.DotProblem:
    """Reduces the call to the problem that implementations are chosen by."""
    lhs, rhs = self.lhs.shape, self.rhs.shape
    global_scale: problems.GlobalScale = "none"
    if self.global_scale is not None:
      global_scale = "array" if self.global_scale.ndim else "scalar"
    k = _product(lhs[d] for d in self.lhs.contracting)
    num_contracting = len(self.lhs.contracting)
    is_copied = striding.are_copied(
      k,
      (self.lhs.format, self.rhs.format),
      num_contracting=num_contracting,
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
      has_global_power=self.global_power is not None,
      highest_precision=self.highest_precision,
      has_bias=self.bias is not None,
      activation=self.activation,
      has_residual=self.residual is not None,
      num_contracting=num_contracting,
      blocked_k=self._blocked_k() if num_contracting > 1 else None,
      blocks_pair_up=len(positions) <= 1,
    )

  def _blocked_k(self) -> int | None:
    """Size of the blocked one of several contracting dimensions.

    That of rhs where the sides differ: kernels then see a dequantized lhs.
    """
    side = self.lhs if self.rhs.format is None else self.rhs
    assert side.axis is not None
    return _product([side.shape[side.axis]])


def _product(sizes: Iterable[Any]) -> int | None:
  sizes = tuple(sizes)
  if not all(isinstance(size, (int, np.integer)) for size in sizes):
    return None  # symbolic
  return math.prod(sizes)
