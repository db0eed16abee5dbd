# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The random Hadamard transform, against its matrix in integers."""

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin.quantization import hadamard
from jaxplugin.testing.oracles import recipes_oracle

SIZES = (2, 16, 128)

transform = jax.jit(hadamard.transform, static_argnums=(1, 2))


def digits_of_pi(count):
  """By Machin's formula, in integers."""
  unity = 10 ** (count + 10)

  def arctan_of_inverse(x):
    term = total = unity // x
    i = 1
    while term:
      term //= -x * x
      i += 2
      total += term // i
    return total

  pi = 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239))
  return str(pi // 10**10)[1:]


class TransformTest(parameterized.TestCase):
  def test_there_are_signs_for_the_largest_group(self):
    self.assertEqual(hadamard.SIZES, (2, 4, 8, 16, 32, 64, 128, 256))
    digits = digits_of_pi(100)
    self.assertStartsWith(digits, recipes_oracle.PI)
    fraction = int(digits) * 2**256 // 10 ** len(digits)
    expected = [-1 if c == "1" else 1 for c in f"{fraction:0256b}"]
    np.testing.assert_array_equal(hadamard.signs(256), expected)
    np.testing.assert_array_equal(hadamard.signs(16), expected[:16])

  @parameterized.parameters(*SIZES)
  @pytest.mark.sample(1)
  def test_transform_multiplies_by_the_matrix(self, size):
    matrix = recipes_oracle.hadamard_matrix(size)
    actual = transform(np.eye(size), 0, size)
    factor = np.float32(size**-0.5)
    np.testing.assert_array_equal(actual, matrix * factor)
    # Orthogonal, but for the rounding of the factor.
    matrix = np.asarray(actual, np.float64)
    np.testing.assert_allclose(
      matrix @ matrix.T, np.eye(size), rtol=0, atol=2.0**-23
    )

  @parameterized.parameters(*SIZES)
  @pytest.mark.sample(1)
  def test_groups_along_any_dimension_are_transformed_alike(self, size):
    x = np.random.default_rng(size).integers(-99, 100, (3, 2 * size, 5))
    groups = x.reshape(3, 2, size, 5)
    sums = np.einsum(
      "ij,agjb->agib", recipes_oracle.hadamard_matrix(size), groups
    )
    expected = sums.astype(np.float32) * np.float32(size**-0.5)
    expected = expected.reshape(x.shape)
    np.testing.assert_array_equal(transform(x, 1, size), expected)
    last = transform(x.transpose(2, 0, 1), 2, size)
    np.testing.assert_array_equal(last, expected.transpose(2, 0, 1))

  @pytest.mark.full
  def test_compiled_bits_are_those_of_single_operations(self):
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    with jax.disable_jit():
      expected = hadamard.transform(x, 1, 32)
    np.testing.assert_array_equal(transform(x, 1, 32), expected)
