# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`accumulate` is a loop over parts, with one sum over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.lab.compilation import deviceless
from jaxplugin.lab.planning import collectives
from jaxplugin.testing import installed
from jaxplugin.testing.meshes import explicit

MATMUL = (((1,), (0,)), ((), ()))
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MICROBATCHES = 4
# Integers whose products and sums are all exact.
RNG = np.random.default_rng(0)
X = RNG.integers(-4, 5, (64, 32)).astype(np.float32)
Y = RNG.integers(-4, 5, (64, 8)).astype(np.float32)
W = RNG.integers(-4, 5, (32, 8)).astype(np.float32)
BIAS = RNG.integers(-4, 5, 8).astype(np.float32)


def loss(params, batch):
  """A linear function, whose gradients are exact."""
  x, y = batch
  out = x @ params["w"] + params["b"]
  return (out * y).sum()


def put(mesh, w_spec, rows):
  place = lambda x, spec: jax.device_put(
    np.asarray(x), NamedSharding(mesh, spec)
  )
  params = {"w": place(W, w_spec), "b": place(BIAS, P())}
  return params, (place(X, P(rows)), place(Y, P(rows)))


# (kind of the mesh's axes, spec of the weight, axes, options)
MESHES = {
  "replicated": (AUTO, P(), "a", {}),
  "both axes": (AUTO, P(), ("a", "b"), {}),
  "axes in another order": (AUTO, P(), ("b", "a"), {}),
  "model parallel": (AUTO, P(None, "b"), "a", {}),
  "fsdp": (AUTO, P("a"), "a", {}),
  "fsdp and model parallel": (AUTO, P("b", "a"), "a", {}),
  "explicit": (EXPLICIT, P(), "a", {}),
  "explicit, model parallel": (EXPLICIT, P(None, "b"), "a", {}),
  "explicit, fsdp": (EXPLICIT, P(("a", "b")), ("a", "b"), {}),
  "mean": (AUTO, P(), "a", {"reduction": "mean"}),
}


class MeshTest(parameterized.TestCase):
  @parameterized.parameters(*MESHES)
  def test_results_are_exact(self, name):
    kind, w_spec, axes, options = MESHES[name]
    mesh = explicit.mesh(self, kind=kind)
    params, batch = put(mesh, w_spec, axes)
    options = {"reduction": "sum", **options}
    step = jp.training.accumulate(loss, MICROBATCHES, axes=axes, **options)
    with jax.set_mesh(mesh):
      value, gradient = jax.jit(step)(params, batch)
    wide = [x.astype(np.float64) for x in (X, Y, W, BIAS)]
    x, y, w, b = wide
    expected = ((x @ w + b) * y).sum(), {"w": x.T @ y, "b": y.sum(0)}
    if options["reduction"] == "mean":
      devices = np.prod([mesh.shape[axis] for axis in axes])
      expected = jax.tree.map(lambda x: x / MICROBATCHES / devices, expected)
    jax.tree.map(np.testing.assert_array_equal, (value, gradient), expected)
    if kind == EXPLICIT:
      self.assertEqual(
        jax.typeof(gradient["w"]).sharding.spec,
        jax.typeof(params["w"]).sharding.spec,
      )

  @parameterized.parameters(True, False)
  def test_enclosing_shard_map(self, check_vma):
    mesh = explicit.mesh(self, kind=AUTO)
    step = jp.training.accumulate(
      loss, MICROBATCHES, axes=("a", "b"), reduction="sum"
    )
    step = jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(P(), P(("a", "b"))),
      out_specs=P(),
      check_vma=check_vma,
    )
    _, gradient = jax.jit(step)(*put(mesh, P(), ("a", "b")))
    np.testing.assert_array_equal(gradient["w"], X.T @ Y)
    np.testing.assert_array_equal(gradient["b"], Y.sum(0))


def parts_of(x, count):
  return x.reshape(count, -1, *x.shape[1:])


class DotTest(parameterized.TestCase):
  """Quantized matmuls against a loop on one device, in the same bits."""

  @parameterized.parameters(
    ("mxfp8", jp.training.MXFP8_RECIPE, P(), None),
    ("nvfp4, a key", jp.training.NVFP4_RECIPE, P(None, "b"), 2),
  )
  def test_results_are_those_of_a_loop_over_all_parts(
    self, _, recipe, w_spec, key_argnum
  ):
    mesh = explicit.mesh(self, kind=AUTO)
    dot = jp.dot_general(recipe=recipe, weight="rhs")
    x = RNG.normal(size=(512, 32)).astype(np.float32)
    w = RNG.normal(size=(32, 64)).astype(np.float32)
    key = jax.random.key(3)

    def loss(w, x, key):
      y = jnp.tanh(dot(x, w, MATMUL, key=key))
      return jnp.square(y).mean(), y

    step = jp.training.accumulate(
      loss,
      MICROBATCHES,
      axes="a",
      mesh=mesh,
      key_argnum=key_argnum,
      has_aux=True,
    )
    place = lambda x, spec: jax.device_put(
      np.asarray(x), NamedSharding(mesh, spec)
    )
    (value, y), gradient = jax.jit(step)(
      place(w, w_spec), place(x, P("a")), key
    )

    count = MICROBATCHES * mesh.shape["a"]
    one = jax.jit(jax.value_and_grad(loss, has_aux=True))
    found = [
      one(w, x, key if key_argnum is None else jax.random.fold_in(key, i))
      for i, x in enumerate(parts_of(x, count))
    ]
    np.testing.assert_array_equal(y, [out for (_, out), _ in found])
    # f32 sums of `count` terms in another order.
    tolerance = count * 2.0**-23
    for actual, terms in (
      (value, [value for (value, _), _ in found]),
      (gradient, [gradient for _, gradient in found]),
    ):
      terms = np.asarray(terms, np.float64)
      bound = tolerance * np.abs(terms).mean(0)
      self.assertTrue((np.abs(actual - terms.mean(0)) <= bound).all())


