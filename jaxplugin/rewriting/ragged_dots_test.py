# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`accelerate`: `jax.lax.ragged_dot` with weights that a model dequantizes."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.rewriting import acceleration_test as constructs
from jaxplugin.rewriting import facts, ragged_dots
from jaxplugin.testing import contract, transformations

G, N, K, M = 4, 24, 64, 13
SIZES = np.array([3, 0, 6, 2], np.int32)
FORMATS = ("mxfp8", "mxfp8_e5m2", "nvfp4", "mxfp4")
OURS, JAXS = "block_scaled_ragged_dot", "ragged_dot_general["
E8M0, E4M3 = jnp.float8_e8m0fnu, jnp.float8_e4m3fn
E2M1 = jnp.float4_e2m1fn


def weights(format, seed=0, shape=(G, N, K)):
  rng = np.random.default_rng(seed)
  w = jax.device_put(rng.normal(size=shape))
  return jp.quantize(w, format, axis=-1)


def rows(seed=1, dtype=jnp.float32):
  x = np.random.default_rng(seed).normal(size=(M, K))
  return jax.device_put(x.astype(np.float32).astype(dtype))


def expected(x, w):
  """The ragged dot with w (groups, n, k), and its magnitudes, in f64."""
  x = np.asarray(x).astype(np.float64)
  found = np.zeros((2, len(x), w.shape[1]))
  ends = np.cumsum(SIZES)
  for start, end, weight in zip(ends - SIZES, ends, w, strict=True):
    found[0, start:end] = x[start:end] @ weight.T
    found[1, start:end] = np.abs(x[start:end]) @ np.abs(weight).T
  return found


def is_within(result, exact):
  value, magnitude = exact
  error = np.abs(np.asarray(result).astype(np.float64) - value)
  return bool((error <= 16 * 2.0**-24 * magnitude).all())


# Ways to dequantize; each gives (groups, k, n) of an unpacked array.


def by_this_package(w):
  return w.dequantize().swapaxes(1, 2)


def by_repeat(w):
  scale = jnp.repeat(w.scale.astype(jnp.bfloat16), w.format.block_size, axis=2)
  return _global(w.values.astype(jnp.bfloat16) * scale, w).swapaxes(1, 2)


def by_blocks(w):
  blocks = w.values.reshape(*w.scale.shape, -1).astype(jnp.float32)
  numbers = blocks * w.scale.astype(jnp.float32)[..., None]
  return jnp.einsum("gnk->gkn", _global(numbers.reshape(w.shape), w))


def by_transposed(w):
  w = w.transpose(0, 2, 1)  # as `lax.ragged_dot` has its weights
  scale = jnp.repeat(w.scale.astype(jnp.float32), w.format.block_size, axis=1)
  return _global(scale * w.values.astype(jnp.float32), w)


def by_jitted_helper(w):
  @jax.jit
  def helper(values, scale):
    scale = jnp.repeat(scale.astype(jnp.float32), w.format.block_size, -1)
    return jnp.swapaxes(values.astype(jnp.float32) * scale, 1, 2)

  return helper(w.values, w.scale) * (
    1 if w.global_scale is None else w.global_scale
  )


def by_bytes(w):
  w = w.to_bytes()
  scale = lax.bitcast_convert_type(w.scale, w.format.scale_dtype)
  values = lax.bitcast_convert_type(w.values, w.format.array_dtype)
  values = values.reshape(w.shape).astype(jnp.float32)
  scale = jnp.repeat(scale.astype(jnp.float32), w.format.block_size, axis=-1)
  return _global(values * scale, w).transpose(0, 2, 1)


def _global(numbers, w):
  return numbers if w.global_scale is None else numbers * w.global_scale


WAYS = {
  f.__name__: f
  for f in (
    *(by_this_package, by_repeat, by_blocks, by_transposed),
    *(by_jitted_helper, by_bytes),
  )
}


