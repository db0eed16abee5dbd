# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The xla backend: dequantize and `dot_general`, on every platform."""

from __future__ import annotations

from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax

from jaxplugin.core import decisions
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot import calls
from jaxplugin.dot import epilogue
from jaxplugin.dot import problems
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
  lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, dtype: Any
) -> jax.Array:
  """Computes `dot_general` in f32, with operands cast to `dtype`."""
  # Without HIGHEST a GPU would multiply f32 in TF32 and a TPU in bf16.
  precision = lax.Precision.HIGHEST
  if dtype == formats.BF16:
    precision = lax.Precision.DEFAULT
  return lax.dot_general(
    lhs.astype(dtype),
    rhs.astype(dtype),
    dimension_numbers,
    precision=precision,
    preferred_element_type=jnp.float32,
  )


def emit(
  call: calls.DotCall, problem: problems.DotProblem, target: targets.Target
) -> jax.Array:
  """Dequantizes both sides, multiplies in f32, and applies the epilogue."""
  del problem
  lhs, rhs = call.lhs.dequantized(), call.rhs.dequantized()
  dtype = operand_dtype(call, target)
  result = multiply(lhs, rhs, call.dimension_numbers, dtype)
  return epilogue.apply(result, call)


BACKEND: Final[decisions.BackendRecord[problems.DotProblem]] = (
  choice.xla_backend(
    summary="dequantize and dot_general in XLA operations", emit=emit
  )
)
