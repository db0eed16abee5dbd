# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What launches of the quantize kernels take: pure functions, no Triton.

A launch of `quantize.quantize` for x[batch, rows, k]:

  grid_rows, grid_k = covered(rows, k, format_name, swizzled=swizzled)
  config = default_config(format_name, architecture, grid_rows, grid_k)
  grid = launch_grid(config, batch, grid_rows, grid_k)
  constexprs(config, format_name, ...), num_warps=config.num_warps
"""

from __future__ import annotations

import dataclasses
from typing import Any
from typing import Final

from jaxplugin.kernels import architectures
from jaxplugin.kernels import formats

REDUCE_CHUNK: Final = 1024  # CHUNK of `reduce_global_scale`
SCALE_ROUNDINGS: Final = ("up", "floor")
# Those that the kernels make.
FORMAT_NAMES: Final = tuple(formats.FORMATS)


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


def _round_up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple


def _next_power_of_2(size: int) -> int:
  return 1 << max(0, size - 1).bit_length()
