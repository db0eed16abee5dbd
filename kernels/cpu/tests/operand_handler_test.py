# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests the FFI handler that quantizes operands of training.

The results are compared with the project's NumPy oracle, and bit by bit with
JAX operations. The library is the same as in dot_handler_test.py.
"""

from __future__ import annotations

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

sys.path.insert(0, str(pathlib.Path(__file__).parents[3]))
import jaxplugin as jp
from jaxplugin.core import blocking
from jaxplugin.quantization import hadamard, problems
from jaxplugin.quantization.backends import xla
from jaxplugin.testing.oracles import recipes_oracle

QUANTIZED = testing.QUANTIZED
FUZZED = 6  # arrays for each format
SIZES = (1, 3, 15, 16, 17, 33, 64, 100, 300)
GLOBAL_SCALES = (0.01, 3.7, 1e-25, 1e30, 0.0, np.nan)


def format_of(name):
  return getattr(jp, name.upper())


def as_three(x, axis):
  """Reshapes x to [outer, k, inner]."""
  outer, inner = np.prod(x.shape[:axis]), np.prod(x.shape[axis + 1 :])
  return x.reshape(int(outer), x.shape[axis], int(inner))


@functools.partial(jax.jit, static_argnames="problem")
def by_operations(x, global_scale, key, problem):
  data = None if key is None else jax.random.key_data(key)
  return xla.quantize(x, global_scale, problem, keys=[data])


def numbers(rng, shape, dtype):
  """Returns blocks of various magnitudes, some with NaN, Inf or zeros."""
  x = rng.normal(size=shape) * np.exp(2 * rng.normal(size=shape))
  kind = rng.integers(6)
  if kind == 0 and dtype == np.float32:
    x *= rng.choice([1e-30, 1e30])
  if kind == 1:
    x.reshape(-1)[rng.integers(x.size)] = rng.choice([np.nan, -np.inf])
  if kind == 2:
    x.reshape(-1)[: x.size // 2] = -0.0
  if kind == 3:  # ties, with sums that f32 holds
    x = rng.integers(-12, 13, shape) / 4
  with np.errstate(over="ignore"):
    return x.astype(dtype)


def fuzzed(name, seed):
  """A problem, x, a given global scale or None, a key or None, and attributes
  of the handler."""
  rng = np.random.default_rng([seed, QUANTIZED.index(name)])
  format = format_of(name)
  ndim = int(rng.integers(1, 4))
  axis = int(rng.integers(ndim))
  shape = [
    int(rng.choice(SIZES[: 8 if ndim > 2 else None])) for _ in range(ndim)
  ]
  size = int(rng.choice([1, 2, 16, 32, 64, 256]))
  b = blocking.Blocking.along(axis, ndim, max(size, format.block_size))
  others = [d for d in range(ndim) if d != axis]
  square = None
  if rng.random() < 0.5:
    square = tuple(others[int(rng.integers(len(others) + 1)) :])
  four_over_six, scale_up = (
    name == "nvfp4" and rng.random() < 0.5 for _ in range(2)
  )
  key = jax.random.key(int(rng.integers(999))) if rng.random() < 0.5 else None
  given = None
  if name == "nvfp4" and rng.random() < 0.5:
    given = np.float32(rng.choice(GLOBAL_SCALES))
  rounding = int(rng.integers(2))
  dtype = (np.float32, jnp.bfloat16, np.float16)[int(rng.integers(3))]
  problem = problems.QuantizationProblem(
    shape=tuple(shape),
    dtype=np.dtype(dtype),
    format=format,
    blockings=(b,),
    scale_rounding=("up", "floor")[rounding],
    has_global_scale=given is not None,
    packed=format.is_fp4,
    options=(
      problems.RecipeOptions(
        hadamard=None if size == 1 else size,
        square=square,
        four_over_six=four_over_six,
        scale_up=scale_up,
        is_stochastic=key is not None,
        key_impl=None if key is None else "threefry2x32",
      ),
    ),
  )
  attributes = {
    "format": QUANTIZED.index(name),
    "rounding": rounding,
    "compute_global": int(name == "nvfp4" and given is None),
    "hadamard": size,
    "square": int(np.prod([shape[d] for d in square])) if square else 0,
    "four_over_six": int(four_over_six),
    "scale_up": int(scale_up),
    "padded": b.shape(shape)[axis],
  }
  return problem, numbers(rng, shape, dtype), given, key, attributes


class OperationsTest(parameterized.TestCase):
  @parameterized.parameters(*QUANTIZED)
  @pytest.mark.sample(1)
  def test_bits_equal_those_of_operations(self, name):
    for seed in range(FUZZED):
      problem, x, given, key, attributes = fuzzed(name, seed)
      axis = problem.blockings[0].axis()
      expected = by_operations(jnp.asarray(x), given, key, problem)
      data = None if key is None else jax.random.key_data(key)
      mask = (
        255
        if format_of(name).is_fp4
        else ((1 << testing.bits(testing.FORMATS[name][0])) - 1)
      )
      for isa in testing.isa_levels():
        got = testing.quantize_operand(
          as_three(x, axis),
          given,
          data,
          isa=testing.ISA_LEVELS[isa],
          **attributes,
        )
        message = f"{seed} {isa}: {problem}, {attributes}"
        for actual, wanted, bits in zip(
          got[:2], expected[:2], (mask, 255), strict=True
        ):
          wanted = np.moveaxis(np.asarray(wanted).view(np.uint8), axis, -1)
          np.testing.assert_array_equal(
            np.asarray(actual).reshape(wanted.shape), wanted & bits, message
          )
        if len(expected) == 3:
          self.assertEqual(np.asarray(got[2]), np.asarray(expected[2]), message)

  @testing.each(shape=((640, 512, 1), (1, 300, 700), (3, 272, 200)))
  @pytest.mark.full
  def test_tasks_of_threads_draw_the_bits_of_their_places(self, isa, shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(np.float32)
    key = jax.random.key(5)
    options = problems.RecipeOptions(
      hadamard=16, is_stochastic=True, key_impl="threefry2x32"
    )
    problem = problems.QuantizationProblem(
      shape=shape,
      dtype=x.dtype,
      format=jp.NVFP4,
      blockings=(blocking.Blocking.along(1, 3, 16),),
      packed=True,
      options=(options,),
    )
    expected = by_operations(jnp.asarray(x), None, key, problem)
    padded = -(-shape[1] // 16) * 16
    got = testing.quantize_operand(
      x,
      None,
      jax.random.key_data(key),
      format=3,
      compute_global=1,
      hadamard=16,
      padded=padded,
      isa=isa,
    )
    for actual, wanted in zip(got, expected, strict=True):
      wanted = np.asarray(wanted)
      if wanted.ndim:
        wanted = np.moveaxis(wanted, 1, -1)
      self.assertEqual(np.asarray(actual).tobytes(), wanted.tobytes())


class OracleTest(parameterized.TestCase):
  """Compares with NumPy code of the papers' formulas."""

  def assert_is(self, got, expected, name):
    """Dequantized codes and scales equal the oracle's."""
    dtype, scale_dtype, _ = testing.FORMATS[name]
    codes = testing.one_a_byte(got[0], name).view(dtype)
    np.testing.assert_array_equal(codes.astype(np.float64), expected.values)
    scale = np.asarray(got[1]).view(scale_dtype).astype(np.float64)
    wanted = expected.scale
    if scale_dtype == testing.E8M0:
      wanted = np.maximum(wanted, 2.0**-127)
    np.testing.assert_array_equal(scale, wanted)
    self.assertEqual(np.asarray(got[2]), np.float32(expected.global_scale))

  @testing.each(
    name=("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4"),
    square=(False, True),
    part=("nearest", "four_over_six", "scale_up", "key", "hadamard"),
  )
  def test_each_part(self, name, square, part, isa):
    if part in ("four_over_six", "scale_up") and name != "nvfp4":
      return  # only NVFP4 has scales to choose
    rng = np.random.default_rng(1)
    x = rng.normal(size=(41, 96)) * np.exp(2 * rng.normal(size=(41, 96)))
    x[:32, :32] = 0
    size = 1
    if part == "hadamard":
      size, x = 32, rng.integers(-99, 99, (41, 96))
    x = x.astype(np.float32)
    key = jax.random.key(3) if part == "key" else None
    got = testing.quantize_operand(
      x[:, :, None],
      None,
      None if key is None else jax.random.key_data(key),
      format=QUANTIZED.index(name),
      compute_global=int(name == "nvfp4"),
      hadamard=size,
      square=41 if square else 0,
      four_over_six=int(part == "four_over_six"),
      scale_up=int(part == "scale_up"),
      isa=isa,
    )
    expected = recipes_oracle.quantize(
      recipes_oracle.transformed(x, None if size == 1 else size),
      format_of(name),
      is_square=square,
      four_over_six=part == "four_over_six",
      scale_up=part == "scale_up",
      key=key,
    )
    self.assert_is(got, expected, name)

  @testing.each(name=("mxfp8", "nvfp4"))
  def test_columns_are_the_rows_of_the_transposed_array(self, name, isa):
    x = np.random.default_rng(2).normal(size=(64, 41)).astype(np.float32)
    attributes = {
      "format": QUANTIZED.index(name),
      "compute_global": int(name == "nvfp4"),
      "isa": isa,
    }
    got = testing.quantize_operand(x[None], **attributes)
    expected = recipes_oracle.quantize(
      np.ascontiguousarray(x.T), format_of(name)
    )
    self.assert_is(got, expected, name)

  @testing.each(size=hadamard.SIZES)
  def test_transform_of_any_size(self, size, isa):
    """The transform of a group with one nonzero value is a matrix column."""
    x = np.zeros((size, max(size, 32)), np.float32)
    x[np.arange(size), np.arange(size)] = 1
    got = testing.quantize_operand(
      x[:, :, None], format=0, hadamard=size, isa=isa
    )
    codes = np.asarray(got[0]).view(testing.E4M3)[:, :size]
    # The oracle supports groups of up to 128.
    known = min(size, 128)
    matrix = recipes_oracle.hadamard_matrix(known)
    np.testing.assert_array_equal(
      np.sign(codes.astype(np.float64))[:known, :known], matrix.T
    )
    signs = hadamard.signs(size)
    np.testing.assert_array_equal(
      np.sign(codes[:, 0].astype(np.float32)), signs
    )


class ErrorsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("rank", {"x": np.ones((2, 32), "f4")}, r"x must be.*outer, k, inner"),
    ("dtype", {"x": np.ones((2, 32, 1), np.int32)}, "x must be"),
    ("format", {"format": 6}, "format must be"),
    ("rounding", {"rounding": 2}, "rounding must be"),
    ("compute", {"compute_global": 1}, "compute_global must be"),
    ("hadamard", {"hadamard": 24}, "hadamard must be.*got 24"),
    ("hadamard_large", {"hadamard": 512}, "hadamard must be.*got 512"),
    ("hadamard_zero", {"hadamard": 0}, "hadamard must be.*got 0"),
    ("groups", {"hadamard": 64}, "whole blocks of 32 and groups"),
    ("square", {"square": 3}, "square must be 0 or divide the rows, got 3"),
    ("square_negative", {"square": -1}, "square must be"),
    ("choice", {"four_over_six": 1}, "four_over_six must be 0, or 1 for nvfp4"),
    ("up", {"scale_up": 1}, "scale_up must be 0, or 1 for nvfp4"),
    ("key", {"key": np.zeros(4, "u4")}, r"key must be u32.2..*u32\[4\]"),
    ("key_dtype", {"key": np.zeros(2, "f4")}, "key must be"),
    ("short", {"values": ((2, 16), "u1")}, "whole blocks"),
    ("values", {"values": ((3, 32), "u1")}, "values must be"),
    ("values_rank", {"values": ((2, 32, 1), "u1")}, "values must be"),
    ("scale", {"scale": ((2, 2), "u1")}, "scale must be"),
    ("isa", {"isa": 9}, "isa must be"),
  )
  def test_malformed_call_is_an_error(self, change, message):
    x = np.ones((2, 32, 1), "f4")
    with self.assertRaisesRegex(testing.HandlerError, message):
      testing.quantize_changed(testing.quantize_operand, x, change)


if __name__ == "__main__":
  absltest.main()
