# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The xla implementation: dequantize and `dot_general`, on every platform."""

from __future__ import annotations

from typing import Any
from typing import Final

import jax
import jax.numpy as jnp

from jaxplugin.core import decisions
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot import call
from jaxplugin.dot import problems
from jaxplugin.dot import reference


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


def operand_dtype(
  config: call.DotConfig,
  operands: call.Operands,
  target: targets.Target,
) -> Any:
  """bf16 where that loses nothing; else f32."""
  # XLA:CPU's bf16 dot loses: vdpbf16ps rounds twice a step, and where one
  # product dominates the sum the error reached 21 * 2^-24 * sum|a * b|, more
  # than the contract's 16 (f32: 12). It is also 13 times slower than f32 at
  # m = 1, and in some layouts it fails at run time, "Unsupported element type
  # for DotThunk::Execute" (jaxlib 0.10.2 and 0.12.0.1, EPYC with AVX512-BF16).
  if target.platform == "cpu":
    return jnp.float32
  is_exact = reference.exact_in_bf16(
    config.lhs, operands.lhs.dtype
  ) and reference.exact_in_bf16(config.rhs, operands.rhs.dtype)
  return formats.BF16 if is_exact else jnp.float32


def emit(
  operands: call.Operands,
  config: call.DotConfig,
  problem: problems.DotProblem,
  target: targets.Target,
) -> jax.Array:
  """The call in plain JAX operations, to be traced by the lowering."""
  del problem
  dtype = operand_dtype(config, operands, target)
  return reference.unfused(operands, config, dtype)


BACKEND: Final = decisions.Backend(
  name="xla",
  summary="dequantize and dot_general in XLA operations",
  rank=_rank,
  supports=supports,
  plan=plan,
  emit=emit,
  is_portable=True,
)
