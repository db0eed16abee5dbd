# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sees operations before JAX differentiates or maps them.

`interception_private.intercept` works below JAX's transformations: if a
function calls `jax.grad`, it sees the operations of the derivative. A watcher
sees the operations that were differentiated. `call_watched` puts a function in
front of `bind` of some primitives while a thread runs a watched function. On
other threads that function does nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from jax._src import api_util, core, linear_util, source_info_util
from jax._src.interpreters import ad, batching, partial_eval
from jax._src.sharding_impls import UNSPECIFIED as UNSPECIFIED
from jax.extend import core as extend_core


@dataclasses.dataclass(frozen=True, eq=False)
class BoundOperation:
  """An operation that code binds, or an equation of a jaxpr.

  Attributes:
    primitive: its primitive.
    args: its arguments; types of them for an equation.
    params: its parameters.
  """

  primitive: Any
  args: Sequence[Any]
  params: dict[str, Any]

  @classmethod
  def of_equation(cls, eqn: Any) -> BoundOperation:
    return cls(eqn.primitive, [v.aval for v in eqn.invars], eqn.params)

  @property
  def name(self) -> str:
    """The name of the primitive."""
    return self.primitive.name

  @property
  def function_name(self) -> str:
    """The name of a jitted function, such as "add"; otherwise `name`."""
    name = self.params.get("name") if self.name == "jit" else None
    return name or self.name

  def bind(self) -> Any:
    """Runs the operation."""
    return self.primitive.bind(*self.args, **self.params)

  def of_types(self) -> BoundOperation:
    """Returns the operation with types of its arguments.

    JAX keeps functions that rules of derivatives close over. Tracers in them
    would leak.
    """
    types = list(map(core.typeof, self.args))
    return dataclasses.replace(self, args=types)

  def results_of(self, out: Any) -> list[Any]:
    """Returns a list of the results, given what `bind` returned."""
    return list(out) if self.primitive.multiple_results else [out]

  def result_type(self) -> Any:
    """Returns the type of the result of an operation with one result."""
    types = map(core.typeof, self.args)
    aval, _ = self.primitive.abstract_eval(*types, **self.params)
    return aval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
  """The trace of JAX that an operation is bound in.

  Attributes:
    is_outer: True if only transformations (`grad`, `vmap`, ...) are between the
      operation and the watched function. False if a function inside it is being
      traced (`jit`, the body of a `scan`), and that function differentiates.
    trace: the trace of the function that contains the operation.
  """

  is_outer: bool
  trace: Any


class Watcher(Protocol):
  """Sees the operations of a function, see `call_watched`.

  Attributes:
    primitives: the operations it sees, or their names if they are JAX's. All
      watchers have the same.
  """

  @property
  def primitives(self) -> frozenset[Any]: ...

  def bind(self, operation: BoundOperation, position: Position) -> Any:
    """Returns the results of an operation.

    The watcher does not see operations that this method binds.
    """

  def note_quantized(self) -> None:
    """Receives that code inside replaced matmuls by quantized ones."""


@dataclasses.dataclass(frozen=True)
class _Watch:
  watcher: Watcher
  base: core.Trace


class _ThreadWatch(threading.local):
  watch: _Watch | None = None


_local: Final = _ThreadWatch()
_lock: Final = threading.Lock()
_threads_inside = 0


# Modules that define the primitives which a watcher may name.
_MODULES: Final = (
  *("core", "pjit", "dispatch", "ad_util", "ad_checkpoint", "shard_map"),
  *("custom_batching", "custom_derivatives"),
  *("lax.lax", "lax.slicing", "lax.parallel", "lax.convolution"),
  *("lax.control_flow.conditionals", "lax.control_flow.loops"),
)


def is_placed(jit: Any) -> bool:
  """Whether a `jit` gives a sharding or layout of an argument or a result.

  Args:
    jit: a `BoundOperation` or an equation.
  """
  params = jit.params
  shardings = (*params["in_shardings"], *params["out_shardings"])
  layouts = (*params["in_layouts"], *params["out_layouts"])
  return any(not isinstance(s, type(UNSPECIFIED)) for s in shardings) or any(
    layout is not None for layout in layouts
  )


