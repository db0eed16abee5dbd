# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations seen below JAX's transformations, one by one as they are traced.

It stands on JAX's private modules, as `jax_private` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Protocol

from jax._src import core
from jax._src import linear_util
from jax._src.interpreters import partial_eval
from jax.extend import core as extend_core

from jaxplugin.jaxext.tracing import provenance_private


class Interceptor(Protocol):
  """What `intercept` asks about every operation of a function.

  Both methods run where the operation would have: operations that they make go
  to whatever encloses the intercepted function.
  """

  def replace(
    self, primitive: Any, args: Sequence[Any], params: dict[str, Any]
  ) -> Any:
    """The results to use in place of the operation's, or None."""

  def rewrite(self, primitive: Any, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters to use, of an operation that is not replaced."""

  def note(
    self, primitive: Any, args: Sequence[Any], params: dict[str, Any], out: Any
  ) -> None:
    """Told the results of an operation that was not replaced."""

  def inside(
    self, primitive: Any, args: Sequence[Any], index: int
  ) -> MakeInterceptor:
    """Makes the interceptor of a function inside of an operation.

    That of `index` 0 takes `args`; others are its rules (`jvp`; `fwd`, `bwd`).
    """


# Makes the interceptor of one call, given the positional arguments.
MakeInterceptor = Callable[[Sequence[Any]], Interceptor]


class _InterceptingTrace(core.Trace):
  """Shows every operation to an interceptor, then hands it to its parent.

  It wraps no values, so a function sees through it what it would have seen
  without it, concrete arrays among them. Functions inside of an operation
  (those of `shard_map`, `custom_jvp` and `custom_vjp`, with their rules) are
  intercepted as well, whenever they run.
  """

  def __init__(self, parent: Any, interceptor: Interceptor):
    super().__init__()
    self.parent_trace = parent
    self.requires_low = parent.requires_low
    self.interceptor = interceptor

  def stage_value(self, val):
    return self.parent_trace.stage_value(val)

  def process_primitive(self, primitive, tracers, params, /):
    with core.set_current_trace(self.parent_trace):
      out = self.interceptor.replace(primitive, tracers, params)
      if out is not None:
        return out
      params = self.interceptor.rewrite(primitive, params)
    out = self.parent_trace.process_primitive(primitive, tracers, params)
    self.interceptor.note(primitive, tracers, params, out)
    return out

  def process_call(self, primitive, f, tracers, params, /):
    (f,) = self._inside(primitive, tracers, f)
    return self.parent_trace.process_call(primitive, f, tracers, params)

  def process_custom_jvp_call(self, primitive, fun, jvp, tracers, /, **params):
    functions = self._inside(primitive, tracers, fun, jvp)
    return self.parent_trace.process_custom_jvp_call(
      primitive, *functions, tracers, **params
    )

  def process_custom_vjp_call(
    self, primitive, fun, fwd, bwd, tracers, /, **params
  ):
    functions = self._inside(primitive, tracers, fun, fwd, bwd)
    return self.parent_trace.process_custom_vjp_call(
      primitive, *functions, tracers, **params
    )

  def process_shard_map(self, primitive, fun, args, /, **params):
    (fun,) = self._inside(primitive, args, fun)
    return self.parent_trace.process_shard_map(primitive, fun, args, **params)

  def _inside(self, primitive, args, *functions):
    if provenance_private.is_own_function(functions[0]):
      return functions
    return [
      _intercept_wrapped(f, self.interceptor.inside(primitive, args, i))
      for i, f in enumerate(functions)
    ]


def _call_intercepted(
  fn: Callable[..., Any],
  make: MakeInterceptor,
  *args: Any,
  **kwargs: Any,
) -> Any:
  parent = core.trace_ctx.trace
  with core.set_current_trace(_InterceptingTrace(parent, make(args))):
    return fn(*args, **kwargs)


_intercept_transformation = linear_util.transformation2(_call_intercepted)


def _intercept_wrapped(fun: Any, make: MakeInterceptor) -> Any:
  """`intercept` of what JAX passes on as a function."""
  if isinstance(fun, linear_util.WrappedFun):
    return _intercept_transformation(fun, make)
  return functools.partial(_call_intercepted, fun, make)


def intercept(
  fn: Callable[..., Any], make: MakeInterceptor
) -> Callable[..., Any]:
  """`fn`, with an interceptor asked about each of its operations.

  Args:
    fn: any callable.
    make: makes the interceptor of one call.
  """

  @functools.wraps(fn)
  def intercepted(*args, **kwargs):
    return _call_intercepted(fn, make, *args, **kwargs)

  return intercepted


def evaluate(
  jaxpr: Any, args: Sequence[Any], interceptor: Interceptor
) -> list[Any]:
  """Evaluates a (closed) jaxpr; the interceptor is asked about operations."""
  if not isinstance(jaxpr, extend_core.ClosedJaxpr):
    jaxpr = extend_core.ClosedJaxpr(jaxpr, ())
  function = core.jaxpr_as_fun(jaxpr)
  return intercept(function, lambda _: interceptor)(*args)


def intercept_jaxpr(
  jaxpr: Any,
  make: MakeInterceptor,
  extra: Sequence[tuple[int, Any]] = (),
  results: Callable[[Sequence[Any]], Sequence[Any]] = lambda extra: (),
) -> tuple[Any, list[Any]]:
  """Traces a (closed) jaxpr once more, with an interceptor.

  Lines of source, name scopes, effects and the names of arguments are kept.

  Args:
    jaxpr: which it is.
    make: makes the interceptor, given first the extra arguments, then those of
      `jaxpr`.
    extra: of each argument more: before which one of `jaxpr` it comes, and its
      type. In order.
    results: of the extra arguments, what is returned before all else.

  Returns:
    A jaxpr, closed if the other one was. Else values that it takes before all
    other arguments: what an interceptor made of no argument.
  """
  is_closed = isinstance(jaxpr, extend_core.ClosedJaxpr)
  closed = jaxpr if is_closed else extend_core.ClosedJaxpr(jaxpr, ())
  evaluate = core.jaxpr_as_fun(closed)
  avals = list(getattr(closed, "in_aval_qdds", closed.in_avals))
  debug_info = closed.jaxpr.debug_info
  names = list(debug_info.arg_names or [""] * len(avals))
  places = [before + i for i, (before, _) in enumerate(extra)]
  for place, (_, aval) in zip(places, extra, strict=True):
    avals.insert(place, aval)
    names.insert(place, "")

  def call(*args):
    more = [args[i] for i in places]
    own = [x for i, x in enumerate(args) if i not in places]
    parent = core.trace_ctx.trace
    interceptor = make((*more, *own))
    with core.set_current_trace(_InterceptingTrace(parent, interceptor)):
      out = evaluate(*own)
    return [*results(more), *out]

  if extra:
    debug_info = debug_info._replace(arg_names=tuple(names), result_paths=None)
  function = linear_util.wrap_init(call, debug_info=debug_info)
  traced, _, consts = partial_eval.trace_to_jaxpr_dynamic(function, avals)
  if is_closed:
    return extend_core.ClosedJaxpr(traced, consts), []
  if consts:
    traced = partial_eval.convert_constvars_jaxpr(traced)
  return traced, list(consts)
