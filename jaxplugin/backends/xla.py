# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The xla implementation: dequantize and `dot_general`, on every platform."""

from __future__ import annotations

from typing import Any
from typing import Final

import jax
import jax.numpy as jnp

from jaxplugin import call
from jaxplugin import formats
from jaxplugin import problem as problem_lib
from jaxplugin import reference
from jaxplugin import target as target_lib

NAME: Final = "xla"
REASON: Final = "dequantize and dot_general in XLA operations"


def supports(
  problem: problem_lib.DotProblem, target: target_lib.Target
) -> problem_lib.Unsupported | None:
  """Serves every problem on every target."""
  del problem, target
  return None


def operand_dtype(
  config: call.DotConfig,
  operands: call.Operands,
  target: target_lib.Target,
) -> Any:
  """bf16 where that loses nothing and is not slow; else f32."""
  exact = reference.exact_in_bf16(
    config.lhs, operands.lhs.dtype
  ) and reference.exact_in_bf16(config.rhs, operands.rhs.dtype)
  if not exact:
    return jnp.float32
  if target.platform == "cpu" and not _cpu_multiplies_bf16(config, operands):
    return jnp.float32
  return formats.BF16


def _cpu_multiplies_bf16(
  config: call.DotConfig, operands: call.Operands
) -> bool:
  """Whether XLA:CPU multiplies bf16 operands of this call, and fast."""
  problem = call.problem_of(config, operands)
  # It has a fast f32 and a naive bf16 matrix-vector product: 5 against 69 ms at
  # 8192 x 8192 on a 2-core EPYC with AVX512-BF16, jaxlib 0.10.2.
  is_matrix_vector = problem.m in (0, 1) or problem.n in (0, 1)
  # In other layouts its bf16 dot may fail at run time: "Unsupported element
  # type for DotThunk::Execute: BF16 x BF16 = F32" (jaxlib 0.10.2 and 0.12.0.1).
  batch = tuple(range(len(config.lhs_batch)))
  is_row_major = (
    problem.num_contracting == 1
    and problem.lhs.contracting_is_minor
    and problem.rhs.contracting_is_minor
    and config.lhs_batch == batch
    and config.rhs_batch == batch
  )
  return is_row_major and not is_matrix_vector


def emit(
  operands: call.Operands,
  config: call.DotConfig,
  problem: problem_lib.DotProblem,
  target: target_lib.Target,
) -> jax.Array:
  """The call in plain JAX operations, to be traced by the lowering."""
  del problem
  dtype = operand_dtype(config, operands, target)
  return reference.unfused(operands, config, dtype)
