# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block-scaled number formats: the only home of facts about each format.

A block-scaled array stores low-precision `values` and one `scale` for every
`block_size` consecutive values along one axis. A value represents
`value * scale` (times one f32 `global_scale` for NVFP4). Everything that other
modules need from a format is a field or a property of `BlockFormat`.

Sources: OCP Microscaling Formats (MX) v1.0, sections 5 and 6; NVIDIA cuDNN
documentation, "Block scaling"; NVIDIA, "Pretraining LLMs with NVFP4" (2025).
"""

from __future__ import annotations

import dataclasses
from typing import Any
from typing import Final
from typing import TypeAlias

import ml_dtypes
import numpy as np

from jaxplugin.core import speaking
from jaxplugin.kernels import formats

Element: TypeAlias = formats.Element

E8M0: Final = np.dtype(ml_dtypes.float8_e8m0fnu)
E4M3: Final = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2: Final = np.dtype(ml_dtypes.float8_e5m2)
E2M3: Final = np.dtype(ml_dtypes.float6_e2m3fn)
E3M2: Final = np.dtype(ml_dtypes.float6_e3m2fn)
E2M1: Final = np.dtype(ml_dtypes.float4_e2m1fn)
BF16: Final = np.dtype(ml_dtypes.bfloat16)
PACKED: Final = np.dtype(np.uint8)
# The dtypes of unquantized operands and of results.
FLOAT_DTYPES: Final = (np.dtype(np.float32), BF16, np.dtype(np.float16))

# The dtypes that `quantize` can round to.
VALUES_DTYPES: Final = (E4M3, E5M2, E2M3, E3M2, E2M1)
SCALE_DTYPES: Final = (E8M0, E4M3, E5M2)

E8M0_BIAS: Final = formats.E8M0.bias
E8M0_NAN: Final = formats.E8M0_NAN
BF16_SIGNIFICAND_BITS: Final = 8

_DTYPES: Final = {
  formats.E8M0: E8M0,
  formats.E4M3: E4M3,
  formats.E5M2: E5M2,
  formats.E2M3: E2M3,
  formats.E3M2: E3M2,
  formats.E2M1: E2M1,
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFormat:
  """A block-scaled format.

  Attributes:
    name: its name in messages, configs and on the command line.
    values_dtype: dtype of the quantized values: float8_e4m3fn, float8_e5m2,
      float6_e2m3fn, float6_e3m2fn or float4_e2m1fn. JAX stores 6-bit floats as
      bytes.
    scale_dtype: dtype of the block scales: float8_e8m0fnu, float8_e4m3fn or
      float8_e5m2.
    block_size: number of consecutive values that share one scale.
    has_global_scale: whether quantization also computes an f32 scale of the
      whole array.

  Raises:
    TypeError: If a dtype is not one of these.
    ValueError: If block_size is not a positive integer, or a format with E8M0
      scales has a global scale.

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

  def __post_init__(self) -> None:
    for field, allowed in (
      ("values_dtype", VALUES_DTYPES),
      ("scale_dtype", SCALE_DTYPES),
    ):
      dtype = as_dtype(getattr(self, field))
      if dtype not in allowed:
        raise TypeError(
          f"BlockFormat: {field} must be"
          f" {' or '.join(d.name for d in allowed)}, got"
          f" {dtype or speaking.shown(getattr(self, field))}; jp.scaled_dot"
          " multiplies values and scales of other dtypes"
        )
      object.__setattr__(self, field, dtype)
    if not isinstance(self.block_size, int) or self.block_size < 1:
      raise ValueError(
        "BlockFormat: block_size must be a positive integer, got"
        f" {speaking.shown(self.block_size)}"
      )
    speaking.require_bool(
      "BlockFormat", "has_global_scale", self.has_global_scale
    )
    if self.has_global_scale and self.scale_is_power_of_two:
      raise ValueError(
        f"BlockFormat: has_global_scale must be False for {E8M0.name} scales,"
        f" which cover the range of f32, got True for {self.name}; leave"
        " has_global_scale out"
      )

  def __repr__(self) -> str:
    return self.name

  @property
  def facts(self) -> formats.Format:
    """The record of the format that kernels read."""
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
  def is_fp4(self) -> bool:
    """Whether values may also be stored packed, two per byte."""
    return self.values_dtype == E2M1

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
    packed = (PACKED,) if self.is_fp4 else ()
    return (self.array_dtype, *packed)

  @property
  def value_bits(self) -> int:
    """Bits of one code."""
    element = _ELEMENTS.get(self.values_dtype)
    return 8 * self.values_dtype.itemsize if element is None else element.bits

  @property
  def exact_in_bf16(self) -> bool:
    """Whether value * scale fits bf16's significand, so bf16 loses nothing."""
    significand = _significand_bits(self.values_dtype)
    if not self.scale_is_power_of_two:
      significand += _significand_bits(self.scale_dtype)
    return significand <= BF16_SIGNIFICAND_BITS

  @property
  def is_standard(self) -> bool:
    """Whether it is one of `FORMATS`, which kernels may support."""
    return self in FORMATS

  @property
  def is_known(self) -> bool:
    """Whether it is one of `KNOWN`, which have public names."""
    return self in KNOWN


