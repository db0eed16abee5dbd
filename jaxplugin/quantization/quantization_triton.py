# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantization by the Triton kernels of kernels/gpu/quantize.py.

They read x where it lies, along any axis, and write values and scale from that
one read; the global scale of NVFP4, where it is computed, takes a read before.
The bits are those of `quantization_ops`. (Along two axes from one read:
`quantization_both_triton`.)
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.core import decisions
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.kernels.gpu import quantize_config
from jaxplugin.runtime import triton_library

# Dtypes that the kernels read.
FLOATS: Final = tuple(
  np.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16)
)
_MAX_PROGRAMS: Final = 2**31 - 1  # of one launch, CUDA's first grid dimension
REDUCE_WARPS: Final = 4
_NUM_STAGES: Final = 1  # no kernel has a loop to pipeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeProblem:
  """A quantization, reduced to what deciding and launching it need.

  Attributes:
    shape, dtype: of x; sizes may be symbolic.
    format: to quantize to.
    axis: which is blocked, not negative.
    scale_rounding: "up" or "floor".
    has_global_scale: whether a global scale is given. Where it is not and the
      format has one, it is computed.
  """

  shape: tuple[Any, ...]
  dtype: np.dtype
  format: formats.BlockFormat
  axis: int
  scale_rounding: str = "up"
  has_global_scale: bool = False

  def __str__(self) -> str:
    sizes = ", ".join(map(str, self.shape))
    return f"{self.dtype.name}[{sizes}] to {self.format}, axis {self.axis}"

  @property
  def computes_global_scale(self) -> bool:
    return self.format.has_global_scale and not self.has_global_scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
  """One kernel launch.

  Attributes:
    kernel: of kernels/gpu/quantize.py.
    name: under which profiles list it: kernel, format and tile.
    inputs: names of the arrays that it reads, in the kernel's order: "x",
      "global_scale", "partial_amax". One that it has not is "x" again: that
      pointer is not read.
    outputs: (name, shape, dtype) of those that it writes: "values", "scale",
      "global_scale", "partial_amax". Names ending in "_t" are of columns.
    constexprs: the rest of the kernel's arguments, by name.
    grid: number of programs.
    num_warps: Triton's.
  """

  kernel: str
  name: str
  inputs: tuple[str, ...]
  outputs: tuple[tuple[str, tuple[int, ...], str], ...]
  constexprs: tuple[tuple[str, Any], ...]
  grid: int
  num_warps: int


def supports(
  problem: QuantizeProblem, target: targets.Target
) -> decisions.Unsupported | None:
  """Serves the package's formats, f32, bf16 and f16, and static sizes. Pure."""
  refusal = input_refusal(problem.shape, problem.dtype, problem.format, target)
  if refusal is not None:
    return refusal
  return grid_refusal(launches(problem, target))


def input_refusal(
  shape: Sequence[Any],
  dtype: np.dtype,
  format: formats.BlockFormat,
  target: targets.Target,
) -> decisions.Unsupported | None:
  """Why no kernel quantizes x of a shape and dtype; None where one may."""
  refusal = triton_library.refusal(target)
  if refusal is not None:
    return refusal
  if not format.is_standard:
    return decisions.Unsupported(
      f"serves {', '.join(f.name for f in formats.FORMATS)}, got {format}"
    )
  if dtype not in FLOATS:
    return decisions.Unsupported(
      f"reads {', '.join(d.name for d in FLOATS)}, got {dtype}"
    )
  if not all(isinstance(size, (int, np.integer)) for size in shape):
    return decisions.Unsupported("needs static sizes, some are symbolic")
  if 0 in shape:
    return decisions.Unsupported("needs sizes of at least 1")
  return None


