# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""MXFP6: every code, and what holds of arrays of bytes that are six bits.

Quantizing to it is in api_mx_test.py, with the other MX formats.
"""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.dot import reference
from jaxplugin.testing import contract
from jaxplugin.testing import quantization_lowerings

FORMATS = (jp.MXFP6_E2M3, jp.MXFP6_E3M2)
E8M0_ONE = 127
CPU = quantization_lowerings.OPERATIONS
P = jax.sharding.PartitionSpec


def codes(shape, seed=0):
  return np.random.default_rng(seed).integers(0, 64, shape).astype(np.uint8)


def scales(shape, low=120, high=134, seed=1):
  random = np.random.default_rng(seed)
  return random.integers(low, high, shape).astype(np.uint8).view(formats.E8M0)


def array(format, shape=(5, 96), seed=0):
  scale = scales((*shape[:-1], shape[-1] // 32), seed=seed + 1)
  return jp.ScaledArray(codes(shape, seed), scale, None, format)


def as_f64(x):
  """By ml_dtypes: independent of the package's decoder."""
  values = np.asarray(x.values).view(x.format.values_dtype).astype(np.float64)
  scale = np.asarray(x.scale).astype(np.float64)
  return values * np.repeat(scale, 32, axis=-1)


class CodesTest(parameterized.TestCase):
  @parameterized.parameters(*FORMATS)
  def test_numbers_of_the_format_quantize_to_their_codes(self, format):
    every = np.arange(64, dtype=np.uint8)
    x = every.view(format.values_dtype).astype(np.float32).reshape(2, 32)
    q = jp.quantize(x, format)
    np.testing.assert_array_equal(np.asarray(q.values).reshape(-1), every)
    np.testing.assert_array_equal(np.asarray(q.scale).view(np.uint8), E8M0_ONE)


class ArrayTest(parameterized.TestCase):
  @parameterized.parameters(*FORMATS)
  def test_names_sizes_and_representation(self, format):
    self.assertIs(formats.by_name(format.name), format)
    x = jp.quantize(np.ones((4, 64), np.float32), format.name)
    self.assertEqual((x.dtype, x.shape, x.axis), (np.uint8, (4, 64), 1))
    self.assertEqual(x.nbytes, 4 * 64 + 4 * 2)
    self.assertFalse(x.is_packed)
    self.assertIs(x.pack(), x)
    self.assertIs(x.unpack(), x)
    self.assertIn(f"{format}: values=uint8[4, 64]", repr(x))

  @parameterized.parameters(*FORMATS)
  def test_indexing_joining_and_transposing_take_the_codes_along(self, format):
    x, y = array(format), array(format, seed=7)
    np.testing.assert_array_equal(as_f64(x[1:3]), as_f64(x)[1:3])
    joined = jp.concatenate([x, y])
    np.testing.assert_array_equal(
      as_f64(joined), np.concatenate([as_f64(x), as_f64(y)])
    )
    stacked = jp.stack([x, y])
    np.testing.assert_array_equal(
      as_f64(stacked), np.stack([as_f64(x), as_f64(y)])
    )
    np.testing.assert_array_equal(jp.dequantize(x.T), jp.dequantize(x).T)

  @parameterized.parameters(*FORMATS)
  def test_prepared_weights_keep_their_numbers(self, format):
    stack = array(format, (3, 33, 96))
    targets = ("cpu", "h200", "b200", "mi355x")
    for target in map(jp.named_target, targets):
      for x in (stack, stack[0]):
        prepared = jp.prepare_weights(x, target)
        self.assertEqual(prepared.shape, x.shape)
        np.testing.assert_array_equal(jp.dequantize(prepared), as_f64(x))
        restored = jp.unprepare_weights(prepared)
        contract.assert_same_bits(restored, x)
    self.assertTrue(jp.prepare_weights(stack, CPU).is_bytes)

  @parameterized.parameters(*FORMATS)
  def test_pytrees_of_it_are_exported_and_loaded(self, format):
    x = jax.device_put(array(format))
    exported = jax.export.export(jax.jit(jp.dequantize))(x)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(x), as_f64(x))

  @parameterized.parameters(*FORMATS)
  def test_arrays_of_numpys_six_bits_and_packed_ones_are_refused(self, format):
    values = codes((4, 64)).view(format.values_dtype)
    scale = scales((4, 2))
    with self.assertRaisesRegex(
      TypeError, r"must be uint8, got float6.*view it as uint8: array.view\(np"
    ):
      jp.ScaledArray(values, scale, None, format)
    with self.assertRaisesRegex(
      ValueError,
      "packed must be False or None unless the format has 4-bit values",
    ):
      jp.quantize(jnp.ones((4, 64)), format, packed=True)
    # Four codes in three bytes would be 24 bytes for a scale.
    with self.assertRaisesRegex(TypeError, r"divided by 32.*\(4, 48\)"):
      jp.ScaledArray(codes((4, 48)), scale, None, format)


