# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which implementation is chosen, and what each refusal says."""

from __future__ import annotations

import builtins
import dataclasses
import itertools
import json
import socket
import subprocess
from typing import Any
from typing import Final
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import decisions
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.dot import problems
from jaxplugin.dot.backends import cudnn

pytestmark = pytest.mark.smoke

UNKNOWN_PLATFORM: Final = targets.Target(name="abacus", platform="abacus")
TARGETS: Final = (
  *(targets.named_target(name) for name in targets.TARGET_NAMES),
  targets.named_target("b200", cudnn="9.13"),
  targets.Target(name="unknown cuda device", platform="cuda"),
  targets.Target(name="v5e", platform="tpu"),
  UNKNOWN_PLATFORM,
)


def operand_problem(
  format: jp.BlockFormat | None, **changes: Any
) -> problems.OperandProblem:
  dtype = np.dtype(jnp.bfloat16) if format is None else format.values_dtype
  return problems.OperandProblem(format=format, dtype=dtype, **changes)


def make_problem(
  lhs: jp.BlockFormat | None = jp.NVFP4,
  rhs: jp.BlockFormat | None = jp.NVFP4,
  **changes: Any,
) -> problems.DotProblem:
  fields = dict(
    batch=1,
    m=128,
    n=256,
    k=512,
    lhs=operand_problem(lhs),
    rhs=operand_problem(rhs),
    out_dtype=np.dtype(np.float32),
  )
  return problems.DotProblem(**{**fields, **changes})


def cudnn_reason(problem: Any, target: Any) -> str:
  """Why cudnn refuses; "" where it serves."""
  refusal = cudnn.supports(problem, target)
  return "" if refusal is None else refusal.reason


def custom_format() -> jp.BlockFormat:
  return dataclasses.replace(formats.NVFP4, name="nvfp4_32", block_size=32)


def order(target: targets.Target) -> tuple[str, ...]:
  return decisions.order(backends.BACKENDS, target)


class OrderTest(parameterized.TestCase):
  @parameterized.parameters(
    ("a100", ("triton", "xla")),
    ("l40s", ("triton", "xla")),
    ("h100", ("triton", "xla")),
    ("h200", ("triton", "xla")),
    ("b200", ("cudnn", "triton", "xla")),
    ("b300", ("cudnn", "triton", "xla")),
    ("rtx5090", ("cudnn", "triton", "xla")),
    ("gb10", ("cudnn", "triton", "xla")),
    ("mi300x", ("triton", "xla")),
    ("mi355x", ("triton", "xla")),
    ("cpu", ("cpu", "xla")),
  )
  def test_order_of_a_named_target(self, name, expected):
    target = targets.named_target(name)
    self.assertEqual(order(target), expected)

  def test_order_just_below_and_at_compute_capability_10(self):
    target = targets.named_target("h100")
    for capability, first in (((9, 9), "triton"), ((10, 0), "cudnn")):
      target = dataclasses.replace(target, compute_capability=capability)
      self.assertEqual(order(target)[0], first)

  @parameterized.parameters("tpu", "abacus", "METAL")
  def test_anything_else_has_xla_alone(self, platform):
    target = targets.Target(name="x", platform=platform)
    self.assertEqual(order(target), ("xla",))

  def test_unknown_cuda_device_is_not_taken_for_blackwell(self):
    target = targets.Target(name="unknown cuda device", platform="cuda")
    self.assertEqual(order(target), ("triton", "xla"))

  @parameterized.product(
    first=("cudnn", "triton", "cpu", "xla"),
    target=("b200", "h100", "mi355x", "cpu"),
  )
  def test_first_that_serves_is_chosen(self, first, target):
    # Each implementation is made to serve, or not, in turn.
    target = targets.named_target(target, cudnn=None)
    tried = order(target)
    with patched_backends(serving=(first, "xla")):
      decision = backends.choose(make_problem(), target)
    expected = first if first in tried else "xla"
    self.assertEqual(decision.implementation, expected)
    refused = {r.implementation: r.reason for r in decision.refusals}
    self.assertEqual(set(refused), set(backends.BACKENDS) - {expected})
    for name, reason in refused.items():
      if name == first or name == "xla":
        self.assertIn("supported, ", reason)
      else:
        self.assertEqual(reason, "not today")