def model(dequantize=by_repeat):
  def function(x, w, sizes):
    numbers = dequantize(w).astype(x.dtype)
    return lax.ragged_dot(x, numbers, sizes, preferred_element_type=jnp.float32)

  return function


def text(function, *args):
  return str(jax.make_jaxpr(function)(*args))


def check_rows(test, rows_of, x, w, *sizes):
  """Asserts that each row is replaced and right, by one program of all.

  Args:
    test: the test case.
    rows_of: by name, a function of the arrays, and its result's factor.
    x: rows.
    w: weights.
    *sizes: sizes of groups, if they are an argument.
  """
  args = (x, w, *sizes)
  for name, (function, _) in rows_of.items():
    with test.subTest(name), warnings.catch_warnings():
      warnings.simplefilter("error", jp.NotQuantizedWarning)
      jaxpr = text(function, *args)
      test.assertIn(OURS, jaxpr)
      test.assertNotIn(JAXS, jaxpr)
  program = jax.jit(lambda *args: [f(*args) for f, _ in rows_of.values()])
  exact = expected(x, contract.exact(w))
  for (name, (_, factor)), result in zip(
    rows_of.items(), program(*args), strict=True
  ):
    with test.subTest(name):
      test.assertTrue(is_within(result, factor * exact))


class RaggedDotsTest(parameterized.TestCase):
  """Replaced, and within the contract of the product that is meant."""

  def check(self, function, x, w, exact):
    fast = jp.accelerate(function)
    jaxpr = text(fast, x, w, SIZES)
    self.assertIn(OURS, jaxpr)
    self.assertNotIn(JAXS, jaxpr)
    for run in (fast, jax.jit(fast)):
      self.assertTrue(is_within(run(x, w, SIZES), exact))

  def test_ways(self):
    w = {f: weights(f).unpack() for f in FORMATS}
    x = {dtype: rows(dtype=dtype) for dtype in ("float32", "bfloat16")}
    cases = list(itertools.product(WAYS, w, x))
    functions = [jp.accelerate(model(WAYS[way])) for way, *_ in cases]

    @jax.jit
    def program(x, w):
      return [
        f(x[dtype], w[format], SIZES)
        for f, (_, format, dtype) in zip(functions, cases, strict=True)
      ]

    jaxpr = text(program, x, w)
    self.assertEqual(jaxpr.count(f"{OURS}["), len(cases))
    self.assertNotIn(JAXS, jaxpr)
    exact = {
      (f, d): expected(x[d], contract.exact(w[f]))
      for f, d in itertools.product(w, x)
    }
    for case, result in zip(cases, program(x, w), strict=True):
      with self.subTest(case):
        self.assertTrue(is_within(result, exact[case[1:]]))

  def test_packed(self):
    for format in ("nvfp4", "mxfp4"):
      w = weights(format).pack()
      function = model(by_this_package)
      self.check(function, rows(), w, expected(rows(), contract.exact(w)))
      # The bytes themselves enter the product.
      jaxpr = text(jp.accelerate(function), rows(), w, SIZES)
      self.assertNotIn("f4_e2m1fn", jaxpr)

  def test_prepared(self):
    for format in ("mxfp8", "mxfp4"):
      w = jp.prepare_weights(weights(format))
      self.assertTrue(w.is_bytes)
      exact = expected(rows(), contract.exact(weights(format)))
      self.check(model(by_this_package), rows(), w, exact)

  def test_global_scale_of_a_group(self):
    w = weights("nvfp4").unpack()
    of_group = jnp.arange(1.0, G + 1).reshape(G, 1, 1)
    w = jp.ScaledArray(w.values, w.scale, of_group, "nvfp4")
    self.check(model(), rows(), w, expected(rows(), contract.exact(w)))

  def test_larger_and_square_blocks(self):
    w = weights("mxfp8")
    scale = w.scale[:, ::8, ::2]

    def dequantize(w):
      numbers = w.values.astype(jnp.float32)
      large = jnp.repeat(jnp.repeat(scale.astype(jnp.float32), 8, 1), 64, 2)
      return (numbers * large).swapaxes(1, 2)

    everywhere = jnp.repeat(jnp.repeat(scale, 8, 1), 2, 2)
    alike = jp.ScaledArray(w.values, everywhere, None, "mxfp8")
    self.check(
      model(dequantize), rows(), w, expected(rows(), contract.exact(alike))
    )

  def test_quantized_rows(self):
    w, x_q = weights("nvfp4").unpack(), jp.quantize(rows(), "nvfp4").unpack()

    def function(x, w, sizes):
      return model()(x.dequantize(), w, sizes)

    exact = expected(contract.exact(x_q), contract.exact(w))
    self.check(function, x_q, w, exact)
    jaxpr = jax.make_jaxpr(jp.accelerate(function))(x_q, w, SIZES)
    (eqn,) = [
      e
      for e in transformations.equations(jaxpr.jaxpr)
      if e.primitive.name == OURS
    ]
    self.assertEqual(eqn.invars[0].aval.dtype, E2M1)

  def test_other_dimension_numbers(self):
    w = weights("mxfp8")
    numbers = lax.RaggedDotDimensionNumbers(
      dot_dimension_numbers=(((0,), (2,)), ((), ())),
      lhs_ragged_dimensions=[1],
      rhs_group_dimensions=[1],
    )

    def function(x, w, sizes):
      dense = by_repeat(w).astype(jnp.float32)  # (g, k, n)
      return lax.ragged_dot_general(
        x.T, jnp.transpose(dense, (2, 0, 1)), sizes, numbers
      )

    self.check(function, rows(), w, expected(rows(), contract.exact(w)))

  def test_result_dtype_is_jaxs(self):
    w = weights("mxfp8")
    for dtype in (jnp.bfloat16, jnp.float16):
      function = lambda x, w: lax.ragged_dot(
        x, by_repeat(w).astype(x.dtype), SIZES
      )
      x = rows(dtype=dtype)
      fast = jp.accelerate(function)
      self.assertIn(OURS, text(fast, x, w))
      self.assertEqual(fast(x, w).dtype, dtype)

  def test_constructs(self):
    mapped = jax.vmap(jp.accelerate(model()), (0, None, None))
    rows_of = {
      name: (jp.accelerate(construct(model())), factor)
      for name, (construct, factor, _) in constructs.OF_ANY_ARRAYS.items()
    } | {"vmap": (lambda x, w, sizes: mapped(x[None], w, sizes)[0], 1)}
    check_rows(self, rows_of, rows(), weights("mxfp8"), SIZES)

  def test_scan_of_stacked_weights(self):
    w, x = weights("mxfp8"), rows()
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), w)
    scan = lambda x, stack, s: lax.scan(
      lambda c, w: (c, model()(x, w, s)), 0, stack
    )[1][1]
    self.check(scan, x, stack, expected(x, contract.exact(w)))

  def test_out_sharding_is_that_of_the_result(self):
    if jax.device_count() < 4:
      self.skipTest(f"needs 4 devices, has {jax.device_count()}")
    mesh = jax.make_mesh(
      (4,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4]
    )
    put = lambda x, *spec: jax.device_put(
      np.asarray(x), NamedSharding(mesh, P(*spec))
    )

    def function(x, w):
      numbers = w.dequantize().swapaxes(1, 2)
      return lax.ragged_dot(x, numbers, SIZES, out_sharding=P(None, "a"))

    x, w = rows(), weights("mxfp8")
    with jax.set_mesh(mesh):
      sharded = jax.tree.map(lambda leaf: put(leaf, "a"), w)
      accelerated = jp.accelerate(function)
      result = jax.jit(accelerated)(put(x), sharded)
      program = text(accelerated, put(x), sharded)
    self.assertEqual(jax.typeof(result).sharding.spec, P(None, "a"))
    self.assertIn(OURS, program)
    # A row is of one device's group.
    np.testing.assert_array_equal(
      np.asarray(result), np.asarray(jp.ragged_dot(x, w, SIZES))
    )

  def test_explain(self):
    args = rows(), weights("mxfp4").unpack(), SIZES
    report = jp.explain(jp.accelerate(model()), *args).details()
    self.assertIn("ragged_dot", report)
    self.assertIn("mxfp4", report)


