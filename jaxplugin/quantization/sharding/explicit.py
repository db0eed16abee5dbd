# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizing and dequantizing arrays whose shardings are in their types.

As `dot.sharding.explicit`: each is lowered to a `shard_map` over the explicit
axes, in which devices compute the shares that they do under the partitioner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxplugin.arrays import layouts
from jaxplugin.jaxext import explicit_axes
from jaxplugin.jaxext import mesh_axes
from jaxplugin.quantization import problems
from jaxplugin.quantization.sharding import assigning
from jaxplugin.quantization.sharding import partitioning
from jaxplugin.quantization.sharding import shares


def quantize_types(
  problem: problems.QuantizeProblem, x: Any, avals: Sequence[Any], mesh: Any
) -> list[Any]:
  """The types of the results of `quantize_p`.

  Their axes are those of x, but for what would cut a block: over that a result
  is whole. Of a swizzled scale all of a matrix is in one tile.

  Args:
    problem: of the whole array.
    x: has a type.
    avals: the types without axes.
    mesh: with explicit axes.
  """
  spec = assigning.with_whole_blocks(
    problem, explicit_axes.spec_of(x), mesh.shape
  )
  specs = [
    own
    for b in problem.blockings
    for own in assigning.result_specs(problem, b, spec)
  ]
  if problem.scale_layout != layouts.LINEAR:
    for i in range(1, len(avals), problem.results_each):
      specs[i] = ((),) * avals[i].ndim
  return sharded(avals, specs, mesh)


def sharded(
  avals: Sequence[Any], specs: Sequence[mesh_axes.Spec], mesh: Any
) -> list[Any]:
  """Types with shardings on a mesh."""
  return [
    aval.update(sharding=NamedSharding(mesh, mesh_axes.partition_spec(spec)))
    for aval, spec in zip(avals, specs, strict=True)
  ]


def whole(avals: Sequence[Any]) -> list[Any]:
  """Types without the axes in them."""
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
  local: shares.Local,
  mesh: Any,
  specs: Sequence[mesh_axes.Spec],
) -> Callable[..., list[jax.Array]]:
  """A function of the operands of `quantize_p`, with its results.

  Args:
    problem: of the whole array.
    local: of one device.
    mesh: with explicit axes.
    specs: in the types of the results.
  """
  if not partitioning.can_quantize(problem):
    return _on_each(
      lambda *operands: local.quantize(operands, problem), mesh, specs
    )
  if problem.scale_layout != layouts.LINEAR:
    size = problem.results_each
    specs = [
      ((),) * len(specs[0]) if i % size == 1 else spec
      for i, spec in enumerate(specs)
    ]
  split = functools.partial(_split, mesh=mesh, specs=specs)
  return partitioning.quantize(problem, local, split)


def dequantize(
  problem: problems.DequantizeProblem,
  local: shares.LocalDequantize,
  mesh: Any,
  spec: mesh_axes.Spec,
) -> Callable[..., jax.Array]:
  """The same of `dequantize_p`.

  Args:
    spec: in the type of the result.
  """
  if not partitioning.can_dequantize(problem):
    function = _on_each(
      lambda *operands: [local(operands, problem)], mesh, [spec]
    )
    return lambda *operands: function(*operands)[0]
  split = functools.partial(_split, mesh=mesh, specs=[spec])
  return partitioning.dequantize(problem, local, local, split)


def _split(
  operation: partitioning.Operation,
  mesh: Any,
  specs: Sequence[mesh_axes.Spec],
) -> Callable[..., list[jax.Array]]:
  """A function of an operation's operands that is split as types say.

  Args:
    operation: what.
    mesh: with explicit axes.
    specs: of the results.
  """

  def function(*operands: jax.Array) -> list[jax.Array]:
    with jax.sharding.use_abstract_mesh(mesh):
      operands = tuple(map(explicit_axes.on_mesh, operands))
      given = list(map(explicit_axes.spec_of, operands))
      assignment = operation.assign(given, specs, mesh.shape)
      results = explicit_axes.shard_map(
        lambda *parts: operation.compute(parts, assignment, mesh.shape),
        mesh,
        assignment.operands,
        list(assignment.results),
      )(*operands)
      return list(map(explicit_axes.reshard, results, specs))

  return function


def _on_each(
  function: Callable[..., Sequence[jax.Array]],
  mesh: Any,
  specs: Sequence[mesh_axes.Spec],
) -> Callable[..., list[jax.Array]]:
  """`function` of whole arrays, which every device computes.

  Args:
    specs: of its results.
  """

  def call(*operands: jax.Array) -> list[jax.Array]:
    with jax.sharding.use_abstract_mesh(mesh):
      results = explicit_axes.shard_map(
        function,
        mesh,
        [((),) * x.ndim for x in operands],
        [((),) * len(spec) for spec in specs],
      )(*operands)
      return list(map(explicit_axes.reshard, results, specs))

  return call
