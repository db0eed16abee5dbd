# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Data and measures of the numerics notebooks.

Data come from `numpy.random.RandomState`, whose streams NumPy has frozen (NEP
19), so a baseline written today stays valid for the same numbers.
Errors are computed in NumPy f64. `block_round_trip` is a second quantizer,
written in NumPy, in which block size, scale and global scale can be varied one
at a time; where it is asked for one of jaxplugin's formats it gives the same
numbers as `jaxplugin.quantize`.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Final, Literal
from unittest import mock

import jax
import ml_dtypes
import numpy as np

import jaxplugin as jp

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "quickstart"))
import minilm

FORMATS: Final = (
  *(jp.MXFP8, jp.MXFP8_E5M2, jp.MXFP6_E2M3, jp.MXFP6_E3M2),
  *(jp.MXFP4, jp.NVFP4),
)
SENTENCES: Final = pathlib.Path(minilm.__file__).parent / "sentences.txt"
# Inputs of linear layers, in the order in which `minilm.encode` makes them.
ACTIVATIONS: Final = ("attention in", "attention out", "ffn in", "ffn out")

E8M0_MIN_EXPONENT: Final = -127
E8M0_MAX_EXPONENT: Final = 127

ScaleRule = Literal["exact", "e8m0_up", "e8m0_floor", "e4m3"]


def octave_rows(x: np.ndarray) -> np.ndarray:
  """Multiplies row i of `x` by 2^((i + 1/2) / rows), from 1 to 2.

  The error of a format with power-of-two scales depends on where the data lie
  between two powers of two. Rows all over an octave make it a matter of the
  format, and not of luck.
  """
  rows = len(x)
  factors = np.exp2((np.arange(rows) + 0.5) / rows)
  return (x * factors[:, None]).astype(np.float32)


def gaussian(shape: tuple[int, int], seed: int) -> np.ndarray:
  """f32[rows, k], independent N(0, 1)."""
  random = np.random.RandomState(seed)
  return random.standard_normal(shape).astype(np.float32)


def laplace(shape: tuple[int, int], seed: int) -> np.ndarray:
  """f32[rows, k], independent Laplace of variance 1."""
  random = np.random.RandomState(seed)
  return random.laplace(scale=2**-0.5, size=shape).astype(np.float32)


def student_t(
  shape: tuple[int, int], seed: int, degrees: int = 3
) -> np.ndarray:
  """f32[rows, k], independent Student t: tails fall as |x|^-(degrees + 1)."""
  random = np.random.RandomState(seed)
  return random.standard_t(degrees, size=shape).astype(np.float32)


