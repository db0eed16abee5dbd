# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The arguments of a dot, checked and converted to sides and arrays.

The functions that validate support arrays, tracers, abstract values and
`ShapeDtypeStruct`s. Errors name the argument, the rule, the given value and the
remedy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import interleaving, layouts, scaled_array, validation
from jaxplugin.core import blocking, error_context, formats
from jaxplugin.dot import calls, sides

_I32: Final = np.iinfo(np.int32)

FASTEST: Final = "fastest"

Operand = jax.Array | scaled_array.ScaledArray


def sides_of(
  lhs: Operand,
  rhs: Operand,
  lhs_scale: jax.Array | None,
  rhs_scale: jax.Array | None,
  *,
  dimension_numbers: Any,
  block_size: int | tuple[int, int] | None,
) -> tuple[sides.Side, sides.Side]:
  """Returns the sides of `block_scaled_dot`, whose arguments these are.

  `validate_sides` checks their shapes.

  Raises:
    TypeError: If an operand is not an array or its format is unknown, the
      dimension numbers are malformed, or neither operand is quantized.
    ValueError: If `block_size` is not that of the formats.
  """
  given = (
    _with_origin(side_of("lhs", lhs, lhs_scale), lhs),
    _with_origin(side_of("rhs", rhs, rhs_scale), rhs),
  )
  numbers = canonical_dimension_numbers(
    dimension_numbers, given[0].ndim, given[1].ndim
  )
  both = [
    side.replace(contracting=contracting, batch=batch)
    for side, contracting, batch in zip(given, *numbers, strict=True)
  ]
  if block_size is not None:
    _validate_block_size(block_size, *both)
  padded = block_size is not None
  lhs_side, rhs_side = (_with_axis(x, padded).in_rows() for x in both)
  if lhs_side.format is None and rhs_side.format is None:
    raise TypeError(
      f"{sides.who()}: lhs or rhs must be quantized, got"
      f" {lhs_side.values.dtype} and {rhs_side.values.dtype} without scale"
      " factors. Quantize one with jaxplugin.quantize, pass quantized values"
      " with their scale factors, or call jax.lax.dot_general"
    )
  return lhs_side, rhs_side


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["array"],
  meta_fields=["name", "format"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Offset:
  """The offset of one operand of a product.

  Attributes:
    name: "lhs" or "rhs".
    format: the format of the operand, which has an `offset_dtype`.
    array: the zero points or minima, of the shape of the operand's scale.
  """

  name: str
  format: formats.BlockFormat
  array: Any


def has_offset(operand: Any) -> bool:
  return (
    isinstance(operand, scaled_array.ScaledArray) and operand.offset is not None
  )


def split_offset(lhs: Any, rhs: Any) -> tuple[Any, Any, Offset | None]:
  """Returns both operands without an offset, and the offset of one or None.

  An lhs with an offset is dequantized to f32 if rhs is quantized, because block
  sums of rhs would read all weights once more.
  """
  for name, operand in (("lhs", lhs), ("rhs", rhs)):
    if has_offset(operand):
      scaled_array.require_arrays(sides.who(), name, operand)
  if has_offset(lhs) and isinstance(rhs, scaled_array.ScaledArray):
    lhs = lhs.dequantize()
  if has_offset(rhs):
    offset = Offset(name="rhs", format=rhs.format, array=rhs.offset)
    return lhs, rhs.without_offset(), offset
  if has_offset(lhs):
    offset = Offset(name="lhs", format=lhs.format, array=lhs.offset)
    return lhs.without_offset(), rhs, offset
  return lhs, rhs, None


def side_of(name: str, operand: Any, scale: Any = None) -> sides.Side:
  """Returns a `Side` for an argument; its dimensions are not set yet."""
  if isinstance(operand, scaled_array.ScaledArray):
    if scale is not None:
      raise TypeError(
        f"{sides.who()}: {name}_scale must be None if {name} is a ScaledArray,"
        f" which contains its scale; leave {name}_scale out"
      )
    scaled_array.require_arrays(sides.who(), name, operand)
    return scaled_side(name, operand.to_floats())
  values = array(name, operand)
  if scale is None:
    return sides.Side(name=name, values=in_f32(values))
  scale = array(f"{name}_scale", scale)
  format = formats.infer(np.dtype(values.dtype), np.dtype(scale.dtype))
  if format is None:
    raise TypeError(
      f"{sides.who()}: {name} {values.dtype} with {name}_scale {scale.dtype}"
      " is not a block format; known formats:"
      f" {formats.pairs_table()}{_view_remedy(name, scale.dtype)}; for another"
      f" format pass a ScaledArray as {name}, without {name}_scale"
    )
  return sides.Side(name=name, values=values, scale=scale, format=format)


def scaled_side(name: str, operand: scaled_array.ScaledArray) -> sides.Side:
  """Returns a `Side` for a `ScaledArray`; its dimensions are not set yet.

  Raises:
    NotImplementedError: If the array has offsets, which a side does not have.
  """
  if operand.offset is not None:
    raise NotImplementedError(
      f"{sides.who()}: {name} must have no zero points or minima, got"
      f" {operand.format}. Pass {name}.dequantize()"
    )
  # With k = 0, values and scale have the same shape, which does not show the
  # blocked axis.
  # Square blocks are blocked along the dimension that is contracted.
  is_known = operand.scale_layout != layouts.LINEAR or (
    not operand.format.is_square
    and tuple(operand.values.shape) != tuple(operand.scale.shape)
  )
  return sides.Side(
    name=name,
    values=operand.values,
    scale=operand.scale,
    global_scale=operand.global_scale,
    format=operand.format,
    axis=operand.axis if is_known else None,
    scale_layout=operand.scale_layout,
  )


def _view_remedy(side: str, scale_dtype: np.dtype) -> str:
  """Returns the remedy for a scale of raw bytes; "" for another scale."""
  if scale_dtype not in (np.uint8, np.int8):
    return ""
  return (
    f"; view it as {formats.E8M0.name} for MX formats or as"
    f" {formats.E4M3.name} for NVFP4: {side}_scale.view(jnp.float8_...)"
  )


def _with_origin(side: sides.Side, operand: Operand) -> sides.Side:
  """Adds the array that was quantized to the operand, and rhs's stack."""
  if not isinstance(operand, scaled_array.ScaledArray):
    return side
  source = operand.quantized_from()
  if source is not None:
    global_scale = jax.lax.stop_gradient(operand.global_scale)
    side = side.replace(source=source, source_global_scale=global_scale)
  layer = operand.layer_of() if side.name == "rhs" else None
  if layer is not None:
    stack = layer[0].to_floats()
    side = side.replace(
      stack=stack.values, stack_scale=stack.scale, layer=layer[1]
    )
  return side


def _with_axis(side: sides.Side, padded: bool) -> sides.Side:
  """Infers the side's blocked dimension from the shapes, if it is not set."""
  if side.format is None or side.axis is not None or side.format.is_square:
    return side
  validate_values(side)
  validate_scale_rank(side)
  values, scale, name = side.values, side.scale, side.name

  def fits(side: sides.Side) -> bool:
    pairs = zip(scale.shape, side.scale_shape, strict=True)
    return all(h >= n if padded else h == n for h, n in pairs)

  contracting = side.contracting
  in_range = [d for d in dict.fromkeys(contracting) if 0 <= d < values.ndim]
  candidates = [side.replace(axis=d) for d in in_range or [values.ndim - 1]]
  fitting = candidates
  if len(candidates) > 1:
    fitting = [candidate for candidate in candidates if fits(candidate)]
  if len(fitting) > 1 and 0 not in values.shape:
    raise TypeError(
      f"{sides.who()}: {name}_scale {tuple(scale.shape)} must divide one"
      f" contracting dimension into blocks, and fits several, {contracting},"
      f" of {name} {tuple(values.shape)}; reshape them into one"
    )
  return (fitting or candidates)[-1]


def _validate_block_size(
  block_size: int | tuple[int, int], lhs: sides.Side, rhs: sides.Side
) -> None:
  sizes: tuple[Any, Any] = (block_size, block_size)
  if isinstance(block_size, tuple) and len(block_size) == 2:
    sizes = block_size
  for side, size in ((lhs, sizes[0]), (rhs, sizes[1])):
    if side.format is not None and not (
      error_context.is_integer(size) and size == side.format.block_size
    ):
      raise ValueError(
        f"{sides.who()}: block_size must be {side.format.block_size} for"
        f" {side.name} of {side.format}, got {error_context.shown(block_size)};"
        " leave block_size out"
      )


def reject_negative_scale(side: sides.Side, given: Any = None) -> None:
  """Raises ValueError if a concrete NVFP4 scale is negative.

  Padding may be negative. Tracers and arrays with shards on other hosts are
  not checked.

  Args:
    given: its scale before the conversion to an array, which would be a tracer
      in a trace. None is the scale of `side`.
  """
  scale = side.scale if given is None else given
  if side.format != formats.NVFP4 or isinstance(scale, jax.core.Tracer):
    return
  if not getattr(scale, "is_fully_addressable", True):
    return
  if not validation.has_negative_code(scale):
    return
  with jax.ensure_compile_time_eval():  # not a tracer, also in a trace
    linear = side.replace(scale=jnp.asarray(scale)).linear_scale()
  # FP8 scales may be stored as uint8.
  exact = np.asarray(linear).view(formats.E4M3)
  negative = np.argwhere(validation.negative_codes(exact))
  if len(negative):
    where = tuple(int(i) for i in negative[0])
    raise ValueError(
      f"{sides.who()}: {side.name}_scale of {side.format} must not be negative"
      f" (Blackwell ignores the sign bit), got {exact[where]} at {where};"
      " negate the values of the block instead"
    )


def array(name: str, x: Any) -> jax.Array:
  is_array = hasattr(x, "shape") and hasattr(x, "dtype")
  if isinstance(x, scaled_array.ScaledArray):
    raise TypeError(
      f"{sides.who()}: {name} must be a plain array, got {x!r}; dequantize it"
    )
  if not is_array and not isinstance(x, (int, float, list)):
    raise TypeError(
      f"{sides.who()}: {name} must be an array, got {type(x).__name__}"
    )
  return scaled_array.as_array(sides.who(), name, x)


def as_operand(name: str, x: Any) -> Any:
  """Converts an operand to an array, float64 to float32.

  A `ScaledArray` is returned unchanged.
  """
  if isinstance(x, scaled_array.ScaledArray):
    return x
  return in_f32(array(name, x))


def in_f32(x: jax.Array) -> jax.Array:
  """Rounds float64 to float32; returns other dtypes unchanged."""
  return x.astype(jnp.float32) if x.dtype == np.float64 else x


def float_operand(name: str, x: Any) -> jax.Array:
  x = array(name, x)
  if x.dtype not in formats.FLOAT_DTYPES:
    raise TypeError(
      f"{sides.who()}: {name} must be float32, bfloat16 or float16, got"
      f" {x.dtype}; cast it"
    )
  return x


def epilogue_operand(name: str, x: Any) -> jax.Array:
  """Converts a bias or a residual to an array, float64 to float32."""
  return float_operand(name, in_f32(array(name, x)))


def integers(name: str, x: Any) -> jax.Array:
  """Converts integers to i32, clipped to its range; returns floats unchanged.

  JAX would wrap integers beyond i32 around.
  """
  if isinstance(x, (int, list, np.ndarray, np.generic)):
    given = np.asarray(x)
    if given.dtype.kind in "iu" and given.dtype.itemsize > 4:
      x = given.clip(_I32.min, _I32.max).astype(np.int32)
  x = array(name, x)
  if not jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == np.int32:
    return x
  own = np.iinfo(x.dtype)
  low, high = max(own.min, _I32.min), min(own.max, _I32.max)
  return jnp.clip(x, low, high).astype(np.int32)


def as_global_scale(global_scale: Any) -> jax.Array:
  if error_context.is_number(global_scale):
    global_scale = error_context.finite_f32(
      sides.who(), "global_scale", global_scale
    )
  else:
    global_scale = array("global_scale", global_scale)
    if global_scale.dtype != np.float32:
      raise TypeError(
        f"{sides.who()}: global_scale must be float32, got"
        f" {global_scale.dtype}; cast it"
      )
  result = jnp.asarray(global_scale, jnp.float32)
  return result.reshape(()) if result.size == 1 and result.ndim else result


# Checks.


def canonical_dimension_numbers(
  dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int
) -> sides.DimensionNumbers:
  """Returns dimension numbers as tuples of ints.

  None contracts the last dimensions. The leading dimensions are then batch if
  the ranks are equal, or rows of lhs if rhs has rank 2.

  Raises:
    TypeError: If they do not have the form of `lax.dot_general`, or are None
      for other ranks.
  """
  if dimension_numbers is None:
    if rhs_ndim < 2 or (lhs_ndim != rhs_ndim and not lhs_ndim > rhs_ndim == 2):
      raise TypeError(
        f"{sides.who()}: without dimension_numbers lhs and rhs must have the"
        " same rank of at least 2, (..., m, k) and (..., n, k), or rhs must"
        " have rank 2 and lhs a higher one, (..., k) and (n, k), got ranks"
        f" {lhs_ndim} and {rhs_ndim}; pass dimension_numbers"
      )
    batch = tuple(range(rhs_ndim - 2))
    return ((lhs_ndim - 1,), (rhs_ndim - 1,)), (batch, batch)
  try:
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = map(
      error_context.as_tuple, error_context.as_tuple(dimension_numbers)
    )
    as_dims = lambda dims: tuple(
      map(error_context.as_integer, error_context.as_tuple(dims))
    )
    return (
      (as_dims(lhs_contracting), as_dims(rhs_contracting)),
      (as_dims(lhs_batch), as_dims(rhs_batch)),
    )
  except (TypeError, ValueError):
    raise TypeError(
      f"{sides.who()}: dimension_numbers must be ((lhs_contracting,"
      " rhs_contracting), (lhs_batch, rhs_batch)), got"
      f" {error_context.shown(dimension_numbers)}"
    ) from None


def is_fastest(precision: Any) -> bool:
  """Returns whether `precision` is `FASTEST`; raises as below if invalid."""
  canonical_precision(precision)
  return isinstance(precision, str) and precision == FASTEST


def canonical_precision(precision: Any) -> bool:
  """Returns whether `precision` is or contains HIGHEST.

  Raises:
    ValueError: If it is neither a precision nor `FASTEST`.
  """
  if isinstance(precision, str) and precision == FASTEST:
    return False
  items = precision if isinstance(precision, (tuple, list)) else (precision,)
  try:
    if any(isinstance(i, (int, float, np.generic)) for i in items):
      raise TypeError  # lax.Precision takes numbers
    precisions = [lax.Precision(i) for i in items if i is not None]
  except (TypeError, ValueError):
    raise ValueError(
      f"{sides.who()}: precision must be None, 'default', 'high', 'highest',"
      f" 'fastest' or a jax.lax.Precision, got {error_context.shown(precision)}"
    ) from None
  return lax.Precision.HIGHEST in precisions


def product_dtype(lhs: np.dtype, rhs: np.dtype) -> np.dtype:
  """Returns the operand dtype with the wider range, then the finer one.

  For bf16 and f16 it is bf16. The result of `jp.dot_general` has this dtype
  without preferred_element_type.
  """
  properties = lambda x: (jnp.finfo(x).maxexp, jnp.finfo(x).nmant)
  return np.dtype(max(lhs, rhs, key=properties))


def parts_dtype(dtype: Any) -> np.dtype | None:
  """Returns `reduce_dtype` as a NumPy dtype; raises TypeError."""
  if dtype is None:
    return None
  return formats.require_float_dtype(
    sides.who(), "reduce_dtype", dtype, ", or None for float32"
  )


def result_dtype(dtype: Any) -> np.dtype:
  """Returns `preferred_element_type` as a NumPy dtype; raises TypeError."""
  return formats.require_float_dtype(
    sides.who(),
    "preferred_element_type",
    jnp.float32 if dtype is None else dtype,
  )


def validate_sides(call: calls.DotCall) -> None:
  """Checks lhs, rhs and their scales; raises TypeError."""
  for side in (call.lhs, call.rhs):
    validate_values(side)
  numbers = call.dimension_numbers
  validate_dimension_numbers(
    sides.who(),
    numbers,
    call.lhs.shape,
    call.rhs.shape,
    lambda *dims: sizes_remedy(
      call.lhs,
      call.rhs,
      dims,
      transposed=(
        "without dimension_numbers rhs is (n, k): for a weight (k, n)"
        " quantize its transpose"
      ),
    ),
  )
  if not call.lhs.contracting:
    raise TypeError(
      f"{sides.who()}: dimension_numbers must name a contracting dimension, got"
      f" {numbers}; pass dequantized arrays to jax.lax.dot_general"
    )
  for side in (call.lhs, call.rhs):
    if side.format is not None:
      validate_scale(side, padded=call.padded_scales)


def validate_dimension_numbers(
  who: str,
  dimension_numbers: sides.DimensionNumbers,
  lhs_shape: Sequence[int],
  rhs_shape: Sequence[int],
  remedy: Callable[[int, int], str] = lambda *_: "",
) -> None:
  """Raises TypeError unless dimension numbers match the logical shapes.

  Args:
    remedy: (lhs dimension, rhs dimension) -> text that the error adds if these
      contracting dimensions have different sizes.
  """
  contracting, batch = dimension_numbers
  for kind, (lhs_dims, rhs_dims) in (
    ("contracting", contracting),
    ("batch", batch),
  ):
    if len(lhs_dims) != len(rhs_dims):
      raise TypeError(
        f"{who}: dimension_numbers must have as many {kind} dimensions for lhs"
        f" as for rhs, got {lhs_dims} and {rhs_dims}; pass dimension_numbers"
        " as for jax.lax.dot_general"
      )
  for side, shape, dims in (
    ("lhs", lhs_shape, contracting[0] + batch[0]),
    ("rhs", rhs_shape, contracting[1] + batch[1]),
  ):
    if any(not 0 <= d < len(shape) for d in dims):
      raise TypeError(
        f"{who}: dimension_numbers name dimensions {dims} of {side}, which has"
        f" rank {len(shape)} (shape {tuple(shape)}); count dimensions from 0"
      )
    if len(set(dims)) != len(dims):
      raise TypeError(
        f"{who}: dimension_numbers name a dimension of {side} twice: {dims};"
        " pass each as a contracting or as a batch dimension"
      )
  for kind, (lhs_dims, rhs_dims) in (
    ("contracting", contracting),
    ("batch", batch),
  ):
    for lhs_dim, rhs_dim in zip(lhs_dims, rhs_dims, strict=True):
      if lhs_shape[lhs_dim] != rhs_shape[rhs_dim]:
        do_this = "; broadcast one side to the batch sizes of the other"
        if kind == "contracting":
          do_this = remedy(lhs_dim, rhs_dim)
        raise TypeError(
          f"{who}: {kind} sizes must agree, got {lhs_shape[lhs_dim]} in"
          f" dimension {lhs_dim} of lhs {tuple(lhs_shape)} and"
          f" {rhs_shape[rhs_dim]} in dimension {rhs_dim} of rhs"
          f" {tuple(rhs_shape)} (logical shapes)"
          f"{do_this}"
        )


def sizes_remedy(
  lhs: Any,
  rhs: Any,
  dims: tuple[int, int],
  *,
  names: tuple[str, str] = ("lhs", "rhs"),
  transposed: str = "",
) -> str:
  """Returns the remedy if two contracting sizes differ, or "" if none is known.

  Args:
    lhs, rhs: plain or quantized arrays, or sides.
    names: argument names of lhs and rhs in the caller.
    transposed: remedy if another dimension of rhs has the size of lhs.
  """
  given = tuple(zip(names, (lhs, rhs), dims, strict=True))
  for (name, plain, dim), (other, quantized, k) in (given, given[::-1]):
    format = _block_format(quantized)
    if format is None or _block_format(plain) is not None:
      continue
    size, wanted = plain.shape[dim], quantized.shape[k]
    if not isinstance(size, int) or (
      blocking.round_up(size, format.block_size) != wanted
    ):
      continue
    widths = [(0, 0)] * len(plain.shape)
    widths[dim] = (0, wanted - size)
    return (
      f"; if {other} was padded with zeros to whole blocks, as by"
      f" quantize(pad=True), pad {name} too: jnp.pad({name}, {widths})"
    )
  others = [size for d, size in enumerate(rhs.shape) if d != dims[1]]
  if transposed and lhs.shape[dims[0]] in others:
    return f"; {transposed}"
  return ""


def _block_format(x: Any) -> formats.BlockFormat | None:
  # JAX arrays have a `format` too: their memory layout.
  format = getattr(x, "format", None)
  return format if isinstance(format, formats.BlockFormat) else None


def validate_values(side: sides.Side) -> None:
  """Checks the dtype of one operand's values; raises TypeError."""
  format, values, name = side.format, side.values, side.name
  if format is None:
    if values.dtype not in formats.FLOAT_DTYPES:
      remedy = "cast it, or quantize it with jaxplugin.quantize"
      if sides.who() == "block_scaled_dot":  # Only it has `{name}_scale`.
        remedy = f"pass {name}_scale for quantized values, else {remedy}"
      raise TypeError(
        f"{sides.who()}: {name} without a scale must be float32, bfloat16 or"
        f" float16, got {values.dtype}; {remedy}"
      )
    return
  if values.dtype == interleaving.WORDS and (
    layouts.may_be_interleaved(format)
  ):
    return
  if values.dtype not in format.storage_dtypes:
    allowed = " or ".join(dtype.name for dtype in format.storage_dtypes)
    raise TypeError(
      f"{sides.who()}: {name} values of {format} must be {allowed}, got"
      f" {values.dtype}{validation.values_remedy(values.dtype, format)}"
    )


def validate_scale(side: sides.Side, *, padded: bool = False) -> None:
  """Checks the block scale of a quantized operand; raises TypeError."""
  format, axis, scale = side.format, side.axis, side.scale
  assert format is not None and axis is not None
  contracting = side.contracting
  name = f"{side.name}_scale"
  if scale.dtype != format.scale_dtype:
    raise TypeError(
      f"{sides.who()}: {name} of {format} must be {format.scale_dtype.name},"
      f" got {scale.dtype}"
      f"{validation.view_remedy(scale.dtype, format.scale_dtype)}"
    )
  validate_scale_rank(side)
  shape = side.shape
  if axis not in contracting:
    raise TypeError(
      f"{sides.who()}: {side.name} must be blocked along a contracting"
      f" dimension, got blocks along dimension {axis} and contraction over"
      f" {contracting}; quantize {side.name} with axis={contracting[-1]}"
    )
  block = format.block_size
  expected = side.scale_shape
  if side.scale_layout == layouts.SWIZZLED:
    if axis != len(shape) - 1 or len(shape) < 2:
      raise TypeError(
        f"{sides.who()}: a swizzled {name} needs the contracting dimension"
        f" last, got dimension {axis} of {side.name} {shape}; use a linear"
        " scale"
      )
    expected = layouts.swizzled_shape(expected)
  if padded and side.scale_layout == layouts.LINEAR:
    _validate_padded_scale(side, expected)
    return
  if (
    not format.may_be_short
    and expected[axis] * block != shape[axis]
    and side.scale_layout == layouts.LINEAR
  ):
    raise TypeError(
      f"{sides.who()}: {side.name} contracting size must be a multiple of"
      f" {block} for {format.name.upper()}, got k={shape[axis]}; pad lhs and"
      " rhs"
    )
  if tuple(scale.shape) != expected:
    raise TypeError(
      f"{sides.who()}: {name} of {format} for {side.name} {shape} must have"
      f" shape {expected} (one scale per {block} values of dimension {axis}),"
      f" got {tuple(scale.shape)}; for a padded scale pass block_size={block}"
    )


def validate_scale_rank(side: sides.Side) -> None:
  """Raises TypeError unless the scale has the rank of the values."""
  if side.scale.ndim != side.values.ndim:
    name = f"{side.name}_scale"
    raise TypeError(
      f"{sides.who()}: {name} must have the rank of {side.name}, got {name}"
      f" {tuple(side.scale.shape)} for {side.name} {tuple(side.values.shape)};"
      " keep a dimension of size 1 where a scale covers the dimension"
    )


def _validate_padded_scale(side: sides.Side, expected: Sequence[int]) -> None:
  pairs = zip(side.scale.shape, expected, strict=True)
  if any(
    have != need if d in side.batch else have < need
    for d, (have, need) in enumerate(pairs)
  ):
    raise TypeError(
      f"{sides.who()}: padded {side.name}_scale for {side.name} {side.shape}"
      f" must have shape {tuple(expected)}, or more in dimensions that are not"
      f" batch, got {tuple(side.scale.shape)}; leave block_size out if the"
      " scale is not padded"
    )


def validate_global_scale(scale: Any, shape: Sequence[int]) -> None:
  """Raises TypeError unless a scale is one number or fits the result."""
  if scale.ndim and (
    scale.ndim != len(shape)
    or any(
      have not in (1, want)
      for have, want in zip(scale.shape, shape, strict=True)
    )
  ):
    raise TypeError(
      f"{sides.who()}: global_scale must have one element, or the rank of the"
      f" result {tuple(shape)} and size 1 where it does not vary, got shape"
      f" {tuple(scale.shape)}; reshape it"
    )
