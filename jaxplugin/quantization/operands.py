# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantized operands of matmuls in training, as a recipe specifies them.

A recipe may ask for more than `quantize` does: a transform before it, square
blocks, and scales that are chosen by the errors of their blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.arrays import scale_signs
from jaxplugin.arrays import scaled_array
from jaxplugin.core import blocking
from jaxplugin.core import formats
from jaxplugin.jaxext import explicit_axes
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import notation
from jaxplugin.quantization import arguments
from jaxplugin.quantization import operations
from jaxplugin.quantization import problems
from jaxplugin.quantization import quantize_primitive
from jaxplugin.quantization.sharding import assignment


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeSpec:
  """Specifies how an array is quantized for a matmul.

  Attributes:
    format: the format to quantize to.
    along: merges dimensions into the one that the matmul contracts.
    scale_rounding: as for `quantize`.
    hadamard: size of the groups that are transformed first, or None.
    square: dimensions that are merged, in this order, into the other side of
      square blocks; None for blocks of one row.
    four_over_six: whether each block is scaled to 6 or to 4 (`operations`).
    scale_up: whether floating-point scales are rounded up (`operations`).
  """

  format: formats.BlockFormat
  along: blocking.Blocking
  scale_rounding: operations.ScaleRounding = "up"
  hadamard: int | None = None
  square: tuple[int, ...] | None = None
  four_over_six: bool = False
  scale_up: bool = False

  @property
  def extras(self) -> problems.Extras:
    """The requests that `quantize` does not have."""
    return problems.Extras(
      hadamard=self.hadamard,
      square=self.square,
      four_over_six=self.four_over_six,
      scale_up=self.scale_up,
    )


@functools.partial(jax.jit, static_argnames="spec")
def quantize(
  x: jax.Array, spec: QuantizeSpec, key: jax.Array | None = None
) -> scaled_array.ScaledArray:
  """Quantizes an array: merges dimensions, pads, transforms and rounds.

  Args:
    x: floats.
    spec: specifies the result.
    key: for stochastic rounding; None rounds to nearest.

  Returns:
    `ScaledArray` with the shape that `spec.along` gives, FP4 packed. The scale
    of a square block is repeated along the merged dimensions, as every kernel
    reads it.
  """
  (result,) = quantize_all(x, (spec,), (key,))
  return result


@functools.partial(jax.jit, static_argnames="specs")
def quantize_all(
  x: jax.Array,
  specs: tuple[QuantizeSpec, ...],
  keys: tuple[jax.Array | None, ...],
) -> list[scaled_array.ScaledArray]:
  """Quantizes by each spec, from one read if kernels support that.

  Args:
    x: floats.
    specs: specs with one format and one scale rounding.
    keys: a key or None for each spec.
  """
  first = specs[0]
  quantized = quantize_primitive.quantize(
    x,
    None,
    blockings=tuple(spec.along for spec in specs),
    extras=[spec.extras for spec in specs],
    keys=keys,
    format=first.format,
    scale_rounding=first.scale_rounding,
    packed=arguments.can_be_packed(first.format),
    for_products=True,
    scale_layout=layouts.LINEAR,
  )
  results = []
  for values, scale, global_scale in quantized:
    if global_scale is not None:
      global_scale = global_scale.reshape((1,) * values.ndim)
    scale_signs.remember_positive(scale)
    results.append(
      scaled_array.ScaledArray(values, scale, global_scale, first.format)
    )
  return results


@functools.partial(jax.jit, static_argnames=("spec", "along", "shape"))
def transposed(
  x: scaled_array.ScaledArray,
  spec: QuantizeSpec,
  along: blocking.Blocking,
  shape: tuple[int, ...],
) -> scaled_array.ScaledArray:
  """Returns an array of square blocks as blocked along the squares' other side.

  Its codes and its scale for each square are the same, so both dequantize to
  the same array, and `Q(w.T) = Q(w).T` bitwise.

  Args:
    x: the array, quantized by `spec`, packed or not.
    spec: has square blocks.
    along: blocking of the array along `spec.square`.
    shape: shape of the array before it was quantized.

  Returns:
    `ScaledArray` with the shape that `along` gives.
  """
  mesh = explicit_axes.mesh_of((x.values,))
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
  """Computes `transposed` of an array with explicit axes, on each device."""
  problem = problems.QuantizeProblem(
    shape=shape,
    dtype=np.dtype(np.float32),
    format=spec.format,
    blockings=(spec.along, along),
    extras=spec.extras,
  )
  dims = assignment.quantize_notation(problem, [x], least_parts=1)
  names = dims.results[:: problem.results_each]  # of both arrays' values
  taker = mesh_axes.Taker(mesh.shape)
  axes = assignment.axes_of_whole_blocks(
    dims, names[0], explicit_axes.spec_of(x.values), taker
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
    results = explicit_axes.shard_map(
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

  # The code of each value's scale. XLA computes only the ones that are used.
  codes = lax.bitcast_convert_type(x.scale, jnp.uint8)
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
