# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The triton implementation: the ragged kernels of kernels/gpu/ragged.

Each kernel program finds its group and rows on the device, from the group
sizes. The kernels read only weights of groups that have rows, without a copy. A
contraction along the blocks gives the rows of a group the bits of
`block_scaled_dot` with the same config. The gradient of lhs contracts across
the blocks, so its kernels transpose tiles of rhs after decoding them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

import jax.numpy as jnp

from jaxplugin.arrays import interleaving, layouts
from jaxplugin.core import decisions, targets
from jaxplugin.dot import problems as dot_problems
from jaxplugin.dot.backends import triton
from jaxplugin.kernels import launching
from jaxplugin.kernels.gpu import configs, matmul_plans
from jaxplugin.kernels.gpu.ragged import plans
from jaxplugin.operation import choice
from jaxplugin.quantization import problems as quantization_problems
from jaxplugin.ragged import calls, epilogue
from jaxplugin.runtime import triton_library

_SCHEDULE: Final = "each kernel program finds its rows on the device"
_NOT_FASTER: Final = (
  'precision="fastest" changes nothing, because ragged kernels sum in f32'
)


def supports(
  problem: calls.RaggedDotProblem, target: targets.Target
) -> decisions.Unsupported | None:
  """Supports readable formats for which a config exists. m may be symbolic."""
  return triton_library.refusal(target) or _problem_gate(problem, target)


def _problem_gate(
  problem: calls.RaggedDotProblem, target: targets.Target
) -> decisions.Unsupported | None:
  refusal = triton.operands_refusal(problem)
  if refusal is not None:
    return refusal
  if problem.rhs.format is None and not problem.is_along_blocks:
    return decisions.Unsupported(
      "needs a block-scaled rhs to contract n, got an unquantized one"
    )
  if triton_library.uses_descriptors(target):
    return decisions.Unsupported(
      "ragged kernels do not use TMA descriptors, which the target requests"
    )
  if problem.is_empty:
    return None
  try:
    for each in _planned(problem):
      _config(_shape(each, target), target)
  except ValueError as error:
    return decisions.Unsupported(str(error))
  return None


def _planned(
  problem: calls.RaggedDotProblem,
) -> tuple[calls.RaggedDotProblem, ...]:
  """Returns the problems that kernels are planned for.

  It is the problem itself. If m is symbolic, it is a problem for each of
  `plans.planned_m`, whose kernels read m.
  """
  if problem.m is not None:
    return (problem,)
  assert problem.groups is not None
  return tuple(
    dataclasses.replace(problem, m=m, reads_m=True)
    for m in plans.planned_m(problem.groups)
  )


def _reads(
  layout: str, problem: calls.RaggedDotProblem, target: targets.Target
) -> bool:
  """Returns whether the kernels read a layout of rhs without conversion.

  They read swizzled scales and, on some architectures, interleaved FP4.
  """
  del problem
  if layout == interleaving.INTERLEAVED:
    return _reads_interleaved(target)
  return layout == layouts.SWIZZLED


def _reads_interleaved(target: targets.Target) -> bool:
  architecture = triton_library.architecture_of(target)
  return architecture is not None and architecture.reads_interleaved


def plan(
  problem: calls.RaggedDotProblem, target: targets.Target
) -> decisions.Plan:
  """Returns the plan: global scales are fused, except one for each row."""
  global_scale = problem.by_kernel
  if problem.is_empty:
    return decisions.Plan(global_scale=global_scale)
  if problem.m is None:
    return triton.plan_of_symbolic(
      {each.m: plan(each, target) for each in _planned(problem)}
    )
  shape, planned = launches(problem, target)
  names = ", ".join(launch.name for launch in planned)
  architecture = triton_library.supported_architecture(target)
  conversions = matmul_plans.conversion_notes(planned[0], architecture)
  return decisions.Plan(
    global_scale=global_scale,
    notes=(
      f"kernels: {names}",
      *triton.scale_notes(problem.lhs.format, problem.rhs.format),
      *conversions,
      *triton.limits_notes(target, functools.partial(_config, shape), shape),
      _SCHEDULE,
      *((_NOT_FASTER,) if problem.fastest_precision else ()),
    ),
    is_native=_config(shape, target).path == "native",
  )


def launches(
  problem: calls.RaggedDotProblem, target: targets.Target
) -> tuple[plans.RaggedShape, tuple[launching.Launch, ...]]:
  """Returns the launches for a supported problem."""
  shape = _shape(problem, target)
  return shape, _launches(shape, target)


def _shape(
  problem: calls.RaggedDotProblem, target: targets.Target
) -> plans.RaggedShape:
  """Returns the kernels' description of a problem, with dense operands."""
  assert problem.groups is not None and problem.m is not None
  assert problem.n is not None and problem.k is not None
  lhs, rhs = problem.lhs, problem.rhs
  n, k = problem.n, problem.k
  is_across = not problem.is_along_blocks
  if is_across:
    # rhs (groups, n, k) is contracted along n. The kernels call it k.
    n, k = k, n
  is_fused = problem.global_scale != "row"
  has_scale = is_fused and problem.global_scale != "none"
  return plans.RaggedShape(
    groups=problem.groups,
    batch=1,
    m=problem.m,
    n=n,
    k=k,
    lhs=_operand(lhs, problem.m, k),
    rhs=_operand(rhs, problem.n, problem.k, target),
    out_dtype=triton.PLAIN_NAMES[problem.out_dtype] if is_fused else "f32",
    has_global_scale=has_scale,
    has_global_power=has_scale and problem.has_global_power,
    has_scale_of_group=problem.global_scale == "group",
    has_bias=is_fused and problem.has_bias,
    activation=(is_fused and problem.activation) or "none",
    is_across=is_across,
    reads_m=problem.reads_m,
  )


