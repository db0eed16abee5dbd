# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The xla implementation: one used group after the other, in tiles of rows.

`lax.ragged_dot_general` masks where it has no kernel: it multiplies as many
copies of an operand as there are groups. This multiplies each row once, and
what a group's last tile has too much.
"""

from __future__ import annotations

import functools
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.core import decisions
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot import epilogue
from jaxplugin.jaxext import jax_private
from jaxplugin.ragged import groups
from jaxplugin.ragged import problems
from jaxplugin.ragged.contraction import calls
from jaxplugin.tables import fitting

_LOOP: Final = (
  "a loop over the groups that have rows, in tiles of {tile} rows; surplus"
  " rows of a group's last tile are multiplied and discarded"
)
_DEQUANTIZED: Final = "writes whole f32 or bf16 copies of block-scaled operands"
_HOST: Final = (
  "the host decides each step of the loop, so it waits for the device"
)

# Rows that a step multiplies at once. Each step reads and writes the group's
# sums. On two cores of Zen 4 tiles of 64 and 128 rows are the best, for groups
# of 128 to 512 rows and sums of 512 x 1024 and more (2026-11).
_MIN_TILE: Final = 16
_MAX_TILE: Final = 128


def _rank(target: targets.Target) -> int:
  """After everything that reads the quantized bytes."""
  del target
  return 100


def supports(
  problem: problems.ContractionProblem, target: targets.Target
) -> decisions.Unsupported | None:
  """Serves every problem on every target."""
  del problem, target
  return None


def plan(
  problem: problems.ContractionProblem, target: targets.Target
) -> decisions.Plan:
  """The global scale is a multiply of its own."""
  notes = [_LOOP.format(tile=_tile_rows(problem))]
  if problem.lhs.format is not None or problem.rhs.format is not None:
    notes.append(_DEQUANTIZED)
  if target.platform != "cpu":
    notes.append(_HOST)
  has_scale = problem.global_scale != "none"
  return decisions.Plan(
    global_scale="separate" if has_scale else "none", notes=tuple(notes)
  )


def emit(
  call: calls.Contraction,
  problem: problems.ContractionProblem,
  target: targets.Target,
) -> jax.Array:
  """Sums of products in f32, times the global scale, cast."""
  if problem.is_empty:
    return jnp.zeros(call.shape, call.preferred_element_type)
  dtype: Any = np.dtype(np.float32)
  if target.platform != "cpu" and (
    call.lhs.exact_in_bf16 and call.rhs.exact_in_bf16
  ):
    dtype = formats.BF16
  tile = _tile_rows(problem)
  ends = groups.ends(call.group_sizes, call.num_rows)
  starts = groups.starts(ends)
  used, count = groups.used(ends)
  # A tile that begins at a group's last row ends beyond all rows.
  lhs, rhs = (
    jnp.pad(x.astype(dtype), ((0, tile), (0, 0)))
    for x in (calls.rows(call.lhs), calls.rows(call.rhs))
  )
  multiply = functools.partial(
    lax.dot_general,
    dimension_numbers=(((0,), (0,)), ((), ())),
    precision=(
      lax.Precision.DEFAULT if dtype == formats.BF16 else lax.Precision.HIGHEST
    ),
    preferred_element_type=jnp.float32,
  )

  def zeros(shape: tuple[Any, ...], dtype: Any) -> jax.Array:
    return jax_private.varying_as(jnp.zeros(shape, dtype), lhs)

  def group(i: jax.Array, result: jax.Array) -> jax.Array:
    index = used[i]
    start, end = starts[index], ends[index]

    def step(j: jax.Array, sums: jax.Array) -> jax.Array:
      row = start + j * tile
      # Zeros in both: 0 * NaN of others' rows would get into the sums.
      is_own = (row + jnp.arange(tile, dtype=jnp.int32) < end)[:, None]
      tiles = (
        jnp.where(is_own, lax.dynamic_slice_in_dim(x, row, tile), 0)
        for x in (lhs, rhs)
      )
      return sums + multiply(*tiles)

    sums = zeros(call.shape[1:], jnp.float32)
    steps = (end - start + tile - 1) // tile
    sums = lax.fori_loop(0, steps, step, sums)
    sums = _scaled(sums, call).astype(call.preferred_element_type)
    return lax.dynamic_update_slice_in_dim(result, sums[None], index, 0)

  result = zeros(call.shape, call.preferred_element_type)
  return lax.fori_loop(0, count, group, result)


def _tile_rows(problem: problems.ContractionProblem) -> int:
  """A power of two near the rows that a group has on average."""
  if problem.m is None or not problem.groups:
    return _MAX_TILE
  average = -(-problem.m // problem.groups)
  tile = 1 << max(average - 1, 0).bit_length()
  return min(max(tile, _MIN_TILE), _MAX_TILE)


def _scaled(sums: jax.Array, call: calls.Contraction) -> jax.Array:
  """f32[n, k] times the call's global scale."""
  scale, power = (
    x if x is None or not x.ndim else x[0]
    for x in (call.global_scale, call.global_power)
  )
  if scale is None:
    return sums
  return epilogue.multiply(sums, scale, power)


BACKEND: Final[decisions.Backend[problems.ContractionProblem]] = (
  decisions.Backend(
    name="xla",
    summary="dequantize and sum each used group's tiles in XLA operations",
    rank=_rank,
    supports=supports,
    plan=plan,
    emit=emit,
    is_portable=True,
    tunable=decisions.Tunable(source=fitting.jaxlib_source),
  )
)
