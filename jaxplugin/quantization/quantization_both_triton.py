# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantization along two axes by Triton kernels that read the input once.

x is a matrix, or a batch of them: its last dimensions are blocked together, and
so are those before them. NVFP4's two global scales, where they are computed,
take one read before. The bits are those of `quantization_triton`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from jaxplugin.core import blocking as blocking_lib
from jaxplugin.core import decisions
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.kernels.gpu import quantize_config
from jaxplugin.quantization import quantization_triton
from jaxplugin.runtime import triton_library

# A quantized array: values, scale, and global scale or None.
Quantized = tuple[jax.Array, jax.Array, jax.Array | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeBothProblem:
  """Quantizations of one array, reduced to what launching them needs.

  Attributes:
    shape, dtype: of x; sizes may be symbolic.
    format: to quantize to.
    blockings: one for each result.
    scale_rounding: "up" or "floor".
    has_global_scale: whether a global scale is given, for all of them.
  """

  shape: tuple[Any, ...]
  dtype: np.dtype
  format: formats.BlockFormat
  blockings: tuple[blocking_lib.Blocking, ...]
  scale_rounding: str = "up"
  has_global_scale: bool = False

  def __str__(self) -> str:
    sizes = ", ".join(map(str, self.shape))
    dims = " and ".join(str(list(b.dims)) for b in self.blockings)
    return f"{self.dtype.name}[{sizes}] to {self.format}, dimensions {dims}"

  @property
  def computes_global_scale(self) -> bool:
    return self.format.has_global_scale and not self.has_global_scale


@dataclasses.dataclass(frozen=True)
class _Matrices:
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
  def of(cls, problem: QuantizeBothProblem) -> _Matrices | None:
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


def supports(
  problem: QuantizeBothProblem, target: targets.Target
) -> decisions.Unsupported | None:
  """Serves what `quantization_triton` does, of matrices. Pure."""
  refusal = quantization_triton.input_refusal(
    problem.shape, problem.dtype, problem.format, target
  )
  if refusal is not None:
    return refusal
  matrices = _Matrices.of(problem)
  if matrices is None:
    return decisions.Unsupported(
      "needs the last dimensions of x and those before them to be blocked, got"
      f" {[b.dims for b in problem.blockings]} of {len(problem.shape)}"
    )
  return quantization_triton.grid_refusal(_launches(problem, matrices, target))


def _launches(
  problem: QuantizeBothProblem,
  matrices: _Matrices,
  target: targets.Target,
) -> list[quantization_triton.Launch]:
  architecture = triton_library.architecture_of(target)
  assert architecture is not None
  config = quantize_config.default_config(
    problem.format.name, architecture, matrices.k_t, matrices.k, both=True
  )
  result = [_quantize_launch(problem, matrices, config)]
  if problem.computes_global_scale:
    result[:0] = _global_scale_launches(problem, matrices, config)
  return result


def _quantize_launch(
  problem: QuantizeBothProblem,
  matrices: _Matrices,
  config: quantize_config.QuantizeConfig,
) -> quantization_triton.Launch:
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
    "x_batch_stride": rows * columns,
    "x_row_stride": columns,
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
  tile = quantization_triton.tile_name(config)
  return quantization_triton.Launch(
    kernel="quantize_both",
    name=f"quantize_both_{format.name}_{tile}",
    inputs=("x", *global_scales),
    outputs=(
      ("values", (batch, rows, k // packing), "uint8"),
      ("scale", (batch, rows, k // format.block_size), "uint8"),
      ("values_t", values_t, "uint8"),
      ("scale_t", scale_t, "uint8"),
    ),
    constexprs=tuple(constexprs.items()),
    grid=quantize_config.launch_grid(config, batch, k_t, k)[0],
    num_warps=config.num_warps,
  )


def _global_scale_launches(
  problem: QuantizeBothProblem,
  matrices: _Matrices,
  config: quantize_config.QuantizeConfig,
) -> list[quantization_triton.Launch]:
  """The largest magnitudes of each tile, then one program over those."""
  rows, columns = matrices.rows, matrices.columns
  (programs,) = quantize_config.launch_grid(
    config, matrices.batch, rows, columns
  )
  amax = {
    "rows": rows,
    "columns": columns,
    "x_batch_stride": rows * columns,
    "x_row_stride": columns,
    "BLOCK_M": config.block_m,
    "BLOCK_K": config.block_k,
    "VEC_SIZE": problem.format.block_size,
  }
  reduce = {"size": programs, "CHUNK": quantize_config.REDUCE_CHUNK}
  return [
    quantization_triton.Launch(
      kernel="finite_amax_both",
      name=f"finite_amax_both_{quantization_triton.tile_name(config)}",
      inputs=("x",),
      outputs=(
        ("partial_amax", (programs,), "int32"),
        ("partial_amax_t", (programs,), "int32"),
      ),
      constexprs=tuple(amax.items()),
      grid=programs,
      num_warps=config.num_warps,
    ),
    quantization_triton.Launch(
      kernel="reduce_global_scales",
      name="reduce_global_scales",
      inputs=("partial_amax", "partial_amax_t"),
      outputs=(
        ("global_scale", (1,), "float32"),
        ("global_scale_t", (1,), "float32"),
      ),
      constexprs=tuple(reduce.items()),
      grid=1,
      num_warps=quantization_triton.REDUCE_WARPS,
    ),
  ]


def emit(
  x: jax.Array,
  global_scale: jax.Array | None,
  problem: QuantizeBothProblem,
  target: targets.Target,
  *,
  packed: bool = False,
) -> list[Quantized]:
  """Values, scale and global scale (None where the format has none) of each.

  Args:
    x: of the problem's shape and dtype.
    global_scale: f32[] where the problem has one.
    problem: one that `supports` takes.
    target: where.
    packed: whether FP4 values are uint8, two a byte.
  """
  matrices = _Matrices.of(problem)
  assert matrices is not None
  arrays = {"x": x}
  if global_scale is not None:
    arrays["global_scale"] = global_scale.reshape(1)
  quantization_triton.run(_launches(problem, matrices, target), arrays, target)
  results: dict[int, Quantized] = {}
  for i, suffix in zip(matrices.order, ("", "_t"), strict=True):
    blocking, format = problem.blockings[i], problem.format
    shape, axis = blocking.shape(problem.shape), blocking.axis()
    if problem.computes_global_scale:
      global_scale = arrays[f"global_scale{suffix}"].reshape(())
    results[i] = (
      quantization_triton.values_of_bytes(
        arrays[f"values{suffix}"], format, shape, axis, packed=packed
      ),
      quantization_triton.scale_of_bytes(
        arrays[f"scale{suffix}"], format, shape, axis
      ),
      global_scale,
    )
  return [results[i] for i in range(len(results))]
