# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The epilogue of a dot: global scale, bias, activation, residual.

The global scales of both operands multiply the result. Their product may
underflow f32: two tensors of about 1e-17 have scales of 2^-68. A call therefore
stores the product as two factors, the second a power of two. A dot computes

    dot * factor * power

in this order. If f32 holds `product`, the result is rounded like
`dot * product`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.dot import calls, problems
from jaxplugin.operation import primitive

Call = TypeVar("Call", bound=primitive.OperationCall)

_MANTISSA_BITS: Final = 23
_BIAS: Final = 127
_EXPONENT_MASK: Final = 0x7F800000  # all ones for Inf and NaN
_MAGNITUDE_MASK: Final = 0x7FFFFFFF
_MIN_EXPONENT: Final = -126  # of normal numbers
_MAX_EXPONENT: Final = 127


def product(
  scales: Sequence[jax.Array],
) -> tuple[jax.Array | None, jax.Array | None]:
  """Returns the product of global scales, as two factors.

  Args:
    scales: f32 arrays that broadcast against each other.

  Returns:
    (factor, power): f32 of the broadcast shape; (scale, None) for one scale,
    (None, None) for none. The derivative of `factor` is that of the product
    divided by `power`. `power` is computed from the bits of the scales and has
    no derivative. The two factors represent products from 2^-252 to below
    2^254. If the product is smaller, `factor` is subnormal or 0. If it is
    larger, `factor` is at least 2^127.
  """
  if not scales:
    return None, None
  if len(scales) == 1:
    return scales[0], None
  return _factors(tuple(scales))


