# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays whose shardings are in their types: what they are, and how to split.

A mesh axis of type Explicit shards what a type says. Functions here take
arrays, tracers and abstract values alike, where they only read types.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext import mesh_axes


def sharding_of(x: Any) -> NamedSharding:
  """The sharding in a type."""
  is_type = isinstance(x, jax.core.ShapedArray)
  return x.sharding if is_type else jax.typeof(x).sharding


def mesh_of(arrays: Iterable[Any]) -> Any:
  """The mesh of the first type that has explicit axes; None without one."""
  for x in arrays:
    mesh = sharding_of(x).mesh
    if mesh_axes.explicit_axes(mesh):
      return mesh
  return None


def spec_of(x: Any) -> mesh_axes.Spec:
  """The mesh axes of each dimension that are in a type."""
  return mesh_axes.normalize_spec(sharding_of(x).spec, len(x.shape))


def type_of(shape: Sequence[int], x: Any, mesh: Any) -> jax.ShapeDtypeStruct:
  """The type of floats of a shape that are sharded as `x` is.

  Args:
    mesh: where what is on no mesh is whole on every device; or None.
  """
  sharding = None
  if mesh is not None:
    spec = mesh_axes.partition_spec(spec_of(x))
    sharding = NamedSharding(mesh, spec)
  return jax.ShapeDtypeStruct(tuple(shape), np.float32, sharding=sharding)


def refuse_unreduced(who: str, out_sharding: Any) -> None:
  """Raises NotImplementedError if a result with this would be unreduced.

  Args:
    who: the function that the error names.
    out_sharding: as `lax.dot_general`'s.
  """
  spec = getattr(out_sharding, "spec", out_sharding)
  if getattr(spec, "unreduced", None):
    raise NotImplementedError(
      f"{who}: out_sharding must have no unreduced axes, got {out_sharding};"
      " leave them out, because the call computes the sum"
    )


def result_sharding(
  function: Callable[..., Any], *args: Any, mesh: Any
) -> NamedSharding:
  """Returns the sharding that JAX gives the result of a function.

  Args:
    function: a function of arrays, traced for its result.
    *args: abstract arrays.
    mesh: the mesh of the context; None for the current one.
  """
  context: Any = contextlib.nullcontext()
  if mesh is not None:
    context = jax.sharding.use_abstract_mesh(mesh)
  with context:
    sharding = jax.eval_shape(function, *args).sharding
  assert isinstance(sharding, NamedSharding)
  return sharding


def reshard(x: jax.Array, spec: mesh_axes.Spec) -> jax.Array:
  """`x`, its dimensions sharded by `spec`, on its mesh or the context's."""
  mesh = sharding_of(x).mesh
  target: Any = mesh_axes.partition_spec(spec)
  if not mesh.empty:
    if spec_of(x) == spec:
      return x
    target = NamedSharding(mesh, target)
  return jax.sharding.reshard(x, target)


def divided(x: jax.Array, dim: int, granule: int) -> jax.Array:
  """`x`, a dimension's groups of `granule` values each on one device."""
  mesh = mesh_of([x])
  if mesh is None:
    return x
  spec = list(spec_of(x))
  taker = mesh_axes.Taker(mesh.shape)
  spec[dim] = taker.take(spec[dim], x.shape[dim], granule)
  return reshard(x, tuple(spec))


def gathered(x: jax.Array) -> jax.Array:
  """`x`, whole on every device."""
  return reshard(x, ((),) * x.ndim)


def on_mesh(x: jax.Array) -> jax.Array:
  """`x` as it is, or whole on every device if it is on no mesh."""
  return gathered(x) if jax.typeof(x).sharding.mesh.empty else x


def shard_map(
  function: Callable[..., Any],
  mesh: Any,
  in_specs: Sequence[mesh_axes.Spec],
  out_specs: mesh_axes.Spec | list[mesh_axes.Spec],
) -> Callable[..., Any]:
  """`function` of each device's parts, over the explicit axes of a mesh.

  Args:
    function: of parts; it may speak with the devices along explicit axes. It
      returns an array, or a sequence of several.
    mesh: that of the context.
    in_specs: of each argument, which is resharded to it.
    out_specs: a list of those of several results, or that of the only one.
  """
  axes = set(mesh_axes.explicit_axes(mesh))
  given: Any
  if isinstance(out_specs, list):
    given = tuple(map(mesh_axes.partition_spec, out_specs))
    inside = lambda *parts: tuple(function(*parts))
  else:
    given = mesh_axes.partition_spec(out_specs)
    inside = function
  mapped = jax.shard_map(
    inside,
    mesh=mesh,
    in_specs=tuple(map(mesh_axes.partition_spec, in_specs)),
    out_specs=given,
    # Over those that a `vmap` maps it is that of the `vmap` itself.
    axis_names=axes - jax_private.mapped_mesh_axes(),
    # Which results vary over which axes kernels do not say.
    check_vma=False,
  )

  def call(*args: jax.Array) -> Any:
    return mapped(*map(reshard, args, in_specs))

  return call