class ArgumentsTest(parameterized.TestCase):
  """On one device, against `jax.value_and_grad` of the whole batch."""

  @parameterized.parameters(1, 2, 64)
  def test_any_number_of_parts(self, microbatches):
    params = {"w": W, "b": BIAS}
    step = jp.training.accumulate(loss, microbatches, reduction="sum")
    actual, expected = (
      jax.jit(f)(params, (X, Y)) for f in (step, jax.value_and_grad(loss))
    )
    jax.tree.map(np.testing.assert_array_equal, actual, expected)

  def test_arguments_and_dtypes(self):
    def loss(tokens, table, scale, power, *, offset, is_squared):
      self.assertIsInstance(is_squared, bool)
      y = table[tokens] * scale + offset
      return (y**power if is_squared else y).sum(), {"tokens": tokens}

    tokens = np.arange(12) % 5
    table = (np.arange(10) % 2).astype(jnp.bfloat16).reshape(5, 2)
    step = jp.training.accumulate(
      loss,
      3,
      argnums=(1, -2),
      batch_argnums=(0,),
      has_aux=True,
      reduction="sum",
    )
    options = {"offset": np.float32(1), "is_squared": True}

    @jax.jit
    def run(tokens, table):
      return step(tokens, table, 2.0, 2, **options)

    (value, aux), gradient = run(tokens, table)
    rows = table[tokens].astype(np.float64)
    y, of_table = 2 * rows + 1, np.zeros((5, 2))
    np.add.at(of_table, tokens, 4 * y)
    expected = (of_table, (2 * y * rows).sum())
    np.testing.assert_array_equal(value, (y**2).sum())
    jax.tree.map(np.testing.assert_array_equal, gradient, expected)
    self.assertEqual([g.dtype for g in gradient], [np.float32] * 2)
    np.testing.assert_array_equal(aux["tokens"], tokens.reshape(3, 4))

  def test_f32_sums_of_bf16_gradients(self):
    # Each part's gradient is 1, and 256 + 1 is 256 in bf16.
    step = jp.training.accumulate(
      lambda w, x: (w * x).sum(), 512, reduction="sum"
    )
    one = np.ones((), jnp.bfloat16)
    _, gradient = jax.jit(step)(one, np.ones(512, jnp.bfloat16))
    self.assertEqual(gradient, 512)

  def test_derivative_of_the_result(self):
    step = jp.training.accumulate(lambda w, x: (w**3 * x).mean(), 2)
    x = np.arange(4, dtype=np.float32)
    second = jax.jit(jax.grad(lambda w: step(w, x)[1]))(2.0)
    self.assertEqual(second, 6 * 2 * 1.5)


def fails(*args, n=2, **options):
  return lambda: jp.training.accumulate(
    lambda w, x: (w * x).sum(), n, **options
  )(*args)