def patched_backends(serving: tuple[str, ...]) -> Any:
  """Makes these backends serve everything, and the others nothing."""
  refusal = decisions.Unsupported("not today")
  fakes = {
    name: dataclasses.replace(
      backend,
      supports=mock.Mock(return_value=None if name in serving else refusal),
      plan=mock.Mock(return_value=decisions.Plan()),
    )
    for name, backend in backends.BACKENDS.items()
  }
  return mock.patch.dict(backends.BACKENDS, fakes)


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
        self.assertLen(others, 4)
        self.assertEqual(
          {decision.implementation, *others},
          set(backends.NAMES),
        )
        for refusal in decision.refusals:
          self.assertNotEmpty(refusal.reason)

  def test_implementations_are_named_once(self):
    self.assertEqual(
      backends.NAMES, ("cudnn", "triton", "cpu", "xla", "cutile")
    )
    for name, backend in backends.BACKENDS.items():
      self.assertEqual(backend.name, name)

  @parameterized.parameters(*TARGETS)
  def test_choosing_is_pure(self, target):
    problem = make_problem(global_scale="scalar")
    before = (repr(problem), repr(target))
    forbidden = mock.Mock(side_effect=AssertionError("not pure"))
    self.enter_context(mock.patch.dict("os.environ", clear=True))
    backends.choose(problem, UNKNOWN_PLATFORM)  # tables are read, once
    with (
      mock.patch.object(targets, "detect_target", forbidden),
      mock.patch.object(targets, "overriding_target", forbidden),
      mock.patch.object(targets, "local_targets", forbidden),
      mock.patch.object(builtins, "open", forbidden),
      mock.patch.object(subprocess, "Popen", forbidden),
      mock.patch.object(socket, "socket", forbidden),
    ):
      first = backends.choose(problem, target)
      with jp.use_target(UNKNOWN_PLATFORM):
        second = backends.choose(problem, target)
    self.assertEqual(first, second)
    self.assertEqual(before, (repr(problem), repr(target)))
    self.assertEqual(hash(problem), hash(make_problem(global_scale="scalar")))

  @parameterized.parameters(*TARGETS)
  def test_xla_may_be_forced_anywhere(self, target):
    decision = backends.choose(make_problem(), target, "xla")
    self.assertEqual(decision.implementation, "xla")
    self.assertIn("requested", decision.reason)

  @parameterized.product(
    name=("cudnn", "triton", "cpu"), target=("cpu", "h100", "mi300x", "b200")
  )
  def test_forced_refusal_lists_every_implementation(self, name, target):
    target = targets.named_target(target)
    problem = make_problem(jp.MXFP8, jp.MXFP4, m=17, n=19, k=96)
    answers = {
      other: module.supports(problem, target)
      for other, module in backends.BACKENDS.items()
    }
    if answers[name] is None:
      self.skipTest(f"{name} serves on {target}")
    with self.assertRaises(NotImplementedError) as caught:
      backends.choose(problem, target, name)
    message = str(caught.exception)
    self.assertIn(f"implementation={name!r}", message)
    self.assertIn("mxfp8 x mxfp4 -> float32, batch=1 m=17 n=19 k=96", message)
    self.assertIn(target.name, message)
    for other, answer in answers.items():
      reason = "supported" if answer is None else answer.reason
      self.assertIn(f"\n  {other}: {reason}", message)

  @parameterized.parameters("XLA", "cuda", "", "none", "xla ")
  def test_unknown_name_is_a_value_error(self, name):
    with self.assertRaisesRegex(
      ValueError, rf"implementation must be None or one of .*got '{name}'"
    ):
      backends.choose(make_problem(), TARGETS[0], name)

  @parameterized.parameters("none", "scalar", "array")
  def test_decision_tells_how_the_global_scale_is_applied(self, global_scale):
    problem = make_problem(global_scale=global_scale)
    decision = backends.choose(problem, UNKNOWN_PLATFORM)
    expected = "none" if global_scale == "none" else "separate"
    self.assertEqual(decision.global_scale, expected)

  def test_decision_becomes_json(self):
    decision = backends.choose(make_problem(), TARGETS[0])
    loaded = json.loads(json.dumps(decision.to_json()))
    self.assertEqual(loaded["implementation"], decision.implementation)
    self.assertLen(loaded["refusals"], 4)