@functools.cache
def _primitives(names: frozenset[Any]) -> tuple[Any, ...]:
  found = {x: None for x in names if isinstance(x, core.Primitive)}
  for module in _MODULES:
    for x in vars(importlib.import_module(f"jax._src.{module}")).values():
      if isinstance(x, core.Primitive) and x.name in names:
        found[x] = None
  return tuple(found)


def _change_threads_inside(by: int, names: frozenset[Any]) -> None:
  global _threads_inside
  with _lock:
    if _threads_inside == 0:
      for primitive in _primitives(names):
        primitive.bind = functools.partial(_bind, primitive, primitive.bind)
    _threads_inside += by
    if _threads_inside == 0:
      for primitive in _primitives(names):
        del primitive.bind  # the class has its own


def _bind(
  primitive: Any, bind: Callable[..., Any], /, *args: Any, **params: Any
) -> Any:
  watch = _local.watch
  if watch is None or not _is_written():
    return bind(*args, **params)
  position = _position(watch.base)
  if position is None:
    return bind(*args, **params)
  with unwatched():
    operation = BoundOperation(primitive, args, params)
    return watch.watcher.bind(operation, position)


def _is_written() -> bool:
  """Returns whether code binds this operation, and not a jaxpr interpreter.

  Interpreters (for derivatives, batching and lowering) set the traceback of the
  current source info to that of the equation.
  """
  return source_info_util._source_info_context.context.traceback is None


@contextlib.contextmanager
def _written() -> Iterator[None]:
  """Makes operations inside count as written, also when JAX calls a `bwd`."""
  local = source_info_util._source_info_context
  before = local.context
  local.context = source_info_util.SourceInfo(None, before.name_stack)
  try:
    yield
  finally:
    local.context = before


def _position(base: core.Trace) -> Position | None:
  """Returns the position; None inside a traced function without derivatives."""
  trace: Any = core.trace_ctx.trace
  is_differentiated = False
  while trace is not base:
    if isinstance(trace, (ad.JVPTrace, ad.LinearizeTrace)):
      is_differentiated = True
    elif not isinstance(trace, (batching.BatchTrace, PassingTrace)):
      return (
        Position(is_outer=False, trace=trace) if is_differentiated else None
      )
    trace = trace.parent_trace
  return Position(is_outer=True, trace=base)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
  """Hides the operations inside from the watcher."""
  watch, _local.watch = _local.watch, None
  try:
    yield
  finally:
    _local.watch = watch


def note_quantized() -> None:
  """Calls `Watcher.note_quantized` of the watcher around, if there is one."""
  if _local.watch is not None:
    _local.watch.watcher.note_quantized()


class PassingTrace(core.Trace):
  """Passes every operation to its parent, and does not wrap values.

  A watcher sees the operations inside, as in its own function. Outside of all
  traces JAX dispatches jitted functions without `bind`. With this trace it
  calls `bind`.
  """

  def __init__(self, parent: Any):
    super().__init__()
    self.parent_trace = parent
    self.requires_low = parent.requires_low

  def inside(self, operation, *functions):
    """Returns the functions of an operation, in place of `functions`."""
    del operation
    return functions

  def stage_value(self, val):
    return self.parent_trace.stage_value(val)

  def process_primitive(self, primitive, tracers, params, /):
    return self.parent_trace.process_primitive(primitive, tracers, params)

  def process_call(self, primitive, f, tracers, params, /):
    (f,) = self.inside(BoundOperation(primitive, tracers, params), f)
    return self.parent_trace.process_call(primitive, f, tracers, params)

  def process_custom_jvp_call(self, primitive, fun, jvp, tracers, /, **params):
    operation = BoundOperation(primitive, tracers, params)
    functions = self.inside(operation, fun, jvp)
    return self.parent_trace.process_custom_jvp_call(
      primitive, *functions, tracers, **params
    )

  def process_custom_vjp_call(
    self, primitive, fun, fwd, bwd, tracers, /, **params
  ):
    operation = BoundOperation(primitive, tracers, params)
    functions = self.inside(operation, fun, fwd, bwd)
    return self.parent_trace.process_custom_vjp_call(
      primitive, *functions, tracers, **params
    )

  def process_shard_map(self, primitive, fun, args, /, **params):
    (fun,) = self.inside(BoundOperation(primitive, args, params), fun)
    return self.parent_trace.process_shard_map(primitive, fun, args, **params)


