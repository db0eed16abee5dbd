# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`accept_quantized`: a model's own code multiplies by quantized weights."""

import functools
import itertools
import pathlib
import pickle
import re
import tempfile
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl.testing import parameterized
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.rewriting import acceleration_test as constructs
from jaxplugin.testing.meshes.explicit import need_devices
from jaxplugin.testing.oracles import hlo_traffic

FORMATS = ("mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4")
# Relative error of a sum of products in f32, from the contract.
EPSILON = 16 * 2.0**-24
F32 = lax.DotAlgorithmPreset.F32_F32_F32
NUM_DEVICES = 4


def normal(*shape, dtype=np.float32):
  rng = np.random.default_rng(sum(shape))
  return jnp.asarray(rng.normal(size=shape), dtype)


def exact(tree):
  """A tree with f64 arrays, weights dequantized."""
  is_weight = lambda x: isinstance(x, (jp.ScaledArray, jp.QuantizedWeight))
  return jax.tree.map(
    lambda x: np.asarray(
      x.dequantize(jnp.float32) if is_weight(x) else x, np.float64
    ),
    tree,
    is_leaf=is_weight,
  )


def quantized(w, format, axis):
  """One weight, contracted along an axis or several."""
  (w_q,), _ = jp.quantize_params([w], format, where=lambda p: axis)
  return w_q


def accepted(fn, **options):
  """`accept_quantized`, jitted; a warning is an error."""
  function = jax.jit(jp.accept_quantized(fn, **options))

  def call(*args):
    with warnings.catch_warnings():
      warnings.simplefilter("error", UserWarning)
      return function(*args)

  call.lower = function.lower
  return call


def doubled_in_a_carry(w, x):
  return lax.scan(lambda w, _: (2 * w, x @ w), w, length=2)[1]


def compiled(function, *args):
  return function.lower(*args).compile().as_text()


def count_calls(hlo):
  return hlo.count('custom_call_target="jaxplugin')


class AcceptedTest(parameterized.TestCase):
  def assert_within(self, actual, function, *args):
    """Whether a result is within the contract of NumPy's, in f64."""
    expected = function(*exact(args))
    bound = EPSILON * function(*map(np.abs, exact(args)))
    np.testing.assert_array_less(
      np.abs(np.asarray(actual, np.float64) - expected), bound + 1e-30
    )


class FormsTest(AcceptedTest):
  """Products as people write them."""

  @parameterized.product(
    format=FORMATS,
    case=(
      ("bk,kn->bn", (5, 64), (64, 96), 0),
      ("bk,nk->bn", (5, 64), (96, 64), 1),
      ("nk,bk->nb", (96, 64), (5, 64), None),
      ("btd,dhs->bths", (2, 3, 64), (64, 4, 24), 0),
      ("bths,hsd->btd", (2, 3, 4, 16), (4, 16, 96), (0, 1)),
      ("bsth,dhs->bdt", (2, 16, 3, 4), (96, 4, 16), (1, 2)),
      ("ebk,ekn->ebn", (3, 5, 64), (3, 64, 96), 1),
      ("ebk,enk->bne", (3, 5, 64), (3, 96, 64), 2),
      ("bk,lkn->lbn", (5, 64), (3, 64, 96), 1),
      ("k,kn->n", (64,), (64, 96), 0),
    ),
  )
  @pytest.mark.sample(5)
  def test_einsum_is_one_product_with_the_bytes(self, format, case):
    equation, shape, other, axis = case
    einsum = functools.partial(jnp.einsum, equation)
    if axis is None:
      args = (quantized(normal(*shape), format, 1), normal(*other))
    else:
      args = (normal(*shape), quantized(normal(*other), format, axis))
    function = accepted(einsum)
    self.assert_within(
      function(*args), functools.partial(np.einsum, equation), *args
    )
    if format != "mxfp6_e2m3":  # which is XLA's
      hlo = compiled(function, *args)
      self.assertEqual(count_calls(hlo), 1)
      self.assertNotIn("jaxplugin_dequantize", hlo)

  def test_layouts_and_conversions_are_seen_through(self):
    w = quantized(normal(64, 96), "nvfp4", 0)

    def function(x, w):
      w = w.astype(jnp.bfloat16).T.reshape(4, 24, 64).transpose(2, 0, 1)
      w = lax.stop_gradient(w.reshape(8, 8, 96))
      y = lax.dot_general(
        x.reshape(5, 8, 8), w.astype(jnp.float32), (((1, 2), (0, 1)), ((), ()))
      )
      return y @ jnp.ones((96, 1))

    x = normal(5, 64)
    call = accepted(function)
    hlo = compiled(call, x, w)
    self.assertEqual(count_calls(hlo), 1)
    # Of 96 sums, each rounded as one.
    expected = (exact(x) @ exact(w)).sum(1, keepdims=True)
    bound = np.abs(exact(x)) @ np.abs(exact(w)).sum(1, keepdims=True)
    self.assertLess(
      (np.abs(np.asarray(call(x, w)) - expected) / bound).max(), 2 * EPSILON
    )

  def test_scaled_array_is_blocked_along_any_dimension(self):
    x = normal(5, 64)
    w = jp.quantize(normal(64, 96), "mxfp8", axis=0)
    stack = jp.quantize(normal(3, 64, 96), "nvfp4", axis=1)
    products = lambda x, w: jnp.einsum("bk,lkn->lbn", x, w)
    function = accepted(lambda x, w, stack: (x @ w, products(x, stack), w))
    self.assertNotIn("jaxplugin_dequantize", compiled(function, x, w, stack))
    y, z, same = function(x, w, stack)
    np.testing.assert_array_equal(y, jp.linear(x, w.transpose()))
    for i in range(3):
      np.testing.assert_array_equal(z[i], jp.linear(x, stack[i].transpose()))
    self.assertEqual((same.shape, same.axis), (w.shape, 0))

  @parameterized.parameters(jnp.bfloat16, jnp.float16)
  @pytest.mark.sample(1)
  def test_result_has_the_type_that_code_gives_it(self, dtype):
    w = quantized(normal(64, 96, dtype=dtype), "mxfp8", 0)
    x = normal(5, 64, dtype=dtype)
    types = []

    def function(x, w):
      types.append((w.shape, w.dtype))
      return x @ w

    y = accepted(function)(x, w)
    self.assertEqual(types, [((64, 96), dtype)])
    self.assertEqual(y.dtype, dtype)
    np.testing.assert_array_equal(
      y, jp.linear(x, w.array, preferred_element_type=dtype)
    )

  def test_dtype_of_a_scaled_array_is_that_beside_it(self):
    w = jp.quantize(normal(96, 64), "mxfp8")
    half, single = jnp.bfloat16, np.dtype("float32")
    seen = lambda tree, x: jnp.zeros((), tree["w"].dtype)
    for beside, dtype, expected in (
      ([normal(3, dtype=half)], None, half),
      ([normal(3, dtype=half), normal(3)], None, single),
      ([], None, single),
      ([normal(3)], half, half),
    ):
      call = jax.jit(jp.accept_quantized(seen, dtype=dtype))
      tree = {"w": w, "beside": beside}
      self.assertEqual(call(tree, normal(3, dtype=np.float16)).dtype, expected)


