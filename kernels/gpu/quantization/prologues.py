# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Norms and gated activations of a tile, before it is quantized.

All arithmetic is f32, in the order of `jaxplugin/quantization/prologues.py`.

The features of x are its last dimension in memory. A norm needs tiles that
cover a row's features. It sums in registers: layer_norm first subtracts the
mean, and then sums squares.

QUANTIZED is a `quantize_config.QuantizeConstant` with a prologue.
"""

import triton
import triton.language as tl
from jaxplugin.kernels.gpu.quantization import quantize_codec as codec
from jaxplugin.kernels.gpu.quantization import quantize_tiles as tiles

# gelu's tanh approximation is gate * sigmoid(z), z = gate * (A + B gate^2),
# A = 2 sqrt(2 / pi), B = 0.044715 A (arXiv 1606.08415, section 2).
_GELU_A = tl.constexpr(1.5957691216057308)
_GELU_B = tl.constexpr(0.07135481627159600)

# e^-x = 2^-n e^r with n = round(x log2(e)): x + _ROUND has n in its low bits.
# `_LN2_HIGH` has few bits, so n times it is exact.
_LOG2_E = tl.constexpr(1.4426950408889634)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23
_LN2_HIGH = tl.constexpr(0.693145751953125)
_LN2_LOW = tl.constexpr(1.4286068203094173e-06)
# (e^r - 1 - r) / r^2 of |r| <= log(2) / 2, from the highest power down: least
# maximum error, found by weighted least squares.
_E4 = tl.constexpr(0.00138145359)
_E3 = tl.constexpr(0.00836874545)
_E2 = tl.constexpr(0.0416683927)
_E1 = tl.constexpr(0.166665211)
_E0 = tl.constexpr(0.49999994)
# e^-x is 0 from here on; it would be subnormal.
_LARGEST = tl.constexpr(87.0)
# Exponent fields of f32. The squares of rows whose amax has a usual one are in
# the range of f32.
_USUAL_LEAST = tl.constexpr(127 - 40)
_USUAL_MOST = tl.constexpr(127 + 40)
_MOST_EXPONENT = tl.constexpr(253)


@triton.jit
def load(
  x,
  other,
  weight,
  bias,
  total,
  batch,
  row_start,
  column_start,
  rows: tl.constexpr,
  columns: tl.constexpr,
  STRIDES: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Loads a tile and computes the prologue; zeros are outside of its sizes.

  Args:
    x: f32, bf16 or f16; rows or columns are features, and halves have twice as
      many.
    other: `up` or `residual`, as x.
    weight, bias: f32; see `jaxplugin/quantization/prologues.py`.
    total: as x, receives x + residual; None to store no sum.
    batch, row_start, column_start: of the tile.
    rows, columns: sizes of what is quantized.
    STRIDES: of x.
  """
  row = row_start + tl.arange(0, BLOCK_M)
  column = column_start + tl.arange(0, BLOCK_K)
  inside = (row < rows)[:, None] & (column < columns)[None, :]
  if QUANTIZED.prologue.is_norm:
    tl.static_assert(STRIDES[2] == 1 and columns <= BLOCK_K)
    tile = tiles.load_runs(
      x, batch, row, column_start, rows, columns, STRIDES, BLOCK_M, BLOCK_K
    )
    if QUANTIZED.prologue.has_residual:
      added = tiles.load_runs(
        other,
        batch,
        row,
        column_start,
        rows,
        columns,
        STRIDES,
        BLOCK_M,
        BLOCK_K,
      )
      tile = tile.to(tl.float32) + added.to(tl.float32)
      tile = tile.to(x.dtype.element_ty)
      if total is not None:
        pointers = total + batch * STRIDES[0]
        pointers += row[:, None] * STRIDES[1] + column[None, :]
        tl.store(pointers, tile, mask=inside)
    tile = _normalized(tile.to(tl.float32), inside, columns, QUANTIZED)
    if QUANTIZED.prologue.has_weight:
      mask = column < columns
      tile = tile * tl.load(weight + column, mask=mask, other=0.0)[None, :]
    if QUANTIZED.prologue.has_bias:
      mask = column < columns
      tile = tile + tl.load(bias + column, mask=mask, other=0.0)[None, :]
  else:
    gate, up = _gate_and_up(
      x,
      other,
      batch,
      row_start,
      column_start,
      rows,
      columns,
      STRIDES,
      BLOCK_M,
      BLOCK_K,
      QUANTIZED,
    )
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if QUANTIZED.prologue.has_bias:
      if STRIDES[2] == 1:
        gate_bias, up_bias = _biases(bias, column, columns, QUANTIZED)
        gate, up = gate + gate_bias[None, :], up + up_bias[None, :]
      else:
        gate_bias, up_bias = _biases(bias, row, rows, QUANTIZED)
        gate, up = gate + gate_bias[:, None], up + up_bias[:, None]
    tile = _gated(gate, up, QUANTIZED)
  if QUANTIZED.prologue.is_norm or QUANTIZED.prologue.has_bias:
    tile = tl.where(inside, tile, 0.0)  # zeros have other results
  return tile


