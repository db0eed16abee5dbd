# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Debug checks of a ragged dot's group sizes and of its result."""

from __future__ import annotations

import functools
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.dot import guards
from jaxplugin.dot import sides
from jaxplugin.ragged import backends
from jaxplugin.ragged import calls
from jaxplugin.ragged import primitive

_F32: Final = np.dtype(np.float32)


def check(result: jax.Array, call: calls.Call) -> None:
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
    jnp.abs(calls.in_usual_order(x).dequantized()) for x in (call.lhs, call.rhs)
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
