# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizing and dequantizing as functions that XLA's partitioner can split.

As `dot.sharding.partitioning`: `assigning` is the one rule, which propagation
and partitioning follow, and kernels compute each device's share. What they make
and take is bytes, so whatever is moved after quantizing, or before
dequantizing, is moved as bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext import mesh_axes
from jaxplugin.jaxext.partitioner import calls_private
from jaxplugin.quantization import problems
from jaxplugin.quantization.sharding import assigning
from jaxplugin.quantization.sharding import notation
from jaxplugin.quantization.sharding import shares
from jaxplugin.runtime import exporting


def can_quantize(problem: problems.QuantizeProblem) -> bool:
  """Whether devices' shares have the bits of the whole array."""
  format = problem.format
  return (
    problem.sizes_are_static
    and 0 not in problem.shape
    and not problem.pads_values
    and not (format.is_fp4 and format.block_size % 2)
    and not any(extras.bits_refusal() for extras in problem.extras_each)
  )


def quantize(
  problem: problems.QuantizeProblem,
  local: shares.Local,
  split: Callable[[Operation], Callable[..., list[jax.Array]]],
) -> Callable[..., list[jax.Array]]:
  """A function of the operands of `quantize_p`, with its results.

  Args:
    problem: of the whole array, that `can_quantize` takes.
    local: of one device; traced for the types of results too.
    split: makes a function of an operation's operands, as `partitioned` does.
  """
  # FP4 is two a byte, and what is swizzled is all of a matrix.
  moved = dataclasses.replace(
    problem,
    packed=problem.format.is_fp4,
    for_products=problem.format.is_fp4 and not problem.packed_in_order,
    scale_layout=layouts.LINEAR,
  )

  def function(*operands: jax.Array) -> list[jax.Array]:
    operation = _Quantization(moved, local, len(operands))
    results = split(operation)(*operands)
    return _unmoved(results, problem)

  return function


def _unmoved(
  results: Sequence[jax.Array], problem: problems.QuantizeProblem
) -> list[jax.Array]:
  """Bytes as the types and layouts that were asked for."""
  format, size = problem.format, problem.results_each
  found = []
  for i, b in enumerate(problem.blockings):
    values, scale, *rest = results[i * size :][:size]
    scale = shares.from_bytes(scale, format.scale_dtype)
    if problem.scale_layout == layouts.SWIZZLED:
      scale = layouts.swizzle_scale(scale)
    if not format.is_fp4:
      values = shares.from_bytes(values, format.array_dtype)
    elif not problem.packed:
      values = shares.unpacked(values, b.axis())
    found += [values, scale, *rest]
  return found


@dataclasses.dataclass(frozen=True)
class _Quantization:
  """Quantizing, as `partitioned` wants an operation."""

  problem: problems.QuantizeProblem
  local: shares.Local
  num_operands: int

  def compute_whole(self, *operands: jax.Array) -> list[jax.Array]:
    results = self.local.quantize(operands, self.problem)
    return shares.bytes_of(results, self.problem)

  def assign(
    self,
    specs: Sequence[mesh_axes.Spec],
    wanted: Sequence[mesh_axes.Spec] | None,
    axis_sizes: Mapping[str, int],
  ) -> assigning.Assignment:
    if wanted is not None:
      wanted = wanted[:: self.problem.results_each]
    return assigning.assign_quantize(
      self.problem, specs[0], wanted, axis_sizes, self.num_operands
    )

  def compute(
    self,
    operands: Sequence[jax.Array],
    assignment: assigning.Assignment,
    axis_sizes: Mapping[str, int],
  ) -> list[jax.Array]:
    return shares.quantize(
      self.local, operands, self.problem, assignment, axis_sizes
    )

  def rule(self, shapes: Sequence[Sequence[int]]) -> notation.Rule:
    return notation.quantize_rule(self.problem, shapes)


def can_dequantize(problem: problems.DequantizeProblem) -> bool:
  """Whether values are bytes that can be dealt to devices."""
  sizes = (*problem.shape, *(problem.global_shape or ()))
  is_static = all(isinstance(size, int) for size in sizes)
  if not is_static or 0 in problem.shape:
    return False
  if problem.format.is_fp4 and problem.format.block_size % 2:
    return False  # bytes are pairs, which a block must not share
  return problem.dtype != formats.E2M1 or problem.shape[problem.axis] % 2 == 0


