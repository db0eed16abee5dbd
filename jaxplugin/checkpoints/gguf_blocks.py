# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of GGUF as values, scales and offsets, without a rounding.

`TYPES` has a record for each type of blocks that is read. A block of Q4_0 has
18 bytes: an f16 scale and 32 integers. K-quants have blocks of 256 values with
two f16, which multiply small integers for each 16 or 32 values. The products
are exact in f32, and become the scales and minima of a `BlockFormat`.

Source: `quants.py` of the gguf package 0.19.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import (
  assembly,
  entries,
  errors,
  names,
  packed_integers,
  records,
  stored,
)
from jaxplugin.core import error_context, formats

# All types of tensors by number: the name, values and bytes of a block. Source:
# `GGML_QUANT_SIZES` of the gguf package 0.19.
ALL_TYPES: Final = {
  0: ("F32", 1, 4),
  1: ("F16", 1, 2),
  2: ("Q4_0", 32, 18),
  3: ("Q4_1", 32, 20),
  6: ("Q5_0", 32, 22),
  7: ("Q5_1", 32, 24),
  8: ("Q8_0", 32, 34),
  9: ("Q8_1", 32, 40),
  10: ("Q2_K", 256, 84),
  11: ("Q3_K", 256, 110),
  12: ("Q4_K", 256, 144),
  13: ("Q5_K", 256, 176),
  14: ("Q6_K", 256, 210),
  15: ("Q8_K", 256, 292),
  16: ("IQ2_XXS", 256, 66),
  17: ("IQ2_XS", 256, 74),
  18: ("IQ3_XXS", 256, 98),
  19: ("IQ1_S", 256, 50),
  20: ("IQ4_NL", 32, 18),
  21: ("IQ3_S", 256, 110),
  22: ("IQ2_S", 256, 82),
  23: ("IQ4_XS", 256, 136),
  24: ("I8", 1, 1),
  25: ("I16", 1, 2),
  26: ("I32", 1, 4),
  27: ("I64", 1, 8),
  28: ("F64", 1, 8),
  29: ("IQ1_M", 256, 56),
  30: ("BF16", 1, 2),
  34: ("TQ1_0", 256, 54),
  35: ("TQ2_0", 256, 66),
  39: ("MXFP4", 32, 17),
  40: ("NVFP4", 64, 36),
  41: ("Q1_0", 128, 18),
}

_WHO: Final = "checkpoints.from_gguf"
_NIBBLES: Final = (0, 4)
_TWO_BITS: Final = (0, 2, 4, 6)
_BITS: Final = tuple(range(8))
# The values of the 4-bit codes of IQ4_NL and IQ4_XS.
_IQ4: Final = np.array(
  [
    *(-127, -104, -83, -65, -49, -35, -22, -10),
    *(1, 13, 25, 38, 53, 69, 89, 113),
  ],
  np.int8,
)


@dataclasses.dataclass(frozen=True)
class BlockType:
  """A type of blocks.

  Attributes:
    format: the format that holds its numbers.
    size, nbytes: values and bytes of a block.
    split: returns integers int8[..., size] or packed bytes uint8[..., size /
      2], scales, and offsets or None, by the bytes of blocks.
  """

  format: formats.BlockFormat
  size: int
  nbytes: int
  split: Callable[[Any], tuple[Any, Any, Any]]


