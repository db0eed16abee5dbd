# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of `explain` for ragged dots."""

import functools

import jax
import jax.numpy as jnp
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.jaxext import program
from jaxplugin.ragged import primitive


def _moe(x, implementation=None):
  w = jp.quantize(jnp.ones((32, 256, 128)), jp.MXFP4)
  sizes = jnp.full((32,), 1)
  return jp.ragged_dot(
    x, w, sizes, activation="swigluoai", implementation=implementation
  ).sum()


class ExplainTest(parameterized.TestCase):
  def test_says_what_serves_and_why_others_do_not(self):
    (dot,) = jp.explain(_moe, jnp.ones((8, 128)))
    self.assertEqual(dot.decision.implementation, "cpu")
    self.assertIn("groups=32 m=8 n=256 k=128", str(dot.problem))
    self.assertIn("xla", [r.implementation for r in dot.decision.refusals])

  def test_cost_of_the_loop_is_told(self):
    h200 = jp.named_target("h200")
    by_xla = functools.partial(_moe, implementation="xla")
    told = jp.explain(by_xla, jnp.ones((8, 128)), target=h200)
    self.assertIn("dequantizes each of them once", told.details())
    self.assertIn("the host decides each step", told.details())
    # Eight rows read at most eight of 32 groups.
    values, scales = 32 * 256 * 64, 32 * 256 * 4
    others = 8 * 128 * 4 + 8 * 128 * 4 + 32 * 4
    self.assertEqual(told[0].estimate.num_bytes, (values + scales) / 4 + others)

  def test_estimate_knows_what_multiplies(self):
    # So many rows are bound by multiplication, of FP8 or of bf16.
    m, size = 1 << 16, 8192
    dot = functools.partial(jp.ragged_dot, preferred_element_type=jnp.bfloat16)
    quantized = lambda *shape: jax.eval_shape(
      lambda x: jp.quantize(x, jp.MXFP8),
      jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
    for name, peak in (("h200", 989e12), ("b200", 4500e12)):
      target = jp.named_target(name)
      args = quantized(m, size), quantized(2, size, size), sizes
      (told,) = jp.explain(dot, *args, target=target)
      self.assertAlmostEqual(
        told.estimate.seconds * peak / (2 * m * size**2), 1, places=6
      )

  def test_gradient_contracts_across_blocks(self):
    told = jp.explain(jax.grad(_moe), jnp.ones((8, 128)))
    self.assertEqual(
      [dot.decision.implementation for dot in told], ["cpu", "cpu", "xla"]
    )
    self.assertEqual(told[2].phase, "backward")

  @parameterized.parameters((128, "cpu"), (0, "xla"))
  def test_kernels_serve_devices_that_have_a_share(self, k, served):
    def dot(x, values, scale):
      w = jp.ScaledArray(values, scale, None, jp.MXFP8)
      return jp.ragged_dot(x, w, jnp.full((32,), 1))

    jaxpr = jax.make_jaxpr(dot)(
      jnp.ones((8, k)),
      jnp.ones((32, 256, k), jnp.float8_e4m3fn),
      jnp.ones((32, 256, k // 32), jnp.float8_e8m0fnu),
    )
    (eqn,) = (
      operation.eqn
      for operation in program.operations(jaxpr.jaxpr)
      if operation.eqn.primitive.name == "block_scaled_ragged_dot"
    )
    decided = primitive.decide(eqn, None, num_devices=8)
    self.assertEqual(decided.decision.implementation, served)
    reasons = [r.reason for r in decided.decision.refusals]
    is_split = served == "cpu"
    self.assertEqual(
      any("XLA partitions the module" in r for r in reasons), not is_split
    )
