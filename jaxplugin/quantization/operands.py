# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantized operands of matmuls in training, as a recipe specifies them.

A recipe may require more than `jp.quantize` supports: a Hadamard transform,
square blocks, and scales chosen by the errors of their blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import scaled_array
from jaxplugin.core import blocking, formats
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import notation
from jaxplugin.quantization import (
  arguments,
  problems,
  prologues,
  quantize_primitive,
)
from jaxplugin.quantization.sharding import assignment, global_scales


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeSpec:
  """Specifies how an array is quantized for a matmul.

  Attributes:
    format: the format to quantize to.
    along: blocking that merges the contracting dimensions into one.
    scale_rounding: as for `quantize`.
    options: what `jp.quantize` does not support.
    axis_name: bound axes of shards that share a global scale.
  """

  format: formats.BlockFormat
  along: blocking.Blocking
  scale_rounding: arguments.ScaleRounding = "up"
  options: problems.RecipeOptions = problems.NO_OPTIONS
  axis_name: tuple[str, ...] = ()

  @classmethod
  def along_axis(
    cls,
    axis: int,
    shape: Sequence[Any],
    format: formats.BlockFormat,
    **fields: Any,
  ) -> Self:
    """Returns the spec of quantizing an array along one dimension."""
    format = format.along(shape[axis])
    along = blocking.Blocking.along(axis, len(shape), format.block_size)
    return cls(format=format, along=along, **fields)


@functools.partial(jax.jit, static_argnames="spec")
def quantize(
  x: jax.Array | prologues.PrologueCall,
  spec: QuantizeSpec,
  key: jax.Array | None = None,
) -> scaled_array.ScaledArray:
  """Quantizes an array: merges dimensions, pads, transforms and rounds.

  With a key, values are rounded stochastically.

  Returns:
    `ScaledArray` of the shape `spec.along.shape(x.shape)`, FP4 packed. Each row
    of a square block has the block's scale, as kernels require.
  """
  (result,) = quantize_all(x, (spec,), (key,))
  return result


@functools.partial(
  jax.jit,
  static_argnames=(
    "specs",
    "packed",
    "for_products",
    "returns_amax",
    "sums_columns",
  ),
)
def quantize_all(
  x: jax.Array | prologues.PrologueCall,
  specs: tuple[QuantizeSpec, ...],
  keys: tuple[jax.Array | None, ...],
  global_scale: jax.Array | None = None,
  *,
  packed: bool | None = None,
  for_products: bool = True,
  returns_amax: bool = False,
  sums_columns: bool = False,
) -> list[Any]:
  """Quantizes an array for each spec, from one read if a kernel supports it.

  Args:
    x: array, or the call of a prologue whose f32 result is quantized.
    specs: specs of the same format, scale rounding and axes.
    keys: key of stochastic rounding for each spec, or None.
    global_scale: f32[] for all specs, f32[n] for each, or None.
    packed: as for `QuantizationProblem`; None packs FP4.
    for_products, returns_amax: as for `QuantizationProblem`.
    sums_columns: whether the sums f32[features] of `column_sums` are a result.

  Returns:
    A `ScaledArray` for each spec, then the amax, the sums and the sum of a
    prologue, each only if there is one.
  """
  first, prologue, more = specs[0], None, {}
  if isinstance(x, prologues.PrologueCall):
    call = x.canonical(x.shape)
    x, prologue, more = call.x, call.prologue, dict(call.more)
  if packed is None:
    packed = arguments.can_be_packed(first.format)
  if first.axis_name:
    problem = problems.QuantizationProblem(
      shape=tuple(x.shape),
      dtype=np.dtype(x.dtype),
      format=first.format,
      blockings=tuple(spec.along for spec in specs),
      options=tuple(spec.options for spec in specs),
    )
    global_scale = global_scales.of_axes(x, problem, first.axis_name)
  quantized, *rest = quantize_primitive.produce(
    x,
    global_scale,
    prologue=prologue,
    more=more,
    blockings=tuple(spec.along for spec in specs),
    options=[spec.options for spec in specs],
    keys=keys,
    format=first.format,
    scale_rounding=first.scale_rounding,
    packed=packed,
    for_products=for_products,
    returns_amax=returns_amax,
    column_sums=0 if sums_columns else None,
  )
  results = list[Any]()
  for values, scale, own_scale in quantized:
    if own_scale is not None:
      own_scale = own_scale.reshape((1,) * values.ndim)
    results.append(
      scaled_array.ScaledArray(values, scale, own_scale, first.format)
    )
  return [*results, *(x for x in rest if x is not None)]


