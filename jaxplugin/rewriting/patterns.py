# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds norms and activations among the operations of a trace.

JAX stores which operation computed a traced value. A pattern is matched from
its result back to its inputs, also through jitted functions. Conversions
between floats are skipped, so a pattern leaves out roundings in between.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxplugin.core import error_context, formats
from jaxplugin.jaxext import jax_private, program
from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.quantization import prologues
from jaxplugin.rewriting import calls, facts, sites, sources

# Their results are their operands.
_SAME: Final = frozenset({"copy", "name", "pbroadcast", "pvary"})
_CONVERT: Final = "convert_element_type"
# Also a `jit` with shardings or layouts.
_CONSTRAINT: Final = "sharding_constraint"
# Operations between a pattern and a matmul, and their names in reasons.
_MOVING: Final = {
  "slice": "a slice",
  "dynamic_slice": "a slice",
  "gather": "a gather",
  "transpose": "a transpose",
  "reshape": "a reshape",
  "squeeze": "a slice",
  "broadcast_in_dim": "a broadcast",
  "stop_gradient": "a stop_gradient",
  "rev": "a reversal",
  "pad": "a pad",
  "concatenate": "a concatenate",
  "dynamic_update_slice": "an update",
  "scatter": "an update",
  "optimization_barrier": "an optimization barrier",
  "clamp": "a clip",
  "all_gather": "an all-gather",
  "all_to_all": "an all-to-all",
  "ppermute": "a ppermute",
  _CONVERT: "a cast",
  _CONSTRAINT: "a sharding constraint",
}
# Which operands of an operation may be a pattern's result, besides the first.
_MOVED_OPERANDS: Final = {
  "concatenate": slice(None),
  "dynamic_update_slice": slice(2),
  "scatter": slice(0, None, 2),
  "clamp": slice(1, 2),
}
# Operations whose results functions inside compute.
_CONTROL: Final = frozenset({"cond", "scan", "while", "shard_map"})
# Operations on constants.
_FOLDED: Final[dict[str, Callable[..., Any]]] = {
  "neg": np.negative,
  "sqrt": np.sqrt,
  "rsqrt": lambda x: 1 / np.sqrt(x),
  "add": np.add,
  "sub": np.subtract,
  "mul": np.multiply,
  "div": np.divide,
  "pow": np.power,
  "gt": np.greater,
}
# Operations of statistics, which code may compute twice, and the parameters
# that determine their results.
_COMPARED: Final = frozenset(
  {
    *("add", "sub", "mul", "div", "square", "integer_pow", "reduce_sum"),
    *("broadcast_in_dim", "reshape"),
  }
)
_OPTIONS: Final = ("axes", "broadcast_dimensions", "y", "new_sizes", "shape")
# Products and numbers of more nested operations are not split. A value that is
# squared again and again would have too many factors.
_DEPTH: Final = 8
_GELU_FACTOR: Final = math.sqrt(2 / math.pi)
_GELU_CUBIC: Final = 0.044715
# Factors of x in the argument of each function that computes an exact gelu:
# 1 + erf(x), and erfc(x) = 1 - erf(x).
_EXACT_GELU: Final = {"erf": math.sqrt(0.5), "erfc": -math.sqrt(0.5)}
_ALPHA: Final = prologues.Prologue(function="swigluoai").alpha

_NO_MEAN: Final = (
  "its root is not that of a mean square or a variance over the last dimension"
)
_MAPPED: Final = "vmap with in_axes=0 keeps the features last"
_INSIDE: Final = "the matmul is inside {}, and {} is not"
# Names of functions that nearly match, by whether they are norms.
_NEAR: Final = ("activation", "norm")


class _NotMatchedError(Exception):
  """A value is nearly the result of a pattern. The message is the reason.

  Attributes:
    name: that of the pattern if only its operands do not fit, or "".
  """

  def __init__(self, reason: str, name: str = ""):
    super().__init__(reason)
    self.name = name


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundPrologue:
  """A norm or activation that computes a value.

  Attributes:
    name: such as "rms_norm with weight".
    call: the prologue and its operands; None if no prologue computes the value.
    of_sums: the call without a bias, of the sums with the bias; or None.
    rows: those that make the bias of `call`, if there is `of_sums`.
    reason: why no prologue does; "" if one does.
    seen: identities of the values that were compared with patterns.
    has_custom_derivative: whether the code may have another derivative than the
      prologue: a custom rule; or `lax.clamp`, whose derivative is 0 at limits,
      or a maximum, whose derivative at 0 is not that of `jax.nn.relu`.
  """

  name: str
  call: prologues.PrologueCall | None = None
  of_sums: prologues.PrologueCall | None = None
  rows: tuple[Any, ...] = ()
  reason: str = ""
  seen: frozenset[int] = frozenset()
  has_custom_derivative: bool = False

  def before(
    self, site: sites.Site, note: str, *, is_fused: bool = False, x: Any = None
  ) -> sites.TracedChain:
    """Returns the record of a matmul whose activations x this computes."""
    chain = sites.Chain(
      name=self.name,
      dot=site.description,
      layer=site.name,
      source=site.source,
      is_fused=is_fused,
      note=note,
    )
    variable = None if x is None else binding_private.identity(x)
    return sites.TracedChain(chain=chain, variable=variable)


def find(x: Any) -> FoundPrologue | None:
  """Returns the norm or activation that computes a traced value.

  Returns None for other values, and for values that are not traced.
  """
  if binding_private.maker(x) is None or np.ndim(x) == 0:
    return None
  matcher = _Matcher()
  value, is_constrained = matcher.before_layout(
    _Value(binding_private.staged(x), None)
  )
  if (found := matcher.find(value)) is not None:
    if found.call is None:
      return found
    if not is_constrained:
      return dataclasses.replace(
        found,
        call=_as_of(x, found.call),
        of_sums=matcher.of_sums,
        rows=matcher.rows,
        seen=frozenset(matcher.seen),
        has_custom_derivative=matcher.has_custom_derivative,
      )
    reason = "a sharding constraint is between it and the matmul"
    return FoundPrologue(name=found.name, reason=reason)
  for reason, operand in matcher.before_operations(value):
    found = matcher.find(operand)
    if found is not None and found.name not in _NEAR:
      return FoundPrologue(name=found.name, reason=reason)
  return None


