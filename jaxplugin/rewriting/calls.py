# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations with functions inside, which use what a walker knows of values.

A `Walker` knows facts about some values, such as which quantized weight a value
is. A fact is a tree, whose leaves are arrays. `RULES` change an operation such
that its functions take these arrays as further arguments. The functions are
traced again, by a walker that has the same facts about their arguments.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.core import formats
from jaxplugin.jaxext import jax_private, program
from jaxplugin.jaxext.tracing import binding_private, interception_private
from jaxplugin.training import products

_TRIP: Final = jax.core.ShapedArray((), np.dtype(np.uint32))
_CARRIED: Final = (
  "it is part of the carry of a loop, which changes in each iteration"
)
_CUSTOM_VMAP: Final = "custom_vmap_call"
_NOT_LAYERS: Final = "a scan iterates over it, and it is not a stack of layers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passed:
  """A fact about an argument of a function inside an operation.

  Attributes:
    argument: index of the argument.
    fact: what is known of it; None in an `Extra`.
    structure: of the fact as a tree.
    leaves: its arrays; in an `Extra` their types.
    each_trip: for each array, whether a trip of a `scan` gets a slice of it.
    is_dropped: whether the function does not take the argument, because the
      walker makes it from the fact.
  """

  argument: int
  fact: Any
  structure: Any
  leaves: tuple[Any, ...]
  each_trip: tuple[bool, ...]
  is_dropped: bool

  def types(self) -> Passed:
    """Returns this without arrays: a key of caches."""
    types = [
      binding_private.slice_type(jax.typeof(x)) if flag else jax.typeof(x)
      for x, flag in zip(self.leaves, self.each_trip, strict=True)
    ]
    return dataclasses.replace(self, fact=None, leaves=tuple(types))


