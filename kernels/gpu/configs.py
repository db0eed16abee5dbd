# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shapes and configs of the matmul kernels, as plain values.

`tiles_by_rule` picks a `MatmulConfig` for a `MatmulShape`, `constraints` checks
it, and `matmul_plans` creates launches from both. This module does not import
Triton.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

from jaxplugin.kernels import constants, formats

Path = Literal["upcast", "native", "small_m", "fp8", "int8"]
PATHS: Final = ("upcast", "native", "small_m", "fp8", "int8")

BLOCK_FORMATS: Final = tuple(formats.FORMATS)
PLAIN_BYTES: Final = {"bf16": 2, "f16": 2, "f32": 4}
FORMATS: Final = (*BLOCK_FORMATS, *PLAIN_BYTES)
# Number of bf16 pieces, with 8 significant bits each, that sum to a value.
_PIECES: Final = {"f16": 2, "f32": 3}
ACTIVATIONS: Final = ("none", "relu", "gelu", "silu")

# Kernels that read m from an array are planned for these m. The last one is for
# all larger m.
PLANNED_M: Final = (16, 64, 256, 1024, 4096)

WORD_BYTES: Final = 4
VALUES_PER_WORD: Final = 8  # FP4 values
INTERLEAVED_UNIT: Final = 16  # values that share two words

