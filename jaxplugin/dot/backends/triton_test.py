# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The triton implementation: its numbers, facts that it relies on, its errors.

The numbers are those of Triton's interpreter (`interpreted`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot.backends import triton
from jaxplugin.kernels.gpu import configs
from jaxplugin.runtime import lowering
from jaxplugin.runtime import triton_library
from jaxplugin.testing import interpreted as triton_testing
from jaxplugin.testing.dot_suite import suite

CPU = triton_testing.CPU
interpreted = triton_testing.interpreted
needs_interpreter = triton_testing.needs_interpreter


class TritonDotSuite(suite.DotSuite):
  """The contract's suite; what triton refuses goes to xla."""

  implementation = "triton"
  cases_per_test = 2
  subnormal_spacing = 2.0**-133  # of bf16
  target = targets.named_target("h200")

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(triton, "_call", interpreted))
    self.enter_context(
      mock.patch.object(
        lowering, "resolve_target", lambda override, _: override or CPU
      )
    )

  def dot(self, *args, **kwargs):
    with jp.use_target(self.target):
      try:
        return jp.block_scaled_dot(*args, implementation="triton", **kwargs)
      except NotImplementedError as error:
        if "needs sizes of at least 1" not in str(error):
          raise
    return jp.block_scaled_dot(*args, implementation="xla", **kwargs)


@needs_interpreter
@pytest.mark.full
class HopperDotTest(TritonDotSuite):
  """Dequantizes in registers."""


@needs_interpreter
@pytest.mark.sample(1)
class BlackwellDotTest(TritonDotSuite):
  """Leaves it to the matrix instruction where that takes the formats."""

  target = targets.named_target("b200")
  kinds = (
    *((a, b) for a in formats.FORMATS[:3] for b in formats.FORMATS[:3]),
    (jp.NVFP4, jp.NVFP4),
  )


del TritonDotSuite


class FactsTest(absltest.TestCase):
  """What the package states a second time."""

  def test_tiles_of_swizzled_scales_are_the_packages(self):
    # 130 x 5 scales are two tiles of rows, each of two tiles.
    kind = configs.operand("nvfp4", 130, 80, swizzled=True)
    padded = layouts.swizzled_shape((130, 5))
    self.assertEqual(kind.scale_strides[0], math.prod(padded))
    self.assertEqual(kind.scale_strides[1], 128 * padded[1])


class ConversionTest(parameterized.TestCase):
  """What is told of how FP4 is decoded, and why."""

  def notes(self, target, *, lhs=None, rhs=jp.NVFP4, ragged=False):
    x = jax.ShapeDtypeStruct((4, 256), np.dtype("bfloat16"))
    if lhs is not None:
      x = jax.eval_shape(lambda x: jp.quantize(x, lhs), x)
    w = jax.ShapeDtypeStruct((2, 512, 256), np.dtype("bfloat16"))
    w = jax.eval_shape(lambda w: jp.quantize(w, rhs), w)
    if ragged:
      sizes = jax.ShapeDtypeStruct((2,), np.dtype("int32"))
      dot = functools.partial(jp.ragged_dot, implementation="triton")
      (told,) = jp.explain(dot, x, w, sizes, target=target)
    else:
      w = jax.eval_shape(lambda w: w[0], w)
      dot = functools.partial(jp.block_scaled_dot, implementation="triton")
      (told,) = jp.explain(dot, x, w, target=target)
    return [note for note in told.decision.notes if "FP4" in note]

  @parameterized.product(name=("b200", "rtx5090"), ragged=(False, True))
  @pytest.mark.sample(1)
  def test_which_and_why(self, name, ragged):
    needs = "its conversion needs ptxas 13.2, and the target's is "
    for ptxas, expected in (
      ("13.4.59", "converted by cvt.rn.bf16x2.e2m1x2 (ptxas 13.4.59)"),
      ("13.1", f"decoded by integer operations: {needs}13.1.0"),
      (None, f"decoded by integer operations: {needs}not known"),
    ):
      target = targets.named_target(name, ptxas=ptxas)
      (note,) = self.notes(target, ragged=ragged)
      self.assertEqual(note, f"FP4 is {expected}")

  @parameterized.parameters(
    ("h200", None, jp.NVFP4),
    ("rtx5090", None, jp.MXFP8),
    ("rtx5090", jp.NVFP4, jp.NVFP4),
  )
  @pytest.mark.sample(1)
  def test_nothing_where_there_is_one_way(self, name, lhs, rhs):
    target = targets.named_target(name, ptxas="13.4")
    self.assertEmpty(self.notes(target, lhs=lhs, rhs=rhs))


