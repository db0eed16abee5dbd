# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`assign_axes`: which mesh axes each dimension of a dot is computed with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from jaxplugin.dot import calls
from jaxplugin.jaxext import mesh_axes

Axes = mesh_axes.Axes
Spec = mesh_axes.Spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
  """The mesh axes that each dimension of a call is computed with.

  Attributes:
    lhs, rhs: axes of each dimension of the operands (and of their scales).
    out: axes of each dimension of the result, after any scatter.
    reduce: axes that shard contracting dimensions: partial results are summed
      over them.
    scatter: (result dimension, axes): the sum over these axes of `reduce` is
      scattered along that dimension. None for a sum that stays replicated.
  """

  lhs: Spec
  rhs: Spec
  out: Spec
  reduce: Axes
  scatter: tuple[int, Axes] | None


class _Taker:
  """Hands out mesh axes, each once, to dimensions that they divide."""

  def __init__(self, axis_sizes: Mapping[str, int]) -> None:
    self._sizes = axis_sizes
    self._used: set[str] = set()

  def count(self, axes: Axes) -> int:
    return math.prod(self._sizes[axis] for axis in axes)

  def fits(self, axes: Axes, size: Any, granule: int = 1) -> bool:
    return (
      bool(axes)
      and isinstance(size, int)
      and not self._used & set(axes)
      and size % (self.count(axes) * granule) == 0
    )

  def take(self, axes: Axes, size: Any, granule: int = 1) -> Axes:
    """Takes the longest prefix of `axes` that fits, perhaps none."""
    while axes and not self.fits(axes, size, granule):
      axes = axes[:-1]
    self._used |= set(axes)
    return axes


