# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which implementation is chosen, and what each refusal says."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import itertools
import socket
import subprocess
from typing import Any, Final
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.core import decisions, formats, targets
from jaxplugin.dot import backends
from jaxplugin.dot.backends import cudnn
from jaxplugin.testing import dot_problems

pytestmark = pytest.mark.smoke

make_problem = dot_problems.problem
UNKNOWN_PLATFORM: Final = targets.Target(name="abacus", platform="abacus")
TARGETS: Final = (
  *(targets.named_target(name) for name in targets.TARGET_NAMES),
  targets.named_target("b200", cudnn="9.13"),
  targets.Target(name="unknown cuda device", platform="cuda"),
  targets.Target(name="v5e", platform="tpu"),
  UNKNOWN_PLATFORM,
)


def cudnn_reason(problem: Any, target: Any) -> str:
  """Returns why cudnn refuses, or "" if it supports the problem."""
  refusal = cudnn.supports(problem, target)
  return "" if refusal is None else refusal.reason


def custom_format() -> jp.BlockFormat:
  return dataclasses.replace(formats.NVFP4, name="nvfp4_32", block_size=32)


def order(target: targets.Target) -> tuple[str, ...]:
  return decisions.order(backends.BACKENDS, target)


class OrderTest(absltest.TestCase):
  def test_order_of_named_and_unknown_targets(self):
    unknown = functools.partial(targets.Target, name="unknown device")
    h100 = targets.named_target("h100")
    gpu, blackwell = ("triton", "xla"), ("cudnn", "triton", "xla")
    table = [
      *((name, gpu) for name in ("a100", "l40s", "h100", "h200")),
      *((name, blackwell) for name in ("b200", "b300", "rtx5090", "gb10")),
      *((name, gpu) for name in ("mi300x", "mi355x")),
      ("cpu", ("cpu", "xla")),
      *((unknown(platform=p), ("xla",)) for p in ("tpu", "abacus", "METAL")),
      # An unknown CUDA device is not taken for Blackwell.
      (unknown(platform="cuda"), gpu),
      (dataclasses.replace(h100, compute_capability=(9, 9)), gpu),
      (dataclasses.replace(h100, compute_capability=(10, 0)), blackwell),
    ]
    for target, expected in table:
      if isinstance(target, str):
        target = targets.named_target(target)
      with self.subTest(str(target)):
        self.assertEqual(order(target), expected)


class ChooseTest(parameterized.TestCase):
  @parameterized.parameters(*TARGETS)
  @pytest.mark.sample(6)
  def test_something_serves_everywhere_and_every_refusal_has_a_reason(
    self, target
  ):
    for lhs, rhs in itertools.product((*formats.FORMATS, None), repeat=2):
      for sizes in ({}, {"k": 100}, {"batch": None, "m": None}, {"m": 0}):
        decision = backends.choose(make_problem(lhs, rhs, **sizes), target)
        others = [r.implementation for r in decision.refusals]
        every = [decision.implementation, *others]
        self.assertCountEqual(every, backends.NAMES)
        for refusal in decision.refusals:
          self.assertNotEmpty(refusal.reason)

  def test_implementations_are_named_once(self):
    self.assertEqual(
      backends.NAMES, ("cudnn", "triton", "cpu", "xla", "cutile")
    )
    for name, backend in backends.BACKENDS.items():
      self.assertEqual(backend.name, name)

  def test_choosing_is_pure(self):
    problem = make_problem(global_scale="scalar")
    self.enter_context(mock.patch.dict("os.environ", clear=True))
    backends.choose(problem, UNKNOWN_PLATFORM)  # tables are read, once
    forbidden = mock.Mock(side_effect=AssertionError("not pure"))
    for module, name in (
      *((targets, "detect_target"), (targets, "overriding_target")),
      *((targets, "local_targets"), (builtins, "open")),
      *((subprocess, "Popen"), (socket, "socket")),
    ):
      self.enter_context(mock.patch.object(module, name, forbidden))
    for target in TARGETS:
      before = (repr(problem), repr(target))
      first = backends.choose(problem, target)
      with jp.use_target(UNKNOWN_PLATFORM):
        second = backends.choose(problem, target)
      self.assertEqual(first, second)
      self.assertEqual(before, (repr(problem), repr(target)))
    self.assertEqual(hash(problem), hash(make_problem(global_scale="scalar")))

  def test_decision_tells_how_the_global_scale_is_applied(self):
    for global_scale in ("none", "scalar", "array"):
      problem = make_problem(global_scale=global_scale)
      decision = backends.choose(problem, UNKNOWN_PLATFORM)
      expected = "none" if global_scale == "none" else "separate"
      self.assertEqual(decision.global_scale, expected)


