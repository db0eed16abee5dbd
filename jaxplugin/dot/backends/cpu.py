# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cpu implementation: the C++ kernels of kernels/cpu, through XLA's FFI.

The kernels read the quantized bytes once, decode them in registers, and fuse
the global scale and the epilogue. Dequantized values outside f32's normal range
are exact, unless the sides are blocked along different dimensions (`plan`).

By default the kernels choose an engine and split its work by rules
(kernels/cpu/README.md). A `CpuConfig`, which a tuning table may choose,
overrides these rules for one call. It changes only which engine computes the
sums, and in which order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np

from jaxplugin.core import blocking, decisions, error_context, formats, targets
from jaxplugin.dot import calls, epilogue, problems, sides
from jaxplugin.operation import choice
from jaxplugin.quantization import problems as quantization_problems
from jaxplugin.runtime import cpu_library

BY_RULE: Final = "by_rule"
FLOATS: Final = "floats"

_FEW_ROWS: Final = ("few_rows_avx2", "few_rows_avx512", "few_rows_vnni")
# The sizes that `candidates` measures. On two Zen 4 cores (2026-11, measured by
# kernels/cpu/tests/compare/compare.sh) tasks of 256 rows are 1.03x to 1.14x
# faster than the rule at 1024^3 and for one row of two MXFP4 sides, and 1.0x to
# 1.04x slower at 128 x 4096 x 4096. Tasks of 16 rows and panels of 64 were
# never faster. With AVX2 a pass of 2 rows is 1.05x faster than one of 4 rows,
# which does not fit the first cache.
_PASSES: Final = (2, 3)
_PASS_ROWS: Final = 4  # upper limit; the rule makes all passes equal
_PANELS: Final = (256,)
_TASKS: Final = (64, 256)
# Up to this work the rule uses one thread (`IsSerial` in
# kernels/cpu/dot/rule.h).
_SERIAL_WORK: Final = 3 << 19
# With more columns lhs is the panel, even if it has more rows than rhs
# (`PanelIsLhs` in kernels/cpu/dot/config.h).
_PANEL_COLUMNS: Final = 256
# Up to this number of rows the kernel streams rhs through registers once. With
# more rows it reads rhs panel by panel or several times.
_MAX_SMALL_ROWS: Final = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class CpuConfig:
  """How the C++ kernels compute a dot. 0 and "by_rule" use the kernels' rule.

  Attributes:
    engine: one of `ENGINES`. Another engine computes numbers that it cannot
      represent, such as bf16 below 2^-55.
    panel_rows: rows of the panel that are unpacked at a time. The panel is the
      side with fewer rows, or lhs if rhs has more than 256. For the engines of
      few rows: rows of one pass over the weights.
    task_rows: rows of the other side in one task of a thread.
    threads: upper limit on the threads that share the work. The rule is all
      threads of the pool, or one if there is little work.
    rows: "floats" does not convert rows with precision="fastest". The rule
      quantizes more than a few rows, and all rows if `engine` is given.
  """

  engine: str = BY_RULE
  panel_rows: int = 0
  task_rows: int = 0
  threads: int = 0
  rows: str = BY_RULE

  def __post_init__(self) -> None:
    for name, words in (("engine", ENGINES), ("rows", (BY_RULE, FLOATS))):
      if getattr(self, name) not in words:
        raise ValueError(
          f"CpuConfig: {name} must be one of {words}, got"
          f" {error_context.shown(getattr(self, name))}"
        )
    for name in _SIZES:
      value = getattr(self, name)
      if type(value) is not int or value < 0:
        raise ValueError(
          f"CpuConfig: {name} must be a whole number, 0 or more, got"
          f" {error_context.shown(value)}"
        )

  def attributes(self) -> dict[str, np.int64]:
    """Returns the config's attributes of the custom call, defaults left out."""
    numbers = {"engine": ENGINES.index(self.engine)}
    numbers |= {name: getattr(self, name) for name in _SIZES}
    return {name: np.int64(value) for name, value in numbers.items() if value}

  def problem(self, problem: problems.DotProblem) -> problems.DotProblem:
    """Returns the problem that the kernels compute."""
    if self.rows == FLOATS:
      return dataclasses.replace(problem, fastest_precision=False)
    return problem

  def __str__(self) -> str:
    fields = [] if self.engine == BY_RULE else [self.engine]
    fields += [] if self.rows == BY_RULE else [f"rows={self.rows}"]
    fields += [
      f"{name}={getattr(self, name)}" for name in _SIZES if getattr(self, name)
    ]
    return " ".join(fields) or BY_RULE


