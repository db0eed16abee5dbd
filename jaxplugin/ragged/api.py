# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ragged_dot`: checks the arguments and binds the primitive."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import layouts, scaled_array
from jaxplugin.core import call_options, error_context, formats
from jaxplugin.dot import (
  arguments,
  epilogue,
  guards,
  offsets,
  sides,
  straight_through,
)
from jaxplugin.jaxext import jax_private, mesh_axes
from jaxplugin.operation import alternatives, choice
from jaxplugin.quantization import out_format as out_format_lib
from jaxplugin.quantization import quantized_results
from jaxplugin.ragged import backends, calls, groups, primitive
from jaxplugin.ragged import epilogue as ragged_epilogue
from jaxplugin.ragged import sharding as sharding_lib
from jaxplugin.ragged.backends import cpu
from jaxplugin.tables import resolution

_F32: Final = np.dtype(np.float32)


def ragged_dot(
  lhs: arguments.Operand,
  rhs: scaled_array.ScaledArray,
  group_sizes: jax.Array,
  *,
  bias: jax.Array | None = None,
  activation: calls.Activation | None = None,
  preferred_element_type: Any = jnp.float32,
  precision: Any = None,
  reduce_dtype: Any = None,
  implementation: str | None = None,
  out_sharding: Any = None,
  out_format: out_format_lib.OutFormatLike | None = None,
) -> Any:
  """Multiplies groups of rows, each with its own block-scaled weight.

  The first group_sizes[0] rows of lhs are group 0, and so on, like tokens
  sorted by expert. With g the group of row i::

    dot[i]    = sum_k(lhs[i, k] * rhs[g, :, k]) * global scales
    result[i] = cast(activation(dot[i] + bias[g]))

  The bound is that of `block_scaled_dot`. Rows beyond the last group are zero.
  The weight of an empty group is not read. Unquantized arguments have
  derivatives. Sharded weights are never gathered.

  Args:
    lhs: f32, bf16, f16 or f64[m, k], or a `ScaledArray` blocked along k.
    rhs: a `ScaledArray` [groups, n, k] blocked along k. Its global scale is
      f32[] or f32[groups, 1, 1].
    group_sizes: integers[groups]. Groups end at row m; negative sizes are 0.
      `debug_checks` reports both.
    bias: f32, bf16 or f16[groups, n].
    activation: None, "relu", "gelu" (tanh approximation), "silu", or a gated
      one. "swiglu" is silu(first half) * second half. "swigluoai" is gpt-oss's:
      gate * sigmoid(1.702 * gate) * (value + 1), with gate = min(even columns,
      7) and value = clip(odd columns, -7, 7).
    preferred_element_type: f32, bf16 or f16.
    precision: as for `block_scaled_dot`.
    reduce_dtype: as for `block_scaled_dot`, if k is sharded.
    implementation: "xla", "triton" or "cpu"; None chooses.
    out_sharding: as for `jax.lax.ragged_dot`.
    out_format: as for `block_scaled_dot`.

  Returns:
    preferred_element_type[m, n], or [m, n / 2] after a gated activation.

  Raises:
    TypeError: If a rank, dtype or shape is wrong.
    ValueError: If a parameter is invalid, or an NVFP4 scale is negative.
    NotImplementedError: If the backend does not support the call, quantized
      values are differentiated, or out_sharding has unreduced axes.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> experts = jnp.ones((2, 3, 32)) * jnp.array([1.0, 2.0])[:, None, None]
    >>> experts_q = jp.quantize(experts, "mxfp4")
    >>> jp.ragged_dot(jnp.ones((3, 32)), experts_q, jnp.array([1, 2]))
    Array([[32., 32., 32.],
           [64., 64., 64.],
           [64., 64., 64.]], dtype=float32)

  See also:
    `jp.ragged_dot_general`, `jp.training.ragged_dot_general`.
  """
  with error_context.in_function(error_context.who(calls.WHO)):
    calls.require_quantized(rhs)
    group_sizes = arguments.integers("group_sizes", group_sizes)
    out = None
    if out_format is not None:
      out = out_format_lib.OutFormat.of_matmul(
        sides.who(), out_format, preferred_element_type
      )
    options: dict[str, Any] = {
      "activation": activation,
      "preferred_element_type": arguments.result_dtype(preferred_element_type),
      "precision": precision,
      "reduce_dtype": arguments.parts_dtype(reduce_dtype),
      "implementation": implementation,
    }
    source = None
    if any(map(scaled_array.has_surrogate, (lhs, rhs))):
      arrays = primitive.RaggedArrays(lhs, rhs, group_sizes, bias)
      source = _straight_through(arrays, out_sharding, **options)
      if out is None:
        return source
      lhs, rhs, *_ = straight_through.without_surrogates(arrays)
    return product(
      lhs,
      rhs,
      group_sizes,
      bias=bias,
      out_sharding=out_sharding,
      out=out,
      source=source,
      **options,
    )