def _leaves(passed: Sequence[Passed], *, each_trip: bool = False) -> list[Any]:
  return [
    x
    for p in passed
    for x, flag in zip(p.leaves, p.each_trip, strict=True)
    if flag == each_trip
  ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extra:
  """Arguments that a function inside an operation takes besides its own ones.

  The base key and arrays come first. In a loop, the number of the trip (if
  there is a key) and arrays that differ from trip to trip come before the
  argument `in_loop`.

  Attributes:
    key: type of the base key; None if there is no key.
    passed: the facts about its arguments.
    in_loop: see above; None outside of loops.
  """

  key: Any = None
  passed: tuple[Passed, ...]
  in_loop: int | None = None

  def trace(
    self,
    jaxpr: Any,
    start: Callable[..., interception_private.Interceptor],
    finish: Callable[[Sequence[Any]], Sequence[Any]] = lambda extra: (),
  ) -> tuple[Any, list[Any]]:
    """Traces a jaxpr again, see `interception_private.intercept_jaxpr`.

    Args:
      jaxpr: the function.
      start: returns the interceptor. Its arguments are a list of facts with
        the index of the argument, the arguments of `jaxpr`, the base key and
        the number of the trip. It must replace arguments that are None.
      finish: called with the further arguments. Returns results to return
        before those of `jaxpr`.
    """
    fixed, slices = (_leaves(self.passed, each_trip=f) for f in (False, True))
    first = [] if self.key is None else [self.key]
    trip = [_TRIP] if first and self.in_loop is not None else []

    def split(
      extra: Sequence[Any], own: list[Any]
    ) -> interception_private.Interceptor:
      rest = iter(extra)
      base, arrays, number, sliced = (
        [next(rest) for _ in part] for part in (first, fixed, trip, slices)
      )
      left = {False: iter(arrays), True: iter(sliced)}
      facts = []
      for p in self.passed:
        leaves = [next(left[flag]) for flag in p.each_trip]
        facts.append((p.argument, jax.tree.unflatten(p.structure, leaves)))
      return start(
        facts, own, base[0] if base else None, number[0] if number else None
      )

    return interception_private.intercept_jaxpr(
      jaxpr,
      split,
      [
        *((0, type) for type in (*first, *fixed)),
        *((self.in_loop or 0, type) for type in (*trip, *slices)),
      ],
      frozenset(p.argument for p in self.passed if p.is_dropped),
      finish,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inside:
  """A function inside an operation, traced again.

  Attributes:
    jaxpr: the new one.
    consts: arrays that it takes before all other arguments.
    is_changed: whether the operation must use it.
    count: how many numbers of keys it uses.
  """

  jaxpr: Any
  consts: list[Any]
  is_changed: bool = True
  count: int = 0


class Walker:
  """Knows facts about values, and replaces operations on them.

  The defaults are those of a walker without keys.

  Attributes:
    is_rebuilding: whether functions inside an operation do not take arguments
      that are known, see `Passed.is_dropped`.
    key: makes the base key, see `dots.Dots`; None if there is none.
    number: the first number of a key that is not in use.
  """

  is_rebuilding: bool = False
  key: Any = None
  number: int = 0

  def layers(
    self, fact: Any, length: int
  ) -> tuple[Any, tuple[bool, ...]] | None:
    """Returns the fact about the slices of an array that a `scan` takes.

    The second result says for each leaf of the fact whether a trip gets a
    slice of the leaf. Returns None if nothing is known about the slices.
    """
    raise NotImplementedError

  def leave(self, name: str, x: Any, fact: Any, reason: str) -> None:
    """Notes that functions of an operation of a name do not know a fact."""

  def trace_inside(
    self,
    jaxpr: Any,
    passed: Sequence[Passed],
    *,
    in_loop: int | None = None,
    returns_trip: bool = False,
    number: int | None = None,
  ) -> Inside:
    """Traces a function of an operation again.

    Args:
      jaxpr: the function.
      passed: facts about its arguments.
      in_loop: see `Extra`.
      returns_trip: whether it returns the next trip's number, if it takes one,
        before all else.
      number: the first number of its keys, by default the next one.
    """
    extra = Extra(passed=tuple(p.types() for p in passed), in_loop=in_loop)
    new, consts = extra.trace(
      jaxpr, lambda known, args, *_: self.interceptor_of(jaxpr, known, args)
    )
    return Inside(jaxpr=new, consts=consts)

  def interceptor_of(
    self, jaxpr: Any, known: list[tuple[int, Any]], args: list[Any]
  ) -> interception_private.Interceptor:
    """Returns the interceptor of a function of an operation.

    Args:
      jaxpr: the function.
      known: facts about arguments, each with the index of its argument.
      args: the arguments. Those that are None must be replaced.
    """
    raise NotImplementedError

  def take_keys(self, count: int) -> list[Any]:
    """Returns the base key in a list, or an empty list if there is no key.

    The next `count` numbers of keys are in use from then on.
    """
    return []


@dataclasses.dataclass(frozen=True)
class ReplacedCall:
  """A call that replaces an operation with functions inside.

  Attributes:
    args, params: new arguments and parameters of its primitive.
    first: how many results the call returns before those of the operation.
  """

  args: list[Any]
  params: dict[str, Any]
  first: int = 0

  def results(self, primitive: Any) -> Any:
    """Returns the results of the operation."""
    return primitive.bind(*self.args, **self.params)[self.first :]


def results(
  walker: Any, operation: binding_private.BoundOperation, facts: Sequence[Any]
) -> Any:
  """Returns the results of an operation that is traced below transformations.

  The walker is also an interceptor. `facts` has the fact about each argument,
  or None. Returns None if the operation cannot be followed.
  """
  args, params = operation.args, operation.params
  if operation.name == _CUSTOM_VMAP:
    # A `vmap` then maps what the function computes, without the custom rule.
    return interception_private.evaluate(params["call"], args, walker)
  if is_inlined(operation):
    return interception_private.evaluate(params["jaxpr"], args, walker)
  if operation.name not in RULES:
    return None
  call = RULES[operation.name](walker, operation, facts)
  return None if call is None else call.results(operation.primitive)


def is_inlined(operation: binding_private.BoundOperation) -> bool:
  """Whether JAX evaluates an operation's function in place of the operation."""
  if operation.name != "jit" or binding_private.is_placed(operation):
    return False
  inline = operation.params["inline"]  # a bool, or from jax 0.12 on an enum
  return getattr(inline, "value", inline) in (True, "jax_early", "jax_late")


def _passed(
  walker: Walker, facts: Sequence[Any], *, first: int = 0
) -> list[Passed]:
  """Returns facts about the arguments of a function, from `first` on."""
  return [
    _pass(walker, first + i, fact, (False,) * len(jax.tree.leaves(fact)))
    for i, fact in enumerate(facts)
    if fact is not None
  ]


def _pass(
  walker: Walker, argument: int, fact: Any, each_trip: tuple[bool, ...]
) -> Passed:
  leaves, structure = jax.tree.flatten(fact)
  return Passed(
    argument=argument,
    fact=fact,
    structure=structure,
    leaves=tuple(leaves),
    each_trip=each_trip,
    is_dropped=walker.is_rebuilding,
  )


def _sliced(
  walker: Walker,
  args: Sequence[Any],
  facts: Sequence[Any],
  first: int,
  length: int,
) -> list[Passed]:
  """Returns facts about the slices that a trip of a `scan` takes."""
  result = []
  for i, (x, fact) in enumerate(zip(args, facts, strict=True)):
    found = None if fact is None else walker.layers(fact, length)
    if found is not None:
      result.append(_pass(walker, first + i, *found))
    elif fact is not None:
      walker.leave("scan", x, fact, _NOT_LAYERS)
  return result


def _unchanged(
  walker: Walker,
  name: str,
  body: Any,
  num_consts: int,
  args: Sequence[Any],
  facts: Sequence[Any],
) -> list[Passed]:
  """Returns facts about values of a loop's carry that no trip changes.

  Args:
    walker, name: the walker, and the name of the loop's primitive.
    body: the loop's jaxpr, whose first results are the next carry.
    num_consts: how many arguments it has before the carry.
    args, facts: the carry before the loop.
  """
  before = body.jaxpr.invars[num_consts:]
  kept = list(facts)
  for i, fact in enumerate(facts):
    if fact is not None and before[i] is not body.jaxpr.outvars[i]:
      walker.leave(name, args[i], fact, _CARRIED)
      kept[i] = None
  # The loop returns them, so the body takes them.
  return [
    dataclasses.replace(p, is_dropped=False)
    for p in _passed(walker, kept, first=num_consts)
  ]


def _taken(passed: Sequence[Passed], count: int) -> list[bool]:
  """Returns for each of a function's arguments whether it is not dropped."""
  dropped = {p.argument for p in passed if p.is_dropped}
  return [i not in dropped for i in range(count)]


# Parameters of operations with one value for each argument, and the value of a
# further argument.
_PER_ARGUMENT: Final = {
  "in_shardings": binding_private.UNSPECIFIED,
  "in_layouts": None,
  "donated_invars": False,
  "prevent_cse": False,
}


def _call(
  walker: Walker,
  operation: binding_private.BoundOperation,
  facts: Sequence[Any],
) -> ReplacedCall | None:
  args = operation.args
  passed = _passed(walker, facts)
  new = walker.trace_inside(operation.params["jaxpr"], passed)
  if not new.is_changed:
    return None
  more = [*new.consts, *walker.take_keys(new.count), *_leaves(passed)]
  taken = _taken(passed, len(args))
  params = dict(operation.params, jaxpr=new.jaxpr)
  for name, value in _PER_ARGUMENT.items():
    if isinstance(params.get(name), tuple):
      own = itertools.compress(params[name], taken)
      params[name] = (*[value] * len(more), *own)
  return ReplacedCall([*more, *itertools.compress(args, taken)], params)


def _cond(
  walker: Walker,
  operation: binding_private.BoundOperation,
  facts: Sequence[Any],
) -> ReplacedCall | None:
  params = operation.params
  index, *operands = operation.args
  passed = _passed(walker, facts[1:])
  # One branch runs, so all use the same numbers of keys.
  branches = [walker.trace_inside(b, passed) for b in params["branches"]]
  if not any(new.is_changed for new in branches):
    return None
  count = max(new.count for new in branches)
  more = [*walker.take_keys(count), *_leaves(passed)]
  params = dict(params, branches=tuple(new.jaxpr for new in branches))
  own = itertools.compress(operands, _taken(passed, len(operands)))
  return ReplacedCall([index, *more, *own], params)


def _scan(
  walker: Walker,
  operation: binding_private.BoundOperation,
  facts: Sequence[Any],
) -> ReplacedCall | None:
  args, params = operation.args, operation.params
  num_consts, num_carry = binding_private.scan_sizes(params)
  first_x, length = num_consts + num_carry, params["length"]
  carry = slice(num_consts, first_x)
  passed = [
    *_passed(walker, facts[:num_consts]),
    *_unchanged(
      walker, "scan", params["jaxpr"], num_consts, args[carry], facts[carry]
    ),
    *_sliced(walker, args[first_x:], facts[first_x:], first_x, length),
  ]
  new = walker.trace_inside(params["jaxpr"], passed, in_loop=first_x, number=0)
  if not new.is_changed:
    return None
  consts, xs = _leaves(passed), _leaves(passed, each_trip=True)
  if walker.key is not None:
    consts = [_loop_key(walker), *consts]
    xs = [jnp.arange(length, dtype=np.uint32), *xs]
  taken = _taken(passed, len(args))
  params = binding_private.resized_scan(
    dict(params, jaxpr=new.jaxpr), taken, consts=len(consts), xs=len(xs)
  )
  fixed = itertools.compress(args[:first_x], taken)
  sliced = itertools.compress(args[first_x:], taken[first_x:])
  return ReplacedCall([*consts, *fixed, *xs, *sliced], params)


def _while(
  walker: Walker,
  operation: binding_private.BoundOperation,
  facts: Sequence[Any],
) -> ReplacedCall | None:
  args, params = operation.args, operation.params
  num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
  num_consts = num_cond + num_body
  carry = _unchanged(
    walker,
    "while",
    params["body_jaxpr"],
    num_body,
    args[num_consts:],
    facts[num_consts:],
  )
  shifted = [
    dataclasses.replace(p, argument=p.argument - num_body + num_cond)
    for p in carry
  ]
  in_condition = [*_passed(walker, facts[:num_cond]), *shifted]
  in_body = [*_passed(walker, facts[num_cond:num_consts]), *carry]
  condition = walker.trace_inside(
    params["cond_jaxpr"], in_condition, in_loop=num_cond, number=0
  )
  body = walker.trace_inside(
    params["body_jaxpr"],
    in_body,
    in_loop=num_body,
    number=condition.count,
    returns_trip=True,
  )
  if not condition.is_changed and not body.is_changed:
    return None
  base = [] if walker.key is None else [_loop_key(walker)]
  trip = [np.uint32(0) for _ in base]
  # A carry is never dropped.
  own = itertools.compress(args, _taken(in_condition, num_cond))
  of_condition = [*base, *_leaves(in_condition), *own]
  own = itertools.compress(args[num_cond:], _taken(in_body, num_body))
  of_body = [*base, *_leaves(in_body), *own]
  params = dict(
    params,
    cond_jaxpr=condition.jaxpr,
    body_jaxpr=body.jaxpr,
    cond_nconsts=len(of_condition),
    body_nconsts=len(of_body),
  )
  args = [*of_condition, *of_body, *trip, *args[num_consts:]]
  return ReplacedCall(args, params, len(trip))


def _loop_key(walker: Walker) -> Any:
  number = walker.number
  (base,) = walker.take_keys(1)
  return products.fold_in(base, number)


RULES: Final = {
  "jit": _call,
  "remat2": _call,
  "cond": _cond,
  "scan": _scan,
  "while": _while,
}


# Operations that `results` follows.
FOLLOWED: Final = frozenset({*RULES, _CUSTOM_VMAP})


# A `jvp` also takes tangents, and the residuals of a `bwd` may be anything.
_JVP: Final = ("custom_jvp_call", 1)
_BACKWARD: Final = ("custom_vjp_call", 2)


def is_rule_of_tangents(
  operation: binding_private.BoundOperation, index: int
) -> bool:
  """Whether a function of an operation takes tangents or cotangents."""
  return (operation.name, index) in (_JVP, _BACKWARD)


def is_replaced(operation: binding_private.BoundOperation, index: int) -> bool:
  """Whether a gradient runs a rule instead of a function of an operation."""
  return (operation.name, index) == ("custom_jvp_call", 0)


def is_forward_rule(
  operation: binding_private.BoundOperation, index: int
) -> bool:
  """Whether a function of an operation is the `fwd` of a `custom_vjp`."""
  return (operation.name, index) == ("custom_vjp_call", 1)


def own_args(
  operation: binding_private.BoundOperation, index: int, args: Sequence[Any]
) -> Sequence[Any]:
  """Returns those arguments of a function that its operation also has.

  Args:
    operation, index: the operation, and which of its functions.
    args: arguments of the function. After each, a `fwd` has whether it is
      differentiated. A `jvp` has tangents after all of them.
  """
  if (operation.name, index) == _BACKWARD:
    return ()
  count = len(operation.args)
  is_forward = len(args) == 2 * count and all(
    isinstance(x, bool) for x in args[1::2]
  )
  return args[::2] if is_forward else args[:count]


# Their rules are functions, which may contain anything.
CUSTOM_RULES: Final = frozenset({"custom_jvp_call", "custom_vjp_call"})


def unsupported(dtype: np.dtype, precision: Any = None) -> str:
  """Returns why no block-scaled dot replaces a matmul; "" if one may.

  Args:
    dtype: of the result.
    precision: parameter of `dot_general`.
  """
  if dtype not in formats.FLOAT_DTYPES:
    return f"the result is {dtype.name}, not float32, bfloat16 or float16"
  if precision is not None and not isinstance(
    precision, (str, tuple, lax.Precision)
  ):
    return f"precision requests the algorithm {precision}"
  return ""


@jax_private.cache_by_jaxpr
def contains(
  jaxpr: Any, names: frozenset[str], in_kernels: bool = False
) -> bool:
  """Whether a jaxpr has an operation of one of these names, at any depth.

  Args:
    jaxpr: a jaxpr.
    names: names of primitives.
    in_kernels: whether operations inside kernels count.
  """
  return any(
    eqn.primitive.name in names
    or (
      (in_kernels or eqn.primitive.name not in program.KERNELS)
      and any_contains(eqn, names, in_kernels)
    )
    for eqn in jaxpr.eqns
  )


def any_contains(
  eqn: Any, names: frozenset[str], in_kernels: bool = False
) -> bool:
  """Whether a jaxpr inside an operation `contains` one of these names.

  Args:
    eqn: a `BoundOperation` or an equation.
    names, in_kernels: see `contains`.
  """
  jaxprs = program.sub_jaxprs(eqn)
  return any(contains(jaxpr, names, in_kernels) for jaxpr in jaxprs)
