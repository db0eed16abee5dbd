# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which rows are whose: what group sizes mean, for everyone who reads them."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ends(group_sizes: jax.Array, num_rows: int) -> jax.Array:
  """i32[groups]: the row after each group's last.

  Sizes below zero count as zero, and rows end at `num_rows`, so that no size
  makes anyone read beyond its arrays.
  """
  sizes = jnp.clip(group_sizes, 0, num_rows)
  # Saturating: sums of i32 would wrap around.
  add = lambda a, b: jnp.minimum(a + b, num_rows)
  return jax.lax.associative_scan(add, sizes)


def of_rows(group_ends: jax.Array, num_rows: int) -> jax.Array:
  """i32[num_rows]: each row's group; the number of groups where it has none."""
  rows = jnp.arange(num_rows, dtype=jnp.int32)
  return jnp.searchsorted(group_ends, rows, side="right").astype(jnp.int32)


def per_row(x: jax.Array, group_of_row: jax.Array) -> jax.Array:
  """`x`, of which each group has an entry, by rows; zeros where it has none."""
  return jnp.take(x, group_of_row, axis=0, mode="fill", fill_value=0)


def sums(x: jax.Array, group_of_row: jax.Array, num_groups: int) -> jax.Array:
  """The sum of each group's rows; the transpose of `per_row`."""
  return jax.ops.segment_sum(x, group_of_row, num_groups)