def _straight_through(
  given: primitive.RaggedArrays, out_sharding: Any, **options: Any
) -> jax.Array:
  """Computes `ragged_dot` if lhs or rhs has a surrogate."""
  lhs, rhs, _ = arguments.split_offset(given.lhs, given.rhs)
  call = _call(lhs, rhs, given.group_sizes, **options)
  of = primitive.RaggedDot(
    dtype=options.pop("preferred_element_type"),
    activation=options.pop("activation"),
    function=functools.partial(product, **options),
    overlay=resolution.overlay(),
  )

  def dot(*arrays: Any) -> jax.Array:
    # Outside of the custom JVP, so that tangents vary over the same mesh axes
    # as the result.
    given = jax_private.vary_alike(primitive.RaggedArrays(*arrays))
    return straight_through.dot(of, given)

  arrays = [
    x if x is None else arguments.as_operand(name, x)
    for name, x in given._asdict().items()
  ]
  sharding = sharding_lib.result_sharding(call, out_sharding)
  return mesh_axes.automatic(dot, sharding)(*arrays)


def product(
  lhs: arguments.Operand,
  rhs: arguments.Operand,
  group_sizes: Any,
  *,
  bias: Any = None,
  out_sharding: Any = None,
  out: out_format_lib.OutFormat | None = None,
  source: jax.Array | None = None,
  **options: Any,
) -> Any:
  """Computes `ragged_dot`; the weights may be unquantized.

  `out` and `source` are those of `quantized_results.compute`, the options those
  of `_call`.
  """
  lhs, rhs, offset = arguments.split_offset(lhs, rhs)
  call_of = lambda *arrays: _call(*arrays, **options)
  call = call_of(lhs, rhs, group_sizes)
  sharding = sharding_lib.result_sharding(call, out_sharding)
  if out is not None and offset is None and sharding is None:
    return quantized(_with_epilogue(call, bias), out, source)
  if source is None and sharding is None:
    source = _dot(call, bias, offset)
  elif source is None:
    dot = lambda bias, offset, *arrays: _dot(call_of(*arrays), bias, offset)
    arrays = jax.tree.map(
      jnp.asarray, (bias, offset, lhs, rhs, call.group_sizes)
    )
    source = mesh_axes.automatic(dot, sharding)(*arrays)
  if out is None:
    return source
  return out_format_lib.quantized(sides.who(), source, out)


def quantized(
  call: calls.Call,
  out: out_format_lib.OutFormat,
  source: jax.Array | None = None,
) -> Any:
  """Binds a checked call, and quantizes its result.

  The arguments are those of `quantized_results.compute`.
  """
  return quantized_results.compute(
    call.vary_alike(),
    out,
    bind=bind,
    backends=backends,
    operation=backends.operation_of(call.problem()),
    is_checked=call_options.has_checks.value,
    source=source,
  )


def _dot(
  call: calls.RaggedDotCall, bias: Any, offset: arguments.Offset | None
) -> jax.Array:
  """Adds the epilogue to a checked call and binds it."""
  call = _with_epilogue(call, bias)
  if offset is None:
    return bind(call)
  bare = call.bare()
  total = _RaggedDotWithOffset(
    call=bare.form(),
    side=offset.name,
    format=offset.format,
    backends=backends,
  )
  if offset.name == "rhs" and call.implementation in (None, cpu.BACKEND.name):
    result = alternatives.compute(total, *bare.flatten(), offset.array)
  else:
    result = total.operations(*bare.flatten(), offset.array)
  return ragged_epilogue.apply(result, call, is_masked=True)


class _RaggedDotWithOffset(offsets.SumWithOffset):
  """The sum of both ragged dots."""

  def operations(self, *operands: Any) -> jax.Array:
    *arrays, array = operands
    # Both dots multiply the same rows of floats.
    call = self.call.filled(arrays).replace(fastest_precision=False)
    result = bind(call)
    with jax.named_scope(offsets.SCOPE):
      return result + bind(_second(call, self.offset(array)))

  def has_kernel(self, call: calls.RaggedDotCall) -> bool:
    return not call.problem().is_empty


