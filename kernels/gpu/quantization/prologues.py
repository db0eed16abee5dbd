# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Norms, activations and their gradients, before a tile is quantized.

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

# The probability of more than |x| in the normal distribution is
# e^(-x^2 / 2) t p(t) with t = 1 / (1 + c |x|), the form of Abramowitz and
# Stegun, 7.1.26. p has least maximum relative error, 2^-25 for |x| <= 14.5. It
# is in powers of t - 0.625, whose coefficients cancel less.
_NORMAL_C = tl.constexpr(0.34375)
_NORMAL_CENTER = tl.constexpr(0.625)
_NORMAL_8 = tl.constexpr(-0.027582265436649323)
_NORMAL_7 = tl.constexpr(0.004892938304692507)
_NORMAL_6 = tl.constexpr(0.0534064844250679)
_NORMAL_5 = tl.constexpr(-0.028220422565937042)
_NORMAL_4 = tl.constexpr(-0.10260549187660217)
_NORMAL_3 = tl.constexpr(0.05316734313964844)
_NORMAL_2 = tl.constexpr(0.32173675298690796)
_NORMAL_1 = tl.constexpr(0.41901886463165283)
_NORMAL_0 = tl.constexpr(0.2969154715538025)
# The probability of more is 0 in f32.
_NORMAL_LARGEST = tl.constexpr(14.5)
_DENSITY_AT_0 = tl.constexpr(0.3989422804014327)

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
_OF_GRADIENT = tl.constexpr(quantize_config.STATISTICS_OF_GRADIENT)


@triton.jit
def load(operands, place, TILE: tl.constexpr, QUANTIZED: tl.constexpr):
  """Loads a tile and computes the prologue; zeros are outside of its sizes.

  Returns:
    The tile, and the values whose columns are summed: the same, or for the
    gradient of a norm the gradients of its weight.

  Args:
    operands: pointers (x, other, weight, bias, cotangent, total).
      x: f32, bf16 or f16; rows or columns are features, and halves have twice
        as many.
      other: `up` or `residual`, as x; or the result of `norm_statistics`, of x
        without a residual.
      weight, bias: f32; see `jaxplugin/quantization/prologues.py`. The gradient
        of a norm has numbers of each row as its bias, f32[rows, 5], see
        `gradient_statistics` there.
      cotangent: of a gradient, as the function's result.
      total: as x, receives x + residual or the gradient of a norm; None to
        store neither.
    place: see `tiles.of_program`.
    TILE: a `quantize_config.Tile` with the sizes of what is quantized.
  """
  _, _, inside = tiles.positions(place, TILE)
  if QUANTIZED.prologue.is_norm_gradient:
    tile, summed = _gradient_of_norm(operands, place, inside, TILE, QUANTIZED)
  elif QUANTIZED.prologue.is_norm:
    tile = _normalized(operands, place, inside, TILE, QUANTIZED)
  elif QUANTIZED.prologue.gradient is not None:
    tile = _gradient_of_tile(operands, place, TILE, QUANTIZED)
  else:
    x, up, _, bias, _, _ = operands
    gate, up = _gate_and_up(x, up, place, TILE, QUANTIZED)
    gate, up = _with_biases(gate, up, bias, place, TILE, QUANTIZED)
    tile = _activated(gate, up, QUANTIZED)
  if QUANTIZED.prologue.is_norm or QUANTIZED.prologue.has_bias:
    tile = tl.where(inside, tile, 0.0)  # zeros have other results
  if not QUANTIZED.prologue.is_norm_gradient:
    summed = tile
  return tile, summed


