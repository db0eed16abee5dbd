# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize` along one axis and `quantize_both` along two.

One of `backends` computes the results; all backends compute the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxplugin.arrays import layouts, scaled_array, validation
from jaxplugin.core import blocking, error_context, formats
from jaxplugin.jaxext import tangents
from jaxplugin.quantization import (
  arguments,
  integers,
  operands,
  problems,
  quantize_primitive,
)
from jaxplugin.quantization.sharding import assignment, global_scales

Derivative = Literal["straight_through"]
STRAIGHT_THROUGH: Final = "straight_through"


def quantize(
  x: jax.Array,
  format: formats.BlockFormat | str,
  *,
  axis: int = -1,
  scale_rounding: arguments.ScaleRounding | integers.PackageRule = "up",
  global_scale: jax.Array | float | None = None,
  key: jax.Array | None = None,
  batch_dims: int = 0,
  derivative: Derivative | None = None,
  pad: bool = False,
  packed: bool | None = None,
  scale_layout: layouts.ScaleLayout = layouts.LINEAR,
  out_sharding: Any = None,
  axis_name: global_scales.AxisName | None = None,
) -> scaled_array.ScaledArray:
  """Quantizes `x` to a block-scaled format along `axis`.

  For each block, with amax its largest magnitude and max that of the format::

    scale  = cast(amax / max)                      (f32, f16, bf16 scales)
    scale  = 2^ceil(log2(amax / max))              (MX, scale_rounding="up")
    scale  = 2^(floor(log2(amax)) - emax)          (MX, scale_rounding="floor")
    values = cast(clip(x / scale, -max, max))

  NVFP4, per block of 16::

    global_scale = max(|x|) / (448 * 6), at least 2^-126; 1 if x is all zero
    scale  = e4m3(amax / 6 / global_scale), at least 2^-9; 0 if amax is 0
    values = e2m1(clip(x / (scale * global_scale), -6, 6))

  The arithmetic is f32, with equal bits on every platform. Casts round to
  nearest even and saturate. A block with a NaN or Inf dequantizes to NaN and
  does not affect the global scale. A block of zeros stays zeros.

  Args:
    x: f32, bf16, f16 or f64[..., k, ...]. f64 becomes f32 first.
    format: a `BlockFormat` or its name, "mxfp8".
    axis: blocked axis; for an operand, the contracting dimension.
    scale_rounding: MX formats: "up" never saturates, "floor" may. Integers:
      also "ggml" or "compressed_tensors".
    global_scale: positive f32[] that replaces the computed one, or f32 of the
      first `batch_dims` dimensions.
    key: `jax.random` key of stochastic rounding; None rounds to nearest.
    batch_dims: number of leading dimensions with a global scale per index.
    derivative: None, or "straight_through" (the derivative of the identity).
    pad: whether to pad `axis` with zeros to whole blocks.
    packed: False returns 4-bit values one by one, not as uint8 pairs.
    scale_layout: "linear" or "swizzled_128x4".
    out_sharding: `PartitionSpec` or `NamedSharding` of explicit mesh axes.
    axis_name: axes of an enclosing `jax.shard_map` that share a global scale.

  Returns:
    A `ScaledArray` of x's shape.

  Raises:
    TypeError: If a dtype, rank or size does not fit.
    ValueError: If a parameter is invalid, or out_sharding cuts a block.
    NotImplementedError: If differentiated without `derivative`.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> x_q = jp.quantize(jnp.arange(32.0).reshape(1, 32), "mxfp8")
    >>> x_q.values[0, -3:]
    Array([224, 240, 256], dtype=float8_e4m3fn)
    >>> x_q.scale
    Array([[0.125]], dtype=float8_e8m0fnu)

  See also:
    `jp.dequantize`; the page "Numerics".

  Source: OCP MX v1.0 section 6.3; arXiv 2506.08027 ("up"); arXiv 2509.25149.
  """
  who = error_context.who("quantize")
  x = arguments.float_array(who, x)
  format = formats.resolve(who, format)
  axis = layouts.canonical_axis(who, axis, x.ndim)
  error_context.require_bool(who, "pad", pad)
  if pad and format.block_size:
    x = blocking.pad_axis(
      x, axis, blocking.round_up(x.shape[axis], format.block_size)
    )
  rule = arguments.package_rule(who, scale_rounding, format)
  rounding: arguments.ScaleRounding = (
    "floor" if scale_rounding == "floor" else "up"
  )
  arguments.validate(who, x, format, (axis,), rounding)
  arguments.validate_key(who, key, format)
  packed = arguments.whether_packed(who, packed, format, x.shape[axis])
  arguments.validate_batch_dims(who, batch_dims, x.ndim, axis)
  arguments.validate_scale_layout(
    who, scale_layout, format, x.ndim, axis, batch_dims
  )
  global_scale = arguments.given_global_scale(
    who, global_scale, format, x.shape[:batch_dims]
  )
  if out_sharding is not None and scale_layout != layouts.LINEAR:
    raise ValueError(
      f'{who}: out_sharding must be None unless scale_layout is "linear", got'
      f" scale_layout={error_context.shown(scale_layout)}; quantize with linear"
      " scales, then call swizzle_scale"
    )
  surrogate, x, global_scale = _split_derivative(
    who, derivative, x, global_scale
  )
  if axis_name is not None:
    global_scale = global_scales.global_scale(
      who,
      x,
      format,
      (axis,),
      axis_name=axis_name,
      given=global_scale,
      batch_dims=batch_dims,
    )
  values, scale, global_scale, offset = _quantize(
    x,
    global_scale,
    key,
    format,
    axis,
    rounding,
    batch_dims,
    packed,
    scale_layout,
    rule=rule,
    in_turn=batch_dims > 0 and key is None and _is_on_one_device(x),
  )
  if out_sharding is not None:
    values, scale = assignment.moved(
      who, values, scale, format, axis, out_sharding
    )
    if offset is not None:
      offset = jax.sharding.reshard(offset, out_sharding)
  if rule != "ggml":
    validation.remember_positive(scale)
  result = scaled_array.ScaledArray(
    values,
    scale,
    global_scale,
    format,
    scale_layout=scale_layout,
    surrogate=surrogate,
    offset=offset,
  )
  is_plain = (
    format.is_known
    and axis == x.ndim - 1 > 0
    and not batch_dims
    and key is None
    and derivative is None
    and out_sharding is None
    and scale_rounding == "up"
  )
  if is_plain and arguments.is_small(x):
    result.remember_origin(x)
  return result


