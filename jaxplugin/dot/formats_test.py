# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Matmuls of the formats of checkpoints, against NumPy in f64."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing import contract
from jaxplugin.testing.meshes import explicit
from jaxplugin.testing.oracles import recipes_oracle

ROWS, COLUMNS, K = 5, 130, 576  # neither is a multiple of 128
INT4_64 = contract.block_format("int4_64", ml_dtypes.int4, np.float32, 64)
COLUMNS_OF_K = (((1,), (0,)), ((), ()))  # lhs @ rhs


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def floats(x):
  if isinstance(x, jp.ScaledArray):
    return contract.exact(x)
  return np.asarray(x).astype(np.float64)


def operand(seed, format, *shape):
  """Returns a quantized array, or an unquantized one of a dtype."""
  x = normal(seed, *shape)
  if isinstance(format, jp.BlockFormat):
    return contract.quantized(x, format)
  return x.astype(format)


class FormatsTest(parameterized.TestCase):
  def assert_is_product(self, actual, lhs, rhs):
    """Checks actual = lhs @ rhs.T within the contract."""
    contract.assert_dot(actual, *contract.dot(floats(lhs), floats(rhs)))


class DotTest(FormatsTest):
  def test_product_is_within_the_bound(self):
    pairs = [
      (operand(0, lhs, ROWS, k), operand(1, rhs, COLUMNS, k))
      for lhs, rhs, k in (
        (jp.FP8_1X128, jp.FP8_128X128, K),
        (jp.FP8_1X128_E8M0, jp.FP8_128X128_E8M0, K),
        (jp.INT8_ROW, jp.INT4_128, K),
        (jp.FP8_128X128, jp.MXINT8, K),
        (jnp.float16, jp.FP8_128X128, K),
        (jp.INT8_32, jnp.float32, K),
        (jnp.float32, INT4_64, K),
        (jnp.float32, jp.INT4_128, 33),  # odd, so not packed
      )
    ]
    run = jax.jit(lambda pairs: [jp.block_scaled_dot(*pair) for pair in pairs])
    for found, (lhs, rhs) in zip(run(pairs), pairs, strict=True):
      with self.subTest(f"{lhs.dtype} {rhs.dtype}"):
        self.assert_is_product(found, lhs, rhs)

  def test_square_blocks_are_contracted_along_both_dimensions(self):
    w = operand(0, jp.FP8_128X128, COLUMNS, K)
    x, g = normal(1, ROWS, K), normal(2, ROWS, COLUMNS)

    @jax.jit
    def gradient(x, g, w):
      y, vjp = jax.vjp(lambda x: x @ w.T, x)
      return y, *vjp(g), g @ w

    y, x_bar, same = gradient(x, g, w)
    self.assert_is_product(y, x, w)
    self.assert_is_product(x_bar, g, floats(w).T)
    self.assert_is_product(same, g, floats(w).T)

  def test_blocks_along_the_first_dimension(self):
    x, w = normal(0, ROWS, 256), normal(1, 256, 6)
    for format in (jp.INT8_ROW, jp.INT4_128):
      w_q = contract.quantized(w, format, axis=0)
      y = jp.block_scaled_dot(x, w_q, dimension_numbers=COLUMNS_OF_K)
      self.assert_is_product(y, x, floats(w_q).T)

  def test_two_contracting_dimensions(self):
    x, w = normal(0, ROWS, 3, 200), normal(1, 6, 3, 200)
    w_q = contract.quantized(w, jp.INT4_128)
    y = jp.block_scaled_dot(
      x, w_q, dimension_numbers=(((1, 2), (1, 2)), ((), ()))
    )
    self.assert_is_product(y, x.reshape(ROWS, 600), floats(w_q).reshape(6, 600))

  def test_nan_scale_makes_its_square_nan(self):
    w = operand(0, jp.FP8_128X128, COLUMNS, 256)
    scale = np.array(w.scale)
    scale[1, 0] = np.nan
    w = jp.ScaledArray(w.values, scale, None, w.format)
    y = np.asarray(jp.block_scaled_dot(normal(1, ROWS, 256), w))
    np.testing.assert_array_equal(
      np.isnan(y), np.broadcast_to(np.arange(COLUMNS) >= 128, y.shape)
    )

  def test_integers_reach_their_most_negative_code(self):
    values = np.full((2, 32), -128, np.int8)
    x = jp.ScaledArray(values, np.ones((2, 1), np.float16), None, jp.INT8_32)
    np.testing.assert_array_equal(
      jp.block_scaled_dot(x, x), np.full((2, 2), 32 * 128.0**2)
    )

  def test_explain_names_the_format_and_how_it_is_read(self):
    x = jax.ShapeDtypeStruct((ROWS, K), jnp.bfloat16)
    w = jax.eval_shape(
      lambda w: jp.quantize(w, jp.FP8_128X128), jnp.ones((COLUMNS, K))
    )
    with jp.use_target(jp.named_target("b200")):
      text = jp.explain(jp.block_scaled_dot, x, w).details()
    self.assertIn("bfloat16 x fp8_128x128", text)
    self.assertIn("values of fp8_128x128 are decoded to bf16", text)


