# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Types and shardings of quantized arrays on meshes with explicit axes."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.jaxext import explicit_axes
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import byte_arrays
from jaxplugin.operation import notation
from jaxplugin.quantization import problems
from jaxplugin.quantization import prologues
from jaxplugin.quantization.sharding import assignment


def quantize_specs(
  problem: problems.QuantizationProblem, x: Any, mesh: Any
) -> list[mesh_axes.Spec]:
  """Returns the mesh axes of each dimension of `quantize_p`'s results.

  They are those of x, except for axes that would cut a block. A swizzled scale
  is replicated, because its tiles mix the rows of a matrix.
  """
  dims = assignment.quantize_notation(problem, [x], least_parts=1)
  spec = explicit_axes.spec_of(x)
  if problem.prologue is not None and problem.prologue.halves:
    # Shards of interleaved halves hold pairs. The others are gathered.
    halves = problem.prologue.halves
    last = spec[-1] if halves == "interleaved" else ()
    spec = tuple(prologues.paired((*spec[:-1], last), halves, ()))
  axes = assignment.axes_of_whole_blocks(
    dims, dims.operands[0], spec, mesh_axes.Taker(mesh.shape)
  )
  specs = list(notation.specs(dims.results, axes))
  if problem.scale_layout != layouts.LINEAR:
    for i in range(1, len(specs), problem.results_each):
      specs[i] = ((),) * len(specs[i])
  return specs


def moved(
  who: str,
  values: jax.Array,
  scale: jax.Array,
  format: formats.BlockFormat,
  axis: int,
  out_sharding: Any,
) -> tuple[jax.Array, jax.Array]:
  """Reshards values and a linear scale over explicit axes, as bytes.

  Raises:
    ValueError: If the sharding would cut a block, or if JAX rejects it.
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
  dtype = values.dtype
  is_unpacked = dtype in formats.FOUR_BITS and format.block_size % 2 == 0
  if is_unpacked:  # Collectives do not support 4-bit values.
    values = layouts.pack_fp4(values, axis=axis)
  dtypes = values.dtype, scale.dtype
  values, scale = (
    byte_arrays.from_bytes(
      jax.sharding.reshard(byte_arrays.to_bytes(x), out_sharding), d
    )
    for x, d in zip((values, scale), dtypes, strict=True)
  )
  if is_unpacked:
    values = layouts.unpack_fp4(values, axis=axis, dtype=dtype)
  return values, scale
