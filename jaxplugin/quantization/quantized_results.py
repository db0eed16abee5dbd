# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Matmuls that quantize their result.

`compute` binds a call and quantizes its f32 result. A backend of the call may
replace both by one kernel, if it supports the `OutFormat`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import scaled_array
from jaxplugin.core import decisions, error_context, formats, targets
from jaxplugin.jaxext import tangents
from jaxplugin.operation import alternatives, choice, primitive
from jaxplugin.quantization import arguments, out_format, problems
from jaxplugin.runtime import lowering
from jaxplugin.tables import resolution

_F32: Final = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedResult(alternatives.Forms):
  """A call whose result is quantized, and its kernel.

  Its operands are the arrays of the call and the leaves of the `OutFormat`.

  Attributes:
    call: form of the call, whose result is f32.
    out: structure of the `OutFormat`.
    bind: computes a call.
    backends: the package of the operation's backends: `choose_for`, `emit`.
    operation: the operation, with its backends.
    is_mapped: whether a `vmap` maps the operands.
  """

  call: Any
  out: Any
  bind: Callable[[Any], jax.Array]
  backends: Any
  operation: resolution.MeasuredOperation[Any]
  is_mapped: bool = False

  def mapped(self) -> QuantizedResult:
    return dataclasses.replace(self, is_mapped=True)

  @property
  def format(self) -> formats.BlockFormat:
    """Format of the result."""
    leaves = [None] * self.out.num_leaves
    format: formats.BlockFormat = self.out.unflatten(leaves).block_format
    return format

  def _filled(
    self, operands: Sequence[Any]
  ) -> tuple[Any, out_format.OutFormat]:
    count = len(self.call.arrays())
    out = jax.tree.unflatten(self.out, operands[count:])
    return self.call.filled(operands[:count]), out

  def operations(self, *operands: Any) -> Any:
    call, out = self._filled(operands)
    return out_format.quantized(
      error_context.who(self.operation.name), self.bind(call), out
    )

  def kernel(
    self, context: primitive.LoweringContext
  ) -> Callable[..., Any] | None:
    if context.mesh is not None or lowering.current_export() is not None:
      return None
    decision, _ = self.decide(context.avals_in, context.target)
    if decision is None:
      return None
    return lambda *operands: self._emit(decision, context.target, operands)

  def decide(
    self, avals: Sequence[Any], target: targets.Target
  ) -> tuple[decisions.Decision | None, str]:
    """Returns the decision of one kernel for both, or None and the reason."""
    if self.is_mapped:
      return None, "jax.vmap maps it"
    call, out = self._filled(avals)
    if reason := refusal(call.shape, out):
      return None, reason
    if call.problem().is_empty:
      return None, "the operands are empty"
    decision = self.backends.choose_for(call, target)
    backend = choice.backend_of(self.operation, decision)
    reason = backend.quantized_refusal(
      call.problem(), problem(call.shape, out), target
    )
    return (None, f"{backend.name}: {reason}") if reason else (decision, "")

  def _emit(
    self,
    decision: decisions.Decision,
    target: targets.Target,
    operands: Sequence[Any],
  ) -> Any:
    call, out = self._filled(operands)
    global_scale = out.global_scale
    quantized = problems.QuantizedOutput(
      problem=problem(call.shape, out), global_scale=global_scale
    )
    values, scale, *amax = self.backends.emit(
      decision, call, target, out=quantized
    )
    if global_scale is not None:
      global_scale = jnp.reshape(global_scale, (1,) * values.ndim)
    result = scaled_array.ScaledArray(
      values, scale, global_scale, out.block_format
    )
    return (result, *amax) if amax else result


def compute(
  call: primitive.OperationCall,
  out: out_format.OutFormat,
  *,
  bind: Callable[[Any], jax.Array],
  backends: Any,
  operation: resolution.MeasuredOperation[Any],
  is_checked: bool,
  source: jax.Array | None = None,
) -> Any:
  """Computes a call, and quantizes its result.

  Args:
    call: a call whose result is f32.
    bind, backends, operation: as for `QuantizedResult`.
    is_checked: whether `bind` checks the result, which only operations have.
    source: the f32 result, if an operand has a derivative that the arrays of
      the call do not have; else None. Its numbers are not used.

  Returns:
    A `ScaledArray`, or two if `out` has two axes; with out.returns_amax a tuple
    of that and the amax.
  """
  arrays = call.flatten()
  if out.derivative is None:
    message = f"{error_context.who(operation.name)}: {out_format.NO_DERIVATIVE}"
    arrays = tangents.without_derivative(arrays, message)
    if source is not None:
      guard = tangents.derivative_guard(source, message)
      arrays = tangents.attach_guard(arrays, guard)
    source = None
  else:
    source = bind(call) if source is None else source
    if getattr(call, "activation", None) is not None:
      # The derivative needs the argument of the activation, which a fused
      # kernel does not return.
      return out_format.quantized(
        error_context.who(operation.name), source, out
      )
    arrays, global_scale = lax.stop_gradient((arrays, out.global_scale))
    out = dataclasses.replace(out, derivative=None, global_scale=global_scale)
  leaves, tree = jax.tree.flatten(out)
  forms = QuantizedResult(
    call=call.form(),
    out=tree,
    bind=bind,
    backends=backends,
    operation=operation,
  )
  if is_checked:
    result = forms.operations(*arrays, *leaves)
  else:
    result = alternatives.compute(forms, *arrays, *leaves)
  return out_format.with_source(result, out, source)


def refusal(shape: Sequence[Any], out: out_format.OutFormat) -> str:
  """Returns why no kernel of a matmul can quantize its result, or ""."""
  format = out.block_format
  if isinstance(out.axis, tuple):
    return "the result is quantized along two axes"
  if out.axis % len(shape) != len(shape) - 1:
    return f"the result is blocked along axis {out.axis}, which is not the last"
  if not all(isinstance(size, int) for size in shape):
    return "a size of the result is symbolic"
  if 0 in shape:
    return "the result is empty"
  if format.is_square:
    return f"blocks of {format} have {format.block_rows} rows"
  if not format.scales_codes:
    return f"{format} has zero points, minima or a codebook"
  if out.scale_rounding not in arguments.SCALE_ROUNDINGS:
    return f"it does not round scales like {out.scale_rounding}"
  if shape[-1] % format.along(shape[-1]).block_size:
    return "the last block of a row is short"
  if out.key is not None:
    return "values are rounded stochastically"
  if format.has_global_scale and out.global_scale is None:
    return (
      "a second pass computes the global scale from the whole result; pass"
      " OutFormat(global_scale=...) to avoid it"
    )
  return ""


def problem(
  shape: Sequence[Any], out: out_format.OutFormat
) -> problems.QuantizationProblem:
  """Returns the problem of a result that `refusal` does not refuse."""
  format = out.block_format
  size = shape[-1]
  return problems.QuantizationProblem.along(
    len(shape) - 1,
    shape=tuple(shape),
    dtype=_F32,
    format=format.along(size),
    scale_rounding=out.scale_rounding,
    has_global_scale=out.global_scale is not None,
    packed=arguments.whether_packed("OutFormat", out.packed, format, size),
    returns_amax=out.returns_amax,
  )