class GradientsTest(parameterized.TestCase):
  @parameterized.product(is_inside=(False, True), is_jitted=(False, True))
  @pytest.mark.sample(2)
  def test_gradient_of_rows(self, is_inside, is_jitted):
    w, x = weights("mxfp8"), rows()
    factors = jnp.asarray(np.random.default_rng(5).normal(size=(M, N)))

    def loss(f):
      return jax.grad(lambda x: jnp.sum(f(x, w, SIZES) * factors))

    f = model()
    gradient = jp.accelerate(loss(f)) if is_inside else loss(jp.accelerate(f))
    gradient = jax.jit(gradient) if is_jitted else gradient
    self.assertNotIn(JAXS, text(gradient, x))
    exact = expected(factors, contract.exact(w).transpose(0, 2, 1))
    self.assertTrue(is_within(gradient(x), exact))

  @parameterized.parameters(False, True)
  @pytest.mark.sample(1)
  def test_other_leaves_keep_jaxs_gradients(self, is_inside):
    # The global scale and the scales' own, through the dequantized weights.
    w, x = weights("nvfp4").unpack(), rows()

    def loss(f, global_scale, scale):
      def of(w_values, scale, global_scale):
        def dequantize(_):
          numbers = w_values.astype(jnp.float32)
          numbers *= jnp.repeat(scale.astype(jnp.float32), 16, axis=-1)
          return (numbers * global_scale).swapaxes(1, 2)

        return jnp.sum(jnp.sin(f(dequantize)(x, None, SIZES)))

      return of(w.values, scale, global_scale)

    inner = lambda dequantize: jp.accelerate(
      lambda x, _, s: model(dequantize)(x, None, s)
    )
    args = (w.global_scale, w.scale)
    plain = jax.grad(functools.partial(loss, model), argnums=(0, 1))
    if is_inside:
      fast = jp.accelerate(plain)
    else:
      fast = jp.accelerate(
        jax.grad(functools.partial(loss, inner), argnums=(0, 1))
      )
    for ours, jaxs in zip(
      jax.jit(fast)(*args), jax.jit(plain)(*args), strict=True
    ):
      self.assertEqual(ours.dtype, jaxs.dtype)
      ours, jaxs = (np.asarray(x).astype(np.float32) for x in (ours, jaxs))
      np.testing.assert_allclose(ours, jaxs, rtol=1e-4, atol=1e-4)
      self.assertGreater(np.abs(jaxs).max(), 0)


