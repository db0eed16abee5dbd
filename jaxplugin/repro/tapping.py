# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluates a program again, and collects its calls' operands.

The calls are equations of this package's primitives. The operands of a call in
a loop or in a `shard_map` get a dimension in front: the trips, or the devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as extend_core
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from jaxplugin.dot import primitive
from jaxplugin.jaxext import explicit_axes
from jaxplugin.jaxext import program
from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.operation import alternatives
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
  }
)
_FORMS: Final = alternatives.kernel_or_operations_p.name
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


def constants(jaxpr: Any) -> list[Any]:
  """Returns the arrays that a closed jaxpr holds, at any depth, once each."""
  found = {id(x): x for x in jaxpr.consts}
  for eqn in jaxpr.jaxpr.eqns:
    for x in eqn.invars:
      if isinstance(x, extend_core.Literal) and np.ndim(x.val):
        found[id(x.val)] = x.val
    for inner in _jaxprs(eqn):
      found |= {id(x): x for x in constants(_closed(inner))}
  return list(found.values())


def _jaxprs(eqn: Any) -> list[Any]:
  """Returns the jaxprs of an equation, closed if they are."""
  kinds = (extend_core.ClosedJaxpr, extend_core.Jaxpr)
  found = []
  for value in eqn.params.values():
    several = value if isinstance(value, (tuple, list)) else (value,)
    found += [x for x in several if isinstance(x, kinds)]
  return found


def _closed(jaxpr: Any) -> Any:
  is_closed = isinstance(jaxpr, extend_core.ClosedJaxpr)
  return jaxpr if is_closed else extend_core.ClosedJaxpr(jaxpr, ())


class _Body:
  """A function of a jaxpr whose taps are results.

  Tracing it sets `eqns`, the equations of the taps.
  """

  def __init__(self, evaluation: Evaluation, jaxpr: Any):
    self._evaluation = evaluation
    self._jaxpr = jaxpr
    self.eqns: list[Any] = []

  def __call__(self, *args: Any) -> tuple[list[Any], list[list[Any]]]:
    results, taps = self._evaluation.run(self._jaxpr, args)
    self.eqns = [tap.eqn for tap in taps]
    return results, [tap.operands for tap in taps]

  def taps(self, operands: Sequence[list[Any]]) -> list[Tap]:
    return [
      Tap(eqn=eqn, operands=x)
      for eqn, x in zip(self.eqns, operands, strict=True)
    ]


_Results = tuple[Sequence[Any], list[Tap]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
  """Evaluates a program once more.

  Attributes:
    constants: values in place of the program's `constants`, by their `id`.
    is_reference: whether XLA's operations compute it, on one device if the
      program does not name devices. Otherwise it is the program as written,
      and its taps are not used.
  """

  constants: Mapping[int, Any]
  is_reference: bool

  def run(self, jaxpr: Any, args: Sequence[Any]) -> tuple[list[Any], list[Tap]]:
    """Returns the results of a jaxpr, and its taps in order."""
    closed = _closed(jaxpr)
    consts = [self._value(x) for x in closed.consts]
    inner = closed.jaxpr
    values = dict(
      zip([*inner.constvars, *inner.invars], [*consts, *args], strict=True)
    )
    taps: list[Tap] = []

    def read(x: Any) -> Any:
      is_literal = isinstance(x, extend_core.Literal)
      return self._value(x.val) if is_literal else values[x]

    for eqn in inner.eqns:
      results, more = self._equation(eqn, [read(x) for x in eqn.invars])
      values.update(zip(eqn.outvars, results, strict=True))
      taps += more
    return [read(x) for x in inner.outvars], taps

  def _value(self, constant: Any) -> Any:
    return self.constants.get(id(constant), constant)

  def _equation(self, eqn: Any, args: list[Any]) -> _Results:
    name, params = eqn.primitive.name, eqn.params
    if PRIMITIVES.get(name) is eqn.primitive:
      if self.is_reference:
        params = _by_xla(params)
      results = binding_private.bind(eqn, args, params)
      return results, [Tap(eqn=eqn, operands=args)]
    if self.is_reference and name in _DROPPED:
      return args[: len(eqn.outvars)], []
    if name in _CALLS or (self.is_reference and name == _FORMS):
      (inner,) = _jaxprs(eqn)
      if self.is_reference or "in_shardings" not in params:
        return self.run(inner, args)
      results, taps = self.run(inner, _placed(args, params["in_shardings"]))
      return _placed(results, params["out_shardings"]), taps
    control = {
      "scan": self._scan,
      "while": self._while,
      "cond": self._cond,
      "shard_map": self._shard_map,
    }
    if name in control:
      return control[name](eqn, args)
    return binding_private.bind(eqn, args, params), []

  def _scan(self, eqn: Any, args: list[Any]) -> _Results:
    params = eqn.params
    num_consts, num_carry = binding_private.scan_sizes(params)
    consts, carry = args[:num_consts], args[num_consts:][:num_carry]
    body = _Body(self, params["jaxpr"])

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

  def _while(self, eqn: Any, args: list[Any]) -> _Results:
    """Returns the taps of the last trip; zeros without trips."""
    params = eqn.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, rest = args[:num_cond], args[num_cond:]
    consts, carry = rest[:num_body], rest[num_body:]
    body = _Body(self, params["body_jaxpr"])

    def goes_on(state: Any) -> Any:
      return self.run(params["cond_jaxpr"], [*cond_consts, *state[0]])[0][0]

    _, types = jax.eval_shape(body, *consts, *carry)
    results, operands = lax.while_loop(
      goes_on, lambda state: body(*consts, *state[0]), (carry, _zeros(types))
    )
    return results, body.taps(operands)

  def _cond(self, eqn: Any, args: list[Any]) -> _Results:
    """Returns the taps of all branches; zeros of those that do not run."""
    index, *args = args
    bodies = [_Body(self, jaxpr) for jaxpr in eqn.params["branches"]]
    types = [jax.eval_shape(body, *args)[1] for body in bodies]

    def branch(i: int) -> Callable[..., Any]:
      def run(*args: Any) -> Any:
        taps = _zeros(types)
        results, taps[i] = bodies[i](*args)
        return results, taps

      return run

    branches = list(map(branch, range(len(bodies))))
    results, each = lax.switch(index, branches, *args)
    taps = [body.taps(x) for body, x in zip(bodies, each, strict=True)]
    return results, [tap for some in taps for tap in some]

  def _shard_map(self, eqn: Any, args: list[Any]) -> _Results:
    params = eqn.params
    body = _Body(self, params["jaxpr"])
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


def _by_xla(params: dict[str, Any]) -> dict[str, Any]:
  changes: dict[str, Any] = {"target": None}
  if "call" in params:
    call = params["call"].replace(implementation="xla", overlay=None)
    return params | changes | {"call": call}
  return params | changes | {"overlay": None}


def _placed(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
  """Constrains arrays to the shardings of a `jit`."""
  return [
    lax.with_sharding_constraint(x, sharding)
    if isinstance(sharding, NamedSharding)
    else x
    for x, sharding in zip(arrays, shardings, strict=True)
  ]


def _zeros(types: Any) -> Any:
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types)


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
