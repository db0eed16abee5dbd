# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions that callbacks split for XLA's partitioner, with stable names.

The protocol with XLA is that of `jax.experimental.custom_partitioning`. There
are two differences:

* The name of a call in the module is a digest of everything that decides its
  splitting and computation, if that is known. It is not an address. Two
  processes therefore lower the same module, and the second process finds the
  executable of the first in JAX's persistent compilation cache.
* Equal calls that are split alike are traced and lowered once.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import enum
import hashlib
import itertools
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax._src import core, sharding_impls, xla_bridge
from jax._src import custom_partitioning_sharding_rule as rules
from jax._src import mesh as mesh_lib
from jax._src.interpreters import mlir, partial_eval
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo
from jax.extend import core as extend_core

from jaxplugin.jaxext import jax_private, mesh_axes

_CALL_TARGET: Final = "jaxplugin_partitioned"
_MAX_SHARES: Final = 256  # cache entries; each holds a module

# Parts of the name of a call without a key.
_process: Final = uuid.uuid4().hex
_numbers: Final = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Split:
  """How calls of a function of arrays are split.

  Attributes:
    partition: (mesh, operands, results) -> the mesh of `mesh_axes.decode`, a
      function of one device's parts of the operands, the shardings of the
      results, and the shardings of the operands. Inside a `shard_map` over some
      axes, the mesh is the mesh of a `mesh_axes.Group`.
    rule: (mesh, operands, results) -> Shardy's rule, and the sizes and kinds of
      its factors. These operands and results are abstract values.
    key: equal for two splits only if both functions do the same, in any process
      and for any shapes; None if that is unknown.

  Operands and results are `ShapeDtypeStruct`s. `jax_private.partitioner_tiling`
  reads their shardings. Results are one array or a list, like the results of
  the function that is split.
  """

  partition: Callable[..., tuple[Any, Any, Any, Any]]
  rule: Callable[..., tuple[str, dict[str, Any]]]
  key: str | None


def split(whole: Callable[..., Any], how: Split) -> Callable[..., Any]:
  """Returns a function that is lowered to one operation for the partitioner.

  Args:
    whole: a function of arrays that returns an array or a list of arrays. It is
      traced for the types of its results.
    how: how calls of the function are split.
  """

  def called(*args: jax.Array) -> Any:
    closed, types = jax.make_jaxpr(whole, return_shape=True)(*args)
    leaves, tree = jax.tree.flatten(types)
    assert len(leaves) == len(closed.out_avals)
    results = partitioned_p.bind(
      *args, how=how, tree=tree, out_avals=tuple(closed.out_avals)
    )
    return jax.tree.unflatten(tree, results)

  return called


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Named:
  """The answers to XLA's callbacks for the calls of one name.

  Attributes:
    name: name of the calls in the module.
    how: how the calls are split.
    tree: tree structure of the results.
    mesh: mesh of the module; empty if unknown.
    devices: devices of the module.
    platforms, backend: platforms and backend of the module.
    context: contexts in which the calls were lowered.
  """

  name: str
  how: Split
  tree: Any
  mesh: Any
  devices: tuple[Any, ...]
  platforms: tuple[str, ...]
  backend: Any
  context: jax_private.Snapshot

  def typed(self, shape: Any, sharding: Any = None) -> Any:
    """Returns the type of an array in a callback's arguments."""
    if sharding is not None:
      sharding = sharding_impls.GSPMDSharding(self.devices, sharding)
    return jax.ShapeDtypeStruct(
      shape.dimensions(), shape.numpy_dtype(), sharding=sharding
    )

  def results(self, shapes: Sequence[Any], shardings: Sequence[Any]) -> Any:
    return self.tree.unflatten(map(self.typed, shapes, shardings))


# A named call lives as long as a module that contains it, or an object that was
# compiled from the module.
_named: Final[weakref.WeakValueDictionary[str, _Named]] = (
  weakref.WeakValueDictionary()
)
# Answers by question: one device's module, and the shardings for it.
_shares: Final[collections.OrderedDict[Any, tuple[bytes, Any, Any]]] = (
  collections.OrderedDict()
)
_lock: Final = threading.Lock()

# Devices of the module that is lowered, for a `shard_map` without them.
_devices: Final[contextvars.ContextVar[tuple[Any, ...] | None]] = (
  contextvars.ContextVar("devices", default=None)
)

partitioned_p = extend_core.Primitive("jaxplugin_partitioned")
partitioned_p.multiple_results = True
jax_private.require_devices_during_lowering(partitioned_p)