class UnquantizedFormat(BlockFormat):
  """Values and scales of any float dtypes, which `quantize` cannot make.

  The drop-ins for `jax.nn` use it. Only the xla backend supports it.
  """

  def __post_init__(self) -> None:
    pass


def _significand_bits(dtype: np.dtype) -> int:
  if dtype.kind in "iu":
    return 8 * dtype.itemsize
  return int(ml_dtypes.finfo(dtype).nmant) + 1


def _of(facts: formats.Format) -> BlockFormat:
  return BlockFormat(
    name=facts.name,
    values_dtype=_DTYPES[facts.element],
    scale_dtype=_DTYPES[facts.scale],
    block_size=facts.block_size,
    has_global_scale=facts.is_two_level,
  )


MXFP8: Final = _of(formats.MXFP8)
MXFP8_E5M2: Final = _of(formats.MXFP8_E5M2)
MXFP6_E2M3: Final = _of(formats.MXFP6_E2M3)
MXFP6_E3M2: Final = _of(formats.MXFP6_E3M2)
MXFP4: Final = _of(formats.MXFP4)
NVFP4: Final = _of(formats.NVFP4)
# Formats that all kernels support.
FORMATS: Final = (MXFP8, MXFP8_E5M2, MXFP4, NVFP4)
# Formats that have a name.
KNOWN: Final = (*FORMATS, MXFP6_E2M3, MXFP6_E3M2)


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


def by_name(name: str) -> BlockFormat:
  """Returns the format called `name`; `ValueError` lists the known names."""
  for candidate in KNOWN:
    if candidate.name == name.lower():
      return candidate
  raise ValueError(
    f"unknown block format {name!r}; known formats: {known_names()}"
  )


def known_names() -> str:
  """Returns the names of all formats, for error messages."""
  return ", ".join(candidate.name for candidate in KNOWN)


def resolve(
  who: str, format: BlockFormat | str, argument: str = "format"
) -> BlockFormat:
  """Returns a format that a caller passed as a format or as a name.

  Args:
    who: the function that was called, for the message.
    format: a `BlockFormat`, or a name that `by_name` accepts.
    argument: name of the function's parameter.

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
    f" ({known_names()}), got {speaking.shown(format)}"
  )


def pairs_table() -> str:
  """Returns the dtypes and block sizes of `FORMATS`, for error messages."""
  return "; ".join(
    f"{f.name} = {f.values_dtype.name} + {f.scale_dtype.name}"
    f" per {f.block_size}"
    for f in FORMATS
  )
