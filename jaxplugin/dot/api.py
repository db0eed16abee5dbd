# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`block_scaled_dot`: checks the arguments and binds the primitive."""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.arrays import scale_signs
from jaxplugin.arrays import scaled_array
from jaxplugin.core import error_context
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.dot import calls
from jaxplugin.dot import epilogue
from jaxplugin.dot import guards
from jaxplugin.dot import offsets
from jaxplugin.dot import primitive
from jaxplugin.dot import problems
from jaxplugin.dot import rules
from jaxplugin.dot import sides
from jaxplugin.dot.autodiff import straight_through
from jaxplugin.dot.sharding import explicit
from jaxplugin.jaxext import jax_private
from jaxplugin.tables import resolution

_I32: Final = np.iinfo(np.int32)

Operand = jax.Array | scaled_array.ScaledArray


def block_scaled_dot(
  lhs: Operand,
  rhs: Operand,
  lhs_scale: jax.Array | None = None,
  rhs_scale: jax.Array | None = None,
  global_scale: jax.Array | float | None = None,
  *,
  dimension_numbers: Any = None,
  preferred_element_type: Any = jnp.float32,
  precision: Any = None,
  block_size: int | tuple[int, int] | None = None,
  bias: jax.Array | None = None,
  activation: problems.Activation | None = None,
  residual: jax.Array | None = None,
  out_sharding: Any = None,
  reduce_dtype: Any = None,
  implementation: str | None = None,
) -> jax.Array:
  """Multiplies operands, one or both of them block-scaled.

  Computes, with f32 sums and one cast::

    dot    = dot_general(lhs * lhs_scale, rhs * rhs_scale) * global_scale
    result = cast(activation(dot + bias) + residual)

  A backend returns these bits if f32 holds all products and sums. Otherwise the
  error before the cast is at most `16 * 2^-24 * sum|a * b|` on random data
  (other data: docs/concepts/numerics.md). A NaN scale makes its block NaN.
  Unquantized arguments have derivatives.

  Args:
    lhs: `ScaledArray`, f32, bf16 or f16[..., m, k], or values with `lhs_scale`.
      Packed FP4: uint8[..., k / 2].
    rhs: the same, [..., n, k] or [n, k].
    lhs_scale: f8e8m0fnu[..., m, k / 32]; NVFP4: f8e4m3fn[..., m, k / 16], >= 0.
    rhs_scale: the same for rhs.
    global_scale: f32 that broadcasts to the result; several multiply in turn.
    dimension_numbers: as for `lax.dot_general`. Default: contract the last
      dimensions; leading ones are batch, or rows if rhs has rank 2.
    preferred_element_type: f32, bf16 or f16.
    precision: "highest": global scales stay f32. "fastest": FP8 sums (GPUs).
    block_size: size or pair; accepts padded scales.
    bias: f32, bf16 or f16[n].
    activation: None, "relu", "gelu" (by tanh) or "silu".
    residual: f32, bf16 or f16 of the result's shape.
    out_sharding: as for `lax.dot_general`.
    reduce_dtype: dtype of sums over devices; None is f32.
    implementation: "cudnn", "triton", "cpu", "xla" or "cutile"; None chooses.

  Returns:
    preferred_element_type[batch..., m..., n...].

  Raises:
    TypeError: If a rank, dtype or shape is wrong.
    ValueError: If a parameter is invalid, or a known NVFP4 scale is negative.
    NotImplementedError: If the named backend does not support the call, or
      quantized values are differentiated.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> x_q = jp.quantize(jnp.ones((2, 32)), "mxfp8")
    >>> w_q = jp.quantize(jnp.ones((3, 32)), "mxfp4")
    >>> jp.block_scaled_dot(x_q, w_q, bias=jnp.array([0.0, 1.0, 2.0]))
    Array([[32., 33., 34.],
           [32., 33., 34.]], dtype=float32)

  See also:
    `jp.linear`, `jp.explain`.
  """
  if straight_through.has_surrogate(lhs) or straight_through.has_surrogate(rhs):
    return _straight_through(
      lhs,
      rhs,
      lhs_scale,
      rhs_scale,
      global_scale,
      bias,
      residual,
      dimension_numbers=dimension_numbers,
      preferred_element_type=preferred_element_type,
      precision=precision,
      block_size=block_size,
      activation=activation,
      out_sharding=out_sharding,
      reduce_dtype=reduce_dtype,
      implementation=implementation,
    )
  lhs, rhs, offset = offsets.split(lhs, rhs)
  lhs_side = _with_source(side_of("lhs", lhs, lhs_scale), lhs)
  rhs_side = _with_source(side_of("rhs", rhs, rhs_scale), rhs)
  rhs_side = _with_stack(rhs_side, rhs)
  contracting, batch = rules.canonical_dimension_numbers(
    dimension_numbers, lhs_side.ndim, rhs_side.ndim
  )
  lhs_side = lhs_side.replace(contracting=contracting[0], batch=batch[0])
  rhs_side = rhs_side.replace(contracting=contracting[1], batch=batch[1])
  _validate_block_size(block_size, lhs_side, rhs_side)
  padded = block_size is not None
  lhs_side = _with_axis(lhs_side, padded).in_rows()
  rhs_side = _with_axis(rhs_side, padded).in_rows()
  if lhs_side.format is None and rhs_side.format is None:
    raise TypeError(
      f"{sides.who()}: lhs or rhs must be quantized, got unquantized"
      f" {lhs_side.values.dtype} and {rhs_side.values.dtype}; quantize one, or"
      " call jax.lax.dot_general"
    )
  backends.validate_name(implementation)
  if activation is not None and activation not in problems.ACTIVATIONS:
    raise ValueError(
      f"{sides.who()}: activation must be None or one of"
      f" {problems.ACTIVATIONS}, got {error_context.shown(activation)}"
    )
  call = calls.DotCall(
    lhs=lhs_side,
    rhs=rhs_side,
    preferred_element_type=result_dtype(preferred_element_type),
    highest_precision=rules.canonical_precision(precision),
    fastest_precision=isinstance(precision, str) and precision == rules.FASTEST,
    activation=activation,
    implementation=implementation,
    padded_scales=padded,
    overlay=resolution.overlay(),
    reduce_dtype=rules.parts_dtype(reduce_dtype),
  )
  rules.validate_sides(call)
  if out_sharding is not None:
    sharding = explicit.asked_sharding(call, out_sharding)
    call = call.replace(out_sharding=sharding)
  for side in (lhs_side, rhs_side):
    reject_negative_scale(side)
  return _bind_with_epilogue(call, offset, global_scale, bias, residual)


