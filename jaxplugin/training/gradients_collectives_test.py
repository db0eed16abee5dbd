# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What devices send for an MLP and its gradients, and that these are right.

The collectives are those in optimized HLO of XLA's GPU compiler, without GPUs.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.dot import reference
from jaxplugin.lab.compilation import deviceless
from jaxplugin.lab.planning import collectives
from jaxplugin.testing.oracles import gradients_oracle

B200 = jp.named_target("b200", cudnn="9.13")
NUM_DEVICES = 8
# [batch, sequence, channels] and hidden channels.
ROWS, HIDDEN = (4, 128, 256), 512
NUMBERS = (((2,), (0,)), ((), ()))
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


@absltest.skipIf(
  importlib.util.find_spec("jax_cuda13_plugin") is None,
  "jax-cuda13-plugin is not installed",
)
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
    if jax.device_count() < NUM_DEVICES:
      self.skipTest(f"needs {NUM_DEVICES} devices, has {jax.device_count()}")
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
