# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Ragged dots of arrays whose shardings are in their types.

The type of the result follows from those of the operands. Inside, the axes are
the partitioner's, as they are of any call, derivatives included: which row is
of which group no type says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxplugin.core import forms
from jaxplugin.jaxext import mesh_axes
from jaxplugin.ragged.sharding import partitioning


def result_sharding(
  call: forms.Call, split: partitioning.Split
) -> NamedSharding | None:
  """The sharding in the type of the result; None without explicit mesh axes.

  Args:
    call: its arrays have types.
    split: of its operation.
  """
  types = call.named(map(jax.typeof, call.flatten()))
  meshes = [
    aval.sharding.mesh
    for aval in types.values()
    if mesh_axes.explicit_axes(aval.sharding.mesh)
  ]
  if not meshes:
    return None
  specs = {
    name: mesh_axes.normalize_spec(aval.sharding.spec, aval.ndim)
    for name, aval in types.items()
  }
  out = split.assign(call, specs, None, meshes[0].shape).out
  return NamedSharding(meshes[0], mesh_axes.partition_spec(out))


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
