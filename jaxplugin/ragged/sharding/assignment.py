# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Assigns mesh axes to the dimensions of ragged dots and contractions.

Unlike in a dot, weights stay on their devices, and rows are gathered to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence

from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import assignment as assignment_lib
from jaxplugin.operation import notation as notation_lib
from jaxplugin.ragged import calls

Spec = mesh_axes.Spec


def can_partition(
  call: calls.Call,
) -> bool:
  """Returns whether the call can be split over devices.

  Sizes must be static and not 0, and no byte may have values of two blocks.
  """
  problem = call.problem()
  return (
    problem.sizes_are_static
    and not problem.is_empty
    and call.lhs.has_whole_pairs
    and call.rhs.has_whole_pairs
  )


def notation(call: calls.RaggedDotCall) -> notation_lib.Notation:
  """Returns the names of the dimensions, as in "mk, gnk -> mn".

  "e" is the groups dimension of the epilogue's arrays. It is separate from "g",
  because with partial sums each device needs all of "e". Shardy would otherwise
  shard it, and it would be gathered again.
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
  # A global scale is f32[], f32[groups] or f32[m, 1].
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
  call: calls.RaggedDotCall,
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

  If groups and rows have the same axes, the rows are gathered. The result is
  scattered if these axes are wanted for it.

  Args:
    call: the call.
    specs: mesh axes of each dimension of lhs and rhs.
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
  # Each device applies the epilogue to its shard of the result, whose rows may
  # be of any group. With a `reduce_dtype`, the global scale multiplies partial
  # sums instead.
  in_parts = call.steps()[0].arrays()
  after = [i for i, name in enumerate(call.arrays()) if name not in in_parts]
  rows, columns = found.results[0]
  return found.with_axes_of(dims, after, {"e": (), "m": rows, "n": columns})


def contraction_notation(
  call: calls.RaggedContraction,
) -> notation_lib.Notation:
  """Returns the names of the dimensions, as in "mn, mk -> gnk"."""
  num_groups, n, k = call.shape
  formats = (side.format for side in (call.lhs, call.rhs))
  blocks = (f.block_size for f in formats if f is not None)

  def names(name: str, shape: Sequence[int]) -> notation_lib.Names:
    if name == "group_sizes":
      return (notation_lib.WHOLE,)
    if name in ("global_scale", "global_power"):
      dims = zip(shape, "gnk" if shape else "", strict=True)
      return [d if size != 1 else notation_lib.OWN for size, d in dims]
    return "mn" if name.startswith("lhs") else "mk"

  return notation_lib.Notation(
    operands=[names(name, x.shape) for name, x in call.arrays().items()],
    results=["gnk"],
    sizes={
      "m": (
        call.num_rows,
        notation_lib.granule_of(call.num_rows, *blocks),
      ),
      "g": (num_groups, 1),
      "n": (n, 1),
      "k": (k, 1),
    },
    reductions="m",
  )


def assign_contraction(
  call: calls.RaggedContraction,
  specs: Mapping[str, Spec],
  wanted: Spec | None,
  axis_sizes: Mapping[str, int],
) -> assignment_lib.Assignment:
  """Decides which mesh axes shard which dimension.

  In this order, an axis goes to the first dimension that has it:

  1. Groups take the sharding of the wanted result.
  2. Rows keep a sharding that both operands have.
  3. Columns keep that of their operand.
  4. Rows take the sharding of one operand.
  5. Columns take that of the wanted result.

  The gradient of an expert is wanted on the expert's device. Rows that have
  axes of the groups are gathered.
  """
  lhs, rhs = specs["lhs"], specs["rhs"]
  wanted = wanted or ((),) * 3
  preferences = [
    ("g", wanted[0]),
    ("m", lhs[0] if lhs[0] == rhs[0] else ()),
    ("n", lhs[1]),
    ("k", rhs[1]),
    ("m", lhs[0] or rhs[0]),
    ("n", wanted[1]),
    ("k", wanted[2]),
  ]
  return assignment_lib.assign(
    contraction_notation(call), preferences, wanted, call.shape, axis_sizes
  )


def _column_granule(call: calls.RaggedDotCall) -> int:
  """Returns the granule of columns: a shard has a multiple of it.

  It keeps the two columns of a gated result together. It keeps blocks of rhs
  whole if the columns are its blocked dimension.
  """
  blocks = [2 if call.is_gated else 1]
  format = call.rhs.format
  if format is not None and call.rhs.contracting != (call.rhs.axis,):
    blocks.append(format.block_size)
  return notation_lib.granule_of(call.columns, *blocks)


def _k_granule(call: calls.RaggedDotCall) -> int:
  """Returns the granule of k, which keeps blocks whole."""
  size = call.rhs.shape[call.rhs.contracting[0]]
  return notation_lib.granule_of(
    size,
    *(
      side.format.block_size
      for side in (call.lhs, call.rhs)
      if side.format is not None and side.contracting == (side.axis,)
    ),
  )
