# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A device's share of quantizing and dequantizing.

Functions of the parts of arrays that `assigning` gives a device, with the names
of its mesh axes bound: in a partitioner's callback, or in a `shard_map` whose
specs are those of an `Assignment`. The bits are those of the whole array.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.jaxext import mesh_axes
from jaxplugin.quantization import operations
from jaxplugin.quantization import problems
from jaxplugin.quantization.sharding import assigning
from jaxplugin.quantization.sharding import places


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local:
  """What one device computes.

  Attributes:
    quantize: (operands of a problem, the problem) -> its results.
    partial_scales: (x, a problem) -> f32[n], `partial_scales` of x; with
      num_maxima u32[n, num_maxima].
    num_maxima: of a problem, as `backends.num_maxima`.
  """

  quantize: Callable[
    [Sequence[jax.Array], problems.QuantizeProblem], list[jax.Array]
  ]
  partial_scales: Callable[..., jax.Array]
  num_maxima: Callable[[problems.QuantizeProblem], int]


# The same of dequantizing: its result.
LocalDequantize = Callable[
  [Sequence[jax.Array], problems.DequantizeProblem], jax.Array
]


def quantize(
  local: Local,
  operands: Sequence[jax.Array],
  problem: problems.QuantizeProblem,
  assignment: assigning.Assignment,
  axis_sizes: Mapping[str, int],
) -> list[jax.Array]:
  """A device's parts of the results, as bytes.

  Global scales are of the whole array: one maximum over the devices for all of
  them. Random bits are those of the places that values have in the whole array.

  Args:
    local: of one device.
    operands: x's part, a global scale or none, data of keys.
    problem: of the whole array, with linear scales and packed FP4.
    assignment: of its dimensions.
    axis_sizes: size of each mesh axis.
  """
  x, *given = operands
  num_keys = sum(e.is_stochastic for e in problem.extras_each)
  scales, keys = given[: len(given) - num_keys], given[len(given) - num_keys :]
  own = _own_problem(problem, assignment, tuple(x.shape))
  keys = _own_keys(keys, problem, assignment, axis_sizes)
  axes = tuple(a for dim in assignment.x for a in dim)
  if not problem.computes_global_scale or not axes:
    return bytes_of(local.quantize([x, *scales, *keys], own), own)
  if count := local.num_maxima(own):
    maxima = lax.pmax(local.partial_scales(x, own, num_maxima=count), axes)
    own = dataclasses.replace(own, num_maxima=count)
    return bytes_of(local.quantize([x, maxima, *keys], own), own)
  # They are of one tensor; a NaN or an Inf alone makes them differ.
  partial = _largest(local.partial_scales(x, own), axes)
  scale = operations.global_scale_of_partial(partial)
  given_scale = _with_whole_scale(own)
  pairs = bytes_of(
    local.quantize(
      [x, scale if scale.size > 1 else scale[0], *keys],
      given_scale,
    ),
    given_scale,
  )
  return [
    leaf
    for i in range(scale.size)
    for leaf in (*pairs[2 * i : 2 * i + 2], scale[i])
  ]


def _largest(partial: jax.Array, axes: mesh_axes.Axes) -> jax.Array:
  """f32[n]: the largest over devices of f32[n], zeros or positive numbers.

  As u32, whose order is that of their bits. A model may have hundreds, and for
  each all-reduce of f32 or s32 XLA compiles a kernel of its own (jaxlib
  0.10.2); of u32 the communication library has it.
  """
  bits = lax.bitcast_convert_type(partial, jnp.uint32)
  return lax.bitcast_convert_type(lax.pmax(bits, axes), jnp.float32)


def _own_problem(
  problem: problems.QuantizeProblem,
  assignment: assigning.Assignment,
  shape: tuple[int, ...],
) -> problems.QuantizeProblem:
  """The problem of a device's part of x."""
  blockings, extras_each = [], []
  for b, extras in zip(problem.blockings, problem.extras_each, strict=True):
    if b.dims and assignment.x[b.dims[0]]:
      # Whole blocks and groups: nothing is left to be padded.
      multiple = math.lcm(problem.format.block_size, extras.hadamard or 1)
      b = dataclasses.replace(b, multiple=multiple)
    if extras.is_stochastic and any(assignment.x):
      strides = places.strides(b.shape(problem.shape))
      extras = dataclasses.replace(extras, strides=strides)
    blockings.append(b)
    extras_each.append(extras)
  first, *more = extras_each
  is_plain = set(more) <= {problems.NO_EXTRAS}
  return dataclasses.replace(
    problem,
    shape=shape,
    blockings=tuple(blockings),
    extras=first,
    more_extras=() if is_plain else tuple(more),
  )


