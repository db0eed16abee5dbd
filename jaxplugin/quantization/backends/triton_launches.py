# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is launched to quantize: kernels of kernels/gpu/quantize.py, in order.

Along one axis x is read where it lies. Along two it is read once, where it is a
matrix, or a batch of them: its last dimensions are blocked together, and so are
those before them. A global scale that is computed takes one read before. All
functions here are pure.

Arrays are "x", "global_scale", "partial_amax", "values" and "scale"; names that
end in "_t" are of columns. No launch lets the compiler contract a product and a
sum, which would change bits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any
from typing import Final

from jaxplugin.arrays import layouts
from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.kernels import launching
from jaxplugin.kernels.gpu import quantize_config
from jaxplugin.quantization import problems
from jaxplugin.runtime import triton_library

_MAX_PROGRAMS: Final = 2**31 - 1  # of one launch, CUDA's first grid dimension
_REDUCE_WARPS: Final = 4


def launches(
  problem: problems.QuantizeProblem, target: targets.Target
) -> list[launching.Launch] | decisions.Unsupported:
  """What is launched for a problem, in order, or why nothing is."""
  architecture = triton_library.architecture_of(target)
  assert architecture is not None
  found: list[launching.Launch] | decisions.Unsupported
  if len(problem.blockings) == 1:
    found = _of_one(problem.each()[0], architecture)
  else:
    found = _of_both(problem, architecture)
  if isinstance(found, decisions.Unsupported):
    return found
  programs = max(each.grid for each in found)
  if programs > _MAX_PROGRAMS:
    return decisions.Unsupported(
      f"needs {programs} programs, a launch has at most {_MAX_PROGRAMS}"
    )
  return found


@dataclasses.dataclass(frozen=True)
class _View:
  """x as [batch, rows, k], by strides in elements; nothing is copied.

  The dimensions after the blocked axis are its rows, or those before it where
  the axis is the last one.
  """

  batch: int
  rows: int
  k: int
  k_is_minor: bool

  @classmethod
  def of(cls, problem: problems.QuantizeProblem) -> _View:
    shape, axis = problem.shape, problem.blockings[0].axis()
    if problem.scale_layout == layouts.SWIZZLED:
      # Each matrix has tiles of its own.
      return cls(math.prod(shape[:-2]), shape[-2], shape[-1], True)
    outer, k = math.prod(shape[:axis]), shape[axis]
    inner = math.prod(shape[axis + 1 :])
    if inner == 1:
      return cls(1, outer, k, True)
    return cls(outer, inner, k, False)

  def shape(self, k: int) -> tuple[int, int, int]:
    """Shape in memory of an array that has k in the place of ours."""
    if self.k_is_minor:
      return self.batch, self.rows, k
    return self.batch, k, self.rows

  def strides(self, k: int) -> tuple[int, int, int]:
    """Of such an array: batch, row, k."""
    row, column = (k, 1) if self.k_is_minor else (1, self.rows)
    return self.rows * k, row, column


def _of_one(
  problem: problems.QuantizeProblem, architecture: Any
) -> list[launching.Launch]:
  view = _View.of(problem)
  config = quantize_config.default_config(
    problem.format.name,
    architecture,
    *_covered(problem, view),
    k_is_contiguous=view.k_is_minor,
  )
  result = [_quantize_launch(problem, view, config)]
  if problem.computes_global_scale:
    result[:0] = _global_scale_launches(problem, view, config)
  return result


def _covered(problem: problems.QuantizeProblem, view: _View) -> tuple[int, int]:
  return quantize_config.covered(
    view.rows,
    view.k,
    problem.format.name,
    swizzled=problem.scale_layout == layouts.SWIZZLED,
  )