class BothSidesTest(AcceptedTest):
  @parameterized.parameters("mxfp8", "nvfp4")
  @pytest.mark.sample(1)
  def test_activations_are_quantized_on_the_fly(self, format):
    x, w = normal(5, 64), quantized(normal(64, 96), format, 0)
    call = accepted(jnp.matmul, activations=format)
    y = call(x, w)
    x_q = jp.quantize(x, format)
    np.testing.assert_array_equal(y, jax.jit(jp.linear)(x_q, w.array))
    self.assert_within(y, np.matmul, x_q, w)
    names = compiled(call, x, w)
    self.assertIn("jaxplugin_quantize", names)
    self.assertNotIn("jaxplugin_dequantize", names)

  def test_derivative_is_that_of_the_product_at_the_quantized_numbers(self):
    x, w = normal(5, 64), quantized(normal(64, 96), "mxfp8", 0)
    call = jp.accept_quantized(jnp.matmul, activations="mxfp8")
    actual = jax.jit(jax.grad(lambda x: (call(x, w) ** 2).sum()))(x)
    y = exact(jp.quantize(x, "mxfp8")) @ exact(w)
    np.testing.assert_allclose(actual, 2 * y @ exact(w).T, rtol=1e-4, atol=1e-2)

  def test_sizes_that_are_no_blocks_are_left_with_a_warning(self):
    x, w = normal(5, 48), quantized(normal(48, 96), "nvfp4", 0)
    call = jax.jit(jp.accept_quantized(jnp.matmul, activations="mxfp8"))
    with self.assertWarnsRegex(
      UserWarning, "48 .* not a multiple of the block size of mxfp8"
    ):
      y = call(x, w)
    np.testing.assert_allclose(y, exact(x) @ exact(w), rtol=1e-4, atol=1e-4)


class TransformationsTest(AcceptedTest):
  def test_scan_reads_layers_where_they_lie(self):
    stack = quantized(normal(3, 64, 64), "nvfp4", 1)
    x, bias = normal(5, 64), normal(3, 64)

    def function(x, stack, bias):
      def step(x, layer):
        w, b = layer
        return jnp.tanh(x @ w + b), None

      return lax.scan(step, x, (stack, bias), reverse=True)[0]

    expected = np.asarray(x, np.float64)
    for w, b in zip(exact(stack)[::-1], exact(bias)[::-1], strict=True):
      expected = np.tanh(expected @ w + b)
    for name, weights in (
      ("as it is", stack),
      ("prepared", jp.prepare_weights(stack, jp.named_target("cpu"))),
    ):
      with self.subTest(name):
        call = accepted(function)
        np.testing.assert_allclose(
          call(x, weights, bias), expected, rtol=1e-4, atol=1e-4
        )
        hlo = compiled(call, x, weights, bias)
        self.assertEqual(count_calls(hlo), 1)
        self.assertIn("jaxplugin_ragged_dot", hlo)
        self.assertNotIn("f32[64,64]", hlo)

  @pytest.mark.full
  def test_calls_take_the_bytes_with_them(self):
    w = quantized(normal(64, 64), "mxfp8", 0)
    x = normal(5, 64)

    def layers(x, w):
      return jnp.tanh(jnp.tanh(x @ w) @ w)

    def in_jits_of_a_transposed_weight(x, w):
      return jax.jit(lambda w, x: jnp.tanh(x @ w.T))(
        w.T, jax.jit(lambda x: jnp.tanh(x @ w))(x)
      )

    def in_vmap(x, w):
      f = jax.vmap(lambda x, w: jnp.tanh(w.T @ x), in_axes=(0, None))
      return f(f(x, w), w)

    functions = {
      name: (construct(layers), factor)
      for name, (construct, factor, _) in constructs.OF_ANY_ARRAYS.items()
      if name in ("while_body", "cond", "scan", "checkpoint", "custom_jvp")
    } | {
      "jits_of_a_transposed_weight": (in_jits_of_a_transposed_weight, 1),
      "vmap": (in_vmap, 1),
    }
    expected = exact(x)
    for _ in range(2):
      expected = np.tanh(expected @ exact(w))
    for name, (function, factor) in functions.items():
      with self.subTest(name):
        call = accepted(function)
        np.testing.assert_allclose(
          call(x, w), factor * expected, rtol=1e-3, atol=factor * 1e-4
        )
        hlo = compiled(call, x, w)
        self.assertIn("jaxplugin_block_scaled_dot", hlo)
        self.assertNotIn("jaxplugin_dequantize", hlo)
        self.assertNotIn("f32[64,64]", hlo)

  def test_weight_in_a_carry_that_no_trip_changes_is_followed(self):
    w, x = quantized(normal(64, 64), "mxfp8", 0), normal(5, 64)

    def function(x, w):
      trip = lambda carry, _: ((carry[0], jnp.tanh(carry[1] @ carry[0])), None)
      return lax.scan(trip, (w, x), length=2)[0][1]

    call = accepted(function)
    expected = np.tanh(np.tanh(exact(x) @ exact(w)) @ exact(w))
    np.testing.assert_allclose(call(x, w), expected, rtol=1e-3, atol=1e-4)
    self.assertNotIn(" dot(", compiled(call, x, w))

  def test_checkpoint_that_the_function_differentiates_is_followed(self):
    w, x = quantized(normal(64, 64), "mxfp8", 0), normal(5, 64)
    step = lambda x, w: jnp.sin(x @ w).sum()
    call = jp.accept_quantized(jax.grad(jax.checkpoint(step)))
    with self.assertWarnsRegex(UserWarning, "differentiate outside"):
      jaxpr = str(jax.make_jaxpr(call)(x, w))
    # Forward and recomputed; the backward matmul contracts the other dimension.
    self.assertEqual(jaxpr.count("block_scaled_dot["), 2)
    self.assertEqual(jaxpr.count(" dot_general["), 1)
    expected = jax.grad(step)(x, jnp.asarray(exact(w), jnp.float32))
    np.testing.assert_allclose(
      jax.jit(call)(x, w), expected, rtol=1e-3, atol=1e-3
    )

  def test_mapped_weights_are_products_of_each(self):
    stack = quantized(normal(3, 64, 96), "nvfp4", 1)
    x = normal(3, 5, 64)
    call = jax.jit(jax.vmap(jp.accept_quantized(jnp.matmul)))
    self.assert_within(call(x, stack), np.matmul, x, stack)
    hlo = compiled(call, x, stack)
    self.assertEqual(count_calls(hlo), 1)

  def test_experts_are_ragged_dots(self):
    weights = quantized(normal(3, 64, 96), "mxfp8", 1)
    x, sizes = normal(7, 64), jnp.array([2, 0, 5], jnp.int32)
    call = accepted(lax.ragged_dot)
    y = call(x, weights, sizes)
    w = exact(weights)
    expected = np.concatenate([exact(x[:2]) @ w[0], exact(x[2:]) @ w[2]])
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    self.assertIn("jaxplugin_ragged_dot", compiled(call, x, weights, sizes))