class CudnnGateTest(parameterized.TestCase):
  """The gates of DESIGN.md section 3, each just below and at it."""

  def setUp(self):
    super().setUp()
    self.target = targets.named_target("b200", cudnn="9.13")

  def with_target(self, **changes: Any) -> targets.Target:
    return dataclasses.replace(self.target, **changes)

  def test_serves_and_comes_first(self):
    decision = backends.choose(make_problem(), self.target)
    self.assertEqual(decision.implementation, "cudnn")

  @parameterized.parameters("cpu", "rocm", "tpu")
  def test_needs_an_nvidia_gpu(self, platform):
    reason = cudnn_reason(make_problem(), self.with_target(platform=platform))
    self.assertIn("NVIDIA", reason)
    self.assertIn(platform, reason)

  @parameterized.parameters(
    ((8, 0), False),
    ((9, 0), False),
    ((9, 9), False),
    ((10, 0), True),
    ((10, 3), True),
    ((12, 1), True),
  )
  def test_compute_capability(self, capability, passes):
    target = self.with_target(compute_capability=capability)
    reason = cudnn_reason(make_problem(), target)
    if passes:
      self.assertEqual(reason, "")
    else:
      self.assertIn("10.0", reason)
      self.assertIn("{}.{}".format(*capability), reason)

  def test_unknown_compute_capability_is_said(self):
    target = self.with_target(compute_capability=None)
    self.assertIn("not known", cudnn_reason(make_problem(), target))

  @parameterized.parameters(
    ("8.9.7", False),
    ("9.9", False),
    ("9.9.99", False),
    ("9.10", True),
    ("9.10.0", True),
    ("9.12", True),
    ("9.13", True),
    ("10.0", True),
  )
  def test_cudnn_version(self, version, passes):
    target = targets.named_target("b200", cudnn=version)
    reason = cudnn_reason(make_problem(), target)
    if passes:
      self.assertEqual(reason, "")
    else:
      self.assertIn("9.10.0", reason)
      self.assertIn(
        targets.format_version(targets.parse_version(version)), reason
      )

  def test_no_cudnn_is_said(self):
    target = targets.named_target("b200")
    self.assertIn("has none", cudnn_reason(make_problem(), target))

  @parameterized.parameters(
    (jp.MXFP8, jp.MXFP8, True),
    (jp.MXFP8, jp.MXFP8_E5M2, True),
    (jp.MXFP8_E5M2, jp.MXFP8, True),
    (jp.MXFP8_E5M2, jp.MXFP8_E5M2, False),
    (jp.NVFP4, jp.NVFP4, True),
    (jp.MXFP4, jp.MXFP4, False),
    (jp.MXFP8, jp.MXFP4, False),
    (jp.NVFP4, jp.MXFP8, False),
    (jp.MXFP4, jp.NVFP4, False),
    (None, jp.NVFP4, False),
    (jp.MXFP8, None, False),
  )
  def test_format_pairs(self, lhs, rhs, passes):
    reason = cudnn_reason(make_problem(lhs, rhs), self.target)
    self.assertEqual(reason == "", passes, reason)

  def test_e5m2_pair_is_named(self):
    problem = make_problem(jp.MXFP8_E5M2, jp.MXFP8_E5M2)
    self.assertIn("E5M2 by E5M2", cudnn_reason(problem, self.target))

  def test_other_block_sizes_are_refused(self):
    problem = make_problem(custom_format(), custom_format())
    self.assertIn("nvfp4_32", cudnn_reason(problem, self.target))

  @parameterized.parameters(
    (jp.NVFP4, 16, True),
    (jp.NVFP4, 15, False),
    (jp.NVFP4, 17, False),
    (jp.MXFP8, 32, True),
    (jp.MXFP8, 31, False),
    (jp.MXFP8, 48, False),
    (jp.MXFP8, 4096, True),
  )
  def test_k_is_whole_blocks(self, format, k, passes):
    reason = cudnn_reason(make_problem(format, format, k=k), self.target)
    if passes:
      self.assertEqual(reason, "")
    else:
      self.assertIn(f"k={k}", reason)
      self.assertIn(str(format.block_size), reason)

  @parameterized.parameters(
    (64, True, ""),
    (48, True, "k=48"),
    (64, False, "along the same contracting dimension"),
  )
  def test_several_contracting_dimensions(self, blocked_k, pair_up, reason):
    problem = make_problem(
      jp.MXFP8,
      jp.MXFP8,
      k=3 * blocked_k,
      num_contracting=2,
      blocked_k=blocked_k,
      blocks_pair_up=pair_up,
    )
    given = cudnn_reason(problem, self.target)
    self.assertEqual(given == "", reason == "")
    self.assertIn(reason, given)

  @parameterized.parameters("batch", "m", "n", "k")
  def test_empty_problems_are_refused(self, name):
    problem = make_problem(**{name: 0})
    self.assertIn("at least 1", cudnn_reason(problem, self.target))

  @parameterized.parameters(
    ("9.17.9", True), ("9.18", False), ("9.20.5", False), ("9.20.6", True)
  )
  def test_denied_versions_are_refused_with_their_reason(self, version, passes):
    denied = cudnn.DeniedVersions((9, 18, 0), (9, 20, 5), "it dreams")
    target = targets.named_target("b200", cudnn=version)
    with mock.patch.object(cudnn, "DENIED_VERSIONS", (denied,)):
      reason = cudnn_reason(make_problem(), target)
    if passes:
      self.assertEqual(reason, "")
    else:
      dotted = targets.format_version(target.cudnn_version)
      self.assertEqual(
        reason,
        f"cuDNN 9.18.0 to 9.20.5 is denied, the target has {dotted}: it dreams",
      )

  @parameterized.parameters("batch", "m", "n", "k")
  def test_symbolic_sizes_are_refused(self, name):
    problem = make_problem(**{name: None})
    self.assertIn("static", cudnn_reason(problem, self.target))

  def test_device_is_the_first_reason(self):
    problem = make_problem(jp.MXFP8_E5M2, jp.MXFP8_E5M2, k=31)
    reason = cudnn_reason(problem, targets.named_target("h100"))
    self.assertIn("compute capability", reason)


