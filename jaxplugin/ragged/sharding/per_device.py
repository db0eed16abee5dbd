# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The part of a ragged dot or contraction that each device computes.

A device multiplies its rows by its groups. A row belongs to one group, so one
device computes its result and the others have zeros there. Their sum is
therefore exact in the dtype of the result, also after an epilogue.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.dot import sides
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import assignment as assignment_lib
from jaxplugin.ragged import calls
from jaxplugin.ragged import epilogue
from jaxplugin.ragged import groups


def prepared(call: Any) -> Any:
  """Converts a call's sides to bytes, with linear scales without padding.

  New arrays drop a side's `square_scale`, as a shard may begin inside of a
  square block.
  """
  return call.replace(lhs=_prepared(call.lhs), rhs=_prepared(call.rhs))


def _prepared(side: sides.Side) -> sides.Side:
  if side.scale_layout != layouts.LINEAR:
    side = side.as_elements()  # bytes cannot be unswizzled
  return side.with_bytes().with_linear_scale().as_bytes()


def compute(
  local: Callable[[calls.RaggedDotCall], jax.Array],
  call: calls.RaggedDotCall,
  assignment: assignment_lib.Assignment,
  axis_sizes: Mapping[str, int],
) -> jax.Array:
  """Computes a device's shard of the result.

  Args:
    local: computes a call on one device.
    call: call of the device's shards, with the sizes of all groups.
    assignment: assignment of mesh axes for the whole call.
    axis_sizes: size of each mesh axis.
  """
  taker = mesh_axes.Taker(axis_sizes)
  axes = assignment.axes
  own, first_row = _own(call, axes, taker)
  if axes["k"]:
    part, after = own.steps()[0], call.steps()[1]
    rows = rolled(local(part), first_row)
    total = assignment_lib.reduced(rows, assignment)
    result = _following(total, after, assignment, taker)
    return _activated(result, call, assignment.results[0][1], taker)
  if call.activation == "swiglu" and axes["n"]:
    result = local(own.before_activation())
    result = _activated(result, call, axes["n"], taker)
  else:
    result = local(own)
  return assignment_lib.reduced(rolled(result, first_row), assignment)


# Rows and groups of a device.


def _own(
  call: calls.RaggedDotCall,
  axes: Mapping[str, mesh_axes.Axes],
  taker: mesh_axes.Taker,
) -> tuple[calls.RaggedDotCall, jax.Array | None]:
  """Returns the call of a device's groups, and the first of their rows.

  Rows are rolled, so that the device's groups begin at row 0: group sizes
  cannot describe rows of other groups before them.
  """
  sizes, first_row = _own_sizes(call, axes, taker, call.rhs.shape[0])
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
  call: calls.Call,
  axes: Mapping[str, mesh_axes.Axes],
  taker: mesh_axes.Taker,
  num_groups: int,
) -> tuple[jax.Array, jax.Array | None]:
  """Returns the sizes of a device's groups within its rows, and the first row.

  The first row is None if each device has all groups.

  Args:
    call: call of the device's rows, with the sizes of all groups.
    axes: mesh axes of the rows, "m", and of the groups, "g".
    taker: taker that counts the devices along axes.
    num_groups: number of groups of a device.
  """
  if not axes["m"] and not axes["g"]:
    return call.group_sizes, None
  starts, ends = _clipped(
    call.group_sizes,
    num_rows=call.num_rows * taker.count(axes["m"]),
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
    group_sizes: i32[groups], sizes within all rows.
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
  assignment: assignment_lib.Assignment,
  taker: mesh_axes.Taker,
) -> jax.Array:
  """Applies the epilogue except the activation to a shard of the sums.

  Returns:
    f32[rows of the shard, columns].
  """
  num_rows = call.num_rows * taker.count(assignment.axes["m"])
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
  taker: mesh_axes.Taker,
) -> jax.Array:
  """Applies the activation and casts.

  Args:
    x: f32, zero in rows without a group. These rows stay zero, because every
      activation of zero is zero.
    call: call with the activation and the dtype.
    axes: mesh axes of the columns of `x`.
    taker: taker that counts the devices along axes.
  """
  parts = taker.count(axes)
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
  assignment: assignment_lib.Assignment,
  axis_sizes: Mapping[str, int],
) -> jax.Array:
  """Computes a device's shard of a contraction.

  A device computes its groups from all of their rows. If rows are sharded over
  other axes, it computes partial sums.
  """
  taker, axes = mesh_axes.Taker(axis_sizes), assignment.axes
  dtype = call.preferred_element_type
  call = call.replace(lhs=call.lhs.as_elements(), rhs=call.rhs.as_elements())
  num_groups = call.num_groups // taker.count(axes["g"])
  sizes, first_row = _own_sizes(call, axes, taker, num_groups)
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
  return plain.replace(values=rolled(plain.values, by))
