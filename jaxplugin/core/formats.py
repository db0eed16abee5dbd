# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block-scaled number formats: the only home of facts about each format.

A block-scaled array stores low-precision `values` and one `scale` for every
`block_size` consecutive values along one axis, or for a block of several rows.
A value represents `value * scale` (times one f32 `global_scale` for NVFP4).
Formats of integers may also have a zero point or a minimum for each block, or a
codebook that a 4-bit code indexes.
Everything that other modules need from a format is a field or a property of
`BlockFormat`.

Sources: OCP Microscaling Formats (MX) v1.0, sections 5 and 6; NVIDIA cuDNN
documentation, "Block scaling"; NVIDIA, "Pretraining LLMs with NVFP4" (2025);
DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np

from jaxplugin.core import error_context
from jaxplugin.kernels import formats

Element: TypeAlias = formats.Element

E8M0: Final = np.dtype(ml_dtypes.float8_e8m0fnu)
E4M3: Final = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2: Final = np.dtype(ml_dtypes.float8_e5m2)
E2M3: Final = np.dtype(ml_dtypes.float6_e2m3fn)
E3M2: Final = np.dtype(ml_dtypes.float6_e3m2fn)
E2M1: Final = np.dtype(ml_dtypes.float4_e2m1fn)
BF16: Final = np.dtype(ml_dtypes.bfloat16)
F16: Final = np.dtype(np.float16)
F32: Final = np.dtype(np.float32)
INT8: Final = np.dtype(np.int8)
INT4: Final = np.dtype(ml_dtypes.int4)
PACKED: Final = np.dtype(np.uint8)
FOUR_BITS: Final = (E2M1, INT4)  # dtypes of which a byte has two values
# The dtypes of unquantized operands and of results.
FLOAT_DTYPES: Final = (F32, BF16, F16)

# The dtypes that `quantize` can round to.
FLOAT_VALUES_DTYPES: Final = (E4M3, E5M2, E2M3, E3M2, E2M1)
VALUES_DTYPES: Final = (*FLOAT_VALUES_DTYPES, INT8, INT4)
BYTE_SCALE_DTYPES: Final = (E8M0, E4M3, E5M2)
SCALE_DTYPES: Final = (*BYTE_SCALE_DTYPES, F32, BF16, F16)
# Zero points are integers, and minima are floats.
OFFSET_DTYPES: Final = (PACKED, INT8, F32, BF16, F16)

E8M0_BIAS: Final = formats.E8M0.bias
E8M0_NAN: Final = formats.E8M0_NAN
BF16_SIGNIFICAND_BITS: Final = 8
# Layer sizes need not be multiples of blocks this long.
_LONG_BLOCK: Final = 128

_DTYPES: Final = {
  formats.E8M0: E8M0,
  formats.E4M3: E4M3,
  formats.E5M2: E5M2,
  formats.E2M3: E2M3,
  formats.E3M2: E3M2,
  formats.E2M1: E2M1,
  formats.INT8: INT8,
  formats.INT4: INT4,
  formats.F32: F32,
  formats.BF16: BF16,
  formats.F16: F16,
}
_ELEMENTS: Final = {dtype: element for element, dtype in _DTYPES.items()}


def encoding(dtype: np.dtype) -> Element:
  """Returns the bit layout of a dtype of values or scales."""
  return _ELEMENTS[dtype]


def as_dtype(x: Any) -> np.dtype | None:
  """Returns the dtype that `x` names, or None.

  An array has a dtype but does not name one, so the result is None.
  """
  is_array = hasattr(x, "dtype") and not isinstance(x, type)
  try:
    return None if x is None or is_array else np.dtype(x)
  except (TypeError, ValueError):
    return None


