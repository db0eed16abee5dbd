# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands quantized once, as flax, equinox, haiku and meshes have them."""

import functools
from typing import Any

import equinox as eqx
import flax.linen
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin import training
from jaxplugin.testing import transformations

WIDTH, NUM_DEVICES = 64, 8
MATMUL = (((1,), (0,)), ((), ()))
RECIPE = training.MXFP8_RECIPE
BATCHES = np.random.default_rng(0).normal(size=(3, 32, WIDTH))
BATCHES = jnp.asarray(BATCHES, jnp.float32)


def make_dot():
  return jp.dot_general(recipe=RECIPE, weight="rhs")


def quantize(path, w):
  is_kernel = str(getattr(path[-1], "key", path[-1])) in ("kernel", "w")
  return jp.quantize_operand(w, RECIPE) if is_kernel else w


def quantize_kernels(params):
  return jax.tree_util.tree_map_with_path(quantize, params)


def summed(loss, params, taken):
  """Gradients of microbatches, of parameters as `taken` has them."""

  def microbatch(total, x):
    of = lambda p: loss(training.with_primals(taken, p), x)
    return jax.tree.map(jnp.add, total, jax.grad(of)(params)), None

  zeros = jax.tree.map(jnp.zeros_like, params)
  return jax.lax.scan(microbatch, zeros, BATCHES)[0]


class ModelsTest(absltest.TestCase):
  def assert_same_and_fewer(self, loss, params, operands=2):
    """The bits of a step without; less is quantized in its microbatches."""
    taken = {
      "without": lambda p: p,
      "with": quantize_kernels,
    }
    results, counts = {}, {}
    for name, quantized in taken.items():
      step = lambda p, quantized=quantized: summed(loss, p, quantized(p))
      traced = jax.jit(step).trace(params)
      results[name] = traced.lower().compile()(params)
      (scan,) = [
        x for x in traced.jaxpr.jaxpr.eqns if x.primitive.name == "scan"
      ]
      counts[name] = transformations.count(
        "block_quantize", scan.params["jaxpr"].jaxpr
      )
    # Each weight, forward, and but for the first one backward.
    self.assertEqual(counts["without"] - counts["with"], 2 * operands - 1)
    actual, expected = map(jax.tree.leaves, results.values())
    for a, e in zip(actual, expected, strict=True):
      self.assertGreater(np.abs(e).max(), 0)
      np.testing.assert_array_equal(a, e)

  @pytest.mark.full
  def test_linen(self):
    dense = functools.partial(
      flax.linen.Dense,
      dot_general=make_dot(),
      promote_dtype=training.promote_dtype,
    )
    model = flax.linen.Sequential([dense(96), jnp.sin, dense(WIDTH)])
    params = model.init(jax.random.key(0), BATCHES[0])
    loss = lambda p, x: jnp.square(model.apply(p, x)).sum()
    self.assert_same_and_fewer(loss, params)

  @pytest.mark.full
  def test_nnx(self):
    linear = functools.partial(
      nnx.Linear,
      dot_general=make_dot(),
      promote_dtype=training.promote_dtype,
      rngs=nnx.Rngs(0),
    )
    model = nnx.Sequential(linear(WIDTH, 96), jnp.sin, linear(96, WIDTH))
    graph, state = nnx.split(model, nnx.Param)
    params = nnx.to_pure_dict(state)

    def loss(params, x):
      given = nnx.State(jax.tree.map(lambda x: x, state))
      nnx.replace_by_pure_dict(given, params)
      return jnp.square(nnx.merge(graph, given)(x)).sum()

    self.assert_same_and_fewer(loss, params)

  @pytest.mark.full
  def test_equinox(self):
    class Layer(eqx.Module):
      w: Any
      static_dot: Any = eqx.field(static=True)
      dot: Any  # no array, nor anything with one

      def __call__(self, x):
        return self.static_dot(self.dot(x, self.w, MATMUL), self.w, MATMUL)

    w = BATCHES[0, :32].repeat(2, 0)
    given = Layer(jp.quantize_operand(w, RECIPE), make_dot(), make_dot())
    loss = lambda layer, x: jnp.sin(layer(x)).sum()
    step = eqx.filter_jit(eqx.filter_grad(loss))
    gradient = step(given, BATCHES[1])
    expected = step(Layer(w, make_dot(), make_dot()), BATCHES[1])
    np.testing.assert_array_equal(gradient.w.primal, expected.w)
    # Copies are not parameters.
    self.assertLen(jax.tree.leaves(gradient), 1)

  @pytest.mark.full
  def test_haiku(self):
    def forward(x, dot):
      w = hk.get_parameter("w", (WIDTH, 96), init=hk.initializers.Constant(0.1))
      return jnp.sin(dot(x, w, MATMUL))

    model = hk.without_apply_rng(hk.transform(forward))
    dot = make_dot()
    params = model.init(jax.random.key(0), BATCHES[0], dot)
    loss = lambda p, x: jnp.square(model.apply(p, x, dot)).sum()
    self.assert_same_and_fewer(loss, params, operands=1)

  def test_promoting_leaves_operands_as_they_are(self):
    w = jp.quantize_operand(jnp.ones((4, 4), jnp.bfloat16), RECIPE)
    x = np.arange(3)
    for dtype, expected in ((None, "bfloat16"), ("bfloat16", "bfloat16")):
      x2, w2, none = training.promote_dtype((x, w, None), dtype=dtype)
      self.assertIs(w2, w)
      self.assertEqual((x2.dtype, none), (jnp.dtype(expected), None))
    plain = training.promote_dtype(x, np.float32(1))
    theirs = flax.linen.dtypes.promote_dtype(x, np.float32(1))
    self.assertEqual([x.dtype for x in plain], [x.dtype for x in theirs])
    with self.assertRaisesRegex(TypeError, "converted to float32 before it"):
      training.promote_dtype(np.ones(3, np.float32), w)
    with self.assertRaisesRegex(ValueError, "must be inexact, got int32"):
      training.promote_dtype(x, dtype=np.dtype(np.int32))


