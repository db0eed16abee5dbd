# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which rows are whose: what group sizes mean, for everyone who reads them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxplugin.core import extents


def ends(group_sizes: jax.Array, num_rows: int) -> jax.Array:
  """i32[groups]: the row after each group's last.

  Sizes below zero count as zero, and rows end at `num_rows`, so that no size
  makes anyone read beyond its arrays.
  """
  sizes = jnp.clip(group_sizes, 0, num_rows)
  # Saturating: sums of i32 would wrap around.
  add = lambda a, b: jnp.minimum(a + b, num_rows)
  return jax.lax.associative_scan(add, sizes)


def starts(group_ends: jax.Array) -> jax.Array:
  """i32[groups]: each group's first row."""
  return jnp.concatenate([jnp.zeros((1,), jnp.int32), group_ends[:-1]])


def used(group_ends: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The groups that have rows, i32[groups] of which the first i32[] count."""
  has_rows = group_ends > starts(group_ends)
  (index,) = jnp.nonzero(has_rows, size=group_ends.shape[0])
  return index.astype(jnp.int32), jnp.sum(has_rows, dtype=jnp.int32)


def sizes_within(group_sizes: jax.Array, num_rows: int) -> jax.Array:
  """i32[groups]: how many rows each group has, whatever sizes are given."""
  group_ends = ends(group_sizes, num_rows)
  return group_ends - starts(group_ends)


def of_rows(group_ends: jax.Array, num_rows: int) -> jax.Array:
  """i32[num_rows]: each row's group; the number of groups where it has none."""
  rows = jnp.arange(num_rows, dtype=jnp.int32)
  # All comparisons: a search is a loop, which a partitioner and GPUs do worse,
  # and which JAX's own has no rule for inside of a shard_map over some axes.
  return jnp.sum(group_ends[None] <= rows[:, None], axis=1, dtype=jnp.int32)


def per_row(x: jax.Array, group_of_row: jax.Array) -> jax.Array:
  """`x`, of which each group has an entry, by rows; zeros where it has none."""
  if x.shape[0] == 0:  # JAX takes nothing from an empty axis
    return jnp.zeros((*group_of_row.shape, *x.shape[1:]), x.dtype)
  return jnp.take(x, group_of_row, axis=0, mode="fill", fill_value=0)


def sums(x: jax.Array, group_of_row: jax.Array, num_groups: int) -> jax.Array:
  """The sum of each group's rows; the transpose of `per_row`."""
  return jax.ops.segment_sum(x, group_of_row, num_groups)


def align(
  x: jax.Array, group_sizes: jax.Array, multiple: int
) -> tuple[jax.Array, jax.Array]:
  """Rows moved so that each group begins at a multiple; see `align_groups`."""
  num_rows, num_groups = x.shape[0], group_sizes.shape[0]
  old_ends = ends(group_sizes, num_rows)
  old_starts = starts(old_ends)
  sizes = extents.round_up(old_ends - old_starts, multiple)
  if multiple == 1:
    return x, sizes
  # So many groups at most have rows, and each gets less than a multiple more.
  most = num_groups
  if isinstance(num_rows, int):
    most = min(num_groups, num_rows)
  total = (num_rows + most * (multiple - 1)) // multiple * multiple
  new_ends = jnp.cumsum(sizes, dtype=jnp.int32)
  of_row = of_rows(new_ends, total)
  rows = jnp.arange(total, dtype=jnp.int32)
  at = functools.partial(per_row, group_of_row=of_row)
  source = rows - at(starts(new_ends)) + at(old_starts)
  is_row = source < at(old_ends)
  moved = (
    jnp.take(x, source, axis=0, mode="clip")
    if num_rows != 0
    else (jnp.zeros((total, *x.shape[1:]), x.dtype))
  )
  is_row = is_row.reshape(total, *(1,) * (x.ndim - 1))
  return jnp.where(is_row, moved, jnp.zeros((), x.dtype)), sizes
