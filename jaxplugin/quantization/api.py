# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize`: block-scaled arrays from floats; `quantize_both`, along two axes.

What does the work is one of `backends`, with the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.arrays import scale_signs
from jaxplugin.arrays import scaled_array
from jaxplugin.core import blocking
from jaxplugin.core import extents
from jaxplugin.core import formats
from jaxplugin.core import speaking
from jaxplugin.jaxext import tangents
from jaxplugin.quantization import arguments
from jaxplugin.quantization import quantize_primitive
from jaxplugin.quantization.sharding import named_axes
from jaxplugin.quantization.sharding import resharding

ScaleRounding = arguments.ScaleRounding
SCALE_ROUNDINGS: Final = arguments.SCALE_ROUNDINGS
Derivative = Literal["straight_through"]
STRAIGHT_THROUGH: Final = "straight_through"


def quantize(
  x: jax.Array,
  format: formats.BlockFormat | str,
  *,
  axis: int = -1,
  scale_rounding: ScaleRounding = "up",
  global_scale: jax.Array | float | None = None,
  key: jax.Array | None = None,
  batch_dims: int = 0,
  derivative: Derivative | None = None,
  pad: bool = False,
  packed: bool | None = None,
  scale_layout: layouts.ScaleLayout = layouts.LINEAR,
  out_sharding: Any = None,
  axis_name: named_axes.AxisName | None = None,
) -> scaled_array.ScaledArray:
  """Quantizes `x` to a block-scaled format along `axis`.

  MX formats, per block of 32, with amax the largest magnitude of the block:
    scale  = 2^ceil(log2(amax / max))                 scale_rounding="up"
    scale  = 2^(floor(log2(amax)) - emax)             scale_rounding="floor"
    values = cast(clip(x / scale, -max, max))
  NVFP4, per block of 16:
    global_scale = max(|x|) / (448 * 6), at least 2^-126; 1 when x is all zero
    scale  = e4m3(amax / 6 / global_scale), at least 2^-9; 0 when amax is 0
    values = e2m1(clip(x / (scale * global_scale), -6, 6))

  Everything is computed in f32 whatever the input dtype, divisions correctly
  rounded, exponents by integer operations, f32 subnormals honoured: the bits
  are the same on every platform. Casts round to nearest even, and saturate.

  A block that holds a NaN or an Inf gets a NaN scale (E8M0 255, E4M3 0x7F) and
  zero values, so all of it dequantizes to NaN; it takes no part in NVFP4's
  global scale. An all-zero block gets scale code 0 and dequantizes to 0. 2^-9
  is E4M3's smallest positive number: NVFP4 blocks 2^18 and more below the
  tensor's maximum would get scale 0 without it, and lose all values (ModelOpt
  clamps alike). Values below 2^-11 * global_scale round to 0. Zeros keep their
  sign.

  A sharding of x changes no bit where its dimensions are divisible. Where
  `with_sharding_constraint` leaves some devices of an uneven dimension nothing,
  XLA gathers what leaves `jit` as a sum of floats: -0 becomes 0 (of plain
  arrays too), and E8M0 code 0, of an all-zero block, becomes NaN. Keep such a
  dimension whole, or pad it; what is used inside of the same `jit` is right.

  It has no derivative: one that is asked for is an error, of this function. To
  train, use `dot_general`, or derivative="straight_through". Then quantization
  counts as the identity in derivatives of any order of what `block_scaled_dot`
  and `dequantize` make of the result: they are those of the dot at the
  quantized numbers, with x in their place. That is so of values that were
  clipped too (scale_rounding="floor", or a global_scale that is too small for
  x; nothing else clips) and of those rounded to zero. A given global_scale is a
  constant then. The result has x as one more leaf, `surrogate`: what is not
  jitted keeps x alive, a jitted function that takes no derivative drops it.

  Args:
    x: f32, bf16 or f16[..., k, ...] (f64 is rounded to f32 first), with k a
      multiple of the block size.
    format: e.g. `jp.MXFP8`, or its name, "mxfp8".
    axis: the axis to block; for an operand, the one that a dot contracts.
    scale_rounding: "up" never saturates (NVIDIA's recipe, also JAX's and
      Transformer Engine's); "floor" is OCP MX v1.0 section 6.3, where values
      above max saturate. NVFP4 scales are rounded to nearest always.
    global_scale: f32[], positive and finite, to use instead of the computed
      one. Only for formats with a global scale. Under batch_dims also f32 of
      the leading dimensions.
    key: a `jax.random` key for stochastic rounding of the values: up with a
      probability equal to the discarded fraction, so unbiased inside the range.
    batch_dims: how many leading dimensions index tensors that get a global
      scale each, as by `vmap`: 1 for a stack of layers to scan over or to take
      experts from. Without it a stack in NVFP4 has one global scale, [1, 1, 1],
      of which JAX's `scan` and `vmap` say "different leading axis sizes" and
      "inconsistent sizes". It changes nothing where there are no global scales.
      Known
      arrays on one device are quantized one after the other by kernels; what is
      traced, all at once by operations, which take longer on CPUs.
    derivative: None or "straight_through".
    pad: pads x with zeros along `axis` to a multiple of the block size, as
      `dot_general` does. The result has the padded shape. Zeros add nothing to
      a product with another side that is padded alike.
    packed: how FP4 values are stored. None or True: as uint8, two a byte along
      the blocked axis, the first in the low nibble. False: as float4_e2m1fn.
      (None is False for FP4 of an own format whose blocks are of 2 values or of
      an odd number.) Of other formats each value is its own element. On a GPU
      bytes are written in the order of x's dimensions, float4_e2m1fn with
      `axis` minor, as cuDNN reads it: what a product of the same program
      contracts along another axis than the last is not moved there with False.
    out_sharding: of values and scale, a `PartitionSpec` or a `NamedSharding` of
      explicit mesh axes: x is quantized where it lies, and bytes are sent. None
      is the sharding of x, but for axes that would cut blocks: over these the
      result is whole.
    axis_name: inside of `jax.shard_map`, mesh axes over which x is split, one
      name or several. Then a computed global scale is of the whole array: one
      maximum over these devices, as `jit` with shardings has it. Without it it
      is of each device's part. (Names of `jax.vmap` are taken too.) It changes
      nothing where there are no global scales.

  Returns:
    `ScaledArray` of x's shape, with a linear scale, and an f32 global scale of
    x's rank: x's sizes in the first batch_dims dimensions, and 1 in the others.
    (None for MX formats.) Its values are format.values_dtype[x.shape]; packed
    ones uint8 of that shape with the blocked axis halved, the same bits. XLA
    moves bytes as they are. FP4 it slices value by value on CPUs, so that a
    scan over float4_e2m1fn or a gather of it takes 10 times as long or more,
    and what leaves `jit` in an uneven sharding is wrong there. Between devices
    it moves FP4 as f16, four times the bytes, but where this package moves it:
    in products, `dequantize` and `shard`.

  Raises:
    TypeError: x is not a float array (a `ScaledArray` is not), axis is not an
      integer, pad is not a bool, k is not a multiple of the block size, or key
      is not a `jax.random` key.
    ValueError: axis, scale_rounding, global_scale, batch_dims, derivative,
      packed, scale_layout or axis_name is not acceptable; or out_sharding cuts
      a block, is given for swizzled scales, or is none that JAX takes.
    NotImplementedError: without derivative="straight_through", a derivative by
      x or global_scale is asked for.

  Sources: OCP MX v1.0 section 6.3; NVIDIA "Recipes for Pre-training LLMs with
  MXFP8" (2025) for rounding up; cuDNN block scaling for NVFP4.
  """
  who = speaking.who("quantize")
  x = arguments.float_array(who, x)
  format = formats.resolve(who, format)
  axis = layouts.canonical_axis(who, axis, x.ndim)
  speaking.require_bool(who, "pad", pad)
  if pad:
    x = extents.pad_axis(
      x, axis, extents.round_up(x.shape[axis], format.block_size)
    )
  arguments.validate(who, x, format, (axis,), scale_rounding)
  arguments.validate_key(who, key)
  packed = arguments.whether_packed(who, packed, format)
  arguments.validate_batch_dims(who, batch_dims, x.ndim, axis)
  arguments.validate_scale_layout(
    who, scale_layout, x.shape[batch_dims:], axis - batch_dims
  )
  global_scale = arguments.given_global_scale(
    who, global_scale, format, x.shape[:batch_dims]
  )
  if out_sharding is not None and scale_layout != layouts.LINEAR:
    raise ValueError(
      f'{who}: out_sharding must be None unless scale_layout is "linear", got'
      f" scale_layout={speaking.shown(scale_layout)}; quantize with linear"
      " scales, then call swizzle_scale"
    )
  surrogate, x, global_scale = _split_derivative(
    who, derivative, x, global_scale
  )
  global_scale = named_axes.global_scale(
    who,
    x,
    format,
    (axis,),
    axis_name=axis_name,
    given=global_scale,
    batch_dims=batch_dims,
  )
  values, scale, global_scale = _quantize(
    x,
    global_scale,
    key,
    format,
    axis,
    scale_rounding,
    batch_dims,
    packed,
    scale_layout,
    in_turn=batch_dims > 0 and key is None and _is_on_one_device(x),
  )
  if out_sharding is not None:
    values, scale = resharding.moved(
      who, values, scale, format, axis, out_sharding
    )
  scale_signs.remember_positive(scale)
  result = scaled_array.ScaledArray(
    values,
    scale,
    global_scale,
    format,
    scale_layout=scale_layout,
    surrogate=surrogate,
  )
  is_plain = (
    format.is_known
    and axis == x.ndim - 1 > 0
    and not batch_dims
    and key is None
    and derivative is None
    and out_sharding is None
    and (scale_rounding == "up" or not format.scale_is_power_of_two)
  )
  if is_plain and arguments.is_small(x):
    result.remember_origin(x)
  return result


