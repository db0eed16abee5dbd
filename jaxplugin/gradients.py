# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A differentiable `dot_general` that quantizes both operands on the fly."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin import backends
from jaxplugin import call
from jaxplugin import dot
from jaxplugin import formats
from jaxplugin import quantization
from jaxplugin import reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """What is quantized to what, forward and backward.

  Attributes:
    lhs_format, rhs_format: formats of the operands; None leaves one as it is.
    grad_format: format of the incoming gradient in the backward products.
    quantize_dgrad: whether the product that makes lhs's gradient is quantized.
    quantize_wgrad: whether the product that makes rhs's gradient is quantized.
    scale_rounding: as in `quantize`.
    implementation: as in `block_scaled_dot`.
  """

  lhs_format: formats.BlockFormat | None
  rhs_format: formats.BlockFormat | None
  grad_format: formats.BlockFormat | None
  quantize_dgrad: bool = True
  quantize_wgrad: bool = True
  scale_rounding: quantization.ScaleRounding = "up"
  implementation: str | None = None


def dot_general(
  lhs_format: formats.BlockFormat | None,
  rhs_format: formats.BlockFormat | None,
  *,
  grad_format: formats.BlockFormat | None = None,
  quantize_dgrad: bool = True,
  quantize_wgrad: bool = True,
  scale_rounding: quantization.ScaleRounding = "up",
  implementation: str | None = None,
) -> Callable[..., jax.Array]:
  """Makes a drop-in for `lax.dot_general` that multiplies in block formats.

  The function returned quantizes both operands along the contracting dimension
  and multiplies them with `block_scaled_dot`. Backward, with g the gradient of
  the result, lhs's gradient is g x rhs and rhs's is g x lhs: each quantizes g
  and the operand along the dimension which that product contracts, from the
  high-precision values that the forward pass was given (quantizing twice would
  add up errors). Quantization itself counts as the identity (straight-through).

  Use it as `flax.linen.Dense(dot_general=...)`, in
  `jnp.einsum(..., _dot_general=...)` (which may swap its operands, so give both
  the same format there), or directly.

  Args:
    lhs_format: e.g. `jp.MXFP8`; None leaves lhs in its own dtype (a plain f32,
      bf16 or f16 operand of a one-sided product).
    rhs_format: likewise for rhs. One of the two must be given.
    grad_format: format of the gradient in the backward products; lhs_format by
      default (rhs_format where that is None).
    quantize_dgrad: False computes lhs's gradient in high precision.
    quantize_wgrad: False computes rhs's gradient in high precision.
    scale_rounding: "up" or "floor", see `quantize`.
    implementation: None chooses; a name forces one, see `block_scaled_dot`.

  Returns:
    f(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None)
    with the meaning of `lax.dot_general`: lhs and rhs are f32, bf16 or f16 of
    any rank; the result has preferred_element_type, by default the operands'
    common dtype. Contracting sizes need not be multiples of the block: they are
    padded with zeros inside. `precision` is that of products in high precision,
    by default the highest.
    Gradients have the operands' dtypes.

  Raises:
    TypeError: a format is no BlockFormat, or both are None; and from the
      function returned: operands are no floats or their shapes do not fit.
    ValueError: scale_rounding or implementation is unknown.

  Source: NVIDIA, "Recipes for Pre-training LLMs with MXFP8" (2025), section 3.
  """
  for name, format in (
    ("lhs_format", lhs_format),
    ("rhs_format", rhs_format),
    ("grad_format", grad_format),
  ):
    if format is not None and not isinstance(format, formats.BlockFormat):
      raise TypeError(
        f"dot_general: {name} must be a BlockFormat or None, got {format!r}"
      )
  if lhs_format is None and rhs_format is None:
    raise TypeError(
      "dot_general: lhs_format or rhs_format must be given, got None for both;"
      " without quantization use jax.lax.dot_general"
    )
  if scale_rounding not in quantization.SCALE_ROUNDINGS:
    raise ValueError(
      "dot_general: scale_rounding must be one of"
      f" {quantization.SCALE_ROUNDINGS}, got {scale_rounding!r}"
    )
  backends.validate_name(implementation)
  recipe = Recipe(
    lhs_format=lhs_format,
    rhs_format=rhs_format,
    grad_format=grad_format or lhs_format or rhs_format,
    quantize_dgrad=quantize_dgrad,
    quantize_wgrad=quantize_wgrad,
    scale_rounding=scale_rounding,
    implementation=implementation,
  )

  def quantized_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
  ) -> jax.Array:
    lhs, rhs = _operand("lhs", lhs), _operand("rhs", rhs)
    numbers = call.canonical_dimension_numbers(
      dimension_numbers, lhs.ndim, rhs.ndim
    )
    call.validate_dimension_numbers(
      "dot_general", numbers, lhs.shape, rhs.shape
    )
    if preferred_element_type is None:
      preferred_element_type = jnp.result_type(lhs, rhs)
    # Here and not inside, so that an operand that is the same on all devices of
    # a `shard_map` gets the sum of their gradients.
    lhs, rhs = dot.vary_alike([lhs, rhs])
    return _dot(
      recipe,
      numbers,
      lax.Precision(precision) if isinstance(precision, str) else precision,
      np.dtype(preferred_element_type),
      lhs,
      rhs,
    )

  return quantized_dot_general