def with_blocks_of_16(w):
  scale = jnp.repeat(w.scale.astype(jnp.float32), 2, 2)
  scale = jnp.repeat(scale[:, :, :4] + 0, 1, 2).astype(E8M0)
  scale = jnp.repeat(scale.astype(jnp.float32), 16, axis=2)
  return (w.values.astype(jnp.float32) * scale).swapaxes(1, 2)


def with_interleaved_blocks(w):
  scale = jnp.tile(w.scale.astype(jnp.float32), (1, 1, 32))
  return (w.values.astype(jnp.float32) * scale).swapaxes(1, 2)


def batched(x, w):
  stacked = jax.tree.map(lambda leaf: leaf[None], w)
  return jax.vmap(model())(x[None], stacked, SIZES[None])


def of_weights(numbers):
  return lambda x, w: lax.ragged_dot(x, numbers(x, w), SIZES)


# By name: a function of rows and weights, and the warning if its weights are
# block-scaled.
LEFT = {
  "plain": (of_weights(lambda x, w: jnp.ones((G, K, N))), None),
  "one_scale_for_all": (
    of_weights(lambda x, w: w.values.astype(jnp.float32).swapaxes(1, 2) * 0.25),
    None,
  ),
  "gradient_of_weights": (
    lambda x, w: lax.ragged_dot_general(
      x,
      x,
      SIZES,
      lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], []),
    ),
    None,
  ),
  "added": (of_weights(lambda x, w: by_repeat(w) + 1), "add changes"),
  "scale_of_a_column": (
    of_weights(lambda x, w: by_repeat(w) * x[0, :N]), "not per block"
  ),
  "unknown_format": (
    of_weights(lambda x, w: with_blocks_of_16(w)), "not a known format"
  ),
  "interleaved_blocks": (
    of_weights(lambda x, w: with_interleaved_blocks(w)),
    "not consecutive elements",
  ),
  "batch": (batched, "batch dimensions"),
}  # fmt: skip