def _abstract_eval(
  *avals: Any, how: Split, tree: Any, out_avals: tuple[Any, ...]
) -> tuple[Any, ...]:
  del avals, how, tree
  return out_avals


def _lower(
  ctx: Any,
  *values: Any,
  how: Split,
  tree: Any,
  out_avals: tuple[Any, ...],
) -> Any:
  mesh, devices = _mesh_and_devices(ctx.module_context.axis_context)
  named = _Named(
    name="",
    how=how,
    tree=tree,
    mesh=mesh,
    devices=devices,
    platforms=tuple(ctx.module_context.platforms),
    backend=ctx.module_context.backend,
    context=jax_private.snapshot(),
  )
  named = _registered(named, ctx.avals_in, out_avals)
  ctx.module_context.add_keepalive(named)
  types_of = lambda avals: mlir.ir_tree_registry.flatten(
    [mlir.aval_to_ir_types(ctx.module_context, a) for a in avals]
  )[0]
  value_types, result_types = types_of(ctx.avals_in), types_of(out_avals)
  marker = _marker(ctx, mesh)
  out = hlo.CustomCallOp(
    result_types,
    [*values, *marker],
    call_target_name=ir.StringAttr.get(_CALL_TARGET),
    has_side_effect=ir.BoolAttr.get(False),
    api_version=mlir.i32_attr(2),
    called_computations=ir.ArrayAttr.get([]),
    backend_config=ir.StringAttr.get(named.name),
    operand_layouts=None,
    result_layouts=None,
  )
  text, factors = how.rule(mesh, ctx.avals_in, out_avals)
  rule = rules.str_to_sdy_sharding_rule(_with_marker(text, mesh), **factors)
  out.attributes["sdy.sharding_rule"] = rules.sdy_sharding_rule_to_mlir(
    rule, [*value_types, *(x.type for x in marker)], result_types
  )
  return out.results


partitioned_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(partitioned_p, _lower)


def _is_in_group(mesh: Any) -> bool:
  """Returns whether callbacks see groups of devices with automatic axes."""
  return jax.sharding.AxisType.Manual in mesh.axis_types and bool(
    mesh_axes.automatic_axes(mesh)
  )


def _marker(ctx: Any, mesh: Any) -> list[Any]:
  """Returns an operand from which callbacks read the numbering of a group.

  Inside a `shard_map` over some axes, XLA chooses how each operation numbers
  the devices of a group, and does not report its choice. So each call has an
  operand that no device reads. It has a dimension for each automatic axis, and
  is split over this axis. The callbacks read the numbering from its sharding.
  """
  if not _is_in_group(mesh):
    return []
  names = mesh_axes.automatic_axes(mesh)
  marker = core.ShapedArray(
    tuple(mesh.shape[name] for name in names), np.dtype(np.uint8)
  )
  sharding = jax.sharding.NamedSharding(
    mesh.abstract_mesh, jax.sharding.PartitionSpec(*names)
  )

  def function() -> jax.Array:
    zeros = jax.lax.full(marker.shape, 0, marker.dtype)
    return jax.lax.with_sharding_constraint(zeros, sharding)

  lower = mlir.lower_fun(function, multiple_results=False)
  return list(lower(ctx.replace(avals_in=[], avals_out=[marker])))


def _with_marker(rule: str, mesh: Any) -> str:
  """Returns Shardy's rule with the marker as a last operand."""
  if not _is_in_group(mesh):
    return rule
  operands, results = rule.split("->")
  names = mesh_axes.automatic_axes(mesh)
  dims = " ".join(f"axis{i}" for i in range(len(names)))
  return f"{operands}, {dims} ->{results}"


@contextlib.contextmanager
def devices_of(axis_context: Any) -> Iterator[None]:
  """Keeps the devices of a module for a `shard_map` on an abstract mesh.

  Outside of `jax.set_mesh`, the type of an array has no devices.
  """
  devices = getattr(axis_context, "device_assignment", None)
  token = _devices.set(devices or _devices.get())
  try:
    yield
  finally:
    _devices.reset(token)