def _straight_through(
  lhs: Operand,
  rhs: Operand,
  *others: Any,
  dimension_numbers: Any,
  preferred_element_type: Any,
  activation: problems.Activation | None,
  **options: Any,
) -> jax.Array:
  """Computes `block_scaled_dot` if lhs or rhs has a surrogate."""
  arrays: list[Any] = [
    x if isinstance(x, scaled_array.ScaledArray) else array(name, x)
    for name, x in (("lhs", lhs), ("rhs", rhs))
  ]
  names = straight_through.DotArrays._fields[2:]
  for name, x in zip(names, others, strict=True):
    if name == "global_scale":
      x = _explicit_global_scale(x)
    arrays.append(x if x is None else array(name, x))
  numbers = rules.canonical_dimension_numbers(
    dimension_numbers, arrays[0].ndim, arrays[1].ndim
  )
  leaves, tree = jax.tree.flatten(straight_through.DotArrays(*arrays))
  return straight_through.dot(
    straight_through.DotOptions(
      function=functools.partial(
        block_scaled_dot, dimension_numbers=numbers, **options
      ),
      dimension_numbers=numbers,
      dtype=result_dtype(preferred_element_type),
      activation=activation,
    ),
    # Outside `dot`'s custom JVP, so that tangents vary over the same mesh axes
    # as the result.
    jax.tree.unflatten(tree, vary_alike(leaves)),
  )