def in_turn(layers, x):
  for w in layers:
    x = x @ w
  return x


EXPERTS = np.array([0, 2, 1, 1, 0])
# Each row: the function, the weight's shape and contracted dimension, and how
# many matmuls use the weight. A function has sums and products only, so that
# the same function of magnitudes bounds its rounding errors.
PARTS = {
  "layer": (lambda w, x: x @ w[1], (3, 64, 64), 1, 1),
  "layer of a small index": (lambda w, x: x @ w[small(1)], (3, 64, 64), 1, 1),
  "all layers": (in_turn, (3, 64, 64), 1, 3),
  "unstacked": (lambda w, x: in_turn(jnp.unstack(w), x), (3, 64, 64), 1, 3),
  "second stack": (lambda w, x: x @ w[:, 1][0], (2, 3, 64, 32), 2, 1),
  "layers of a layer": (
    lambda w, x: jnp.einsum("bk,ekn->ebn", x, w[1]),
    (2, 3, 64, 32),
    2,
    1,
  ),
  "some layers": (lambda w, x: in_turn(w[1:], x), (3, 64, 64), 1, 2),
  "loop": (
    lambda w, x: lax.fori_loop(0, 3, lambda i, x: x @ w[i], x),
    (3, 64, 64),
    1,
    1,
  ),
  "jnp.take": (lambda w, x: x @ jnp.take(w, -1, axis=0), (3, 64, 64), 1, 1),
  "out of range": (lambda w, x: x @ jnp.take(w, 3, axis=0), (3, 64, 64), 1, 1),
  "experts of rows": (
    lambda w, x: jnp.einsum("bk,bkn->bn", x, w[EXPERTS]),
    (3, 64, 96),
    1,
    1,
  ),
  "experts under vmap": (
    lambda w, x: jax.vmap(lambda x, i: x @ w[i])(x, jnp.asarray(EXPERTS)),
    (3, 64, 96),
    1,
    1,
  ),
  "columns": (
    lambda w, x: [x @ part for part in jnp.split(w, [32, 80], axis=1)],
    (64, 96),
    0,
    3,
  ),
  "each second column": (lambda w, x: x @ w[:, 1::2], (64, 96), 0, 1),
  "columns at a number": (
    lambda w, x: x @ lax.dynamic_slice_in_dim(w, small(100), 32, axis=1),
    (64, 200),
    0,
    1,
  ),
  "tied embeddings": (
    lambda w, x: (w[jnp.asarray(EXPERTS)] + x) @ w.T,
    (96, 64),
    1,
    1,
  ),
  "positions": (lambda w, x: (w[:5] @ w.T, x), (96, 64), 1, 1),
  "embeddings of small tokens": (
    lambda w, x: x + jnp.take(w, small([1, 100, 3, 127, -1]), axis=0),
    (200, 64),
    1,
    0,
  ),
  "embeddings out of range": (
    lambda w, x: 2 * jnp.take(w, 95 + jnp.asarray(EXPERTS), axis=0),
    (96, 64),
    1,
    0,
  ),
}


def small(index):
  """Integers that cannot hold the size of every dimension."""
  return jnp.asarray(index, jnp.int8)


