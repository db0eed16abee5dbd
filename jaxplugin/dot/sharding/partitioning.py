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

import dataclasses
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
from jaxplugin.dot import call
from jaxplugin.dot import reference
from jaxplugin.dot.sharding import assigning
from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext import mesh_axes


def operand_specs(
  config: call.DotConfig,
  operands: call.Operands,
  assignment: assigning.Assignment,
) -> call.Operands:
  """The axes of each dimension of every operand that is there."""

  def of_result(operand):
    if operand is None:
      return None
    if not operand.shape:
      return ()
    return tuple(
      axes if size != 1 else ()
      for size, axes in zip(operand.shape, assignment.out, strict=True)
    )

  return call.Operands(
    lhs=assignment.lhs,
    rhs=assignment.rhs,
    lhs_scale=assignment.lhs if config.lhs.format is not None else None,
    rhs_scale=assignment.rhs if config.rhs.format is not None else None,
    global_scale=of_result(operands.global_scale),
    bias=of_result(operands.bias),
    residual=of_result(operands.residual),
    global_power=of_result(operands.global_power),
  )


def sharding_rule(
  config: call.DotConfig,
  operands: call.Operands,
  axis_sizes: Sequence[int] = (),
) -> tuple[str, dict[str, Any]]:
  """The call's dimensions in Shardy's einsum-like notation.

  A blocked dimension is a compound of whole blocks (of the larger block size,
  where the two differ) and of what is inside one. The scale shares the factor
  of whole blocks, so a sharding of k spreads from values to scales and back.
  Where a mesh axis cannot divide the number of blocks, Shardy would split that
  axis in two and spread the parts, to results that leave `jit` as well; there k
  is left out of the rule.

  Args:
    config: the call.
    operands: its operands, as `to_bytes` returns them.
    axis_sizes: sizes of the mesh axes.

  Returns:
    The rule, e.g. "b0 m0 (k0 v), n0 (k0 w), b0 m0 k0, n0 k0 -> b0 m0 n0", and
    the sizes and kinds of its factors.
  """
  names = _factor_names(config, operands)
  kwargs: dict[str, Any] = {}
  inside = []
  terms: dict[str, str] = {}
  pairs = list(zip(config.lhs_contracting, config.rhs_contracting, strict=True))
  for side, operand, values, scale, own in (
    ("lhs", config.lhs, operands.lhs, operands.lhs_scale, 0),
    ("rhs", config.rhs, operands.rhs, operands.rhs_scale, 1),
  ):
    value_factors = list(names[side])
    scale_factors = list(names[side])
    for pair in pairs:
      dim, granule = pair[own], assigning.granule_of(config, *pair)
      if granule == 1:
        continue
      blocks = names[side][dim]
      size = values.shape[dim] // (
        call.operand_shape(operand, values)[dim] // granule
      )
      factor = f"{side[0]}v{dim}"
      num_blocks = values.shape[dim] // size
      if any(num_blocks % axis_size for axis_size in axis_sizes):
        value_factors[dim], scale_factors[dim] = f"{factor}x", f"{factor}y"
        continue
      kwargs[factor] = size
      inside.append(factor)
      value_factors[dim] = f"({blocks} {factor})"
      block = operand.format.block_size if operand.format else granule
      if operand.axis == dim and block != granule:
        factor = f"{side[0]}s{dim}"
        kwargs[factor] = granule // block
        inside.append(factor)
        scale_factors[dim] = f"({blocks} {factor})"
    terms[side] = " ".join(value_factors)
    if scale is not None:
      terms[f"{side}_scale"] = " ".join(scale_factors)
  for name in ("global_scale", "bias", "residual", "global_power"):
    operand = getattr(operands, name)
    if operand is not None:
      sizes = zip(operand.shape, names["out"], strict=True)
      terms[name] = " ".join(
        factor if size != 1 else f"{name[0]}{i}"
        for i, (size, factor) in enumerate(sizes if operand.shape else ())
      )
  order = [terms[name] for name in call.Operands._fields if name in terms]
  rule = f"{', '.join(order)} -> {' '.join(names['out'])}"
  # Shardy wants each kind of factor in the order of its first appearance.
  factors = list(dict.fromkeys(re.findall(r"\w+", rule)))
  reduction = {names["lhs"][lhs] for lhs, _ in pairs} - set(inside)
  kwargs["reduction_factors"] = tuple(f for f in factors if f in reduction)
  kwargs["need_replication_factors"] = tuple(f for f in factors if f in inside)
  return rule, kwargs


