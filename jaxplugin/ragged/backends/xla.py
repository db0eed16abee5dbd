# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The xla backends of the ragged dot and the contraction, on every platform.

Without a kernel, `lax.ragged_dot` and `lax.ragged_dot_general` multiply every
row with every group, and all groups must be dequantized first. These backends
loop over the groups that have rows. They multiply a group's rows in tiles of a
static size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax

from jaxplugin.core import decisions, targets
from jaxplugin.dot import epilogue as dot_epilogue
from jaxplugin.dot import sides
from jaxplugin.dot.backends import xla
from jaxplugin.jaxext import jax_private
from jaxplugin.operation import choice
from jaxplugin.ragged import calls, epilogue, groups

_HOST: Final = (
  "the host decides each step of the loop, so it waits for the device"
)
# Limits on the rows of a tile, which a step multiplies at once. A group's last
# tile may have surplus rows. A step of a contraction reads and writes the
# group's sums. On two cores of Zen 4 its fastest tiles have 64 and 128 rows,
# for groups of 128 to 512 rows and sums of 512 x 1024 and more (2026-11).
_MIN_TILE: Final = 8
_MIN_CONTRACTION_TILE: Final = 16
_MAX_TILE: Final = 128


def _tile_rows(problem: calls.Problem, smallest: int) -> int:
  """Returns a power of two near the average number of rows of a group."""
  if problem.m is None or not problem.groups:
    return _MAX_TILE
  average = -(-problem.m // problem.groups)
  tile = 1 << max(average - 1, 0).bit_length()
  return min(max(tile, smallest), _MAX_TILE)


def _for_groups(
  group_sizes: jax.Array,
  num_rows: int,
  body: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array],
  init: jax.Array,
) -> jax.Array:
  """Loops in order over the groups that have rows.

  Args:
    body: (group, first row, end row, x) -> x of the next iteration.
  """
  ends = groups.ends(group_sizes, num_rows)
  starts = groups.starts(ends)
  used, count = groups.used(ends)

  def step(i: jax.Array, x: jax.Array) -> jax.Array:
    index = used[i]
    return body(index, starts[index], ends[index], x)

  return lax.fori_loop(0, count, step, init)


# The ragged dot.


def _notes(
  problem: calls.RaggedDotProblem, target: targets.Target
) -> tuple[str, ...]:
  del problem
  loop = "a loop over the groups that have rows; dequantizes each of them once"
  return (loop,) if target.platform == "cpu" else (loop, _HOST)


def _emit(
  call: calls.RaggedDotCall,
  problem: calls.RaggedDotProblem,
  target: targets.Target,
) -> jax.Array:
  """Computes the sums in f32, and applies the epilogue."""
  call = call.in_usual_order()
  return epilogue.apply(_sums(call, problem, target), call)


