# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans matmuls whose f32 result is quantized before it leaves registers.

This module does not import Triton.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from jaxplugin.kernels.gpu.quantization import quantize_config, quantize_plans

from jaxplugin.kernels import architectures, constants, formats, launching

# A row of FP8 then has a whole sector of memory.
_COLUMNS_OF_PART: Final = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultKind(constants.KernelConstant):
  """The quantized result of a matmul kernel, as a compile-time constant.

  Attributes:
    quantized: its format and options.
    columns_of_part: number of columns that are quantized at a time.
    has_amax: whether each program stores its largest finite magnitude.
  """

  quantized: quantize_config.QuantizeConstant
  columns_of_part: int
  has_amax: bool

  @property
  def suffix(self) -> str:
    """Suffix of kernel names."""
    options = self.quantized.options.suffix
    return f"_to_{self.quantized.format.name}{options}{'_amax' * self.has_amax}"


def blocks_error(
  launches: Sequence[launching.Launch], format: str
) -> str | None:
  """Returns why programs would share blocks of the result, or None."""
  constants = dict(launches[-1].constexprs)
  tiling = constants["TILING"]
  width = getattr(tiling.shape, "out_columns", tiling.shape.n)
  columns = tiling.config.block_n * width // tiling.shape.n
  columns = constants.get("BLOCK", columns)
  block_size = formats.by_name(format).block_size
  if columns % block_size == 0:
    return None
  return f"a program has {columns} columns, not whole blocks of {block_size}"


def plan(
  launches: Sequence[launching.Launch],
  rows: quantize_config.Rows,
  architecture: architectures.Architecture,
) -> tuple[launching.Launch, ...]:
  """Returns the launches with a quantized result.

  Args:
    launches: launches that compute an f32 result of a static size.
    rows: the result: a dense array with a linear scale. A global scale is
      given. If it returns amax, "amax" is one more output, f32[programs].
    architecture: the GPU.
  """
  *first, last = launches
  tiling = dict(last.constexprs)["TILING"]
  if last.kernel == "reduce" and not tiling.is_ragged:  # one long row
    size = rows.batch * rows.rows * rows.k
    rows = dataclasses.replace(rows, batch=1, rows=1, k=size)
  has_amax = rows.returns_amax
  rows = dataclasses.replace(rows, returns_amax=False)
  config = quantize_config.default_config(rows, architecture)
  launch = quantize_plans.quantize_launch(rows, config, 0)
  quantized = dict(launch.constexprs)["QUANTIZED"]
  result = ResultKind(
    quantized=quantized,
    # An accumulator that is transposed is in registers as a whole.
    columns_of_part=quantized.format.block_size
    if tiling.config.swap
    else _COLUMNS_OF_PART,
    has_amax=has_amax,
  )
  *inputs, out_global_scale, key = last.inputs
  if rows.global_scale == "given":
    out_global_scale = "out_global_scale"
  if rows.options.is_stochastic:
    key = "key"
  outputs, constants = launch.outputs, dict(last.constexprs)
  del constants["scale"]
  if has_amax:
    outputs += (launching.Output("amax", (last.grid,), "float32"),)
    del constants["amax"]
  last = dataclasses.replace(
    last,
    name=f"{last.name}{result.suffix}",
    inputs=(*inputs, out_global_scale, key),
    outputs=outputs,
    constexprs=tuple((constants | {"RESULT": result}).items()),
  )
  return (*first, last)