class PartsTest(AcceptedTest):
  """Code takes a part of a weight, and only this part is read."""

  @parameterized.parameters(
    *zip(PARTS, itertools.cycle(("mxfp8", "nvfp4", "int4_32")), strict=False)
  )
  def test_result_is_that_of_the_dequantized_part(self, name, format):
    function, shape, axis, num_matmuls = PARTS[name]
    w, x = quantized(normal(*shape), format, axis), normal(5, 64)
    call = accepted(function)
    with jax.enable_x64(True):
      expected = function(*map(jnp.asarray, exact((w, x))))
      largest = function(*(jnp.abs(a) for a in exact((w, x))))
    leaves = map(jax.tree.leaves, (call(w, x), expected, largest))
    for actual, sums, magnitude in zip(*leaves, strict=True):
      self.assertEqual(actual.dtype, np.float32)
      np.testing.assert_array_equal(np.isnan(actual), np.isnan(sums))
      # Each matmul of a chain has the contract's error.
      bound = max(num_matmuls, 1) * EPSILON * magnitude
      is_wrong = np.abs(np.asarray(actual, np.float64) - sums) > bound
      self.assertFalse(np.any(is_wrong))
    hlo = compiled(call, w, x)
    matmuls = re.findall(r'"jaxplugin_(?:block_scaled|ragged)_dot', hlo)
    self.assertLen(matmuls, num_matmuls)
    for dims in (shape, (*shape[:-2], shape[-1], shape[-2])):
      self.assertNotIn(f"f32[{','.join(map(str, dims))}]", hlo)

  def test_prepared_layers_and_their_rows_are_taken(self):
    w, x = quantized(normal(3, 64, 96), "nvfp4", 1), normal(5, 64)
    prepared = jp.prepare_weights(w, jp.named_target("cpu"))
    call = accepted(lambda w, x: x @ w[2][:, 16:48])
    np.testing.assert_array_equal(call(prepared, x), call(w, x))

  def test_ranges_of_the_blocked_dimension_are_refused(self):
    w, x = quantized(normal(64, 96), "mxfp8", 0), normal(5, 32)
    call = jax.jit(jp.accept_quantized(lambda w, x: x @ w[:32]))
    with self.assertWarnsRegex(
      UserWarning, "whole of argument 0.*slice.*blocked along.*Split the param"
    ):
      y = call(w, x)
    self.assert_within(y, lambda w, x: x @ w[:32], w, x)

  def test_part_that_a_matmul_contracts_otherwise_is_named(self):
    w, x = quantized(normal(3, 64, 64), "mxfp8", 1), normal(5, 64)
    call = jax.jit(jp.accept_quantized(lambda w, x: x @ w[1].T))
    with self.assertWarnsRegex(UserWarning, "a part of argument 0.*dot_gener"):
      y = call(w, x)
    self.assert_within(y, lambda w, x: x @ w[1].T, w, x)


# Code that places a weight. Each row: a function of `put`, the weight and x,
# and the weight's shape and contracted dimension.
PLACES = {
  "columns": (lambda put, w, x: x @ put(w, P(None, "b")), (64, 96), 0),
  "transposed": (
    lambda put, w, x: x @ put(w.astype(jnp.bfloat16).T, P("b")).T,
    (64, 96),
    0,
  ),
  "everything": (lambda put, w, x: x @ put(w, P()), (64, 96), 0),
  "contracted rows": (
    lambda put, w, x: jnp.dot(
      put(x, P(None, "b")),
      put(w, P("b")),
      out_sharding=P() if put is jax.sharding.reshard else None,
    ),
    (64, 96),
    0,
  ),
  "layer": (lambda put, w, x: x @ put(w[1], P(None, "b")), (2, 64, 96), 1),
  "scanned layers": (
    lambda put, w, x: lax.scan(lambda x, w: (x @ put(w, P()), None), x, w)[0],
    (2, 64, 64),
    1,
  ),
  "scanned experts": (
    lambda put, w, x: lax.scan(
      lambda x, w: (jnp.einsum("ebk,ekn->ebn", x, put(w, P("a"))), None),
      put(jnp.stack([x, x]), P("a")),
      w,
    )[0],
    (2, 2, 64, 64),
    2,
  ),
  "heads": (
    lambda put, w, x: jnp.einsum("bk,khd->bhd", x, put(w, P(None, "a"))),
    (64, 4, 16),
    0,
  ),
}


def gathered(w, axis):
  return lax.all_gather(w, "b", axis=axis, tiled=True)


# Functions of devices' parts. Each row: a function of x and a weight, specs of
# both and of the result, and the weight's shape and contracted dimension.
SHARDS = {
  "columns": (jnp.matmul, P(), P(None, "b"), P(None, "b"), (64, 96), 0),
  "contracted rows": (
    lambda x, w: lax.psum(x @ w, "b"),
    *(P(None, "b"), P("b"), P(), (64, 96), 0),
  ),
  "a whole weight": (jnp.matmul, P("a"), P(), P("a"), (64, 96), 0),
  "heads": (
    lambda x, w: jnp.einsum("bk,khd->bhd", x, w),
    *(P(), P(None, "b"), P(None, "b"), (64, 4, 16), 0),
  ),
  "layers": (
    lambda x, w: x @ w[1],
    *(P(), P(None, None, "b"), P(None, "b"), (2, 64, 96), 1),
  ),
  "experts": (
    lambda x, w: jnp.einsum("bk,ekn->ebn", x, w),
    *(P(), P("b"), P("b"), (2, 64, 48), 1),
  ),
  "gathered columns": (
    lambda x, w: x @ gathered(w, 1),
    *(P("a"), P(None, "b"), P("a"), (64, 96), 0),
  ),
  "gathered blocks": (
    lambda x, w: x @ gathered(w, 0),
    *(P("a"), P("b"), P("a"), (64, 96), 0),
  ),
  "gathered experts": (
    lambda x, w: jnp.einsum("bk,ekn->ebn", x, gathered(w, 0)),
    *(P("a"), P("b"), P(None, "a"), (4, 64, 48), 1),
  ),
}


