# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The contract's suite on a real GPU, where there is one.

python -m pytest jaxplugin/dot/backends/gpu_device_test.py
"""

from __future__ import annotations

import jax
import numpy as np
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.dot.backends import cudnn, triton
from jaxplugin.testing import contract, dot_problems
from jaxplugin.testing.dot_suite import dot_rows, suite

REFUSALS = (  # of problems; anything else that is refused is a failure
  "supports mxfp8 pairs",
  "E5M2 by E5M2",
  "needs both operands quantized",
  "needs k divisible by",
  "needs sizes of at least 1",
)


def why_not(supports) -> str:
  """Why an implementation cannot be tried here; empty where it can."""
  if jax.default_backend() != "gpu":
    return f"needs a GPU, JAX's default backend is {jax.default_backend()}"
  target = targets.detect_target()
  refusal = supports(dot_problems.problem(jp.MXFP8, n=128, k=128), target)
  return "" if refusal is None else f"{refusal.reason} ({target})"


def on_a_gpu(test: type) -> type:
  reason = why_not(test.supports)
  return absltest.skipIf(bool(reason), reason)(test)


class DeviceDotSuite(suite.DotSuite):
  """If the backend refuses a call's formats or sizes, xla computes it."""

  cases_per_test = 5

  def dot(self, *args, **kwargs):
    try:
      return super().dot(*args, **kwargs)
    except NotImplementedError as error:
      if not any(text in str(error) for text in REFUSALS):
        raise
    return jp.block_scaled_dot(*args, implementation="xla", **kwargs)


@on_a_gpu
class TritonDeviceTest(DeviceDotSuite):
  implementation = "triton"
  supports = staticmethod(triton.supports)
  subnormal_spacing = 2.0**-133  # of bf16


@on_a_gpu
class TritonFormatsDeviceTest(dot_rows.DotRowsTestCase):
  """Formats of checkpoints, which kernels read and do not quantize to."""

  implementation = "triton"
  supports = staticmethod(triton.supports)
  in_leg = tuple(dot_rows.CHECKPOINTS)
  truncates = True


@on_a_gpu
class TritonFastestDeviceTest(absltest.TestCase):
  supports = staticmethod(triton.supports)

  def test_sums_of_fp8_instructions_are_within_their_bound(self):
    rng = np.random.default_rng(0)
    for format in (jp.FP8_1X128, jp.FP8_1X128_E8M0, jp.FP8_ROW):
      lhs, rhs = (
        contract.operand(rng, format, (rows, 2048), integers=False)
        for rows in (192, 160)
      )
      result = jp.block_scaled_dot(
        lhs.operand, rhs.operand, implementation="triton", precision="fastest"
      )
      exact, magnitude = contract.dot(lhs.exact, rhs.exact)
      bound = (contract.FP8_SUM_BOUND + contract.DOT_BOUND) * magnitude
      with self.subTest(format.name):
        contract.assert_within(result, exact, bound, contract.F32)


@on_a_gpu
class CudnnDeviceTest(DeviceDotSuite):
  implementation = "cudnn"
  supports = staticmethod(cudnn.supports)
  keeps_global_scale_f32 = False


@on_a_gpu
class XlaDeviceTest(DeviceDotSuite):
  implementation = "xla"
  supports = staticmethod(lambda problem, target: None)


del DeviceDotSuite
