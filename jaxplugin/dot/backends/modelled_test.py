# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the model has dequantization come first, and where it is silent."""

import dataclasses
import types
from unittest import mock

import numpy as np
from absl.testing import parameterized

from jaxplugin.core import formats, targets
from jaxplugin.dot import backends
from jaxplugin.dot.backends import modelled
from jaxplugin.plugins import registry
from jaxplugin.tables import resolution
from jaxplugin.testing import dot_problems

H100 = targets.named_target("h100")
H200 = targets.named_target("h200")
A100 = targets.named_target("a100")
TWO_K = {"num_contracting": 2, "blocked_k": 64}
SWIZZLED = {"scale_layout": "swizzled_128x4"}
COPY = 4.8e12 * 2.94 / 3.35  # bytes per second of a copy on an H200
# Medians in microseconds of examples/benchmarks/results/gpu_h100_dots.json,
# gpu_h100_middle.json and gpu_h100_large.json, with n = k = 8192: lhs, rhs, m,
# triton, xla.
MEASURED = (
  (None, formats.NVFP4, 256, 98.7, 167.8),
  (None, formats.NVFP4, 512, 191.7, 207.2),
  (None, formats.NVFP4, 1024, 377.8, 306.9),
  (None, formats.MXFP8, 256, 113.7, 149.3),
  (None, formats.MXFP8, 512, 203.4, 186.1),
  (None, formats.MXFP8, 1024, 409.5, 286.2),
  (None, formats.MXFP8, 8192, 3288.3, 1719.2),
  (None, formats.MXFP4, 512, 180.7, 211.4),
  (formats.MXFP8, formats.MXFP8, 512, 318.3, 194.6),
  (formats.NVFP4, formats.NVFP4, 512, 220.7, 219.2),
  (formats.MXFP4, formats.MXFP4, 512, 222.2, 216.3),
  (formats.MXFP8, formats.MXFP8, 8192, 4880.5, 1779.6),
  (formats.NVFP4, formats.NVFP4, 8192, 3594.8, 1984.3),
)
# The same of gpu_h100_checkpoints.json, with scales other than powers of two.
CHECKPOINTS = (
  (None, formats.FP8_128X128, 16, 38, 275),
  (None, formats.FP8_128X128, 512, 220, 1495),
  (formats.FP8_1X128, formats.FP8_128X128, 512, 324, 1488),
  (None, formats.INT4_128, 512, 206, 1478),
  (None, formats.INT8_32, 512, 395, 1489),
)
ALONE = resolution.Overlay(is_alone=True)  # no table of this machine


side = dot_problems.operand


def problem(lhs, rhs, m, **fields):
  fields = {"n": 8192, "k": 8192, "out_dtype": formats.BF16, **fields}
  return dot_problems.problem(lhs, rhs, m=m, **fields)


def chosen(asked, target, requested=None, overlay=ALONE):
  return backends.choose(asked, target, requested, overlay=overlay)


def unfused(asked):
  return modelled.model(asked, H200).unfused