def _mesh_and_devices(axis_context: Any) -> tuple[Any, tuple[Any, ...]]:
  """Returns the mesh of a partitioned module if known, and its devices."""
  if isinstance(axis_context, sharding_impls.SPMDAxisContext):
    is_abstract = isinstance(axis_context.mesh, jax.sharding.AbstractMesh)
    devices = (
      _devices.get() if is_abstract else axis_context.mesh._flat_devices_tuple
    )
    if devices is None:
      raise NotImplementedError(
        "jaxplugin: the mesh must have devices if some of its axes are Auto,"
        f" got {axis_context.mesh}. Call the function inside"
        " jax.set_mesh(mesh)"
      )
    manual = axis_context.manual_axes
    names = axis_context.mesh.axis_names
    kinds = jax.sharding.AxisType
    mesh = mesh_lib.Mesh(
      np.array(devices, dtype=object).reshape(axis_context.mesh.axis_sizes),
      names,
      tuple(kinds.Manual if name in manual else kinds.Auto for name in names),
    )
    return mesh, tuple(devices)
  mesh = mesh_lib.thread_resources.env.physical_mesh
  devices = tuple(axis_context.device_assignment)
  abstract = axis_context.abstract_mesh
  if abstract is not None:
    grid = np.array(devices, dtype=object).reshape(abstract.axis_sizes)
    mesh = mesh_lib.Mesh(grid, abstract.axis_names)
  return mesh, devices


def _registered(
  named: _Named, avals_in: Sequence[Any], avals_out: Sequence[Any]
) -> _Named:
  """Returns the record of calls with this name, and adds it if needed."""
  name = _name(named, avals_in, avals_out)
  with _lock:
    known = _named.get(name)
    if known is None or known.backend is not named.backend:
      known = _named[name] = dataclasses.replace(named, name=name)
  return known


def _name(
  named: _Named, avals_in: Sequence[Any], avals_out: Sequence[Any]
) -> str:
  """Returns a digest of all that decides the callbacks' answers.

  Returns a unique name if a part of it has no encoding.
  """
  mesh = named.mesh
  is_in_order = tuple(mesh.devices.flat) == named.devices
  try:
    if named.how.key is None:
      raise NoEncodingError
    text = encode(
      (
        named.how.key,
        tuple((a.shape, a.dtype) for a in avals_in),
        tuple((a.shape, a.dtype) for a in avals_out),
        tuple(mesh.devices.shape) if is_in_order else None,
        tuple(kind.name for kind in mesh.axis_types),
        len(named.devices),
        named.platforms,
        named.context.everything,
      )
    )
  except NoEncodingError:
    return f"{_process} {next(_numbers)}"
  return hashlib.sha256(text.encode()).hexdigest()


# The callbacks of XLA.


def _propagate(sharding: Any, shape: Any, name: bytes) -> Any:
  del shape, name
  return sharding


def _infer(
  shapes: Sequence[Any],
  shardings: Sequence[Any],
  result_shape: Any,
  name: bytes,
) -> Any:
  """Replicates results. Only GSPMD calls it; lowering rules refuse GSPMD."""
  del shapes, shardings, name
  results, _ = _elements(result_shape)
  return _together(
    result_shape, [xla_client.HloSharding.replicate() for _ in results]
  )


def _partition(
  shapes: Sequence[Any],
  shardings: Sequence[Any],
  result_shape: Any,
  result_sharding: Any,
  name: bytes,
) -> tuple[bytes, list[Any], Any]:
  named = _named[name.decode()]
  results, wanted = _elements(result_shape, result_sharding)
  asked = (name, id(named.backend), tuple(shardings), tuple(wanted))
  with _lock:
    known = _shares.get(asked)
    if known is not None:
      _shares.move_to_end(asked)
      return known
  with named.context.restored():
    operands = list(map(named.typed, shapes, shardings))
    mesh, group, marker = named.mesh, None, []
    if _is_in_group(mesh):
      marker = [shardings[-1]]
      tiling = jax_private.partitioner_tiling(
        operands.pop().sharding, len(shapes[-1].dimensions())
      )
      group = mesh_axes.group_of(mesh, tiling)
      mesh = group.mesh
    mesh, share, result_shardings, operand_shardings = named.how.partition(
      mesh, operands, named.results(results, wanted)
    )
    into = _hlo_shardings(operand_shardings, shapes[: len(operands)]) + marker
    out = _hlo_shardings(result_shardings, results)
    module = _share(
      named,
      mesh if group is None else group.collective_mesh(mesh),
      lambda *parts: share(*parts[: len(operands)]),
      _tiles(shapes, into),
      _tiles(results, out),
    )
  answer = module, into, _together(result_shape, out)
  with _lock:
    _shares[asked] = answer
    while len(_shares) > _MAX_SHARES:
      _shares.popitem(last=False)
  return answer


def forget_shares() -> None:
  """Clears the cache of per-device functions, for tests that replace them."""
  with _lock:
    _shares.clear()