def require_float_dtype(
  who: str, name: str, dtype: Any, remedy: str = ""
) -> np.dtype:
  """Returns a dtype of `FLOAT_DTYPES`; raises TypeError for other values."""
  result = as_dtype(dtype)
  if result not in FLOAT_DTYPES:
    raise TypeError(
      f"{who}: {name} must be float32, bfloat16 or float16{remedy}, got"
      f" {result or error_context.shown(dtype)}"
    )
  return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFormat:
  """A block-scaled format.

  Attributes:
    name: its name in messages, configs and on the command line.
    values_dtype: dtype of the quantized values: float8_e4m3fn, float8_e5m2,
      float6_e2m3fn, float6_e3m2fn, float4_e2m1fn, int8 or int4. JAX stores
      6-bit floats as bytes.
    scale_dtype: dtype of the block scales: float8_e8m0fnu, float8_e4m3fn,
      float8_e5m2, float32, bfloat16 or float16.
    block_size: number of consecutive values that share one scale; 0 for all
      values along the axis.
    has_global_scale: whether quantization also computes an f32 scale of the
      whole array.
    block_rows: number of rows whose blocks share one scale: 1, or `block_size`
      for square blocks, which a matmul can contract along either of the last
      two dimensions.
    fraction_bits: integers count units of 2**-fraction_bits; 6 for MXINT8.
    offset_dtype: None, or the dtype of an offset for each block of integers
      with float32, bfloat16 or float16 scales. An offset of uint8 or int8 is a
      zero point, and values are (code - zero_point) * scale. An offset of
      float32, bfloat16 or float16 is a minimum, and values are
      code * scale + minimum.
    code_offset: codes are stored values plus this number. It is 0 for signed
      codes. Unsigned codes have 8 for int4 and 128 for int8, and need an
      offset_dtype.
    codebook: None, or 16 f32 numbers, each 0 or of a magnitude from 2**-126 to
      2**126. An int4 value is then codebook[stored + 8] * scale, and scales are
      as for `offset_dtype`.

  Raises:
    TypeError: If a dtype is not listed above.
    ValueError: If another field is invalid.

  Example:
    >>> import ml_dtypes
    >>> import jaxplugin as jp
    >>> jp.NVFP4.block_size, jp.NVFP4.has_global_scale
    (16, True)
    >>> jp.BlockFormat(
    ...   name="e4m3_in_64",
    ...   values_dtype=ml_dtypes.float8_e4m3fn,
    ...   scale_dtype=ml_dtypes.float8_e8m0fnu,
    ...   block_size=64,
    ... ).value_bits
    8
  """

  name: str
  values_dtype: np.dtype
  scale_dtype: np.dtype
  block_size: int
  has_global_scale: bool = False
  block_rows: int = 1
  fraction_bits: int = 0
  offset_dtype: np.dtype | None = None
  code_offset: int = 0
  codebook: tuple[float, ...] | None = None

  def __post_init__(self) -> None:
    if not (isinstance(self.name, str) and self.name):
      raise TypeError(
        "BlockFormat: name must be a string that is not empty, got"
        f" {error_context.shown(self.name)}"
      )
    for field, allowed in (
      ("values_dtype", VALUES_DTYPES),
      ("scale_dtype", SCALE_DTYPES),
    ):
      dtype = as_dtype(getattr(self, field))
      if dtype not in allowed:
        raise TypeError(
          f"BlockFormat: {field} must be"
          f" {' or '.join(d.name for d in allowed)}, got"
          f" {dtype or error_context.shown(getattr(self, field))};"
          " jp.scaled_dot multiplies values and scales of other dtypes"
        )
      object.__setattr__(self, field, dtype)
    for field in ("block_size", "block_rows", "fraction_bits", "code_offset"):
      value = error_context.require_integer(
        "BlockFormat", field, getattr(self, field)
      )
      object.__setattr__(self, field, value)
    size = self.block_size
    if size < 0:
      raise ValueError(
        "BlockFormat: block_size must be a positive integer, or 0 for one scale"
        f" for all values along the axis, got {size}"
      )
    if self.block_rows not in (1, size):
      raise ValueError(
        "BlockFormat: block_rows must be 1, or block_size for square blocks,"
        f" got {error_context.shown(self.block_rows)} for block_size {size}"
      )
    if self.block_rows != 1 and self.has_pairs:
      raise ValueError(
        "BlockFormat: block_rows must be 1 for values of 4 bits, which are"
        " packed along one dimension, got"
        f" {error_context.shown(self.block_rows)}"
      )
    if self.fraction_bits and not self.is_integer:
      raise ValueError(
        "BlockFormat: fraction_bits must be 0 unless values are integers, got"
        f" {error_context.shown(self.fraction_bits)} for"
        f" {self.values_dtype.name}"
      )
    has_global_scale = error_context.require_bool(
      "BlockFormat", "has_global_scale", self.has_global_scale
    )
    object.__setattr__(self, "has_global_scale", has_global_scale)
    if self.has_global_scale and self.scale_dtype not in (E4M3, E5M2):
      raise ValueError(
        "BlockFormat: has_global_scale must be False for"
        f" {self.scale_dtype.name} scales, which need no second scale to cover"
        f" the range of values, got True for {self.name}; leave"
        " has_global_scale out"
      )
    self._validate_offset()
    if self.codebook is not None:
      self._validate_codebook()

  def _validate_codebook(self) -> None:
    given: Any = self.codebook
    try:
      if not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError
      entries = tuple(map(float, given))
    except (TypeError, ValueError):
      raise TypeError(
        "BlockFormat: codebook must be None or a sequence of 16 floats, got"
        f" {error_context.shown(given)}"
      ) from None
    object.__setattr__(self, "codebook", entries)
    # XLA takes subnormal numbers for 0, and `quantize` adds two entries.
    are_f32 = all(
      x == 0 or (2.0**-126 <= abs(x) <= 2.0**126 and float(np.float32(x)) == x)
      for x in entries
    )
    if (
      len(entries) != 1 << formats.INT4.bits or not are_f32 or not any(entries)
    ):
      raise ValueError(
        "BlockFormat: codebook must have 16 finite numbers that f32 holds, each"
        " 0 or of a magnitude from 2**-126 to 2**126, not all of them 0, got"
        f" {list(entries)} for {self.name}. Round them with numpy.float32, or"
        " move a common factor to the scales"
      )
    if (
      self.values_dtype != INT4
      or self.fraction_bits
      or self.offset_dtype is not None
      or self.scale_dtype not in FLOAT_DTYPES
    ):
      raise ValueError(
        "BlockFormat: codebook must be None unless values are int4 without"
        " fraction_bits and offset_dtype, with float32, bfloat16 or float16"
        f" scales, got a codebook for {self.name}. Leave codebook out"
      )

  def _validate_offset(self) -> None:
    unsigned = 1 << (self.value_bits - 1)
    if self.offset_dtype is None:
      if self.code_offset:
        raise ValueError(
          "BlockFormat: code_offset must be 0 without offset_dtype, got"
          f" {error_context.shown(self.code_offset)} for {self.name}; pass"
          " offset_dtype"
        )
      return
    dtype = as_dtype(self.offset_dtype)
    if dtype not in OFFSET_DTYPES:
      raise TypeError(
        "BlockFormat: offset_dtype must be None or"
        f" {' or '.join(d.name for d in OFFSET_DTYPES)}, got"
        f" {dtype or error_context.shown(self.offset_dtype)}"
      )
    object.__setattr__(self, "offset_dtype", dtype)
    if (
      not self.is_integer
      or self.fraction_bits
      or self.is_square
      or self.scale_dtype not in FLOAT_DTYPES
    ):
      raise ValueError(
        "BlockFormat: offset_dtype must be None unless values are integers"
        " without fraction_bits, in blocks of one row, with float32, bfloat16"
        f" or float16 scales, got {dtype.name} for {self.name}"
      )
    if self.code_offset not in (0, unsigned):
      raise ValueError(
        "BlockFormat: code_offset must be 0 for signed codes or"
        f" {unsigned} for unsigned ones of {self.values_dtype.name}, got"
        f" {error_context.shown(self.code_offset)}"
      )
    if self.has_zero_points:
      limits = np.iinfo(dtype)
      lowest, highest = self.code_range
      if not limits.min <= lowest <= highest <= limits.max:
        raise ValueError(
          "BlockFormat: offset_dtype must hold all codes, which are zero"
          f" points, got {dtype.name} for codes from {lowest} to {highest}"
        )

  def __repr__(self) -> str:
    return self.name

  def along(self, size: int) -> BlockFormat:
    """Returns the format of rows of `size` values, whose block size is known.

    A format with block_size 0 becomes one with blocks of `size`. Others are
    returned unchanged.

    Raises:
      NotImplementedError: If the block size would be symbolic.
    """
    if self.block_size:
      return self
    if not isinstance(size, int):
      raise NotImplementedError(
        f"{self}: the size along the blocked axis must be static, got {size}."
        " Pass a format with blocks, or a static size"
      )
    return dataclasses.replace(self, block_size=max(size, 1))

  def of_rows(self) -> BlockFormat:
    """Returns the format after each row of square blocks got its own scale."""
    return dataclasses.replace(self, block_rows=1)

  def without_offset(self) -> BlockFormat:
    """Returns the format of values and scales, which kernels read.

    It keeps its name, so messages name the format that the caller passed.
    """
    return dataclasses.replace(self, offset_dtype=None, code_offset=0)

  @property
  def scales_codes(self) -> bool:
    """Whether a value is its code times its scale: no offset, no codebook."""
    return self.offset_dtype is None and self.codebook is None

  @property
  def has_zero_points(self) -> bool:
    """Whether each block has an integer that `scale` does not multiply."""
    return self.offset_dtype is not None and self.offset_dtype.kind in "iu"

  @property
  def code_range(self) -> tuple[int, int]:
    """The smallest and the largest code of integers."""
    half = 1 << (self.value_bits - 1)
    return self.code_offset - half, self.code_offset + half - 1

  @property
  def facts(self) -> formats.Format:
    """The record of the format that kernels read."""
    assert self.block_size and self.block_rows == 1
    assert self.scales_codes
    return formats.Format(
      name=self.name,
      element=self.values_encoding,
      scale=self.scale_encoding,
      block_size=self.block_size,
      is_two_level=self.has_global_scale,
    )

  @property
  def values_encoding(self) -> Element:
    """The facts about `values_dtype` that kernels read."""
    if self.fraction_bits:
      return formats.integer(self.value_bits, self.fraction_bits)
    return encoding(self.values_dtype)

  @property
  def scale_encoding(self) -> Element:
    """The facts about `scale_dtype` that kernels read."""
    return encoding(self.scale_dtype)

  @property
  def scale_is_power_of_two(self) -> bool:
    """Whether scales are E8M0."""
    return self.scale_dtype == E8M0

  @property
  def is_square(self) -> bool:
    """Whether blocks have several rows."""
    return self.block_rows > 1

  @property
  def may_be_short(self) -> bool:
    """Whether the last block of a row may have fewer values than the others."""
    is_long = not self.block_size or self.block_size >= _LONG_BLOCK
    return is_long or self.scale_dtype.itemsize > 1

  def fits(self, size: int) -> bool:
    """Returns whether rows of `size` values can be divided into blocks.

    A symbolic size must be a multiple of the block size.
    """
    if self.may_be_short and isinstance(size, int):
      return True
    return not self.block_size or size % self.block_size == 0

  @property
  def is_integer(self) -> bool:
    """Whether values are integers."""
    return self.values_dtype in (INT8, INT4)

  @property
  def is_fp4(self) -> bool:
    """Whether values are E2M1."""
    return self.values_dtype == E2M1

  @property
  def has_pairs(self) -> bool:
    """Whether values have 4 bits and may be stored packed, two per byte."""
    return self.values_dtype in FOUR_BITS

  @property
  def is_fp6(self) -> bool:
    """Whether values are bytes with a code in the low six bits."""
    return self.values_dtype in (E2M3, E3M2)

  @property
  def array_dtype(self) -> np.dtype:
    """Dtype of a JAX array with one element per value."""
    return PACKED if self.is_fp6 else self.values_dtype

  @property
  def storage_dtypes(self) -> tuple[np.dtype, ...]:
    """The dtypes in which values may be stored."""
    packed = (PACKED,) if self.has_pairs else ()
    return (self.array_dtype, *packed)

  @property
  def value_bits(self) -> int:
    """Bits of one code."""
    element = _ELEMENTS.get(self.values_dtype)
    return 8 * self.values_dtype.itemsize if element is None else element.bits

  @property
  def exact_in_bf16(self) -> bool:
    """Whether bf16 holds every dequantized value."""
    if not self.scales_codes:
      return False
    significand = _significand_bits(self.values_dtype)
    if not self.scale_is_power_of_two:
      significand += _significand_bits(self.scale_dtype)
    return significand <= BF16_SIGNIFICAND_BITS

  @property
  def codes_are_exact_in_bf16(self) -> bool:
    """Whether bf16 holds every value before it is multiplied by its scale."""
    significand = _significand_bits(self.values_dtype)
    return self.scales_codes and significand <= BF16_SIGNIFICAND_BITS

  @property
  def is_standard(self) -> bool:
    """Whether it is one of `FORMATS`, which kernels may support."""
    return self in FORMATS

  @property
  def is_named(self) -> bool:
    """Whether the format is one of `NAMED`, which `by_name` finds."""
    return self in NAMED

  @property
  def is_known(self) -> bool:
    """Whether the format is one of `KNOWN`, which kernels can quantize."""
    return self in KNOWN


