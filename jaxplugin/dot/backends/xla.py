# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The xla backend: dequantize and `dot_general`, on every platform.

A scale factor of a whole row multiplies sums instead of values. Then a GPU or a
TPU multiplies FP8 and INT8 codes in bf16, which holds them exactly. A product
of a code and an f32 scale factor would need an f32 matmul.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.core import decisions, formats, targets
from jaxplugin.dot import calls, epilogue, problems, sides
from jaxplugin.operation import choice


def operand_dtype(call: Any, target: targets.Target) -> Any:
  """Returns bf16 if it represents both sides of a call exactly, else f32."""
  # XLA:CPU's bf16 dot is inaccurate: vdpbf16ps rounds twice a step. If one
  # product dominated the sum, the error reached 21 * 2^-24 * sum|a * b|, more
  # than the allowed 16 (f32: 12). It is also 13 times slower than f32 at m = 1,
  # and in some layouts it fails at run time, "Unsupported element type for
  # DotThunk::Execute" (jaxlib 0.10.2 and 0.12.0.1, EPYC with AVX512-BF16).
  if target.platform == "cpu":
    return jnp.float32
  is_exact = call.lhs.exact_in_bf16 and call.rhs.exact_in_bf16
  return formats.BF16 if is_exact else jnp.float32


def multiply(
  lhs: jax.Array,
  rhs: jax.Array,
  dimension_numbers: Any,
  dtype: Any,
  *,
  precision: Any = None,
  out_sharding: Any = None,
) -> jax.Array:
  """Computes `dot_general` in f32, with operands cast to `dtype`.

  Args:
    dtype: f32, or bf16 that represents both operands exactly.
    precision: precision of f32 operands. None is HIGHEST, which avoids TF32 on
      a GPU and bf16 on a TPU.
  """
  if dtype == formats.BF16:
    precision = lax.Precision.DEFAULT
  elif precision is None:
    precision = lax.Precision.HIGHEST
  return lax.dot_general(
    lhs.astype(dtype),
    rhs.astype(dtype),
    dimension_numbers,
    precision=precision,
    preferred_element_type=jnp.float32,
    out_sharding=out_sharding,
  )


def plain_dot(
  lhs: jax.Array,
  rhs: jax.Array,
  dimension_numbers: Any,
  dtype: Any,
  **options: Any,
) -> jax.Array:
  """Computes `dot_general`, accumulated in f32 and cast once.

  Args:
    lhs, rhs: arrays of dtypes that f32 represents exactly.
  """

  def multiplied(in_dtype: Any) -> Callable[..., jax.Array]:
    return lambda lhs, rhs: multiply(
      lhs, rhs, dimension_numbers, in_dtype, **options
    )

  in_f32 = multiplied(jnp.float32)
  if lhs.dtype == rhs.dtype == formats.BF16:
    # A bf16 dot has the same products, but not on a CPU (`operand_dtype`).
    in_bf16 = multiplied(formats.BF16)
    result = lax.platform_dependent(lhs, rhs, cpu=in_f32, default=in_bf16)
  else:
    result = in_f32(lhs, rhs)
  return result.astype(dtype)


def emit(
  call: calls.DotCall, problem: problems.DotProblem, target: targets.Target
) -> jax.Array:
  """Dequantizes both sides, multiplies in f32, and applies the epilogue."""
  del problem
  scaled = call.with_sides(functools.partial(_with_row_scale, target))
  result = multiply(
    scaled.lhs.dequantized(),
    scaled.rhs.dequantized(),
    call.dimension_numbers,
    operand_dtype(scaled, target),
  )
  for scale in scaled.scales_in_result():
    result = result * scale
  return epilogue.apply(result, call)


def _with_row_scale(target: targets.Target, side: sides.Side) -> sides.Side:
  """Returns codes with the scale of their rows as a global scale, if exact."""
  if not side.scales_rows:
    return side
  scale = side.linear_scale().astype(jnp.float32)
  codes = side.replace(scale=jnp.ones_like(scale), scale_layout=layouts.LINEAR)
  dtype = jnp.float32 if target.platform == "cpu" else formats.BF16
  return sides.Side(
    name=side.name,
    values=codes.dequantized().astype(dtype),
    global_scale=scale,
    contracting=side.contracting,
    batch=side.batch,
  )


BACKEND: Final[decisions.BackendRecord[problems.DotProblem]] = (
  choice.xla_backend(
    summary="dequantize and dot_general in XLA operations", emit=emit
  )
)
