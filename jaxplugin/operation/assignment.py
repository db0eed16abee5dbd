# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Assigns mesh axes to dimensions, and computes sums over devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import notation as notation_lib

Axes = mesh_axes.Axes
Spec = mesh_axes.Spec
# Pairs (dimension of the result, mesh axes). The sum over these axes is a
# reduce-scatter along this dimension.
Scatter = tuple[tuple[int, Axes], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shardings:
  """The shardings of an operation's arrays before it is split.

  Attributes:
    operands: mesh axes of each dimension of each operand, in a list, or by name
      for a call.
    results: axes wanted for each result; None if nothing is known.
    axis_sizes: size of each mesh axis.
  """

  operands: Any
  results: Sequence[Spec] | None = None
  axis_sizes: Mapping[str, int]

  def wanted(self, default: Spec) -> Spec:
    """Returns the axes wanted for the only result."""
    return default if self.results is None else self.results[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
  """The mesh axes of the dimensions of an operation.

  Attributes:
    axis_sizes: size of each mesh axis.
    operands: axes of each dimension of each operand, as devices read it.
    results: axes of each dimension of each result, after any scatter.
    axes: axes of each named dimension, before any scatter.
    reduce: axes over which devices have partial sums.
    scatter: axes of `reduce` over which the sum is scattered. Over the others
      it is replicated.
  """

  axis_sizes: Mapping[str, int]
  operands: tuple[Spec, ...]
  results: tuple[Spec, ...]
  axes: Mapping[str, Axes] = dataclasses.field(default_factory=dict)
  reduce: Axes = ()
  scatter: Scatter = ()

  def count(self, axes: Axes) -> int:
    """Returns the number of parts into which axes split a dimension."""
    return mesh_axes.Taker(self.axis_sizes).count(axes)

  def with_axes_of(
    self,
    notation: notation_lib.Notation,
    indices: Collection[int],
    axes: Mapping[str, Axes],
  ) -> Assignment:
    """Returns the assignment with other axes for some operands."""
    changed = notation_lib.specs(notation.operands, axes)
    operands = tuple(
      changed[i] if i in indices else spec
      for i, spec in enumerate(self.operands)
    )
    return dataclasses.replace(self, operands=operands)


def assign(
  notation: notation_lib.Notation,
  preferences: Iterable[tuple[str, Axes]],
  wanted: Spec,
  shape: Sequence[Any],
  axis_sizes: Mapping[str, int],
) -> Assignment:
  """Assigns mesh axes to the dimensions of an operation with one result.

  Args:
    preferences: pairs (dimension, axes) in order of priority. A dimension gets
      the first axes that are free and divide it. If axes do not divide it, it
      gets their longest prefix that does.
    wanted: axes wanted for the result, which sums are scattered to.
  """
  taker = mesh_axes.Taker(axis_sizes)
  axes: dict[str, Axes] = dict.fromkeys(notation.sizes, ())
  for name, preferred in preferences:
    axes[name] = axes[name] or taker.take(preferred, *notation.sizes[name])
  reduce = tuple(a for name in notation.reductions for a in axes[name])
  (parts,) = notation_lib.specs(notation.results, axes)
  result, scatter = scattered(parts, reduce, wanted, shape, taker)
  return Assignment(
    axis_sizes=axis_sizes,
    operands=notation_lib.specs(notation.operands, axes),
    results=(result,),
    axes=axes,
    reduce=reduce,
    scatter=scatter,
  )


def scattered(
  parts: Spec,
  reduce: Axes,
  wanted: Spec,
  shape: Sequence[Any],
  taker: mesh_axes.Taker,
) -> tuple[Spec, Scatter]:
  """Decides along which dimensions a sum over devices is scattered.

  A dimension is scattered if its wanted axes begin with its axes in the partial
  sums, and the sum is over the other wanted axes.

  Args:
    parts: axes of each dimension of the partial sums.
    wanted: axes wanted for each dimension of the result.

  Returns:
    (axes of each dimension of the result, the scattered axes).
  """
  out = list(parts)
  rest = set(reduce)
  scatter = []
  for dim, axes in enumerate(wanted):
    num_parts = len(out[dim])
    more = axes[num_parts:]
    if (
      more
      and axes[:num_parts] == out[dim]
      and rest.issuperset(more)
      and isinstance(shape[dim], int)
      and shape[dim] % taker.count(axes) == 0
    ):
      scatter.append((dim, more))
      out[dim] = axes
      rest -= set(more)
  return tuple(out), tuple(scatter)


def reduced(part: jax.Array, assignment: Assignment) -> jax.Array:
  """Sums `part` over devices: `psum_scatter` and `psum` of an assignment."""
  reduce = assignment.reduce
  for dim, axes in assignment.scatter:
    part = lax.psum_scatter(part, axes, scatter_dimension=dim, tiled=True)
    reduce = tuple(axis for axis in reduce if axis not in axes)
  return lax.psum(part, reduce) if reduce else part