class ErrorTest(parameterized.TestCase):
  def test_amd_gpu_by_name_is_told(self):
    x = jp.quantize(np.ones((16, 64), np.float32), jp.MXFP8)
    target = targets.named_target("mi300x")
    (dot,) = jp.explain(jp.block_scaled_dot, x, x, target=target)
    self.assertEqual(dot.decision.implementation, "xla")
    reasons = {r.implementation: r.reason for r in dot.decision.refusals}
    self.assertRegex(reasons["triton"], "AMD GPUs only if one is attached")
    forced = functools.partial(jp.block_scaled_dot, implementation="triton")
    with (
      jp.use_target(target),
      self.assertRaisesRegex(NotImplementedError, "only if one is attached"),
    ):
      jax.jit(forced).trace(x, x)

  @parameterized.parameters(("gfx942", "gfx950"), (None, "none"))
  def test_amd_gpu_of_another_architecture_is_told_by_lowering(
    self, architecture, told
  ):
    # jax-triton compiles for the device that it finds, whatever is asked for.
    local = targets.Target(name="local", platform="rocm", architecture="gfx950")
    if architecture is None:
      local = dataclasses.replace(local, architecture=None)
    target = targets.named_target("mi300x").with_library(targets.JAX_TRITON)
    x = jp.quantize(np.ones((16, 64), np.float32), jp.MXFP8)
    with (
      mock.patch.object(targets, "detect_target", lambda *_: local),
      jp.use_target(target),
    ):
      traced = jax.jit(jp.block_scaled_dot).trace(x, x)
      with self.assertRaisesRegex(
        NotImplementedError,
        rf"only for the attached AMD GPU \({told}\).* mi300x",
      ):
        traced.lower(lowering_platforms=("rocm",))

  def test_missing_jax_triton_is_told(self):
    x = jp.quantize(np.ones((16, 64), np.float32), jp.MXFP8)
    triton_library._import_error.cache_clear()
    self.addCleanup(triton_library._import_error.cache_clear)
    with (
      mock.patch.dict(sys.modules, {"jax_triton": None}),
      jp.use_target(targets.named_target("h200")),
    ):
      traced = jax.jit(jp.block_scaled_dot).trace(x, x)
      with self.assertRaisesRegex(NotImplementedError, "needs jax-triton"):
        traced.lower(lowering_platforms=("cuda",))

  def test_target_with_too_little_memory_is_refused_with_the_numbers(self):
    target = dataclasses.replace(
      targets.named_target("h200"), shared_memory_bytes=1024
    )
    x = jp.quantize(np.ones((256, 256), np.float32), jp.MXFP8)
    (dot,) = jp.explain(jp.block_scaled_dot, x, x, target=target)
    self.assertEqual(dot.decision.implementation, "xla")
    reasons = {r.implementation: r.reason for r in dot.decision.refusals}
    # The least tile, twice 16 x 32: a byte a value, a scale a row, and bf16.
    needed = 2 * (16 * 32 + 16 + 2 * 16 * 32)
    self.assertEndsWith(
      reasons["triton"],
      f"may need {needed} bytes of shared memory, sm_90 has 1024",
    )

  @pytest.mark.full
  def test_target_without_jax_triton_is_refused_with_the_reason(self):
    target = targets.named_target("h200").without_library(
      targets.JAX_TRITON, "it is away"
    )
    x = jp.quantize(np.ones((16, 64), np.float32), jp.MXFP8)
    (dot,) = jp.explain(jp.block_scaled_dot, x, x, target=target)
    self.assertEqual(dot.decision.implementation, "xla")
    reasons = {r.implementation: r.reason for r in dot.decision.refusals}
    self.assertEqual(reasons["triton"], "it is away")


if __name__ == "__main__":
  absltest.main()
