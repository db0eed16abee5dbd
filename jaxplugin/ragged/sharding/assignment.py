# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which mesh axes each dimension of a ragged dot is computed with.

Unlike the dot, weights of all groups stay on their devices, and rows come to
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxplugin.dot import sides
from jaxplugin.dot.sharding import side_bytes
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import assignment as assignment_lib
from jaxplugin.operation import notation as notation_lib
from jaxplugin.ragged import calls

Spec = mesh_axes.Spec


def can_partition(call: calls.Call) -> bool:
  """Returns whether devices can share the call.

  Sizes must be static and not 0, and blocks whole.
  """
  problem = call.problem()
  if not problem.sizes_are_static or problem.is_empty:
    return False
  if not all(map(has_whole_blocks, (call.lhs, call.rhs))):
    return False
  size, granule = notation(call).sizes["k"]
  return size % granule == 0


def has_whole_blocks(side: sides.Side) -> bool:
  """Returns whether a side consists of whole blocks, each of whole bytes."""
  if side.format is None:
    return True
  assert side.axis is not None
  is_whole = side.shape[side.axis] % side.format.block_size == 0
  return is_whole and side_bytes.has_whole_pairs(side)


def notation(call: calls.Call) -> notation_lib.Notation:
  """Returns the names of the dimensions, as in "mk, gnk -> mn".

  "e" is the groups of the epilogue. The rule does not relate them to "g": if
  devices have parts of the sums, each needs all of "e", and would gather what
  the rule had spread.
  """
  own = notation_lib.OWN
  rhs = "gnk" if call.rhs.contracting == (2,) else "gkn"
  of_arrays = {
    "lhs": "mk",
    "lhs_scale": "mk",
    "rhs": rhs,
    "rhs_scale": rhs,
    "group_sizes": (notation_lib.WHOLE,),
    "bias": "en",
  }
  # A global scale is one number, one for each group, or one for each row.
  of_scale = ("", "e", ("m", own))
  return notation_lib.Notation(
    operands=[
      of_arrays[name] if name in of_arrays else of_scale[len(x.shape)]
      for name, x in call.arrays().items()
    ],
    results=["mn"],
    sizes={
      "m": (call.num_rows, 1),
      "g": (call.num_groups, 1),
      "n": (call.columns, _column_granule(call)),
      "k": (call.rhs.shape[call.rhs.contracting[0]], _k_granule(call)),
    },
    reductions="gk",
  )


def assign(
  call: calls.Call,
  specs: Mapping[str, Spec],
  wanted: Spec | None,
  axis_sizes: Mapping[str, int],
) -> assignment_lib.Assignment:
  """Decides which mesh axes shard which dimension.

  In this order, an axis goes to the first dimension that has it:

  1. Groups, columns and k keep the sharding of rhs. It is therefore never
     gathered, unless an axis does not divide it.
  2. Rows keep the sharding of lhs.
  3. k takes the sharding of lhs.
  4. Dimensions without sharding take that of the wanted result.

  If groups have the axes of the rows, the rows are gathered. Their results are
  scattered if that is wanted.

  Args:
    call: the call.
    specs: axes of the dimensions of lhs and rhs.
    wanted: axes wanted for the result; None keeps the sharding of the rows.
    axis_sizes: size of each mesh axis.
  """
  dims = notation(call)
  lhs, rhs = (
    specs["lhs"],
    dict(zip(dims.operands[1], specs["rhs"], strict=True)),
  )
  wanted = wanted or (lhs[0], ())
  preferences = [
    *((name, rhs[name]) for name in "gnk"),
    ("m", lhs[0]),
    ("k", lhs[1]),
    *zip("mn", wanted, strict=True),
  ]
  found = assignment_lib.assign(
    dims, preferences, wanted, call.shape, axis_sizes
  )
  axes = {**found.axes, "e": found.axes["g"]}
  every = range(len(dims.operands))
  found = found.with_axes_of(dims, every, axes)
  if not axes["k"]:
    return found
  # Each device computes the epilogue of its part of the result, which has rows
  # of any group. With a `reduce_dtype`, global scales multiply the parts.
  in_parts = call.steps()[0].arrays()
  after = [i for i, name in enumerate(call.arrays()) if name not in in_parts]
  rows, columns = found.results[0]
  return found.with_axes_of(dims, after, {"e": (), "m": rows, "n": columns})


def _column_granule(call: calls.Call) -> int:
  """Returns how many columns of the product stay together.

  These are the columns of one gated result, and whole blocks of rhs if the
  columns are its blocked dimension.
  """
  granule = 2 if call.is_gated else 1
  format = call.rhs.format
  if format is not None and call.rhs.contracting != (call.rhs.axis,):
    granule = math.lcm(granule, format.block_size)
  return granule


def _k_granule(call: calls.Call) -> int:
  """Returns how many values of k stay together: whole blocks."""
  return math.lcm(
    *(
      side.format.block_size
      for side in (call.lhs, call.rhs)
      if side.format is not None and side.contracting == (side.axis,)
    )
  )
