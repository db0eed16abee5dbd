# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shapes and configs of the matmul kernels, as plain values.

`tiles_by_rule` picks a `MatmulConfig` for a `MatmulShape`, `constraints` checks
it, and `matmul_plans` creates launches from both. This module does not import
Triton.
"""

from __future__ import annotations

import dataclasses
from typing import Final
from typing import Literal

from jaxplugin.kernels import constants
from jaxplugin.kernels import formats

Path = Literal["upcast", "native", "small_m"]
PATHS: Final = ("upcast", "native", "small_m")

BLOCK_FORMATS: Final = tuple(formats.FORMATS)
PLAIN_BYTES: Final = {"bf16": 2, "f16": 2, "f32": 4}
FORMATS: Final = (*BLOCK_FORMATS, *PLAIN_BYTES)
# bf16 pieces that hold a value exactly: 8 significant bits each.
_PIECES: Final = {"f16": 2, "f32": 3}
ACTIVATIONS: Final = ("none", "relu", "gelu", "silu")

WORD_BYTES: Final = 4
VALUES_PER_WORD: Final = 8  # of FP4
INTERLEAVED_UNIT: Final = 16  # values that share two words

NUMPY_DTYPES: Final = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def cdiv(a: int, b: int) -> int:
  return -(-a // b)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperandKind:
  """One operand, as it lies in memory.

  Attributes:
    format: one of `formats.READABLE` or of `PLAIN_BYTES`.
    strides: (batch, row, k) in stored elements; those of FP4 are bytes, each
      of two values along k, or where it is interleaved words, of eight.
    scale_strides: (batch, row, column) of a linear scale; (batch, row tile) of
      a scale swizzled in tiles of 128 x 4; None of a plain operand.
    is_interleaved: whether the values are FP4 as `decode.interleaved_to_bf16`
      reads them.
    in_words: whether FP4 in its usual order is read as words, which then its
      strides count; `plan` has it so for the small_m kernel.
    is_converted: whether an instruction makes bf16 of its values, which are FP4
      in their usual order, two at a time, or f32 where they are multiplied so;
      `plan` has it so where there is one.
  """

  format: str
  strides: tuple[int, int, int]
  scale_strides: tuple[int, ...] | None = None
  is_interleaved: bool = False
  in_words: bool = False
  is_converted: bool = False

  @property
  def block_format(self) -> formats.Format | None:
    """The facts of its format; None of a plain operand."""
    return formats.READABLE.get(self.format)

  @property
  def element(self) -> formats.Element:
    """The type of its values, where it has a block format."""
    return formats.READABLE[self.format].element

  @property
  def scale(self) -> formats.Element:
    """The type of its scales, where it has a block format."""
    return formats.READABLE[self.format].scale

  @property
  def is_quantized(self) -> bool:
    return self.block_format is not None

  @property
  def folds_repair(self) -> bool:
    """Whether scales are multiplied by what repairs the bias of values.

    So with NVFP4, whose scales are E4M3 (`decode`), unless it is converted.
    """
    facts = self.block_format
    return (
      facts is not None
      and not self.is_converted
      and facts.element == formats.E2M1
      and facts.scale == formats.E4M3
    )

  @property
  def missing_exponent(self) -> int:
    """`decode.dequantize`'s result is divided by two to this power."""
    if not self.folds_repair:
      return 0
    # The largest exponent of bf16 is 127, that of E4M3 is 8.
    return 127 - self.element.bias + self.scale.max_exponent - 127

  @property
  def is_packed(self) -> bool:
    """Whether values are stored two a byte."""
    return self.block_format is not None and self.block_format.is_packed

  @property
  def name(self) -> str:
    """The format, and how its values lie, for names of kernels."""
    return self.format + ("_interleaved" if self.is_interleaved else "")

  @property
  def values_per_scale(self) -> int:
    return formats.READABLE[self.format].block_size

  @property
  def bits(self) -> int:
    """Stored bits of one value, its share of the scale not counted."""
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
    """bf16 numbers that hold one value exactly."""
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
) -> OperandKind:
  """A dense operand [batch, rows, k], or [batch, k, rows] if k is not minor.

  With one row that is not minor the stride of k is two: another dimension, as
  batch, is.
  """
  known = (*formats.READABLE, *PLAIN_BYTES)
  if format not in known:
    raise ValueError(f"operand: format must be one of {known}, got {format!r}")

  def dense(columns: int) -> tuple[int, int, int]:
    if k_is_minor:
      return rows * columns, columns, 1
    return rows * columns, 1, max(rows, 2)

  facts = formats.READABLE.get(format)
  if facts is None:
    return OperandKind(format=format, strides=dense(k))
  per_element = VALUES_PER_WORD if interleaved else facts.values_per_byte
  strides = dense(cdiv(k, per_element))
  columns = cdiv(k, facts.block_size)
  scale_strides: tuple[int, ...] = dense(columns)
  if swizzled:
    tile = formats.SCALE_TILE_ROWS * formats.SCALE_TILE_COLUMNS
    row_tile = cdiv(columns, formats.SCALE_TILE_COLUMNS) * tile
    scale_strides = (cdiv(rows, formats.SCALE_TILE_ROWS) * row_tile, row_tile)
  return OperandKind(
    format=format,
    strides=strides,
    scale_strides=scale_strides,
    is_interleaved=interleaved,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulShape:
  """A block-scaled matrix product.

  Attributes:
    batch, m, n, k: sizes.
    lhs, rhs: the operands, of rows m and n.
    out_dtype: "f32", "bf16" or "f16"; the result is dense [batch, m, n].
    has_global_scale, has_bias, activation, has_residual: the epilogue.
    has_global_power: whether the global scale is two factors, f32[2].
    has_two_global_scales: whether the kernel gets two global scales, and
      computes these factors from their product.
    layers: number of matrices in rhs. A number on the device selects one, and
      the first stride of rhs is the distance between two. The batch is then 1.
      None if rhs is [batch, n, k].
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

  def __str__(self) -> str:
    return (
      f"{self.lhs.format} x {self.rhs.format} -> {self.out_dtype},"
      f" batch={self.batch} m={self.m} n={self.n} k={self.k}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulConfig:
  """How a product is computed.

  Attributes:
    path: "upcast" to bf16; "small_m", the same for few rows of lhs; or
      "native", the block-scaled matrix instruction.
    block_m, block_n, block_k: a program's tile.
    split_k: programs that share one tile's k.
    group_m: rows of tiles in one group of the program order.
    num_warps, num_stages: Triton's.
    swap: whether rhs is the left operand of the matrix instruction; "small_m"
      has it so always.
    use_descriptors: whether values are copied by the tensor memory accelerator
      (`descriptors`), not loaded by threads; scales are loaded by threads. No
      default has it: no GPU has measured it yet. It needs an NVIDIA GPU from
      sm_90 on, and to be lowered, jax-triton 0.4 with jaxlib above 0.11.0.
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
  """How `decode` makes bf16 numbers of values, by what a GPU can do.

  Attributes:
    has_ptx: whether PTX may say it, which leaves two numbers in one register
      where LLVM would take them apart.
    packs: whether PTX decodes four FP8 codes together and multiplies numbers
      in pairs, as LLVM then does not.
    in_f32: whether values and scales are multiplied in f32, where a product in
      bf16 is one in f32 that instructions round.
  """

  has_ptx: bool = False
  packs: bool = False
  in_f32: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
  """The tile of one operand that a program reads in each step.

  Attributes:
    operand: storage of the operand.
    rows, k: sizes of the operand.
    block_rows, block_k: sizes of the tile.
    even_rows, even_k: whether the tiles divide the sizes.
    is_described: whether the kernel gets a TMA descriptor instead of a pointer
      to the values.
    decoding: how values are decoded.
    pair: distance of neighbouring rows, if the tile takes rows of the first and
      of the second half in turns; None if rows are consecutive.
    takes_scale_tiles: whether swizzled scales may be read in whole tiles of 128
      rows. Rows are then consecutive, and results of padding are not stored.
    scale_is_ahead: whether each step loads the scale of the next one.
    overlaps: whether a last step that would reach beyond k takes the last
      block_k of it instead.
    skips_overlap: whether what the step before had is 0 then; of one operand.
    shrinks_overlap: whether what the step before had is scaled by 2^-127 then;
      of the other, where a scale may make infinity of a value.
  """

  operand: OperandKind
  rows: int
  k: int
  block_rows: int
  block_k: int
  even_rows: bool
  even_k: bool
  is_described: bool
  decoding: Decoding = Decoding()
  pair: int | None = None
  takes_scale_tiles: bool = True
  scale_is_ahead: bool = False
  overlaps: bool = False
  skips_overlap: bool = False
  shrinks_overlap: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling(constants.KernelConstant):
  """A product and how it is computed: all that a kernel knows beforehand.

  Kernels take it as their one compile-time constant.

  Attributes:
    shape, config: the product, and how it is computed.
    waits: whether a step's products are done before the next step begins. A
      wgmma is asynchronous, and ptxas before CUDA 13.3 may reuse registers that
      it has not read yet, where decoded values are (release notes of CUDA 13.3;
      triton-lang/triton#11781). Which ptxas will assemble a kernel is not known
      when it is planned.
    scales_ahead: whether the scales of lhs and of rhs are loaded a step before
      they are used. Where a thread has fewer than four bytes of them there is
      no copy to shared memory, so that Triton does not begin to load them
      early.
    decoding: of both operands.
  """

  shape: MatmulShape
  config: MatmulConfig
  waits: bool = False
  scales_ahead: tuple[bool, bool] = (False, False)
  decoding: Decoding = Decoding()

  @property
  def is_across(self) -> bool:
    """Whether k runs across the blocks of rhs, which lie along n."""
    return False

  @property
  def is_split(self) -> bool:
    """Whether programs share a tile's k, whose sums a second launch adds."""
    return self.config.split_k > 1

  @property
  def tiles_m(self) -> int:
    return cdiv(self.shape.m, self.config.block_m)

  @property
  def tiles_n(self) -> int:
    return cdiv(self.shape.n, self.config.block_n)

  @property
  def programs(self) -> int:
    """Programs of the matmul launch."""
    planes = self.config.split_k * self.shape.batch
    return planes * self.tiles_m * self.tiles_n

  @property
  def steps(self) -> int:
    """Steps of k that a program takes, at most."""
    return cdiv(self.shape.k, self.config.block_k * self.config.split_k)

  @property
  def longer_splits(self) -> int:
    """How many of the splits of k take `steps`; the others one less.

    The first ones do. 0: all take `steps`.
    """
    return cdiv(self.shape.k, self.config.block_k) % self.config.split_k

  @property
  def products_of_step(self) -> int:
    """Multiplications of one program's step, by pieces of its operands."""
    blocks = self.config.block_m * self.config.block_n * self.config.block_k
    return blocks * self.shape.lhs.pieces * self.shape.rhs.pieces

  @property
  def repair(self) -> float:
    """What sums of dequantized numbers are still to be multiplied by."""
    sides = (self.shape.lhs, self.shape.rhs)
    return 2.0 ** sum(side.missing_exponent for side in sides)

  @property
  def lhs(self) -> Tile:
    return self._tile(
      self.shape.lhs,
      self.shape.m,
      self.config.block_m,
      is_ahead=self.scales_ahead[0],
      skips=True,
    )

  @property
  def rhs(self) -> Tile:
    return self._tile(
      self.shape.rhs,
      self.shape.n,
      self.config.block_n,
      is_ahead=self.scales_ahead[1],
      skips=False,
    )

  @property
  def overlaps(self) -> bool:
    """Whether the last step takes some of k a second time, instead of masks.

    Those k of lhs are 0 then, and rhs has no infinity there, neither as a value
    nor by a scale. Blocks and loads of 16 bytes begin at multiples of 32.
    """
    shape, config = self.shape, self.config
    return (
      not self.is_across
      and not config.use_descriptors
      and shape.k > config.block_k
      and shape.k % config.block_k > 0
      and shape.k % 32 == 0
      and shape.rhs.is_quantized
      and not shape.rhs.element.has_infinity
      and not (shape.lhs.is_swizzled or shape.rhs.is_swizzled)
    )

  def _tile(
    self,
    operand: OperandKind,
    rows: int,
    block_rows: int,
    *,
    is_ahead: bool,
    skips: bool,
  ) -> Tile:
    config = self.config
    return Tile(
      operand=operand,
      rows=rows,
      k=self.shape.k,
      block_rows=block_rows,
      block_k=config.block_k,
      even_rows=rows % block_rows == 0,
      # A split without a step would begin beyond k.
      even_k=self.overlaps
      or (
        self.shape.k % config.block_k == 0
        and self.shape.k >= config.block_k * config.split_k
      ),
      is_described=config.use_descriptors,
      decoding=self.decoding,
      scale_is_ahead=is_ahead and operand.is_quantized,
      overlaps=self.overlaps,
      skips_overlap=self.overlaps and skips,
      # Of NVFP4, without its global scale, the largest number is 448 * 6.
      shrinks_overlap=self.overlaps
      and not skips
      and (operand.scale == formats.E8M0 or operand.scale.has_infinity),
    )
