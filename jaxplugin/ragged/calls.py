# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`Call`: one call of a ragged dot.

As of a `dot.calls.Call`, what needs only shapes and dtypes takes whatever has
them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any
from typing import Final

import numpy as np
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.dot import sides
from jaxplugin.ragged import problems

# The arrays of a call, in the order in which the primitive takes them.
ARRAYS: Final = (
  *("lhs", "rhs", "lhs_scale", "rhs_scale", "group_sizes"),
  *("global_scale", "bias", "global_power"),
)


class _Form(enum.Enum):
  """What stands for an array in `Call.form`."""

  ARRAY = "array"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """A call: its arrays, and everything else about it.

  Attributes:
    lhs: (m, k), contracting dimension 1.
    rhs: (groups, n, k), contracting dimension 2; or 1 in the gradient of lhs,
      which then is (m, n). Blocked along dimension 2 in either case. Values and
      scales of 8 bits may be bytes, as `prepare_weights` keeps stacks: to view
      all groups as floats would be a copy of them (`as_floats`).
    group_sizes: i32[groups].
    global_scale: f32[], f32[groups] or f32[m, 1], or None.
    global_power: f32 of its shape, multiplied after it: a power of two without
      a derivative.
    bias: a float[groups, columns], or None.
    preferred_element_type: dtype of the result.
    activation: as of `ragged_dot`.
    implementation: the one asked for, or None to choose.
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

  def replace(self, **changes: Any) -> Call:
    return dataclasses.replace(self, **changes)

  # Its arrays.

  def arrays(self) -> dict[str, Any]:
    """Those that are there, by their names in `ARRAYS`, in that order."""
    found = (
      *(self.lhs.values, self.rhs.values, self.lhs.scale, self.rhs.scale),
      *(self.group_sizes, self.global_scale, self.bias, self.global_power),
    )
    pairs = zip(ARRAYS, found, strict=True)
    return {name: x for name, x in pairs if x is not None}

  def flatten(self) -> list[Any]:
    return list(self.arrays().values())

  def with_arrays(self, **arrays: Any) -> Call:
    """The same call with other arrays; None takes one out."""
    changes: dict[str, Any] = {"lhs": {}, "rhs": {}}
    fields = {
      "lhs": ("lhs", "values"),
      "rhs": ("rhs", "values"),
      "lhs_scale": ("lhs", "scale"),
      "rhs_scale": ("rhs", "scale"),
    }
    for name, x in arrays.items():
      if name in fields:
        side, field = fields[name]
        changes[side][field] = x
      else:
        changes[name] = x
    changes["lhs"] = self.lhs.replace(**changes["lhs"])
    changes["rhs"] = self.rhs.replace(**changes["rhs"])
    return self.replace(**changes)

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
    """The same sums of products in f32, without what follows them."""
    return self.replace(
      preferred_element_type=np.dtype(np.float32),
      global_scale=None,
      global_power=None,
      bias=None,
      activation=None,
    )

  def before_activation(self) -> Call:
    """The same in f32, without its activation."""
    return self.replace(
      preferred_element_type=np.dtype(np.float32), activation=None
    )

  def in_usual_order(self) -> Call:
    """With values in order, and linear scales without padding."""
    return self.replace(
      lhs=_in_usual_order(self.lhs), rhs=_in_usual_order(self.rhs)
    )

  # Of shapes and dtypes.

  @property
  def num_rows(self) -> Any:
    return self.lhs.shape[0]

  @property
  def num_groups(self) -> Any:
    return self.rhs.shape[0]

  @property
  def columns(self) -> Any:
    """Of the product, before a gated activation halves them."""
    (column_dim,) = {1, 2} - set(self.rhs.contracting)
    return self.rhs.shape[column_dim]

  @property
  def is_gated(self) -> bool:
    return self.activation in problems.GATED

  @property
  def shape(self) -> tuple[Any, Any]:
    """Of the result."""
    columns = self.columns
    return self.num_rows, columns // 2 if self.is_gated else columns

  def problem(self) -> problems.RaggedProblem:
    """Reduces the call to the problem that implementations are chosen by."""
    _, n, k = self.rhs.shape
    kinds: tuple[problems.GlobalScale, ...] = ("scalar", "group", "row")
    scale = self.global_scale
    return problems.RaggedProblem(
      groups=_static(self.num_groups),
      m=_static(self.num_rows),
      n=_static(n),
      k=_static(k),
      lhs=self.lhs.problem(is_copied=True),
      rhs=self.rhs.problem(is_copied=True),
      out_dtype=self.preferred_element_type,
      is_along_blocks=self.rhs.contracting == (2,),
      global_scale="none" if scale is None else kinds[scale.ndim],
      has_global_power=self.global_power is not None,
      has_bias=self.bias is not None,
      activation=self.activation,
    )


def as_floats(side: sides.Side) -> sides.Side:
  """With values and scale of their dtypes, where they are bytes."""
  format = side.format
  if format is None:
    return side
  values, scale = side.values, side.scale
  if values.dtype == formats.PACKED and not format.is_fp4:
    values = lax.bitcast_convert_type(values, format.array_dtype)
  if scale.dtype == formats.PACKED:
    scale = lax.bitcast_convert_type(scale, format.scale_dtype)
  return side.replace(values=values, scale=scale)


def _in_usual_order(side: sides.Side) -> sides.Side:
  if side.scale_layout != layouts.LINEAR:
    side = as_floats(side)
  return side.in_usual_order().with_linear_scale()


def _static(size: Any) -> int | None:
  """A size, or None of a symbolic one."""
  return int(size) if isinstance(size, (int, np.integer)) else None
