# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`dot_general`'s arguments, and its shardings, are those of JAX's own."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.dot import reference
from jaxplugin.lab.compilation import deviceless
from jaxplugin.lab.planning import collectives
from jaxplugin.testing import installed
from jaxplugin.testing.meshes import explicit
from jaxplugin.testing.oracles import gradients_oracle

MATMUL = (((1,), (0,)), ((), ()))
DOT_GENERAL = jp.dot_general(jp.MXFP8, jp.MXFP8)
# Integers whose quantization, products and sums are all exact.
X = np.random.default_rng(0).integers(-4, 5, (64, 128)).astype(np.float32)
W = np.random.default_rng(1).integers(-4, 5, (128, 32)).astype(np.float32)
C = np.random.default_rng(2).integers(-4, 5, (64, 32)).astype(np.float32)


class SignatureTest(absltest.TestCase):
  def test_arguments_are_those_of_lax_dot_general_and_a_key(self):
    # The installed JAX: the test fails if a newer one adds an argument.
    simplify = lambda function: [
      (p.name, p.kind, p.default)
      for p in inspect.signature(function).parameters.values()
    ]
    expected = simplify(jax.lax.dot_general)
    at = [name for name, *_ in expected].index("out_sharding")
    expected.insert(at, ("key", inspect.Parameter.KEYWORD_ONLY, None))
    self.assertEqual(simplify(DOT_GENERAL), expected)


class ExplicitTest(explicit.ExplicitTestCase):
  def outcome(self, dot_general, x, w, out_sharding):
    """Results, a tangent and gradients, and the shardings in their types."""
    dot = lambda x, w: dot_general(x, w, MATMUL, out_sharding=out_sharding)

    @jax.jit
    def run(x, w):
      result, tangent = jax.jvp(lambda x: dot(x, w), (x,), (-x,))
      loss = lambda x, w: (dot(x, w) * C).sum()
      return result, tangent, *jax.grad(loss, (0, 1))(x, w)

    arrays = run(x, w)
    return [np.asarray(a) for a in arrays], [
      jax.typeof(a).sharding.spec for a in arrays
    ]

  @parameterized.parameters(
    (P("a"), P(None, "b"), None),
    (P(), P(), None),
    # k is sharded, and the result says how.
    (P("a", "b"), P("b"), P("a", None)),
    # The sum is scattered.
    (P("a", "b"), P("b"), P("a", "b")),
    (P(None, "b"), P("b"), P(("a", "b"))),
    # Operands are gathered.
    (P("a"), P(None, "b"), P()),
    (P("a"), P(None, "a"), P(None, "a")),
  )
  @pytest.mark.sample(1)
  def test_shardings_are_those_of_lax_dot_general(self, x_spec, w_spec, out):
    with jax.set_mesh(self.mesh):
      x, w = self.put(X, x_spec), self.put(W, w_spec)
      arrays, specs = self.outcome(DOT_GENERAL, x, w, out)
      _, expected_specs = self.outcome(jax.lax.dot_general, x, w, out)
    self.assertEqual(specs, expected_specs)
    # C is quantized too, exactly.
    product = X @ W
    exact = product, -product, C @ W.T, X.T @ C
    for actual, expected in zip(arrays, exact, strict=True):
      np.testing.assert_array_equal(actual, expected)

  @parameterized.parameters(
    # It is ambiguous where the sum should be.
    (P(None, "b"), P("b"), None),
    (P("a"), P(None, "a"), None),
    (P("a"), P("b"), P("c")),
  )
  def test_errors_are_those_of_lax_dot_general(self, x_spec, w_spec, out):
    with jax.set_mesh(self.mesh):
      x, w = self.put(X, x_spec), self.put(W, w_spec)
      with self.assertRaises(Exception) as expected:
        jax.lax.dot_general(x, w, MATMUL, out_sharding=out)
      message = str(expected.exception).splitlines()[0]
      with self.assertRaisesRegex(type(expected.exception), re.escape(message)):
        DOT_GENERAL(x, w, MATMUL, out_sharding=out)

  def test_axes_that_are_not_explicit_cannot_be_named(self):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), self.assertRaisesRegex(ValueError, "type Auto"):
      DOT_GENERAL(X, W, MATMUL, out_sharding=P("a"))

  def test_unreduced_result_is_refused(self):
    with jax.set_mesh(self.mesh):
      x, w = self.put(X, P(None, "b")), self.put(W, P("b"))
      with self.assertRaisesRegex(NotImplementedError, r"unreduced={'b'}"):
        DOT_GENERAL(x, w, MATMUL, out_sharding=P(unreduced={"b"}))

  def test_einsum_and_vmap_pass_it_on(self):
    with jax.set_mesh(self.mesh):
      x, w = self.put(np.stack([X, -X]), P(None, "a")), self.put(W, P())
      result = jnp.einsum(
        "bmk,kn->bmn",
        x,
        w,
        out_sharding=P(None, None, "b"),
        _dot_general=DOT_GENERAL,
      )
      self.assertEqual(jax.typeof(result).sharding.spec, P(None, None, "b"))
      np.testing.assert_array_equal(result, np.stack([X @ W, -X @ W]))
      mapped = jax.jit(
        jax.vmap(lambda x: DOT_GENERAL(x, w, MATMUL, out_sharding=P(None, "b")))
      )(x)
      self.assertEqual(jax.typeof(mapped).sharding.spec, P(None, None, "b"))
      np.testing.assert_array_equal(mapped, np.stack([X @ W, -X @ W]))

  def test_operands_that_need_reshaping_keep_their_shardings(self):
    # Backward rows of all batches are contracted, padded to whole blocks.
    x = X.reshape(4, 16, 128)
    numbers = (((2,), (0,)), ((), ()))

    def loss(dot_general, x, w):
      result = dot_general(x, w, numbers)
      return (result * C.reshape(4, 16, 32)).sum()

    with jax.set_mesh(self.mesh):
      args = self.put(x, P("a", "b")), self.put(W, P())
      grads = jax.jit(jax.grad(loss, argnums=(1, 2)), static_argnums=0)
      actual, expected = (
        grads(f, *args) for f in (DOT_GENERAL, jax.lax.dot_general)
      )
    for a, e in zip(actual, expected, strict=True):
      self.assertEqual(jax.typeof(a), jax.typeof(e))
      np.testing.assert_array_equal(a, e)