def _operand(
  side: dot_problems.SideProblem,
  rows: int,
  k: int,
  target: targets.Target | None = None,
) -> configs.OperandKind:
  """Returns the kernels' description of a dense operand.

  Args:
    target: target, for rhs; None for lhs, whose scales become linear and whose
      values are not interleaved.
  """

  is_read = target is not None and _reads_interleaved(target)
  return configs.operand(
    triton.kind_name(side.format, side.dtype),
    rows,
    k,
    swizzled=target is not None
    and side.scale_layout == layouts.SWIZZLED
    and triton.reads_swizzled(side.format),
    interleaved=side.is_interleaved and is_read,
  )


def _config(
  shape: plans.RaggedShape, target: targets.Target
) -> configs.MatmulConfig:
  architecture = triton_library.supported_architecture(target)
  config = plans.default_config(
    shape, architecture, core_count=target.core_count or 1
  )
  return triton.within_limits(config, shape, target)


def _launches(
  shape: plans.RaggedShape, target: targets.Target
) -> tuple[launching.Launch, ...]:
  architecture = triton_library.supported_architecture(target)
  config = _config(shape, target)
  found = plans.plan(shape, config, architecture)
  return triton.limited(found, config, shape, target)


def emit(
  call: calls.RaggedDotCall,
  problem: calls.RaggedDotProblem,
  target: targets.Target,
  out: quantization_problems.QuantizedOutput | None = None,
) -> Any:
  """Launches the kernels, and emits epilogues they do not fuse as XLA ops."""

  def kernel(call: calls.RaggedDotCall) -> Any:
    cases = [
      functools.partial(_ragged_dot, each, target, call, out)
      for each in _planned(problem)
    ]
    if problem.m is not None:
      return cases[0]()
    assert problem.groups is not None
    limits = plans.planned_m(problem.groups)
    return choice.by_size(call.num_rows, limits, cases)

  return epilogue.around_kernel(kernel, call)


def quantized_refusal(
  problem: calls.RaggedDotProblem,
  out: quantization_problems.QuantizationProblem,
  target: targets.Target,
) -> str:
  """Returns why no kernel quantizes the result, or ""."""
  if problem.m is None:
    return "m is symbolic"
  if problem.is_empty:
    return "an operand is empty"
  if problem.by_kernel == "separate":
    return "XLA operations multiply by the global scales of rows"
  shape, planned = launches(problem, target)
  return triton.result_refusal(planned, out, shape.out_columns)


def _ragged_dot(
  problem: calls.RaggedDotProblem,
  target: targets.Target,
  call: calls.RaggedDotCall,
  out: quantization_problems.QuantizedOutput | None,
) -> Any:
  """Computes a call without a global scale of rows.

  It runs the launches on the call's arrays, copied only if necessary.
  """
  shape = _shape(problem, target)
  arrays: dict[str, Any] = {"group_sizes": call.group_sizes, "bias": call.bias}
  lhs, rhs = _readable(call, shape, target)
  arrays["lhs"], arrays["lhs_scale"], lhs_kind = lhs
  arrays["rhs"], arrays["rhs_scale"], rhs_kind = rhs
  factors = [x for x in (call.global_scale, call.global_power) if x is not None]
  if factors:
    arrays["global_scale"] = jnp.stack(factors, axis=-1)
  shape = dataclasses.replace(shape, lhs=lhs_kind, rhs=rhs_kind)
  if problem.reads_m:
    arrays["m"] = jnp.asarray(call.num_rows, jnp.int32).reshape(1)
  return triton.run(
    _launches(shape, target),
    arrays,
    target,
    who=calls.WHO,
    num_rows=call.num_rows,
    sizes=(1, shape.m, shape.out_columns),
    out=out,
  )


def _readable(
  call: calls.RaggedDotCall, shape: plans.RaggedShape, target: targets.Target
) -> tuple[triton.Readable, triton.Readable]:
  """Returns lhs as (1, m, k) and rhs as (groups, n, k), for the kernels."""
  lhs = call.lhs.in_usual_order().with_linear_scale()
  rhs = call.rhs.with_bytes()
  if rhs.is_interleaved and not _reads_interleaved(target):
    rhs = rhs.in_usual_order()
  # rhs has the strides of a contraction along its blocks, also if the call
  # contracts across them.
  rhs = rhs.replace(batch=(0,), contracting=(2,))
  return (
    triton.strided(lhs, shape.lhs),
    triton.strided(rhs, shape.rhs),
  )


BACKEND: Final[decisions.BackendRecord[calls.RaggedDotProblem]] = (
  choice.triton_backend(
    summary="Triton kernels that read the bytes of the used groups",
    folder="gpu/ragged",
    supports=supports,
    plan=plan,
    emit=emit,
    quantized_refusal=quantized_refusal,
    reads=_reads,
  )
)
