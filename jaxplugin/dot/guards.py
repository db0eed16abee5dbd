# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`debug_checks`: block-scaled dots that look for NaN and Inf in their results.

A test follows each dot that is traced inside, for every backend and device. If
the result is not finite, a `lax.cond` computes the dot once more, in f32 by
portable operations, to find the NaN and Inf that the operands explain. If there
are others, the host raises `NonFiniteError`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxplugin.core import call_options, decisions, error_context, targets
from jaxplugin.dot import (
  backends,
  calls,
  epilogue,
  reference,
  sides,
)
from jaxplugin.dot.backends import xla
from jaxplugin.jaxext import jax_private, mesh_axes
from jaxplugin.operation import failures, primitive

# Allowed relative error of an activation: 16 roundings of f32.
_ACTIVATION_ERROR: Final = 16 * 2.0**-24
# Largest slope of an activation (gelu, silu: below 1.13).
_MAX_SLOPE: Final = 2.0

_records_lock = threading.Lock()
_records: list[list[Exception]] = []  # a list for each active `debug_checks`


class NonFiniteError(FloatingPointError):
  """The error of a NaN or Inf that the operands of a dot do not explain.

  The message names the call, the backend, and the shapes and formats of its
  operands. It also has the number of such elements and the first one.
  """


@contextlib.contextmanager
def debug_checks(enabled: bool = True) -> Iterator[None]:
  """Checks the results of block-scaled dots traced inside of the context.

  A check finds NaN and Inf that the operands do not explain. An element is
  explained in two cases:

  * The dot in f32 is NaN or Inf there too.
  * Its magnitude plus the bound of the result exceeds the range of f32 or of
    the result's dtype.

  Any other NaN or Inf is a fault of the backend.

  The context is part of `jit`'s cache key: a jitted function is traced again
  inside of it. A function compiled ahead of time inside keeps its checks. Each
  check computes the dot a second time. All transformations work. Under
  `shard_map` each device checks its own part. Without the context nothing is
  added to the program.

  JAX cannot export a function with checks, because checks call Python. It also
  cannot lower one for a platform without a local device.

  Args:
    enabled: False turns off the checks of an enclosing context.

  Yields:
    None. The end of the context waits for checks in progress.

  Raises:
    NonFiniteError: If a check failed, at the end of the context at the latest.
      Outside of the context, a function traced inside raises
      `jax.errors.JaxRuntimeError` with the same text.
    ValueError: If the group sizes of a `ragged_dot` are negative or too large.
    TypeError: If enabled is not a bool.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> x_q = jp.quantize(jnp.ones((2, 32)), "mxfp8")
    >>> with jp.debug_checks():
    ...   print(jp.block_scaled_dot(x_q, x_q))
    [[32. 32.]
     [32. 32.]]
  """
  if not isinstance(enabled, bool):
    raise TypeError(
      "debug_checks: enabled must be True or False, got"
      f" {error_context.shown(enabled)}"
    )
  if not enabled:
    with call_options.has_checks(False):
      yield
    return
  record: list[Exception] = []
  with _records_lock:
    _records.append(record)
  failure = None
  try:
    with call_options.has_checks(True):
      yield
  except jax.errors.JaxRuntimeError as error:
    failure = error
  except BaseException as error:
    _wait()
    if record:
      error.add_note(f"Before it a check failed: {record[0]}")
    raise
  else:
    failure = _wait()
  finally:
    if failure is not None:
      _wait()  # Otherwise the next wait would raise the same error again.
    with _records_lock:
      # By identity, because other lists may have equal items.
      _records[:] = [other for other in _records if other is not record]
  if record:
    raise record[0] from failure
  if failure is not None:
    failures.note(failure)
    raise failure


def _wait() -> Exception | None:
  """Waits for checks in progress; returns the error that JAX raised."""
  try:
    jax_private.wait_for_effects()
  except (jax.errors.JaxRuntimeError, ExceptionGroup) as error:
    return error
  return None


def check(result: jax.Array, call: calls.DotCall) -> None:
  """Traces the check of a call's result."""
  if 0 not in result.shape:
    check_finite(
      result,
      call,
      functools.partial(_unexplained, call.form()),
      who=sides.WHO,
      description=describe(result, call, backends.choose_for),
    )


def check_finite(
  result: jax.Array,
  call: primitive.OperationCall,
  unexplained: Callable[[jax.Array, list[jax.Array]], NonFiniteValues],
  *,
  who: str,
  description: str,
) -> None:
  """Traces a check that fails if a result has unexplained NaN or Inf.

  Args:
    result: result of the call, not empty.
    unexplained: (result, flat) -> elements that the arrays do not explain. It
      runs only if the result is not finite.
  """
  report = functools.partial(
    _report, who, description, call.PRIMITIVE.name, call.form()
  )

  def explain(result: jax.Array, flat: list[jax.Array]) -> None:
    # The partitioner shards sums and slices across devices.
    sharding = mesh_axes.explicit_sharding_of(result)
    if sharding is not None:
      sharding = sharding.update(spec=PartitionSpec())

    # JAX does not lower a callback with operands that have explicit axes.
    def call_back(result: jax.Array, flat: list[jax.Array]) -> jax.Array:
      values = unexplained(result, flat)
      operands = flat if failures.is_on() else []
      jax.debug.callback(report, operands, *values)
      return values.count

    mesh_axes.automatic(call_back, sharding)(result, flat)

  lax.cond(
    jnp.all(jnp.isfinite(result)),
    lambda result, flat: None,
    explain,
    result,
    call.flatten(),
  )


