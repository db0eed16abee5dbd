# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The serving example decodes what its dequantized weights decode."""

import contextlib
import io
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serve
from absl.testing import parameterized

import jaxplugin as jp

PARAMS = serve.make_params(layers=3, width=64)
TOKEN = jnp.arange(4, dtype=jnp.int32)


def dequantized(params):
  return jax.tree.map(
    lambda x: jp.dequantize(x) if isinstance(x, jp.ScaledArray) else x,
    params,
    is_leaf=lambda x: isinstance(x, jp.ScaledArray),
  )


class ServeTest(parameterized.TestCase):
  @parameterized.parameters(jp.MXFP8, jp.NVFP4)
  @pytest.mark.sample(1)
  def test_logits_are_those_of_dequantized_weights(self, format):
    params_q = serve.quantize_params(PARAMS, format)
    actual = serve.next_logits(params_q, TOKEN)
    plain = dequantized(params_q)
    expected = serve.next_logits(plain, TOKEN)
    # Seven dots of the contract's 16 roundings each; norms of random weights
    # pass errors on about as they are.
    self.assertLess(serve.relative_error(actual, expected), 7 * 16 * 2.0**-24)
    tokens = serve.decode(params_q, TOKEN, 4)
    np.testing.assert_array_equal(tokens, serve.decode(plain, TOKEN, 4))
    self.assertEqual(tokens.shape, (4, len(TOKEN)))

  def test_each_layer_has_a_global_scale_of_its_own(self):
    params = PARAMS | {"up": PARAMS["up"] * jnp.array([1, 2, 4])[:, None, None]}
    up = serve.quantize_params(params, jp.NVFP4)["up"]
    largest = np.abs(params["up"]).max((1, 2))
    np.testing.assert_allclose(
      np.ravel(up.global_scale), largest / (448 * 6), rtol=2.0**-22
    )

  def test_prints_the_dots_and_both_models(self):
    argv = ["serve.py", "--tokens=2", "--layers=2", "--width=64"]
    out = io.StringIO()
    with mock.patch("sys.argv", argv), contextlib.redirect_stdout(out):
      serve.main()
    printed = out.getvalue()
    for k in (64, 128):
      self.assertRegex(printed, rf"f32 x nvfp4 +1 +\d+ +{k} .*cpu")
    self.assertRegex(printed, r"error of the logits: \d+\.\d%")
    self.assertRegex(printed, r"(?m)^nvfp4 .* ms a token: \d+ ")