def _second(
  call: calls.RaggedDotCall, offset: arguments.Offset
) -> calls.RaggedDotCall:
  """Returns the second call of `dot.offsets`, without global scales.

  Zero points of weights are multiplied as values of blocks of one, so a backend
  reads only those of groups that have rows.
  """
  format = offset.format
  if offset.name == "lhs" or not format.has_zero_points:
    lhs, rhs = offsets.operands_of(call, offset)
    return calls.plain(lhs, rhs, call.group_sizes, 2)
  weights = call.rhs
  assert weights.format is not None
  sums = offsets.block_sums(
    call.lhs.in_usual_order().dequantized(), 1, weights.format.block_size
  )
  second = calls.plain(-sums, offset.array, call.group_sizes, 2)
  zero_points = formats.UnquantizedFormat(
    name=f"zero points of {format}",
    values_dtype=offset.array.dtype,
    scale_dtype=format.scale_dtype,
    block_size=1,
    code_offset=-format.code_offset,
  )
  return second.replace(
    rhs=second.rhs.replace(scale=weights.scale, format=zero_points, axis=2),
    implementation="xla",  # the only backend that reads blocks of one
  )


def bind(call: calls.Call) -> jax.Array:
  """Binds a checked call, with debug checks if they are enabled."""
  call = call.vary_alike()
  if call.implementation is not None:
    # Raises if no local device supports the requested backend.
    choice.require_somewhere(functools.partial(backends.choose_for, call))
  result = primitive.bind(call)
  if call_options.has_checks.value:
    _check(result, call)
  return result


def across_blocks(
  lhs: jax.Array,
  rhs: scaled_array.ScaledArray,
  group_sizes: jax.Array,
  *,
  preferred_element_type: Any = jnp.float32,
) -> jax.Array:
  """Contracts n of lhs with weights that are blocked along k.

  With g the group of row i::

    result[i] = sum_n(lhs[i, n] * rhs[g, n, :]) * global scale

  Args:
    lhs: f32, bf16 or f16[m, n].
    rhs, group_sizes, preferred_element_type: as for `ragged_dot`.

  Returns:
    preferred_element_type[m, k].
  """
  rhs = _in_rows("rhs", rhs)
  rhs_side = _contracting(_side_of("rhs", rhs), 2)
  call = calls.RaggedDotCall(
    lhs=sides.Side(name="lhs", values=lhs, contracting=(1,)),
    rhs=_with_bytes(rhs_side, rhs).replace(contracting=(1,)),
    group_sizes=arguments.integers("group_sizes", group_sizes),
    preferred_element_type=arguments.result_dtype(preferred_element_type),
    overlay=resolution.overlay(),
  )
  arguments.reject_negative_scale(call.rhs)
  return primitive.bind(_with_epilogue(call, None).vary_alike())


def _call(
  lhs: Any,
  rhs: Any,
  group_sizes: Any,
  *,
  activation: calls.Activation | None = None,
  preferred_element_type: Any = jnp.float32,
  precision: Any = None,
  reduce_dtype: Any = None,
  implementation: str | None = None,
) -> calls.RaggedDotCall:
  """Returns the checked call without the arrays of the epilogue."""
  given = rhs
  lhs, rhs = _in_rows("lhs", lhs), _in_rows("rhs", rhs)
  lhs_side, rhs_side = _side_of("lhs", lhs), _side_of("rhs", rhs)
  for side in (lhs_side, rhs_side):
    calls.validate_rank(side)
  group_sizes = arguments.integers("group_sizes", group_sizes)
  calls.validate_groups(group_sizes, rhs_side.values.shape[0])
  choice.validate_name(backends.OPERATION, implementation)
  lhs_side = _contracting(lhs_side, 1)
  rhs_side = _contracting(rhs_side, 2)
  call = calls.RaggedDotCall(
    lhs=lhs_side,
    rhs=rhs_side,
    group_sizes=group_sizes,
    preferred_element_type=arguments.result_dtype(preferred_element_type),
    fastest_precision=arguments.is_fastest(precision),
    activation=activation,
    implementation=implementation,
    overlay=resolution.overlay(),
    reduce_dtype=arguments.parts_dtype(reduce_dtype),
  )
  calls.validate(call)
  calls.validate_activation(activation, call.columns)
  call = call.replace(
    lhs=_with_bytes(call.lhs, lhs), rhs=_with_bytes(call.rhs, rhs)
  )
  for side in (call.lhs, call.rhs):
    arguments.reject_negative_scale(side)
  if rhs is not given:
    call = call.replace(rhs=call.rhs.replace(square_scale=given.scale))
  return call


