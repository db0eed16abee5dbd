# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A differentiable `dot_general` that quantizes both operands on the fly.

Forward it contracts an operand along one dimension, backward along another, and
is quantized along that which is contracted. Where a gradient will be taken, the
forward pass quantizes an operand along both at once and keeps the second for
the backward pass; that quantizes the incoming gradient along both at once.
"""

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
from jax.sharding import AxisType
from jax.sharding import NamedSharding

from jaxplugin import backends
from jaxplugin import blocking as blocking_lib
from jaxplugin import call
from jaxplugin import call_rules
from jaxplugin import derivatives
from jaxplugin import dot
from jaxplugin import formats
from jaxplugin import quantization
from jaxplugin import reference
from jaxplugin import tangents


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
  lhs_format: formats.BlockFormat | str | None,
  rhs_format: formats.BlockFormat | str | None,
  *,
  grad_format: formats.BlockFormat | str | None = None,
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

  Under differentiation the forward pass quantizes each operand along both
  dimensions, and what is kept for the backward pass is the second quantization
  and not the operand: 1 byte a value for FP8, half a byte for FP4, and scales.
  An operand is kept as it is, and quantized forward only, where its format is
  None or its product backward is not quantized. g is quantized along both
  dimensions where both products are. On GPUs both take one read where
  `quantize_both` does: dimensions that are contracted together lie side by
  side in order, those of the other product beside them, batch dimensions first.
  Without differentiation, and under `jit` for a gradient that is not used,
  nothing is quantized twice. Second derivatives are there, in reverse mode,
  where neither product is quantized backward; else they are an error.

  Use it as `flax.linen.Dense(dot_general=...)`, in
  `jnp.einsum(..., _dot_general=...)` (which may swap its operands, so give both
  the same format there), or directly.

  Args:
    lhs_format: e.g. `jp.MXFP8`, or its name, "mxfp8"; None leaves lhs in its
      own dtype (a plain f32, bf16 or f16 operand of a one-sided product).
    rhs_format: likewise for rhs. One of the two must be given.
    grad_format: format of the gradient in the backward products; lhs_format by
      default (rhs_format where that is None).
    quantize_dgrad: False computes lhs's gradient in high precision.
    quantize_wgrad: False computes rhs's gradient in high precision.
    scale_rounding: "up" or "floor", see `quantize`.
    implementation: None chooses; a name forces one, see `block_scaled_dot`.

  Returns:
    f(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None,
    *, out_sharding=None) with the meaning of `lax.dot_general`: lhs and rhs are
    f32, bf16 or f16 of any rank; the result has preferred_element_type, by
    default the operands' common dtype. Contracting sizes need not be multiples
    of the block: they are padded with zeros inside. `precision` is that of
    products in high precision, by default the highest. Under explicit mesh axes
    the result has the sharding that `lax.dot_general` gives it: `out_sharding`,
    or else that of the operands' remaining dimensions; between, the compiler
    decides, and what has to be gathered travels quantized. Gradients have the
    operands' dtypes and shardings.

  Raises:
    TypeError: a format is no BlockFormat, or both are None; and from the
      function returned: operands are no floats or their shapes do not fit.
    ValueError: scale_rounding, implementation or a format's name is unknown.
    NotImplementedError: out_sharding has unreduced axes, or from the function
      returned, a derivative of a gradient whose products are quantized.
    JAX's own errors of shardings, those of `lax.dot_general`: out_sharding
      names an axis that is not explicit, or is needed, as a contracting
      dimension is sharded, and is not given.

  Source: NVIDIA, "Recipes for Pre-training LLMs with MXFP8" (2025), section 3.
  """
  lhs_format, rhs_format, grad_format = (
    None if format is None else formats.resolve("dot_general", format, name)
    for name, format in (
      ("lhs_format", lhs_format),
      ("rhs_format", rhs_format),
      ("grad_format", grad_format),
    )
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
    *,
    out_sharding: Any = None,
  ) -> jax.Array:
    lhs, rhs = _operand("lhs", lhs), _operand("rhs", rhs)
    numbers = call.canonical_dimension_numbers(
      dimension_numbers, lhs.ndim, rhs.ndim
    )
    call_rules.validate_dimension_numbers(
      "dot_general", numbers, lhs.shape, rhs.shape
    )
    if preferred_element_type is None:
      preferred_element_type = jnp.result_type(lhs, rhs)
    try:
      result_dtype = np.dtype(preferred_element_type)
    except TypeError as error:
      raise TypeError(
        "dot_general: preferred_element_type must be a dtype, got"
        f" {preferred_element_type!r}"
      ) from error
    # Here and not inside, so that an operand that is the same on all devices of
    # a `shard_map` gets the sum of their gradients.
    lhs, rhs = dot.vary_alike([lhs, rhs])
    product = functools.partial(
      _dot,
      recipe,
      numbers,
      lax.Precision(precision) if isinstance(precision, str) else precision,
      result_dtype,
    )
    sharding = _explicit_sharding(lhs, rhs, numbers, out_sharding)
    if sharding is not None:
      axes = _explicit_axes(sharding.mesh)
      product = jax.sharding.auto_axes(
        product, axes=axes, out_sharding=sharding
      )
    return product(lhs, rhs)

  return quantized_dot_general


