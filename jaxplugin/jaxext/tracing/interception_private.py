# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sees each operation as it is traced, below JAX's transformations.

The module uses JAX's private modules, like `jax_private`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jax._src import core, linear_util, source_info_util
from jax._src.interpreters import partial_eval
from jax.extend import core as extend_core

from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext.tracing import binding_private


class Interceptor(Protocol):
  """Replaces operations of a function, see `intercept`.

  `replace` and `rewrite` run in place of the operation. The trace around the
  intercepted function receives the operations that they run.
  """

  def replace(self, operation: binding_private.BoundOperation) -> Any:
    """Returns results to use instead of the operation's, or None."""

  def rewrite(
    self, operation: binding_private.BoundOperation
  ) -> binding_private.BoundOperation:
    """Returns what to run for an operation that is not replaced."""
    return operation

  def note(
    self, operation: binding_private.BoundOperation, results: Sequence[Any]
  ) -> None:
    """Receives the results of an operation that was not replaced."""

  def inside(
    self, operation: binding_private.BoundOperation, index: int
  ) -> MakeInterceptor:
    """Returns a function that makes the interceptor of a function inside.

    The function of `index` 0 takes the arguments of the operation. Others are
    its rules (`jvp`; `fwd` and `bwd`).
    """

  def shards(
    self, args: Sequence[Any], mesh: Any, in_specs: Sequence[Any]
  ) -> Shards | None:
    """Returns what a `shard_map` takes instead of its arguments, or None."""
    return None

  def note_own(self, function: Any, args: Sequence[Any]) -> None:
    """Receives a function of this package that an operation calls."""
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
  """New arguments of a `shard_map`.

  Attributes:
    args: the arguments.
    in_specs: of each of them.
    start: called with their shards. Returns the interceptor of the function,
      and the arguments that the function had.
  """

  args: list[Any]
  in_specs: list[Any]
  start: Callable[[Sequence[Any]], tuple[Interceptor, list[Any]]]


# Makes the interceptor of one call, given the positional arguments.
MakeInterceptor = Callable[[Sequence[Any]], Interceptor]


class _InterceptingTrace(binding_private.PassingTrace):
  """Shows each operation to an interceptor, then passes it to its parent.

  A function gets the same values as without it, such as concrete arrays.
  Functions inside an operation (`shard_map`, `custom_jvp` and `custom_vjp`, and
  their rules) are also intercepted.
  """

  def __init__(self, parent: Any, interceptor: Interceptor):
    super().__init__(parent)
    self.interceptor = interceptor

  def process_primitive(self, primitive, tracers, params, /):
    operation = binding_private.BoundOperation(primitive, tracers, params)
    with core.set_current_trace(self.parent_trace):
      out = self.interceptor.replace(operation)
      if out is not None:
        return out
      operation = self.interceptor.rewrite(operation)
    out = super().process_primitive(primitive, operation.args, operation.params)
    self.interceptor.note(operation, operation.results_of(out))
    return out

  def inside(self, operation, *functions):
    if jax_private.is_own(functions[0]):
      self.interceptor.note_own(functions[0], operation.args)
      return functions
    return [
      binding_private.wrapped(
        _call_intercepted, f, self.interceptor.inside(operation, i)
      )
      for i, f in enumerate(functions)
    ]

  def process_shard_map(self, primitive, fun, args, /, **params):
    shards = self.interceptor.shards(args, params["mesh"], params["in_specs"])
    if shards is None:
      return super().process_shard_map(primitive, fun, args, **params)
    names = ("",) * len(shards.args)
    params["debug_info"] = params["debug_info"]._replace(arg_names=names)
    params["in_specs"] = tuple(shards.in_specs)

    def call(*inner):
      interceptor, own = shards.start(inner)
      return _call_intercepted(fun, lambda _: interceptor, *own)

    return self.parent_trace.process_shard_map(
      primitive, call, shards.args, **params
    )


