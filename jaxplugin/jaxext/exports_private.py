# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions for `jp.export` that use JAX's private modules."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax._src.pjit import jit_p

_MESH: Final = re.compile(r"sdy\.mesh @\S+ = <\[(\"[^\]]+)\]")
_AXIS: Final = re.compile(r'"([^"]+)"=(\d+)')


def with_vjp_exported_in(exported: Any, context: Callable[[], Any]) -> Any:
  """Returns an `Exported` whose derivative is exported inside a context.

  Args:
    context: function that returns a context manager.
  """
  export_vjp = exported._get_vjp

  def in_context(primal: Any) -> Any:
    with context():
      return export_vjp(primal)

  return dataclasses.replace(exported, _get_vjp=in_context)


def mesh_of(exported: Any, devices: Sequence[Any]) -> jax.sharding.Mesh:
  """Returns a mesh of the first devices for calling an `Exported`.

  It has the axes of the mesh that the `Exported` was made with, or one axis if
  the program has no mesh.
  """
  used = np.array(devices[: exported.nr_devices])
  named = exported._in_named_shardings + exported._out_named_shardings
  for sharding in named:
    if sharding is not None and sharding.mesh.size == used.size:
      mesh = sharding.mesh
      shape = used.reshape(mesh.axis_sizes)
      return jax.sharding.Mesh(shape, mesh.axis_names, mesh.axis_types)
  # Only the module has the mesh of a `shard_map` of unsharded arguments.
  for axes in _MESH.findall(exported.mlir_module()):
    found = [(name, int(size)) for name, size in _AXIS.findall(axes)]
    names, sizes = zip(*found, strict=True)
    if math.prod(sizes) == used.size:
      return jax.sharding.Mesh(used.reshape(sizes), names)
  return jax.sharding.Mesh(used, ("devices",))


@contextlib.contextmanager
def lowered_anew(primitives: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
  """Makes JAX lower each equation of some primitives without its cache.

  The setting holds for all threads while the context is active. Modules that
  other threads lower meanwhile are larger but correct.

  Yields:
    Lowering rules for `jax.export.export` and `lowered_with`. With these rules
    JAX also lowers each call of an inner `jit` again.
  """
  added = [p for p in primitives if p not in mlir._uncacheable_primitives]
  mlir._uncacheable_primitives.update(added)
  try:
    yield (
      (jit_p, _lower_jit_anew),
      *((p, _lower_for_each_platform) for p in primitives),
    )
  finally:
    mlir._uncacheable_primitives.difference_update(added)


def _lower_jit_anew(ctx: Any, *args: Any, **params: Any) -> Any:
  lowered = ctx.module_context.cached_primitive_lowerings
  for key in [k for k in lowered if isinstance(k, tuple) and k[0] is jit_p]:
    del lowered[key]
  return mlir._lowerings[jit_p].rule(ctx, *args, **params)


def _lower_for_each_platform(ctx: Any, *args: Any, **params: Any) -> Any:
  """Does what JAX does. JAX's own rule fails for several platforms, because
  `lower_per_platform` expects `avals_out` to be a list."""
  primitive = ctx.primitive
  rules = {
    platform: entries[primitive].rule
    for platform, entries in mlir._platform_specific_lowerings.items()
    if primitive in entries
  }
  default = mlir._lowerings[primitive].rule
  ctx = ctx.replace(avals_out=list(ctx.avals_out))
  return mlir.lower_per_platform(
    ctx, str(primitive), rules, default, frozenset(), *args, **params
  )


def lowered_with(traced: Any, rules: Any) -> jax.stages.Lowered:
  """Lowers a `jax.stages.Traced` with the rules of `lowered_anew`."""
  return traced.lower(
    _private_parameters=mlir.LoweringParameters(override_lowering_rules=rules)
  )