def quantize_both(
  x: jax.Array,
  format: formats.BlockFormat | str,
  *,
  axes: tuple[int, int] = (-1, -2),
  scale_rounding: ScaleRounding = "up",
  global_scale: jax.Array | float | None = None,
  derivative: Derivative | None = None,
  packed: bool | None = None,
  axis_name: named_axes.AxisName | None = None,
) -> tuple[scaled_array.ScaledArray, scaled_array.ScaledArray]:
  """Quantizes `x` along one axis and along another.

  The same bits as, and on GPUs up to half the reads of,

    quantize(x, format, axis=axes[0]), quantize(x, format, axis=axes[1])

  with the other arguments as given. Training needs both: blocks lie along the
  dimension that a product contracts, and a product and its gradients contract
  different ones. (`dot_general` does it by itself.)

  One kernel reads once where `axes` are the last two, in either order, on a GPU
  (of several, on each); elsewhere each axis is
  quantized by itself. A result that is not used is not computed. NVFP4's global
  scales are computed one for each axis: they are equal unless x holds a NaN or
  an Inf, which spoils a block along either axis, of other numbers. Each result
  has the shape of x; no axis is transposed.

  Args:
    x: as of `quantize`, of rank 2 or more; the sizes of both axes are multiples
      of the block size.
    format: as of `quantize`.
    axes: two different axes.
    scale_rounding: as of `quantize`.
    global_scale: as of `quantize`, used for both.
    derivative: as of `quantize`.
    packed: as of `quantize`: FP4 values of each result are packed along its own
      blocked axis.
    axis_name: as of `quantize`.

  Returns:
    One `ScaledArray` for each of `axes`.

  Raises:
    TypeError: x is not a float array, an axis is not an integer, or a size is
      not a multiple of the block size.
    ValueError: axes, scale_rounding, global_scale, derivative, packed or
      axis_name is not acceptable.
    NotImplementedError: as of `quantize`.
  """
  x = arguments.float_array("quantize_both", x)
  format = formats.resolve("quantize_both", format)
  axes = arguments.two_axes(axes, x.ndim)
  arguments.validate("quantize_both", x, format, axes, scale_rounding)
  packed = arguments.whether_packed("quantize_both", packed, format)
  surrogate, x, global_scale = _split_derivative(
    "quantize_both",
    derivative,
    x,
    arguments.given_global_scale("quantize_both", global_scale, format),
  )
  global_scale = named_axes.global_scale(
    "quantize_both", x, format, axes, axis_name=axis_name, given=global_scale
  )
  first, second = quantize_blocked(
    x,
    format,
    [blocking.Blocking.along(axis, x.ndim, format.block_size) for axis in axes],
    scale_rounding=scale_rounding,
    global_scale=global_scale,
    packed=packed,
  )
  first.surrogate = second.surrogate = surrogate
  return first, second


