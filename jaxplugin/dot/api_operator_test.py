# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Methods of `ScaledArray` that plain arrays have: `@`, `.T`, `.size`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin import quantization
from jaxplugin.core import formats
from jaxplugin.testing import contract

K = 64


def make(format, shape, axis=-1, *, packed=False, seed=0):
  """A `ScaledArray` of small integers, and the f64 numbers that it means."""
  storage = "packed_scaled_array" if packed else "scaled_array"
  rng = np.random.default_rng(seed)
  operand = contract.operand(rng, format, shape, axis, storage=storage)
  return operand.operand, operand.exact


def integers(shape, dtype=np.float32, seed=1):
  return np.random.default_rng(seed).integers(-8, 9, shape).astype(dtype)


class MatmulTest(parameterized.TestCase):
  @parameterized.product(
    format=(jp.MXFP8, jp.NVFP4),
    shapes=(
      ((3, K), (2, 4, 5, K)),
      ((3, K), (5, K)),
      ((2, 3, K), (5, K)),
      ((K,), (5, K)),
      ((3, K), (K,)),
      ((2, 3, K), (K,)),
      ((2, 3, K), (2, 5, K)),
      ((3, K), (2, 5, K)),
      ((K,), (2, 5, K)),
      ((0, K), (5, K)),
    ),
  )
  @pytest.mark.sample(2)
  def test_matmul_is_numpys_matmul_of_the_dequantized_arrays(
    self, format, shapes
  ):
    packed = format.is_fp4
    lhs, lhs_exact = make(format, shapes[0], packed=packed)
    rhs, rhs_exact = make(format, shapes[1], packed=packed, seed=2)
    if rhs.ndim > 1:
      order = (*range(rhs.ndim - 2), rhs.ndim - 1, rhs.ndim - 2)
      rhs, rhs_exact = rhs.transpose(order), rhs_exact.transpose(order)
    expected = np.matmul(lhs_exact, rhs_exact)
    contract.assert_exact(lhs @ rhs, expected, contract.F32)
    # With one plain side, of JAX and of NumPy.
    for dtype in (np.float32, jnp.bfloat16):
      left = integers(lhs.shape, dtype)
      expected = np.matmul(left.astype(np.float64), rhs_exact)
      contract.assert_exact(left @ rhs, expected, contract.F32)
      contract.assert_exact(jnp.asarray(left) @ rhs, expected, contract.F32)
    right = integers(rhs.shape)
    expected = np.matmul(lhs_exact, right.astype(np.float64))
    contract.assert_exact(lhs @ jnp.asarray(right), expected, contract.F32)

  @parameterized.parameters(
    ((3, K), (5, K), TypeError, r"\(3, 64\) and \(5, 64\); .* x @ w.T"),
    ((3, 40), (K, 5), TypeError, "right side was padded .* left side too"),
    ((3, 64), (64, 32), TypeError, "right side must be .* dimension 0.* 1;"),
    ((2, 3, K), (4, K, 5), NotImplementedError, r"\(2, 3, 64\) and \(4, 64, 5"),
    ((), (5, K), TypeError, "rank 1 or more"),
  )
  def test_shapes_that_do_not_match_are_refused(self, lhs, rhs, error, message):
    rhs, _ = make(jp.MXFP8, rhs, axis=-1 if rhs[-1] % 32 == 0 else -2)
    with self.assertRaisesRegex(error, f"ScaledArray @: .*{message}"):
      jnp.ones(lhs) @ rhs

  def test_left_side_must_be_blocked_along_its_last_dimension(self):
    lhs, _ = make(jp.MXFP8, (64, 32), axis=0)
    with self.assertRaisesRegex(TypeError, "left side .* dimension 1,.* 0;"):
      lhs @ np.ones((32, 4), np.float32)

  def test_other_objects_are_left_to_python(self):
    w, _ = make(jp.MXFP8, (5, K))
    for wrong in (lambda: w @ "x", lambda: [1.0] @ w):
      with self.assertRaisesRegex(TypeError, "unsupported operand"):
        wrong()


