# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands quantized once: the bits of operands that each call quantizes.

Also as flax and meshes have them.
"""

import dataclasses
import functools
import re

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin import training
from jaxplugin.testing import transformations
from jaxplugin.testing.meshes import explicit

KEY = jax.random.key(0)
MATMUL = (((1,), (0,)), ((), ()))
LAYERS, ROWS, WIDTH = 2, 33, 64


def normal(seed, *shape):
  x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
  return jax.device_put(x)


X = normal(0, ROWS, 40)
W = normal(1, 40, 72)


def assert_equal_bits(actual, expected):
  actual, tree = jax.tree.flatten(actual)
  expected, expected_tree = jax.tree.flatten(expected)
  assert tree == expected_tree, (tree, expected_tree)
  for a, e in zip(actual, expected, strict=True):
    assert np.abs(np.asarray(e, np.float32)).max() > 0
    np.testing.assert_array_equal(a, e)


def recipes():
  return {
    "mxfp8": training.MXFP8_RECIPE,
    "nvfp4": training.NVFP4_RECIPE,
    "quantized_twice": training.Recipe(
      activation_format="mxfp8",
      weight_format="mxfp4",
      grad_format="mxfp8",
      backward_from_quantized=True,
    ),
    "high_precision_dgrad": training.Recipe(
      activation_format="nvfp4",
      weight_format="mxfp8",
      grad_format="mxfp8",
      wgrad_hadamard=32,
      quantize_dgrad=False,
    ),
  }


class OneProductTest(parameterized.TestCase):
  """A product with one operand or both quantized before."""

  def assert_same(self, dot, numbers, arrays, quantize, wanted=(0, 1)):
    """Compares values and gradients for each function in `quantize`."""

    def loss(quantize, *arrays):
      operands = [q(x) for q, x in zip(quantize, arrays, strict=True)]
      return jnp.sin(dot(*operands, numbers, key=KEY)).sum()

    plain = (lambda x: x,) * 2
    grad = jax.value_and_grad(loss, argnums=tuple(i + 1 for i in wanted))
    step = jax.jit(grad, static_argnums=0)
    assert_equal_bits(step(quantize, *arrays), step(plain, *arrays))

  @parameterized.named_parameters(recipes().items())
  @pytest.mark.sample(2)
  def test_bits_are_those_of_a_call_that_quantizes(self, recipe):
    make = functools.partial(jp.quantize_operand, recipe=recipe)
    self.assert_same(
      jp.dot_general(recipe=recipe, weight="rhs"),
      MATMUL,
      (X, W),
      (functools.partial(make, role="activation"), make),
    )

  @pytest.mark.full
  def test_weight_of_several_dimensions_on_the_left(self):
    recipe = training.MXFP8_RECIPE
    make = functools.partial(jp.quantize_operand, recipe=recipe)
    self.assert_same(
      jp.dot_general(recipe=recipe, weight="lhs"),
      (((1, 3), (0, 2)), ((2,), (3,))),
      (normal(2, 12, 4, 2, 10), normal(3, 4, 6, 10, 2)),
      (
        functools.partial(make, contracting=(1, 3), batch=2),
        functools.partial(
          make, contracting=(0, 2), batch=-1, role="activation"
        ),
      ),
    )

  def test_formats_have_no_roles(self):
    # Operands are bf16, and the result has another dtype.
    self.assert_same(
      jp.dot_general(jp.MXFP8, "mxfp8"),
      MATMUL,
      (X.astype(jnp.bfloat16), W),
      (functools.partial(jp.quantize_operand, recipe="mxfp8", contracting=1),)
      + (functools.partial(jp.quantize_operand, recipe=jp.MXFP8),),
    )

  def test_copies_are_those_of_quantize(self):
    w_q = jp.quantize_operand(W, jp.MXFP8)
    for copy, axis in ((w_q.forward, 0), (w_q.backward, 1)):
      expected = jp.quantize(
        jnp.pad(W, ((0, 24), (0, 24))), jp.MXFP8, axis=axis
      )
      sizes = [slice(0, n) for n in copy.shape]
      np.testing.assert_array_equal(
        np.asarray(copy.values).view(np.uint8),
        np.asarray(expected.values[tuple(sizes)]).view(np.uint8),
      )
    leaves = jax.tree.leaves(w_q)
    self.assertIs(leaves[0], W)
    # Nothing but the primal is a parameter.
    for leaf in leaves[1:]:
      self.assertFalse(jnp.issubdtype(leaf.dtype, jnp.inexact), leaf.dtype)

  def test_second_derivative_is_an_error_as_without(self):
    dot = jp.dot_general(jp.MXFP8, jp.MXFP8)
    w_q = jp.quantize_operand(W, jp.MXFP8)
    x = X[:2]

    def gradient(w):
      return jax.grad(
        lambda w: jnp.sin(dot(x, w_q.with_primal(w), MATMUL)).sum()
      )(w)

    for function in (gradient, jax.jit(gradient), jax.checkpoint(gradient)):
      with self.assertRaisesRegex(NotImplementedError, "has no derivative"):
        jax.jvp(function, (W,), (W,))
    # It has one if no gradient is quantized.
    options = {"quantize_dgrad": False, "quantize_wgrad": False}
    dot = jp.dot_general(jp.MXFP8, jp.MXFP8, **options)
    tangent = jax.jit(lambda w: jax.jvp(gradient, (w,), (w,))[1])(W)
    self.assertGreater(np.abs(tangent).max(), 0)


DOT = jp.dot_general(recipe=training.MXFP8_RECIPE, weight="rhs")
STACK = normal(5, LAYERS, WIDTH, WIDTH) / 8
BATCHES = normal(6, 3, 32, WIDTH)
quantize_stack = jax.vmap(
  lambda w: jp.quantize_operand(w, training.MXFP8_RECIPE)
)


def network(stack, x):
  """Layers by a scan, each computed again in the backward pass."""

  @jax.checkpoint
  def layer(x, w):
    return x + jnp.sin(DOT(x, w, MATMUL)), None

  x, _ = jax.lax.scan(layer, x, stack)
  return (x * x).sum()


def summed(loss, params, given):
  """Sums gradients of microbatches, with quantized parameters `given`."""

  def microbatch(total, x):
    of = lambda p: loss(training.with_primals(given, p), x)
    return jax.tree.map(jnp.add, total, jax.grad(of)(params)), None

  zeros = jax.tree.map(jnp.zeros_like, params)
  return jax.lax.scan(microbatch, zeros, BATCHES)[0]


def summed_over_microbatches(quantize, stack):
  return summed(network, stack, quantize(stack))


def of_the_sum(quantize, stack):
  """The gradient of the loss of all microbatches."""

  def loss(stack):
    stack_q = quantize(stack)
    one = lambda total, x: (total + network(stack_q, x), None)
    return jax.lax.scan(one, jnp.float32(0), BATCHES)[0]

  return jax.grad(loss)(stack)


def mapped(quantize, stack):
  """Layers beside each other, and not one after the other."""
  function = jax.vmap(lambda w, x: jnp.sin(DOT(x, w, MATMUL)).sum())
  loss = lambda stack: function(quantize(stack), BATCHES[:LAYERS]).sum()
  return jax.grad(loss)(stack)


class ManyProductsTest(parameterized.TestCase):
  @parameterized.parameters(summed_over_microbatches, of_the_sum, mapped)
  @pytest.mark.sample(2)
  def test_gradients_have_the_bits_of_those_without(self, gradient):
    step = jax.jit(gradient, static_argnums=0)
    plain = step(lambda x: x, STACK)
    assert_equal_bits(step(quantize_stack, STACK), plain)

  def test_weights_are_quantized_outside_of_the_microbatches(self):
    counts = {}
    for name, quantize in (("once", quantize_stack), ("each", lambda x: x)):
      step = functools.partial(summed_over_microbatches, quantize)
      jaxpr = jax.make_jaxpr(step)(STACK).jaxpr
      (scan,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
      inside = transformations.count(
        "block_quantize", scan.params["jaxpr"].jaxpr
      )
      counts[name] = (
        inside,
        transformations.count("block_quantize", jaxpr) - inside,
      )
    # Forward x, again x; the gradient. And w: forward, again forward, and for
    # its backward product.
    self.assertEqual(counts, {"once": (3, 1), "each": (3 + 3, 0)})

  def test_gradient_by_the_operand_itself(self):
    w_q = jp.quantize_operand(W, training.MXFP8_RECIPE)
    loss = lambda w: jnp.sin(DOT(X, w, MATMUL)).sum()
    gradient = jax.jit(jax.grad(loss, allow_int=True))(w_q)
    assert_equal_bits(gradient.primal, jax.jit(jax.grad(loss))(W))
    copies = jax.tree.leaves(gradient)[1:]
    self.assertEqual({x.dtype for x in copies}, {jax.dtypes.float0})
    assert_equal_bits(training.primals({"w": w_q}), {"w": W})

  def test_the_other_operand_may_be_whatever_an_array_is_made_of(self):
    w_q = jp.quantize_operand(W, training.MXFP8_RECIPE)
    expected = DOT(X[:1], W, MATMUL)
    assert_equal_bits(DOT(np.asarray(X[:1]), w_q, MATMUL), expected)
    assert_equal_bits(DOT(X[:1].tolist(), w_q, MATMUL), expected)

  def test_operand_of_another_array_is_refused(self):
    w_q = jp.quantize_operand(W, training.MXFP8_RECIPE)
    with self.assertRaisesRegex(TypeError, r"float32\[40, 72\].*bfloat16\[40"):
      training.with_primals([w_q], [W.astype(jnp.bfloat16)])
    for primal in (None, "w"):
      with self.assertRaisesRegex(TypeError, f"with_primal.* got {primal!r};"):
        w_q.with_primal(primal)
    for index in (0, slice(None), (..., 0)):
      with self.assertRaisesRegex(TypeError, r"index must be \.\.\."):
        _ = w_q[index]
    self.assertIs(w_q[...], w_q)


class ResidualsTest(parameterized.TestCase):
  """What products leave to the backward pass, of bf16."""

  X = normal(7, 96, 64).astype(jnp.bfloat16)
  WEIGHTS = tuple(normal(8 + i, 64, 64).astype(jnp.bfloat16) for i in range(4))

  def residuals(self, dot, given, share):
    """Types of what is kept beside arguments, and of arguments that are kept.

    Query, key and value of one input, and a product of their sum.

    Args:
      dot: multiplies.
      given: the weights, as they are taken.
      share: of the input, what the three take.
    """

    def block(x, weights):
      *heads, out = training.with_primals(given, weights)
      x = share(x * 2)  # so that x is not an argument
      return dot(sum(dot(x, w, MATMUL) for w in heads), out, MATMUL)

    def linear(x, weights):
      return jax.tree.leaves(jax.vjp(block, x, weights)[1])

    jaxpr = jax.make_jaxpr(linear)(self.X, self.WEIGHTS).jaxpr
    arguments = set(map(id, (*jaxpr.invars, *jaxpr.constvars)))
    found = {id(x): x.aval for x in jaxpr.outvars}
    kept = [x for key, x in found.items() if key not in arguments]
    return kept, [x for key, x in found.items() if key in arguments]

  @parameterized.parameters(training.MXFP8_RECIPE, training.NVFP4_RECIPE)
  @pytest.mark.sample(1)
  def test_bytes_are_about_half_of_bf16s_and_none_for_weights(self, recipe):
    size = lambda types: sum(x.size * x.dtype.itemsize for x in types)
    bf16, bf16_weights = self.residuals(
      jax.lax.dot_general, self.WEIGHTS, lambda x: x
    )
    # Both inputs; the factor of 2, that of the `share`.
    self.assertEqual(size(bf16), 2 * self.X.nbytes + 2)
    dot = functools.partial(
      jp.dot_general(recipe=recipe, weight="rhs"), key=KEY
    )
    make = functools.partial(jp.quantize_operand, recipe=recipe)
    for given in (self.WEIGHTS, tuple(map(make, self.WEIGHTS))):
      kept, arguments = self.residuals(
        dot, given, functools.partial(make, role="activation")
      )
      # Keys, global scales and the factor are a few bytes each.
      few = [x for x in kept if x.size < 16]
      self.assertLess(size(few), 256)
      self.assertLessEqual(size(kept) - size(few), 0.55 * size(bf16))
      shapes = {x.shape for x in kept if x not in few}
      # One copy for three products, whose blocks are along the rows.
      self.assertLen([x for x in kept if x not in few], 4)
      self.assertTrue(all(shape[1] == 64 for shape in shapes), shapes)
      # A weight, or a copy of it that exists already.
      self.assertGreaterEqual(len(arguments), len(bf16_weights))

  def test_policies_know_it_by_name(self):
    make = functools.partial(
      jp.quantize_operand, recipe=training.MXFP8_RECIPE, role="activation"
    )
    policy = jax.checkpoint_policies.save_from_both_policies(
      jp.checkpoint_policies.dots_saveable,
      jp.checkpoint_policies.quantized_saveable,
    )

    def layer(x, w):
      x = make(jnp.sin(x))
      return DOT(x, w, MATMUL) + DOT(x, w, MATMUL)

    counts = []
    for function in (
      layer,
      jax.checkpoint(layer, policy=policy),
      jax.checkpoint(layer),
    ):
      loss = lambda x, w, f=function: jnp.sin(f(x, w)).sum()
      grad = jax.value_and_grad(loss, argnums=(0, 1))
      jaxpr, _ = jax.interpreters.partial_eval.dce_jaxpr(
        jax.make_jaxpr(grad)(X, W).jaxpr, [True] * 3
      )
      counts.append(transformations.count("block_quantize", jaxpr))
    # x; each weight forward and backward; each gradient. Then x once more.
    self.assertEqual(counts, [1 + 4 + 2, 1 + 4 + 2, 1 + 4 + 2 + 1])


RECIPE = training.MXFP8_RECIPE


def make_dot():
  return jp.dot_general(recipe=RECIPE, weight="rhs")


def quantize_kernel(path, w):
  is_kernel = str(getattr(path[-1], "key", path[-1])) in ("kernel", "w")
  return jp.quantize_operand(w, RECIPE) if is_kernel else w


def quantize_kernels(params):
  return jax.tree_util.tree_map_with_path(quantize_kernel, params)


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


NUM_DEVICES = explicit.NUM_DEVICES


class MeshTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    explicit.need_devices(self)
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

  @parameterized.parameters(0, 1)
  def test_shards_are_gathered_as_bytes(self, dim):
    """A weight's shards are quantized, gathered and trained."""
    dot = jp.dot_general(recipe=RECIPE, weight="rhs")
    w = normal(5, 32 * NUM_DEVICES, 32 * NUM_DEVICES)
    x = normal(6, 32 * NUM_DEVICES, w.shape[0])

    def loss(w, x):
      return (dot(x, w, MATMUL) ** 2).sum()

    def of_device(w, x):
      gather = functools.partial(
        jax.lax.all_gather, axis_name="x", axis=dim, tiled=True
      )
      w_q = jax.tree.map(gather, jp.quantize_operand(w, RECIPE))
      return jax.lax.psum(loss(w_q, x), "x")

    spec = P(*[None] * dim, "x")
    sharded = jax.shard_map(
      of_device, mesh=self.mesh, in_specs=(spec, P("x")), out_specs=P()
    )
    w_shards = jax.device_put(np.asarray(w), NamedSharding(self.mesh, spec))
    step = jax.jit(jax.grad(sharded, (0, 1))).lower(w_shards, x).compile()
    gathered = re.findall(r"= (\w+)\[[\d,]*\]\S* all-gather\(", step.as_text())
    # Values and scale factors of the forward and of the backward copy.
    self.assertEqual(gathered, ["u8"] * 4)
    gradients = step(w_shards, x)
    self.assertEqual(gradients[0].sharding.spec, spec)
    for found, want in zip(
      gradients, jax.jit(jax.grad(loss, (0, 1)))(w, x), strict=True
    ):
      # The same f32 products, summed in another order.
      np.testing.assert_allclose(
        found, want, rtol=0, atol=2.0**-20 * np.abs(want).max()
      )


