# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Matmuls of arrays with zero points or minima, against NumPy in f64."""

import copy
import dataclasses
import functools
import pickle

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.dot import reference
from jaxplugin.testing import contract
from jaxplugin.testing.meshes import explicit

BOUND = 16 * 2.0**-24  # docs/concepts/numerics.md
ROWS, COLUMNS, K = 5, 130, 576  # neither is a multiple of 128
INT8_64 = contract.block_format(
  "int8_64_with_minima",
  np.int8,
  np.float32,
  64,
  offset_dtype=ml_dtypes.bfloat16,
)
UINT8_ROW = contract.block_format(
  "uint8_row", np.int8, np.float32, 0, offset_dtype=np.uint8, code_offset=128
)
FORMATS = (jp.UINT4_128, jp.UINT4_128_BF16, jp.UINT4_32_MIN, INT8_64, UINT8_ROW)


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def parts(w):
  """Returns f64 stored * scale, and f64 terms of the blocks, of an array."""
  k = w.shape[-1]
  stored = reference.oracle_dequantize(w.values, w.scale, w.format)
  return stored, reference.oracle_terms(w.scale, w.offset, w.format.along(k), k)


def values_of(x):
  """Returns the f64 values of an operand, and magnitudes for the bound."""
  if isinstance(x, jp.ScaledArray) and x.offset is not None:
    product, term = parts(x)
    return product + term, np.abs(product) + np.abs(term)
  if isinstance(x, jp.ScaledArray):
    x = contract.exact(x)
  x = np.asarray(x).astype(np.float64)
  return x, np.abs(x)


def array(format, values, scale, offset):
  """Returns an array of NumPy's, with two codes of 4 bits in a byte."""
  values = values.astype(format.values_dtype)
  if format.has_pairs:
    values = contract.pack(values, -1)
  values, scale, offset = jax.device_put(
    (
      values,
      scale.astype(format.scale_dtype),
      offset.astype(format.offset_dtype),
    )
  )
  return jp.ScaledArray(values, scale, None, format, offset=offset)


