# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Matmuls of experts that are written without this package.

Rows x (rows, k) are sorted by expert. Weights w are (experts, n, k), and sizes
i32[experts] has the number of rows of each. Results are f32[rows, n].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax

_LAST: Final = (((1,), (1,)), ((), ()))
_RAGGED: Final = lax.RaggedDotDimensionNumbers(
  dot_dimension_numbers=(((1,), (2,)), ((), ())),
  lhs_ragged_dimensions=[0],
  rhs_group_dimensions=[0],
)
# Number of rows of a step of `scan`.
_MIN_TILE: Final = 8
_MAX_TILE: Final = 128


def _precision(x: jax.Array) -> Any:
  return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
  """Contracts the last dimensions of x and w."""
  return lax.dot_general(
    x,
    w,
    _LAST,
    precision=_precision(x),
    preferred_element_type=jnp.float32,
  )


def by_ragged_dot(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
  """Calls one operation of JAX, which multiplies all rows with all experts."""
  return lax.ragged_dot_general(
    x,
    w,
    sizes,
    _RAGGED,
    precision=_precision(x),
    preferred_element_type=jnp.float32,
  )


def by_loop(
  x: jax.Array, weights: Sequence[jax.Array], *, sizes: Sequence[int]
) -> jax.Array:
  """Computes a dot for each used expert, with static sizes.

  Args:
    x: rows.
    weights: a separate array (n, k) for each used expert.
    sizes: number of rows of each used expert.
  """
  results, row = [], 0
  for w, size in zip(weights, sizes, strict=True):
    results.append(_dot(x[row : row + size], w))
    row += size
  return jnp.concatenate(results)


def by_scan(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
  """Loops over the used experts, with dynamic slices of rows and weights."""
  num_rows, experts = len(x), len(w)
  average = -(-num_rows // experts)
  tile = 1 << max(average - 1, 0).bit_length()
  tile = min(max(tile, _MIN_TILE), _MAX_TILE)
  ends = jnp.cumsum(sizes)
  starts = ends - sizes
  (used,) = jnp.nonzero(sizes, size=min(experts, num_rows))
  padded = jnp.pad(x, ((0, tile), (0, 0)))

  def expert(i: jax.Array, result: jax.Array) -> jax.Array:
    e = used[i]
    own = lax.dynamic_index_in_dim(w, e, keepdims=False)

    def step(j: jax.Array, result: jax.Array) -> jax.Array:
      row = starts[e] + j * tile
      new = _dot(lax.dynamic_slice_in_dim(padded, row, tile), own)
      old = lax.dynamic_slice_in_dim(result, row, tile)
      is_own = row + jnp.arange(tile) < ends[e]
      new = jnp.where(is_own[:, None], new, old)
      return lax.dynamic_update_slice_in_dim(result, new, row, 0)

    return lax.fori_loop(0, (sizes[e] + tile - 1) // tile, step, result)

  result = jnp.zeros((num_rows + tile, w.shape[1]), jnp.float32)
  return lax.fori_loop(0, jnp.sum(sizes > 0), expert, result)[:num_rows]


def by_take(x: jax.Array, w: jax.Array, of_row: jax.Array) -> jax.Array:
  """Multiplies each row with a copy of its expert `of_row`, i32[rows]."""
  return jnp.einsum(
    "rk,rnk->rn",
    x,
    jnp.take(w, of_row, axis=0),
    precision=_precision(x),
    preferred_element_type=jnp.float32,
  )
