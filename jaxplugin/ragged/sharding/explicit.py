# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Ragged dots of arrays whose shardings are in their types.

The type of the result is what the call asks for, or follows from those of the
operands. Inside, the axes are the partitioner's, as they are of any call,
derivatives included: which row is of which group no type says.
"""

from __future__ import annotations

import contextlib
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
from jaxplugin.ragged.sharding import partitioning


def result_sharding(
  call: Any, split: partitioning.Split, out_sharding: Any = None
) -> NamedSharding | None:
  """The sharding in the type of the result; None without explicit mesh axes.

  Args:
    call: a `Call` or a `Contraction`; its arrays have types.
    split: of its operation.
    out_sharding: asked for, or None: then it follows from the operands.

  Raises:
    What `asked_sharding` does.
  """
  if out_sharding is not None:
    return asked_sharding(call, out_sharding)
  mesh = explicit_axes.mesh_of(call.flatten())
  if mesh is None:
    return None
  specs = call.named(map(explicit_axes.spec_of, call.flatten()))
  out = split.assign(call, specs, None, mesh.shape).out
  return NamedSharding(mesh, mesh_axes.partition_spec(out))


def asked_sharding(call: Any, out_sharding: Any) -> NamedSharding:
  """What `lax.ragged_dot` gives to the type of its result, or raises.

  Args:
    call: of which the shape of the result is taken.
    out_sharding: a `PartitionSpec`, or a `NamedSharding` of explicit axes.

  Raises:
    NotImplementedError: the result would be unreduced.
    ValueError: it has more dimensions than the result.
    JAX's own: it is neither of the two, names an axis that is not explicit, or
      does not divide a dimension.
  """
  who, shape = sides.who(), tuple(call.shape)
  explicit_axes.refuse_unreduced(who, out_sharding)
  spec = getattr(out_sharding, "spec", out_sharding)
  if isinstance(spec, PartitionSpec) and len(spec) > len(shape):
    raise ValueError(
      f"{who}: out_sharding must have at most {len(shape)} dimensions, as the"
      f" result {shape} has, got {out_sharding}"
    )
  mesh = getattr(out_sharding, "mesh", None)
  mesh = mesh or explicit_axes.mesh_of(call.flatten())
  context: Any = contextlib.nullcontext()
  if mesh is not None:
    mesh = getattr(mesh, "abstract_mesh", mesh)
    context = jax.sharding.use_abstract_mesh(mesh)
  with context:
    sharding = jax.eval_shape(
      functools.partial(_like_result, shape, out_sharding)
    ).sharding
  assert isinstance(sharding, NamedSharding)
  return sharding


def _like_result(shape: tuple[Any, ...], out_sharding: Any) -> jax.Array:
  """`lax`'s own ragged dot with a result of a shape, of a sum of nothing."""
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
  function: Callable[..., jax.Array], sharding: NamedSharding
) -> Callable[..., jax.Array]:
  """`function`, with its mesh's explicit axes left to the partitioner.

  Args:
    function: of trees of arrays.
    sharding: of its result.
  """
  axes = mesh_axes.explicit_axes(sharding.mesh)
  wrapped: Any = jax.sharding.auto_axes(
    function, axes=axes, out_sharding=sharding
  )
  return wrapped