def _quantize_launch(
  problem: problems.QuantizeProblem,
  view: _View,
  config: quantize_config.QuantizeConfig,
) -> launching.Launch:
  format = problem.format
  blocks = view.k // format.block_size
  if format.is_fp4:
    # Two values a byte along k, which therefore is minor in what is written.
    values = (view.batch, view.rows, view.k // 2)
    values_strides = (values[1] * values[2], values[2], 1)
  else:
    values = view.shape(view.k)
    values_strides = view.strides(view.k)
  swizzled = problem.scale_layout == layouts.SWIZZLED
  scale: tuple[int, ...] = view.shape(blocks)
  scale_strides = view.strides(blocks)
  if swizzled:
    scale = (view.batch, *layouts.swizzled_shape((view.rows, blocks)))
    scale_strides = (scale[1] * scale[2], 0, 0)
  grid_rows, grid_k = _covered(problem, view)
  constexprs = {
    "rows": view.rows,
    "k": view.k,
    "grid_rows": grid_rows,
    "grid_k": grid_k,
    "x_strides": view.strides(view.k),
    "values_strides": values_strides,
    "scale_strides": scale_strides,
    **quantize_config.constexprs(
      config,
      format.name,
      scale_rounding=problem.scale_rounding,
      swizzled=swizzled,
    ),
  }
  return launching.Launch(
    kernel="quantize",
    name=f"quantize_{format.name}_{_tile_name(config)}",
    inputs=("x", "global_scale" if format.has_global_scale else "x"),
    outputs=(
      launching.Output("values", values, "uint8"),
      launching.Output("scale", scale, "uint8"),
    ),
    constexprs=tuple(constexprs.items()),
    grid=quantize_config.launch_grid(config, view.batch, grid_rows, grid_k)[0],
    num_warps=config.num_warps,
  )


def _global_scale_launches(
  problem: problems.QuantizeProblem,
  view: _View,
  config: quantize_config.QuantizeConfig,
) -> list[launching.Launch]:
  """The largest magnitude of each tile, then one program over those."""
  (programs,) = quantize_config.launch_grid(
    config, view.batch, view.rows, view.k
  )
  amax = {
    "rows": view.rows,
    "k": view.k,
    "x_strides": view.strides(view.k),
    "BLOCK_M": config.block_m,
    "BLOCK_K": config.block_k,
    "VEC_SIZE": problem.format.block_size,
  }
  reduce = {"size": programs, "CHUNK": quantize_config.REDUCE_CHUNK}
  return [
    launching.Launch(
      kernel="finite_amax",
      name=f"finite_amax_{_tile_name(config)}",
      inputs=("x",),
      outputs=(launching.Output("partial_amax", (programs,), "int32"),),
      constexprs=tuple(amax.items()),
      grid=programs,
      num_warps=config.num_warps,
    ),
    launching.Launch(
      kernel="reduce_global_scale",
      name="reduce_global_scale",
      inputs=("partial_amax",),
      outputs=(launching.Output("global_scale", (1,), "float32"),),
      constexprs=tuple(reduce.items()),
      grid=1,
      num_warps=_REDUCE_WARPS,
    ),
  ]


def _tile_name(config: quantize_config.QuantizeConfig) -> str:
  return f"{config.block_m}x{config.block_k}"


@dataclasses.dataclass(frozen=True)
class Matrices:
  """x as [batch, rows, columns], dense.

  Attributes:
    batch, rows, columns: sizes.
    k, k_t: columns and rows, padded.
    is_transposed: whether what is blocked along rows has them last.
    order: position, among the blockings, of that of columns and that of rows.
  """

  batch: int
  rows: int
  columns: int
  k: int
  k_t: int
  is_transposed: bool
  order: tuple[int, int]

  @classmethod
  def of(cls, problem: problems.QuantizeProblem) -> Matrices | None:
    """None where x is no such array, or there are not two blockings."""
    if len(problem.blockings) != 2:
      return None
    for order in ((0, 1), (1, 0)):
      of_columns, of_rows = (problem.blockings[i] for i in order)
      ndim = len(problem.shape)
      middle = ndim - len(of_columns.dims)
      start = middle - len(of_rows.dims)
      batch = tuple(range(start))
      rows, columns = tuple(range(start, middle)), tuple(range(middle, ndim))
      if not (
        rows
        and columns
        and of_rows.dims == rows
        and of_columns.dims == columns
        and (len(columns) == 1 or of_columns.lead == batch + rows)
        and (len(rows) == 1 or of_rows.lead == batch + columns)
      ):
        continue
      shapes = [b.shape(problem.shape) for b in (of_columns, of_rows)]
      return cls(
        batch=math.prod(problem.shape[d] for d in batch),
        rows=math.prod(problem.shape[d] for d in rows),
        columns=math.prod(problem.shape[d] for d in columns),
        k=shapes[0][of_columns.axis()],
        k_t=shapes[1][of_rows.axis()],
        is_transposed=len(rows) > 1,
        order=order,
      )
    return None


def _of_both(
  problem: problems.QuantizeProblem, architecture: Any
) -> list[launching.Launch] | decisions.Unsupported:
  matrices = Matrices.of(problem)
  if matrices is None:
    return decisions.Unsupported(
      "needs the last dimensions of x and those before them to be blocked, got"
      f" {[b.dims for b in problem.blockings]} of {len(problem.shape)}"
    )
  config = quantize_config.default_config(
    problem.format.name, architecture, matrices.k_t, matrices.k, both=True
  )
  result = [_quantize_both_launch(problem, matrices, config)]
  if problem.computes_global_scale:
    result[:0] = _global_scales_launches(problem, matrices, config)
  return result


def _quantize_both_launch(
  problem: problems.QuantizeProblem,
  matrices: Matrices,
  config: quantize_config.QuantizeConfig,
) -> launching.Launch:
  format = problem.format
  packing = 2 if format.is_fp4 else 1
  batch, rows, columns = matrices.batch, matrices.rows, matrices.columns
  k, k_t = matrices.k, matrices.k_t
  # FP4 has two values a byte along the blocked dimension, which therefore is
  # minor in what is written.
  values_t: tuple[int, ...] = (batch, columns, k_t // packing)
  scale_t: tuple[int, ...] = (batch, columns, k_t // format.block_size)
  if not matrices.is_transposed:
    scale_t = (batch, k_t // format.block_size, columns)
    if not format.is_fp4:
      values_t = (batch, k_t, columns)
  sizes = {"rows": rows, "columns": columns, "k": k, "k_t": k_t}
  constexprs = {
    **sizes,
    "grid_rows": k_t,
    "grid_columns": k,
    "x_strides": (rows * columns, columns, 1),
    **quantize_config.constexprs(
      config, format.name, scale_rounding=problem.scale_rounding
    ),
    "TRANSPOSED": matrices.is_transposed,
  }
  global_scales = ("x", "x")
  if problem.computes_global_scale:
    global_scales = ("global_scale", "global_scale_t")
  elif problem.has_global_scale:
    global_scales = ("global_scale", "global_scale")
  tile = _tile_name(config)
  return launching.Launch(
    kernel="quantize_both",
    name=f"quantize_both_{format.name}_{tile}",
    inputs=("x", *global_scales),
    outputs=(
      launching.Output("values", (batch, rows, k // packing), "uint8"),
      launching.Output("scale", (batch, rows, k // format.block_size), "uint8"),
      launching.Output("values_t", values_t, "uint8"),
      launching.Output("scale_t", scale_t, "uint8"),
    ),
    constexprs=tuple(constexprs.items()),
    grid=quantize_config.launch_grid(config, batch, k_t, k)[0],
    num_warps=config.num_warps,
  )


def _global_scales_launches(
  problem: problems.QuantizeProblem,
  matrices: Matrices,
  config: quantize_config.QuantizeConfig,
) -> list[launching.Launch]:
  """The largest magnitudes of each tile, then one program over those."""
  rows, columns = matrices.rows, matrices.columns
  (programs,) = quantize_config.launch_grid(
    config, matrices.batch, rows, columns
  )
  amax = {
    "rows": rows,
    "columns": columns,
    "x_strides": (rows * columns, columns, 1),
    "BLOCK_M": config.block_m,
    "BLOCK_K": config.block_k,
    "VEC_SIZE": problem.format.block_size,
  }
  reduce = {"size": programs, "CHUNK": quantize_config.REDUCE_CHUNK}
  return [
    launching.Launch(
      kernel="finite_amax_both",
      name=f"finite_amax_both_{_tile_name(config)}",
      inputs=("x",),
      outputs=(
        launching.Output("partial_amax", (programs,), "int32"),
        launching.Output("partial_amax_t", (programs,), "int32"),
      ),
      constexprs=tuple(amax.items()),
      grid=programs,
      num_warps=config.num_warps,
    ),
    launching.Launch(
      kernel="reduce_global_scales",
      name="reduce_global_scales",
      inputs=("partial_amax", "partial_amax_t"),
      outputs=(
        launching.Output("global_scale", (1,), "float32"),
        launching.Output("global_scale_t", (1,), "float32"),
      ),
      constexprs=tuple(reduce.items()),
      grid=1,
      num_warps=_REDUCE_WARPS,
    ),
  ]
