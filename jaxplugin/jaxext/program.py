# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lists the operations of a traced function, with their surroundings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Final, Self

from jax.extend import core as extend_core

from jaxplugin.jaxext import jax_private, linear_calls
from jaxplugin.jaxext.tracing import binding_private

# Operations that only call the function in their one jaxpr.
CALLS: Final = frozenset(
  {"jit", "remat2", "closed_call", "custom_jvp_call", "custom_vjp_call"}
)
# Operations whose jaxprs are programs in a kernel language.
KERNELS: Final = frozenset({"pallas_call", "core_map", "mpmd_map"})

# Jitted functions of this package that are one operation. No kernel computes
# them.
DEQUANTIZE: Final = "dequantize_with_offset"
FUNCTIONS: Final = frozenset(
  {DEQUANTIZE, "quantize_by_operations", "quantize_integers"}
)

# Operations whose result is a slice if their operand is one.
_VIEWS: Final = frozenset({"reshape", "squeeze", "bitcast_convert_type"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """Place of an operation in a program, and how often it runs.

  Attributes:
    source: file, line and function (or column) of the call; "" if not known.
    layer: names of the scopes around it, "Block_0/Dense_1"; "" outside of
      scopes. flax linen opens a scope for each module.
    phase: "forward", "dgrad", "wgrad", "backward" (one of both) or "recomputed"
      (by `jax.checkpoint`, for the backward pass).
    count: number of equal operations at this place.
    trips: how often each runs, the product of the `scan`s around it. None
      inside a `while_loop`, whose trips are not known.
    is_conditional: whether it is in a branch of a `cond`, which may not run.
  """

  source: str = ""
  layer: str = ""
  phase: jax_private.Phase = "forward"
  count: int = 1
  trips: int | None = 1
  is_conditional: bool = False

  @property
  def runs(self) -> int:
    """How often it runs; unknown trips count once."""
    return self.count * (self.trips or 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedOperation(Place):
  """An equation and its surroundings.

  Attributes:
    eqn: the equation.
    is_local: whether it is inside a `shard_map` over all axes of a mesh of
      several devices. Sizes are then sizes of one device's arrays.
    num_devices: number of devices that arrays around it are sharded over, as
      far as known.
    scanned: which operands are a `scan`'s slices of its inputs.
    alternative: the innermost equation around it with a parameter `forms`,
      which a kernel may replace; None outside of them.
  """

  eqn: Any
  is_local: bool
  num_devices: int
  scanned: frozenset[int]
  alternative: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlFlow:
  """How often an operation runs in one run of a function.

  Attributes:
    trips, is_conditional: see `Place`.
  """

  trips: int | None = 1
  is_conditional: bool = False

  def inside(self, name: str, params: dict[str, Any]) -> Self:
    """Adds the control flow of an operation with functions inside."""
    if name == "scan" and self.trips is not None:
      return dataclasses.replace(self, trips=self.trips * params["length"])
    if name == "while":
      return dataclasses.replace(self, trips=None)
    if name == "cond":
      return dataclasses.replace(self, is_conditional=True)
    return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Around(ControlFlow):
  """Facts that hold for all equations of a jaxpr."""

  names: tuple[jax_private.ScopeName, ...] = ()
  manual_axes: frozenset[str] = frozenset()
  is_local: bool = False
  num_devices: int = 1
  source: str = ""  # of a call to this package, for all its equations
  # The innermost call that has a source line. A function that JAX traces
  # separately, such as a rule of `jax.custom_jvp`, has no lines of its callers.
  caller: str = ""
  alternative: Any = None


def operations(jaxpr: Any, num_devices: int = 1) -> list[TracedOperation]:
  """Returns every equation without sub-jaxprs, also those in sub-jaxprs.

  Args:
    jaxpr: a `Jaxpr`.
    num_devices: number of devices that its arguments are sharded over.
  """
  num_devices = max(num_devices, _devices_of(jaxpr))
  return list(_walk(jaxpr, _Around(num_devices=num_devices)))


def _walk(
  jaxpr: Any, around: _Around, slices: frozenset[Any] = frozenset()
) -> Iterator[TracedOperation]:
  """Yields operations; `slices` are the variables that are a scan's slices."""
  for eqn in jaxpr.eqns:
    scanned = frozenset(
      i
      for i, x in enumerate(eqn.invars)
      if isinstance(x, extend_core.Var) and x in slices
    )
    if scanned and eqn.primitive.name in _VIEWS:
      slices |= {*eqn.outvars}
    names = around.names + jax_private.scopes(eqn.source_info)
    inside = [] if _is_leaf(eqn) else sub_jaxprs(eqn)
    if not inside:
      layer, phase = jax_private.layer_and_phase(names)
      yield TracedOperation(
        eqn=eqn,
        layer=layer,
        phase=phase,
        source=around.source
        or jax_private.user_frame(eqn.source_info)
        or around.caller,
        trips=around.trips,
        is_conditional=around.is_conditional,
        is_local=around.is_local,
        num_devices=around.num_devices,
        scanned=scanned,
        alternative=around.alternative,
      )
      continue
    caller = jax_private.user_frame(eqn.source_info) or around.caller
    within = dataclasses.replace(around, names=names, caller=caller)
    for sub in inside:
      yield from _walk(
        sub, _inside(eqn, within), _slices_inside(eqn, sub, scanned)
      )


def _is_leaf(eqn: Any) -> bool:
  """Returns whether jaxprs inside an equation are not part of the program."""
  scaled = jax_private.scaled_primitives()
  return (
    eqn.primitive.name in KERNELS
    or any(eqn.primitive in s for s in scaled)
    or called_function(eqn) is not None
  )


def called_function(eqn: Any) -> str | None:
  """Returns the name in `FUNCTIONS` of the function that is called, or None."""
  name = eqn.params.get("name") if eqn.primitive.name == "jit" else None
  return name if name in FUNCTIONS else None


def _inside(eqn: Any, around: _Around) -> _Around:
  name, params = eqn.primitive.name, eqn.params
  if (
    name == "jit" and not around.source and jax_private.is_own(params["jaxpr"])
  ):
    # JAX may have traced it for an earlier call at another line.
    return dataclasses.replace(around, source=around.caller)
  if "forms" in params:
    return dataclasses.replace(around, alternative=eqn)
  if name == "shard_map":
    mesh = params["mesh"]
    manual = around.manual_axes | params["newly_manual_axes"]
    is_whole = manual == set(mesh.axis_names)
    return dataclasses.replace(
      around,
      manual_axes=manual,
      is_local=is_whole and mesh.size > 1,
      num_devices=1 if is_whole else max(around.num_devices, mesh.size),
    )
  return around.inside(name, params)


def _slices_inside(
  eqn: Any, sub: Any, scanned: frozenset[int]
) -> frozenset[Any]:
  """Returns the arguments of a sub-jaxpr that are a scan's slices."""
  # A `cond` also has its index in front, and a `while` other constants.
  offset = len(eqn.invars) - len(sub.invars)
  found = {sub.invars[i - offset] for i in scanned if i >= offset >= 0}
  if eqn.primitive.name == "scan":
    first = sum(binding_private.scan_sizes(eqn.params))
    found |= {*sub.invars[first:]}
  return frozenset(found)


def sub_jaxprs(eqn: Any) -> list[Any]:
  """Returns the open jaxprs inside an equation or a `BoundOperation`."""
  return [j for value in eqn.params.values() for j in jaxprs_of(value)]


def jaxprs_of(value: Any) -> Iterator[Any]:
  """Yields the open jaxprs in nested tuples and lists."""
  for jaxpr in stored_jaxprs(value):
    is_closed = isinstance(jaxpr, extend_core.ClosedJaxpr)
    yield jaxpr.jaxpr if is_closed else jaxpr


def stored_jaxprs(value: Any) -> Iterator[Any]:
  """Yields the jaxprs in nested tuples and lists, closed if they are."""
  if isinstance(value, linear_calls.Operations):
    yield value.jaxpr
  elif isinstance(value, (extend_core.ClosedJaxpr, extend_core.Jaxpr)):
    yield value
  elif isinstance(value, (tuple, list)):
    for item in value:
      yield from stored_jaxprs(item)


def _devices_of(jaxpr: Any) -> int:
  """Returns the largest number of devices of a sharding in a jaxpr.

  Shardings of jitted functions and constraints count at any depth, because XLA
  partitions a module as a whole.
  """
  most = 1
  for eqn in jaxpr.eqns:
    name, params = eqn.primitive.name, eqn.params
    if name == "jit":
      shardings = (*params["in_shardings"], *params["out_shardings"])
    elif name == "sharding_constraint":
      shardings = (params["sharding"],)
    else:
      shardings = ()
    most = max([most, *(getattr(s, "num_devices", 1) for s in shardings)])
    for variable in eqn.outvars:
      sharding = getattr(variable.aval, "sharding", None)
      mesh = getattr(sharding, "mesh", None)
      if mesh is not None and not mesh.empty and not mesh.are_all_axes_manual:
        most = max(most, math.prod(mesh.shape.values()))
    for sub in () if _is_leaf(eqn) else sub_jaxprs(eqn):
      most = max(most, _devices_of(sub))
  return most
