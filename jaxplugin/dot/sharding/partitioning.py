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
import jax.numpy as jnp
from jax import lax
from jax.experimental import custom_partitioning as custom_partitioning_lib
from jax.sharding import NamedSharding

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.dot import calls
from jaxplugin.dot import epilogue
from jaxplugin.dot import sides
from jaxplugin.dot.sharding import assigning
from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext import mesh_axes


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

  def of_result(array: Any) -> mesh_axes.Spec:
    if not array.shape:
      return ()
    return tuple(
      axes if size != 1 else ()
      for size, axes in zip(array.shape, assignment.out, strict=True)
    )

  return {
    name: of_side[name] if name in of_side else of_result(array)
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
  is left out of the rule.

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
      if any(num_blocks % axis_size for axis_size in axis_sizes):
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
) -> Callable[..., jax.Array]:
  """Makes a function of a call's arrays that the partitioner can split.

  It takes them flat, as `to_bytes` returns them. Scales must be linear and
  without padding.

  Args:
    abstract_dot: call -> result, traced for the result's type.
    local_dot: call -> result, computes a call on one device.
    form: of the call.
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
      # Traced while XLA compiles, perhaps inside a caller's `set_mesh`, whose
      # explicit axes are none of this function's business.
      with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return _local(local_dot, from_bytes(form.filled(flat)), assignment)

    return mesh, per_shard, named(assignment.out), arg_shardings

  function = custom_partitioning_lib.custom_partitioning(whole)

  def rule(mesh, value_types, result_types):
    del result_types
    call = form.filled(_TypeShape(t) for t in value_types)
    return sharding_rule(call, tuple(mesh.shape.values()))

  function.def_partition(
    infer_sharding_from_operands=infer,
    partition=partition,
    decode_shardings=False,
    sharding_rule=rule,
  )
  return function


def to_bytes(call: calls.Call) -> list[jax.Array]:
  """The arrays as they travel between devices: quantized ones as bytes.

  XLA:CPU widens collectives of 8-bit floats to 16 or 32 bits, and FP4 is not a
  collective's type anywhere; uint8 is one everywhere.
  """
  return call.replace(
    lhs=_side_to_bytes(call.lhs), rhs=_side_to_bytes(call.rhs)
  ).flatten()


def _side_to_bytes(side: sides.Side) -> sides.Side:
  if side.format is None:
    return side
  values = side.values
  if values.dtype == formats.E2M1:
    pack: Any = layouts.pack_fp4
    if not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
      pack = _pack_fp4_elementwise
    values = pack(values, axis=side.axis)
  u8 = jnp.dtype(jnp.uint8)
  return side.replace(
    values=_reinterpret(values, u8), scale=_reinterpret(side.scale, u8)
  )


def _pack_fp4_elementwise(values: jax.Array, *, axis: int) -> jax.Array:
  """`pack_fp4` in operations that GSPMD propagates shardings through.

  It replicates the operand of a bitcast that changes the shape.
  """
  nibbles = lax.bitcast_convert_type(values, jnp.uint4).astype(jnp.uint8)
  shape = values.shape
  pairs = nibbles.reshape(
    *shape[:axis], shape[axis] // 2, 2, *shape[axis + 1 :]
  )
  low = lax.index_in_dim(pairs, 0, axis + 1, keepdims=False)
  high = lax.index_in_dim(pairs, 1, axis + 1, keepdims=False)
  return low | (high << 4)


def from_bytes(call: calls.Call) -> calls.Call:
  """The call of what `to_bytes` made; FP4 values stay packed."""
  return call.replace(
    lhs=_side_from_bytes(call.lhs), rhs=_side_from_bytes(call.rhs)
  )


def _side_from_bytes(side: sides.Side) -> sides.Side:
  if side.format is None:
    return side
  values = side.values
  if not side.format.is_fp4:
    values = _reinterpret(values, side.format.array_dtype)
  scale = _reinterpret(side.scale, side.format.scale_dtype)
  return side.replace(values=values, scale=scale)


def _reinterpret(x: jax.Array, dtype: Any) -> jax.Array:
  """A bitcast between types of one byte; wider types, of formats that only
  the xla implementation serves, travel as they are."""
  if x.dtype.itemsize != dtype.itemsize:
    return x
  return lax.bitcast_convert_type(x, dtype)


class _TypeShape:
  """Shape and dtype of an MLIR tensor type, as a `Side` reads them."""

  def __init__(self, tensor_type: Any) -> None:
    self.shape = tuple(tensor_type.shape)
    is_u8 = str(tensor_type.element_type) == "ui8"
    self.dtype = jnp.dtype(jnp.uint8) if is_u8 else None


def _local(
  local_dot: Callable[[calls.Call], jax.Array],
  call: calls.Call,
  assignment: assigning.Assignment,
) -> jax.Array:
  """One device's share: the dot, the sum over devices, then the epilogue."""
  if not assignment.reduce:
    return local_dot(call)
  result = local_dot(call.bare())
  if assignment.scatter is None:
    result = lax.psum(result, assignment.reduce)
  else:
    dim, axes = assignment.scatter
    result = lax.psum_scatter(result, axes, scatter_dimension=dim, tiled=True)
  return epilogue.apply(result, call)
