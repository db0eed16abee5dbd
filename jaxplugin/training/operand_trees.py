# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trees with `QuantizedOperand`s, and flax layers that accept them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxplugin.training import quantized_operand


def _is_operand(x: Any) -> bool:
  return isinstance(x, quantized_operand.QuantizedOperand)


def primals(tree: Any) -> Any:
  """Returns a tree with the array of each `QuantizedOperand` in its place.

  Args:
    tree: a tree of arrays and `QuantizedOperand`s.

  Returns:
    The tree of arrays; other leaves do not change.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> w = jnp.ones((64, 64))
    >>> tree = {"w": jp.quantize_operand(w, "mxfp8"), "b": w[0]}
    >>> jp.training.primals(tree)["w"] is w
    True
  """
  return jax.tree.map(quantized_operand.primal_of, tree, is_leaf=_is_operand)


def with_primals(tree: Any, primals: Any) -> Any:
  """Returns `tree` with new arrays next to its quantized copies.

  Differentiate by the new arrays, and quantize only once for several
  microbatches. docs/how_to/gradient_accumulation.md is the guide.

  Args:
    tree: a tree of arrays and `QuantizedOperand`s.
    primals: a tree of arrays with one array for each leaf. Values are not
      compared with the quantized ones.

  Returns:
    `tree`, where each `QuantizedOperand` has its array from `primals`, and each
    other leaf is the one of `primals`.

  Raises:
    TypeError: If an array has another shape or dtype than the quantized one.
    ValueError: If the structures differ.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> dot = jp.dot_general(recipe="mxfp8", weight="rhs")
    >>> def loss(params, x):
    ...   return dot(x, params["w"], (((1,), (0,)), ((), ()))).sum()
    >>> params, x = {"w": jnp.ones((64, 64))}, jnp.ones((4, 64))
    >>> params_q = {"w": jp.quantize_operand(params["w"], "mxfp8")}
    >>> gradient = jax.grad(
    ...   lambda p: loss(jp.training.with_primals(params_q, p), x))(params)
    >>> print(gradient["w"][0, 0])
    4.0
  """

  def merged(x: Any, primal: Any) -> Any:
    return x.with_primal(primal) if _is_operand(x) else primal

  return jax.tree.map(merged, tree, primals, is_leaf=_is_operand)


def promote_dtype(
  *args: Any, dtype: Any = None, inexact: bool = True
) -> list[Any] | tuple[Any, ...]:
  """Promotes like flax's `promote_dtype`, and keeps `QuantizedOperand`s.

  Pass it to layers of linen and nnx with quantized parameters: `nnx.Linear(...,
  promote_dtype=jp.training.promote_dtype)`.

  Args:
    args: arrays, `QuantizedOperand`s and None, as linen passes them; or one
      tuple of these, as nnx does.
    dtype: dtype of the results; by default JAX's promotion of all arguments.
    inexact: whether integers become floats.

  Returns:
    A list of arrays of that dtype, or a tuple if one was given. Operands and
    None do not change.

  Raises:
    TypeError: If an operand was quantized from another dtype.
    ValueError: If dtype is not a float and `inexact` is True.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> x, y = jp.training.promote_dtype(jnp.ones(2, jnp.bfloat16), jnp.ones(2))
    >>> print(x.dtype, y.dtype)
    float32 float32
  """
  if len(args) == 1 and isinstance(args[0], tuple):
    return tuple(promote_dtype(*args[0], dtype=dtype, inexact=inexact))
  if dtype is None:
    given = [quantized_operand.primal_of(x) for x in args if x is not None]
    dtype = jnp.result_type(*given)
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
      dtype = jnp.promote_types(jnp.float32, dtype)
  if inexact and not jnp.issubdtype(dtype, jnp.inexact):
    raise ValueError(f"promote_dtype: dtype must be inexact, got {dtype}")

  def promoted(x: Any) -> Any:
    if x is None:
      return None
    if not _is_operand(x):
      return jnp.asarray(x, dtype)
    if x.dtype != dtype:
      raise TypeError(
        f"promote_dtype: {x!r} must be converted to {jnp.dtype(dtype).name}"
        f" before it is quantized; pass w.astype({jnp.dtype(dtype).name!r}) to"
        " quantize_operand, and to with_primals"
      )
    return x

  return [promoted(x) for x in args]
