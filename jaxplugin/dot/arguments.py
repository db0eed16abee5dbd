# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The arguments of a dot, checked and converted to sides and arrays."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts, scaled_array, validation
from jaxplugin.core import error_context, formats
from jaxplugin.dot import calls, sides
from jaxplugin.jaxext import jax_private

_I32: Final = np.iinfo(np.int32)

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

  `calls.validate_sides` checks their shapes.

  Raises:
    TypeError: If an operand is not an array or its format is unknown, the
      dimension numbers are malformed, or neither operand is quantized.
    ValueError: If `block_size` is not that of the formats.
  """
  both = side_of("lhs", lhs, lhs_scale), side_of("rhs", rhs, rhs_scale)
  contracting, batch = calls.canonical_dimension_numbers(
    dimension_numbers, both[0].ndim, both[1].ndim
  )
  result = []
  for i, (side, operand) in enumerate(zip(both, (lhs, rhs), strict=True)):
    side = side.replace(contracting=contracting[i], batch=batch[i])
    if isinstance(operand, scaled_array.ScaledArray):
      side = _with_origin(side, operand)
    result.append(side)
  if block_size is not None:
    _validate_block_size(block_size, *result)
  padded = block_size is not None
  lhs_side, rhs_side = (_in_rows(_with_axis(x, padded)) for x in result)
  if lhs_side.format is None and rhs_side.format is None:
    raise TypeError(
      f"{sides.who()}: lhs or rhs must be quantized, got unquantized"
      f" {lhs_side.values.dtype} and {rhs_side.values.dtype}; quantize one, or"
      " call jax.lax.dot_general"
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


def _in_rows(side: sides.Side) -> sides.Side:
  """Returns `side.in_rows()`, which remembers the scale of square blocks."""
  rows = side.in_rows()
  if side.format is None or not side.format.is_square:
    return rows
  return rows.replace(square_scale=side.scale)


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


def _with_origin(
  side: sides.Side, operand: scaled_array.ScaledArray
) -> sides.Side:
  """Adds the array that was quantized to the operand, and rhs's stack."""
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
  calls.validate_values(side)
  calls.validate_scale_rank(side)
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
    if side.format is not None and side.format.block_size != size:
      raise ValueError(
        f"{sides.who()}: block_size must be {side.format.block_size} for"
        f" {side.name} of {side.format}, got {error_context.shown(block_size)}"
      )


def reject_negative_scale(side: sides.Side) -> None:
  """Raises ValueError if a concrete NVFP4 scale is negative.

  Padding may be negative. Tracers and arrays with shards on other hosts are
  not checked.
  """
  scale = side.scale
  if side.format != formats.NVFP4 or isinstance(scale, jax.core.Tracer):
    return
  if not getattr(scale, "is_fully_addressable", True):
    return
  if not validation.has_negative_code(scale):
    return
  # FP8 scales may be stored as uint8.
  exact = np.asarray(side.linear_scale()).view(formats.E4M3)
  negative = np.argwhere(validation.negative_codes(exact))
  if len(negative):
    where = tuple(int(i) for i in negative[0])
    raise ValueError(
      f"{sides.who()}: {side.name}_scale of {side.format} must not be negative"
      f" (Blackwell ignores the sign bit), got {exact[where]} at {where}"
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
  if x.dtype not in sides.PLAIN_DTYPES:
    raise TypeError(
      f"{sides.who()}: {name} must be float32, bfloat16 or float16, got"
      f" {x.dtype}"
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
  if not np.issubdtype(x.dtype, np.integer) or x.dtype == np.int32:
    return x
  own = np.iinfo(x.dtype)
  low, high = max(own.min, _I32.min), min(own.max, _I32.max)
  return jnp.clip(x, low, high).astype(np.int32)


def as_global_scale(global_scale: Any) -> jax.Array:
  if not isinstance(global_scale, (int, float)):
    global_scale = array("global_scale", global_scale)
    if global_scale.dtype != np.float32:
      raise TypeError(
        f"{sides.who()}: global_scale must be float32, got"
        f" {global_scale.dtype}; cast it"
      )
  result = jnp.asarray(global_scale, jnp.float32)
  return result.reshape(()) if result.size == 1 and result.ndim else result


def vary_alike(flat: list[jax.Array]) -> list[jax.Array]:
  """Makes all operands vary over the same mesh axes inside `shard_map`."""
  varying = [jax_private.varying_axes(x) for x in flat]
  union = frozenset().union(*varying)
  return [
    x if own == union else jax.lax.pcast(x, tuple(union - own), to="varying")
    for x, own in zip(flat, varying, strict=True)
  ]
