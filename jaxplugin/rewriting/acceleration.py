# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`accelerate`: block-scaled dots in code that calls JAX's scaled dots."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import jax
import numpy as np
from jax.extend import core as extend_core
from jax.interpreters import batching, mlir

from jaxplugin.core import error_context, formats
from jaxplugin.dot import backends
from jaxplugin.dropin import nn_scaled
from jaxplugin.jaxext import jax_private, program
from jaxplugin.jaxext.tracing import binding_private, interception_private
from jaxplugin.rewriting import calls, facts, ragged_dots, sites

WHO: Final = "accelerate"

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_NNX: Final = (
  "Apply accelerate to the function that calls the model, and transform the"
  " result: nnx.grad(accelerate(loss)), inside nnx.jit."
)


# `jax.nn.scaled_matmul` is a jitted function of this name around one equation.
_MATMUL_JIT_NAME: Final = "_scaled_matmul"

_RAGGED: Final = frozenset({ragged_dots.NAME})
# If all elements of their first operand are one, so are those of the result.
_KEEP_ONES: Final = frozenset(
  {"broadcast_in_dim", "convert_element_type", "reshape", "copy"}
)


def accelerate(
  fn: Callable[_Parameters, _Result], *, implementation: str | None = None
) -> Callable[_Parameters, _Result]:
  """Returns `fn` with JAX's scaled dots replaced by block-scaled dots.

  `jax.nn.scaled_matmul`, `jax.nn.scaled_dot_general` and `jax.lax.scaled_dot`
  compute what `jp.nn.scaled_matmul` and `jp.scaled_dot` do. They run on every
  platform, and accumulate in f32. `scaled_dot_general` still quantizes as JAX
  does.

  `jax.lax.ragged_dot` and `ragged_dot_general` become `jp.ragged_dot` if `fn`
  dequantizes their weights from block-scaled values. Rounding of the
  dequantized weights is then left out.

  Calls inside `jit`, `scan`, `while_loop`, `cond`, `checkpoint`, `shard_map`,
  `vmap`, `grad`, `custom_jvp` and `custom_vjp` are included. Everything else in
  `fn` stays the same. Results keep JAX's types; on explicit mesh axes they are
  replicated. docs/how_to/migrate.md has the limits.

  Args:
    fn: any callable.
    implementation: a backend for all dots, see `block_scaled_dot`; None chooses
      one for each.

  Returns:
    A function with the signature of `fn`. Call it inside `jit`.

  Raises:
    TypeError: If `fn` is not callable.
    ValueError: If `implementation` is unknown. The result raises it for a
      negative NVFP4 scale factor.
    NotImplementedError: From the result, if the forced implementation does not
      support a dot.

  Warns:
    jp.NotQuantizedWarning: If `fn` calls none of these functions, or a dot is
      not supported and stays. The text has the reason.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> x = jp.quantize(jnp.ones((1, 16, 64)), "mxfp8")
    >>> f = jax.jit(jp.accelerate(jax.nn.scaled_matmul))
    >>> print(f(x.values, x.values, x.scale, x.scale)[0, 0, 0])
    64.0
  """
  error_context.require_function(WHO, fn)
  with error_context.in_function(WHO):
    backends.validate_name(implementation)

  @functools.wraps(fn)
  def accelerated(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> Any:
    outcome = _Outcome()
    make = lambda own: _Accelerator(implementation, outcome)
    with error_context.explaining_nnx(WHO, _NNX):
      result = interception_private.intercept(fn, make)(*args, **kwargs)
    if not outcome.is_noted:
      warnings.warn(
        f"{WHO}: replaced nothing: fn called neither jax.nn.scaled_matmul,"
        " scaled_dot_general, jax.lax.scaled_dot nor a ragged dot of"
        f" dequantized weights; call jaxplugin's functions, or leave {WHO} out",
        error_context.NotQuantizedWarning,
        stacklevel=2,
      )
    return result

  return accelerated


@dataclasses.dataclass
class _Outcome:
  """The outcome of one call of an accelerated function.

  Attributes:
    is_noted: whether a dot was replaced, a warning said why it was not, or a
      rule of a custom derivative may run one later.
  """

  is_noted: bool = False


class _Accelerator(calls.Walker, interception_private.Interceptor):
  """Replaces JAX's scaled dots in one call, and follows dequantized values."""

  def __init__(self, implementation: str | None, outcome: _Outcome):
    self._implementation = implementation
    self._outcome = outcome
    # Values computed from dequantized ones that no dot can replace, by
    # identity, and the operation that computed them.
    self._lost = facts.Values[str]()
    # Traced values whose elements are all known to be 1, by identity.
    self._ones = facts.Values[bool]()
    self._products = facts.ArrayProducts()

  def replace(self, operation: binding_private.BoundOperation) -> Any:
    if operation.name == ragged_dots.NAME:
      return self._ragged_dot(operation)
    dot = _scaled_dot(operation)
    if dot is not None:
      return self._dot(dot)
    if any(self._known(x) is not None for x in operation.args):
      return self._inside(operation)
    return None

  def _dot(self, operation: binding_private.BoundOperation) -> Any:
    """Returns the results of a scaled dot, or None if it stays."""
    matmuls, _ = jax_private.scaled_primitives()
    is_matmul = operation.primitive in matmuls
    args, numbers = list(operation.args), nn_scaled.MATMUL_NUMBERS
    if not is_matmul:
      numbers = operation.params["dimension_numbers"]
      for i, contracting in zip((2, 3), numbers[0], strict=True):
        if self._is_placeholder(args[i], contracting):
          args[i] = None
    dtype = operation.params["preferred_element_type"]
    reason = _unsupported(args, numbers, dtype)
    self._outcome.is_noted = True
    if reason is not None:
      _warn(operation.name, reason)
      return None
    lhs, rhs, lhs_scale, rhs_scale = args
    # `scaled_dot_general` calls a matmul with configs of different block sizes.
    if is_matmul and lhs_scale.shape[2] == rhs_scale.shape[2]:
      result = nn_scaled.scaled_matmul(
        lhs,
        rhs,
        lhs_scale,
        rhs_scale,
        dtype,
        implementation=self._implementation,
      )
    else:
      result = nn_scaled.scaled_dot(
        lhs,
        rhs,
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale,
        dimension_numbers=numbers,
        preferred_element_type=dtype,
        implementation=self._implementation,
      )
    result = _with_jax_type(result)
    return [result] if is_matmul else result

  def _ragged_dot(
    self, operation: binding_private.BoundOperation
  ) -> jax.Array | None:
    lhs, rhs, *_ = operation.args
    known = self._products.of(lhs), self._products.of(rhs)
    try:
      result = ragged_dots.replaced(operation, known, self._implementation)
    except facts.NotSupported as reason:
      self._outcome.is_noted = True
      _warn(operation.name, str(reason))
      return None
    numbers = operation.params["ragged_dot_dimension_numbers"]
    lost_by = self._lost_by(rhs)
    is_lost = bool(lost_by and numbers.rhs_group_dimensions)
    if result is None and is_lost:
      _warn(operation.name, lost_by)
    self._outcome.is_noted |= result is not None or is_lost
    if result is not None:
      sites.note_taken(operation)
    return result

  def _child(self) -> _Accelerator:
    return _Accelerator(self._implementation, self._outcome)

  def _known(self, x: Any) -> facts.ArrayProduct | None:
    """Returns what is known of a value that is dequantized."""
    # An inner function dequantizes a value of a narrow dtype itself.
    if getattr(x, "dtype", None) not in facts.WIDE:
      return None
    found = self._products.of(x)
    return found if found and ragged_dots.is_quantized(found) else None

  # As a `calls.Walker`.

  def layers(
    self, fact: facts.ArrayProduct, length: int
  ) -> tuple[facts.ArrayProduct, tuple[bool, ...]] | None:
    return facts.layers(fact)

  def leave(
    self, name: str, x: Any, fact: facts.ArrayProduct, reason: str
  ) -> None:
    self._lose(x, f"{name}: {reason}")

  def interceptor_of(
    self, jaxpr: Any, known: list[tuple[int, Any]], args: list[Any]
  ) -> _Accelerator:
    child = self._child()
    for i, product in known:
      child._products.put(args[i], product)
    return child

  def _inside(self, operation: binding_private.BoundOperation) -> Any:
    """Returns the results of an operation on dequantized weights.

    None if no ragged dot is inside, or the operation cannot be followed.
    """
    is_kernel = operation.name in program.KERNELS
    if is_kernel or not calls.any_contains(operation, _RAGGED):
      return None
    known = list(map(self._known, operation.args))
    out = calls.results(self, operation, known)
    if out is not None:
      self._products.note(operation, operation.results_of(out))
    else:
      self._outcome.is_noted = True
      _warn(
        operation.name,
        "it contains a ragged dot, and accelerate does not follow dequantized"
        " weights into it; call jaxplugin.ragged_dot there",
      )
    return out

  def _lose(self, x: Any, reason: str) -> None:
    if isinstance(x, jax.core.Tracer):
      self._lost.put(x, reason)

  def _lost_by(self, x: Any) -> str:
    """Returns why a value is lost (see `_lost`); "" if it is not."""
    return self._lost.get(x) or ""

  def rewrite(
    self, operation: binding_private.BoundOperation
  ) -> binding_private.BoundOperation:
    if operation.name in program.KERNELS:
      return operation
    self._outcome.is_noted |= calls.any_contains(
      operation, _scaled_dots(), in_kernels=True
    )

    def accelerated(jaxpr: Any) -> Any:
      new, is_noted, taken = _accelerated_jaxpr(jaxpr, self._implementation)
      self._outcome.is_noted |= is_noted
      sites.note_all_taken(taken)
      return new

    params = {
      name: _map_jaxprs(accelerated, value)
      for name, value in operation.params.items()
    }
    return dataclasses.replace(operation, params=params)

  def inside(
    self, operation: binding_private.BoundOperation, index: int
  ) -> interception_private.MakeInterceptor:
    args, name = operation.args, operation.name
    if name == "custom_vjp_call":
      self._outcome.is_noted = True  # its bwd runs later
    known = [self._known(x) for x in args]
    if not any(known):
      return lambda inner: self._child()
    shapes, operation = [np.shape(x) for x in args], operation.of_types()

    def make(inner: Sequence[Any]) -> _Accelerator:
      child = self._child()
      own = calls.own_args(operation, index, inner)
      for x, product, shape in zip(own, known, shapes, strict=False):
        if product is None:
          continue
        if np.shape(x) != shape:
          child._lose(x, f"{name} splits the dequantized weights over devices")
        elif any(
          binding_private.is_differentiated(f.array) for f in product.factors
        ):
          child._lose(
            x, "the values or scales of the weights are differentiated"
          )
        else:
          child._products.put(x, product)
      return child

    return make

  def note(
    self, operation: binding_private.BoundOperation, results: Sequence[Any]
  ) -> None:
    if (
      operation.name in _KEEP_ONES
      and isinstance(results[0], jax.core.Tracer)
      and self._is_one(operation.args[0])
    ):
      self._ones.put(results[0], True)
    self._products.note(operation, results)
    self._note_lost(operation, results)

  def _note_lost(
    self, operation: binding_private.BoundOperation, results: Sequence[Any]
  ) -> None:
    """Notes an operation whose result a ragged dot cannot use as weights."""
    if operation.name in sites.PRODUCTS:  # not weights in another layout
      return
    reasons = [self._lost_by(x) for x in operation.args]
    if any(self._known(x) is not None for x in operation.args):
      name = operation.function_name
      reasons.append(f"{name} changes the dequantized weights")
    reason = next(filter(None, reasons), "")
    if not reason:
      return
    for x in results:
      if self._known(x) is None:
        self._lose(x, reason)

  def _is_one(self, x: Any) -> bool:
    """Whether all elements of a traced value or a number are known to be 1."""
    if isinstance(x, jax.core.Tracer):
      return bool(self._ones.get(x))
    is_array = isinstance(x, jax.Array)
    if is_array and not jax.numpy.issubdtype(x.dtype, np.floating):
      return False  # a key of random numbers, perhaps
    return np.ndim(x) == 0 and _is_concrete_one(x)

  def _is_placeholder(self, scale: Any, contracting: Sequence[int]) -> bool:
    """Whether `jax.lax.scaled_dot` created the scale, because none was passed.

    Its elements are 1, and it has one block along k. Such a scale changes
    nothing.
    """
    if scale.dtype != formats.E8M0 or any(
      scale.shape[d] != 1 for d in contracting
    ):
      return False
    if isinstance(scale, jax.core.Tracer):
      return self._is_one(scale)
    return _is_concrete_one(scale)


def _is_concrete_one(x: Any) -> bool:
  if not getattr(x, "is_fully_addressable", True):
    return False
  return bool((np.asarray(x) == 1).all())


# The type of JAX's scaled dots is not sharded over an explicit mesh axis, and
# does not vary over a manual one. A replaced dot has the same type, because the
# code around it was traced with that type. The carry of a loop, for example,
# has one type before and after a trip.
_jax_type_p = extend_core.Primitive("with_jax_type")
_jax_type_p.def_impl(lambda x: x)
_jax_type_p.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
batching.defvectorized(_jax_type_p)


def _lower_jax_type(ctx: Any, x: Any) -> Any:
  """Replicates the result on explicit axes."""
  (aval,) = ctx.avals_in
  spec = jax.sharding.PartitionSpec(*[None] * aval.ndim)
  aval = aval.update(sharding=aval.sharding.update(spec=spec))
  return [jax_private.lower_with_sharding_in_types(ctx, x, aval)]


mlir.register_lowering(_jax_type_p, _lower_jax_type)


def _with_jax_type(x: jax.Array) -> jax.Array:
  is_traced = isinstance(x, jax.core.Tracer)
  if not is_traced or jax.typeof(x) == jax.core.ShapedArray(x.shape, x.dtype):
    return x
  return _jax_type_p.bind(x)


def _scaled_dot(
  operation: binding_private.BoundOperation,
) -> binding_private.BoundOperation | None:
  """Returns JAX's scaled dot that an operation is or calls, or None."""
  matmuls, dots = jax_private.scaled_primitives()
  if operation.primitive in matmuls | dots:
    return operation
  if operation.name != "jit" or operation.params["name"] != _MATMUL_JIT_NAME:
    return None
  jaxpr = operation.params["jaxpr"].jaxpr
  if len(jaxpr.eqns) != 1:
    return None
  (eqn,) = jaxpr.eqns
  is_all = eqn.invars == jaxpr.invars and eqn.outvars == jaxpr.outvars
  if not is_all or eqn.primitive not in matmuls:
    return None
  # JAX traced this equation for the first call with such shapes. Another call
  # has another line.
  return binding_private.BoundOperation(
    eqn.primitive, operation.args, eqn.params
  )


def _unsupported(args: Sequence[Any], numbers: Any, dtype: Any) -> str | None:
  """Returns why jaxplugin does not support a dot that JAX does, or None."""
  reason = calls.unsupported(np.dtype(dtype))
  if reason:
    return reason
  for x in args:
    if x is not None and jax.numpy.issubdtype(x.dtype, np.complexfloating):
      return f"an operand is {x.dtype}"
  for values, scale, contracting in zip(
    args[:2], args[2:], numbers[0], strict=True
  ):
    if scale is None or not contracting:
      continue
    size, scale_size = (x.shape[contracting[-1]] for x in (values, scale))
    if isinstance(size, int) and isinstance(scale_size, int):
      continue
    format = formats.infer(values.dtype, scale.dtype)
    if format is None or scale_size * format.block_size != size:
      return (
        "the contracting size is symbolic, and"
        f" {values.dtype}{list(values.shape)} with"
        f" {scale.dtype}{list(scale.shape)} is not a known format"
      )
  return None


def _warn(name: str, reason: str) -> None:
  frame = jax_private.user_frame()
  place = f" at {frame}" if frame else ""
  warnings.warn(
    f"{WHO}: left JAX's {name}{place} as it is: {reason}",
    error_context.NotQuantizedWarning,
    stacklevel=2,
  )


@functools.cache
def _scaled_dots() -> frozenset[str]:
  """Names of JAX's scaled dots."""
  matmuls, dots = jax_private.scaled_primitives()
  return frozenset(primitive.name for primitive in (*matmuls, *dots))


@jax_private.cache_by_jaxpr
def _accelerated_jaxpr(
  jaxpr: Any, implementation: str | None
) -> tuple[Any, bool, Sequence[sites.Taken]]:
  """Returns the jaxpr with its dots replaced, and `_Outcome.is_noted`.

  The jaxpr is None if it has no dots. The last result is the matmuls that were
  replaced.
  """
  if not calls.contains(jaxpr, _scaled_dots() | _RAGGED | calls.CUSTOM_RULES):
    return None, False, ()
  outcome = _Outcome()
  with sites.taking() as taken:
    new, consts = interception_private.intercept_jaxpr(
      jaxpr, lambda extra, own: _Accelerator(implementation, outcome)
    )
  assert not consts  # neither the equations nor the interceptor make any
  return new, outcome.is_noted, taken


def _map_jaxprs(function: Callable[[Any], Any], value: Any) -> Any:
  """Replaces jaxprs in nested tuples unless `function` returns None."""
  if isinstance(value, (extend_core.ClosedJaxpr, extend_core.Jaxpr)):
    new = function(value)
    return value if new is None else new
  if not isinstance(value, (tuple, list)):
    return value
  items = [_map_jaxprs(function, item) for item in value]
  if all(a is b for a, b in zip(items, value, strict=True)):
    return value
  if hasattr(value, "_fields"):
    return type(value)(*items)
  return type(value)(items)