def _operand(name: str, x: Any) -> jax.Array:
  x = jnp.asarray(x)
  if x.dtype not in call.PLAIN_DTYPES:
    raise TypeError(
      f"dot_general: {name} must be float32, bfloat16 or float16, got"
      f" {x.dtype}{list(x.shape)}"
    )
  return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _dot(
  recipe: Recipe,
  numbers: call.DimensionNumbers,
  precision: Any,
  dtype: Any,
  lhs: jax.Array,
  rhs: jax.Array,
) -> jax.Array:
  del precision  # of products in high precision; this one is quantized
  return quantized_product(
    lhs, rhs, numbers, recipe.lhs_format, recipe.rhs_format, dtype, recipe
  )


def _dot_fwd(
  recipe: Recipe,
  numbers: call.DimensionNumbers,
  precision: Any,
  dtype: Any,
  lhs: jax.Array,
  rhs: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _dot(recipe, numbers, precision, dtype, lhs, rhs), (lhs, rhs)


def _dot_bwd(
  recipe: Recipe,
  numbers: call.DimensionNumbers,
  precision: Any,
  dtype: Any,
  residuals: tuple[jax.Array, jax.Array],
  g: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  del dtype
  lhs, rhs = residuals

  def product(
    other_format: formats.BlockFormat | None, is_quantized: bool
  ) -> Product:
    if is_quantized:
      return lambda g, other, numbers, dtype: quantized_product(
        g, other, numbers, recipe.grad_format, other_format, dtype, recipe
      )
    return lambda g, other, numbers, dtype: reference.plain_dot(
      g, other, numbers, dtype, precision
    )

  return gradients(
    g,
    lhs,
    rhs,
    numbers,
    dgrad=product(recipe.rhs_format, recipe.quantize_dgrad),
    wgrad=product(recipe.lhs_format, recipe.quantize_wgrad),
  )


_dot.defvjp(_dot_fwd, _dot_bwd)

Product = Callable[
  [jax.Array, jax.Array, call.DimensionNumbers, Any], jax.Array
]


def gradients(
  g: jax.Array,
  lhs: jax.Array,
  rhs: jax.Array,
  numbers: call.DimensionNumbers,
  *,
  dgrad: Product,
  wgrad: Product,
) -> tuple[jax.Array, jax.Array]:
  """Gradients of `dot_general(lhs, rhs, numbers)`, given that of its result.

  Args:
    g: [batch..., m..., n...].
    lhs, rhs: the operands.
    numbers: their dimension numbers.
    dgrad: (g, rhs, dimension_numbers, dtype) -> product, used for lhs.
    wgrad: (g, lhs, dimension_numbers, dtype) -> product, used for rhs.

  Returns:
    Gradients with the shapes and dtypes of lhs and rhs.
  """
  (lhs_k, rhs_k), (lhs_batch, rhs_batch) = numbers
  lhs_free = call.free_dims(lhs.ndim, lhs_k, lhs_batch)
  rhs_free = call.free_dims(rhs.ndim, rhs_k, rhs_batch)
  batch = tuple(range(len(lhs_batch)))
  m = tuple(len(batch) + i for i in range(len(lhs_free)))
  n = tuple(len(batch) + len(m) + i for i in range(len(rhs_free)))

  def gradient(
    product: Product,
    x: jax.Array,
    x_dims: tuple[call.Dims, call.Dims, call.Dims],
    y: jax.Array,
    y_dims: tuple[call.Dims, call.Dims, call.Dims],
    g_contracting: call.Dims,
  ) -> jax.Array:
    x_k, x_batch, x_free = x_dims
    y_k, y_batch, y_free = y_dims
    numbers = ((g_contracting, y_free), (batch, y_batch))
    result = product(g, y, numbers, x.dtype)
    # It has dimensions [batch..., x_free..., y_k... in ascending order].
    k_order = sorted(range(len(y_k)), key=lambda i: y_k[i])
    source = (*x_batch, *x_free, *(x_k[i] for i in k_order))
    return result.transpose(np.argsort(source)).astype(x.dtype)

  lhs_dims = (lhs_k, lhs_batch, lhs_free)
  rhs_dims = (rhs_k, rhs_batch, rhs_free)
  return (
    gradient(dgrad, lhs, lhs_dims, rhs, rhs_dims, n),
    gradient(wgrad, rhs, rhs_dims, lhs, lhs_dims, m),
  )


def quantized_product(
  lhs: jax.Array,
  rhs: jax.Array,
  numbers: call.DimensionNumbers,
  lhs_format: formats.BlockFormat | None,
  rhs_format: formats.BlockFormat | None,
  dtype: Any,
  recipe: Recipe,
) -> jax.Array:
  """Quantizes along the contracting dimension and multiplies.

  Several contracting dimensions are merged into one, and it is padded with
  zeros to whole blocks. An operand whose format is None stays as it is; with
  both None the product is a plain one.

  Args:
    lhs, rhs: f32, bf16 or f16 of any rank.
    numbers: `lax.dot_general`'s dimension numbers.
    lhs_format, rhs_format: formats, or None.
    dtype: the result's.
    recipe: says how scales are rounded and which implementation multiplies.
  """
  if lhs_format is None and rhs_format is None:
    return reference.plain_dot(lhs, rhs, numbers, dtype)
  (lhs_k, rhs_k), (lhs_batch, rhs_batch) = numbers
  if not lhs_k:  # an outer product contracts over a dimension of size 1
    lhs_k, rhs_k = (lhs.ndim,), (rhs.ndim,)
    lhs, rhs = jnp.expand_dims(lhs, -1), jnp.expand_dims(rhs, -1)
  lhs, lhs_axis, lhs_batch = _merge_contracting(lhs, lhs_k, lhs_batch)
  rhs, rhs_axis, rhs_batch = _merge_contracting(rhs, rhs_k, rhs_batch)
  block = math.lcm(
    *(f.block_size for f in (lhs_format, rhs_format) if f is not None)
  )
  lhs = _quantized(lhs, lhs_axis, lhs_format, block, recipe)
  rhs = _quantized(rhs, rhs_axis, rhs_format, block, recipe)
  return dot.block_scaled_dot(
    lhs,
    rhs,
    dimension_numbers=(((lhs_axis,), (rhs_axis,)), (lhs_batch, rhs_batch)),
    preferred_element_type=dtype,
    implementation=recipe.implementation,
  )


def _merge_contracting(
  x: jax.Array, contracting: call.Dims, batch: call.Dims
) -> tuple[jax.Array, int, call.Dims]:
  """Leaves one contracting dimension; with several, it becomes the last."""
  if len(contracting) == 1:
    return x, contracting[0], batch
  free = call.free_dims(x.ndim, contracting, batch)
  lead = [x.shape[d] for d in (*batch, *free)]
  x = x.transpose(*batch, *free, *contracting)
  size = math.prod(x.shape[len(lead) :])
  return x.reshape(*lead, size), len(lead), tuple(range(len(batch)))


def _quantized(
  x: jax.Array,
  axis: int,
  format: formats.BlockFormat | None,
  block: int,
  recipe: Recipe,
) -> Any:
  # Written so that a symbolic size pads to a provable multiple of the block.
  padding = (x.shape[axis] + block - 1) // block * block - x.shape[axis]
  if not (isinstance(padding, int) and padding == 0):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, padding)
    x = jnp.pad(x, widths)
  if format is None:
    return x
  return quantization.quantize(
    x, format, axis=axis, scale_rounding=recipe.scale_rounding
  )
