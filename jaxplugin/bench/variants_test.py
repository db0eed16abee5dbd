# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which variants there are of a product on a device, and what they take."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin import dot
from jaxplugin import target as target_lib
from jaxplugin.bench import rows
from jaxplugin.bench import variants
from jaxplugin.bench import verification


def ours(pair, target, names=None):
  (row,) = rows.parse_rows("5x96x256")
  (pair,) = rows.parse_pairs(pair)
  made = variants.DotVariants(row, pair, np.dtype(jnp.bfloat16), target)
  return {variant.name: variant for variant in made.ours(names)}


class OursTest(parameterized.TestCase):
  @parameterized.parameters(
    ("h200", None, "bf16xnvfp4", ["triton", "triton prepared", "xla"]),
    ("h200", None, "bf16xmxfp8", ["triton", "xla"]),
    (
      "b200",
      "9.13",
      "nvfp4",
      ["cudnn", "cudnn prepared", "triton", "triton prepared", "xla"],
    ),
    ("cpu", None, "nvfp4", ["xla"]),
  )
  def test_prepared_weights_are_timed_where_they_differ(
    self, device, cudnn, pair, expected
  ):
    target = target_lib.named_target(device, cudnn=cudnn)
    self.assertEqual(sorted(ours(pair, target)), expected)

  @parameterized.parameters("h200", "b200")
  def test_prepared_weights_are_the_same_weights(self, device):
    found = ours("nvfp4", target_lib.named_target(device), ["triton"])
    plain, prepared = found["triton"], found["triton prepared"]
    lhs, rhs = prepared.operands(0)
    _, plain_rhs = plain.operands(0)
    differs = [
      a.shape != b.shape or a.dtype != b.dtype
      for a, b in zip(
        jax.tree.leaves(rhs), jax.tree.leaves(plain_rhs), strict=True
      )
    ]
    self.assertTrue(any(differs))
    result = dot.block_scaled_dot(lhs, rhs, preferred_element_type=jnp.bfloat16)
    prepared.check(0, result)
    with self.assertRaises(verification.WrongResultError):
      prepared.check(0, result * 1.05)


if __name__ == "__main__":
  absltest.main()
