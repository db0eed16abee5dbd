# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The xla implementation: one used group after the other, on every platform.

`lax.ragged_dot` multiplies every row with every group where it has no kernel,
and would need all groups dequantized. This is a loop over the groups that have
rows: each one's weight is dequantized once, and multiplied with its rows in
tiles of a static size.
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
from jaxplugin.dot import sides
from jaxplugin.jaxext import jax_private
from jaxplugin.ragged import calls
from jaxplugin.ragged import epilogue
from jaxplugin.ragged import groups
from jaxplugin.ragged import problems
from jaxplugin.tables import fitting

_LOOP: Final = (
  "a loop over the groups that have rows; dequantizes each of them once"
)
_HOST: Final = (
  "the host decides each step of the loop, so it waits for the device"
)

# Rows that a step multiplies at once. What exceeds a group's rows is computed
# in vain; what it lacks is one more step.
_MIN_TILE: Final = 8
_MAX_TILE: Final = 128


def _rank(target: targets.Target) -> int:
  """After everything that reads the quantized bytes."""
  del target
  return 100


def supports(
  problem: problems.RaggedProblem, target: targets.Target
) -> decisions.Unsupported | None:
  """Serves every problem on every target."""
  del problem, target
  return None


def plan(
  problem: problems.RaggedProblem, target: targets.Target
) -> decisions.Plan:
  """The global scale is a multiply of its own."""
  has_scale = problem.global_scale != "none"
  notes = (_LOOP,) if target.platform == "cpu" else (_LOOP, _HOST)
  return decisions.Plan(
    global_scale="separate" if has_scale else "none", notes=notes
  )


def emit(
  call: calls.Call, problem: problems.RaggedProblem, target: targets.Target
) -> jax.Array:
  """Sums of products in f32, and the epilogue."""
  call = call.in_usual_order()
  if problem.is_empty:
    sums = jnp.zeros((call.num_rows, call.columns), jnp.float32)
  else:
    sums = _sums(call, _operand_dtype(call, target), _tile_rows(problem))
  return epilogue.apply(sums, call)


def _operand_dtype(call: calls.Call, target: targets.Target) -> Any:
  """bf16 where that loses nothing; else f32 (see `dot.backends.xla`)."""
  if target.platform == "cpu":
    return np.dtype(np.float32)
  is_exact = call.lhs.exact_in_bf16 and call.rhs.exact_in_bf16
  return formats.BF16 if is_exact else np.dtype(np.float32)


def _tile_rows(problem: problems.RaggedProblem) -> int:
  """A power of two near the rows that a group has on average."""
  if problem.m is None or not problem.groups:
    return _MAX_TILE
  average = -(-problem.m // problem.groups)
  tile = 1 << max(average - 1, 0).bit_length()
  return min(max(tile, _MIN_TILE), _MAX_TILE)


def _sums(call: calls.Call, dtype: Any, tile: int) -> jax.Array:
  """f32[m, columns] of the rows of groups; anything in others.

  A group's last tile may reach beyond its rows. Those rows are the next groups'
  and get their own products later, as groups come in order, or they are no
  group's, and the epilogue makes zeros of them. So nothing is masked here.
  """
  num_rows = call.num_rows
  ends = groups.ends(call.group_sizes, num_rows)
  starts = groups.starts(ends)
  used, count = groups.used(ends)
  # A tile that begins at a group's last row ends beyond all rows.
  lhs = calls.as_floats(call.lhs).dequantized().astype(dtype)
  lhs = jnp.pad(lhs, ((0, tile), (0, 0)))
  multiply = functools.partial(
    lax.dot_general,
    dimension_numbers=(((1,), (call.rhs.contracting[0] - 1,)), ((), ())),
    precision=(
      lax.Precision.DEFAULT if dtype == formats.BF16 else lax.Precision.HIGHEST
    ),
    preferred_element_type=jnp.float32,
  )

  def group(i: jax.Array, sums: jax.Array) -> jax.Array:
    index = used[i]
    start, end = starts[index], ends[index]
    own = calls.as_floats(_group_of(call.rhs, index))
    weight = own.dequantized()[0].astype(dtype)

    def step(j: jax.Array, sums: jax.Array) -> jax.Array:
      row = start + j * tile
      rows = lax.dynamic_slice_in_dim(lhs, row, tile)
      product = multiply(rows, weight)
      return lax.dynamic_update_slice_in_dim(sums, product, row, 0)

    return lax.fori_loop(0, (end - start + tile - 1) // tile, step, sums)

  sums = jnp.zeros((num_rows + tile, call.columns), jnp.float32)
  sums = jax_private.varying_as(sums, lhs)  # inside of a shard_map
  return lax.fori_loop(0, count, group, sums)[:num_rows]


def _group_of(rhs: sides.Side, index: jax.Array) -> sides.Side:
  """One group of all."""
  take = functools.partial(
    lax.dynamic_slice_in_dim, start_index=index, slice_size=1
  )
  scale = None if rhs.scale is None else take(rhs.scale)
  return rhs.replace(values=take(rhs.values), scale=scale)


BACKEND: Final[decisions.Backend[problems.RaggedProblem]] = decisions.Backend(
  name="xla",
  summary="dequantize each used group and dot_general in XLA operations",
  rank=_rank,
  supports=supports,
  plan=plan,
  emit=emit,
  is_portable=True,
  tunable=decisions.Tunable(source=fitting.jaxlib_source),
)
