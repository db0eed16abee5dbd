# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums over devices that have a part of each: where they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jaxplugin.jaxext import mesh_axes

# (result dimension, mesh axes) of each dimension along which sums over some
# axes are scattered.
Scatter = tuple[tuple[int, mesh_axes.Axes], ...]


def scattered(
  parts: mesh_axes.Spec,
  reduce: mesh_axes.Axes,
  wanted: mesh_axes.Spec,
  shape: Sequence[Any],
  taker: mesh_axes.Taker,
) -> tuple[mesh_axes.Spec, Scatter]:
  """Where a result is wanted scattered over axes that its sums are over.

  Args:
    parts: axes of each dimension of the parts that are summed.
    reduce: axes that are summed over.
    wanted: axes wanted of each dimension of the result.
    shape: of the result.
    taker: knows how many devices axes have.

  Returns:
    (axes of each dimension of the result, what is scattered). A dimension is
    scattered where what is wanted of it is what the parts have and more.
  """
  out = list(parts)
  rest = set(reduce)
  scatter = []
  for dim, axes in enumerate(wanted):
    have = len(out[dim])
    more = axes[have:]
    if (
      more
      and axes[:have] == out[dim]
      and rest.issuperset(more)
      and isinstance(shape[dim], int)
      and shape[dim] % taker.count(axes) == 0
    ):
      scatter.append((dim, more))
      out[dim] = axes
      rest -= set(more)
  return tuple(out), tuple(scatter)


def combined(
  part: jax.Array, reduce: mesh_axes.Axes, scatter: Scatter
) -> jax.Array:
  """The sum of the parts of all devices along some axes.

  Args:
    part: a device's.
    reduce: axes of these devices.
    scatter: over which axes of `reduce` the sum is dealt out.
  """
  for dim, axes in scatter:
    part = lax.psum_scatter(part, axes, scatter_dimension=dim, tiled=True)
    reduce = tuple(axis for axis in reduce if axis not in axes)
  return lax.psum(part, reduce) if reduce else part
