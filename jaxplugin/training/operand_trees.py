# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trees with `QuantizedOperand`s in them, and layers of flax that take such."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxplugin.training import quantized_operand


def _is_operand(x: Any) -> bool:
  return isinstance(x, quantized_operand.QuantizedOperand)


def primals(tree: Any) -> Any:
  """`tree` with the array of each `QuantizedOperand` in its place."""
  return jax.tree.map(quantized_operand.primal_of, tree, is_leaf=_is_operand)


def with_primals(tree: Any, primals: Any) -> Any:
  """`tree` with the leaves of `primals`, and the copies that are in `tree`.

  So a gradient is taken by parameters alone, and the copies are made once, here
  for all microbatches:

    params_q = jax.tree.map(lambda w: jp.quantize_operand(w, recipe), params)

    def microbatch(total, batch):
      of = lambda p: loss(jp.training.with_primals(params_q, p), batch)
      return jax.tree.map(jnp.add, total, jax.grad(of)(params)), None

    total, _ = jax.lax.scan(microbatch, zeros, batches)

  Args:
    tree: of arrays and `QuantizedOperand`s.
    primals: of its structure, with an array in the place of each.

  Raises:
    TypeError: an array has another shape or dtype than what was quantized.
    ValueError: the structures differ.
  """

  def merged(x: Any, primal: Any) -> Any:
    return x.with_primal(primal) if _is_operand(x) else primal

  return jax.tree.map(merged, tree, primals, is_leaf=_is_operand)


def promote_dtype(
  *args: Any, dtype: Any = None, inexact: bool = True
) -> list[Any] | tuple[Any, ...]:
  """flax's `promote_dtype`, which leaves `QuantizedOperand`s as they are.

  For layers of linen and nnx that have such parameters:

    nnx.Linear(..., dot_general=dot, promote_dtype=jp.training.promote_dtype)

  Args:
    args: arrays, operands and None, as linen gives them, or a tuple of those,
      as nnx does.
    dtype: of the results; by default what JAX promotes all to.
    inexact: whether integers become floats.

  Returns:
    As many, arrays of that dtype; a tuple for a tuple.

  Raises:
    TypeError: an operand was quantized from another dtype.
    ValueError: dtype is no float, and inexact.
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
