# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations as code makes them, before JAX differentiates or maps them.

`interception_private.intercept` stands below JAX's transformations: of a
`jax.grad` inside of a function it sees what is differentiated already. Here an
operation is seen above them. For that `bind` of the few primitives that matter
has a function in front of it while there is a thread in a `watched` function,
and only then; on all other threads that function does nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import Protocol

from jax._src import core
from jax._src import linear_util
from jax._src import source_info_util
from jax._src.interpreters import ad
from jax._src.interpreters import batching
from jax._src.interpreters import partial_eval
from jax._src.sharding_impls import UNSPECIFIED as UNSPECIFIED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
  """Where among JAX's traces an operation is made.

  Attributes:
    is_outer: under transformations alone (`grad`, `vmap`, ...) inside of the
      watched function. Else a function inside of it is being traced (`jit`, the
      body of a `scan`), and its derivative is taken in there.
    trace: of that function, an object to tell them apart.
  """

  is_outer: bool
  trace: Any


class Watcher(Protocol):
  """What `watched` tells about the operations of a function."""

  def bind(
    self,
    bind: Callable[..., Any],
    primitive: Any,
    args: Sequence[Any],
    params: dict[str, Any],
    position: Position,
  ) -> Any:
    """The results of an operation; `bind(*args, **params)` is JAX's own.

    What it does is not watched itself.
    """


@dataclasses.dataclass(frozen=True)
class _Watch:
  watcher: Watcher
  base: core.Trace


class _Local(threading.local):
  watch: _Watch | None = None


_local: Final = _Local()
_lock: Final = threading.Lock()
_threads_inside = 0


@functools.cache
def _primitives() -> tuple[Any, ...]:
  """Products, what has functions inside, and what only lays numbers out."""
  from jax._src import ad_checkpoint
  from jax._src import ad_util
  from jax._src import custom_batching
  from jax._src import custom_derivatives
  from jax._src import dispatch
  from jax._src import pjit
  from jax._src import shard_map
  from jax._src.lax import convolution
  from jax._src.lax import lax
  from jax._src.lax import parallel
  from jax._src.lax import slicing
  from jax._src.lax.control_flow import conditionals
  from jax._src.lax.control_flow import loops

  return (
    lax.dot_general_p,
    lax.ragged_dot_general_p,
    convolution.conv_general_dilated_p,
    pjit.jit_p,
    ad_checkpoint.remat_p,
    loops.scan_p,
    loops.while_p,
    conditionals.cond_p,
    shard_map.shard_map_p,
    custom_derivatives.custom_jvp_call_p,
    custom_derivatives.custom_vjp_call_p,
    custom_batching.custom_vmap_p,
    lax.reshape_p,
    lax.transpose_p,
    lax.squeeze_p,
    lax.broadcast_in_dim_p,
    lax.split_p,
    lax.concatenate_p,
    lax.rev_p,
    lax.copy_p,
    lax.convert_element_type_p,
    lax.reduce_precision_p,
    lax.optimization_barrier_p,
    lax.stack_p,
    lax.unstack_p,
    lax.tile_p,
    lax.pad_p,
    lax.tie_p,
    ad_util.stop_gradient_p,
    dispatch.device_put_p,
    slicing.slice_p,
    slicing.dynamic_slice_p,
    slicing.gather_p,
    pjit.sharding_constraint_p,
    pjit.layout_constraint_p,
    pjit.reshard_p,
    ad_checkpoint.name_p,
    parallel.all_gather_p,
    parallel.all_gather_invariant_p,
    parallel.all_gather_reduced_p,
    parallel.ppermute_p,
    parallel.all_to_all_p,
    parallel.pbroadcast_p,
    parallel.preduced_p,
    parallel.vary_unreduced_cast_p,
    core.pvary_p,
    core.reduced_vary_cast_p,
  )


def _change_threads_inside(by: int) -> None:
  global _threads_inside
  with _lock:
    if _threads_inside == 0:
      for primitive in _primitives():
        primitive.bind = functools.partial(_bind, primitive, primitive.bind)
    _threads_inside += by
    if _threads_inside == 0:
      for primitive in _primitives():
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
    return watch.watcher.bind(bind, primitive, args, params, position)


def _is_written() -> bool:
  """Whether code makes this operation, and no interpreter of a jaxpr.

  Interpreters (those of derivatives, batching and lowering) say that it is the
  line of the equation's first maker that makes it.
  """
  return source_info_util._source_info_context.context.traceback is None


@contextlib.contextmanager
def _written() -> Iterator[None]:
  """What follows is code's own, though an interpreter calls it (a `bwd`)."""
  local = source_info_util._source_info_context
  before = local.context
  local.context = source_info_util.SourceInfo(None, before.name_stack)
  try:
    yield
  finally:
    local.context = before


def _position(base: core.Trace) -> Position | None:
  """None where a function is traced whose derivative is not taken in there."""
  trace: Any = core.trace_ctx.trace
  is_differentiated = False
  while trace is not base:
    if isinstance(trace, (ad.JVPTrace, ad.LinearizeTrace)):
      is_differentiated = True
    elif not isinstance(trace, batching.BatchTrace):
      return (
        Position(is_outer=False, trace=trace) if is_differentiated else None
      )
    trace = trace.parent_trace
  return Position(is_outer=True, trace=base)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
  """What is done inside is no business of a watcher."""
  watch, _local.watch = _local.watch, None
  try:
    yield
  finally:
    _local.watch = watch


