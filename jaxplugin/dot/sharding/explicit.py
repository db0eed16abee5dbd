# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block-scaled dots on meshes with explicit axes.

The types of the arrays contain their shardings. A call is therefore lowered to
a `shard_map` over the explicit axes (`operation/split.py`), without a
partitioning rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from jaxplugin.arrays import interleaving
from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.dot import calls
from jaxplugin.dot import sides
from jaxplugin.dot.sharding import assignment
from jaxplugin.dot.sharding import per_device
from jaxplugin.jaxext import explicit_axes
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import byte_arrays
from jaxplugin.operation import split


def result_sharding(call: calls.DotCall) -> NamedSharding:
  """Returns the sharding of the result's type.

  It is `call.out_sharding`, or the one that `lax.dot_general` would return.

  Args:
    call: call of abstract arrays with shardings.

  Raises:
    ShardingTypeError: If both sides shard a contracting dimension and
      `out_sharding` is None, or if the shardings of the sides do not fit.
  """
  if call.out_sharding is not None:
    return call.out_sharding
  if explicit_axes.mesh_of(call.flatten()) is None:
    whole = PartitionSpec(*(None,) * len(call.shape))
    return call.lhs.values.sharding.update(spec=whole)
  return asked_sharding(call, None)


def asked_sharding(call: calls.DotCall, out_sharding: Any) -> NamedSharding:
  """Returns the sharding that the result of `lax.dot_general` would have.

  Args:
    call: call of arrays on a mesh with explicit axes.
    out_sharding: as for `lax.dot_general`.

  Raises:
    NotImplementedError: If the result would be unreduced.
  """
  explicit_axes.refuse_unreduced(sides.who(), out_sharding)
  mesh = explicit_axes.mesh_of(call.flatten())
  types = [
    explicit_axes.type_of(side.shape, side.values, mesh)
    for side in (call.lhs, call.rhs)
  ]
  return _dot_general_sharding(
    *types, call.dimension_numbers, out_sharding, mesh
  )


@functools.lru_cache(maxsize=1024)
def _dot_general_sharding(
  lhs: jax.ShapeDtypeStruct,
  rhs: jax.ShapeDtypeStruct,
  numbers: sides.DimensionNumbers,
  out_sharding: Any,
  mesh: Any,
) -> NamedSharding:
  dot_general = functools.partial(
    lax.dot_general, dimension_numbers=numbers, out_sharding=out_sharding
  )
  return explicit_axes.result_sharding(dot_general, lhs, rhs, mesh=mesh)


def split_dot(
  local: per_device.Dot, call: calls.DotCall, sharding: NamedSharding
) -> jax.Array:
  """Computes a call split over the devices of a mesh with explicit axes.

  Args:
    local: computes a call on one device.
    call: call of arrays with shardings in their types.
    sharding: sharding of the result.
  """
  mesh: Any = sharding.mesh
  with jax.sharding.use_abstract_mesh(mesh):
    call = _prepared(call)
  spec = mesh_axes.normalize_spec(sharding.spec, len(call.shape))
  operation = split.of_call(
    call.form(),
    assign=assignment.assign,
    notation=assignment.notation,
    per_device=functools.partial(per_device.compute, local),
  )
  function = split.on_explicit_axes(operation, mesh, [spec])
  return function(*call.flatten())[0]


def product_across_blocks(
  local: Callable[[jax.Array, sides.Side, sides.DimensionNumbers], jax.Array],
  g: jax.Array,
  side: sides.Side,
  numbers: sides.DimensionNumbers,
  out: mesh_axes.Spec,
) -> jax.Array:
  """Computes a gradient's matmul in f32, split over devices.

  The quantized side is gathered as bytes.

  Args:
    local: (g, side, numbers) -> f32 result on one device.
    g: unquantized cotangent, on a mesh with explicit axes.
    side: quantized operand, not blocked along the contracting dimensions.
    numbers: dimension numbers of g and `side`.
    out: mesh axes of each dimension of the result.
  """
  (g_dims, side_dims), (g_batch, side_batch) = numbers
  call = calls.DotCall(
    lhs=sides.Side(name="lhs", values=g, contracting=g_dims, batch=g_batch),
    rhs=side.replace(
      name="rhs", contracting=side_dims, batch=side_batch, global_scale=None
    ),
    preferred_element_type=np.dtype(np.float32),
    padded_scales=side.format is not None and side.scale_is_padded,
  ).without_origins()
  mesh = explicit_axes.sharding_of(g).mesh
  return split_dot(
    lambda call: local(call.lhs.values, call.rhs, call.dimension_numbers),
    call,
    NamedSharding(mesh, mesh_axes.partition_spec(out)),
  )


def _prepared(call: calls.DotCall) -> calls.DotCall:
  """Converts a call's sides to bytes, with linear scales without padding."""
  call = call.without_origins_of_sides().with_scales_alone()
  call = call.form().filled(map(explicit_axes.on_mesh, call.flatten()))
  return call.replace(
    lhs=_prepared_side(call.lhs),
    rhs=_prepared_side(call.rhs),
    padded_scales=False,
    out_sharding=None,
  )


def _prepared_side(side: sides.Side) -> sides.Side:
  """Converts a side's values and scale to bytes on each device."""
  if side.format is None:
    return side
  axis = side.axis
  assert axis is not None
  if side.comes_as_words:
    # A word is 8 FP4 values of one device, so no device needs others' bytes.
    values = _on_each_device(interleaving.to_bytes, side.values)
    side = side.replace(values=values, is_interleaved=True)
  if side.scale_layout != layouts.LINEAR or side.scale_is_padded:
    # Shards of a swizzled or padded scale do not match shards of rows and
    # blocks, so the scale is gathered first.
    side = side.replace(scale=explicit_axes.gathered(side.scale))
    side = side.with_linear_scale()
  values = side.values
  if values.dtype == formats.E2M1:
    # Shards must hold whole bytes, which are pairs of FP4 values.
    values = _on_each_device(
      lambda x: byte_arrays.to_bytes(byte_arrays.packed(x, axis)),
      explicit_axes.divided(values, axis, 2),
    )
  return side.replace(
    values=byte_arrays.to_bytes(values), scale=byte_arrays.to_bytes(side.scale)
  )


def _on_each_device(
  function: Callable[[jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
  """Applies a function to each shard of `x`; keeps the sharding of `x`."""
  spec = explicit_axes.spec_of(x)
  mesh = explicit_axes.sharding_of(x).mesh
  return explicit_axes.shard_map(function, mesh, (spec,), spec)(x)
