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
from jaxplugin.quantization import problems
from jaxplugin.quantization.sharding import offsets

# (operands, problem) -> results of `quantize_p`, computed on one device.
Quantize = Callable[
  [Sequence[jax.Array], problems.QuantizationProblem], list[jax.Array]
]
# (x, problem) -> u32[blockings, count], partial amax values of a shard x.
Maxima = Callable[[jax.Array, problems.QuantizationProblem], jax.Array]
# (operands, problem) -> result of `dequantize_p`, computed on one device.
Dequantize = Callable[
  [Sequence[jax.Array], problems.DequantizationProblem], jax.Array
]


def quantize(
  local: Quantize,
  maxima: Maxima,
  operands: Sequence[jax.Array],
  problem: problems.QuantizationProblem,
  assignment: assignment_lib.Assignment,
  axis_sizes: Mapping[str, int],
) -> list[jax.Array]:
  """Computes a device's shards of the results, as bytes.

  Global scales are computed for the whole array by one maximum over devices.
  Random bits depend on the offset of a value in the whole array.

  Args:
    local: quantizes on one device.
    maxima: finds partial amax values on one device.
    operands: shard of x, perhaps a global scale, and key data.
    problem: problem of the whole array, with linear scales and packed FP4.
    assignment: mesh axes of its dimensions.
    axis_sizes: size of each mesh axis.
  """
  x, *given = operands
  num_given = len(given) - problem.num_keys
  scales, keys = given[:num_given], given[num_given:]
  own = _own_problem(problem, assignment, tuple(x.shape))
  keys = _own_keys(keys, problem, assignment, axis_sizes)
  axes = tuple(a for dim in assignment.operands[0] for a in dim)
  if problem.computes_global_scale and axes:
    # XLA compiles a kernel for each f32 or s32 all-reduce (jaxlib 0.10.2), and
    # a model may have hundreds of them. The communication library has a kernel
    # for u32.
    found = lax.pmax(maxima(x, own), axes)
    own, scales = dataclasses.replace(own, num_maxima=found.shape[1]), [found]
  return bytes_of(local([x, *scales, *keys], own), own)


def _own_problem(
  problem: problems.QuantizationProblem,
  assignment: assignment_lib.Assignment,
  shape: tuple[int, ...],
) -> problems.QuantizationProblem:
  """Returns the problem of a device's shard of x."""
  blockings, options_each = [], []
  for b, options in zip(problem.blockings, problem.options, strict=True):
    if b.dims and assignment.operands[0][b.dims[0]]:
      # A sharded dimension has whole blocks and groups, so it needs no padding.
      multiple = math.lcm(problem.format.block_size, options.hadamard or 1)
      b = dataclasses.replace(b, multiple=multiple)
    if options.is_stochastic and any(assignment.operands[0]):
      strides = offsets.strides(b.shape(problem.shape))
      options = dataclasses.replace(options, strides=strides)
    blockings.append(b)
    options_each.append(options)
  return dataclasses.replace(
    problem,
    shape=shape,
    blockings=tuple(blockings),
    options=tuple(options_each),
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
    problem.blockings, problem.options, specs, strict=True
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
  local: Dequantize,
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