def _factor_names(
  config: call.DotConfig, operands: call.Operands
) -> dict[str, list[str]]:
  """One factor for each dimension of lhs, rhs and the result."""
  lhs_ndim, rhs_ndim = len(operands.lhs.shape), len(operands.rhs.shape)
  lhs, rhs = [""] * lhs_ndim, [""] * rhs_ndim
  for letter, lhs_dims, rhs_dims in (
    ("b", config.lhs_batch, config.rhs_batch),
    ("k", config.lhs_contracting, config.rhs_contracting),
  ):
    for i, (l, r) in enumerate(zip(lhs_dims, rhs_dims, strict=True)):
      lhs[l] = rhs[r] = f"{letter}{i}"
  lhs_free = call.lhs_free(config, lhs_ndim)
  rhs_free = call.rhs_free(config, rhs_ndim)
  for i, d in enumerate(lhs_free):
    lhs[d] = f"m{i}"
  for i, d in enumerate(rhs_free):
    rhs[d] = f"n{i}"
  out = [lhs[d] for d in (*config.lhs_batch, *lhs_free)]
  return {"lhs": lhs, "rhs": rhs, "out": out + [rhs[d] for d in rhs_free]}


def can_partition(config: call.DotConfig, operands: call.Operands) -> bool:
  """Whether the call fits `sharding_rule`: whole blocks, nothing empty."""
  if any(0 in x.shape for x in operands.flatten()):
    return False
  for format in (config.lhs.format, config.rhs.format):
    if format is not None and format.is_fp4 and format.block_size % 2:
      return False  # `to_bytes` packs pairs, which a block must not share
  lhs_shape = call.operand_shape(config.lhs, operands.lhs)
  return all(
    lhs_shape[lhs] % assigning.granule_of(config, lhs, rhs) == 0
    for lhs, rhs in zip(
      config.lhs_contracting, config.rhs_contracting, strict=True
    )
  )


def partitioned(
  abstract_dot: Callable[..., jax.Array],
  local_dot: Callable[..., jax.Array],
  config: call.DotConfig,
) -> Callable[..., jax.Array]:
  """Makes a function of a call's operands that the partitioner can split.

  It takes them flat, as `to_bytes` returns them. Scales must be linear and
  without padding.

  Args:
    abstract_dot: (operands, config) -> result, traced for the result's type.
    local_dot: (operands, config) -> result, computes a call on one device.
    config: the call.
  """

  def whole(*flat):
    return abstract_dot(from_bytes(config, flat), config)

  def decode(mesh, arg_shapes, *more):
    arrays = [*arg_shapes, *more]
    ndims = [len(x.shape) for x in arrays]
    tilings = [
      jax_private.partitioner_tiling(x.sharding, ndim)
      for x, ndim in zip(arrays, ndims, strict=True)
    ]
    mesh, specs = mesh_axes.decode(mesh, tilings, ndims)
    return mesh, call.Operands.unflatten(config, specs), specs[-1]

  def infer(mesh, arg_shapes, result_shape):
    del result_shape
    operands = call.Operands.unflatten(config, arg_shapes)
    mesh, specs, _ = decode(mesh, arg_shapes)
    spec = assigning.result_spec(
      config, operands, specs.lhs, specs.rhs, mesh.shape
    )
    return NamedSharding(mesh, mesh_axes.partition_spec(spec))

  def partition(mesh, arg_shapes, result_shape):
    operands = call.Operands.unflatten(config, arg_shapes)
    mesh, specs, out_spec = decode(mesh, arg_shapes, result_shape)
    assignment = assigning.assign_axes(
      config,
      call.operand_shape(config.lhs, operands.lhs),
      call.operand_shape(config.rhs, operands.rhs),
      specs.lhs,
      specs.rhs,
      out_spec,
      mesh.shape,
    )
    named = lambda spec: NamedSharding(mesh, mesh_axes.partition_spec(spec))
    wanted = operand_specs(config, operands, assignment)
    arg_shardings = tuple(named(spec) for spec in wanted if spec is not None)

    def per_shard(*flat):
      # Traced while XLA compiles, perhaps inside a caller's `set_mesh`, whose
      # explicit axes are none of this function's business.
      with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return _local(local_dot, config, flat, assignment)

    return mesh, per_shard, named(assignment.out), arg_shardings

  function = custom_partitioning_lib.custom_partitioning(whole)

  def rule(mesh, value_types, result_types):
    del result_types
    shapes = [_TypeShape(t) for t in value_types]
    operands = call.Operands.unflatten(config, shapes)
    return sharding_rule(config, operands, tuple(mesh.shape.values()))

  function.def_partition(
    infer_sharding_from_operands=infer,
    partition=partition,
    decode_shardings=False,
    sharding_rule=rule,
  )
  return function