def prologue_refusal(
  specs: Sequence[QuantizeSpec],
  shape: Sequence[Any],
) -> str:
  """Returns why the specs quantize a prologue's result separately, or ""."""
  first = specs[0]
  if not blocking.are_static(shape):
    return f"a size of {list(shape)} is symbolic"
  for spec in specs:
    what = "the matmul" if spec is first else "the backward pass"
    if spec.axis_name:
      return f"{what} needs a global scale over axes {list(spec.axis_name)}"
    if spec.options != problems.NO_OPTIONS:
      return f"{what} needs its values {spec.options}, which no kernel fuses"
    if not spec.format.scales_codes:
      return "no kernel fuses it with zero points, minima or a codebook"
    if spec.format.is_square:
      return f"{what} needs square blocks of {spec.format}"
    if spec.format != first.format:
      return (
        f"{what} quantizes it in blocks of {spec.format.block_size}, and the"
        f" forward pass in blocks of {first.format.block_size}"
      )
    k = math.prod(shape[d] for d in spec.along.dims)
    if k % spec.along.multiple:
      return (
        f"{what} quantizes it along {k} values, which are not whole blocks of"
        f" {spec.along.multiple}"
      )
  return ""


@functools.partial(jax.jit, static_argnames=("spec", "along", "shape"))
def transposed(
  x: scaled_array.ScaledArray,
  spec: QuantizeSpec,
  along: blocking.Blocking,
  shape: tuple[int, ...],
) -> scaled_array.ScaledArray:
  """Blocks an array of square blocks along the squares' other side.

  Each square keeps its codes and its scale, so both arrays dequantize to the
  same values, and `Q(w.T) = Q(w).T` bitwise.

  Args:
    x: array quantized by `spec`, packed or not.
    spec: spec with square blocks.
    along: blocking of the array along the squares' other side.
    shape: shape of the array before it was quantized.

  Returns:
    `ScaledArray` of the shape `along.shape(shape)`.
  """
  mesh = mesh_axes.mesh_of((x.values,))
  if mesh is not None:
    return _transposed_on_devices(x, spec, along, shape, mesh)
  return _transposed(x, spec, along, shape)


def _transposed_on_devices(
  x: scaled_array.ScaledArray,
  spec: QuantizeSpec,
  along: blocking.Blocking,
  shape: tuple[int, ...],
  mesh: Any,
) -> scaled_array.ScaledArray:
  """Computes `transposed` on each device of a mesh with explicit axes."""
  problem = problems.QuantizationProblem(
    shape=shape,
    dtype=np.dtype(np.float32),
    format=spec.format,
    blockings=(spec.along, along),
    options=(spec.options, problems.NO_OPTIONS),
  )
  dims = assignment.quantize_notation(problem, [x], least_parts=1)
  names = dims.results[:: problem.results_each]  # dimensions of both values
  taker = mesh_axes.Taker(mesh.shape)
  axes = assignment.axes_of_whole_blocks(
    dims, names[0], mesh_axes.spec_of(x.values), taker
  )
  given, wanted = notation.specs(names, axes)
  (x_spec,) = notation.specs(dims.operands, axes)
  own = tuple(
    n // taker.count(axes) for n, axes in zip(shape, x_spec, strict=True)
  )
  leaves, tree = jax.tree.flatten(x)
  num_scales = len(leaves) - 2  # 1 with a global scale, else 0

  def function(*leaves: jax.Array) -> list[jax.Array]:
    return jax.tree.leaves(
      _transposed(jax.tree.unflatten(tree, leaves), spec, along, own)
    )

  with jax.sharding.use_abstract_mesh(mesh):
    results = mesh_axes.shard_map(
      function,
      mesh,
      [given, given, *[((),) * len(given)] * num_scales],
      [wanted, wanted, *[((),) * len(wanted)] * num_scales],
    )(*leaves)
  return jax.tree.unflatten(tree, results)


def _transposed(
  x: scaled_array.ScaledArray,
  spec: QuantizeSpec,
  along: blocking.Blocking,
  shape: tuple[int, ...],
) -> scaled_array.ScaledArray:
  x = x.unpack()
  axis, size = spec.along.axis(), spec.format.block_size

  def moved(leaf: jax.Array) -> jax.Array:
    return along.apply(spec.along.undo(leaf, shape))

  # `each` has the scale's code for every value. XLA computes only the codes
  # that `slice_in_dim` selects.
  unsigned = np.dtype(f"uint{8 * x.scale.dtype.itemsize}")
  codes = lax.bitcast_convert_type(x.scale, unsigned)
  each = moved(jnp.repeat(codes, size, axis))
  codes = lax.slice_in_dim(each, 0, None, size, along.axis())
  values = moved(x.values)
  global_scale = x.global_scale
  if global_scale is not None:
    global_scale = global_scale.reshape((1,) * values.ndim)
  return scaled_array.ScaledArray(
    values,
    lax.bitcast_convert_type(codes, x.format.scale_dtype),
    global_scale,
    x.format,
  )