def _with_whole_scale(
  problem: problems.QuantizeProblem,
) -> problems.QuantizeProblem:
  """The same of a part that is given the global scale of the whole array."""
  # Without errors to compare any global scale serves.
  first, *more = (
    dataclasses.replace(extras, is_part=extras.four_over_six)
    for extras in problem.extras_each
  )
  return dataclasses.replace(
    problem,
    has_global_scale=True,
    extras=first,
    more_extras=tuple(more) if problem.more_extras else (),
  )


def _own_keys(
  keys: Sequence[jax.Array],
  problem: problems.QuantizeProblem,
  assignment: assigning.Assignment,
  axis_sizes: Mapping[str, int],
) -> list[jax.Array]:
  """Data of keys, with the place of the first value of a device's part."""
  if not any(assignment.x):
    return list(keys)
  taker = mesh_axes.Taker(axis_sizes)
  result, left = [], list(keys)
  for b, extras in zip(problem.blockings, problem.extras_each, strict=True):
    if not extras.is_stochastic:
      continue
    shape = b.shape(problem.shape)
    firsts = [
      lax.axis_index(axes) * (size // taker.count(axes))
      if axes
      else jnp.int32(0)
      for axes, size in zip(
        assigning.result_spec(b, assignment.x), shape, strict=True
      )
    ]
    result.append(places.words(left.pop(0), firsts, places.strides(shape)))
  return result


def bytes_of(
  results: Sequence[jax.Array], problem: problems.QuantizeProblem
) -> list[jax.Array]:
  """Results of `quantize_p`, with values and scales as bytes."""
  each = problem.results_each
  return [
    to_bytes(x) if i % each < 2 else x  # a global scale is third
    for i, x in enumerate(results)
  ]


def dequantize(
  local: LocalDequantize,
  operands: Sequence[jax.Array],
  problem: problems.DequantizeProblem,
) -> jax.Array:
  """A device's part of the result.

  Args:
    local: dequantizes on one device.
    operands: parts of values and scale, as bytes, and of a global scale.
    problem: of the whole array.
  """
  values, scale, *given = operands
  format = problem.format
  if not format.is_fp4:
    values = from_bytes(values, format.array_dtype)
  own = dataclasses.replace(
    problem,
    shape=tuple(values.shape),
    dtype=np.dtype(values.dtype),
    global_shape=tuple(given[0].shape) if given else None,
  )
  return local([values, from_bytes(scale, format.scale_dtype), *given], own)


# What is quantized, as it travels: FP4 is no type of a collective, XLA:CPU
# widens those of 8-bit floats, and bytes are bytes everywhere.


def to_bytes(x: jax.Array) -> jax.Array:
  """Values or scales of a byte each, or two FP4 values a byte, as u8."""
  if x.dtype == jnp.uint8:
    return x
  return lax.bitcast_convert_type(x, jnp.uint8)


def from_bytes(x: jax.Array, dtype: Any) -> jax.Array:
  """Undoes `to_bytes`."""
  if dtype == jnp.uint8:
    return x
  return lax.bitcast_convert_type(x, dtype)


def packed(values: jax.Array, axis: int) -> jax.Array:
  """FP4 values two a byte along an axis, others as they are."""
  if values.dtype != formats.E2M1:
    return values
  if _is_shardy():
    return layouts.pack_fp4(values, axis=axis)
  # GSPMD replicates the operand of a bitcast that changes the shape.
  nibbles = lax.bitcast_convert_type(values, jnp.uint4).astype(jnp.uint8)
  low, high = (
    lax.slice_in_dim(nibbles, first, None, 2, axis) for first in (0, 1)
  )
  return low | (high << 4)


def unpacked(values: jax.Array, axis: int) -> jax.Array:
  """Undoes `packed` of FP4."""
  if _is_shardy():
    return layouts.unpack_fp4(values, axis=axis)
  pairs = jnp.stack([values & 15, values >> 4], axis + 1).astype(jnp.uint4)
  size = 2 * values.shape[axis]
  shape = (*values.shape[:axis], size, *values.shape[axis + 1 :])
  return lax.bitcast_convert_type(pairs.reshape(shape), formats.E2M1)


def _is_shardy() -> bool:
  return bool(jax.config.jax_use_shardy_partitioner)  # type: ignore[attr-defined]
