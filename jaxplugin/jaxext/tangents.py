# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What derivatives need that JAX has not: a refusal, and jvp of some leaves.

An integer operation ends a derivative without a word. What is made of such
operations, and yet stands for a function of floats, takes its arguments through
`without_derivative`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from typing import TypeVar

import jax
import jax.custom_derivatives
from jax import dtypes
from jax.extend import core as extend_core
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir

T = TypeVar("T")

without_derivative_p = extend_core.Primitive("without_derivative")


def without_derivative(x: T, message: str) -> T:
  """The arrays of the pytree `x`; a derivative by one of them is an error.

  It is no operation in a compiled program. A derivative for which they are
  constants passes: those of others, and after `lax.stop_gradient`.

  Raises:
    NotImplementedError: `message`, while a derivative is traced.
  """
  return jax.tree.map(
    lambda leaf: without_derivative_p.bind(leaf, message=message), x
  )


def _jvp(primals: Any, tangents: Any, *, message: str) -> Any:
  (x,), (tangent,) = primals, tangents
  if type(tangent) is not ad.Zero and tangent.dtype != dtypes.float0:
    raise NotImplementedError(message)
  return without_derivative_p.bind(x, message=message), tangent


def _batch(args: Any, dims: Any, *, message: str) -> Any:
  return without_derivative_p.bind(*args, message=message), dims[0]


without_derivative_p.def_impl(lambda x, *, message: x)
without_derivative_p.def_abstract_eval(lambda x, *, message: x)
ad.primitive_jvps[without_derivative_p] = _jvp
batching.primitive_batchers[without_derivative_p] = _batch
mlir.register_lowering(without_derivative_p, lambda ctx, x, *, message: [x])


def is_constant(tangent: Any) -> bool:
  """Whether a tangent that a `custom_jvp` rule is given is zero for certain.

  The rule is defined with `symbolic_zeros=True`.
  """
  return (
    isinstance(tangent, jax.custom_derivatives.SymbolicZero)
    or tangent.dtype == dtypes.float0
  )


def tangent_of(
  function: Callable[[T], jax.Array], primals: T, tangents: T
) -> jax.Array | None:
  """The tangent of `function` at the pytree `primals`.

  Args:
    tangents: of the structure of `primals`; some may be constant. Those leaves
      are constants of `function` too.

  Returns:
    The result's tangent, or None where all are constant.
  """
  leaves, tree = jax.tree.flatten(primals)
  given = dict(enumerate(jax.tree.leaves(tangents)))
  active = [i for i, t in given.items() if not is_constant(t)]
  if not active:
    return None

  def of_active(*args: jax.Array) -> jax.Array:
    merged = list(leaves)
    for i, x in zip(active, args, strict=True):
      merged[i] = x
    return function(jax.tree.unflatten(tree, merged))

  _, tangent = jax.jvp(
    of_active,
    tuple(leaves[i] for i in active),
    tuple(given[i] for i in active),
  )
  return tangent
