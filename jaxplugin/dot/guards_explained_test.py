# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What operands explain `debug_checks` lets pass, and nothing else.

Numbers that are not finite are explained where the reference has them as well,
or where an implementation's bound allows them.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.testing.dot_suite import planted

M, N, K = planted.M, planted.N, planted.K


def with_leaf(x, name, index, byte):
  """A `ScaledArray` with one byte of its values or of its scale replaced."""
  leaf = np.array(getattr(x, name))
  leaf.view(np.uint8)[index] = byte
  leaves = {"values": x.values, "scale": x.scale, name: jnp.asarray(leaf)}
  return jp.ScaledArray(
    leaves["values"], leaves["scale"], x.global_scale, x.format
  )


def nan_value():
  return (
    with_leaf(planted.quantized(M), "values", (2, 3), 0x7F),
    planted.quantized(N),
  ), {}


def nan_scale():
  return (
    planted.quantized(M),
    with_leaf(planted.quantized(N), "scale", (2, 1), 0xFF),
  ), {}


def nan_plain():
  x = np.ones((M, K), np.float32)
  x[2, 3] = np.nan
  return (jnp.asarray(x), planted.quantized(N)), {}


def infinite_plain():
  x = np.ones((M, K), np.float32)
  x[2, 3] = np.inf
  return (jnp.asarray(x), planted.quantized(N)), {}


def f32_overflow():
  # 2^127 * 2^10 is beyond f32.
  x = with_leaf(planted.quantized(M), "scale", (2, slice(None)), 254)
  return (x, with_leaf(planted.quantized(N), "scale", (2, 1), 137)), {}


def cast_overflow(dtype, number):
  """One row beyond what a 16-bit result holds, and inside of f32."""

  def make():
    x = np.zeros((M, K), np.float32)
    x[2, 0] = number
    w = np.ones((N, K), np.float32)
    return (jnp.asarray(x), jp.quantize(w, jp.MXFP8)), {
      "preferred_element_type": dtype
    }

  return make


def nan_bias():
  bias = jnp.zeros((N,)).at[3].set(np.nan)
  return (planted.quantized(M), planted.quantized(N)), {
    "bias": bias,
    "activation": "gelu",
  }


def infinite_residual():
  residual = jnp.zeros((M, N)).at[2, 3].set(-np.inf)
  return (planted.quantized(M), planted.quantized(N)), {
    "residual": residual,
    "activation": "relu",
  }


def nan_global_scale_of_a_row():
  scale = jnp.ones((M, 1)).at[2].set(np.nan)
  return (planted.quantized(M), planted.quantized(N)), {"global_scale": scale}


EXPLAINED = (
  nan_value,
  nan_scale,
  nan_plain,
  infinite_plain,
  f32_overflow,
  # Rounds to Inf: halfway between the largest and the next power of two.
  cast_overflow(jnp.float16, 65520.0),
  cast_overflow(jnp.bfloat16, 3.3961775e38),
  nan_bias,
  infinite_residual,
  nan_global_scale_of_a_row,
)


class ExplainedTest(planted.Case):
  @parameterized.parameters(*EXPLAINED)
  @pytest.mark.sample(1)
  def test_what_the_operands_explain_passes_and_hides_nothing_else(self, make):
    args, kwargs = make()
    function = lambda *args: planted.dot(*args, **kwargs)
    bad = ~np.isfinite(np.asarray(planted.run(function, *args), np.float32))
    self.assertTrue(bad.any())
    self.assertFalse(bad.all())
    fine = tuple(int(i) for i in np.argwhere(~bad)[-1])
    self.plant(fine)
    with self.assertRaises(jp.NonFiniteError) as caught:
      planted.run(function, *args)
    self.assertStartsWith(
      str(caught.exception), "block_scaled_dot: 1 of the result"
    )
    self.assertIn(f"nan at {fine}", str(caught.exception))

  def test_implementation_that_overflows_at_a_finite_result_is_caught(self):
    # 60000 is a number of f16; the planted Inf is not its rounding.
    args, kwargs = cast_overflow(jnp.float16, 60000.0)()
    self.plant((2, 0), value=np.inf)
    with self.assertRaisesRegex(jp.NonFiniteError, "the reference has 60000.0"):
      planted.run(lambda *args: planted.dot(*args, **kwargs), *args)

  @parameterized.parameters(
    # Its own sum may be as large as the next number, which rounds to Inf.
    (jnp.float16, 65500.0),
    # A global scale rounded to bf16 may be larger by almost 2^-8.
    (jnp.bfloat16, 3.3895314e38 * (1 - 0.99 * 2.0**-8)),
  )
  @pytest.mark.sample(1)
  def test_overflow_within_the_bound_of_an_implementation_passes(
    self, dtype, number
  ):
    args, kwargs = cast_overflow(dtype, number)()
    self.plant((2, 0), value=np.inf)
    planted.run(lambda *args: planted.dot(*args, **kwargs), *args)

  @parameterized.parameters(
    # Twice the contract's bound counts as well: 2^-19.
    (jnp.float32, 3.4028235e38, 2.0**-18),
    (jnp.float16, 65504.0, 2.0**-11),
    (jnp.bfloat16, 3.3895314e38, 2.0**-8),
  )
  @pytest.mark.sample(1)
  def test_overflow_beyond_the_rounding_of_its_dtype_is_caught(
    self, dtype, largest, rounding
  ):
    args, kwargs = cast_overflow(dtype, largest * (1 - 1.5 * rounding))()
    self.plant((2, 0), value=np.inf)
    with self.assertRaisesRegex(jp.NonFiniteError, "the reference has"):
      planted.run(lambda *args: planted.dot(*args, **kwargs), *args)

  def test_sum_whose_terms_overflow_in_some_order_passes(self):
    x = np.zeros((M, K), np.float32)
    x[:, :2] = [3e38, -3e38]
    args = jnp.asarray(x), jp.quantize(np.ones((N, K), np.float32), jp.MXFP8)
    self.assertTrue(np.isfinite(planted.run(planted.dot, *args)).all())
    self.plant((1, 2))
    planted.run(planted.dot, *args)

  @parameterized.parameters((0, N, K), (M, 0, K), (M, N, 0))
  @pytest.mark.sample(1)
  def test_empty_calls_pass(self, m, n, k):
    x = jp.quantize(np.zeros((m, k), np.float32), jp.MXFP8)
    w = jp.quantize(np.zeros((n, k), np.float32), jp.MXFP8)
    self.assertEqual(planted.run(planted.dot, x, w).shape, (m, n))

  def test_swizzled_scales_are_understood(self):
    x, w = planted.quantized(M), planted.quantized(N)
    swizzled = lambda a: jp.ScaledArray(
      a.values, jp.swizzle_scale(a.scale), None, a.format,
      scale_layout="swizzled_128x4",
    )  # fmt: skip
    self.plant((1, 2))
    with self.assertRaisesRegex(jp.NonFiniteError, "1 of the result"):
      planted.run(planted.dot, swizzled(x), swizzled(w))

  @pytest.mark.full
  def test_weights_that_were_prepared_are_understood(self):
    w = jp.prepare_weights(
      planted.quantized(N, jp.NVFP4), targets.named_target("h200")
    )
    self.assertTrue(w.is_interleaved)
    bias = jnp.zeros((N,)).at[3].set(np.nan)
    self.plant((1, 2))
    with self.assertRaisesRegex(jp.NonFiniteError, "1 of the result"):
      planted.run(
        lambda x, w: planted.dot(x, w, bias=bias),
        planted.quantized(M, jp.NVFP4),
        w,
      )


if __name__ == "__main__":
  absltest.main()
