# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The xla implementation's choice of a dtype, from dtypes alone."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.dot import calls
from jaxplugin.dot import sides
from jaxplugin.dot.backends import xla


def side(name, kind):
  """A block format's side, or a plain one of a dtype."""
  format = kind if isinstance(kind, jp.BlockFormat) else None
  dtype = kind if format is None else format.values_dtype
  return sides.Side(
    name=name, values=jax.ShapeDtypeStruct((8, 64), dtype), format=format
  )


class OperandDtypeTest(parameterized.TestCase):
  @parameterized.parameters(
    # bf16 has 8 significant bits. Products of E4M3 and E4M3 have 4 + 4 at most,
    # f16 has 11 and f32 has 24.
    ("h200", jp.MXFP8, jp.NVFP4, jnp.bfloat16),
    ("h200", jnp.bfloat16, jp.MXFP4, jnp.bfloat16),
    ("h200", jnp.float16, jp.MXFP4, jnp.float32),
    ("h200", jp.MXFP8, jnp.float32, jnp.float32),
    ("cpu", jnp.bfloat16, jp.MXFP4, jnp.float32),
  )
  def test_gpus_multiply_bf16_if_it_holds_both_sides(
    self, target, lhs, rhs, expected
  ):
    call = calls.DotCall(
      lhs=side("lhs", lhs),
      rhs=side("rhs", rhs),
      preferred_element_type=np.dtype(np.float32),
    )
    found = xla.operand_dtype(call, targets.named_target(target))
    self.assertEqual(np.dtype(found), np.dtype(expected))


if __name__ == "__main__":
  absltest.main()
