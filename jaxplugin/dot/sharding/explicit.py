# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block-scaled dots of arrays whose shardings are in their types.

The types say what the partitioner would have to find out. So a call is lowered
to a `shard_map` over the explicit axes: no callback, and a module that caches
and exports. `assigning.assign_axes` decides, as it does for the partitioner,
and a device computes the same share.
"""

from __future__ import annotations

import contextlib
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
from jaxplugin.dot.sharding import assigning
from jaxplugin.dot.sharding import partitioning
from jaxplugin.dot.sharding import side_bytes
from jaxplugin.jaxext import explicit_axes
from jaxplugin.jaxext import mesh_axes


def result_sharding(call: calls.Call) -> NamedSharding:
  """The sharding in the type of the result.

  It is the one asked for, or else that of `lax.dot_general`, which is asked; so
  are its errors.

  Args:
    call: of abstract arrays, which have shardings.

  Raises:
    JAX's ShardingTypeError: a contracting dimension of both sides is
      sharded, and nothing is asked for; or shardings of the sides do not fit.
  """
  if call.out_sharding is not None:
    return call.out_sharding
  if explicit_axes.mesh_of(call.flatten()) is None:
    whole = PartitionSpec(*(None,) * len(call.shape))
    return call.lhs.values.sharding.update(spec=whole)
  return asked_sharding(call, None)


def asked_sharding(call: calls.Call, out_sharding: Any) -> NamedSharding:
  """What `lax.dot_general` gives to the type of its result, or raises.

  Args:
    call: its arrays have types.
    out_sharding: as `lax.dot_general`'s.

  Raises:
    NotImplementedError: the result would be unreduced.
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
  context: Any = contextlib.nullcontext()
  if mesh is not None:
    context = jax.sharding.use_abstract_mesh(mesh)
  with context:
    return jax.eval_shape(
      functools.partial(
        lax.dot_general, dimension_numbers=numbers, out_sharding=out_sharding
      ),
      lhs,
      rhs,
    ).sharding


def split(
  local_dot: Callable[[calls.Call], jax.Array],
  call: calls.Call,
  sharding: NamedSharding,
) -> jax.Array:
  """The result of a call: of each device its share.

  Args:
    local_dot: call -> result, computes a call on one device.
    call: its arrays have types.
    sharding: of the result.
  """
  mesh: Any = sharding.mesh
  with jax.sharding.use_abstract_mesh(mesh):
    call = _prepared(call)
    specs = call.named(map(explicit_axes.spec_of, call.flatten()))
    out = mesh_axes.normalize_spec(sharding.spec, len(call.shape))
    assignment = assigning.assign_axes(
      call, specs["lhs"], specs["rhs"], out, mesh.shape
    )
    form = call.form()
    result = explicit_axes.shard_map(
      lambda *flat: partitioning.compute(
        local_dot, partitioning.from_bytes(form.filled(flat)), assignment
      ),
      mesh,
      tuple(partitioning.operand_specs(call, assignment).values()),
      assignment.out,
    )(*call.flatten())
    return explicit_axes.reshard(result, out)


def product_across_blocks(
  local: Callable[[jax.Array, sides.Side, sides.DimensionNumbers], jax.Array],
  g: jax.Array,
  side: sides.Side,
  numbers: sides.DimensionNumbers,
  out: mesh_axes.Spec,
) -> jax.Array:
  """A gradient's product, f32: of each device its share, summed in f32.

  What has to be gathered of the side travels as bytes.

  Args:
    local: (g, side, numbers) -> the product on one device, in f32.
    g: plain, with a type of a mesh with explicit axes.
    side: quantized, not blocked along what is contracted.
    numbers: of g and the side.
    out: axes of the result.
  """
  (g_dims, side_dims), (g_batch, side_batch) = numbers
  call = calls.Call(
    lhs=sides.Side(name="lhs", values=g, contracting=g_dims, batch=g_batch),
    rhs=side.replace(
      name="rhs", contracting=side_dims, batch=side_batch, global_scale=None
    ),
    preferred_element_type=np.dtype(np.float32),
    padded_scales=side.format is not None and side.scale_is_padded,
  ).without_origins()
  mesh = explicit_axes.sharding_of(g).mesh
  return split(
    lambda call: local(call.lhs.values, call.rhs, call.dimension_numbers),
    call,
    NamedSharding(mesh, mesh_axes.partition_spec(out)),
  )


def _prepared(call: calls.Call) -> calls.Call:
  """The call as operands travel: bytes, and linear scales without padding."""
  call = call.with_scales_alone()
  call = call.form().filled(map(explicit_axes.on_mesh, call.flatten()))
  return call.replace(
    lhs=_prepared_side(call.lhs),
    rhs=_prepared_side(call.rhs),
    padded_scales=False,
    out_sharding=None,
  )


def _prepared_side(side: sides.Side) -> sides.Side:
  """`side` in bytes, which every device makes of what it has."""
  if side.format is None:
    return side
  if side.comes_as_words:
    side = _with_bytes(side)
  if side.scale_layout != layouts.LINEAR or side.scale_is_padded:
    # Tiles and padding are in no order of rows and blocks.
    side = side.replace(scale=explicit_axes.gathered(side.scale))
    side = side.with_linear_scale()
  axis = side.axis
  assert axis is not None
  to_bytes = lambda values: side_bytes.values_to_bytes(values, axis)
  if side.values.dtype == formats.E2M1:
    spec = list(explicit_axes.spec_of(side.values))
    mesh = jax.typeof(side.values).sharding.mesh
    parts = mesh_axes.Taker(mesh.shape).count(spec[axis])
    if side.values.shape[axis] % (parts * 2):
      spec[axis] = ()  # a byte would lie on two devices
    to_bytes = explicit_axes.shard_map(
      to_bytes, mesh, (tuple(spec),), tuple(spec)
    )
  return side.replace(
    values=to_bytes(side.values), scale=side_bytes.scale_to_bytes(side.scale)
  )


def _with_bytes(side: sides.Side) -> sides.Side:
  """With FP4 values that come as words given as their bytes, in their place.

  A word's bytes follow each other, so each device has those of its words.
  """
  spec = explicit_axes.spec_of(side.values)
  mesh = jax.typeof(side.values).sharding.mesh
  to_bytes = explicit_axes.shard_map(interleaving.to_bytes, mesh, (spec,), spec)
  return side.replace(values=to_bytes(side.values), is_interleaved=True)