def record_outside(
  operation: binding_private.BoundOperation,
  weights: Sequence[sources.Origin | None],
  around: sites.Surroundings,
) -> None:
  """Records norms and activations of arguments that matmuls inside read.

  The function of the operation is traced separately, so its matmuls quantize
  their operands without a prologue.

  Args:
    operation: the operation, which has jaxprs inside.
    weights: the origin of each argument that is a weight, or None. Matmuls of
      other arguments do not count.
    around: of the function that is traced.
  """
  if sites.is_recording():
    name = {"remat2": "checkpoint"}.get(operation.name, operation.name)
    found = find_outside(name, operation.args)
    _record_outside(operation, found, weights, around)


class Outside(sources.TracedValues[FoundPrologue]):
  """Arguments of a function that norms and activations outside compute."""

  def put_all(
    self, args: Sequence[Any], found: Sequence[FoundPrologue | None]
  ) -> None:
    for x, each in zip(args, found, strict=False):
      if each is not None:
        self.put(x, each)


def find_outside(
  operation: str, args: Sequence[Any]
) -> list[FoundPrologue | None]:
  """Returns the norms and activations of the arguments of an operation.

  JAX traces the function inside with other values. The reason is that a matmul
  of the function is inside.
  """
  if not sites.is_recording():
    return [None] * len(args)
  return [
    FoundPrologue(name=found.name, reason=_INSIDE.format(operation, found.name))
    if (found := find(x)) is not None and found.call is not None
    else None
    for x in args
  ]


def _bodies(name: str, params: dict[str, Any]) -> list[Any]:
  """Returns jaxprs inside an operation, without the condition of a loop."""
  functions = params["body_jaxpr"] if name == "while" else [*params.values()]
  return list(program.jaxprs_of((functions,)))


def _record_outside(
  operation: binding_private.BoundOperation,
  found: Sequence[FoundPrologue | None],
  weights: Sequence[sources.Origin | None],
  around: sites.Surroundings,
) -> None:
  """Records the arguments of an operation that matmuls inside read.

  Args:
    operation: an operation.
    found: what computes each argument outside, or None.
    weights, around: see `record_outside`.
  """
  name, num_args = operation.name, len(found)
  jaxprs = _bodies(name, operation.params)
  if not any(found) or (len(jaxprs) > 1 and name != "cond"):
    return
  first = {"cond": 1, "while": operation.params.get("cond_nconsts", 0)}
  skipped = first.get(name, 0)
  for jaxpr in jaxprs:
    if len(jaxpr.invars) == num_args - skipped:
      _record_read(jaxpr, found[skipped:], weights[skipped:], around)


def _record_read(
  jaxpr: Any,
  found: Sequence[FoundPrologue | None],
  weights: Sequence[sources.Origin | None],
  around: sites.Surroundings,
) -> None:
  """Records the arguments of a jaxpr that its matmuls read."""
  matcher = _Matcher()
  function = _Function(jaxpr, [_Value(v, None) for v in jaxpr.invars])
  ids = list(map(id, jaxpr.invars))
  outside = dict(zip(ids, found, strict=True))
  origins = dict(zip(ids, weights, strict=True))

  def find_argument(atom: Any) -> FoundPrologue | None:
    if hasattr(atom, "val"):  # a literal
      return None
    value, _ = matcher.before_layout(function.value(atom))
    return outside.get(id(value.atom))

  for eqn in jaxpr.eqns:
    operation = binding_private.BoundOperation.of_equation(eqn)
    of_args = [origins.get(id(v)) for v in eqn.invars]
    if operation.name not in sites.PRODUCTS:
      for source in filter(None, of_args):
        origins.update((id(v), source) for v in eqn.outvars)
      if operation.name in calls.FOLLOWED:
        args = list(map(find_argument, eqn.invars))
        with sites.inside(operation, []):
          _record_outside(operation, args, of_args, around)
      continue
    for atom, weight in zip(eqn.invars[:2], of_args[1::-1], strict=True):
      chain = find_argument(atom)
      if weight is not None and chain is not None:
        result = eqn.outvars[0].aval
        site = sites.make(operation, result, (weight, None), around)
        sites.record_chain(chain.before(site, chain.reason))


_WEIGHTS: Final = (
  "the code calls a matmul by quantized weights; pass it the result of"
  " jp.nn.{}(..., out_format=...)"
)
# For operations and functions of this package: what the code calls, and why it
# has no prologue, with the remedy.
_OWN: Final = {
  "block_scaled_dot": ("block_scaled_dot", _WEIGHTS),
  "block_scaled_ragged_dot": ("ragged_dot", _WEIGHTS),
  "_quantize": (
    "quantize",
    "the code calls jp.quantize; pass out_format= to jp.nn.{}",
  ),
  "quantized_dot": (
    "a matmul with a recipe",
    "the code calls a matmul with a recipe; call jax.lax.dot_general or"
    " jax.lax.ragged_dot in its place",
  ),
}


def record_own(operation: binding_private.BoundOperation) -> None:
  """Records norms and activations that code passes to this package.

  The code has chosen formats, so no transformation fuses them.
  """
  if sites.is_recording():
    params = operation.params
    is_own = operation.name == "jit" and jax_private.is_own(params["jaxpr"])
    _record_own(params["name"] if is_own else operation.name, operation.args)


def record_own_function(function: Any, args: Sequence[Any]) -> None:
  """Records as `record_own` does, for a function inside an operation."""
  if sites.is_recording():
    _record_own(function.debug_info.func_name, args)


def _record_own(name: str, args: Sequence[Any]) -> None:
  if name not in _OWN:
    return
  what, note = _OWN[name]
  for x in args:
    found = find(x)
    if found is None or found.call is None:
      continue
    function = found.call.prologue.function
    chain = sites.Chain(
      name=found.name,
      dot=f"{what} of {error_context.shown(x)}",
      layer="/".join(sites.scope_names()),
      source=jax_private.user_frame(),
      note=note.format(function.removeprefix("exact_")),
    )
    sites.record_chain(sites.TracedChain(chain=chain))