class LeftTest(parameterized.TestCase):
  """Stays JAX's; with a warning where the weights are block-scaled."""

  def check_left(self, function, *args, warning=None):
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      jaxpr = text(jp.accelerate(function), *args)
    self.assertNotIn(OURS, jaxpr)
    self.assertIn(JAXS, jaxpr)
    self.assertEqual({w.category for w in caught}, {jp.NotQuantizedWarning})
    messages = [str(w.message) for w in caught]
    self.assertLen(messages, 1)
    if warning is None:
      self.assertIn("accelerate: replaced nothing", messages[0])
    else:
      self.assertRegex(messages[0], f"left JAX's ragged_dot_general.*{warning}")
      self.assertIn("ragged_dots_test.py", messages[0])

  @parameterized.named_parameters((name, *row) for name, row in LEFT.items())
  def test_left(self, function, warning):
    self.check_left(function, rows(), weights("mxfp8"), warning=warning)

  def test_random_keys_pass(self):
    function = lambda key, x, w: lax.ragged_dot(
      x, w + jax.random.normal(jax.random.split(key)[0], w.shape), SIZES
    )
    self.check_left(function, jax.random.key(0), rows(), jnp.ones((G, K, N)))

  def test_implementation_of_other_dots(self):
    fast = jp.accelerate(model(), implementation="cudnn")
    with self.assertWarnsRegex(UserWarning, "no implementation 'cudnn'"):
      self.assertIn(JAXS, text(fast, rows(), weights("mxfp8"), SIZES))

  def test_group_offset(self):
    # JAX 0.10.2 cannot bind one: it is a parameter, and an array has no hash.
    numbers = lax.RaggedDotDimensionNumbers(
      dot_dimension_numbers=(((1,), (2,)), ((), ())),
      lhs_ragged_dimensions=[0],
      rhs_group_dimensions=[0],
    )
    params = {"ragged_dot_dimension_numbers": numbers, "out_sharding": None}
    w = weights("mxfp8")
    args = rows(), w.dequantize(), SIZES, np.array([1], np.int32)
    operation = binding_private.BoundOperation(None, args, params)
    with self.assertRaisesRegex(facts.NotSupported, "has a group_offset"):
      ragged_dots.multiplied(operation, None, w, None)

  def test_result_dtype(self):
    w = weights("mxfp8")
    with jax.enable_x64(True):
      function = lambda x, w: lax.ragged_dot(
        x,
        by_repeat(w).astype(x.dtype),
        SIZES,
        preferred_element_type=np.float64,
      )
      self.check_left(function, rows(), w, warning="result is float64")


DEVICES = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))


def in_shard_map(f):
  return jax.shard_map(
    f, mesh=DEVICES, in_specs=P(), out_specs=P(), check_vma=False
  )


def in_carry(f):
  def scan(x, w, sizes):
    step = lambda carry, _: (carry, f(x, carry, sizes))
    return lax.scan(step, w, None, length=1)[1][0]

  return scan


