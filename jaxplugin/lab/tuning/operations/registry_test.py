# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Candidates of every operation are checked on exact operands."""

import contextlib
import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin import repro
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.dot import problems as dot_problems
from jaxplugin.dot.backends import xla
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.tuning import jobs, listing, workload
from jaxplugin.lab.tuning.operations import operands, registry
from jaxplugin.operation import failures
from jaxplugin.quantization import problems as quantization
from jaxplugin.ragged import calls
from jaxplugin.tables import resolution
from jaxplugin.testing import folders, prologue_cases

F32 = np.dtype(np.float32)
TARGET = targets.detect_target("cpu")


def of_shapes(shapes, formats):
  work = workload.of_shapes(
    workloads.parse_rows(shapes), workloads.parse_pairs(formats), F32, TARGET
  )
  return [item.problem for item in work.items]


def check(problem, candidate):
  argument = {
    "problem": jobs.packed(problem),
    "candidate": candidate.to_json(),
  }
  return jobs.check(argument, lambda note: None)


def plain_contraction():
  side = dot_problems.SideProblem(format=None, dtype=F32)
  return calls.ContractionProblem(
    groups=4, m=20, n=24, k=40, lhs=side, rhs=side, out_dtype=F32
  )


class CheckedTest(parameterized.TestCase):
  @parameterized.parameters(
    ("quantize:6x64", "mxfp8,nvfp4", "quantize"),
    ("dequantize:6x64", "mxfp4", "dequantize"),
    ("experts:5x2of3x24x64", "bf16xnvfp4", "ragged_dot"),
  )
  @pytest.mark.lab
  def test_every_candidate_gives_exact_results(self, shapes, formats, name):
    for problem in of_shapes(shapes, formats):
      self.assertEqual(registry.of(problem).operation.name, name)
      listed = listing.of_problem(problem, TARGET)
      found = {candidate.implementation for candidate in listed.candidates}
      expected = {"xla"} | ({"cpu"} if TARGET.cpu_kernels else set())
      self.assertEqual(found, expected)
      for candidate in listed.candidates:
        self.assertEqual(
          check(problem, candidate), ["poison: these operands have no padding"]
        )

  def test_rows_that_kernels_quantize_give_exact_results(self):
    (dot,) = of_shapes("4x32x96", "bf16xmxfp4")
    (ragged,) = of_shapes("experts:5x2of3x24x64", "bf16xmxfp4")
    for problem in (dot, ragged):
      problem = dataclasses.replace(problem, fastest_precision=True)
      listed = listing.of_problem(problem, TARGET).candidates
      for candidate in listed:
        check(problem, candidate)

  @parameterized.parameters(*prologue_cases.CASES[1::4])
  @pytest.mark.sample(1)
  def test_every_candidate_of_a_prologue_gives_its_results(self, prologue):
    problem = quantization.QuantizationProblem.along(
      1, shape=(6, 64), dtype=F32, format=jp.MXFP8, prologue=prologue
    )
    listed = listing.of_problem(problem, TARGET)
    self.assertLen(listed.candidates, 1 + (TARGET.cpu_kernels is not None))
    for candidate in listed.candidates:
      check(problem, candidate)
    operation = registry.of(problem)
    arrays, expected = operation.make(problem, 0, True)
    arrays["x"] = -arrays["x"]
    with self.assertRaisesRegex(operands.InexactResultError, "result 0[ ,]"):
      operation.check(operation.compute(problem, arrays), expected, problem)

  @absltest.skipIf(TARGET.cpu_kernels is None, "there are no C++ kernels")
  def test_a_config_that_the_program_ignores_is_an_error(self):
    (problem,) = of_shapes("8x32x64", "mxfp8")
    candidate = listing.TrialCandidate(
      implementation="cpu", config=(("engine", "scalar"),)
    )
    with (
      mock.patch.object(
        resolution, "pinned", lambda *_: contextlib.nullcontext()
      ),
      self.assertRaisesRegex(
        jobs.UnexpectedDecisionError, "must be cpu engine=scalar, got cpu"
      ),
    ):
      check(problem, candidate)

  def test_a_wrong_candidate_writes_a_file(self):
    (problem,) = of_shapes("8x32x64", "mxfp8")
    candidate = listing.TrialCandidate(implementation="xla")
    folder = folders.new(self)
    wrong = dataclasses.replace(
      xla.BACKEND, emit=lambda *args: xla.BACKEND.emit(*args) + 1
    )
    with (
      mock.patch.dict("os.environ", {failures.VARIABLE: str(folder)}),
      mock.patch.dict(backends.BACKENDS, {"xla": wrong}),
      self.assertRaisesRegex(
        operands.InexactResultError, f"jaxplugin repro {folder}"
      ),
    ):
      check(problem, candidate)
    (path,) = folder.glob("jaxplugin-tuner-*.zip")
    with mock.patch.dict(backends.BACKENDS, {"xla": wrong}):
      jax.clear_caches()
      self.assertEqual(repro.replay(path).first_wrong, 0)
    jax.clear_caches()
    self.assertIsNone(repro.replay(path).first_wrong)

  @pytest.mark.lab
  def test_a_contraction_gives_exact_results(self):
    problem = plain_contraction()
    (candidate,) = listing.of_problem(problem, TARGET).candidates
    check(problem, candidate)

  @parameterized.parameters(
    ("quantize:4x32", "mxfp8"),
    ("quantize:4x32", "nvfp4"),
    ("dequantize:4x32", "mxfp8"),
    ("experts:4x1of2x8x32", "mxfp8"),
  )
  @pytest.mark.lab
  def test_a_wrong_number_is_found_in_every_part(self, shapes, formats):
    (problem,) = of_shapes(shapes, formats)
    operation = registry.of(problem)
    arrays, expected = operation.make(problem, 0, True)
    result = operation.compute(problem, arrays)
    operation.check(result, expected, problem)
    leaves, tree = jax.tree.flatten(result)
    for i, leaf in enumerate(leaves):
      codes = np.array(leaf)
      # The lowest bit of one element: another code, or the next number.
      codes.reshape(-1)[-1:].view(f"u{codes.itemsize}")[:] ^= 1
      wrong = jax.tree.unflatten(tree, [*leaves[:i], codes, *leaves[i + 1 :]])
      with self.assertRaises(operands.InexactResultError):
        operation.check(wrong, expected, problem)

  @pytest.mark.lab
  def test_what_is_not_tuned_says_why(self):
    gated = dataclasses.replace(
      of_shapes("experts:4x1of2x8x32", "mxfp8")[0], activation="swiglu"
    )
    for problem, reason in (
      (gated, "swiglu is not checked"),
      (
        dataclasses.replace(plain_contraction(), global_scale="scalar"),
        "it has a global scale",
      ),
      (
        dataclasses.replace(plain_contraction(), m=None),
        "sizes are symbolic",
      ),
    ):
      operation = registry.of(problem)
      self.assertEqual(operation.refusal(problem), reason)
      with self.assertRaisesRegex(operands.OperandsError, f": {reason}$"):
        operation.make(problem, 0, True)