class UnquantizedFormat(BlockFormat):
  """Values and scales of any float dtypes, which `quantize` cannot make.

  The drop-ins for `jax.nn` use it. Only the xla backend supports it.
  """

  def __post_init__(self) -> None:
    pass


def _significand_bits(dtype: np.dtype) -> int:
  if dtype in _ELEMENTS:
    return _ELEMENTS[dtype].significand_bits
  if dtype.kind in "iu":
    return 8 * dtype.itemsize
  return int(ml_dtypes.finfo(dtype).nmant) + 1


def _named(
  name: str, values: np.dtype, scale: np.dtype, block_size: int, **others: Any
) -> BlockFormat:
  return BlockFormat(
    name=name,
    values_dtype=values,
    scale_dtype=scale,
    block_size=block_size,
    **others,
  )


def _of(facts: formats.Format) -> BlockFormat:
  return _named(
    facts.name,
    _DTYPES[facts.element],
    _DTYPES[facts.scale],
    facts.block_size,
    has_global_scale=facts.is_two_level,
  )


MXFP8: Final = _of(formats.MXFP8)
MXFP8_E5M2: Final = _of(formats.MXFP8_E5M2)
MXFP6_E2M3: Final = _of(formats.MXFP6_E2M3)
MXFP6_E3M2: Final = _of(formats.MXFP6_E3M2)
MXFP4: Final = _of(formats.MXFP4)
NVFP4: Final = _of(formats.NVFP4)
# E4M3 as in the checkpoints of DeepSeek-V3 and Qwen: square blocks of weights,
# and blocks along rows of the activations.
FP8_128X128: Final = _named("fp8_128x128", E4M3, F32, 128, block_rows=128)
FP8_1X128: Final = _named("fp8_1x128", E4M3, F32, 128)
# The same with power-of-two scales, as in DeepSeek-V3.1.
FP8_128X128_E8M0: Final = _named(
  "fp8_128x128_e8m0", E4M3, E8M0, 128, block_rows=128
)
FP8_1X128_E8M0: Final = _named("fp8_1x128_e8m0", E4M3, E8M0, 128)
# One scale for a row, as in compressed-tensors' "channel" and "token".
FP8_ROW: Final = _named("fp8_row", E4M3, F32, 0)
INT8_ROW: Final = _named("int8_row", INT8, F32, 0)
# The values and scales of GGUF's Q8_0 and Q4_0.
INT8_32: Final = _named("int8_32", INT8, F16, 32)
INT4_32: Final = _named("int4_32", INT4, F16, 32)
# Symmetric GPTQ and compressed-tensors "pack-quantized" in groups of 128.
INT4_128: Final = _named("int4_128", INT4, F16, 128)
INT4_128_BF16: Final = _named("int4_128_bf16", INT4, BF16, 128)
# Asymmetric AWQ, GPTQ and compressed-tensors "pack-quantized" in groups of 128.
UINT4_128: Final = _named(
  "uint4_128", INT4, F16, 128, offset_dtype=PACKED, code_offset=8
)
UINT4_128_BF16: Final = _named(
  "uint4_128_bf16", INT4, BF16, 128, offset_dtype=PACKED, code_offset=8
)
# GGUF's Q4_1.
UINT4_32_MIN: Final = _named(
  "uint4_32_min", INT4, F16, 32, offset_dtype=F16, code_offset=8
)
# Dettmers et al., "QLoRA" (arXiv 2305.14314), appendix E; the entries and the
# block size are those of bitsandbytes (`get_4bit_type`).
NF4: Final = _named(
  "nf4",
  INT4,
  F32,
  64,
  codebook=(
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
  ),
)
# OCP MX v1.0, section 5.3.4.
MXINT8: Final = _named("mxint8", INT8, E8M0, 32, fraction_bits=6)
# Formats that all kernels support.
FORMATS: Final = (MXFP8, MXFP8_E5M2, MXFP4, NVFP4)
# Formats that the quantization kernels support.
KNOWN: Final = (*FORMATS, MXFP6_E2M3, MXFP6_E3M2)
# Formats that have a name.
NAMED: Final = (
  *KNOWN,
  MXINT8,
  FP8_128X128,
  FP8_1X128,
  FP8_128X128_E8M0,
  FP8_1X128_E8M0,
  FP8_ROW,
  INT8_ROW,
  INT8_32,
  INT4_32,
  INT4_128,
  INT4_128_BF16,
  UINT4_128,
  UINT4_128_BF16,
  UINT4_32_MIN,
  NF4,
)