# Two layers trained in the usual layouts of explicit mesh axes.
B, S, D, F = 8, 64, 128, 256
NUMBERS = (((2,), (0,)), ((), ()))

# Specs of x, both weights, and the results of both matmuls.
LAYOUTS = {
  "dp": (P(("f", "t")), P(), P(), None, None),
  "fsdp": (P("f"), P("f"), P("f"), P("f"), P("f")),
  "fsdp_of_all": (P("f"), P(("f", "t")), P(("t", "f")), P("f"), P("f")),
  "tp": (P(), P(None, "t"), P("t"), None, P()),
  "tp_sp": (P(None, "t"), P(None, "t"), P("t"), P(None, None, "t"),
    P(None, "t")),
  "fsdp_tp": (P("f"), P("f", "t"), P("t", "f"), P("f", None, "t"), P("f")),
  "fsdp_tp_sp": (P("f", "t"), P("f", "t"), P("t", "f"), P("f", None, "t"),
    P("f", "t")),
  "two_dims_of_weights": (P("f", None, "t"), P("t", "f"), P("f", "t"), P("f"),
    P("f", None, "t")),
}  # fmt: skip


def _integers(seed, *shape):
  random = np.random.default_rng(seed)
  return random.integers(-2, 3, shape).astype(np.float32)


def _arrays():
  # Quantization, products and sums are all exact in MXFP8.
  arrays = _integers(0, B, S, D), _integers(1, D, F), _integers(2, F, D) / 8
  return arrays, _integers(3, B, S, D)


def _layers(dot_general, outs, arrays, c):
  x, first, second = arrays
  hidden = dot_general(x, first, NUMBERS, out_sharding=outs[0])
  result = dot_general(
    jnp.maximum(hidden, 0), second, NUMBERS, out_sharding=outs[1]
  )
  return (result * c).sum(), result


