# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cpu implementation: the C++ kernels of kernels/cpu, through XLA's FFI.

The kernels read the quantized bytes once, decode them in registers, and fuse
the global scale and the epilogue. Dequantized values outside f32's normal range
are exact, unless the sides are blocked along different dimensions (`plan`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Final

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np

from jaxplugin.core import decisions, extents, formats, targets
from jaxplugin.dot import calls, epilogue, problems, sides
from jaxplugin.dot.backends import cpu_configs
from jaxplugin.operation import choice
from jaxplugin.quantization import problems as quantization_problems
from jaxplugin.runtime import cpu_library

_LHS_IS_DEQUANTIZED: Final = (
  "lhs is dequantized to f32 first, because the operands are blocked along"
  " different dimensions; only values in the normal range of f32 are exact"
)
# With precision="fastest".
_ROWS_ARE_QUANTIZED: Final = (
  'rows are quantized to int8 in blocks of 32, because of precision="fastest"'
)
_MANY_ROWS_ARE_QUANTIZED: Final = f"{_ROWS_ARE_QUANTIZED}, except a few rows"
_FEW_ROWS_STAY_FLOATS: Final = (
  'rows stay floats despite precision="fastest", because quantizing so few rows'
  " takes longer than it saves"
)
_ROWS_STAY_FLOATS: Final = (
  'precision="fastest" changes nothing, because {isa} kernels do not quantize'
  " rows that are multiplied with {format}"
)

_FLOATS_ARE_FASTER: Final = (
  'rows stay floats despite precision="fastest", because a tuning table says'
  " that quantizing them is slower"
)

_DOT: Final = "jaxplugin_block_scaled_dot"
# Attribute values of the custom call, listed in kernels/cpu/README.md.
_ACTIVATIONS: Final = {None: 0, "relu": 1, "gelu": 2, "silu": 3}
BEST_ISA: Final = 0
_UNUSED_BLOCK_SIZE: Final = 32  # attribute of an operand without scale


@dataclasses.dataclass(frozen=True)
class QuantizedOutput:
  """A quantized result of a custom call.

  Attributes:
    out: the problem of quantizing the f32 result.
    global_scale: f32[], or None.
  """

  out: quantization_problems.QuantizationProblem
  global_scale: jax.Array | None

  @property
  def operands(self) -> tuple[jax.Array]:
    return (or_absent(self.global_scale),)

  def types(self, rows: int) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of the custom call's results, in rows."""
    return [
      jax.ShapeDtypeStruct(
        (rows, math.prod(shape) // rows) if shape else (), dtype
      )
      for shape, dtype in self.out.result_types()
    ]

  @property
  def attributes(self) -> dict[str, np.int64]:
    return {
      "result_format": np.int64(cpu_library.FORMATS[self.out.format]),
      "result_rounding": np.int64(
        cpu_library.ROUNDINGS[self.out.scale_rounding]
      ),
    }

  def results(self, found: Any) -> list[jax.Array]:
    """Returns the results of `emit_quantized`."""
    types = self.out.result_types()
    return [x.reshape(t[0]) for x, t in zip(found, types, strict=True)]


def result_refusal(out: quantization_problems.QuantizationProblem) -> str:
  """Returns why kernels do not quantize a result, or ""."""
  if out.format not in cpu_library.FORMATS:
    return f"kernels do not write {out.format}"
  return ""


def supports(
  problem: problems.DotProblem, target: targets.Target
) -> decisions.Unsupported | None:
  """Supports formats that kernels read, and static k, on CPUs with kernels."""
  refusal = missing(target) or unreadable(
    problem.lhs, problem.rhs, k=problem.dense_k
  )
  if refusal is not None:
    return refusal
  if problem.k is None:
    return decisions.Unsupported("needs a static k, got a symbolic one")
  return None


def missing(target: targets.Target) -> decisions.Unsupported | None:
  """Returns why a target has no CPU kernels, or None if it has them."""
  refusal = decisions.platform_refusal(target, "cpu")
  if refusal is not None:
    return refusal
  if target.cpu_kernels is None:
    return decisions.Unsupported(
      target.missing(targets.CPU_KERNELS)
      or "the target has no CPU kernels (a named one assumes none; see"
      " jp.detect_target)"
    )
  return None


def unreadable(
  *operands: problems.SideProblem, k: int | None
) -> decisions.Unsupported | None:
  """Returns why the kernels cannot read rows of size k, or None if they can."""
  for operand in operands:
    reason = cpu_library.format_refusal(operand.format, k)
    if reason is not None:
      return decisions.Unsupported(reason)
  return None


def plan(
  problem: problems.DotProblem,
  target: targets.Target,
  config: decisions.Fields = (),
) -> decisions.Plan:
  """Returns the plan, which fuses a scalar global scale.

  With precision="fastest" the plan says whether rows are quantized.

  If the sides are blocked along different dimensions, XLA ops dequantize lhs to
  f32 (`DotCall.dense_sides`). XLA:CPU flushes subnormals, and large values
  overflow.
  """
  notes: tuple[str, ...] = ()
  if not problem.blocks_pair_up:
    notes += (_LHS_IS_DEQUANTIZED,)
  given = cpu_configs.config_of(config)
  if given.rows == cpu_configs.FLOATS:
    notes += (_FLOATS_ARE_FASTER,)
  else:
    by_rule = given.engine == cpu_configs.BY_RULE
    notes += fastest_notes(problem, target, by_rule=by_rule)
  return decisions.Plan(global_scale=problem.fused_application, notes=notes)


def fastest_notes(
  problem: Any, target: targets.Target, *, by_rule: bool = True
) -> tuple[str, ...]:
  """Returns what precision="fastest" changes for rows of floats.

  Args:
    problem: a problem of a dot or a ragged dot.
    target: the target, which has CPU kernels.
    by_rule: whether the kernels choose the engine, and so may keep few rows.
  """
  if not cpu_configs.may_quantize_rows(problem):
    return ()
  quantizes = functools.partial(cpu_configs.quantizes_rows, problem, target)
  if not quantizes(cpu_configs.MANY_ROWS):
    note = _ROWS_STAY_FLOATS.format(
      isa=target.cpu_kernels, format=problem.lhs.format or problem.rhs.format
    )
    return (note,)
  if isinstance(problem, problems.DotProblem) and problem.sizes_are_static:
    are_quantized = quantizes() or not by_rule
    return (_ROWS_ARE_QUANTIZED if are_quantized else _FEW_ROWS_STAY_FLOATS,)
  # Sizes of groups, too, are known at run time.
  are_all = quantizes(cpu_configs.ONE_ROW)
  return (_ROWS_ARE_QUANTIZED if are_all else _MANY_ROWS_ARE_QUANTIZED,)


def emit(
  call: calls.DotCall,
  problem: problems.DotProblem,
  target: targets.Target,
  config: decisions.Fields = (),
  offset: tuple[jax.Array, int] | None = None,
) -> jax.Array:
  """Emits one custom call, and XLA ops for epilogues it does not fuse.

  Args:
    call, problem, target: as for every backend.
    config: fields of a config (`cpu_configs.fields_of`). If they are empty, the
      kernels use their own rules.
    offset: offsets of rhs, which is not batched, and the format's
      `code_offset`. The call then has no epilogue.
  """
  if problem.is_empty:
    return epilogue.apply(jnp.zeros(call.shape, jnp.float32), call)
  dot = functools.partial(
    _dot,
    target=target,
    config=cpu_configs.config_of(config),
    offset=offset,
  )
  return epilogue.fused(dot, call, problem)


def quantized_refusal(
  problem: problems.DotProblem,
  out: quantization_problems.QuantizationProblem,
  target: targets.Target,
  config: decisions.Fields = (),
) -> str:
  """Returns why no custom call quantizes the result, or ""."""
  del target, config
  assert problem.n is not None
  if problem.n % out.shape[-1]:
    return "rhs has no dimension of the result, which is blocked"
  if not problem.fuses_epilogue:
    return "XLA operations compute a part of the epilogue"
  return result_refusal(out)


def emit_quantized(
  call: calls.DotCall,
  problem: problems.DotProblem,
  target: targets.Target,
  config: decisions.Fields = (),
  *,
  out: quantization_problems.QuantizationProblem,
  global_scale: jax.Array | None,
) -> list[jax.Array]:
  """Emits one custom call, which quantizes the f32 result."""
  return _dot(
    call,
    problem,
    target=target,
    config=cpu_configs.config_of(config),
    quantized=QuantizedOutput(out, global_scale),
  )


def _dot(
  call: calls.DotCall,
  problem: problems.DotProblem,
  *,
  target: targets.Target,
  config: cpu_configs.CpuConfig,
  offset: tuple[jax.Array, int] | None = None,
  quantized: QuantizedOutput | None = None,
) -> Any:
  """Emits the custom call on operands reshaped to [batch, rows, k]."""
  cpu_library.register()
  shape = call.shape
  dtype = call.preferred_element_type
  lhs, rhs = call.dense_sides()
  # Sizes come from the arrays, because the problem has None for symbolic ones.
  batch, m, _ = lhs.values.shape
  n = rhs.values.shape[1]
  bias, residual = None, call.residual
  if call.bias is not None:
    bias = epilogue.bias_row(call)
  if residual is not None:
    if residual.dtype != dtype:
      residual = residual.astype(jnp.float32)
    residual = jnp.broadcast_to(residual, shape)
  lhs_scale, rhs_scale = (
    scale_of(side, dense) for side, dense in ((call.lhs, lhs), (call.rhs, rhs))
  )
  if cpu_configs.is_turned(problem.m, problem.n):
    lhs, rhs = rhs, lhs
    lhs_scale, rhs_scale = rhs_scale, lhs_scale
    m, n = n, m
    bias = None if bias is None else jnp.broadcast_to(bias, (n,))
  global_scale = epilogue.pair(call)
  result_type = jax.ShapeDtypeStruct((batch, m, n), dtype)
  if residual is not None:
    residual = residual.reshape(batch, m, n)
  types = result_type if quantized is None else quantized.types(batch * m)
  result: Any = jax.ffi.ffi_call(_DOT, types)(
    *(lhs.values, lhs_scale[0]),
    *(rhs.values, rhs_scale[0]),
    or_absent(global_scale),
    or_absent(bias),
    or_absent(residual),
    *offset_operand(offset, rhs_scale[0]),
    *(quantized.operands if quantized else ()),
    **attributes("lhs", lhs, lhs_scale[1]),
    **attributes("rhs", rhs, rhs_scale[1]),
    **rows_attribute(config.problem(problem)),
    **offset_attribute(offset),
    **(quantized.attributes if quantized else {}),
    activation=np.int64(_ACTIVATIONS[call.activation]),
    isa=np.int64(BEST_ISA),
    **config.attributes(),
    **cpu_library.thread_limit(target),
  )
  return (
    result.reshape(shape) if quantized is None else quantized.results(result)
  )


def scale_of(side: sides.Side, dense: sides.Side) -> tuple[jax.Array, int]:
  """Returns a scale for the kernels, and the number of rows that share it.

  Kernels read the scale of square blocks, which has fewer bytes than the scale
  of rows. With several matrices, each must have whole blocks.

  Args:
    side: an operand.
    dense: the operand as [batch, rows, k].
  """
  if (
    side.square_scale is None or len(side.free) > 1 or len(side.contracting) > 1
  ):
    return or_absent(dense.scale), 1
  scale = side.merge(side.square_scale)
  assert side.format is not None
  size = side.format.block_size
  batch, rows, _ = dense.values.shape
  is_readable = (
    size & (size - 1) == 0
    and scale.shape
    == (batch, extents.divide_up(rows, size), dense.scale.shape[2])
    and (batch == 1 or rows % size == 0)
  )
  return (scale, size) if is_readable else (dense.scale, 1)


def attributes(
  prefix: str, side: sides.Side, scale_rows: int = 1
) -> dict[str, np.int64]:
  """Returns the attributes of the custom call for one operand.

  Args:
    prefix: "lhs" or "rhs".
    side: the operand.
    scale_rows: number of rows that share a row of the scale.
  """
  format = side.format
  if format is None:
    return {f"{prefix}_block_size": np.int64(_UNUSED_BLOCK_SIZE)}
  attributes = {f"{prefix}_block_size": np.int64(format.block_size)}
  element = cpu_library.ELEMENTS.get(format.values_dtype)
  if element is not None and side.values.dtype == formats.PACKED:
    attributes[f"{prefix}_element"] = np.int64(element)
  if side.scale.dtype == formats.PACKED:
    element = cpu_library.SCALE_ELEMENTS[format.scale_dtype]
    attributes[f"{prefix}_scale_element"] = np.int64(element)
  if scale_rows > 1:
    attributes[f"{prefix}_scale_rows"] = np.int64(scale_rows)
  if format.fraction_bits:
    attributes[f"{prefix}_fraction_bits"] = np.int64(format.fraction_bits)
  return attributes


def rows_attribute(problem: Any) -> dict[str, np.int64]:
  """Returns the attribute by which kernels may quantize rows, if they may."""
  if cpu_configs.may_quantize_rows(problem):
    return {"quantize_rows": np.int64(1)}
  return {}


def offset_operand(
  offset: tuple[jax.Array, int] | None, scale: jax.Array
) -> tuple[jax.Array, ...]:
  """Returns the custom call's last operand, if rhs has offsets."""
  return () if offset is None else (offset[0].reshape(scale.shape),)


def offset_attribute(
  offset: tuple[jax.Array, int] | None,
) -> dict[str, np.int64]:
  """Returns the attribute that belongs to `offset_operand`."""
  return {} if offset is None else {"rhs_code_offset": np.int64(offset[1])}


def or_absent(x: jax.Array | None) -> jax.Array:
  # `jnp.zeros` is traced. custom_partitioning refuses constants like NumPy
  # arrays.
  return jnp.zeros((0,), jnp.float32) if x is None else x


BACKEND: Final[decisions.BackendRecord[problems.DotProblem]] = (
  decisions.BackendRecord(
    name="cpu",
    summary="C++ kernels that read the quantized bytes once",
    platforms=("cpu",),
    rank=choice.rank_on(10, "cpu"),
    supports=supports,
    plan=plan,
    emit=emit,
    quantized_refusal=quantized_refusal,
    emit_quantized=emit_quantized,
    tunable=decisions.Tunable(
      source=cpu_library.source,
      config_error=cpu_configs.fields_error,
      # An engine needs an instruction set that another CPU may lack.
      configs_travel=False,
    ),
  )
)
