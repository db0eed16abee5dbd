# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A differentiable `dot_general` that quantizes both operands on the fly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import NamedSharding

from jaxplugin import dot
from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.dot import backends
from jaxplugin.dot import rules
from jaxplugin.dot import sides
from jaxplugin.training import gradients
from jaxplugin.training import products


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
  nothing is quantized twice.

  Forward mode (`jax.jvp`, `jax.jacfwd`) multiplies tangents, in high precision
  and as they are, with what the backward pass multiplies g with: both modes are
  the same matrix, but for the quantization of g. Second derivatives, in any
  order of modes, are there where neither product is quantized backward; else
  they are an error.

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
      returned, a second derivative where products backward are quantized.
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
  recipe = products.Recipe(
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
    numbers = rules.canonical_dimension_numbers(
      dimension_numbers, lhs.ndim, rhs.ndim
    )
    rules.validate_dimension_numbers(
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
      gradients.quantized_dot,
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
  numbers: sides.DimensionNumbers,
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
  x = scaled_array.as_array("dot_general", name, x)
  if x.dtype not in sides.PLAIN_DTYPES:
    raise TypeError(
      f"dot_general: {name} must be float32, bfloat16 or float16, got"
      f" {x.dtype}{list(x.shape)}"
    )
  return x