def call_watched(
  fn: Callable[..., Any],
  make: Callable[[Sequence[Any], dict[str, Any]], Watcher],
  *args: Any,
  **kwargs: Any,
) -> Any:
  """Calls `fn`, with a watcher of its operations.

  Args:
    fn: any callable.
    make: makes the watcher, given the arguments.
    *args, **kwargs: the arguments.
  """
  watcher = make(args, kwargs)
  base = core.trace_ctx.trace
  if core.trace_state_clean():
    base = PassingTrace(base)
  before = _local.watch
  _change_threads_inside(1, watcher.primitives)
  _local.watch = _Watch(watcher, base)
  try:
    with core.set_current_trace(base), _written():
      return fn(*args, **kwargs)
  finally:
    _local.watch = before
    _change_threads_inside(-1, watcher.primitives)


def wrapped(call: Callable[..., Any], fun: Any, make: Any) -> Any:
  """Wraps an operation's function: it becomes `call(fun, make, *args)`."""
  if isinstance(fun, linear_util.WrappedFun):
    return linear_util.transformation2(call)(fun, make)
  return functools.partial(call, fun, make)


def _inner(x: Any) -> Any:
  """Returns the value below a tracer, or None."""
  inner = getattr(x, "primal", None)
  return getattr(x, "val", None) if inner is None else inner


def identity(x: Any) -> Any:
  """Returns an object that identifies a value below all transformations.

  This is the variable of the jaxpr for a traced value, and otherwise the array.
  """
  while isinstance(x, core.Tracer) and (inner := _inner(x)) is not None:
    x = inner
  return x


def is_differentiated(x: Any) -> bool:
  """Returns whether a value, or its maker, is being differentiated."""
  while isinstance(x, core.Tracer):
    if isinstance(x, (ad.JVPTracer, ad.LinearizeTracer)):
      return True
    x = getattr(x, "val", None)
  return False


def staged(x: Any) -> Any:
  """Returns the tracer of a jaxpr below all transformations, or None."""
  while isinstance(x, core.Tracer):
    if isinstance(x, partial_eval.DynamicJaxprTracer):
      return x
    x = _inner(x)
  return None


def below_vmaps(x: Any) -> Any:
  """Returns `staged(x)` if x is only mapped by first dimensions, else None."""
  while isinstance(x, batching.BatchTracer) and x.batch_dim == 0:
    x = x.val
  return x if isinstance(x, partial_eval.DynamicJaxprTracer) else None


def mapped_as(x: Any, value: Any) -> Any:
  """Returns a value below all transformations as one in the `vmap`s of x.

  The value has the shape of `staged(x)`, and the same mapped dimensions.
  """
  if isinstance(x, batching.BatchTracer):
    inner = mapped_as(x.val, value)
    return batching.BatchTracer(x._trace, inner, x.batch_dim)
  inner = _inner(x) if isinstance(x, core.Tracer) else None
  return mapped_as(inner, value) if isinstance(inner, core.Tracer) else value


def mapped_inside(x: Any, value: Any) -> Any:
  """Returns a value with the inner `vmap`s of x, which the value lacks.

  Below all transformations it has the shape of x, and the same mapped
  dimensions.
  """
  if not isinstance(x, core.Tracer) or x._trace is getattr(
    value, "_trace", None
  ):
    return value
  inner = mapped_inside(_inner(x), value)
  if isinstance(x, batching.BatchTracer):
    return batching.BatchTracer(x._trace, inner, x.batch_dim)
  return inner


def maker(x: Any) -> tuple[Any, Any] | None:
  """Returns the operation that computed a traced value.

  Returns:
    The equation (with `primitive`, `params` and its operands `in_tracers`), and
    the index of its result that `x` is. None for an argument of the traced
    function, and for a constant.
  """
  x = staged(x)
  if x is None or x.parent is None:
    return None
  index = next(i for i, v in enumerate(x.parent.outvars) if v is x.val)
  return x.parent, index


