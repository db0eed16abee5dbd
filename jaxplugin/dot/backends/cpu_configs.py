# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Configs of the C++ kernels, which tuning tables may choose.

By default the kernels choose an engine and split its work by rules
(kernels/cpu/README.md). A `CpuConfig` overrides these rules for one call. It
changes only which engine computes the sums, and in which order.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np

from jaxplugin.core import decisions, error_context, formats, targets
from jaxplugin.dot import problems
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
    rows: "floats" does not quantize rows with precision="fastest". The rule
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


# Sizes (m, n) of which kernels quantize rows, if they quantize any.
MANY_ROWS: Final = (1 << 20, 1 << 20)
ONE_ROW: Final = (1, 1 << 20)
# `kQuantizedRows` in kernels/cpu/dot/rule.h.
_QUANTIZED_ROWS: Final = dataclasses.replace(
  formats.INT8_32, scale_dtype=formats.F32
)
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
  if config.rows == FLOATS and not quantizes_rows(problem, target, MANY_ROWS):
    return "the kernels do not quantize rows of this dot"
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
  if quantizes_rows(problem, target):
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
    problem, target: as for every backend.
    by_rule: whether the kernels choose the engine, and so may keep few rows of
      floats.
  """
  if target.cpu_kernels is None:
    return "the target has no CPU kernels"
  if not problem.sizes_are_static:
    return "needs static sizes, some are symbolic"
  (m, n), sides = _handed_over(problem)
  assert problem.k is not None
  if quantizes_rows(problem, target, None if by_rule else MANY_ROWS):
    sides = tuple(
      _QUANTIZED_ROWS if isinstance(side, np.dtype) else side for side in sides
    )
  return cpu_library.dot_numbers(target.cpu_kernels, sides, (m, n, problem.k))


def may_quantize_rows(problem: Any) -> bool:
  """Returns whether kernels may quantize the side of floats to int8.

  A quantized lhs that XLA dequantizes first is not quantized again.

  Args:
    problem: a problem of a dot or a ragged dot.
  """
  return (
    problem.fastest_precision
    and problem.blocks_pair_up
    and None in (problem.lhs.format, problem.rhs.format)
  )


def quantizes_rows(
  problem: Any, target: targets.Target, sizes: tuple[int, int] | None = None
) -> bool:
  """Returns whether the kernels quantize the side of floats to int8.

  They keep a few rows of floats (kernels/cpu/dot/rule.h).

  Args:
    problem: a problem of a dot or a ragged dot.
    target: the target.
    sizes: (m, n). None is those of the problem, which must be static.
  """
  if not may_quantize_rows(problem) or target.cpu_kernels is None:
    return False
  sides = tuple(
    side.format or side.dtype for side in (problem.lhs, problem.rhs)
  )
  numbers = (*(sizes or (problem.m, problem.n)), problem.k or 1)
  return cpu_library.quantizes_rows(
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
