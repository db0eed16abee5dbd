# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The products of a recipe in NumPy, from the papers' formulas.

It takes nothing from the package but formats and the constants of a recipe, and
of JAX only random bits. Matrices are [rows, k], blocked along k. f32 where the
definition says f32, f64 elsewhere; casts are ml_dtypes'.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import jax
import ml_dtypes
import numpy as np

from jaxplugin.core import formats
from jaxplugin.training import recipes

# Recipes to test: a name, the recipe and the fields that it changes.
CASES: Final = (
  ("mxfp8", recipes.MXFP8_RECIPE, {}),
  ("mxfp8_rounded", recipes.MXFP8_RECIPE, {"stochastic_rounding": True}),
  ("mxfp8_2d", recipes.MXFP8_RECIPE, {"weight_2d": True}),
  (
    "mxfp8_dgrad",
    recipes.MXFP8_RECIPE,
    {"quantize_dgrad": False, "scale_rounding": "floor"},
  ),
  (
    "mxfp8_from_quantized_in_high_precision",
    recipes.MXFP8_RECIPE,
    {
      "backward_from_quantized": True,
      "quantize_dgrad": False,
      "quantize_wgrad": False,
    },
  ),
  ("nvfp4", recipes.NVFP4_RECIPE, {}),
  ("nvfp4_scales_up", recipes.NVFP4_RECIPE, {"grad_scale_up": True}),
  ("nvfp4_four_over_six", recipes.NVFP4_RECIPE, {"four_over_six": True}),
  ("nvfp4_wgrad", recipes.NVFP4_RECIPE, {"quantize_wgrad": False}),
  (
    "nvfp4_from_quantized",
    recipes.NVFP4_RECIPE,
    {"backward_from_quantized": True, "wgrad_hadamard": None},
  ),
  ("mxfp4", recipes.MXFP4_RECIPE, {}),
  ("mxfp4_backward", recipes.MXFP4_RECIPE, {"quantize_forward": False}),
)
# 50 digits of pi suffice for the signs of groups of up to 128.
PI = "14159265358979323846264338327950288419716939937510"


@dataclasses.dataclass
class Quantized:
  """Values and scale [rows, k / block], as f64, and a global scale."""

  values: np.ndarray
  scale: np.ndarray
  global_scale: float

  def dequantized(self) -> np.ndarray:
    size = self.values.shape[-1] // self.scale.shape[-1]
    return self.values * np.repeat(self.scale, size, -1) * self.global_scale


def hadamard_matrix(size: int) -> np.ndarray:
  """sqrt(size) times the transform: y = matrix @ x."""
  fraction = int(PI) * 2**size // 10 ** len(PI)
  signs = [-1 if fraction >> (size - 1 - i) & 1 else 1 for i in range(size)]
  matrix = np.array([[1]])
  while len(matrix) < size:
    matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix)
  return matrix * np.array(signs)


def transformed(x: np.ndarray, size: int | None) -> np.ndarray:
  """f32: exact sums of groups along the last dimension, and one rounding."""
  if size is None:
    return x
  groups = x.astype(np.float64).reshape(*x.shape[:-1], -1, size)
  sums = (groups @ hadamard_matrix(size).T).reshape(x.shape)
  assert (sums == sums.astype(np.float32)).all(), "sums must be exact in f32"
  return sums.astype(np.float32) * np.float32(size**-0.5)


def rounded(x: np.ndarray, dtype: np.dtype, bits: Any = None) -> np.ndarray:
  """f32 to the values of a dtype, saturating: to nearest, or up or down.

  Args:
    bits: uint32, random. Up where they, read as a fraction of as many bits as
      f32 has more than the dtype (22 for subnormals), and the part that is
      lost come to 1.
  """
  info = ml_dtypes.finfo(dtype)
  largest = float(info.max)
  x = np.clip(x, -largest, largest)
  if bits is None:
    return x.astype(dtype).astype(np.float64)
  magnitude = np.abs(x.astype(np.float64))
  lowest = int(np.log2(float(info.smallest_normal)))
  exponent = np.floor(np.log2(np.maximum(magnitude, 2.0**lowest)))
  quantum = 2.0 ** (exponent - info.nmant)
  is_normal = magnitude >= 2.0**lowest
  count = np.where(is_normal, 23 - info.nmant, 22)
  below = np.floor(magnitude / quantum)
  lost = magnitude / quantum - below
  lost = np.floor(lost * 2.0**count) / 2.0**count
  noise = (bits.astype(np.int64) % (1 << count)) / 2.0**count
  return np.copysign((below + (lost + noise >= 1)) * quantum, x)