def users(x: Any) -> Iterator[Any]:
  """Yields the operations that have read a traced value, the latest first."""
  x = staged(x)
  if x is None:
    return
  for eqn in reversed(x._trace.frame.tracing_eqns):
    eqn = eqn() if isinstance(eqn, weakref.ref) else eqn
    if eqn is x.parent:
      return
    if eqn is not None and any(
      getattr(v, "val", v) is x.val for v in eqn.invars
    ):
      yield eqn


def is_traced_by(x: Any, trace: Any) -> bool:
  """Returns whether `trace` traces a value, below all transformations."""
  x = staged(x)
  return x is not None and x._trace is trace


def are_in_one_trace(x: Any, y: Any) -> bool:
  """Returns whether two values are differentiated and mapped by one trace."""
  return getattr(x, "_trace", None) is getattr(y, "_trace", None)


def use_of(values: Sequence[Any]) -> Callable[[], bool]:
  """Returns a function that says whether code may still use traced values.

  It may not use values of a function that JAX has traced before, which a rule
  of a custom derivative may remember. JAX then replaces the list of the
  function's equations.
  """
  traces = [x._trace for x in values if isinstance(x, core.Tracer)]
  frames = [trace.frame for trace in traces if hasattr(trace, "frame")]
  equations = [frame.tracing_eqns for frame in frames]

  def is_allowed() -> bool:
    return all(trace.is_valid() for trace in traces) and all(
      frame.tracing_eqns is own
      for frame, own in zip(frames, equations, strict=True)
    )

  return is_allowed


def bind(eqn: Any, args: Sequence[Any], params: dict[str, Any]) -> list[Any]:
  """Runs an equation's operation with other arguments and parameters.

  The operation keeps its source line and its scopes.
  """
  bound = eqn.primitive.get_bind_params(params)
  functions, bound = bound if isinstance(bound, tuple) else ((), bound)
  info = eqn.source_info
  stack = source_info_util.current_name_stack() + info.name_stack
  with (
    source_info_util.user_context(info.traceback, name_stack=stack),
    eqn.ctx.manager,
  ):
    results = eqn.primitive.bind(*functions, *args, **bound)
  return list(results) if eqn.primitive.multiple_results else [results]


def traced(fn: Callable[..., Any], avals: Sequence[Any]) -> Any:
  """Returns the closed jaxpr of a function of arrays of given types."""
  info = api_util.debug_info("traced", fn, avals, {})
  function = linear_util.wrap_init(fn, debug_info=info)
  jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(function, list(avals))
  return extend_core.ClosedJaxpr(jaxpr, consts)


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
  """Returns the numbers of constants and of values in the carry of a `scan`."""
  if "num_consts" in params:
    return params["num_consts"], params["num_carry"]
  consts, carry, _ = params["ft_in"].unpack()  # since JAX 0.12
  return len(consts), len(carry)


def slice_type(aval: Any) -> Any:
  """Returns the type of the slice of an array in one trip of a `scan`."""
  return core.mapped_aval(aval.shape[0], 0, aval)


def resized_scan(
  params: dict[str, Any], kept: Sequence[bool], *, consts: int, xs: int
) -> dict[str, Any]:
  """Returns parameters of a `scan` with other arguments.

  Args:
    params: the parameters before.
    kept: for each argument, whether it stays.
    consts, xs: numbers of new constants and new `xs`. They come before the
      constants and `xs` that stay.
  """
  if "num_consts" not in params:
    flattree = importlib.import_module("jax._src.flattree")
    kept_in = params["ft_in"].filter_with_mask(list(kept))
    own_consts, carry, own_xs = kept_in.unpack()
    more_consts, more_xs = flattree.nones(consts), flattree.nones(xs)
    every = ((more_consts, own_consts), carry, (more_xs, own_xs))
    return dict(params, ft_in=flattree.pack(every))
  num_consts = params["num_consts"]
  return dict(params, num_consts=sum(kept[:num_consts]) + consts)
