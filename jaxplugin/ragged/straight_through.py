# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ragged_dot` of operands with straight-through gradients.

`dot/straight_through.py` computes them for any matmul.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import quantization
from jaxplugin.dot import straight_through
from jaxplugin.ragged import calls, epilogue, groups, primitive
from jaxplugin.tables import resolution

_F32: Final = np.dtype(np.float32)


class RaggedArrays(NamedTuple):
  """The array arguments of `ragged_dot`, or their tangents."""

  lhs: Any
  rhs: Any
  group_sizes: Any
  bias: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedDot(straight_through.Matmul):
  """A call of `ragged_dot`, with the tuning tables of its forward pass."""

  overlay: resolution.Overlay | None

  def of_tangent(self, side: str) -> Self:
    if side == "lhs":
      return self
    # The requested backend may not support unquantized weights.
    function = functools.partial(self.function, implementation=None)
    return self.replace(function=function)

  def activated(self, arrays: RaggedArrays) -> jax.Array:
    before = self.replace(dtype=_F32, activation=None)
    result = straight_through.dot(before, arrays)
    result = epilogue.activate(result, self.activation)
    rows = result.shape[0]
    ends = groups.ends(arrays.group_sizes, rows)
    is_own = groups.of_rows(ends, rows)[:, None] < len(arrays.group_sizes)
    result = jnp.where(is_own, result, np.float32(0))
    return result.astype(self.dtype)

  def plain(self, arrays: RaggedArrays) -> jax.Array:
    lhs, rhs, sizes, _ = arrays
    call = calls.plain(lhs, rhs, sizes, 2, overlay=self.overlay)
    return primitive.bind(call).astype(self.dtype)

  def transpose(
    self, side: str, g: jax.Array, arrays: RaggedArrays
  ) -> jax.Array:
    sizes, overlay = arrays.group_sizes, self.overlay
    if side == "lhs":
      rhs = quantization.dequantize(arrays.rhs)
      return primitive.bind(calls.plain(g, rhs, sizes, 1, overlay=overlay))
    lhs = quantization.dequantize(arrays.lhs)
    return primitive.bind(
      calls.plain_contraction(g, lhs, sizes, overlay=overlay)
    )
