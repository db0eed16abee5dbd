# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Number formats as plain data for kernels, with one home for each fact.

A block-scaled array stores small floats, its elements, and one scale for every
`block_size` of them. Records are frozen and hashable, so kernels take them as
compile-time constants. `jaxplugin.core.formats` adds dtypes.

Sources: OCP Microscaling Formats (MX) v1.0, section 5.3; OCP 8-bit Floating
Point Specification (OFP8); NVIDIA cuDNN documentation, "Block scaling".
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from typing import Any, Final


@dataclasses.dataclass(frozen=True, kw_only=True)
class Element:
  """A small float or integer: a sign if it has one, exponent and mantissa.

  An integer is a float without an exponent: its numbers are multiples of
  `min_positive`, as the subnormal numbers of a float are.

  Attributes:
    name: name from the bits of exponent and mantissa, such as "e4m3".
    exponent_bits, mantissa_bits: sizes of these fields.
    bias: bias of the exponent.
    max: largest finite value.
    nan_code: code of a positive quiet NaN; None if the element has no NaN.
    has_infinity: whether the element has an infinity.
    values_per_byte: number of codes in one byte, the first in the lowest bits.
      Unused bits of the byte are 0.
    is_signed: whether it has a sign bit, above the exponent.
    is_twos_complement: whether negative codes are two's complement, as those of
      signed integers, instead of a magnitude and a sign bit.
  """

  name: str
  exponent_bits: int
  mantissa_bits: int
  bias: int
  max: float
  nan_code: int | None = None
  has_infinity: bool = False
  values_per_byte: int = 1
  is_signed: bool = True
  is_twos_complement: bool = False

  @property
  def bits(self) -> int:
    """Bits of one code."""
    return int(self.is_signed) + self.sign_shift

  @property
  def stored_bits(self) -> int:
    """Bits of memory for each code."""
    return 8 // self.values_per_byte

  @property
  def sign_shift(self) -> int:
    return self.exponent_bits + self.mantissa_bits

  @property
  def min_exponent(self) -> int:
    """The exponent of the smallest normal number."""
    return 1 - self.bias

  @property
  def min_positive(self) -> float:
    """The smallest positive number; subnormal except in E8M0."""
    return 2.0 ** (self.min_exponent - self.mantissa_bits)

  @property
  def max_exponent(self) -> int:
    """The exponent of the largest number (`emax` in OCP MX v1.0)."""
    return math.frexp(self.max)[1] - 1

  @property
  def significand_bits(self) -> int:
    return self.mantissa_bits + 1

  @property
  def max_f32_bits(self) -> int:
    """The bits of `max` in f32, as an integer."""
    return struct.unpack("<i", struct.pack("<f", self.max))[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
  """A block-scaled format.

  Attributes:
    name: name in messages, configs and on the command line.
    element: element type of the values.
    scale: element type of the scales: `E8M0`, or a float whose sign is unused.
    block_size: number of consecutive values that share one scale.
    is_two_level: whether an f32 scale for each tensor multiplies block scales.
  """

  name: str
  element: Element
  scale: Element
  block_size: int
  is_two_level: bool = False

  @property
  def values_per_byte(self) -> int:
    return self.element.values_per_byte

  @property
  def scales_sums(self) -> bool:
    """Whether GPU matmul kernels multiply sums over a block by its scales.

    Otherwise they multiply values by scales, which is exact in bf16.
    """
    return not (self.is_exact_in_bf16 and self.block_size in _SHORT_BLOCKS)

  @property
  def is_exact_in_bf16(self) -> bool:
    """Whether a value times its scale has at most bf16's 8 significant bits."""
    bits = self.element.significand_bits
    if self.scale != E8M0:
      bits += self.scale.significand_bits
    return bits <= BF16.significand_bits

  @property
  def is_packed(self) -> bool:
    """Whether a byte stores several values."""
    return self.element.values_per_byte > 1


def _float(
  name: str, exponent_bits: int, mantissa_bits: int, max: float, **fields: Any
) -> Element:
  """Returns a float whose bias is that of IEEE 754."""
  return Element(
    name=name,
    exponent_bits=exponent_bits,
    mantissa_bits=mantissa_bits,
    bias=(1 << exponent_bits - 1) - 1,
    max=max,
    **fields,
  )


E4M3: Final = _float("e4m3", 4, 3, 448.0, nan_code=0x7F)
E5M2: Final = _float("e5m2", 5, 2, 57344.0, nan_code=0x7E, has_infinity=True)
# MX v1.0 packs elements of 6 bits densely (section 5.3.2). Here each is in the
# low bits of a byte, as in ml_dtypes and in the matrix instructions of GPUs.
E2M3: Final = _float("e2m3", 2, 3, 7.5)
E3M2: Final = _float("e3m2", 3, 2, 28.0)
E2M1: Final = _float("e2m1", 2, 1, 6.0, values_per_byte=2)
E8M0_NAN: Final = 255
# Powers of two; code 0 is 2^-127, not 0.
E8M0: Final = _float("e8m0", 8, 0, 2.0**127, nan_code=E8M0_NAN, is_signed=False)
ELEMENTS: Final = {e.name: e for e in (E4M3, E5M2, E2M3, E3M2, E2M1, E8M0)}


def integer(bits: int, fraction_bits: int = 0) -> Element:
  """Returns a signed integer that counts units of 2**-fraction_bits.

  `max` is symmetric: kernels decode the most negative integer, but never
  quantize to it.
  """
  magnitude_bits = bits - 1
  return Element(
    name=f"int{bits}" + (f"_q{fraction_bits}" if fraction_bits else ""),
    exponent_bits=0,
    mantissa_bits=magnitude_bits,
    bias=1 + fraction_bits - magnitude_bits,
    max=(2.0**magnitude_bits - 1) * 2.0**-fraction_bits,
    values_per_byte=8 // bits,
    is_twos_complement=True,
  )


INT8: Final = integer(8)
INT4: Final = integer(4)
# OCP MX v1.0, section 5.3.4: 8 bits with 6 bits after the binary point.
MXINT8_ELEMENT: Final = integer(8, fraction_bits=6)
# Scales of more than one byte. A code has two bytes, or four for f32.
F16: Final = _float("f16", 5, 10, 65504.0, nan_code=0x7E00, has_infinity=True)
_BF16_MAX: Final = float.fromhex("0x1.fep127")
BF16: Final = _float(
  "bf16", 8, 7, _BF16_MAX, nan_code=0x7FC0, has_infinity=True
)
_F32_MAX: Final = float.fromhex("0x1.fffffep127")
F32: Final = _float(
  "f32", 8, 23, _F32_MAX, nan_code=0x7FC00000, has_infinity=True
)

MXFP8: Final = Format(name="mxfp8", element=E4M3, scale=E8M0, block_size=32)
MXFP8_E5M2: Final = Format(
  name="mxfp8_e5m2", element=E5M2, scale=E8M0, block_size=32
)
MXFP6_E2M3: Final = Format(
  name="mxfp6_e2m3", element=E2M3, scale=E8M0, block_size=32
)
MXFP6_E3M2: Final = Format(
  name="mxfp6_e3m2", element=E3M2, scale=E8M0, block_size=32
)
MXFP4: Final = Format(name="mxfp4", element=E2M1, scale=E8M0, block_size=32)
NVFP4: Final = Format(
  name="nvfp4", element=E2M1, scale=E4M3, block_size=16, is_two_level=True
)
FORMATS: Final = {
  format.name: format
  for format in (MXFP8, MXFP8_E5M2, MXFP6_E2M3, MXFP6_E3M2, MXFP4, NVFP4)
}


_ELEMENTS: Final = {
  e.name: e for e in (E4M3, E5M2, E2M3, E3M2, E2M1, INT8, INT4, MXINT8_ELEMENT)
}
_SCALES: Final = {s.name: s for s in (E8M0, E4M3, E5M2, F32, BF16, F16)}
# Block sizes for which GPU kernels multiply values by scales in bf16.
_SHORT_BLOCKS: Final = (32, 16)


@functools.cache
def readable_by_name(name: str) -> Format | None:
  """Returns the format that GPU matmul kernels call `name`, or None.

  It is one of `FORMATS`, or "<element>_<scale>_<block size>": "e4m3_f32_128".
  """
  if name in FORMATS:
    return FORMATS[name]
  element, *rest = name.rsplit("_", 2)
  if element not in _ELEMENTS or len(rest) != 2 or rest[0] not in _SCALES:
    return None
  return Format(
    name=name,
    element=_ELEMENTS[element],
    scale=_SCALES[rest[0]],
    block_size=int(rest[1]),
  )


def readable(
  element: Element, scale: Element, block_size: int, *, repeats: bool = True
) -> tuple[Format, int] | None:
  """Returns the format in which GPU matmul kernels read blocks, or None.

  If bf16 holds values times scales, large blocks are read as blocks of 32 or 16
  whose scales repeat, unless `repeats` is false.

  Returns:
    The format, and how often each scale of the blocks repeats.
  """
  if element.name not in _ELEMENTS or scale.name not in _SCALES:
    return None

  def named(size: int) -> Format:
    for format in FORMATS.values():
      if (format.element, format.scale, format.block_size) == (
        element,
        scale,
        size,
      ):
        return format
    unnamed = readable_by_name(f"{element.name}_{scale.name}_{size}")
    assert unnamed is not None
    return unnamed

  for size in _SHORT_BLOCKS if repeats else ():
    if block_size % size == 0 and named(size).is_exact_in_bf16:
      return named(size), block_size // size
  return named(block_size), 1


# The tile of a scale that is swizzled for tensor memory: PTX ISA, tcgen05 scale
# factor layout "1X"; F8_128x4 in cuDNN.
SCALE_TILE_ROWS: Final = 128
SCALE_TILE_COLUMNS: Final = 4


def by_name(name: str) -> Format:
  """Returns the format called `name`; ValueError lists known names."""
  format = FORMATS.get(name)
  if format is None:
    raise ValueError(
      f"unknown block format {name!r}; known formats: {', '.join(FORMATS)}"
    )
  return format