@triton.jit
def norm_statistics(
  x,
  residual,
  statistics,
  total,
  TILE: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Stores the statistics of each row of x, or of x + residual.

  Grid: one program for each block of rows. It keeps the first features in
  registers, and reads the others several times. Masked: rows and features past
  the sizes of TILE.

  Args:
    x: f32, bf16 or f16[1, rows, features].
    residual: as x, if the prologue has one; else not read.
    statistics: f32[rows, 3], the mean (of layer_norm), the factor that keeps
      squares in range, and 1 / the root of the scaled mean square.
    total: x + residual, as x; None without a residual.
    TILE: a `quantize_config.Tile` whose columns are features.
  """
  place = tiles.of_program(TILE)
  operands = (x, residual, total)
  tile = _sum_with_residual(operands, place, TILE, QUANTIZED)
  row, _, inside = tiles.positions(place, TILE)
  mean, factor, inverse = _statistics(
    tile, inside, operands, place, TILE, QUANTIZED
  )
  mask = row < TILE.rows
  stored = statistics + row * _STATISTICS
  tl.store(stored, mean, mask=mask)
  tl.store(stored + 1, factor, mask=mask)
  tl.store(stored + 2, inverse, mask=mask)


@triton.jit
def _normalized(
  operands, place, inside, TILE: tl.constexpr, QUANTIZED: tl.constexpr
):
  """Loads a tile and computes a norm."""
  x, other, weight, bias, _, total = operands
  tile = _sum_with_residual((x, other, total), place, TILE, QUANTIZED)
  if QUANTIZED.prologue.has_statistics:
    mean = _statistic(other, 0, _STATISTICS, place, TILE)
    factor = _statistic(other, 1, _STATISTICS, place, TILE)
    inverse = _statistic(other, 2, _STATISTICS, place, TILE)
  else:
    tl.static_assert(TILE.is_row_major and TILE.columns <= TILE.block_k)
    mean, factor, inverse = _statistics(
      tile, inside, (x, other, total), place, TILE, QUANTIZED
    )
    mean, factor, inverse = mean[:, None], factor[:, None], inverse[:, None]
  tile = _centered(tile, mean, inside, QUANTIZED) * factor * inverse
  if QUANTIZED.prologue.has_weight:
    weights = _load_features(weight, 1, place, TILE)
    tile = tile * _of_features(weights, TILE)
  if QUANTIZED.prologue.has_bias:
    biases = _load_features(bias, 1, place, TILE)
    tile = tile + _of_features(biases, TILE)
  return tile


@triton.jit
def _gradient_of_norm(
  operands, place, inside, TILE: tl.constexpr, QUANTIZED: tl.constexpr
):
  """Loads a tile, and returns the gradients of a norm and of its weight."""
  x, residual, weight, statistics, cotangent, total = operands
  tile = tiles.load_runs(x, place, TILE).to(tl.float32)
  given = tiles.load_runs(cotangent, place, TILE).to(tl.float32)
  mean = _statistic(statistics, 0, _OF_GRADIENT, place, TILE)
  factor = _statistic(statistics, 1, _OF_GRADIENT, place, TILE)
  inverse = _statistic(statistics, 2, _OF_GRADIENT, place, TILE)
  tile = _centered(tile, mean, inside, QUANTIZED) * factor * inverse
  d = given
  if QUANTIZED.prologue.has_weight:
    d = d * _of_features(_load_features(weight, 1, place, TILE), TILE)
  change = d - tile * _statistic(statistics, 4, _OF_GRADIENT, place, TILE)
  if QUANTIZED.prologue.function == "layer_norm":
    change = change - _statistic(statistics, 3, _OF_GRADIENT, place, TILE)
  gradient = factor * inverse * change
  if QUANTIZED.prologue.has_residual:
    gradient += tiles.load_runs(residual, place, TILE).to(tl.float32)
  if total is not None:
    row, column, _ = tiles.positions(place, TILE)
    pointers = total + place[0] * TILE.strides[0]
    pointers += row[:, None] * TILE.strides[1]
    pointers += column[None, :] * TILE.strides[2]
    tl.store(pointers, gradient.to(total.dtype.element_ty), mask=inside)
  return gradient, given * tile


@triton.jit
def _of_rows(x, TILE: tl.constexpr):
  """Adds the dimension of features to numbers of a tile's rows."""
  return x[:, None] if TILE.is_row_major else x[None, :]


@triton.jit
def _statistic(
  statistics,
  NUMBER: tl.constexpr,
  COUNT: tl.constexpr,
  place,
  TILE: tl.constexpr,
):
  """Loads one of COUNT numbers that are stored for each row of a matrix."""
  row, column, _ = tiles.positions(place, TILE)
  if TILE.is_row_major:
    mask = row < TILE.rows
    stored = statistics + (place[0] * TILE.rows + row) * COUNT
  else:
    mask = column < TILE.columns
    stored = statistics + (place[0] * TILE.columns + column) * COUNT
  return _of_rows(tl.load(stored + NUMBER, mask=mask, other=0.0), TILE)


@triton.jit
def _load_features(values, DISTANCE: tl.constexpr, place, TILE: tl.constexpr):
  """Loads numbers of a tile's features, which lie DISTANCE apart."""
  row, column, _ = tiles.positions(place, TILE)
  feature = column if TILE.is_row_major else row
  mask = feature < TILE.features
  return tl.load(values + DISTANCE * feature, mask=mask, other=0.0)


@triton.jit
def _of_features(x, TILE: tl.constexpr):
  """Adds the other dimension of a tile to numbers of features."""
  return x[None, :] if TILE.is_row_major else x[:, None]


@triton.jit
def _sum_with_residual(
  operands, place, TILE: tl.constexpr, QUANTIZED: tl.constexpr
):
  """Returns a tile of x in f32, with a residual the sum.

  It rounds the sum to x's dtype, and stores it to the total unless that is
  None. Operands are pointers (x, residual, total).
  """
  x, residual, total = operands
  tile = tiles.load_runs(x, place, TILE)
  if QUANTIZED.prologue.has_residual:
    added = tiles.load_runs(residual, place, TILE)
    tile = tile.to(tl.float32) + added.to(tl.float32)
    tile = tile.to(x.dtype.element_ty)
    if total is not None:
      row, column, inside = tiles.positions(place, TILE)
      pointers = total + place[0] * TILE.strides[0]
      pointers += row[:, None] * TILE.strides[1] + column[None, :]
      tl.store(pointers, tile, mask=inside)
  return tile.to(tl.float32)


@triton.jit
def _statistics(
  tile,
  inside,
  operands,
  place,
  TILE: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Returns f32[rows] three times, see `norm_statistics`.

  `tile` has the first columns. The loops load the others.
  """
  x, residual, _ = operands
  batch, row_start, _ = place
  unstored = (x, residual, None)
  block_m: tl.constexpr = TILE.block_m
  block_k: tl.constexpr = TILE.block_k
  columns: tl.constexpr = TILE.columns
  mean = tl.zeros((block_m,), tl.float32)
  if QUANTIZED.prologue.function == "layer_norm":
    sums = tile
    for start in range(block_k, columns, block_k):
      more = (batch, row_start, start)
      sums += _deviations(unstored, mean, more, TILE, QUANTIZED)
    mean = tl.div_rn(tl.sum(sums, axis=1), columns * 1.0)
  tile = _centered(tile, mean[:, None], inside, QUANTIZED)
  largest = tl.abs(tile)
  for start in range(block_k, columns, block_k):
    more = (batch, row_start, start)
    deviations = _deviations(unstored, mean, more, TILE, QUANTIZED)
    largest = tl.maximum(largest, tl.abs(deviations))
  factor = _factor_in_range(tl.max(largest, axis=1), QUANTIZED)
  tile = tile * factor[:, None]
  squares = tile * tile
  for start in range(block_k, columns, block_k):
    more = (batch, row_start, start)
    deviations = _deviations(operands, mean, more, TILE, QUANTIZED)
    deviations = deviations * factor[:, None]
    squares += deviations * deviations
  square = tl.div_rn(tl.sum(squares, axis=1), columns * 1.0)
  root = tl.sqrt_rn(square + QUANTIZED.prologue.epsilon * factor * factor)
  return mean, factor, tl.div_rn(1.0, root)


@triton.jit
def _deviations(
  operands, mean, place, TILE: tl.constexpr, QUANTIZED: tl.constexpr
):
  """Returns `_sum_with_residual`, for layer_norm less the mean of each row."""
  tile = _sum_with_residual(operands, place, TILE, QUANTIZED)
  _, _, inside = tiles.positions(place, TILE)
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
def _gate_and_up(x, up, place, TILE: tl.constexpr, QUANTIZED: tl.constexpr):
  """Loads gates and factors: two tiles, or one with pairs of both.

  The factor of an activation that is not gated is 1.
  """
  if QUANTIZED.prologue.halves == "interleaved":
    batch, row_start, column_start = place
    block_m: tl.constexpr = TILE.block_m
    block_k: tl.constexpr = TILE.block_k
    of_pairs: tl.constexpr = TILE.of_pairs
    if TILE.is_row_major:
      first = (batch, row_start, 2 * column_start)
      pairs = tiles.load_runs(x, first, of_pairs)
      pairs = tl.reshape(pairs, (block_m, block_k, 2))
    else:
      first = (batch, 2 * row_start, column_start)
      pairs = tiles.load(x, first, of_pairs)
      pairs = tl.reshape(pairs, (block_m, 2, block_k))
      pairs = tl.permute(pairs, (0, 2, 1))
    gate, factor = tl.split(pairs)
    factor = factor.to(tl.float32)
  else:
    if QUANTIZED.prologue.halves == "split":
      up = x + TILE.features
    gate = tiles.load_runs(x, place, TILE)
    factor = 1.0
    if QUANTIZED.prologue.is_gated:
      factor = tiles.load_runs(up, place, TILE).to(tl.float32)
  return gate.to(tl.float32), factor


@triton.jit
def _with_biases(
  gate, up, bias, place, TILE: tl.constexpr, QUANTIZED: tl.constexpr
):
  """Adds the biases of gates and of factors, which have the order of x."""
  if QUANTIZED.prologue.has_bias:
    is_paired: tl.constexpr = QUANTIZED.prologue.halves == "interleaved"
    distance: tl.constexpr = 2 if is_paired else 1
    gate_bias = _load_features(bias, distance, place, TILE)
    gate += _of_features(gate_bias, TILE)
    if QUANTIZED.prologue.is_gated:
      bias += 1 if is_paired else TILE.features
      up_bias = _load_features(bias, distance, place, TILE)
      up += _of_features(up_bias, TILE)
  return gate, up


@triton.jit
def _gradient_of_tile(
  operands, place, TILE: tl.constexpr, QUANTIZED: tl.constexpr
):
  """Loads a tile of the operands, and computes the gradient.

  With halves, x has all gates of a row before all factors. A tile has only
  gradients of gates, or only those of factors. Their numbers are the same.
  """
  x, up, _, bias, cotangent, _ = operands
  is_up = QUANTIZED.prologue.gradient == "up"
  if QUANTIZED.prologue.gradient_of_halves:
    batch, row_start, column_start = place
    half: tl.constexpr = TILE.half
    gates: tl.constexpr = TILE.half.features
    up = x + gates
    if TILE.is_row_major:
      tl.static_assert(gates % TILE.block_k == 0)
      is_up = column_start >= gates
      column_start = tl.where(is_up, column_start - gates, column_start)
    else:
      tl.static_assert(gates % TILE.block_m == 0)
      is_up = row_start >= gates
      row_start = tl.where(is_up, row_start - gates, row_start)
    place = (batch, row_start, column_start)
  else:
    half: tl.constexpr = TILE
  gate = tiles.load_runs(x, place, half).to(tl.float32)
  factor = 1.0
  if QUANTIZED.prologue.is_gated:
    factor = tiles.load_runs(up, place, half).to(tl.float32)
  if QUANTIZED.prologue.gradient_of_halves:
    of_cotangent: tl.constexpr = TILE.of_cotangent
    given = tiles.load(cotangent, place, of_cotangent)
  else:
    given = tiles.load_runs(cotangent, place, TILE)
  given = given.to(tl.float32)
  gate, factor = _with_biases(gate, factor, bias, place, half, QUANTIZED)
  if QUANTIZED.prologue.function == "relu":
    gradient = tl.where(gate > 0, given, 0.0)
  else:
    of_gate, of_up = _gradients(gate, factor, QUANTIZED)
    gradient = given * tl.where(is_up, of_up, of_gate)
  return gradient


@triton.jit
def _gradients(gate, up, QUANTIZED: tl.constexpr):
  """Returns the derivatives of `_activated` with respect to both operands."""
  passes_gate = 1.0
  passes_up = 1.0
  if QUANTIZED.prologue.function == "swigluoai":
    passes_gate = _passes(gate, QUANTIZED.prologue.limit)
    passes_up = _passes(tl.abs(up), QUANTIZED.prologue.limit)
  if QUANTIZED.prologue.activation == "exact_gelu":
    share, derivative = _normal(gate, QUANTIZED)
    slope = 1.0
  else:
    gate, up, z, slope = _terms(gate, up, QUANTIZED)
    power = tl.where(z == z, _exponential(tl.abs(z)), z)  # keeps a NaN
    inverse = codec.approximate_reciprocal(power + 1.0, QUANTIZED.hardware_cast)
    inverse = tl.fma(tl.fma(-inverse, power + 1.0, 1.0), inverse, inverse)
    share = tl.where(z < 0, power * inverse, inverse)
    derivative = power * inverse * inverse
  # The slope or the gate may be infinite where the derivative is 0.
  change = tl.where(derivative == 0, 0.0, gate * slope * derivative)
  return up * (share + change) * passes_gate, gate * share * passes_up


@triton.jit
def _passes(x, limit: tl.constexpr):
  """Returns the derivative of the smaller one of x and a limit."""
  return tl.where(x < limit, 1.0, tl.where(x == limit, 0.5, 0.0))


@triton.jit
def _terms(gate, up, QUANTIZED: tl.constexpr):
  """Returns gate and factor of gate * sigmoid(z) * factor, z and dz / dgate."""
  if QUANTIZED.prologue.activation == "silu":
    z = gate
    slope = 1.0
  elif QUANTIZED.prologue.activation == "gelu":
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
def _activated(gate, up, QUANTIZED: tl.constexpr):
  """Returns the activation of gates, times the factors.

  An infinite gate of a sigmoid gives NaN, which quantizes like Inf.
  """
  if QUANTIZED.prologue.function == "relu":
    result = tl.where(gate <= 0, 0.0, gate)  # keeps a NaN
  elif QUANTIZED.prologue.activation == "exact_gelu":
    share, _ = _normal(gate, QUANTIZED)
    result = gate * share * up
  else:
    result = _gate_times_sigmoid(gate, up, QUANTIZED)
  return result


@triton.jit
def _gate_times_sigmoid(gate, up, QUANTIZED: tl.constexpr):
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
def _normal(x, QUANTIZED: tl.constexpr):
  """Returns the probability of less than x and the density, of a normal x."""
  size = tl.minimum(tl.abs(x), _NORMAL_LARGEST)
  power = _exponential(0.5 * (x * x))
  power = tl.where(x == x, power, x)  # keeps a NaN
  divisor = tl.fma(size, _NORMAL_C, 1.0)
  t = codec.approximate_reciprocal(divisor, QUANTIZED.hardware_cast)
  t = tl.fma(tl.fma(-t, divisor, 1.0), t, t)
  s = t - _NORMAL_CENTER
  p = tl.fma(tl.fma(_NORMAL_8, s, _NORMAL_7), s, _NORMAL_6)
  p = tl.fma(tl.fma(p, s, _NORMAL_5), s, _NORMAL_4)
  p = tl.fma(tl.fma(p, s, _NORMAL_3), s, _NORMAL_2)
  p = tl.fma(tl.fma(p, s, _NORMAL_1), s, _NORMAL_0)
  tail = p * t * power
  return tl.where(x < 0, tail, 1.0 - tail), _DENSITY_AT_0 * power


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
