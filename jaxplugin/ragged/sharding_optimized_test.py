# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""XLA's GPU compiler splits a ragged dot; no GPU is needed."""

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.lab.compilation import deviceless
from jaxplugin.testing import installed
from jaxplugin.testing.oracles import hlo_traffic

GROUPS, M, N, K = 8, 64, 256, 512


@installed.needs_gpu_compilers
class OptimizedTest(parameterized.TestCase):
  @parameterized.parameters(
    ("h100", False, P("a"), P("b"), [("all-reduce", "bf16")]),
    (
      *("h100", True, P("b"), P("b")),
      [("all-gather", "u8"), ("reduce-scatter", "bf16")],
    ),
    (
      *("b200", True, P(None, "b"), P(None, None, "b")),
      [("all-reduce", "f32")],
    ),
  )
  @pytest.mark.full
  def test_kernels_serve_each_device_and_few_bytes_travel(
    self, name, is_quantized, lhs_spec, rhs_spec, collectives
  ):
    target = jp.named_target(name)
    mesh = deviceless.mesh(target, (2, 2), ("a", "b"))

    def spec(shape, dtype, spec):
      sharding = NamedSharding(mesh, spec)
      return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    lhs = spec((M, K), jnp.bfloat16, lhs_spec)
    if is_quantized:
      values = spec((M, K), jnp.float8_e4m3fn, lhs_spec)
      scale = spec((M, K // 32), jnp.float8_e8m0fnu, lhs_spec)
      lhs = jp.ScaledArray(values, scale, None, jp.MXFP8)
    rhs = jp.ScaledArray(
      spec((GROUPS, N, K // 2), jnp.uint8, rhs_spec),
      spec((GROUPS, N, K // 32), jnp.float8_e8m0fnu, rhs_spec),
      None,
      jp.MXFP4,
    )
    text = deviceless.compile(
      lambda *args: jp.ragged_dot(*args, preferred_element_type=jnp.bfloat16),
      *(lhs, rhs, spec((GROUPS,), jnp.int32, P())),
      target=target,
      mesh=mesh,
    ).as_text()
    found = [each[:2] for each in hlo_traffic.collectives(text)]
    self.assertEqual(found, collectives)
    self.assertIn("triton_kernel_call", text)
    self.assertNotRegex(text, r"\b(while|conditional)\(")
