# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize` and `dequantize`: block-scaled arrays from floats, and back.

On CPUs the kernels of kernels/cpu do the work where they are faster, on GPUs
the Triton kernels of kernels/quantize.py quantize, with the same bits
(`quantization_primitive`); elsewhere JAX operations do (`quantization_ops`).
"""

from __future__ import annotations

import functools
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import formats
from jaxplugin import quantization_ops
from jaxplugin import quantization_primitive
from jaxplugin import scaled_array

ScaleRounding = quantization_ops.ScaleRounding
SCALE_ROUNDINGS: Final = ("up", "floor")

_FLOATS: Final = ("float32", "bfloat16", "float16", "float64")


def quantize(
  x: jax.Array,
  format: formats.BlockFormat,
  *,
  axis: int = -1,
  scale_rounding: ScaleRounding = "up",
  global_scale: jax.Array | float | None = None,
  key: jax.Array | None = None,
) -> scaled_array.ScaledArray:
  """Quantizes `x` to a block-scaled format along `axis`.

  MX formats, per block of 32, with amax the largest magnitude of the block:
    scale  = 2^ceil(log2(amax / max))                 scale_rounding="up"
    scale  = 2^(floor(log2(amax)) - emax)             scale_rounding="floor"
    values = cast(clip(x / scale, -max, max))
  NVFP4, per block of 16:
    global_scale = max(|x|) / (448 * 6), at least 2^-126; 1 when x is all zero
    scale  = e4m3(amax / 6 / global_scale)
    values = e2m1(clip(x / (scale * global_scale), -6, 6))

  Everything is computed in f32 whatever the input dtype, divisions correctly
  rounded, exponents by integer operations, f32 subnormals honoured: the bits
  are the same on every platform. Casts round to nearest even, and saturate.

  A block that holds a NaN or an Inf gets a NaN scale (E8M0 255, E4M3 0x7F) and
  zero values, so all of it dequantizes to NaN; it takes no part in NVFP4's
  global scale. An all-zero block gets scale code 0 and dequantizes to 0. So
  does an NVFP4 block whose scale underflows. Zeros keep their sign.

  Args:
    x: f32, bf16 or f16[..., k, ...] (f64 is rounded to f32 first), with k a
      multiple of the block size.
    format: e.g. `jp.MXFP8`.
    axis: the axis to block; for an operand, the one that a dot contracts.
    scale_rounding: "up" never saturates (NVIDIA's recipe, also JAX's and
      Transformer Engine's); "floor" is OCP MX v1.0 section 6.3, where values
      above max saturate. NVFP4 scales are rounded to nearest always.
    global_scale: f32[], positive and finite, to use instead of the computed
      one. Only for formats with a global scale.
    key: a `jax.random` key for stochastic rounding of the values: up with a
      probability equal to the discarded fraction, so unbiased inside the range.

  Returns:
    `ScaledArray` with values of the logical shape, a linear scale, and f32[]
    global scale (None for MX formats).

  Raises:
    TypeError: x is no float array, or k is no multiple of the block size.
    ValueError: axis, scale_rounding or global_scale is not acceptable.

  Sources: OCP MX v1.0 section 6.3; NVIDIA "Recipes for Pre-training LLMs with
  MXFP8" (2025) for rounding up; cuDNN block scaling for NVFP4.
  """
  x = _float_array("quantize", x)
  axis = scaled_array.canonical_axis("quantize", axis, x.ndim)
  if not isinstance(format, formats.BlockFormat):
    raise TypeError(f"quantize: format must be a BlockFormat, got {format!r}")
  if scale_rounding not in SCALE_ROUNDINGS:
    raise ValueError(
      f"quantize: scale_rounding must be one of {SCALE_ROUNDINGS},"
      f" got {scale_rounding!r}"
    )
  if x.shape[axis] % format.block_size != 0:
    raise TypeError(
      f"quantize: the size of axis {axis} must be a multiple of"
      f" {format.block_size} for {format.name.upper()}, got k={x.shape[axis]}"
      f" in shape {x.shape}; pad x"
    )
  if global_scale is not None and not format.has_global_scale:
    raise ValueError(
      f"quantize: {format} has no global scale, got {global_scale!r}; leave"
      " global_scale out"
    )
  if format.has_global_scale and global_scale is not None:
    global_scale = _given_global_scale(global_scale)
  values, scale, global_scale = _quantize(
    x, global_scale, key, format, axis, scale_rounding
  )
  return scaled_array.ScaledArray(values, scale, global_scale, format)


# Jitted as one, so that an eager call compiles one program and not forty.
@functools.partial(
  jax.jit, static_argnames=("format", "axis", "scale_rounding")
)
def _quantize(
  x: jax.Array,
  global_scale: jax.Array | None,
  key: jax.Array | None,
  format: formats.BlockFormat,
  axis: int,
  scale_rounding: ScaleRounding,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Values, scale and global scale of `quantize`."""
  if key is not None:
    return quantization_ops.quantize(
      x, global_scale, key, format, axis, scale_rounding
    )
  return quantization_primitive.quantize(
    x, global_scale, format, axis, scale_rounding
  )


def dequantize(
  x: scaled_array.ScaledArray, dtype: Any = jnp.float32
) -> jax.Array:
  """Returns `values * scale * global_scale`, computed in f32, then cast.

  Exact in f32 for MX formats; for NVFP4 the product with the global scale is
  rounded once. A NaN scale makes its whole block NaN. Results below 2^-126 are
  flushed to zero where the platform does so (XLA:CPU), except by the kernels
  for CPUs: they serve the last axis in modules for one CPU.

  Args:
    x: a `ScaledArray` of any layout, packed or not.
    dtype: the result's dtype, rounded to once at the end.

  Returns:
    dtype[x.shape].
  """
  if not isinstance(x, scaled_array.ScaledArray):
    raise TypeError(f"dequantize: x must be a ScaledArray, got {type(x)}")
  return _dequantize(x, np.dtype(dtype))


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantize(x: scaled_array.ScaledArray, dtype: np.dtype) -> jax.Array:
  if x.is_interleaved:
    x = x.pack()
  return quantization_primitive.dequantize(
    x.values, linear_scale(x), x.global_scale, x.format, x.axis, dtype
  )


def linear_scale(x: scaled_array.ScaledArray) -> jax.Array:
  """The scale of `x` in the linear layout, without padding."""
  if x.scale_layout == scaled_array.LINEAR:
    return x.scale
  rows, k = x.shape[-2:]
  return scaled_array.unswizzle_scale(
    x.scale, (rows, -(-k // x.format.block_size))
  )


def _float_array(who: str, x: Any) -> jax.Array:
  if isinstance(x, scaled_array.ScaledArray):
    raise TypeError(f"{who}: x is a ScaledArray already, got {x!r}")
  x = jnp.asarray(x)
  if x.dtype.name not in _FLOATS:
    raise TypeError(
      f"{who}: x must be float32, bfloat16, float16 or float64, got"
      f" {x.dtype}[{','.join(map(str, x.shape))}]; cast it first"
    )
  if x.ndim == 0:
    raise TypeError(f"{who}: x must have rank 1 or more, got a scalar")
  return x


def _given_global_scale(global_scale: jax.Array | float) -> jax.Array:
  global_scale = jnp.asarray(global_scale)
  if global_scale.size != 1 or global_scale.dtype.kind not in "fiV":
    raise ValueError(
      "quantize: global_scale must be one float32, got"
      f" {global_scale.dtype}{list(global_scale.shape)}"
    )
  global_scale = global_scale.reshape(()).astype(jnp.float32)
  if not isinstance(global_scale, jax.core.Tracer):
    number = float(global_scale)
    if not (0 < number < np.inf):
      raise ValueError(
        f"quantize: global_scale must be positive and finite, got {number}"
      )
  return global_scale
