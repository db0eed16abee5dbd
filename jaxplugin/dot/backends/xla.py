# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The xla implementation: dequantize and `dot_general`, on every platform."""

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
from jaxplugin.tables import fitting


def _rank(target: targets.Target) -> int:
  """After everything that reads the quantized bytes."""
  del target
  return 100


def supports(
  problem: problems.DotProblem, target: targets.Target
) -> decisions.Unsupported | None:
  """Serves every problem on every target."""
  del problem, target
  return None


def plan(
  problem: problems.DotProblem, target: targets.Target
) -> decisions.Plan:
  """The global scale is a multiply of its own."""
  del target
  has_scale = problem.global_scale != "none"
  return decisions.Plan(global_scale="separate" if has_scale else "none")


def operand_dtype(call: calls.Call, target: targets.Target) -> Any:
  """bf16 where that loses nothing; else f32."""
  # XLA:CPU's bf16 dot loses: vdpbf16ps rounds twice a step, and where one
  # product dominates the sum the error reached 21 * 2^-24 * sum|a * b|, more
  # than the contract's 16 (f32: 12). It is also 13 times slower than f32 at
  # m = 1, and in some layouts it fails at run time, "Unsupported element type
  # for DotThunk::Execute" (jaxlib 0.10.2 and 0.12.0.1, EPYC with AVX512-BF16).
  if target.platform == "cpu":
    return jnp.float32
  is_exact = call.lhs.exact_in_bf16 and call.rhs.exact_in_bf16
  return formats.BF16 if is_exact else jnp.float32


def emit(
  call: calls.Call, problem: problems.DotProblem, target: targets.Target
) -> jax.Array:
  """Dequantizes both sides, multiplies in f32, and applies the epilogue."""
  del problem
  dtype = operand_dtype(call, target)
  lhs, rhs = call.lhs.dequantized(), call.rhs.dequantized()
  # Without HIGHEST a GPU multiplies f32 in TF32 and a TPU in bf16.
  precision = lax.Precision.HIGHEST
  if dtype == formats.BF16:
    precision = lax.Precision.DEFAULT
  result = lax.dot_general(
    lhs.astype(dtype),
    rhs.astype(dtype),
    call.dimension_numbers,
    precision=precision,
    preferred_element_type=jnp.float32,
  )
  return epilogue.apply(result, call)


BACKEND: Final[decisions.Backend[problems.DotProblem]] = decisions.Backend(
  name="xla",
  summary="dequantize and dot_general in XLA operations",
  rank=_rank,
  supports=supports,
  plan=plan,
  emit=emit,
  is_portable=True,
  tunable=decisions.Tunable(source=fitting.jaxlib_source),
)