def quantize_blocked(
  x: jax.Array,
  format: formats.BlockFormat,
  blockings: Sequence[blocking.Blocking],
  *,
  scale_rounding: ScaleRounding,
  global_scale: jax.Array | None = None,
  packed: bool = False,
  for_products: bool = False,
) -> list[scaled_array.ScaledArray]:
  """`quantize` of each blocking of `x`, from one read where kernels can.

  Args:
    for_products: as of `QuantizeProblem`; the rest as of `quantize`.
  """
  results = _quantize_blocked(
    x,
    global_scale,
    format,
    tuple(blockings),
    scale_rounding,
    packed,
    for_products,
  )
  for _, scale, _ in results:
    scale_signs.remember_positive(scale)
  return [
    scaled_array.ScaledArray(values, scale, computed, format)
    for values, scale, computed in results
  ]


@functools.partial(
  jax.jit,
  static_argnames=(
    "format",
    "blockings",
    "scale_rounding",
    "packed",
    "for_products",
  ),
)
def _quantize_blocked(
  x: jax.Array,
  global_scale: jax.Array | None,
  format: formats.BlockFormat,
  blockings: tuple[blocking.Blocking, ...],
  scale_rounding: ScaleRounding,
  packed: bool,
  for_products: bool,
) -> list[tuple[jax.Array, jax.Array, jax.Array | None]]:
  x, global_scale = _without_derivative("quantize_both", x, global_scale)
  results = quantize_primitive.quantize(
    x,
    global_scale,
    format=format,
    blockings=blockings,
    scale_rounding=scale_rounding,
    packed=packed,
    for_products=for_products,
    scale_layout=layouts.LINEAR,
  )
  return [
    (values, scale, _of_rank(computed, values.ndim))
    for values, scale, computed in results
  ]