def _as_of(x: Any, call: prologues.PrologueCall) -> prologues.PrologueCall:
  """Returns a call whose result has the shape of x, in the `vmap`s of x."""
  shape = call.prologue.x_shape(np.shape(x))
  return call.with_rows(
    lambda array: binding_private.mapped_as(x, array).reshape(shape)
  )


class _Function:
  """A function inside an operation, with the values that it is called with."""

  def __init__(self, jaxpr: Any, args: list[_Value]):
    self.is_relu = jax_private.is_relu(jaxpr)
    self._args = dict(zip(jaxpr.invars, args, strict=True))
    self._makers = {
      v: (e, i) for e in jaxpr.eqns for i, v in enumerate(e.outvars)
    }

  def value(self, atom: Any) -> _Value:
    if not hasattr(atom, "val") and atom in self._args:
      return self._args[atom]
    return _Value(atom, self)

  def maker(self, atom: Any) -> tuple[Any, int] | None:
    return None if hasattr(atom, "val") else self._makers.get(atom)


class _Value(NamedTuple):
  """A traced value, or a variable or literal of a function inside."""

  atom: Any
  function: _Function | None

  @property
  def shape(self) -> tuple[Any, ...]:
    return tuple(self.atom.aval.shape)

  @property
  def dtype(self) -> np.dtype:
    return self.atom.aval.dtype

  def key(self) -> tuple[int, int]:
    """Returns what identifies the value."""
    return id(self.function), id(binding_private.identity(self.atom))


class _Operation(NamedTuple):
  """The operation that computed a value.

  Attributes:
    name: its name; "" if no operation of the trace computed the value.
    params, operands: its parameters and operands.
    result: which of its results the value is.
    value: the value.
  """

  name: str
  params: dict[str, Any]
  operands: tuple[_Value, ...]
  result: int
  value: _Value


# A factor of a product: "input" or the kind of a root, and its value.
_Factor = tuple[str, _Value]
_IsInput = Callable[[_Value], bool]