def quantize_both(
  x: jax.Array,
  format: formats.BlockFormat | str,
  *,
  axes: tuple[int, int] = (-1, -2),
  scale_rounding: arguments.ScaleRounding = "up",
  global_scale: jax.Array | float | None = None,
  derivative: Derivative | None = None,
  packed: bool | None = None,
  axis_name: global_scales.AxisName | None = None,
) -> tuple[scaled_array.ScaledArray, scaled_array.ScaledArray]:
  """Quantizes `x` along two axes.

  The results have the bits of two calls::

    quantize(x, format, axis=axes[0]), quantize(x, format, axis=axes[1])

  A GPU kernel writes both from one read of `x` if `axes` are the last two.
  Otherwise each axis is quantized separately. A result that the program does
  not use is not computed.

  NVFP4's global scale is computed per axis. Both are equal unless `x` holds a
  NaN or an Inf, which invalidates different blocks along each axis.

  Args:
    x: as for `quantize`, of rank 2 or more. Both axes must be multiples of the
      block size.
    format: a `BlockFormat` or its name.
    axes: two different axes.
    scale_rounding: as for `quantize`.
    global_scale: as for `quantize`; one f32[] for both results.
    derivative: as for `quantize`.
    packed: as for `quantize`. FP4 values are packed along the blocked axis of
      each result.
    axis_name: as for `quantize`.

  Returns:
    Two `ScaledArray`s of x's shape, in the order of `axes`. No axis is
    transposed.

  Raises:
    TypeError: If x is not a float array, an axis is not an integer, or a size
      is not a multiple of the block size.
    ValueError: If a parameter is invalid.
    NotImplementedError: If differentiated without `derivative`.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> rows, columns = jp.quantize_both(jnp.ones((32, 64)), "mxfp8")
    >>> rows.scale.shape, columns.scale.shape
    ((32, 2), (1, 64))

  See also:
    `jp.dot_general`, which does this for training.
  """
  who = error_context.who("quantize_both")
  x = arguments.float_array(who, x)
  format = formats.resolve(who, format)
  axes = arguments.two_axes(who, axes, x.ndim)
  arguments.validate(who, x, format, axes, scale_rounding)
  if format.may_be_short:
    along = lambda axis: quantize(
      x,
      format,
      axis=axis,
      scale_rounding=scale_rounding,
      global_scale=global_scale,
      derivative=derivative,
      packed=packed,
      axis_name=axis_name,
    )
    with error_context.in_function(who):
      return along(axes[0]), along(axes[1])
  packed = arguments.whether_packed(who, packed, format, x.shape[axes[0]])
  surrogate, x, global_scale = _split_derivative(
    who,
    derivative,
    x,
    arguments.given_global_scale(who, global_scale, format),
  )
  if axis_name is not None:
    global_scale = global_scales.global_scale(
      who, x, format, axes, axis_name=axis_name, given=global_scale
    )
  x, global_scale = _without_derivative("quantize_both", x, global_scale)
  spec_of = lambda axis: operands.QuantizeSpec.along_axis(
    axis, x.shape, format, scale_rounding=scale_rounding
  )
  first, second = operands.quantize_all(
    x,
    tuple(map(spec_of, axes)),
    (None, None),
    global_scale,
    packed=packed,
    for_products=False,
  )
  for result in (first, second):
    validation.remember_positive(result.scale)
    result.surrogate = surrogate
  return first, second


