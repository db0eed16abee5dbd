# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Replaces matmuls of a function while it is traced, at any depth."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from jax.extend import core as extend_core

from jaxplugin.core import error_context
from jaxplugin.jaxext import jax_private, program
from jaxplugin.jaxext.tracing import binding_private, interception_private
from jaxplugin.quantization import prologues
from jaxplugin.rewriting import calls, operands, patterns, sources
from jaxplugin.rewriting import sites as sites_lib
from jaxplugin.training import activation_gradients, products, quantized_operand

# JAX gives the operations of a derivative these names.
_DERIVATIVES: Final = frozenset({"jvp", "transpose"})
_WHO: Final = sites_lib.WHO
# Operations that do not move elements.
_IN_ORDER: Final = frozenset(
  {"reshape", "convert_element_type", "copy", "name"}
)
# Prefix of this package's operations with functions inside.
_OWN: Final = "jaxplugin_"
_NO_KEY: Final = (
  "it is inside a custom_jvp or custom_vjp function, which the key does not"
  " reach"
)
_IN_RULE: Final = (
  "it is in the rule of a custom derivative, where no operand counts as a"
  " parameter"
)
_IN_FORWARD: Final = (
  "the fwd of its custom_vjp function differentiates it, inside a function that"
  f" JAX traces (jit, scan, ...): call {_WHO} inside of fwd, or on the function"
  " without custom_vjp"
)
_EITHER: Final = (
  "both operands are arguments of a jitted function that differentiates, so"
  f" either may be the parameter: call {_WHO} inside of jax.jit instead, or"
  " pass where="
)
_BY_RULE: Final = (
  "it is inside a custom_jvp function, and a gradient runs the function's rule"
  " instead"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rewritten(calls.Inside):
  """A function inside an operation, with its matmuls decided about.

  Attributes:
    sites: all matmuls, in order.
    outcomes: what became of each `operands.Fact` that it got.
  """

  sites: tuple[sites_lib.DecidedSite, ...]
  outcomes: tuple[tuple[bool, str], ...]


# Larger than all numbers of sites.
_INNER: Final = 1 << 31
# How many numbers of keys are reserved for a function that JAX traces later.
_MOST_INSIDE: Final = 1 << 16

# Stands for the base key inside a traced function that differentiates. The call
# of the function replaces it. `count` numbers of keys are in use by then.
base_key_p: Final = extend_core.Primitive("quantize_dots_key")
base_key_p.def_abstract_eval(lambda *, count, aval: aval)
# Operations to decide about, and operations whose rules may contain some.
_DECIDED: Final = sites_lib.PRODUCTS | calls.CUSTOM_RULES | {base_key_p.name}


class _MatmulResult(NamedTuple):
  """The result of a matmul, also moved or after an addition.

  Attributes:
    x: the value, which may be differentiated.
    backward: returns how the matmul quantizes the gradient of x, or None. Only
      activations and norms need it.
    number: that of the matmul in its function.
  """

  x: Any
  backward: Callable[[], activation_gradients.Backward | None]
  number: int


@dataclasses.dataclass(eq=False)
class Dots(calls.Walker):
  """Decides about the operations of one function that is being traced.

  Attributes:
    transform: arguments of `quantize_dots`.
    around: of the function.
    key: returns the base key, given how many numbers are in use; or None.
    number: the first number that is not in use.
    parent: returns the `Dots` of the function around it, which counts the same
      numbers, or None. A weak reference, because JAX keeps rules longer than a
      trace.
    known: the `QuantizedOperand`s of the function.
    sites: matmuls that were decided about.
    note: see `sites.DecidedSite`, for all matmuls.
    is_rule: whether the function is a rule of a custom derivative.
    results: results of matmuls, and sums with them; only recorded to fuse
      activations.
    rows: vectors that operations add, multiply or move; only recorded for the
      same.
    norms: results of norms, to be read as `attached_norm` returns them.
    streams: for the x of a norm, the value that later additions read.
    of_rules: results of functions with a custom derivative.
    outside: arguments that norms and activations outside compute.
    is_changed: whether a matmul was replaced.
  """

  transform: sites_lib.Transform
  _: dataclasses.KW_ONLY
  around: sites_lib.Surroundings = dataclasses.field(
    default_factory=sites_lib.Surroundings
  )
  key: Callable[[int], Any] | None = None
  number: int = 0
  parent: Callable[[], Dots | None] = lambda: None
  known: operands.Operands = dataclasses.field(
    default_factory=operands.Operands
  )
  sites: list[sites_lib.DecidedSite] = dataclasses.field(default_factory=list)
  note: str = ""
  is_rule: bool = False
  results: sources.TracedValues[_MatmulResult] = dataclasses.field(
    default_factory=sources.TracedValues
  )
  rows: sources.TracedValues[Any] = dataclasses.field(
    default_factory=sources.TracedValues
  )
  norms: sources.TracedValues[Any] = dataclasses.field(
    default_factory=sources.TracedValues
  )
  streams: sources.TracedValues[Any] = dataclasses.field(
    default_factory=sources.TracedValues
  )
  of_rules: sources.TracedValues[None] = dataclasses.field(
    default_factory=sources.TracedValues
  )
  outside: patterns.Outside = dataclasses.field(
    default_factory=patterns.Outside
  )
  is_changed: bool = False

  def replaced(
    self,
    operation: binding_private.BoundOperation,
    origins: Sequence[sources.Origin | None],
  ) -> Any:
    """Returns the results to use instead of an operation's; None to keep those.

    Args:
      operation: a matmul, or an operation with jaxprs inside.
      origins: the origin of each argument, or None.
    """
    if operation.name in sites_lib.PRODUCTS:
      return self._product(operation, origins)
    if calls.is_inlined(operation):
      return self._evaluated(operation, origins)
    call = self._call(operation, origins)
    return None if call is None else call.results(operation.primitive)

  def _product(
    self,
    operation: binding_private.BoundOperation,
    origins: Sequence[sources.Origin | None],
  ) -> Any:
    args, params = operation.args, operation.params
    result, origins = operation.result_type(), sources.without_gathered(origins)
    site = sites_lib.make(operation, result, origins, self.around)
    origin = sites_lib.input_of(origins)
    recipe, implementation = None, self.transform.implementation
    reason = sites_lib.impossible(site, operation, result, implementation)
    if not reason:
      unclear = _IN_RULE if self.is_rule else ""
      if all(o is not None and o.is_guess for o in origins[:2]):
        unclear = _EITHER
      recipe, reason = self.transform.decide(site, origin, unclear)
    is_random = recipe is not None and recipe.stochastic_rounding
    if is_random and self.key is None and self.transform.key_type is not None:
      recipe, reason = None, _NO_KEY
    decided = dataclasses.replace(site, recipe=recipe, reason=reason)
    self.known.note(args, reason)
    given, chain = self._fused(operation, decided)
    self.sites.append(
      sites_lib.DecidedSite(
        site=decided, origin=origin, chain=chain, note=self.note
      )
    )
    scope = sites_lib.scope_of(site)
    if recipe is None:
      if scope is None:
        return None
      with scope:
        return operation.bind()
    self.note_change()
    keywords = {}
    if site.operation == sites_lib.DOT:
      keywords["precision"] = params["precision"]
    if is_random and self.key is not None:
      base = self.key(self.number + 1)
      keywords["key"] = products.fold_in(base, self.number)
    self.use(1)
    with scope or contextlib.nullcontext(), error_context.in_function(_WHO):
      out = self.transform.product(decided)(
        *given,
        params[sites_lib.NUMBERS[site.operation]],
        preferred_element_type=result.dtype,
        out_sharding=params["out_sharding"],
        **keywords,
      )
      if self.transform.fuse_activations:
        backward = sites_lib.backward_of(decided, operation)
        self.results.put(out, _MatmulResult(out, backward, len(self.sites)))
    return out

  def leave_in_forward(self, operation: binding_private.BoundOperation) -> None:
    """Warns that a matmul stays, which the `fwd` of a function differentiates.

    It was not seen before JAX differentiated it.
    """
    result = operation.result_type()
    site = sites_lib.make(operation, result, (None, None), self.around)
    left = dataclasses.replace(site, reason=_IN_FORWARD)
    sites_lib.record([sites_lib.DecidedSite(site=left)])
    warnings.warn(
      sites_lib.left_text("left 1 matmul", [left]),
      error_context.NotQuantizedWarning,
      stacklevel=2,
    )

  def follow(
    self, operation: binding_private.BoundOperation, results: Sequence[Any]
  ) -> None:
    """Records what an operation that moves elements, or adds some, returns."""
    self.known.follow(operation, results)
    if not self.transform.fuse_activations:
      return
    args = operation.args
    self.note_rows(args)
    found = [r for r in map(self.results.get, args) if r is not None]
    if found:
      # A residual may be the result of a matmul before.
      last = max(found, key=lambda result: result.number)
      if operation.name in sources.LAYOUTS - _IN_ORDER:  # elements are moved
        last = last._replace(backward=lambda: None)
      for x in results:
        self.results.put(x, last._replace(x=x))

  def note_rows(self, args: Sequence[Any]) -> None:
    """Records vectors among the operands of an operation."""
    if self.transform.fuse_activations:
      for x in args:
        if np.ndim(x) and np.size(x) == np.shape(x)[-1]:
          self.rows.put(x, x)

  def with_streams(
    self, operation: binding_private.BoundOperation
  ) -> binding_private.BoundOperation:
    """Returns an addition whose gradient goes to the norms of its operands."""
    if operation.function_name != "add":
      return operation
    found = [_in_trace_of(x, self.streams) for x in operation.args]
    args = [
      x if stream is None else stream
      for x, stream in zip(operation.args, found, strict=True)
    ]
    return dataclasses.replace(operation, args=args)

  def note_rule(self, results: Sequence[Any]) -> None:
    """Records the results of a function with a custom derivative.

    Such a function may return its argument, whose identity is the same.
    """
    for x in results:
      self.of_rules.put(x, None)

  def _attached(self, y: Any, found: patterns.FoundPrologue) -> Any:
    """Returns an activation whose backward pass other matmuls recognize.

    A found call has values below all transformations. They are replaced by
    results of matmuls, or sums with their biases, which may be differentiated.
    If another operation computes an operand, or if the model's code has a
    custom derivative, y keeps the derivative of the code.
    """
    call = found.call
    assert call is not None
    if found.has_custom_derivative or not found.seen.isdisjoint(
      self.of_rules.ids()
    ):
      return y
    if call.prologue.is_norm:
      return self._attached_norm(y, call)
    is_above = binding_private.staged(y) is not y
    given, results, bias = self._operands_of(call)
    if is_above and bias is not None:
      rows = [self.rows.get(row) for row in found.rows]
      are_fused = all(r is not None and r.backward() for r in results.values())
      if rows and are_fused and all(row is not None for row in rows):
        bias = patterns.joined(rows)
      elif found.of_sums is not None:
        call = found.of_sums
        given, results, bias = self._operands_of(call)
      else:
        return y
    if is_above:
      if any(result is None for result in results.values()):
        return y
      given = {name: result.x for name, result in results.items() if result}
    if bias is not None:
      given["bias"] = bias
    x = given.pop("x")
    live = dataclasses.replace(call, x=x, more=given)
    live = live.with_rows(lambda a: binding_private.mapped_inside(y, a))
    matmuls = {name: r.backward() for name, r in results.items() if r}
    return activation_gradients.attached(y, live, matmuls)

  def _attached_norm(self, y: Any, call: prologues.PrologueCall) -> Any:
    """Returns a norm whose gradient, with the residual's, a matmul quantizes.

    Its x is the result of that matmul, or a sum with it.
    """
    if (known := _in_trace_of(y, self.norms)) is not None:
      return known
    result = self.results.get(call.x)
    more: dict[str, Any] = dict(call.more)
    if result is None or (backward := result.backward()) is None:
      return y
    if binding_private.staged(y) is not y:
      more = {name: self.rows.get(row) for name, row in more.items()}
    x = result.x
    is_found = all(row is not None for row in more.values())
    if not (is_found and binding_private.are_in_one_trace(x, y)):
      return y
    live = dataclasses.replace(call, x=x, more=more)
    attached, stream = activation_gradients.attached_norm(y, live, backward)
    self.norms.put(y, attached)
    self.streams.put(x, stream)
    return attached

  def _operands_of(
    self, call: prologues.PrologueCall
  ) -> tuple[dict[str, Any], dict[str, _MatmulResult | None], Any]:
    """Returns x and `up` of a call, their matmuls, and the bias or None."""
    given = {"x": call.x, **call.more}
    bias = given.pop("bias", None)
    results = {name: self.results.get(x) for name, x in given.items()}
    return given, results, bias

  def _fused(
    self, operation: binding_private.BoundOperation, site: sites_lib.Site
  ) -> tuple[list[Any], sites_lib.TracedChain | None]:
    """Returns operands of a matmul, with a prologue if it can be fused.

    Args:
      operation: JAX's matmul.
      site: the same, after the decision.
    """
    args = operation.args
    given, reason = self.known.given(args), site.reason
    index = 1 if site.weight == "lhs" else 0
    is_fusing = self.transform.fuse_activations and not reason
    is_wanted = is_fusing or sites_lib.is_recording()
    if (
      not is_wanted
      or site.weight is None
      or quantized_operand.is_operand(given[index])
    ):
      return given, None
    found = patterns.find(args[index]) or self.outside.get(args[index])
    if found is None:
      return given, None
    x, note, in_training = args[index], found.reason, ""
    if reason:
      note = f"the matmul is not quantized: {reason}"
    if not note:
      note, in_training = sites_lib.prologue_refusals(site, operation)
    if not note and not is_fusing:
      note = f"pass fuse_activations=True to {_WHO}"
    is_fused = not note
    if is_fused:
      assert found.call is not None  # there is no reason
      y = x
      if in_training:
        note = f"{sites_lib.NOT_IN_TRAINING}{in_training}"
      else:
        y = self._attached(x, found)
      given[index] = quantized_operand.Produced(y, found.call)
    return given, found.before(site, note, is_fused=is_fused, x=x)

  def _evaluated(
    self,
    operation: binding_private.BoundOperation,
    origins: Sequence[sources.Origin | None],
  ) -> list[Any] | None:
    """Evaluates the function of a `jit` that JAX inlines, such as `jnp.matmul`.

    Its matmuls then see how their operands are computed. Returns None if the
    function has none.
    """
    args, jaxpr = operation.args, operation.params["jaxpr"]
    if jax_private.is_own(jaxpr) or not calls.contains(jaxpr, _DECIDED):
      return None
    rewriter = Rewriter(self, list(zip(args, origins, strict=True)))
    return interception_private.evaluate(jaxpr, args, rewriter)

  def _leave_inside(self, operation: binding_private.BoundOperation) -> None:
    """Records the matmuls inside an operation that `quantize_dots` skips."""
    reason = f"it is inside {operation.name}, which {_WHO} does not enter"
    for jaxpr in program.sub_jaxprs(operation):
      for traced in program.operations(jaxpr):
        eqn = traced.eqn
        if eqn.primitive.name in sites_lib.PRODUCTS:
          source = traced.source or self.around.source
          site = sites_lib.make(
            binding_private.BoundOperation.of_equation(eqn),
            eqn.outvars[0].aval,
            (None, None),
            dataclasses.replace(self.around, source=source),
          )
          left = dataclasses.replace(site, reason=reason)
          flow = program.ControlFlow(
            trips=traced.trips, is_conditional=traced.is_conditional
          )
          self.sites.append(sites_lib.DecidedSite(site=left, flow=flow))

  def _call(
    self,
    operation: binding_private.BoundOperation,
    origins: Sequence[sources.Origin | None],
  ) -> calls.ReplacedCall | None:
    """Returns what to call instead of an operation with jaxprs inside.

    Returns None if the operation can stay as it is.
    """
    name = operation.name
    if name == "jit" and jax_private.is_own(operation.params["jaxpr"]):
      return None
    if not calls.any_contains(operation, _DECIDED):
      return None
    with sites_lib.inside(operation, self.sites):
      parameters = [o if o and o.is_parameter else None for o in origins]
      patterns.record_outside(operation, parameters, self.around)
      if name not in calls.RULES:
        self.known.refuse_inside(operation)
        if not name.startswith(_OWN):
          self._leave_inside(operation)
        return None
      facts = self.known.facts(operation.args, origins)
      return calls.RULES[name](self, operation, facts)

  # As a `calls.Walker`.

  def layers(
    self, fact: operands.Fact, length: int
  ) -> tuple[operands.Fact, tuple[bool, ...]]:
    return fact.layers(length)

  def leave(self, name: str, x: Any, fact: operands.Fact, reason: str) -> None:
    fact.note(False, reason)

  def trace_inside(
    self,
    jaxpr: Any,
    passed: Sequence[calls.Passed],
    *,
    in_loop: int | None = None,
    returns_trip: bool = False,
    number: int | None = None,
  ) -> calls.Inside:
    # JAX defines the body of lax.map, whose operations have lines of the code.
    around = self.around if in_loop is not None else self.around.at_call(jaxpr)
    extra = calls.Extra(
      passed=tuple(p.types() for p in passed),
      key=None if self.key is None else self.transform.key_type,
      in_loop=in_loop,
    )
    rewritten = _rewritten(
      jaxpr,
      self.transform,
      around.inside(sites_lib.scope_names()),
      self.number if number is None else number,
      extra,
      returns_trip and self.key is not None,
    )
    given = [p.fact for p in passed if p.fact.structure is not None]
    for fact, outcome in zip(given, rewritten.outcomes, strict=True):
      fact.note(*outcome)
    self.sites += [
      dataclasses.replace(site, note=self.note or site.note)
      for site in rewritten.sites
    ]
    if rewritten.is_changed:
      self.note_change()
    return rewritten

  def take_keys(self, count: int) -> list[Any]:
    base = [] if self.key is None else [self.key(self.number + count)]
    self.use(count)
    return base

  def use(self, count: int) -> None:
    """Counts numbers of keys, also in the functions around this one."""
    dots: Dots | None = self
    number = self.number + count
    while dots is not None:
      dots.number = max(dots.number, number)
      dots = dots.parent()

  def for_functions(self, name: str) -> Dots:
    """Returns a copy for the functions that an operation calls.

    The copy's base key is a value of the current trace. Rules of custom
    derivatives get no key: JAX keeps them longer than the values of a trace.
    """
    if self.key is None:
      return self
    new = copy.copy(self)
    new.parent = weakref.ref(self)
    new.key = None
    if name not in calls.CUSTOM_RULES:
      base = self.key(self.number + _MOST_INSIDE)
      new.key = lambda count: base
    return new

  def nested(
    self,
    scopes: list[str],
    operation: binding_private.BoundOperation,
    index: int,
  ) -> Dots:
    """Returns a `Dots` for a function that an operation in scopes calls.

    Args:
      scopes: names of the scopes.
      operation, index: the operation, and which of its functions.
    """
    return Dots(
      self.transform,
      around=self.around.unless_open(scopes),
      key=None if operation.name in calls.CUSTOM_RULES else self.key,
      number=self.number,
      parent=weakref.ref(self),
      note=_BY_RULE if calls.is_replaced(operation, index) else self.note,
      is_rule=self.is_rule or calls.is_rule_of_tangents(operation, index),
    )

  def inner(self) -> Dots:
    """Returns a `Dots` for a function that differentiates, with keys from 0."""
    key = None
    if self.key is not None:
      key = lambda count: base_key_p.bind(
        count=count, aval=self.transform.key_type
      )
    return Dots(self.transform, key=key, known=self.known, note=self.note)

  def note_change(self) -> None:
    self.is_changed = True
    parent = self.parent()
    if parent is not None:
      parent.note_change()


def _in_trace_of(x: Any, values: sources.TracedValues[Any]) -> Any:
  """Returns the value that replaces x in its trace, or None."""
  value = values.get(x)
  return value if binding_private.are_in_one_trace(x, value) else None


@jax_private.cache_by_jaxpr
def _rewritten(
  jaxpr: Any,
  transform: sites_lib.Transform,
  around: sites_lib.Surroundings,
  number: int,
  extra: calls.Extra,
  returns_trip: bool,
) -> _Rewritten:
  found: list[Dots] = []
  rewritten: dict[str, Any] = {}

  def start(
    facts: list[tuple[int, Any]], own: list[Any], base: Any, trip: Any
  ) -> Rewriter:
    if trip is not None:
      base = products.fold_in(base, trip)
    key = None if base is None else (lambda count: base)
    dots = Dots(transform, around=around, key=key, number=number)
    dots.known.enter(facts, own)
    found.append(dots)
    origins = [(own[i], fact.origin) for i, fact in facts]
    return Rewriter(dots, origins)

  def finish(values: Sequence[Any]) -> list[Any]:
    # JAX caches the jaxpr, which must not keep values of a trace alive.
    dots = found.pop()
    dots.key = None
    rewritten.update(
      is_changed=dots.is_changed,
      sites=tuple(dots.sites),
      count=dots.number - number,
      outcomes=dots.known.outcomes(),
    )
    # The number of the trip comes last, because a `while` has no slices.
    return [values[-1] + np.uint32(1)] if returns_trip else []

  new, consts = extra.trace(jaxpr, start, finish)
  return _Rewritten(jaxpr=new, consts=consts, **rewritten)


class Rewriter(interception_private.Interceptor):
  """Decides about the equations of a jaxpr."""

  def __init__(
    self,
    dots: Dots,
    origins: Sequence[tuple[Any, sources.Origin | None]],
    *,
    is_forward: bool = False,
  ):
    """Args:
    dots: decides about matmuls.
    origins: arguments of the jaxpr, each with its origin or None.
    is_forward: whether it is the `fwd` of a function with a custom derivative.
    """
    self._dots = dots
    self._is_forward = is_forward
    self._depth = len(jax_private.scopes())
    # The number of the first key of functions that differentiate.
    self._first: int | None = None
    self._origins = sources.Origins()
    for x, origin in origins:
      self._origins.add(x, origin)

  def replace(self, operation: binding_private.BoundOperation) -> Any:
    if operation.primitive is base_key_p:
      return self._base_key(operation.params)
    if self._is_left(operation):
      if self._is_forward and operation.name in sites_lib.PRODUCTS:
        self._dots.leave_in_forward(operation)
      return None
    patterns.record_own(operation)
    origins = self._origins.of_all(operation.args)
    out = self._dots.replaced(operation, origins)
    if out is not None:
      self._origins.note(operation, operation.results_of(out))
    return out

  def _base_key(self, params: dict[str, Any]) -> Any:
    """Returns the base key of a function that numbered its keys from 0."""
    dots = self._dots
    if dots.key is None:
      return None
    dots.note_change()
    if self._first is None:
      self._first = dots.number
    dots.use(max(0, self._first + params["count"] - dots.number))
    base = dots.key(dots.number)
    if self._first == 0:
      return base
    return products.fold_in(base, _INNER + self._first)

  def _is_left(self, operation: binding_private.BoundOperation) -> bool:
    """Whether an operation was decided about before, or is inside a kernel."""
    if operation.name in program.KERNELS:
      return True
    names = jax_private.scopes()[self._depth :]
    return any(
      name.is_transform and name.text in _DERIVATIVES for name in names
    )

  def rewrite(
    self, operation: binding_private.BoundOperation
  ) -> binding_private.BoundOperation:
    return self._dots.with_streams(operation)

  def note(
    self, operation: binding_private.BoundOperation, results: Sequence[Any]
  ) -> None:
    self._origins.note(operation, results)
    self._dots.follow(operation, results)

  def inside(
    self, operation: binding_private.BoundOperation, index: int
  ) -> interception_private.MakeInterceptor:
    self._dots.known.refuse_inside(operation)
    is_rule = calls.is_rule_of_tangents(operation, index)
    args = [] if is_rule else operation.args
    origins = self._origins.of_all(args)
    outside = patterns.find_outside(operation.name, args)
    outer, scopes = self._dots, sites_lib.scope_names()
    if operation.name in calls.CUSTOM_RULES:
      outer.note_change()  # its rules may contain matmuls
    operation = operation.of_types()

    def make(args: Sequence[Any]) -> Rewriter:
      dots = outer.nested(scopes, operation, index)
      dots.sites = outer.sites
      own = calls.own_args(operation, index, args)
      dots.outside.put_all(own, outside)
      return Rewriter(
        dots,
        list(zip(own, origins, strict=False)),
        is_forward=calls.is_forward_rule(operation, index),
      )

    return make

  def note_own(self, function: Any, args: Sequence[Any]) -> None:
    patterns.record_own_function(function, args)