def quantize(
  x: np.ndarray,
  format: formats.BlockFormat,
  *,
  scale_rounding: str = "up",
  is_square: bool = False,
  four_over_six: bool = False,
  scale_up: bool = False,
  key: Any = None,
) -> Quantized:
  """A matrix f32[rows, k]; square blocks may end in smaller ones."""
  size = format.block_size
  rows, k = x.shape
  bits = None
  if key is not None:
    bits = np.asarray(jax.random.bits(key, x.shape, np.uint32))
  amax = np.abs(x).reshape(rows, k // size, size).max(-1)
  if is_square:
    for start in range(0, rows, size):
      amax[start : start + size] = amax[start : start + size].max(0)
  if format.scale_is_power_of_two:
    with np.errstate(divide="ignore"):
      ratio = amax.astype(np.float64) / float(
        ml_dtypes.finfo(format.values_dtype).max
      )
      exponent = np.ceil(np.log2(ratio))
      if scale_rounding == "floor":
        exponent = np.floor(np.log2(amax.astype(np.float64)))
        exponent -= format.values_encoding.max_exponent
    scale = 2.0 ** np.maximum(exponent, -127)
    quotient = (x / np.repeat(scale, size, -1)).astype(np.float32)
    return Quantized(rounded(quotient, format.values_dtype, bits), scale, 1.0)

  largest = 256 if four_over_six else 448
  global_scale = np.float32(amax.max()) / np.float32(largest * 6)
  if not amax.max():
    global_scale = np.float32(1)

  def scaled_to(top: int) -> tuple[np.ndarray, np.ndarray]:
    ideal = amax / np.float32(top) / global_scale
    # E4M3's least positive number, except in a block of zeros.
    ideal = np.where(amax == 0, 0, np.maximum(ideal, np.float32(2**-9)))
    scale = np.minimum(ideal, np.float32(448)).astype(format.scale_dtype)
    scale = scale.astype(np.float32)
    if scale_up:
      scale = least_not_less(np.minimum(ideal, np.float32(448)))
    step = np.repeat(scale, size, -1) * global_scale
    with np.errstate(divide="ignore", invalid="ignore"):
      return scale, np.where(step == 0, np.float32(0), x / step)

  scale, quotient = scaled_to(6)
  if four_over_six:
    other, other_quotient = scaled_to(4)
    errors = []
    for s, q in ((scale, quotient), (other, other_quotient)):
      error = (q - rounded(q, format.values_dtype)) * np.repeat(s, size, -1)
      error = (error.astype(np.float64) ** 2).reshape(rows, -1, size).sum(-1)
      if is_square:
        for start in range(0, rows, size):
          error[start : start + size] = error[start : start + size].sum(0)
      errors.append(error)
    is_other = errors[1] < errors[0]
    scale = np.where(is_other, other, scale)
    quotient = np.where(np.repeat(is_other, size, -1), other_quotient, quotient)
  return Quantized(
    rounded(quotient, format.values_dtype, bits),
    scale.astype(np.float64),
    float(global_scale),
  )


def assert_same(actual: Any, expected: Quantized) -> None:
  """Checks that a `ScaledArray` has the oracle's values and scales."""
  for name in ("values", "scale"):
    numbers = np.asarray(getattr(actual.unpack(), name)).astype(np.float64)
    wanted = getattr(expected, name)
    if name == "scale" and actual.format.scale_is_power_of_two:
      wanted = np.maximum(wanted, 2.0**-127)
    np.testing.assert_array_equal(numbers, wanted, err_msg=name)
  if actual.global_scale is not None:
    np.testing.assert_array_equal(actual.global_scale, expected.global_scale)


def least_not_less(x: np.ndarray) -> np.ndarray:
  """Rounds `x` up to E4M3, by a search in all E4M3 numbers."""
  codes = np.arange(0x7F, dtype=np.uint8)
  numbers = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
  return numbers[np.searchsorted(numbers, x)]


def padded(x: np.ndarray, multiple: int) -> np.ndarray:
  return np.pad(x, [(0, 0), (0, -x.shape[-1] % multiple)])


def operand(
  x: np.ndarray,
  format: formats.BlockFormat | None,
  recipe: recipes.Recipe,
  multiple: int,
  transform: int | None = None,
  **kwargs: Any,
) -> np.ndarray:
  """f64: a matrix as a product along its last dimension has it."""
  x = transformed(padded(x, multiple), transform)
  if format is None:
    return x.astype(np.float64)
  has_choice = format.is_fp4 and not format.scale_is_power_of_two
  return quantize(
    x,
    format,
    scale_rounding=recipe.scale_rounding,
    four_over_six=recipe.four_over_six and has_choice,
    **kwargs,
  ).dequantized()


@dataclasses.dataclass
class Product:
  """[rows, k] and [columns, k]: a product, and what bounds its error."""

  lhs: np.ndarray
  rhs: np.ndarray

  @property
  def value(self) -> np.ndarray:
    return self.lhs @ self.rhs.T

  @property
  def magnitude(self) -> np.ndarray:
    """sum|a * b|."""
    return np.abs(self.lhs) @ np.abs(self.rhs).T


def products(
  recipe: recipes.Recipe, x: Any, w: Any, g: Any, key: Any = None
) -> tuple[Product, Product, Product]:
  """x @ w, g @ w.T and x.T @ g, for x [m, k], w [k, n], g [m, n].

  Args:
    key: the call's.
  """
  x, w, g = (np.asarray(a, np.float32) for a in (x, w, g))
  blocks = [f.block_size for f in recipe.formats]
  activation, weight = recipe.activation_format, recipe.weight_format
  keys = [None, None]
  if recipe.stochastic_rounding:
    keys = [jax.random.fold_in(key, i) for i in range(2)]

  multiple = np.lcm.reduce(blocks)
  forward = Product(
    operand(x, activation, recipe, multiple),
    operand(w.T, weight, recipe, multiple, is_square=recipe.weight_2d),
  )
  if not recipe.quantize_forward:
    forward = Product(x.astype(np.float64), w.T.astype(np.float64))
  x_back, w_back = x, w
  if recipe.backward_from_quantized:
    k = x.shape[1]
    x_back = forward.lhs[:, :k].astype(np.float32)
    w_back = forward.rhs[:, :k].T.astype(np.float32)

  dgrad = Product(g.astype(np.float64), w_back.astype(np.float64))
  if recipe.quantize_dgrad:
    size = recipe.dgrad_hadamard
    multiple = np.lcm.reduce([*blocks, size or 1])
    dgrad = Product(
      operand(
        g,
        recipe.grad_format,
        recipe,
        multiple,
        size,
        key=keys[0],
        scale_up=recipe.grad_scale_up,
      ),
      # Squares: those of w itself, so blocks along n are squares as well.
      operand(
        w_back, weight, recipe, multiple, size, is_square=recipe.weight_2d
      ),
    )
  wgrad = Product(x_back.T.astype(np.float64), g.T.astype(np.float64))
  if recipe.quantize_wgrad:
    size = recipe.wgrad_hadamard
    multiple = np.lcm.reduce([*blocks, size or 1])
    wgrad = Product(
      operand(x_back.T, activation, recipe, multiple, size),
      # Drawn for g, padded along what is contracted, as it lies: [m, n].
      operand_of_columns(g, recipe, multiple, size, keys[1]),
    )
  return forward, dgrad, wgrad


def operand_of_columns(
  g: np.ndarray,
  recipe: recipes.Recipe,
  multiple: int,
  size: int | None,
  key: Any,
) -> np.ndarray:
  """`operand` of g.T, with random bits in the order of g."""
  format = recipe.grad_format
  x = transformed(padded(g.T, multiple), size)
  if format is None:
    return x.astype(np.float64)
  scale_up = recipe.grad_scale_up
  result = operand(g.T, format, recipe, multiple, size, scale_up=scale_up)
  if key is None:
    return result
  bits = jax.random.bits(key, x.T.shape, np.uint32)
  has_choice = format.is_fp4 and not format.scale_is_power_of_two
  nearest = quantize(
    x,
    format,
    scale_rounding=recipe.scale_rounding,
    four_over_six=recipe.four_over_six and has_choice,
    scale_up=scale_up,
  )
  step = np.repeat(nearest.scale, format.block_size, -1)
  step = step.astype(np.float32) * np.float32(nearest.global_scale)
  with np.errstate(divide="ignore", invalid="ignore"):
    quotient = np.where(step == 0, np.float32(0), x / step)
  nearest.values = rounded(
    quotient.astype(np.float32), format.values_dtype, np.asarray(bits).T
  )
  return nearest.dequantized()


def aligned(x: np.ndarray, sizes: Any, multiple: int, rows: int) -> np.ndarray:
  """Groups of rows, each padded with zeros to a multiple, and all to `rows`."""
  ends = np.cumsum(sizes)
  parts = [
    np.pad(x[end - size : end], ((0, -size % multiple), (0, 0)))
    for size, end in zip(sizes, ends, strict=True)
  ]
  result = np.concatenate(parts)
  return np.pad(result, ((0, rows - len(result)), (0, 0)))


def ragged_products(
  recipe: recipes.Recipe, x: Any, w: Any, g: Any, sizes: Any, key: Any = None
) -> list[list[Product]]:
  """The same three of a mixture, by groups: a product for each group in each.

  For x [m, k], w [groups, n, k] and g [m, n]; rows of no group are zeros. n and
  k are whole blocks.

  Returns:
    Three lists of as many products as there are groups.
  """
  x, w, g = (np.asarray(a, np.float32) for a in (x, w, g))
  num_groups = len(w)
  activation, weight = recipe.activation_format, recipe.weight_format
  keys = [None, None]
  if recipe.stochastic_rounding:
    keys = [jax.random.fold_in(key, i) for i in range(2)]
  starts = np.cumsum(sizes) - sizes
  own = lambda rows, i: rows[starts[i] : starts[i] + sizes[i]]
  each = range(num_groups)

  def weights(w: np.ndarray, size: int | None) -> np.ndarray:
    rows = w.reshape(-1, w.shape[2])
    result = operand(
      *(rows, weight, recipe, size or 1, size), is_square=recipe.weight_2d
    )
    return result.reshape(w.shape)

  x_q, w_q = operand(x, activation, recipe, 1), weights(w, None)
  if not recipe.quantize_forward:
    x_q, w_q = x.astype(np.float64), w.astype(np.float64)
  forward = [Product(own(x_q, i), w_q[i]) for i in each]
  if recipe.backward_from_quantized:
    x, w = x_q.astype(np.float32), w_q.astype(np.float32)

  g_q, turned = g.astype(np.float64), w.swapaxes(1, 2).astype(np.float64)
  if recipe.quantize_dgrad:
    size = recipe.dgrad_hadamard
    g_q = operand(
      *(g, recipe.grad_format, recipe, size or 1, size),
      key=keys[0],
      scale_up=recipe.grad_scale_up,
    )
    turned = weights(w.swapaxes(1, 2), size)
  dgrad = [Product(own(g_q, i), turned[i]) for i in each]

  x_t, g_t = x.T.astype(np.float64), g.T.astype(np.float64)
  if recipe.quantize_wgrad:
    size = recipe.wgrad_hadamard
    blocks = [f.block_size for f in (activation, recipe.grad_format) if f]
    multiple = int(np.lcm.reduce([*blocks, size or 1]))
    rows = len(x) + min(num_groups, len(x)) * (multiple - 1)
    rows = rows // multiple * multiple
    x, g = (aligned(a, sizes, multiple, rows) for a in (x, g))
    x_t = operand(x.T, activation, recipe, multiple, size)
    g_t = operand_of_columns(g, recipe, multiple, size, keys[1])
    sizes = -(-np.asarray(sizes) // multiple) * multiple
    starts = np.cumsum(sizes) - sizes
  columns = lambda a, i: a[:, starts[i] : starts[i] + sizes[i]]
  wgrad = [Product(columns(g_t, i), columns(x_t, i)) for i in each]
  return [forward, dgrad, wgrad]
