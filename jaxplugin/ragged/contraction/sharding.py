# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How a ragged contraction is split over the devices of a mesh.

As `ragged.sharding`. Gradients of experts are wanted where the experts are, so
each device makes those of its own groups, from all rows; rows that are split
over other axes give parts of sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import numpy as np

from jaxplugin.dot import sides
from jaxplugin.dot.sharding import sums
from jaxplugin.jaxext import mesh_axes
from jaxplugin.ragged import calls as ragged_calls
from jaxplugin.ragged.contraction import calls
from jaxplugin.ragged.sharding import notation
from jaxplugin.ragged.sharding import partitioning
from jaxplugin.ragged.sharding import shares

Axes = mesh_axes.Axes
Spec = mesh_axes.Spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
  """The mesh axes that each dimension of a call is computed with.

  Attributes:
    rows: of both operands: partial results are summed over them.
    groups, lhs_columns, rhs_columns: of the result.
    out: of the result, after any scatter.
    scatter: (result dimension, axes) of each dimension along which the sum over
      some axes is scattered.
  """

  rows: Axes
  groups: Axes
  lhs_columns: Axes
  rhs_columns: Axes
  out: Spec
  scatter: sums.Scatter


def can_partition(call: calls.Contraction) -> bool:
  """Whether it fits the rule: static sizes, whole blocks, nothing empty."""
  problem = call.problem()
  sizes = (problem.groups, problem.m, problem.n, problem.k)
  return (
    None not in sizes
    and 0 not in sizes
    and all(map(partitioning.has_whole_blocks, (call.lhs, call.rhs)))
    and call.num_rows % _row_granule(call) == 0
  )


def assign(
  call: calls.Contraction,
  specs: Mapping[str, Spec],
  out_spec: Spec | None,
  axis_sizes: Mapping[str, int],
) -> Assignment:
  """Decides which mesh axes split which dimension.

  In order: groups take what is wanted of the result; rows what both operands
  have; columns what each operand has; rows what one of them has; and columns
  what is wanted. Rows that want axes of the groups are gathered.
  """
  taker = mesh_axes.Taker(axis_sizes)
  num_groups, n, k = call.shape
  wanted = out_spec or ((),) * 3
  lhs, rhs = specs["lhs"], specs["rhs"]
  of_rows = call.num_rows, _row_granule(call)

  groups = taker.take(wanted[0], num_groups)
  rows = taker.take(lhs[0], *of_rows) if lhs[0] == rhs[0] else ()
  lhs_columns, rhs_columns = taker.take(lhs[1], n), taker.take(rhs[1], k)
  rows = rows or taker.take(lhs[0] or rhs[0], *of_rows)
  lhs_columns = lhs_columns or taker.take(wanted[1], n)
  rhs_columns = rhs_columns or taker.take(wanted[2], k)

  parts = (groups, lhs_columns, rhs_columns)
  out, scatter = sums.scattered(parts, rows, wanted, call.shape, taker)
  return Assignment(
    rows=rows,
    groups=groups,
    lhs_columns=lhs_columns,
    rhs_columns=rhs_columns,
    out=out,
    scatter=scatter,
  )


def _row_granule(call: calls.Contraction) -> int:
  """How many rows stay together: those of a block."""
  formats = (side.format for side in (call.lhs, call.rhs))
  return math.lcm(*(f.block_size for f in formats if f is not None))


def operand_specs(
  call: calls.Contraction, assignment: Assignment
) -> dict[str, Spec]:
  """The axes of each dimension of every array, by its name."""
  lhs = (assignment.rows, assignment.lhs_columns)
  rhs = (assignment.rows, assignment.rhs_columns)
  specs: dict[str, Spec] = {
    "lhs": lhs,
    "lhs_scale": lhs,
    "rhs": rhs,
    "rhs_scale": rhs,
    "group_sizes": ((),),
  }
  columns = ((), assignment.lhs_columns, assignment.rhs_columns)

  def spec(name: str, shape: Sequence[int]) -> Spec:
    if name in specs:
      return specs[name]
    sizes = zip(shape, columns if shape else (), strict=True)
    return tuple(axes if size != 1 else () for size, axes in sizes)

  return {name: spec(name, x.shape) for name, x in call.arrays().items()}


def sharding_rule(
  call: calls.Contraction, axis_sizes: Sequence[int] = ()
) -> tuple[str, dict[str, Any]]:
  """Shardy's rule, e.g. "m n, m k, s0 -> g n k"; rows are summed over."""
  counts = {"m": call.num_rows // _row_granule(call)}

  def of(name: str, shape: Sequence[int]) -> str:
    if name == "group_sizes":
      return notation.WHOLE
    if name in ("global_scale", "global_power"):
      return "".join(
        letter if size != 1 else notation.OWN
        for size, letter in zip(shape, "gnk" if shape else "", strict=True)
      )
    return "mn" if name.startswith("lhs") else "mk"

  letters = {name: of(name, x.shape) for name, x in call.arrays().items()}
  return notation.rule_of(call, letters, "gnk", "m", counts, axis_sizes)


def compute(
  local: Callable[[calls.Contraction], jax.Array],
  call: calls.Contraction,
  assignment: Assignment,
  axis_sizes: Mapping[str, int],
) -> jax.Array:
  """One device's part of the result; arguments are of `shares.compute`."""
  taker = mesh_axes.Taker(axis_sizes)
  dtype = call.preferred_element_type
  as_floats = ragged_calls.as_floats
  call = call.replace(lhs=as_floats(call.lhs), rhs=as_floats(call.rhs))
  if assignment.rows or assignment.groups:
    num_groups = call.num_groups // taker.count(assignment.groups)
    sizes, first_row = shares.own_sizes(
      call.group_sizes,
      call.num_rows,
      rows=assignment.rows,
      row_parts=taker.count(assignment.rows),
      groups_=assignment.groups,
      num_groups=num_groups,
    )
    call = call.replace(group_sizes=sizes)
    if first_row is not None:
      call = call.replace(
        lhs=_rolled(call.lhs, -first_row), rhs=_rolled(call.rhs, -first_row)
      )
  if not assignment.rows:
    return local(call)
  part_dtype = call.reduce_dtype or np.dtype(np.float32)
  part = local(call.replace(preferred_element_type=part_dtype))
  total = sums.combined(part, assignment.rows, assignment.scatter)
  return total.astype(dtype)


def _rolled(side: sides.Side, by: jax.Array) -> sides.Side:
  """A plain side: blocks of rows would not lie where blocks can."""
  plain = side.in_usual_order().with_linear_scale().plain()
  return plain.replace(values=shares.rolled(plain.values, by))


RAGGED_CONTRACTION: Final = partitioning.Split(
  assign=assign,
  operand_specs=operand_specs,
  compute=compute,
  sharding_rule=sharding_rule,
)