def _bind_with_epilogue(
  call: calls.DotCall,
  offset: offsets.Offset | None,
  global_scale: Any,
  bias: Any,
  residual: Any,
) -> jax.Array:
  """Brings global scales, bias and residual to the result's rank, and binds."""
  shape = call.shape
  scales = _global_scales(call, global_scale)
  factor, power = epilogue.product(scales)
  if bias is not None:
    bias = float_operand("bias", in_f32(array("bias", bias)))
    bias = _expand_bias(bias, shape, len(call.rhs.free))
  if residual is not None:
    residual = float_operand("residual", in_f32(array("residual", residual)))
    if tuple(residual.shape) != shape:
      raise TypeError(
        f"{sides.who()}: residual must have the result's shape {shape}, got"
        f" {tuple(residual.shape)}"
      )
  call = call.replace(
    lhs=call.lhs.replace(global_scale=None),
    rhs=call.rhs.replace(global_scale=None),
    global_scale=factor,
    global_power=power,
    **_of_two_numbers(scales),
    bias=bias,
    residual=residual,
  )
  call = call.form().filled(vary_alike(call.flatten()))
  rules.validate_epilogue(call)
  if offset is not None:
    return offsets.with_offset(call, offset, _bind)
  return _bind(call)


def _bind(call: calls.DotCall) -> jax.Array:
  """Binds a checked call, with debug checks if they are enabled."""
  _validate_implementation(call)
  result = primitive.bind(call, targets.overriding_target())
  if guards.is_on():
    guards.check(result, call.without_origins())
  return result


def _of_two_numbers(scales: Sequence[jax.Array]) -> dict[str, jax.Array]:
  """Returns `DotCall`'s fields for two scalar global scales, {} for others."""
  if len(scales) != 2 or any(scale.ndim for scale in scales):
    return {}
  first, second = map(jax.lax.stop_gradient, scales)
  return {"first_global_scale": first, "second_global_scale": second}


def _global_scales(call: calls.DotCall, explicit: Any) -> list[jax.Array]:
  """Returns a call's global scales, reshaped to the result's dimensions."""
  scales = []
  offset = len(call.lhs.batch)
  for side in (call.lhs, call.rhs):
    positions = {d: i for i, d in enumerate(side.batch)}
    positions |= {d: i + offset for i, d in enumerate(side.free)}
    offset += len(side.free)
    scales.append(epilogue.global_scale_of(side, positions, len(call.shape)))
  scales.append(_explicit_global_scale(explicit))
  return [scale for scale in scales if scale is not None]


def side_of(name: str, operand: Any, scale: Any = None) -> sides.Side:
  """Returns a `Side` for an argument; its dimensions are not set yet."""
  if isinstance(operand, scaled_array.ScaledArray):
    if scale is not None:
      raise TypeError(
        f"{sides.who()}: {name}_scale must be None if {name} is a ScaledArray,"
        f" which contains its scale; leave {name}_scale out"
      )
    require_arrays(name, operand)
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


def _with_stack(side: sides.Side, operand: Operand) -> sides.Side:
  """Returns the side with its stack if the operand is a slice of a stack."""
  if not isinstance(operand, scaled_array.ScaledArray):
    return side
  found = operand.layer_of()
  if found is None:
    return side
  stack = found[0].to_floats()
  return side.replace(
    stack=stack.values, stack_scale=stack.scale, layer=found[1]
  )


def _with_source(side: sides.Side, operand: Operand) -> sides.Side:
  """Returns the side with the array it was quantized from, if known."""
  if not isinstance(operand, scaled_array.ScaledArray):
    return side
  x = operand.quantized_from()
  if x is None:
    return side
  global_scale = jax.lax.stop_gradient(operand.global_scale)
  return side.replace(source=x, source_global_scale=global_scale)


def require_arrays(name: str, operand: scaled_array.ScaledArray) -> None:
  """Raises TypeError unless the operand's leaves are arrays that match."""
  scaled_array.require_numbers(sides.who(), name, operand)
  scaled_array.require_global_scale(f"{sides.who()}: {name}", operand)


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


