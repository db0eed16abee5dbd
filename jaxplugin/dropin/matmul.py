# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The operator `@` of block-scaled arrays."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp

from jaxplugin import dot
from jaxplugin.arrays import scaled_array
from jaxplugin.dot import calls

WHO: Final = "ScaledArray @"


def matmul(lhs: Any, rhs: Any) -> jax.Array:
  """NumPy's matmul of the dequantized arrays; see `ScaledArray.__matmul__`."""
  lhs, rhs = dot.as_operand("lhs", lhs), dot.as_operand("rhs", rhs)
  shapes = f"{tuple(lhs.shape)} and {tuple(rhs.shape)}"
  if lhs.ndim == 0 or rhs.ndim == 0:
    raise TypeError(f"{WHO}: both sides must have rank 1 or more, got {shapes}")
  lhs_k, rhs_k = lhs.ndim - 1, max(rhs.ndim - 2, 0)
  if lhs.shape[lhs_k] != rhs.shape[rhs_k]:
    names = ("the left side", "the right side")
    remedy = calls.sizes_remedy(lhs, rhs, (lhs_k, rhs_k), names=names)
    raise TypeError(
      f"{WHO}: the last size of the left side must equal the second to last"
      " size of the right side, got"
      f" {shapes}{remedy or '; for weights (n, k) write x @ w.T'}"
    )
  for side, operand, k in (("left", lhs, lhs_k), ("right", rhs, rhs_k)):
    if (
      isinstance(operand, scaled_array.ScaledArray)
      and 0 not in operand.shape
      and operand.axis != k
      and not operand.format.is_square
    ):
      raise TypeError(
        f"{WHO}: the {side} side must be blocked along dimension {k}, which is"
        f" contracted, got {operand!r} blocked along dimension {operand.axis};"
        f" quantize it with axis={k}, or dequantize it"
      )
  lhs_lead, rhs_lead = lhs.shape[:-2], rhs.shape[:-2]
  if lhs_lead and rhs_lead and lhs_lead != rhs_lead:
    raise NotImplementedError(
      f"{WHO}: leading dimensions must be equal, or one side must have none,"
      f" got {shapes}; broadcast one, or call block_scaled_dot"
    )
  batch: tuple[int, ...] = ()
  if lhs_lead and rhs_lead:
    batch = tuple(range(len(lhs_lead)))
  result = dot.block_scaled_dot(
    lhs,
    rhs,
    dimension_numbers=(((lhs_k,), (rhs_k,)), (batch, batch)),
    preferred_element_type=jnp.float32,
  )
  if rhs_lead and not batch and lhs.ndim == 2:
    # (m, k) x (..., k, n): rows come after the leading dimensions.
    return jnp.moveaxis(result, 0, -2)
  return result


scaled_array.provide(matmul=matmul)
