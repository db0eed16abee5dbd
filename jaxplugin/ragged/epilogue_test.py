# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gated activations, against their formulas in NumPy and f64."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from jaxplugin.ragged import epilogue

# On both sides of the limits, 7 and -7, of swigluoai.
_NUMBERS = np.array([-20, -7.5, -7, -6.5, -1, 0, 0.5, 6.5, 7, 7.5, 20])
# The argument of exp(-34) is rounded by up to 2^-19; f32 rounds the products.
_ROUNDING = 2.0**-18


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


class ActivationTest(absltest.TestCase):
  def test_swigluoai_clamps_both_halves_of_each_pair(self):
    gate, up = map(np.ravel, np.meshgrid(_NUMBERS, _NUMBERS))
    pairs = np.stack([gate, up], axis=-1).reshape(1, -1)
    actual = epilogue.activate(jnp.float32(pairs), "swigluoai")
    gate, up = np.minimum(gate, 7), np.minimum(np.maximum(up, -7), 7)
    expected = gate * _sigmoid(1.702 * gate) * (up + 1)
    np.testing.assert_allclose(actual[0], expected, rtol=_ROUNDING, atol=1e-30)
