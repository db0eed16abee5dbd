# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cpu implementation: the dot's C++ kernels, group by group.

The kernels read each group that has rows once, and do not read the others. The
result of a group's rows is bitwise that of `block_scaled_dot` of these rows.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np

from jaxplugin.core import decisions, targets
from jaxplugin.dot import sides
from jaxplugin.dot.backends import cpu
from jaxplugin.operation import choice
from jaxplugin.quantization import problems as quantization_problems
from jaxplugin.ragged import calls, epilogue
from jaxplugin.runtime import cpu_library

_RAGGED_DOT: Final = "jaxplugin_ragged_dot"
# Attribute values of the custom call, listed in kernels/cpu/README.md.
_ACTIVATIONS: Final[dict[str | None, int]] = {
  None: 0,
  "relu": 1,
  "gelu": 2,
  "silu": 3,
  "swiglu": 4,
  "swigluoai": 5,
}


def supports(
  problem: calls.RaggedDotProblem, target: targets.Target
) -> decisions.Unsupported | None:
  """Supports the formats of the dot's kernels, contracted along the blocks."""
  refusal = cpu_library.refusal(target) or cpu.unreadable(
    problem.lhs, problem.rhs, k=problem.k
  )
  if refusal is not None:
    return refusal
  if None in (problem.groups, problem.n, problem.k):
    return decisions.Unsupported(
      "needs a static n, k and number of groups; m alone may be symbolic"
    )
  if problem.rhs.format is None:
    return decisions.Unsupported(
      "needs a block-scaled rhs, got an unquantized one"
    )
  if not problem.is_along_blocks:
    return decisions.Unsupported(
      "needs rhs blocked along its contracting dimension"
    )
  return None


def plan(
  problem: calls.RaggedDotProblem, target: targets.Target
) -> decisions.Plan:
  """Returns the plan: global scales are fused, except one for each row.

  With precision="fastest" the plan says whether rows are quantized.
  """
  return decisions.Plan(
    global_scale=problem.by_kernel,
    notes=cpu.fastest_notes(problem, target),
  )


def emit(
  call: calls.RaggedDotCall,
  problem: calls.RaggedDotProblem,
  target: targets.Target,
  offset: tuple[jax.Array, int] | None = None,
  out: quantization_problems.QuantizedOutput | None = None,
) -> Any:
  """Emits one custom call, and XLA ops for epilogues it does not fuse.

  With an offset, as for the dot's backend, the call has no epilogue.
  """
  square = call.rhs.replace(batch=(0,))
  kernel = functools.partial(_ragged_dot, problem, square, offset, target, out)
  return epilogue.around_kernel(kernel, call.in_usual_order())


def quantized_refusal(
  problem: calls.RaggedDotProblem,
  out: quantization_problems.QuantizationProblem,
  target: targets.Target,
) -> str:
  """Returns why no custom call quantizes the result, or ""."""
  del target
  if problem.by_kernel == "separate":
    return "a separate operation multiplies rows by their global scales"
  return cpu.result_refusal(out)


def _ragged_dot(
  problem: calls.RaggedDotProblem,
  weights: sides.Side,
  offset: tuple[jax.Array, int] | None,
  target: targets.Target,
  out: quantization_problems.QuantizedOutput | None,
  call: calls.RaggedDotCall,
) -> Any:
  """Emits the custom call; `weights` has the scale of square blocks."""
  factors = [
    jnp.broadcast_to(x, (call.num_groups,))
    for x in (call.global_scale, call.global_power)
    if x is not None
  ]
  global_scale = jnp.stack(factors) if factors else None
  bias = None if call.bias is None else call.bias.astype(jnp.float32)
  return cpu.custom_call(
    _RAGGED_DOT,
    jax.ShapeDtypeStruct(call.shape, call.preferred_element_type),
    (
      (call.lhs, cpu_library.or_absent(call.lhs.scale), 1),
      (call.rhs, *cpu.scale_of(weights, call.rhs)),
    ),
    (call.group_sizes, global_scale, bias),
    problem=problem,
    target=target,
    offset=offset,
    out=out,
    activation=np.int64(_ACTIVATIONS[call.activation]),
  )


BACKEND: Final[decisions.BackendRecord[calls.RaggedDotProblem]] = (
  choice.cpu_backend(
    summary="C++ kernels that read the bytes of the used groups once",
    supports=supports,
    plan=plan,
    emit=emit,
    quantized_refusal=quantized_refusal,
  )
)