class PlacesTest(AcceptedTest):
  """Code places a weight on a mesh, and its bytes move."""

  @parameterized.parameters(
    *zip(
      (*SHARDS, *SHARDS),
      itertools.cycle(("mxfp8", "nvfp4", "int4_32", "uint4_32_min")),
      itertools.cycle((None, "mxfp8", None)),
      strict=False,
    )
  )
  @pytest.mark.sample(9)
  def test_devices_multiply_by_their_parts(self, name, format, activations):
    need_devices(self, NUM_DEVICES)
    function, of_x, of_w, of_y, shape, axis = SHARDS[name]
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    w, x = quantized(normal(*shape), format, axis), normal(8, 64)
    mapped = jax.shard_map(
      function,
      mesh=mesh,
      in_specs=(of_x, of_w),
      out_specs=of_y,
      # JAX takes what is gathered for different on each device.
      check_vma="gathered" not in name,
    )
    call = accepted(mapped, activations=activations)
    plain = (
      x if activations is None else jp.quantize(x, activations).dequantize(),
      w.dequantize(jnp.float32),
    )
    error = np.abs(call(x, w) - jax.jit(mapped)(*plain))
    magnitude = jax.jit(mapped)(*map(jnp.abs, plain))
    # Both sums are in f32, so each has this error.
    np.testing.assert_array_less(error, 2 * EPSILON * magnitude)
    hlo = compiled(call, x, w)
    self.assertEqual(count_calls(hlo), 1 if activations is None else 2)
    self.assertNotIn("jaxplugin_dequantize", hlo)
    found = hlo_traffic.collectives(hlo)
    moved = {dtype: n for kind, dtype, n in found if kind == "all-gather"}
    # Some scales are f16, and global scales are f32.
    self.assertContainsSubset(moved, {"u8", "f16", "f32"})
    self.assertLessEqual(moved.get("f32", 0), 4)
    self.assertEqual("u8" in moved, "gathered" in name)

  def test_scales_of_devices_are_not_taken_for_equal(self):
    need_devices(self, NUM_DEVICES)
    mesh = jax.make_mesh((2,), ("b",), axis_types=(AxisType.Auto,))

    def function(x, w):
      # Each device computes a global scale for its part.
      w_q = jp.quantize(w.T, "nvfp4").T
      product = lambda x, w: x @ gathered(w, 1)
      return jp.accept_quantized(product)(x, w_q), product(x, w_q.dequantize())

    mapped = jax.shard_map(
      function,
      mesh=mesh,
      in_specs=(P(), P(None, "b")),
      out_specs=P(),
      check_vma=False,
    )
    w = normal(64, 96) * np.linspace(1, 100, 96)
    with self.assertWarnsRegex(UserWarning, "all_gather.*its own global scale"):
      actual, expected = jax.jit(mapped)(normal(5, 64), w)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-2)

  @parameterized.product(
    name=tuple(PLACES),
    kind=(AxisType.Auto, AxisType.Explicit),
    activations=(None, "nvfp4"),
  )
  @pytest.mark.sample(6)
  def test_its_bytes_move_and_are_multiplied(self, name, kind, activations):
    need_devices(self, NUM_DEVICES)
    function, shape, axis = PLACES[name]
    w, x = quantized(normal(*shape), "mxfp8", axis), normal(8, 64)
    mesh = jax.make_mesh(
      (2, 2),
      ("a", "b"),
      axis_types=(kind,) * 2,
      devices=jax.devices()[:NUM_DEVICES],
    )
    is_auto = kind == AxisType.Auto
    put = lax.with_sharding_constraint if is_auto else jax.sharding.reshard
    alone = accepted(
      functools.partial(function, lambda w, _: w), activations=activations
    )
    call = accepted(functools.partial(function, put), activations=activations)
    blocked = [None] * axis + ["a", "b"]
    with jax.set_mesh(mesh):
      args = jp.shard(w, P(*blocked)), jax.device_put(x, P())
      actual, hlo = call(*args), compiled(call, *args)
    expected = alone(w, x)
    np.testing.assert_allclose(
      actual, expected, rtol=0, atol=1e-6 * np.abs(expected).max()
    )
    self.assertEqual(hlo.count('"jaxplugin_block_scaled_dot'), 1)
    moved = re.findall(r"= (\w+)\[\S* (?:all-gather|all-to-all)\(", hlo)
    self.assertEqual(set(moved), {"u8"})

  def test_scales_of_devices_around_a_shard_map_differ(self):
    need_devices(self, NUM_DEVICES)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    gather = functools.partial(lax.all_gather, axis=1, tiled=True)

    def inside(x, w):
      return jax.shard_map(
        lambda x, w: x @ gather(gather(w, "b"), "a"),
        in_specs=(P(), P(None, "b")),
        out_specs=P(),
        axis_names={"b"},
        check_vma=False,
      )(x, w)

    def function(x, w):
      # Each device along "a" computes a global scale for its part.
      w_q = jp.quantize(w.T, "nvfp4").T
      return jp.accept_quantized(inside)(x, w_q), inside(x, w_q.dequantize())

    mapped = jax.shard_map(
      function,
      in_specs=(P(), P(None, "a")),
      out_specs=P(),
      axis_names={"a"},
      check_vma=False,
    )
    w = normal(64, 128) * np.linspace(1, 100, 128)
    with (
      jax.set_mesh(mesh),
      self.assertWarnsRegex(UserWarning, "all_gather.*its own global scale"),
    ):
      actual, expected = jax.jit(mapped)(normal(5, 64), w)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-2)

  def test_a_place_that_cuts_blocks_dequantizes(self):
    need_devices(self, NUM_DEVICES)
    w, x = quantized(normal(96, 64), "mxfp8", 0), normal(5, 96)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    function = lambda w, x: x @ lax.with_sharding_constraint(w, P("a"))
    call = jax.jit(jp.accept_quantized(function))
    with (
      jax.set_mesh(mesh),
      self.assertWarnsRegex(
        UserWarning, "sharding_constraint.*whole blocks of 32.*jaxplugin.shard"
      ),
    ):
      y = call(w, x)
    self.assert_within(y, lambda w, x: x @ w, w, x)