PLAIN_WEIGHTS = training.Recipe(
  activation_format="mxfp8", weight_format=None, grad_format=None
)
PLAIN_DGRAD = dataclasses.replace(training.MXFP8_RECIPE, quantize_dgrad=False)


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"role": "weights"}, ValueError, "'weight', 'activation'.*'weights'"),
    ({"contracting": 2}, ValueError, "contracting .* -2 to 1, got 2"),
    ({"contracting": 1.0}, ValueError, "contracting .* got 1.0"),
    ({"batch": None}, ValueError, "batch must be dimensions .* got None"),
    ({"contracting": (0, -2)}, ValueError, r"each once, .*\(0, -2\)"),
    ({"contracting": 0, "batch": 0}, ValueError, "each once, .*batch=0"),
    ({"recipe": 8}, TypeError, "recipe must be a .*Recipe, .* got 8"),
    ({"recipe": "fp3"}, ValueError, "fp3.*mxfp8"),
    ({"x": W.astype(int)}, TypeError, "x must be float32, .* got int32"),
    ({"recipe": PLAIN_WEIGHTS}, TypeError, "recipe must quantize weights"),
  )
  def test_arguments(self, changes, error, message):
    kwargs = {"x": W, "recipe": "mxfp8", **changes}
    with self.assertRaisesRegex(error, f"quantize_operand: .*{message}"):
      jp.quantize_operand(**kwargs)

  @parameterized.parameters(
    # Quantized for the other side, dimension, recipe or rounding.
    ({"role": "activation"}, {}, "role=.weight.*role=.weight. to quantize_"),
    ({"contracting": 1}, {}, r"dimensions \[0\].* for \[1\] and \[\]"),
    ({"recipe": "mxfp4"}, {}, "needs rhs as mxfp8 along .*got mxfp4 along"),
    ({"recipe": training.NVFP4_RECIPE}, {"weight_format": "nvfp4"},
     "as nvfp4 along .* up, got nvfp4 along .* in square blocks"),
    ({}, {"dgrad_hadamard": 32}, "backward pass .* rhs .* groups of 32, got"),
    ({"recipe": PLAIN_DGRAD}, {}, "backward .* rhs as mxfp8 .* got nothing"),
  )  # fmt: skip
  def test_what_was_quantized_for_another_call(self, made, recipe, message):
    w = jp.quantize_operand(
      **{"x": normal(9, 64, 64), "recipe": training.MXFP8_RECIPE, **made}
    )
    recipe = dataclasses.replace(training.MXFP8_RECIPE, **recipe)
    dot = jp.dot_general(recipe=recipe, weight="rhs")
    with self.assertRaisesRegex(TypeError, f"dot_general: .*{message}"):
      dot(STACK[0], w, MATMUL)

  def test_weight_where_both_are_activations(self):
    dot = jp.dot_general(recipe=training.MXFP8_RECIPE, weight=None)
    w = jp.quantize_operand(W, training.MXFP8_RECIPE)
    with self.assertRaisesRegex(TypeError, "weight=None.*weight, float32.40"):
      dot(X, w, MATMUL)

  def test_rows_of_groups(self):
    recipe = training.MXFP8_RECIPE
    quantize = functools.partial(jp.quantize_operand, recipe=recipe)
    x = jax.jit(functools.partial(quantize, role="activation"))(X)
    w = normal(4, 3, 40, 24)
    ragged = functools.partial(
      training.ragged_dot_general, group_sizes=np.array([3] * 3), recipe=recipe
    )
    with self.assertRaisesRegex(
      NotImplementedError, "lhs must be an unquantized array"
    ):
      ragged(x, w.transpose(0, 2, 1))
    numbers = jax.lax.RaggedDotDimensionNumbers(
      (((1,), (1,)), ((), ())), (0,), (0,)
    )
    w_q = jax.jit(functools.partial(quantize, contracting=2, batch=0))(w)
    with self.assertRaisesRegex(
      TypeError,
      r"dimensions \[1\] and batch dimensions \[0\], got .* \[2\] and",
    ):
      ragged(X, w_q, ragged_dot_dimension_numbers=numbers)

  def test_other_functions_say_what_it_is(self):
    w = jp.quantize_operand(W, training.MXFP8_RECIPE)
    with self.assertRaisesRegex(
      TypeError, r"needs a plain array.*\.primal.*flax"
    ):
      jnp.sin(w)
    with self.assertRaisesRegex(
      TypeError, "rhs must be .*QuantizedOperand.* its .forward, a ScaledArray"
    ):
      jp.block_scaled_dot(X, w)
