# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions for arrays with explicit sharding, which is part of their types.

An axis of type Explicit appears in the shardings of types. Functions that only
read types accept arrays, tracers and abstract values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

from jaxplugin.jaxext import jax_private, mesh_axes


def axes_of(mesh: Any) -> mesh_axes.Axes:
  """Returns the mesh axes that appear in the shardings of types."""
  types = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return tuple(name for name, kind in types if kind == AxisType.Explicit)


def sharding_of(x: Any) -> NamedSharding:
  """Returns the sharding in the type of `x`."""
  is_type = isinstance(x, jax.core.ShapedArray)
  return x.sharding if is_type else jax.typeof(x).sharding


def mesh_of(arrays: Iterable[Any]) -> Any:
  """Returns the first mesh with explicit axes among the types, or None."""
  for x in arrays:
    mesh = sharding_of(x).mesh
    if axes_of(mesh):
      return mesh
  return None


def spec_of(x: Any) -> mesh_axes.Spec:
  """Returns the mesh axes of each dimension from the type of `x`."""
  return mesh_axes.normalize_spec(sharding_of(x).spec, len(x.shape))


def type_of(shape: Sequence[int], x: Any, mesh: Any) -> jax.ShapeDtypeStruct:
  """Returns an f32 type of a shape that is sharded like `x`.

  Args:
    shape: shape of the type.
    x: array whose spec the type gets. If `x` is on no mesh, the type is
      replicated.
    mesh: mesh of the type; None for a type without a sharding.
  """
  sharding = None
  if mesh is not None:
    spec = mesh_axes.partition_spec(spec_of(x))
    sharding = NamedSharding(mesh, spec)
  return jax.ShapeDtypeStruct(tuple(shape), np.float32, sharding=sharding)


def refuse_unreduced(who: str, out_sharding: Any) -> None:
  """Raises NotImplementedError if an `out_sharding` has unreduced axes.

  Args:
    who: the function that the error names.
    out_sharding: the argument of `lax.dot_general`.
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
  """Shards `x` by `spec` over its own mesh, or over the mesh of the context."""
  mesh = sharding_of(x).mesh
  target: Any = mesh_axes.partition_spec(spec)
  if not mesh.empty:
    if spec_of(x) == spec:
      return x
    target = NamedSharding(mesh, target)
  return jax.sharding.reshard(x, target)


def divided(x: jax.Array, dim: int, granule: int) -> jax.Array:
  """Reshards `x` so that no shard cuts a group of `granule` values of `dim`."""
  mesh = mesh_of([x])
  if mesh is None:
    return x
  spec = list(spec_of(x))
  taker = mesh_axes.Taker(mesh.shape)
  spec[dim] = taker.take(spec[dim], x.shape[dim], granule)
  return reshard(x, tuple(spec))


def gathered(x: jax.Array) -> jax.Array:
  """Returns `x` replicated on every device."""
  return reshard(x, ((),) * x.ndim)


def on_mesh(x: jax.Array) -> jax.Array:
  """Replicates `x` if it is on no mesh; otherwise returns it unchanged."""
  return gathered(x) if jax.typeof(x).sharding.mesh.empty else x


def shard_map(
  function: Callable[..., Any],
  mesh: Any,
  in_specs: Sequence[mesh_axes.Spec],
  out_specs: mesh_axes.Spec | list[mesh_axes.Spec],
) -> Callable[..., Any]:
  """Maps `function` over the shards along the explicit axes of a mesh.

  Args:
    function: a function of one device's shards. It may use collectives over the
      explicit axes. It returns one array, or a sequence if `out_specs` is a
      list.
    mesh: mesh of the context.
    in_specs: spec of each argument. The arguments are resharded to it.
    out_specs: spec of the result, or a list with the spec of each result.
  """
  axes = set(axes_of(mesh))
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
    # An enclosing `vmap` over a mesh axis maps that axis itself.
    axis_names=axes - jax_private.mapped_mesh_axes(),
    # Kernels do not declare the axes over which their results vary.
    check_vma=False,
  )

  def call(*args: jax.Array) -> Any:
    return mapped(*map(reshard, args, in_specs))

  return call