def from_gguf(
  blocks: Any,
  format: formats.BlockFormat | str,
  scale: Any = None,
  *,
  global_scale_range: assembly.Range | None = assembly.GLOBAL_SCALE_RANGE,
) -> scaled_array.ScaledArray:
  """Converts a weight of GGUF without a rounding, in one copy.

  The numbers are those of the gguf package's `dequantize`, except that MXFP4's
  scale byte 255 is NaN here. Integers of 5 and 6 bits and of IQ4 become INT8.
  The scales and minima of K-quants become f32. So these types need more bytes
  in memory than in the file.

  Args:
    blocks: uint8[..., n, bytes], the blocks of each row.
    format: GGUF's name of the type: "MXFP4", "NVFP4", "Q8_0", "Q4_0", "Q4_1",
      "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL" or
      "IQ4_XS". Or the format: `MXFP4`, `NVFP4`, `INT8_32` (Q8_0), `INT4_32`
      (Q4_0) or `UINT4_32_MIN` (Q4_1).
    scale: NVFP4: the tensor "NAME.scale" next to "NAME.weight", which
      multiplies. f32, one number or one for each leading index; or None.
    global_scale_range: same as in `from_modelopt`.

  Returns:
    A `ScaledArray`, blocked along the last dimension.

  Raises:
    TypeError: If a dtype or a shape differs.
    ValueError: If there is no such type, or the format is another one.
    CheckpointError: If scale is out of range, or a block scale of NVFP4 that is
      not traced has a sign.

  Source: `quants.py` of gguf 0.19.

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> block = np.full((32, 17), 0x22, np.uint8)  # E2M1's 0010 is 1
    >>> block[:, 0] = 127  # 2^0
    >>> w_q = jp.checkpoints.from_gguf(block, "mxfp4")
    >>> print(w_q.format, w_q.shape, jp.dequantize(w_q)[0, 0])
    mxfp4 (32, 32) 1.0
  """
  assembly.require_arrays(_WHO, {"blocks": blocks})
  name = _find(format)
  kind = TYPES[name]
  *lead, k = shape_of(_WHO, blocks, name)
  rows = blocks.reshape(*lead, k // kind.size, kind.nbytes)
  second = assembly.GlobalScale(_WHO, "scale", scale, global_scale_range)
  assembly.require_no_global(second, kind.format)
  with np.errstate(invalid="ignore"):  # an infinite f16 times 0
    values, scale, offset = kind.split(rows)
  values, scale = (_rows(lead, x) for x in (values, scale))
  if offset is not None:
    offset = _rows(lead, offset)
  if kind.format.has_pairs and values.dtype == np.int8:
    values = _packed(values)
  return assembly.assemble(kind.format, values, scale, second, offset=offset)


def _find(format: formats.BlockFormat | str) -> str:
  """Returns the name of the type that a caller passed."""
  if isinstance(format, str) and format.upper() in TYPES:
    return format.upper()
  if not isinstance(format, str) or format.upper() not in _SIZES:
    found = formats.resolve(_WHO, format)
    for name, kind in TYPES.items():
      if kind.format == found and found.is_named:
        return name
  raise ValueError(
    f"{_WHO}: format must be a type of GGUF that jaxplugin reads,"
    f" {', '.join(TYPES)}, or the format of one, got"
    f" {error_context.shown(format)}; dequantize other types with the gguf"
    " package, and call jp.quantize"
  )


def shape_of(who: str, blocks: Any, name: str) -> tuple[int, ...]:
  """Returns the logical shape of blocks.

  Raises:
    TypeError: If the array does not have whole blocks of bytes.
  """
  kind, shape = TYPES[name], tuple(blocks.shape)
  if (
    blocks.dtype != formats.PACKED
    or len(shape) < 2
    or shape[-1] == 0
    or shape[-1] % kind.nbytes
  ):
    raise TypeError(
      f"{who}: blocks of {name} must be uint8[..., n, {kind.nbytes} * k /"
      f" {kind.size}], got {assembly.brief(blocks)}"
    )
  return (*shape[:-1], shape[-1] // kind.nbytes * kind.size)


def _rows(lead: Sequence[int], x: Any) -> Any:
  """Returns x[*lead, ...] as x[*lead, k]; NumPy infers no k without rows."""
  return x.reshape(*lead, math.prod(x.shape[len(lead) :]))


def _fields(blocks: Any, *sizes: int) -> Iterator[Any]:
  """Yields the parts of blocks, by their sizes in bytes."""
  start = 0
  for size in sizes:
    yield blocks[..., start : start + size]
    start += size
  assert start == blocks.shape[-1]


def _bits(data: Any, groups: int, shifts: Sequence[int], mask: int) -> Any:
  """Returns parts of bytes: uint8[..., values].

  Bytes are divided into groups. A group has the lowest bits of all its bytes
  first, then those at the next shift.
  """
  *lead, size = data.shape
  data = data.reshape(*lead, groups, 1, size // groups)
  parts = data >> np.array(shifts, np.uint8)[:, None] & np.uint8(mask)
  return parts.reshape(*lead, len(shifts) * size)


def _floats(data: Any) -> Any:
  """Returns the f16 of each two bytes."""
  if isinstance(data, np.ndarray):
    return np.ascontiguousarray(data).view("<f2")
  pairs = data.reshape(*data.shape[:-1], data.shape[-1] // 2, 2)
  return lax.bitcast_convert_type(pairs, jnp.float16)


def _signed(data: Any) -> Any:
  return assembly.viewed(data, formats.INT8)


def _packed(values: Any) -> Any:
  """Returns int4 values, two in a byte, the first in the low nibble."""
  codes = values.astype(np.uint8) & np.uint8(15)
  return codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)


def _halves(data: Any) -> Any:
  """Returns packed nibbles of bytes whose high nibbles are the second half."""
  xp: Any = np if isinstance(data, np.ndarray) else jnp
  even, odd = data[..., 0::2], data[..., 1::2]
  low = (even & 15) | (odd << 4)
  high = (even >> 4) | (odd & 0xF0)
  return xp.concatenate([low, high], axis=-1)


def _times(d: Any, factors: Any) -> Any:
  """Returns f32 products of an f16 for each block and integers."""
  return _floats(d).astype(np.float32) * factors.astype(np.float32)


# Blocks of 32, and NVFP4's of 64.


def _mxfp4(blocks: Any) -> tuple[Any, Any, Any]:
  scale, data = _fields(blocks, 1, 16)
  return _halves(data), scale.copy(), None


def _nvfp4(blocks: Any) -> tuple[Any, Any, Any]:
  xp: Any = np if isinstance(blocks, np.ndarray) else jnp
  codes, data = _fields(blocks, 4, 32)
  if assembly.is_known(codes) and bool((codes & assembly.SIGN).any()):
    raise errors.CheckpointError(
      f"{_WHO}: NVFP4 scales of GGUF must be bytes below {assembly.SIGN:#x},"
      " got a larger one; the blocks are damaged, or have another type"
    )
  # gguf reads this code as 0; in E4M3 it is NaN.
  codes = xp.where(codes == assembly.E4M3_NAN, xp.uint8(0), codes)
  return _halves(data.reshape(*data.shape[:-1], 4, 8)), codes, None


def _q8_0(blocks: Any) -> tuple[Any, Any, Any]:
  d, data = _fields(blocks, 2, 32)
  return _signed(data), _floats(d), None


def _q4_0(blocks: Any) -> tuple[Any, Any, Any]:
  d, data = _fields(blocks, 2, 16)
  return _halves(data) ^ packed_integers.NIBBLE_SIGNS, _floats(d), None


def _q4_1(blocks: Any) -> tuple[Any, Any, Any]:
  d, minimum, data = _fields(blocks, 2, 2, 16)
  values = _halves(data) ^ packed_integers.NIBBLE_SIGNS
  return values, _floats(d), _floats(minimum)


def _five_bits(high: Any, data: Any) -> Any:
  """Returns the codes of Q5_0 and Q5_1, from 0 to 31."""
  low = _bits(data, 1, _NIBBLES, 15)
  return _signed(low | _bits(high, 4, _BITS, 1) << np.uint8(4))


def _q5_0(blocks: Any) -> tuple[Any, Any, Any]:
  d, high, data = _fields(blocks, 2, 4, 16)
  return _five_bits(high, data) - np.int8(16), _floats(d), None


def _q5_1(blocks: Any) -> tuple[Any, Any, Any]:
  d, minimum, high, data = _fields(blocks, 2, 2, 4, 16)
  return _five_bits(high, data), _floats(d), _floats(minimum)


def _iq4_nl(blocks: Any) -> tuple[Any, Any, Any]:
  d, data = _fields(blocks, 2, 16)
  return _iq4(data, 1), _floats(d), None


def _iq4(data: Any, groups: int) -> Any:
  codes = _bits(data, groups, _NIBBLES, 15)
  table = _IQ4 if isinstance(data, np.ndarray) else jnp.asarray(_IQ4)
  return table[codes]


# Blocks of 256: K-quants and IQ4_XS.


def _iq4_xs(blocks: Any) -> tuple[Any, Any, Any]:
  d, high, low, data = _fields(blocks, 2, 2, 4, 128)
  factors = _bits(low, 4, _NIBBLES, 15)
  factors |= _bits(high, 2, _TWO_BITS, 3) << np.uint8(4)
  return _iq4(data, 8), _times(d, _signed(factors) - np.int8(32)), None


def _q2_k(blocks: Any) -> tuple[Any, Any, Any]:
  factors, data, d, minimum = _fields(blocks, 16, 64, 2, 2)
  codes = _signed(_bits(data, 2, _TWO_BITS, 3))
  return codes, _times(d, factors & 15), -_times(minimum, factors >> 4)


def _q3_k(blocks: Any) -> tuple[Any, Any, Any]:
  high, data, factors, d = _fields(blocks, 32, 64, 12, 2)
  low = _signed(_bits(data, 2, _TWO_BITS, 3))
  # A bit of 0 subtracts 4.
  codes = low - (_signed(_bits(high, 1, _BITS, 1)) ^ np.int8(1)) * np.int8(4)
  six_bits = _bits(factors[..., :8], 1, _NIBBLES, 15)
  six_bits |= _bits(factors[..., 8:], 1, _TWO_BITS, 3) << np.uint8(4)
  return codes, _times(d, _signed(six_bits) - np.int8(32)), None


def _q4_k(blocks: Any) -> tuple[Any, Any, Any]:
  d, minimum, factors, data = _fields(blocks, 2, 2, 12, 128)
  scales, minima = _six_bits(factors)
  codes = _signed(_bits(data, 4, _NIBBLES, 15)) - np.int8(8)
  return codes, _times(d, scales), -_times(minimum, minima)


def _q5_k(blocks: Any) -> tuple[Any, Any, Any]:
  d, minimum, factors, high, data = _fields(blocks, 2, 2, 12, 32, 128)
  scales, minima = _six_bits(factors)
  codes = _bits(data, 4, _NIBBLES, 15)
  codes |= _bits(high, 1, _BITS, 1) << np.uint8(4)
  return _signed(codes), _times(d, scales), -_times(minimum, minima)


def _six_bits(factors: Any) -> tuple[Any, Any]:
  """Returns the factors of 8 scales and of 8 minima, in 12 bytes."""
  xp: Any = np if isinstance(factors, np.ndarray) else jnp
  scales, minima, rest = _fields(factors, 4, 4, 4)
  return (
    xp.concatenate([scales & 63, rest & 15 | scales >> 2 & 48], axis=-1),
    xp.concatenate([minima & 63, rest >> 4 | minima >> 2 & 48], axis=-1),
  )


def _q6_k(blocks: Any) -> tuple[Any, Any, Any]:
  data, high, factors, d = _fields(blocks, 128, 64, 16, 2)
  codes = _bits(data, 2, _NIBBLES, 15)
  codes |= _bits(high, 2, _TWO_BITS, 3) << np.uint8(4)
  return _signed(codes) - np.int8(32), _times(d, _signed(factors)), None


def _format(name: str, dtype: np.dtype, size: int, **more: Any) -> Any:
  return formats.BlockFormat(
    **{"scale_dtype": formats.F32, **more},
    name=name,
    values_dtype=dtype,
    block_size=size,
  )


_MIN: Final = {"offset_dtype": formats.F32}
_F16: Final = {"scale_dtype": formats.F16, "offset_dtype": formats.F16}
_INT8, _INT4 = formats.INT8, formats.INT4

_SIZES: Final = {n: (size, nbytes) for n, size, nbytes in ALL_TYPES.values()}
TYPES: Final = {
  name: BlockType(format, *_SIZES[name], split)
  for name, format, split in (
    ("MXFP4", formats.MXFP4, _mxfp4),
    ("NVFP4", formats.NVFP4, _nvfp4),
    ("Q8_0", formats.INT8_32, _q8_0),
    ("Q4_0", formats.INT4_32, _q4_0),
    ("Q4_1", formats.UINT4_32_MIN, _q4_1),
    ("Q5_0", formats.INT8_32, _q5_0),
    ("Q5_1", _format("int8_32_min", _INT8, 32, **_F16), _q5_1),
    ("Q2_K", _format("int4_16_f32_min", _INT4, 16, **_MIN), _q2_k),
    ("Q3_K", _format("int4_16_f32", _INT4, 16), _q3_k),
    (
      "Q4_K",
      _format("uint4_32_f32_min", _INT4, 32, code_offset=8, **_MIN),
      _q4_k,
    ),
    ("Q5_K", _format("int8_32_f32_min", _INT8, 32, **_MIN), _q5_k),
    ("Q6_K", _format("int8_16_f32", _INT8, 16), _q6_k),
    ("IQ4_NL", formats.INT8_32, _iq4_nl),
    ("IQ4_XS", _format("int8_32_f32", _INT8, 32), _iq4_xs),
  )
}


def _recognize(
  contents: records.Contents, blocks: stored.StoredTensor
) -> records.Entry | None:
  name = blocks.type_name
  if name not in TYPES:
    return None
  format = TYPES[name].format
  scale = None
  if format == formats.NVFP4:
    base = names.base(blocks.name)
    # llama.cpp's converter writes the first name, other tools the second.
    scale_names = (f"{base}.scale", f"{base}{names.WEIGHT}.scale")
    scales = [x for name in scale_names if (x := contents.tensors.get(name))]
    if len(scales) > 1:
      raise stored.fault(
        blocks,
        f"its global scale must be one tensor, got {scale_names[0]!r} and"
        f" {scale_names[1]!r}",
      )
    scale = scales[0] if scales else None
  return entries.entry(
    *("gguf", format),
    lambda x, y, **options: from_gguf(x, name, y, **options),
    (blocks, scale),
    has_range=True,
    shape=shape_of(entries.WHO, blocks, name),
  )


LAYOUT: Final = records.Layout(name="gguf", recognize=_recognize)