SIZES: Final = ("batch", "m", "n", "k")


def b200(cudnn: str | None = "9.13", **changes: Any) -> targets.Target:
  target = targets.named_target("b200", cudnn=cudnn)
  return dataclasses.replace(target, **changes)


def two_k(**changes: Any) -> Any:
  changes = {"num_contracting": 2, "k": 192, "blocked_k": 64} | changes
  return make_problem(jp.MXFP8, **changes)


# cudnn's gates, each just below and at it, with a pattern of the reason. cudnn
# supports the rows without a pattern.
TARGET_GATES: Final = (
  (b200(), ""),
  (b200(platform="cpu"), "NVIDIA.*cpu"),
  (b200(platform="rocm"), "NVIDIA.*rocm"),
  (b200(platform="tpu"), "NVIDIA.*tpu"),
  (b200(compute_capability=(8, 0)), r"10\.0 .*8\.0"),
  (b200(compute_capability=(9, 0)), r"10\.0 .*9\.0"),
  (b200(compute_capability=(9, 9)), r"10\.0 .*9\.9"),
  (b200(compute_capability=(10, 0)), ""),
  (b200(compute_capability=(10, 3)), ""),
  (b200(compute_capability=(12, 1)), ""),
  (b200(compute_capability=None), "not known"),
  (b200("8.9.7"), r"9\.10\.0 .*8\.9\.7"),
  (b200("9.9"), r"9\.10\.0 .*9\.9\.0"),
  (b200("9.9.99"), r"9\.10\.0 .*9\.9\.99"),
  (b200("9.10"), ""),
  (b200("9.10.0"), ""),
  (b200("9.12"), ""),
  (b200("10.0"), ""),
  (b200(None), "has none"),
)
FORMAT_GATES: Final = (
  (jp.MXFP8, jp.MXFP8, ""),
  (jp.MXFP8, jp.MXFP8_E5M2, ""),
  (jp.MXFP8_E5M2, jp.MXFP8, ""),
  (jp.MXFP8_E5M2, jp.MXFP8_E5M2, "E5M2 by E5M2"),
  (jp.NVFP4, jp.NVFP4, ""),
  (jp.MXFP4, jp.MXFP4, "supports mxfp8 pairs"),
  (jp.MXFP8, jp.MXFP4, "supports mxfp8 pairs"),
  (jp.NVFP4, jp.MXFP8, "supports mxfp8 pairs"),
  (jp.MXFP4, jp.NVFP4, "supports mxfp8 pairs"),
  (None, jp.NVFP4, "needs both operands quantized"),
  (jp.MXFP8, None, "needs both operands quantized"),
  (custom_format(), custom_format(), "nvfp4_32"),
)
SIZE_GATES: Final = (
  (make_problem(k=16), ""),
  (make_problem(k=15), "by 16, got k=15"),
  (make_problem(k=17), "by 16, got k=17"),
  (make_problem(jp.MXFP8, k=32), ""),
  (make_problem(jp.MXFP8, k=31), "by 32, got k=31"),
  (make_problem(jp.MXFP8, k=48), "by 32, got k=48"),
  (make_problem(jp.MXFP8, k=4096), ""),
  (two_k(), ""),
  (two_k(k=144, blocked_k=48), "k=48"),
  (two_k(blocks_pair_up=False), "along the same contracting dimension"),
  *((make_problem(**{d: 0}), "at least 1") for d in SIZES),
  *((make_problem(**{d: None}), "static") for d in SIZES),
)


class CudnnGateTest(absltest.TestCase):
  def test_each_gate_refuses_below_and_passes_at_it(self):
    for problem, target, pattern in (
      *((make_problem(), target, pattern) for target, pattern in TARGET_GATES),
      *((make_problem(x, w), b200(), p) for x, w, p in FORMAT_GATES),
      *((problem, b200(), pattern) for problem, pattern in SIZE_GATES),
      # The device is the first reason.
      (make_problem(k=31), targets.named_target("h100"), "compute capability"),
    ):
      with self.subTest(f"{problem} on {target}"):
        reason = cudnn_reason(problem, target)
        self.assertRegex(reason, pattern or "^$")