class TransposeTest(parameterized.TestCase):
  @parameterized.product(
    format=(jp.MXFP8, jp.NVFP4),
    axes=((2, 0, 1), (0, 2, 1), (-1, -2, -3)),
    axis=(0, 1, 2),
    packed=(False, True),
  )
  @pytest.mark.full
  def test_numbers_are_those_of_the_transposed_array(
    self, format, axes, axis, packed
  ):
    packed = packed and format.is_fp4
    shape = [3, 5, 7]
    shape[axis] = 32
    x, exact = make(format, tuple(shape), axis, packed=packed)
    expected = exact.transpose(axes)
    for y in (x.transpose(axes), x.transpose(*axes)):
      self.assertEqual(y.shape, expected.shape)
      self.assertEqual(y.axis, [d % 3 for d in axes].index(axis))
      self.assertEqual(y.is_packed, packed)
      contract.assert_exact(y.dequantize(), expected, contract.F32)
    contract.assert_exact(x.T.dequantize(), exact.T, contract.F32)
    contract.assert_exact(x.transpose().dequantize(), exact.T, contract.F32)

  def test_stacked_global_scales_and_surrogates_move_along(self):
    x = np.random.default_rng(0).normal(size=(3, 5, 32)).astype(np.float32)
    x *= np.array([1, 16, 256], np.float32)[:, None, None]
    weights = integers((32, 5, 3))

    @jax.jit
    def run(x):
      make = lambda x: jp.quantize(
        x, jp.NVFP4, batch_dims=1, derivative="straight_through"
      )
      loss = lambda x: (weights * make(x).T.dequantize()).sum()
      y = make(x).T
      return make(x), y, y.dequantize(), jax.grad(loss)(x)

    made, y, floats, gradient = run(x)
    self.assertEqual(y.global_scale.shape, (1, 1, 3))
    np.testing.assert_array_equal(floats, contract.dequantized(made).T)
    np.testing.assert_array_equal(gradient, weights.T)

  @parameterized.parameters(jp.MXFP8, jp.NVFP4)
  @pytest.mark.sample(1)
  def test_array_of_bytes_is_transposed_and_multiplied_alike(self, format):
    w, exact = make(format, (5, K))
    w, x = w.to_bytes(), integers((3, K))
    contract.assert_exact(w.T.dequantize(), exact.T, contract.F32)
    contract.assert_exact(x @ w.T, x @ exact.T, contract.F32)

  def test_layout_of_a_kernel_is_refused_with_the_remedy(self):
    w, exact = make(jp.MXFP8, (5, K))
    swizzled = jp.ScaledArray(
      w.values,
      jp.swizzle_scale(w.scale),
      None,
      jp.MXFP8,
      scale_layout="swizzled_128x4",
    )
    with self.assertRaisesRegex(NotImplementedError, "unprepare_weights"):
      _ = swizzled.T
    contract.assert_exact(
      jp.unprepare_weights(swizzled).T.dequantize(), exact.T, contract.F32
    )

  @parameterized.parameters(((0, 0),), ((0,),), ((0, 2),), ((0, 1, 2),))
  def test_axes_are_a_permutation(self, axes):
    w, _ = make(jp.MXFP8, (5, K))
    with self.assertRaisesRegex(ValueError, "each of 2 dimensions once"):
      w.transpose(axes)


class ArrayMethodsTest(parameterized.TestCase):
  @parameterized.parameters(*formats.FORMATS)
  def test_size_is_that_of_the_numbers(self, format):
    for packed in {False, format.is_fp4}:
      x, exact = make(format, (3, 5, 32), packed=packed)
      self.assertEqual(x.size, exact.size)

  def test_dequantize_is_the_function(self):
    x, exact = make(jp.NVFP4, (3, K))
    contract.assert_exact(x.dequantize(), exact, contract.F32)
    contract.assert_exact(x.dequantize(jnp.bfloat16), exact, contract.BF16)

  def test_sharding_is_that_of_the_values(self):
    x, _ = make(jp.MXFP8, (4, K))
    mesh = jax.make_mesh((1,), ("a",))
    sharding = jax.NamedSharding(mesh, jax.P("a"))
    self.assertEqual(jax.device_put(x, sharding).sharding, sharding)

  def test_block_until_ready_returns_the_array(self):
    x, _ = make(jp.NVFP4, (4, K))
    self.assertIs(x.block_until_ready(), x)

  @parameterized.parameters(np.asarray, np.array, jnp.asarray, jnp.array)
  def test_conversion_to_a_plain_array_says_how(self, convert):
    x, _ = make(jp.MXFP4, (4, K))
    with self.assertRaisesRegex(
      TypeError, r"mxfp4: values.*array\.dequantize\(\).*array\.values"
    ):
      convert(x)


def ones(*shape, dtype=jnp.float32):
  return np.ones(shape, dtype)


STRUCT = jax.ShapeDtypeStruct((2, K), jnp.float32)
SCALED = functools.partial(make, jp.MXFP8, (5, K))
E4M3 = jnp.float8_e4m3fn
NT = (((1,), (1,)), ((), ()))

