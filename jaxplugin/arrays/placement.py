# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shardings for the leaves of block-scaled arrays, from the logical array."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxplugin.arrays import layouts, quantized_weight, scaled_array
from jaxplugin.arrays import leaves as leaves_lib
from jaxplugin.core import error_context, formats
from jaxplugin.jaxext import mesh_axes

_SHARD = "shard"
_SHARDINGS = "shardings"


def shardings(tree: Any, sharding: Any) -> Any:
  """Returns shardings of the leaves of block-scaled arrays.

  Use it for `in_shardings` and `out_shardings` of `jax.jit`, `jax.device_put`
  and checkpoints. Values and block scales are split over the same mesh axes. So
  each device has whole blocks with their scales. A global scale of size 1 is
  replicated.

  Args:
    tree: a tree of `ScaledArray`s and plain arrays, or of their shapes and
      dtypes (`jax.eval_shape`). Plain arrays get the sharding unchanged. The
      dimensions of a `QuantizedWeight` are those of the weight. If several are
      stored as one, only the first may be split.
    sharding: a `jax.sharding.Sharding` of the logical dimensions, or a
      `PartitionSpec` inside of `jax.set_mesh`. It may be a tree, with an entry
      per part of `tree`.

  Returns:
    `tree` with a sharding or `PartitionSpec` for each leaf.

  Raises:
    TypeError: If a dimension does not divide into shards of whole blocks, a
      swizzled scale would be split, or sharding has another type or rank.
    ValueError: If a tree of shardings does not fit `tree`, or the mesh has no
      such axis.
    NotImplementedError: If a sharding is neither a `NamedSharding` nor
      replicated.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> mesh = jax.make_mesh((1,), ("x",))
    >>> rows = jax.sharding.NamedSharding(mesh, jax.P("x"))
    >>> w_q = jp.quantize(jnp.ones((2, 32)), "nvfp4")
    >>> placed = jp.shardings(w_q, rows)
    >>> tuple(placed.values.spec), tuple(placed.global_scale.spec)
    (('x',), (None, None))
  """
  return _shardings(_SHARDINGS, tree, sharding)


def shard(tree: Any, sharding: Any) -> Any:
  """Places block-scaled arrays by shardings of their logical dimensions.

  It is `jax.device_put` with `shardings(tree, sharding)` outside of `jit`.
  Inside of `jit` it is `jax.lax.with_sharding_constraint`, or
  `jax.sharding.reshard` if the mesh axes are explicit. Values travel between
  devices as bytes. XLA moves unpacked FP4 as f16 on explicit axes.

  Args:
    tree: as for `shardings`, with arrays as leaves.
    sharding: as for `shardings`.

  Returns:
    `tree`, with its leaves placed.

  Raises:
    TypeError: If a leaf of tree is not an array; and as `shardings`.
    ValueError: As `shardings`.
    NotImplementedError: As `shardings`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> mesh = jax.make_mesh((1,), ("x",))
    >>> rows = jax.sharding.NamedSharding(mesh, jax.P("x"))
    >>> w_q = jp.shard(jp.quantize(jnp.ones((2, 32)), "mxfp8"), rows)
    >>> tuple(w_q.scale.sharding.spec)
    ('x',)
  """
  targets = _shardings(_SHARD, tree, sharding)
  for leaf in jax.tree.leaves(tree):
    if not hasattr(leaf, "shape"):
      raise TypeError(
        f"{_SHARD}: tree must contain only arrays, got"
        f" {error_context.shown(leaf)}; for shapes and dtypes call jp.shardings"
      )

  def place(x: Any, target: Any) -> Any:
    if not leaves_lib.is_quantized(x):
      return _place(x, target)
    return jax.tree.map(_place_bytes, x, target)

  return jax.tree.map(place, tree, targets, is_leaf=leaves_lib.is_quantized)


def _place_bytes(leaf: Any, target: Any) -> Any:
  """Places a leaf of a block-scaled array, 8-bit floats of a trace as bytes."""
  if not isinstance(leaf, jax.core.Tracer) or leaf.dtype.itemsize != 1:
    return _place(leaf, target)
  if leaf.dtype in formats.FOUR_BITS:
    return _place(leaf, target)
  # Without the barrier XLA would shard the floats, and move those.
  data = jax.lax.optimization_barrier(layouts.to_bytes(leaf))
  return layouts.from_bytes(_place(data, target), leaf.dtype)


