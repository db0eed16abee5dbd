# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is launched to quantize: pure functions, no Triton.

`plan` quantizes along one axis, reading x where it lies. `plan_both` quantizes
along two, from one read. A global scale that is computed takes one read before.
Arrays are "x", "global_scale", "partial_amax", "values" and "scale"; names that
end in "_t" are of columns. No launch lets the compiler contract a product and a
sum, which would change bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from typing import Final
from typing import Literal

from jaxplugin.kernels import architectures
from jaxplugin.kernels import formats
from jaxplugin.kernels import launching

REDUCE_CHUNK: Final = 1024  # CHUNK of `reduce_global_scale`
SCALE_ROUNDINGS: Final = ("up", "floor")
# Those that the kernels make.
FORMAT_NAMES: Final = tuple(formats.FORMATS)
_REDUCE_WARPS: Final = 4

# Whether a global scale divides x: not, one that is given, or one that is
# computed from x, which then takes launches of its own.
GlobalScale = Literal["none", "given", "computed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
  """How a quantize kernel is launched.

  Attributes:
    block_m: rows of a tile.
    block_k: values of a tile along k, a multiple of the scale block.
    num_warps: of a program.
    hardware_cast: FP8 values are cast by the target's own instruction.
  """

  block_m: int
  block_k: int
  num_warps: int
  hardware_cast: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized:
  """What a kernel makes: a compile-time constant of it.

  Attributes:
    format: of values and scales.
    rounds_up: whether the power of two of an MX scale is rounded up, so that no
      value saturates; else down ("floor").
    hardware_cast: as of `QuantizeConfig`.
    is_swizzled: whether scales are written as "swizzled_128x4".
  """

  format: formats.Format
  rounds_up: bool
  hardware_cast: bool
  is_swizzled: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
  """x to be quantized along k, as [batch, rows, k]; nothing is copied.

  Attributes:
    batch, rows, k: sizes.
    k_is_minor: whether x lies as [batch, rows, k]; else as [batch, k, rows].
    format: of `formats.FORMATS`.
    scale_rounding: one of `SCALE_ROUNDINGS`.
    swizzled: whether the scale is written as "swizzled_128x4".
    global_scale: see `GlobalScale`.
  """

  batch: int
  rows: int
  k: int
  k_is_minor: bool
  format: str
  scale_rounding: str = "up"
  swizzled: bool = False
  global_scale: GlobalScale = "none"

  def shape(self, k: int) -> tuple[int, int, int]:
    """Shape in memory of an array that has k in the place of ours."""
    if self.k_is_minor:
      return self.batch, self.rows, k
    return self.batch, k, self.rows

  def strides(self, k: int) -> tuple[int, int, int]:
    """Of such an array: batch, row, k; in elements."""
    row, column = (k, 1) if self.k_is_minor else (1, self.rows)
    return self.rows * k, row, column

  def covered(self) -> tuple[int, int]:
    return covered(self.rows, self.k, self.format, swizzled=self.swizzled)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrices:
  """x as [batch, rows, columns], dense, to be quantized along both.

  Attributes:
    batch, rows, columns: sizes.
    k, k_t: columns and rows, padded.
    is_transposed: whether what is blocked along rows has them last.
    format, scale_rounding, global_scale: as of `Rows`; "computed" are two.
  """

  batch: int
  rows: int
  columns: int
  k: int
  k_t: int
  is_transposed: bool
  format: str
  scale_rounding: str = "up"
  global_scale: GlobalScale = "none"


def plan(
  x: Rows, architecture: architectures.Architecture
) -> list[launching.Launch]:
  """What is launched to quantize along k, in order.

  Raises:
    ValueError: unknown format or scale rounding.
  """
  config = default_config(
    x.format, architecture, *x.covered(), k_is_contiguous=x.k_is_minor
  )
  result = [_quantize_launch(x, config)]
  if x.global_scale == "computed":
    result[:0] = _global_scale_launches(x, config)
  return result


def plan_both(
  x: Matrices, architecture: architectures.Architecture
) -> list[launching.Launch]:
  """What is launched to quantize along columns and along rows, in order.

  Raises:
    ValueError: unknown format or scale rounding.
  """
  config = default_config(x.format, architecture, x.k_t, x.k, both=True)
  result = [_quantize_both_launch(x, config)]
  if x.global_scale == "computed":
    result[:0] = _global_scales_launches(x, config)
  return result


def default_config(
  format_name: str,
  architecture: architectures.Architecture,
  grid_rows: int,
  grid_k: int,
  *,
  both: bool = False,
  k_is_contiguous: bool = True,
) -> QuantizeConfig:
  """The config by rule.

  A thread has 32 values, so four loads of 16 bytes of a 16-bit input are on
  their way at once; fewer where the array is small, and 16 where it quantizes
  twice, or registers spill on sm_100. Tiles are long where memory is
  contiguous, so that a warp reads whole lines.

  Args:
    format_name: one of `FORMAT_NAMES`.
    architecture: to launch on.
    grid_rows, grid_k: what the grid covers, see `covered`.
    both: for `quantize_both` and `finite_amax_both`.
    k_is_contiguous: whether consecutive values of a block are in memory.
  """
  block_m, block_k = (16, 256) if k_is_contiguous else (128, 32)
  if both:
    block_m, block_k = 64, 64
  else:
    vec_size = formats.by_name(format_name).block_size
    block_m = min(block_m, _next_power_of_2(grid_rows))
    block_k = min(block_k, max(vec_size, _next_power_of_2(grid_k)))
  threads = block_m * block_k // (16 if both else 32)
  return QuantizeConfig(
    block_m=block_m,
    block_k=block_k,
    num_warps=max(1, threads // architecture.warp_size),
    hardware_cast=casts_in_hardware(format_name, architecture),
  )


def casts_in_hardware(
  format_name: str, architecture: architectures.Architecture
) -> bool:
  """Whether the values' type has a cast that rounds and saturates as ours.

  `cvt.rn.satfinite.e4m3x2.f32` and its E5M2 twin, from sm_89 on (PTX ISA).
  """
  is_fp8 = formats.by_name(format_name).element.bits == 8
  return is_fp8 and architecture.casts_to_fp8


def covered(
  rows: int, k: int, format_name: str, *, swizzled: bool
) -> tuple[int, int]:
  """Rows and k that a grid covers: padding of a swizzled scale included."""
  if not swizzled:
    return rows, k
  tile_k = formats.SCALE_TILE_COLUMNS * formats.by_name(format_name).block_size
  return _round_up(rows, formats.SCALE_TILE_ROWS), _round_up(k, tile_k)


def covered_by_both(
  rows: int, columns: int, format_name: str, *, swizzled: bool
) -> tuple[int, int]:
  """As `covered`, for `quantize_both`: the padding of both scales."""
  first = covered(rows, columns, format_name, swizzled=swizzled)
  second = covered(columns, rows, format_name, swizzled=swizzled)
  return max(first[0], second[1]), max(first[1], second[0])


def launch_grid(
  config: QuantizeConfig, batch: int, grid_rows: int, grid_k: int
) -> tuple[int]:
  """Programs of the kernels that read `x`."""
  return (
    batch * -(-grid_rows // config.block_m) * -(-grid_k // config.block_k),
  )


def constexprs(
  config: QuantizeConfig,
  format_name: str,
  *,
  scale_rounding: str = "up",
  swizzled: bool = False,
) -> dict[str, Any]:
  """The constexprs of `quantize`, and but TRANSPOSED of `quantize_both`.

  Raises:
    ValueError: unknown format or scale rounding.
  """
  if scale_rounding not in SCALE_ROUNDINGS:
    raise ValueError(
      f"scale_rounding must be one of {SCALE_ROUNDINGS}, got {scale_rounding!r}"
    )
  return {
    "BLOCK_M": config.block_m,
    "BLOCK_K": config.block_k,
    "QUANTIZED": Quantized(
      format=formats.by_name(format_name),
      rounds_up=scale_rounding == "up",
      hardware_cast=config.hardware_cast,
      is_swizzled=swizzled,
    ),
  }


def _quantize_launch(
  x: Rows,
  config: QuantizeConfig,
) -> launching.Launch:
  format = formats.by_name(x.format)
  blocks = x.k // format.block_size
  if format.is_packed:
    # Several values a byte along k, which is minor therefore.
    values = (x.batch, x.rows, x.k // format.values_per_byte)
    values_strides = (values[1] * values[2], values[2], 1)
  else:
    values = x.shape(x.k)
    values_strides = x.strides(x.k)
  scale: tuple[int, ...] = x.shape(blocks)
  scale_strides = x.strides(blocks)
  grid_rows, grid_k = x.covered()
  if x.swizzled:
    scale = (x.batch, grid_rows, grid_k // format.block_size)
    scale_strides = (scale[1] * scale[2], 0, 0)
  constants = {
    "rows": x.rows,
    "k": x.k,
    "grid_rows": grid_rows,
    "grid_k": grid_k,
    "x_strides": x.strides(x.k),
    "values_strides": values_strides,
    "scale_strides": scale_strides,
    **constexprs(
      config,
      x.format,
      scale_rounding=x.scale_rounding,
      swizzled=x.swizzled,
    ),
  }
  return launching.Launch(
    kernel="quantize",
    name=f"quantize_{x.format}_{_tile_name(config)}",
    inputs=("x", "x" if x.global_scale == "none" else "global_scale"),
    outputs=(
      launching.Output("values", values, "uint8"),
      launching.Output("scale", scale, "uint8"),
    ),
    constexprs=tuple(constants.items()),
    grid=launch_grid(config, x.batch, grid_rows, grid_k)[0],
    num_warps=config.num_warps,
  )


def _global_scale_launches(
  x: Rows,
  config: QuantizeConfig,
) -> list[launching.Launch]:
  """The largest magnitude of each tile, then one program over those."""
  (programs,) = launch_grid(config, x.batch, x.rows, x.k)
  amax = {
    "rows": x.rows,
    "k": x.k,
    "x_strides": x.strides(x.k),
    "BLOCK_M": config.block_m,
    "BLOCK_K": config.block_k,
    "VEC_SIZE": formats.by_name(x.format).block_size,
  }
  reduce = {"size": programs, "CHUNK": REDUCE_CHUNK}
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


def _quantize_both_launch(
  x: Matrices,
  config: QuantizeConfig,
) -> launching.Launch:
  format = formats.by_name(x.format)
  packing = format.values_per_byte
  batch, rows, columns = x.batch, x.rows, x.columns
  k, k_t = x.k, x.k_t
  # Several values a byte lie along the blocked dimension, which is therefore
  # minor in what is written.
  values_t: tuple[int, ...] = (batch, columns, k_t // packing)
  scale_t: tuple[int, ...] = (batch, columns, k_t // format.block_size)
  if not x.is_transposed:
    scale_t = (batch, k_t // format.block_size, columns)
    if not format.is_packed:
      values_t = (batch, k_t, columns)
  sizes = {"rows": rows, "columns": columns, "k": k, "k_t": k_t}
  constants = {
    **sizes,
    "grid_rows": k_t,
    "grid_columns": k,
    "x_strides": (rows * columns, columns, 1),
    **constexprs(config, x.format, scale_rounding=x.scale_rounding),
    "TRANSPOSED": x.is_transposed,
  }
  global_scales = ("x", "x")
  if x.global_scale == "computed":
    global_scales = ("global_scale", "global_scale_t")
  elif x.global_scale == "given":
    global_scales = ("global_scale", "global_scale")
  tile = _tile_name(config)
  return launching.Launch(
    kernel="quantize_both",
    name=f"quantize_both_{x.format}_{tile}",
    inputs=("x", *global_scales),
    outputs=(
      launching.Output("values", (batch, rows, k // packing), "uint8"),
      launching.Output("scale", (batch, rows, k // format.block_size), "uint8"),
      launching.Output("values_t", values_t, "uint8"),
      launching.Output("scale_t", scale_t, "uint8"),
    ),
    constexprs=tuple(constants.items()),
    grid=launch_grid(config, batch, k_t, k)[0],
    num_warps=config.num_warps,
  )


def _global_scales_launches(
  x: Matrices,
  config: QuantizeConfig,
) -> list[launching.Launch]:
  """The largest magnitudes of each tile, then one program over those."""
  rows, columns = x.rows, x.columns
  (programs,) = launch_grid(config, x.batch, rows, columns)
  amax = {
    "rows": rows,
    "columns": columns,
    "x_strides": (rows * columns, columns, 1),
    "BLOCK_M": config.block_m,
    "BLOCK_K": config.block_k,
    "VEC_SIZE": formats.by_name(x.format).block_size,
  }
  reduce = {"size": programs, "CHUNK": REDUCE_CHUNK}
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


def _tile_name(config: QuantizeConfig) -> str:
  return f"{config.block_m}x{config.block_k}"


def _round_up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple


def _next_power_of_2(size: int) -> int:
  return 1 << max(0, size - 1).bit_length()