class ErrorTest(parameterized.TestCase):
  @parameterized.parameters(
    (ValueError, "microbatches must be at least 1, got 0", fails(n=0)),
    (TypeError, "microbatches must be an integer, got 2.5", fails(n=2.5)),
    (ValueError, '"mean" or "sum", got \'max\'', fails(reduction="max")),
    (TypeError, r"multiple of 2 .* got float32\[3\]. Pad",
      fails(1.0, np.ones(3, np.float32))),
    (TypeError, "multiple of 2 .* got 1.0", fails(1.0, 1.0)),
    (ValueError, "argnums must be positions of the 2 arguments, got 2",
      fails(1.0, X, argnums=2)),
    (ValueError, "different arguments, got 1, 1 and None",
      fails(1.0, X, argnums=1)),
    (ValueError, "argnums must name an argument, got None",
     fails(1.0, X, argnums=None)),
    (TypeError, "has_aux must be True or False, got 1", fails(has_aux=1)),
    (TypeError, "axes must be the name of a mesh axis .* got 3", fails(axes=3)),
    (ValueError, "mesh must be None without axes, got .* 1", fails(mesh=1)),
    (TypeError, "key must be", fails(1.0, X, 3, key_argnum=2)),
    (ValueError, r"the mesh, \(\), got \('a',\). Pass mesh=",
      fails(1.0, X, axes="a")),
    (TypeError, "real- or complex-valued inputs", fails(np.arange(3), X)),
  )  # fmt: skip
  def test_message(self, error, message, call):
    with self.assertRaisesRegex(error, message):
      call()

  def test_devices_must_divide_the_batch(self):
    mesh = explicit.mesh(self)
    with self.assertRaisesRegex(TypeError, r"8 \(2 microbatches x 4 devices\)"):
      fails(1.0, X[:12], axes="b", mesh=mesh)()

  def test_explicit_axes_of_the_batch_must_be_given(self):
    mesh = explicit.mesh(self)
    _, (x, _) = put(mesh, P(), ("a", "b"))
    with self.assertRaisesRegex(ValueError, r"\('a', 'b'\), got \('a',\). Add"):
      fails(1.0, x, axes="a", mesh=mesh)()

  def test_shard_map_over_some_of_the_axes_is_refused(self):
    mesh = explicit.mesh(self, kind=AUTO)
    step = jax.shard_map(
      lambda x: fails(1.0, x, axes=("a", "b"))(),
      mesh=mesh,
      in_specs=P("a"),
      out_specs=P(),
      axis_names={"a"},
    )
    with self.assertRaisesRegex(ValueError, "over all axes or none"):
      jax.jit(step)(X[:16])


LAYERS, CHANNELS, HIDDEN = 3, 64, 128
WEIGHT_BYTES = 4 * 2 * LAYERS * CHANNELS * HIDDEN


def layers_loss(dot, params, x):
  def layer(x, w):
    return x + dot(jnp.tanh(dot(x, w["up"], MATMUL)), w["down"], MATMUL), None

  x, _ = jax.lax.scan(layer, x, params)
  return jnp.square(x).mean()


def loop(loss, shardings):
  """The gradients of a loop without `accumulate`."""

  def step(params, batch):
    def part(total, x):
      gradient = jax.grad(loss)(params, x)
      gradient = jax.lax.with_sharding_constraint(gradient, shardings)
      return jax.tree.map(jnp.add, total, gradient), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    # Each microbatch has rows of every device.
    parts = batch.reshape(-1, MICROBATCHES, CHANNELS).swapaxes(0, 1)
    return jax.lax.scan(part, zeros, parts)[0]

  return step


class CollectivesTest(parameterized.TestCase):
  def check(self, mesh, compile, dot, specs, by_hand):
    """Checks the bytes of sums over "data" of the loop and of `accumulate`."""
    loss = functools.partial(layers_loss, dot)
    shardings = {
      name: NamedSharding(mesh, spec)
      for name, spec in zip(("up", "down"), specs, strict=True)
    }
    shapes = {
      "up": (LAYERS, CHANNELS, HIDDEN),
      "down": (LAYERS, HIDDEN, CHANNELS),
    }
    make = lambda shape, sharding: jax.ShapeDtypeStruct(
      shape, jnp.float32, sharding=sharding
    )
    args = (
      {name: make(shapes[name], shardings[name]) for name in shapes},
      make((1024, CHANNELS), NamedSharding(mesh, P("data"))),
    )
    accumulated = jp.training.accumulate(
      loss, MICROBATCHES, axes="data", mesh=mesh
    )
    once = lambda *args: jax.lax.with_sharding_constraint(
      accumulated(*args)[1], shardings
    )
    in_loop, in_sum = (
      [
        one
        for one in collectives.of_compiled(compile(step, *args), mesh)
        if one.kind in ("all-reduce", "reduce-scatter")
        and one.axes == ("data",)
      ]
      for step in (loop(loss, shardings), once)
    )
    self.assertEqual({one.times for one in in_sum}, {1})
    self.assertEqual(collectives.received(in_sum), by_hand)
    self.assertEqual(collectives.received(in_loop), MICROBATCHES * by_hand)

  def test_sums_are_outside_of_the_loop(self):
    mesh = explicit.mesh(self, ("data", "model"), AUTO)
    self.check(
      mesh,
      lambda step, *args: jax.jit(step).lower(*args).compile(),
      jax.lax.dot_general,
      (P(None, None, "model"), P(None, "model")),
      2 * (WEIGHT_BYTES / 4) * 1 / 2,
    )

  @installed.needs("jax_cuda13_plugin")
  @parameterized.parameters(
    (P(), P(), 2 * WEIGHT_BYTES * 7 / 8),
    # The sums are scattered.
    (P(None, "data"), P(None, None, "data"), WEIGHT_BYTES * 7 / 8),
  )
  @pytest.mark.lab
  def test_sums_on_b200_are_outside_of_the_loop(self, up, down, by_hand):
    target = jp.named_target("b200", cudnn="9.13")
    mesh = deviceless.mesh(target, (8,), ("data",))
    compile = functools.partial(deviceless.compile, target=target, mesh=mesh)
    dot = jp.dot_general("mxfp8", "mxfp8")
    self.check(mesh, compile, dot, (up, down), by_hand)