class _Matcher:
  """Matches the operations that compute one value."""

  def __init__(self) -> None:
    # Functions of operations, by operation and enclosing function. A repeated
    # visit must give equal values. The operation stays alive.
    self._functions: dict[tuple[int, int], tuple[Any, _Function]] = {}
    self.seen: set[int] = set()
    self.of_sums: prologues.PrologueCall | None = None
    self.rows: tuple[Any, ...] = ()
    self.has_custom_derivative = False

  # Values.

  def _made(self, value: _Value) -> _Operation:
    """Returns the operation that computed a value, inside of calls."""
    while True:
      atom, function = value
      if function is None:
        self.seen.add(id(binding_private.identity(atom)))
        made = binding_private.maker(atom)
      else:
        made = function.maker(atom)
      if made is None:
        return _Operation("", {}, (), 0, value)
      eqn, index = made
      if eqn.primitive.name in calls.CUSTOM_RULES:
        self.has_custom_derivative |= not any(
          jax_private.is_own(jaxpr) or jax_private.is_relu(jaxpr)
          for jaxpr in program.sub_jaxprs(eqn)
        )
      if function is None:
        operands = [_Value(x, None) for x in eqn.in_tracers]
      else:
        operands = [function.value(v) for v in eqn.invars]
      if eqn.primitive.name not in program.CALLS:
        name, params = eqn.primitive.name, eqn.params
        return _Operation(name, params, tuple(operands), index, value)
      jaxprs = program.sub_jaxprs(eqn)
      if len(jaxprs) != 1 or len(jaxprs[0].invars) != len(operands):
        return _Operation("", {}, (), 0, value)
      key = id(eqn), id(function)
      if key not in self._functions:
        self._functions[key] = eqn, _Function(jaxprs[0], operands)
      value = self._functions[key][1].value(jaxprs[0].outvars[index])
      if eqn.primitive.name == "jit" and binding_private.is_placed(eqn):
        return _Operation(_CONSTRAINT, {}, (value,), index, value)

  def _bare(self, value: _Value) -> _Value:
    """Returns the value before conversions that do not round, and copies."""
    while True:
      made = self._made(value)
      is_same = made.name in _SAME or (
        made.name == _CONVERT
        and _is_widened(made.operands[0].dtype, value.dtype)
      )
      if not is_same and not self._adds_nothing(made):
        return value
      value = made.operands[0]

  def _operation(self, value: _Value) -> _Operation:
    """Returns the operation that computed a value before it was converted."""
    while True:
      made = self._made(value)
      name, operands = made.name, made.operands
      if (
        name == "select_n" and (which := self._number(operands[0])) is not None
      ):
        value = operands[1 + int(which)]
      elif (
        name in _SAME
        or self._adds_nothing(made)
        or (name == _CONVERT and {operands[0].dtype, value.dtype} <= facts.WIDE)
      ):
        value = operands[0]
      else:
        return made

  def before_layout(self, value: _Value) -> tuple[_Value, bool]:
    """Returns a value before rows are reshaped, and whether it is sharded.

    The second result is whether a sharding constraint is applied to it.
    """
    is_constrained = False
    while True:
      made = self._operation(value)
      if made.name == _CONSTRAINT:
        is_constrained = True
      elif not self._is_reshape_of_rows(made):
        return value, is_constrained
      value = made.operands[0]

  def _is_reshape_of_rows(self, made: _Operation) -> bool:
    if made.name not in ("reshape", "squeeze", "broadcast_in_dim"):
      return False
    before, after = made.operands[0].shape, made.value.shape
    return before[-1:] == after[-1:] and math.prod(before) == math.prod(after)

  def _operands(self, value: _Value, name: str) -> tuple[_Value, ...] | None:
    """Returns the operands if an operation of this name computes a value."""
    made = self._operation(value)
    return made.operands if made.name == name else None

  def _adds_nothing(self, made: _Operation) -> bool:
    if made.name == "mul":  # a norm does not depend on this factor
      factor = self._made(self._narrow(made.operands[1]))
      return factor.params.get("name") == prologues.FACTOR_IN_RANGE
    neutral = {"sub": 0, "div": 1}.get(made.name)
    return neutral is not None and self._number(made.operands[1]) == neutral

  def _number(self, value: _Value, depth: int = _DEPTH) -> float | None:
    """Returns the number that all elements of a value are, or None."""
    atom = binding_private.identity(value.atom)
    atom = getattr(atom, "val", atom)  # a literal
    if isinstance(atom, (bool, int, float)) or hasattr(atom, "dtype"):
      return float(np.asarray(atom)) if np.ndim(atom) == 0 else None
    made = self._made(value)
    if depth == 0:
      return None
    if made.name in (_CONVERT, "broadcast_in_dim", "reshape", *_SAME):
      return self._number(made.operands[0], depth - 1)
    if (
      made.name in _FOLDED
      and (len(made.operands) == 1 or not value.shape)
      and (made.name != "div" or jnp.issubdtype(value.dtype, jnp.floating))
    ):
      numbers = [self._number(x, depth - 1) for x in made.operands]
      if None not in numbers:
        with np.errstate(all="ignore"):
          return float(_FOLDED[made.name](*map(np.float64, numbers)))
    return None

  def _is_equal(self, a: _Value, b: _Value, depth: int = 4) -> bool:
    """Whether two values are the same, or computed by the same operations."""
    a, b = self._bare(a), self._bare(b)
    if a.key() == b.key():
      return True
    first, second = self._operation(a), self._operation(b)
    if depth == 0 or not first.name or not second.name:
      number = self._number(a)
      return number is not None and number == self._number(b)
    return (
      first.name == second.name
      and first.name in _COMPARED
      and _options(first) == _options(second)
      and all(
        self._is_equal(x, y, depth - 1)
        for x, y in zip(first.operands, second.operands, strict=True)
      )
    )

  def before_operations(self, value: _Value) -> Iterator[tuple[str, _Value]]:
    """Yields values that operations move, drop, change or compute inside.

    Each comes with the reason: the operation that is the last one.
    """
    level, seen = [("", value)], set[tuple[int, int]]()
    for _ in range(_DEPTH):
      level = [
        (reason or new, x)
        for reason, v in level
        for new, x in self._moved(self._operation(v), is_after=not reason)
        if x.key() not in seen
      ]
      seen.update(x.key() for _, x in level)
      yield from level

  def _moved(
    self, made: _Operation, is_after: bool
  ) -> Iterator[tuple[str, _Value]]:
    """Yields operands of one operation, each with a reason.

    Args:
      made: the operation.
      is_after: whether no other operation is between it and the matmul.
    """
    name, operands = made.name, made.operands
    numbers = [self._number(x) for x in operands]
    what, kept = "", list[_Value]()
    if name in _MOVING:
      what = _MOVING[name]
      kept = list(operands[_MOVED_OPERANDS.get(name, slice(1))])
      if name == "optimization_barrier":
        kept = [operands[made.result]]
    elif name in ("max", "min") and numbers.count(None) == 1:
      what, kept = "a clip", [operands[numbers.index(None)]]
    elif name == "select_n":
      what = "dropout or a mask" if 0 in numbers[1:] else "a select"
      kept = [
        x for x, n in zip(operands[1:], numbers[1:], strict=True) if n != 0
      ]
    elif name in ("div", "mul") and numbers.count(None) == 1 and not is_after:
      kept = [operands[numbers.index(None)]]  # dropout divides
    for x in kept:
      yield f"{what} is between it and the matmul", x
    for jaxpr in _bodies(name, made.params) if name in _CONTROL else ():
      key = id(jaxpr), id(made.value.function)
      variables = [_Value(v, None) for v in jaxpr.invars]
      new = jaxpr, _Function(jaxpr, variables)
      _, function = self._functions.setdefault(key, new)
      result = function.value(jaxpr.outvars[made.result])
      yield f"it is inside {name}, and the matmul is not", result

  def find(self, value: _Value) -> FoundPrologue | None:
    """Returns the norm or activation that computes a value.

    The call's arrays have the shape of the value.
    """
    found, x = None, self._of_relu(value)
    for kind, root in self.roots(value) if x is None else [("relu", x)]:
      is_norm = kind == "rsqrt"
      try:
        match = self.norm if is_norm else self.activation
        call = match(value, kind, root)
        return FoundPrologue(name=str(call.prologue), call=call)
      except _NotMatchedError as reason:
        name = reason.name or _NEAR[is_norm]
        found = found or FoundPrologue(name=name, reason=str(reason))
    return found

  # Products.

  def _root(self, value: _Value) -> tuple[float, _Factor] | None:
    """Returns a number and the root whose product a value is, or None.

    A root is the kind of a function that marks a pattern, and its argument a.
    The kinds "tanh" and "erf" are 1 + tanh(a) and 1 + erf(a).
    """
    value = self._narrow(value)
    made = self._operation(value)
    name, operands = made.name, made.operands
    if name in ("rsqrt", "logistic"):
      return 1.0, (name, operands[0])
    if name == "pow" and self._number(operands[1]) == -0.5:
      return 1.0, ("rsqrt", operands[0])
    if (line := self._line(value)) is None:
      return None
    offset, slope, (kind, argument) = line
    if offset and offset == slope:
      return offset, (kind, argument)
    if offset and offset == -slope and kind == "erf":
      return offset, ("erfc", argument)
    return None

  def _line(
    self, value: _Value, depth: int = _DEPTH
  ) -> tuple[float, float, _Factor] | None:
    """Returns p, q and f(a) if a value is p + q * f(a), of erf or tanh."""
    made = self._operation(value)
    name, operands = made.name, made.operands
    if name in ("tanh", "erf"):
      return 0.0, 1.0, (name, operands[0])
    if name == "erfc":
      return 1.0, -1.0, ("erf", operands[0])
    if not depth or name not in ("neg", "add", "sub", "mul", "div", "select_n"):
      return None
    if name == "select_n":
      return self._line_of_ndtr(*operands[1:]) if len(operands) == 3 else None
    numbers = [self._number(x) for x in operands]
    if numbers.count(None) != 1:
      return None
    index = numbers.index(None)
    if (inner := self._line(operands[index], depth - 1)) is None:
      return None
    p, q, root = inner
    match name, numbers:
      case "neg", _:
        return -p, -q, root
      case "add", ([float(n), None] | [None, float(n)]):
        return p + n, q, root
      case "sub", [None, float(n)]:
        return p - n, q, root
      case "sub", [float(n), None]:
        return n - p, -q, root
      case "mul", ([float(n), None] | [None, float(n)]):
        return n * p, n * q, root
      case "div", [None, float(n)] if n:
        return p / n, q / n, root
    return None

  def _line_of_ndtr(
    self, tails: _Value, head: _Value
  ) -> tuple[float, float, _Factor] | None:
    """Returns `_line` of 1 + erf(w) as `jax.scipy.special.ndtr` computes it.

    The head is 1 + erf(w), for small |w|. The tails are 2 - erfc(|w|) if w > 0,
    else erfc(|w|).
    """
    is_positive, *terms = self._operands(tails, "select_n") or [tails]
    lines = [self._line(x, 1) for x in (*terms, head)]
    signs = self._operands(is_positive, "gt")
    if signs is None or self._number(signs[1]) != 0 or None in lines:
      return None
    numbers = [line[:2] for line in lines if line]
    *sizes, w = [line[2][1] for line in lines if line]
    of_sizes = [self._operands(size, "abs") for size in sizes]
    is_ndtr = numbers == [(1, -1), (1, 1), (1, 1)] and all(
      x is not None and self._is_equal(x[0], w) for x in (*of_sizes, signs)
    )
    return lines[-1] if is_ndtr else None

  def roots(self, value: _Value) -> list[tuple[str, _Value]]:
    """Returns each root in the product, sum and conversions of a value."""
    found = list(self._roots(value, sums=True))
    return list({(kind, v.key()): (kind, v) for kind, v in found}.values())

  def _roots(
    self, value: _Value, *, sums: bool, depth: int = _DEPTH
  ) -> Iterator[tuple[str, _Value]]:
    root = self._root(value)
    made = self._operation(value)
    if root is not None:
      yield root[1]
    elif depth:
      name, operands = made.name, made.operands
      if name == "div" and (
        inner := self._operands(self._narrow(operands[1]), "sqrt")
      ):
        yield "rsqrt", inner[0]
        yield from self._roots(operands[0], sums=sums, depth=depth - 1)
      elif name == "div" and self._operands(operands[1], "add"):
        for term in self._operands(operands[1], "add") or ():
          if inner := self._operands(term, "sqrt"):
            yield "rsqrt", inner[0]
      elif name == "div" and self._number(operands[1]) is not None:
        yield from self._roots(operands[0], sums=False, depth=depth - 1)
      elif name == "transpose" and depth < _DEPTH:
        if any(self._roots(operands[0], sums=False, depth=depth - 1)):
          yield name, value
      elif name == "mul" or (name in ("add", "sub") and sums):
        for x in operands:
          is_product = name == "mul"
          yield from self._roots(x, sums=sums and is_product, depth=depth - 1)

  def _factors(
    self, value: _Value, is_input: _IsInput, depth: int = _DEPTH
  ) -> tuple[float, list[_Factor], bool]:
    """Splits a product as far as its inputs and roots require.

    Returns:
      The product of its numbers, its other factors, and whether an input or a
      root is among them.
    """
    if is_input(value):
      return 1.0, [("input", value)], True
    if (root := self._root(value)) is not None:
      return root[0], [root[1]], True
    made = self._operation(value)
    if made.name in ("mul", "div") and depth:
      a, b = made.operands
      factor, factors, is_found = self._factors(a, is_input, depth - 1)
      if made.name == "div":
        inner = self._operands(self._narrow(b), "sqrt")
        number = self._number(b)
        if inner is not None:
          return factor, [*factors, ("rsqrt", inner[0])], True
        if number and is_found:
          return factor / number, factors, True
      else:
        for one in (a, b):
          if (number := self._number(one)) is not None:
            if one is a:
              factor, factors, is_found = self._factors(b, is_input, depth - 1)
            return factor * number, factors, is_found
        more = self._factors(b, is_input, depth - 1)
        if is_found or more[2]:
          return factor * more[0], [*factors, *more[1]], True
    return 1.0, [("", self._bare(value))], False

  def _others(
    self, value: _Value, root: tuple[str, _Value], is_input: _IsInput, what: str
  ) -> tuple[float, list[_Value]]:
    """Returns the number and the factors besides an input and its root."""
    factor, factors, _ = self._factors(value, is_input)
    rest = [v for kind, v in factors if not kind]
    kinds = sorted(kind for kind, _ in factors if kind)
    if kinds != sorted(("input", root[0])):
      raise _NotMatchedError(f"the result is not {what}")
    return factor, rest

  # Rows and statistics.

  def _mean(self, value: _Value) -> _Value | None:
    """Returns the operand of a mean over the last dimension, or None."""
    made = self._operation(self._narrow(value))
    name, operands = made.name, made.operands
    if name not in ("div", "mul"):
      return None
    pairs = [operands] if name == "div" else [operands, operands[::-1]]
    for total, count in pairs:
      number = self._number(count)
      summed = self._operation(self._narrow(total))
      if not number:
        continue
      if summed.name == "transpose":
        raise _NotMatchedError(f"the rows of its mean are moved; {_MAPPED}")
      if summed.name == "reduce_sum":
        (x,) = summed.operands
        axes = list(map(int, summed.params["axes"]))
        if axes != [len(x.shape) - 1]:
          raise _NotMatchedError(
            f"its mean is over dimensions {axes} of {list(x.shape)}, not only"
            f" the last one; {_MAPPED}"
          )
        size = 1 / number if name == "mul" else number
        if not math.isclose(size, x.shape[-1], rel_tol=1e-6):
          raise _NotMatchedError(
            f"the sum is divided by {size:g}, not by the {x.shape[-1]} features"
          )
        return x
    return None

  def _narrow(self, value: _Value) -> _Value:
    """Returns one number a row before it is repeated along the last axis."""
    while True:
      made = self._operation(value)
      if made.name not in ("broadcast_in_dim", "reshape"):
        return value
      x, shape = made.operands[0], made.value.shape
      dims = made.params.get("broadcast_dimensions", range(len(x.shape)))
      is_single = x.shape in (shape[:-1], (*shape[:-1], 1))
      if [*dims] != [*range(len(x.shape))] or not is_single:
        return value
      value = x

  def _row(self, value: _Value, size: Any) -> _Value | None:
    """Returns a value [..., size] before it is repeated for each row."""
    value = self._bare(value)
    while (made := self._made(value)).name in ("broadcast_in_dim", "reshape"):
      x, last = made.operands[0], len(value.shape) - 1
      dims = made.params.get("broadcast_dimensions", (last,))
      if tuple(dims[-1:]) != (last,) or x.shape[-1:] != (size,):
        break
      value = self._bare(x)
    return (
      value if value.shape == (*[1] * (len(value.shape) - 1), size) else None
    )

  # Patterns.

  def norm(
    self, value: _Value, kind: str, root: _Value
  ) -> prologues.PrologueCall:
    """Returns the norm with a root 1 / sqrt(root) that computes a value."""
    size, epsilon, square = value.shape[-1], 0.0, root
    if (terms := self._operands(root, "add")) is not None:
      numbers = list(map(self._number, terms))
      if (numbers[0] is None) == (numbers[1] is None):
        raise _NotMatchedError(
          "its root is not that of a mean and one number, epsilon"
        )
      square = terms[0 if numbers[0] is None else 1]
      epsilon = next(n for n in numbers if n is not None)
    if not 0 <= epsilon < math.inf:
      raise _NotMatchedError("its epsilon is negative or not finite")
    x, is_centered = self._of_variance(square)
    x = self._bare(x)

    def is_input(v: _Value) -> bool:
      if not is_centered:
        return self._is_equal(v, x)
      centered = self._centered(v)
      return centered is not None and self._is_equal(centered, x)

    products: list[tuple[_Value, _Value | None]] = [(value, None)]
    if not is_input(value) and (terms := self._operands(value, "add")):
      # One row of the norm may be a bias too.
      rows = [self._row(term, size) for term in terms]
      products = [
        (one, row)
        for one, row in zip(terms, rows[::-1], strict=True)
        if row is not None
      ]
      if not products:
        raise _NotMatchedError(
          "something else than one bias for each feature is added to it"
        )
    what = "(x - mean(x)) / sqrt(variance + epsilon)"
    if not is_centered:
      what = "x / sqrt(mean(x * x) + epsilon)"
    product, bias = products[0]
    try:
      factor, rest = self._others(product, (kind, root), is_input, what)
    except _NotMatchedError:
      if len(products) == 1:
        raise
      product, bias = products[1]
      factor, rest = self._others(product, (kind, root), is_input, what)
    weights = [self._row(v, size) for v in rest]
    if factor != 1 or len(weights) > 1 or None in weights:
      raise _NotMatchedError(
        "it is multiplied by something else than one weight for each feature"
      )
    if bias is not None and not is_centered:
      raise _NotMatchedError("a bias is added to an RMS norm")
    more = {"weight": weights[0] if weights else None, "bias": bias}
    function = "layer_norm" if is_centered else "rms_norm"
    return _call(function, value.shape, x, more, epsilon)

  def _of_variance(self, value: _Value) -> tuple[_Value, bool]:
    """Returns x of mean(x * x) or of a variance, and whether of a variance."""
    value = self._narrow(value)
    while (operands := self._operands(value, "max")) is not None:
      numbers = list(map(self._number, operands))
      if 0 not in numbers:
        break
      value = self._narrow(operands[1 - numbers.index(0)])
    if (terms := self._operands(value, "sub")) is not None:  # E[x^2] - E[x]^2
      mean = self._square(terms[1])
      x = mean and self._mean(mean)
      squares = self._mean(terms[0])
      square = squares and self._square(squares)
      if x and square and self._is_equal(square, x):
        return x, True
      raise _NotMatchedError(_NO_MEAN)
    squares = self._mean(value)
    x = squares and self._square(squares)
    if not x:
      raise _NotMatchedError(_NO_MEAN)
    centered = self._centered(x)
    return (x, False) if centered is None else (centered, True)

  def _square(self, value: _Value) -> _Value | None:
    made = self._operation(value)
    if (
      made.name == "square"
      or (made.name == "integer_pow" and made.params["y"] == 2)
      or (
        made.name == "mul"
        and self._is_equal(made.operands[0], made.operands[1])
      )
    ):
      return made.operands[0]
    return None

  def _centered(self, value: _Value) -> _Value | None:
    """Returns x of x - mean(x), or None."""
    terms = self._operands(value, "sub")
    if terms is None:
      return None
    x = self._mean(terms[1])
    return x if x is not None and self._is_equal(x, terms[0]) else None

  def activation(
    self, value: _Value, kind: str, root: _Value
  ) -> prologues.PrologueCall:
    """Returns the activation with a root that computes a value."""
    if kind == "transpose":
      raise _NotMatchedError(
        f"one of its factors is transposed, not all; {_MAPPED}"
      )
    if self._operation(value).name in ("add", "sub"):
      raise _NotMatchedError("another value is added to it")
    if kind == "relu":
      return self._before_biases("relu", value.shape, [self._bare(root)])
    if kind in _EXACT_GELU:
      constant = _EXACT_GELU[kind]
      if (gate := self._gate_of_exact_gelu(root, constant)) is None:
        raise _NotMatchedError(f"it is not gelu, of {kind}({constant:.3g} * x)")
      return self._activation_of(value, kind, root, "exact_gelu", gate)
    # gelu is also x times a sigmoid of twice the argument of tanh.
    of_gelu = _GELU_FACTOR if kind == "tanh" else 2 * _GELU_FACTOR
    if (gelu := self._gate_of_gelu(root, of_gelu)) is not None:
      return self._activation_of(value, kind, root, "gelu", gelu)
    if kind == "tanh":
      raise _NotMatchedError("it is not the tanh approximation of gelu")
    alone = "silu", self._bare(root)
    if (scaled := self._scaled(root)) is None:
      return self._activation_of(value, kind, root, *alone)
    alpha, gate = scaled
    try:
      return self._activation_of(value, kind, root, "silu", gate, alpha)
    except _NotMatchedError as error:
      # The number may be a part of the gate of silu.
      try:
        return self._activation_of(value, kind, root, *alone)
      except _NotMatchedError as other:
        raise (other if other.name else error) from None

  def _activation_of(
    self,
    value: _Value,
    kind: str,
    root: _Value,
    function: str,
    gate: _Value,
    alpha: float = 1.0,
  ) -> prologues.PrologueCall:
    """As `activation`, of `gate`, with a sigmoid of alpha times `gate`."""
    what = "gelu(gate) * up"
    if function == "silu":
      what = "gate * sigmoid(gate) * up"
    if alpha != 1:
      what = "gate * sigmoid(alpha * gate) * (up + 1)"
    is_input = lambda v: self._is_equal(v, gate)
    factor, rest = self._others(value, (kind, root), is_input, what)
    if factor != (1.0 if kind == "logistic" else 0.5):
      raise _NotMatchedError("it is also multiplied by a number")
    if not rest and alpha == 1:
      return self._before_biases(function, value.shape, [gate])
    if not rest:
      raise _NotMatchedError("it is x * sigmoid(alpha * x), not silu or gelu")
    if len(rest) > 1:
      raise _NotMatchedError("two arrays are multiplied by the activation")
    function, numbers = f"{function}_and_mul", dict[str, float]()
    (up,) = rest
    clipped = None
    if function == "silu_and_mul":
      clipped = self._clipped_pair(gate, up)
    if clipped is not None:
      gate, up, limit = clipped
      function, numbers = "swigluoai", {"alpha": alpha, "limit": limit}
    elif alpha != 1:
      raise _NotMatchedError(
        "it is not gate * sigmoid(alpha * gate) * (up + 1) of min(gate, limit)"
        " and clip(up, -limit, limit)"
      )
    halves = self._halves(gate, up)
    both, name = (
      ([gate, up], None) if halves is None else ([halves[0]], halves[1])
    )
    return self._before_biases(
      function, value.shape, both, halves=name, **numbers
    )

  def _before_biases(
    self,
    function: str,
    shape: tuple[Any, ...],
    sums: list[_Value],
    **fields: Any,
  ) -> prologues.PrologueCall:
    """Returns the call of an activation, before biases are added to its arrays.

    `sums` are x, and `up` if it is an operand.
    """

    def call(
      arrays: list[_Value], bias: _Value | None
    ) -> prologues.PrologueCall:
      x, *ups = arrays
      more = {"up": ups[0] if ups else None, "bias": bias}
      return _call(function, shape, x, more, **fields)

    pairs = [pair for v in sums if (pair := self._biased(v)) is not None]
    if len(pairs) < len(sums):
      return call(sums, None)
    rows = [row.atom for _, row in pairs]
    found = call([v for v, _ in pairs], _Value(joined(rows), None))
    if all(v.function is None for v in sums):
      self.of_sums, self.rows = call(sums, None), tuple(rows)
    return found

  def _of_relu(self, value: _Value) -> _Value | None:
    """Returns x if a value is max(x, 0), or None."""
    operands = self._operands(value, "max") or ()
    for x, zero in zip(operands, operands[::-1], strict=True):
      if self._number(zero) == 0:
        function = zero.function
        self.has_custom_derivative |= function is None or not function.is_relu
        return x
    return None

  def _scaled(self, value: _Value) -> tuple[float, _Value] | None:
    """Returns the number and the array of their product, or None."""
    made = self._operation(value)
    if made.name != "mul":
      return None
    for one, other in (made.operands, made.operands[::-1]):
      if (number := self._number(one)) is not None:
        is_usual = number == np.asarray(_ALPHA, made.value.dtype)
        return _ALPHA if is_usual else number, self._bare(other)
    return None

  def _clipped_pair(
    self, gate: _Value, up: _Value
  ) -> tuple[_Value, _Value, float] | None:
    """Returns g, u and the limit of min(g, limit) and clip(u, ...) + 1."""
    terms = self._operands(up, "add") or ()
    ones = [self._number(term) == 1 for term in terms]
    if sum(ones) != 1:
      return None
    g, *of_gate = self._clipped(gate)
    u, *of_up = self._clipped(terms[1 - ones.index(True)])
    limit = of_gate[1]
    if limit <= 0 or math.isinf(limit):
      return None
    is_usual = of_gate[0] == -math.inf and of_up == [-limit, limit]
    return (g, u, limit) if is_usual else None

  def _clipped(self, value: _Value) -> tuple[_Value, float, float]:
    """Returns a value before it is clipped, and the limits."""
    low, high = -math.inf, math.inf
    while True:
      made = self._operation(value)
      numbers = [self._number(x) for x in made.operands]
      match made.name, numbers:
        case ("min", (float(n), None)) | ("min", (None, float(n))):
          high = min(high, n)
        case ("max", (float(n), None)) | ("max", (None, float(n))):
          low = max(low, n)
        case "clamp", (float(least), None, float(most)):
          low, high = max(low, least), min(high, most)
          self.has_custom_derivative = True
        case _:
          return self._bare(value), low, high
      value = made.operands[numbers.index(None)]

  def _biased(self, value: _Value) -> tuple[_Value, _Value] | None:
    """Returns a value before a row is added to it, and the row."""
    terms = self._operands(value, "add") or ()
    for one, other in (terms, terms[::-1]) if terms else ():
      x, row = self._bare(one), self._row(other, value.shape[-1])
      if row is not None and x.function is None and row.function is None:
        return x, row
    return None

  def _halves(self, gate: _Value, up: _Value) -> tuple[_Value, str] | None:
    """Returns x if gate and up are its halves, and how x contains them."""
    first, second = self._part(gate), self._part(up)
    if first is None or second is None:
      return None
    (x, *of_gate), (y, *of_up), size = first, second, gate.shape[-1]
    is_all = x.shape == (*gate.shape[:-1], 2 * size) and x.function is None
    if x.key() != y.key() or gate.shape != up.shape or not is_all:
      return None
    if [of_gate, of_up] == [[0, 1], [size, 1]]:
      return x, "split"
    return (x, "interleaved") if [of_gate, of_up] == [[0, 2], [1, 2]] else None

  def _part(self, value: _Value) -> tuple[_Value, int, int] | None:
    """Returns x, start and stride if a value is x[..., start::stride]."""
    axis, made = len(value.shape) - 1, self._made(value)
    is_paired = made.name in ("squeeze", "unstack")
    if made.name == "squeeze":
      value, (axis, *more) = made.operands[0], made.params["dimensions"]
      if more:
        return None
      made = self._made(value)
    if made.name not in ("slice", "split", "unstack"):
      return None
    (x, *_), params, start, stride = made.operands, made.params, made.result, 1
    if made.name == "unstack":
      axis = params["axis"]
    elif any(value.shape[d] != n for d, n in enumerate(x.shape) if d != axis):
      return None
    elif made.name == "split":
      start = int(sum(params["sizes"][: made.result]))
    else:
      start = params["start_indices"][axis]
      stride = params["strides"][axis] if params["strides"] else 1
    if not is_paired:
      return x, start, stride
    reshaped, ndim = self._made(x), len(x.shape)  # [..., 2, k] or [..., k, 2]
    if reshaped.name != "reshape" or axis < ndim - 2:
      return None
    (flat, *_), size = reshaped.operands, x.shape[-1]
    if flat.shape != (*x.shape[:-2], x.shape[-2] * size):
      return None
    return (flat, start, size) if axis == ndim - 1 else (flat, start * size, 1)

  def _gate_of_gelu(self, value: _Value, constant: float) -> _Value | None:
    """Returns g of constant * (g + 0.044715 * g^3), or None."""
    factor, rest = self._product(value)
    terms = self._operands(rest[0], "add") if len(rest) == 1 else None
    if terms is not None and self._is_close(value, factor, constant):
      for gate, cube in (terms, terms[::-1]):
        cubic, factors = self._product(cube)
        is_cube = len(factors) == 3 and all(
          self._is_equal(v, gate) for v in factors
        )
        if is_cube and self._is_close(cube, cubic, _GELU_CUBIC):
          return self._bare(gate)
    return None

  def _gate_of_exact_gelu(
    self, value: _Value, constant: float
  ) -> _Value | None:
    """Returns g of constant * g, or None. g may be a product too."""
    product, number = value, 1.0
    while True:
      made = self._operation(value)
      numbers = [self._number(x) for x in made.operands]
      match made.name, numbers:
        case "neg", [None]:
          number = -number
        case "mul", ([float(n), None] | [None, float(n)]):
          number *= n
        case "div", [None, float(n)] if n:
          number /= n
        case _:
          return None
      value = made.operands[numbers.index(None)]
      if self._is_close(product, number, constant):
        return self._bare(value)

  def _is_close(self, value: _Value, number: float, constant: float) -> bool:
    """Whether a product has a constant, rounded to the dtype of the product."""
    dtype = self._operation(value).value.dtype
    rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
    tolerance = rounding.get(dtype.name, 2.0**-20)
    return math.isclose(number, constant, rel_tol=tolerance)

  def _product(
    self, value: _Value, depth: int = _DEPTH
  ) -> tuple[float, list[_Value]]:
    """Splits a product into its number and all its other factors."""
    if (number := self._number(value)) is not None:
      return number, []
    made = self._operation(value)
    powers = {"mul": 1, "square": 2, "integer_pow": made.params.get("y")}
    power = powers.get(made.name)
    if power not in (1, 2, 3) or depth == 0:
      return 1.0, [value]
    each = [self._product(x, depth - 1) for x in made.operands * power]
    number = math.prod(factor for factor, _ in each)
    return number, [v for _, more in each for v in more]


