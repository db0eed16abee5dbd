# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Replaces `jax.lax.ragged_dot` of dequantized weights, for `accelerate`.

It gets the facts about both operands (`facts`), finds the block-scaled array
that each operand was dequantized from, and multiplies these arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.dot import rules
from jaxplugin.jaxext import tangents as tangents_lib
from jaxplugin.ragged import api
from jaxplugin.ragged import backends
from jaxplugin.rewriting import facts

NAME: Final = "ragged_dot_general"

_QUANTIZED: Final = frozenset((*formats.VALUES_DTYPES, *formats.SCALE_DTYPES))
_FLOATS: Final = frozenset(
  np.dtype(dtype) for dtype in (jnp.float32, jnp.bfloat16, np.float16)
)


class NotServed(Exception):
  """A ragged dot of block-scaled weights that stays as it is; says why."""


def is_quantized(x: facts.Product) -> bool:
  """Whether values of few bits are among the factors."""
  return any(factor.dtype in _QUANTIZED for factor in x.factors)


# Recognition.


def _block_scaled(
  x: facts.Product, order: Sequence[int], name: str
) -> scaled_array.ScaledArray | None:
  """The block-scaled array that a product is, its dimensions in this order.

  Returns:
    None if it is none: no block scales are among its factors.

  Raises:
    NotServed: it is one that no call here takes.
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
    raise NotServed(
      f"{name} is {pair[0].name} with {pair[1].name} scales for blocks of"
      f" {block_size}, which is not a known format{known}"
    )
  outer = list(dims)
  outer[axis] = tuple(atom for atom in dims[axis] if atom in scale.atoms)
  # Both as bytes, or none.
  as_bytes = values.is_bytes and scale.is_bytes
  scales = scale.laid_out(outer, as_bytes=as_bytes)
  if block_size != format.block_size:
    # The scale of larger blocks is that of each part.
    scales = jnp.repeat(scales, block_size // format.block_size, axis=axis)
  rest = [f for f in x.factors if f is not values and f is not scale]
  leaves = (
    values.laid_out(dims, as_bytes=as_bytes),
    scales,
    _global_scale(rest, dims, name),
  )
  if as_bytes:
    # Which leaves of bytes are, the constructor cannot see.
    aux = (format, layouts.LINEAR)
    return scaled_array.ScaledArray.tree_unflatten(aux, leaves)
  return scaled_array.ScaledArray(*leaves, format)


def _blocks(
  dims: Sequence[facts.Atoms], scale: facts.Factor, name: str
) -> tuple[int, int]:
  """The blocked dimension and the size of a block.

  Of several with blocks it is the last: along the others the scale repeats.
  """
  axis = max(
    d for d, dim in enumerate(dims) if any(a not in scale.atoms for a in dim)
  )
  has = [atom in scale.atoms for atom in dims[axis]]
  if not axis or has != sorted(has, reverse=True):
    raise NotServed(
      f"the blocks of {name} are not consecutive elements of one dimension"
    )
  inner = [atom for atom in dims[axis] if atom not in scale.atoms]
  return axis, math.prod(atom.size for atom in inner)


def _global_scale(
  factors: Sequence[facts.Factor],
  dims: Sequence[facts.Atoms],
  name: str,
) -> jax.Array | None:
  """What all other factors come to; of size 1 but for the first dimension."""
  product = None
  for factor in factors:
    if factor.atoms and factor.dtype not in _FLOATS:
      raise NotServed(
        f"{name} is also multiplied by {factor.dtype.name} values"
      )
    if not factor.atoms <= frozenset(dims[0]):
      raise NotServed(
        f"{name} is multiplied by a scale that is not per block, per group or"
        " global"
      )
    first = dims[0] if factor.atoms else ()
    scale = factor.laid_out([first] + [()] * (len(dims) - 1))
    scale = scale.astype(jnp.float32)
    product = scale if product is None else product * scale
  return product


# Replacement.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Dimensions:
  """Which dimension is which.

  Attributes:
    rows, contracting: of lhs.
    group, weight_contracting, column: of rhs.
  """

  rows: int
  contracting: int
  group: int
  weight_contracting: int
  column: int


def _dimensions(lhs: Any, rhs: Any, numbers: Any) -> _Dimensions | None:
  """None of what is no product of groups of rows with weights of their own."""
  (lhs_contracting, rhs_contracting), batch = numbers.dot_dimension_numbers
  ragged, group = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
  if not group or any(batch) or (lhs.ndim, rhs.ndim) != (2, 3):
    return None
  if len(lhs_contracting) != 1 or len(ragged) != 1:
    return None
  (column,) = {0, 1, 2} - {*group, *rhs_contracting}
  return _Dimensions(
    rows=ragged[0],
    contracting=lhs_contracting[0],
    group=group[0],
    weight_contracting=rhs_contracting[0],
    column=column,
  )


def replaced(
  primitive: Any,
  args: Sequence[Any],
  params: Mapping[str, Any],
  known: Sequence[facts.Product | None],
  implementation: str | None,
) -> jax.Array | None:
  """The result of one of JAX's ragged dots, by this package's.

  Args:
    primitive: `ragged_dot_general`'s.
    args: lhs, rhs, group sizes; a group offset may follow.
    params: of the operation.
    known: of lhs and of rhs.
    implementation: of `ragged_dot`, None to choose. The product across blocks,
      which is the gradient of lhs, is chosen.

  Returns:
    None of a product of plain weights.

  Raises:
    NotServed: the weights are block-scaled, and yet it cannot be.
  """
  of_lhs, of_rhs = known
  if of_rhs is None or not is_quantized(of_rhs):
    return None
  lhs, rhs = args[:2]
  dims = _dimensions(lhs, rhs, params["ragged_dot_dimension_numbers"])
  if dims is None:
    if rhs.ndim < 2 or _block_scaled(of_rhs, range(rhs.ndim), "rhs") is None:
      return None
    raise NotServed("it has batch dimensions, or contracts several")
  order = (dims.group, dims.column, dims.weight_contracting)
  weights = _block_scaled(of_rhs, order, "rhs")
  if weights is None:
    return None
  rows = None
  if of_lhs is not None and is_quantized(of_lhs):
    rows = _rows(of_lhs, (dims.rows, dims.contracting))
  return _product(primitive, args, params, dims, rows, weights, implementation)


def multiplied(
  primitive: Any,
  args: Sequence[Any],
  params: Mapping[str, Any],
  weights_of: Callable[[tuple[int, int, int]], scaled_array.ScaledArray],
  implementation: str | None,
) -> jax.Array:
  """The result of one of JAX's ragged dots, whose weights are known.

  Args:
    primitive, args, params, implementation: as of `replaced`.
    weights_of: the weights, given the dimensions of rhs that are groups,
      columns and contracted, in this order; or raises NotServed.

  Raises:
    NotServed: it cannot be.
  """
  lhs, rhs = args[:2]
  dims = _dimensions(lhs, rhs, params["ragged_dot_dimension_numbers"])
  if dims is None:
    raise NotServed("it has batch dimensions, or contracts several")
  weights = weights_of((dims.group, dims.column, dims.weight_contracting))
  return _product(primitive, args, params, dims, None, weights, implementation)


def _product(
  primitive: Any,
  args: Sequence[Any],
  params: Mapping[str, Any],
  dims: _Dimensions,
  rows: scaled_array.ScaledArray | None,
  weights: scaled_array.ScaledArray,
  implementation: str | None,
) -> jax.Array:
  """Of lhs, or of rows, which is the same quantized, and weights."""
  lhs, rhs, group_sizes, *offset = args
  if implementation not in (None, *backends.BACKENDS):
    raise NotServed(f"a ragged dot has no implementation {implementation!r}")
  if any(x is not None for x in offset):
    raise NotServed("it has a group_offset")
  if params["out_sharding"] is not None and weights.axis != 2:
    raise NotServed(
      "it has an out_sharding, and the weights are not blocked along the"
      " contracting dimension"
    )
  result = jax.eval_shape(functools.partial(primitive.bind, **params), *args)
  if result.dtype not in rules.RESULT_DTYPES:
    raise NotServed(
      f"the result is {result.dtype.name}, not float32, bfloat16 or float16"
    )
  if rows is None and np.dtype(lhs.dtype) not in _FLOATS:
    raise NotServed(f"lhs is {lhs.dtype}, not float32, bfloat16 or float16")
  bind = functools.partial(primitive.bind, **params)
  multiply = functools.partial(
    _multiply, dims, result.dtype, implementation, params["out_sharding"]
  )
  return _differentiable(bind, multiply)(lhs, rhs, group_sizes, rows, weights)


def _rows(
  x: facts.Product, order: Sequence[int]
) -> scaled_array.ScaledArray | None:
  """lhs as a block-scaled array along k; None if it is better left alone."""
  try:
    array = _block_scaled(x, order, "lhs")
  except NotServed:
    return None
  return array if array is not None and array.axis == 1 else None


def _multiply(
  dims: _Dimensions,
  dtype: np.dtype,
  implementation: str | None,
  out_sharding: Any,
  lhs: jax.Array | scaled_array.ScaledArray,
  weights: scaled_array.ScaledArray,
  group_sizes: jax.Array,
) -> jax.Array:
  """The product; of a plain lhs as JAX has it, of a block-scaled one (m, k)."""
  if isinstance(lhs, jax.Array) and dims.rows:
    lhs = lhs.T
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
    lhs, weights.transpose(0, 2, 1), group_sizes, preferred_element_type=dtype
  )


def _differentiable(
  bind: Callable[..., jax.Array], multiply: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
  """`multiply` with the derivative that JAX's own operation has.

  What is differentiated is `bind` of both operands as they were. So derivatives
  reach whatever made them; the weights' is JAX's, that of lhs is ours.
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
