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
from absl.testing import absltest
from absl.testing import parameterized
from jax import lax
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.rewriting import facts
from jaxplugin.rewriting import ragged_dots
from jaxplugin.testing import transformations

G, N, K, M = 4, 24, 64, 13
SIZES = np.array([3, 0, 6, 2], np.int32)
FORMATS = ("mxfp8", "mxfp8_e5m2", "nvfp4", "mxfp4")
OURS, JAXS = "block_scaled_ragged_dot", "ragged_dot_general["
E8M0, E4M3 = jnp.float8_e8m0fnu, jnp.float8_e4m3fn
E2M1 = jnp.float4_e2m1fn


def weights(format, seed=0, shape=(G, N, K)):
  rng = np.random.default_rng(seed)
  w = jnp.asarray(rng.normal(size=shape), jnp.float32)
  return jp.quantize(w, format, axis=-1)


def rows(seed=1, dtype=jnp.float32):
  x = np.random.default_rng(seed).normal(size=(M, K))
  return jnp.asarray(x, jnp.float32).astype(dtype)


def in_f64(w_q):
  """Dequantizes by NumPy, in f64."""
  w_q = w_q.unpack()
  block = w_q.format.block_size
  numbers = np.asarray(w_q.values).astype(np.float64)
  numbers *= np.repeat(np.asarray(w_q.scale).astype(np.float64), block, -1)
  if w_q.global_scale is not None:
    numbers *= np.asarray(w_q.global_scale, np.float64)
  return numbers


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
      (f, d): expected(x[d], in_f64(w[f])) for f, d in itertools.product(w, x)
    }
    for case, result in zip(cases, program(x, w), strict=True):
      with self.subTest(case):
        self.assertTrue(is_within(result, exact[case[1:]]))

  def test_packed(self):
    for format in ("nvfp4", "mxfp4"):
      w = weights(format).pack()
      fast = jp.accelerate(model(by_this_package))
      self.check(fast, rows(), w, expected(rows(), in_f64(w)))
      # The bytes themselves enter the product.
      jaxpr = text(fast, rows(), w, SIZES)
      self.assertNotIn("f4_e2m1fn", jaxpr)

  def test_prepared(self):
    for format in ("mxfp8", "mxfp4"):
      w = jp.prepare_weights(weights(format))
      self.assertTrue(w.is_bytes)
      exact = expected(rows(), in_f64(weights(format)))
      self.check(model(by_this_package), rows(), w, exact)

  def test_global_scale_of_a_group(self):
    w = weights("nvfp4").unpack()
    of_group = jnp.arange(1.0, G + 1).reshape(G, 1, 1)
    w = jp.ScaledArray(w.values, w.scale, of_group, "nvfp4")
    self.check(model(), rows(), w, expected(rows(), in_f64(w)))

  def test_larger_and_square_blocks(self):
    w = weights("mxfp8")
    scale = w.scale[:, ::8, ::2]

    def dequantize(w):
      numbers = w.values.astype(jnp.float32)
      large = jnp.repeat(jnp.repeat(scale.astype(jnp.float32), 8, 1), 64, 2)
      return (numbers * large).swapaxes(1, 2)

    everywhere = jnp.repeat(jnp.repeat(scale, 8, 1), 2, 2)
    alike = jp.ScaledArray(w.values, everywhere, None, "mxfp8")
    self.check(model(dequantize), rows(), w, expected(rows(), in_f64(alike)))

  def test_quantized_rows(self):
    w, x_q = weights("nvfp4").unpack(), jp.quantize(rows(), "nvfp4").unpack()

    def function(x, w, sizes):
      return model()(x.dequantize(), w, sizes)

    exact = expected(in_f64(x_q), in_f64(w))
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

    self.check(function, rows(), w, expected(rows(), in_f64(w)))

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

  @parameterized.parameters("scan", "checkpoint", "cond", "nested_jit", "vmap")
  @pytest.mark.sample(3)
  def test_constructs(self, construct):
    w, x = weights("mxfp8"), rows()
    f = model()
    exact = expected(x, in_f64(w))
    if construct == "scan":
      stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), w)
      function = lambda x, w, s: lax.scan(
        lambda c, w: (c, f(x, w, s)), 0, stacked
      )[1][1]
    elif construct == "cond":
      function = lambda x, w, s: lax.cond(
        s[0] > 0, lambda: f(x, w, s), lambda: jnp.zeros((M, N))
      )
    elif construct == "vmap":
      function = lambda x, w, s: jax.vmap(jp.accelerate(f), (0, None, None))(
        x[None], w, s
      )[0]
    else:
      wrap = {"checkpoint": jax.checkpoint, "nested_jit": jax.jit}[construct]
      function = wrap(f)
    fast = jp.accelerate(function)
    self.assertIn(OURS, text(fast, x, w, SIZES))
    self.assertTrue(is_within(jax.jit(fast)(x, w, SIZES), exact))

  def test_out_sharding_is_that_of_the_result(self):
    if jax.device_count() < 4:
      self.skipTest(f"needs 4 devices, has {jax.device_count()}")
    mesh = jax.make_mesh(
      (4,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4]
    )
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))

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
    exact = expected(factors, in_f64(w).transpose(0, 2, 1))
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
    for ours, jaxs in zip(jax.jit(fast)(*args), plain(*args), strict=True):
      self.assertEqual(ours.dtype, jaxs.dtype)
      ours, jaxs = (np.asarray(x).astype(np.float32) for x in (ours, jaxs))
      np.testing.assert_allclose(ours, jaxs, rtol=1e-4, atol=1e-4)
      self.assertGreater(np.abs(jaxs).max(), 0)


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

  def test_plain(self):
    function = lambda x, w: lax.ragged_dot(x, w, SIZES)
    self.check_left(function, rows(), jnp.ones((G, K, N)))

  def test_one_scale_for_all(self):
    w = weights("mxfp8")
    function = lambda x, w: lax.ragged_dot(
      x, w.values.astype(jnp.float32).swapaxes(1, 2) * 0.25, SIZES
    )
    self.check_left(function, rows(), w)

  def test_random_keys_pass(self):
    function = lambda key, x, w: lax.ragged_dot(
      x, w + jax.random.normal(jax.random.split(key)[0], w.shape), SIZES
    )
    self.check_left(function, jax.random.key(0), rows(), jnp.ones((G, K, N)))

  def test_what_is_no_product(self):
    w = weights("mxfp8")
    function = lambda x, w: lax.ragged_dot(
      x, by_repeat(w).astype(x.dtype) + 1, SIZES
    )
    self.check_left(function, rows(), w, warning="add changes")

  def test_gradient_of_weights(self):
    numbers = lax.RaggedDotDimensionNumbers(
      dot_dimension_numbers=(((0,), (0,)), ((), ())),
      lhs_ragged_dimensions=[0],
      rhs_group_dimensions=[],
    )
    function = lambda x, y: lax.ragged_dot_general(x, y, SIZES, numbers)
    self.check_left(function, rows(), rows())

  def test_scale_of_a_column(self):
    w = weights("mxfp8")
    function = lambda x, w, column: lax.ragged_dot(
      x, by_repeat(w).astype(x.dtype) * column, SIZES
    )
    self.check_left(
      function, rows(), w, jnp.ones((N,)), warning="not per block"
    )

  def test_unknown_format(self):
    w = weights("mxfp8")

    def dequantize(w):
      scale = jnp.repeat(w.scale.astype(jnp.float32), 2, 2)  # blocks of 16
      scale = jnp.repeat(scale[:, :, :4] + 0, 1, 2).astype(E8M0)
      scale = jnp.repeat(scale.astype(jnp.float32), 16, axis=2)
      return (w.values.astype(jnp.float32) * scale).swapaxes(1, 2)

    self.check_left(
      model(dequantize), rows(), w, SIZES, warning="not a known format"
    )

  def test_implementation_of_other_dots(self):
    fast = jp.accelerate(model(), implementation="cudnn")
    with self.assertWarnsRegex(UserWarning, "no implementation 'cudnn'"):
      self.assertIn(JAXS, text(fast, rows(), weights("mxfp8"), SIZES))

  def test_interleaved_blocks(self):
    def dequantize(w):
      scale = jnp.tile(w.scale.astype(jnp.float32), (1, 1, 32))
      return (w.values.astype(jnp.float32) * scale).swapaxes(1, 2)

    self.check_left(
      *(model(dequantize), rows(), weights("mxfp8"), SIZES),
      warning="not consecutive elements",
    )

  def test_batch(self):
    w = weights("mxfp8")
    stacked = jax.tree.map(lambda leaf: leaf[None], w)
    f = lambda x, w, sizes: model()(x, w, sizes)
    args = (rows()[None], stacked, SIZES[None])
    self.check_left(jax.vmap(f), *args, warning="batch dimensions")

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
    with self.assertRaisesRegex(facts.NotSupported, "has a group_offset"):
      ragged_dots.multiplied(None, args, params, lambda dims: w, None)

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


