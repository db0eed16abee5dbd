# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizing and dequantizing as operations split over devices.

Their quantized arrays are bytes, so collectives after quantizing and before
dequantizing move bytes. The results have the bits of the whole array. Functions
of a shard run where the mesh axes' names are bound: in a partitioner callback
or a `shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.core import blocking, formats, targets
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import notation, primitive, split
from jaxplugin.quantization import backends, problems, prologues
from jaxplugin.quantization.backends import xla
from jaxplugin.quantization.sharding import assignment, offsets
from jaxplugin.runtime import lowering
from jaxplugin.tables import resolution

# (operands, problem) -> results of `quantize_p`, computed on one device.
LocalQuantize = Callable[
  [Sequence[jax.Array], problems.QuantizationProblem], list[jax.Array]
]
# (x, problem) -> u32[blockings, count], partial amax values of a shard x.
Maxima = Callable[[jax.Array, problems.QuantizationProblem], jax.Array]
# (operands, problem) -> result of `dequantize_p`, computed on one device.
LocalDequantize = Callable[
  [Sequence[jax.Array], problems.DequantizationProblem], jax.Array
]


def can_quantize(problem: problems.QuantizationProblem) -> bool:
  """Returns whether quantizing shards gives the bits of the whole array."""
  format = problem.format
  return (
    problem.sizes_are_static
    and 0 not in problem.shape
    and not problem.pads_values
    and not (format.has_pairs and format.block_size % 2)
    and not any(options.bits_refusal() for options in problem.options)
  )


def quantize(
  problem: problems.QuantizationProblem,
  local: LocalQuantize,
  maxima: Maxima,
) -> split.Operation | None:
  """Returns the split form of a `quantize_p` equation; None if it has none.

  Args:
    local: quantizes on one device; also traced for the result types.
    maxima: finds partial amax values on one device.
  """
  if not can_quantize(problem):
    return None
  # Devices compute packed 4-bit values, so that results are bytes, and linear
  # scales, because a swizzled scale mixes the rows of a matrix.
  moved = dataclasses.replace(
    problem,
    packed=problem.format.has_pairs,
    for_products=(
      not problem.packed_in_order
      if problem.format.has_pairs
      else problem.for_products
    ),
    scale_layout=layouts.LINEAR,
  )
  return split.Operation(
    assign=functools.partial(assignment.assign_quantize, moved),
    per_device=functools.partial(_quantize_shard, local, maxima, moved),
    whole=lambda *operands: _bytes_of(
      local(_with_pairs(_merged, moved, operands), moved)
    ),
    rule=lambda operands, results, axis_sizes: notation.sharding_rule(
      assignment.quantize_notation(moved, operands), operands, results
    ),
    before=lambda *operands: _with_pairs(prologues.pair, moved, operands),
    after=functools.partial(_as_asked, problem),
  )


def _with_pairs(
  function: Callable[[jax.Array, str | None], jax.Array],
  problem: problems.QuantizationProblem,
  operands: Sequence[jax.Array],
) -> list[jax.Array]:
  """Applies a function to the operands that hold gates and factors."""
  prologue, found = problem.prologue, list(operands)
  if prologue is None or not prologue.is_gated:
    return found
  if prologue.halves:
    found[0] = function(found[0], prologue.halves)
  if "bias" in prologue.operands:
    i = 1 + prologue.operands.index("bias")
    found[i] = function(found[i], prologue.halves)
  return found


def _merged(x: jax.Array, halves: str | None) -> jax.Array:
  """Undoes `prologues.pair`."""
  del halves
  return x.reshape(*x.shape[:-2], -1)


def _as_asked(
  problem: problems.QuantizationProblem, results: Sequence[jax.Array]
) -> list[jax.Array]:
  """Converts bytes to the types and layouts of a problem."""
  format, size = problem.format, problem.results_each
  found = []
  for i, b in enumerate(problem.blockings):
    values, scale, *rest = results[i * size :][:size]
    scale = layouts.from_bytes(scale, format.scale_dtype)
    if problem.scale_layout == layouts.SWIZZLED:
      scale = layouts.swizzle_scale(scale)
    if not format.has_pairs:
      values = layouts.from_bytes(values, format.array_dtype)
    elif not problem.packed:
      values = layouts.unpack_fp4(
        values, axis=b.axis(), dtype=format.values_dtype
      )
    found += [values, scale, *rest]
  return [*found, *results[len(found) :]]


def can_dequantize(problem: problems.DequantizationProblem) -> bool:
  """Returns whether an equation of `dequantize_p` can be split."""
  sizes = (*problem.shape, *(problem.global_shape or ()))
  is_static = all(isinstance(size, int) for size in sizes)
  if not is_static or 0 in problem.shape:
    return False
  if problem.format.has_pairs and problem.format.block_size % 2:
    return False  # A byte would hold values of two blocks.
  is_unpacked = problem.dtype in formats.FOUR_BITS
  return not is_unpacked or problem.shape[problem.axis] % 2 == 0


def dequantize(
  problem: problems.DequantizationProblem, local: LocalDequantize
) -> split.Operation | None:
  """Returns the split form of a `dequantize_p` equation; None if it has none.

  Args:
    local: dequantizes on one device; also traced for the result type.
  """
  if not can_dequantize(problem):
    return None

  def before(
    values: jax.Array, scale: jax.Array, *given: jax.Array
  ) -> list[jax.Array]:
    values = layouts.packed_pairs(values, problem.axis)
    return [layouts.to_bytes(values), layouts.to_bytes(scale), *given]

  values = jax.eval_shape(
    functools.partial(layouts.packed_pairs, axis=problem.axis),
    jax.ShapeDtypeStruct(problem.shape, problem.dtype),
  )
  moved = dataclasses.replace(
    problem, shape=tuple(values.shape), dtype=values.dtype
  )
  dequantized = lambda parts: [_dequantize_shard(local, parts, moved)]
  return split.Operation(
    assign=functools.partial(assignment.assign_dequantize, moved),
    per_device=lambda parts, assigned: dequantized(parts),
    whole=lambda *operands: dequantized(operands),
    rule=lambda operands, results, axis_sizes: notation.sharding_rule(
      assignment.dequantize_notation(moved, operands), operands, results
    ),
    before=before,
  )


def _quantize_shard(
  local: LocalQuantize,
  maxima: Maxima,
  problem: problems.QuantizationProblem,
  operands: Sequence[jax.Array],
  assigned: split.Assignment,
) -> list[jax.Array]:
  """Computes a device's shards of the results of a problem, as bytes.

  Global scales are computed for the whole array by one maximum over devices.
  Random bits depend on the offset of a value in the whole array.
  """
  operands = _with_pairs(_merged, problem, operands)
  x, more, scales, keys = problem.split_operands(operands)
  own = _own_problem(problem, assigned, tuple(x.shape))
  keys = _own_keys(keys, problem, assigned)
  axes = tuple(a for dim in assigned.operands[0] for a in dim)
  operands = (x, *more.values(), *scales, *keys)
  rest: list[jax.Array] = []
  if problem.computes_global_scale:
    operands, own, rest = xla.after_prologue(operands, own)
  # The maxima are given in a `shard_map` over some axes of the mesh.
  if problem.computes_global_scale and problem.num_maxima is None and axes:
    # XLA compiles a kernel for each f32 or s32 all-reduce (jaxlib 0.10.2), and
    # a model may have hundreds of them. The communication library has a kernel
    # for u32.
    largest = lax.pmax(maxima(operands[0], own), axes)
    own = dataclasses.replace(own, num_maxima=largest.shape[1])
    operands = (operands[0], largest, *keys)
  found = _bytes_of(local(operands, own)) + rest
  at = len(problem.blockings) * problem.results_each
  if problem.returns_amax and axes:
    bits = lax.bitcast_convert_type(found[at], jnp.uint32)
    found[at] = lax.bitcast_convert_type(lax.pmax(bits, axes), jnp.float32)
  if problem.column_sums is not None:
    summed = assigned.operands[0][problem.column_sums : -1]
    if over := tuple(a for dim in summed for a in dim):
      at += problem.returns_amax
      found[at] = lax.psum(found[at], over)
  return found


def _own_problem(
  problem: problems.QuantizationProblem,
  assigned: split.Assignment,
  shape: tuple[int, ...],
) -> problems.QuantizationProblem:
  """Returns the problem of a device's shard of x."""
  spec = list(assigned.operands[0])
  if problem.prologue is not None:
    shape = problem.prologue.shape_of(shape)
    if problem.prologue.halves:
      del spec[-1 if problem.prologue.halves == "interleaved" else -2]
  blockings, options_each = [], []
  for b, options in zip(problem.blockings, problem.options, strict=True):
    if b.dims and spec[b.dims[0]]:
      # A sharded dimension has whole blocks and groups, so it needs no padding.
      multiple = math.lcm(problem.format.block_size, options.hadamard or 1)
      b = dataclasses.replace(b, multiple=multiple)
    if options.is_stochastic and any(spec):
      strides = _strides(b, options, problem)
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
  assigned: split.Assignment,
) -> list[jax.Array]:
  """Returns key data with the offset of the shard's first value (`words`)."""
  if not any(assigned.operands[0]):
    return list(keys)
  result, left = [], list(keys)
  count = len(problem.blockings) * problem.results_each
  specs = assigned.results[: count : problem.results_each]  # of the values
  for b, options, spec in zip(
    problem.blockings, problem.options, specs, strict=True
  ):
    if not options.is_stochastic:
      continue
    shape = b.shape(problem.shape)
    firsts = [
      lax.axis_index(axes) * (size // assigned.count(axes))
      if axes
      else jnp.int32(0)
      for axes, size in zip(spec, shape, strict=True)
    ]
    strides = _strides(b, options, problem)
    result.append(offsets.words(left.pop(0), firsts, strides))
  return result


def _strides(
  b: blocking.Blocking,
  options: problems.RecipeOptions,
  problem: problems.QuantizationProblem,
) -> tuple[int, ...]:
  """Returns the strides of the whole array; x may be a shard."""
  return options.strides or offsets.strides(b.shape(problem.shape))


def _bytes_of(results: Sequence[jax.Array]) -> list[jax.Array]:
  """Bitcasts the values and scales among `quantize_p`'s results to bytes."""
  return list(map(layouts.to_bytes, results))


def _dequantize_shard(
  local: LocalDequantize,
  operands: Sequence[jax.Array],
  problem: problems.DequantizationProblem,
) -> jax.Array:
  """Computes a device's shard of the result from bytes of values and scale."""
  values, scale, *given = operands
  format = problem.format
  if not format.has_pairs:
    values = layouts.from_bytes(values, format.array_dtype)
  scale = layouts.from_bytes(scale, format.scale_dtype)
  own = dataclasses.replace(
    problem,
    shape=tuple(values.shape),
    dtype=np.dtype(values.dtype),
    global_shape=tuple(given[0].shape) if given else None,
  )
  return local([values, scale, *given], own)


def lowered(
  context: primitive.LoweringContext,
  operation: split.Operation | None,
  local: Callable[..., Sequence[jax.Array]],
  *,
  key: tuple[Any, ...],
) -> Callable[..., list[jax.Array]] | None:
  """Returns a function that computes an equation on several devices.

  Args:
    context: the equation, in a split module or on a mesh with explicit axes.
    operation: split form of the equation; None if it has none.
    local: computes the equation on one device.

  Returns:
    Function of the equation's operands, or None if XLA gathers the operands.
  """
  if context.mesh is not None:
    specs = list(map(mesh_axes.spec_of, context.avals_out))
    operation = operation or _on_each(local)
    return split.on_explicit_axes(operation, context.mesh, specs)
  if operation is None:
    return None
  return split.partitioned(operation, primitive.partition_key(context, *key))


def _on_each(
  local: Callable[..., Sequence[jax.Array]],
) -> split.Operation:
  """Returns an operation that every device computes on replicated arrays."""
  replicated = lambda specs: tuple(((),) * len(spec) for spec in specs)
  return split.Operation(
    assign=lambda operands, shardings: split.Assignment(
      axis_sizes=shardings.axis_sizes,
      operands=replicated(shardings.operands),
      results=replicated(shardings.results),
    ),
    per_device=lambda parts, assigned: list(local(*parts)),
  )


def explained(
  problem: backends.Problem,
  module: lowering.Module,
  target: targets.Target,
  overlay: resolution.Overlay | None,
  axis_sizes: Mapping[str, int],
) -> backends.Decided:
  """Returns the decisions about an equation, for `explain`.

  Args:
    axis_sizes: axis sizes of the mesh that the module is partitioned over.
  """
  if isinstance(problem, problems.DequantizationProblem):
    is_shared = can_dequantize(problem)
  else:
    is_shared = can_quantize(problem)
  if not (module.is_split and is_shared):
    return backends.explained(problem, module, target, overlay)
  notes = assignment.uneven_notes(problem, axis_sizes)
  if isinstance(problem, problems.QuantizationProblem) and problem.prologue:
    reason = ""
    if problem.computes_global_scale:
      reason = "each device finds the amax of its result first"
    elif problem.prologue.gradient_of_halves:
      reason = "devices may split the gates and factors of x"
    if reason:
      notes = (*notes, backends.SEPARATE + reason)
      problem = problem.without_prologue()
  found = backends.explained(problem, module.of_device(), target, overlay)
  each = tuple(
    dataclasses.replace(d, notes=(*d.notes, *notes)) for d in found.decisions
  )
  return dataclasses.replace(found, decisions=each)
