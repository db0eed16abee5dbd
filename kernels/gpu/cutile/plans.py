# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans the launch of the cuTile matmul.

`plan` returns a `CutileLaunch` for a `configs.MatmulShape` and a `TileConfig`.
The lowering, the assembler and the tests use it. This module does not import
cuda.tile.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Final

from jaxplugin.kernels.gpu import configs

from jaxplugin.kernels import architectures, formats

# Architectures whose compiled code was inspected. The assembler refuses Hopper,
# whose matrix instructions have no block scales.
ARCHITECTURES: Final = ("sm_100", "sm_103", "sm_120")

# Tensor memory accelerator: rows start at multiples of 16 bytes. Others would
# be loaded byte by byte, and take the assembler 40 seconds.
ROW_ALIGNMENT_BYTES: Final = 16
# A tile of swizzled scales, 128 rows by 4 columns, as the kernel sees it.
SCALE_TILE: Final = (32, 16)

# Sizes and strides of arrays are 32 bits; with 64 the compiler does not use the
# tensor memory accelerator (cuda-tile 1.7).
_MAX_INDEX: Final = 2**31 - 1
_GROUP_M: Final = 8  # rows of tiles that are computed together, for the cache

_ELEMENT_DTYPES: Final = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_BLOCK_ROWS: Final = (128, 256)
_BLOCK_SIZES_K: Final = (64, 128, 256, 512)
_CTAS: Final = (1, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileConfig:
  """The config of a launch.

  Attributes:
    block_m, block_n, block_k: the tile of a program, in values.
    num_ctas: CTAs of a program; two share a matrix instruction.
    group_m: number of rows of tiles in one group of the program order.
  """

  block_m: int
  block_n: int
  block_k: int
  num_ctas: int = 1
  group_m: int = _GROUP_M

  def __str__(self) -> str:
    ctas = f"_{self.num_ctas}cta" if self.num_ctas > 1 else ""
    return f"{self.block_m}x{self.block_n}x{self.block_k}{ctas}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
  """An argument of the kernel: a row-major array."""

  name: str
  dtype: str  # NumPy's name, or ml_dtypes'
  shape: tuple[int, ...]

  @property
  def strides(self) -> tuple[int, ...]:
    """The strides, in elements."""
    strides = [1]
    for size in self.shape[:0:-1]:
      strides.append(strides[-1] * size)
    return tuple(reversed(strides))

  def assumptions(self) -> dict[str, Any]:
    """Returns the facts about an array that the compiler may use.

    Arrays with equal facts share one compiled kernel.
    """
    bits = 8 * _ITEM_BYTES[self.dtype]
    unit = 8 * ROW_ALIGNMENT_BYTES // bits
    return {
      "dtype": self.dtype,
      "stride_divisible_by": [
        unit if stride % unit == 0 else 1 for stride in self.strides[:-1]
      ]
      + [1],
      "shape_divisible_by": [
        ROW_ALIGNMENT_BYTES if size % ROW_ALIGNMENT_BYTES == 0 else 1
        for size in self.shape
      ],
    }


_ITEM_BYTES: Final = {
  "uint8": 1,
  "float8_e4m3fn": 1,
  "float8_e5m2": 1,
  "bfloat16": 2,
  "float16": 2,
  "float32": 4,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CutileLaunch:
  """One launch of `matmul_kernel.block_scaled_matmul`.

  Attributes:
    name: name in profiles, a C identifier.
    gpu_code: the architecture that it is compiled for.
    grid: number of programs.
    num_ctas: number of CTAs of a program.
    arguments: the arguments in the kernel's order. The first is the output. A
      number is a constant, or replaces an array that the call does not have.
  """

  name: str
  gpu_code: str
  grid: int
  num_ctas: int
  arguments: tuple[Argument | int, ...]

  @property
  def arrays(self) -> tuple[Argument, ...]:
    return tuple(x for x in self.arguments if isinstance(x, Argument))

  @property
  def inputs(self) -> tuple[Argument, ...]:
    return self.arrays[1:]

  @property
  def output(self) -> Argument:
    return self.arrays[0]

  def specification(self) -> dict[str, Any]:
    """Returns the facts that determine the compiled kernel, as JSON.

    Launches of other sizes may have the same specification.
    """
    return {
      "name": self.name,
      "gpu_code": self.gpu_code,
      "num_ctas": self.num_ctas,
      "arguments": [
        x.assumptions() if isinstance(x, Argument) else x
        for x in self.arguments
      ],
    }


def shape_error(
  shape: configs.MatmulShape, architecture: architectures.Architecture
) -> str | None:
  """Returns why no config can compute a matmul, or None if one can."""
  if architecture.name not in ARCHITECTURES:
    return f"needs {', '.join(ARCHITECTURES)}, got {architecture.name}"
  kinds = (shape.lhs, shape.rhs)
  names = tuple(kind.format for kind in kinds)
  for kind in kinds:
    if kind.block_format is None:
      return f"needs both operands quantized, got {' x '.join(names)}"
    if kind.element.name not in (*_ELEMENT_DTYPES, formats.E2M1.name):
      return f"multiplies FP8 and FP4, got {kind.format}"
    if kind.is_interleaved:
      return "needs values in their usual order, got interleaved ones"
  one, other = (kind.block_format for kind in kinds)
  assert one is not None and other is not None
  if (one.scale, one.block_size) != (other.scale, other.block_size):
    return f"needs operands with one kind of scale, got {' x '.join(names)}"
  elements = {one.element.name, other.element.name} - {formats.E2M1.name}
  if len(elements) > 1:
    return (
      "needs operands of one type, and no FP8 type contains both E4M3 and"
      f" E5M2, got {' x '.join(names)}"
    )
  for argument in _arguments(shape):
    largest = max(*argument.shape, *argument.strides)
    if largest > _MAX_INDEX:
      return (
        f"has 32-bit offsets, and {argument.name} of shape {argument.shape}"
        f" needs {largest}"
      )
  return None


def config_error(
  config: TileConfig,
  shape: configs.MatmulShape,
  architecture: architectures.Architecture,
) -> str | None:
  """Returns why a config does not fit a shape without a `shape_error`."""
  blocks = (config.block_m, config.block_n, config.block_k)
  if any(size <= 0 or size & (size - 1) for size in (*blocks, config.num_ctas)):
    return f"tiles and num_ctas must be powers of two, got {config}"
  # Scales are read by whole tiles.
  tile_rows, columns = formats.SCALE_TILE_ROWS, formats.SCALE_TILE_COLUMNS
  tile_k = columns * shape.lhs.values_per_scale
  if config.block_m % tile_rows or config.block_n % tile_rows:
    return f"block_m and block_n must be multiples of {tile_rows}, got {config}"
  if config.block_k % tile_k:
    return f"block_k must be a multiple of {tile_k}, got {config.block_k}"
  if architecture.has_tensor_memory:
    # Rows of tcgen05.mma: 128, or 256 of two CTAs. With 256 by 256 of one CTA
    # the assembler (13.4) has not ended within 20 seconds.
    if config.block_m != 128 * config.num_ctas or config.num_ctas > 2:
      return (
        "block_m must be 128 for each of one or two CTAs, got"
        f" {config.block_m} and {config.num_ctas}"
      )
  elif config.num_ctas != 1:
    return f"{architecture.name} has no pairs of CTAs, got {config.num_ctas}"
  if shape.k // shape.lhs.values_per_element % ROW_ALIGNMENT_BYTES or (
    shape.k // shape.rhs.values_per_element % ROW_ALIGNMENT_BYTES
  ):
    return f"rows must be multiples of 16 bytes, got k={shape.k}; pad k"
  needed = shared_memory_bound(config, shape)
  if needed > architecture.shared_memory_bytes:
    return (
      f"two stages need {needed} bytes of shared memory, {architecture.name}"
      f" has {architecture.shared_memory_bytes}"
    )
  return None


def shared_memory_bound(config: TileConfig, shape: configs.MatmulShape) -> int:
  """Returns the least bytes of two stages of both tiles, of one CTA."""
  rows = config.block_m * shape.lhs.bits + config.block_n * shape.rhs.bits
  return 2 * rows * config.block_k // 8 // config.num_ctas


def default_config(
  shape: configs.MatmulShape, architecture: architectures.Architecture
) -> TileConfig:
  """Returns the config that rules choose. No GPU has measured it.

  Raises:
    ValueError: If the kernel cannot compute the matmul, with the reason.
  """
  error = shape_error(shape, architecture)
  if error is not None:
    raise ValueError(error)
  if not architecture.has_tensor_memory:
    return TileConfig(block_m=128, block_n=128, block_k=128)
  is_fp4 = shape.lhs.is_packed and shape.rhs.is_packed
  block_k = 256 if is_fp4 else 128
  if shape.m <= 128:
    return TileConfig(block_m=128, block_n=128, block_k=block_k)
  return TileConfig(block_m=256, block_n=256, block_k=block_k, num_ctas=2)


def candidates(
  shape: configs.MatmulShape, architecture: architectures.Architecture
) -> Iterator[TileConfig]:
  """Yields every config that supports a matmul."""
  if shape_error(shape, architecture) is not None:
    return
  for sizes in itertools.product(
    _BLOCK_ROWS, _BLOCK_ROWS, _BLOCK_SIZES_K, _CTAS
  ):
    block_m, block_n, block_k, num_ctas = sizes
    config = TileConfig(
      block_m=block_m, block_n=block_n, block_k=block_k, num_ctas=num_ctas
    )
    if config_error(config, shape, architecture) is None:
      yield config


def padded_k(k: int, *, is_packed: bool) -> int:
  """Returns k of rows that are padded to `ROW_ALIGNMENT_BYTES`.

  Scale blocks divide the result, or the result divides a block. `is_packed` is
  whether an operand is FP4.
  """
  values = ROW_ALIGNMENT_BYTES * (2 if is_packed else 1)
  return configs.cdiv(k, values) * values


def plan(
  shape: configs.MatmulShape,
  config: TileConfig,
  architecture: architectures.Architecture,
  *,
  residual_dtype: str = "float32",
) -> CutileLaunch:
  """Returns the launch of a matmul with dense operands and swizzled scales.

  Args:
    shape: the matmul. The layouts of its scales are ignored.
    config: the tiles.
    architecture: the GPU.
    residual_dtype: NumPy's name of the residual's dtype.

  Raises:
    ValueError: If the kernel cannot compute it. The message has the reason.
  """
  error = shape_error(shape, architecture)
  error = error or config_error(config, shape, architecture)
  if error is not None:
    raise ValueError(error)
  arrays = {x.name: x for x in _arguments(shape, residual_dtype)}
  order = (
    *("out", "lhs", "lhs_scale", "rhs", "rhs_scale"),
    *("global_scale", "bias", "residual"),
  )
  constants = {
    "block_m": config.block_m,
    "block_n": config.block_n,
    "block_k": config.block_k,
    "group_m": config.group_m,
    "vec_size": shape.lhs.values_per_scale,
    "scales_are_e4m3": int(shape.lhs.scale == formats.E4M3),
    "lhs_is_packed": int(shape.lhs.is_packed),
    "rhs_is_packed": int(shape.rhs.is_packed),
    "num_factors": _num_factors(shape),
    "has_bias": int(shape.has_bias),
    "activation": configs.ACTIVATIONS.index(shape.activation),
    "has_residual": int(shape.has_residual),
  }
  rows = configs.cdiv(shape.m, config.block_m)
  columns = configs.cdiv(shape.n, config.block_n)
  name = f"cutile_{shape.lhs.format}_{shape.rhs.format}_{config}"
  return CutileLaunch(
    name=name,
    gpu_code=architecture.name,
    grid=shape.batch * rows * columns,
    num_ctas=config.num_ctas,
    arguments=(*(arrays.get(name, 0) for name in order), *constants.values()),
  )


def _num_factors(shape: configs.MatmulShape) -> int:
  return int(shape.has_global_scale) + int(shape.has_global_power)


def _arguments(
  shape: configs.MatmulShape, residual_dtype: str = "float32"
) -> list[Argument]:
  """Returns the arrays of a matmul, which do not depend on the config."""
  out_dtype = configs.NUMPY_DTYPES[shape.out_dtype]
  result = (shape.batch, shape.m, shape.n)
  found = [Argument(name="out", dtype=out_dtype, shape=result)]
  for name, kind, rows in (
    ("lhs", shape.lhs, shape.m),
    ("rhs", shape.rhs, shape.n),
  ):
    dtype = "uint8" if kind.is_packed else _ELEMENT_DTYPES[kind.element.name]
    k = configs.cdiv(shape.k, kind.values_per_element)
    columns = configs.cdiv(shape.k, kind.values_per_scale)
    scale = (
      shape.batch,
      configs.cdiv(rows, formats.SCALE_TILE_ROWS),
      configs.cdiv(columns, formats.SCALE_TILE_COLUMNS),
      *SCALE_TILE,
    )
    found += [
      Argument(name=name, dtype=dtype, shape=(shape.batch, rows, k)),
      Argument(name=f"{name}_scale", dtype="uint8", shape=scale),
    ]
  if shape.has_global_scale:
    sizes = (_num_factors(shape),)
    found.append(Argument(name="global_scale", dtype="float32", shape=sizes))
  if shape.has_bias:
    found.append(Argument(name="bias", dtype="float32", shape=(1, 1, shape.n)))
  if shape.has_residual:
    found.append(Argument(name="residual", dtype=residual_dtype, shape=result))
  return found