def weight(format, *shape, seed=0):
  """Returns an array of random codes, scales and offsets."""
  rng = np.random.default_rng(seed)
  bits = format.value_bits
  values = rng.integers(-(1 << bits - 1), 1 << bits - 1, shape)
  blocks = -(-shape[-1] // format.along(shape[-1]).block_size)
  sizes = (*shape[:-1], blocks)
  scale = rng.uniform(0.01, 0.1, sizes)
  offset = rng.normal(size=sizes)
  if np.dtype(format.offset_dtype).kind in "iu":
    offset = rng.integers(0, 1 << bits, sizes)
  return array(format, values, scale, offset)


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
    found = np.asarray(jax.jit(jp.dequantize)(w))
    exact = product + term
    largest = np.abs(product) + np.abs(term)
    bound = 2.0**-22 * largest + 1e-30
    np.testing.assert_array_less(np.abs(found - exact), bound)
    if format.scale_dtype != np.float32 and format is not jp.UINT4_32_MIN:
      np.testing.assert_array_equal(found, exact)

  @parameterized.parameters(*FORMATS)
  def test_product_is_within_the_bound(self, format):
    x, w = normal(1, ROWS, K), weight(format, COLUMNS, K)
    rows = [x, x.astype(jnp.bfloat16)]
    rows += [contract.quantized(x, name) for name in ("int8_row", "nvfp4")]

    @jax.jit
    def run(rows, w):
      return [
        (
          jp.block_scaled_dot(x, w),
          jp.block_scaled_dot(x, w, implementation="xla"),
        )
        for x in rows
      ]

    for x, found in zip(rows, run(rows, w), strict=True):
      for y in found:
        self.assert_is_product(y, x, w)

  @parameterized.parameters(*FORMATS)
  def test_both_sides_and_lhs_may_have_offsets(self, format):
    lhs, rhs = weight(format, ROWS, K), weight(jp.UINT4_128, COLUMNS, K, seed=1)
    sides = [rhs, normal(1, COLUMNS, K)]
    run = jax.jit(
      lambda lhs, sides: [jp.block_scaled_dot(lhs, w) for w in sides]
    )
    for w, found in zip(sides, run(lhs, sides), strict=True):
      self.assert_is_product(found, lhs, w)

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

  def test_offsets_have_no_derivative(self):
    x, w = jax.device_put(normal(1, ROWS, K)), weight(jp.UINT4_32_MIN, 4, K)

    def loss(offset):
      array = jp.ScaledArray(w.values, w.scale, None, w.format, offset=offset)
      return jnp.sum(jp.block_scaled_dot(x, array))

    with self.assertRaisesRegex(NotImplementedError, "offsets of quantized"):
      jax.grad(loss)(w.offset)

  def test_nan_scale_is_nan(self):
    w = weight(jp.UINT4_128, 4, 256)
    w.scale = np.array(w.scale)
    w.scale[1, 1] = np.nan
    found = jax.jit(jp.block_scaled_dot)(np.ones((2, 256), np.float32), w)
    np.testing.assert_array_equal(
      np.isnan(found), np.arange(4)[None] == np.ones((2, 1))
    )


X = np.random.default_rng(1).normal(size=(4, 256)).astype(np.float32)
NUMBERS = (((1,), (1,)), ((), ()))
SIZES = np.array([1, 0, 3])
OF_GROUPS = jax.lax.RaggedDotDimensionNumbers(
  (((1,), (2,)), ((), ())), (0,), (0,)
)
OF_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def weights(format=jp.UINT4_128):
  return weight(format, 3, 16, 256)


def plain(x):
  return values_of(x)[0]


def through_flax(w):
  from flax import serialization

  jp.register_flax_serialization()
  return serialization.from_bytes(w, serialization.to_bytes(w))


def ragged(w, x=X):
  w, x = plain(w), plain(x)
  return np.concatenate([x[:1] @ w[0].T, x[1:4] @ w[2].T])


def same(w):
  return w


def of_layer(layer):
  """Returns NumPy's product of X and a layer."""
  return lambda w: X @ w[layer].T


def linear(x=X, **options):
  return lambda w: jp.linear(x, w, **options)


def activated(x=X):
  return lambda w: np.maximum(x @ w[1].T + 1, 0)


def squares(dot):
  """Returns the gradient of the sum of squares by the rows."""
  return lambda w: jax.grad(lambda x: jnp.sum(dot(x, w) ** 2))(X)


def silu_gradient(w):
  """Returns NumPy's gradient of the sum of squares of silu(X @ w.T + 1)."""
  z = X @ w.T + 1
  s = 1 / (1 + np.exp(-z))
  return (2 * z * s * (s + z * s * (1 - s))) @ w


def ragged_gradient(w):
  """Returns NumPy's gradient of the sum of squares of `ragged`."""
  y = 2 * ragged(w)
  return np.concatenate([y[:1] @ w[0], y[1:] @ w[2]])


def through(dot, *shape):
  """Returns the gradient by weights that are quantized straight-through."""

  def gradient(w):
    quantize = functools.partial(
      jp.quantize, format=w.format, derivative="straight_through"
    )
    return jax.grad(lambda w: jnp.sum(dot(quantize(w))))(jnp.ones(shape))

  return gradient


def swiglu(w):
  gate, up = np.split(ragged(w) + 1, 2, -1)
  return np.pad(gate / (1 + np.exp(-gate)) * up, ((0, 4), (0, 0)))


EPILOGUE = {"layer": 1, "bias": np.ones((3, 16)), "activation": "relu"}
MANY = np.repeat(X, 17, 0)
TWICE, BATCH = np.tile(X, (2, 1)), np.stack([X, X + 1, 2 * X])
BATCHED = lambda w: np.einsum("lmk,lnk->lmn", BATCH, w)
INT8, MINIMA = (
  contract.quantized(X, jp.INT8_ROW),
  weight(jp.UINT4_32_MIN, 4, 256),
)
SWIZZLED = contract.operand(
  np.random.default_rng(2), jp.MXFP8, (2, 2, 256), storage="swizzled"
)
# Each row: the function under test, and NumPy's function of plain arrays.
# fmt: off
RESULTS = {
  "index": (lambda w: w[2], lambda w: w[2]),
  "slice": (lambda w: w[1:, ::2], lambda w: w[1:, ::2]),
  "indices": (lambda w: w[np.array([2, 0])], lambda w: w[[2, 0]]),
  "transpose": (lambda w: w.transpose(2, 0, 1), lambda w: w.transpose(2, 0, 1)),
  "unpack": (lambda w: w.unpack().pack(), same),
  "bytes": (lambda w: w.to_bytes().to_floats(), same),
  "rows": (lambda w: w.in_rows(), same),
  "concatenate": (lambda w: jp.concatenate([w, w.unpack()]),
                  lambda w: np.concatenate([w, w])),
  "concatenate blocks": (lambda w: jp.concatenate([w, w], 2),
                         lambda w: np.concatenate([w, w], 2)),
  "stack": (lambda w: jp.stack([w, w], 1), lambda w: np.stack([w, w], 1)),
  "scan": (lambda w: jax.lax.scan(lambda _, x: (None, x), None, w)[1], same),
  "vmap": (lambda w: jax.vmap(jp.dequantize, 1, 1)(w), same),
  "prepare": (lambda w: jp.prepare_weights(w, jp.named_target("b200")), same),
  "unprepare": (lambda w: jp.unprepare_weights(jp.prepare_weights(w)), same),
  "legacy": (jp.legacy_global_scales, same),
  "pickle": (lambda w: pickle.loads(pickle.dumps(w)), same),
  "deepcopy": (copy.deepcopy, same),
  "flax": (through_flax, same),
  "weight": (lambda w: jp.QuantizedWeight(w[0], (256, 16), (0,)),
             lambda w: w[0].T),
  "matmul": (lambda w: X @ w[0].T, of_layer(0)),
  "matmul from the left": (lambda w: w[0] @ X.T, lambda w: w[0] @ X.T),
  "contracted columns": (
    lambda w: jp.block_scaled_dot(
      X, w[0].T, dimension_numbers=(((1,), (0,)), ((), ()))),
    of_layer(0)),
  "batch": (lambda w: jp.block_scaled_dot(BATCH, w), BATCHED),
  "mapped batch": (lambda w: jax.vmap(jp.block_scaled_dot)(BATCH, w), BATCHED),
  "two contracted dimensions": (
    lambda w: jp.block_scaled_dot(
      BATCH, w, dimension_numbers=(((0, 2), (0, 2)), ((), ()))),
    lambda w: np.einsum("lmk,lnk->mn", BATCH, w)),
  "gradient": (
    squares(lambda x, w: jp.linear(x, w[0], np.ones(16), "silu")),
    lambda w: silu_gradient(w[0])),
  "straight-through gradient": (
    through(lambda w: jp.linear(X, w), 16, 256),
    lambda w: np.tile(X.sum(0), (16, 1))),
  "linear": (lambda w: jp.linear(X, w[0]), of_layer(0)),
  "layer": (linear(layer=1), of_layer(1)),
  "layer with an epilogue": (linear(**EPILOGUE), activated()),
  "layer and many rows": (linear(MANY, **EPILOGUE), activated(MANY)),
  "swizzled rows": (
    lambda w: [jp.linear(SWIZZLED.operand, w[0]),
               jax.vmap(jp.linear, (0, None))(SWIZZLED.operand, w[0])],
    lambda w: [SWIZZLED.exact @ w[0].T] * 2),
  "layer in a scan": (
    lambda w: jax.lax.map(lambda i: jp.linear(X, w, layer=i), jnp.arange(3)),
    lambda w: np.einsum("mk,lnk->lmn", X, w)),
  "layer of a quantized operand": (
    lambda w: jp.linear(INT8, w, layer=1), lambda w: plain(INT8) @ w[1].T),
  "ragged": (lambda w: jp.ragged_dot(X, w, SIZES), ragged),
  "ragged of the xla backend": (
    lambda w: jp.ragged_dot(X, w, SIZES, implementation="xla"), ragged),
  "ragged with an epilogue": (
    lambda w: jp.ragged_dot(
      TWICE, w, SIZES, bias=np.ones((3, 16)), activation="swiglu"),
    swiglu),
  "ragged of rows with minima": (
    lambda w: jp.ragged_dot(MINIMA, w, SIZES), lambda w: ragged(w, MINIMA)),
  "ragged gradient": (
    squares(lambda x, w: jp.ragged_dot(x, w, SIZES)),
    ragged_gradient),
  "ragged straight-through gradient": (
    through(lambda w: jp.ragged_dot(X, w, SIZES), 3, 16, 256),
    lambda w: np.stack([np.tile(x.sum(0), (16, 1))
                        for x in (X[:1], X[:0], X[1:])])),
  "mapped rows": (
    lambda w: jax.vmap(jp.block_scaled_dot, (1, None))(X[:, None], w[0])[0],
    of_layer(0)),
  "mapped rows of a layer": (
    lambda w: jax.vmap(lambda x: jp.linear(x, w, layer=2), 1)(X[:, None])[0],
    of_layer(2)),
  "ragged, general": (
    lambda w: jp.ragged_dot_general(X, w, SIZES, OF_GROUPS), ragged),
  "accepted": (
    lambda w: jp.accept_quantized(lambda w: X @ w.T)(w[0]), of_layer(0)),
  "accepted ragged": (
    jp.accept_quantized(
      lambda w: jax.lax.ragged_dot(X, jnp.swapaxes(w, 1, 2), SIZES)), ragged),
  "exported": (
    lambda w: jax.export.deserialize(
      jp.export(jax.jit(jp.linear))(X, w[0]).serialize()).call(X, w[0]),
    of_layer(0)),
}
# fmt: on
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


class PublicFunctionsTest(parameterized.TestCase):
  """The right value, or a refusal."""

  @parameterized.parameters(jp.UINT4_128, INT8_64)
  def test_values_have_the_offsets(self, format):
    w = weights(format)
    eager = {
      name: RESULTS[name][0](w) for name in ("pickle", "flax", "exported")
    }

    @jax.jit
    def run(w, eager):
      arrays = {n: f(w) for n, (f, _) in RESULTS.items() if n not in eager}
      return {
        name: x.dequantize() if hasattr(x, "dequantize") else x
        for name, x in (arrays | eager).items()
      }

    for name, found in run(w, eager).items():
      with self.subTest(name):
        exact = RESULTS[name][1](plain(w))
        error = 1e-5 * max(10, np.abs(exact).max())
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=error)

  @parameterized.parameters(*REFUSED)
  def test_refusal_names_the_format(self, name):
    with self.assertRaisesRegex(
      NotImplementedError, "no zero points or minima, got uint4_128. Pass"
    ):
      REFUSED[name](weights())

  @parameterized.parameters((jnp.int8, "int8_32"), (jnp.int4, "int4_32"))
  def test_refusal_of_an_unnamed_format_names_another(self, values, other):
    format = contract.block_format(
      "own",
      values,
      jnp.float16,
      20,
      offset_dtype=jnp.uint8,
      code_offset=128 if values == jnp.int8 else 8,
    )
    with self.assertRaisesRegex(NotImplementedError, f"own. Pass {other}, or"):
      jp.quantize_dots(jnp.dot, format)

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
    self.assertIsNone(stack.format.offset_dtype)
    self.assertEqual(
      (stack.format.name, stack.shape), ("uint4_128", (3, 16, 256))
    )

  def test_a_stack_may_mix_derivatives(self):
    @jax.jit
    def run(w):
      ones = jnp.ones((16, 256))
      arrays = w[0], jp.quantize(ones, w.format, derivative="straight_through")
      parts = jnp.stack([x.dequantize() for x in arrays])
      return jp.stack(arrays).dequantize(), parts

    np.testing.assert_array_equal(*run(weights()))

  def test_a_cast_leaf_is_refused_by_name(self):
    w = weight(INT8_64, 16, 256)
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), w)
    with self.assertRaisesRegex(TypeError, "the scale of int8_64_with_minima"):
      jp.linear(X, cast)

  def test_explain_says_why_there_are_two_matmuls(self):
    text = jp.explain(jp.linear, X, weight(jp.UINT4_128, 16, 256)).details()
    self.assertIn("the second matmul of a block-scaled one", text)
    self.assertIn("float32 x uint4_128", text)

  @parameterized.parameters(*FORMATS[:3])
  def test_errors_name_the_format_with_the_offset(self, format):
    w = weight(format, 16, 256)
    rows = jp.quantize(X, "mxfp8")
    named = functools.partial(jp.linear, implementation="cudnn")
    with jp.use_target(jp.named_target("b200", cudnn="9.13")):
      for function, message in (
        (lambda: named(rows, w), f"got mxfp8 x {format.name}\n"),
        (lambda: named(X, w), f"does not support float32 x {format.name} "),
        (
          lambda: jp.block_scaled_dot(X, w, block_size=64),
          f"for rhs of {format.name}, got 64",
        ),
      ):
        with self.assertRaises(Exception) as caught:
          function()
        self.assertIn(message, str(caught.exception))
        self.assertNotRegex(str(caught.exception), r"\bint4_")

  def test_xla_adds_offsets_if_it_is_named(self):
    for implementation, expected in ((None, True), ("xla", False)):
      dot = functools.partial(jp.linear, layer=1, implementation=implementation)
      jaxpr = jax.make_jaxpr(dot)(X, weights())
      self.assertEqual("kernel_or_operations" in str(jaxpr), expected)

  def test_one_cpu_kernel_computes_both_matmuls(self):
    if jp.detect_target("cpu").cpu_kernels is None:
      self.skipTest("the CPU kernels are not built")
    for dot, call in (
      (lambda x, w: jp.block_scaled_dot(x, w[0]), "block_scaled_dot"),
      (lambda x, w: jp.linear(x, w, layer=1), "ragged_dot"),
      (lambda x, w: jp.ragged_dot(x, w, SIZES), "ragged_dot"),
    ):
      text = jax.jit(dot).lower(X, weights()).as_text()
      self.assertEqual(text.count(f"custom_call @jaxplugin_{call}("), 1)
      self.assertNotIn("dot_general", text)

  def test_fastest_precision_is_within_its_bound(self):
    # Values of 0 and 1, stored as codes -8 and 7: the sum of the stored values
    # and that of the zero points are large, and cancel.
    k = 512
    codes = np.full((3, COLUMNS, k), -8)
    codes[..., ::128] = 7
    scale = np.full((3, COLUMNS, k // 128), 1 / 15)
    w = array(jp.UINT4_128, codes, scale, np.zeros_like(scale))
    exact = plain(w)
    x = normal(0, 65, k)
    x[:, ::32] *= 30
    fastest = functools.partial(jp.block_scaled_dot, precision="fastest")
    # docs/concepts/numerics.md, "Rows quantized to int8".
    steps = np.abs(x.reshape(65, -1, 32)).max(-1) / 127
    blocks = np.abs(exact).reshape(3, COLUMNS, -1, 32).sum(-1)
    rounded = (1 + 2.0**-16) * np.einsum("mb,lnb->lmn", steps / 2, blocks)
    whole = sum(np.abs(part) for part in parts(w))
    sums = 18 * 2.0**-24 * np.einsum("mk,lnk->lmn", np.abs(x), whole)
    expected = np.einsum("mk,lnk->lmn", x, exact)
    three = np.stack([x] * 3)
    for what, dot in {
      "dot": lambda x, w: jnp.stack([fastest(x, w[i]) for i in range(3)]),
      "lhs": lambda x, w: jnp.stack([fastest(w[i], x).T for i in range(3)]),
      "vmap": lambda x, w: jax.vmap(fastest)(three, w),
      "batch": lambda x, w: fastest(
        three, w, dimension_numbers=(((2,), (2,)), ((0,), (0,)))
      ),
      "layer": lambda x, w: jnp.stack(
        [jp.linear(x, w, layer=i, precision="fastest") for i in range(3)]
      ),
      "ragged": lambda x, w: jnp.stack(
        [
          jp.ragged_dot(
            x, w, jnp.zeros(3, jnp.int32).at[i].set(65), precision="fastest"
          )
          for i in range(3)
        ]
      ),
    }.items():
      with self.subTest(what):
        error = np.abs(np.asarray(jax.jit(dot)(x, w), np.float64) - expected)
        self.assertLessEqual((error / (rounded + sums)).max(), 1)

  @absltest.skipIf(
    jp.detect_target("cpu").cpu_kernels in (None, "baseline", "baseline_neon"),
    "the baseline quantizes no rows",
  )
  def test_fastest_precision_has_the_bits_of_converted_rows(self):
    rows = dataclasses.replace(jp.INT8_32, name="rows", scale_dtype=np.float32)
    w = weight(jp.UINT4_128, COLUMNS, K)
    rounds = jp.detect_target("cpu").cpu_kernels in ("avx512_bf16", "amx_bf16")
    many = normal(0, 65, K)
    quantized = jp.quantize(many, rows)
    for m in (2, 16, 17, 65):
      x = many[:m]
      fastest = lambda x, w: jp.block_scaled_dot(x, w, precision="fastest")
      actual = jax.jit(fastest)(x, w)
      note, given = "rows are quantized to int8", quantized[:m]
      if m == 2 and rounds:
        note, given = "rows are rounded to bf16", x.astype(jnp.bfloat16)
      expected = jp.block_scaled_dot(given, w)
      np.testing.assert_array_equal(actual, expected)
      notes = jp.explain(fastest, x, w)[0].decision.notes
      self.assertIn(note, " ".join(notes))


M, N, LONG_K = 8, 16, 1024
SHARDED_SIZES = np.array([3, 0, 4, 1])
KINDS = (AxisType.Auto, AxisType.Explicit)
SHARDED_FORMATS = (jp.UINT4_128, jp.UINT4_32_MIN)
NEAR = {"rtol": 1e-3, "atol": 1e-3}


def in_groups(x, weights):
  """Returns the products of rows in groups of `SHARDED_SIZES`."""
  first, third, last = np.split(x, [3, 7])
  return np.concatenate(
    [first @ weights[0].T, third @ weights[2].T, last @ weights[3].T]
  )


class ShardedTest(parameterized.TestCase):
  """Arrays with offsets on eight devices."""

  def put(self, mesh, x, spec):
    return jp.shard(jax.tree.map(np.asarray, x), NamedSharding(mesh, spec))

  def stacked(self):
    """Returns rows, a stack of weights, and what the weights mean."""
    w = weight(jp.UINT4_128, 4, N, LONG_K)
    return normal(0, M, LONG_K), w, plain(w)

  @parameterized.product(
    kind=KINDS,
    specs=(
      (P("a"), P("b"), P("a", "b")),
      (P(None, "b"), P(None, "b"), P()),
      (P("a"), P("b", "a"), P("a", "b")),
    ),
  )
  def test_dots_and_gradients(self, kind, specs):
    mesh = explicit.mesh(self, kind=kind)
    x = normal(0, M, LONG_K)
    weights = [weight(format, N, LONG_K) for format in SHARDED_FORMATS]
    x_spec, w_spec, spec = specs
    out = None if kind == AxisType.Auto else spec

    def loss(x, w):
      y = jp.block_scaled_dot(x, w, activation="relu", out_sharding=out)
      return jnp.sum(y**2), y

    @jax.jit
    def run(x, weights):
      return [jax.grad(loss, has_aux=True)(x, w) for w in weights]

    with jax.set_mesh(mesh):
      placed = [self.put(mesh, w, w_spec) for w in weights]
      found = run(self.put(mesh, x, x_spec), placed)
    for w, (x_bar, y) in zip(weights, found, strict=True):
      e = plain(w)
      exact = np.maximum(x @ e.T, 0)
      np.testing.assert_allclose(y, exact, rtol=1e-3, atol=1e-3)
      np.testing.assert_allclose(x_bar, 2 * exact @ e, rtol=1e-3, atol=1e-2)

  def test_quantize_has_the_bits_of_one_device(self):
    w = normal(0, N, LONG_K)

    @jax.jit
    def run(w):
      arrays = [jp.quantize(w, format) for format in SHARDED_FORMATS]
      return arrays, [jp.dequantize(array) for array in arrays]

    expected = run(w)
    for kind in KINDS:
      mesh = explicit.mesh(self, kind=kind)
      with self.subTest(kind), jax.set_mesh(mesh):
        found = run(self.put(mesh, w, P("a", "b")))
        jax.tree.map(np.testing.assert_array_equal, found, expected)

  @parameterized.product(
    kind=KINDS, specs=((P("a"), P("b")), (P(None, "b"), P(None, None, "b")))
  )
  def test_groups(self, kind, specs):
    mesh = explicit.mesh(self, kind=kind)
    x, w, exact = self.stacked()
    with jax.set_mesh(mesh):
      args = self.put(mesh, x, specs[0]), self.put(mesh, w, specs[1])
      found = jax.jit(lambda x, w: jp.ragged_dot(x, w, SHARDED_SIZES))(*args)
    np.testing.assert_allclose(found, in_groups(x, exact), **NEAR)

  @parameterized.parameters(*KINDS)
  def test_layers(self, kind):
    mesh = explicit.mesh(self, kind=kind)
    x, w, exact = self.stacked()
    with jax.set_mesh(mesh):
      args = self.put(mesh, x, P("a")), self.put(mesh, w, P(None, "b"))
      found = jax.jit(lambda x, w: jp.linear(x, w, layer=2))(*args)
    np.testing.assert_allclose(found, x @ exact[2].T, **NEAR)

  def test_shard_map_over_rows_of_weights(self):
    mesh = explicit.mesh(self, kind=AxisType.Auto)
    x, w, exact = self.stacked()
    spec = P(None, "b")

    @jax.jit
    def run(x, w):
      local = lambda x, w: (
        jp.ragged_dot(x, w, SHARDED_SIZES),
        jp.block_scaled_dot(x, w[1]),
      )
      return jax.shard_map(
        local, mesh=mesh, in_specs=(P(), spec), out_specs=(spec, spec)
      )(x, w)

    groups, one = run(x, self.put(mesh, w, spec))
    np.testing.assert_allclose(groups, in_groups(x, exact), **NEAR)
    np.testing.assert_allclose(one, x @ exact[1].T, **NEAR)
