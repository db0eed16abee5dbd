# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A ragged contraction split over devices.

The gradient of an expert is wanted on the expert's device. Each device computes
the gradients of its groups from all of their rows. If rows are sharded over
other axes, it computes partial sums.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

import jax
import numpy as np

from jaxplugin.dot import sides
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import assignment as assignment_lib
from jaxplugin.operation import notation as notation_lib
from jaxplugin.ragged import calls
from jaxplugin.ragged.sharding import per_device

Local = Callable[[calls.RaggedContraction], jax.Array]


def notation(call: calls.RaggedContraction) -> notation_lib.Notation:
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


def assign(
  call: calls.RaggedContraction,
  specs: Mapping[str, mesh_axes.Spec],
  wanted: mesh_axes.Spec | None,
  axis_sizes: Mapping[str, int],
) -> assignment_lib.Assignment:
  """Decides which mesh axes shard which dimension.

  In this order, an axis goes to the first dimension that has it:

  1. Groups take the sharding of the wanted result.
  2. Rows keep a sharding that both operands have.
  3. Columns keep that of their operand.
  4. Rows take the sharding of one operand.
  5. Columns take that of the wanted result.

  Rows that have axes of the groups are gathered.
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
    notation(call), preferences, wanted, call.shape, axis_sizes
  )


def compute(
  local: Local,
  call: calls.RaggedContraction,
  assignment: assignment_lib.Assignment,
  axis_sizes: Mapping[str, int],
) -> jax.Array:
  """Computes a device's shard of the result."""
  taker, axes = mesh_axes.Taker(axis_sizes), assignment.axes
  dtype = call.preferred_element_type
  call = call.replace(lhs=call.lhs.as_elements(), rhs=call.rhs.as_elements())
  if axes["m"] or axes["g"]:
    sizes, first_row = per_device.own_sizes(
      call.group_sizes,
      call.num_rows,
      rows=axes["m"],
      row_parts=taker.count(axes["m"]),
      groups_=axes["g"],
      num_groups=call.num_groups // taker.count(axes["g"]),
    )
    call = call.replace(group_sizes=sizes)
    if first_row is not None:
      call = call.replace(
        lhs=_rolled(call.lhs, -first_row), rhs=_rolled(call.rhs, -first_row)
      )
  if not axes["m"]:
    return local(call)
  part_dtype = call.reduce_dtype or np.dtype(np.float32)
  part = local(call.replace(preferred_element_type=part_dtype))
  return assignment_lib.reduced(part, assignment).astype(dtype)


def _rolled(side: sides.Side, by: jax.Array) -> sides.Side:
  """Dequantizes a side and rolls its rows.

  Rolled rows would not start at a block boundary, so the side is dequantized.
  """
  plain = calls.in_usual_order(side).plain()
  return plain.replace(values=per_device.rolled(plain.values, by))