def infer(values_dtype: np.dtype, scale_dtype: np.dtype) -> BlockFormat | None:
  """Returns the format of raw values and scales by their dtypes, or None.

  `uint8` values are FP4, two values in a byte. Other formats that are stored as
  bytes need a `ScaledArray`, which has its format.
  """
  if values_dtype == PACKED:
    values_dtype = E2M1
  for candidate in FORMATS:
    if (candidate.values_dtype, candidate.scale_dtype) == (
      values_dtype,
      scale_dtype,
    ):
      return candidate
  return None


def named(format: BlockFormat) -> BlockFormat:
  """Returns the named format with a format's fields, or else the format."""
  for candidate in NAMED:
    if dataclasses.replace(candidate, name=format.name) == format:
      return candidate
  return format


def by_name(name: str) -> BlockFormat:
  """Returns the format called `name`; `ValueError` lists the known names."""
  for candidate in NAMED:
    if candidate.name == name.lower():
      return candidate
  raise ValueError(
    f"unknown block format {name!r}; known formats: {known_names()}"
  )


def known_names() -> str:
  """Returns the names of all formats, for error messages."""
  return ", ".join(candidate.name for candidate in NAMED)


def resolve(
  who: str, format: BlockFormat | str, argument: str = "format"
) -> BlockFormat:
  """Returns a format that a caller passed as a format or as a name.

  Args:
    format: a `BlockFormat`, or a name that `by_name` accepts.

  Raises:
    TypeError: If it is neither. The message lists the known names.
    ValueError: If the name is unknown. The message lists the known names.
  """
  if isinstance(format, BlockFormat):
    return format
  if isinstance(format, str):
    try:
      return by_name(format)
    except ValueError as error:
      raise ValueError(f"{who}: {argument}: {error}") from None
  raise TypeError(
    f"{who}: {argument} must be a BlockFormat (jp.MXFP8, ...) or its name"
    f" ({known_names()}), got {error_context.shown(format)}"
  )


def pairs_table() -> str:
  """Returns the dtypes and block sizes of `FORMATS`, for error messages."""
  return "; ".join(
    f"{f.name} = {f.values_dtype.name} + {f.scale_dtype.name}"
    f" per {f.block_size}"
    for f in FORMATS
  )
