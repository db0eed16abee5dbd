# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Computes the rows of each group from the group sizes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxplugin.core import blocking


def ends(group_sizes: jax.Array, num_rows: int) -> jax.Array:
  """Returns i32[groups]: the row after each group's last one.

  A size below zero counts as zero, and rows end at `num_rows`. No size can
  therefore cause an out-of-bounds read.
  """
  sizes = jnp.clip(group_sizes, 0, num_rows)
  # Sums saturate, because i32 sums could wrap around.
  add = lambda a, b: jnp.minimum(a + b, num_rows)
  return jax.lax.associative_scan(add, sizes)


def starts(group_ends: jax.Array) -> jax.Array:
  """Returns i32[groups]: each group's first row."""
  return jnp.concatenate([jnp.zeros((1,), jnp.int32), group_ends[:-1]])


def used(group_ends: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns i32[groups], the groups that have rows first, and their number."""
  has_rows = group_ends > starts(group_ends)
  (index,) = jnp.nonzero(has_rows, size=group_ends.shape[0])
  return index.astype(jnp.int32), jnp.sum(has_rows, dtype=jnp.int32)


def sizes_within(group_sizes: jax.Array, num_rows: int) -> jax.Array:
  """Returns i32[groups]: the number of rows of each group, for any sizes."""
  group_ends = ends(group_sizes, num_rows)
  return group_ends - starts(group_ends)


def masked(x: jax.Array, sizes: jax.Array) -> jax.Array:
  """Sets rows without a group to zero. `sizes` are from `sizes_within`."""
  rows = jnp.arange(x.shape[0], dtype=jnp.int32)
  has_group = rows < jnp.sum(sizes, dtype=jnp.int32)
  return jnp.where(has_group[:, None], x, jnp.zeros((), x.dtype))


def of_rows(group_ends: jax.Array, num_rows: int) -> jax.Array:
  """Returns i32[num_rows]: each row's group, or num_groups if it has none."""
  rows = jnp.arange(num_rows, dtype=jnp.int32)
  # All pairs are compared. `jnp.searchsorted` is a loop, which is slower on
  # GPUs and when partitioned, and it has no rule in a shard_map over some axes.
  return jnp.sum(group_ends[None] <= rows[:, None], axis=1, dtype=jnp.int32)


def per_row(x: jax.Array, group_of_row: jax.Array) -> jax.Array:
  """Returns each row's element of `x[groups]`, or zeros without a group."""
  if x.shape[0] == 0:  # `jnp.take` does not support an empty axis.
    return jnp.zeros((*group_of_row.shape, *x.shape[1:]), x.dtype)
  return jnp.take(x, group_of_row, axis=0, mode="fill", fill_value=0)


def sums(x: jax.Array, group_of_row: jax.Array, num_groups: int) -> jax.Array:
  """Returns the sum of each group's rows, the transpose of `per_row`."""
  return jax.ops.segment_sum(x, group_of_row, num_groups)


def align(
  x: jax.Array, group_sizes: jax.Array, multiple: int
) -> tuple[jax.Array, jax.Array]:
  """Moves rows so that each group begins at a multiple (`align_groups`)."""
  num_rows, num_groups = x.shape[0], group_sizes.shape[0]
  old_ends = ends(group_sizes, num_rows)
  old_starts = starts(old_ends)
  sizes = blocking.round_up(old_ends - old_starts, multiple)
  if multiple == 1:
    return x, sizes
  # At most `most` groups have rows. Each gets at most `multiple - 1` zero rows.
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
    else jnp.zeros((total, *x.shape[1:]), x.dtype)
  )
  is_row = is_row.reshape(total, *(1,) * (x.ndim - 1))
  return jnp.where(is_row, moved, jnp.zeros((), x.dtype)), sizes
