# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block-scaled number formats: the single source of truth about each of them.

A block-scaled array stores low-precision `values` and one `scale` for every
`block_size` consecutive values along one axis; the number meant is
`value * scale` (times one f32 `global_scale` for NVFP4). Everything that other
modules need to know about a format is a field or a property of `BlockFormat`.

Sources: OCP Microscaling Formats (MX) v1.0, sections 5 and 6; NVIDIA cuDNN
documentation, "Block scaling"; NVIDIA, "Pretraining LLMs with NVFP4" (2025).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from typing import Final

import ml_dtypes
import numpy as np

E8M0: Final = np.dtype(ml_dtypes.float8_e8m0fnu)
E4M3: Final = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2: Final = np.dtype(ml_dtypes.float8_e5m2)
E2M1: Final = np.dtype(ml_dtypes.float4_e2m1fn)
BF16: Final = np.dtype(ml_dtypes.bfloat16)
PACKED: Final = np.dtype(np.uint8)

# What `quantize` makes; others have codes that it does not know.
VALUES_DTYPES: Final = (E4M3, E5M2, E2M1)
SCALE_DTYPES: Final = (E8M0, E4M3, E5M2)

E8M0_BIAS: Final = 127
E8M0_NAN: Final = 255
BF16_SIGNIFICAND_BITS: Final = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class FloatEncoding:
  """Bit layout of a small floating-point type: sign, exponent, mantissa."""

  exponent_bits: int
  mantissa_bits: int
  bias: int
  max: float  # the largest finite value
  nan_code: int | None  # a positive quiet NaN; None where there is no NaN

  @property
  def sign_shift(self) -> int:
    return self.exponent_bits + self.mantissa_bits

  @property
  def min_exponent(self) -> int:
    """The exponent of the smallest normal number."""
    return 1 - self.bias

  @property
  def max_exponent(self) -> int:
    """The exponent of the largest number (`emax` in OCP MX v1.0)."""
    return int(np.frexp(self.max)[1]) - 1

  @property
  def significand_bits(self) -> int:
    return self.mantissa_bits + 1


