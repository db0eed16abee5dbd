# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluates a program by XLA's operations, and collects its calls' operands.

The calls are equations of this package's primitives. The operands of a call in
a loop or in a `shard_map` get a dimension in front: the trips, or the devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as extend_core
from jax.sharding import PartitionSpec

from jaxplugin.dot import primitive
from jaxplugin.jaxext import explicit_axes
from jaxplugin.jaxext import program
from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.quantization import dequantize_primitive
from jaxplugin.quantization import quantize_primitive
from jaxplugin.ragged import primitive as ragged_primitive

PRIMITIVES: Final = {
  p.name: p
  for p in (
    primitive.block_scaled_dot_p,
    *ragged_primitive.PRIMITIVES,
    quantize_primitive.quantize_p,
    dequantize_primitive.dequantize_p,
  )
}
# Operations that compute the function in their only jaxpr.
_CALLS: Final = frozenset(
  {
    *("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    "kernel_or_operations",
  }
)
# Without effect on numbers, and for the devices of the original program.
_DROPPED: Final = frozenset({"sharding_constraint", "debug_callback"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tap:
  """The operands of a call.

  Attributes:
    eqn: the equation.
    operands: its operands, with a dimension in front for each enclosing loop.
  """

  eqn: Any
  operands: list[Any]

  @property
  def loops(self) -> int:
    """Number of dimensions in front."""
    inside = self.eqn.invars[0].aval
    return len(self.operands[0].shape) - len(inside.shape)


def evaluate(
  jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]
) -> tuple[list[Any], list[Tap]]:
  """Returns the results of an open jaxpr, and its taps in order."""
  values = dict(
    zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True)
  )
  taps: list[Tap] = []

  def read(x: Any) -> Any:
    return x.val if isinstance(x, extend_core.Literal) else values[x]

  for eqn in jaxpr.eqns:
    results, more = _equation(eqn, [read(x) for x in eqn.invars])
    values.update(zip(eqn.outvars, results, strict=True))
    taps += more
  return [read(x) for x in jaxpr.outvars], taps


def _equation(eqn: Any, args: list[Any]) -> tuple[Sequence[Any], list[Tap]]:
  name, params = eqn.primitive.name, eqn.params
  if PRIMITIVES.get(name) is eqn.primitive:
    changes: dict[str, Any] = {"target": None}
    if "call" in params:
      call = params["call"].replace(implementation="xla", overlay=None)
      changes["call"] = call
    else:
      changes["overlay"] = None
    results = binding_private.bind(eqn, args, params | changes)
    return results, [Tap(eqn=eqn, operands=args)]
  if name in _DROPPED:
    return args[: len(eqn.outvars)], []
  if name in _CALLS:
    (inner,) = _jaxprs(eqn)
    return _run(inner, args)
  if name in _CONTROL_FLOW:
    return _CONTROL_FLOW[name](eqn, args)
  return binding_private.bind(eqn, args, params), []


def _jaxprs(eqn: Any) -> list[Any]:
  """Returns the jaxprs of an equation, closed if they are."""
  kinds = (extend_core.ClosedJaxpr, extend_core.Jaxpr)
  return [x for x in eqn.params.values() if isinstance(x, kinds)]


def _run(jaxpr: Any, args: Sequence[Any]) -> tuple[list[Any], list[Tap]]:
  if isinstance(jaxpr, extend_core.ClosedJaxpr):
    return evaluate(jaxpr.jaxpr, jaxpr.consts, args)
  return evaluate(jaxpr, (), args)


class _Body:
  """A function of a jaxpr whose taps are results.

  Tracing it sets `eqns`, the equations of the taps.
  """

  def __init__(self, jaxpr: Any):
    self._jaxpr = jaxpr
    self.eqns: list[Any] = []

  def __call__(self, *args: Any) -> tuple[list[Any], list[list[Any]]]:
    results, taps = _run(self._jaxpr, args)
    self.eqns = [tap.eqn for tap in taps]
    return results, [tap.operands for tap in taps]

  def taps(self, operands: Sequence[list[Any]]) -> list[Tap]:
    return [
      Tap(eqn=eqn, operands=x)
      for eqn, x in zip(self.eqns, operands, strict=True)
    ]


def _scan(eqn: Any, args: list[Any]) -> tuple[list[Any], list[Tap]]:
  params = eqn.params
  num_consts, num_carry = binding_private.scan_sizes(params)
  consts, carry = args[:num_consts], args[num_consts:][:num_carry]
  body = _Body(params["jaxpr"])

  def step(carry: Any, xs: Any) -> Any:
    results, operands = body(*consts, *carry, *xs)
    return results[:num_carry], (results[num_carry:], operands)

  carry, (ys, operands) = lax.scan(
    step,
    carry,
    args[num_consts + num_carry :],
    length=params["length"],
    reverse=params["reverse"],
  )
  return [*carry, *ys], body.taps(operands)


def _while(eqn: Any, args: list[Any]) -> tuple[list[Any], list[Tap]]:
  """Returns the taps of the last trip; zeros without trips."""
  params = eqn.params
  num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
  cond_consts, rest = args[:num_cond], args[num_cond:]
  consts, carry = rest[:num_body], rest[num_body:]
  body = _Body(params["body_jaxpr"])
  _, types = jax.eval_shape(body, *consts, *carry)
  last = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types)
  results, operands = lax.while_loop(
    lambda state: _run(params["cond_jaxpr"], [*cond_consts, *state[0]])[0][0],
    lambda state: body(*consts, *state[0]),
    (carry, last),
  )
  return results, body.taps(operands)


def _cond(eqn: Any, args: list[Any]) -> tuple[list[Any], list[Tap]]:
  """Returns the taps of all branches; zeros of those that do not run."""
  index, *args = args
  bodies = [_Body(jaxpr) for jaxpr in eqn.params["branches"]]
  types = [jax.eval_shape(body, *args)[1] for body in bodies]

  def branch(i: int) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
      zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types)
      results, zeros[i] = bodies[i](*args)
      return results, zeros

    return run

  branches = list(map(branch, range(len(bodies))))
  results, each = lax.switch(index, branches, *args)
  taps = [body.taps(x) for body, x in zip(bodies, each, strict=True)]
  return results, [tap for some in taps for tap in some]


def _shard_map(eqn: Any, args: list[Any]) -> tuple[list[Any], list[Tap]]:
  params = eqn.params
  body = _Body(params["jaxpr"])
  axes = tuple(params["newly_manual_axes"])

  def shard(*args: Any) -> Any:
    results, operands = body(*args)
    return results, jax.tree.map(lambda x: x[None], operands)

  results, operands = jax.shard_map(
    shard,
    mesh=params["mesh"],
    in_specs=tuple(params["in_specs"]),
    out_specs=(list(params["out_specs"]), PartitionSpec(axes)),
    axis_names=set(axes),
    check_vma=params["check_vma"],
  )(*args)
  return results, body.taps(operands)


_CONTROL_FLOW: Final = {
  "scan": _scan,
  "while": _while,
  "cond": _cond,
  "shard_map": _shard_map,
}


def is_for_a_mesh(jaxpr: Any) -> bool:
  """Returns whether a program itself names devices: it must keep its mesh.

  This is a `shard_map`, or a mesh with explicit axes. Other shardings change
  only where the program runs.
  """
  for eqn in jaxpr.eqns:
    avals = [x.aval for x in eqn.outvars]
    if eqn.primitive.name == "shard_map" or explicit_axes.mesh_of(avals):
      return True
    if any(map(is_for_a_mesh, program.sub_jaxprs(eqn))):
      return True
  return False
