# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Everything that the package uses of JAX's private modules, in one place."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import dispatch
from jax._src.interpreters import mlir


def require_devices_during_lowering(primitive: Any) -> None:
  """Makes JAX hand the device assignment to the primitive's lowering."""
  dispatch.prim_requires_devices_during_lowering.add(primitive)


def lower_with_sharding_in_types(ctx: Any, value: Any, aval: Any) -> Any:
  """Constrains a lowered value to the explicit sharding in its type."""
  return mlir.lower_with_sharding_in_types(ctx, value, aval)


def varying_axes(x: Any) -> frozenset[str]:
  """The mesh axes of an enclosing `shard_map` over which `x` varies."""
  return frozenset(jax.typeof(x).mat.varying)


def cudnn_version_number() -> int | None:
  """The installed cuDNN's version, e.g. 91300; None without a CUDA plugin."""
  from jax._src.lib import cuda_versions  # loads a CUDA plugin's module

  return None if cuda_versions is None else cuda_versions.cudnn_get_version()
