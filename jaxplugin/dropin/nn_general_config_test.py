# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`get_scaled_dot_general_config`, and configs that JAX makes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin import nn
from jaxplugin.testing import nn_cases
from jaxplugin.testing.oracles import nn_general_oracle

MODES = nn_general_oracle.MODES
config = nn_general_oracle.config
floats = nn_general_oracle.floats


class ConfigTest(parameterized.TestCase):
  @parameterized.parameters(*MODES)
  def test_fields_are_those_of_jax(self, mode):
    if mode == "mxfp4" and nn_cases.JAX_VERSION < (0, 11):
      self.skipTest(f"jax {jax.__version__} has no mode mxfp4")
    for args in ((mode,), (mode, jnp.array([0.5], jnp.float32))):
      if mode == "mxfp4" and len(args) == 2:
        continue
      ours = nn.get_scaled_dot_general_config(*args)
      jaxs = jax.nn.get_scaled_dot_general_config(*args)
      self.assertEqual(
        [f.name for f in dataclasses.fields(ours)],
        [f.name for f in dataclasses.fields(jaxs)],
      )
      for name in ("mode", "block_size", "infer_only"):
        self.assertEqual(getattr(ours, name), getattr(jaxs, name))
      for name in ("data_type", "scale_type"):
        self.assertEqual(
          jnp.dtype(getattr(ours, name)), jnp.dtype(getattr(jaxs, name))
        )
      if jaxs.global_scale is None:
        self.assertIsNone(ours.global_scale)
      else:
        np.testing.assert_array_equal(
          ours.global_scale, jaxs.global_scale, strict=True
        )

  def test_an_unknown_mode_lists_the_known_ones(self):
    with self.assertRaisesRegex(ValueError, "mxfp8, mxfp4, nvfp4, got 'fp8'"):
      nn.get_scaled_dot_general_config("fp8")

  def test_mxfp4_refuses_a_global_scale(self):
    with self.assertRaisesRegex(ValueError, "mxfp4 has no global scale"):
      nn.get_scaled_dot_general_config("mxfp4", jnp.float32(0.5))

  @parameterized.parameters("mxfp8", "nvfp4")
  @pytest.mark.full
  def test_configs_of_jax_give_the_same_bits(self, mode):
    lhs, rhs = floats(40, "bmk"), floats(41, "bnk")
    scale = jnp.array([0.5], jnp.float32)
    results = []
    for module in (nn, jax.nn):
      configs = [module.get_scaled_dot_general_config(mode, scale)] * 3
      results.append(
        nn_general_oracle.dot_and_gradients(lhs, rhs, configs, "bmk,bnk->bmn")
      )
    jax.tree.map(np.testing.assert_array_equal, *results)

  def test_a_config_is_an_argument_of_a_jitted_function(self):
    lhs, rhs = floats(42, "mk"), floats(43, "nk")
    configs = [config("nvfp4", 0.25)] * 3
    nn_general_oracle.assert_product(
      *(jax.jit(nn_general_oracle.dot)(lhs, rhs, configs), lhs, rhs),
      nn_general_oracle.quantizer("nvfp4", 0.25),
    )


if __name__ == "__main__":
  absltest.main()