@jax.custom_vjp
def ragged_of_a_library(x, w, sizes):
  return lax.ragged_dot(x, w, sizes)


ragged_of_a_library.defvjp(
  lambda x, w, sizes: (lax.ragged_dot(x, w, sizes), (w, sizes)),
  lambda kept, g: (
    lax.ragged_dot(g, kept[0].swapaxes(1, 2), kept[1]),
    None,
    None,
  ),
)


@jax.custom_jvp
def ragged_with_jvp(x, w, sizes):
  return lax.ragged_dot(x, w, sizes)


ragged_with_jvp.defjvp(
  lambda primals, tangents: (
    lax.ragged_dot(*primals),
    lax.ragged_dot(tangents[0], *primals[1:]),
  )
)


@jax.custom_batching.custom_vmap
def ragged_with_vmap(x, w, sizes):
  return lax.ragged_dot(x, w, sizes)


ragged_with_vmap.def_vmap(
  lambda size, batched, *args: (lax.ragged_dot(*args), True)
)

DEVICES = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))


def in_shard_map(x, w, sizes):
  return jax.shard_map(
    lax.ragged_dot, mesh=DEVICES, in_specs=P(), out_specs=P(), check_vma=False
  )(x, w, sizes)


def in_while(x, w, sizes):
  step = lambda c: (c[0] + 1, c[1] + lax.ragged_dot(x, w, sizes))
  return lax.while_loop(lambda c: c[0] < 1, step, (0, jnp.zeros((M, N))))[1]


