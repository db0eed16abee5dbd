# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands as recipes want them: bits against NumPy, and what they are for."""

import functools

import jax
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import blocking, formats
from jaxplugin.quantization import operands
from jaxplugin.testing import contract
from jaxplugin.testing import quantization_lowerings as lowerings
from jaxplugin.testing.oracles import quantization_cases, recipes_oracle

FORMATS = (jp.MXFP8, jp.MXFP4, jp.NVFP4)
assert_same = recipes_oracle.assert_same


def matrix(seed, rows, k, spread=2):
  """Normal numbers with a random size for each block, and a zero block."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(rows, k)) * np.exp(spread * rng.normal(size=(rows, k)))
  x[:32, :32] = 0
  return x.astype(np.float32)


def spec_of(format, axis=1, **fields):
  return quantization_cases.manner(format, (axis,), **fields)


class BitsTest(parameterized.TestCase):
  @parameterized.product(format=FORMATS, rows=(64, 41))
  @pytest.mark.sample(1)
  def test_squares_have_one_scale(self, format, rows):
    x = matrix(0, rows, 96)
    actual = operands.quantize(x, spec_of(format, square=(0,)))
    assert_same(actual, recipes_oracle.quantize(x, format, is_square=True))
    size = format.block_size
    scale = np.asarray(actual.scale).astype(np.float32)
    for start in range(0, rows, size):
      group = scale[start : start + size]
      np.testing.assert_array_equal(
        group, np.broadcast_to(group[:1], group.shape)
      )
    self.assertGreater(len(np.unique(scale)), 3)

  def test_rounded_at_random_bits_are_those_of_the_key(self):
    x, key = matrix(1, 40, 96), jax.random.key(3)
    cases = list(zip(formats.FORMATS, 2 * (False, True), strict=True))

    @jax.jit
    def run(x, key):
      specs = [
        spec_of(format, **({"square": (0,)} if is_square else {}))
        for format, is_square in cases
      ]
      plain = jp.quantize(x, cases[0][0], key=key)
      return plain, [operands.quantize(x, spec, key) for spec in specs]

    plain, results = run(x, key)
    contract.assert_same_bits(plain, results[0])
    for (format, is_square), actual in zip(cases, results, strict=True):
      with self.subTest(format.name):
        quantize = functools.partial(
          recipes_oracle.quantize, x, format, is_square=is_square
        )
        expected = quantize(key=key)
        assert_same(actual, expected)
        self.assertGreater(np.mean(quantize().values != expected.values), 0.01)

  @parameterized.product(format=FORMATS, size=(16, 32))
  @pytest.mark.sample(3)
  def test_transformed_before_it_is_rounded(self, format, size):
    x = np.random.default_rng(2).integers(-99, 99, (40, 96)).astype(np.float32)
    actual = operands.quantize(x, spec_of(format, hadamard=size))
    transformed = recipes_oracle.transformed(x, size)
    assert_same(actual, recipes_oracle.quantize(transformed, format))

  def test_padding_is_of_zeros_before_the_transform(self):
    x = np.random.default_rng(2).integers(-99, 99, (8, 40)).astype(np.float32)
    actual = operands.quantize(x, spec_of(jp.NVFP4, multiple=32, hadamard=32))
    transformed = recipes_oracle.transformed(recipes_oracle.padded(x, 32), 32)
    assert_same(actual, recipes_oracle.quantize(transformed, jp.NVFP4))

  def test_plain_spec_is_quantize(self):
    x = matrix(3, 40, 96)
    cases = [(format, {}) for format in FORMATS]
    cases.append((jp.MXFP8, {"scale_rounding": "floor"}))

    @jax.jit
    def run(x):
      return [
        (
          operands.quantize(x, spec_of(f, **fields)),
          jp.quantize(x, f, **fields),
        )
        for f, fields in cases
      ]

    for actual, expected in run(x):
      contract.assert_same_bits(actual, expected)

  def test_vmap_is_the_loop(self):
    x = np.stack([matrix(seed, 33, 64) for seed in range(3)])
    for fields in ({"square": (0,)}, {"hadamard": 16}):
      found = spec_of(jp.MXFP8, **fields)
      quantize = lambda x, found=found: operands.quantize(x, found)
      entries = map(quantize, x)
      expected = jax.tree.map(lambda *leaves: np.stack(leaves), *entries)
      contract.assert_same_bits(jax.vmap(quantize)(x), expected)

  @pytest.mark.full
  def test_nan_spoils_its_square_and_no_other(self):
    x = np.ones((64, 64), np.float32)
    x[20, 3] = np.nan
    for axis in (0, 1):
      found = spec_of(jp.NVFP4, axis, square=(1 - axis,))
      result = np.asarray(jp.dequantize(operands.quantize(x, found)))
      expected = np.isnan(np.zeros((64, 64)))
      expected[16:32, :16] = True
      np.testing.assert_array_equal(np.isnan(result), expected)
      np.testing.assert_array_equal(result[~expected], 1)

  def test_scale_rounded_up_is_at_most_the_largest(self):
    # In f32, 0.7 / 6 over its global scale, 0.7 / 2688, is 448 * (1 + 2**-23).
    x = np.full((1, 16), 0.7, np.float32)
    result = operands.quantize(x, spec_of(jp.NVFP4, scale_up=True), None)
    self.assertEqual(result.scale.item(), 448)


class FourOverSixTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  @pytest.mark.sample(1)
  def test_bits(self, square):
    x = matrix(4, 64, 96, spread=1)
    fields = {"square": (0,)} if square else {}
    found = spec_of(jp.NVFP4, four_over_six=True, **fields)
    expected = recipes_oracle.quantize(
      x, jp.NVFP4, is_square=square, four_over_six=True
    )
    assert_same(operands.quantize(x, found), expected)
    # Some blocks have the largest value 4, others 6.
    largest = np.abs(expected.values).reshape(64, 6, 16).max(-1)
    if not square:
      self.assertContainsSubset({4, 6}, set(largest.ravel()))

  def test_no_block_has_a_larger_error_than_scaled_to_six(self):
    x = matrix(5, 64, 96, spread=0)
    found = spec_of(jp.NVFP4, four_over_six=True)
    chosen = operands.quantize(x, found)
    six = jp.quantize(x, jp.NVFP4, global_scale=chosen.global_scale)
    errors = [
      (np.asarray(jp.dequantize(q), np.float64) - x) ** 2 for q in (chosen, six)
    ]
    chosen, six = (e.reshape(64, 6, 16).sum(-1) for e in errors)
    # Sums are compared in f32.
    self.assertTrue((chosen <= six * (1 + 2.0**-18)).all())
    self.assertLess(chosen.sum(), 0.95 * six.sum())

  def test_values_that_four_holds_are_kept_exactly(self):
    # 4 and 2 apart by 4/3: to 6 they were 6 and 3, and 3/4 of 6 is lost.
    x = np.tile(np.float32([4, 3, 2, 1.5]), (1, 4))
    x = np.concatenate([x, 64 * np.float32([[6, 4, 3, 2] * 4])], 1)
    found = operands.quantize(x, spec_of(jp.NVFP4, four_over_six=True))
    np.testing.assert_array_equal(jp.dequantize(found), x)
    six = jp.quantize(x, jp.NVFP4, global_scale=found.global_scale)
    self.assertGreater(
      np.abs(jp.dequantize(six)[0, :16] - x[0, :16]).max(), 0.1
    )

  def test_block_that_both_hold_exactly_is_scaled_to_six(self):
    # The first block's scale is the largest for six, 256, at global scale 1.
    x = np.float32([[6 * 256] + 15 * [0] + [12] + 15 * [0]])
    found = operands.quantize(x, spec_of(jp.NVFP4, four_over_six=True))
    self.assertEqual(found.global_scale, 1)
    np.testing.assert_array_equal(
      np.asarray(found.scale).astype(np.float64), [[256, 2]]
    )


class BitsOfOperationsTest(lowerings.WithOperations, BitsTest):
  pass


class FourOverSixOfOperationsTest(lowerings.WithOperations, FourOverSixTest):
  pass


class TransposedTest(parameterized.TestCase):
  @parameterized.parameters(
    *((format, False) for format in FORMATS), (jp.NVFP4, True)
  )
  @pytest.mark.sample(1)
  def test_squares_commute_with_transposition(self, format, four_over_six):
    w = matrix(6, 64, 96)
    found = spec_of(format, square=(0,), four_over_six=four_over_six)
    of_rows = operands.quantize(w, found).unpack()
    of_columns = operands.quantize(w.T, found).unpack()
    bits = lambda a: np.asarray(a).view(np.uint8)
    np.testing.assert_array_equal(
      bits(of_rows.values).T, bits(of_columns.values)
    )
    np.testing.assert_array_equal(
      jp.dequantize(of_rows).T, jp.dequantize(of_columns)
    )
    # The copy for the other matmul has the bits of the first one.
    along = blocking.Blocking.along(0, 2, format.block_size)
    transposed = operands.transposed(of_rows, found, along, w.shape)
    self.assertEqual(transposed.axis, 0)
    for name in ("values", "scale"):
      np.testing.assert_array_equal(
        bits(getattr(transposed, name)).T, bits(getattr(of_columns, name))
      )
    if format == jp.NVFP4:
      np.testing.assert_array_equal(
        of_rows.global_scale, of_columns.global_scale
      )

  @parameterized.parameters(
    # Contracted and free dimensions of a weight, merged in this order.
    ((48, 5, 7), (0,), (1, 2)),
    ((3, 11, 40), (0, 1), (2,)),
    ((3, 11, 5, 7), (1, 0), (3, 2)),
    ((2, 33, 31), (2,), (1,)),
    ((4, 3, 8), (0, 2), (1,)),  # nothing to pad, and yet another order
    ((48,), (0,), ()),
  )
  @pytest.mark.full
  def test_any_rank_is_the_matrix_of_merged_dimensions(self, shape, k, free):
    w = np.random.default_rng(7).normal(size=shape).astype(np.float32)
    batch = tuple(d for d in range(len(shape)) if d not in (*k, *free))
    block = lambda dims, lead: blocking.Blocking(
      dims=dims, lead=(*batch, *lead), multiple=16
    )
    found = quantization_cases.spec(jp.NVFP4, block(k, free), square=free)
    quantized = operands.quantize(w, found)
    backward = block(free, k)
    transposed = operands.transposed(quantized, found, backward, shape)
    values = [
      np.asarray(b.undo(jp.dequantize(q), shape))
      for b, q in ((found.along, quantized), (backward, transposed))
    ]
    np.testing.assert_array_equal(*values)
    rows = int(np.prod([shape[d] for d in free]))
    order = (*batch, *free, *k)
    merged = w.transpose(order).reshape(*[shape[d] for d in batch], rows, -1)
    tensors = merged.reshape(-1, *merged.shape[-2:])
    # One global scale, that of the tensor with the largest value.
    largest = np.argmax(np.abs(tensors).max((1, 2)))
    expected = recipes_oracle.quantize(
      recipes_oracle.padded(tensors[largest], 16), jp.NVFP4, is_square=True
    )
    actual = values[0].transpose(order).reshape(tensors.shape)[largest]
    np.testing.assert_array_equal(
      actual,
      np.float32(expected.dequantized())[:, : actual.shape[1]],
    )


class ScaleUpTest(parameterized.TestCase):
  @parameterized.product(square=(False, True), four_over_six=(False, True))
  @pytest.mark.sample(1)
  def test_bits_are_those_of_a_search_and_no_value_saturates(
    self, square, four_over_six
  ):
    # Errors of scaling to 4 and to 6 are compared in f32: none are as near.
    x = matrix(12, 64, 96, spread=1 if four_over_six else 4)
    fields = {"square": (0,)} if square else {}
    found = spec_of(
      jp.NVFP4, scale_up=True, four_over_six=four_over_six, **fields
    )
    for key in (None, jax.random.key(2)):
      expected = recipes_oracle.quantize(
        x,
        jp.NVFP4,
        scale_up=True,
        is_square=square,
        four_over_six=four_over_six,
        key=key,
      )
      assert_same(operands.quantize(x, found, key), expected)
    nearest = recipes_oracle.quantize(
      x, jp.NVFP4, is_square=square, four_over_six=four_over_six
    )
    self.assertGreater(np.mean(nearest.scale != expected.scale), 0.1)
    # Only the quotient itself is rounded.
    step = np.repeat(expected.scale, 16, -1) * expected.global_scale
    self.assertTrue((np.abs(x) <= step * 6 * (1 + 2.0**-22)).all())