def in_scaled_matmul(f):
  """`jax.nn.scaled_matmul` is a jitted function of this name."""

  def _scaled_matmul(x, w, sizes):
    return f(x, w, sizes)

  return jax.jit(_scaled_matmul)


# Functions that are given dequantized weights, as a library's are, by name with
# their factors. Each takes rows, weights (groups, k, n) and sizes. Weights are
# not followed into a linear solve or a composite.
LIBRARY = {
  name: (construct(lax.ragged_dot), factor)
  for name, (construct, factor, _) in constructs.OF_ANY_ARRAYS.items()
  if name not in ("custom_linear_solve", "composite")
} | {
  "jit_of_custom_vjp": (jax.jit(constructs.in_custom_vjp(lax.ragged_dot)), 1),
  "carry": (in_carry(lax.ragged_dot), 1),
  "scaled_matmul": (in_scaled_matmul(lax.ragged_dot), 1),
  "shard_map": (in_shard_map(lax.ragged_dot), 1),
}


class InnerFunctionsTest(absltest.TestCase):
  """Dequantized weights are followed into functions inside."""

  def check(self, transform, f):
    rows_of = {
      name: (transform(f(library)), factor)
      for name, (library, factor) in LIBRARY.items()
    }
    check_rows(self, rows_of, rows(), weights("mxfp8"))

  def test_accelerate(self):
    f = lambda library: lambda x, w: library(x, by_blocks(w), SIZES)
    self.check(jp.accelerate, f)

  def test_accept_quantized(self):
    f = lambda library: lambda x, w: library(x, w.swapaxes(1, 2), SIZES)
    self.check(jp.accept_quantized, f)

  def test_scan_over_stacked_experts(self):
    stack = weights("mxfp8", shape=(2, G, N, K))

    def over(stack):
      step = lambda sum, w: (sum + lax.ragged_dot(rows(), w, SIZES), None)
      scale = jnp.repeat(stack.scale.astype(jnp.float32), 32, axis=-1)
      w = (stack.values.astype(jnp.float32) * scale).swapaxes(2, 3)
      return lax.scan(step, jnp.zeros((M, N)), w)[0]

    function = jax.jit(jp.accelerate(over))
    jaxpr = text(function, stack)
    self.assertIn(OURS, jaxpr)
    self.assertNotIn(JAXS, jaxpr)
    exact = sum(expected(rows(), w) for w in contract.exact(stack))
    self.assertTrue(is_within(function(stack), exact))

  def test_forward_of_a_custom_vjp_is_followed_under_a_gradient(self):
    ragged = jax.custom_vjp(lambda x, w, sizes: lax.ragged_dot(x, w, sizes))
    ragged.defvjp(
      lambda *args: (lax.ragged_dot(*args), args[1:]),
      lambda kept, g: (
        lax.ragged_dot(g, kept[0].swapaxes(1, 2), kept[1]),
        None,
        None,
      ),
    )
    loss = jp.accelerate(lambda x, w: ragged(x, by_blocks(w), SIZES).sum())
    jaxpr = text(jax.grad(loss), rows(), weights("mxfp8"))
    self.assertIn(OURS, jaxpr)

  def test_part_of_a_weight_in_a_shard_map_is_named(self):
    function = jp.accelerate(
      lambda x, w: jax.shard_map(
        lambda x, w: lax.ragged_dot(x, w, SIZES),
        mesh=DEVICES,
        in_specs=(P(), P(None, None, "a")),
        out_specs=P(None, "a"),
        check_vma=False,
      )(x, by_blocks(w))
    )
    with self.assertWarnsRegex(jp.NotQuantizedWarning, "shard_map splits the"):
      text(function, rows(), weights("mxfp8"))

  def test_accept_quantized_that_multiplies_by_no_weight_warns(self):
    function = jp.accept_quantized(lambda x, w: x + 1)
    with self.assertWarnsRegex(jp.NotQuantizedWarning, "by none of its 1"):
      text(function, rows(), weights("mxfp8"))