def grid_refusal(
  launches: Sequence[Launch],
) -> decisions.Unsupported | None:
  """Why a launch has too many programs; None where all can be made."""
  programs = max(launch.grid for launch in launches)
  if programs > _MAX_PROGRAMS:
    return decisions.Unsupported(
      f"needs {programs} programs, a launch has at most {_MAX_PROGRAMS}"
    )
  return None


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
  def of(cls, problem: QuantizeProblem) -> _View:
    outer = math.prod(problem.shape[: problem.axis])
    k = problem.shape[problem.axis]
    inner = math.prod(problem.shape[problem.axis + 1 :])
    if inner == 1:
      return cls(1, outer, k, True)
    return cls(outer, inner, k, False)

  def shape(self, k: int) -> tuple[int, int, int]:
    """Shape in memory of an array that has k in the place of ours."""
    if self.k_is_minor:
      return self.batch, self.rows, k
    return self.batch, k, self.rows

  def strides(self, array: str, k: int) -> dict[str, int]:
    """A kernel's constexprs for such an array."""
    row, column = (k, 1) if self.k_is_minor else (1, self.rows)
    return _strides(array, self.rows * k, row, column)


def _strides(array: str, batch: int, row: int, k: int) -> dict[str, int]:
  return {
    f"{array}_batch_stride": batch,
    f"{array}_row_stride": row,
    f"{array}_k_stride": k,
  }


def launches(
  problem: QuantizeProblem, target: targets.Target
) -> tuple[Launch, ...]:
  """What is launched for a problem that is served, in order. Pure."""
  architecture = triton_library.architecture_of(target)
  assert architecture is not None
  view = _View.of(problem)
  config = quantize_config.default_config(
    problem.format.name,
    architecture,
    view.rows,
    view.k,
    k_is_contiguous=view.k_is_minor,
  )
  result = [_quantize_launch(problem, view, config)]
  if problem.computes_global_scale:
    result[:0] = _global_scale_launches(problem, view, config)
  return tuple(result)