def in_cond(x, w, sizes):
  branch = lambda: lax.ragged_dot(x, w, sizes)
  return lax.cond(x[0, 0] < 9, branch, lambda: branch() + 1)


def in_scan(x, w, sizes):
  step = lambda carry, _: (carry + lax.ragged_dot(x, w, sizes), None)
  return lax.scan(step, jnp.zeros((M, N)), None, length=1)[0]


def in_carry(x, w, sizes):
  step = lambda carry, _: (carry, lax.ragged_dot(x, carry, sizes))
  return lax.scan(step, w, None, length=1)[1][0]


# Functions that are given dequantized weights, as a library's are. Each takes
# rows, weights (groups, k, n) and sizes.
LIBRARY = {
  "jit": jax.jit(lax.ragged_dot),
  "jit_in_jit": jax.jit(lambda *args: jax.jit(lax.ragged_dot)(*args)),
  "custom_vjp": ragged_of_a_library,
  "jit_of_custom_vjp": jax.jit(ragged_of_a_library),
  "custom_jvp": ragged_with_jvp,
  "custom_vmap": ragged_with_vmap,
  "checkpoint": jax.checkpoint(lax.ragged_dot),
  "cond": in_cond,
  "while": in_while,
  "scan": in_scan,
  "carry": in_carry,
  "shard_map": in_shard_map,
}


class InnerFunctionsTest(absltest.TestCase):
  """Dequantized weights are followed into functions inside."""

  def check(self, transform, f, *args):
    """All rows in one program: the contract, and nothing left to JAX."""
    exact = expected(args[0], in_f64(args[1]))
    for name, library in LIBRARY.items():
      with self.subTest(name), warnings.catch_warnings():
        warnings.simplefilter("error", jp.NotQuantizedWarning)
        jaxpr = text(transform(f(library)), *args)
        self.assertIn(OURS, jaxpr)
        self.assertNotIn(JAXS, jaxpr)
    every = [transform(f(library)) for library in LIBRARY.values()]
    results = jax.jit(lambda *args: [each(*args) for each in every])(*args)
    for name, result in zip(LIBRARY, results, strict=True):
      with self.subTest(name):
        self.assertTrue(is_within(result, exact))

  def test_accelerate(self):
    f = lambda library: lambda x, w: library(x, by_blocks(w), SIZES)
    self.check(jp.accelerate, f, rows(), weights("mxfp8"))

  def test_accept_quantized(self):
    f = lambda library: lambda x, w: library(x, w.swapaxes(1, 2), SIZES)
    self.check(jp.accept_quantized, f, rows(), weights("mxfp8"))

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
    exact = sum(expected(rows(), w) for w in in_f64(stack))
    self.assertTrue(is_within(function(stack), exact))

  def test_forward_of_a_custom_vjp_is_followed_under_a_gradient(self):
    loss = jp.accelerate(
      lambda x, w: ragged_of_a_library(x, by_blocks(w), SIZES).sum()
    )
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


if __name__ == "__main__":
  absltest.main()
