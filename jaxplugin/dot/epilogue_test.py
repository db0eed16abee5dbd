# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Two factors stand for a product of global scales, which f32 need not hold."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin.dot import epilogue

_BITS_OF_FACTOR = 2.0**-24  # relative, of one rounding to f32
_SPECIAL = np.array(
  [0, -0.0, np.inf, -np.inf, np.nan, 1, -1.5, 2.0**-126, 2.0**127], np.float32
)


def normal_numbers(count, seed):
  """Random normal numbers with any exponent, sign and significand."""
  bits = np.random.default_rng(seed).integers(0, 2**32, count, np.uint32)
  exponents = (bits >> 23) % 254 + 1
  return ((bits & 0x807FFFFF) | exponents << 23).view(np.float32)


class ProductTest(parameterized.TestCase):
  def test_two_factors_are_the_product_rounded_once(self):
    first, second = normal_numbers(10**5, 0), normal_numbers(10**5, 1)
    factor, power = map(np.float64, epilogue.product([first, second]))
    exact = np.float64(first) * np.float64(second)  # 48 bits
    significand, _ = np.frexp(power)
    np.testing.assert_array_equal(significand, 0.5)
    # Beyond what two f32 hold the factor is zero, or Inf.
    held = (np.abs(exact) >= 2.0**-250) & (np.abs(exact) < 2.0**254)
    self.assertGreater(np.mean(held), 0.99)
    np.testing.assert_allclose(
      (factor * power)[held], exact[held], rtol=_BITS_OF_FACTOR, atol=0
    )
    # A number that is multiplied by the factor first does not overflow.
    inside = (np.abs(exact) >= 2.0**-125) & (np.abs(exact) < 2.0**126)
    self.assertLess(np.abs(factor[inside]).max(), 1)
    self.assertGreaterEqual(np.abs(factor[inside]).min(), 0.25)

  def test_what_is_no_normal_number_stays_what_it_is(self):
    first = np.repeat(_SPECIAL, _SPECIAL.size)
    second = np.tile(_SPECIAL, _SPECIAL.size)
    factor, power = map(np.float64, epilogue.product([first, second]))
    with np.errstate(invalid="ignore"):
      exact = np.float64(first) * np.float64(second)
    np.testing.assert_array_equal(factor * power, exact)
    np.testing.assert_array_equal(np.signbit(factor), np.signbit(exact))

  def test_two_have_the_factors_that_three_have_with_a_one(self):
    """They are computed in fewer operations."""
    first, second = normal_numbers(10**4, 2), normal_numbers(10**4, 3)
    factor, power = epilogue.product([first, second])
    other, other_power = epilogue.product([first, second, np.ones_like(first)])
    held = np.abs(np.float64(first) * np.float64(second)) >= 2.0**-120
    np.testing.assert_array_equal(
      (np.float64(factor) * power)[held],
      (np.float64(other) * other_power)[held],
    )

  def test_three_are_the_product_wherever_two_f32_hold_it(self):
    scales = [normal_numbers(10**5, seed) for seed in (4, 5, 6)]
    factor, power = map(np.float64, epilogue.product(scales))
    exact = np.prod(np.float64(scales), axis=0)  # 53 bits of 72
    found = factor * power
    magnitude = np.abs(exact)
    held = (magnitude >= 2.0**-252) & (magnitude < 2.0**254)
    self.assertGreater(np.mean(held), 0.9)
    np.testing.assert_allclose(
      found[held], exact[held], rtol=2 * _BITS_OF_FACTOR, atol=0
    )
    is_below = magnitude < 2.0**-252
    self.assertGreater(np.mean(is_below), 0.01)
    largest = (1 + 2 * _BITS_OF_FACTOR) * magnitude[is_below]
    self.assertTrue((np.abs(found[is_below]) <= largest).all())

  @parameterized.parameters(
    ([2.0**-126] * 3, 2.0**127, 0),
    ([2.0**-126, 2.0**-126, -(2.0**-40)], 2.0**127, 0),
    ([2.0**-126, 2.0**-126, 1], 2.0**127, 2.0**-125),
    ([2.0**-126, 2.0**-126, 2.0**127], 2.0**127, 4),
    ([2.0**127] * 3, 0, 0),
    ([2.0**127] * 3, 2.0**-126, np.inf),
  )
  def test_three_extreme_scales_of_a_dot(self, scales, dot, expected):
    pair = epilogue.product([np.float32(x) for x in scales])
    self.assertEqual(epilogue.multiply(jnp.float32(dot), *pair), expected)

  def test_two_constants_are_multiplied_one_after_the_other(self):
    # Their product, 2^-160, is below the smallest number of f32, 2^-149.
    small = np.float32(2.0**-80)
    function = jax.jit(lambda x: epilogue.multiply(x, small, small))
    x = np.array([2.0**127, -(2.0**100), np.nan], np.float32)
    np.testing.assert_array_equal(function(x), np.float64(x) * 2.0**-160)

  @parameterized.parameters(((), ()), ((3, 1), (4,)), ((2, 1, 1), (5, 1)))
  @pytest.mark.sample(1)
  def test_derivative_of_the_factor_is_that_of_the_product(self, *shapes):
    first, second = (
      jax.device_put(np.random.default_rng(i).uniform(1, 9, shape))
      for i, shape in enumerate(shapes)
    )

    def function(first, second):
      factor, power = epilogue.product([first, second])
      return factor * jax.lax.stop_gradient(power)

    cotangent = jnp.full(jnp.broadcast_shapes(*shapes), np.float32(3))
    found, wanted = (
      jax.vjp(f, first, second)[1](cotangent)
      for f in (function, lambda a, b: a * b)
    )
    for x, y in zip(found, wanted, strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-6)

  def test_two_scalars_take_few_operations(self):
    """Each dot has them, and compiling takes time for each operation."""
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    lowered = jax.jit(lambda a, b: epilogue.product([a, b])).lower(scale, scale)
    found = re.findall(r"= stablehlo\.(?!constant)\w+", lowered.as_text())
    self.assertContainsSubset({"= stablehlo.multiply"}, found)
    self.assertLess(len(found), 32)