@functools.cache
def encoding(dtype: np.dtype) -> FloatEncoding:
  """Returns the bit layout of `dtype`, a signed 4- to 8-bit float type."""
  info = ml_dtypes.finfo(dtype)
  has_nan = bool(np.isnan(np.array(np.nan, np.float32).astype(dtype)))
  nan = np.array(np.nan, np.float32).astype(dtype).view(np.uint8)
  return FloatEncoding(
    exponent_bits=info.nexp,
    mantissa_bits=info.nmant,
    bias=1 - int(info.minexp),
    max=float(info.max),
    nan_code=int(nan) & (2 ** (info.bits - 1) - 1) if has_nan else None,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFormat:
  """A block-scaled format.

  Attributes:
    name: how messages, configs and the command line call it.
    values_dtype: dtype of the quantized values (never the packed one):
      float8_e4m3fn, float8_e5m2 or float4_e2m1fn.
    scale_dtype: dtype of the per-block scale: float8_e8m0fnu, float8_e4m3fn or
      float8_e5m2.
    block_size: number of consecutive values that share one scale.
    has_global_scale: whether quantization also makes one f32 scale a tensor.

  Raises:
    TypeError: a dtype is another one, which no function here quantizes to.
    ValueError: block_size is no positive integer, or E8M0 scales are to have a
      global scale.
  """

  name: str
  values_dtype: np.dtype
  scale_dtype: np.dtype
  block_size: int
  has_global_scale: bool = False

  def __post_init__(self) -> None:
    for field, allowed in (
      ("values_dtype", VALUES_DTYPES),
      ("scale_dtype", SCALE_DTYPES),
    ):
      dtype = _dtype_or_none(getattr(self, field))
      if dtype not in allowed:
        raise TypeError(
          f"BlockFormat: {field} must be"
          f" {' or '.join(d.name for d in allowed)}, got"
          f" {getattr(self, field) if dtype is None else dtype}; jp.scaled_dot"
          " multiplies values and scales of other dtypes"
        )
      object.__setattr__(self, field, dtype)
    if not isinstance(self.block_size, int) or self.block_size < 1:
      raise ValueError(
        "BlockFormat: block_size must be a positive integer, got"
        f" {self.block_size!r}"
      )
    if self.has_global_scale and self.scale_is_power_of_two:
      raise ValueError(
        f"BlockFormat: {self.name} of {E8M0.name} scales, which reach as far as"
        " f32, must not have a global scale; leave has_global_scale out"
      )

  def __repr__(self) -> str:
    return self.name

  @property
  def values_encoding(self) -> FloatEncoding:
    return encoding(self.values_dtype)

  @property
  def scale_encoding(self) -> FloatEncoding:
    """Bit layout of a floating-point scale; E8M0 has none (no sign)."""
    return encoding(self.scale_dtype)

  @property
  def scale_is_power_of_two(self) -> bool:
    return self.scale_dtype == E8M0

  @property
  def is_fp4(self) -> bool:
    """Whether values may also be stored packed, two a byte."""
    return self.values_dtype == E2M1

  @property
  def storage_dtypes(self) -> tuple[np.dtype, ...]:
    """The dtypes that values may be stored in."""
    packed = (PACKED,) if self.is_fp4 else ()
    return (self.values_dtype, *packed)

  @property
  def value_bits(self) -> int:
    return 4 if self.is_fp4 else 8 * self.values_dtype.itemsize

  @property
  def exact_in_bf16(self) -> bool:
    """Whether value * scale fits bf16's significand, so bf16 loses nothing."""
    significand = _significand_bits(self.values_dtype)
    if not self.scale_is_power_of_two:
      significand += _significand_bits(self.scale_dtype)
    return significand <= BF16_SIGNIFICAND_BITS

  @property
  def is_standard(self) -> bool:
    """Whether it is one of `FORMATS`, which hardware kernels may serve."""
    return self in FORMATS


class UnquantizedFormat(BlockFormat):
  """Values and scales of any float dtypes, which only multiply.

  `quantize` makes none; the xla implementation multiplies them (`nn`).
  """

  def __post_init__(self) -> None:
    pass


def _dtype_or_none(dtype: Any) -> np.dtype | None:
  try:
    return None if dtype is None else np.dtype(dtype)
  except TypeError:
    return None


def _significand_bits(dtype: np.dtype) -> int:
  if dtype.kind in "iu":
    return 8 * dtype.itemsize
  return int(ml_dtypes.finfo(dtype).nmant) + 1


MXFP8: Final = BlockFormat(
  name="mxfp8", values_dtype=E4M3, scale_dtype=E8M0, block_size=32
)
MXFP8_E5M2: Final = BlockFormat(
  name="mxfp8_e5m2", values_dtype=E5M2, scale_dtype=E8M0, block_size=32
)
MXFP4: Final = BlockFormat(
  name="mxfp4", values_dtype=E2M1, scale_dtype=E8M0, block_size=32
)
NVFP4: Final = BlockFormat(
  name="nvfp4",
  values_dtype=E2M1,
  scale_dtype=E4M3,
  block_size=16,
  has_global_scale=True,
)
FORMATS: Final = (MXFP8, MXFP8_E5M2, MXFP4, NVFP4)


def infer(values_dtype: np.dtype, scale_dtype: np.dtype) -> BlockFormat | None:
  """Returns the format that a raw (values, scale) pair's dtypes name, if any.

  `uint8` values are FP4, packed two a byte.
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


def by_name(name: str) -> BlockFormat:
  """Returns the format called `name`; `ValueError` lists the known names."""
  for candidate in FORMATS:
    if candidate.name == name.lower():
      return candidate
  raise ValueError(
    f"unknown block format {name!r}; known formats: {known_names()}"
  )


def known_names() -> str:
  """The names of all formats, for error messages."""
  return ", ".join(candidate.name for candidate in FORMATS)


def resolve(
  who: str, format: BlockFormat | str, argument: str = "format"
) -> BlockFormat:
  """Returns a format that a caller gave, itself or by its name.

  Args:
    who: the function that was called, for the message.
    format: a `BlockFormat`, or a name that `by_name` knows.
    argument: what the function calls it.

  Raises:
    TypeError: it is neither; lists the known names.
    ValueError: the name is unknown; lists the known ones.
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
    f" ({known_names()}), got {format!r}"
  )


def pairs_table() -> str:
  """Lists the (values, scale, block size) triples, for error messages."""
  return "; ".join(
    f"{f.name} = {f.values_dtype.name} + {f.scale_dtype.name}"
    f" per {f.block_size}"
    for f in FORMATS
  )
