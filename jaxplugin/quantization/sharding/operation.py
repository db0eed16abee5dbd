# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizing and dequantizing as operations that devices share.

Their quantized arrays are bytes, so bytes are moved after quantizing and before
dequantizing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence

import jax

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.operation import byte_arrays
from jaxplugin.operation import notation
from jaxplugin.operation import split as split_lib
from jaxplugin.quantization import problems
from jaxplugin.quantization.sharding import assignment
from jaxplugin.quantization.sharding import per_device

# (an operation) -> a function of its operands, as `split.partitioned` returns.
Split = Callable[[split_lib.Operation], Callable[..., list[jax.Array]]]


def can_quantize(problem: problems.QuantizeProblem) -> bool:
  """Returns whether devices' parts have the bits of the whole array."""
  format = problem.format
  return (
    problem.sizes_are_static
    and 0 not in problem.shape
    and not problem.pads_values
    and not (format.is_fp4 and format.block_size % 2)
    and not any(extras.bits_refusal() for extras in problem.extras_each)
  )


def quantize(
  problem: problems.QuantizeProblem, local: per_device.Local, split: Split
) -> Callable[..., list[jax.Array]]:
  """Returns a function of the operands of `quantize_p`, with its results.

  Args:
    problem: the problem of the whole array, which `can_quantize` accepts.
    local: the functions of one device, also traced for the types of results.
    split: makes a function of an operation's operands.
  """
  # FP4 is packed, and a swizzled scale mixes the rows of a matrix.
  moved = dataclasses.replace(
    problem,
    packed=problem.format.is_fp4,
    for_products=problem.format.is_fp4 and not problem.packed_in_order,
    scale_layout=layouts.LINEAR,
  )
  each = problem.results_each
  function = split(
    split_lib.Operation(
      assign=lambda operands, specs, wanted, axis_sizes: (
        assignment.assign_quantize(
          moved, specs[0], wanted[::each], axis_sizes, len(operands)
        )
      ),
      per_device=lambda parts, assigned, axis_sizes: per_device.quantize(
        local, parts, moved, assigned, axis_sizes
      ),
      whole=lambda *operands: per_device.bytes_of(
        local.quantize(operands, moved), moved
      ),
      rule=lambda operands, results, axis_sizes: notation.sharding_rule(
        assignment.quantize_notation(moved, operands), operands, results
      ),
    )
  )
  return lambda *operands: _as_asked(function(*operands), problem)


def _as_asked(
  results: Sequence[jax.Array], problem: problems.QuantizeProblem
) -> list[jax.Array]:
  """Converts bytes to the types and layouts of a problem."""
  format, size = problem.format, problem.results_each
  found = []
  for i, b in enumerate(problem.blockings):
    values, scale, *rest = results[i * size :][:size]
    scale = byte_arrays.from_bytes(scale, format.scale_dtype)
    if problem.scale_layout == layouts.SWIZZLED:
      scale = layouts.swizzle_scale(scale)
    if not format.is_fp4:
      values = byte_arrays.from_bytes(values, format.array_dtype)
    elif not problem.packed:
      values = layouts.unpack_fp4(values, axis=b.axis())
    found += [values, scale, *rest]
  return found


def can_dequantize(problem: problems.DequantizeProblem) -> bool:
  """Returns whether values are bytes that devices can share."""
  sizes = (*problem.shape, *(problem.global_shape or ()))
  is_static = all(isinstance(size, int) for size in sizes)
  if not is_static or 0 in problem.shape:
    return False
  if problem.format.is_fp4 and problem.format.block_size % 2:
    return False  # a byte holds two values, which must be of one block
  return problem.dtype != formats.E2M1 or problem.shape[problem.axis] % 2 == 0


def dequantize(
  problem: problems.DequantizeProblem,
  local: per_device.LocalDequantize,
  split: Split,
) -> Callable[..., jax.Array]:
  """Returns a function of the operands of `dequantize_p`, with its result.

  Args:
    problem: the problem of the whole array, which `can_dequantize` accepts.
    local: dequantizes on one device, also traced for the type of the result.
    split: as for `quantize`.
  """

  def function(
    values: jax.Array, scale: jax.Array, *given: jax.Array
  ) -> jax.Array:
    values = byte_arrays.packed(values, problem.axis)
    moved = dataclasses.replace(
      problem, shape=tuple(values.shape), dtype=values.dtype
    )
    dequantized = lambda parts: [per_device.dequantize(local, parts, moved)]
    operation = split_lib.Operation(
      assign=lambda operands, specs, wanted, axis_sizes: (
        assignment.assign_dequantize(moved, specs[0], wanted[0], axis_sizes)
      ),
      per_device=lambda parts, assigned, axis_sizes: dequantized(parts),
      whole=lambda *operands: dequantized(operands),
      rule=lambda operands, results, axis_sizes: notation.sharding_rule(
        assignment.dequantize_notation(moved, operands), operands, results
      ),
    )
    values, scale = map(byte_arrays.to_bytes, (values, scale))
    return split(operation)(values, scale, *given)[0]

  return function
