# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The operations of a traced function: where each is, and how often it runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import Literal

from jax.extend import core as extend_core

from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext.tracing import provenance_private

Phase = Literal["forward", "backward", "dgrad", "wgrad", "recomputed"]

# Operations whose jaxprs are programs in a kernel language, not for XLA.
KERNELS: Final = frozenset({"pallas_call", "core_map", "mpmd_map"})

# Scopes that say what is computed, and not which layer it belongs to. Those of
# the backward pass are of `gradients`, the other one is of `jax.checkpoint`.
_PHASE_SCOPES: Final[dict[str, Phase]] = {
  "dgrad": "dgrad",
  "wgrad": "wgrad",
  "rematted_computation": "recomputed",
}
_NO_LAYERS: Final = frozenset({*_PHASE_SCOPES, "checkpoint", "while", "body"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
  """An equation, and its surroundings.

  Attributes:
    eqn: the equation.
    layer: names of the `jax.named_scope`s around it, "Block_0/Dense_1"; flax
      linen has one for each module. Empty where there is none.
    phase: what it is part of, as far as scopes and transformations tell.
    source: file, line and function; empty when not known.
    trips: how often it runs in a run of the function; None inside of a
      `while_loop`, whose trips are not known.
    is_conditional: whether it is in a branch of a `cond`, which may not run.
    is_local: whether it is inside of a `shard_map` over all axes of its mesh:
      sizes are those of one device's arrays.
    num_devices: over how many devices arrays around it are known to be spread.
  """

  eqn: Any
  layer: str
  phase: Phase
  source: str
  trips: int | None
  is_conditional: bool
  is_local: bool
  num_devices: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Around:
  """What holds for all equations of a jaxpr."""

  names: tuple[provenance_private.Name, ...] = ()
  trips: int | None = 1
  is_conditional: bool = False
  manual_axes: frozenset[str] = frozenset()
  is_local: bool = False
  num_devices: int = 1
  source: str = ""  # of a call of this package, for all that it makes
  # The innermost call that has a source line. A function that JAX traces
  # separately, such as a rule of `jax.custom_jvp`, has no lines of its callers.
  caller: str = ""


def operations(jaxpr: Any, num_devices: int = 1) -> list[Operation]:
  """Every equation of a jaxpr that has no jaxpr inside, in sub-jaxprs too.

  Args:
    jaxpr: a `Jaxpr`.
    num_devices: over how many devices its arguments are spread.
  """
  num_devices = max(num_devices, _devices_of(jaxpr))
  return list(_walk(jaxpr, _Around(num_devices=num_devices)))


def _walk(jaxpr: Any, around: _Around) -> Iterator[Operation]:
  for eqn in jaxpr.eqns:
    names = around.names + provenance_private.scopes(eqn.source_info)
    inside = [] if _is_leaf(eqn) else sub_jaxprs(eqn)
    if not inside:
      layer, phase = _layer_and_phase(names)
      yield Operation(
        eqn=eqn,
        layer=layer,
        phase=phase,
        source=around.source
        or provenance_private.user_frame(eqn.source_info)
        or around.caller,
        trips=around.trips,
        is_conditional=around.is_conditional,
        is_local=around.is_local,
        num_devices=around.num_devices,
      )
      continue
    caller = provenance_private.user_frame(eqn.source_info) or around.caller
    within = dataclasses.replace(around, names=names, caller=caller)
    for sub in inside:
      yield from _walk(sub, _inside(eqn, within))


def _is_leaf(eqn: Any) -> bool:
  """Whether what is inside an equation is not part of the program."""
  scaled = jax_private.scaled_primitives()
  return eqn.primitive.name in KERNELS or any(
    eqn.primitive in s for s in scaled
  )


def _inside(eqn: Any, around: _Around) -> _Around:
  name, params = eqn.primitive.name, eqn.params
  if (
    name == "jit"
    and not around.source
    and provenance_private.is_own(params["jaxpr"])
  ):
    # It may have been traced for an earlier call, at another line.
    return dataclasses.replace(around, source=around.caller)
  if name == "scan":
    trips = None if around.trips is None else around.trips * params["length"]
    return dataclasses.replace(around, trips=trips)
  if name == "while":
    return dataclasses.replace(around, trips=None)
  if name == "cond":
    return dataclasses.replace(around, is_conditional=True)
  if name == "shard_map":
    mesh = params["mesh"]
    manual = around.manual_axes | params["newly_manual_axes"]
    is_local = manual == set(mesh.axis_names)
    return dataclasses.replace(
      around,
      manual_axes=manual,
      is_local=is_local,
      num_devices=1 if is_local else max(around.num_devices, mesh.size),
    )
  return around


def _layer_and_phase(
  names: Sequence[provenance_private.Name],
) -> tuple[str, Phase]:
  layers: list[str] = []
  phase: Phase = "forward"
  after_transform = False
  for name in names:
    if name.is_transform:
      after_transform = True
      if name.text == "transpose":
        phase = "backward"
      continue
    phase = _PHASE_SCOPES.get(name.text, phase)
    # Under a transformation an enclosing scope is named once more.
    is_again = after_transform and layers[-1:] == [name.text]
    if name.text not in _NO_LAYERS and not is_again:
      layers.append(name.text)
    after_transform = False
  return "/".join(layers), phase


def sub_jaxprs(eqn: Any) -> list[Any]:
  """The jaxprs inside of an equation."""
  return [j for value in eqn.params.values() for j in jaxprs_of(value)]


def jaxprs_of(value: Any) -> Iterator[Any]:
  """Those in nested tuples and lists, not closed."""
  if isinstance(value, extend_core.ClosedJaxpr):
    yield value.jaxpr
  elif isinstance(value, extend_core.Jaxpr):
    yield value
  elif isinstance(value, (tuple, list)):
    for item in value:
      yield from jaxprs_of(item)


def _devices_of(jaxpr: Any) -> int:
  """Over how many devices shardings in a jaxpr spread arrays.

  Those of jitted functions and constraints count, wherever they are: a module
  is partitioned as a whole.
  """
  most = 1
  for eqn in jaxpr.eqns:
    name, params = eqn.primitive.name, eqn.params
    if name in ("jit", "pjit"):
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
