# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Public functions of arrays with offsets: the right value, or a refusal."""

import copy
import functools
import pickle

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp

X = np.random.default_rng(1).normal(size=(4, 256)).astype(np.float32)
NUMBERS = (((1,), (1,)), ((), ()))
SIZES = jnp.array([1, 0, 3])
OF_GROUPS = jax.lax.RaggedDotDimensionNumbers(
  (((1,), (2,)), ((), ())), (0,), (0,)
)
OF_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
WITH_MINIMA = jp.BlockFormat(
  name="int8_64_min",
  values_dtype=np.int8,
  scale_dtype=np.float32,
  block_size=64,
  offset_dtype=np.float32,
)


def weights(format="uint4_128"):
  w = np.random.default_rng(0).normal(size=(3, 16, 256)) + 0.2
  return jp.quantize(jnp.asarray(w, jnp.float32), format)


def plain(x):
  return np.asarray(x.dequantize() if hasattr(x, "dequantize") else x)


def through_flax(w):
  from flax import serialization

  jp.register_flax_serialization()
  return serialization.from_bytes(w, serialization.to_bytes(w))


def ragged(w):
  w = plain(w)
  return np.concatenate([X[:1] @ w[0].T, X[1:] @ w[2].T])


# Each row: the function under test, and NumPy's function of plain arrays.
ARRAYS = {
  "index": (lambda w: w[2], lambda w: w[2]),
  "slice": (lambda w: w[1:, ::2], lambda w: w[1:, ::2]),
  "indices": (lambda w: w[np.array([2, 0])], lambda w: w[[2, 0]]),
  "transpose": (lambda w: w.transpose(2, 0, 1), lambda w: w.transpose(2, 0, 1)),
  "unpack": (lambda w: w.unpack().pack(), lambda w: w),
  "bytes": (lambda w: w.to_bytes().to_floats(), lambda w: w),
  "rows": (lambda w: w.in_rows(), lambda w: w),
  "concatenate": (
    lambda w: jp.concatenate([w, w.unpack()]),
    lambda w: np.concatenate([w, w]),
  ),
  "concatenate blocks": (
    lambda w: jp.concatenate([w, w], 2),
    lambda w: np.concatenate([w, w], 2),
  ),
  "stack": (lambda w: jp.stack([w, w], 1), lambda w: np.stack([w, w], 1)),
  "scan": (
    lambda w: jax.lax.scan(lambda _, x: (None, x), None, w)[1],
    lambda w: w,
  ),
  "vmap": (lambda w: jax.vmap(jp.dequantize, 1, 1)(w), lambda w: w),
  "prepare": (
    lambda w: jp.prepare_weights(w, jp.named_target("b200")),
    lambda w: w,
  ),
  "unprepare": (
    lambda w: jp.unprepare_weights(jp.prepare_weights(w)),
    lambda w: w,
  ),
  "legacy": (jp.legacy_global_scales, lambda w: w),
  "pickle": (lambda w: pickle.loads(pickle.dumps(w)), lambda w: w),
  "deepcopy": (copy.deepcopy, lambda w: w),
  "flax": (through_flax, lambda w: w),
  "weight": (
    lambda w: jp.QuantizedWeight(w[0], (256, 16), (0,)),
    lambda w: w[0].T,
  ),
}
PRODUCTS = {
  "matmul": (lambda w: X @ w[0].T, lambda w: X @ w[0].T),
  "matmul from the left": (lambda w: w[0] @ X.T, lambda w: w[0] @ X.T),
  "linear": (lambda w: jp.linear(X, w[0]), lambda w: X @ w[0].T),
  "layer": (
    jax.jit(lambda w: jp.linear(X, w, layer=1)),
    lambda w: X @ w[1].T,
  ),
  "layer with an epilogue": (
    jax.jit(
      lambda w: jp.linear(
        X, w, layer=1, bias=np.ones((3, 16)), activation="relu"
      )
    ),
    lambda w: np.maximum(X @ w[1].T + 1, 0),
  ),
  "layer in a scan": (
    jax.jit(
      lambda w: jax.lax.map(lambda i: jp.linear(X, w, layer=i), jnp.arange(3))
    ),
    lambda w: np.einsum("mk,lnk->lmn", X, w),
  ),
  "layer of a quantized operand": (
    lambda w: jp.linear(jp.quantize(X, "int8_row"), w, layer=1),
    lambda w: plain(jp.quantize(X, "int8_row")) @ w[1].T,
  ),
  "ragged": (lambda w: jp.ragged_dot(X, w, SIZES), ragged),
  "ragged, general": (
    lambda w: jp.ragged_dot_general(X, w, SIZES, OF_GROUPS),
    ragged,
  ),
  "accepted": (
    lambda w: jax.jit(jp.accept_quantized(lambda w: X @ w.T))(w[0]),
    lambda w: X @ w[0].T,
  ),
  "accepted ragged": (
    jax.jit(
      jp.accept_quantized(
        lambda w: jax.lax.ragged_dot(X, jnp.swapaxes(w, 1, 2), SIZES)
      )
    ),
    ragged,
  ),
  "exported": (
    lambda w: jax.export.deserialize(
      jp.export(jax.jit(jp.linear))(X, w[0]).serialize()
    ).call(X, w[0]),
    lambda w: X @ w[0].T,
  ),
}
REFUSED = {
  "contraction": lambda w: jp.ragged_dot_general(
    w[0].T, jnp.ones((256, 2)), jnp.array([256]), OF_ROWS
  ),
  "dot_general": lambda w: jp.dot_general(w.format, w.format)(X, X, NUMBERS),
  "recipe": lambda w: jp.training.Recipe(
    activation_format="mxfp8", weight_format=w.format, grad_format="mxfp8"
  ),
  "quantize_dots": lambda w: jp.quantize_dots(jnp.dot, w.format),
  "quantize_operand": lambda w: jp.quantize_operand(X, w.format),
}


