# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Scales are checked for negative codes once for each array."""

import gc
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.arrays import validation
from jaxplugin.core import formats

# Codes of E4M3: 1.0, -0.0 and both NaNs; then -1.0.
POSITIVE = (0x38, 0x80, 0x7F, 0xFF)
NEGATIVE = 0xB8


def codes_as_scale(codes):
  return np.array(codes, np.uint8).view(formats.E4M3)


def e4m3(*shape):
  return codes_as_scale(np.resize(np.array(POSITIVE, np.uint8), shape))


def fp4(*shape):
  return jnp.ones(shape, jnp.float4_e2m1fn)


class ScaleSignsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.looked_at = self.enter_context(
      mock.patch.object(
        validation, "negative_codes", side_effect=validation.negative_codes
      )
    )

  def test_every_code_against_ml_dtypes(self):
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(formats.E4M3).astype(np.float32) < 0
    for code, is_negative in zip(codes, expected, strict=True):
      scale = jnp.asarray(codes_as_scale([code]))
      self.assertEqual(validation.has_negative_code(scale), is_negative)

  def test_array_of_jax_is_looked_at_once(self):
    lhs, rhs = jnp.asarray(e4m3(2, 2)), jnp.asarray(e4m3(6, 2))
    array = jp.ScaledArray(fp4(6, 32), rhs, None, jp.NVFP4)
    for _ in range(3):
      jp.block_scaled_dot(fp4(2, 32), fp4(6, 32), lhs, rhs)
      jp.block_scaled_dot(jnp.ones((2, 32)), array)
    self.assertEqual(self.looked_at.call_count, 2)
    self.assertTrue(validation.is_known_positive(lhs))
    self.assertTrue(validation.is_known_positive(rhs))

  def test_scales_of_quantize_are_not_checked(self):
    x = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    x[0, 0] = np.nan
    for key in (None, jax.random.key(0)):
      x_q = jp.quantize(-x, jp.NVFP4, key=key)
      for other in (x_q, *jp.quantize_both(x, jp.NVFP4)[:1]):
        jp.block_scaled_dot(x_q, other)
    self.looked_at.assert_not_called()
    self.assertFalse((np.asarray(x_q.scale, np.float32) < 0).any())

  def test_array_of_numpy_is_looked_at_each_time(self):
    scale = e4m3(6, 2)
    array = jp.ScaledArray(np.asarray(fp4(6, 32)), scale, None, jp.NVFP4)
    jp.block_scaled_dot(jnp.ones((2, 32)), array)
    scale.view(np.uint8)[4, 1] = NEGATIVE
    with self.assertRaisesRegex(ValueError, r"rhs_scale.*-1\.0 at \(4, 1\)"):
      jp.block_scaled_dot(jnp.ones((2, 32)), array)

  def test_negative_scale_is_refused_each_time(self):
    scale = jnp.asarray(codes_as_scale([[0x38, NEGATIVE]]))
    for _ in range(3):
      with self.assertRaisesRegex(ValueError, r"-1\.0 at \(0, 1\)"):
        jp.block_scaled_dot(jnp.ones((2, 32)), fp4(1, 32), None, scale)

  def test_negative_padding_is_not_taken_for_good_wherever_it_is_used(self):
    scale = jnp.asarray(codes_as_scale([[0x38, 0x38], [0x38, NEGATIVE]]))
    dot = lambda rows: jp.block_scaled_dot(
      jnp.ones((2, 32)), fp4(rows, 32), None, scale, block_size=16
    )
    for _ in range(2):
      self.assertEqual(dot(1).shape, (2, 1))  # the second row is padding
      with self.assertRaisesRegex(ValueError, r"-1\.0 at \(1, 1\)"):
        dot(2)

  def test_array_is_forgotten_when_it_goes(self):
    scale = jnp.asarray(e4m3(6, 2))
    validation.remember_positive(scale)
    key = id(scale)
    self.assertIn(key, validation._known)
    del scale
    gc.collect()
    self.assertNotIn(key, validation._known)

  def test_array_at_the_address_of_another_is_not_taken_for_it(self):
    scale, other = jnp.asarray(e4m3(6, 2)), jnp.asarray(e4m3(6, 2))
    validation.remember_positive(scale)
    with mock.patch.dict(
      validation._known, {id(other): validation._known[id(scale)]}
    ):
      self.assertFalse(validation.is_known_positive(other))

  def test_traced_scale_is_not_remembered(self):
    before = set(validation._known)
    jax.jit(lambda x: jp.quantize(x, jp.NVFP4))(jnp.ones((2, 32)))
    jax.jit(jp.block_scaled_dot)(
      fp4(2, 32), fp4(6, 32), jnp.asarray(e4m3(2, 2)), jnp.asarray(e4m3(6, 2))
    )
    self.assertContainsSubset(set(validation._known), before)