def _sums(
  call: calls.RaggedDotCall,
  problem: calls.RaggedDotProblem,
  target: targets.Target,
) -> jax.Array:
  """Returns f32[m, columns]; rows without a group have arbitrary values.

  A group's last tile may extend beyond its rows, but needs no mask. Surplus
  rows of later groups are overwritten by these groups. The epilogue sets rows
  without a group to zero.
  """
  dtype = xla.operand_dtype(call, target)
  tile = _tile_rows(problem, _MIN_TILE)
  numbers = (((1,), (call.rhs.contracting[0] - 1,)), ((), ()))
  # The padding lets the last tile extend beyond the last row.
  lhs = call.lhs.dequantized().astype(dtype)
  lhs = jnp.pad(lhs, ((0, tile), (0, 0)))

  def group(
    index: jax.Array, start: jax.Array, end: jax.Array, sums: jax.Array
  ) -> jax.Array:
    weight = _group_of(call.rhs, index).dequantized()[0].astype(dtype)

    def step(j: jax.Array, sums: jax.Array) -> jax.Array:
      row = start + j * tile
      rows = lax.dynamic_slice_in_dim(lhs, row, tile)
      product = xla.multiply(rows, weight, numbers, dtype)
      return lax.dynamic_update_slice_in_dim(sums, product, row, 0)

    return lax.fori_loop(0, (end - start + tile - 1) // tile, step, sums)

  sums = jnp.zeros((call.num_rows + tile, call.columns), jnp.float32)
  sums = jax_private.varying_as(sums, lhs)  # for a shard_map
  sums = _for_groups(call.group_sizes, call.num_rows, group, sums)
  return sums[: call.num_rows]


def _group_of(rhs: sides.Side, index: jax.Array) -> sides.Side:
  take = functools.partial(
    lax.dynamic_slice_in_dim, start_index=index, slice_size=1
  )
  scale = None if rhs.scale is None else take(rhs.scale)
  return rhs.replace(values=take(rhs.values), scale=scale)


BACKEND: Final[decisions.BackendRecord[calls.RaggedDotProblem]] = (
  choice.xla_backend(
    summary="dequantize each used group and dot_general in XLA operations",
    emit=_emit,
    notes=_notes,
  )
)


# The contraction.


def _contraction_notes(
  problem: calls.ContractionProblem, target: targets.Target
) -> tuple[str, ...]:
  tile = _tile_rows(problem, _MIN_CONTRACTION_TILE)
  notes = [
    f"a loop over the groups that have rows, in tiles of {tile} rows; surplus"
    " rows of a group's last tile are multiplied and discarded"
  ]
  if problem.lhs.format is not None or problem.rhs.format is not None:
    notes.append("writes whole f32 or bf16 copies of block-scaled operands")
  if target.platform != "cpu":
    notes += ["Triton kernels do not contract the rows of groups", _HOST]
  return tuple(notes)


def _contract(
  call: calls.RaggedContraction,
  problem: calls.ContractionProblem,
  target: targets.Target,
) -> jax.Array:
  """Computes the sums in f32, applies the global scale, and casts."""
  dtype = xla.operand_dtype(call, target)
  tile = _tile_rows(problem, _MIN_CONTRACTION_TILE)
  # The padding lets the last tile extend beyond the last row.
  lhs, rhs = (
    jnp.pad(
      side.in_usual_order().dequantized().astype(dtype),
      ((0, tile), (0, 0)),
    )
    for side in (call.lhs, call.rhs)
  )
  numbers = (((0,), (0,)), ((), ()))

  def group(
    index: jax.Array, start: jax.Array, end: jax.Array, result: jax.Array
  ) -> jax.Array:
    def step(j: jax.Array, sums: jax.Array) -> jax.Array:
      row = start + j * tile
      # Both tiles are masked, because 0 times a NaN of another group is NaN.
      is_own = (row + jnp.arange(tile, dtype=jnp.int32) < end)[:, None]
      lhs_tile, rhs_tile = (
        jnp.where(is_own, lax.dynamic_slice_in_dim(x, row, tile), 0)
        for x in (lhs, rhs)
      )
      return sums + xla.multiply(lhs_tile, rhs_tile, numbers, dtype)

    sums = jnp.zeros(call.shape[1:], jnp.float32)
    sums = jax_private.varying_as(sums, lhs)
    sums = lax.fori_loop(0, (end - start + tile - 1) // tile, step, sums)
    sums = _scaled(sums, call).astype(call.preferred_element_type)
    return lax.dynamic_update_slice_in_dim(result, sums[None], index, 0)

  result = jnp.zeros(call.shape, call.preferred_element_type)
  result = jax_private.varying_as(result, lhs)
  return _for_groups(call.group_sizes, call.num_rows, group, result)


def _scaled(sums: jax.Array, call: calls.RaggedContraction) -> jax.Array:
  """Returns f32[n, k] times the call's global scale."""
  scale, power = (
    x if x is None or not x.ndim else x[0]
    for x in (call.global_scale, call.global_power)
  )
  if scale is None:
    return sums
  return dot_epilogue.multiply(sums, scale, power)


CONTRACTION: Final[decisions.BackendRecord[calls.ContractionProblem]] = (
  choice.xla_backend(
    summary="dequantize and sum each used group's tiles in XLA operations",
    emit=_contract,
    notes=_contraction_notes,
  )
)
