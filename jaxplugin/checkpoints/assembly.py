# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps that layouts share from the parts of a weight to a `ScaledArray`.

Dtypes and sizes decide which format the parts fit. NumPy arrays give views; JAX
arrays are bitcast.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import layouts, scaled_array
from jaxplugin.checkpoints import errors
from jaxplugin.core import blocking, error_context, formats

# Smallest and largest global scale that multiplies. With NVFP4's amax / 2688
# this is an amax from 2.4e-9 to 672. A scale that divides (2688 / amax, 1e3 to
# 1e4 for weights) is far above the range, and its reciprocal far below.
GLOBAL_SCALE_RANGE: Final = (2.0**-40, 0.25)

SIGN: Final = 0x80
FP8: Final = (formats.E4M3, formats.E5M2)
E4M3_NAN: Final = 0x7F
_FP4_MAGNITUDES: Final = 0x77  # both values in a byte

FORMATS: Final = (
  *(formats.NVFP4, formats.MXFP4, formats.MXFP8, formats.MXFP8_E5M2),
)
_FP6_BITS: Final = 6 * formats.MXFP4.block_size
# NVFP4 in groups of 32 (ModelOpt's W4A8_NVFP4_FP8).
_WIDE_GROUP: Final = 2 * formats.NVFP4.block_size
# Values that a scale of FP8 covers in rows and in columns.
_SCALE_ROWS: Final = (1, 32, 128)
_SCALE_COLUMNS: Final = (32, 128)

# Sizes of groups and of square blocks, tried in this order.
_SCALE_SIZES: Final = (128, 64, 32)
_SHORT_SIZE: Final = 128  # the last group of a row may be short
_SCALE_DTYPES: Final = (formats.F32, formats.BF16, formats.F16, formats.E8M0)
# Codes of unsigned 4-bit integers are stored minus this number.
_UNSIGNED: Final = 8
_NAMES: Final = {
  formats.E4M3: "fp8",
  formats.E5M2: "fp8_e5m2",
  formats.INT8: "int8",
  formats.INT4: "int4",
}

Range = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class GlobalScale:
  """The global scale of a weight, as its file has it.

  Attributes:
    who: the function that an error names.
    name: the argument or tensor that has it.
    given: an array or numbers; None if the weight has none.
    allowed: smallest and largest one that multiplies; None allows any.
    divides: whether `given` divides.
  """

  who: str
  name: str
  given: Any
  allowed: Range | None
  divides: bool = False


def require_arrays(
  who: str, parts: Mapping[str, Any], optional: Mapping[str, Any] | None = None
) -> None:
  """Raises TypeError, of `who`, unless all parts of a weight are arrays.

  The optional ones may be None.
  """
  given = {n: x for n, x in (optional or {}).items() if x is not None}
  for name, x in {**parts, **given}.items():
    if not isinstance(x, (np.ndarray, np.generic, jax.Array)):
      raise TypeError(
        f"{who}: {name} must be an array of NumPy or JAX, got"
        f" {error_context.shown(x)}. Pass the tensor of the checkpoint."
      )


def find_format(who: str, values: Any, scale: Any) -> formats.BlockFormat:
  """Returns the format that values and linear scales fit.

  Blocks lie along the last dimension, or along k of a stack [..., k, n]. NVFP4
  may have groups of 32, and block scales in F32, BF16 or F16.

  Raises:
    TypeError: If they fit no format.
  """
  axis = blocked_axis(values, scale)
  if axis is not None:
    bits_of_scale = values.shape[axis] * 8 / scale.shape[axis]
    for format in FORMATS:
      size = format.block_size * format.value_bits
      if bits_of_scale == size and has_dtypes(format, values, scale):
        return format
    if values.dtype == formats.PACKED:
      nvfp4 = formats.NVFP4
      is_wide = bits_of_scale == _WIDE_GROUP * nvfp4.value_bits
      is_block = bits_of_scale == nvfp4.block_size * nvfp4.value_bits
      if is_wide and scale.dtype == nvfp4.scale_dtype:
        return nvfp4
      if is_block and is_float(scale):
        return nvfp4
    if bits_of_scale == _FP6_BITS and values.dtype == formats.PACKED:
      raise TypeError(
        f"{who}: packed FP6 (four values in three bytes) is not supported, got"
        f" {brief(values)} and {brief(scale)}; quantize the unquantized weight"
        " with jp.quantize, which stores MXFP6 as a byte per value"
      )
  raise TypeError(
    f"{who}: values and scales must be those of NVFP4 (uint8[..., n, k / 2],"
    " float8_e4m3fn[..., n, k / 16]), MXFP4 (uint8[..., n, k / 2],"
    " uint8[..., n, k / 32]) or MXFP8 (float8_e4m3fn[..., n, k],"
    f" uint8[..., n, k / 32]), got {brief(values)} and {brief(scale)}; pass"
    " both as the file stores them"
  )


