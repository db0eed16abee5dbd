# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What follows the sum of products: global scale, bias, activation, residual.

Global scales of the operands are brought to the result and multiplied. The
product of two f32 global scales need not be an f32: two tensors of 1e-17
have scales of 2^-68. So a call has a product as two factors. The second is a
power of two. The result of a dot is always

    dot * factor * power

in this order, rounded as `dot * product` is wherever that can be computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.dot import calls
from jaxplugin.dot import problems
from jaxplugin.dot import sides

_MANTISSA_BITS: Final = 23
_BIAS: Final = 127
_EXPONENT_MASK: Final = 0x7F800000  # all ones for Inf and NaN
_MAGNITUDE_MASK: Final = 0x7FFFFFFF
_MIN_EXPONENT: Final = -126  # of normal numbers
_MAX_EXPONENT: Final = 127


def global_scale_of(
  side: sides.Side, positions: Mapping[int, int], ndim: int
) -> jax.Array | None:
  """Returns a side's global scale, at the result's dimensions.

  Args:
    side: whose.
    positions: the result's dimension of each operand's that is not contracted.
    ndim: the result's rank.

  Raises:
    TypeError: it varies along a contracting dimension.
  """
  scale = side.global_scale
  if scale is None or scale.size == 1:
    return None if scale is None else scale.reshape(())
  varying = [d for d in range(scale.ndim) if scale.shape[d] != 1]
  if any(d not in positions for d in varying):
    raise TypeError(
      f"{sides.who()}: the global scale of {side.name} must have size 1 in"
      f" contracting dimensions, got shape {tuple(scale.shape)}"
    )
  order = sorted(varying, key=lambda d: positions[d])
  shape = [1] * ndim
  for d in order:
    shape[positions[d]] = scale.shape[d]
  ones = tuple(d for d in range(scale.ndim) if d not in varying)
  return jnp.transpose(scale, (*order, *ones)).reshape(shape)


def product(
  scales: Sequence[jax.Array],
) -> tuple[jax.Array | None, jax.Array | None]:
  """Returns the product of global scales, as two factors.

  Args:
    scales: f32 arrays that broadcast against each other.

  Returns:
    (factor, power): f32, of the shape of all broadcast, multiplied one after
    the other; (scale, None) for one scale, (None, None) for none. `factor`
    has the derivative of the product divided by `power`, and `power`, found
    from the bits of the scales, has none. They hold a product of three from
    2^-252 to below 2^254. If it is smaller, `factor` underflows: it is 0 if
    subnormal numbers are flushed. If it is larger, `factor` is at least 2^127.
  """
  if not scales:
    return None, None
  if len(scales) == 1:
    return scales[0], None
  return _factors(tuple(scales))


