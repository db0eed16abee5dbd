# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Assigns mesh axes to the dimensions of a block-scaled dot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from jaxplugin.dot import calls
from jaxplugin.dot import sides
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import assignment as assignment_lib
from jaxplugin.operation import notation as notation_lib

Spec = mesh_axes.Spec
AxesByName = dict[str, mesh_axes.Axes]


def notation(call: calls.DotCall) -> notation_lib.Notation:
  """Returns the names of the dimensions: b0, m0, n0, k0 and so on."""
  lhs, rhs = [""] * call.lhs.ndim, [""] * call.rhs.ndim
  lhs_shape, rhs_shape = call.lhs.shape, call.rhs.shape
  sizes: dict[str, tuple[Any, int]] = {}
  contracting, batch = call.dimension_numbers
  for letter, dims in (("b", batch), ("k", contracting)):
    for i, (l, r) in enumerate(zip(*dims, strict=True)):
      name = lhs[l] = rhs[r] = f"{letter}{i}"
      blocks = block_of(call.lhs, l), block_of(call.rhs, r)
      granule = notation_lib.granule_of(lhs_shape[l], *blocks)
      sizes[name] = lhs_shape[l], granule
  for letter, names, shape, side in (
    ("m", lhs, lhs_shape, call.lhs),
    ("n", rhs, rhs_shape, call.rhs),
  ):
    for i, d in enumerate(side.free):
      names[d] = f"{letter}{i}"
      granule = notation_lib.granule_of(shape[d], block_of(side, d))
      sizes[names[d]] = shape[d], granule
  out = [lhs[d] for d in (*call.lhs.batch, *call.lhs.free)]
  out += [rhs[d] for d in call.rhs.free]
  of_sides = {"lhs": lhs, "rhs": rhs, "lhs_scale": lhs, "rhs_scale": rhs}

  def of_result(shape: Sequence[Any]) -> list[str]:
    dims = zip(shape, out if shape else (), strict=True)
    return [name if size != 1 else notation_lib.OWN for size, name in dims]

  return notation_lib.Notation(
    operands=[
      of_sides[name] if name in of_sides else of_result(x.shape)
      for name, x in call.arrays().items()
    ],
    results=[out],
    sizes=sizes,
    reductions=[lhs[d] for d in call.lhs.contracting],
  )


def assign(
  call: calls.DotCall,
  specs: Mapping[str, Spec],
  wanted: Spec | None,
  axis_sizes: Mapping[str, int],
) -> assignment_lib.Assignment:
  """Decides which mesh axes shard which dimension.

  In this order, an axis goes to the first dimension that has it:

  1. Batch dimensions keep the sharding of either operand.
  2. k keeps a sharding that both operands have.
  3. m and n keep the sharding of their operand. If both have an axis, the
     wanted result decides. If it does not use the axis, the smaller operand is
     gathered over it.
  4. k takes the sharding of one operand. The other operand is sliced, which
     costs nothing.
  5. Dimensions without sharding take that of the wanted result.

  An axis that does not divide its dimension into whole blocks is dropped.

  Args:
    call: the call.
    specs: mesh axes of each dimension of lhs and rhs.
    wanted: axes wanted for the result; None if nothing is known.
    axis_sizes: size of each mesh axis.
  """
  dims = notation(call)
  lhs_names, rhs_names = dims.operands[:2]
  (out,) = dims.results
  wanted = wanted or ((),) * len(out)
  want = dict(zip(out, wanted, strict=True))
  lhs = dict(zip(lhs_names, specs["lhs"], strict=True))
  rhs = dict(zip(rhs_names, specs["rhs"], strict=True))
  m_first, n_first = _preferences(call, lhs, rhs, want)
  k = dims.reductions
  preferences = [
    *((b, lhs[b] or rhs[b]) for b in out[: len(call.lhs.batch)]),
    *((d, lhs[d]) for d in k if lhs[d] == rhs[d]),
    *m_first,
    *n_first,
    *((d, lhs[d] or rhs[d]) for d in k if not (lhs[d] and rhs[d])),
    *want.items(),
  ]
  found = assignment_lib.assign(
    dims, preferences, wanted, call.shape, axis_sizes
  )
  # The epilogue follows the sum over devices, except for a global scale that
  # multiplies each partial sum.
  in_parts = steps(call)[0].arrays()
  return found.with_axes_of(
    dims,
    [i for i, name in enumerate(call.arrays()) if name not in in_parts],
    dict(zip(out, found.results[0], strict=True)),
  )


def _preferences(
  call: calls.DotCall, lhs: AxesByName, rhs: AxesByName, want: AxesByName
) -> list[list[tuple[str, mesh_axes.Axes]]]:
  """Returns the axes of m and n, in order of priority.

  If both sides are sharded over an axis and only one side's dimensions have it
  in the wanted result, the other side is gathered over it. That side is also
  gathered over its minor axes, because its data would otherwise move between
  devices.
  """
  m = {name: axes for name, axes in lhs.items() if name[0] == "m"}
  n = {name: axes for name, axes in rhs.items() if name[0] == "n"}
  want_m = _flat(want[name] for name in m)
  want_n = _flat(want[name] for name in n)
  both = _flat(m.values()) & _flat(n.values())

  def without(dims: AxesByName, gathered: set[str]) -> AxesByName:
    return {
      name: tuple(itertools.takewhile(lambda a: a not in gathered, axes))
      for name, axes in dims.items()
    }

  m, n = (
    without(m, both & (want_n - want_m)),
    without(n, both & (want_m - want_n)),
  )
  is_n_first = not _flat(m.values()) & want_m and (
    bool(_flat(n.values()) & want_n)
    or _count(call.rhs.shape) > _count(call.lhs.shape)
  )
  order = (n, m) if is_n_first else (m, n)
  return [list(dims.items()) for dims in order]


def _flat(specs: Iterable[mesh_axes.Axes]) -> set[str]:
  return {axis for axes in specs for axis in axes}


def _count(shape: Sequence[Any]) -> int:
  return math.prod(size for size in shape if isinstance(size, int))


def block_of(side: sides.Side, dim: int) -> int:
  """Returns the number of values along a dimension that share a scale.

  In a gradient's matmul the blocked dimension is not contracted.
  """
  if side.format is None or side.axis != dim:
    return 1
  return side.format.block_size


def steps(call: calls.DotCall) -> tuple[calls.DotCall, calls.DotCall]:
  """Returns a call for partial sums and a call for the epilogue.

  Each device computes the first call. The epilogue of the second call is
  applied to the sum over devices.
  """
  if call.reduce_dtype is None:
    return call.bare(), call
  part = call.replace(
    preferred_element_type=call.reduce_dtype,
    bias=None,
    activation=None,
    residual=None,
  )
  return part, call.replace(global_scale=None, global_power=None)