class RaggedDotTest(FormatsTest):
  def test_each_group_has_its_product(self):
    pairs = [
      (operand(0, lhs, 10, 200), operand(1, rhs, 3, COLUMNS, 200))
      for lhs, rhs in (
        (jp.FP8_1X128, jp.FP8_128X128),
        (jnp.float32, jp.INT4_128),
        (jnp.float32, jp.INT8_ROW),
      )
    ]
    sizes = np.array([3, 0, 5])
    run = jax.jit(lambda pairs: [jp.ragged_dot(*p, sizes) for p in pairs])
    for y, (x, w) in zip(map(np.asarray, run(pairs)), pairs, strict=True):
      with self.subTest(w.format.name):
        self.assert_is_product(y[:3], floats(x)[:3], floats(w)[0])
        self.assert_is_product(y[3:8], floats(x)[3:8], floats(w)[2])
        np.testing.assert_array_equal(y[8:], 0)

  def test_rows_are_contracted_in_groups_of_blocks(self):
    x = contract.quantized(normal(0, 256, 6), jp.INT8_32, axis=0)
    g = normal(1, 256, 7)
    numbers = jax.lax.RaggedDotDimensionNumbers(
      (((0,), (0,)), ((), ())), [0], []
    )
    y = np.asarray(jp.ragged_dot_general(x, g, np.array([64, 192]), numbers))
    self.assert_is_product(y[0], floats(x)[:64].T, g[:64].T)
    self.assert_is_product(y[1], floats(x)[64:].T, g[64:].T)


@functools.cache
def quantized_weights():
  """Returns an array in three formats, quantized by one program."""
  formats = jp.FP8_128X128, jp.INT8_ROW, jp.INT4_128
  run = jax.jit(lambda w: [jp.quantize(w, format) for format in formats])
  return dict(zip(formats, run(normal(1, 256, 512)), strict=True))


