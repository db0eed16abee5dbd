# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Matmuls of arrays with zero points or minima, against NumPy in f64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp

BOUND = 16 * 2.0**-24  # docs/concepts/numerics.md
ROWS, COLUMNS, K = 5, 130, 576  # neither is a multiple of 128
INT8_64 = jp.BlockFormat(
  name="int8_64_with_minima",
  values_dtype=np.int8,
  scale_dtype=np.float32,
  block_size=64,
  offset_dtype=ml_dtypes.bfloat16,
)
UINT8_ROW = jp.BlockFormat(
  name="uint8_row",
  values_dtype=np.int8,
  scale_dtype=np.float32,
  block_size=0,
  offset_dtype=np.uint8,
  code_offset=128,
)
FORMATS = (
  jp.UINT4_128,
  jp.UINT4_128_BF16,
  jp.UINT4_32_MIN,
  INT8_64,
  UINT8_ROW,
)


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def in_blocks(x, format, k):
  """Repeats one number of each block for its values, as f64."""
  size = format.along(k).block_size
  return np.repeat(np.asarray(x).astype(np.float64), size, axis=-1)[..., :k]


def parts(w):
  """Returns f64 stored * scale, and f64 terms of the blocks, of an array."""
  format, k = w.format, w.shape[-1]
  stored = np.asarray(w.unpack().values).astype(np.float64)
  scale, offset = (in_blocks(x, format, k) for x in (w.scale, w.offset))
  if np.dtype(format.offset_dtype).kind in "iu":
    return stored * scale, (format.code_offset - offset) * scale
  return stored * scale, format.code_offset * scale + offset


def values_of(x):
  """Returns the f64 values of an operand, and magnitudes for the bound."""
  if not isinstance(x, jp.ScaledArray):
    x = np.asarray(x).astype(np.float64)
    return x, np.abs(x)
  if x.offset is None:
    x = np.asarray(x.dequantize()).astype(np.float64)
    return x, np.abs(x)
  product, term = parts(x)
  return product + term, np.abs(product) + np.abs(term)