class DerivativesTest(AcceptedTest):
  """Derivatives by adapters next to frozen weights."""

  def adapted(self, format):
    stack = quantized(normal(2, 64, 64), format, 1)
    adapters = {"a": normal(2, 64, 4) / 8, "b": normal(2, 4, 64) / 2}

    def loss(adapters, x, stack):
      def layer(x, weights):
        w, adapter = weights
        y = x @ w / 8 + (x @ adapter["a"]) @ adapter["b"] / 8
        return jnp.tanh(y), None

      return (lax.scan(layer, x, (stack, adapters))[0] ** 2).sum()

    return loss, adapters, normal(5, 64), stack

  @parameterized.parameters("mxfp8", "nvfp4")
  @pytest.mark.full
  def test_they_are_those_of_dequantized_weights(self, format):
    loss, *args = self.adapted(format)
    actual = jax.jit(jax.grad(jp.accept_quantized(loss), argnums=(0, 1)))(*args)
    plain = args[2].dequantize()
    expected = jax.grad(loss, argnums=(0, 1))(*args[:2], plain)
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
      self.assertGreater(np.abs(b).max(), 0.01)
      np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)

  def test_nothing_dequantized_is_kept_for_them(self):
    loss, adapters, x, stack = self.adapted("mxfp8")

    def forward(adapters, x, stack):
      call = lambda adapters: jp.accept_quantized(loss)(adapters, x, stack)
      _, backward = jax.vjp(call, adapters)
      return jax.tree.leaves(backward)

    kept = jax.eval_shape(forward, adapters, x, stack)
    self.assertNotEmpty(kept)
    shapes = {(x.shape, x.dtype.name) for x in kept}
    for shape in ((2, 64, 64), (64, 64)):
      for dtype in ("float32", "bfloat16"):
        self.assertNotIn((shape, dtype), shapes)
    self.assertIn(((2, 64, 64), "float8_e4m3fn"), shapes)

  def test_one_of_a_quantized_weight_is_an_error(self):
    x, w = normal(5, 64), quantized(normal(64, 96), "mxfp8", 0)
    call = jp.accept_quantized(lambda w, x: (x @ w).sum())
    with self.assertRaisesRegex(
      NotImplementedError, "accept_quantized: quantized weights have no deriv"
    ):
      jax.jit(jax.grad(call, allow_int=True))(w, x)


class TrapsTest(AcceptedTest):
  """Warnings for slow uses, and errors for unsupported ones."""

  @parameterized.named_parameters(
    ("gather", lambda w, x: w[jnp.array([1, 2])], "gather|dynamic_slice"),
    ("mask", lambda w, x: x @ (w * (w > 0)), "greater"),
    ("integers", lambda w, x: x.astype(jnp.int8) @ w.astype(jnp.int8), "conv"),
    ("norm", lambda w, x: (x @ w) / jnp.abs(w).sum(), "abs.*"),
    ("tied", lambda w, x: (x @ w) @ w.T, "dot_general.*than the blocked one"),
    (
      "algorithm",
      lambda w, x: jnp.dot(x, w, precision=F32),
      "dot_general.*F32",
    ),
    ("carry", doubled_in_a_carry, "scan.*changes in each iteration"),
  )
  @pytest.mark.sample(4)
  def test_a_weight_that_is_dequantized_is_named(self, function, message):
    x, w = normal(5, 64), quantized(normal(64, 64), "mxfp8", 0)
    call = jax.jit(jp.accept_quantized(function))
    with self.assertWarnsRegex(
      UserWarning, f"(?s)the whole of argument 0 is dequantized for {message}"
    ):
      y = call(w, x)
    expected = jax.jit(function)(w.dequantize(), x)
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3)

  def test_called_outside_of_jit_is_said(self):
    x, w = normal(5, 64), quantized(normal(64, 96), "mxfp8", 0)
    with self.assertWarnsRegex(UserWarning, "called outside of jit"):
      y = jp.accept_quantized(jnp.matmul)(x, w)
    self.assert_within(y, np.matmul, x, w)

  def test_weights_that_are_not_seen_are_said(self):
    x, w = normal(5, 64), quantized(normal(64, 96), "mxfp8", 0)
    with (
      self.assertWarnsRegex(UserWarning, "contain no quantized weight"),
      self.assertRaisesRegex(TypeError, "jaxplugin.accept_quantized"),
    ):
      jax.jit(jp.accept_quantized(lambda x: x @ w))(x)

  def test_bound_arguments_are_seen(self):
    x, w = normal(5, 64), quantized(normal(64, 96), "mxfp8", 0)
    partial = functools.partial(lambda w, x: x @ w, w)
    expected = jp.linear(x, w.array)
    np.testing.assert_array_equal(accepted(partial)(x), expected)
    named = functools.partial(lambda x, *, w: x @ w, w=w)
    np.testing.assert_array_equal(accepted(named)(x), expected)

  def test_weights_that_are_returned_stay_quantized(self):
    tree = {"w": quantized(normal(64, 96), "nvfp4", 0), "b": normal(96)}
    step = lambda tree, x: (dict(tree, b=tree["b"] + 1), x @ tree["w"])
    after, _ = accepted(step)(tree, normal(5, 64))
    self.assertEqual(jax.tree.structure(after), jax.tree.structure(tree))
    for a, b in zip(*map(jax.tree.leaves, (after, tree)), strict=True):
      np.testing.assert_array_equal(a, b if a.shape != (96,) else b + 1)

  def test_arguments_are_checked(self):
    for options, error, message in (
      ({"activations": "fp3"}, ValueError, "accept_quantized.*fp3"),
      ({"dtype": np.float64}, TypeError, "dtype must be float32.*float64"),
      ({"implementation": "gpu"}, ValueError, "accept_quantized.*gpu"),
    ):
      with self.assertRaisesRegex(error, message):
        jp.accept_quantized(jnp.matmul, **options)
    with self.assertRaisesRegex(TypeError, "fn must be a function"):
      jp.accept_quantized(normal(3))

  def test_errors_from_inside_name_the_function_that_was_called(self):
    sizes = jnp.array([5], jnp.int32)
    w = quantized(normal(64, 96), "mxfp8", 0)
    experts = quantized(normal(1, 64, 96), "mxfp8", 1)
    for function, weight in (
      (jnp.matmul, w),
      (lambda x, w: jax.lax.ragged_dot(x, w, sizes), experts),
    ):
      call = jp.accept_quantized(function, implementation="triton")
      with (
        jp.use_target(jp.named_target("cpu")),
        self.assertRaisesRegex(
          NotImplementedError, "^accept_quantized: implementation='triton'"
        ),
      ):
        jax.jit(call).lower(normal(5, 64), weight)

  def test_functions_of_scaled_arrays_say_what_to_give(self):
    w = quantized(normal(64, 96), "mxfp8", 0)
    with self.assertRaisesRegex(TypeError, r"linear: w_q .* pass its array"):
      jp.linear(normal(5, 64), w)

  def test_slices_of_other_dimensions_are_refused(self):
    w = quantized(normal(64, 96), "mxfp8", 0)
    half = jax.tree.map(lambda x: x[:48], w)
    with self.assertRaisesRegex(TypeError, r"must be \(96, 64\).*leading"):
      jax.jit(jp.accept_quantized(jnp.matmul))(normal(5, 64), half)


