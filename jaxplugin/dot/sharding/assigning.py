# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`assign_axes`: which mesh axes each dimension of a dot is computed with."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from jaxplugin.dot import calls
from jaxplugin.dot import sides
from jaxplugin.dot.sharding import sums
from jaxplugin.jaxext import mesh_axes

Axes = mesh_axes.Axes
Spec = mesh_axes.Spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
  """The mesh axes that each dimension of a call is computed with.

  Attributes:
    lhs, rhs: axes of each dimension of the operands (and of their scales).
    parts: axes of each dimension of what a device multiplies: a part of the
      sums, where `reduce` has axes.
    out: axes of each dimension of the result, after any scatter.
    reduce: axes that shard contracting dimensions: parts are summed over them.
    scatter: (result dimension, axes) of each dimension along which the sum over
      some axes of `reduce` is scattered; over the others it is replicated.
  """

  lhs: Spec
  rhs: Spec
  parts: Spec
  out: Spec
  reduce: Axes
  scatter: sums.Scatter


def assign_axes(
  call: calls.Call,
  lhs_spec: Spec,
  rhs_spec: Spec,
  out_spec: Spec | None,
  axis_sizes: Mapping[str, int],
) -> Assignment:
  """Decides which mesh axes shard which dimension.

  In order: batch dimensions keep the sharding of either operand; k keeps a
  sharding that both operands share; m and n keep that of their operand, where
  both have an axis the wanted result deciding which yields it, axis by axis
  (the operand that yields is gathered over that axis alone; of axes of which
  the result says nothing the smaller operand yields); k takes the sharding of
  one operand alone when its axes are still free, since slicing the other costs
  nothing; and at last dimensions without sharding take that of the wanted
  result. An axis is dropped where it does not divide its dimension (into whole
  blocks, where that has blocks).

  Args:
    call: the call.
    lhs_spec, rhs_spec: axes of their dimensions.
    out_spec: axes wanted for the result, None when nothing is known.
    axis_sizes: size of each mesh axis.
  """
  taker = mesh_axes.Taker(axis_sizes)
  lhs, rhs = call.lhs, call.rhs
  lhs_shape, rhs_shape = lhs.shape, rhs.shape
  lhs_axes: list[Axes] = [()] * len(lhs_shape)
  rhs_axes: list[Axes] = [()] * len(rhs_shape)
  num_batch, num_m = len(lhs.batch), len(lhs.free)
  wanted = out_spec or ((),) * len(call.shape)
  wanted_m = wanted[num_batch : num_batch + num_m]
  wanted_n = wanted[num_batch + num_m :]
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

  m_takes, n_takes = _takes(call, lhs_spec, rhs_spec, wanted_m, wanted_n)
  takes_of_m = (lhs_axes, lhs, lhs_shape, m_takes)
  takes_of_n = (rhs_axes, rhs, rhs_shape, n_takes)
  is_n_first = not _flat(m_takes) & _flat(wanted_m) and (
    bool(_flat(n_takes) & _flat(wanted_n))
    or _count(rhs_shape) > _count(lhs_shape)
  )
  order = (takes_of_n, takes_of_m) if is_n_first else (takes_of_m, takes_of_n)
  for axes_list, side, shape, takes in order:
    for dim, axes in zip(side.free, takes, strict=True):
      axes_list[dim] = taker.take(axes, shape[dim], block_of(side, dim))

  for lhs_dim, rhs_dim in k_pairs:
    either = lhs_spec[lhs_dim] or rhs_spec[rhs_dim]
    only_one = not (lhs_spec[lhs_dim] and rhs_spec[rhs_dim])
    if only_one and not lhs_axes[lhs_dim]:
      take_k(lhs_dim, rhs_dim, either)

  for position, (lhs_dim, rhs_dim) in enumerate(batch_pairs):
    if not lhs_axes[lhs_dim]:
      axes = taker.take(wanted[position], lhs_shape[lhs_dim])
      lhs_axes[lhs_dim] = rhs_axes[rhs_dim] = axes
  for axes_list, side, shape, want in (
    (lhs_axes, lhs, lhs_shape, wanted_m),
    (rhs_axes, rhs, rhs_shape, wanted_n),
  ):
    for dim, axes in zip(side.free, want, strict=True):
      if not axes_list[dim]:
        axes_list[dim] = taker.take(axes, shape[dim], block_of(side, dim))

  reduce = tuple(a for d in lhs.contracting for a in lhs_axes[d])
  parts = (
    *(lhs_axes[d] for d in lhs.batch),
    *(lhs_axes[d] for d in lhs.free),
    *(rhs_axes[d] for d in rhs.free),
  )
  out, scatter = sums.scattered(parts, reduce, wanted, call.shape, taker)
  return Assignment(
    lhs=tuple(lhs_axes),
    rhs=tuple(rhs_axes),
    parts=parts,
    out=out,
    reduce=reduce,
    scatter=scatter,
  )


def _takes(
  call: calls.Call,
  lhs_spec: Spec,
  rhs_spec: Spec,
  wanted_m: Spec,
  wanted_n: Spec,
) -> tuple[Spec, Spec]:
  """The axes that m and n would keep: those of their operands, less a few.

  Of an axis that both have the one yields where the result wants it of the
  other alone; and what is minor to it, or data would have to change places.
  """
  m = tuple(lhs_spec[d] for d in call.lhs.free)
  n = tuple(rhs_spec[d] for d in call.rhs.free)
  both = _flat(m) & _flat(n)
  m_yields = both & (_flat(wanted_n) - _flat(wanted_m))
  n_yields = both & (_flat(wanted_m) - _flat(wanted_n))

  def without(spec: Spec, yields: set[str]) -> Spec:
    takes = lambda axes: itertools.takewhile(lambda a: a not in yields, axes)
    return tuple(tuple(takes(axes)) for axes in spec)

  return without(m, m_yields), without(n, n_yields)


def _flat(specs: Any) -> set[str]:
  return {axis for axes in specs for axis in axes}


def _count(shape: Sequence[Any]) -> int:
  return math.prod(size for size in shape if isinstance(size, int))


def granule_of(call: calls.Call, lhs_dim: int, rhs_dim: int) -> int:
  """The number of values of a contracting dimension that stay together."""
  return math.lcm(block_of(call.lhs, lhs_dim), block_of(call.rhs, rhs_dim))


def block_of(side: sides.Side, dim: int) -> int:
  """The number of values of a dimension that share a scale.

  Also of one that is not contracted: a gradient's product has blocks there.
  """
  if side.format is None or side.axis != dim:
    return 1
  return side.format.block_size


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
