# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The part of quantizing and dequantizing that each device computes.

The results have the bits of the whole array. The functions run where the mesh
axes' names are bound: in a partitioner callback or a `shard_map`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import assignment as assignment_lib
from jaxplugin.operation import byte_arrays
from jaxplugin.quantization import operations
from jaxplugin.quantization import problems
from jaxplugin.quantization.sharding import offsets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local:
  """Functions that compute on one device.

  Attributes:
    quantize: (operands, problem) -> results of `quantize_p`.
    partial_scales: (x, problem) -> f32[n], `partial_scales` of x. With
      num_maxima it returns u32[n, num_maxima].
    num_maxima: problem -> `backends.num_maxima`.
  """

  quantize: Callable[
    [Sequence[jax.Array], problems.QuantizationProblem], list[jax.Array]
  ]
  partial_scales: Callable[..., jax.Array]
  num_maxima: Callable[[problems.QuantizationProblem], int]


# (operands, problem) -> result of `dequantize_p`.
LocalDequantize = Callable[
  [Sequence[jax.Array], problems.DequantizationProblem], jax.Array
]


def quantize(
  local: Local,
  operands: Sequence[jax.Array],
  problem: problems.QuantizationProblem,
  assignment: assignment_lib.Assignment,
  axis_sizes: Mapping[str, int],
) -> list[jax.Array]:
  """Computes a device's shards of the results, as bytes.

  Global scales are computed for the whole array by one maximum over devices.
  Random bits depend on the offset of a value in the whole array.

  Args:
    local: functions of one device.
    operands: shard of x, perhaps a global scale, and key data.
    problem: problem of the whole array, with linear scales and packed FP4.
    assignment: mesh axes of its dimensions.
    axis_sizes: size of each mesh axis.
  """
  x, *given = operands
  num_keys = sum(e.is_stochastic for e in problem.options_each)
  scales, keys = given[: len(given) - num_keys], given[len(given) - num_keys :]
  own = _own_problem(problem, assignment, tuple(x.shape))
  keys = _own_keys(keys, problem, assignment, axis_sizes)
  axes = tuple(a for dim in assignment.operands[0] for a in dim)
  if not problem.computes_global_scale or not axes:
    return bytes_of(local.quantize([x, *scales, *keys], own), own)
  if count := local.num_maxima(own):
    maxima = lax.pmax(local.partial_scales(x, own, num_maxima=count), axes)
    own = dataclasses.replace(own, num_maxima=count)
    return bytes_of(local.quantize([x, maxima, *keys], own), own)
  # The blockings' scales differ only if x has a NaN or an Inf.
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
  """Returns the maximum over devices of f32[n] that are not negative.

  It is computed on their bits as u32, which have the same order. XLA compiles a
  kernel for each f32 or s32 all-reduce (jaxlib 0.10.2), and a model may have
  hundreds of them. The communication library has a kernel for u32.
  """
  bits = lax.bitcast_convert_type(partial, jnp.uint32)
  return lax.bitcast_convert_type(lax.pmax(bits, axes), jnp.float32)


def _own_problem(
  problem: problems.QuantizationProblem,
  assignment: assignment_lib.Assignment,
  shape: tuple[int, ...],
) -> problems.QuantizationProblem:
  """Returns the problem of a device's shard of x."""
  blockings, options_each = [], []
  for b, options in zip(problem.blockings, problem.options_each, strict=True):
    if b.dims and assignment.operands[0][b.dims[0]]:
      # A sharded dimension has whole blocks and groups, so it needs no padding.
      multiple = math.lcm(problem.format.block_size, options.hadamard or 1)
      b = dataclasses.replace(b, multiple=multiple)
    if options.is_stochastic and any(assignment.operands[0]):
      strides = offsets.strides(b.shape(problem.shape))
      options = dataclasses.replace(options, strides=strides)
    blockings.append(b)
    options_each.append(options)
  first, *more = options_each
  is_plain = set(more) <= {problems.NO_OPTIONS}
  return dataclasses.replace(
    problem,
    shape=shape,
    blockings=tuple(blockings),
    options=first,
    more_options=() if is_plain else tuple(more),
  )


def _with_whole_scale(
  problem: problems.QuantizationProblem,
) -> problems.QuantizationProblem:
  """Returns a shard's problem, given the global scale of the array."""
  # `is_part` only matters with `four_over_six`: kernels then refuse a global
  # scale that a user passed.
  first, *more = (
    dataclasses.replace(options, is_part=options.four_over_six)
    for options in problem.options_each
  )
  return dataclasses.replace(
    problem,
    has_global_scale=True,
    options=first,
    more_options=tuple(more) if problem.more_options else (),
  )


def _own_keys(
  keys: Sequence[jax.Array],
  problem: problems.QuantizationProblem,
  assignment: assignment_lib.Assignment,
  axis_sizes: Mapping[str, int],
) -> list[jax.Array]:
  """Returns key data with the offset of the shard's first value (`words`)."""
  if not any(assignment.operands[0]):
    return list(keys)
  taker = mesh_axes.Taker(axis_sizes)
  result, left = [], list(keys)
  specs = assignment.results[:: problem.results_each]  # axes of the values
  for b, options, spec in zip(
    problem.blockings, problem.options_each, specs, strict=True
  ):
    if not options.is_stochastic:
      continue
    shape = b.shape(problem.shape)
    firsts = [
      lax.axis_index(axes) * (size // taker.count(axes))
      if axes
      else jnp.int32(0)
      for axes, size in zip(spec, shape, strict=True)
    ]
    result.append(offsets.words(left.pop(0), firsts, offsets.strides(shape)))
  return result


def bytes_of(
  results: Sequence[jax.Array], problem: problems.QuantizationProblem
) -> list[jax.Array]:
  """Bitcasts the values and scales among `quantize_p`'s results to bytes."""
  each = problem.results_each
  return [
    byte_arrays.to_bytes(x) if i % each < 2 else x  # global scale third
    for i, x in enumerate(results)
  ]


def dequantize(
  local: LocalDequantize,
  operands: Sequence[jax.Array],
  problem: problems.DequantizationProblem,
) -> jax.Array:
  """Computes a device's shard of the dequantized array.

  Args:
    local: dequantizes on one device.
    operands: shards of values and scale, as bytes, and perhaps of a global
      scale.
    problem: problem of the whole array.
  """
  values, scale, *given = operands
  format = problem.format
  if not format.has_pairs:
    values = byte_arrays.from_bytes(values, format.array_dtype)
  scale = byte_arrays.from_bytes(scale, format.scale_dtype)
  own = dataclasses.replace(
    problem,
    shape=tuple(values.shape),
    dtype=np.dtype(values.dtype),
    global_shape=tuple(given[0].shape) if given else None,
  )
  return local([values, scale, *given], own)
