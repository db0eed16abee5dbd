# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The layer of the mixture-of-experts example against NumPy in f64."""

import functools

import jax
import moe
import numpy as np
import pytest
from absl.testing import parameterized


class MoeTest(parameterized.TestCase):
  @parameterized.parameters("mxfp4", "nvfp4", "mxfp8")
  @pytest.mark.sample(1)
  def test_layer_agrees_with_numpy_in_f64(self, format):
    layer = moe.quantized(moe.make_layer(moe.SMALL), format)
    plain = moe.dequantized(layer)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((11, moe.SMALL.model), dtype=np.float32)
    exact = moe.oracle(plain, x)
    for weights, experts_of in (
      (layer, moe.ours),
      (plain, moe.by_lax),
      (layer, moe.by_lax_dequantizing),
    ):
      run = jax.jit(functools.partial(moe.apply, experts_of=experts_of))
      self.assertLess(moe.relative_error(run(weights, x), exact), 1e-6)