def _explicit_axes(mesh: Any) -> tuple[str, ...]:
  types = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return tuple(name for name, kind in types if kind == AxisType.Explicit)


def _explicit_sharding(
  lhs: jax.Array,
  rhs: jax.Array,
  numbers: call.DimensionNumbers,
  out_sharding: Any,
) -> NamedSharding | None:
  """The sharding in the type of the result; None without explicit mesh axes.

  JAX is asked what `lax.dot_general` would give, or raise.
  """
  meshes = [jax.typeof(x).sharding.mesh for x in (lhs, rhs)]
  if out_sharding is None and not any(map(_explicit_axes, meshes)):
    return None
  spec = getattr(out_sharding, "spec", out_sharding)
  if getattr(spec, "unreduced", None):
    raise NotImplementedError(
      "dot_general: out_sharding must have no unreduced axes, got"
      f" {out_sharding}; leave them out, and the sum is made here"
    )

  def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return lax.dot_general(
      # Of one dtype: which pairs of them go together is our own rule.
      lhs.astype(np.float32),
      rhs.astype(np.float32),
      numbers,
      out_sharding=out_sharding,
    )

  sharding = jax.eval_shape(product, lhs, rhs).sharding
  assert sharding is None or isinstance(sharding, NamedSharding)
  return sharding


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
  product = _Product.forward(recipe, numbers, lhs.ndim, rhs.ndim)
  (lhs_q,) = _quantized(lhs, recipe.lhs_format, [product.lhs], recipe)
  (rhs_q,) = _quantized(rhs, recipe.rhs_format, [product.rhs], recipe)
  return product.multiply(lhs_q, rhs_q, dtype, recipe)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["array"],
  meta_fields=["is_blocked", "ndim", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class _Kept:
  """What the backward pass needs of an operand.

  Attributes:
    array: the operand, or where is_blocked a `ScaledArray` of it, quantized
      along what the backward product contracts.
    ndim, dtype: of the operand.
  """

  array: Any
  is_blocked: bool
  ndim: int
  dtype: np.dtype


def _dot_fwd(
  recipe: Recipe,
  numbers: call.DimensionNumbers,
  precision: Any,
  dtype: Any,
  lhs: jax.Array,
  rhs: jax.Array,
) -> tuple[jax.Array, tuple[_Kept, _Kept]]:
  dgrad, wgrad = _backward_products(recipe, numbers, lhs.ndim, rhs.ndim)
  if dgrad is None and wgrad is None:
    # A custom derivative again, so that there is a second one.
    result = _dot(recipe, numbers, precision, dtype, lhs, rhs)
    lhs_kept, rhs_kept = (_Kept(x, False, x.ndim, x.dtype) for x in (lhs, rhs))
    return result, (lhs_kept, rhs_kept)
  forward = _Product.forward(recipe, numbers, lhs.ndim, rhs.ndim)

  def quantize(
    x: jax.Array,
    format: formats.BlockFormat | None,
    blocking: blocking_lib.Blocking,
    backward: _Product | None,
  ) -> tuple[Any, _Kept]:
    if format is None or backward is None:
      (now,) = _quantized(x, format, [blocking], recipe)
      return now, _Kept(x, False, x.ndim, x.dtype)
    now, later = _quantized(x, format, [blocking, backward.rhs], recipe)
    return now, _Kept(later, True, x.ndim, x.dtype)

  lhs_q, lhs_kept = quantize(lhs, recipe.lhs_format, forward.lhs, wgrad)
  rhs_q, rhs_kept = quantize(rhs, recipe.rhs_format, forward.rhs, dgrad)
  result = forward.multiply(lhs_q, rhs_q, dtype, recipe)
  return result, (lhs_kept, rhs_kept)


def _dot_bwd(
  recipe: Recipe,
  numbers: call.DimensionNumbers,
  precision: Any,
  dtype: Any,
  residuals: tuple[_Kept, _Kept],
  g: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  del dtype
  lhs, rhs = residuals
  dgrad, wgrad = _backward_products(recipe, numbers, lhs.ndim, rhs.ndim)
  quantized = [p for p in (dgrad, wgrad) if p is not None]
  g_blocked = _quantized(
    g, recipe.grad_format, [p.lhs for p in quantized], recipe
  )
  g_for = dict(zip(quantized, g_blocked, strict=True))

  def product(planned: _Product | None) -> Product:
    if planned is None:
      return lambda g, other, numbers, dtype: reference.plain_dot(
        g, other.array, numbers, dtype, precision
      )

    def multiply(
      _: jax.Array, other: _Kept, numbers: call.DimensionNumbers, dtype: Any
    ) -> jax.Array:
      del numbers  # the product was planned for them
      kept = other.array
      if not other.is_blocked:
        kept = planned.rhs.apply(kept)
      return planned.multiply(g_for[planned], kept, dtype, recipe)

    return multiply

  return gradients(
    g, lhs, rhs, numbers, dgrad=product(dgrad), wgrad=product(wgrad)
  )


_dot.defvjp(_dot_fwd, _dot_bwd)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
  """A quantized product: how its operands are blocked, and multiplied.

  Attributes:
    lhs, rhs: blockings, along what is contracted. Sizes are padded to whole
      blocks of both formats.
    numbers: `block_scaled_dot`'s, of the blocked operands.
  """

  lhs: blocking_lib.Blocking
  rhs: blocking_lib.Blocking
  numbers: call.DimensionNumbers

  @classmethod
  def of(
    cls,
    numbers: call.DimensionNumbers,
    ndims: tuple[int, int],
    operand_formats: tuple[
      formats.BlockFormat | None, formats.BlockFormat | None
    ],
  ) -> _Product:
    multiple = math.lcm(*(f.block_size for f in operand_formats if f))
    contracting, batch = numbers
    lhs, rhs = (
      blocking_lib.Blocking(
        dims=k, lead=(*b, *call.free_dims(ndim, k, b)), multiple=multiple
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
    numbers: call.DimensionNumbers,
    lhs_ndim: int,
    rhs_ndim: int,
  ) -> _Product:
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


def _quantized(
  x: jax.Array,
  format: formats.BlockFormat | None,
  blockings: list[blocking_lib.Blocking],
  recipe: Recipe,
) -> list[Any]:
  """`x`, blocked each way and quantized; only blocked where format is None."""
  if format is None or not blockings:
    return [b.apply(x) for b in blockings]
  x = tangents.without_derivative(
    x,
    "dot_general: a gradient that is a product of quantized arrays has no"
    " derivative; for a second one pass quantize_dgrad=False and"
    " quantize_wgrad=False, and take it in reverse mode",
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
    )
    for b in blockings
  ]


def _backward_products(
  recipe: Recipe, numbers: call.DimensionNumbers, lhs_ndim: int, rhs_ndim: int
) -> tuple[_Product | None, _Product | None]:
  """g x rhs, for lhs's gradient, and g x lhs; None where not quantized."""
  dims = derivatives.GradientDims.of(numbers, lhs_ndim, rhs_ndim)
  dgrad = wgrad = None
  if recipe.quantize_dgrad:
    dgrad = _Product.of(
      dims.dgrad,
      (dims.g_ndim, rhs_ndim),
      (recipe.grad_format, recipe.rhs_format),
    )
  if recipe.quantize_wgrad:
    wgrad = _Product.of(
      dims.wgrad,
      (dims.g_ndim, lhs_ndim),
      (recipe.grad_format, recipe.lhs_format),
    )
  return dgrad, wgrad


Product = Callable[[jax.Array, Any, call.DimensionNumbers, Any], jax.Array]


def gradients(
  g: jax.Array,
  lhs: Any,
  rhs: Any,
  numbers: call.DimensionNumbers,
  *,
  dgrad: Product,
  wgrad: Product,
) -> tuple[jax.Array, jax.Array]:
  """Gradients of `dot_general(lhs, rhs, numbers)`, given that of its result.

  Args:
    g: [batch..., m..., n...].
    lhs, rhs: the operands, or what the products take for them that has their
      ndim and dtype.
    numbers: their dimension numbers.
    dgrad: (g, rhs, dimension_numbers, dtype) -> product, used for lhs.
    wgrad: (g, lhs, dimension_numbers, dtype) -> product, used for rhs.

  Returns:
    Gradients with the shapes and dtypes of lhs and rhs.
  """
  dims = derivatives.GradientDims.of(numbers, lhs.ndim, rhs.ndim)
  lhs_gradient = dgrad(g, rhs, dims.dgrad, lhs.dtype)
  rhs_gradient = wgrad(g, lhs, dims.wgrad, rhs.dtype)
  return (
    lhs_gradient.transpose(dims.lhs_order).astype(lhs.dtype),
    rhs_gradient.transpose(dims.rhs_order).astype(rhs.dtype),
  )