class NonFiniteValues(NamedTuple):
  """The unexplained NaN and Inf of a result.

  Attributes:
    count: uint32[], number of unexplained elements.
    index: int32[rank], index of the first one.
    actual, expected: f32[], the result and the reference at this index.
  """

  count: jax.Array  # type: ignore[assignment]
  index: jax.Array  # type: ignore[assignment]
  actual: jax.Array
  expected: jax.Array


def _unexplained(
  form: calls.DotCall, result: jax.Array, flat: list[jax.Array]
) -> NonFiniteValues:
  """Returns the NaN and Inf of a result that the operands do not explain."""
  call = form.filled(flat).with_sides(sides.Side.in_usual_order)
  in_f32 = call.replace(preferred_element_type=np.dtype(np.float32))
  lhs = call.lhs.dequantized().astype(jnp.float32)
  rhs = call.rhs.dequantized().astype(jnp.float32)
  multiply = functools.partial(
    xla.plain_dot,
    dimension_numbers=call.dimension_numbers,
    dtype=jnp.float32,
  )
  expected = epilogue.apply(multiply(lhs, rhs), in_f32)
  # If the magnitude overflows, the error bound is infinite, because a sum in
  # another order may overflow.
  magnitude = multiply(jnp.abs(lhs), jnp.abs(rhs))
  if call.global_scale is not None:
    factor = jnp.abs(call.global_scale)
    if call.global_power is not None:
      factor = factor * call.global_power
    magnitude = magnitude * jnp.maximum(factor, 1)
  return found(result, expected, magnitude, call.preferred_element_type)


def found(
  result: jax.Array,
  expected: jax.Array,
  magnitude: jax.Array,
  dtype: np.typing.DTypeLike,
) -> NonFiniteValues:
  """Returns the elements of a result that should be finite, and are not.

  Args:
    expected: result before the cast, computed in f32 by portable operations.
    magnitude: f32, sum(|a * b|) times the global scale.
  """
  error = _MAX_SLOPE * reference.ERROR_BOUND * magnitude
  # A backend may round a global scale to the result's dtype before the cast.
  relative = reference.rounding_error(dtype) + _ACTIVATION_ERROR
  bound = jnp.abs(expected) * (1 + relative) + error
  is_explained = ~(bound < float(jnp.finfo(dtype).max))
  is_bad = ~jnp.isfinite(result) & ~is_explained
  index = _first(is_bad)
  at_index = lambda x: lax.dynamic_slice(x, index, (1,) * x.ndim).reshape(())
  return NonFiniteValues(
    count=jnp.sum(is_bad, dtype=jnp.uint32),
    index=jnp.stack(index) if index else jnp.zeros((0,), jnp.int32),
    actual=at_index(result).astype(jnp.float32),
    expected=at_index(expected),
  )


def _first(is_true: jax.Array) -> list[jax.Array]:
  """Returns the index of the first True, one i32 for each dimension.

  A flat index could exceed 32 bits.
  """
  index = []
  for _ in range(is_true.ndim):
    rest = tuple(range(1, is_true.ndim))
    i = jnp.argmax(jnp.any(is_true, axis=rest)).astype(jnp.int32)
    is_true = lax.dynamic_index_in_dim(is_true, i, keepdims=False)
    index.append(i)
  return index


def _report(
  who: str,
  description: str,
  operation: str,
  form: Any,
  operands: list[np.ndarray],
  count: np.ndarray,
  index: np.ndarray,
  actual: np.ndarray,
  expected: np.ndarray,
) -> None:
  """Fails on the host if elements are unexplained, and writes the call.

  Under `vmap` the callback also runs for entries without such elements.
  """
  if count == 0:
    return
  where = tuple(int(i) for i in np.asarray(index))
  written = ""
  if operands:
    written = (
      f"\n  {failures.write('debug_checks', [(operation, form, operands)])}"
    )
  fail(
    NonFiniteError(
      f"{who}: {int(count)} of the result's elements are NaN or Inf although"
      f" the operands give finite ones; the first is {float(actual)} at"
      f" {where}, where the reference has {float(expected)}\n"
      f"{description}{written}"
    )
  )


def fail(error: Exception) -> None:
  """Raises `error` on the host; records it for each active `debug_checks`."""
  with _records_lock:
    for record in _records:
      record.append(error)
  raise error


def describe(
  result: jax.Array, call: Any, choose: Callable[..., decisions.Decision]
) -> str:
  """Describes a call: its source location, its arrays, its backend."""
  arrays = ", ".join(
    f"{name} {x.dtype.name}[{', '.join(map(str, x.shape))}]"
    for name, x in call.arrays().items()
  )
  lines = [
    f"  call: {jax_private.user_frame() or 'not known'}",
    f"  name scope: {jax_private.name_scope() or 'none'}",
    f"  problem: {call.problem()}, result {tuple(result.shape)}",
    f"  operands: {arrays}",
    f"  implementation: {_implementation(call, choose)}",
    '  Compute it with implementation="xla" to continue, and please report'
    " the problem.",
  ]
  return "\n".join(lines)


def _implementation(
  call: Any, choose: Callable[..., decisions.Decision]
) -> str:
  """Returns the backend that is chosen for the first supported local target.

  The actual target is unknown before lowering.
  """
  for target in targets.local_targets():
    with contextlib.suppress(NotImplementedError):
      decision = choose(call, target)
      return f"{decision.implementation}, as decided for {target}"
  return str(call.implementation)