def to_bytes(
  config: call.DotConfig, operands: call.Operands
) -> list[jax.Array]:
  """The operands as they travel between devices: quantized ones as bytes.

  XLA:CPU widens collectives of 8-bit floats to 16 or 32 bits, and FP4 is not a
  collective's type anywhere; uint8 is one everywhere.
  """
  changes = {}
  for side, operand in (("lhs", config.lhs), ("rhs", config.rhs)):
    if operand.format is None:
      continue
    values = getattr(operands, side)
    if values.dtype == formats.E2M1:
      pack: Any = layouts.pack_fp4
      if not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
        pack = _pack_fp4_elementwise
      values = pack(values, axis=operand.axis)
    changes[side] = _reinterpret(values, jnp.dtype(jnp.uint8))
    changes[f"{side}_scale"] = _reinterpret(
      getattr(operands, f"{side}_scale"), jnp.dtype(jnp.uint8)
    )
  return operands._replace(**changes).flatten()


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


def from_bytes(
  config: call.DotConfig, flat: Sequence[jax.Array]
) -> call.Operands:
  """Inverse of `to_bytes`; FP4 values stay packed."""
  operands = call.Operands.unflatten(config, flat)
  changes = {}
  for side, operand in (("lhs", config.lhs), ("rhs", config.rhs)):
    if operand.format is None:
      continue
    if not operand.format.is_fp4:
      changes[side] = _reinterpret(
        getattr(operands, side), operand.format.array_dtype
      )
    changes[f"{side}_scale"] = _reinterpret(
      getattr(operands, f"{side}_scale"), operand.format.scale_dtype
    )
  return operands._replace(**changes)


def _reinterpret(x: jax.Array, dtype: Any) -> jax.Array:
  """A bitcast between types of one byte; wider types, of formats that only
  the xla implementation serves, travel as they are."""
  if x.dtype.itemsize != dtype.itemsize:
    return x
  return lax.bitcast_convert_type(x, dtype)


class _TypeShape:
  """Shape and dtype of an MLIR tensor type, as `call` reads them."""

  def __init__(self, tensor_type: Any) -> None:
    self.shape = tuple(tensor_type.shape)
    is_u8 = str(tensor_type.element_type) == "ui8"
    self.dtype = jnp.dtype(jnp.uint8) if is_u8 else None


def _local(
  local_dot: Callable[..., jax.Array],
  config: call.DotConfig,
  flat: Sequence[jax.Array],
  assignment: assigning.Assignment,
) -> jax.Array:
  """One device's share: the dot, the sum over devices, then the epilogue."""
  operands = from_bytes(config, flat)
  if not assignment.reduce:
    return local_dot(operands, config)
  bare = call.bare_config(config)
  result = local_dot(call.bare_operands(operands), bare)
  if assignment.scatter is None:
    result = lax.psum(result, assignment.reduce)
  else:
    dim, axes = assignment.scatter
    result = lax.psum_scatter(result, axes, scatter_dimension=dim, tiled=True)
  return reference.apply_epilogue(result, operands, config)


def with_exact_scales(
  config: call.DotConfig, operands: call.Operands
) -> tuple[call.DotConfig, call.Operands]:
  """The same call with linear scales without padding.

  A swizzled or padded scale cannot be sharded as its values are.
  """
  changes: dict[str, Any] = {}
  for side in ("lhs", "rhs"):
    operand = getattr(config, side)
    if operand.format is None:
      continue
    changes[f"{side}_scale"] = reference.exact_scale(
      operand, getattr(operands, side), getattr(operands, f"{side}_scale")
    )
    linear = dataclasses.replace(operand, scale_layout=layouts.LINEAR)
    config = config.replace(**{side: linear})
  return config.replace(padded_scales=False), operands._replace(**changes)