class DotTest(parameterized.TestCase):
  @parameterized.product(
    lhs=(*FORMATS, jp.MXFP8, None), rhs=FORMATS, sizes=((1, 5), (7, 33))
  )
  @pytest.mark.sample(10)
  def test_product_is_within_the_bound_of_the_exact_one(self, lhs, rhs, sizes):
    m, n = sizes
    x = np.random.default_rng(2).normal(size=(2, m, 96)).astype(np.float32)
    w = array(rhs, (2, n, 96), seed=3)
    exact_x = x.astype(np.float64)
    if lhs is not None:
      x = jp.quantize(x, lhs)
      exact_x = np.asarray(jp.dequantize(x), np.float64)
    exact = exact_x @ as_f64(w).swapaxes(-1, -2)
    magnitude = np.abs(exact_x) @ np.abs(as_f64(w)).swapaxes(-1, -2)
    for dot in (jp.block_scaled_dot, jax.jit(jp.block_scaled_dot)):
      error = np.abs(np.asarray(dot(x, w), np.float64) - exact)
      self.assertTrue((error <= reference.ERROR_BOUND * magnitude).all())

  @parameterized.parameters(*FORMATS)
  def test_vmap_and_scan_are_each_product_alone(self, format):
    w = array(format, (3, 8, 96))
    x = np.random.default_rng(2).normal(size=(4, 96)).astype(np.float32)
    expected = np.stack([jp.block_scaled_dot(x, w[i]) for i in range(3)])
    mapped = jax.vmap(jp.block_scaled_dot, (None, 0))(x, w)
    np.testing.assert_allclose(mapped, expected, rtol=1e-5, atol=1e-4)
    step = lambda carry, w: (carry, jp.block_scaled_dot(x, w))
    for stack in (w, jp.prepare_weights(w, CPU)):
      _, scanned = jax.lax.scan(step, 0, stack)
      np.testing.assert_allclose(scanned, expected, rtol=1e-5, atol=1e-4)

  @parameterized.parameters(*FORMATS)
  @pytest.mark.sample(1)
  def test_derivative_is_that_of_the_quantized_numbers(self, format):
    x = np.random.default_rng(4).normal(size=(4, 64)).astype(np.float32)
    w = array(format, (8, 64))
    g = np.random.default_rng(5).normal(size=(4, 8)).astype(np.float32)

    def loss(x):
      q = jp.quantize(x, format, derivative="straight_through")
      return (jp.block_scaled_dot(q, w) * g).sum()

    np.testing.assert_allclose(jax.grad(loss)(x), g @ as_f64(w), rtol=1e-4)
    trained = jax.grad(
      lambda x: jp.dot_general(format, format)(
        x, x, (((1,), (1,)), ((), ()))
      ).sum()
    )(x)
    self.assertTrue(np.isfinite(trained).all())

  @parameterized.parameters(*FORMATS)
  @pytest.mark.sample(1)
  def test_sharded_operands_give_the_same_product(self, format):
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    w = array(format, (64, 128))
    x = np.random.default_rng(6).normal(size=(8, 128)).astype(np.float32)
    x_q = jp.quantize(x, format)
    expected = jp.block_scaled_dot(x_q, w)
    for spec in (P("x"), P("x", "y"), P(None, "x")):
      sharding = jax.sharding.NamedSharding(mesh, spec)
      sharded = jp.shard(jax.device_put(w), sharding)
      result = jax.jit(jp.block_scaled_dot)(jax.device_put(x_q), sharded)
      np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)
    sharding = jax.sharding.NamedSharding(mesh, P("x", "y"))
    quantized = jax.jit(lambda x: jp.quantize(x, format))(
      jax.device_put(x, sharding)
    )
    contract.assert_same_bits(quantized, x_q)

  @parameterized.product(
    format=FORMATS, target=("cpu", "h200", "b200", "mi355x")
  )
  def test_quantize_is_told(self, format, target):
    target = jp.named_target(target)
    (told,) = jp.explain(
      lambda x: jp.quantize(x, format),
      np.ones((4, 64), np.float32),
      target=target,
    ).quantizations
    if target.platform == "cuda":
      self.assertEqual(told.implementation, "triton")
    else:  # a CPU without kernels, and no GPU of AMD to lower for
      self.assertEqual(told.implementation, "xla")
      self.assertRegex(told.reason, "^(cpu|triton): ")


class CpuKernelsTest(parameterized.TestCase):
  @quantization_lowerings.needs_library
  @parameterized.product(
    lhs=(*FORMATS, jp.MXFP8, jp.MXFP4, None), rhs=FORMATS, m=(1, 5)
  )
  @pytest.mark.sample(15)
  def test_dot_is_theirs_and_exact_on_integers(self, lhs, rhs, m):
    random = np.random.default_rng(8)
    x, w = (
      random.integers(-4, 5, (rows, 96)).astype(np.float32) for rows in (m, 37)
    )
    left = x if lhs is None else jp.quantize(x, lhs)
    right = jp.quantize(w, rhs)
    np.testing.assert_array_equal(jp.dequantize(right), w)
    target = jp.detect_target("cpu")
    (dot,) = jp.explain(jp.block_scaled_dot, left, right, target=target)
    self.assertEqual(dot.decision.implementation, "cpu")
    result = jp.block_scaled_dot(left, right, implementation="cpu")
    np.testing.assert_array_equal(result, x @ w.T)


if __name__ == "__main__":
  absltest.main()
