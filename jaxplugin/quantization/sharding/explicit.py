# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizing and dequantizing arrays whose shardings are in their types.

Each is lowered to a `shard_map` over the explicit axes (`operation/split.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.jaxext import explicit_axes
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import assignment as assignment_lib
from jaxplugin.operation import byte_arrays
from jaxplugin.operation import split
from jaxplugin.quantization import problems
from jaxplugin.quantization.sharding import assignment
from jaxplugin.quantization.sharding import operation
from jaxplugin.quantization.sharding import per_device


def quantize_types(
  problem: problems.QuantizeProblem, x: Any, avals: Sequence[Any], mesh: Any
) -> list[Any]:
  """Returns the types of the results of `quantize_p`.

  Their axes are those of x, except for axes that would cut a block. A swizzled
  scale has none, because its tiles mix the rows of a matrix.

  Args:
    problem: the problem of the whole array.
    x: has a type.
    avals: the types without axes.
    mesh: a mesh with explicit axes.
  """
  spec = assignment.with_whole_blocks(
    problem, explicit_axes.spec_of(x), mesh.shape
  )
  specs = [
    own
    for b in problem.blockings
    for own in assignment.result_specs(problem, b, spec)
  ]
  if problem.scale_layout != layouts.LINEAR:
    for i in range(1, len(avals), problem.results_each):
      specs[i] = ((),) * avals[i].ndim
  return sharded(avals, specs, mesh)


def sharded(
  avals: Sequence[Any], specs: Sequence[mesh_axes.Spec], mesh: Any
) -> list[Any]:
  """Adds shardings on a mesh to types."""
  return [
    aval.update(sharding=NamedSharding(mesh, mesh_axes.partition_spec(spec)))
    for aval, spec in zip(avals, specs, strict=True)
  ]


def whole(avals: Sequence[Any]) -> list[Any]:
  """Removes the axes from types."""
  return [
    aval.update(
      sharding=aval.sharding.update(
        spec=mesh_axes.partition_spec(((),) * aval.ndim)
      )
    )
    for aval in avals
  ]


def quantize(
  problem: problems.QuantizeProblem,
  local: per_device.Local,
  mesh: Any,
  specs: Sequence[mesh_axes.Spec],
) -> Callable[..., list[jax.Array]]:
  """Returns a function of the operands of `quantize_p`, with its results.

  Args:
    problem: the problem of the whole array.
    local: the functions of one device.
    mesh: a mesh with explicit axes.
    specs: the axes in the types of the results.
  """
  if not operation.can_quantize(problem):
    return _on_each(
      lambda *operands: local.quantize(operands, problem), mesh, specs
    )
  if problem.scale_layout != layouts.LINEAR:
    size = problem.results_each
    specs = [
      ((),) * len(specs[0]) if i % size == 1 else spec
      for i, spec in enumerate(specs)
    ]
  on_axes = functools.partial(split.on_explicit_axes, mesh=mesh, specs=specs)
  return operation.quantize(problem, local, on_axes)


def dequantize(
  problem: problems.DequantizeProblem,
  local: per_device.LocalDequantize,
  mesh: Any,
  spec: mesh_axes.Spec,
) -> Callable[..., jax.Array]:
  """Returns a function of the operands of `dequantize_p`, with its result.

  Args:
    problem: the problem of the whole array.
    local: dequantizes on one device.
    mesh: a mesh with explicit axes.
    spec: the axes in the type of the result.
  """
  if not operation.can_dequantize(problem):
    function = _on_each(
      lambda *operands: [local(operands, problem)], mesh, [spec]
    )
    return lambda *operands: function(*operands)[0]
  on_axes = functools.partial(split.on_explicit_axes, mesh=mesh, specs=[spec])
  return operation.dequantize(problem, local, on_axes)


def _on_each(
  function: Callable[..., Sequence[jax.Array]],
  mesh: Any,
  specs: Sequence[mesh_axes.Spec],
) -> Callable[..., list[jax.Array]]:
  """Returns a function of whole arrays that every device computes.

  Args:
    function: the function.
    mesh: a mesh with explicit axes.
    specs: axes of each dimension of each result.
  """
  replicated = lambda specs: tuple(((),) * len(spec) for spec in specs)
  each = split.Operation(
    assign=lambda operands,
    given,
    wanted,
    axis_sizes: assignment_lib.Assignment(
      operands=replicated(given), results=replicated(wanted)
    ),
    per_device=lambda parts, assigned, axis_sizes: list(function(*parts)),
  )
  return split.on_explicit_axes(each, mesh, specs)


def moved(
  who: str,
  values: jax.Array,
  scale: jax.Array,
  format: formats.BlockFormat,
  axis: int,
  out_sharding: Any,
) -> tuple[jax.Array, jax.Array]:
  """Moves values and a linear scale, as bytes, to a sharding in their types.

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