def _is_widened(before: Any, after: Any) -> bool:
  return {before, after} <= facts.WIDE and np.dtype(after) in (
    before,
    formats.F32,
  )


def joined(rows: Sequence[Any]) -> Any:
  """Returns one row with all rows, in f32 if there are several."""
  if len(rows) == 1:
    return rows[0]
  each = [jnp.ravel(row).astype(jnp.float32) for row in rows]
  return jnp.concatenate(each)


def _options(made: _Operation) -> list[Any]:
  return [made.params.get(name) for name in _OPTIONS]


def _call(
  function: str,
  shape: tuple[Any, ...],
  x: _Value,
  more: dict[str, _Value | None],
  epsilon: float = 0.0,
  halves: str | None = None,
  **numbers: Any,
) -> prologues.PrologueCall:
  """Returns the call of a function whose result has a shape."""
  given = {n: v for n in prologues.OPERANDS if (v := more.get(n)) is not None}
  prologue = prologues.Prologue(
    function=function,
    operands=tuple(given),
    epsilon=epsilon,
    halves=halves,
    **numbers,
  )
  for value in (x, *given.values()):
    if value.function is not None:
      raise _NotMatchedError(
        "a jitted or checkpointed function computes one of its operands",
        str(prologue),
      )
    if value.dtype not in facts.WIDE:
      raise _NotMatchedError(f"an operand is {value.dtype}")
  for name in ("x", *prologues.OF_X):
    value = given.get(name, x)
    if value.shape != (wanted := prologue.x_shape(shape)):
      raise _NotMatchedError(
        f"an operand has shape {list(value.shape)}, not {list(wanted)}"
      )
  arrays = {name: value.atom for name, value in given.items()}
  return prologues.PrologueCall(prologue=prologue, x=x.atom, more=arrays)
