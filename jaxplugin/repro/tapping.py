# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluates a program again, and collects its calls' operands.

The calls are equations of this package's primitives, and kernels that replace
several of them. An operand that differs between the trips of a loop or between
the devices of a `shard_map` gets a dimension in front.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as extend_core
from jax.sharding import NamedSharding, PartitionSpec

from jaxplugin.core import decisions, targets
from jaxplugin.dot import backends, calls, primitive
from jaxplugin.jaxext import linear_calls, mesh_axes, program
from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.operation import alternatives
from jaxplugin.quantization import (
  dequantization,
  quantize_primitive,
  quantized_results,
)
from jaxplugin.ragged import backends as ragged_backends
from jaxplugin.ragged import primitive as ragged_primitive
from jaxplugin.runtime import lowering

PRIMITIVES: Final = {
  p.name: p
  for p in (
    primitive.block_scaled_dot_p,
    *ragged_primitive.PRIMITIVES,
    quantize_primitive.quantize_p,
    dequantization.dequantize_p,
  )
}
_CALLS: Final = program.CALLS | {
  *("custom_vmap_call", "remat_opt", "composite", "linear_call"),
  linear_calls.linear_call_p.name,
}
_FORMS: Final = alternatives.kernel_or_operations_p.name
# Without effect on numbers, and for the devices of the original program.
_DROPPED: Final = frozenset({"sharding_constraint", "debug_callback"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tap:
  """The operands of a call.

  Attributes:
    eqn: the equation of the program.
    operation: name of the primitive of the call.
    form: its parameter `call` or `problem`, or an `alternatives.FusedCall`.
    operands: its operands, with a dimension in front for each loop inside which
      they differ.
    loops: number of dimensions in front of each operand.
    is_layer: whether a kernel reads a layer of a stack as a group.
  """

  eqn: Any
  operation: str
  form: Any
  operands: list[Any]
  loops: tuple[int, ...]
  is_layer: bool = False

  def typed(self) -> Tap:
    """Returns the tap with types instead of operands, which may be tracers."""
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.operands]
    return dataclasses.replace(self, operands=types)

  def outside(self, operands: Sequence[Any], more: Sequence[int]) -> Tap:
    """Returns the tap with the operands outside of a loop."""
    loops = tuple(a + b for a, b in zip(self.loops, more, strict=True))
    return dataclasses.replace(self, operands=list(operands), loops=loops)


def _tap(eqn: Any, operation: str, form: Any, operands: Sequence[Any]) -> Tap:
  return Tap(
    eqn=eqn,
    operation=operation,
    form=form,
    operands=list(operands),
    loops=(0,) * len(operands),
  )


def backends_of(call: Any) -> Any:
  """Returns the module with the backends of a dot or a ragged dot."""
  return backends if isinstance(call, calls.DotCall) else ragged_backends


def chosen(call: Any, target: targets.Target) -> decisions.Decision:
  """Returns the decision about a dot or a ragged dot."""
  options: dict[str, Any] = {"overlay": call.overlay}
  if isinstance(call, calls.DotCall):
    options["is_of_layer"] = call.is_of_layer
  choose = backends_of(call).choose
  decision: decisions.Decision = choose(
    call.problem(), target, call.implementation, **options
  )
  return decision


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
  return [
    j for value in eqn.params.values() for j in program.stored_jaxprs(value)
  ]


def _used(jaxpr: Any, outvars: Sequence[Any]) -> list[Any]:
  """Returns the equations that `outvars` need, and those with effects."""
  used, found = {*map(id, outvars)}, []
  for eqn in reversed(jaxpr.eqns):
    if eqn.effects or any(id(x) in used for x in eqn.outvars):
      used |= {*map(id, eqn.invars)}
      found.append(eqn)
  return found[::-1]


def _has_calls(jaxpr: Any) -> bool:
  """Returns whether a jaxpr has a call of this package, at any depth."""
  primitives = PRIMITIVES.values()
  return any(x.eqn.primitive in primitives for x in program.operations(jaxpr))


def _closed(jaxpr: Any) -> Any:
  is_closed = isinstance(jaxpr, extend_core.ClosedJaxpr)
  return jaxpr if is_closed else extend_core.ClosedJaxpr(jaxpr, ())


class _Body:
  """The body of a loop or a branch, whose taps are further results.

  Operands of taps that depend only on the first arguments of the body are
  computed outside of it. A loop would repeat them for each trip.
  """

  def __init__(
    self, evaluation: Evaluation, jaxpr: Any, consts: Sequence[Any] = ()
  ):
    self._taps: list[Tap] = []

    def function(*args: Any) -> list[Any]:
      results, taps = evaluation.run(jaxpr, args)
      self._taps[:] = [tap.typed() for tap in taps]
      return [*results, *(x for tap in taps for x in tap.operands)]

    closed = binding_private.traced(function, jaxpr.in_avals)
    self._function = extend_core.jaxpr_as_fun(closed)
    self._num_results = num = len(jaxpr.out_avals)
    operands = closed.jaxpr.outvars[num:]
    fixed = _computed(closed, consts, operands)
    self._fixed = [fixed.get(id(x)) for x in operands]
    self.types = [
      aval
      for aval, x in zip(closed.out_avals[num:], self._fixed, strict=True)
      if x is None
    ]

  def __call__(self, *args: Any) -> tuple[list[Any], list[Any]]:
    """Returns the results, and the operands that are computed inside."""
    out = self._function(*args)
    results, operands = out[: self._num_results], out[self._num_results :]
    varying = zip(operands, self._fixed, strict=True)
    return results, [x for x, fixed in varying if fixed is None]

  def taps(self, inside: Sequence[Any], dims: int = 0) -> list[Tap]:
    """Returns the taps, given the operands of `__call__` after the loop.

    Args:
      inside: the operands.
      dims: number of dimensions that the loop has added to them.
    """
    rest, fixed = iter(inside), iter(self._fixed)
    found = []
    for tap in self._taps:
      outside = [next(fixed) for _ in tap.operands]
      operands = [next(rest) if x is None else x for x in outside]
      found.append(
        tap.outside(operands, [dims if x is None else 0 for x in outside])
      )
    return found


def _computed(
  closed: Any, args: Sequence[Any], outvars: Sequence[Any]
) -> dict[int, Any]:
  """Returns the `outvars` that only the first arguments decide, by `id`."""
  jaxpr = closed.jaxpr
  values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
  values |= zip(jaxpr.invars, args, strict=False)
  for eqn in _used(jaxpr, outvars):
    variables = [x for x in eqn.invars if isinstance(x, extend_core.Var)]
    if variables and all(x in values for x in variables):
      given = [
        values[x] if isinstance(x, extend_core.Var) else x.val
        for x in eqn.invars
      ]
      results = binding_private.bind(eqn, given, eqn.params)
      values.update(zip(eqn.outvars, results, strict=True))
  variables = [x for x in outvars if isinstance(x, extend_core.Var)]
  return {id(x): values[x] for x in variables if x in values}


_Results = tuple[Sequence[Any], list[Tap]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
  """Evaluates a program once more.

  Attributes:
    constants: values in place of the program's `constants`, by their `id`.
    is_reference: whether XLA's operations compute it, on one device if the
      program does not name devices. Otherwise it is the program as written,
      without taps.
    target: the device whose kernels are tapped.
    is_inside: whether it evaluates the operations of a kernel, which no other
      kernel replaces.
  """

  constants: Mapping[int, Any]
  is_reference: bool
  target: targets.Target | None = None
  is_inside: bool = False

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

    for eqn in _used(inner, inner.outvars):
      results, more = self._equation(eqn, [read(x) for x in eqn.invars])
      values.update(zip(eqn.outvars, results, strict=True))
      taps += more
    return [read(x) for x in inner.outvars], taps

  def _value(self, constant: Any) -> Any:
    return self.constants.get(id(constant), constant)

  def _equation(self, eqn: Any, args: list[Any]) -> _Results:
    name, params = eqn.primitive.name, eqn.params
    if PRIMITIVES.get(name) is eqn.primitive and self.is_reference:
      results = binding_private.bind(eqn, args, _by_xla(params))
      form = params.get("call", params.get("problem"))
      return results, [_tap(eqn, name, form, args)]
    if self.is_reference and name in _DROPPED:
      return args[: len(eqn.outvars)], []
    if name == _FORMS and self.is_reference:
      return self._forms(eqn, args)
    if name in _CALLS:
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
      "custom_linear_solve": self._linear_solve,
    }
    if name in control:
      return control[name](eqn, args)
    if self.is_reference and any(map(_has_calls, program.sub_jaxprs(eqn))):
      raise NotImplementedError(
        f"save: fn must have no block-scaled call inside {name}, which save"
        " does not evaluate, got one. Save the function that is called there"
      )
    return binding_private.bind(eqn, args, params), []

  def _forms(self, eqn: Any, args: list[Any]) -> _Results:
    """Returns the taps of the kernel, and those of the operations."""
    inside = dataclasses.replace(self, is_inside=True)
    (inner,) = _jaxprs(eqn)
    results, taps = inside.run(inner, args)
    if self.is_inside:
      return results, taps
    # The equation of a kernel has no source line; those of its operations do.
    kernels = [
      dataclasses.replace(tap, eqn=taps[0].eqn if taps else eqn)
      for tap in self._kernels(eqn, args)
    ]
    return results, [*kernels, *taps]

  def _kernels(self, eqn: Any, args: list[Any]) -> list[Tap]:
    """Returns the taps of the kernels that replace an equation on `target`."""
    forms = eqn.params["forms"]
    if isinstance(forms, quantized_results.QuantizedResult):
      return []  # the taps are the matmul and the quantization
    target = targets.resolved(eqn.params["target"], self.target)
    module = lowering.Module(platforms=(target.platform,))
    avals = [jax.typeof(x) for x in args]
    kernel = alternatives.kernel_of(eqn, module, target, avals)
    if kernel is None:
      return []
    fused = forms.fused(*args)
    if fused is None:
      flat = lambda *x: jax.tree.leaves(kernel(*x))
      closed = binding_private.traced(flat, avals)
      _, taps = self.run(closed, args)
      fusing = lambda tap: isinstance(tap.form, alternatives.FusedCall)
      taps = [*filter(fusing, taps)] or taps
      return [dataclasses.replace(tap, is_layer=True) for tap in taps]
    form, operands = fused
    return [_tap(eqn, form.operation, form, operands)]

  def _scan(self, eqn: Any, args: list[Any]) -> _Results:
    params = eqn.params
    num_consts, num_carry = binding_private.scan_sizes(params)
    consts, carry = args[:num_consts], args[num_consts:][:num_carry]
    body = _Body(self, params["jaxpr"], consts)

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
    return [*carry, *ys], body.taps(operands, 1)

  def _while(self, eqn: Any, args: list[Any]) -> _Results:
    """Returns the taps of the last trip and of the last condition.

    Those of the body are zeros without trips.
    """
    params = eqn.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, rest = args[:num_cond], args[num_cond:]
    consts, carry = rest[:num_body], rest[num_body:]
    body = _Body(self, params["body_jaxpr"], consts)

    def goes_on(state: Any) -> Any:
      return self.run(params["cond_jaxpr"], [*cond_consts, *state[0]])[0][0]

    results, operands = lax.while_loop(
      goes_on,
      lambda state: body(*consts, *state[0]),
      (carry, _zeros(body.types)),
    )
    _, taps = self.run(params["cond_jaxpr"], [*cond_consts, *results])
    return results, [*body.taps(operands), *taps]

  def _linear_solve(self, eqn: Any, args: list[Any]) -> _Results:
    """Returns the results and taps of the solver, the only part that runs."""
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    right = sum(lengths)
    given = [*args[first : first + lengths.solve], *args[right:]]
    return self.run(eqn.params["jaxprs"].solve, given)

  def _cond(self, eqn: Any, args: list[Any]) -> _Results:
    """Returns the taps of all branches; zeros of those that do not run."""
    index, *args = args
    bodies = [_Body(self, jaxpr) for jaxpr in eqn.params["branches"]]

    def branch(i: int) -> Callable[..., Any]:
      def run(*args: Any) -> Any:
        taps = [_zeros(body.types) for body in bodies]
        results, taps[i] = bodies[i](*args)
        return results, taps

      return run

    branches = list(map(branch, range(len(bodies))))
    results, each = lax.switch(index, branches, *args)
    taps = [body.taps(x) for body, x in zip(bodies, each, strict=True)]
    return results, [tap for some in taps for tap in some]

  def _shard_map(self, eqn: Any, args: list[Any]) -> _Results:
    params = eqn.params
    axes = tuple(params["newly_manual_axes"])
    taps: list[Tap] = []

    def shard(*args: Any) -> Any:
      results, inside = self.run(params["jaxpr"], args)
      taps[:] = [tap.typed() for tap in inside]
      return results, [[x[None] for x in tap.operands] for tap in inside]

    results, each = jax.shard_map(
      shard,
      mesh=params["mesh"],
      in_specs=tuple(params["in_specs"]),
      out_specs=(list(params["out_specs"]), PartitionSpec(axes)),
      axis_names=set(axes),
      check_vma=params["check_vma"],
    )(*args)
    return results, [
      tap.outside(x, (1,) * len(x)) for tap, x in zip(taps, each, strict=True)
    ]


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


def _zeros(types: Sequence[Any]) -> list[Any]:
  return [jnp.zeros(x.shape, x.dtype) for x in types]


def is_for_a_mesh(jaxpr: Any) -> bool:
  """Returns whether a program itself names devices: it must keep its mesh.

  This is a `shard_map`, or a mesh with explicit axes. Other shardings change
  only where the program runs.
  """
  for eqn in jaxpr.eqns:
    avals = [x.aval for x in eqn.outvars]
    if eqn.primitive.name == "shard_map" or mesh_axes.mesh_of(avals):
      return True
    if any(map(is_for_a_mesh, program.sub_jaxprs(eqn))):
      return True
  return False