class CudnnPlanTest(parameterized.TestCase):
  """How the global scale is applied: DESIGN.md, sections 2 and 3."""

  @parameterized.product(
    version=("9.10", "9.12.9", "9.13", "9.28"),
    dtype=(np.float32, jnp.bfloat16, np.float16),
    global_scale=("none", "scalar", "array"),
    highest=(False, True),
    has_bias=(False, True),
  )
  @pytest.mark.sample(1)
  def test_global_scale(self, version, dtype, global_scale, highest, has_bias):
    target = targets.named_target("b200", cudnn=version)
    problem = make_problem(
      out_dtype=np.dtype(dtype),
      global_scale=global_scale,
      highest_precision=highest,
      has_bias=has_bias,
    )
    decision = backends.choose(problem, target)
    self.assertEqual(decision.implementation, "cudnn")
    expected = "none" if global_scale == "none" else "separate"
    rounds = False
    if global_scale == "scalar" and version in ("9.13", "9.28"):
      if has_bias or dtype == np.float32:
        expected = "fused"  # into a call whose result is f32
      elif dtype == jnp.bfloat16 and not highest:
        expected, rounds = "fused", True
    self.assertEqual(decision.global_scale, expected)
    self.assertLen(decision.notes, int(rounds))
    if rounds:
      self.assertIn("rounded to bfloat16", decision.notes[0])
      self.assertIn('precision="highest"', decision.notes[0])

  @parameterized.product(
    dtype=(np.float32, jnp.bfloat16, np.float16),
    global_scale=("scalar", "array"),
    highest=(False, True),
    epilogue=(
      {},
      {"has_bias": True},
      {"activation": "relu"},
      {"has_residual": True},
    ),
  )
  def test_product_of_global_scales(
    self, dtype, global_scale, highest, epilogue
  ):
    target = targets.named_target("b200", cudnn="9.13")
    problem = make_problem(
      out_dtype=np.dtype(dtype),
      global_scale=global_scale,
      has_global_power=True,
      highest_precision=highest,
      **epilogue,
    )
    decision = backends.choose(problem, target)
    is_fused = decision.global_scale == "fused"
    may_be_fused = global_scale == "scalar" and not highest
    has_f32 = bool(epilogue) or dtype != np.float16
    self.assertEqual(is_fused, may_be_fused and has_f32)
    said = [
      note for note in decision.notes if "below 2^-126 becomes zero" in note
    ]
    self.assertLen(said, int(is_fused))

  @parameterized.parameters(
    ({}, ""),
    ({"m": 1}, "lhs rows 1 to 128"),
    (
      {"m": 129, "n": 300, "k": 48},
      "lhs rows 129 to 256, rhs rows 300 to 384, scale columns 3 to 4",
    ),
  )
  def test_padding_is_told(self, sizes, expected):
    target = targets.named_target("b200", cudnn="9.13")
    decision = backends.choose(make_problem(**sizes), target)
    self.assertEqual(decision.padding, expected)