# Jitted, so that an eager call runs one program.
@jax.jit
def _factors(scales: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
  return _of_two(*scales) if len(scales) == 2 else _of_any(scales)


@jax.custom_jvp
def _of_two(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Computes `_of_any` for two scales, in half as many operations.

  XLA's passes take as long for an operation on two numbers as for one on
  matrices. Exponents stay at their place in a number's bits, so a subtraction
  leaves the significand. The derivative is that of `_of_any`.
  """
  exponents = [_exponent_bits(scale) for scale in (first, second)]
  significands = [
    lax.bitcast_convert_type(_bits(scale) - exponent, jnp.float32)
    for scale, exponent in zip((first, second), exponents, strict=True)
  ]
  # Their sum is in [-252, 254], and what the power leaves of it is normal.
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
    # In two steps, as 2^-127 would be flushed to zero.
    half = exponent >> 1
    significands.append(
      scale * _power_of_two(-half) * _power_of_two(half - exponent)
    )
    exponents.append(exponent)
  # Significands are in [1, 2), so that their product is one of [1, 2^n). It is
  # brought below 1: what is multiplied by it first does not overflow.
  exponent = sum(exponents[1:], start=exponents[0])
  power = jnp.clip(exponent + len(scales), _MIN_EXPONENT, _MAX_EXPONENT)
  # The rest is the part beyond the range of the power. It is within that range
  # for two scales.
  exponent = exponent - power
  rest = jnp.clip(exponent, _MIN_EXPONENT, _MAX_EXPONENT)
  factor = math.prod(significands[1:], start=significands[0])
  factor = factor * _power_of_two(rest)
  if len(scales) > 2:
    # Too small for the factor, which underflows then. A rest that is too large
    # stays clipped, because the result of any dot but 0 overflows.
    rest = jnp.clip(exponent - rest, _MIN_EXPONENT, 0)
    factor = factor * _power_of_two(rest)
  return factor, jnp.broadcast_to(_power_of_two(power), factor.shape)


def _exponent_bits(x: jax.Array) -> jax.Array:
  """Returns i32 e * 2^23, with 2^e <= |x| < 2^(e+1).

  It is 0 for zeros, subnormals, Inf and NaN.
  """
  bits = _bits(x)
  # The exponent field plus one, which of Inf and NaN leaves 31 bits.
  following = (bits + jnp.int32(_in_place(1))) & _MAGNITUDE_MASK
  is_normal = following >= _in_place(2)
  exponent = (bits & _EXPONENT_MASK) - jnp.int32(_in_place(_BIAS))
  return jnp.where(is_normal, exponent, 0)


def _bits(x: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(x, jnp.int32)


def _in_place(exponent: int) -> int:
  """Returns an exponent as part of the bits of an f32."""
  return exponent << _MANTISSA_BITS


def _power_of_two(exponent: jax.Array) -> jax.Array:
  """Returns f32 2^exponent, for the exponent of a normal number."""
  bits = (exponent + _BIAS) << _MANTISSA_BITS
  return lax.bitcast_convert_type(bits, jnp.float32)


def with_product(call: calls.Call) -> calls.Call:
  """Returns a call with the product of two separate global scales."""
  if call.first_global_scale is None or call.global_scale is not None:
    return call
  factor, power = product([call.first_global_scale, call.second_global_scale])
  return call.replace(global_scale=factor, global_power=power)


def multiply(
  x: jax.Array, global_scale: jax.Array, power: jax.Array | None
) -> jax.Array:
  """Returns f32 `x * global_scale * power`, in this order under XLA too.

  XLA would multiply two constants first, and f32 need not hold their product.
  """
  x = x * global_scale
  if power is None:
    return x
  # It does not look through a select. NaN stays NaN.
  x = jnp.where(jnp.isnan(x), np.float32(np.nan), x)
  return x * power


def apply(result: jax.Array, call: calls.Call) -> jax.Array:
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
  """Applies an activation by its name; None is the identity."""
  if activation is None:
    return x
  functions = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,  # the tanh approximation, its default
    "silu": jax.nn.silu,
  }
  return functions[activation](x)


# What kernels take of it.


def pair(call: calls.Call) -> jax.Array | None:
  """Returns the global scale for kernels: f32[2], or f32[] of one factor."""
  if call.global_power is None:
    return call.global_scale
  return jnp.stack([call.global_scale, call.global_power])


def fused(
  dot: Callable[[calls.Call, problems.DotProblem], jax.Array],
  call: calls.Call,
  problem: problems.DotProblem,
) -> jax.Array:
  """Completes a dot of kernels that fuse one global scale, and a bias over n.

  Args:
    dot: (call, problem) -> the result. Where the global scale or the bias
      varies otherwise, it is asked for the bare dot in f32, and the epilogue
      follows.
    call, problem: the call.
  """
  if bias_is_over_n(call) and problem.global_scale != "array":
    return dot(call, problem)
  bare = call.bare()
  return apply(dot(bare, bare.problem()), with_product(call))


def bias_is_over_n(call: calls.Call) -> bool:
  """Returns whether the bias varies only over rhs's dimensions."""
  if call.bias is None:
    return True
  num_n = len(call.rhs.free)
  return all(size == 1 for size in call.bias.shape[: call.bias.ndim - num_n])


def bias_row(call: calls.Call) -> jax.Array:
  """Returns f32[n] of a bias that `bias_is_over_n`."""
  shape, num_n = call.shape, len(call.rhs.free)
  columns = shape[len(shape) - num_n :]
  ones = (1,) * (len(shape) - num_n)
  bias = jnp.broadcast_to(call.bias.astype(jnp.float32), ones + columns)
  return bias.reshape(math.prod(columns))
