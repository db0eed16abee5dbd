# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A backend of another package, which sums block by block.

Both scale factors of a block are powers of two, with exponents e and f. The
backend sums the products of the values without scale factors, and multiplies
the sum by 2^(e + f). So no dequantized value leaves float32's range, and the
result is exact.

The backend stores the sums of all blocks, f32[blocks, m, n]. So it supports
only few rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import jaxplugin as jp

_BLOCK_SIZE = 32
_MAX_ROWS = 256
_MAX_SUMS = 1 << 28  # f32 numbers, 1 GiB
_NAN = 255  # the code of E8M0's NaN
_BIAS = 127


def supports(problem: jp.backends.Problem, target: jp.Target) -> str | None:
  """Supports few rows of MX formats, in whole blocks."""
  del target
  for name, operand in (("lhs", problem.lhs), ("rhs", problem.rhs)):
    if operand.format not in (jp.MXFP8, jp.MXFP8_E5M2, jp.MXFP4):
      return f"needs MXFP8 or MXFP4 on both sides, got {operand} as {name}"
  if problem.num_contracting != 1:
    return f"needs one contracting dimension, got {problem.num_contracting}"
  # Symbolic sizes need takes_symbolic_sizes=True.
  batch, m, n, k = problem.batch, problem.m, problem.n, problem.k
  assert batch is not None and m is not None
  assert n is not None and k is not None
  if k % _BLOCK_SIZE:
    return f"needs k to be a multiple of {_BLOCK_SIZE}, got k={k}"
  if m > _MAX_ROWS:
    return f"needs m up to {_MAX_ROWS}, got m={m}"
  sums = batch * m * n * (k // _BLOCK_SIZE)
  if sums > _MAX_SUMS:
    return f"needs at most {_MAX_SUMS} sums of blocks, got {sums}"
  return None


def emit(call: jp.backends.Call) -> jax.Array:
  """Computes the call in JAX operations."""
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
  """Returns values without scales, f32[batch, rows, blocks, block size]."""
  values = operand.unpacked().astype(jnp.float32)
  return values.reshape(*values.shape[:2], -1, _BLOCK_SIZE)


def _exponents(operand: jp.backends.Operand) -> jax.Array:
  """Returns the exponents of E8M0 scales, i32[batch, blocks, rows]."""
  assert operand.scale is not None
  codes = lax.bitcast_convert_type(operand.scale, jnp.uint8)
  return jnp.swapaxes(codes, 1, 2).astype(jnp.int32) - _BIAS


def _times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
  """Returns x * 2^exponent for -254 to 254, by factors that are normal."""
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
  summary="sums each block, and multiplies by the powers of two of both scales",
  is_portable=True,
)