# `jit` makes an eager call compile one program instead of forty.
@functools.partial(
  jax.jit,
  static_argnames=(
    "format",
    "axis",
    "scale_rounding",
    "batch_dims",
    "packed",
    "scale_layout",
    "rule",
    "in_turn",
  ),
)
def _quantize(
  x: jax.Array,
  global_scale: jax.Array | None,
  key: jax.Array | None,
  format: formats.BlockFormat,
  axis: int,
  scale_rounding: arguments.ScaleRounding,
  batch_dims: int,
  packed: bool,
  scale_layout: layouts.ScaleLayout,
  rule: str | None,
  in_turn: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
  """Returns values, scale, global scale and offset of `quantize`.

  Args:
    rule: one of `integers.PACKAGE_RULES`, or None.
    in_turn: whether kernels quantize the tensors of `batch_dims` one after the
      other. Otherwise XLA ops quantize all of them at once.
  """
  x, global_scale = _without_derivative("quantize", x, global_scale)
  size = x.shape[axis]
  format = format.along(size)
  if not format.scales_codes or rule is not None:
    values, scale, offset = integers.quantize_integers(
      x, key, format, axis, packed, rule
    )
    return values, scale, None, offset
  if not format.has_global_scale:
    batch_dims = 0
  if key is not None and batch_dims:
    key = jax.random.split(key, x.shape[:batch_dims])
  along = blocking.Blocking.along(
    axis - batch_dims, x.ndim - batch_dims, format.block_size
  )
  options, rows = problems.NO_OPTIONS, None
  if format.is_square:
    rows = x.ndim - 2 if axis == x.ndim - 1 else x.ndim - 1
    options = problems.RecipeOptions(square=(rows,))

  def function(
    x: jax.Array, global_scale: jax.Array | None, key: Any, *, packed: bool
  ) -> Any:
    (result,), *_ = quantize_primitive.produce(
      x,
      global_scale,
      blockings=(along,),
      keys=(key,),
      options=(options,),
      format=format.of_rows(),
      scale_rounding=scale_rounding,
      packed=packed,
      scale_layout=scale_layout,
    )
    return result

  is_one = global_scale is None or not global_scale.ndim
  if batch_dims and in_turn and x.size:
    batch = x.shape[:batch_dims]
    # XLA:CPU copies bytes into the result of the loop in bulk, but FP4 one
    # value at a time.
    are_bytes = packed or arguments.can_be_packed(format)
    results = _quantize_in_turn(
      functools.partial(function, key=None, packed=are_bytes),
      x.reshape(-1, *x.shape[batch_dims:]),
      None if global_scale is None else global_scale.reshape(-1),
    )
    values, scale, global_scale = (
      leaf.reshape(*batch, *leaf.shape[1:]) for leaf in results
    )
    if are_bytes and not packed:
      values = layouts.unpack_fp4(values, axis=axis, dtype=format.values_dtype)
  else:
    mapped: Callable[..., Any] = functools.partial(function, packed=packed)
    in_axes = (0, None if is_one else 0, None if key is None else 0)
    for _ in range(batch_dims):
      mapped = jax.vmap(mapped, in_axes)
    values, scale, global_scale = mapped(x, global_scale, key)
  if format.may_be_short and size % format.block_size:
    stored = size // 2 if packed else size
    values = lax.slice_in_dim(values, 0, stored, axis=axis)
  if rows is not None:  # the rows of a block have the same scale
    scale = lax.slice_in_dim(scale, 0, None, format.block_rows, axis=rows)
  return values, scale, _of_rank(global_scale, x.ndim), None


def _quantize_in_turn(
  function: Callable[..., Any],
  x: jax.Array,
  global_scale: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Applies `function` to one tensor after the other."""
  if global_scale is not None:
    global_scale = jnp.broadcast_to(global_scale, x.shape[:1])
  return lax.map(lambda args: function(*args), (x, global_scale))


def _is_on_one_device(x: jax.Array) -> bool:
  return not isinstance(x, jax.core.Tracer) and len(x.devices()) == 1


def _of_rank(global_scale: jax.Array | None, ndim: int) -> jax.Array | None:
  """Appends dimensions of size 1 to a global scale, up to rank `ndim`."""
  if global_scale is None:
    return None
  return jnp.expand_dims(global_scale, tuple(range(global_scale.ndim, ndim)))


def _split_derivative(
  who: str,
  derivative: Derivative | None,
  x: jax.Array,
  global_scale: jax.Array | None,
) -> tuple[jax.Array | None, jax.Array, jax.Array | None]:
  """Returns (surrogate or None, x to quantize, global scale)."""
  if derivative is None:
    return None, x, global_scale
  if not error_context.is_one_of(derivative, (STRAIGHT_THROUGH,)):
    raise ValueError(
      f"{who}: derivative must be None or {STRAIGHT_THROUGH!r}, got"
      f" {error_context.shown(derivative)}"
    )
  return x, *lax.stop_gradient((x, global_scale))


def _without_derivative(
  who: str, x: jax.Array, global_scale: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
  return tangents.without_derivative(
    (x, global_scale),
    f"{who}: quantization has no derivative with respect to x or global_scale."
    " To train a model, wrap the function that calls it:"
    " jaxplugin.quantize_dots(f, recipe). For a single matmul use"
    " jaxplugin.dot_general(lhs_format, rhs_format), which quantizes both"
    f" operands and defines the gradient, or {who}(...,"
    ' derivative="straight_through"), whose gradient is that of the identity.'
    " To treat x as a constant, pass jax.lax.stop_gradient(x)",
  )
