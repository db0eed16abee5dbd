# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands and arguments of the `nn` drop-ins: checks, conversions, formats.

Arrays may have any real dtype, and block sizes may be those of no format. Error
messages name the function that was called: `scaled_matmul`, `scaled_dot` or
`scaled_dot_general`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxplugin.arrays import scaled_array
from jaxplugin.core import error_context, formats
from jaxplugin.dot import arguments, backends, sides

MIN_BLOCK_SIZE: Final = 2  # of `scaled_dot` and of a config, as in JAX


def array(who: str, name: str, x: Any) -> jax.Array:
  is_array = hasattr(x, "shape") and hasattr(x, "dtype")
  if isinstance(x, scaled_array.ScaledArray) or not (
    is_array or isinstance(x, (int, float))
  ):
    raise TypeError(
      f"{who}: {name} must be an array, got {error_context.shown(x)}; pass a"
      " ScaledArray to block_scaled_dot"
    )
  if isinstance(x, np.ndarray) and jax.sharding.get_abstract_mesh().empty:
    # A tracer would hide a negative scale from the check of NVFP4.
    with jax.ensure_compile_time_eval():
      return scaled_array.as_array(who, name, x)
  return scaled_array.as_array(who, name, x)


def as_float(who: str, name: str, x: jax.Array) -> jax.Array:
  """Converts integers of up to 8 bits to bf16, exactly, and others to f32."""
  dtype = x.dtype
  if jnp.issubdtype(dtype, jnp.floating):
    return x.astype(jnp.float32) if dtype == np.float64 else x
  if dtype == np.bool_:
    return x.astype(jnp.bfloat16)
  if jnp.issubdtype(dtype, jnp.integer):
    is_narrow = ml_dtypes.iinfo(dtype).bits <= formats.BF16_SIGNIFICAND_BITS
    return x.astype(jnp.bfloat16 if is_narrow else jnp.float32)
  raise TypeError(
    f"{who}: {name} must have a real dtype, got {dtype}; multiply the real and"
    " imaginary parts separately"
  )


def block_format(
  values_dtype: np.dtype,
  scale_dtype: np.dtype,
  block_size: int,
  has_global_scale: bool,
) -> formats.BlockFormat:
  """Returns the known format, or a new one that only xla supports."""
  values_dtype, scale_dtype = np.dtype(values_dtype), np.dtype(scale_dtype)
  known = formats.infer(values_dtype, scale_dtype)
  if known is not None and known.block_size == block_size:
    return known
  is_quantizable = (
    values_dtype in formats.FLOAT_VALUES_DTYPES
    and scale_dtype in formats.BYTE_SCALE_DTYPES
  )
  make = formats.BlockFormat if is_quantizable else formats.UnquantizedFormat
  return make(
    name=f"{values_dtype.name} + {scale_dtype.name} per {block_size}",
    values_dtype=values_dtype,
    scale_dtype=scale_dtype,
    block_size=block_size,
    has_global_scale=has_global_scale,
  )


def canonical_numbers(
  who: str,
  dimension_numbers: Any,
  lhs_shape: Sequence[Any],
  rhs_shape: Sequence[Any],
) -> sides.DimensionNumbers:
  """Returns dimension numbers in tuples, after a check against the shapes."""
  numbers = arguments.canonical_dimension_numbers(
    dimension_numbers, len(lhs_shape), len(rhs_shape)
  )
  arguments.validate_dimension_numbers(who, numbers, lhs_shape, rhs_shape)
  return numbers


def result_dtype(who: str, dtype: Any) -> np.dtype:
  """Returns f32, bf16 or f16. In JAX, f64 means f32 unless x64 is enabled."""
  try:
    result = jax.dtypes.canonicalize_dtype(dtype)
  except (TypeError, ValueError):
    result = None
  if result not in formats.FLOAT_DTYPES:
    raise TypeError(
      f"{who}: preferred_element_type must be float32, bfloat16 or float16, got"
      f" {error_context.shown(dtype)}"
    )
  return np.dtype(result)


def require_portable(who: str, implementation: str | None, what: str) -> None:
  """Raises NotImplementedError if `implementation` is a kernel."""
  table = backends.table()
  if implementation is None or table[implementation].is_portable:
    return
  *most, last = (
    name for name, backend in table.items() if not backend.is_portable
  )
  raise NotImplementedError(
    f"{who}: implementation={implementation!r} does not support {what}, which"
    f" is lax.dot_general: {', '.join(most)} and {last} need a quantized"
    " operand; leave implementation out"
  )