def _call_intercepted(
  fn: Callable[..., Any],
  make: MakeInterceptor,
  *args: Any,
  **kwargs: Any,
) -> Any:
  parent = core.trace_ctx.trace
  with core.set_current_trace(_InterceptingTrace(parent, make(args))):
    return fn(*args, **kwargs)


def intercept(
  fn: Callable[..., Any], make: MakeInterceptor
) -> Callable[..., Any]:
  """Returns `fn` with an interceptor of its operations.

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
  """Evaluates a (closed) jaxpr with an interceptor.

  Operations of a function of JAX get the source line of the caller.
  """
  if not isinstance(jaxpr, extend_core.ClosedJaxpr):
    jaxpr = extend_core.ClosedJaxpr(jaxpr, ())
  if jax_private.is_of_jax(jaxpr):
    line = source_info_util.current().traceback
    eqns = [
      eqn.replace(source_info=eqn.source_info.replace(traceback=line))
      for eqn in jaxpr.eqns
    ]
    jaxpr = jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(eqns=eqns))
  function = core.jaxpr_as_fun(jaxpr)
  return intercept(function, lambda _: interceptor)(*args)


def intercept_jaxpr(
  jaxpr: Any,
  start: Callable[[list[Any], list[Any]], Interceptor],
  extra: Sequence[tuple[int, Any]] = (),
  dropped: frozenset[int] = frozenset(),
  finish: Callable[[Sequence[Any]], Sequence[Any]] = lambda extra: (),
) -> tuple[Any, list[Any]]:
  """Traces a (closed) jaxpr once more, with an interceptor.

  Source lines, name scopes, effects and the names of arguments stay the same.

  Args:
    jaxpr: the function to trace.
    start: returns the interceptor. Its arguments are the further arguments and
      the list of `jaxpr`'s arguments. It must replace each dropped argument,
      which is None in that list.
    extra: (index, type) of each further argument, in order. It comes before the
      argument of `jaxpr` with this index.
    dropped: indices of arguments of `jaxpr` that the new jaxpr does not have.
    finish: function of the further arguments, called after the function. Its
      results come before all other results.

  Returns:
    A jaxpr, closed if `jaxpr` is closed. Also the values that it takes before
    all other arguments, for arrays that were not arguments of the interceptor.
  """
  is_closed = isinstance(jaxpr, extend_core.ClosedJaxpr)
  closed = jaxpr if is_closed else extend_core.ClosedJaxpr(jaxpr, ())
  evaluate = core.jaxpr_as_fun(closed)
  types = list(getattr(closed, "in_aval_qdds", closed.in_avals))
  debug_info = closed.jaxpr.debug_info
  names = list(debug_info.arg_names or [""] * len(types))
  # The type and name of each argument, and its number if `jaxpr` has it.
  arguments: list[tuple[Any, str, int | None]] = []
  for i in range(len(types) + 1):
    arguments += [(type, "", None) for before, type in extra if before == i]
    if i < len(types) and i not in dropped:
      arguments.append((types[i], names[i], i))

  def call(*args):
    more, own = [], [None] * len(types)
    for x, (_, _, index) in zip(args, arguments, strict=True):
      if index is None:
        more.append(x)
      else:
        own[index] = x
    parent = core.trace_ctx.trace
    interceptor = start(more, own)
    with core.set_current_trace(_InterceptingTrace(parent, interceptor)):
      out = evaluate(*own)
    return [*finish(more), *out]

  avals = [type for type, _, _ in arguments]
  if extra or dropped:
    arg_names = tuple(name for _, name, _ in arguments)
    debug_info = debug_info._replace(arg_names=arg_names, result_paths=None)
  function = linear_util.wrap_init(call, debug_info=debug_info)
  traced, _, consts = partial_eval.trace_to_jaxpr_dynamic(function, avals)
  if is_closed:
    return extend_core.ClosedJaxpr(traced, consts), []
  if consts:
    traced = partial_eval.convert_constvars_jaxpr(traced)
  return traced, list(consts)