class FunctionsTest(parameterized.TestCase):
  @parameterized.product(
    name=(*ARRAYS, *PRODUCTS), format=("uint4_128", WITH_MINIMA)
  )
  def test_value_has_the_offsets(self, name, format):
    function, exact = (ARRAYS | PRODUCTS)[name]
    w = weights(format)
    np.testing.assert_allclose(
      plain(function(w)), exact(plain(w)), rtol=1e-4, atol=1e-4
    )

  @parameterized.parameters(*REFUSED)
  def test_refusal_names_the_format(self, name):
    with self.assertRaisesRegex(
      NotImplementedError, "no zero points or minima, got uint4_128. Pass"
    ):
      REFUSED[name](weights())

  def test_exported_function_takes_any_number_of_rows(self):
    w = weights()
    (rows,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 256), jnp.float32)

    @jax.jit
    def both(x, w):
      x_q = jp.quantize(x, w.format)
      return jp.ragged_dot(x, w, SIZES), jp.block_scaled_dot(x_q, w[0])

    ragged_result, dot = jp.export(both)(x, w).call(X, w)
    np.testing.assert_allclose(ragged_result, ragged(w), rtol=1e-4, atol=1e-4)
    exact = plain(jp.quantize(X, w.format)) @ plain(w)[0].T
    np.testing.assert_allclose(dot, exact, rtol=1e-4, atol=1e-4)

  def test_size_and_text_count_the_offsets(self):
    w = weights()
    leaves = jax.tree.leaves(w)
    self.assertEqual(w.nbytes, sum(leaf.nbytes for leaf in leaves))
    self.assertIn("offset=uint8[3, 16, 2]", repr(w))
    paths = [str(path[0]) for path, _ in jax.tree.leaves_with_path(w)]
    self.assertEqual(paths, [".values", ".scale", ".offset"])

  def test_a_layer_remembers_its_stack(self):
    found = []

    @jax.make_jaxpr
    def trace(w):
      found.append(w[1].without_offset().layer_of())
      return w.values

    trace(weights())
    ((stack, _),) = found
    self.assertEqual((stack.format, stack.shape), (jp.INT4_128, (3, 16, 256)))

  def test_a_stack_may_mix_derivatives(self):
    w = weights()
    other = jp.quantize(
      jnp.ones((16, 256)), w.format, derivative="straight_through"
    )
    both = jp.stack([w[0], other])
    np.testing.assert_array_equal(both[0].dequantize(), w[0].dequantize())
    np.testing.assert_array_equal(both[1].dequantize(), other.dequantize())

  def test_a_cast_leaf_is_refused_by_name(self):
    w = weights(WITH_MINIMA)[0]
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), w)
    with self.assertRaisesRegex(TypeError, "the scale of int8_64_min must be"):
      jp.linear(X, cast)

  def test_explain_says_why_there_are_two_matmuls(self):
    text = jp.explain(jp.linear, X, weights()[0]).details()
    self.assertIn("the second matmul of a block-scaled one", text)
    self.assertIn("float32 x int4_128", text)

  def test_xla_adds_offsets_if_it_is_named(self):
    for implementation, expected in ((None, True), ("xla", False)):
      dot = functools.partial(jp.linear, layer=1, implementation=implementation)
      jaxpr = jax.make_jaxpr(dot)(X, weights())
      self.assertEqual("add_block_offsets" in str(jaxpr), expected)


class RaggedTest(parameterized.TestCase):
  @parameterized.parameters("uint4_128", WITH_MINIMA)
  def test_epilogue_follows_the_sum(self, format):
    w, bias = weights(format), np.ones((3, 16), np.float32)
    found = jax.jit(
      lambda x, w: jp.ragged_dot(x, w, SIZES, bias=bias, activation="swiglu")
    )(np.concatenate([X, X]), w)
    gate, up = np.split(ragged(w) + 1, 2, -1)
    exact = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(found[:4], exact, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(found[4:], np.zeros((4, 8)))

  def test_gradients_are_those_of_the_dequantized_array(self):
    w = weights()
    grad = jax.jit(jax.grad(lambda x: jnp.sum(jp.ragged_dot(x, w, SIZES) ** 2)))
    e = plain(w)
    exact = np.concatenate(
      [2 * X[:1] @ e[0].T @ e[0], 2 * X[1:] @ e[2].T @ e[2]]
    )
    np.testing.assert_allclose(grad(X), exact, rtol=1e-3, atol=1e-2)

  def test_lhs_may_have_offsets_too(self):
    w, x = weights(), jp.quantize(X, "uint4_32_min")
    found = jp.ragged_dot(x, w, SIZES)
    e, x = plain(w), plain(x)
    exact = np.concatenate([x[:1] @ e[0].T, x[1:] @ e[2].T])
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4)

  def test_straight_through_derivative(self):
    def loss(w):
      w_q = jp.quantize(w, "uint4_128", derivative="straight_through")
      return jnp.sum(jp.ragged_dot(X, w_q, SIZES))

    found = jax.grad(loss)(jnp.ones((3, 16, 256)))
    exact = np.stack([X[:1].sum(0), np.zeros(256), X[1:].sum(0)])
    exact = np.broadcast_to(exact[:, None], found.shape)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
  absltest.main()