def is_float(x: Any) -> bool:
  """Returns whether a dtype is a float of more than a byte."""
  return x.dtype.itemsize > 1 and jnp.issubdtype(x.dtype, jnp.floating)


def is_scaled_by_floats(values: Any, scale: Any) -> bool:
  """Returns whether values are FP8 or INT8, and scales f16 or wider floats."""
  return values.dtype in (*FP8, formats.INT8) and is_float(scale)


def require_global_scale(
  who: str, name: str, given: Any, shape: Sequence[int], axis: int
) -> int:
  """Returns how many equal parts of the rows have a global scale each.

  Args:
    who, name: the caller, and the name of the global scale.
    given: the global scale.
    shape: of the weight, whose blocks lie along `axis`.

  Returns:
    0 for one number, 1 for one number for each index of the leading dimensions,
    otherwise the number of parts.

  Raises:
    TypeError: If the shape or the dtype does not fit.
  """
  lead, of_given = tuple(shape[:-2]), tuple(given.shape)
  rows = _rows(shape, axis)
  if jnp.issubdtype(given.dtype, jnp.floating):
    if math.prod(of_given) == 1:
      return 0
    if of_given in (lead, (*lead, 1, 1)):
      return 1
    count = of_given[-1] if of_given and of_given[:-1] == lead else 0
    if count and rows % count == 0:
      return count
  raise TypeError(
    f"{who}: {name} must be one float, one for each index of the leading"
    f" dimensions {lead}, or one for each of p equal parts of the {rows} rows,"
    f" {[*lead, 'p']}, got {brief(given)}; pass it as the file stores it"
  )


def _rows(shape: Sequence[int], axis: int) -> int:
  return shape[-3 - axis] if len(shape) > 1 else 0


def blocked_axis(values: Any, scale: Any) -> int | None:
  """Returns the axis along which blocks lie, or None if sizes do not fit.

  It is -1, or -2 for a stack [..., k, n]. Values and linear scales have the
  same size along all other axes.
  """
  of_values, of_scale = tuple(values.shape), tuple(scale.shape)
  if len(of_values) < 2 or len(of_scale) != len(of_values):
    return None
  if of_values[:-1] == of_scale[:-1]:
    return -1 if of_scale[-1] else None
  is_stack = len(of_values) > 2 and of_values[:-2] == of_scale[:-2]
  is_along_k = is_stack and of_values[-1] == of_scale[-1] and of_scale[-2]
  return -2 if is_along_k else None


