# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Problems and configs of the quantize kernels, without Triton."""

from __future__ import annotations

import dataclasses
import math
from typing import Final, Literal

from jaxplugin.kernels import architectures, constants, formats, prologues

SCALE_ROUNDINGS: Final = ("up", "floor")

Sizes = tuple[int, int, int]

# Limits of the kernel in which one program reads a small array: values of a
# tile, and number of tiles.
_TILE_OF_FEW: Final = 1 << 15
_FEW_TILES: Final = 2
# Warps of a program that keeps a row of a norm in registers; more would spill.
_MAX_WARPS: Final = 16
# Features of a longer row that are in registers, with as many partial sums.
_LONG_ROW_TILE: Final = 1 << 12
# Numbers that `norm_statistics` stores for a row, and those of a gradient.
STATISTICS: Final = 3
STATISTICS_OF_GRADIENT: Final = 5

# Whether a global scale divides x: not, one that is given, or one that is
# computed: of largest magnitudes that a launch before found, or of given ones.
GlobalScale = Literal["none", "given", "computed", "of_maxima"]


@dataclasses.dataclass(frozen=True)
class Places:
  """The offsets of values in the array that random bits are drawn for.

  Attributes:
    batch, row, k: size and stride of each dimension that a kernel's axis
      merges, major to minor, in one tuple. The first size is not used.
  """

  # Flat, because Triton 3.6 cannot read a tuple inside of a tuple.
  batch: tuple[int, ...]
  row: tuple[int, ...]
  k: tuple[int, ...]

  @classmethod
  def of_strides(cls, strides: Sizes) -> Places:
    """Returns the places along axes that are one dimension each."""
    return cls(*((0, stride) for stride in strides))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile(constants.KernelConstant):
  """The tiles of x that a kernel loads, as a compile-time constant.

  Attributes:
    rows, columns: sizes of x; with halves, those of what is quantized.
    strides: strides of (batch, row, column) in x.
    block_m, block_k: rows and columns of a tile.
    covered_rows, covered_columns: sizes that the grid covers.
  """

  rows: int
  columns: int
  strides: Sizes
  block_m: int
  block_k: int
  covered_rows: int
  covered_columns: int

  @property
  def is_row_major(self) -> bool:
    return self.strides[2] == 1

  @property
  def features(self) -> int:
    """Size of the dimension of x that is last in memory."""
    return self.columns if self.is_row_major else self.rows

  @property
  def of_pairs(self) -> Tile:
    """The tile of x with interleaved halves, of twice as many features."""
    if self.is_row_major:
      return dataclasses.replace(
        self, columns=2 * self.columns, block_k=2 * self.block_k
      )
    return dataclasses.replace(
      self, rows=2 * self.rows, block_m=2 * self.block_m
    )

  @property
  def half(self) -> Tile:
    """The tile of the first half of the features of x."""
    if self.is_row_major:
      return dataclasses.replace(self, columns=self.columns // 2)
    return dataclasses.replace(self, rows=self.rows // 2)

  @property
  def of_cotangent(self) -> Tile:
    """The tile of an array that only has half of the features of x."""
    batch, row, column = self.strides
    if self.is_row_major:
      strides = batch // 2, row // 2, column
    else:
      strides = batch // 2, row, column // 2
    return dataclasses.replace(self.half, strides=strides)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
  """How a quantize kernel is launched.

  Attributes:
    block_m: rows of a tile.
    block_k: values of a tile along k, a multiple of the scale block.
    num_warps: of a program.
    hardware_cast: FP8 or FP4 values are cast by the target's own instruction.
  """

  block_m: int
  block_k: int
  num_warps: int
  hardware_cast: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
  """Options of training recipes.

  Attributes:
    hadamard: group size of the Hadamard transform along k, a power of two; 1
      for no transform.
    sign_words: signs of the transform as int32 words. Bit i % 32 of word
      i // 32 is set if value i of a group is negated.
    factor: factor of the transform, 1 / sqrt(hadamard).
    is_square: whether block_size rows share scales. Their first row is a
      multiple of block_size, and the last group may have fewer rows.
    four_over_six: whether each block, or square, is scaled to 6 or 4, whichever
      has the smaller error.
    scale_up: whether floating-point scales are rounded up instead of to
      nearest.
    is_stochastic: whether values are rounded stochastically.
    is_part: whether x is a shard with the random bits of a larger array.
  """

  hadamard: int = 1
  sign_words: tuple[int, ...] = ()
  factor: float = 1.0
  is_square: bool = False
  four_over_six: bool = False
  scale_up: bool = False
  is_stochastic: bool = False
  is_part: bool = False

  @property
  def suffix(self) -> str:
    """Suffix of kernel names for these options."""
    parts = [f"_hadamard{self.hadamard}"] if self.hadamard > 1 else []
    parts += ["_square"] if self.is_square else []
    parts += ["_four_over_six"] if self.four_over_six else []
    parts += ["_scale_up"] if self.scale_up else []
    parts += ["_stochastic"] if self.is_stochastic else []
    return "".join(parts + (["_of_part"] if self.is_part else []))

  @property
  def needs_all_bits(self) -> bool:
    """Whether quotients must be correctly rounded."""
    return self.four_over_six or self.is_stochastic


NO_OPTIONS: Final = QuantizeOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Maxima:
  """Partial amax values of x, from which a kernel computes a global scale.

  Attributes:
    count: number of values for each array that is quantized from x.
    row: index of this array, 0 or 1.
    range: the format's largest value times its largest scale. The global scale
      is amax / range.
  """

  count: int
  row: int
  range: float

  @property
  def size(self) -> int:
    """`count` rounded up to a power of two."""
    return _next_power_of_2(self.count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeConstant(constants.KernelConstant):
  """The result of a quantize kernel, as a compile-time constant.

  A kernel that stores no values does not need the last four attributes.

  Attributes:
    format: format of values and scales.
    rounds_up: whether the power of two of an MX scale is rounded up, so that no
      value saturates; else down ("floor").
    hardware_cast: see `QuantizeConfig`.
    is_swizzled: whether scales are written as "swizzled_128x4".
    pads_values: whether values have the rows of a swizzled scale, with zeros
      after the rows of x.
    options: options of a recipe.
    maxima: the maxima from which a global scale is computed. None if the global
      scale is an argument, or if the format has none.
    prologue: computes what is quantized; None quantizes x.
    k: number of values that are stored in a row.
    random_places: for stochastic rounding.
    values_strides, scale_strides: strides of (batch, row, k) in elements; of a
      swizzled scale only that of the batch is used.
  """

  format: formats.Format
  rounds_up: bool
  hardware_cast: bool
  is_swizzled: bool
  pads_values: bool = False
  options: QuantizeOptions = NO_OPTIONS
  maxima: Maxima | None = None
  prologue: prologues.Prologue | None = None
  k: int = 0
  random_places: Places | None = None
  values_strides: Sizes = (0, 0, 0)
  scale_strides: Sizes = (0, 0, 0)

  @property
  def has_prologue(self) -> bool:
    return self.prologue is not None

  @property
  def is_bounded(self) -> bool:
    """Whether quotients are bounded: the global scale is computed from x."""
    return self.maxima is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputArray:
  """An array x that is quantized; `Rows` or `Matrices`.

  Attributes:
    batch, rows: sizes.
    format: name in `formats.FORMATS`.
    scale_rounding: one of `SCALE_ROUNDINGS`.
    global_scale: see `GlobalScale`; one for each result.
    num_maxima: number of maxima if `global_scale` is "of_maxima".
    packed_in_place: whether packed values have the dimension order of x;
      otherwise k is minor.
    options: options of a recipe. Squares do not span matrices of the batch.
    places: places of random bits.
    prologue: see `QuantizeConstant`.
    dtype: NumPy's name of the dtype of x and of a prologue's sum with x.
    returns_amax: whether the prologue's amax is a result.
    sums_columns: whether the sums of the prologue's features are a result.
  """

  batch: int
  rows: int
  format: str
  scale_rounding: str = "up"
  global_scale: GlobalScale = "none"
  num_maxima: int = 0
  packed_in_place: bool = False
  options: QuantizeOptions = NO_OPTIONS
  places: Places | None = None
  prologue: prologues.Prologue | None = None
  dtype: str = "float32"
  returns_amax: bool = False
  sums_columns: bool = False

  def _as_norm(self, rows: int, features: int) -> Rows:
    return Rows(
      batch=1,
      rows=self.batch * rows,
      k=features,
      k_is_minor=True,
      format=self.format,
      prologue=self.prologue,
      dtype=self.dtype,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(InputArray):
  """An array x that is quantized along k without a copy.

  Attributes:
    k: size of the blocked dimension.
    k_is_minor: whether x is [batch, rows, k] in memory; else [batch, k, rows].
    swizzled: whether the scale is written as "swizzled_128x4".
    pads_values: see `QuantizeConstant`; only with a swizzled scale.
    places: None for the offsets in x.
    prologue: its features are k if k is minor; else they are the rows.
  """

  k: int
  k_is_minor: bool
  swizzled: bool = False
  pads_values: bool = False

  @property
  def columns(self) -> int:
    return self.k

  def layout(self, k: int) -> tuple[Sizes, Sizes]:
    """Returns `layout` of the quantized array with another `k`."""
    return layout(self.batch, self.rows, k, k_is_minor=self.k_is_minor)

  @property
  def x_strides(self) -> Sizes:
    """Strides of (batch, row, k) in x, whose halves are twice as long."""
    batch, row, k = self.layout(self.k)[1]
    if self.prologue is None or not self.prologue.merged_halves:
      return batch, row, k
    return (
      (2 * batch, 2 * row, k) if self.k_is_minor else (2 * batch, row, 2 * k)
    )

  @property
  def as_norm(self) -> Rows:
    """The rows that a norm reads, whichever axis is blocked."""
    rows, features = self.rows, self.k
    if not self.k_is_minor:
      rows, features = features, rows
    return self._as_norm(rows, features)

  def covered(self) -> tuple[int, int]:
    """Returns rows and k with the padding of a swizzled scale."""
    if not self.swizzled:
      return self.rows, self.k
    block_size = formats.by_name(self.format).block_size
    return (
      _round_up(self.rows, formats.SCALE_TILE_ROWS),
      _round_up(self.k, formats.SCALE_TILE_COLUMNS * block_size),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrices(InputArray):
  """A dense array x[batch, rows, columns] that is quantized along both.

  Attributes:
    columns: size of the last dimension.
    k, k_t: padded sizes of columns and rows.
    is_transposed: whether the result that is blocked along rows has rows last.
    row: row of the maxima for the result that is blocked along columns, 0 or 1.
    packed_in_place: for the result that is not transposed.
    options, options_t: for the results blocked along columns and along rows.
    places, places_t: places of random bits for (batch, row, column) and for
      (batch, column, row); () if no bits are drawn.
    prologue: its features are columns.
  """

  columns: int
  k: int
  k_t: int
  is_transposed: bool
  row: int = 0
  options_t: QuantizeOptions = NO_OPTIONS
  places_t: Places | None = None

  @property
  def x_strides(self) -> Sizes:
    """Strides of (batch, row, column) in x, whose halves are twice as long."""
    is_half = self.prologue is not None and self.prologue.merged_halves
    return layout(self.batch, self.rows, self.columns * (2 if is_half else 1))[
      1
    ]

  @property
  def as_norm(self) -> Rows:
    """The rows that a norm reads."""
    return self._as_norm(self.rows, self.columns)


def layout(
  batch: int, rows: int, k: int, *, k_is_minor: bool = True
) -> tuple[Sizes, Sizes]:
  """Returns the shape of a dense array, and its strides of (batch, row, k)."""
  if k_is_minor:
    return (batch, rows, k), (rows * k, k, 1)
  return (batch, k, rows), (rows * k, 1, rows)


def default_config(
  x: InputArray, architecture: architectures.Architecture
) -> QuantizeConfig:
  """Returns the config that rules choose to quantize x and to find its amax.

  Raises:
    ValueError: If the format is unknown.
  """
  if isinstance(x, Matrices):
    return _config_of_matrices(x, architecture)
  assert isinstance(x, Rows)
  return _config_of_rows(x, architecture)


def _config_of_rows(
  x: Rows, architecture: architectures.Architecture
) -> QuantizeConfig:
  """Returns the config for `quantize` and `finite_amax`.

  A thread has 32 values, which are four 16-byte loads of a 16-bit input at
  once. It has 16 if it needs all bits of quotients, because registers would
  spill on sm_100. Tiles are long along the contiguous dimension, so that a warp
  reads whole cache lines. They have whole squares and groups, and whole rows
  for a norm without statistics. A tile of a gradient has either gates or
  factors.
  """
  grid_rows, grid_k = x.covered()
  block_m, block_k = (16, 256) if x.k_is_minor else (128, 32)
  if x.prologue is not None and x.prologue.needs_whole_rows:
    block_k = _next_power_of_2(grid_k)
    block_m = max(1, block_m * 256 // block_k)
  if x.k_is_minor:
    block_k = _in_halves(x, x.k, block_k)
  else:
    block_m = _in_halves(x, x.rows, block_m)
  vec_size = formats.by_name(x.format).block_size
  least_m = vec_size if x.options.is_square else 1
  least_k = max(vec_size, x.options.hadamard)
  needs_all_bits = x.options.needs_all_bits
  return _config_of_tile(
    max(least_m, min(block_m, _next_power_of_2(grid_rows))),
    max(least_k, min(block_k, _next_power_of_2(grid_k))),
    architecture,
    values_of_thread=16 if needs_all_bits else 32,
    hardware_cast=not needs_all_bits
    and casts_in_hardware(x.format, architecture),
  )


def _config_of_matrices(
  x: Matrices, architecture: architectures.Architecture
) -> QuantizeConfig:
  """Returns the config for `quantize_both` and `finite_amax`.

  A thread has 16 values, because it quantizes twice (`_config_of_rows`).
  """
  needs_all_bits = x.options.needs_all_bits or x.options_t.needs_all_bits
  return _config_of_tile(
    64,
    _in_halves(x, x.columns, 64),
    architecture,
    values_of_thread=16,
    hardware_cast=not needs_all_bits
    and casts_in_hardware(x.format, architecture),
  )


def _in_halves(x: InputArray, features: int, block: int) -> int:
  """Returns the largest part of a tile's block that divides halves, if any."""
  if x.prologue is None or not x.prologue.gradient_of_halves:
    return block
  return math.gcd(block, features // 2)


def needs_statistics(
  x: InputArray, architecture: architectures.Architecture
) -> bool:
  """Returns whether another kernel must compute the statistics of a norm.

  Otherwise a program that quantizes keeps whole rows in registers.
  """
  if x.prologue is None or not x.prologue.needs_whole_rows:
    return False
  if not isinstance(x, Rows) or not x.k_is_minor:
    return True
  return default_config(x, architecture).num_warps > _MAX_WARPS


def config_of_statistics(
  x: Rows, architecture: architectures.Architecture
) -> QuantizeConfig:
  """Returns the config of `norm_statistics` for rows that a norm reads.

  Sums have the order of `quantize` unless rows are too long for registers.
  """
  config = default_config(x, architecture)
  if config.num_warps <= _MAX_WARPS:
    return config
  return _config_of_tile(
    1, _LONG_ROW_TILE, architecture, values_of_thread=32, hardware_cast=False
  )


def _config_of_tile(
  block_m: int,
  block_k: int,
  architecture: architectures.Architecture,
  *,
  values_of_thread: int,
  hardware_cast: bool,
) -> QuantizeConfig:
  threads = block_m * block_k // values_of_thread
  return QuantizeConfig(
    block_m=block_m,
    block_k=block_k,
    num_warps=max(1, threads // architecture.warp_size),
    hardware_cast=hardware_cast,
  )


def config_of_few(
  x: InputArray, architecture: architectures.Architecture
) -> QuantizeConfig | None:
  """Returns a config of `global_scale_of_few`, or None for other arrays.

  Its single program has 1024 threads with 32 values each. Two such tiles of
  16-bit values are 128 KiB. One multiprocessor reads 64 bytes a cycle from L2,
  so this takes about 1.2 us, as long as a launch (modelled, not measured).
  """
  if not isinstance(x, Rows) or not x.k_is_minor:
    return None
  if measured(x, x.options).options != NO_OPTIONS:
    return None
  if x.prologue is not None:
    return None
  vec_size = formats.by_name(x.format).block_size
  block_k = max(vec_size, min(_TILE_OF_FEW, _next_power_of_2(x.k)))
  block_m = min(_TILE_OF_FEW // block_k, _next_power_of_2(x.rows))
  few = _config_of_tile(
    block_m, block_k, architecture, values_of_thread=32, hardware_cast=False
  )
  tiles = num_tiles(few, x.batch, x.rows, x.k)
  return few if tiles <= _FEW_TILES else None


def casts_in_hardware(
  format_name: str, architecture: architectures.Architecture
) -> bool:
  """Returns whether an instruction casts to the values' type like `encode`.

  `cvt.rn.satfinite` supports E4M3 and E5M2 from sm_89 on and E2M1 from sm_100
  on (PTX ISA, "cvt").
  """
  element = formats.by_name(format_name).element
  if element.bits == 8:
    return architecture.casts_to_fp8
  return element.name == "e2m1" and architecture.casts_to_fp4


def tile_of(
  x: Rows | Matrices,
  config: QuantizeConfig,
  covered: tuple[int, int] | None = None,
) -> Tile:
  """Returns the tiles of x; by default their grid covers the sizes of x."""
  covered_rows, covered_columns = covered or (x.rows, x.columns)
  return Tile(
    rows=x.rows,
    columns=x.columns,
    strides=x.x_strides,
    block_m=config.block_m,
    block_k=config.block_k,
    covered_rows=covered_rows,
    covered_columns=covered_columns,
  )


def num_tiles(config: QuantizeConfig, batch: int, rows: int, k: int) -> int:
  """Returns the number of tiles of an array."""
  return batch * -(-rows // config.block_m) * -(-k // config.block_k)


def measured(
  x: InputArray, options: QuantizeOptions, *, hardware_cast: bool = False
) -> QuantizeConstant:
  """Returns the constant of kernels that compute the largest magnitude.

  A prologue is computed as by the kernel that quantizes (`hardware_cast`).
  """
  return QuantizeConstant(
    format=formats.by_name(x.format),
    rounds_up=True,
    hardware_cast=hardware_cast,
    is_swizzled=False,
    options=dataclasses.replace(
      options,
      four_over_six=False,
      scale_up=False,
      is_stochastic=False,
      is_part=False,
    ),
    prologue=x.prologue,
  )


def _round_up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple


def _next_power_of_2(size: int) -> int:
  return 1 << max(0, size - 1).bit_length()
