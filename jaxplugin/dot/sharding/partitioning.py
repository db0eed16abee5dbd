# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How a block-scaled dot is split over the devices of a mesh.

`assigning.assign_axes` is the one rule: a pure function from the mesh axes that
shard each dimension of the operands and of the wanted result to the axes that
each logical dimension (batch, m, n, k) is computed with. Abstract evaluation
(for explicitly sharded types), the partitioner's propagation and its
partitioning all follow it. Operands are brought to the assignment as they are
stored, so whatever has to be gathered travels as quantized bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxplugin.dot import calls
from jaxplugin.dot import epilogue
from jaxplugin.dot.sharding import assigning
from jaxplugin.dot.sharding import side_bytes
from jaxplugin.dot.sharding import sums
from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext import mesh_axes
from jaxplugin.jaxext.partitioner import calls_private
from jaxplugin.runtime import exporting


def operand_specs(
  call: calls.Call, assignment: assigning.Assignment
) -> dict[str, mesh_axes.Spec]:
  """The axes of each dimension of every array, by its name."""
  of_side = {
    "lhs": assignment.lhs,
    "rhs": assignment.rhs,
    "lhs_scale": assignment.lhs,
    "rhs_scale": assignment.rhs,
  }
  in_parts, _ = _steps(call)

  def of_result(name: str, array: Any) -> mesh_axes.Spec:
    if not array.shape:
      return ()
    is_in_parts = name in in_parts.arrays()
    axes_of_dims = assignment.parts if is_in_parts else assignment.out
    return tuple(
      axes if size != 1 else ()
      for size, axes in zip(array.shape, axes_of_dims, strict=True)
    )

  return {
    name: of_side[name] if name in of_side else of_result(name, array)
    for name, array in call.arrays().items()
  }


def sharding_rule(
  call: calls.Call, axis_sizes: Sequence[int] = ()
) -> tuple[str, dict[str, Any]]:
  """The call's dimensions in Shardy's einsum-like notation.

  A blocked dimension is a compound of whole blocks (of the larger block size,
  where the two differ) and of what is inside one. The scale shares the factor
  of whole blocks, so a sharding of k spreads from values to scales and back.
  Where a mesh axis cannot divide the number of blocks, Shardy would split that
  axis in two and spread the parts, to results that leave `jit` as well; there k
  is left out of the rule; and where it is one block, as Shardy has no compound
  of one.

  Args:
    call: the call, of arrays as `to_bytes` returns them.
    axis_sizes: sizes of the mesh axes.

  Returns:
    The rule, e.g. "b0 m0 (k0 v), n0 (k0 w), b0 m0 k0, n0 k0 -> b0 m0 n0", and
    the sizes and kinds of its factors.
  """
  names = _factor_names(call)
  kwargs: dict[str, Any] = {}
  inside = []
  terms: dict[str, str] = {}
  pairs = list(zip(call.lhs.contracting, call.rhs.contracting, strict=True))
  for side, own in ((call.lhs, 0), (call.rhs, 1)):
    value_factors = list(names[side.name])
    scale_factors = list(names[side.name])
    for pair in pairs:
      dim, granule = pair[own], assigning.granule_of(call, *pair)
      if granule == 1:
        continue
      blocks = names[side.name][dim]
      stored = side.values.shape[dim]
      size = stored // (side.shape[dim] // granule)
      factor = f"{side.name[0]}v{dim}"
      num_blocks = stored // size
      if num_blocks == 1 or any(num_blocks % size for size in axis_sizes):
        value_factors[dim], scale_factors[dim] = f"{factor}x", f"{factor}y"
        continue
      kwargs[factor] = size
      inside.append(factor)
      value_factors[dim] = f"({blocks} {factor})"
      block = side.format.block_size if side.format else granule
      if side.axis == dim and block != granule:
        factor = f"{side.name[0]}s{dim}"
        kwargs[factor] = granule // block
        inside.append(factor)
        scale_factors[dim] = f"({blocks} {factor})"
    terms[side.name] = " ".join(value_factors)
    terms[f"{side.name}_scale"] = " ".join(scale_factors)
  terms |= {"first_global_scale": "", "second_global_scale": ""}
  for name in ("global_scale", "bias", "residual", "global_power"):
    operand = getattr(call, name)
    if operand is not None:
      sizes = zip(operand.shape, names["out"], strict=True)
      terms[name] = " ".join(
        factor if size != 1 else f"{name[0]}{i}"
        for i, (size, factor) in enumerate(sizes if operand.shape else ())
      )
  order = [terms[name] for name in call.arrays()]
  rule = f"{', '.join(order)} -> {' '.join(names['out'])}"
  # Shardy wants each kind of factor in the order of its first appearance.
  factors = list(dict.fromkeys(re.findall(r"\w+", rule)))
  reduction = {names["lhs"][lhs] for lhs, _ in pairs} - set(inside)
  kwargs["reduction_factors"] = tuple(f for f in factors if f in reduction)
  kwargs["need_replication_factors"] = tuple(f for f in factors if f in inside)
  return rule, kwargs


