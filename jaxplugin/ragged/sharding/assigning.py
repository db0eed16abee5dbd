# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`assign_axes`: which mesh axes each dimension of a ragged dot is split over.

As `dot.sharding.assigning`, with other preferences: the weights of all groups
are what devices were given to hold, so they stay where they are, and rows come
to them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxplugin.dot.sharding import sums
from jaxplugin.jaxext import mesh_axes
from jaxplugin.ragged import calls

Axes = mesh_axes.Axes
Spec = mesh_axes.Spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
  """The mesh axes that each dimension of a call is computed with.

  Attributes:
    rows: of lhs.
    groups: of rhs: a device multiplies with its own groups.
    columns: of the product.
    contracting: a device has a part of each sum.
    out: of both dimensions of the result, after any scatter.
    scatter: (result dimension, axes) of each dimension along which the sum over
      some axes is scattered; over the others it is replicated.
  """

  rows: Axes = ()
  groups: Axes = ()
  columns: Axes = ()
  contracting: Axes = ()
  out: Spec = ((), ())
  scatter: sums.Scatter = ()

  @property
  def reduce(self) -> Axes:
    """Over which results of devices are summed."""
    return self.groups + self.contracting


def assign_axes(
  call: calls.Call,
  lhs_spec: Spec,
  rhs_spec: Spec,
  out_spec: Spec | None,
  axis_sizes: Mapping[str, int],
) -> Assignment:
  """Decides which mesh axes split which dimension.

  In order: groups, columns and the contracting dimension keep the sharding of
  rhs, which therefore is never gathered (but where an axis does not divide it);
  rows keep that of lhs; the contracting dimension takes that of lhs where its
  axes are still free; and dimensions without sharding take that of the wanted
  result. Where groups have the axes of the rows, the rows are gathered, and
  their results scattered back if that is wanted.

  Args:
    call: the call.
    lhs_spec, rhs_spec: axes of their dimensions.
    out_spec: axes wanted for the result; None wants the rows to stay as they
      are in lhs.
    axis_sizes: size of each mesh axis.
  """
  taker = mesh_axes.Taker(axis_sizes)
  (contracting,) = call.rhs.contracting
  columns = 3 - contracting
  wanted_rows, wanted_columns = out_spec or (lhs_spec[0], ())
  of_columns = call.columns, column_granule(call)
  of_contracting = call.rhs.shape[contracting], contracting_granule(call)

  groups = taker.take(rhs_spec[0], call.num_groups)
  n = taker.take(rhs_spec[columns], *of_columns)
  k = taker.take(rhs_spec[contracting], *of_contracting)
  m = taker.take(lhs_spec[0], call.num_rows)
  k = k or taker.take(lhs_spec[1], *of_contracting)
  m = m or taker.take(wanted_rows, call.num_rows)
  n = n or taker.take(wanted_columns, *of_columns)

  wanted = (wanted_rows, wanted_columns)
  out, scatter = sums.scattered(
    (m, n), (*groups, *k), wanted, call.shape, taker
  )
  return Assignment(
    rows=m,
    groups=groups,
    columns=n,
    contracting=k,
    out=out,
    scatter=scatter,
  )


def column_granule(call: calls.Call) -> int:
  """How many columns of the product stay together.

  Those of one result, of a gated activation; whole blocks of rhs, where the
  columns are its blocked dimension.
  """
  granule = 2 if call.is_gated else 1
  format = call.rhs.format
  if format is not None and call.rhs.contracting != (call.rhs.axis,):
    granule = math.lcm(granule, format.block_size)
  return granule


def contracting_granule(call: calls.Call) -> int:
  """How many values of the contracting dimension stay together: blocks."""
  granule = 1
  for side in (call.lhs, call.rhs):
    if side.format is not None and side.contracting == (side.axis,):
      granule = math.lcm(granule, side.format.block_size)
  return granule


def operand_specs(call: calls.Call, assignment: Assignment) -> dict[str, Spec]:
  """The axes of each dimension of every array, by its name.

  Where devices have parts of the sums, what follows these is made after all are
  summed, by each device of its own part of the result: of any group's rows. Of
  global scales that is so without a reduce_dtype; with one they are of parts.
  """
  (contracting,) = call.rhs.contracting
  lhs = (assignment.rows, assignment.contracting)
  rhs = [assignment.groups, (), ()]
  rhs[contracting] = assignment.contracting
  rhs[3 - contracting] = assignment.columns
  groups, rows = assignment.groups, assignment.rows
  scale_groups, scale_rows = groups, rows
  columns = assignment.columns
  if assignment.contracting:
    groups, (rows, columns) = (), assignment.out
    if call.reduce_dtype is None:
      scale_groups, scale_rows = groups, rows
  specs: dict[str, Spec] = {
    "lhs": lhs,
    "lhs_scale": lhs,
    "rhs": tuple(rhs),
    "rhs_scale": tuple(rhs),
    "group_sizes": ((),),
    "bias": (groups, columns),
  }

  def spec(name: str, array: Any) -> Spec:
    if name in specs:
      return specs[name]
    # Global scales: one, one a group, or one a row.
    return ((), (scale_groups,), (scale_rows, ()))[len(array.shape)]

  return {name: spec(name, array) for name, array in call.arrays().items()}