def dequantize(
  problem: problems.DequantizeProblem,
  whole: shares.LocalDequantize,
  local: shares.LocalDequantize,
  split: Callable[[Operation], Callable[..., list[jax.Array]]],
) -> Callable[..., jax.Array]:
  """A function of the operands of `dequantize_p`, with its result.

  Args:
    problem: of the whole array, that `can_dequantize` takes.
    whole: (operands, problem) -> result, traced for its type.
    local: the same, on one device.
    split: as of `quantize`.
  """

  def function(
    values: jax.Array, scale: jax.Array, *given: jax.Array
  ) -> jax.Array:
    values = shares.packed(values, problem.axis)
    moved = dataclasses.replace(
      problem, shape=tuple(values.shape), dtype=values.dtype
    )
    operation = _Dequantization(moved, whole, local)
    (result,) = split(operation)(
      shares.to_bytes(values), shares.to_bytes(scale), *given
    )
    return result

  return function


@dataclasses.dataclass(frozen=True)
class _Dequantization:
  """Dequantizing, as `partitioned` wants an operation."""

  problem: problems.DequantizeProblem
  whole: shares.LocalDequantize
  local: shares.LocalDequantize

  def compute_whole(self, *operands: jax.Array) -> list[jax.Array]:
    return [shares.dequantize(self.whole, operands, self.problem)]

  def assign(
    self,
    specs: Sequence[mesh_axes.Spec],
    wanted: Sequence[mesh_axes.Spec] | None,
    axis_sizes: Mapping[str, int],
  ) -> assigning.Assignment:
    result = None if wanted is None else wanted[0]
    return assigning.assign_dequantize(
      self.problem, specs[0], result, axis_sizes
    )

  def compute(
    self,
    operands: Sequence[jax.Array],
    assignment: assigning.Assignment,
    axis_sizes: Mapping[str, int],
  ) -> list[jax.Array]:
    del assignment, axis_sizes
    return [shares.dequantize(self.local, operands, self.problem)]

  def rule(self, shapes: Sequence[Sequence[int]]) -> notation.Rule:
    return notation.dequantize_rule(self.problem, shapes)


Operation = _Quantization | _Dequantization


def partitioned(
  operation: Operation,
  key: str | None,
) -> Callable[..., list[jax.Array]]:
  """A function of an operation's operands that the partitioner splits.

  Args:
    operation: what.
    key: of all that decides what it does; None where that is not known.
  """

  def decode(mesh, arg_shapes, result_shapes):
    arrays = [*arg_shapes, *result_shapes]
    ndims = [len(x.shape) for x in arrays]
    tilings = [
      jax_private.partitioner_tiling(getattr(x, "sharding", None), ndim)
      for x, ndim in zip(arrays, ndims, strict=True)
    ]
    mesh, specs = mesh_axes.decode(mesh, tilings, ndims)
    return mesh, specs[: len(arg_shapes)], specs[len(arg_shapes) :]

  def named(mesh, specs):
    return tuple(
      NamedSharding(mesh, mesh_axes.partition_spec(spec)) for spec in specs
    )

  def infer(mesh, arg_shapes, result_shapes):
    del result_shapes
    fine, specs, _ = decode(mesh, arg_shapes, ())
    assignment = operation.assign(specs, None, fine.shape)
    # It may spread to results that leave `jit`, which JAX has to name.
    results = [
      tuple(
        axes if mesh_axes.of_whole_axes(axes, fine, mesh) else ()
        for axes in spec
      )
      for spec in assignment.results
    ]
    return list(named(fine, results))

  def partition(mesh, arg_shapes, result_shapes):
    mesh, specs, wanted = decode(mesh, arg_shapes, result_shapes)
    assignment = operation.assign(specs, wanted, mesh.shape)

    def per_shard(*operands):
      return operation.compute(operands, assignment, mesh.shape)

    results = list(named(mesh, assignment.results))
    return mesh, per_shard, results, named(mesh, assignment.operands)

  def rule(mesh, value_types, result_types):
    del mesh
    shapes: list[Any] = [tuple(t.shape) for t in (*value_types, *result_types)]
    return operation.rule(shapes)

  how = calls_private.Split(
    infer=infer, partition=partition, rule=rule, key=key
  )
  return exporting.split(operation.compute_whole, how)
