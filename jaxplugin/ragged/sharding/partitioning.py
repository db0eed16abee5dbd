# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A ragged dot as a function that XLA's partitioner can split.

As `dot.sharding.partitioning`: `assigning.assign_axes` is the one rule, which
the types of results under explicit axes, the partitioner's propagation and its
partitioning follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from typing import Final

import jax
from jax.sharding import NamedSharding

from jaxplugin.arrays import layouts
from jaxplugin.core import forms
from jaxplugin.dot import sides
from jaxplugin.dot.sharding import side_bytes
from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext import mesh_axes
from jaxplugin.jaxext.partitioner import calls_private
from jaxplugin.ragged import calls
from jaxplugin.ragged.sharding import assigning
from jaxplugin.ragged.sharding import notation
from jaxplugin.ragged.sharding import shares
from jaxplugin.runtime import exporting


def can_partition(call: calls.Call) -> bool:
  """Whether it fits the rule: static sizes, whole blocks, nothing empty."""
  problem = call.problem()
  if not problem.sizes_are_static or problem.is_empty:
    return False
  if not all(map(has_whole_blocks, (call.lhs, call.rhs))):
    return False
  (contracting,) = call.rhs.contracting
  size = call.rhs.shape[contracting]
  return size % assigning.contracting_granule(call) == 0


def has_whole_blocks(side: sides.Side) -> bool:
  """Whether blocks can be dealt to devices as they are."""
  format = side.format
  if format is None:
    return True
  if format.is_fp4 and format.block_size % 2:
    return False  # bytes are pairs, which a block must not share
  assert side.axis is not None
  return side.shape[side.axis] % format.block_size == 0


def prepared(call: Any) -> Any:
  """The call as it is split: bytes, and linear scales without padding."""
  return call.replace(lhs=_prepared(call.lhs), rhs=_prepared(call.rhs))


def _prepared(side: sides.Side) -> sides.Side:
  if side.scale_layout != layouts.LINEAR:
    side = calls.as_floats(side)  # bytes are not swizzled back
  return side_bytes.to_bytes(side_bytes.without_words(side).with_linear_scale())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
  """How the calls of one operation are split.

  Attributes:
    assign: (call, axes of its arrays by name, axes wanted for the result or
      None, sizes of axes) -> what each dimension is split over, and `out`, the
      axes of the result.
    operand_specs: (call, what `assign` returned) -> axes of its arrays by name.
    compute: (call -> result on one device, a device's part of the call, what
      `assign` returned, sizes of axes) -> a device's part of the result.
    sharding_rule: (call, sizes of axes) -> Shardy's rule and its options.
  """

  assign: Callable[..., Any]
  operand_specs: Callable[..., dict[str, mesh_axes.Spec]]
  compute: Callable[..., jax.Array]
  sharding_rule: Callable[..., tuple[str, dict[str, Any]]]


RAGGED_DOT: Final = Split(
  assign=lambda call, specs, out_spec, axis_sizes: assigning.assign_axes(
    call, specs["lhs"], specs["rhs"], out_spec, axis_sizes
  ),
  operand_specs=assigning.operand_specs,
  compute=shares.compute,
  sharding_rule=notation.sharding_rule,
)


def partitioned(
  split: Split,
  abstract_dot: Callable[[Any], jax.Array],
  local_dot: Callable[[Any], jax.Array],
  form: forms.Call,
  key: str | None,
) -> Callable[..., jax.Array]:
  """Makes a function of the arrays of a `prepared` call.

  Args:
    split: of the operation.
    abstract_dot: call -> result, traced for the result's type.
    local_dot: call -> result, computes a call on one device.
    form: of the call.
    key: of all that decides what these do; None where that is not known.
  """

  def whole(*flat):
    return abstract_dot(form.filled(flat))

  def decode(mesh, arg_shapes, *more):
    arrays = [*arg_shapes, *more]
    ndims = [len(x.shape) for x in arrays]
    tilings = [
      jax_private.partitioner_tiling(x.sharding, ndim)
      for x, ndim in zip(arrays, ndims, strict=True)
    ]
    mesh, specs = mesh_axes.decode(mesh, tilings, ndims)
    return mesh, form.named(specs[: len(arg_shapes)]), specs[-1]

  def infer(mesh, arg_shapes, result_shape):
    del result_shape
    call = form.filled(arg_shapes)
    mesh, specs, _ = decode(mesh, arg_shapes)
    assignment = split.assign(call, specs, None, mesh.shape)
    return NamedSharding(mesh, mesh_axes.partition_spec(assignment.out))

  def partition(mesh, arg_shapes, result_shape):
    call = form.filled(arg_shapes)
    mesh, specs, out_spec = decode(mesh, arg_shapes, result_shape)
    assignment = split.assign(call, specs, out_spec, mesh.shape)
    named = lambda spec: NamedSharding(mesh, mesh_axes.partition_spec(spec))
    operand_specs = split.operand_specs(call, assignment)
    arg_shardings = tuple(map(named, operand_specs.values()))

    def per_shard(*flat):
      own = form.filled(flat)
      return split.compute(local_dot, own, assignment, mesh.shape)

    out_sharding = named(assignment.out)
    return mesh, per_shard, out_sharding, arg_shardings

  def rule(mesh, value_types, result_types):
    del result_types
    call = form.filled(map(side_bytes.TypeShape, value_types))
    return split.sharding_rule(call, mesh_axes.automatic_sizes(mesh))

  how = calls_private.Split(
    infer=infer, partition=partition, rule=rule, key=key
  )
  return exporting.split(whole, how)
