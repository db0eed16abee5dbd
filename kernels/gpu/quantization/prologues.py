# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Norms, gated activations and their gradients, before a tile is quantized.

All arithmetic is f32, in the order of `jaxplugin/quantization/prologues.py`.

The features of x are its last dimension in memory. Tiles that cover a row's
features have its statistics in registers: layer_norm first subtracts the mean,
and then sums squares. Other tiles read the statistics, which the kernel
`norm_statistics` stores before.

QUANTIZED is a `quantize_config.QuantizeConstant` with a prologue.
"""

import triton
import triton.language as tl
from jaxplugin.kernels.gpu.quantization import quantize_codec as codec
from jaxplugin.kernels.gpu.quantization import quantize_config
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
_STATISTICS = tl.constexpr(quantize_config.STATISTICS)


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
    other: `up` or `residual`, as x; or the result of `norm_statistics`, of x
      without a residual.
    weight, bias: f32; see `jaxplugin/quantization/prologues.py`. A gradient has
      the cotangent in place of a weight.
    total: as x, receives x + residual; None to store no sum.
    batch, row_start, column_start: of the tile.
    rows, columns: sizes of what is quantized.
    STRIDES: of x.
  """
  row = row_start + tl.arange(0, BLOCK_M)
  column = column_start + tl.arange(0, BLOCK_K)
  inside = (row < rows)[:, None] & (column < columns)[None, :]
  if QUANTIZED.prologue.is_norm:
    tile = _sum_with_residual(
      x,
      other,
      total,
      batch,
      row,
      column_start,
      rows,
      columns,
      STRIDES,
      BLOCK_M,
      BLOCK_K,
      QUANTIZED,
    )
    if not QUANTIZED.prologue.has_statistics:
      tl.static_assert(STRIDES[2] == 1 and columns <= BLOCK_K)
      mean, factor, inverse = _statistics(
        tile,
        inside,
        x,
        other,
        total,
        batch,
        row,
        rows,
        columns,
        STRIDES,
        BLOCK_M,
        BLOCK_K,
        QUANTIZED,
      )
      mean, factor = mean[:, None], factor[:, None]
      inverse = inverse[:, None]
    elif STRIDES[2] == 1:
      mean, factor, inverse = _load_statistics(other, batch, row, rows)
      mean, factor = mean[:, None], factor[:, None]
      inverse = inverse[:, None]
    else:
      mean, factor, inverse = _load_statistics(other, batch, column, columns)
      mean, factor = mean[None, :], factor[None, :]
      inverse = inverse[None, :]
    tile = _centered(tile, mean, inside, QUANTIZED) * factor * inverse
    if QUANTIZED.prologue.has_weight:
      tile = tile * _of_features(weight, row, column, rows, columns, STRIDES)
    if QUANTIZED.prologue.has_bias:
      tile = tile + _of_features(bias, row, column, rows, columns, STRIDES)
  elif QUANTIZED.prologue.gradient is not None:
    tile = _gradient_of_tile(
      x,
      other,
      weight,
      bias,
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
def norm_statistics(
  x,
  residual,
  statistics,
  total,
  rows: tl.constexpr,
  features: tl.constexpr,
  x_strides: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Stores the statistics of each row of x, or of x + residual.

  Grid: one program for each BLOCK_M rows. It keeps the first BLOCK_K features
  in registers, and reads the others several times. Masked: rows past `rows`,
  and features past `features`.

  Args:
    x: f32, bf16 or f16[1, rows, features].
    residual: as x, if the prologue has one; else not read.
    statistics: f32[rows, 3], the mean (of layer_norm), the factor that keeps
      squares in range, and 1 / the root of the scaled mean square.
    total: x + residual, as x; None without a residual.
    x_strides: (batch, row, feature) in elements.
  """
  batch, row_start, start = tiles.of_program(rows, 1, BLOCK_M, BLOCK_K)
  row = row_start + tl.arange(0, BLOCK_M)
  tile = _sum_with_residual(
    x,
    residual,
    total,
    batch,
    row,
    start,
    rows,
    features,
    x_strides,
    BLOCK_M,
    BLOCK_K,
    QUANTIZED,
  )
  column = tl.arange(0, BLOCK_K)
  inside = (row < rows)[:, None] & (column < features)[None, :]
  mean, factor, inverse = _statistics(
    tile,
    inside,
    x,
    residual,
    total,
    batch,
    row,
    rows,
    features,
    x_strides,
    BLOCK_M,
    BLOCK_K,
    QUANTIZED,
  )
  place = statistics + row * _STATISTICS
  tl.store(place, mean, mask=row < rows)
  tl.store(place + 1, factor, mask=row < rows)
  tl.store(place + 2, inverse, mask=row < rows)


@triton.jit
def _load_statistics(statistics, batch, row, rows):
  """Loads what `norm_statistics` stored for rows of a matrix of a batch."""
  place = statistics + (batch * rows + row) * _STATISTICS
  mean = tl.load(place, mask=row < rows, other=0.0)
  factor = tl.load(place + 1, mask=row < rows, other=0.0)
  return mean, factor, tl.load(place + 2, mask=row < rows, other=0.0)


@triton.jit
def _of_features(values, row, column, rows, columns, STRIDES: tl.constexpr):
  """Loads the weight or bias of a tile's features."""
  if STRIDES[2] == 1:
    mask = column < columns
    found = tl.load(values + column, mask=mask, other=0.0)[None, :]
  else:
    found = tl.load(values + row, mask=row < rows, other=0.0)[:, None]
  return found


@triton.jit
def _sum_with_residual(
  x,
  residual,
  total,
  batch,
  row,
  start,
  rows: tl.constexpr,
  columns: tl.constexpr,
  STRIDES: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Returns columns of x in f32, from `start` on, with a residual the sum.

  It rounds the sum to x's dtype, and stores it to `total` unless that is None.
  """
  tile = tiles.load_runs(
    x, batch, row, start, rows, columns, STRIDES, BLOCK_M, BLOCK_K
  )
  if QUANTIZED.prologue.has_residual:
    added = tiles.load_runs(
      residual, batch, row, start, rows, columns, STRIDES, BLOCK_M, BLOCK_K
    )
    tile = tile.to(tl.float32) + added.to(tl.float32)
    tile = tile.to(x.dtype.element_ty)
    if total is not None:
      column = start + tl.arange(0, BLOCK_K)
      inside = (row < rows)[:, None] & (column < columns)[None, :]
      pointers = total + batch * STRIDES[0]
      pointers += row[:, None] * STRIDES[1] + column[None, :]
      tl.store(pointers, tile, mask=inside)
  return tile.to(tl.float32)


@triton.jit
def _statistics(
  tile,
  inside,
  x,
  residual,
  total,
  batch,
  row,
  rows: tl.constexpr,
  columns: tl.constexpr,
  STRIDES: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Returns f32[rows] three times, see `norm_statistics`.

  `tile` has the first BLOCK_K columns. The loops load the others.
  """
  mean = tl.zeros((BLOCK_M,), tl.float32)
  if QUANTIZED.prologue.function == "layer_norm":
    sums = tile
    for start in range(BLOCK_K, columns, BLOCK_K):
      sums += _deviations(
        x,
        residual,
        None,
        mean,
        batch,
        row,
        start,
        rows,
        columns,
        STRIDES,
        BLOCK_M,
        BLOCK_K,
        QUANTIZED,
      )
    mean = tl.div_rn(tl.sum(sums, axis=1), columns * 1.0)
  tile = _centered(tile, mean[:, None], inside, QUANTIZED)
  largest = tl.abs(tile)
  for start in range(BLOCK_K, columns, BLOCK_K):
    more = _deviations(
      x,
      residual,
      None,
      mean,
      batch,
      row,
      start,
      rows,
      columns,
      STRIDES,
      BLOCK_M,
      BLOCK_K,
      QUANTIZED,
    )
    largest = tl.maximum(largest, tl.abs(more))
  factor = _factor_in_range(tl.max(largest, axis=1), QUANTIZED)
  tile = tile * factor[:, None]
  squares = tile * tile
  for start in range(BLOCK_K, columns, BLOCK_K):
    more = _deviations(
      x,
      residual,
      total,
      mean,
      batch,
      row,
      start,
      rows,
      columns,
      STRIDES,
      BLOCK_M,
      BLOCK_K,
      QUANTIZED,
    )
    more = more * factor[:, None]
    squares += more * more
  square = tl.div_rn(tl.sum(squares, axis=1), columns * 1.0)
  root = tl.sqrt_rn(square + QUANTIZED.prologue.epsilon * factor * factor)
  return mean, factor, tl.div_rn(1.0, root)


@triton.jit
def _deviations(
  x,
  residual,
  total,
  mean,
  batch,
  row,
  start,
  rows: tl.constexpr,
  columns: tl.constexpr,
  STRIDES: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Returns `_sum_with_residual`, for layer_norm less the mean of each row."""
  tile = _sum_with_residual(
    x,
    residual,
    total,
    batch,
    row,
    start,
    rows,
    columns,
    STRIDES,
    BLOCK_M,
    BLOCK_K,
    QUANTIZED,
  )
  column = start + tl.arange(0, BLOCK_K)
  inside = (row < rows)[:, None] & (column < columns)[None, :]
  return _centered(tile, mean[:, None], inside, QUANTIZED)


@triton.jit
def _centered(x, mean, inside, QUANTIZED: tl.constexpr):
  """Subtracts the mean from x for layer_norm."""
  if QUANTIZED.prologue.function == "layer_norm":
    x = tl.where(inside, x - mean, 0.0)
  return x


@triton.jit
def _factor_in_range(amax, QUANTIZED: tl.constexpr):
  """Returns a power of two for each row's amax, so that f32 holds its squares.

  It is 1 for most rows. Multiplying the row by it, and epsilon by its square,
  does not change the norm.
  """
  exponent = codec.f32_bits(amax) >> 23
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
def _gradient_of_tile(
  x,
  up,
  cotangent,
  bias,
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
  """Loads a tile of the operands, and computes the gradient.

  With halves, x has all gates of a row before all factors. A tile has only
  gradients of gates, or only those of factors. Their numbers are the same.
  """
  is_minor: tl.constexpr = STRIDES[2] == 1
  features: tl.constexpr = columns if is_minor else rows
  is_split: tl.constexpr = QUANTIZED.prologue.gradient_of_halves
  gates: tl.constexpr = features // 2 if is_split else features
  of_rows: tl.constexpr = rows if is_minor else gates
  of_columns: tl.constexpr = gates if is_minor else columns
  is_up = QUANTIZED.prologue.gradient == "up"
  if is_split:
    tl.static_assert(gates % (BLOCK_K if is_minor else BLOCK_M) == 0)
    up = x + gates
    if is_minor:
      is_up = column_start >= gates
      column_start = tl.where(is_up, column_start - gates, column_start)
    else:
      is_up = row_start >= gates
      row_start = tl.where(is_up, row_start - gates, row_start)
  row = row_start + tl.arange(0, BLOCK_M)
  gate = tiles.load_runs(
    x, batch, row, column_start, of_rows, of_columns, STRIDES, BLOCK_M, BLOCK_K
  ).to(tl.float32)
  factor = tiles.load_runs(
    up, batch, row, column_start, of_rows, of_columns, STRIDES, BLOCK_M, BLOCK_K
  ).to(tl.float32)
  column = column_start + tl.arange(0, BLOCK_K)
  if is_split:  # The cotangent has half of the features of x.
    row_stride: tl.constexpr = STRIDES[1] // 2 if is_minor else STRIDES[1]
    column_stride: tl.constexpr = STRIDES[2] if is_minor else STRIDES[2] // 2
    pointers = cotangent + batch * (STRIDES[0] // 2)
    pointers += row[:, None] * row_stride + column[None, :] * column_stride
    inside = (row < of_rows)[:, None] & (column < of_columns)[None, :]
    given = tl.load(pointers, mask=inside, other=0.0)
  else:
    given = tiles.load_runs(
      cotangent,
      batch,
      row,
      column_start,
      of_rows,
      of_columns,
      STRIDES,
      BLOCK_M,
      BLOCK_K,
    )
  given = given.to(tl.float32)
  if QUANTIZED.prologue.has_bias:
    if is_minor:
      gate_bias, up_bias = _biases(bias, column, gates, QUANTIZED)
      gate, factor = gate + gate_bias[None, :], factor + up_bias[None, :]
    else:
      gate_bias, up_bias = _biases(bias, row, gates, QUANTIZED)
      gate, factor = gate + gate_bias[:, None], factor + up_bias[:, None]
  of_gate, of_up = _gradients(gate, factor, QUANTIZED)
  return given * tl.where(is_up, of_up, of_gate)


@triton.jit
def _gradients(gate, up, QUANTIZED: tl.constexpr):
  """Returns the derivatives of `_gated` with respect to both operands."""
  passes_gate = 1.0
  passes_up = 1.0
  if QUANTIZED.prologue.function == "swigluoai":
    passes_gate = _passes(gate, QUANTIZED.prologue.limit)
    passes_up = _passes(tl.abs(up), QUANTIZED.prologue.limit)
  gate, up, z, slope = _terms(gate, up, QUANTIZED)
  power = tl.where(z == z, _exponential(tl.abs(z)), z)  # keeps a NaN
  inverse = codec.approximate_reciprocal(power + 1.0, QUANTIZED.hardware_cast)
  inverse = tl.fma(tl.fma(-inverse, power + 1.0, 1.0), inverse, inverse)
  sigmoid = tl.where(z < 0, power * inverse, inverse)
  derivative = power * inverse * inverse
  # The slope may be infinite where the derivative is 0.
  change = tl.where(derivative == 0, 0.0, gate * slope * derivative)
  return up * (sigmoid + change) * passes_gate, gate * sigmoid * passes_up


@triton.jit
def _passes(x, limit: tl.constexpr):
  """Returns the derivative of the smaller one of x and a limit."""
  return tl.where(x < limit, 1.0, tl.where(x == limit, 0.5, 0.0))


@triton.jit
def _terms(gate, up, QUANTIZED: tl.constexpr):
  """Returns gate and factor of gate * sigmoid(z) * factor, z and dz / dgate."""
  if QUANTIZED.prologue.function == "silu_and_mul":
    z = gate
    slope = 1.0
  elif QUANTIZED.prologue.function == "gelu_and_mul":
    square = gate * gate
    z = gate * tl.fma(square, _GELU_B, _GELU_A)
    slope = tl.fma(square, 3 * _GELU_B, _GELU_A)
  else:
    tl.static_assert(QUANTIZED.prologue.function == "swigluoai")
    limit: tl.constexpr = QUANTIZED.prologue.limit
    slope = QUANTIZED.prologue.alpha
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
    z = gate * slope
  return gate, up, z, slope


@triton.jit
def _gated(gate, up, QUANTIZED: tl.constexpr):
  """Returns gate * sigmoid(z) * up; for swigluoai * (up + 1).

  An infinite gate gives NaN, which quantizes like Inf.
  """
  gate, up, z, _ = _terms(gate, up, QUANTIZED)
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
