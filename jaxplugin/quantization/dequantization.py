# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`dequantize`: block-scaled arrays to floats, with one of `backends`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import scaled_array
from jaxplugin.jaxext import tangents
from jaxplugin.quantization import arguments
from jaxplugin.quantization import dequantize_primitive
from jaxplugin.quantization import operations


def dequantize(
  x: scaled_array.ScaledArray, dtype: Any = jnp.float32
) -> jax.Array:
  """Returns the floats that a block-scaled array stands for.

  The product is computed in f32 and cast once::

    result = cast(values * scale * global_scale)
    result = cast((code - zero_point) * scale)   (integer format.offset_dtype)
    result = cast(code * scale + minimum)        (floating format.offset_dtype)

  It is exact in f32 for MX formats. For NVFP4 the product with the global scale
  is rounded once. A NaN scale makes its whole block NaN.

  XLA:CPU flushes results below 2^-126 to zero. The C++ kernels do not; they
  dequantize the last axis in programs for one CPU.

  The global scale has a derivative. The argument of
  `quantize(..., derivative="straight_through")` has one too.

  Args:
    x: a `ScaledArray` in any layout.
    dtype: f32, bf16, f16 or f64. JAX replaces f64 by f32 unless x64 is enabled.

  Returns:
    dtype[x.shape].

  Raises:
    TypeError: If x is not a `ScaledArray`, or dtype is not one of these.
    NotImplementedError: If differentiated with respect to values or scales.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> x_q = jp.quantize(jnp.arange(32.0).reshape(1, 32), "mxfp8")
    >>> jp.dequantize(x_q)[0, -4:]
    Array([28., 28., 30., 32.], dtype=float32)
  """
  if not isinstance(x, scaled_array.ScaledArray):
    raise TypeError(f"dequantize: x must be a ScaledArray, got {type(x)}")
  scaled_array.require_arrays("dequantize", "x", x)
  if x.surrogate is None:
    return _dequantize(x, arguments.float_dtype(dtype))
  return _dequantize_straight_through(arguments.float_dtype(dtype), x)


scaled_array.provide(dequantize=dequantize)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _dequantize_straight_through(
  dtype: np.dtype, x: scaled_array.ScaledArray
) -> jax.Array:
  return _dequantize(x.without_surrogate(), dtype)


@functools.partial(_dequantize_straight_through.defjvp, symbolic_zeros=True)
def _dequantize_straight_through_jvp(
  dtype: np.dtype,
  primals: tuple[scaled_array.ScaledArray],
  given: tuple[scaled_array.ScaledArray],
) -> tuple[jax.Array, jax.Array]:
  (x,), (tangent,) = primals, given
  function = functools.partial(_dequantize, dtype=dtype)
  bare, bare_tangent = x.without_surrogate(), tangent.without_surrogate()
  result = _dequantize_straight_through(dtype, x)
  terms = [tangents.tangent_of(function, bare, bare_tangent)]
  if not tangents.is_constant(tangent.surrogate):
    terms.append(tangent.surrogate.astype(result.dtype))
  present = [term for term in terms if term is not None]
  return result, sum(present, start=jnp.zeros_like(result))


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantize(x: scaled_array.ScaledArray, dtype: np.dtype) -> jax.Array:
  values, scale, offset = tangents.without_derivative(
    (x.values, x.scale, x.offset),
    "dequantize: quantized values and block scales have no derivative."
    " Differentiate with respect to the array before quantize(...,"
    ' derivative="straight_through"), or with respect to the global scale,'
    " with jax.lax.stop_gradient around values and scale",
  )
  if offset is not None:
    format = x.format.along(x.shape[x.axis])
    result = operations.dequantize_raw(
      values, scale, format, axis=x.axis, offset=offset
    )
    return result.astype(dtype)
  x = x.tree_unflatten(
    (x.format, x.scale_layout), (values, scale, x.global_scale)
  )
  x = x.to_floats().in_rows()
  if x.is_interleaved:
    x = x.pack()
  return dequantize_primitive.dequantize(
    x.values, x.linear_scale(), x.global_scale, x.format, x.axis, dtype
  )
