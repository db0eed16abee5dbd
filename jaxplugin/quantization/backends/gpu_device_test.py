# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizing by Triton kernels on a real GPU, where there is one.

python -m pytest jaxplugin/quantization/backends/gpu_device_test.py
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.testing import contract, installed, prologue_cases
from jaxplugin.testing import quantization_lowerings as lowerings
from jaxplugin.testing.oracles import quantization_cases

CASES = [
  row
  for is_full in (False, True)
  for row in quantization_cases.rows(is_full=is_full, for_triton=True)
]


def on_the_cpu():
  return jax.default_device(jax.devices("cpu")[0])


class DeviceTestCase(parameterized.TestCase):
  def assert_calls_kernels(self, function, *args):
    text = lowerings.lowered_text(function, *args, platforms=("cuda",))
    self.assertIn("@triton_kernel_call", text)

  def by_operations(self, function, *args):
    with on_the_cpu(), targets.use_target(lowerings.OPERATIONS):
      return jax.jit(function)(*args)


@installed.needs_gpu
class QuantizeDeviceTest(DeviceTestCase):
  @parameterized.named_parameters(*CASES)
  def test_kernels_have_the_bits_of_operations(self, case):
    with on_the_cpu():
      x = np.asarray(case.array())
    self.assert_calls_kernels(case.call, x)
    found = jax.device_get(case.call(x))
    contract.assert_same_bits(found, self.by_operations(case.call, x))


@installed.needs_gpu
class PrologueDeviceTest(DeviceTestCase):
  @parameterized.named_parameters(
    (f"{case.kernel}_{i}", case)
    for i, case in enumerate(prologue_cases.kernel_cases())
  )
  def test_kernels_agree_with_operations(self, case):
    with on_the_cpu():
      args = jax.tree.map(np.asarray, case.args())
    self.assert_calls_kernels(case.call, *args)
    wanted = self.by_operations(case.call, *args)
    case.check(self, jax.device_get(jax.jit(case.call)(*args)), wanted, args)


@installed.needs_gpu
class ResultDeviceTest(DeviceTestCase):
  """`out_format` of a dot gives the bits of `quantize`."""

  @parameterized.product(
    format=("mxfp8", "mxfp4", "nvfp4"), m=(5, 200), activation=(None, "gelu")
  )
  def test_result_of_a_dot(self, format, m, activation):
    dot = functools.partial(jp.block_scaled_dot, activation=activation)
    self.check(dot, format, m, "mxfp8")

  @parameterized.product(format=("mxfp8", "nvfp4"), m=(14, 300))
  def test_result_of_a_ragged_dot(self, format, m):
    dot = functools.partial(jp.ragged_dot, activation="swiglu")
    sizes = jnp.array([m // 2, 0, m // 3], np.int32)
    self.check(dot, format, m, "mxfp4", (3,), (sizes,))

  def check(self, dot, format, m, weights, groups=(), sizes=()):
    rng = np.random.default_rng(m)
    x = jnp.asarray(rng.normal(size=(m, 256)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(*groups, 320, 256)), np.float32)
    scale = np.float32(0.05) if format == "nvfp4" else None
    out = jp.OutFormat(format, global_scale=scale, returns_amax=True)
    dot = functools.partial(dot, implementation="triton")
    self.assert_one_kernel(dot, out, x, jp.quantize(w, weights), *sizes)

  def assert_one_kernel(self, dot, out, *args):
    fused = jax.jit(lambda *args: dot(*args, out_format=out))
    text = fused.lower(*args).as_text()
    self.assertEqual(text.count("@triton_kernel_call"), 1)
    to_f32 = functools.partial(dot, preferred_element_type=jnp.float32)
    y = jax.jit(to_f32)(*args)
    found, amax = fused(*args)
    wanted = self.by_operations(
      lambda y: jp.quantize(y, out.format, global_scale=out.global_scale),
      np.asarray(y),
    )
    contract.assert_same_bits(jax.device_get(found), wanted)
    self.assertEqual(amax, np.abs(np.asarray(y)).max())


if __name__ == "__main__":
  absltest.main()