@pytest.mark.full
class LayoutsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.mesh = explicit.mesh(self, ("f", "t"))

  def step(self, dot_general, outs):
    def function(arrays, c):
      return _layers(dot_general, outs, arrays, c)

    return jax.jit(jax.grad(function, has_aux=True))

  def check(self, layout, dot_general, bound=0):
    """Bits of one device, and the types of `lax.dot_general`.

    `bound` is of an error in units of the largest number of an array.
    """
    *specs, hidden, out = LAYOUTS[layout]
    arrays, c = _arrays()
    expected = self.step(dot_general, (None, None))(arrays, c)
    step = self.step(dot_general, (hidden, out))
    with jax.set_mesh(self.mesh):
      put = functools.partial(explicit.put, self.mesh)
      arrays = tuple(map(put, arrays, specs))
      c = put(c, specs[0] if out is None else out)
      lowered = step.lower(arrays, c)
      found = lowered.compile()(arrays, c)
      types = jax.eval_shape(
        self.step(jax.lax.dot_general, (hidden, out)), arrays, c
      )
    # All is in the types: the partitioner calls nothing back.
    text = lowered.as_text()
    self.assertNotIn("jaxplugin_partitioned", text)
    self.assertNotIn("CustomSPMDPartitioning", text)
    for actual, e, t in zip(
      *map(jax.tree.leaves, (found, expected, types)), strict=True
    ):
      atol = bound * np.abs(np.asarray(e)).max()
      np.testing.assert_allclose(actual, e, rtol=0, atol=atol)
      self.assertEqual(jax.typeof(actual).sharding, t.sharding)

  @parameterized.parameters(*LAYOUTS)
  def test_mxfp8(self, layout):
    self.check(layout, jp.dot_general(jp.MXFP8, jp.MXFP8))

  @parameterized.parameters("fsdp_tp_sp", "two_dims_of_weights")
  def test_nvfp4_recipe(self, layout):
    dot_general = jp.dot_general(recipe=jp.training.NVFP4_RECIPE, weight="rhs")
    key = jax.random.key(0)
    # Devices exchange sums that are not integers.
    self.check(
      layout,
      lambda *args, **kw: dot_general(*args, key=key, **kw),
      bound=2.0**-20,
    )


B200 = jp.named_target("b200", cudnn="9.13")
NUM_DEVICES = 8
# [batch, sequence, channels] and hidden channels.
ROWS, HIDDEN = (4, 128, 256), 512
# Axes of the mesh: f splits the batch and weights, t hidden channels, and with
# sequence parallelism the sequence too, where all channels are on each device.
TOKENS = {"tp": P("f"), "fsdp+tp+sp": P("f", "t")}
MESHES = {"tp": (1, 4), "fsdp+tp+sp": (2, 2)}


def step_of(dot_general, mesh, tokens):
  """The MLP's result and its gradients by weights and x."""

  def constrained(x, *axes):
    sharding = NamedSharding(mesh, P(*axes))
    return jax.lax.with_sharding_constraint(x, sharding)

  def forward(weights, x):
    up, down = weights
    y = constrained(dot_general(x, up, NUMBERS), "f", None, "t")
    y = constrained(jax.nn.relu(y), "f", None, "t")
    return constrained(dot_general(y, down, NUMBERS), *tokens)

  def step(up, down, x, g):
    y, vjp = jax.vjp(forward, (up, down), x)
    (up, down), x = vjp(g)
    return (
      y,
      constrained(up, "f", "t"),
      constrained(down, "t", "f"),
      constrained(x, *tokens),
    )

  return step


@functools.cache
def sent(layout, format):
  """What one device receives, as XLA's compiler for B200 has it."""
  mesh = deviceless.mesh(B200, MESHES[layout], ("f", "t"))
  dot_general = jax.lax.dot_general
  if format is not None:
    dot_general = jp.dot_general(format, format)
  tokens, channels = TOKENS[layout], ROWS[-1]
  arguments = [
    jax.ShapeDtypeStruct(
      shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)
    )
    for shape, spec in (
      ((channels, HIDDEN), P("f", "t")),
      ((HIDDEN, channels), P("t", "f")),
      *((ROWS, tokens), (ROWS, tokens)),
    )
  ]
  compiled = deviceless.compile(
    step_of(dot_general, mesh, tokens), *arguments, target=B200, mesh=mesh
  )
  return collectives.of_compiled(compiled, mesh)


