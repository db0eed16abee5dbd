# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations split over the devices of a mesh.

`Operation` describes how an operation is split. `partitioned` splits it over
auto axes, which XLA's partitioner assigns, and `on_explicit_axes` over explicit
axes. Both compute the same on each device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxplugin.jaxext import mesh_axes, partitioner_private
from jaxplugin.operation import assignment as assignment_lib
from jaxplugin.operation import notation as notation_lib
from jaxplugin.runtime import lowering

Assignment = assignment_lib.Assignment
Shardings = assignment_lib.Shardings
Specs = Sequence[mesh_axes.Spec]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
  """A function of arrays, and how it is split.

  Attributes:
    assign: (operands, shardings) -> assignment.
    per_device: (a device's shards of the operands, assignment) -> its shards of
      the results. It may use collectives over the mesh axes.
    whole: (*operands) -> results, traced for their types.
    rule: (operands, results, sizes of the mesh axes) -> Shardy rule.
    before: operands of the equation -> operands of the function.
    after: results of the function -> results of the equation.
  """

  assign: Callable[[Sequence[Any], Shardings], Assignment]
  per_device: Callable[[Sequence[Any], Assignment], list[jax.Array]]
  whole: Callable[..., list[jax.Array]] | None = None
  rule: (
    Callable[[Sequence[Any], Sequence[Any], Sequence[int]], notation_lib.Rule]
    | None
  ) = None
  before: Callable[..., Sequence[jax.Array]] = lambda *operands: operands
  after: Callable[[list[jax.Array]], list[jax.Array]] = lambda results: results


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
    assign: (call, shardings by name) -> assignment.
    notation: call -> names of the dimensions of its arrays.
    per_device: (call of a device's shards, assignment) -> a device's shard of
      the result.
    whole: call -> result.
  """
  return Operation(
    assign=lambda operands, shardings: assign(
      form.filled(operands),
      dataclasses.replace(shardings, operands=form.named(shardings.operands)),
    ),
    per_device=lambda parts, assignment: [
      per_device(form.filled(parts), assignment)
    ],
    whole=None if whole is None else lambda *x: [whole(form.filled(x))],
    rule=lambda operands, results, axis_sizes: notation_lib.sharding_rule(
      notation(form.filled(operands)), operands, results, axis_sizes
    ),
  )


def partitioned(
  operation: Operation, key: str | None
) -> Callable[..., list[jax.Array]]:
  """Returns the function of an equation that XLA's partitioner splits.

  Args:
    key: key that is equal only for equal operations; None if unknown.
  """
  assert operation.whole is not None
  assert operation.rule is not None
  find_rule = operation.rule

  def partition(mesh: Any, operands: Any, results: Any) -> Any:
    fine, specs = mesh_axes.decode_shardings(mesh, [*operands, *results])
    count = len(operands)
    shardings = Shardings(
      operands=specs[:count], results=specs[count:], axis_sizes=fine.shape
    )
    assignment = operation.assign(operands, shardings)

    def per_device(*parts: jax.Array) -> list[jax.Array]:
      return operation.per_device(parts, assignment)

    named = lambda spec: NamedSharding(fine, mesh_axes.partition_spec(spec))
    return (
      fine,
      per_device,
      list(map(named, assignment.results)),
      tuple(map(named, assignment.operands)),
    )

  def rule(mesh: Any, operands: Any, results: Any) -> notation_lib.Rule:
    return find_rule(operands, results, mesh_axes.automatic_sizes(mesh))

  function = _split_call(
    operation.whole,
    partitioner_private.Split(partition=partition, rule=rule, key=key),
  )
  return _around(operation, function)


def _around(
  operation: Operation, function: Callable[..., list[jax.Array]]
) -> Callable[..., list[jax.Array]]:
  return lambda *operands: operation.after(
    function(*operation.before(*operands))
  )


def _split_call(
  whole: Callable[..., Any], how: partitioner_private.Split
) -> Callable[..., Any]:
  """Does what `partitioner_private.split` does, also during a `jp.export`.

  XLA's partitioner calls back for each device's part of a call during the
  compilation. An exported module has no such callback. The exporting process
  therefore compiles the function first and records the shardings of each call.
  It then exports the call as a `shard_map` with these shardings.

  Args:
    how: description of the split; `how.partition` returns `NamedSharding`s.

  Raises:
    UnheardError: If the shardings of the call are not recorded yet.
  """
  export = lowering.current_export()
  if export is None:
    return partitioner_private.split(whole, how)
  number = export.next_number()
  if export.phase == "listening":
    return partitioner_private.split(whole, _listening(export, number, how))
  if number not in export.splits:
    raise lowering.UnheardError
  return functools.partial(
    _split_as_recorded, export, number, whole, how.partition
  )


def _listening(
  export: lowering.Export, number: int, how: partitioner_private.Split
) -> partitioner_private.Split:
  """Returns a split that records the partitioner's arguments.

  The parts of each device compute zeros.
  """
  heard = export.splits.setdefault(number, [])

  def rule(mesh: Any, *types: Any) -> Any:
    export.mesh = mesh
    return how.rule(mesh, *types)

  def partition(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
    heard.append(
      lowering.Heard(
        mesh=mesh, arg_shapes=arg_shapes, result_shape=result_shape
      )
    )
    mesh, _, results, operands = how.partition(mesh, arg_shapes, result_shape)

    def nothing(*parts: Any) -> Any:
      del parts
      return jax.tree.map(
        lambda sharding, x: jnp.zeros(sharding.shard_shape(x.shape), x.dtype),
        results,
        result_shape,
      )

    return mesh, nothing, results, operands

  # Without a key, the names of calls are unique over all processes.
  return dataclasses.replace(how, rule=rule, partition=partition, key=None)


def _split_as_recorded(
  export: lowering.Export,
  number: int,
  whole: Callable[..., Any],
  partition: Callable[..., Any],
  *arrays: jax.Array,
) -> Any:
  """Calls `whole` in a `shard_map` with the recorded shardings.

  The partitioner may ask for a call more than once if the call is in a function
  with several callers. All of these are split like the first one.
  """
  if export.splits[number]:
    first = export.splits[number][0]
  else:  # The result is unused, so the partitioner never asked.
    assert export.mesh is not None
    first = lowering.Heard(
      mesh=export.mesh,
      arg_shapes=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays),
      result_shape=jax.eval_shape(whole, *arrays),
    )
  assert [x.shape for x in arrays] == [x.shape for x in first.arg_shapes]
  mesh, per_shard, results, operands = partition(
    first.mesh, first.arg_shapes, first.result_shape
  )
  if {*mesh.axis_names} <= {*first.mesh.axis_names}:
    mesh = first.mesh
  options: dict[str, Any] = {"mesh": mesh}
  around: Any = jax.sharding.get_abstract_mesh()
  if not around.empty:
    # The mesh of the context. An enclosing `shard_map` may use some axes of it.
    mesh = around
    options = {"axis_names": {*around.axis_names} - {*around.manual_axes}}
  spec = lambda sharding: sharding.spec
  is_sharding = lambda x: isinstance(x, NamedSharding)
  return jax.shard_map(
    per_shard,
    in_specs=tuple(map(spec, operands)),
    out_specs=jax.tree.map(spec, results, is_leaf=is_sharding),
    # Kernels do not declare the axes over which their results vary.
    check_vma=False,
    **options,
  )(*_as_they_were(arrays, first, mesh))


def _as_they_were(
  arrays: Sequence[jax.Array], heard: lowering.Heard, mesh: Any
) -> list[jax.Array]:
  """Returns the arrays with the shardings that the partitioner chose.

  Without these constraints the partitioner may reshard the values before they
  become bytes, and XLA moves FP8 as f16.
  """
  # Decodes all arrays together, as `partition` does, so that the axes agree.
  shapes = [*heard.arg_shapes, *jax.tree.leaves(heard.result_shape)]
  _, specs = mesh_axes.decode_shardings(heard.mesh, shapes)
  return [
    jax.lax.with_sharding_constraint(
      x, NamedSharding(mesh, mesh_axes.partition_spec(spec))
    )
    for x, spec in zip(arrays, specs[: len(arrays)], strict=True)
  ]


def on_explicit_axes(
  operation: Operation, mesh: Any, specs: Specs
) -> Callable[..., list[jax.Array]]:
  """Returns the function of an equation, as a `shard_map`.

  It needs no partitioner callback, so JAX can cache and export the module.

  Args:
    specs: mesh axes of each dimension of each result.
  """

  def function(*operands: jax.Array) -> list[jax.Array]:
    with jax.sharding.use_abstract_mesh(mesh):
      operands = tuple(map(mesh_axes.on_mesh, operands))
      given = list(map(mesh_axes.spec_of, operands))
      shardings = Shardings(
        operands=given, results=specs, axis_sizes=mesh.shape
      )
      assignment = operation.assign(operands, shardings)
      results = mesh_axes.shard_map(
        lambda *parts: operation.per_device(parts, assignment),
        mesh,
        assignment.operands,
        list(assignment.results),
      )(*operands)
      return list(map(mesh_axes.reshard, results, specs))

  return _around(operation, function)
