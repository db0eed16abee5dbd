# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`block_scaled_dot` and the operator `@` of a `ScaledArray`."""

from __future__ import annotations

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp

from jaxplugin.arrays import scaled_array
from jaxplugin.core import call_options, error_context
from jaxplugin.dot import (
  arguments,
  backends,
  calls,
  epilogue,
  guards,
  offsets,
  primitive,
  problems,
  sharding,
  sides,
  straight_through,
)
from jaxplugin.jaxext import jax_private
from jaxplugin.operation import choice
from jaxplugin.quantization import out_format as out_format_lib
from jaxplugin.quantization import quantized_results
from jaxplugin.tables import resolution

Operand = arguments.Operand

_AT: Final = "ScaledArray @"


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
  out_format: out_format_lib.OutFormatLike | None = None,
) -> Any:
  """Multiplies operands, one or both of them block-scaled.

  Computes, with f32 sums and one cast::

    dot    = dot_general(lhs * lhs_scale, rhs * rhs_scale) * global_scale
    result = cast(activation(dot + bias) + residual)

  If f32 holds all products and sums, a backend returns these bits. Otherwise
  the error before the cast is at most `16 * 2^-24 * sum|a * b|` on random data
  (docs/concepts/numerics.md). A NaN scale makes its block NaN.
  Unquantized arguments have derivatives.

  Args:
    lhs: `ScaledArray`, f32, bf16 or f16[..., m, k], or values with `lhs_scale`.
      Packed FP4: uint8[..., k / 2].
    rhs: the same, [..., n, k] or [n, k].
    lhs_scale, rhs_scale: f8e8m0fnu[..., m, k / 32]; NVFP4: f8e4m3fn[..., m, k /
      16], >= 0.
    global_scale: f32[], or of the result's rank.
    dimension_numbers: as for `lax.dot_general`. Default: contract the last
      dimensions; leading ones are batch, or rows if rhs has rank 2.
    preferred_element_type: f32, bf16 or f16.
    precision: "highest": f32 global scales. "fastest": FP8 sums, int8 rows.
    block_size: size or pair; accepts padded scales.
    bias: f32, bf16 or f16[n].
    activation: None, "relu", "gelu" (by tanh) or "silu".
    residual: floats of the result's shape.
    out_sharding: as for `lax.dot_general`.
    reduce_dtype: dtype of sums over devices; None is f32.
    implementation: "cudnn", "triton", "cpu", "xla" or "cutile"; None chooses.
    out_format: None, or format or `OutFormat` of a quantized result.

  Returns:
    preferred_element_type[batch..., m..., n...], or a quantized result.

  Raises:
    TypeError: If a rank, dtype or shape is wrong.
    ValueError: If a parameter is invalid, or an NVFP4 scale is negative.
    NotImplementedError: If the backend does not support the call, or quantized
      values are differentiated.

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
  out: out_format_lib.OutFormat | None = None
  if out_format is not None:
    out = out_format_lib.OutFormat.of_matmul(
      sides.who(), out_format, preferred_element_type
    )
  source = None
  if scaled_array.has_surrogate(lhs) or scaled_array.has_surrogate(rhs):
    source = _straight_through(
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
    if out is None:
      return source
    lhs, rhs = (
      x.without_surrogate() if scaled_array.has_surrogate(x) else x
      for x in (lhs, rhs)
    )
  lhs, rhs, offset = arguments.split_offset(lhs, rhs)
  lhs_side, rhs_side = arguments.sides_of(
    lhs,
    rhs,
    lhs_scale,
    rhs_scale,
    dimension_numbers=dimension_numbers,
    block_size=block_size,
  )
  backends.validate_name(implementation)
  if not error_context.is_one_of(activation, (None, *problems.ACTIVATIONS)):
    raise ValueError(
      f"{sides.who()}: activation must be None or one of"
      f" {problems.ACTIVATIONS}, got {error_context.shown(activation)}; apply"
      " another function to the result"
    )
  call = calls.DotCall(
    lhs=lhs_side,
    rhs=rhs_side,
    preferred_element_type=arguments.result_dtype(preferred_element_type),
    highest_precision=arguments.canonical_precision(precision),
    fastest_precision=arguments.is_fastest(precision),
    activation=activation,
    implementation=implementation,
    padded_scales=block_size is not None,
    overlay=resolution.overlay(),
    reduce_dtype=arguments.parts_dtype(reduce_dtype),
  )
  arguments.validate_sides(call)
  if out_sharding is not None:
    asked = sharding.asked_sharding(call, out_sharding)
    call = call.replace(out_sharding=asked)
  arguments.reject_negative_scale(lhs_side, lhs_scale)
  arguments.reject_negative_scale(rhs_side, rhs_scale)
  call = _with_epilogue(call, global_scale, bias, residual)
  if out is None:
    return _bind_sum(call, offset)
  if offset is not None:
    source = _bind_sum(call, offset) if source is None else source
    return out_format_lib.quantized(sides.who(), source, out)
  return quantized_results.compute(
    call,
    out,
    bind=_bind,
    backends=backends,
    operation=backends.OPERATION,
    is_checked=call_options.has_checks.value,
    source=source,
  )


def _bind_sum(
  call: calls.DotCall, offset: arguments.Offset | None
) -> jax.Array:
  """Binds a checked call, and adds the offset of an operand."""
  if offset is None:
    return _bind(call)
  return offsets.with_offset(call, offset, _bind)


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
    x if isinstance(x, scaled_array.ScaledArray) else arguments.array(name, x)
    for name, x in (("lhs", lhs), ("rhs", rhs))
  ]
  names = straight_through.DotArrays._fields[2:]
  for name, x in zip(names, others, strict=True):
    if name == "global_scale" and x is not None:
      x = arguments.as_global_scale(x)
    arrays.append(x if x is None else arguments.array(name, x))
  numbers = arguments.canonical_dimension_numbers(
    dimension_numbers, arrays[0].ndim, arrays[1].ndim
  )
  return straight_through.dot(
    straight_through.Dot(
      function=functools.partial(
        block_scaled_dot, dimension_numbers=numbers, **options
      ),
      dimension_numbers=numbers,
      dtype=arguments.result_dtype(preferred_element_type),
      activation=activation,
    ),
    # Outside `dot`'s custom JVP, so that tangents vary over the same mesh axes
    # as the result.
    jax_private.vary_alike(straight_through.DotArrays(*arrays)),
  )


def _with_epilogue(
  call: calls.DotCall, global_scale: Any, bias: Any, residual: Any
) -> calls.DotCall:
  """Adds global scales, bias and residual, brought to the result's rank."""
  shape = call.shape
  scales = call.scales_in_result()
  if global_scale is not None:
    scales.append(arguments.as_global_scale(global_scale))
  first = second = None
  if len(scales) == 2 and not any(scale.ndim for scale in scales):
    first, second = map(jax.lax.stop_gradient, scales)
  call = epilogue.with_global_scale(
    call, scales, first_global_scale=first, second_global_scale=second
  )
  if call.global_scale is not None:
    arguments.validate_global_scale(call.global_scale, shape)
  if bias is not None:
    bias = arguments.epilogue_operand("bias", bias)
    bias = _expand_bias(bias, shape, len(call.rhs.free))
  if residual is not None:
    residual = arguments.epilogue_operand("residual", residual)
    if tuple(residual.shape) != shape:
      raise TypeError(
        f"{sides.who()}: residual must have the result's shape {shape}, got"
        f" {tuple(residual.shape)}; pass jnp.broadcast_to(residual, {shape})"
      )
  return call.replace(bias=bias, residual=residual).vary_alike()


