# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`linear` with a layer of stacked weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.testing import contract
from jaxplugin.testing.meshes import explicit

LAYERS, N, K = 3, 12, 64
NUM_DEVICES = 2
HAS_KERNELS = targets.detect_target("cpu").cpu_kernels is not None


make = contract.operand


def each_layer(x, stack, bias=None, **options):
  """Results with all layers, by a scan over their numbers."""

  def step(carry, i):
    return carry, jp.linear(x, stack, bias, layer=i, **options)

  return jax.lax.scan(step, 0, jnp.arange(LAYERS))[1]


class LayersTest(parameterized.TestCase):
  @parameterized.product(
    lhs=(jp.MXFP8, jp.NVFP4, contract.F32, contract.BF16),
    rhs=(jp.MXFP8, jp.MXFP4, jp.NVFP4, jp.MXFP6_E2M3),
    storage=("as_made", "prepared"),
  )
  @pytest.mark.sample(1)
  def test_each_layer_is_exact_in_a_scan(self, lhs, rhs, storage):
    rng = np.random.default_rng(0)
    x, stack = make(rng, lhs, (5, K)), make(rng, rhs, (LAYERS, N, K))
    bias = rng.integers(-9, 9, (LAYERS, N)).astype(np.float32)
    given = stack.operand
    if storage == "prepared":
      given = jp.prepare_weights(given, targets.detect_target("cpu"))
    actual = jax.jit(functools.partial(each_layer, activation="relu"))(
      x.operand, given, bias
    )
    exact = np.einsum("mk,lnk->lmn", x.exact, stack.exact) + bias[:, None]
    contract.assert_exact(actual, np.maximum(exact, 0), actual.dtype)

  @parameterized.parameters((1,), (2, 3), (2, 1, 3))
  def test_leading_dimensions_are_rows(self, *lead):
    rng = np.random.default_rng(1)
    x, stack = (
      make(rng, contract.F32, (*lead, K)),
      make(rng, jp.MXFP8, (3, N, K)),
    )
    actual = jp.linear(x.operand, stack.operand, layer=2)
    exact = np.einsum("...k,nk->...n", x.exact, stack.exact[2])
    contract.assert_exact(actual, exact, contract.F32)

  @absltest.skipIf(
    targets.detect_target("cpu").cpu_kernels
    in (None, "baseline", "baseline_neon"),
    "the baseline quantizes no rows",
  )
  def test_fastest_precision_reads_the_stack_and_quantizes_rows(self):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((5, K)).astype(np.float32)
    w = rng.standard_normal((LAYERS, N, K)).astype(np.float32)
    for format in (jp.NVFP4, jp.UINT4_32_MIN):
      stack = jp.quantize(w, format)
      function = functools.partial(each_layer, precision="fastest")
      text = jax.jit(function).lower(x, stack).as_text()
      self.assertIn("jaxplugin_ragged_dot", text)
      self.assertIn("quantize_rows = 1", text)
      actual = function(x, stack)
      for i in range(LAYERS):
        expected = jp.linear(x, stack[i], precision="fastest")
        # Minima are added by different XLA operations.
        error = {"rtol": 1e-6, "atol": 1e-5} if stack.offset is not None else {}
        np.testing.assert_allclose(actual[i], expected, **error)
        exact = jp.linear(x, stack[i])
        self.assertGreater(np.abs(actual[i] - exact).max(), 1e-3)
    with self.assertRaisesRegex(ValueError, "linear: precision must be None"):
      jax.jit(functools.partial(each_layer, precision="fast"))(x, stack)

  def test_global_scale_of_each_row_of_a_layer(self):
    # Weights of one; the ragged kernels have one global scale for a layer.
    scale = np.exp2(np.arange(LAYERS * N).reshape(LAYERS, N, 1) % 7)
    stack = jp.ScaledArray(
      np.ones((LAYERS, N, K), jp.NVFP4.values_dtype),
      np.ones((LAYERS, N, K // 16), jp.NVFP4.scale_dtype),
      scale.astype(np.float32),
      jp.NVFP4,
    )
    function = jax.jit(lambda x, i: jp.linear(x, stack, layer=i))
    actual = function(np.ones((1, K), np.float32), 1)
    np.testing.assert_array_equal(actual, K * scale[1].T)

  @parameterized.product(
    format=(jp.MXFP8, jp.NVFP4), m=(1, 5), is_quantized=(False, True)
  )
  @pytest.mark.sample(1)
  def test_bits_are_those_of_the_layer_alone(self, format, m, is_quantized):
    rng = np.random.default_rng(4)
    weights = rng.normal(size=(LAYERS, 40, 416)).astype(np.float32)
    stack = jp.quantize(weights, format, batch_dims=1)
    x = rng.normal(size=(m, 416)).astype(np.float32)
    x = jp.quantize(x, format) if is_quantized else jnp.asarray(x)
    actual = jax.jit(each_layer)(x, stack)
    for i in range(LAYERS):
      alone = jax.jit(jp.linear)(x, stack[i])
      np.testing.assert_array_equal(actual[i], alone, err_msg=str(i))

  @pytest.mark.full
  def test_layer_of_any_integer_dtype(self):
    w = np.ones((200, 8, 32), np.float32)
    w[150] = 2
    w_q = jp.quantize(w, jp.MXFP8)
    x = np.ones((1, 32), np.float32)
    for dtype in (np.uint8, np.int16, np.uint32, np.int64, np.uint64):
      for jitted in (False, True):
        f = lambda i: jp.linear(x, w_q, layer=i)
        with self.subTest(dtype=dtype, jitted=jitted):
          y = (jax.jit(f) if jitted else f)(dtype(150))
          np.testing.assert_array_equal(y, np.full((1, 8), 64, np.float32))
    with self.assertRaisesRegex(ValueError, "layer must .*got 4294967446"):
      jp.linear(x, w_q, layer=np.int64(2**32 + 150))

  def test_traced_layer_out_of_range_is_the_nearest(self):
    rng = np.random.default_rng(3)
    x, stack = make(rng, contract.F32, (2, K)), make(rng, jp.MXFP8, (3, N, K))
    function = jax.jit(lambda i: jp.linear(x.operand, stack.operand, layer=i))
    for given, meant in ((-1, 0), (7, 2)):
      exact = x.exact @ stack.exact[meant].T
      contract.assert_exact(function(given), exact, contract.F32)


class CopiesTest(absltest.TestCase):
  def mesh(self):
    explicit.need_devices(self, NUM_DEVICES)
    return jax.make_mesh((NUM_DEVICES,), ("x",))

  @absltest.skipUnless(HAS_KERNELS, "no CPU kernels here")
  def test_stack_is_not_sliced_where_kernels_serve(self):
    rng = np.random.default_rng(0)
    stack = make(rng, jp.MXFP8, (LAYERS, N, K)).operand
    text = (
      jax.jit(each_layer).lower(jnp.ones((1, K)), stack).compile().as_text()
    )
    self.assertIn("jaxplugin_ragged_dot", text)
    self.assertNotIn("jaxplugin_block_scaled_dot", text)
    self.assertNotRegex(text, rf"(f8e4m3fn|u8)\[1,{N},{K}\]")

  def test_stack_is_sliced_elsewhere(self):
    rng = np.random.default_rng(0)
    stack = make(rng, jp.MXFP8, (LAYERS, N, K)).operand
    mesh = self.mesh()
    spread = jax.NamedSharding(mesh, P("x"))
    x = jax.device_put(jnp.ones((2, K)), spread)
    partitioned = jax.jit(each_layer).lower(x, stack).as_text()
    with jp.use_target(jp.named_target("cpu")):
      no_kernels = jax.jit(each_layer).lower(jnp.ones((1, K)), stack).as_text()
    for text in (partitioned, no_kernels):
      self.assertNotIn("jaxplugin_ragged_dot", text)
      self.assertIn("dynamic_slice", text)

  def test_results_are_the_same_over_devices(self):
    rng = np.random.default_rng(0)
    x, stack = make(rng, contract.F32, (4, K)), make(rng, jp.MXFP8, (3, N, K))
    mesh = self.mesh()
    local = jax.shard_map(
      lambda x: each_layer(x, stack.operand),
      mesh=mesh,
      in_specs=P("x"),
      out_specs=P(None, "x"),
    )
    exact = np.einsum("mk,lnk->lmn", x.exact, stack.exact)
    given = jax.device_put(
      np.asarray(x.operand), jax.NamedSharding(mesh, P("x"))
    )
    for function in (local, each_layer):
      args = (given,) if function is local else (given, stack.operand)
      actual = jax.jit(function)(*args)
      contract.assert_exact(actual, exact, contract.F32)

  def test_columns_on_explicit_axes_are_exact(self):
    rng = np.random.default_rng(0)
    x, stack = make(rng, contract.F32, (4, K)), make(rng, jp.MXFP8, (3, N, K))
    mesh = self.mesh()
    mesh = jax.sharding.Mesh(
      mesh.devices, ("x",), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    place = lambda x, *spec: jax.device_put(
      np.asarray(x), jax.NamedSharding(mesh, P(*spec))
    )
    columns = jax.tree.map(lambda w: place(w, None, "x"), stack.operand)
    function = jax.jit(lambda x, w: jp.linear(x, w[2]))
    actual = function(place(x.operand), columns)
    self.assertEqual(actual.sharding.spec, P(None, "x"))
    contract.assert_exact(actual, x.exact @ stack.exact[2].T, contract.F32)

  def test_explain_lists_the_product_once(self):
    stack = make(np.random.default_rng(0), jp.NVFP4, (LAYERS, N, K)).operand
    explained = jp.explain(each_layer, jnp.ones((1, K)), stack)
    (product,) = explained.dots
    self.assertEqual(product.trips, LAYERS)
    if HAS_KERNELS:
      told = " ".join(product.decision.notes)
      self.assertIn("linear(layer=) reads it from the stack", told)


class TransformationsTest(parameterized.TestCase):
  @parameterized.parameters("x", "layer", "both")
  @pytest.mark.sample(1)
  def test_vmap_is_exact(self, mapped):
    rng = np.random.default_rng(0)
    x, stack = (
      make(rng, contract.F32, (4, 2, K)),
      make(rng, jp.MXFP4, (3, N, K)),
    )
    numbers = np.array([2, 0, 1, 1])
    in_axes = (0 if mapped != "layer" else None, 0 if mapped != "x" else None)
    function = jax.vmap(
      lambda x, i: jp.linear(x, stack.operand, layer=i), in_axes
    )
    given = x.operand if mapped != "layer" else x.operand[0]
    actual = jax.jit(function)(given, numbers if mapped != "x" else 1)
    exact = np.stack(
      [
        x.exact[j if mapped != "layer" else 0]
        @ stack.exact[numbers[j] if mapped != "x" else 1].T
        for j in range(4)
      ]
    )
    contract.assert_exact(actual, exact, contract.F32)

  @pytest.mark.full
  def test_gradients_are_those_of_the_layer_alone(self):
    rng = np.random.default_rng(1)
    stack = make(rng, jp.MXFP8, (LAYERS, N, K)).operand
    x = jax.device_put(rng.normal(size=(2, K)))
    bias = jax.device_put(rng.normal(size=(LAYERS, N)))

    def loss(product, x, bias):
      return jnp.square(product(x, bias)).sum()

    of_stack = lambda x, b: jp.linear(x, stack, b, "silu", layer=1)
    alone = lambda x, b: jp.linear(x, stack[1], b[1], "silu")
    grads = [
      jax.jit(jax.grad(functools.partial(loss, f), (0, 1)))(x, bias)
      for f in (of_stack, alone)
    ]
    for actual, expected in zip(*grads, strict=True):
      self.assertGreater(np.abs(expected).max(), 0.1)
      # The activation is the kernel's for the stack, and XLA's alone.
      np.testing.assert_allclose(
        actual, expected, rtol=0, atol=2.0**-20 * np.abs(expected).max()
      )
    tangents = [jax.jvp(f, (x, bias), (x, bias))[1] for f in (of_stack, alone)]
    np.testing.assert_array_equal(*tangents)

  def test_quantized_result_passes_its_cotangent_to_x(self):
    rng = np.random.default_rng(1)
    stack = make(rng, jp.MXFP8, (LAYERS, 32, K))
    x, g = rng.normal(size=(2, K)), rng.normal(size=(2, 32))
    out = jp.OutFormat("mxfp8", derivative="straight_through")

    def loss(x):
      y = jp.linear(x, stack.operand, layer=1, out_format=out)
      return (y.dequantize() * g).sum()

    found = jax.jit(jax.grad(loss))(x.astype(np.float32))
    np.testing.assert_allclose(found, g @ stack.exact[1], rtol=1e-4, atol=1e-4)

  def test_surrogates_have_derivatives(self):
    weights = jnp.ones((LAYERS, N, K))
    x = jnp.arange(2.0 * K).reshape(2, K)

    def loss(weights):
      stack = jp.quantize(weights, jp.MXFP8, derivative="straight_through")
      return jp.linear(x, stack, layer=1).sum()

    expected = np.zeros((LAYERS, N, K))
    expected[1] = x.sum(0)
    found = jax.jit(jax.grad(loss))(weights)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"layer": 3}, ValueError, "below the 3 layers of w_q, got 3"),
    ({"layer": -1}, ValueError, "got -1"),
    ({"layer": 1.0}, TypeError, "one integer, got float32"),
    ({"layer": [0, 1]}, TypeError, r"one integer, got int32\[2\]"),
    ({}, TypeError, "pass layer= for a stack"),
    (
      {"layer": 0, "bias": np.ones(N, np.float32)},
      TypeError,
      r"\(layers, n\) \(3, 12\), got \(12,\)",
    ),
  )
  def test_say_what_was_given(self, options, error, message):
    stack = make(np.random.default_rng(0), jp.MXFP8, (3, N, K)).operand
    call = functools.partial(jp.linear, jnp.ones((1, K)), stack, **options)
    for run in (call, functools.partial(jax.eval_shape, call)):
      with self.assertRaisesRegex(error, f"^linear: .*{message}"):
        run()

  def test_stack_must_be_one(self):
    one = make(np.random.default_rng(0), jp.MXFP8, (N, K)).operand
    with self.assertRaisesRegex(TypeError, "leave layer out"):
      jp.linear(jnp.ones((1, K)), one, layer=0)
    with self.assertRaisesRegex(TypeError, r"pass w_q\[layer\]"):
      jp.linear(one, jnp.ones((3, N, K)), layer=0)
