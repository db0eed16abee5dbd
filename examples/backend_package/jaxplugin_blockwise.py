# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A third-party backend of jaxplugin, which sums block by block.

Both scales of a block are powers of two, with exponents e and f. The block's
sum is computed from the values without scales, and multiplied by 2^(e + f).
No dequantized value can overflow, so the result is exact even if values times
scales leave float32's range.

It is for few rows, because it keeps the sums of all blocks, f32[blocks, m, n].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import jaxplugin as jp

_BLOCK_SIZE = 32
_MAX_ROWS = 256
_MAX_SUMS = 1 << 28  # f32 numbers, 1 GiB
_NAN = 255  # of E8M0
_BIAS = 127


def supports(problem: jp.backends.Problem, target: jp.Target) -> str | None:
  """Serves few rows of MX formats, in whole blocks."""
  del target
  for name, operand in (("lhs", problem.lhs), ("rhs", problem.rhs)):
    if operand.format not in (jp.MXFP8, jp.MXFP8_E5M2, jp.MXFP4):
      return f"needs MXFP8 or MXFP4 on both sides, got {operand} as {name}"
  if problem.num_contracting != 1:
    return f"contracts one dimension, got {problem.num_contracting}"
  # jaxplugin asks about symbolic sizes only where a backend says so.
  batch, m, n, k = problem.batch, problem.m, problem.n, problem.k
  assert batch is not None and m is not None
  assert n is not None and k is not None
  if k % _BLOCK_SIZE:
    return f"needs k to be a multiple of {_BLOCK_SIZE}, got k={k}"
  if m > _MAX_ROWS:
    return f"is for m up to {_MAX_ROWS}, got m={m}"
  sums = batch * m * n * (k // _BLOCK_SIZE)
  if sums > _MAX_SUMS:
    return (
      f"holds {_MAX_SUMS} sums of blocks at most, of these there are {sums}"
    )
  return None


def emit(call: jp.backends.Call) -> jax.Array:
  """The call, in XLA's operations."""
  rows = call.as_rows()  # (batch, m, k) x (batch, n, k)
  sums = jnp.einsum(
    "zmbv,znbv->zbmn",
    _blocks(rows.lhs),
    _blocks(rows.rhs),
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
  of_lhs, of_rhs = _exponents(rows.lhs), _exponents(rows.rhs)
  exponent = of_lhs[:, :, :, None] + of_rhs[:, :, None, :]
  is_nan = (of_lhs == _NAN - _BIAS)[:, :, :, None]
  is_nan |= (of_rhs == _NAN - _BIAS)[:, :, None, :]
  sums = jnp.where(is_nan, jnp.nan, _times_power_of_two(sums, exponent))
  # Global scales, bias, activation, residual and the cast.
  return rows.finish(jnp.sum(sums, axis=1))


def _blocks(operand: jp.backends.Operand) -> jax.Array:
  """f32[batch, rows, blocks, block size] of values without their scales."""
  values = operand.unpacked().astype(jnp.float32)
  return values.reshape(*values.shape[:2], -1, _BLOCK_SIZE)


def _exponents(operand: jp.backends.Operand) -> jax.Array:
  """i32[batch, blocks, rows] of E8M0 scales."""
  assert operand.scale is not None
  codes = lax.bitcast_convert_type(operand.scale, jnp.uint8)
  return jnp.swapaxes(codes, 1, 2).astype(jnp.int32) - _BIAS


def _times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
  """x * 2^exponent of -254 to 254, in steps that are normal numbers."""
  step = exponent // 3
  for part in (step, step, exponent - 2 * step):
    bits = (part + _BIAS) << 23
    x = x * lax.bitcast_convert_type(bits, jnp.float32)
  return x


BACKEND = jp.Backend(
  name="blockwise",
  api_version=1,
  platforms=("cpu", "cuda", "rocm", "tpu"),
  supports=supports,
  emit=emit,
  summary="sums of blocks, each times the power of two of both scales",
  is_portable=True,
)