def scale_block(weight: Any, scale: Any) -> tuple[int, int] | None:
  """Returns how many rows and columns of FP8 share a scale; None if unclear."""
  if len(weight.shape) < 2 or len(scale.shape) != len(weight.shape):
    return None
  *lead, n, k = weight.shape
  *scale_lead, rows, columns = scale.shape
  if lead != scale_lead or not n or not k or k % formats.MXFP8.block_size:
    return None
  for size in _SCALE_ROWS:
    for width in _SCALE_COLUMNS:
      if -(-n // size) == rows and -(-k // width) == columns:
        return size, width
  return None


def require_known_global(
  second: GlobalScale, format: formats.BlockFormat
) -> None:
  """Raises TypeError if NVFP4 lacks a global scale, or MX has one."""
  who, name = second.who, second.name
  if format.has_global_scale and second.given is None:
    raise TypeError(
      f"{who}: {name} must be given for {format}, because without it weights"
      " are wrong by orders of magnitude, got None; pass 1.0 if the"
      " checkpoint has none"
    )
  require_no_global(second, format)


def require_no_global(second: GlobalScale, format: formats.BlockFormat) -> None:
  """Raises TypeError if a format without a global scale has one."""
  if second.given is not None and not format.has_global_scale:
    raise TypeError(
      f"{second.who}: {second.name} must be None for {format}, which has none;"
      f" leave {second.name} out"
    )


def has_dtypes(format: formats.BlockFormat, values: Any, scale: Any) -> bool:
  # Bytes are read as E4M3. Only tensors with E5M2's dtype are E5M2.
  of_values = {formats.PACKED} if format.is_fp4 else {format.values_dtype}
  if format == formats.MXFP8:
    of_values.add(formats.PACKED)
  return values.dtype in of_values and scale.dtype in (
    format.scale_dtype,
    formats.PACKED,
  )


def fits_swizzled(format: formats.BlockFormat, values: Any, scale: Any) -> bool:
  """Returns whether values and swizzled, padded scales fit a format."""
  bits = format.block_size * format.value_bits
  return (
    values.shape[-1] * 8 % bits == 0
    and has_dtypes(format, values, scale)
    and math.prod(scale.shape) == math.prod(swizzled_shape(format, values))
  )


def swizzled_shape(format: formats.BlockFormat, qdata: Any) -> tuple[int, ...]:
  *lead, rows, size = qdata.shape
  columns = size * 8 // (format.block_size * format.value_bits)
  return layouts.swizzled_shape((*lead, rows, columns))


def brief(x: Any) -> str:
  """Returns dtype and shape for a message."""
  return f"{x.dtype}{list(x.shape)}"


def assemble(
  format: formats.BlockFormat,
  values: Any,
  scale: Any,
  second: GlobalScale | None = None,
  *,
  offset: Any = None,
  axis: int = -1,
  is_swizzled: bool = False,
) -> scaled_array.ScaledArray:
  """Returns a `ScaledArray` of parts whose format is known.

  Values and scales may be bytes. Scales have the shape of the result. `offset`
  has the zero points or minima.

  Raises:
    TypeError: If the shape or dtype of the global scale does not fit.
    CheckpointError: If the global scale is out of range.
  """
  multiplier = None
  if second is not None and second.given is not None:
    given = second.given
    if not isinstance(given, jax.Array):
      given = np.asarray(given)
    second = dataclasses.replace(second, given=given)
    parts = require_global_scale(
      second.who, second.name, given, values.shape, axis
    )
    if parts < 2 or not is_swizzled:  # tiles do not have the order of rows
      scale, second = _replace_zeros(values, scale, second, axis, parts)
    multiplier = _multiplier(second, values, axis, parts)
  dtype = formats.PACKED if format.has_pairs else format.array_dtype
  return scaled_array.ScaledArray(
    viewed(values, dtype),
    viewed(scale, format.scale_dtype),
    multiplier,
    format,
    scale_layout=layouts.SWIZZLED if is_swizzled else layouts.LINEAR,
    offset=offset,
  )


def viewed(x: Any, dtype: np.dtype) -> Any:
  """Returns the same bytes with another dtype of one byte."""
  if x.dtype == dtype:
    return x
  if isinstance(x, np.ndarray):
    return x.view(dtype)
  return lax.bitcast_convert_type(x, dtype)


def from_linear(
  values: Any, scale: Any, second: GlobalScale, *, is_optional: bool = False
) -> scaled_array.ScaledArray:
  """Returns a `ScaledArray` of values, linear scales and a global scale.

  Unless it is optional, NVFP4 must have a global scale.
  """
  format = find_format(second.who, values, scale)
  if is_optional:
    require_no_global(second, format)
  else:
    require_known_global(second, format)
  axis = blocked_axis(values, scale)
  assert axis is not None  # they fit a format
  if is_float(scale):
    scale = _as_e4m3(second.who, scale)
  blocks = values.shape[axis] * 8 // (format.block_size * format.value_bits)
  scale = repeated(scale, blocks // scale.shape[axis], axis, blocks)
  array = assemble(format, values, scale, second, axis=axis)
  if array.global_scale is None or len(values.shape) < 3:
    return array
  scale, multiplier = _folded(array.scale, array.global_scale)
  return scaled_array.ScaledArray(array.values, scale, multiplier, format)


def _as_e4m3(who: str, scale: Any) -> Any:
  """Returns block scales in E4M3, which must hold them exactly."""
  if not is_known(scale):
    raise TypeError(
      f"{who}: block scales in {scale.dtype} must be concrete arrays, so that"
      " they can be compared with E4M3, got traced ones; cast them to"
      " float8_e4m3fn"
    )
  with np.errstate(invalid="ignore", over="ignore"):
    codes = scale.astype(formats.E4M3)
  same = (codes.astype(np.float32) == scale) | (scale != scale)
  if not bool(same.all()):
    bad = float(np.asarray(scale)[~np.asarray(same)].reshape(-1)[0])
    raise errors.CheckpointError(
      f"{who}: block scales in {scale.dtype} must be representable in E4M3, as"
      f" NVFP4 requires, got {bad:g}; quantize the"
      " unquantized weight"
    )
  return codes


def repeated(x: Any, times: int, axis: int, size: int) -> Any:
  """Returns an array with each index repeated, cut to a size."""
  if times > 1:
    x = (np if isinstance(x, np.ndarray) else jnp).repeat(x, times, axis=axis)
  if x.shape[axis] == size:
    return x
  cut = [slice(None)] * len(x.shape)
  cut[axis] = slice(size)
  return x[tuple(cut)]


def _folded(scale: Any, multiplier: Any) -> tuple[Any, Any]:
  """Returns block scales and one multiplier an expert, if both are exact.

  `ragged_dot` takes one global scale for each expert. The largest one of an
  expert stays, and block scales are multiplied by the ratios of the others.
  """
  if multiplier.size in (1, math.prod(multiplier.shape[:-2])):
    return scale, multiplier
  if not (is_known(scale) and is_known(multiplier)):
    return scale, multiplier
  parts = np.asarray(multiplier, np.float64)
  largest = parts.max(axis=(-1, -2), keepdims=True)
  with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
    ratio = np.where(largest > 0, parts / largest, 1)
    numbers = np.asarray(viewed(scale, formats.E4M3)).astype(np.float64)
    wanted = numbers * ratio
    codes = wanted.astype(formats.E4M3)
    is_exact = codes.astype(np.float64) == wanted
  if not bool((is_exact | np.isnan(numbers)).all()):
    return scale, multiplier
  return codes, largest.astype(np.float32)


def _multiplier(second: GlobalScale, values: Any, axis: int, parts: int) -> Any:
  """Returns the f32 that multiplies, with the rank of values.

  Its shape is [..., n, 1] if parts of the rows have different global scales.
  """
  given = second.given.astype(np.float32)
  if is_known(given):
    _require_range(second, np.asarray(given))
  with np.errstate(divide="ignore", over="ignore"):
    given = np.float32(1) / given if second.divides else given
  lead = tuple(values.shape[:-2])
  if parts == 0:
    return given.reshape((1,) * len(values.shape))
  if parts > 1 and is_known(given) and bool((given == given[..., :1]).all()):
    given, parts = given[..., 0], 1
  if parts == 1:
    return given.reshape((*lead, 1, 1))
  rows = _rows(values.shape, axis)
  given = repeated(given, rows // parts, -1, rows)
  return given.reshape((*lead, rows, 1) if axis == -1 else (*lead, 1, rows))


def _require_range(second: GlobalScale, given: np.ndarray) -> None:
  """Raises CheckpointError for a global scale that is probably inverted."""
  allowed, divides = second.allowed, second.divides
  if allowed is None:
    return
  is_good = is_allowed(given, allowed, divides)
  if is_good.all():
    return
  smallest, largest = allowed
  bad = float(given[~is_good].reshape(-1)[0])
  word = "divides" if divides else "multiplies"
  bounds = [1 / largest, 1 / smallest] if divides else [smallest, largest]
  raise errors.CheckpointError(
    f"{second.who}: {second.name} {word}, and must be in [{bounds[0]:.4g},"
    f" {bounds[1]:.4g}] or 1, got {bad:g}; ModelOpt's weight_scale_2 (about"
    " 1e-4) multiplies,"
    " compressed-tensors' weight_global_scale (1e3 to 1e4) divides; if the"
    " value is intended, pass global_scale_range=None"
  )


def is_allowed(
  given: np.ndarray, allowed: Range, divides: bool = False
) -> np.ndarray:
  """Returns which global scales are in a range, or 1."""
  smallest, largest = allowed
  with np.errstate(divide="ignore", over="ignore"):
    numbers = 1 / given.astype(np.float64) if divides else given
  return (numbers >= smallest) & (numbers <= largest) | (given == 1)


def _replace_zeros(
  values: Any, scale: Any, second: GlobalScale, axis: int, parts: int
) -> tuple[Any, GlobalScale]:
  """Returns block scales and global scale, changed if all values are 0.

  Some tools write a global scale of 0, infinity or NaN for a tensor of zeros,
  and NaN block scales. The global scale becomes 1 and NaN block scales become
  0, so the weight is exactly 0. Traced arrays stay as they are. The values are
  packed FP4, because only NVFP4 has a global scale.
  """
  if not all(map(is_known, (values, scale, second.given))):
    return scale, second
  numbers = np.asarray(second.given, np.float32)
  limits = np.finfo(np.float32)
  usable = second.allowed or (float(limits.tiny), float(limits.max))
  is_odd = ~is_allowed(numbers, usable, second.divides)
  if not is_odd.any():
    return scale, second
  lead = tuple(values.shape[:-2])
  magnitudes = np.asarray(values).view(np.uint8) & _FP4_MAGNITUDES
  has_number: Any = magnitudes.any(axis)
  if parts == 0:
    where = is_odd.reshape(()) & ~has_number.any()
  else:
    has_number = has_number.reshape(*lead, parts, -1).any(-1)
    where = is_odd.reshape(*lead, parts) & ~has_number
  numbers = np.where(where.reshape(numbers.shape), np.float32(1), numbers)
  if parts > 1:
    where = where.repeat(_rows(values.shape, axis) // parts, -1)
  if parts:
    where = np.expand_dims(where, axis)
  codes = np.asarray(scale).view(np.uint8)
  is_nan = (codes & ~np.uint8(SIGN)) == E4M3_NAN
  scale = np.where(is_nan & where, np.uint8(0), codes).view(formats.E4M3)
  return scale, dataclasses.replace(second, given=numbers)


def is_known(x: Any) -> bool:
  """Returns whether this process can read the elements of an array."""
  if isinstance(x, np.ndarray):
    return True
  return not isinstance(x, jax.core.Tracer) and x.is_fully_addressable


# FP8 and integers whose scales are floats that multiply.


def find_scaled_format(
  who: str,
  dtype: np.dtype,
  shape: tuple[int, ...],
  scale: Any,
  zero_dtype: np.dtype | None = None,
) -> formats.BlockFormat:
  """Returns the format of FP8 or integers [..., n, k] with float scales.

  The shape of the scales determines which values share a scale. There is one
  for a matrix, for each row, for groups of a row, or for square blocks.

  Scales in bf16 or f16 become f32 if only the f32 format has a name.

  Args:
    who: the caller.
    dtype: float8_e4m3fn, float8_e5m2, int8 or int4.
    shape: the logical shape of the values.
    scale: one number for the array or for each matrix; [..., n] or [..., n, 1];
      [..., n, k / size]; or [..., n / size, k / size], rounded up.
    zero_dtype: dtype of zero points: uint8 for int4, int8 for int8; or None.

  Raises:
    TypeError: If the shape or the dtype of the scales does not fit.
  """
  block = _scaled_block(shape, tuple(scale.shape), dtype == formats.INT4)
  if block is None or scale.dtype not in _SCALE_DTYPES or dtype not in _NAMES:
    raise TypeError(
      f"{who}: scales must be floats, one for a matrix [n, k], a row, a group"
      f" of k or a square block of {', '.join(map(str, _SCALE_SIZES))}, got"
      f" {brief(scale)} for {dtype}{list(shape)}; pass both as the file stores"
      " them"
    )
  rows, size = block
  if zero_dtype is not None and (rows > 1 or not is_float(scale)):
    raise TypeError(
      f"{who}: zero points need scales in float32, bfloat16 or float16, one for"
      f" a matrix, a row or a group of k, got {brief(scale)} for"
      f" {dtype}{list(shape)}"
    )
  name = f"{rows}x{size}" if size else "row"
  is_unsigned = zero_dtype == formats.PACKED
  if zero_dtype is not None:
    name += "_zero"
  made = formats.BlockFormat(
    name=f"{'u' if is_unsigned else ''}{_NAMES[dtype]}_{name}_{scale.dtype}",
    values_dtype=dtype,
    scale_dtype=scale.dtype,
    block_size=size,
    block_rows=rows,
    offset_dtype=zero_dtype,
    code_offset=_UNSIGNED if is_unsigned else 0,
  )
  found = formats.named(made)
  if not found.is_named and is_float(scale):
    found = formats.named(dataclasses.replace(made, scale_dtype=formats.F32))
  return found if found.is_named else made


def _scaled_block(
  shape: tuple[int, ...], scale_shape: tuple[int, ...], is_packed: bool
) -> tuple[int, int] | None:
  """Returns how many rows and values of k share a scale; 0 for all of k."""
  if len(shape) < 2 or not shape[-1]:
    return None
  *lead, n, k = shape
  row = (1, 0)
  if scale_shape in ((), (1,), (*lead, n)):
    return row
  if lead and scale_shape in ((*lead,), (*lead, 1, 1)):
    return row
  if len(scale_shape) != len(shape) or [*scale_shape[:-2]] != lead:
    return None
  rows, columns = scale_shape[-2:]
  if rows == n and columns == 1 and not (is_packed and k in _SCALE_SIZES):
    return row
  if rows == n and columns:
    for size in _SCALE_SIZES:
      if size * columns == k:
        return 1, size
    if blocking.divide_up(k, _SHORT_SIZE) == columns:
      return 1, _SHORT_SIZE
    return None if k % columns else (1, k // columns)
  for size in () if is_packed else _SCALE_SIZES:
    if (rows, columns) == tuple(blocking.divide_up(x, size) for x in (n, k)):
      return size, size
  return row if (rows, columns) == (1, 1) else None


def assemble_scaled(
  who: str, dtype: np.dtype, values: Any, scale: Any, zero_points: Any = None
) -> scaled_array.ScaledArray:
  """Returns a `ScaledArray` of values [..., n, k] and scales that multiply.

  Args:
    who: the caller.
    dtype: the dtype of the values, int4 for bytes of two.
    values: the values.
    scale: see `find_scaled_format`. A matrix's scale is repeated for its rows.
    zero_points: uint8 (int4) or int8 (int8) of the shape of scale; or None.
  """
  shape = tuple(values.shape)
  if dtype == formats.INT4:
    shape = (*shape[:-1], 2 * shape[-1])
  zero_dtype = None if zero_points is None else zero_points.dtype
  format = find_scaled_format(who, dtype, shape, scale, zero_dtype)
  wanted = layouts.linear_scale_shape(format, shape, len(shape) - 1)
  if scale.dtype != format.scale_dtype:
    scale = scale.astype(format.scale_dtype)
  offset = None
  if zero_points is not None:
    offset = _spread(zero_points, wanted)
  return assemble(format, values, _spread(scale, wanted), offset=offset)


def _spread(scale: Any, wanted: tuple[int, ...]) -> Any:
  """Returns scales in the shape of the result, repeated for a matrix's rows."""
  if math.prod(scale.shape) == math.prod(wanted):
    return scale.reshape(wanted)
  xp: Any = np if isinstance(scale, np.ndarray) else jnp
  lead = wanted[:-2]
  one_each = lead if math.prod(scale.shape) > 1 else (1,) * len(lead)
  return xp.broadcast_to(scale.reshape(*one_each, 1, 1), wanted).copy()
