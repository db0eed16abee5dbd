# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What `explain` tells of ragged dots."""

import jax
import jax.numpy as jnp
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin.jaxext import program
from jaxplugin.ragged import traced


def _moe(x):
  w = jp.quantize(jnp.ones((32, 256, 128)), jp.MXFP4)
  sizes = jnp.full((32,), 1)
  return jp.ragged_dot(x, w, sizes, activation="swigluoai").sum()


class ExplainTest(absltest.TestCase):
  def test_says_what_serves_and_why_others_do_not(self):
    (dot,) = jp.explain(_moe, jnp.ones((8, 128)))
    self.assertEqual(dot.decision.implementation, "cpu")
    self.assertIn("groups=32 m=8 n=256 k=128", str(dot.problem))
    self.assertIn("xla", [r.implementation for r in dot.decision.refusals])

  def test_cost_of_the_loop_is_told(self):
    h200 = jp.named_target("h200")
    told = jp.explain(_moe, jnp.ones((8, 128)), target=h200)
    self.assertIn("each of which is dequantized once", str(told))
    self.assertIn("the host decides each step", str(told))
    # Of eight rows at most eight of 32 groups are read.
    values, scales = 32 * 256 * 64, 32 * 256 * 4
    others = 8 * 128 * 4 + 8 * 128 * 4 + 32 * 4
    self.assertEqual(told[0].estimate.num_bytes, (values + scales) / 4 + others)

  def test_gradient_contracts_across_blocks(self):
    told = jp.explain(jax.grad(_moe), jnp.ones((8, 128)))
    self.assertEqual(
      [dot.decision.implementation for dot in told], ["cpu", "cpu", "xla"]
    )
    self.assertEqual(told[2].phase, "backward")

  def test_partitioned_module_has_no_kernel(self):
    jaxpr = jax.make_jaxpr(_moe)(jnp.ones((8, 128)))
    (eqn,) = (
      operation.eqn
      for operation in program.operations(jaxpr.jaxpr)
      if operation.eqn.primitive.name == "block_scaled_ragged_dot"
    )
    decided = traced.decide(eqn, None, num_devices=8)
    self.assertEqual(decided.decision.implementation, "xla")
    (refusal,) = decided.decision.refusals
    self.assertIn("XLA partitions the module", refusal.reason)


if __name__ == "__main__":
  absltest.main()
