# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""State of a `jp.export` that keeps kernels, for lowering rules.

XLA's partitioner calls back for each device's part of a call during the
compilation. An exported module has no such callback. The exporting process
therefore compiles the function first and records the shardings of each call. It
then exports the call as a `shard_map` with these shardings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import Literal

import jax
import jax.export
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxplugin.core import targets
from jaxplugin.jaxext import mesh_axes
from jaxplugin.jaxext.partitioner import calls_private

Phase = Literal["listening", "exporting"]


class UnheardError(Exception):
  """A call must be split, but its shardings are not recorded yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Heard:
  """The partitioner's arguments to `partition` for a call."""

  mesh: jax.sharding.Mesh
  arg_shapes: Any
  result_shape: Any


@dataclasses.dataclass(kw_only=True, eq=False)
class Export:
  """One export. It only equals itself, because it is part of `jit`'s key.

  Attributes:
    targets: target for each platform; targets of other platforms are detected.
    num_platforms: number of platforms of a module. Each lowers every call.
    phase: "listening" records the partitioner's shardings; "exporting" uses
      them.
    splits: recorded arguments of each call. Keys are the positions of calls in
      the order of lowering.
    mesh: mesh of the partitioner; None before the phase "listening".
  """

  targets: Mapping[str, targets.Target]
  num_platforms: int = 1
  phase: Phase = "exporting"
  splits: dict[int, list[_Heard]] = dataclasses.field(default_factory=dict)
  mesh: jax.sharding.Mesh | None = None
  _num_calls: int = 0

  def begin(self, phase: Phase) -> None:
    self.phase = phase
    self._num_calls = 0

  def next_number(self) -> int:
    """Returns the position of the call being lowered.

    For export, each platform lowers a call before the next call is lowered.
    """
    number = self._num_calls
    self._num_calls += 1
    return number if self.phase == "listening" else number // self.num_platforms


_current: Final = jax.make_user_context(default_value=None)


def current() -> Export | None:
  """Returns the current export of this thread, or None."""
  return _current.value


@contextlib.contextmanager
def going_on(export: Export) -> Iterator[Export]:
  """Makes `export` the current export."""
  with _current(export):
    yield export


def symbolic_error(arrays: Sequence[Any]) -> str | None:
  """Returns why `jp.export` refuses arrays on several devices, or None.

  JAX 0.12 cannot compile a `shard_map` whose operations read a symbolic size.
  """
  shapes = [x.shape for x in arrays if hasattr(x, "shape")]
  if not any(map(jax.export.is_symbolic_dim, itertools.chain(*shapes))):
    return None
  return (
    f"sizes must be static on several devices, got symbolic ones in {shapes}."
    " Export the function of one device, and call the loaded function inside a"
    " jax.shard_map; or export XLA operations with Auto axes by"
    " jax.export.export"
  )


def split(
  whole: Callable[..., Any], how: calls_private.Split
) -> Callable[..., Any]:
  """Does what `calls_private.split` does, also during an export.

  Args:
    whole: the function to split.
    how: description of the split; `how.partition` returns `NamedSharding`s.

  Raises:
    UnheardError: If the shardings of the call are not recorded yet.
  """
  export = current()
  if export is None:
    return calls_private.split(whole, how)
  number = export.next_number()
  if export.phase == "listening":
    return calls_private.split(whole, _listening(export, number, how))
  if number not in export.splits:
    raise UnheardError
  return functools.partial(_split, export, number, whole, how.partition)


def _listening(
  export: Export, number: int, how: calls_private.Split
) -> calls_private.Split:
  """Returns a split that records the partitioner's arguments.

  The parts of each device compute zeros.
  """
  heard = export.splits.setdefault(number, [])

  def rule(mesh: Any, *types: Any) -> Any:
    export.mesh = mesh
    return how.rule(mesh, *types)

  def partition(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
    heard.append(
      _Heard(mesh=mesh, arg_shapes=arg_shapes, result_shape=result_shape)
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


def _split(
  export: Export,
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
    first = _Heard(
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
  arrays: Sequence[jax.Array], heard: _Heard, mesh: Any
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
