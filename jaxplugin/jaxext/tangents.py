# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors instead of silent zero derivatives, and `jvp` with respect to leaves.

JAX's derivative of an integer operation is silently zero. A function of floats
that is built from integer operations passes its arguments through
`without_derivative`. A result that already exists passes through
`attach_guard`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import jax
import jax.custom_derivatives
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.extend import core as extend_core
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

T = TypeVar("T")
Result = TypeVar("Result")

without_derivative_p = extend_core.Primitive("without_derivative")
derivative_guard_p = extend_core.Primitive("derivative_guard")
attach_guard_p = extend_core.Primitive("attach_derivative_guard")
# Their operands are only needed for the error of a derivative.
GUARDS: Final = (without_derivative_p, derivative_guard_p)


def without_derivative(x: T, message: str) -> T:
  """Returns the pytree `x`; differentiating with respect to it is an error.

  A compiled program has no operation for it. Derivatives with respect to other
  arrays, or after `lax.stop_gradient`, are allowed.

  Raises:
    NotImplementedError: `message`, while a derivative is traced.
  """
  return jax.tree.map(
    lambda leaf: without_derivative_p.bind(leaf, message=message), x
  )


def _jvp(primals: Any, tangents: Any, *, message: str) -> Any:
  (x,), (tangent,) = primals, tangents
  if not is_constant(tangent):
    raise NotImplementedError(message)
  return without_derivative_p.bind(x, message=message), tangent


def _batch(args: Any, dims: Any, *, message: str) -> Any:
  return without_derivative_p.bind(*args, message=message), dims[0]


without_derivative_p.def_impl(lambda x, *, message: x)
without_derivative_p.def_abstract_eval(lambda x, *, message: x)
ad.primitive_jvps[without_derivative_p] = _jvp
batching.primitive_batchers[without_derivative_p] = _batch
mlir.register_lowering(without_derivative_p, lambda ctx, x, *, message: [x])


def derivative_guard(x: jax.Array, message: str) -> jax.Array:
  """Returns an empty f32[0] array that depends on `x` for derivatives.

  Differentiating the result with respect to `x` is an error. `attach_guard`
  attaches the result to an array that replaces `x` and lives longer than `x`.
  The result has no bytes and reads nothing from `x`.

  Raises:
    NotImplementedError: `message`, while a derivative is traced.
  """
  return derivative_guard_p.bind(x, message=message)


def attach_guard(x: T, guard: jax.Array) -> T:
  """Returns the pytree `x` with a dependency on the array of `guard`."""
  return jax.tree.map(lambda leaf: attach_guard_p.bind(leaf, guard), x)


def _guard_type(x: Any, *, message: str) -> Any:
  del message
  sharding = NamedSharding(x.sharding.mesh, PartitionSpec(None))
  return x.update(
    shape=(0,), dtype=np.dtype(np.float32), weak_type=False, sharding=sharding
  )


def _guard_jvp(primals: Any, tangents: Any, *, message: str) -> Any:
  (tangent,) = tangents
  if not is_constant(tangent):
    raise NotImplementedError(message)
  result = derivative_guard_p.bind(*primals, message=message)
  return result, ad.Zero(jax.typeof(result).to_tangent_aval())


def _guard_value(*args: Any, **params: Any) -> jax.Array:
  del args, params
  return jnp.zeros((0,), np.float32)


derivative_guard_p.def_impl(_guard_value)
derivative_guard_p.def_abstract_eval(_guard_type)
ad.primitive_jvps[derivative_guard_p] = _guard_jvp
batching.primitive_batchers[derivative_guard_p] = lambda args, dims, **params: (
  derivative_guard_p.bind(*args, **params),
  None,
)
mlir.register_lowering(
  derivative_guard_p, mlir.lower_fun(_guard_value, multiple_results=False)
)


attach_guard_p.def_impl(lambda x, _: x)
attach_guard_p.def_abstract_eval(lambda x, _: x)
ad.primitive_jvps[attach_guard_p] = lambda primals, tangents: (
  attach_guard_p.bind(*primals),
  tangents[0],
)
batching.primitive_batchers[attach_guard_p] = lambda args, dims: (
  attach_guard_p.bind(*args),
  dims[0],
)
mlir.register_lowering(attach_guard_p, lambda ctx, x, _: [x])


# The tangent of a constant in a call of `jvp`.
CONSTANT: Final = np.zeros((), dtypes.float0)


def is_constant(tangent: Any) -> bool:
  """Returns whether a tangent in a derivative rule is surely zero.

  The rule is that of a primitive, or of a `custom_jvp` that was defined with
  `symbolic_zeros=True`.
  """
  return (
    isinstance(tangent, (ad.Zero, jax.custom_derivatives.SymbolicZero))
    or tangent.dtype == dtypes.float0
  )


def jvp(
  function: Callable[[T], Result], primals: T, tangents: T
) -> tuple[Result, Result] | None:
  """Returns the result of `function` at the pytree `primals`, and its tangent.

  Args:
    function: a function of the pytree.
    primals: the point.
    tangents: a pytree like `primals`. Leaves with a constant tangent are
      constants of `function`.

  Returns:
    The result and its tangent, or None if all tangents are constant.
  """
  leaves, tree = jax.tree.flatten(primals)
  # An `ad.Zero` is a pytree without leaves.
  is_zero = lambda t: isinstance(t, ad.Zero)
  given = jax.tree.leaves(tangents, is_leaf=is_zero)
  active = [i for i, t in enumerate(given) if not is_constant(t)]
  if not active:
    return None

  def of_active(*args: jax.Array) -> Result:
    merged = list(leaves)
    for i, x in zip(active, args, strict=True):
      merged[i] = x
    return function(jax.tree.unflatten(tree, merged))

  result, tangent = jax.jvp(
    of_active,
    tuple(leaves[i] for i in active),
    tuple(given[i] for i in active),
  )
  return result, tangent


def tangent_of(
  function: Callable[[T], Result], primals: T, tangents: T
) -> Result | None:
  """Returns the tangent of `jvp`, or None."""
  found = jvp(function, primals, tangents)
  return None if found is None else found[1]