def _in_rows(name: str, operand: Any) -> Any:
  """Returns an operand whose rows of square blocks have separate scales."""
  if not isinstance(operand, scaled_array.ScaledArray) or (
    not operand.format.is_square
  ):
    return operand
  scaled_array.require_arrays(sides.who(), name, operand)
  return operand.in_rows()


def _side_of(name: str, operand: Any) -> sides.Side:
  """Returns a `Side` for an argument. Bytes become abstract 8-bit floats."""
  if not isinstance(operand, scaled_array.ScaledArray) or not operand.is_bytes:
    return arguments.side_of(name, operand)
  scaled_array.require_arrays(sides.who(), name, operand)
  to_floats = scaled_array.ScaledArray.to_floats
  return arguments.scaled_side(name, jax.eval_shape(to_floats, operand))


def _with_bytes(side: sides.Side, operand: Any) -> sides.Side:
  """Returns the side with the argument's arrays if they are bytes."""
  if isinstance(operand, scaled_array.ScaledArray) and operand.is_bytes:
    return side.replace(
      values=operand.values,
      scale=operand.scale,
      global_scale=operand.global_scale,
    )
  return side


def _contracting(side: sides.Side, axis: int) -> sides.Side:
  """Sets the side's contracting and blocked dimension; raises TypeError."""
  if side.format is None:
    return side.replace(contracting=(axis,))
  if side.axis not in (None, axis):
    remedy = f"quantize it with axis={axis}"
    if side.name == "rhs" and side.axis == 1:
      remedy = (
        "for weights (groups, k, n) blocked along k pass rhs.transpose(0, 2, 1)"
      )
    raise TypeError(
      f"{sides.who()}: {side.name} must be blocked along its last dimension, k,"
      f" got {side.name} {side.shape} with blocks along dimension {side.axis};"
      f" {remedy}"
    )
  return side.replace(contracting=(axis,), axis=axis).in_rows()


def _with_epilogue(call: calls.RaggedDotCall, bias: Any) -> calls.RaggedDotCall:
  """Adds the global scales, as one or two factors, and the bias."""
  if bias is not None:
    bias = arguments.epilogue_operand("bias", bias)
    calls.validate_bias(bias, call.num_groups, call.columns)
  scales = [
    scale
    for scale in (
      call.lhs.global_scale_in({0: 0}, 2),  # f32[] or f32[m, 1]
      _global_of_rhs(call.rhs),
    )
    if scale is not None
  ]
  if len({scale.ndim for scale in scales} - {0}) > 1:
    # Scales of rows and of groups are multiplied as scales of rows.
    ends = groups.ends(call.group_sizes, call.num_rows)
    of_row = groups.of_rows(ends, call.num_rows)
    scales = [
      groups.per_row(scale, of_row)[:, None] if scale.ndim == 1 else scale
      for scale in scales
    ]
  return epilogue.with_global_scale(call, scales, bias=bias)


def _global_of_rhs(rhs: sides.Side) -> jax.Array | None:
  """Returns the global scale of rhs as f32[] or f32[groups], or None.

  Raises:
    TypeError: If it varies within a group.
  """
  scale = rhs.global_scale
  if scale is None:
    return None
  if scale.size == 1:
    return scale.reshape(())
  # An array of version 0.1 has f32[groups] (`legacy_global_scales`).
  if any(size != 1 for size in scale.shape[1:]):
    raise TypeError(
      f"{sides.who()}: the global scale of rhs must be one number, or one per"
      f" group with shape ({rhs.shape[0]}, 1, 1), got {tuple(scale.shape)};"
      " quantize the weights with batch_dims=1"
    )
  return scale.reshape(-1)


def _check(result: jax.Array, call: calls.Call) -> None:
  """Traces the checks of a call's group sizes and result."""
  who = sides.who()
  unexplained: Any = _unexplained
  if isinstance(call, calls.RaggedContraction):
    unexplained = _unexplained_sums
  description = guards.describe(result, call, backends.choose_for)
  report = functools.partial(_report_sizes, who, description)
  sizes = call.group_sizes
  rows = call.num_rows
  # An i32 sum could wrap around. The f32 sum is only approximate;
  # `_report_sizes` checks again.
  is_bad = jnp.any(sizes < 0) | (jnp.sum(sizes.astype(_F32)) > rows)
  lax.cond(
    is_bad,
    lambda sizes: jax.debug.callback(report, sizes, rows),
    lambda sizes: None,
    sizes,
  )
  if 0 not in result.shape:
    guards.check_finite(
      result,
      call,
      functools.partial(unexplained, call.form()),
      who=who,
      description=description,
    )


