# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`scaled_matmul` against JAX's own, and NumPy in f64.

JAX's runs on a CPU since 0.12. Here are also the signatures of all drop-ins and
the implementations that cannot be forced; `scaled_dot`, `scaled_dot_general`
and malformed calls have other tests.
"""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import nn
from jaxplugin.core import formats
from jaxplugin.testing import contract
from jaxplugin.testing import nn_cases

BF16, F16, F32 = contract.BF16, contract.F16, contract.F32
E4M3, E5M2, E2M1 = formats.E4M3, formats.E5M2, formats.E2M1
E8M0 = formats.E8M0
NT_2D, NT_3D = nn_cases.NT_2D, nn_cases.NT_3D
SCALE_ROUNDING_BOUND = nn_cases.SCALE_ROUNDING_BOUND
mx = nn_cases.mx
rng_of, dequantized = nn_cases.rng_of, nn_cases.dequantized

INT8 = np.dtype(np.int8)


class SignatureTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("scaled_matmul", nn.scaled_matmul, jax.nn.scaled_matmul),
    ("scaled_dot", nn.scaled_dot, jax.lax.scaled_dot),
    ("scaled_dot_general", nn.scaled_dot_general, jax.nn.scaled_dot_general),
    (
      "get_scaled_dot_general_config",
      nn.get_scaled_dot_general_config,
      jax.nn.get_scaled_dot_general_config,
    ),
  )
  def test_parameters_are_those_of_jax_and_implementation(self, ours, jaxs):
    def parameters(function):
      signature = inspect.signature(function)
      return [
        (p.name, p.kind, p.default) for p in signature.parameters.values()
      ]

    expected = parameters(jaxs)
    names = [name for name, _, _ in expected]
    is_config = ours is nn.get_scaled_dot_general_config
    if "implementation" not in names and not is_config:
      keyword = inspect.Parameter.KEYWORD_ONLY
      expected.append(("implementation", keyword, None))
    self.assertEqual(parameters(ours), expected)


class ScaledMatmulTest(parameterized.TestCase):
  def test_the_basic_example_of_jax(self):
    a = jnp.array([1, 2, 3]).reshape((1, 1, 3))
    b = jnp.array([4, 5, 6]).reshape((1, 1, 3))
    a_scales = jnp.array([0.5]).reshape((1, 1, 1))
    b_scales = jnp.array([0.5]).reshape((1, 1, 1))
    result = nn.scaled_matmul(a, b, a_scales, b_scales)
    np.testing.assert_array_equal(
      result, np.array([[[8.0]]], np.float32), strict=True
    )

  def test_the_mxfp8_example_of_jax(self):
    # 4 scales for 64 values are blocks of 16, so this is not MXFP8.
    dtype = jnp.float8_e4m3fn
    a = jax.random.normal(jax.random.PRNGKey(1), (3, 128, 64), dtype=dtype)
    b = jax.random.normal(jax.random.PRNGKey(2), (3, 128, 64), dtype=dtype)
    a_scales = jnp.ones((3, 128, 4), dtype=jnp.float8_e8m0fnu)
    b_scales = jnp.ones((3, 128, 4), dtype=jnp.float8_e8m0fnu)
    result = nn.scaled_matmul(a, b, a_scales, b_scales)
    exact, magnitude = contract.dot(
      np.asarray(a, np.float64), np.asarray(b, np.float64)
    )
    bound = contract.DOT_BOUND * magnitude
    contract.assert_within(result, exact, bound, F32)

  @parameterized.named_parameters(
    ("mxfp8", E4M3, E8M0, 32),
    ("mxfp8_e5m2", E5M2, E8M0, 32),
    ("mxfp4", E2M1, E8M0, 32),
    ("nvfp4", E2M1, E4M3, 16),
    ("blocks_of_1", E4M3, E8M0, 1),
    ("blocks_of_64", E4M3, E8M0, 64),
    ("bf16_scale", E4M3, BF16, 16),
    ("f32_scale", INT8, F32, 64),
  )
  @pytest.mark.sample(1)
  def test_random_data_is_within_the_contract_of_f64(
    self, dtype, scale_dtype, block
  ):
    lhs, rhs, lhs_scale, rhs_scale = self.operands(dtype, scale_dtype, block)
    exact, magnitude = contract.dot(
      dequantized(lhs, lhs_scale), dequantized(rhs, rhs_scale)
    )
    result = nn.scaled_matmul(lhs, rhs, lhs_scale, rhs_scale)
    bound = (contract.DOT_BOUND + SCALE_ROUNDING_BOUND) * magnitude
    contract.assert_within(result, exact, bound, F32)
    if not nn_cases.JAX_NN_RUNS_ON_CPU:
      return
    arrays = map(jnp.asarray, (lhs, rhs, lhs_scale, rhs_scale))
    jaxs = np.asarray(jax.nn.scaled_matmul(*arrays))
    contract.assert_within(result, jaxs.astype(np.float64), 2 * bound, F32)

  def operands(self, dtype, scale_dtype, block):
    (lhs, lhs_scale), (rhs, rhs_scale) = (
      mx((2, rows, 64), 2, dtype, block, scale_dtype).make(
        rng_of(20, rows), nn_cases.random_values, nn_cases.random_scale
      )
      for rows in (3, 5)
    )
    return lhs, rhs, lhs_scale, rhs_scale

  @parameterized.parameters(jnp.float32, jnp.bfloat16, jnp.float16)
  @pytest.mark.full
  def test_is_bit_equal_to_jax_on_integers(self, dtype):
    if not nn_cases.JAX_NN_RUNS_ON_CPU:
      self.skipTest(nn_cases.NEEDS_JAX_NN)
    for block in (3, 16, 32):
      lhs, lhs_scale = mx((2, 3, 96), 2, block=block).make(rng_of(22))
      rhs, rhs_scale = mx((2, 5, 96), 2, block=block).make(rng_of(23))
      arrays = [jnp.asarray(x) for x in (lhs, rhs, lhs_scale, rhs_scale)]
      np.testing.assert_array_equal(
        nn.scaled_matmul(*arrays, preferred_element_type=dtype),
        jax.nn.scaled_matmul(*arrays, preferred_element_type=dtype),
        strict=True,
      )

  def test_an_f16_result_keeps_scales_that_f16_cannot_hold(self):
    lhs, lhs_scale = mx((1, 3, 32), 2).make(rng_of(24))
    rhs, rhs_scale = mx((1, 5, 32), 2).make(rng_of(25))
    lhs_scale = np.full_like(lhs_scale, 2.0**30)
    rhs_scale = np.full_like(rhs_scale, 2.0**-30)
    exact, _ = contract.dot(
      dequantized(lhs, lhs_scale), dequantized(rhs, rhs_scale)
    )
    result = nn.scaled_matmul(lhs, rhs, lhs_scale, rhs_scale, jnp.float16)
    contract.assert_exact(result, exact, F16)

  def test_jit_changes_no_bit(self):
    for block in (8, 32):
      operands = self.operands(E4M3, E8M0, block)
      np.testing.assert_array_equal(
        jax.jit(nn.scaled_matmul)(*operands), nn.scaled_matmul(*operands)
      )


class ImplementationTest(parameterized.TestCase):
  """Forced implementations, on the device that each is best at."""

  @parameterized.parameters("cudnn", "triton", "cpu")
  def test_unknown_format_is_refused_with_every_reason(self, name):
    dtypes = (E4M3, E8M0), (E2M1, E8M0), (E2M1, E4M3), (E4M3, BF16)
    for (dtype, scale_dtype), block in itertools.product(dtypes, (8, 64)):
      x, scale = mx((1, 3, 64), 2, dtype, block, scale_dtype).make(rng_of(30))
      message = (
        f"(?s)^scaled_matmul: implementation='{name}' does not support"
        f" {dtype.name} \\+ {scale_dtype.name} per {block} (?=.*\n  cudnn: )"
        "(?=.*\n  triton: )(?=.*\n  cpu: )(?=.*\n  xla: supported)"
      )
      with (
        jp.use_target(nn_cases.BEST_TARGETS[name]),
        self.assertRaisesRegex(NotImplementedError, message),
      ):
        nn.scaled_matmul(x, x, scale, scale, implementation=name)

  @parameterized.parameters("cudnn", "triton", "cpu")
  def test_a_dot_of_unquantized_operands_is_refused(self, name):
    x = jnp.ones((3, 32), jnp.bfloat16)
    for function, message in (
      (nn.scaled_dot, f"scaled_dot: implementation='{name}' does not"),
      (nn.scaled_dot_general, f"scaled_dot_general: .*'{name}'.*configs=None"),
    ):
      with (
        self.subTest(message),
        jp.use_target(nn_cases.BEST_TARGETS[name]),
        self.assertRaisesRegex(NotImplementedError, message),
      ):
        function(x, x, dimension_numbers=NT_2D, implementation=name)

  @parameterized.parameters(8, 32)
  @pytest.mark.sample(1)
  def test_xla_serves_everything(self, block):
    x, scale = mx((2, 3, 64), 2, block=block).make(rng_of(31))
    exact, _ = contract.dot(dequantized(x, scale), dequantized(x, scale))
    result = nn.scaled_matmul(x, x, scale, scale, implementation="xla")
    contract.assert_exact(result, exact, F32)
    result = nn_cases.scaled_dot(
      (x, scale), (x, scale), NT_3D, implementation="xla"
    )
    contract.assert_exact(result, exact, F32)


if __name__ == "__main__":
  absltest.main()