def _quantize_launch(
  problem: QuantizeProblem,
  view: _View,
  config: quantize_config.QuantizeConfig,
) -> Launch:
  format = problem.format
  blocks = view.k // format.block_size
  if format.is_fp4:
    # Two values a byte along k, which therefore is minor in what is written.
    values = (view.batch, view.rows, view.k // 2)
    values_strides = _strides("values", values[1] * values[2], values[2], 1)
  else:
    values = view.shape(view.k)
    values_strides = view.strides("values", view.k)
  constexprs = {
    "rows": view.rows,
    "k": view.k,
    "grid_rows": view.rows,
    "grid_k": view.k,
    **values_strides,
    **view.strides("scale", blocks),
    **view.strides("x", view.k),
    **quantize_config.constexprs(
      config, format.name, scale_rounding=problem.scale_rounding
    ),
  }
  return Launch(
    kernel="quantize",
    name=f"quantize_{format.name}_{tile_name(config)}",
    inputs=("x", "global_scale" if format.has_global_scale else "x"),
    outputs=(
      ("values", values, "uint8"),
      ("scale", view.shape(blocks), "uint8"),
    ),
    constexprs=tuple(constexprs.items()),
    grid=_programs(config, view),
    num_warps=config.num_warps,
  )


def _global_scale_launches(
  problem: QuantizeProblem,
  view: _View,
  config: quantize_config.QuantizeConfig,
) -> list[Launch]:
  """The largest magnitude of each tile, then one program over those."""
  programs = _programs(config, view)
  amax = {
    "rows": view.rows,
    "k": view.k,
    **view.strides("x", view.k),
    "BLOCK_M": config.block_m,
    "BLOCK_K": config.block_k,
    "VEC_SIZE": problem.format.block_size,
  }
  reduce = {"size": programs, "CHUNK": quantize_config.REDUCE_CHUNK}
  return [
    Launch(
      kernel="finite_amax",
      name=f"finite_amax_{tile_name(config)}",
      inputs=("x",),
      outputs=(("partial_amax", (programs,), "int32"),),
      constexprs=tuple(amax.items()),
      grid=programs,
      num_warps=config.num_warps,
    ),
    Launch(
      kernel="reduce_global_scale",
      name="reduce_global_scale",
      inputs=("partial_amax",),
      outputs=(("global_scale", (1,), "float32"),),
      constexprs=tuple(reduce.items()),
      grid=1,
      num_warps=REDUCE_WARPS,
    ),
  ]


def _programs(config: quantize_config.QuantizeConfig, view: _View) -> int:
  (programs,) = quantize_config.launch_grid(
    config, view.batch, view.rows, view.k
  )
  return programs


def tile_name(config: quantize_config.QuantizeConfig) -> str:
  return f"{config.block_m}x{config.block_k}"


def emit(
  x: jax.Array,
  global_scale: jax.Array | None,
  problem: QuantizeProblem,
  target: targets.Target,
  *,
  packed: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Values, scale and global scale (None where the format has none).

  Args:
    x: of the problem's shape and dtype.
    global_scale: f32[] where the problem has one.
    problem: one that `supports` takes.
    target: where.
    packed: whether FP4 values are uint8, two a byte.
  """
  arrays = {"x": x}
  if global_scale is not None:
    arrays["global_scale"] = global_scale.reshape(1)
  run(launches(problem, target), arrays, target)
  if problem.format.has_global_scale:
    global_scale = arrays["global_scale"].reshape(())
  format, shape, axis = problem.format, problem.shape, problem.axis
  return (
    values_of_bytes(arrays["values"], format, shape, axis, packed=packed),
    scale_of_bytes(arrays["scale"], format, shape, axis),
    global_scale,
  )


def run(
  launches: Sequence[Launch],
  arrays: dict[str, jax.Array],
  target: targets.Target,
) -> None:
  """Makes the launches on `arrays`, by name, and adds what they write."""
  for launch in launches:
    inputs = [arrays[name] for name in launch.inputs]
    results = _call(launch, inputs, target)
    names = [name for name, _, _ in launch.outputs]
    arrays |= dict(zip(names, results, strict=True))


def _call(
  launch: Launch, inputs: Sequence[jax.Array], target: targets.Target
) -> list[jax.Array]:
  """Runs a launch; no product may be contracted with a sum, for its bits."""
  kernels = importlib.import_module("jaxplugin.kernels.gpu.quantize")
  return triton_library.call(
    getattr(kernels, launch.kernel),
    inputs,
    [jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in launch.outputs],
    dict(launch.constexprs),
    name=launch.name,
    grid=launch.grid,
    num_warps=launch.num_warps,
    num_stages=_NUM_STAGES,
    fp_fusion=False,
    target=target,
  )


def values_of_bytes(
  values: jax.Array,
  format: formats.BlockFormat,
  shape: Sequence[int],
  axis: int,
  *,
  packed: bool,
) -> jax.Array:
  """Bytes as they were written, as the format's values of a shape.

  Args:
    values: uint8, FP8 in the order of `shape`; FP4 packed along `axis`, which
      is minor.
    format: of the values.
    shape: the logical one.
    axis: which is blocked.
    packed: whether FP4 values stay uint8, two a byte.
  """
  if not format.is_fp4:
    return lax.bitcast_convert_type(values.reshape(shape), format.values_dtype)
  rest = (*shape[:axis], *shape[axis + 1 :])
  values = values.reshape(*rest, shape[axis] // 2)
  if not packed:
    values = layouts.unpack_fp4(values)
  return jnp.moveaxis(values, -1, axis)


def scale_of_bytes(
  scale: jax.Array,
  format: formats.BlockFormat,
  shape: Sequence[int],
  axis: int,
) -> jax.Array:
  """Bytes as they were written, in the order of `shape`, as its scale."""
  blocks = list(shape)
  blocks[axis] //= format.block_size
  return lax.bitcast_convert_type(scale.reshape(blocks), format.scale_dtype)