# Messages, and what raises a TypeError with them.
WRONG_ARGUMENTS = {
  "quantize: x must be an array, got nvfp4; pass the array before": (
    lambda: jp.quantize(jp.NVFP4, ones(2, 32))),
  "quantize_both: x must be an array, got 'nvfp4'; pass the array before": (
    lambda: jp.quantize_both("nvfp4", ones(2, 32))),
  "quantize: x must be an array, got None": (
    lambda: jp.quantize(None, jp.MXFP8)),
  r"quantize: key must be one jax.random key, got 0. Pass jax.random.key\(": (
    lambda: jp.quantize(ones(2, 32), jp.MXFP8, key=0)),
  r"quantize: key must be one jax.random key, got key.*\[4\]..*by jax.vmap": (
    lambda: jp.quantize(
      ones(4, 32), jp.MXFP8, key=jax.random.split(jax.random.key(0), 4)
    )
  ),
  r"quantize: key must be one jax.random key, got float32\[2\].": (
    lambda: jp.quantize(ones(2, 32), jp.MXFP8, key=ones(2))),
  r"quantize: x must be an array, got ShapeDtypeStruct.*jax.eval_shape": (
    lambda: jp.quantize(STRUCT, "mxfp8")),
  "block_scaled_dot: lhs must be an array, got ShapeDtype.*jax.eval_shape": (
    lambda: jp.block_scaled_dot(STRUCT, SCALED()[0])),
  "block_scaled_dot: rhs must be a ScaledArray of arrays.*jax.eval_shape": (
    lambda: jp.block_scaled_dot(ones(2, K), jax.eval_shape(SCALED)[0])),
  "dequantize: x must be a ScaledArray of arrays.*jax.eval_shape": (
    lambda: jax.eval_shape(SCALED)[0].dequantize()),
  "dot_general: lhs must be an array, got ShapeDtypeStruct": (
    lambda: jp.dot_general("mxfp8", "mxfp8")(STRUCT, ones(2, K), NT)),
  "rhs_scale uint8 is not a block format.*; view it as float8_e8m0fnu "
  "for MX formats or as float8_e4m3fn for NVFP4": (
    lambda: jp.block_scaled_dot(
      *(ones(2, 32), ones(2, 32, dtype=E4M3)),
      *(None, ones(2, 1, dtype=jnp.uint8)),
    )
  ),
}  # fmt: skip


class WrongArgumentsTest(absltest.TestCase):
  """Messages of ours, where JAX's own would come from its inside."""

  def test_message_names_what_was_given_and_what_helps(self):
    for message, call in WRONG_ARGUMENTS.items():
      with self.subTest(message), self.assertRaisesRegex(TypeError, message):
        call()

  def test_keys_of_both_kinds_are_taken(self):
    x = np.ones((2, 32), np.float32)
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
      jp.quantize(x, jp.MXFP8, key=key)
      jax.jit(lambda k: jp.quantize(x, jp.MXFP8, key=k))(key)


class PadTest(parameterized.TestCase):
  @parameterized.product(
    format=(jp.MXFP8, jp.NVFP4), axis=(0, 1), k=(1, 40, 64)
  )
  @pytest.mark.sample(1)
  def test_zeros_are_added_up_to_a_block(self, format, axis, k):
    rng = np.random.default_rng(k)
    shape = (k, 3) if axis == 0 else (3, k)
    x = rng.normal(size=shape).astype(np.float32)
    size = -(-k // format.block_size) * format.block_size
    padded = np.zeros((size, 3) if axis == 0 else (3, size), np.float32)
    padded[: shape[0], : shape[1]] = x
    actual = quantization.quantize(x, format, axis=axis, pad=True)
    expected = quantization.quantize(padded, format, axis=axis)
    self.assertEqual(actual.shape, padded.shape)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)

  @pytest.mark.full
  def test_derivative_passes_the_padding(self):
    x = np.ones((3, 40), np.float32)
    w = integers((3, 64))
    quantize = lambda x: jp.quantize(
      x, jp.MXFP8, pad=True, derivative="straight_through"
    )
    gradient = jax.grad(lambda x: (w * quantize(x).dequantize()).sum())(x)
    np.testing.assert_array_equal(gradient, w[:, :40])

  def test_without_it_the_error_names_it(self):
    with self.assertRaisesRegex(TypeError, r"got 40.*Pad x \(pad=True does\)"):
      jp.quantize(np.ones((3, 40), np.float32), jp.MXFP8)