# Forms of rows (`RowsForm` in kernels/cpu/kernels.h).
GIVEN, BF16, INT8 = range(3)
# Sizes (m, n) of which kernels quantize rows, if they quantize any.
MANY_ROWS: Final = (1 << 20, 1 << 20)
ONE_ROW: Final = (1, 1 << 20)
# INT8 is `kQuantizedRows` in kernels/cpu/dot/rule.h.
_ROWS: Final = {
  BF16: formats.BF16,
  INT8: dataclasses.replace(formats.INT8_32, scale_dtype=formats.F32),
}
_SIZES: Final = ("panel_rows", "task_rows", "threads")
_FIELDS: Final = ("engine", *_SIZES, "rows")
# An engine's index is its number in kernels/cpu/dot/config.h.
ENGINES: Final = (
  *(BY_RULE, "f32", "float_avx2", "integer_avx2", "few_rows_avx2"),
  *("bf16", "vnni", "few_rows_avx512", "amx", "few_rows_vnni"),
  *("bf16_rows", "float_avx512", "neon_integers"),
)


def fields_of(config: CpuConfig) -> decisions.Fields:
  """Returns a config's fields for tuning tables: sorted, defaults left out."""
  return tuple(
    (name, value)
    for name in sorted(_FIELDS)
    if (value := getattr(config, name)) not in (0, BY_RULE)
  )


def config_of(fields: decisions.Fields) -> CpuConfig:
  """Returns the config whose `fields_of` are `fields`.

  Raises:
    ValueError: If no config has these fields. The message names the field.
  """
  given: dict[str, Any] = dict(fields)
  unknown = sorted(set(given) - set(_FIELDS))
  if unknown:
    raise ValueError(
      f"CpuConfig: fields must be among {', '.join(_FIELDS)}, got"
      f" {', '.join(unknown)}"
    )
  config = CpuConfig(**given)
  if fields_of(config) != fields:
    raise ValueError(
      "CpuConfig: fields must be sorted and must not repeat the defaults, got"
      f" {fields}"
    )
  return config


def fields_error(
  fields: decisions.Fields, problem: problems.DotProblem, target: targets.Target
) -> str | None:
  """Returns why fields are not a config for a problem, or None if they are."""
  try:
    config = config_of(fields)
  except ValueError as error:
    return str(error)
  return config_error(problem, target, config)


def config_error(
  problem: problems.DotProblem, target: targets.Target, config: CpuConfig
) -> str | None:
  """Returns why a config cannot compute a problem, or None if it can.

  The C++ library decides, also for instruction sets that this machine lacks.
  The backend's `supports` must accept the problem.
  """
  if config.rows == FLOATS and rows_form(problem, target, MANY_ROWS) == GIVEN:
    return "the kernels do not convert rows of this dot"
  question = _question(
    config.problem(problem), target, by_rule=config.engine == BY_RULE
  )
  if isinstance(question, str):
    return question
  numbers = (
    ENGINES.index(config.engine),
    *(getattr(config, name) for name in _SIZES),
  )
  return cpu_library.dot_config_error(question, numbers) or None