@installed.needs("jax_cuda13_plugin")
class SentTest(parameterized.TestCase):
  @parameterized.parameters(
    ("tp", jp.MXFP8, 1.0),
    ("fsdp+tp+sp", jp.MXFP8, 1.1),
    ("fsdp+tp+sp", jp.NVFP4, 0.9),
  )
  @pytest.mark.full
  def test_bytes_are_those_of_bf16_or_fewer(self, layout, format, most):
    found = sent(layout, format)
    ratio = collectives.received(found) / collectives.received(
      sent(layout, None)
    )
    self.assertLessEqual(ratio, most + 1e-9, found)
    # Codes, and sums in the results' dtype; and numbers of which the largest is
    # a tensor's amax, some of which XLA sends together.
    large = {one.dtype for one in found if one.total > 64}
    self.assertContainsSubset(large, {"u8", "bf16", "u32"})
    maxima = collectives.received(found, dtype="u32")
    self.assertLess(maxima, 5e-3 * collectives.received(found), found)
    for one in found:
      if one.dtype == "u32":
        self.assertEqual(one.kind, "all-reduce", one)
      if one.dtype == "u8":
        self.assertEqual(one.kind, "all-gather", one)
        self.assertLen(one.axes, 1, one)
      self.assertNotEqual(one.kind, "all-to-all", one)


# Axes of x, w and y of one product, and of which of y, the gradient of x and
# that of w no sum over devices is a part.
PRODUCTS = {
  "fsdp": (P("f"), P("f"), P("f"), {"y", "x"}),
  "tp, rows": (P(None, None, "t"), P("t"), P(), {"x", "w"}),
  "sp, columns": (P("f", "t"), P("f", "t"), P("f", None, "t"), {"y"}),
  "sp, rows": (P("f", None, "t"), P("t", "f"), P("f", "t"), {"x"}),
}


# Shapes of x, w and y, with whole blocks on each device.
SHAPES = ((2, 64, 64), (64, 128), (2, 64, 128))


def integers(*shape):
  return (
    np.random.default_rng(shape).integers(-15, 16, shape).astype(np.float32)
  )


@functools.cache
def results(make, dtype, mesh=None, specs=(P(), P(), P()), reduce_dtype=None):
  """The result of a product and both gradients, as f32."""
  dot_general = jp.dot_general(jp.MXFP8, jp.MXFP8, reduce_dtype=reduce_dtype)
  arrays = [np.asarray(make(*shape), dtype) for shape in SHAPES]

  function = gradients_oracle.with_gradients(
    lambda x, w: dot_general(x, w, NUMBERS)
  )
  if mesh is not None:
    x, w, y = (NamedSharding(mesh, spec) for spec in specs)
    function = jax.jit(function, out_shardings=(y, x, w))
    arrays = list(map(jax.device_put, arrays, (x, w, y)))
  return [np.asarray(r, np.float32) for r in function(*arrays)]


def magnitudes(make):
  """Sums of |a * b| of each of the results."""
  x, w, g = (np.abs(make(*shape).astype(np.float64)) for shape in SHAPES)
  return x @ w, g @ w.T, np.einsum("bsk,bsn->kn", x, g)


class ValuesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    explicit.need_devices(self, NUM_DEVICES)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    self.mesh = jax.sharding.Mesh(devices, ("f", "t"))

  @parameterized.parameters(*PRODUCTS)
  @pytest.mark.full
  def test_results_are_one_devices(self, layout):
    *specs, without_sum = PRODUCTS[layout]
    # Sums of these are exact, in whatever order.
    actual = results(integers, np.float32, self.mesh, tuple(specs))
    expected = results(integers, np.float32)
    for a, e in zip(actual, expected, strict=True):
      np.testing.assert_array_equal(a, e)
    # Rounded once by each device, and once more by each sum.
    actual = results(integers, jnp.bfloat16, self.mesh, tuple(specs))
    expected = results(integers, jnp.bfloat16)
    rounding = (2 + 2) * reference.rounding_error(jnp.bfloat16)
    for name, a, e, m in zip(
      "yxw", actual, expected, magnitudes(integers), strict=True
    ):
      if name in without_sum:
        np.testing.assert_array_equal(a, e)
      else:
        np.testing.assert_array_less(np.abs(a - e), rounding * m)

  def test_sums_in_f32_that_are_exact_are_one_devices_in_bf16(self):
    *specs, _ = PRODUCTS["sp, rows"]
    args = (integers, jnp.bfloat16, self.mesh, tuple(specs))
    expected = results(integers, jnp.bfloat16)
    rounded, exact = results(*args), results(*args, np.float32)
    for a, e in zip(exact, expected, strict=True):
      np.testing.assert_array_equal(a, e)
    self.assertGreater(np.abs(rounded[0] - expected[0]).max(), 0)
