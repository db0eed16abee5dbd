# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Ragged dots and contractions on several devices.

`assign` decides which mesh axes shard which dimension. Unlike in a dot, weights
stay on their devices, and rows are gathered to them.

`compute` is the part of each device, which multiplies its rows by its groups. A
row belongs to one group, so one device computes its result and the others have
zeros there. Their sum is therefore exact in the dtype of the result, also after
an epilogue.

Explicit axes become auto axes of the partitioner (`mesh_axes.automatic`), also
in derivatives, because types do not describe the assignment of rows to groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxplugin.dot import sides
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import assignment as assignment_lib
from jaxplugin.operation import notation as notation_lib
from jaxplugin.operation import split
from jaxplugin.ragged import calls, epilogue, groups

# Assignment of mesh axes.


def can_partition(call: calls.Call) -> bool:
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
  call: calls.RaggedDotCall, shardings: split.Shardings
) -> split.Assignment:
  """Decides which mesh axes shard which dimension.

  In this order, an axis goes to the first dimension that has it:

  1. Groups, columns and k keep the sharding of rhs. It is therefore never
     gathered, unless an axis does not divide it.
  2. Rows keep the sharding of lhs.
  3. k takes the sharding of lhs.
  4. Dimensions without sharding take that of the wanted result.

  If groups and rows have the same axes, the rows are gathered. The result is
  scattered if these axes are wanted for it. If no axes are wanted, the sharding
  of the rows is kept.
  """
  dims = notation(call)
  lhs = shardings.operands["lhs"]
  rhs = dict(zip(dims.operands[1], shardings.operands["rhs"], strict=True))
  wanted = shardings.wanted((lhs[0], ()))
  preferences = [
    *((name, rhs[name]) for name in "gnk"),
    ("m", lhs[0]),
    ("k", lhs[1]),
    *zip("mn", wanted, strict=True),
  ]
  found = assignment_lib.assign(
    dims, preferences, wanted, call.shape, shardings.axis_sizes
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
  call: calls.RaggedContraction, shardings: split.Shardings
) -> split.Assignment:
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
  lhs, rhs = shardings.operands["lhs"], shardings.operands["rhs"]
  wanted = shardings.wanted(((),) * 3)
  preferences = [
    ("g", wanted[0]),
    ("m", lhs[0] if lhs[0] == rhs[0] else ()),
    ("n", lhs[1]),
    ("k", rhs[1]),
    ("m", lhs[0] or rhs[0]),
    ("n", wanted[1]),
    ("k", wanted[2]),
  ]
  dims = contraction_notation(call)
  return assignment_lib.assign(
    dims, preferences, wanted, call.shape, shardings.axis_sizes
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


# The part of each device.


def prepared(call: Any) -> Any:
  """Converts a call's sides to bytes, with linear scales without padding.

  New arrays drop a side's `square_scale`, as a shard may begin inside of a
  square block.
  """
  return call.with_sides(sides.Side.as_bytes)


def compute(
  local: Callable[[calls.RaggedDotCall], jax.Array],
  call: calls.RaggedDotCall,
  assignment: split.Assignment,
) -> jax.Array:
  """Computes a device's shard of the result.

  Args:
    call: call of the device's shards, with the sizes of all groups.
  """
  axes = assignment.axes
  own, first_row = _own(call, assignment)
  if axes["k"]:
    part, after = own.steps()[0], call.steps()[1]
    rows = rolled(local(part), first_row)
    total = assignment_lib.reduced(rows, assignment)
    result = _following(total, after, assignment)
    parts = assignment.count(assignment.results[0][1])
    return _activated(result, call, assignment.results[0][1], parts)
  if call.activation == "swiglu" and axes["n"]:
    result = local(own.before_activation())
    parts = assignment.count(axes["n"])
    result = _activated(result, call, axes["n"], parts)
  else:
    result = local(own)
  return assignment_lib.reduced(rolled(result, first_row), assignment)


# Rows and groups of a device.


def _own(
  call: calls.RaggedDotCall, assignment: split.Assignment
) -> tuple[calls.RaggedDotCall, jax.Array | None]:
  """Returns the call of a device's groups, and the first of their rows.

  Rows are rolled, so that the device's groups begin at row 0: group sizes
  cannot describe rows of other groups before them.
  """
  sizes, first_row = _own_sizes(call, assignment, call.rhs.shape[0])
  by_rows = {"lhs", "lhs_scale"}
  if call.global_scale is not None and call.global_scale.ndim == 2:
    by_rows |= {"global_scale", "global_power"}
  shifted = {
    name: rolled(x, None if first_row is None else -first_row)
    for name, x in call.arrays().items()
    if name in by_rows
  }
  return call.with_arrays(group_sizes=sizes, **shifted), first_row


def _own_sizes(
  call: calls.Call, assignment: split.Assignment, num_groups: int
) -> tuple[jax.Array, jax.Array | None]:
  """Returns the sizes of a device's groups within its rows, and the first row.

  The first row is None if each device has all groups.

  Args:
    assignment: mesh axes of the rows, "m", and of the groups, "g".
    num_groups: number of groups of a device.
  """
  axes = assignment.axes
  if not axes["m"] and not axes["g"]:
    return call.group_sizes, None
  starts, ends = _clipped(
    call.group_sizes,
    num_rows=call.num_rows * assignment.count(axes["m"]),
    begin=_index(axes["m"]) * call.num_rows,
    size=call.num_rows,
  )
  sizes = ends - starts
  if not axes["g"]:
    return sizes, None
  first_group = _index(axes["g"]) * num_groups
  own = lax.dynamic_slice_in_dim(sizes, first_group, num_groups)
  return own, starts[first_group]


def _clipped(
  group_sizes: jax.Array, *, num_rows: int, begin: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the begin and end of each group within a shard of the rows.

  Args:
    num_rows: number of all rows.
    begin: first row of the shard.
    size: number of rows of the shard.
  """
  ends = groups.ends(group_sizes, num_rows)
  starts = groups.starts(ends)
  return jnp.clip(starts - begin, 0, size), jnp.clip(ends - begin, 0, size)


def _index(axes: mesh_axes.Axes) -> jax.Array:
  """Returns the index of this device along mesh axes."""
  return lax.axis_index(axes) if axes else jnp.int32(0)


def rolled(x: jax.Array, by: jax.Array | None) -> jax.Array:
  """Rolls rows forward by a number of rows; None does not roll them."""
  return x if by is None else jnp.roll(x, by, axis=0)


# The combined result.


def _following(
  total: jax.Array,
  call: calls.RaggedDotCall,
  assignment: split.Assignment,
) -> jax.Array:
  """Applies the epilogue except the activation to a shard of the sums.

  Returns:
    f32[rows of the shard, columns].
  """
  num_rows = call.num_rows * assignment.count(assignment.axes["m"])
  part, _ = total.shape
  starts, ends = _clipped(
    call.group_sizes,
    num_rows=num_rows,
    begin=_index(assignment.results[0][0]) * part,
    size=part,
  )
  lhs = call.lhs.values
  of_rows = jax.ShapeDtypeStruct((part, *lhs.shape[1:]), lhs.dtype)
  whole = call.with_arrays(lhs=of_rows, group_sizes=ends - starts)
  return epilogue.apply(total.astype(np.float32), whole.before_activation())


def _activated(
  x: jax.Array,
  call: calls.RaggedDotCall,
  axes: mesh_axes.Axes,
  parts: int,
) -> jax.Array:
  """Applies the activation and casts.

  Args:
    x: f32, zero in rows without a group. These rows stay zero, because every
      activation of zero is zero.
    axes: mesh axes of the columns of `x`.
    parts: number of devices along these axes.
  """
  if call.activation == "swiglu" and parts > 1:
    x = _paired_halves(x, axes, parts)
  result = epilogue.activate(x, call.activation)
  return result.astype(call.preferred_element_type)


def _paired_halves(x: jax.Array, axes: mesh_axes.Axes, parts: int) -> jax.Array:
  """Moves columns so that each device has gates and the values of these gates.

  All gates come before all values. Of 2 * parts chunks of columns, device i has
  chunks 2 i and 2 i + 1 and needs chunks i and parts + i. In each of two rounds
  every device sends and receives one chunk. In the first round even devices
  receive gates and odd devices values, in the second round the reverse.
  """
  index = _index(axes)
  first, second = jnp.split(x, 2, axis=1)
  if parts % 2:
    rounds = [first, second]
    chunks = [
      [2 * i for i in range(parts)],
      [2 * i + 1 for i in range(parts)],
    ]
  else:
    # Devices of the lower half have gates, the others values.
    is_upper = index >= parts // 2
    rounds = [
      jnp.where(is_upper, second, first),
      jnp.where(is_upper, first, second),
    ]
    upper = np.arange(parts) >= parts // 2
    chunks = [
      [2 * i + int(upper[i]) for i in range(parts)],
      [2 * i + 1 - int(upper[i]) for i in range(parts)],
    ]
  to_even, to_odd = (
    lax.ppermute(sent, axes, [(i, c % parts) for i, c in enumerate(of_device)])
    for sent, of_device in zip(rounds, chunks, strict=True)
  )
  is_even = index % 2 == 0
  gate = jnp.where(is_even, to_even, to_odd)
  value = jnp.where(is_even, to_odd, to_even)
  return jnp.concatenate([gate, value], axis=1)


# Contractions.


def compute_contraction(
  local: Callable[[calls.RaggedContraction], jax.Array],
  call: calls.RaggedContraction,
  assignment: split.Assignment,
) -> jax.Array:
  """Computes a device's shard of a contraction.

  A device computes its groups from all of their rows. If rows are sharded over
  other axes, it computes partial sums.
  """
  axes, dtype = assignment.axes, call.preferred_element_type
  call = call.with_sides(sides.Side.as_elements)
  num_groups = call.num_groups // assignment.count(axes["g"])
  sizes, first_row = _own_sizes(call, assignment, num_groups)
  call = call.replace(group_sizes=sizes)
  if first_row is not None:
    call = call.with_sides(functools.partial(_rolled, by=-first_row))
  if not axes["m"]:
    return local(call)
  part_dtype = call.reduce_dtype or np.dtype(np.float32)
  part = local(call.replace(preferred_element_type=part_dtype))
  return assignment_lib.reduced(part, assignment).astype(dtype)


def _rolled(side: sides.Side, by: jax.Array) -> sides.Side:
  """Dequantizes a side and rolls its rows.

  Rolled rows would not start at a block boundary, so the side is dequantized.
  """
  plain = side.in_usual_order().plain()
  return plain.replace(values=rolled(plain.values, by))


# Meshes with explicit axes.


def result_sharding(
  call: calls.Call, out_sharding: Any = None
) -> NamedSharding | None:
  """Returns the sharding of the result's type; None without explicit axes.

  Args:
    out_sharding: requested `PartitionSpec`, or `NamedSharding` of explicit
      axes. The result is the sharding that `lax.ragged_dot` would return. None
      derives it from the operands.

  Raises:
    NotImplementedError: If the result would be unreduced.
    ValueError: If `out_sharding` has more dimensions than the result. JAX
      raises for other shardings that do not fit.
  """
  mesh = mesh_axes.mesh_of(call.flatten())
  if out_sharding is None:
    if mesh is None:
      return None
    call = call.without_origins()
    specs = call.named(map(mesh_axes.spec_of, call.flatten()))
    is_contraction = isinstance(call, calls.RaggedContraction)
    how: Any = assign_contraction if is_contraction else assign
    shardings = split.Shardings(operands=specs, axis_sizes=mesh.shape)
    (spec,) = how(call, shardings).results
    return NamedSharding(mesh, mesh_axes.partition_spec(spec))
  who, shape = sides.who(), tuple(call.shape)
  mesh_axes.validate_out_sharding(who, out_sharding)
  spec = getattr(out_sharding, "spec", out_sharding)
  if isinstance(spec, PartitionSpec) and len(spec) > len(shape):
    raise ValueError(
      f"{who}: out_sharding must have at most {len(shape)} dimensions, as the"
      f" result {shape} has, got {out_sharding}; pass an axis or None for each"
    )
  mesh = getattr(out_sharding, "mesh", None) or mesh
  mesh = getattr(mesh, "abstract_mesh", mesh)
  result = functools.partial(_like_result, shape, out_sharding)
  return mesh_axes.result_sharding(result, mesh=mesh)


def _like_result(shape: tuple[Any, ...], out_sharding: Any) -> jax.Array:
  """Computes JAX's ragged dot with k = 0 or m = 0, and a result of a shape."""
  dtype = np.float32
  *lead, rows, columns = shape
  if not lead:
    return lax.ragged_dot(
      jnp.zeros((rows, 0), dtype),
      jnp.zeros((1, 0, columns), dtype),
      jnp.zeros((1,), np.int32),
      out_sharding=out_sharding,
    )
  return lax.ragged_dot_general(
    jnp.zeros((0, rows), dtype),
    jnp.zeros((0, columns), dtype),
    jnp.zeros(lead, np.int32),
    lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ()),
    out_sharding=out_sharding,
  )