@triton.jit
def _normalized(x, inside, columns: tl.constexpr, QUANTIZED: tl.constexpr):
  """Returns rows of x divided by their root mean square or deviation."""
  if QUANTIZED.prologue.function == "layer_norm":
    mean = tl.div_rn(tl.sum(x, axis=1), columns * 1.0)
    x = tl.where(inside, x - mean[:, None], 0.0)
  factor = _factor_in_range(x, QUANTIZED)
  x = x * factor[:, None]
  square = tl.div_rn(tl.sum(x * x, axis=1), columns * 1.0)
  root = tl.sqrt_rn(square + QUANTIZED.prologue.epsilon * factor * factor)
  return x * tl.div_rn(1.0, root)[:, None]


@triton.jit
def _factor_in_range(x, QUANTIZED: tl.constexpr):
  """Returns a power of two for each row, so that f32 holds its squares.

  It is 1 for most rows. Multiplying the row by it, and epsilon by its square,
  does not change the norm.
  """
  exponent = codec.f32_bits(tl.max(tl.abs(x), axis=1)) >> 23
  exponent = tl.maximum(exponent, QUANTIZED.prologue.least_exponent)
  exponent = tl.minimum(exponent, _MOST_EXPONENT)
  usual = tl.minimum(tl.maximum(exponent, _USUAL_LEAST), _USUAL_MOST)
  return codec.from_bits((usual - exponent + 127) << 23)


@triton.jit
def _gate_and_up(
  x,
  up,
  batch,
  row_start,
  column_start,
  rows: tl.constexpr,
  columns: tl.constexpr,
  STRIDES: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Loads gates and factors: two tiles, or one with pairs of both."""
  if QUANTIZED.prologue.halves == "interleaved":
    if STRIDES[2] == 1:
      row = row_start + tl.arange(0, BLOCK_M)
      pairs = tiles.load_runs(
        x,
        batch,
        row,
        2 * column_start,
        rows,
        2 * columns,
        STRIDES,
        BLOCK_M,
        2 * BLOCK_K,
      )
      pairs = tl.reshape(pairs, (BLOCK_M, BLOCK_K, 2))
    else:
      row = 2 * row_start + tl.arange(0, 2 * BLOCK_M)
      column = column_start + tl.arange(0, BLOCK_K)
      pairs = tiles.load(x, batch, row, column, 2 * rows, columns, STRIDES)
      pairs = tl.reshape(pairs, (BLOCK_M, 2, BLOCK_K))
      pairs = tl.permute(pairs, (0, 2, 1))
    gate, factor = tl.split(pairs)
  else:
    if QUANTIZED.prologue.halves == "split":
      up = x + (columns if STRIDES[2] == 1 else rows)
    row = row_start + tl.arange(0, BLOCK_M)
    gate = tiles.load_runs(
      x, batch, row, column_start, rows, columns, STRIDES, BLOCK_M, BLOCK_K
    )
    factor = tiles.load_runs(
      up, batch, row, column_start, rows, columns, STRIDES, BLOCK_M, BLOCK_K
    )
  return gate, factor


@triton.jit
def _biases(bias, feature, features, QUANTIZED: tl.constexpr):
  """Loads the biases of gates and of factors, which have the order of x."""
  if QUANTIZED.prologue.halves == "interleaved":
    bias += 2 * feature
    distance = 1
  else:
    bias += feature
    distance = features
  mask = feature < features
  gate = tl.load(bias, mask=mask, other=0.0)
  return gate, tl.load(bias + distance, mask=mask, other=0.0)


@triton.jit
def _gated(gate, up, QUANTIZED: tl.constexpr):
  """Returns gate * sigmoid(z) * up; for swigluoai * (up + 1).

  An infinite gate gives NaN, which quantizes like Inf.
  """
  if QUANTIZED.prologue.function == "silu_and_mul":
    z = gate
    power = _exponential(tl.abs(z))
  elif QUANTIZED.prologue.function == "gelu_and_mul":
    factor = tl.fma(gate * gate, _GELU_B, _GELU_A)
    z = gate * factor
    power = _exponential(tl.abs(z))
  else:
    tl.static_assert(QUANTIZED.prologue.function == "swigluoai")
    limit: tl.constexpr = QUANTIZED.prologue.limit
    alpha: tl.constexpr = QUANTIZED.prologue.alpha
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
    z = gate * alpha
    power = _exponential(tl.abs(z))
  # sigmoid(z) = e^z / (1 + e^z) for negative z. One Newton step rounds the
  # quotient, as its divisor is 1 to 2.
  numerator = tl.where(z < 0, gate * power, gate)
  divisor = power + 1.0
  inverse = codec.approximate_reciprocal(divisor, QUANTIZED.hardware_cast)
  quotient = numerator * inverse
  excess = tl.fma(quotient, divisor, -numerator)  # keeps the sign of a zero
  return tl.fma(-excess, inverse, quotient) * up


@triton.jit
def _exponential(x):
  """Returns e^-x of x >= 0 within 1 ulp, and 0 from `_LARGEST` on.

  The hardware's e^x has an error of |x| ulps.
  """
  rounded = tl.fma(x, _LOG2_E, _ROUND)
  n = rounded - _ROUND
  r = tl.fma(n, _LN2_LOW, tl.fma(n, _LN2_HIGH, -x))
  power = tl.fma(tl.fma(_E4, r, _E3), r, _E2)
  power = tl.fma(tl.fma(power, r, _E1), r, _E0)
  power = tl.fma(r * r, power, r) + 1.0
  bits = power.to(tl.int32, bitcast=True)
  bits -= rounded.to(tl.int32, bitcast=True) << 23
  return tl.where(x < _LARGEST, codec.from_bits(bits), 0.0)
