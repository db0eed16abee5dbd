# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands of products in training: quantized as a recipe wants it.

Beside what `quantize` does that is: transformed before, in square blocks, and
with scales that are chosen by errors.
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
from jaxplugin.quantization import arguments
from jaxplugin.quantization import operations
from jaxplugin.quantization import problems
from jaxplugin.quantization import quantize_primitive
from jaxplugin.quantization.sharding import assignment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manner:
  """How an array is quantized for a product.

  Attributes:
    format: to quantize to.
    along: how it gets the one dimension that the product contracts.
    scale_rounding: as for `quantize`.
    hadamard: the size of the groups that are transformed before, or None.
    square: dimensions that are merged, in this order, into the other side of
      blocks that are squares; None for blocks of one row.
    four_over_six: whether blocks are scaled to 6 or to 4, see `operations`.
    scale_up: whether floating-point scales are rounded up, see `operations`.
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
    """What it asks for beside what `quantize` does."""
    return problems.Extras(
      hadamard=self.hadamard,
      square=self.square,
      four_over_six=self.four_over_six,
      scale_up=self.scale_up,
    )


@functools.partial(jax.jit, static_argnames="manner")
def quantize(
  x: jax.Array, manner: Manner, key: jax.Array | None = None
) -> scaled_array.ScaledArray:
  """`x` quantized in a manner: blocked, padded, transformed, rounded.

  Args:
    x: floats.
    manner: how.
    key: for stochastic rounding; None rounds to nearest.

  Returns:
    `ScaledArray` with the shape that `manner.along` gives, FP4 packed. The
    scales of square blocks are repeated along the merged dimensions, so that
    every kernel takes them.
  """
  (result,) = quantize_all(x, (manner,), (key,))
  return result


@functools.partial(jax.jit, static_argnames="manners")
def quantize_all(
  x: jax.Array,
  manners: tuple[Manner, ...],
  keys: tuple[jax.Array | None, ...],
) -> list[scaled_array.ScaledArray]:
  """`quantize` in each manner, from one read where kernels can.

  Args:
    x: floats.
    manners: of one format and one scale rounding.
    keys: of each.
  """
  first = manners[0]
  quantized = quantize_primitive.quantize(
    x,
    None,
    blockings=tuple(manner.along for manner in manners),
    extras=[manner.extras for manner in manners],
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


@functools.partial(jax.jit, static_argnames=("manner", "along", "shape"))
def turned(
  x: scaled_array.ScaledArray,
  manner: Manner,
  along: blocking.Blocking,
  shape: tuple[int, ...],
) -> scaled_array.ScaledArray:
  """Returns an array of square blocks as blocked along the squares' other side.

  Its codes and its scale for each square are the same, so both dequantize to
  the same array, and `Q(w.T) = Q(w).T` bitwise.

  Args:
    x: `quantize` of an array in a manner that is square, packed or not.
    manner: that.
    along: blocking of that array along `manner.square`.
    shape: of that array.

  Returns:
    `ScaledArray` with the shape that `along` gives.
  """
  mesh = explicit_axes.mesh_of((x.values,))
  if mesh is not None:
    return _turned_in_parts(x, manner, along, shape, mesh)
  return _turned(x, manner, along, shape)


def _turned_in_parts(
  x: scaled_array.ScaledArray,
  manner: Manner,
  along: blocking.Blocking,
  shape: tuple[int, ...],
  mesh: Any,
) -> scaled_array.ScaledArray:
  """`turned` of an array whose sharding is in its type: each device its own."""
  problem = problems.QuantizeProblem(
    shape=shape,
    dtype=np.dtype(np.float32),
    format=manner.format,
    blockings=(manner.along, along),
    extras=manner.extras,
  )
  spec = assignment.with_whole_blocks(
    problem,
    assignment.spec_of_x(
      manner.along, explicit_axes.spec_of(x.values), len(shape)
    ),
    mesh.shape,
  )
  count = mesh_axes.Taker(mesh.shape).count
  own = tuple(n // count(axes) for n, axes in zip(shape, spec, strict=True))
  given = assignment.result_spec(manner.along, spec)
  wanted = assignment.result_spec(along, spec)
  leaves, tree = jax.tree.flatten(x)
  num_scales = len(leaves) - 2  # none, or a global one

  def function(*leaves: jax.Array) -> list[jax.Array]:
    return jax.tree.leaves(
      _turned(jax.tree.unflatten(tree, leaves), manner, along, own)
    )

  with jax.sharding.use_abstract_mesh(mesh):
    results = explicit_axes.shard_map(
      function,
      mesh,
      [given, given, *[((),) * len(given)] * num_scales],
      [wanted, wanted, *[((),) * len(wanted)] * num_scales],
    )(*leaves)
  return jax.tree.unflatten(tree, results)


def _turned(
  x: scaled_array.ScaledArray,
  manner: Manner,
  along: blocking.Blocking,
  shape: tuple[int, ...],
) -> scaled_array.ScaledArray:
  x = x.unpack()
  axis, size = manner.along.axis(), manner.format.block_size

  def moved(leaf: jax.Array) -> jax.Array:
    return along.apply(manner.along.undo(leaf, shape))

  # The code of the scale of each value; XLA computes those that are taken.
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