class ShardingTest(explicit.ExplicitTestCase, FormatsTest):
  @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
  def test_shards_that_cut_a_block_are_whole(self, kind):
    mesh = explicit.mesh(self, kind=kind)
    x, w = normal(0, 8, 512), normal(1, 256, 512)
    out = None if kind == AxisType.Auto else NamedSharding(mesh, P())

    @functools.partial(jax.jit, static_argnums=2)
    def run(x, w, formats):
      arrays = [jp.quantize(w, format) for format in formats]
      return [
        (jp.dequantize(w_q), jp.block_scaled_dot(x, w_q, out_sharding=out))
        for w_q in arrays
      ]

    # The 2 x 4 blocks of 128 do not fit on 4 x 2 or 1 x 8 devices.
    for spec, formats in (
      (P("b", "a"), (jp.FP8_128X128, jp.INT8_ROW)),
      (P(None, ("a", "b")), (jp.FP8_128X128, jp.INT4_128)),
    ):
      placed = jax.device_put(np.asarray(w), NamedSharding(mesh, spec))
      rows = jax.device_put(np.asarray(x), NamedSharding(mesh, P()))
      found = run(rows, placed, formats)
      for format, (values, y) in zip(formats, found, strict=True):
        w_q = quantized_weights()[format]
        np.testing.assert_array_equal(values, floats(w_q).astype(np.float32))
        self.assert_is_product(y, x, w_q)

  def test_weights_are_placed_in_whole_squares(self):
    w = operand(0, jp.FP8_128X128, 256, 512)
    placed = jp.shard(w, NamedSharding(self.mesh, P("a", "b")))
    self.assertEqual(placed.scale.sharding.spec, P("a", "b"))
    np.testing.assert_array_equal(
      jax.jit(jp.dequantize)(placed), jp.dequantize(w)
    )
    for spec in (P("b", None), P(None, ("a", "b"))):
      with self.assertRaisesRegex(TypeError, "whole blocks of 128"):
        jp.shard(w, NamedSharding(self.mesh, spec))


class TrainingTest(FormatsTest):
  def test_fp8_blocks_have_the_gradients_of_the_formulas(self):
    recipe = jp.training.FP8_BLOCK_RECIPE
    x, w, g = normal(0, 40, 300), normal(1, 300, 150), normal(2, 40, 150)

    @jax.jit
    def run(x, w, g):
      y, vjp = jax.vjp(functools.partial(_matmul, recipe), x, w)
      return y, *vjp(g)

    expected = recipes_oracle.products(recipe, x, w, g)
    for actual, wanted in zip(run(x, w, g), expected, strict=True):
      self.assert_is_product(actual, wanted.lhs, wanted.rhs)

  def test_one_line_quantizes_a_model_in_blocks(self):
    def loss(params, x):
      return jnp.sum(jnp.tanh(x @ params["w"]) ** 2)

    params, x = {"w": normal(0, 256, 130) / 16}, normal(1, 8, 256)
    y = np.tanh(x @ params["w"])
    exact = x.T @ (2 * y * (1 - y * y))
    for recipe in ("fp8_128x128", jp.training.FP8_BLOCK_RECIPE):
      quantized = jp.quantize_dots(loss, recipe)
      (site,) = jp.explain(quantized, params, x).sites
      self.assertTrue(site.is_taken, site.reason)
      found = jax.jit(jax.grad(quantized))(params, x)["w"]
      error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
      self.assertBetween(error, 1e-3, 0.1)

  def test_params_are_quantized_in_squares_and_rows(self):
    params, x = {"kernel": normal(0, 200, 130)}, normal(2, ROWS, 200)
    for format in ("fp8_128x128", "int8_row", "int4_128"):
      quantized, report = jp.quantize_params(params, format)
      self.assertIn(format, str(report))
      model = jp.accept_quantized(lambda params, x: x @ params["kernel"])
      w = quantized["kernel"].array
      self.assert_is_product(jax.jit(model)(quantized, x), x, w)


def _matmul(recipe, x, w):
  dot_general = jp.dot_general(recipe=recipe, weight="rhs")
  return dot_general(x, w, COLUMNS_OF_K)


class RecipeTest(parameterized.TestCase):
  def test_square_weights_set_weight_2d(self):
    recipe = jp.training.FP8_BLOCK_RECIPE
    self.assertTrue(recipe.weight_2d)
    self.assertEqual(recipe.weight_format.block_rows, 1)

  @parameterized.parameters(
    ({"grad_format": jp.FP8_128X128}, "grad_format .*got fp8_128x128"),
    (
      {"weight_format": jp.INT8_ROW, "weight_2d": True},
      "weight_2d .*got True for int8_row",
    ),
  )
  def test_bad_field_is_named(self, fields, message):
    formats = dict.fromkeys(
      ("activation_format", "weight_format", "grad_format"), jp.FP8_1X128
    )
    with self.assertRaisesRegex(ValueError, f"^Recipe: {message}"):
      jp.training.Recipe(**formats | fields)
