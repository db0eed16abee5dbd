# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Moves quantized arrays, as bytes, to a sharding in their types."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import byte_arrays


def moved(
  who: str,
  values: jax.Array,
  scale: jax.Array,
  format: formats.BlockFormat,
  axis: int,
  out_sharding: Any,
) -> tuple[jax.Array, jax.Array]:
  """Moves values and a linear scale to a sharding.

  Args:
    who: the function that errors name.
    values, scale: quantized along `axis`.
    format: the format of both.
    axis: at least 0.
    out_sharding: a `PartitionSpec`, or a `NamedSharding` of explicit axes.

  Raises:
    ValueError: If a block would lie on two devices, or if JAX raises it.
  """
  mesh: Any = jax.sharding.get_abstract_mesh()
  spec = out_sharding
  if isinstance(out_sharding, NamedSharding):
    mesh, spec = out_sharding.mesh, out_sharding.spec
  if isinstance(spec, jax.sharding.PartitionSpec) and not mesh.empty:
    axes = mesh_axes.normalize_spec(spec, values.ndim)[axis]
    if set(axes) <= set(mesh.axis_names):
      parts = mesh_axes.Taker(mesh.shape).count(axes)
      if scale.shape[axis] % parts:
        raise ValueError(
          f"{who}: out_sharding must not cut a block, got {out_sharding},"
          f" which splits {scale.shape[axis]} blocks of axis {axis} into"
          f" {parts} parts; shard another axis"
        )
  is_unpacked = values.dtype == formats.E2M1 and format.block_size % 2 == 0
  if is_unpacked:  # FP4 is not a type of a collective
    values = layouts.pack_fp4(values, axis=axis)
  dtypes = values.dtype, scale.dtype
  values, scale = (
    byte_arrays.from_bytes(
      jax.sharding.reshard(byte_arrays.to_bytes(x), out_sharding), d
    )
    for x, d in zip((values, scale), dtypes, strict=True)
  )
  if is_unpacked:
    values = layouts.unpack_fp4(values, axis=axis)
  return values, scale