class OtherGateTest(parameterized.TestCase):
  @parameterized.parameters(*TARGETS)
  def test_cpu_serves_cpus_alone(self, target):
    refusal = backends.BACKENDS["cpu"].supports(make_problem(), target)
    if target.platform != "cpu":
      self.assertIn(target.platform, refusal.reason)

  @parameterized.parameters(*TARGETS)
  def test_triton_serves_nvidia_and_amd_alone(self, target):
    refusal = backends.BACKENDS["triton"].supports(make_problem(), target)
    if target.platform not in ("cuda", "rocm"):
      self.assertIn(target.platform, refusal.reason)

  @parameterized.parameters(*TARGETS)
  def test_xla_serves_everything(self, target):
    for lhs, rhs in itertools.product(formats.FORMATS, repeat=2):
      problem = make_problem(lhs, rhs, batch=None, k=7)
      self.assertIsNone(backends.BACKENDS["xla"].supports(problem, target))


class ProblemTest(parameterized.TestCase):
  def test_problem_reads_as_one_line(self):
    problem = make_problem(jp.MXFP8, None, m=None)
    self.assertEqual(
      str(problem), "mxfp8 x bfloat16 -> float32, batch=1 m=? n=256 k=512"
    )

  @parameterized.parameters("batch", "m", "n", "k")
  def test_any_unknown_size_makes_a_problem_not_static(self, name):
    self.assertTrue(make_problem().sizes_are_static)
    self.assertFalse(make_problem(**{name: None}).sizes_are_static)

  def test_problems_and_decisions_are_frozen(self):
    for value in (
      make_problem(),
      operand_problem(jp.MXFP8),
      backends.choose(make_problem(), UNKNOWN_PLATFORM),
    ):
      field = dataclasses.fields(value)[0].name
      with self.assertRaises(dataclasses.FrozenInstanceError):
        setattr(value, field, None)


if __name__ == "__main__":
  absltest.main()