def weight(format, *shape, seed=0):
  """Returns an array of random codes, scales and offsets."""
  rng = np.random.default_rng(seed)
  bits = format.value_bits
  low, high = -(1 << bits - 1), 1 << bits - 1
  values = rng.integers(low, high, shape).astype(format.values_dtype)
  blocks = -(-shape[-1] // format.along(shape[-1]).block_size)
  sizes = (*shape[:-1], blocks)
  scale = rng.uniform(0.01, 0.1, sizes).astype(format.scale_dtype)
  offset = rng.normal(size=sizes)
  if np.dtype(format.offset_dtype).kind in "iu":
    offset = rng.integers(0, 1 << bits, sizes)
  return jp.ScaledArray(
    jnp.asarray(values),
    jnp.asarray(scale),
    None,
    format,
    offset=jnp.asarray(offset.astype(format.offset_dtype)),
  )


class OffsetsTest(parameterized.TestCase):
  def assert_is_product(self, actual, lhs, rhs):
    """Checks actual = lhs @ rhs.T within the contract."""
    (lhs, lhs_size), (rhs, rhs_size) = values_of(lhs), values_of(rhs)
    error = np.abs(np.asarray(actual).astype(np.float64) - lhs @ rhs.T)
    np.testing.assert_array_less(error, BOUND * (lhs_size @ rhs_size.T) + 1e-30)

  @parameterized.parameters(*FORMATS)
  def test_dequantize_applies_the_offset(self, format):
    w = weight(format, 7, K)
    product, term = parts(w)
    found = np.asarray(jax.jit(jp.dequantize)(w.pack()))
    exact = product + term
    largest = np.abs(product) + np.abs(term)
    bound = 2.0**-22 * largest + 1e-30
    np.testing.assert_array_less(np.abs(found - exact), bound)
    if format.scale_dtype != np.float32 and format is not jp.UINT4_32_MIN:
      np.testing.assert_array_equal(found, exact)

  @parameterized.product(
    format=FORMATS, lhs=(jnp.float32, jnp.bfloat16, "int8_row", "nvfp4")
  )
  def test_product_is_within_the_bound(self, format, lhs):
    x = jnp.asarray(normal(1, ROWS, K))
    x = jp.quantize(x, lhs) if isinstance(lhs, str) else x.astype(lhs)
    w = weight(format, COLUMNS, K)
    self.assert_is_product(jax.jit(jp.block_scaled_dot)(x, w), x, w)

  @parameterized.parameters(*FORMATS)
  def test_both_sides_and_lhs_may_have_offsets(self, format):
    lhs, rhs = weight(format, ROWS, K), weight(jp.UINT4_128, COLUMNS, K, seed=1)
    self.assert_is_product(jp.block_scaled_dot(lhs, rhs), lhs, rhs)
    w = jnp.asarray(normal(1, COLUMNS, K))
    self.assert_is_product(jp.block_scaled_dot(lhs, w), lhs, w)

  def test_epilogue_follows_the_sum(self):
    w = weight(jp.UINT4_128, COLUMNS, K)
    x, bias = normal(1, ROWS, K), normal(2, COLUMNS)
    residual = normal(3, ROWS, COLUMNS)
    found = jax.jit(
      lambda *args: jp.block_scaled_dot(
        args[0],
        args[1],
        global_scale=0.5,
        bias=args[2],
        activation="relu",
        residual=args[3],
        preferred_element_type=jnp.bfloat16,
      )
    )(x, w, bias, residual)
    exact = np.maximum(0.5 * x @ values_of(w)[0].T + bias, 0) + residual
    self.assertEqual(found.dtype, jnp.bfloat16)
    np.testing.assert_allclose(
      np.asarray(found).astype(np.float64), exact, rtol=2.0**-8, atol=1e-3
    )

  def test_any_dimensions_may_be_contracted(self):
    w = weight(jp.UINT4_32_MIN, 3, COLUMNS, 64)
    x = jnp.asarray(normal(1, 3, ROWS, 64))
    found = jp.block_scaled_dot(x, w)
    mapped = jax.vmap(jp.block_scaled_dot)(x, w)
    for i in range(3):
      self.assert_is_product(found[i], x[i], w[i])
      self.assert_is_product(mapped[i], x[i], w[i])
    found = jp.block_scaled_dot(
      x[0], w[0].T, dimension_numbers=(((1,), (0,)), ((), ()))
    )
    self.assert_is_product(found, x[0], w[0])
    found = jp.block_scaled_dot(
      x, w, dimension_numbers=(((0, 2), (0, 2)), ((), ()))
    )
    flat = values_of(w)[0].transpose(1, 0, 2).reshape(COLUMNS, -1)
    x = np.asarray(x).transpose(1, 0, 2).reshape(ROWS, -1)
    np.testing.assert_allclose(found, x @ flat.T, rtol=1e-4, atol=1e-3)

  def test_gradients_are_those_of_the_dequantized_array(self):
    w = weight(jp.UINT4_128, COLUMNS, K)
    x, bias = normal(1, ROWS, K), normal(2, COLUMNS)

    def loss(dot, x, bias):
      return jnp.sum(jnp.sin(dot(x, w, bias=bias, activation="silu")))

    def plain(x, w, bias, activation):
      del activation
      return jax.nn.silu(x @ w.dequantize().T + bias)

    found = jax.jit(jax.grad(lambda *a: loss(jp.block_scaled_dot, *a), (0, 1)))
    wanted = jax.grad(lambda *a: loss(plain, *a), (0, 1))(x, bias)
    for actual, expected in zip(found(x, bias), wanted, strict=True):
      np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)

  def test_straight_through_derivative(self):
    x, w = jnp.asarray(normal(1, ROWS, K)), jnp.asarray(normal(0, COLUMNS, K))

    def loss(w, x):
      w_q = jp.quantize(w, jp.UINT4_128, derivative="straight_through")
      return jnp.sum(jp.block_scaled_dot(x, w_q) ** 2)

    w_bar, x_bar = jax.jit(jax.grad(loss, (0, 1)))(w, x)
    exact = np.asarray(jp.quantize(w, jp.UINT4_128).dequantize())
    y = x @ exact.T
    np.testing.assert_allclose(w_bar, 2 * y.T @ x, rtol=1e-3, atol=0.1)
    np.testing.assert_allclose(x_bar, 2 * y @ exact, rtol=1e-3, atol=0.1)

  def test_offsets_have_no_derivative(self):
    x, w = jnp.asarray(normal(1, ROWS, K)), weight(jp.UINT4_32_MIN, 4, K)

    def loss(offset):
      array = jp.ScaledArray(w.values, w.scale, None, w.format, offset=offset)
      return jnp.sum(jp.block_scaled_dot(x, array))

    with self.assertRaisesRegex(NotImplementedError, "offsets of quantized"):
      jax.grad(loss)(w.offset)

  def test_nan_scale_is_nan(self):
    w = weight(jp.UINT4_128, 4, 256)
    w.scale = w.scale.at[1, 1].set(jnp.nan)
    found = np.asarray(jp.block_scaled_dot(jnp.ones((2, 256)), w))
    np.testing.assert_array_equal(
      np.isnan(found), np.arange(4)[None] == np.ones((2, 1))
    )

  @parameterized.parameters("cpu", "xla")
  def test_every_backend_has_it(self, implementation):
    x, w = normal(1, ROWS, K), weight(jp.UINT4_128, COLUMNS, K)
    found = jp.block_scaled_dot(x, w, implementation=implementation)
    self.assert_is_product(found, x, w)


if __name__ == "__main__":
  absltest.main()