class FunctionsTest(absltest.TestCase):
  """The functions that `dot_general` returns compare by value."""

  def test_equal_arguments_make_equal_functions(self):
    makers = (
      make_dot,
      lambda: jp.dot_general(jp.MXFP8, "mxfp8", implementation="xla"),
      lambda: jp.dot_general(recipe=training.NVFP4_RECIPE, weight="lhs"),
      lambda: jp.dot_general(recipe=RECIPE, weight="lhs"),
    )
    by_name = jp.dot_general("mxfp8", "nvfp4", grad_format="mxfp4")
    by_format = jp.dot_general(jp.MXFP8, jp.NVFP4, grad_format=jp.MXFP4)
    self.assertEqual(by_name, by_format)
    made = [(make(), make()) for make in makers]
    for first, second in made:
      self.assertIsNot(first, second)
      self.assertEqual(first, second)
    self.assertLen({x for pair in made for x in pair}, len(makers))
    self.assertEmpty(jax.tree.leaves(made))

  def test_caches_know_a_function_made_anew(self):
    traced = []

    def product(dot, x, w):
      traced.append(dot)
      return dot(x, w, MATMUL)

    x, w = BATCHES[0], BATCHES[1].T
    static = jax.jit(product, static_argnums=0)
    leafless = jax.jit(product)
    for function in (static, static, leafless, leafless):
      function(make_dot(), x, w)
    self.assertLen(traced, 2)
    static(jp.dot_general(recipe=RECIPE, weight="lhs"), x, w)
    self.assertLen(traced, 3)
    # A module of linen that has it is equal, too.
    model = lambda: flax.linen.Dense(8, dot_general=make_dot())
    self.assertEqual(model(), model())
    self.assertEqual(hash(model()), hash(model()))


class MeshTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    if jax.device_count() < NUM_DEVICES:
      self.skipTest(f"needs {NUM_DEVICES} devices, has {jax.device_count()}")
    self.w = BATCHES.reshape(-1, WIDTH)[:WIDTH]
    self.mesh = jax.make_mesh(
      (NUM_DEVICES,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)
    )

  def gradients(self, quantize, recipe=RECIPE):
    """The gradient of two microbatches by w, and by x of the first."""
    dot = jp.dot_general(recipe=recipe, weight="rhs")

    def step(w, batches, key):
      w_q = quantize(w)

      def microbatch(x):
        x = quantize(x, role="activation")
        loss = lambda p: jnp.sin(
          dot(x, training.with_primals(w_q, p), MATMUL, key=key)
        ).sum()
        return jax.grad(loss)(w)

      return microbatch(batches[0]) + microbatch(batches[1])

    return step

  @parameterized.parameters(RECIPE, training.NVFP4_RECIPE)
  @pytest.mark.full
  def test_fsdp(self, recipe):
    make = functools.partial(jp.quantize_operand, recipe=recipe)
    key = jax.random.key(0)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(self.mesh, P(*spec)))
    w, batches = put(self.w, "x"), put(BATCHES, None, "x")
    found = []
    for quantize in (make, lambda x, role="": x):
      compiled = jax.jit(
        self.gradients(quantize, recipe), out_shardings=w.sharding
      )
      found.append(np.asarray(compiled(w, batches, key)))
    self.assertGreater(np.abs(found[1]).max(), 0)
    np.testing.assert_array_equal(*found)

  @pytest.mark.full
  def test_shard_map(self):
    make = functools.partial(jp.quantize_operand, recipe=RECIPE)
    key = jax.random.key(0)
    found = []
    for quantize in (make, lambda x, role="": x):
      local = jax.shard_map(
        self.gradients(quantize),
        mesh=self.mesh,
        in_specs=(P(), P(None, "x"), P()),
        out_specs=P(),
      )
      rows = jnp.concatenate([BATCHES] * NUM_DEVICES, axis=1)
      found.append(np.asarray(jax.jit(local)(self.w, rows, key)))
    np.testing.assert_array_equal(*found)
    # Rows are repeated eight times, and their sums have fewer roundings.
    one = self.gradients(lambda x, role="": x)(self.w, BATCHES, key)
    np.testing.assert_allclose(
      found[0], NUM_DEVICES * one, rtol=1e-5, atol=1e-4
    )


if __name__ == "__main__":
  absltest.main()
