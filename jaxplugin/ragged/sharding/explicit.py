# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Ragged dots on meshes with explicit axes.

The sharding of the result is the requested one, or follows from the operands.
Inside, explicit axes become auto axes of the partitioner, also in derivatives,
because types do not describe the assignment of rows to groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from jaxplugin.dot import sides
from jaxplugin.jaxext import explicit_axes
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import assignment
from jaxplugin.ragged import calls


def result_sharding(
  call: calls.Call,
  assign: Callable[..., assignment.Assignment],
  out_sharding: Any = None,
) -> NamedSharding | None:
  """Returns the sharding of the result's type; None without explicit axes.

  Args:
    call: the call.
    assign: assigns mesh axes to the call.
    out_sharding: requested `PartitionSpec`, or `NamedSharding` of explicit
      axes. The result is the sharding that `lax.ragged_dot` would return. None
      derives it from the operands.

  Raises:
    NotImplementedError: If the result would be unreduced.
    ValueError: If `out_sharding` has more dimensions than the result. JAX
      raises for other shardings that do not fit.
  """
  call = call.without_origins()
  mesh = explicit_axes.mesh_of(call.flatten())
  if out_sharding is None:
    if mesh is None:
      return None
    specs = call.named(map(explicit_axes.spec_of, call.flatten()))
    (spec,) = assign(call, specs, None, mesh.shape).results
    return NamedSharding(mesh, mesh_axes.partition_spec(spec))
  who, shape = sides.who(), tuple(call.shape)
  explicit_axes.refuse_unreduced(who, out_sharding)
  spec = getattr(out_sharding, "spec", out_sharding)
  if isinstance(spec, PartitionSpec) and len(spec) > len(shape):
    raise ValueError(
      f"{who}: out_sharding must have at most {len(shape)} dimensions, as the"
      f" result {shape} has, got {out_sharding}"
    )
  mesh = getattr(out_sharding, "mesh", None) or mesh
  mesh = getattr(mesh, "abstract_mesh", mesh)
  result = functools.partial(_like_result, shape, out_sharding)
  return explicit_axes.result_sharding(result, mesh=mesh)


def _like_result(shape: tuple[Any, ...], out_sharding: Any) -> jax.Array:
  """Computes JAX's ragged dot with k = 0 or m = 0, and a result of a shape."""
  dtype = np.float32
  *groups, rows, columns = shape
  if not groups:
    return lax.ragged_dot(
      jnp.zeros((rows, 0), dtype),
      jnp.zeros((1, 0, columns), dtype),
      jnp.zeros((1,), np.int32),
      out_sharding=out_sharding,
    )
  return lax.ragged_dot_general(
    jnp.zeros((0, rows), dtype),
    jnp.zeros((0, columns), dtype),
    jnp.zeros(groups, np.int32),
    lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ()),
    out_sharding=out_sharding,
  )


def automatic(
  function: Callable[..., jax.Array], sharding: NamedSharding | None
) -> Callable[..., jax.Array]:
  """Returns `function` with the explicit mesh axes made auto axes.

  Args:
    function: function of trees of arrays.
    sharding: sharding of its result; None returns `function`.
  """
  if sharding is None:
    return function
  axes = explicit_axes.axes_of(sharding.mesh)
  wrapped: Any = jax.sharding.auto_axes(
    function, axes=axes, out_sharding=sharding
  )
  return wrapped