def _place(leaf: Any, target: Any) -> Any:
  if not isinstance(leaf, jax.core.Tracer):
    if isinstance(target, PartitionSpec):
      target = NamedSharding(jax.sharding.get_mesh(), target)
    if _packing_axis(leaf, target) is not None:
      sharding = getattr(leaf, "sharding", target)
      if (
        sharding.device_set == target.device_set
        and sharding.memory_kind == target.memory_kind
      ):
        return _reshard_packed(leaf, target)
    return jax.device_put(leaf, target)
  mesh = _mesh_of(target)
  if mesh is not None and mesh_axes.axes_of(mesh):
    return jax.sharding.reshard(leaf, target)
  axis = _packing_axis(leaf, target)
  if axis is None:
    return jax.lax.with_sharding_constraint(leaf, target)
  packed = layouts.pack_fp4(leaf, axis=axis)
  # Without the barrier XLA would shard the unpacked values, and move those.
  packed = jax.lax.optimization_barrier(packed)
  packed = jax.lax.with_sharding_constraint(packed, target)
  return layouts.unpack_fp4(packed, axis=axis, dtype=leaf.dtype)


@functools.partial(jax.jit, static_argnames="target")
def _reshard_packed(leaf: jax.Array, target: NamedSharding) -> jax.Array:
  return jax.lax.with_sharding_constraint(_place(leaf, target), target)


def _packing_axis(leaf: Any, target: Any) -> int | None:
  """Returns the axis along which 4-bit values are packed to be moved, or None.

  XLA has no collectives for 4-bit values. It would move the values as f16,
  which has four times as many bytes.
  """
  dtype = getattr(leaf, "dtype", None)
  if dtype not in formats.FOUR_BITS or leaf.size <= 1:
    return None
  spec, mesh = getattr(target, "spec", target), _mesh_of(target)
  if mesh is None or not isinstance(spec, PartitionSpec):
    return None
  if PartitionSpec.UNCONSTRAINED in tuple(spec):
    return None
  taker = mesh_axes.Taker(mesh.shape)
  entries = mesh_axes.normalize_spec(spec, leaf.ndim)
  for axis in reversed(range(leaf.ndim)):
    if leaf.shape[axis] % (2 * taker.count(entries[axis])) == 0:
      return axis
  return None


def _is_sharding(x: Any) -> bool:
  return isinstance(x, (Sharding, PartitionSpec))


def _shardings(who: str, tree: Any, sharding: Any) -> Any:
  is_part = lambda x: _is_sharding(x) or x is None
  flat: tuple[list[Any], Any] = jax.tree_util.tree_flatten_with_path(
    sharding, is_leaf=is_part
  )
  given, structure = flat
  for _, leaf in given:
    if not _is_sharding(leaf):
      what = type(leaf).__name__ if hasattr(leaf, "shape") else repr(leaf)
      raise TypeError(
        f"{who}: sharding must be a jax.sharding.Sharding, a PartitionSpec or a"
        f" tree of them, got {what}; pass PartitionSpec() to replicate an array"
      )
    if isinstance(leaf, PartitionSpec):
      _require_axes(who, leaf)
  try:
    parts = structure.flatten_up_to(tree)
  except ValueError as error:
    raise ValueError(
      f"{who}: sharding must be a tree that is a prefix of the first argument:"
      f" {error}"
    ) from error

  def of_leaf(path: Any, x: Any, sharding: Any) -> Any:
    # Errors name the leaf of a tree.
    name = f"{who}: {jax.tree_util.keystr(path)}" if path else who
    if leaves_lib.is_quantized(x):
      return _of_array(name, x, sharding)
    _require_rank(name, x, sharding)
    return sharding

  found = [
    jax.tree_util.tree_map_with_path(
      lambda path, x, before=before, leaf=leaf: of_leaf(
        (*before, *path), x, leaf
      ),
      part,
      is_leaf=leaves_lib.is_quantized,
    )
    for (before, leaf), part in zip(given, parts, strict=True)
  ]
  return jax.tree.unflatten(structure, found)


def _require_axes(who: str, spec: PartitionSpec) -> None:
  """Raises ValueError unless the mesh of the context has a spec's axes."""
  mesh = jax.sharding.get_abstract_mesh()
  entries = mesh_axes.normalize_spec(spec, len(spec))
  names = {name for axes in entries for name in axes}
  if unknown := sorted(names.difference(mesh.axis_names)):
    remedy = "name these"
    if mesh.empty:
      remedy = "call it inside jax.set_mesh, or pass a NamedSharding"
    raise ValueError(
      f"{who}: a PartitionSpec must name axes of the mesh of the context,"
      f" {mesh.axis_names}, got {', '.join(map(repr, unknown))} in {spec};"
      f" {remedy}"
    )


def _require_rank(who: str, x: Any, sharding: Any) -> None:
  """Raises TypeError if a sharding has more dimensions than `x`."""
  spec = getattr(sharding, "spec", sharding)
  if not isinstance(spec, PartitionSpec) or not hasattr(x, "ndim"):
    return
  if len(spec) > x.ndim:
    raise TypeError(
      f"{who}: sharding must have at most {x.ndim} dimensions for an array of"
      f" shape {tuple(x.shape)}, got {spec}; name a mesh axis or None for each"
      " dimension of the array before it was quantized"
    )