def _with_axis(side: sides.Side, padded: bool) -> sides.Side:
  """Infers the side's blocked dimension from the shapes, if it is not set."""
  if side.format is None or side.axis is not None or side.format.is_square:
    return side
  rules.validate_values(side)
  values, scale, name = side.values, side.scale, side.name
  if scale.ndim != values.ndim:
    raise TypeError(
      f"{sides.who()}: {name}_scale must have the rank of {name}, got"
      f" {name}_scale {tuple(scale.shape)} for {name} {tuple(values.shape)}"
    )

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
  block_size: int | tuple[int, int] | None,
  lhs: sides.Side,
  rhs: sides.Side,
) -> None:
  if block_size is None:
    return
  sizes: tuple[Any, Any] = (block_size, block_size)
  if isinstance(block_size, tuple) and len(block_size) == 2:
    sizes = block_size
  for side, size in ((lhs, sizes[0]), (rhs, sizes[1])):
    if side.format is not None and side.format.block_size != size:
      raise ValueError(
        f"{sides.who()}: block_size must be {side.format.block_size} for"
        f" {side.name} of {side.format}, got {error_context.shown(block_size)}"
      )


def result_dtype(dtype: Any) -> np.dtype:
  result = formats.as_dtype(jnp.float32 if dtype is None else dtype)
  if result is None:
    raise TypeError(
      f"{sides.who()}: preferred_element_type must be float32, bfloat16 or"
      f" float16, got {error_context.shown(dtype)}"
    )
  return result


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
  if not scale_signs.has_negative_code(scale):
    return
  # FP8 scales may be stored as uint8.
  exact = np.asarray(side.linear_scale()).view(formats.E4M3)
  negative = np.argwhere(scale_signs.negative_codes(exact))
  if len(negative):
    where = tuple(int(i) for i in negative[0])
    raise ValueError(
      f"{sides.who()}: {side.name}_scale of {side.format} must not be negative"
      f" (Blackwell ignores the sign bit), got {exact[where]} at {where}"
    )


def _explicit_global_scale(global_scale: Any) -> jax.Array | None:
  if global_scale is None:
    return None
  if not isinstance(global_scale, (int, float)):
    global_scale = array("global_scale", global_scale)
    if global_scale.dtype != np.float32:
      raise TypeError(
        f"{sides.who()}: global_scale must be float32, got"
        f" {global_scale.dtype}; cast it"
      )
  result = jnp.asarray(global_scale, jnp.float32)
  return result.reshape(()) if result.size == 1 and result.ndim else result


def float_operand(name: str, x: Any) -> jax.Array:
  x = array(name, x)
  if x.dtype not in sides.PLAIN_DTYPES:
    raise TypeError(
      f"{sides.who()}: {name} must be float32, bfloat16 or float16, got"
      f" {x.dtype}"
    )
  return x


def _expand_bias(
  bias: jax.Array, shape: tuple[int, ...], num_n: int
) -> jax.Array:
  columns = shape[len(shape) - num_n :]
  if tuple(bias.shape) not in (columns, columns[-1:]):
    raise TypeError(
      f"{sides.who()}: bias must have the shape {columns} of the result's"
      f" dimensions that come from rhs, got {tuple(bias.shape)}"
    )
  return bias.reshape((1,) * (len(shape) - bias.ndim) + tuple(bias.shape))


def vary_alike(flat: list[jax.Array]) -> list[jax.Array]:
  """Makes all operands vary over the same mesh axes inside `shard_map`."""
  varying = [jax_private.varying_axes(x) for x in flat]
  union = frozenset().union(*varying)
  return [
    x if own == union else jax.lax.pcast(x, tuple(union - own), to="varying")
    for x, own in zip(flat, varying, strict=True)
  ]


def _validate_implementation(call: calls.DotCall) -> None:
  """Raises if no local device supports the requested backend."""
  if call.implementation is None:
    return
  problem = call.problem()
  require_somewhere(
    lambda target: backends.choose(
      problem,
      target,
      call.implementation,
      overlay=call.overlay,
      is_of_layer=call.is_of_layer,
    )
  )


def require_somewhere(choose: Callable[[targets.Target], Any]) -> None:
  """Raises the error of `choose` unless it succeeds for a local target.

  Inside `use_target`, that target is the only one.
  """
  override = targets.overriding_target()
  refused = None
  for target in [override] if override else targets.local_targets():
    try:
      choose(target)
    except NotImplementedError as error:
      refused = refused or error
    else:
      return
  assert refused is not None
  raise refused
