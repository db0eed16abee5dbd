# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What one device computes of a ragged dot, and how results are combined.

A device multiplies its rows with its groups, by whatever implementation it has.
A row is of one group, so of all devices that share it one has its result, and
the others have zeros: their sum is that result, whatever followed the products,
and is exact in the result's own dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.dot.sharding import sums
from jaxplugin.jaxext import mesh_axes
from jaxplugin.ragged import calls
from jaxplugin.ragged import epilogue
from jaxplugin.ragged import groups
from jaxplugin.ragged.sharding import assigning

LocalDot = Callable[[calls.Call], jax.Array]


def compute(
  local_dot: LocalDot,
  call: calls.Call,
  assignment: assigning.Assignment,
  axis_sizes: Mapping[str, int],
) -> jax.Array:
  """One device's part of the result.

  Args:
    local_dot: call -> result, computes a call on one device.
    call: of the device's parts of all arrays (`assigning.operand_specs`); its
      group sizes are all.
    assignment: of the whole call.
    axis_sizes: size of each mesh axis.
  """
  taker = mesh_axes.Taker(axis_sizes)
  own, first_row = _own(call, assignment, taker.count(assignment.rows))
  if assignment.contracting:
    of_part, _ = own.steps()
    part = rolled(local_dot(of_part), first_row)
    total = sums.combined(part, assignment.reduce, assignment.scatter)
    _, after = call.steps()
    result = _following(total, after, assignment, taker)
    return _activated(result, call, assignment.out[1], axis_sizes)
  if call.activation == "swiglu" and assignment.columns:
    result = local_dot(own.before_activation())
    result = _activated(result, call, assignment.columns, axis_sizes)
  else:
    result = local_dot(own)
  result = rolled(result, first_row)
  return sums.combined(result, assignment.reduce, assignment.scatter)


# Which rows and groups are a device's.


def _own(
  call: calls.Call, assignment: assigning.Assignment, row_parts: int
) -> tuple[calls.Call, jax.Array | None]:
  """The call of the rows of a device's groups, and the first of these rows.

  Rows of other groups may come before them, which no size says: all rows are
  rolled until these are the first.
  """
  if not assignment.rows and not assignment.groups:
    return call, None
  sizes, first_row = own_sizes(
    call.group_sizes,
    call.num_rows,
    rows=assignment.rows,
    row_parts=row_parts,
    groups_=assignment.groups,
    num_groups=call.num_groups,
  )
  by_rows = {"lhs", "lhs_scale"}
  if call.global_scale is not None and call.global_scale.ndim == 2:
    by_rows |= {"global_scale", "global_power"}
  shifted = {
    name: rolled(x, None if first_row is None else -first_row)
    for name, x in call.arrays().items()
    if name in by_rows
  }
  return call.with_arrays(group_sizes=sizes, **shifted), first_row


def own_sizes(
  group_sizes: jax.Array,
  num_rows: int,
  *,
  rows: mesh_axes.Axes,
  row_parts: int,
  groups_: mesh_axes.Axes,
  num_groups: int,
) -> tuple[jax.Array, jax.Array | None]:
  """The sizes of a device's groups among its rows, and the first such row.

  Args:
    group_sizes: of all groups among all rows.
    num_rows: of a device.
    rows: axes that rows are split over.
    row_parts: into how many parts.
    groups_: axes that groups are split over; without, the first row is None.
    num_groups: of a device.
  """
  starts, ends = _clipped(
    group_sizes,
    num_rows=num_rows * row_parts,
    begin=_index(rows) * num_rows,
    size=num_rows,
  )
  sizes = ends - starts
  if not groups_:
    return sizes, None
  first_group = _index(groups_) * num_groups
  own = lax.dynamic_slice_in_dim(sizes, first_group, num_groups)
  return own, starts[first_group]


def _clipped(
  group_sizes: jax.Array, *, num_rows: int, begin: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
  """Of each group the first row and the one after the last, in a part of all.

  Args:
    group_sizes: i32[groups].
    num_rows: of which those are the sizes.
    begin: the first row of the part.
    size: the number of its rows.
  """
  ends = groups.ends(group_sizes, num_rows)
  starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
  return jnp.clip(starts - begin, 0, size), jnp.clip(ends - begin, 0, size)


def _index(axes: mesh_axes.Axes) -> jax.Array:
  """Which part of a dimension is this device's."""
  return lax.axis_index(axes) if axes else jnp.int32(0)


def rolled(x: jax.Array, by: jax.Array | None) -> jax.Array:
  """Rows that many places later, the last ones first; None is as they are."""
  return x if by is None else jnp.roll(x, by, axis=0)


# How results become one.


def _following(
  total: jax.Array,
  call: calls.Call,
  assignment: assigning.Assignment,
  taker: mesh_axes.Taker,
) -> jax.Array:
  """f32: what follows sums, but the activation, of rows of any groups."""
  num_rows = call.num_rows * taker.count(assignment.rows)
  part, _ = total.shape
  starts, ends = _clipped(
    call.group_sizes,
    num_rows=num_rows,
    begin=_index(assignment.out[0]) * part,
    size=part,
  )
  lhs, rhs = call.lhs.values, call.rhs.values
  of_rows = jax.ShapeDtypeStruct((part, *lhs.shape[1:]), lhs.dtype)
  of_groups = jax.ShapeDtypeStruct((*starts.shape, *rhs.shape[1:]), rhs.dtype)
  whole = call.with_arrays(
    lhs=of_rows, rhs=of_groups, group_sizes=ends - starts
  )
  return epilogue.apply(total.astype(np.float32), whole.before_activation())


def _activated(
  x: jax.Array,
  call: calls.Call,
  axes: mesh_axes.Axes,
  axis_sizes: Mapping[str, int],
) -> jax.Array:
  """The activation, and the cast.

  Args:
    x: f32, before it; zero in no group's rows, of which activations are zero.
    call: which activation and dtype.
    axes: over which the columns of `x` are split.
    axis_sizes: size of each mesh axis.
  """
  parts = mesh_axes.Taker(axis_sizes).count(axes)
  if call.activation == "swiglu" and parts > 1:
    x = _paired_halves(x, axes, parts)
  result = epilogue.activate(x, call.activation)
  return result.astype(call.preferred_element_type)


def _paired_halves(x: jax.Array, axes: mesh_axes.Axes, parts: int) -> jax.Array:
  """Gates beside their values, where all gates come before all values.

  Of 2 * parts chunks of columns device i has 2 i and 2 i + 1, and needs i and
  parts + i. Each chunk is sent once: two rounds, in each of which every device
  sends one and gets one. In the first, gates go to even devices and values to
  odd ones; in the second it is the other way.
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
    # Those of the lower half have gates, those of the upper one values.
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