class ModelledTest(parameterized.TestCase):
  @parameterized.parameters(
    # m that still decodes in registers, m that dequantizes first.
    (H100, formats.MXFP8, formats.MXFP8, 256, 384),
    (H100, formats.NVFP4, formats.NVFP4, 512, 640),
    (H200, formats.MXFP8, formats.MXFP8, 192, 256),
    (H200, formats.NVFP4, formats.NVFP4, 384, 640),
    (H200, formats.MXFP8, formats.MXFP4, 192, 384),
    (H200, None, formats.NVFP4, 512, 640),
    (H200, None, formats.MXFP8, 384, 512),
    (A100, formats.MXFP8, formats.MXFP8, 64, 256),
    (A100, None, formats.NVFP4, 64, 256),
    (A100, None, formats.MXFP8, 64, 256),
  )
  def test_many_rows_are_dequantized_first(self, target, lhs, rhs, few, many):
    self.assertEqual(
      chosen(problem(lhs, rhs, few), target).implementation, "triton"
    )
    for m in (many, 2048, 8192):
      decision = chosen(problem(lhs, rhs, m), target)
      self.assertEqual(decision.implementation, "xla")
      self.assertEqual(decision.implementation_from, "model")
      self.assertIn("model: modelled, not measured: ", decision.reason)
      triton = dot_problems.reasons(decision)["triton"]
      self.assertEqual(triton, "supported, but xla was modelled to be faster")

  @parameterized.parameters(*MEASURED)
  def test_times_and_choices_agree_with_an_h100(
    self, lhs, rhs, m, fused, unfused
  ):
    # NVFP4 has a global scale, which xla multiplies in another kernel.
    has_global = formats.NVFP4 in (lhs, rhs)
    asked = problem(
      lhs, rhs, m, global_scale="scalar" if has_global else "none"
    )
    times = modelled.model(asked, H100)
    self.assertBetween(times.fused * 1e6 / fused, 0.85, 1.15)
    self.assertBetween(times.unfused * 1e6 / unfused, 0.85, 1.15)
    proposes_xla = modelled.proposal(asked, H100) is not None
    self.assertEqual(proposes_xla, fused / unfused > modelled.MARGIN)

  @parameterized.parameters(*CHECKPOINTS)
  def test_scales_of_sums_are_not_dequantized_first(
    self, lhs, rhs, m, fused, unfused
  ):
    self.assertLess(fused, unfused)
    lhs, rhs = (f and f.of_rows() for f in (lhs, rhs))
    asked = problem(lhs, rhs, m)
    self.assertIsNone(modelled.model(asked, H100))
    self.assertEqual(chosen(asked, H100).implementation, "triton")

  def test_power_of_two_scales_are_modelled_as_those_of_mxfp8(self):
    pair = formats.FP8_1X128_E8M0, formats.FP8_128X128_E8M0.of_rows()
    for m, implementation in ((128, "triton"), (512, "xla")):
      asked = problem(*pair, m)
      known = problem(formats.MXFP8, formats.MXFP8, m)
      times, expected = (modelled.model(x, H100) for x in (asked, known))
      self.assertEqual(times.fused, expected.fused)
      self.assertBetween(times.unfused / expected.unfused, 0.98, 1)
      self.assertEqual(chosen(asked, H100).implementation, implementation)
    fastest = dataclasses.replace(asked, fastest_precision=True)
    self.assertIsNone(modelled.model(fastest, H100))
    self.assertEqual(chosen(fastest, H100).implementation, "triton")

  def test_rows_with_one_scale_are_converted_first(self):
    # The median of gpu_h100_fastest.json, in microseconds.
    row = formats.FP8_ROW.along(8192)
    times = modelled.model(problem(row, row, 8192), H100)
    self.assertBetween(times.fused * 1e6 / 2952, 0.95, 1.05)
    # Codes are read and written in bf16, and the result is scaled.
    num_bytes = 2 * 8192**2 * (1 + 1 / 8192 + 2)
    unfused = num_bytes / (3.35e12 * 2.15 / 3.35) + 3 * 2.5e-6
    unfused += 8192**2 * (4 + 4 + 2) / (3.35e12 * 2.94 / 3.35)
    unfused += 2 * 8192**3 / 733e12
    self.assertAlmostEqual(times.unfused / unfused, 1, places=6)
    for lhs, rhs, m, fields, implementation in (
      (row, row, 512, {}, "triton"),
      (row, row, 1024, {}, "xla"),
      (row, row, 8192, {}, "xla"),
      (row, row, 8192, {"fastest_precision": True}, "triton"),
      (None, row, 8192, {}, "triton"),
      (formats.FP8_1X128, row, 8192, {}, "triton"),
      (*(formats.INT8_ROW.along(8192),) * 2, 8192, {}, "triton"),
    ):
      with self.subTest(f"{lhs} x {rhs}", m=m, **fields):
        decision = chosen(problem(lhs, rhs, m, **fields), H100)
        self.assertEqual(decision.implementation, implementation)

  def test_attached_h100_is_modelled(self):
    device = types.SimpleNamespace(
      device_kind=targets.DEVICE_KINDS["h100"],
      compute_capability="9.0",
      core_count=H100.core_count,
    )
    with mock.patch.object(targets, "_local_cudnn_version", lambda: None):
      attached = targets.target_of_device(device, "cuda")
    asked = problem(formats.MXFP8, formats.MXFP8, 8192)
    self.assertEqual(
      modelled.proposal(asked, attached), modelled.proposal(asked, H100)
    )

  def test_times_by_hand(self):
    # 2048 tiles on 264 slots are 8 rounds of 128 steps of 2091 cycles, two
    # blocks taking turns, at 1.755 GHz. Each side reads 1 + 1 / 32 bytes a
    # value and writes 2; 2 * 4096 * 8192^2 operations at 733 TFLOP/s.
    times = modelled.model(problem(formats.MXFP8, formats.MXFP8, 4096), H200)
    fused = 8 * 2 * 128 * 2091 / 1.755e9
    num_bytes = (4096 + 8192) * 8192 * (1 + 1 / 32 + 2)
    unfused = num_bytes / (4.8e12 * 2.15 / 3.35)
    unfused += 2 * 2.5e-6 + 2 * 4096 * 8192**2 / 733e12
    self.assertAlmostEqual(times.fused / fused, 1, places=6)
    self.assertAlmostEqual(times.unfused / unfused, 1, places=6)

  def test_a_result_that_is_scaled_afterwards_is_moved_again(self):
    asked = problem(formats.NVFP4, formats.NVFP4, 1024)
    scaled = dataclasses.replace(asked, global_scale="scalar")
    added = unfused(scaled) - unfused(asked)
    expected = 1024 * 8192 * (4 + 4 + 2) / COPY + 2.5e-6
    self.assertAlmostEqual(added / expected, 1, places=6)

  def test_interleaved_values_are_moved_twice(self):
    rhs = side(formats.NVFP4, is_interleaved=True)
    asked = problem(None, formats.NVFP4, 1024)
    added = unfused(problem(None, rhs, 1024)) - unfused(asked)
    expected = 8192 * 8192 * 2 * 0.5 / COPY + 2.5e-6
    self.assertAlmostEqual(added / expected, 1, places=6)

  @parameterized.named_parameters(
    ("few_rows", problem(None, formats.NVFP4, 64), A100),
    ("other_gpus", problem(None, formats.NVFP4, 4096), "b200"),
    ("amd", problem(None, formats.NVFP4, 4096), "mi300x"),
    ("cpu", problem(None, formats.NVFP4, 4096), "cpu"),
    ("symbolic", problem(None, formats.NVFP4, None), H200),
    ("empty", problem(None, formats.NVFP4, 4096, n=0), H200),
    ("f32", problem(np.float32, formats.NVFP4, 4096), H200),
    ("mxfp6", problem(None, formats.MXFP6_E2M3, 4096), H200),
    ("mxfp6_pair", problem(formats.MXFP8, formats.MXFP6_E3M2, 4096), H200),
    ("two_k", problem(None, formats.MXFP8, 4096, **TWO_K), H200),
    ("swizzled", problem(None, side(formats.MXFP8, **SWIZZLED), 4096), H200),
  )
  def test_it_says_nothing_of(self, asked, target):
    if isinstance(target, str):
      target = targets.named_target(target)
    self.assertIsNone(modelled.model(asked, target))
    self.assertIsNone(modelled.proposal(asked, target))

  def test_small_products_stay_one_launch(self):
    asked = problem(formats.MXFP8, formats.MXFP8, 512, n=512, k=512)
    self.assertEqual(chosen(asked, H200).implementation, "triton")

  def test_what_is_asked_for_comes_before_it(self):
    asked = problem(formats.MXFP8, formats.MXFP8, 4096)
    for name in ("triton", "xla"):
      decision = chosen(asked, H200, name)
      self.assertEqual(decision.implementation, name)
      self.assertEqual(decision.implementation_from, "argument")
      self.assertEqual(decision.config_from, "rule")

  def test_what_is_tried_before_triton_comes_before_it(self):
    asked = problem(formats.MXFP8, formats.MXFP8, 4096)
    first = dataclasses.replace(
      backends.BACKENDS["triton"], name="first", rank=lambda target: 0
    )
    with mock.patch.object(
      registry, "table", lambda interface: {"first": first}
    ):
      decision = chosen(asked, H200)
    self.assertEqual(decision.implementation, "first")
    self.assertEqual(decision.implementation_from, "rule")

  def test_what_was_measured_comes_before_it(self):
    asked = problem(formats.MXFP8, formats.MXFP8, 4096)
    pin = resolution.Overlay(is_alone=True, pin=("triton", ()))
    decision = chosen(asked, H200, overlay=pin)
    self.assertEqual(decision.implementation, "triton")
    self.assertEqual(decision.implementation_from, "pin")