def _share(
  named: _Named,
  mesh: Any,
  function: Callable[..., Any],
  operands: Sequence[Any],
  results: Sequence[Any],
) -> bytes:
  """Returns the module with one device's computation."""
  axes = list(mesh.shape.items())
  # Explicit axes of the process that compiles do not apply to a device's part.
  # XLA could not lower their sharding constraints at this point.
  nowhere = jax.sharding.AbstractMesh((), ())
  with jax.sharding.use_abstract_mesh(nowhere):
    closed = jax.make_jaxpr(function, axis_env=axes)(*operands)
    made = [(a.shape, a.dtype) for a in closed.out_avals]
    assert made == [(a.shape, a.dtype) for a in results], (made, results)
    with core.extend_axis_env_nd(axes):
      if getattr(closed, "is_high", False):  # since JAX 0.11: `ragged_dot`
        lower: Any = getattr(partial_eval, "lower_jaxpr2")  # noqa: B009
        closed = lower(closed)
      module = mlir.build_mlir_module_helper(
        closed,
        name="share",
        platforms=named.platforms,
        backend=named.backend,
        axis_context=sharding_impls.SPMDAxisContext(
          mesh, frozenset(mesh.axis_names)
        ),
      )
  return mlir.module_to_bytecode(module)


def _elements(shape: Any, sharding: Any = None) -> tuple[list[Any], list[Any]]:
  """Returns the shapes of an array or a tuple, and the shardings or None."""
  if not shape.is_tuple():
    return [shape], [sharding]
  shapes = list(shape.tuple_shapes())
  if sharding is None:
    return shapes, [None] * len(shapes)
  return shapes, list(sharding.tuple_elements())


def _together(shape: Any, shardings: Sequence[Any]) -> Any:
  if not shape.is_tuple():
    return shardings[0]
  return xla_client.HloSharding.tuple_sharding(shape, list(shardings))


def _hlo_shardings(shardings: Any, shapes: Sequence[Any]) -> list[Any]:
  leaves = jax.tree.leaves(shardings)
  return [
    sharding._to_xla_hlo_sharding(len(shape.dimensions()))
    for sharding, shape in zip(leaves, shapes, strict=True)
  ]


def _tiles(shapes: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
  tiles = [
    sharding.tile(shape)
    for sharding, shape in zip(shardings, shapes, strict=True)
  ]
  return [core.ShapedArray(t.dimensions(), t.numpy_dtype()) for t in tiles]


def _newest(function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a function that calls the latest import of this module.

  XLA keeps the callbacks that were registered first. The module may since have
  been deleted from `sys.modules` and imported again.
  """

  def call(*args: Any) -> Any:
    module = sys.modules.get(__name__)
    return getattr(module, function.__name__, function)(*args)

  return call


def _register(**where: Any) -> None:
  xla_client.register_custom_call_partitioner(
    name=_CALL_TARGET,
    prop_user_sharding=_newest(_propagate),
    partition=_newest(_partition),
    infer_sharding_from_operands=_newest(_infer),
    can_side_effecting_have_replicated_sharding=True,
    **where,
  )


_register()
xla_bridge.register_plugin_callbacks(_register)


# Text for values: equal values have the same text in every process, so that
# equal calls have equal names.


class NoEncodingError(TypeError):
  """A value is not plain data; for example a function or an array."""


def encode(value: Any) -> str:
  """Returns the text of a value. Different values have different texts.

  Args:
    value: None, a bool, number, string, bytes, dtype or enum; or a tuple, list,
      set, dict or dataclass of such values.

  Raises:
    NoEncodingError: If the value, or a value in it, is of another type.
  """
  kind = type(value)
  name = f"{kind.__module__}.{kind.__qualname__}"
  if value is None or kind in (bool, int, str, bytes):
    return repr(value)
  if kind is float:
    return value.hex()
  if isinstance(value, np.dtype):
    return f"dtype {value.name}"
  if isinstance(value, enum.Enum):
    return f"{name}.{value.name}"
  if kind in (tuple, list):
    return f"{kind.__name__}({','.join(map(encode, value))})"
  if kind in (set, frozenset):
    return f"{kind.__name__}({','.join(sorted(map(encode, value)))})"
  if kind is dict:
    items = (f"{encode(k)}:{encode(v)}" for k, v in value.items())
    return f"dict({','.join(sorted(items))})"
  if dataclasses.is_dataclass(kind):
    fields = (
      f"{field.name}={encode(getattr(value, field.name))}"
      for field in dataclasses.fields(value)
    )
    return f"{name}({','.join(fields)})"
  raise NoEncodingError(
    f"encode: must be plain data or a dataclass of it, got {name}"
  )
