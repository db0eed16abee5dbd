# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Estimates of a program's matmuls, and reasons why some are plain."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any
from typing import Final

import numpy as np
from jaxlib.mlir.dialects import stablehlo

from jaxplugin.core import decisions
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.dot import offsets
from jaxplugin.dot import primitive
from jaxplugin.dot import problems
from jaxplugin.dot.backends import cpu
from jaxplugin.explanation import estimates
from jaxplugin.explanation import report
from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext import program
from jaxplugin.operation import choice
from jaxplugin.quantization import quantized_results
from jaxplugin.ragged import backends as ragged_backends
from jaxplugin.ragged import problems as ragged_problems
from jaxplugin.runtime import lowering
from jaxplugin.stablehlo import module_calls
from jaxplugin.stablehlo import modules
from jaxplugin.tables import matching

# Reasons why a matmul is not block-scaled, by its primitive in JAX.
_REASONS: Final = {
  "dot_general": "a plain matmul; jp.dot_general would quantize its operands",
  "ragged_dot_general": (
    "a plain ragged matmul; jp.ragged_dot has block-scaled weights"
  ),
  "conv_general_dilated": "a convolution, which has no block-scaled kernel",
}
# Plain matmuls of modules, with their names in `_REASONS`.
_MODULE_NAMES: Final = {
  "stablehlo.dot": "dot_general",
  "stablehlo.dot_general": "dot_general",
  "stablehlo.convolution": "conv_general_dilated",
  "chlo.ragged_dot": "ragged_dot_general",
}
_OWN_BACKWARD: Final = (
  "jp.dot_general computes this matmul of the backward pass in high precision"
)
_SCALED: Final = (
  "JAX's own scaled dot, which JAX lowers; wrap the function in jp.accelerate"
)
_OFFSETS: Final = (
  "the second matmul of a block-scaled one; it adds the zero points or minima"
  " of an operand. On a CPU the kernel of the first matmul computes it if there"
  " are few rows or groups"
)
# XLA:CPU passes whole arrays to custom calls.
_SCANNED: Final = (
  "rhs: a scan's slice of stacked weights, which is copied in each step; to"
  " avoid the copy, scan over the layers' numbers and call linear(layer=)"
)
_SCANNED_GROUPS: Final = (
  "rhs: a scan's slice of stacked weights, which is copied in each step; to"
  " avoid the copy, make layers and groups one dimension, and set the sizes of"
  " other layers' groups to 0"
)
_HALF: Final = (formats.BF16, np.dtype(np.float16))


def place(operation: program.TracedOperation) -> dict[str, Any]:
  """Returns the fields of a `report.Place` for an operation."""
  return {
    "source": operation.source,
    "layer": operation.layer,
    "phase": operation.phase,
    "trips": operation.trips,
    "is_conditional": operation.is_conditional,
  }


def with_notes(
  operation: program.TracedOperation,
  decision: decisions.Decision | None,
  note: str,
) -> decisions.Decision | None:
  """Adds a note unless it is "", and one if a scan slices the weights."""
  if decision is None:
    return None
  notes = [*decision.notes, *([note] if note else [])]
  eqn = operation.eqn
  numbers = eqn.params["call"].named(range(len(eqn.invars)))
  if (
    decision.implementation == cpu.BACKEND.name
    and numbers["rhs"] in operation.scanned
  ):
    is_dot = eqn.primitive is primitive.block_scaled_dot_p
    notes.append(_SCANNED if is_dot else _SCANNED_GROUPS)
  return dataclasses.replace(decision, notes=tuple(notes))