def _bind(call: calls.DotCall) -> jax.Array:
  """Binds a checked call, with debug checks if they are enabled."""
  if call.implementation is not None:  # some local device must support it
    choice.require_somewhere(functools.partial(backends.choose_for, call))
  result = primitive.bind(call)
  if call_options.has_checks.value:
    guards.check(result, call.without_origins())
  return result


def _expand_bias(
  bias: jax.Array, shape: tuple[int, ...], num_n: int
) -> jax.Array:
  columns = shape[len(shape) - num_n :]
  if tuple(bias.shape) not in (columns, columns[-1:]):
    raise TypeError(
      f"{sides.who()}: bias must have the shape {columns} of the result's"
      f" dimensions that come from rhs, got {tuple(bias.shape)}; add an array"
      " of another shape to the result, or pass it as residual"
    )
  return bias.reshape((1,) * (len(shape) - bias.ndim) + tuple(bias.shape))


def _matmul(lhs: Any, rhs: Any) -> jax.Array:
  """NumPy's matmul of the dequantized arrays; see `ScaledArray.__matmul__`."""
  lhs, rhs = arguments.as_operand("lhs", lhs), arguments.as_operand("rhs", rhs)
  shapes = f"{tuple(lhs.shape)} and {tuple(rhs.shape)}"
  if lhs.ndim == 0 or rhs.ndim == 0:
    raise TypeError(f"{_AT}: both sides must have rank 1 or more, got {shapes}")
  lhs_k, rhs_k = lhs.ndim - 1, max(rhs.ndim - 2, 0)
  if lhs.shape[lhs_k] != rhs.shape[rhs_k]:
    names = ("the left side", "the right side")
    remedy = arguments.sizes_remedy(lhs, rhs, (lhs_k, rhs_k), names=names)
    raise TypeError(
      f"{_AT}: the last size of the left side must equal the second to last"
      " size of the right side, got"
      f" {shapes}{remedy or '; for weights (n, k) write x @ w.T'}"
    )
  for side, operand, k in (("left", lhs, lhs_k), ("right", rhs, rhs_k)):
    if (
      isinstance(operand, scaled_array.ScaledArray)
      and 0 not in operand.shape
      and operand.axis != k
      and not operand.format.is_square
    ):
      raise TypeError(
        f"{_AT}: the {side} side must be blocked along dimension {k}, which is"
        f" contracted, got {operand!r} blocked along dimension {operand.axis};"
        f" quantize it with axis={k}, or dequantize it"
      )
  lhs_lead, rhs_lead = lhs.shape[:-2], rhs.shape[:-2]
  if lhs_lead and rhs_lead and lhs_lead != rhs_lead:
    raise NotImplementedError(
      f"{_AT}: leading dimensions must be equal, or one side must have none,"
      f" got {shapes}; broadcast one, or call block_scaled_dot"
    )
  batch: tuple[int, ...] = ()
  if lhs_lead and rhs_lead:
    batch = tuple(range(len(lhs_lead)))
  result = block_scaled_dot(
    lhs,
    rhs,
    dimension_numbers=(((lhs_k,), (rhs_k,)), (batch, batch)),
    preferred_element_type=jnp.float32,
  )
  if rhs_lead and not batch and lhs.ndim == 2:
    # (m, k) x (..., k, n): rows come after the leading dimensions.
    return jnp.moveaxis(result, 0, -2)
  return result


scaled_array.provide(matmul=_matmul)