class _TransparentTrace(core.Trace):
  """Hands all to its parent.

  Outside of all transformations JAX dispatches jitted functions without a
  `bind`. In here it does not.
  """

  def __init__(self, parent: Any):
    super().__init__()
    self.parent_trace = parent
    self.requires_low = parent.requires_low

  def stage_value(self, val):
    return self.parent_trace.stage_value(val)

  def process_primitive(self, primitive, tracers, params, /):
    return self.parent_trace.process_primitive(primitive, tracers, params)

  def process_call(self, primitive, f, tracers, params, /):
    return self.parent_trace.process_call(primitive, f, tracers, params)

  def process_custom_jvp_call(self, primitive, fun, jvp, tracers, /, **params):
    return self.parent_trace.process_custom_jvp_call(
      primitive, fun, jvp, tracers, **params
    )

  def process_custom_vjp_call(
    self, primitive, fun, fwd, bwd, tracers, /, **params
  ):
    return self.parent_trace.process_custom_vjp_call(
      primitive, fun, fwd, bwd, tracers, **params
    )

  def process_shard_map(self, primitive, fun, args, /, **params):
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
    base = _TransparentTrace(base)
  before = _local.watch
  _change_threads_inside(1)
  _local.watch = _Watch(watcher, base)
  try:
    with core.set_current_trace(base), _written():
      return fn(*args, **kwargs)
  finally:
    _local.watch = before
    _change_threads_inside(-1)


_watch_transformation = linear_util.transformation2(call_watched)


def watch_wrapped(
  fun: Any, make: Callable[[Sequence[Any], dict[str, Any]], Watcher]
) -> Any:
  """`call_watched` of what JAX passes on as a function, whenever it runs."""
  if isinstance(fun, linear_util.WrappedFun):
    return _watch_transformation(fun, make)
  return functools.partial(call_watched, fun, make)


def identity(x: Any) -> Any:
  """What stands for a value below all transformations.

  Of a traced value the variable of the jaxpr; else the array itself. Equal
  values have one that is the same object, whatever is done above.
  """
  while isinstance(x, core.Tracer):
    inner = getattr(x, "primal", None)
    if inner is None:
      inner = getattr(x, "val", None)
    if inner is None:
      return x
    x = inner
  return x


def is_differentiated(x: Any) -> bool:
  """Whether a derivative with respect to a value, or its maker, is taken."""
  while isinstance(x, core.Tracer):
    if isinstance(x, (ad.JVPTracer, ad.LinearizeTracer)):
      return True
    inner = getattr(x, "val", None)
    if inner is None:
      return False
    x = inner
  return False


def maker(x: Any) -> tuple[Any, Any] | None:
  """The operation that made a traced value.

  Returns:
    The equation, with `primitive`, `params`, and the traced values `in_tracers`
    it takes, and the index of its result that `x` is. None of an argument of
    the function that is traced, and of a constant.
  """
  while isinstance(x, core.Tracer):
    if isinstance(x, partial_eval.DynamicJaxprTracer):
      if x.parent is None:
        return None
      index = next(i for i, v in enumerate(x.parent.outvars) if v is x.val)
      return x.parent, index
    inner = getattr(x, "primal", None)
    x = getattr(x, "val", None) if inner is None else inner
  return None


def is_traced_by(x: Any, trace: Any) -> bool:
  """Whether a value is traced by that trace, below all transformations."""
  while isinstance(x, core.Tracer):
    if isinstance(x, partial_eval.DynamicJaxprTracer):
      return x._trace is trace
    inner = getattr(x, "primal", None)
    x = getattr(x, "val", None) if inner is None else inner
  return False


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
  """How many constants and how many values of its carry a `scan` has."""
  if "num_consts" in params:
    return params["num_consts"], params["num_carry"]
  consts, carry, _ = params["ft_in"].unpack()  # since JAX 0.12
  return len(consts), len(carry)


def slice_type(aval: Any) -> Any:
  """The type of what a trip of a `scan` gets of an array with that type."""
  return core.mapped_aval(aval.shape[0], 0, aval)


def extended_scan(
  params: dict[str, Any], *, consts: int, xs: int
) -> dict[str, Any]:
  """Parameters of a `scan` with so many constants and `xs` more.

  They come before the others of their kind.
  """
  if "num_consts" not in params:
    flattree = importlib.import_module("jax._src.flattree")
    own_consts, carry, own_xs = params["ft_in"].unpack()
    more_consts, more_xs = flattree.nones(consts), flattree.nones(xs)
    every = ((more_consts, own_consts), carry, (more_xs, own_xs))
    return dict(params, ft_in=flattree.pack(every))
  num_consts = params["num_consts"]
  params = dict(params, num_consts=num_consts + consts)
  if "linear" in params:
    first_x = num_consts + params["num_carry"]
    linear = params["linear"]
    params["linear"] = (
      *((False,) * consts + linear[:first_x]),
      *((False,) * xs + linear[first_x:]),
    )
  return params


def abstract_result(
  primitive: Any, args: Sequence[Any], params: dict[str, Any]
) -> Any:
  """The type of the one result of an operation."""
  aval, _ = primitive.abstract_eval(*map(core.typeof, args), **params)
  return aval
