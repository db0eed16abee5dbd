# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The random Hadamard transform, against its matrix in integers."""

import jax
import numpy as np
import pytest
from absl.testing import absltest
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

  @parameterized.parameters(*SIZES)
  @pytest.mark.sample(1)
  def test_outlier_is_spread_over_its_group_and_no_other(self, size):
    x = np.zeros((4, size), np.float32)
    x[2, size // 2] = 448
    y = np.asarray(transform(x.reshape(-1), 0, size)).reshape(4, size)
    np.testing.assert_array_equal(np.abs(y[2]), 448 * np.float32(size**-0.5))
    np.testing.assert_array_equal(y[[0, 1, 3]], 0)

  @parameterized.parameters(16, 32, 128)
  @pytest.mark.sample(1)
  def test_constant_group_is_not_gathered_in_one_value(self, size):
    # As it would be if the signs were a row of the matrix, or were left out.
    y = transform(np.ones(size, np.float32), 0, size)
    self.assertLess(np.abs(y).max(), size**0.5 * 0.75)

  @parameterized.parameters(*SIZES)
  @pytest.mark.sample(1)
  def test_transforms_of_both_sides_cancel_in_the_product(self, size):
    rng = np.random.default_rng(size)
    x, g = (rng.normal(size=(256, n)).astype(np.float32) for n in (5, 7))
    transformed = [
      np.asarray(transform(a, 0, size), np.float64) for a in (x, g)
    ]
    actual = transformed[0].T @ transformed[1]
    expected = x.astype(np.float64).T @ g
    # log2(size) + 2 roundings a value, of sums no larger than the norms of
    # their groups times sqrt(size).
    norms = [
      np.linalg.norm(a.reshape(-1, size, a.shape[1]), axis=1) for a in (x, g)
    ]
    bound = 2 * (np.log2(size) + 2) * 2.0**-24 * norms[0].T @ norms[1]
    np.testing.assert_array_less(np.abs(actual - expected), bound)

  @pytest.mark.full
  def test_compiled_bits_are_those_of_single_operations(self):
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    with jax.disable_jit():
      expected = hadamard.transform(x, 1, 32)
    np.testing.assert_array_equal(transform(x, 1, 32), expected)


if __name__ == "__main__":
  absltest.main()