def quantized_result(
  operation: program.TracedOperation,
  target: targets.Target | None,
  *,
  for_export: bool,
) -> tuple[bool, str]:
  """Explains the quantization of a matmul's result (`out_format`).

  Args:
    operation: the matmul, or its quantization.
    target, for_export: as for `explain`.

  Returns:
    Whether the kernel of the matmul quantizes, and a note; (False, "") without
    `out_format`.
  """
  eqn = operation.alternative
  forms = None if eqn is None else eqn.params["forms"]
  if not isinstance(forms, quantized_results.QuantizedResult):
    return False, ""
  target = targets.requested(
    eqn.params["target"],
    lambda asked: target or asked or targets.detect_target(),
  )
  module = lowering.Module(
    platforms=(target.platform,),
    is_partitioned=operation.num_devices > 1,
  )
  refusal = module.kernels_refusal()
  if for_export:
    reason = "jp.export writes kernels of one operation"
  elif refusal is not None:
    reason = refusal.reason
  else:
    _, reason = forms.decide([x.aval for x in eqn.invars], target)
  note = f"result: quantized to {forms.format}"
  if reason:
    return False, f"{note} separately, because {reason}"
  return True, f"{note} by the kernel of the matmul (fused)"


def describe(aval: Any) -> str:
  return f"{aval.dtype.name}[{', '.join(map(str, aval.shape))}]"


def backend_of(
  decided: choice.Decided,
) -> decisions.BackendRecord[Any]:
  """Returns the backend that was chosen for a matmul."""
  operation: matching.MeasuredOperation[Any] = backends.OPERATION
  if not isinstance(decided.problem, problems.DotProblem):
    operation = ragged_backends.operation_of(decided.problem)
  assert decided.decision is not None
  return operation.backends()[decided.decision.implementation]


def estimate(
  eqn: Any, decided: choice.Decided, results: Sequence[Any]
) -> estimates.Estimate | None:
  """Estimates a matmul; None if a size is symbolic.

  `results` are the arrays that its kernel writes.

  The number of groups with rows is unknown. The estimate of a ragged dot
  assumes the smaller of the number of rows and the number of groups. A
  contraction reads all rows and writes all groups.
  """
  problem = decided.problem
  if decided.decision is None or not problem.sizes_are_static:
    return None
  assert problem.m is not None and problem.n is not None
  assert problem.k is not None
  call = eqn.params["call"].filled(v.aval for v in eqn.invars)
  flops = 2 * problem.m * problem.n * problem.k
  grouped: tuple[str, ...] = ()
  used = 1.0
  if isinstance(problem, problems.DotProblem):
    assert problem.batch is not None
    # If an operand is a layer of a stack, only this layer is read.
    call = call.without_origins()
    flops *= problem.batch
  elif isinstance(problem, ragged_problems.RaggedDotProblem):
    assert problem.groups is not None
    grouped = ("rhs", "rhs_scale")
    used = min(problem.m, problem.groups) / max(problem.groups, 1)
  arrays = call.arrays()
  in_groups = estimates.bytes_of(arrays.pop(n) for n in grouped if n in arrays)
  others = estimates.bytes_of([*arrays.values(), *results])
  assert in_groups is not None and others is not None
  is_native = False
  if not isinstance(problem, ragged_problems.ContractionProblem):
    is_native = backend_of(decided).plan(problem, decided.target).is_native
  precision = estimates.precision_of(
    problem.lhs, problem.rhs, is_native=is_native
  )
  return estimates.estimate(
    in_groups * used + others, flops, precision, decided.target
  )