def assign_axes(
  call: calls.Call,
  lhs_spec: Spec,
  rhs_spec: Spec,
  out_spec: Spec | None,
  axis_sizes: Mapping[str, int],
) -> Assignment:
  """Decides which mesh axes shard which dimension.

  In order: batch dimensions keep the sharding of either operand; k keeps a
  sharding that both operands share; m and n keep that of their operand, the
  wanted result deciding which yields where both want an axis (the operand that
  yields is gathered; without a wanted result the smaller one yields); k takes
  the sharding of one operand alone when its axes are still free, since slicing
  the other costs nothing; and at last dimensions without sharding take that of
  the wanted result. An axis is dropped where it does not divide its dimension
  (for k: into whole blocks).

  Args:
    call: the call.
    lhs_spec, rhs_spec: axes of their dimensions.
    out_spec: axes wanted for the result, None when nothing is known.
    axis_sizes: size of each mesh axis.
  """
  taker = _Taker(axis_sizes)
  lhs, rhs = call.lhs, call.rhs
  lhs_shape, rhs_shape = lhs.shape, rhs.shape
  lhs_axes: list[Axes] = [()] * len(lhs_shape)
  rhs_axes: list[Axes] = [()] * len(rhs_shape)
  lhs_free, rhs_free = lhs.free, rhs.free
  num_batch = len(lhs.batch)
  wanted = out_spec or ((),) * (num_batch + len(lhs_free) + len(rhs_free))
  wanted_m = wanted[num_batch : num_batch + len(lhs_free)]
  wanted_n = wanted[num_batch + len(lhs_free) :]
  batch_pairs = list(zip(lhs.batch, rhs.batch, strict=True))
  k_pairs = list(zip(lhs.contracting, rhs.contracting, strict=True))

  for lhs_dim, rhs_dim in batch_pairs:
    axes = lhs_spec[lhs_dim] or rhs_spec[rhs_dim]
    axes = taker.take(axes, lhs_shape[lhs_dim])
    lhs_axes[lhs_dim] = rhs_axes[rhs_dim] = axes

  def take_k(lhs_dim: int, rhs_dim: int, axes: Axes) -> None:
    granule = granule_of(call, lhs_dim, rhs_dim)
    axes = taker.take(axes, lhs_shape[lhs_dim], granule)
    lhs_axes[lhs_dim] = rhs_axes[rhs_dim] = axes

  for lhs_dim, rhs_dim in k_pairs:
    if lhs_spec[lhs_dim] == rhs_spec[rhs_dim]:
      take_k(lhs_dim, rhs_dim, lhs_spec[lhs_dim])

  def take_m() -> None:
    for dim in lhs_free:
      lhs_axes[dim] = taker.take(lhs_spec[dim], lhs_shape[dim])

  def take_n() -> None:
    for dim in rhs_free:
      rhs_axes[dim] = taker.take(rhs_spec[dim], rhs_shape[dim])

  n_first = _flat(wanted_n) & _flat(rhs_spec[d] for d in rhs_free)
  m_first = _flat(wanted_m) & _flat(lhs_spec[d] for d in lhs_free)
  if (n_first and not m_first) or (
    not m_first and _count(rhs_shape) > _count(lhs_shape)
  ):
    take_n()
    take_m()
  else:
    take_m()
    take_n()

  for lhs_dim, rhs_dim in k_pairs:
    either = lhs_spec[lhs_dim] or rhs_spec[rhs_dim]
    only_one = not (lhs_spec[lhs_dim] and rhs_spec[rhs_dim])
    if only_one and not lhs_axes[lhs_dim]:
      take_k(lhs_dim, rhs_dim, either)

  reduce = tuple(a for d in lhs.contracting for a in lhs_axes[d])
  for position, (lhs_dim, rhs_dim) in enumerate(batch_pairs):
    if not lhs_axes[lhs_dim]:
      axes = taker.take(wanted[position], lhs_shape[lhs_dim])
      lhs_axes[lhs_dim] = rhs_axes[rhs_dim] = axes
  for axes_list, free, shape, want in (
    (lhs_axes, lhs_free, lhs_shape, wanted_m),
    (rhs_axes, rhs_free, rhs_shape, wanted_n),
  ):
    for dim, axes in zip(free, want, strict=True):
      if not axes_list[dim]:
        axes_list[dim] = taker.take(axes, shape[dim])

  out = [
    *(lhs_axes[d] for d in lhs.batch),
    *(lhs_axes[d] for d in lhs_free),
    *(rhs_axes[d] for d in rhs_free),
  ]
  sizes = [
    *(lhs_shape[d] for d in lhs.batch),
    *(lhs_shape[d] for d in lhs_free),
    *(rhs_shape[d] for d in rhs_free),
  ]
  scatter = None
  for dim, axes in enumerate(wanted):
    if (
      reduce
      and axes == out[dim] + reduce
      and isinstance(sizes[dim], int)
      and sizes[dim] % taker.count(axes) == 0
    ):
      scatter = (dim, reduce)
      out[dim] = axes
      break
  return Assignment(
    lhs=tuple(lhs_axes),
    rhs=tuple(rhs_axes),
    out=tuple(out),
    reduce=reduce,
    scatter=scatter,
  )


def _flat(specs: Any) -> set[str]:
  return {axis for axes in specs for axis in axes}


def _count(shape: Sequence[Any]) -> int:
  return math.prod(size for size in shape if isinstance(size, int))


def granule_of(call: calls.Call, lhs_dim: int, rhs_dim: int) -> int:
  """The number of values of a contracting dimension that stay together."""
  granule = 1
  for side, dim in ((call.lhs, lhs_dim), (call.rhs, rhs_dim)):
    if side.format is not None and side.axis == dim:
      granule = math.lcm(granule, side.format.block_size)
  return granule


def result_spec(
  call: calls.Call,
  lhs_spec: Spec,
  rhs_spec: Spec,
  axis_sizes: Mapping[str, int],
) -> Spec:
  """The result's axes when nothing else asks for any."""
  assignment = assign_axes(
    call,
    lhs_spec,
    rhs_spec,
    None,
    axis_sizes,
  )
  return assignment.out