def outlier_channels(
  shape: tuple[int, int], seed: int, factor: float = 50, every: int = 128
) -> np.ndarray:
  """f32[rows, k]: N(0, 1), but one column of each `every` `factor` as large.

  This is how activations of large transformers look: the same few channels are
  large for every token.
  """
  x = gaussian(shape, seed)
  x[:, every // 3 :: every] *= np.float32(factor)
  return x


def sqnr_db(x: np.ndarray, approximation: np.ndarray) -> float:
  """Signal to quantization noise: 10 log10(sum x^2 / sum (x - approx)^2)."""
  x = np.asarray(x, np.float64)
  noise = np.sum(np.square(x - np.asarray(approximation, np.float64)))
  if noise == 0:
    return float("inf")
  return float(10 * np.log10(np.sum(np.square(x)) / noise))


def hadamard(x: np.ndarray, size: int, seed: int = 0) -> np.ndarray:
  """f64: each group of `size` values along the last axis, transformed.

  H (s * x) / sqrt(size), with Sylvester's matrix H, [[1]] and from there on
  [[H, H], [H, -H]], and signs s drawn from the seed. Undone by `unhadamard`.
  """
  matrix, signs = _hadamard_matrix(size), _signs(size, seed)
  groups = np.asarray(x, np.float64).reshape(-1, size) * signs
  return (groups @ matrix).reshape(x.shape)


def unhadamard(x: np.ndarray, size: int, seed: int = 0) -> np.ndarray:
  """The inverse of `hadamard`: the matrix is its own, as the signs are."""
  matrix, signs = _hadamard_matrix(size), _signs(size, seed)
  groups = np.asarray(x, np.float64).reshape(-1, size) @ matrix
  return (groups * signs).reshape(x.shape)


def _hadamard_matrix(size: int) -> np.ndarray:
  """f64[size, size], symmetric and orthogonal."""
  matrix = np.ones((1, 1))
  while len(matrix) < size:
    matrix = np.block([[matrix, matrix], [matrix, -matrix]])
  return matrix / np.sqrt(size)


def _signs(size: int, seed: int) -> np.ndarray:
  return np.random.RandomState(seed).choice([-1.0, 1.0], size)


def crest_factor(x: np.ndarray, block_size: int) -> float:
  """Mean over blocks of max |x| / root mean square; blocks of zeros left out.

  As Chen et al. (arXiv 2510.25602, section 5.1) measure it.
  """
  blocks = np.asarray(x, np.float64).reshape(-1, block_size)
  rms = np.sqrt(np.mean(np.square(blocks), axis=1))
  largest = np.abs(blocks).max(axis=1)
  return float(np.mean(largest[rms > 0] / rms[rms > 0]))


@functools.cache
def _compiled_round_trip(
  format: jp.BlockFormat, scale_rounding: str, has_global_scale: bool
) -> Callable[..., jax.Array]:
  def round_trip(x, global_scale):
    quantized = jp.quantize(
      x,
      format,
      scale_rounding=scale_rounding,
      global_scale=global_scale if has_global_scale else None,
    )
    return jp.dequantize(quantized)

  return jax.jit(round_trip)


def round_trip(
  x: np.ndarray,
  format: jp.BlockFormat,
  *,
  scale_rounding: str = "up",
  global_scale: float | None = None,
) -> np.ndarray:
  """f64 of `jp.dequantize(jp.quantize(x, format))`, along the last axis."""
  given = global_scale is not None
  function = _compiled_round_trip(format, scale_rounding, given)
  scale = np.float32(global_scale if given else 1)
  return np.asarray(function(np.asarray(x, np.float32), scale), np.float64)


@functools.cache
def positive_levels(dtype: np.dtype) -> np.ndarray:
  """f64[levels]: zero and the positive finite numbers of a 4- or 8-bit type.

  Level i is that of code i.
  """
  bits = ml_dtypes.finfo(dtype).bits
  codes = np.arange(2 ** (bits - 1), dtype=np.uint8)
  levels = codes.view(dtype).astype(np.float64)
  levels = levels[np.isfinite(levels)]
  if not (np.diff(levels) > 0).all():
    raise AssertionError(f"codes of {dtype} are not in order")
  return levels


def round_to_levels(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """f64: `x` rounded to the nearest number of `dtype`, ties to the even code.

  Larger magnitudes than the largest number become that number.
  """
  levels = positive_levels(dtype)
  middles = (levels[:-1] + levels[1:]) / 2
  magnitude = np.abs(np.asarray(x, np.float64))
  below = np.searchsorted(middles, magnitude, side="left")
  above = np.searchsorted(middles, magnitude, side="right")
  # They differ only on a tie, and then are neighbours: one of them is even.
  code = np.where(below % 2 == 0, below, above)
  return np.copysign(levels[code], x)


def block_scale(
  amax: np.ndarray, values_dtype: np.dtype, rule: ScaleRule
) -> np.ndarray:
  """f32: the scale of blocks whose largest magnitude is `amax`, 0 where it is.

  Args:
    amax: f32, divided by the global scale already where there is one.
    values_dtype: dtype of the values, whose largest number is max.
    rule: "exact" is amax / max in f32; "e8m0_up" that, rounded up to a power of
      two; "e8m0_floor" is 2^(floor(log2 amax) - floor(log2 max)); "e4m3" is
      amax / max rounded to nearest in E4M3, at least its least positive one.
  """
  largest = np.float32(positive_levels(values_dtype)[-1])
  amax = np.asarray(amax, np.float32)
  if rule == "exact":
    return amax / largest
  if rule == "e4m3":
    return _e4m3_scale(amax / largest)
  # frexp: amax = fraction * 2^exponent, 1/2 <= fraction < 1.
  fraction, exponent = np.frexp(amax.astype(np.float64))
  max_fraction, max_exponent = np.frexp(np.float64(largest))
  exponent = exponent - max_exponent
  if rule == "e8m0_up":
    exponent = exponent + (fraction > max_fraction)
  elif rule != "e8m0_floor":
    raise ValueError(f"block_scale: unknown rule {rule!r}")
  exponent = np.clip(exponent, E8M0_MIN_EXPONENT, E8M0_MAX_EXPONENT)
  return np.where(amax == 0, 0, np.exp2(exponent)).astype(np.float32)


def _e4m3_scale(ideal: np.ndarray) -> np.ndarray:
  """f32: `ideal` rounded to E4M3, never from a positive number to 0."""
  least = np.where(ideal == 0, 0, np.maximum(ideal, np.float32(2**-9)))
  return round_to_levels(least, ml_dtypes.float8_e4m3fn).astype(np.float32)


def block_round_trip(
  x: np.ndarray,
  *,
  values_dtype: np.dtype,
  block_size: int | None,
  rule: ScaleRule,
  has_global_scale: bool = False,
) -> np.ndarray:
  """f64: `x` quantized in blocks along the last axis, and back, in NumPy.

  Args:
    x: finite f32[..., k].
    values_dtype: of the quantized values.
    block_size: a divisor of k; None is one block for the whole array.
    rule: how the scale is made, see `block_scale`.
    has_global_scale: whether everything is divided by max |x| / (448 * max of
      the values) first, as NVFP4 does.
  """
  x = np.asarray(x, np.float32)
  blocks = x.reshape(-1, block_size or x.size)
  amax = np.abs(blocks).max(axis=1, keepdims=True)
  global_scale = np.float32(1)
  if has_global_scale and amax.max() > 0:
    scale_max = positive_levels(ml_dtypes.float8_e4m3fn)[-1]
    value_max = positive_levels(values_dtype)[-1]
    global_scale = amax.max() / np.float32(scale_max * value_max)
  largest = np.float32(positive_levels(values_dtype)[-1])
  if rule == "e4m3":
    # amax / max first, then / global: the order in which jaxplugin rounds.
    scale = _e4m3_scale(amax / largest / global_scale)
  else:
    scale = block_scale(amax / global_scale, values_dtype, rule)
  # f64 holds the product of two f32, and so a scale below f32's range.
  step = (scale * global_scale).astype(np.float32)
  quotient = blocks / np.where(step == 0, np.float32(1), step)
  quotient = np.where(step == 0, np.float32(0), quotient)
  values = round_to_levels(quotient, values_dtype)
  exact_step = scale.astype(np.float64) * np.float64(global_scale)
  return (values * exact_step).reshape(x.shape)


def tensor_round_trip(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """f64: `x` in 8-bit floats with one f32 scale for the whole array."""
  x = np.asarray(x, np.float32)
  largest = np.float32(ml_dtypes.finfo(dtype).max)
  scale = np.abs(x).max() / largest
  # A quotient may come out an ulp too large, where E5M2 has an infinity.
  values = np.clip(x / scale, -largest, largest).astype(dtype)
  return values.astype(np.float64) * np.float64(scale)


def bfloat16_round_trip(x: np.ndarray) -> np.ndarray:
  """f64: `x` rounded to bf16."""
  return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


# Round trips that the notebooks compare: name in tables -> function from
# f32[rows, k] to the rounded values in f64.
ROUND_TRIPS: Final[dict[str, Callable[[np.ndarray], np.ndarray]]] = {
  "bf16": bfloat16_round_trip,
  "e4m3, tensor": functools.partial(
    tensor_round_trip, dtype=ml_dtypes.float8_e4m3fn
  ),
  "e5m2, tensor": functools.partial(
    tensor_round_trip, dtype=ml_dtypes.float8_e5m2
  ),
} | {
  format.name: functools.partial(round_trip, format=format)
  for format in FORMATS
}


def bits_per_value(format: jp.BlockFormat) -> float:
  """Stored bits of a value, its share of the block's scale included."""
  scale_bits = 8 * format.scale_dtype.itemsize
  return format.value_bits + scale_bits / format.block_size


@functools.cache
def model() -> tuple[minilm.Config, minilm.Params, Any]:
  """all-MiniLM-L6-v2: config, f32 parameters, tokenizer."""
  path = minilm.find_model()
  config, params = minilm.load(path)
  return config, params, minilm.load_tokenizer(path, config)


def model_weights() -> dict[str, np.ndarray]:
  """f32[n, k] of the model's linear layers, by "layer name"."""
  _, params, _ = model()
  return {
    f"{index} {name}": np.asarray(layer[name]["weight"])
    for index, layer in enumerate(params["layers"])
    for name in minilm.LINEARS
  }


@functools.cache
def model_activations() -> dict[str, np.ndarray]:
  """f32[tokens, k]: what the linear layers multiply, by "layer name".

  The inputs for the sentences of sentences.txt, padding left out. The three
  projections of attention share one.
  """
  config, params, tokenizer = model()
  lines = SENTENCES.read_text("utf-8").splitlines()
  sentences = [line for line in lines if line and not line.startswith("#")]
  token_ids, mask = minilm.tokenize(tokenizer, sentences)

  @jax.jit
  def record(params, token_ids, mask):
    recorded = []

    def operand(x, mask, weight):
      recorded.append(x)
      return x

    with mock.patch.object(minilm, "operand", operand):
      minilm.encode(params, token_ids, mask, config=config)
    return recorded

  recorded = [np.asarray(x)[mask] for x in record(params, token_ids, mask)]
  names = [
    f"{layer} {name}" for layer in range(config.layers) for name in ACTIVATIONS
  ]
  return dict(zip(names, recorded, strict=True))