def explain(
  operation: program.TracedOperation, target: targets.Target | None
) -> report.NotBlockScaled | None:
  """Explains a matmul that is not block-scaled; None for other operations."""
  eqn = operation.eqn
  matmuls, dots = jax_private.scaled_primitives()
  name, sides = f"lax.{eqn.primitive.name}", eqn.invars[:2]
  if eqn.primitive in matmuls:
    name, reason = "jax.nn.scaled_matmul", _SCALED
  elif eqn.primitive in dots:
    name, reason = "jax.lax.scaled_dot", _SCALED
  elif eqn.primitive.name in _REASONS:
    reason = _REASONS[eqn.primitive.name]
    if operation.phase in ("dgrad", "wgrad"):
      reason = _OWN_BACKWARD
    if offsets.SCOPE in operation.layer.split("/"):
      reason = _OFFSETS
  else:
    return None
  lhs, rhs, out = (v.aval for v in (*sides, eqn.outvars[0]))
  dimensions = None
  if eqn.primitive.name == "dot_general":
    (contracting, _), (batch, _) = eqn.params["dimension_numbers"]
    dimensions = batch, contracting
  return report.NotBlockScaled(
    **place(operation),
    operation=name,
    description=f"{describe(lhs)} x {describe(rhs)} -> {describe(out)}",
    reason=reason,
    operands=f"{lhs.dtype.name} x {rhs.dtype.name}",
    **_figures((lhs, rhs, out), dimensions, target or targets.current_target()),
  )


def _figures(
  arrays: Sequence[Any],
  dimensions: tuple[Sequence[int], Sequence[int]] | None,
  target: targets.Target,
) -> dict[str, Any]:
  """Returns the fields `sizes` and `estimate` of a `report.NotBlockScaled`.

  Args:
    arrays: shapes and dtypes of lhs, rhs and the result; None if not known.
    dimensions: batch and contracting dimensions of lhs; None if the operation
      is not a dot.
    target: the device to estimate for.
  """
  lhs, rhs, out = arrays
  if dimensions is None or lhs is None or rhs is None:
    return {}
  static = (int, np.integer)
  if not all(isinstance(size, static) for size in (*lhs.shape, *rhs.shape)):
    return {}
  batch, k = (math.prod(lhs.shape[d] for d in dims) for dims in dimensions)
  both = max(batch * k, 1)
  m, n = math.prod(lhs.shape) // both, math.prod(rhs.shape) // both
  sizes = batch, m, n, k
  num_bytes = None if out is None else estimates.bytes_of((lhs, rhs, out))
  if num_bytes is None:
    return {"sizes": sizes}
  flops = 2 * math.prod(out.shape) * k
  is_half = lhs.dtype in _HALF and rhs.dtype in _HALF
  precision: estimates.Precision | None = "bf16" if is_half else None
  return {
    "sizes": sizes,
    "estimate": estimates.estimate(num_bytes, flops, precision, target),
  }


def of_module(
  operation: Any, source: modules.ParsedModule, target: targets.Target
) -> report.NotBlockScaled | None:
  """Explains a plain matmul of a module; None for other operations."""
  name = _MODULE_NAMES.get(operation.name)
  if name is None:
    return None
  types = [x.type for x in (*operation.operands[:2], *operation.results)]
  arrays = [_array_type(x) for x in types]
  lhs, rhs, out = (
    str(ir_type) if array is None else describe(array)
    for ir_type, array in zip(types, arrays, strict=True)
  )
  return report.NotBlockScaled(
    source=source.location(operation),
    operation=operation.name,
    description=f"{lhs} x {rhs} -> {out}",
    reason=_REASONS[name],
    operands=f"{lhs.partition('[')[0]} x {rhs.partition('[')[0]}",
    **_figures(arrays, _dimensions_of_module(operation, arrays[0]), target),
  )


def _array_type(ir_type: Any) -> Any:
  """Returns shape and dtype; None for f64 and for symbolic sizes."""
  try:
    return module_calls.array_type(ir_type)
  except (TypeError, NotImplementedError):
    return None


def _dimensions_of_module(
  operation: Any, lhs: Any
) -> tuple[Sequence[int], Sequence[int]] | None:
  """Returns the batch and contracting dimensions of lhs; None if not a dot."""
  if operation.name == "stablehlo.dot_general":
    numbers = stablehlo.DotDimensionNumbers(
      operation.attributes["dot_dimension_numbers"]
    )
    return numbers.lhs_batching_dimensions, numbers.lhs_contracting_dimensions
  if operation.name == "stablehlo.dot" and lhs is not None:
    return [], [len(lhs.shape) - 1]
  return None