class CudnnPlanTest(absltest.TestCase):
  """How the global scale is applied, and what is padded."""

  def test_global_scale(self):
    for version, dtype, global_scale, highest, has_bias in itertools.product(
      ("9.10", "9.12.9", "9.13", "9.28"),
      (np.float32, jnp.bfloat16, np.float16),
      ("none", "scalar", "array"),
      (False, True),
      (False, True),
    ):
      problem = make_problem(
        out_dtype=np.dtype(dtype),
        global_scale=global_scale,
        highest_precision=highest,
        has_bias=has_bias,
      )
      decision = backends.choose(problem, b200(version))
      self.assertEqual(decision.implementation, "cudnn")
      expected = "none" if global_scale == "none" else "separate"
      rounds = False
      if global_scale == "scalar" and version in ("9.13", "9.28"):
        if has_bias or dtype == np.float32:
          expected = "fused"  # into a call whose result is f32
        elif dtype == jnp.bfloat16 and not highest:
          expected, rounds = "fused", True
      with self.subTest(str(problem), version=version):
        self.assertEqual(decision.global_scale, expected)
        self.assertLen(decision.notes, int(rounds))
        if rounds:
          self.assertIn("rounded to bfloat16", decision.notes[0])
          self.assertIn('precision="highest"', decision.notes[0])

  def test_product_of_global_scales(self):
    epilogues = {"has_bias": True}, {"activation": "relu"}
    for dtype, global_scale, highest, epilogue in itertools.product(
      (np.float32, jnp.bfloat16, np.float16),
      ("scalar", "array"),
      (False, True),
      ({}, *epilogues, {"has_residual": True}),
    ):
      problem = make_problem(
        out_dtype=np.dtype(dtype),
        global_scale=global_scale,
        has_global_power=True,
        highest_precision=highest,
        **epilogue,
      )
      decision = backends.choose(problem, b200())
      is_fused = decision.global_scale == "fused"
      may_be_fused = global_scale == "scalar" and not highest
      has_f32 = bool(epilogue) or dtype != np.float16
      with self.subTest(f"{problem} {epilogue}", highest=highest):
        self.assertEqual(is_fused, may_be_fused and has_f32)
        said = [n for n in decision.notes if "below 2^-126 becomes zero" in n]
        self.assertLen(said, int(is_fused))

  def test_padding_is_told(self):
    every = "lhs rows 129 to 256, rhs rows 300 to 384, scale columns 3 to 4"
    for sizes, expected in (
      *(({}, ""), ({"m": 1}, "lhs rows 1 to 128")),
      ({"m": 129, "n": 300, "k": 48}, every),
    ):
      decision = backends.choose(make_problem(**sizes), b200())
      self.assertEqual(decision.padding, expected)


class OtherGateTest(absltest.TestCase):
  def test_each_implementation_serves_its_platforms_alone(self):
    for target, (name, platforms) in itertools.product(
      TARGETS, (("cpu", ("cpu",)), ("triton", ("cuda", "rocm")))
    ):
      if target.platform not in platforms:
        refusal = backends.BACKENDS[name].supports(make_problem(), target)
        self.assertIn(target.platform, refusal.reason)

  def test_mxfp6_is_multiplied_by_kernels(self):
    has_kernels = dataclasses.replace(
      targets.named_target("cpu"), cpu_kernels="avx2"
    )
    for format, target in itertools.product(
      (jp.MXFP6_E2M3, jp.MXFP6_E3M2), ("h200", "b200", "a100", has_kernels)
    ):
      if isinstance(target, str):
        target = targets.named_target(target)
      decision = backends.choose(make_problem(format), target)
      expected = "cpu" if target.platform == "cpu" else "triton"
      self.assertEqual(decision.implementation, expected)


class ProblemTest(absltest.TestCase):
  def test_problem_reads_as_one_line(self):
    problem = make_problem(jp.MXFP8, None, m=None)
    self.assertEqual(
      str(problem), "mxfp8 x bfloat16 -> float32, batch=1 m=? n=256 k=512"
    )

  def test_any_unknown_size_makes_a_problem_not_static(self):
    self.assertTrue(make_problem().sizes_are_static)
    for name in SIZES:
      self.assertFalse(make_problem(**{name: None}).sizes_are_static)