# Models of linen, nnx and equinox; shardings, checkpoints, exports.


def dequantized(tree):
  is_weight = lambda x: isinstance(x, (jp.ScaledArray, jp.QuantizedWeight))
  return jax.tree.map(
    lambda x: x.dequantize() if is_weight(x) else x, tree, is_leaf=is_weight
  )


def assert_same_bits(actual, expected):
  both = [jax.tree.leaves(x) for x in (actual, expected)]
  for a, b in zip(*both, strict=True):
    np.testing.assert_array_equal(
      np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)
    )


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    y = nn.LayerNorm()(x)
    y = nn.MultiHeadDotProductAttention(num_heads=4, name="attention")(y, y)
    y = nn.gelu(nn.Dense(128, name="up")(x + y))
    return x + nn.Dense(64, name="down", use_bias=False)(y), None


class Decoder(nn.Module):
  """Tied embeddings, layers in a scan that are computed again backward."""

  @nn.compact
  def __call__(self, tokens):
    embed = nn.Embed(32, 64)
    scanned = nn.scan(
      nn.remat(Block),
      variable_axes={"params": 0},
      split_rngs={"params": True},
      length=2,
      in_axes=nn.broadcast,
    )
    x, _ = scanned(name="middle")(embed(tokens), None)
    return embed.attend(x)


def decoder():
  tokens = jnp.arange(6).reshape(2, 3)
  types = jax.eval_shape(Decoder().init, jax.random.key(0), tokens)
  params = jax.tree.map(lambda x: normal(*x.shape) / 8, types)
  return params, tokens


class FrameworksTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("error", ".*quantize.*", UserWarning)

  def assert_close(self, actual, expected):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * scale)

  @pytest.mark.full
  def test_decoder_of_linen(self):
    params, tokens = decoder()
    params_q, report = jp.quantize_params(params, "nvfp4")
    self.assertLen(report.quantized, 6)
    call = jax.jit(jp.accept_quantized(Decoder().apply))
    self.assert_close(
      call(params_q, tokens), Decoder().apply(dequantized(params_q), tokens)
    )
    hlo = call.lower(params_q, tokens).compile().as_text()
    self.assertEqual(hlo.count('custom_call_target="jaxplugin_ragged_dot'), 6)
    self.assertNotIn("jaxplugin_dequantize", hlo)
    for shape in ("64,128", "128,64", "64,64"):
      self.assertNotIn(f"f32[{shape}]", hlo)
      self.assertNotIn(f"f32[2,{shape}]", hlo)

  def test_model_of_nnx_is_an_argument_and_its_state_changes(self):
    class Model(nnx.Module):
      def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(
          num_heads=4, in_features=64, decode=False, rngs=rngs
        )
        self.out = nnx.Linear(64, 96, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

      def __call__(self, x):
        self.calls[...] += 1
        return self.out(x + self.attention(x))

    model, x = Model(nnx.Rngs(0)), normal(2, 3, 64)
    model_q, report = jp.quantize_params(model, "mxfp8")
    self.assertLen(report.quantized, 5)
    expected = dequantized(model_q)(x)
    call = nnx.jit(jp.accept_quantized(lambda model, x: model(x)))
    self.assert_close(call(model_q, x), expected)
    self.assertEqual(model_q.calls[...], 1)
    self.assertIsInstance(model_q.out.kernel.get_value(), jp.QuantizedWeight)
    graph, state = nnx.split(model_q)
    merged = jax.jit(
      jp.accept_quantized(lambda state, x: nnx.merge(graph, state)(x))
    )
    self.assert_close(merged(state, x), expected)

  def test_module_of_equinox_is_the_function_or_an_argument(self):
    model = eqx.nn.MLP(64, 32, 96, 2, key=jax.random.key(0))
    model_q, report = jp.quantize_params(model, "nvfp4", min_size=0)
    self.assertLen(report.quantized, 3)
    x = normal(5, 64)
    expected = jax.vmap(dequantized(model_q))(x)

    @eqx.filter_jit
    def as_function(model, x):
      return jax.vmap(jp.accept_quantized(model))(x)

    as_argument = eqx.filter_jit(
      jp.accept_quantized(lambda model, x: jax.vmap(model)(x))
    )
    for call in (as_function, as_argument):
      self.assert_close(call(model_q, x), expected)
      found = jp.explain(call, model_q, x)
      self.assertLen(found.dots, 3)
      self.assertEmpty(found.quantizations)

  @pytest.mark.full
  def test_metadata_of_linen_is_unboxed(self):
    kernel = nn.with_partitioning(nn.initializers.normal(), (None, "b"))
    module = nn.Dense(96, kernel_init=kernel)
    x = normal(5, 64)
    params_q, _ = jp.quantize_params(module.init(jax.random.key(0), x), "mxfp8")
    call = jax.jit(jp.accept_quantized(module.apply))
    self.assert_close(call(params_q, x), module.apply(dequantized(params_q), x))


class PlacedTest(parameterized.TestCase):
  """On several devices, on disk, and in exported functions."""

  def setUp(self):
    super().setUp()
    need_devices(self, NUM_DEVICES)
    devices = np.array(jax.devices()[:NUM_DEVICES]).reshape(2, 2)
    self.mesh = jax.sharding.Mesh(devices, ("a", "b"))

  def sharding(self, *spec):
    return NamedSharding(self.mesh, P(*spec))

  def shardings(self, params):
    """Columns of what goes up, rows of what comes down, as heads do."""
    specs = {
      "up": (None, None, "b"),
      "down": (None, "b"),
      "query": (None, None, "b"),
      "out": (None, "b"),
    }

    def of(path, x):
      names = [getattr(key, "key", "") for key in path]
      found = [spec for name, spec in specs.items() if name in names]
      is_kernel = names[-1] == "kernel"
      return self.sharding(*(found[0] if found and is_kernel else ()))

    return jax.tree_util.tree_map_with_path(of, params)

  @pytest.mark.full
  def test_sharded_weights_have_their_bits_and_products(self):
    params, tokens = decoder()
    whole, _ = jp.quantize_params(params, "nvfp4")
    shardings = self.shardings(params)
    placed = jax.device_put(params, shardings)
    params_q, report = jp.quantize_params(placed, "nvfp4")
    self.assertLen(report.quantized, 6)
    assert_same_bits(params_q, whole)
    by_shard = jp.shard(whole, shardings)
    assert_same_bits(by_shard, whole)
    for a, b in zip(*map(jax.tree.leaves, (params_q, by_shard)), strict=True):
      self.assertTrue(a.sharding.is_equivalent_to(b.sharding, a.ndim))
    up = params_q["params"]["middle"]["up"]["kernel"].array
    self.assertEqual(up.values.sharding.shard_shape(up.shape), (2, 64, 64))
    out = params_q["params"]["middle"]["attention"]["out"]["kernel"].array
    self.assertEqual(out.scale.sharding.spec[2], "b")

    call = jp.accept_quantized(Decoder().apply)
    expected = Decoder().apply(dequantized(whole), tokens)
    sharded = jax.jit(
      call,
      in_shardings=(jp.shardings(whole, shardings), self.sharding("a")),
      out_shardings=self.sharding("a"),
    )
    actual = sharded(params_q, jax.device_put(tokens, self.sharding("a")))
    np.testing.assert_allclose(
      actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max()
    )

  def test_sharding_that_cuts_blocks_is_said(self):
    params = {"kernel": jax.device_put(normal(96, 64), self.sharding("b"))}
    with self.assertWarnsRegex(UserWarning, "arrays was quantized"):
      params_q, report = jp.quantize_params(params, "mxfp8")
    self.assertIn("whole blocks of 32", report.entries[0].reason)
    self.assertIs(params_q["kernel"], params["kernel"])

  def test_dimensions_stored_as_one_are_split_at_the_first(self):
    tree, _ = jp.quantize_params(
      {"w": normal(64, 4, 16)}, "mxfp8", where=lambda p: 0
    )
    spec = lambda *s: jp.shardings(tree, self.sharding(*s))["w"].array.values
    self.assertEqual(spec("a", "b").spec, P("b", "a"))
    with self.assertRaisesRegex(
      TypeError, "only dimension 1 of .*may be split"
    ):
      spec(None, None, "b")
    with self.assertRaisesRegex(TypeError, "at most 3 dimensions"):
      spec(None, None, None, "b")

  def test_checkpoints_are_restored_bitwise_to_another_sharding(self):
    params, _ = decoder()
    params_q, _ = jp.quantize_params(params, "nvfp4")
    folder = self.enter_context(tempfile.TemporaryDirectory())
    path = pathlib.Path(folder) / "state"
    with ocp.StandardCheckpointer() as saver:
      saver.save(path, params_q)
    shardings = jp.shardings(params_q, self.shardings(params))
    target = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      params_q,
      shardings,
    )
    with ocp.StandardCheckpointer() as saver:
      restored = saver.restore(path, target)
    self.assertEqual(jax.tree.structure(restored), jax.tree.structure(params_q))
    assert_same_bits(restored, params_q)
    up = restored["params"]["middle"]["up"]["kernel"].array
    self.assertEqual(up.values.sharding.spec[1], "b")

  def test_pickled_and_exported_weights_are_the_same(self):
    x, w = normal(5, 64), normal(64, 96)
    tree, _ = jp.quantize_params({"kernel": w}, "nvfp4")
    assert_same_bits(pickle.loads(pickle.dumps(tree)), tree)
    call = jax.jit(jp.accept_quantized(lambda p, x: x @ p["kernel"]))
    exported = jax.export.export(call)(tree, x)
    again = jax.export.deserialize(bytearray(exported.serialize()))
    # The exported module has XLA's operations, which sum in another order.
    expected = call(tree, x)
    np.testing.assert_allclose(
      again.call(tree, x), expected, rtol=0, atol=1e-5 * np.abs(expected).max()
    )

  @pytest.mark.full
  def test_trees_are_mapped_stacked_and_sliced_by_layers(self):
    layers = [
      jp.quantize_params({"kernel": normal(64, 96) * i}, "nvfp4")[0]
      for i in (1, 2, 3)
    ]
    stack = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    self.assertEqual(stack["kernel"].shape, (3, 64, 96))
    again = jax.tree.map(lambda x: x[1], stack)
    assert_same_bits(again, layers[1])
    np.testing.assert_array_equal(
      stack["kernel"].dequantize()[1], layers[1]["kernel"].dequantize()
    )
