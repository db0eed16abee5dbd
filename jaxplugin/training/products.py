# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantized products of `dot_general`: one forward, two backward.

Each contracts other dimensions, so each quantizes its operands along others.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from jaxplugin import dot
from jaxplugin import quantization
from jaxplugin.core import blocking
from jaxplugin.core import formats
from jaxplugin.dot import sides
from jaxplugin.dot.autodiff import derivatives
from jaxplugin.jaxext import tangents


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
  """A quantized product: how its operands are blocked, and multiplied.

  Attributes:
    lhs, rhs: blockings, along what is contracted. Sizes are padded to whole
      blocks of both formats.
    numbers: `block_scaled_dot`'s, of the blocked operands.
  """

  lhs: blocking.Blocking
  rhs: blocking.Blocking
  numbers: sides.DimensionNumbers

  @classmethod
  def of(
    cls,
    numbers: sides.DimensionNumbers,
    ndims: tuple[int, int],
    operand_formats: tuple[
      formats.BlockFormat | None, formats.BlockFormat | None
    ],
  ) -> Product:
    multiple = math.lcm(*(f.block_size for f in operand_formats if f))
    contracting, batch = numbers
    lhs, rhs = (
      blocking.Blocking(
        dims=k, lead=(*b, *sides.free_dims(ndim, k, b)), multiple=multiple
      )
      for k, b, ndim in zip(contracting, batch, ndims, strict=True)
    )
    # Merging brings the batch dimensions to the front.
    lhs_batch, rhs_batch = (
      tuple(range(len(b))) if len(k) > 1 else b
      for k, b in zip(contracting, batch, strict=True)
    )
    return cls(
      lhs=lhs,
      rhs=rhs,
      numbers=(((lhs.axis(),), (rhs.axis(),)), (lhs_batch, rhs_batch)),
    )

  @classmethod
  def forward(
    cls,
    recipe: Recipe,
    numbers: sides.DimensionNumbers,
    lhs_ndim: int,
    rhs_ndim: int,
  ) -> Product:
    return cls.of(
      numbers, (lhs_ndim, rhs_ndim), (recipe.lhs_format, recipe.rhs_format)
    )

  def multiply(
    self, lhs: Any, rhs: Any, dtype: Any, recipe: Recipe
  ) -> jax.Array:
    """The product of blocked operands, quantized or not."""
    return dot.block_scaled_dot(
      lhs,
      rhs,
      dimension_numbers=self.numbers,
      preferred_element_type=dtype,
      implementation=recipe.implementation,
    )


def quantized(
  x: jax.Array,
  format: formats.BlockFormat | None,
  blockings: list[blocking.Blocking],
  recipe: Recipe,
) -> list[Any]:
  """`x`, blocked each way and quantized; only blocked where format is None."""
  if format is None or not blockings:
    return [b.apply(x) for b in blockings]
  x = tangents.without_derivative(
    x,
    "dot_general: a gradient that is a product of quantized arrays has no"
    " derivative; for a second one pass quantize_dgrad=False and"
    " quantize_wgrad=False",
  )
  if len(blockings) > 1:
    return quantization.quantize_blocked(
      x, format, blockings, scale_rounding=recipe.scale_rounding
    )
  return [
    quantization.quantize(
      b.apply(x),
      format,
      axis=b.axis(),
      scale_rounding=recipe.scale_rounding,
      packed=False,
    )
    for b in blockings
  ]


def backward_products(
  recipe: Recipe,
  dims: derivatives.GradientDims,
  lhs_ndim: int,
  rhs_ndim: int,
) -> tuple[Product | None, Product | None]:
  """g x rhs, for lhs's gradient, and g x lhs; None where not quantized."""
  dgrad = wgrad = None
  if recipe.quantize_dgrad:
    dgrad = Product.of(
      dims.dgrad,
      (dims.g_ndim, rhs_ndim),
      (recipe.grad_format, recipe.rhs_format),
    )
  if recipe.quantize_wgrad:
    wgrad = Product.of(
      dims.wgrad,
      (dims.g_ndim, lhs_ndim),
      (recipe.grad_format, recipe.lhs_format),
    )
  return dgrad, wgrad
