# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Replaces `jax.lax.ragged_dot` with dequantized weights by `jp.ragged_dot`.

A `facts.ArrayProduct` describes each operand. The module finds the block-scaled
array that was dequantized, and multiplies by it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts, scaled_array
from jaxplugin.core import formats
from jaxplugin.jaxext import tangents as tangents_lib
from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.ragged import api, backends
from jaxplugin.rewriting import calls, facts

NAME: Final = "ragged_dot_general"

_QUANTIZED: Final = frozenset(
  (*formats.FLOAT_VALUES_DTYPES, *formats.BYTE_SCALE_DTYPES)
)


def is_quantized(x: facts.ArrayProduct) -> bool:
  """Whether a factor has a dtype of quantized values or of scales."""
  return any(factor.dtype in _QUANTIZED for factor in x.factors)


# Recognition.


def _block_scaled(
  x: facts.ArrayProduct, order: Sequence[int], name: str
) -> scaled_array.ScaledArray | None:
  """Returns the block-scaled array that was dequantized to a product.

  Args:
    x: the product.
    order: its dimensions in the order of the result.
    name: of the operand, for errors.

  Returns:
    None if no factor is a block scale.

  Raises:
    facts.NotSupported: If `jp.ragged_dot` does not support the array.
  """
  dims = [x.dims[d] for d in order]
  everything = frozenset(atom for dim in dims for atom in dim)
  quantized = [f for f in x.factors if f.dtype in _QUANTIZED]
  if len(quantized) != 2:
    return None
  scale, values = sorted(quantized, key=lambda f: len(f.atoms))
  if values.atoms != everything or scale.atoms == everything:
    return None
  axis, block_size = _blocks(dims, scale, name)
  pair = values.dtype, scale.dtype
  format = formats.infer(*pair)
  if format is None or block_size % format.block_size:
    known = "" if format is None else f", {format} has {format.block_size}"
    raise facts.NotSupported(
      f"{name} is {pair[0].name} with {pair[1].name} scales for blocks of"
      f" {block_size}, which is not a known format{known}"
    )
  outer = list(dims)
  outer[axis] = tuple(atom for atom in dims[axis] if atom in scale.atoms)
  # Both are bytes, or neither is.
  as_bytes = values.is_bytes and scale.is_bytes
  scales = scale.laid_out(outer, as_bytes=as_bytes)
  if block_size != format.block_size:
    # Each part of a larger block has the block's scale.
    scales = jnp.repeat(scales, block_size // format.block_size, axis=axis)
  rest = [f for f in x.factors if f is not values and f is not scale]
  leaves = (
    values.laid_out(dims, as_bytes=as_bytes),
    scales,
    _global_scale(rest, dims, name),
  )
  if as_bytes:
    # The constructor cannot infer the format of bytes.
    aux = (format, layouts.LINEAR)
    return scaled_array.ScaledArray.tree_unflatten(aux, leaves)
  return scaled_array.ScaledArray(*leaves, format)


def _blocks(
  dims: Sequence[facts.Atoms], scale: facts.Factor, name: str
) -> tuple[int, int]:
  """Returns the blocked dimension and the block size.

  If several dimensions have blocks, the last one is blocked. The scale is
  repeated along the others.
  """
  axis = max(
    d for d, dim in enumerate(dims) if any(a not in scale.atoms for a in dim)
  )
  has = [atom in scale.atoms for atom in dims[axis]]
  if not axis or has != sorted(has, reverse=True):
    raise facts.NotSupported(
      f"the blocks of {name} are not consecutive elements of one dimension"
    )
  inner = [atom for atom in dims[axis] if atom not in scale.atoms]
  return axis, math.prod(atom.size for atom in inner)


def _global_scale(
  factors: Sequence[facts.Factor],
  dims: Sequence[facts.Atoms],
  name: str,
) -> jax.Array | None:
  """Returns the product of the other factors, or None if there are none.

  All its dimensions except the first have size 1.
  """
  product = None
  for factor in factors:
    if factor.atoms and factor.dtype not in facts.WIDE:
      raise facts.NotSupported(
        f"{name} is also multiplied by {factor.dtype.name} values"
      )
    if not factor.atoms <= frozenset(dims[0]):
      raise facts.NotSupported(
        f"{name} is multiplied by a scale that is not per block, per group or"
        " global"
      )
    first = dims[0] if factor.atoms else ()
    scale = factor.laid_out([first] + [()] * (len(dims) - 1))
    scale = scale.astype(jnp.float32)
    product = scale if product is None else product * scale
  return product


# Replacement.


def refusal(
  operation: binding_private.BoundOperation, implementation: str | None
) -> str:
  """Returns why no ragged dot of this package replaces one of JAX's, or "".

  Args:
    operation, implementation: see `replaced`.
  """
  _, _, _, *offset = operation.args
  if reason := _refusal_of_dimensions(operation):
    return reason
  if implementation not in (None, *backends.OPERATION.backends()):
    return f"a ragged dot has no implementation {implementation!r}"
  return "it has a group_offset" if any(x is not None for x in offset) else ""


def _refusal_of_dimensions(operation: binding_private.BoundOperation) -> str:
  lhs, rhs, *_ = operation.args
  numbers = operation.params["ragged_dot_dimension_numbers"]
  if any(numbers.dot_dimension_numbers[1]):
    return "it has batch dimensions"
  if not numbers.rhs_group_dimensions:
    return "it contracts the ragged dimension"
  if (lhs.ndim, rhs.ndim) != (2, 3):
    return f"its operands have ranks {lhs.ndim} and {rhs.ndim}, not 2 and 3"
  return ""


def orders(
  operation: binding_private.BoundOperation,
) -> tuple[tuple[int, int], tuple[int, int, int]]:
  """Returns the dimensions of one of JAX's ragged dots.

  Returns:
    Those of lhs: rows and contracted ones; and those of rhs: groups, columns
    and contracted ones.

  Raises:
    facts.NotSupported: If `jp.ragged_dot` does not support them.
  """
  if reason := _refusal_of_dimensions(operation):
    raise facts.NotSupported(reason)
  numbers = operation.params["ragged_dot_dimension_numbers"]
  (lhs_k,), (rhs_k,) = numbers.dot_dimension_numbers[0]
  (row,), (group,) = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
  (column,) = {0, 1, 2} - {group, rhs_k}
  return (row, lhs_k), (group, column, rhs_k)


def replaced(
  operation: binding_private.BoundOperation,
  known: Sequence[facts.ArrayProduct | None],
  implementation: str | None,
) -> jax.Array | None:
  """Computes one of JAX's ragged dots with dequantized weights.

  Args:
    operation: a `ragged_dot_general` of lhs, rhs, group sizes; a group offset
      may follow.
    known: the products that lhs and rhs are, or None.
    implementation: see `ragged_dot`. A matmul across blocks, such as the
      gradient of lhs, ignores it.

  Returns:
    The result; None if the weights were not dequantized.

  Raises:
    facts.NotSupported: If `jp.ragged_dot` does not support the operation.
  """
  of_lhs, of_rhs = known
  if of_rhs is None or not is_quantized(of_rhs):
    return None
  rhs = operation.args[1]
  if _refusal_of_dimensions(operation) and (
    rhs.ndim < 2 or _block_scaled(of_rhs, range(rhs.ndim), "rhs") is None
  ):
    return None
  of_rows, of_weights = orders(operation)
  weights = _block_scaled(of_rhs, of_weights, "rhs")
  if weights is None:
    return None
  rows = None
  if of_lhs is not None and is_quantized(of_lhs):
    rows = _rows(of_lhs, of_rows)
  return multiplied(operation, rows, weights, implementation)


def multiplied(
  operation: binding_private.BoundOperation,
  rows: scaled_array.ScaledArray | None,
  weights: scaled_array.ScaledArray,
  implementation: str | None,
) -> jax.Array:
  """Computes one of JAX's ragged dots with quantized weights.

  Args:
    operation, implementation: see `replaced`.
    rows: the quantized lhs as (rows, contracted), or None.
    weights: rhs as (groups, columns, contracted).

  Raises:
    facts.NotSupported: If `jp.ragged_dot` does not support the operation.
  """
  lhs, rhs, group_sizes, *_ = operation.args
  out_sharding = operation.params["out_sharding"]
  if reason := refusal(operation, implementation):
    raise facts.NotSupported(reason)
  if out_sharding is not None and weights.axis != 2:
    raise facts.NotSupported(
      "it has an out_sharding, and the weights are not blocked along the"
      " contracting dimension"
    )
  dtype = operation.result_type().dtype
  reason = calls.unsupported(dtype)
  if reason:
    raise facts.NotSupported(reason)
  if rows is None and np.dtype(lhs.dtype) not in facts.WIDE:
    raise facts.NotSupported(
      f"lhs is {lhs.dtype}, not float32, bfloat16 or float16"
    )
  order, _ = orders(operation)

  def multiply(lhs: Any, weights: Any, group_sizes: jax.Array) -> jax.Array:
    # A plain lhs has JAX's dimensions, a block-scaled one (m, k).
    if isinstance(lhs, jax.Array):
      lhs = lhs.transpose(order)
    if weights.axis == 2:
      return api.ragged_dot(
        lhs,
        weights,
        group_sizes,
        preferred_element_type=dtype,
        implementation=implementation,
        out_sharding=out_sharding,
      )
    if isinstance(lhs, scaled_array.ScaledArray):
      lhs = lhs.dequantize()
    return api.across_blocks(
      lhs,
      weights.transpose(0, 2, 1),
      group_sizes,
      preferred_element_type=dtype,
    )

  bind = functools.partial(operation.primitive.bind, **operation.params)
  return _differentiable(bind, multiply)(lhs, rhs, group_sizes, rows, weights)


def _rows(
  x: facts.ArrayProduct, order: Sequence[int]
) -> scaled_array.ScaledArray | None:
  """Returns lhs as an array that is blocked along k; None if it is not."""
  try:
    array = _block_scaled(x, order, "lhs")
  except facts.NotSupported:
    return None
  return array if array is not None and array.axis == 1 else None


def _differentiable(
  bind: Callable[..., jax.Array], multiply: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
  """Returns `multiply` with the derivative of JAX's operation.

  It is differentiated as `bind` of the dequantized operands, so derivatives
  reach the code that computed them. `bind` computes the derivative by rhs, and
  `multiply` the derivative by lhs.
  """

  @jax.custom_jvp
  def function(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    rows: Any,
    weights: Any,
  ) -> jax.Array:
    del rhs
    return multiply(lhs if rows is None else rows, weights, group_sizes)

  @functools.partial(function.defjvp, symbolic_zeros=True)
  def jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    lhs, _, group_sizes, _, weights = primals
    by_lhs, by_rhs, *_ = tangents
    result = function(*primals)
    terms = []
    if not tangents_lib.is_constant(by_lhs):
      terms.append(multiply(by_lhs, weights, group_sizes))
    if not tangents_lib.is_constant(by_rhs):
      terms.append(bind(lhs, by_rhs, group_sizes))
    if not terms:
      return result, jnp.zeros_like(result)
    return result, sum(terms[1:], start=terms[0])

  return function