def engine_by_rule(
  problem: problems.DotProblem, target: targets.Target
) -> str | None:
  """Returns the engine that the rule chooses; None if it is unknown."""
  question = _question(problem, target)
  if isinstance(question, str):
    return None
  engine = cpu_library.dot_engine(question)
  return ENGINES[engine] if engine >= 0 else None


def candidates(
  problem: problems.DotProblem, target: targets.Target
) -> tuple[CpuConfig, ...]:
  """Returns the configs to measure for a problem, the default one first.

  Each can compute the problem, and each computes it in a different way.
  """
  by_rule = CpuConfig()
  if config_error(problem, target, by_rule) is not None:
    return ()
  if problem.is_empty:
    return (by_rule,)
  rule = engine_by_rule(problem, target)
  found = [by_rule]
  if rows_form(problem, target) != GIVEN:
    found.append(CpuConfig(rows=FLOATS))
  found += [CpuConfig(engine=name) for name in ENGINES[1:] if name != rule]
  found += _other_sizes(problem, target, is_few=rule in _FEW_ROWS)
  return tuple(
    config for config in found if config_error(problem, target, config) is None
  )


def _other_sizes(
  problem: problems.DotProblem, target: targets.Target, *, is_few: bool
) -> list[CpuConfig]:
  """Returns configs that differ from the default in one size."""
  (m, n), _ = _handed_over(problem)
  panel, strip = (m, n) if m <= n or n > _PANEL_COLUMNS else (n, m)
  if is_few:
    pass_by_rule = -(-panel // -(-panel // _PASS_ROWS))
    panels = [rows for rows in _PASSES if rows < pass_by_rule]
  else:
    panels = [rows for rows in _PANELS if rows < panel]
  sizes = [CpuConfig(panel_rows=rows) for rows in panels]
  sizes += [CpuConfig(task_rows=rows) for rows in _TASKS if rows < strip]
  cores = target.core_count or 2
  if cores > 1:
    assert problem.batch is not None and problem.k is not None
    work = problem.batch * strip * problem.k * (panel + 4)
    is_serial = work <= _SERIAL_WORK
    sizes.append(CpuConfig(threads=cores if is_serial else 1))
  return sizes


def is_turned(m: int | None, n: int | None) -> bool:
  """Returns whether lhs and rhs are swapped, because rhs is a vector.

  The kernel then streams the matrix. The transposed result is the same array. A
  symbolic m (None) counts as large.
  """
  return n == 1 and (m is None or m > _MAX_SMALL_ROWS)


def _question(
  problem: problems.DotProblem, target: targets.Target, *, by_rule: bool = True
) -> tuple[int, ...] | str:
  """Returns the argument of the library's functions, or why there is none.

  Args:
    by_rule: whether the kernels choose the engine, and so a few rows may be
      bf16.
  """
  unsupported = cpu_library.refusal(target)
  if unsupported is not None:
    return unsupported.reason
  if not problem.sizes_are_static:
    return "needs static sizes, some are symbolic"
  (m, n), sides = _handed_over(problem)
  assert target.cpu_kernels is not None and problem.k is not None
  form = rows_form(problem, target, None if by_rule else MANY_ROWS)
  if form != GIVEN:
    sides = tuple(
      _ROWS[form] if isinstance(side, np.dtype) else side for side in sides
    )
  return cpu_library.dot_numbers(target.cpu_kernels, sides, (m, n, problem.k))


def may_quantize_rows(problem: Any) -> bool:
  """Returns whether kernels may convert the side of floats to bf16 or int8.

  A quantized lhs that XLA dequantizes first is not quantized again.
  """
  return (
    problem.fastest_precision
    and problem.blocks_pair_up
    and None in (problem.lhs.format, problem.rhs.format)
  )


def rows_form(
  problem: Any, target: targets.Target, sizes: tuple[int, int] | None = None
) -> int:
  """Returns the form of the side of floats: GIVEN, BF16 or INT8.

  It depends on the number of rows (kernels/cpu/dot/rule.h).

  Args:
    sizes: (m, n). None is those of the problem, which must be static.
  """
  if not may_quantize_rows(problem) or target.cpu_kernels is None:
    return GIVEN
  sides = tuple(
    side.format or side.dtype for side in (problem.lhs, problem.rhs)
  )
  numbers = (*(sizes or (problem.m, problem.n)), problem.k or 1)
  return cpu_library.rows_form(
    cpu_library.dot_numbers(target.cpu_kernels, sides, numbers)
  )


def _handed_over(
  problem: problems.DotProblem,
) -> tuple[tuple[int, int], tuple[formats.BlockFormat | np.dtype, ...]]:
  """Returns (m, n), and formats or dtypes of the custom call's operands."""
  m, n = problem.m, problem.n
  assert m is not None and n is not None
  lhs, rhs = (side.format or side.dtype for side in (problem.lhs, problem.rhs))
  if not problem.blocks_pair_up:  # `DotCall.dense_sides` dequantizes lhs
    lhs = formats.F32
  if is_turned(m, n):
    return (n, m), (rhs, lhs)
  return (m, n), (lhs, rhs)


_LHS_IS_DEQUANTIZED: Final = (
  "lhs is dequantized to f32 first, because the operands are blocked along"
  " different dimensions; only values in the normal range of f32 are exact"
)
# With precision="fastest".
_ROWS_ARE_QUANTIZED: Final = (
  'rows are quantized to int8 in blocks of 32, because of precision="fastest"'
)
_EXCEPT_FEW: Final = {
  GIVEN: "a few rows, which stay in bf16",
  BF16: "a few rows, which are rounded to bf16",
}
_ROWS_ARE_ROUNDED: Final = (
  'rows are rounded to bf16, because of precision="fastest"; int8 would save'
  " little for so few rows"
)
_ROWS_STAY_BF16: Final = (
  'rows stay in bf16 despite precision="fastest", because int8 would save'
  " little for so few rows"
)
_ROWS_STAY_FLOATS: Final = (
  'precision="fastest" changes nothing, because {isa} kernels do not quantize'
  " rows that are multiplied with {format}"
)

_FLOATS_ARE_FASTER: Final = (
  'rows stay floats despite precision="fastest", because a tuning table says'
  " that another form of them is slower"
)

_DOT: Final = "jaxplugin_block_scaled_dot"
# Attribute values of the custom call, listed in kernels/cpu/README.md.
_ACTIVATIONS: Final = {None: 0, "relu": 1, "gelu": 2, "silu": 3}
_UNUSED_BLOCK_SIZE: Final = 32  # attribute of an operand without scale


def result_refusal(out: quantization_problems.QuantizationProblem) -> str:
  """Returns why kernels do not quantize a result, or ""."""
  if out.format not in cpu_library.FORMATS:
    return f"kernels do not write {out.format}"
  return ""


def supports(
  problem: problems.DotProblem, target: targets.Target
) -> decisions.Unsupported | None:
  """Supports formats that kernels read, and static k, on CPUs with kernels."""
  refusal = cpu_library.refusal(target) or unreadable(
    problem.lhs, problem.rhs, k=problem.dense_k
  )
  if refusal is not None:
    return refusal
  if problem.k is None:
    return decisions.Unsupported("needs a static k, got a symbolic one")
  return None


def unreadable(
  *operands: problems.SideProblem, k: int | None
) -> decisions.Unsupported | None:
  """Returns why the kernels cannot read rows of size k, or None if they can."""
  for operand in operands:
    reason = cpu_library.format_refusal(operand.format, k, reads_codebooks=True)
    if reason is not None:
      return decisions.Unsupported(reason)
  # Behind the end of a row, codes of 0 have values other than 0.
  if all(x.format and x.format.codebook for x in operands):
    return decisions.Unsupported(
      "decodes a codebook of one operand, got"
      f" {' x '.join(str(x.format) for x in operands)}"
    )
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
  given = config_of(config)
  if given.rows == FLOATS:
    notes += (_FLOATS_ARE_FASTER,)
  else:
    by_rule = given.engine == BY_RULE
    notes += fastest_notes(problem, target, by_rule=by_rule)
  return decisions.Plan(global_scale=problem.fused_application, notes=notes)


def fastest_notes(
  problem: Any, target: targets.Target, *, by_rule: bool = True
) -> tuple[str, ...]:
  """Returns what precision="fastest" changes for rows of floats.

  Args:
    by_rule: whether the kernels choose the engine, and so a few rows may be
      bf16.
  """
  if not may_quantize_rows(problem):
    return ()
  form_of = functools.partial(rows_form, problem, target)
  if form_of(MANY_ROWS) == GIVEN:
    note = _ROWS_STAY_FLOATS.format(
      isa=target.cpu_kernels, format=problem.lhs.format or problem.rhs.format
    )
    return (note,)
  if isinstance(problem, problems.DotProblem) and problem.sizes_are_static:
    form = form_of() if by_rule else INT8
    notes = {INT8: _ROWS_ARE_QUANTIZED, BF16: _ROWS_ARE_ROUNDED}
    return (notes.get(form, _ROWS_STAY_BF16),)
  # Sizes of groups, too, are known at run time.
  form = form_of(ONE_ROW)
  if form == INT8:
    return (_ROWS_ARE_QUANTIZED,)
  return (f"{_ROWS_ARE_QUANTIZED}, except {_EXCEPT_FEW[form]}",)


def emit(
  call: calls.DotCall,
  problem: problems.DotProblem,
  target: targets.Target,
  config: decisions.Fields = (),
  offset: tuple[jax.Array, int] | None = None,
  out: quantization_problems.QuantizedOutput | None = None,
) -> Any:
  """Emits one custom call, and XLA ops for epilogues it does not fuse.

  Args:
    offset: offsets of rhs, which is not batched, and the format's
      `code_offset`. The call then has no epilogue.
  """
  if problem.is_empty:
    return epilogue.apply(jnp.zeros(call.shape, jnp.float32), call)
  dot = functools.partial(
    _dot,
    target=target,
    config=config_of(config),
    offset=offset,
    out=out,
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


def _dot(
  call: calls.DotCall,
  problem: problems.DotProblem,
  *,
  target: targets.Target,
  config: CpuConfig,
  offset: tuple[jax.Array, int] | None,
  out: quantization_problems.QuantizedOutput | None,
) -> Any:
  """Emits the custom call on operands reshaped to [batch, rows, k]."""
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
  operands = [
    (dense, *scale_of(side, dense))
    for side, dense in ((call.lhs, lhs), (call.rhs, rhs))
  ]
  if is_turned(problem.m, problem.n):
    operands.reverse()
    m, n = n, m
    bias = None if bias is None else jnp.broadcast_to(bias, (n,))
  global_scale = epilogue.pair(call)
  if residual is not None:
    residual = residual.reshape(batch, m, n)
  result = custom_call(
    _DOT,
    jax.ShapeDtypeStruct((batch, m, n), dtype),
    operands,
    (global_scale, bias, residual),
    problem=config.problem(problem),
    target=target,
    offset=offset,
    out=out,
    activation=np.int64(_ACTIVATIONS[call.activation]),
    **config.attributes(),
  )
  return result.reshape(shape) if out is None else result


def custom_call(
  name: str,
  result_type: jax.ShapeDtypeStruct,
  operands: Sequence[tuple[sides.Side, jax.Array, int]],
  others: Sequence[jax.Array | None],
  *,
  problem: Any,
  target: targets.Target,
  offset: tuple[jax.Array, int] | None,
  out: quantization_problems.QuantizedOutput | None,
  **attributes: Any,
) -> Any:
  """Emits the custom call of a dot or of a ragged dot.

  Args:
    result_type: type of its result, [..., rows, columns], without `out`.
    operands: both sides, each with the results of `scale_of`.
    offset, out: as for `emit`.
  """
  cpu_library.register()
  arrays = [x for side, scale, _ in operands for x in (side.values, scale)]
  arrays += map(cpu_library.or_absent, others)
  for prefix, (side, _, scale_rows) in zip(
    ("lhs", "rhs"), operands, strict=True
  ):
    attributes |= _attributes(prefix, side, scale_rows)
  if may_quantize_rows(problem):
    attributes["quantize_rows"] = np.int64(1)
  if offset is not None:
    _, rhs_scale, _ = operands[1]
    arrays.append(offset[0].reshape(rhs_scale.shape))
    attributes["rhs_code_offset"] = np.int64(offset[1])
  attributes |= cpu_library.call_attributes(target)
  if out is None:
    return jax.ffi.ffi_call(name, result_type)(*arrays, **attributes)
  quantized, rows = out.problem, math.prod(result_type.shape[:-1])
  arrays.append(cpu_library.or_absent(out.global_scale))
  attributes |= {
    "result_format": np.int64(cpu_library.FORMATS[quantized.format]),
    "result_rounding": np.int64(
      cpu_library.ROUNDINGS[quantized.scale_rounding]
    ),
  }
  shapes, dtypes = zip(*quantized.result_types(), strict=True)
  types = [
    jax.ShapeDtypeStruct(
      (rows, math.prod(shape) // rows) if shape else (), dtype
    )
    for shape, dtype in zip(shapes, dtypes, strict=True)
  ]
  found = jax.ffi.ffi_call(name, types)(*arrays, **attributes)
  return [x.reshape(shape) for x, shape in zip(found, shapes, strict=True)]


def scale_of(side: sides.Side, dense: sides.Side) -> tuple[jax.Array, int]:
  """Returns a scale for the kernels, and the number of rows that share it.

  Kernels read the scale of square blocks, which has fewer bytes than the scale
  of rows. With several matrices, each must have whole blocks.

  Args:
    dense: the operand as [batch, rows, k].
  """
  if (
    side.square_scale is None or len(side.free) > 1 or len(side.contracting) > 1
  ):
    return cpu_library.or_absent(dense.scale), 1
  scale = side.merge(side.square_scale)
  assert side.format is not None
  size = side.format.block_size
  batch, rows, _ = dense.values.shape
  is_readable = (
    size & (size - 1) == 0
    and scale.shape
    == (batch, blocking.divide_up(rows, size), dense.scale.shape[2])
    and (batch == 1 or rows % size == 0)
  )
  return (scale, size) if is_readable else (dense.scale, 1)


def _attributes(
  prefix: str, side: sides.Side, scale_rows: int
) -> dict[str, Any]:
  """Returns the attributes of the custom call for one operand."""
  format = side.format
  if format is None:
    return {f"{prefix}_block_size": np.int64(_UNUSED_BLOCK_SIZE)}
  attributes = cpu_library.format_attributes(
    format, side.values.dtype, f"{prefix}_"
  )
  if side.scale.dtype == formats.PACKED:
    element = cpu_library.SCALE_ELEMENTS[format.scale_dtype]
    attributes[f"{prefix}_scale_element"] = np.int64(element)
  if scale_rows > 1:
    attributes[f"{prefix}_scale_rows"] = np.int64(scale_rows)
  return attributes


BACKEND: Final[decisions.BackendRecord[problems.DotProblem]] = (
  choice.cpu_backend(
    summary="C++ kernels that read the quantized bytes once",
    supports=supports,
    plan=plan,
    emit=emit,
    quantized_refusal=quantized_refusal,
    tunable=decisions.Tunable(
      source=cpu_library.source,
      config_error=fields_error,
      # An engine needs an instruction set that another CPU may lack.
      configs_travel=False,
    ),
  )
)