def _of_array(who: str, array: Any, sharding: Any) -> Any:
  """Returns the array with shardings in place of its leaves."""
  if isinstance(array, quantized_weight.QuantizedWeight):
    _, aux = array.tree_flatten()
    stored = _of_array(who, array.array, _stored(who, array, sharding))
    return array.tree_unflatten(aux, (stored,))
  (_, _, global_scale, *rest), aux = array.tree_flatten()
  if not isinstance(sharding, (NamedSharding, PartitionSpec)):
    if not sharding.is_fully_replicated:
      raise NotImplementedError(
        f"{who}: sharding of a ScaledArray must be a NamedSharding, a"
        f" PartitionSpec or replicated, got {error_context.shown(sharding)};"
        " pass NamedSharding(mesh, spec)"
      )
    return jax.tree.map(lambda _: sharding, array)
  entries = _entries(who, array, sharding)
  mesh = _mesh_of(sharding)
  if mesh is not None:
    _require_even(who, array, entries, mesh.shape)

  of_global: Any = None
  if global_scale is not None:
    sizes = scaled_array.full_global_scale_shape(array)
    of_sizes = [
      None if size == 1 else entry
      for size, entry in zip(sizes, entries, strict=True)
    ]
    of_global = _with_spec(sharding, *of_sizes[: global_scale.ndim])
  return array.tree_unflatten(
    aux, (sharding, sharding, of_global, *(sharding for _ in rest))
  )


def _stored(
  who: str, weight: quantized_weight.QuantizedWeight, sharding: Any
) -> Any:
  """Converts a sharding of a weight's dimensions to the stored dimensions."""
  if not isinstance(sharding, (NamedSharding, PartitionSpec)):
    return sharding
  entries = _entries(who, weight, sharding)
  stored = []
  for dims in weight.stored_dims():
    dims = tuple(d for d in dims if weight.shape[d] != 1)
    if any(entries[d] for d in dims[1:]):
      raise TypeError(
        f"{who}: only dimension {dims[0]} of the dimensions {dims}, which a"
        f" weight of shape {weight.shape} stores as one, may be split, got"
        f" {getattr(sharding, 'spec', sharding)}; pass None for the others"
      )
    stored.append(entries[dims[0]] if dims else None)
  return _with_spec(sharding, *stored)


def _entries(
  who: str, x: Any, sharding: NamedSharding | PartitionSpec
) -> list[Any]:
  """Returns an entry of the spec for each dimension of `x`."""
  _require_rank(who, x, sharding)
  spec = sharding if isinstance(sharding, PartitionSpec) else sharding.spec
  return [*spec, *[None] * (x.ndim - len(spec))]


def _with_spec(
  sharding: NamedSharding | PartitionSpec, *entries: Any
) -> NamedSharding | PartitionSpec:
  """Returns a sharding of the same kind with other entries."""
  spec = PartitionSpec(*entries)
  if isinstance(sharding, PartitionSpec):
    return spec
  return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _mesh_of(sharding: Any) -> Any:
  """Returns the mesh of a sharding, or the context's for a spec; or None."""
  if isinstance(sharding, NamedSharding):
    return sharding.mesh
  if not isinstance(sharding, PartitionSpec):
    return None
  mesh = jax.sharding.get_abstract_mesh()
  return None if mesh.empty else mesh


def _require_even(
  who: str,
  array: scaled_array.ScaledArray,
  entries: Sequence[Any],
  axis_sizes: Mapping[str, int],
) -> None:
  """Raises TypeError unless all devices get the same number of whole blocks."""
  shape, axis = array.shape, array.axis
  is_swizzled = array.scale_layout == layouts.SWIZZLED
  taker = mesh_axes.Taker(axis_sizes)
  for dim, names in enumerate(mesh_axes.normalize_spec(entries, array.ndim)):
    parts = taker.count(names)
    if parts == 1:
      continue
    is_blocked = dim == axis or (array.format.is_square and dim == axis - 1)
    unit = array.block_size if is_blocked else 1
    if shape[dim] % (parts * unit):
      rule = f"divisible into {parts} parts"
      remedy = "pad it, or leave the dimension whole"
      if is_blocked and not array.format.block_size:
        rule = "whole, because a row has one scale factor"
        remedy = "split another dimension, or quantize to a format of blocks"
      elif is_blocked:
        rule += f" of whole blocks of {unit}"
      raise TypeError(
        f"{who}: dimension {dim} of an array of shape {shape} must be {rule},"
        f" got size {shape[dim]} over mesh axes {names}; {remedy}"
      )
    if is_swizzled and dim >= array.ndim - 2:
      raise TypeError(
        f"{who}: dimension {dim} of an array of shape {shape} with swizzled"
        f" scales must be whole on each device, got mesh axes {names}; shard"
        " unprepare_weights(array)"
      )
