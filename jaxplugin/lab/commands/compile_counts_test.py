# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of programs that XLA's GPU compiler compiles without a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from absl.testing import parameterized
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxplugin as jp
from jaxplugin.lab.commands import compile
from jaxplugin.stablehlo import modules
from jaxplugin.testing import installed, written_modules

B200 = jp.named_target("b200", cudnn="9.13")
needs_compiler = installed.needs("jax_cuda13_plugin")
DOT = written_modules.dot_module(m=128, n=384, k=256)


def of_text(text, target=B200):
  return compile.of_module(modules.read(text, "m", trusted=True), target)


@needs_compiler
class OfModuleTest(parameterized.TestCase):
  def test_call_that_cudnn_serves_is_one_call_with_its_scales_moved(self):
    found = of_text(DOT)
    self.assertEqual(found.custom_calls, {"__cudnn$blockScaledDot": 1})
    # Both scales are brought into the layout of the kernel.
    self.assertEqual(sum(found.fusions.values()), 2)
    self.assertEqual(found.kernels, 3)
    values, scales = (128 + 384) * 256, (128 + 384) * 8
    self.assertEqual(found.argument_bytes, values + scales)
    self.assertEqual(found.output_bytes, 128 * 384 * 4)
    self.assertGreaterEqual(found.temp_bytes, scales)

  def test_older_cudnn_has_no_such_call(self):
    found = of_text(DOT, jp.named_target("b200", cudnn="9.9"))
    self.assertNotIn("__cudnn$blockScaledDot", found.custom_calls)

  def test_each_instruction_of_a_loop_counts_once(self):
    def looped(x, w):
      return jax.lax.fori_loop(0, 7, lambda _, x: jnp.tanh(x @ w), x)

    spec = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    found = of_text(jax.jit(looped).lower(spec, spec).as_text())
    # The product is a Triton fusion or cuBLAS's; the counter is a fusion too.
    products = found.fusions.get("kCustom", 0) + sum(
      found.custom_calls.values()
    )
    self.assertEqual(products, 1, found)
    self.assertGreaterEqual(found.fusions["kLoop"], 2)

  def test_partitions_of_the_module_are_devices(self):
    mesh = jax.sharding.AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    specs = [
      jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes))
      )
      for shape, axes in (((64, 256), (None, "x")), ((256, 128), ("x",)))
    ]
    lowered = (
      jax.jit(jnp.matmul).trace(*specs).lower(lowering_platforms=("cuda",))
    )
    found = of_text(lowered.as_text())
    self.assertEqual(found.collectives, {"all-reduce": 1})
    self.assertEqual(found.argument_bytes, (64 + 128) * 256 * 4 // 4)

  def test_elided_hlo_has_no_backend_config(self):
    found = of_text(DOT)
    self.assertIn("backend_config=", found.hlo())
    self.assertNotIn("backend_config=", found.hlo(elide=True))
    self.assertIn('custom_call_target="__cudnn$', found.hlo(elide=True))