NUMPY_DTYPES: Final = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def cdiv(a: int, b: int) -> int:
  return -(-a // b)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperandKind:
  """The format and memory layout of one operand.

  Attributes:
    format: name for `formats.readable_by_name`, or in `PLAIN_BYTES`.
    strides: (batch, row, k) in stored elements. An element of FP4 or INT4 is a
      byte of two values along k, or a word of eight if it is interleaved.
    scale_strides: (batch, row, column) of a linear scale; (batch, row tile) of
      a scale swizzled in tiles of 128 x 4; None for a plain operand.
    is_interleaved: whether the values are FP4 in the order that
      `decode.interleaved_to_bf16` reads.
    in_words: whether FP4 or INT4 that is not interleaved is read as words,
      which the strides then count. `plan` sets it for the small_m kernel.
    is_converted: whether an instruction converts FP4 that is not interleaved,
      two values at a time, to bf16 or, if products are in f32, to f32. `plan`
      sets it if the GPU has such an instruction.
    rows_per_scale: number of consecutive rows that share a row of scales: that
      of square blocks, whose scales multiply sums; otherwise 1.
  """

  format: str
  strides: tuple[int, int, int]
  scale_strides: tuple[int, ...] | None = None
  is_interleaved: bool = False
  in_words: bool = False
  is_converted: bool = False
  rows_per_scale: int = 1

  @property
  def block_format(self) -> formats.Format | None:
    """The record of the block format; None for a plain operand."""
    return formats.readable_by_name(self.format)

  @property
  def _facts(self) -> formats.Format:
    assert self.block_format is not None, self.format
    return self.block_format

  @property
  def element(self) -> formats.Element:
    """The element type of the values; requires a block format."""
    return self._facts.element

  @property
  def scale(self) -> formats.Element:
    """The element type of the scales; requires a block format."""
    return self._facts.scale

  @property
  def is_quantized(self) -> bool:
    return self.block_format is not None

  @property
  def scales_sums(self) -> bool:
    """Whether scales multiply sums of products; see `formats.Format`."""
    return self.is_quantized and self._facts.scales_sums

  @property
  def scales_values(self) -> bool:
    """Whether scales multiply values before the matrix instruction."""
    return self.is_quantized and not self._facts.scales_sums

  @property
  def folds_repair(self) -> bool:
    """Whether the exponent bias of values is corrected in the scales.

    True for E2M1 values with E4M3 scales (NVFP4), unless an instruction
    converts the values (`decode`).
    """
    facts = self.block_format
    return (
      facts is not None
      and not facts.scales_sums
      and not self.is_converted
      and facts.element == formats.E2M1
      and facts.scale == formats.E4M3
    )

  @property
  def missing_exponent(self) -> int:
    """`decode.dequantize` returns values divided by 2 to this power."""
    if not self.folds_repair:
      return 0
    # The largest exponent of bf16 is 127, that of E4M3 is 8.
    return 127 - self.element.bias + self.scale.max_exponent - 127

  @property
  def is_packed(self) -> bool:
    """Whether a byte stores two values."""
    return self.block_format is not None and self.block_format.is_packed

  @property
  def name(self) -> str:
    """The format, blocks and order of values, for names of kernels."""
    square = "_square" if self.rows_per_scale > 1 else ""
    return self.format + square + ("_interleaved" * self.is_interleaved)

  @property
  def values_per_scale(self) -> int:
    return self._facts.block_size

  @property
  def bits(self) -> int:
    """Stored bits of one value, without the scale."""
    if self.block_format is None:
      return 8 * PLAIN_BYTES[self.format]
    return self.block_format.element.stored_bits

  @property
  def values_per_element(self) -> int:
    """Values along k that one stored element holds."""
    if self.is_interleaved or self.in_words:
      return VALUES_PER_WORD
    return 1 if self.block_format is None else self.block_format.values_per_byte

  @property
  def element_bytes(self) -> int:
    return self.bits * self.values_per_element // 8

  @property
  def pieces(self) -> int:
    """Number of bf16 pieces that sum to one value exactly."""
    return _PIECES.get(self.format, 1)

  @property
  def k_is_minor(self) -> bool:
    return self.strides[2] == 1

  @property
  def is_swizzled(self) -> bool:
    return self.scale_strides is not None and len(self.scale_strides) == 2


def operand(
  format: str,
  rows: int,
  k: int,
  *,
  k_is_minor: bool = True,
  swizzled: bool = False,
  interleaved: bool = False,
  rows_per_scale: int = 1,
) -> OperandKind:
  """Returns a dense operand [batch, rows, k], or [batch, k, rows].

  If k is not minor and there is one row, the stride of k is two, so that
  `k_is_minor` is False.
  """
  facts = formats.readable_by_name(format)
  if facts is None and format not in PLAIN_BYTES:
    raise ValueError(
      f"operand: format must be one of {FORMATS} or"
      f" <element>_<scale>_<block size>, got {format!r}"
    )

  def dense(rows: int, columns: int) -> tuple[int, int, int]:
    if k_is_minor:
      return rows * columns, columns, 1
    return rows * columns, 1, max(rows, 2)

  if facts is None:
    return OperandKind(format=format, strides=dense(rows, k))
  per_element = VALUES_PER_WORD if interleaved else facts.values_per_byte
  strides = dense(rows, cdiv(k, per_element))
  columns = cdiv(k, facts.block_size)
  scale_strides: tuple[int, ...] = dense(cdiv(rows, rows_per_scale), columns)
  if swizzled:
    tile = formats.SCALE_TILE_ROWS * formats.SCALE_TILE_COLUMNS
    row_tile = cdiv(columns, formats.SCALE_TILE_COLUMNS) * tile
    scale_strides = (cdiv(rows, formats.SCALE_TILE_ROWS) * row_tile, row_tile)
  return OperandKind(
    format=format,
    strides=strides,
    scale_strides=scale_strides,
    is_interleaved=interleaved,
    rows_per_scale=rows_per_scale,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulShape:
  """A block-scaled matmul.

  Attributes:
    batch, m, n, k: sizes.
    lhs, rhs: the operands, with m and n rows.
    out_dtype: "f32", "bf16" or "f16"; the result is dense [batch, m, n].
    has_global_scale, has_bias, activation, has_residual: the epilogue.
    has_global_power: whether the global scale is two factors, f32[2].
    has_two_global_scales: whether the kernel is passed two global scales and
      computes these two factors.
    layers: number of matrices in rhs if an index on the device selects one. The
      batch is then 1, and the first stride of rhs is the distance between two
      matrices. None if rhs is [batch, n, k].
    may_round_sums: whether sums over a block may have fewer bits than f32.
    reads_m: whether kernels read m from an array. They compute up to `m` rows,
      or any number if `is_for_any_m`. The batch is then 1.
  """

  batch: int
  m: int
  n: int
  k: int
  lhs: OperandKind
  rhs: OperandKind
  out_dtype: str = "f32"
  has_global_scale: bool = False
  has_bias: bool = False
  activation: str = "none"
  has_residual: bool = False
  has_global_power: bool = False
  has_two_global_scales: bool = False
  layers: int | None = None
  may_round_sums: bool = False
  reads_m: bool = False

  @property
  def is_for_any_m(self) -> bool:
    """Whether a shape is planned for the last one of `PLANNED_M`."""
    return self.reads_m and self.m >= PLANNED_M[-1]

  def __str__(self) -> str:
    return (
      f"{self.lhs.format} x {self.rhs.format} -> {self.out_dtype},"
      f" batch={self.batch} m={self.m} n={self.n} k={self.k}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulConfig:
  """How a matmul is computed.

  Attributes:
    path: "upcast" decodes to bf16; "small_m" does this for few rows of lhs;
      "native" uses the block-scaled matrix instruction; "fp8" uses the FP8
      matrix instruction, whose sums have fewer bits than f32; "int8" uses the
      INT8 matrix instruction, whose sums are exact.
    block_m, block_n, block_k: sizes of a program's tile.
    split_k: number of programs that share the k of a tile.
    group_m: number of rows of tiles in one group of the program order.
    num_warps, num_stages: Triton's options.
    swap: whether rhs is the left operand of the matrix instruction. It always
      is with "small_m".
    use_descriptors: whether the tensor memory accelerator copies values
      (`descriptors`). Threads load scales in any case. The rules do not set it,
      because it has not been measured. It requires an NVIDIA GPU from sm_90 on,
      and its lowering requires jax-triton 0.4 with jaxlib above 0.11.0.
  """

  path: Path
  block_m: int
  block_n: int
  block_k: int
  split_k: int = 1
  group_m: int = 8
  num_warps: int = 4
  num_stages: int = 3
  swap: bool = False
  use_descriptors: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
  """How `decode` converts values to bf16 on a GPU.

  Attributes:
    has_ptx: whether `decode` may use inline PTX, which keeps two bf16 numbers
      in one register. LLVM would separate them.
    packs: whether inline PTX decodes four FP8 codes together and multiplies
      pairs of bf16 numbers, because LLVM does not.
    in_f32: whether values and scales are multiplied in f32, because the GPU has
      no bf16 multiplication.
    reads_words: whether a register holds four adjacent one-byte values. With
      the layout of a matrix instruction it holds two.
  """

  has_ptx: bool = False
  packs: bool = False
  in_f32: bool = False
  reads_words: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperandTile:
  """The tile of one operand that a program reads in each step.

  Attributes:
    operand: storage of the operand.
    rows, k: sizes of the operand.
    block_rows, block_k: sizes of the tile.
    even_rows, even_k: whether the tiles divide the sizes.
    reads_rows: whether the kernel reads the number of rows from an array.
    is_described: whether the kernel gets a TMA descriptor instead of a pointer
      to the values.
    decoding: how values are decoded.
    pair: distance of adjacent rows in the operand if the tile alternates rows
      of its first and its second half; None if rows are consecutive.
    takes_scale_tiles: whether swizzled scales may be read in whole tiles of 128
      rows. Rows are then consecutive, and results of padding are not stored.
    scale_is_ahead: whether each step loads the scale of the next one.
    overlaps: whether a last step that would exceed k reads the last block_k
      values of k instead, some of which the previous step has read.
    skips_overlap: whether this operand's values of the overlap become 0. Set
      for lhs.
    shrinks_overlap: whether this operand's scales of the overlap become 2^-127.
      Set for rhs if a scale could make a value infinite.
  """

  operand: OperandKind
  rows: int
  k: int
  block_rows: int
  block_k: int
  even_rows: bool
  even_k: bool
  is_described: bool
  reads_rows: bool = False
  decoding: Decoding = Decoding()
  pair: int | None = None
  takes_scale_tiles: bool = True
  scale_is_ahead: bool = False
  overlaps: bool = False
  skips_overlap: bool = False
  shrinks_overlap: bool = False

  @property
  def scales_steps(self) -> bool:
    """Whether scales multiply the sums of each step.

    A step then has values of one block.
    """
    return self.operand.scales_sums and self.operand.values_per_scale < self.k

  @property
  def scales_total(self) -> bool:
    """Whether a row has one scale, which multiplies the sum over k."""
    return self.operand.scales_sums and not self.scales_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling(constants.KernelConstant):
  """The single compile-time constant of a matmul kernel.

  Attributes:
    shape, config: the matmul and how it is computed.
    waits: whether a step waits for its matrix instructions. A wgmma is
      asynchronous, and ptxas before CUDA 13.3 may reuse registers of decoded
      values before the wgmma reads them (release notes of CUDA 13.3;
      triton-lang/triton#11781). The ptxas version is unknown when a kernel is
      planned.
    scales_ahead: whether the scales of lhs and of rhs are loaded one step
      early. Triton does so by itself with copies to shared memory, but it makes
      no such copy if a thread has fewer than four bytes.
    decoding: how the values of both operands are decoded.
  """

  shape: MatmulShape
  config: MatmulConfig
  waits: bool = False
  scales_ahead: tuple[bool, bool] = (False, False)
  decoding: Decoding = Decoding()

  @property
  def is_ragged(self) -> bool:
    """Whether rows are divided into groups (`ragged.plans.RaggedTiling`)."""
    return False

  @property
  def is_across(self) -> bool:
    """Whether k runs across the blocks of rhs, which lie along n."""
    return False

  @property
  def is_split(self) -> bool:
    """Whether programs share a tile's k. A second launch adds their sums."""
    return self.config.split_k > 1

  @property
  def tiles_m(self) -> int:
    return cdiv(self.shape.m, self.config.block_m)

  @property
  def tiles_n(self) -> int:
    return cdiv(self.shape.n, self.config.block_n)

  @property
  def programs(self) -> int:
    """Number of programs of the matmul launch."""
    planes = self.config.split_k * self.shape.batch
    return planes * self.tiles_m * self.tiles_n

  @property
  def steps(self) -> int:
    """Maximum number of k steps of a program."""
    return cdiv(self.shape.k, self.config.block_k * self.config.split_k)

  @property
  def longer_splits(self) -> int:
    """Number of splits of k with `steps` steps; the others have one less.

    The longer splits come first. Returns 0 if all have `steps` steps.
    """
    return cdiv(self.shape.k, self.config.block_k) % self.config.split_k

  @property
  def products_of_step(self) -> int:
    """Number of multiplications in one step of a program, for all pieces."""
    blocks = self.config.block_m * self.config.block_n * self.config.block_k
    return blocks * self.shape.lhs.pieces * self.shape.rhs.pieces

  @property
  def sums_steps(self) -> bool:
    """Whether each step has its own sums, which are added to the accumulator.

    Scales may multiply them. Other steps with several bf16 pieces need it for
    precision: a matrix instruction truncates the accumulator (numerics.md).
    """
    if self.config.path == "fp8":
      return True
    pieces = max(self.shape.lhs.pieces, self.shape.rhs.pieces)
    return pieces > 1 or self.scales_steps

  @property
  def scales_steps(self) -> bool:
    """Whether scales multiply the sums of each step."""
    return self.lhs.scales_steps or self.rhs.scales_steps

  @property
  def loads_factors_ahead(self) -> bool:
    """Whether each step loads the scales that multiply the next step's sums.

    Kernels that decode lack the registers. By the model in
    `jaxplugin/lab/inspection/simulation.py`, INT8 blocks of 128 take 29 % less
    time on sm_90, FP8 blocks of 128 4 %, and with square blocks 11 %.
    """
    return self.scales_steps and self.config.path in ("fp8", "int8")

  @property
  def sums_integers(self) -> bool:
    """Whether the accumulator is int32, because scales multiply its total."""
    return self.config.path == "int8" and not self.sums_steps

  @property
  def repair(self) -> float:
    """The factor 2^missing_exponent of both operands, applied to the sums."""
    sides = (self.shape.lhs, self.shape.rhs)
    return 2.0 ** sum(side.missing_exponent for side in sides)

  @property
  def lhs(self) -> OperandTile:
    return self._tile(0)

  @property
  def rhs(self) -> OperandTile:
    return self._tile(1)

  @property
  def overlaps(self) -> bool:
    """Whether the last step reads some k again instead of masking.

    The values of lhs for these k become 0, and rhs must not be infinite there,
    also after scaling. Blocks and 16-byte loads begin at multiples of 32. A
    step may not have parts of two blocks whose scales multiply sums.
    """
    shape, config = self.shape, self.config
    return (
      not self.is_across
      and not (shape.lhs.scales_sums or shape.rhs.scales_sums)
      and not config.use_descriptors
      and shape.k > config.block_k
      and shape.k % config.block_k > 0
      and shape.k % 32 == 0
      and shape.rhs.is_quantized
      and not shape.rhs.element.has_infinity
      and not (shape.lhs.is_swizzled or shape.rhs.is_swizzled)
    )

  def _tile(self, side: int) -> OperandTile:
    """Returns the tile of lhs, side 0, or of rhs, side 1."""
    shape, config = self.shape, self.config
    operand = (shape.lhs, shape.rhs)[side]
    rows = (shape.m, shape.n)[side]
    block_rows = (config.block_m, config.block_n)[side]
    reads_rows = side == 0 and shape.reads_m
    return OperandTile(
      operand=operand,
      rows=rows,
      k=shape.k,
      block_rows=block_rows,
      block_k=config.block_k,
      even_rows=rows % block_rows == 0 and not reads_rows,
      reads_rows=reads_rows,
      # If there are fewer steps than splits, a split begins beyond k.
      even_k=self.overlaps
      or (
        shape.k % config.block_k == 0
        and shape.k >= config.block_k * config.split_k
      ),
      is_described=config.use_descriptors,
      decoding=self.decoding,
      scale_is_ahead=self.scales_ahead[side] and operand.scales_values,
      overlaps=self.overlaps,
      skips_overlap=self.overlaps and side == 0,
      # NVFP4 values times block scales are at most 6 * 448, so never infinite.
      shrinks_overlap=self.overlaps
      and side == 1
      and (operand.scale == formats.E8M0 or operand.scale.has_infinity),
    )