def _report_sizes(
  who: str, description: str, sizes: np.ndarray, rows: int
) -> None:
  # NumPy int64, because a JAX array would sum in i32.
  sizes, rows = np.asarray(sizes).astype(np.int64), int(rows)
  if (sizes >= 0).all() and sizes.sum() <= rows:
    return  # Under `vmap` it runs for all entries if one is bad.
  guards.fail(
    ValueError(
      f"{who}: group_sizes must not be negative, and their sum at most the"
      f" {rows} rows of lhs, got {sizes.tolist()} of sum"
      f" {int(sizes.sum())}\n{description}"
    )
  )


def _unexplained(
  form: calls.RaggedDotCall, result: jax.Array, flat: list[jax.Array]
) -> guards.NonFiniteValues:
  """Returns the NaN and Inf of a result that the operands do not explain."""
  call = form.filled(flat).in_usual_order().replace(implementation="xla")
  expected = primitive.bind(call.replace(preferred_element_type=_F32))
  magnitude = primitive.bind(_of_magnitudes(call))
  if call.is_gated:
    # A result depends on the sums of a gate and of a value, so an overflow of
    # any sum in the row explains it.
    peak = jnp.max(magnitude, axis=1, keepdims=True)
    magnitude = jnp.where(jnp.isfinite(peak), jnp.abs(expected), jnp.inf)
  return guards.found(result, expected, magnitude, call.preferred_element_type)


def _unexplained_sums(
  form: calls.RaggedContraction,
  result: jax.Array,
  flat: list[jax.Array],
) -> guards.NonFiniteValues:
  """Returns the NaN and Inf of a contraction that operands do not explain."""
  call = form.filled(flat).replace(implementation="xla")
  lhs, rhs = (
    jnp.abs(x.in_usual_order().dequantized()) for x in (call.lhs, call.rhs)
  )
  magnitudes = calls.plain_contraction(
    lhs, rhs, call.group_sizes, global_scale=_magnitude_of_scale(call)
  )
  expected = primitive.bind(call.replace(preferred_element_type=_F32))
  dtype = call.preferred_element_type
  magnitude = primitive.bind(magnitudes)
  return guards.found(result, expected, magnitude, dtype)


def _magnitude_of_scale(
  call: calls.Call,
) -> jax.Array | None:
  """Returns the magnitude of the global scale, at least 1."""
  scale, power = call.global_scale, call.global_power
  if scale is None:
    return None
  scale = jnp.abs(scale)
  return jnp.maximum(scale if power is None else scale * power, 1)


def _of_magnitudes(call: calls.RaggedDotCall) -> calls.RaggedDotCall:
  """Returns a call for sum(|a * b|) times the `_magnitude_of_scale`."""
  bare = call.bare()
  plain = bare.lhs.plain() if bare.lhs.format is not None else bare.lhs
  lhs = plain.replace(values=jnp.abs(plain.values))
  scale = _magnitude_of_scale(call)
  return bare.replace(lhs=lhs, rhs=_magnitudes(bare.rhs), global_scale=scale)


def _magnitudes(side: sides.Side) -> sides.Side:
  """Clears the signs of a quantized operand's values."""
  format = side.format
  assert format is not None
  if format.codebook is not None:
    entries = tuple(map(abs, format.codebook))
    return side.replace(format=dataclasses.replace(format, codebook=entries))
  is_fp4 = format.is_fp4
  side = side.as_elements()
  values = side.values
  if format.is_integer:
    if values.dtype == formats.PACKED:
      assert side.axis is not None
      values = layouts.unpack_fp4(values, axis=side.axis, dtype=formats.INT4)
    # The most negative integer has no magnitude of its dtype.
    largest = jnp.iinfo(values.dtype).max
    values = jnp.minimum(jnp.abs(values.astype(_F32)), largest)
    values = values.astype(format.values_dtype)
  elif values.dtype == formats.PACKED:  # two FP4 codes a byte, or one FP6 code
    values = values & jnp.uint8(0x77 if is_fp4 else 0x1F)
  else:
    values = jnp.abs(values.astype(_F32)).astype(values.dtype)
  return side.replace(values=values)