def _factor_names(call: calls.Call) -> dict[str, list[str]]:
  """One factor for each dimension of lhs, rhs and the result."""
  lhs, rhs = [""] * call.lhs.ndim, [""] * call.rhs.ndim
  contracting, batch = call.dimension_numbers
  for letter, dims in (("b", batch), ("k", contracting)):
    for i, (l, r) in enumerate(zip(*dims, strict=True)):
      lhs[l] = rhs[r] = f"{letter}{i}"
  for i, d in enumerate(call.lhs.free):
    lhs[d] = f"m{i}"
  for i, d in enumerate(call.rhs.free):
    rhs[d] = f"n{i}"
  out = [lhs[d] for d in (*call.lhs.batch, *call.lhs.free)]
  out += [rhs[d] for d in call.rhs.free]
  return {"lhs": lhs, "rhs": rhs, "out": out}


def can_partition(call: calls.Call) -> bool:
  """Whether the call fits `sharding_rule`: whole blocks, nothing empty."""
  if any(0 in x.shape for x in call.flatten()):
    return False
  for side in (call.lhs, call.rhs):
    format = side.format
    if format is not None and format.is_fp4 and format.block_size % 2:
      return False  # `to_bytes` packs pairs, which a block must not share
  lhs_shape = call.lhs.shape
  return all(
    lhs_shape[lhs] % assigning.granule_of(call, lhs, rhs) == 0
    for lhs, rhs in zip(call.lhs.contracting, call.rhs.contracting, strict=True)
  )


def partitioned(
  abstract_dot: Callable[[calls.Call], jax.Array],
  local_dot: Callable[[calls.Call], jax.Array],
  form: calls.Call,
  key: str | None,
) -> Callable[..., jax.Array]:
  """Makes a function of a call's arrays that the partitioner can split.

  It takes them flat, as `to_bytes` returns them. Scales must be linear and
  without padding.

  Args:
    abstract_dot: call -> result, traced for the result's type.
    local_dot: call -> result, computes a call on one device.
    form: of the call.
    key: of all that decides what `form` and `local_dot` do; None where that is
      not known.
  """

  def whole(*flat):
    return abstract_dot(from_bytes(form.filled(flat)))

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
    spec = assigning.result_spec(call, specs["lhs"], specs["rhs"], mesh.shape)
    return NamedSharding(mesh, mesh_axes.partition_spec(spec))

  def partition(mesh, arg_shapes, result_shape):
    call = form.filled(arg_shapes)
    mesh, specs, out_spec = decode(mesh, arg_shapes, result_shape)
    assignment = assigning.assign_axes(
      call, specs["lhs"], specs["rhs"], out_spec, mesh.shape
    )
    named = lambda spec: NamedSharding(mesh, mesh_axes.partition_spec(spec))
    arg_shardings = tuple(map(named, operand_specs(call, assignment).values()))

    def per_shard(*flat):
      return compute(local_dot, from_bytes(form.filled(flat)), assignment)

    out_sharding = named(assignment.out)
    return mesh, per_shard, out_sharding, arg_shardings

  def rule(mesh, value_types, result_types):
    del result_types
    call = form.filled(side_bytes.TypeShape(t) for t in value_types)
    return sharding_rule(call, mesh_axes.automatic_sizes(mesh))

  how = calls_private.Split(
    infer=infer, partition=partition, rule=rule, key=key
  )
  return exporting.split(whole, how)


def to_bytes(call: calls.Call) -> list[jax.Array]:
  """The arrays as they travel between devices: quantized ones as bytes."""
  return call.replace(
    lhs=side_bytes.to_bytes(call.lhs), rhs=side_bytes.to_bytes(call.rhs)
  ).flatten()


def from_bytes(call: calls.Call) -> calls.Call:
  """The call of what `to_bytes` made; FP4 values stay packed."""
  return call.replace(
    lhs=side_bytes.from_bytes(call.lhs), rhs=side_bytes.from_bytes(call.rhs)
  )


def compute(
  local_dot: Callable[[calls.Call], jax.Array],
  call: calls.Call,
  assignment: assigning.Assignment,
) -> jax.Array:
  """One device's share: the dot, the sum over devices, then the epilogue."""
  if not assignment.reduce:
    return local_dot(call)
  in_parts, after = _steps(call)
  total = sums.combined(
    local_dot(in_parts), assignment.reduce, assignment.scatter
  )
  if not after.has_epilogue:
    # No other operation than the sum: XLA joins sums of sums to one.
    return total.astype(call.preferred_element_type)
  return epilogue.apply(total.astype(np.float32), epilogue.with_product(after))


def _steps(call: calls.Call) -> tuple[calls.Call, calls.Call]:
  """What is computed of each device's part, and what of the sum of all.

  Returns:
    (the call of a part, one whose epilogue is that of the sum).
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