# `jit` makes an eager call run one program.
@jax.jit
def _factors(scales: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
  return _of_two(*scales) if len(scales) == 2 else _of_any(scales)


@jax.custom_jvp
def _of_two(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Computes `_of_any` for two scales, in half as many operations.

  Fewer operations compile faster, because XLA's passes take as long for an
  operation on scalars as for one on matrices. Exponents keep their position in
  the bits of an f32, so subtracting them leaves the significand. The derivative
  is that of `_of_any`.
  """
  exponents = [_exponent_bits(scale) for scale in (first, second)]
  significands = [
    lax.bitcast_convert_type(_bits(scale) - exponent, jnp.float32)
    for scale, exponent in zip((first, second), exponents, strict=True)
  ]
  # The sum of the exponents is in [-252, 254]. Its rest after subtracting the
  # power is the exponent of a normal number.
  exponent = exponents[0] + exponents[1]
  power = lax.clamp(
    jnp.int32(_in_place(_MIN_EXPONENT - 2)),
    exponent,
    jnp.int32(_in_place(_MAX_EXPONENT - 2)),
  ) + jnp.int32(_in_place(_BIAS + 2))
  rest = (exponent - power) + jnp.int32(_in_place(2 * _BIAS))
  factor = significands[0] * significands[1]
  factor = factor * lax.bitcast_convert_type(rest, jnp.float32)
  return factor, lax.bitcast_convert_type(power, jnp.float32)


@_of_two.defjvp
def _of_two_jvp(primals: Any, tangents: Any) -> Any:
  return jax.jvp(lambda *scales: _of_any(scales), primals, tangents)


def _of_any(scales: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
  significands, exponents = [], []
  for scale in scales:
    exponent = _exponent_bits(scale) >> _MANTISSA_BITS
    # Two multiplications, because 2^-127 would be flushed to zero.
    half = exponent >> 1
    significands.append(
      scale * _power_of_two(-half) * _power_of_two(half - exponent)
    )
    exponents.append(exponent)
  # Significands are in [1, 2), so the product of n is in [1, 2^n). The power
  # takes n from the exponent, so the factor is below 1, and `dot * factor` does
  # not overflow.
  exponent = sum(exponents[1:], start=exponents[0])
  power = jnp.clip(exponent + len(scales), _MIN_EXPONENT, _MAX_EXPONENT)
  # The rest of the exponent exceeds the range of the power. With two scales the
  # rest is itself within that range.
  exponent = exponent - power
  rest = jnp.clip(exponent, _MIN_EXPONENT, _MAX_EXPONENT)
  factor = math.prod(significands[1:], start=significands[0])
  factor = factor * _power_of_two(rest)
  if len(scales) > 2:
    # If the rest is below the range, the factor underflows. If it is above, it
    # stays clipped, because the result overflows unless the dot is 0.
    rest = jnp.clip(exponent - rest, _MIN_EXPONENT, 0)
    factor = factor * _power_of_two(rest)
  return factor, jnp.broadcast_to(_power_of_two(power), factor.shape)


def _exponent_bits(x: jax.Array) -> jax.Array:
  """Returns i32 e * 2^23, with 2^e <= |x| < 2^(e+1).

  It is 0 for zeros, subnormals, Inf and NaN.
  """
  bits = _bits(x)
  # Adding one to the exponent field overflows 31 bits for Inf and NaN.
  following = (bits + jnp.int32(_in_place(1))) & _MAGNITUDE_MASK
  is_normal = following >= _in_place(2)
  exponent = (bits & _EXPONENT_MASK) - jnp.int32(_in_place(_BIAS))
  return jnp.where(is_normal, exponent, 0)


def _bits(x: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(x, jnp.int32)


def _in_place(exponent: int) -> int:
  """Returns an exponent shifted to the exponent field of an f32."""
  return exponent << _MANTISSA_BITS


def _power_of_two(exponent: jax.Array) -> jax.Array:
  """Returns f32 2^exponent, for exponents of normal numbers."""
  bits = (exponent + _BIAS) << _MANTISSA_BITS
  return lax.bitcast_convert_type(bits, jnp.float32)


def with_global_scale(
  call: Call, scales: Sequence[jax.Array | None], **changes: Any
) -> Call:
  """Returns a call whose global scale is a product, and whose sides have none.

  Args:
    scales: factors of the global scale, f32 in the result's rank or f32[].
  """
  factor, power = product([scale for scale in scales if scale is not None])
  return call.with_sides(
    lambda side: side.replace(global_scale=None),
    global_scale=factor,
    global_power=power,
    **changes,
  )


def with_product(call: calls.DotCall) -> calls.DotCall:
  """Returns a call with two separate global scales multiplied."""
  if call.first_global_scale is None or call.global_scale is not None:
    return call
  factor, power = product([call.first_global_scale, call.second_global_scale])
  return call.replace(global_scale=factor, global_power=power)


def multiply(
  x: jax.Array, global_scale: jax.Array, power: jax.Array | None
) -> jax.Array:
  """Returns f32 `x * global_scale * power`, computed in this order.

  XLA would multiply two constants first, and their product may underflow f32.
  """
  x = x * global_scale
  if power is None:
    return x
  # The clamp changes no value. XLA does not reassociate products across it, and
  # fuses it into the kernel of the dot.
  x = lax.clamp(np.float32(-np.inf), x, np.float32(np.inf))
  return x * power


def apply(result: jax.Array, call: calls.DotCall) -> jax.Array:
  """Computes activation(result * global_scale + bias) + residual in f32."""
  if call.global_scale is not None:
    result = multiply(result, call.global_scale, call.global_power)
  if call.bias is not None:
    result = result + call.bias.astype(jnp.float32)
  result = activate(result, call.activation)
  if call.residual is not None:
    result = result + call.residual.astype(jnp.float32)
  return result.astype(call.preferred_element_type)


def activate(x: jax.Array, activation: problems.Activation | None) -> jax.Array:
  """Applies the activation with this name; None is the identity."""
  if activation is None:
    return x
  functions = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,  # the tanh approximation, its default
    "silu": jax.nn.silu,
  }
  return functions[activation](x)


# Epilogues of kernels.


def pair(call: calls.DotCall) -> jax.Array | None:
  """Returns the global scale for kernels: f32[2] of both factors, or f32[]."""
  if call.global_power is None:
    return call.global_scale
  return jnp.stack([call.global_scale, call.global_power])


def fused(
  dot: Callable[[calls.DotCall, problems.DotProblem], jax.Array],
  call: calls.DotCall,
  problem: problems.DotProblem,
) -> jax.Array:
  """Computes a call with kernels that fuse most epilogues.

  The kernels fuse a scalar global scale and a bias over n. If the global scale
  or the bias varies over other dimensions, `dot` computes the dot without
  epilogue in f32, and XLA ops apply the epilogue.
  """
  if problem.fuses_epilogue:
    return dot(call, problem)
  bare = call.bare()
  planned = dataclasses.replace(
    bare.problem(), m=problem.m, reads_m=problem.reads_m
  )
  return apply(dot(bare, planned), with_product(call))


def bias_row(call: calls.DotCall) -> jax.Array:
  """Returns the bias as f32[n], if it varies only over n."""
  shape, num_n = call.shape, len(call.rhs.free)
  columns = shape[len(shape) - num_n :]
  ones = (1,) * (len(shape) - num_n)
  bias = jnp.broadcast_to(call.bias.astype(jnp.float32), ones + columns)
  return bias.reshape(math.prod(columns))
