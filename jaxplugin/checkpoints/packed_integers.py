# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversions of integers that files pack into 32-bit words.

A word has unsigned integers of b bits. Results have these integers minus 2^(b -
1), in two's complement along k, the last dimension. Zero points of 4 bits stay
unsigned, and those of 8 bits become signed.

Sources: `pack_to_int32` of compressed-tensors 0.20; `qlinear` and
`convert_gptq_v1_to_v2_format_module` of GPTQModel 7.7; `packing_utils.py` of
AutoAWQ 0.2.
"""

from __future__ import annotations

import dataclasses
import functools
import re
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
  records,
  stored,
)
from jaxplugin.core import blocking, formats

INT32: Final = np.dtype(np.int32)
# Sign bits of two nibbles. Flipping them subtracts 8 from each nibble.
NIBBLE_SIGNS: Final = np.uint8(0x88)
_PER_WORD: Final = 8  # integers of 4 bits
# By dtype: integers of a word, and their sign bits in each byte.
_DTYPES: Final = {
  formats.INT4: (_PER_WORD, NIBBLE_SIGNS),
  formats.INT8: (4, np.uint8(0x80)),
}
# AWQ: the nibble of each of 8 columns.
_AWQ_NIBBLES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
_ZERO_POINT: Final = 8
# A 1 for each integer of a word. GPTQ subtracts it from the whole word, so an
# integer of 0 borrows from the next one.
_ONES: Final = np.int32(0x11111111)
# Words of GPTQModel's configuration for files with plain zero points.
_V2_FORMATS: Final = ("gptq_v2", "gptq_p")
_REMEDY: Final = (
  "dequantize the weight with the tool that wrote it, and quantize the result"
)


def bytes_of(words: Any) -> Any:
  """Returns the bytes of words, the lowest first: uint8[..., 4 * words]."""
  if isinstance(words, np.ndarray):
    words = np.ascontiguousarray(words)
    return words.astype(words.dtype.newbyteorder("<"), copy=False).view("u1")
  split = lax.bitcast_convert_type(words, jnp.uint8)
  return split.reshape(*words.shape[:-1], 4 * words.shape[-1])


def words_of(packed: Any) -> Any:
  """Returns int32[..., k / 8] of packed int4 values uint8[..., k / 2]."""
  return (packed ^ NIBBLE_SIGNS).view("<i4")


def zero_point_words(zero_points: Any) -> Any:
  """Returns int32[n / 8, groups] of uint8[n, groups], n rounded up."""
  xp: Any = np if isinstance(zero_points, np.ndarray) else jnp
  codes = zero_points.T
  codes = xp.pad(codes, ((0, 0), (0, -codes.shape[1] % _PER_WORD)))
  return (codes[:, 0::2] | codes[:, 1::2] << 4).copy().view("<i4").T


def default_shape(words: Any) -> tuple[int, ...]:
  """Returns the shape of 4-bit integers that fill their words."""
  return (*words.shape[:-1], *(_PER_WORD * x for x in words.shape[-1:]))


def find_dtype(who: str, words: Any, shape: tuple[int, ...]) -> np.dtype:
  """Returns int4 or int8, by the number of words of k integers.

  Raises:
    TypeError: If the shape of the words fits neither, or k of int4 is odd.
  """
  for dtype, (per_word, _) in _DTYPES.items() if len(shape) > 1 else ():
    *lead, k = shape
    if tuple(words.shape) == (*lead, blocking.divide_up(k, per_word)):
      if dtype == formats.INT4 and k % 2:
        raise TypeError(f"{who}: k must be even for 4 bits, got {list(shape)}")
      return dtype
  raise TypeError(
    f"{who}: weight_packed must be int32[..., k / 8] (4 bits) or"
    f" int32[..., k / 4] (8 bits), got {assembly.brief(words)} for a weight of"
    f" shape {list(shape)}; {_REMEDY}"
  )


def unpack(
  who: str,
  words: Any,
  scale: Any,
  shape: tuple[int, ...],
  zero_points: Any = None,
) -> scaled_array.ScaledArray:
  """Returns a weight of compressed-tensors, whose words are cut to a shape."""
  dtype = find_dtype(who, words, shape)
  _, signs = _DTYPES[dtype]
  size = shape[-1] // 2 if dtype == formats.INT4 else shape[-1]
  values = bytes_of(words)[..., :size] ^ signs
  if zero_points is not None:
    zero_points = _unpack_zero_points(who, zero_points, scale, dtype)
  return assembly.assemble_scaled(who, dtype, values, scale, zero_points)


def nibbles(words: Any) -> Any:
  """Returns the 4-bit integers of words, the lowest first: uint8[..., k]."""
  xp: Any = np if isinstance(words, np.ndarray) else jnp
  codes = bytes_of(words)
  pairs = xp.stack([codes & 15, codes >> 4], -1)
  return pairs.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def check_zero_points(
  who: str, words: Any, scale: Any, dtype: np.dtype
) -> None:
  """Raises TypeError unless zero points fit the scales.

  Args:
    who: the caller.
    words: int32[..., n / 8, groups] (4 bits) or int32[..., n / 4, groups], n
      rounded up; or int8 of the scales' shape, which the strategy "tensor"
      does not pack.
    scale: the scales [..., n, groups].
    dtype: int4 or int8, the dtype of the integers.
  """
  if words.dtype == formats.INT8 and words.shape == scale.shape:
    return
  per_word, _ = _DTYPES[dtype]
  *lead, n, groups = scale.shape if len(scale.shape) > 1 else (0, 0)
  wanted = (*lead, blocking.divide_up(n, per_word), groups)
  if words.dtype != INT32 or tuple(words.shape) != wanted:
    raise TypeError(
      f"{who}: weight_zero_point must be int32{list(wanted)}, or int8 of the"
      f" shape of the scales, got {assembly.brief(words)} for scales"
      f" {assembly.brief(scale)}"
    )


def _unpack_zero_points(
  who: str, words: Any, scale: Any, dtype: np.dtype
) -> Any:
  """Returns zero points, uint8 or int8; see `check_zero_points`."""
  check_zero_points(who, words, scale, dtype)
  if words.dtype == formats.INT8:
    is_int4 = dtype == formats.INT4
    return (words + _ZERO_POINT).astype(formats.PACKED) if is_int4 else words
  _, signs = _DTYPES[dtype]
  *_, n, _ = scale.shape
  across = words.swapaxes(-1, -2)
  if dtype == formats.INT4:
    integers = nibbles(across)
  else:
    integers = assembly.viewed(bytes_of(across) ^ signs, formats.INT8)
  return integers[..., :n].swapaxes(-1, -2)


def from_gptq(
  qweight: Any,
  scales: Any,
  qzeros: Any = None,
  g_idx: Any = None,
  *,
  is_v2: bool = False,
) -> scaled_array.ScaledArray:
  """Converts a weight of GPTQ: integers of 4 bits in groups.

  The numbers are::

    weight[j, i] = (integer[i, j] - zero[i // group, j]) * scales[i // group, j]

  Args:
    qweight: int32[k / 8, n]. Each word has 8 integers along k, the first in the
      lowest bits.
    scales: f16, bf16 or f32[k / group, n].
    qzeros: int32[k / group, n / 8], the zero points. None means that all are 8.
    g_idx: int32[k], the group of each row, which must be i // group; or None.
    is_v2: whether the format in the configuration is gptq_v2 or gptq_p, whose
      qzeros are zero points. In the format gptq, their words are less by
      0x11111111.

  Returns:
    A `ScaledArray` [n, k] in the format `UINT4_128`, or in the format that has
    this group size and scale dtype. If all zero points are 8 and not traced, it
    is `INT4_128`, or the format of this group size.

  Raises:
    TypeError: If dtypes and shapes do not fit 4 bits.
    CheckpointError: If groups are not consecutive (desc_act). A traced g_idx is
      not checked.

  Source: `qlinear` of GPTQModel 4.

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> words = np.full((32, 16), 0x99999999, np.uint32).view(np.int32)
    >>> scales = np.full((2, 16), 0.5, np.float16)
    >>> w_q = jp.checkpoints.from_gptq(words, scales)
    >>> print(w_q.format, w_q.shape, jp.dequantize(w_q)[0, 0])
    int4_128 (16, 256) 0.5
  """
  who = "checkpoints.from_gptq"
  assembly.require_arrays(
    *(who, {"qweight": qweight, "scales": scales}),
    {"qzeros": qzeros, "g_idx": g_idx},
  )
  _, k = word_shape(who, qweight, scales, qzeros, g_idx)
  zeros = zero_points_of(qzeros, is_smaller=not is_v2)
  values = bytes_of(qweight.T) ^ NIBBLE_SIGNS
  array = assembly.assemble_scaled(who, formats.INT4, values, scales.T, zeros)
  if g_idx is not None and assembly.is_known(g_idx):
    order = np.arange(k) // array.block_size
    if not np.array_equal(np.asarray(g_idx), order):
      raise errors.CheckpointError(
        f"{who}: g_idx must name consecutive groups, because a block has"
        " consecutive values, got others (desc_act, act-order); use a"
        " checkpoint with desc_act false, or dequantize it and quantize the"
        " result"
      )
  return array


def from_awq(
  qweight: Any, scales: Any, qzeros: Any = None
) -> scaled_array.ScaledArray:
  """Converts a weight of AWQ: integers of 4 bits in groups.

  The numbers are::

    weight[j, i] = (integer[i, j] - zero[i // group, j]) * scales[i // group, j]

  Args:
    qweight: int32[k, n / 8]. Each word has 8 integers along n, in the order 0,
      2, 4, 6, 1, 3, 5, 7 from the lowest bits.
    scales: f16, bf16 or f32[k / group, n].
    qzeros: int32[k / group, n / 8], the zero points, in the same order. None
      means that all are 8.

  Returns:
    A `ScaledArray` [n, k], see `from_gptq`.

  Raises:
    TypeError: If dtypes and shapes do not fit.

  Source: `packing_utils.py` of AutoAWQ 0.2.

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> words = np.zeros((32, 1), np.int32)  # each integer is 0 - 8
    >>> w_q = jp.checkpoints.from_awq(words, np.ones((1, 8), np.float16))
    >>> print(w_q.format, jp.dequantize(w_q)[0, 0])
    int4_32 -8.0
  """
  who = "checkpoints.from_awq"
  assembly.require_arrays(
    who, {"qweight": qweight, "scales": scales}, {"qzeros": qzeros}
  )
  word_shape(who, qweight, scales, qzeros, is_awq=True)
  integers = _awq_nibbles(qweight).T
  values = (integers[:, ::2] | integers[:, 1::2] << 4) ^ NIBBLE_SIGNS
  zeros = zero_points_of(qzeros, is_awq=True)
  return assembly.assemble_scaled(who, formats.INT4, values, scales.T, zeros)


def _awq_nibbles(words: Any) -> Any:
  """Returns the integers of words in AWQ's order: uint8[..., n]."""
  integers = nibbles(words)
  words_of_8 = integers.reshape(*words.shape, _PER_WORD)
  return words_of_8[..., np.asarray(_AWQ_NIBBLES)].reshape(integers.shape)


def zero_points_of(
  qzeros: Any, *, is_awq: bool = False, is_smaller: bool = False
) -> Any:
  """Returns zero points of GPTQ or AWQ, uint8[n, k / group].

  The result is None if there are none, or if all are 8 and not traced.

  Args:
    qzeros: int32[k / group, n / 8], or None.
    is_awq: whether integers are in AWQ's order.
    is_smaller: whether the words are those of the zero points minus `_ONES`.
  """
  if qzeros is None:
    return None
  if is_smaller:
    qzeros = qzeros + _ONES
  zeros = (_awq_nibbles if is_awq else nibbles)(qzeros).T
  if assembly.is_known(zeros) and bool((zeros == _ZERO_POINT).all()):
    return None
  return zeros


def is_awq(qweight: Any, scales: Any) -> bool:
  """Returns whether words have integers along n, as AWQ has them."""
  columns, n = qweight.shape[-1:], scales.shape[-1:]
  return bool(columns) and n == (_PER_WORD * columns[0],)


def word_shape(
  who: str,
  qweight: Any,
  scales: Any,
  qzeros: Any,
  g_idx: Any = None,
  *,
  is_awq: bool = False,
) -> tuple[int, int]:
  """Returns [n, k] of a weight of GPTQ or AWQ.

  Raises:
    TypeError: If dtypes and shapes do not fit 4 bits.
  """
  if len(qweight.shape) == 2 and len(scales.shape) == 2:
    groups, n = scales.shape
    k = qweight.shape[0] * (1 if is_awq else _PER_WORD)
    columns = n // _PER_WORD
    if (
      qweight.dtype == INT32
      and qweight.shape[1] == (columns if is_awq else n)
      and n % _PER_WORD == k % 2 == 0
      and _is_int32(qzeros, (groups, columns))
      and _is_int32(g_idx, (k,))
    ):
      return n, k
  words = "k, n / 8" if is_awq else "k / 8, n"
  parts = [x for x in (qweight, scales, qzeros, g_idx) if x is not None]
  raise TypeError(
    f"{who}: qweight, scales, qzeros and g_idx must be int32[{words}] (4 bits),"
    " floats [k / group, n], int32[k / group, n / 8] and int32[k], got"
    f" {', '.join(map(assembly.brief, parts))}; {_REMEDY}"
  )


def _is_int32(x: Any, shape: tuple[int, ...]) -> bool:
  """Returns whether an optional part is missing, or int32 of a shape."""
  return x is None or (x.dtype == INT32 and tuple(x.shape) == shape)


def _recognize(
  contents: records.Contents, words: stored.StoredTensor, *, layout: str
) -> records.Entry | None:
  """Returns a weight of GPTQ or AWQ; None for other layouts."""
  base = words.name.removesuffix(".qweight")
  scale, zeros, order = (
    contents.tensors.get(f"{base}.{x}") for x in ("scales", "qzeros", "g_idx")
  )
  if words.dtype != INT32 or base == words.name:
    return None
  along_n = scale is not None and is_awq(words, scale)
  if words.shape[-1:] == (0,):  # without rows, both layouts have these shapes
    along_n = "awq" in contents.config
  if scale is None or along_n != (layout == "awq"):
    return None
  bits = re.search(r"\bbits (\d+)", contents.config)
  if zeros is None and order is None and bits and bits[1] != "4":
    # Without them, words of 4 bits may have these shapes too.
    rule = f"its integers must have 4 bits, got {bits[1]} in the configuration"
    raise stored.fault(words, f"{rule}; {_REMEDY}")
  n, k = word_shape(*(entries.WHO, words, scale, zeros, order), is_awq=along_n)
  across = dataclasses.replace(scale, shape=scale.shape[::-1])
  is_v2 = any(x in contents.config for x in _V2_FORMATS)

  # Symmetric weights have zero points too, so their numbers decide.
  points = zero_points_of(
    zeros and zeros.read(), is_awq=along_n, is_smaller=not (along_n or is_v2)
  )
  zero_dtype = None if points is None else points.dtype
  convert: Any = functools.partial(from_gptq, is_v2=is_v2)
  if along_n:
    convert = lambda x, y, z, _: from_awq(x, y, z)
  return entries.entry(
    layout,
    assembly.find_scaled_format(
      entries.WHO, formats.INT4, (n, k), across, zero_dtype
    ),
    convert,
    (words, scale, zeros, order),
    name=f"{base}{names.WEIGHT}",
    shape=(n, k),
  )


LAYOUTS: Final = tuple(
  records.Layout(
    name=name, recognize=functools.partial(_recognize, layout=name)
  )
  for name in ("gptq", "awq")
)
