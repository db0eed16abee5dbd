# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations split over the devices of a mesh.

`Operation` describes how an operation is split. `partitioned` splits it over
auto axes, which XLA's partitioner assigns, and `on_explicit_axes` over explicit
axes. Both compute the same on each device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxplugin.jaxext import explicit_axes
from jaxplugin.jaxext import mesh_axes
from jaxplugin.jaxext.partitioner import calls_private
from jaxplugin.operation import assignment as assignment_lib
from jaxplugin.operation import notation as notation_lib
from jaxplugin.runtime import exporting

Assignment = assignment_lib.Assignment
Specs = Sequence[mesh_axes.Spec]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
  """A function of arrays, and how it is split.

  Attributes:
    assign: (operands, axes of their dimensions, axes wanted for the results,
      size of each mesh axis) -> assignment.
    per_device: (a device's shards of the operands, assignment, size of each
      mesh axis) -> its shards of the results. It may use collectives over the
      mesh axes.
    whole: (*operands) -> results, traced for their types.
    rule: (operands, results, sizes of the mesh axes) -> Shardy rule.
  """

  assign: Callable[[Sequence[Any], Specs, Specs, Mapping[str, int]], Assignment]
  per_device: Callable[
    [Sequence[Any], Assignment, Mapping[str, int]], list[jax.Array]
  ]
  whole: Callable[..., list[jax.Array]] | None = None
  rule: (
    Callable[[Sequence[Any], Sequence[Any], Sequence[int]], notation_lib.Rule]
    | None
  ) = None


def of_call(
  form: Any,
  *,
  assign: Callable[..., Assignment],
  notation: Callable[[Any], notation_lib.Notation],
  per_device: Callable[..., jax.Array],
  whole: Callable[[Any], jax.Array] | None = None,
) -> Operation:
  """Returns the `Operation` of a `primitive.OperationCall`.

  Args:
    form: form of the call.
    assign: (call, axes of its arrays by name, axes wanted for the result, size
      of each mesh axis) -> assignment.
    notation: call -> names of the dimensions of its arrays.
    per_device: (call of a device's shards, assignment, size of each mesh axis)
      -> a device's shard of the result.
    whole: call -> result.
  """
  return Operation(
    assign=lambda operands, specs, wanted, axis_sizes: assign(
      form.filled(operands), form.named(specs), wanted[0], axis_sizes
    ),
    per_device=lambda parts, assignment, axis_sizes: [
      per_device(form.filled(parts), assignment, axis_sizes)
    ],
    whole=None if whole is None else lambda *x: [whole(form.filled(x))],
    rule=lambda operands, results, axis_sizes: notation_lib.sharding_rule(
      notation(form.filled(operands)), operands, results, axis_sizes
    ),
  )


def partitioned(
  operation: Operation, key: str | None
) -> Callable[..., list[jax.Array]]:
  """Returns a function of the operands that XLA's partitioner splits.

  Args:
    operation: the operation.
    key: key that is equal only for equal operations; None if unknown.
  """
  assert operation.whole is not None
  assert operation.rule is not None
  find_rule = operation.rule

  def partition(mesh: Any, operands: Any, results: Any) -> Any:
    fine, specs = mesh_axes.decode_shardings(mesh, [*operands, *results])
    given, wanted = specs[: len(operands)], specs[len(operands) :]
    assignment = operation.assign(operands, given, wanted, fine.shape)

    def per_device(*parts: jax.Array) -> list[jax.Array]:
      return operation.per_device(parts, assignment, fine.shape)

    named = lambda spec: NamedSharding(fine, mesh_axes.partition_spec(spec))
    return (
      fine,
      per_device,
      list(map(named, assignment.results)),
      tuple(map(named, assignment.operands)),
    )

  def rule(mesh: Any, operands: Any, results: Any) -> notation_lib.Rule:
    return find_rule(operands, results, mesh_axes.automatic_sizes(mesh))

  return exporting.split(
    operation.whole,
    calls_private.Split(partition=partition, rule=rule, key=key),
  )


def on_explicit_axes(
  operation: Operation, mesh: Any, specs: Specs
) -> Callable[..., list[jax.Array]]:
  """Returns a function of the operands that is a `shard_map`.

  It needs no partitioner callback, so JAX can cache and export the module.

  Args:
    operation: the operation.
    mesh: mesh with explicit axes.
    specs: mesh axes of each dimension of each result.
  """

  def function(*operands: jax.Array) -> list[jax.Array]:
    with jax.sharding.use_abstract_mesh(mesh):
      operands = tuple(map(explicit_axes.on_mesh, operands))
      given = list(map(explicit_axes.spec_of, operands))
      assignment = operation.assign(operands, given, specs, mesh.shape)
      results = explicit_axes.shard_map(
        lambda *parts: operation.per_device(parts, assignment, mesh.shape),
        mesh,
        assignment.operands,
        list(assignment.results),
      )(*operands)
      return list(map(explicit_axes.reshard, results, specs))

  return function