# Jitted as one, so that an eager call compiles one program and not forty.
@functools.partial(
  jax.jit,
  static_argnames=(
    "format",
    "axis",
    "scale_rounding",
    "batch_dims",
    "packed",
    "scale_layout",
    "in_turn",
  ),
)
def _quantize(
  x: jax.Array,
  global_scale: jax.Array | None,
  key: jax.Array | None,
  format: formats.BlockFormat,
  axis: int,
  scale_rounding: ScaleRounding,
  batch_dims: int,
  packed: bool,
  scale_layout: layouts.ScaleLayout,
  in_turn: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Values, scale and global scale of `quantize`.

  Args:
    in_turn: whether tensors that get a global scale each are quantized one
      after the other, by kernels, and not all at once, by operations.
  """
  x, global_scale = _without_derivative("quantize", x, global_scale)
  if not format.has_global_scale:
    batch_dims = 0
  if key is not None and batch_dims:
    key = jax.random.split(key, x.shape[:batch_dims])
  function: Callable[..., Any] = functools.partial(
    _quantize_tensor,
    format=format,
    axis=axis - batch_dims,
    scale_rounding=scale_rounding,
    scale_layout=scale_layout,
  )
  is_one = global_scale is None or not global_scale.ndim
  if batch_dims and in_turn and x.size:
    batch = x.shape[:batch_dims]
    # XLA:CPU writes FP4 into a longer array value by value, and bytes at once.
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
      values = layouts.unpack_fp4(values, axis=axis)
  else:
    function = functools.partial(function, packed=packed)
    in_axes = (0, None if is_one else 0, None if key is None else 0)
    for _ in range(batch_dims):
      function = jax.vmap(function, in_axes)
    values, scale, global_scale = function(x, global_scale, key)
  return values, scale, _of_rank(global_scale, x.ndim)


def _quantize_in_turn(
  function: Callable[..., Any],
  x: jax.Array,
  global_scale: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`function` of each tensor."""
  if global_scale is not None:
    global_scale = jnp.broadcast_to(global_scale, x.shape[:1])
  return lax.map(lambda args: function(*args), (x, global_scale))


def _is_on_one_device(x: jax.Array) -> bool:
  return not isinstance(x, jax.core.Tracer) and len(x.devices()) == 1


def _quantize_tensor(
  x: jax.Array,
  global_scale: jax.Array | None,
  key: jax.Array | None,
  *,
  format: formats.BlockFormat,
  axis: int,
  scale_rounding: ScaleRounding,
  packed: bool,
  scale_layout: layouts.ScaleLayout,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """`_quantize` with a global scale f32[]."""
  params: dict[str, Any] = {
    "format": format,
    "scale_rounding": scale_rounding,
    "packed": packed,
    "scale_layout": scale_layout,
  }
  along = blocking.Blocking.along(axis, x.ndim, format.block_size)
  (result,) = quantize_primitive.quantize(
    x, global_scale, blockings=(along,), keys=(key,), **params
  )
  return result


def _of_rank(global_scale: jax.Array | None, ndim: int) -> jax.Array | None:
  """A global scale of leading dimensions with all of an array's."""
  if global_scale is None:
    return None
  return jnp.expand_dims(global_scale, tuple(range(global_scale.ndim, ndim)))


def _split_derivative(
  who: str,
  derivative: Derivative | None,
  x: jax.Array,
  global_scale: jax.Array | None,
) -> tuple[jax.Array | None, jax.Array, jax.Array | None]:
  """The surrogate, and what is quantized."""
  if derivative is None:
    return None, x, global_scale
  if derivative != STRAIGHT_THROUGH:
    raise ValueError(
      f"{who}: derivative must be None or {STRAIGHT_THROUGH!r}, got"
      f" {speaking.shown(derivative)}"
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
