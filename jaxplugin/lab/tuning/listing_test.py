# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every config is either a candidate or pruned, by a rule that holds."""

import dataclasses
import itertools
import math
import unittest

import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.core import formats, targets
from jaxplugin.dot.backends import cpu, triton
from jaxplugin.kernels.gpu import configs, constraints
from jaxplugin.lab.tuning import listing, triton_space
from jaxplugin.lab.tuning.operations import operation
from jaxplugin.printing import console
from jaxplugin.runtime import triton_library
from jaxplugin.testing import dot_problems


def problem(lhs=jp.MXFP8, rhs=jp.MXFP8, **changes):
  fields = dict(m=4096, n=4096, k=4096, out_dtype=formats.BF16) | changes
  return dot_problems.problem(lhs, rhs, **fields)


def gpu(name):
  return targets.named_target(name).with_library(targets.JAX_TRITON)


def planned(given, target):
  """Returns the shape of a problem and its default config."""
  shape, (launch, *_) = triton.launches(given, target)
  return shape, dict(launch.constexprs)["TILING"].config


DECODE = problem(None, jp.NVFP4, m=1)
SQUARE = problem()
FP8 = problem(jp.FP8_1X128, jp.FP8_1X128, fastest_precision=True)


class TableTest(absltest.TestCase):
  def test_measured_candidates_fit_80_columns_in_a_line_each(self):
    figures = {"us": "123456", "ratio": "1.000", "interval": "[0.999, 1.001]"}
    configs = [
      (),
      (("engine", "few_rows_avx512"), ("threads", 2)),
      (("engine", "neon_integers"), ("threads", 2)),
    ]
    candidates = [
      listing.TrialCandidate(implementation="cpu", config=c) for c in configs
    ]
    cells = [{"": "tie", **figures, "backend": "cpu (default)"}] * 3
    text = console.text(listing.table(candidates, cells, figures=figures))
    shared, header, *rows = text.splitlines()
    self.assertEqual(shared.split(), ["every", "config:", "threads=2"])
    self.assertEqual(header.split(), [*figures, "backend", "config"])
    self.assertEqual(
      [row.split("(default)")[1].strip() for row in rows],
      ["", "engine=few_rows_avx512", "engine=neon_integers"],
    )
    self.assertLessEqual(max(map(len, (header, *rows))), 80)


class ListingTest(parameterized.TestCase):
  @parameterized.parameters(("h100", DECODE), ("b200", SQUARE))
  @pytest.mark.lab
  def test_every_config_is_a_candidate_or_pruned(self, name, given):
    target = gpu(name)
    architecture = triton_library.architecture_of(target)
    found = triton_space.space(given, target, operation.MARGIN)
    shape, default = planned(given, target)
    # Written a second time: all that there is.
    copies = 2 if architecture.has_tma else 1
    ways = 2 * 3 * 5 * copies
    total = sum(
      5 * 5 * 5 * 5 * ways * (1 if path == "small_m" else 2)
      for path in ("upcast", "native", "small_m", "fp8", "int8")
    )
    kept = len(found.configs) - 1  # and the rule
    pruned = sum(p.count for p in found.pruned)
    self.assertIn(total - pruned - kept, (0, 1))  # the default may be of them
    self.assertNotIn(triton.fields_of(default), found.configs)
    self.assertEqual(found.configs[0], ())
    for fields in found.configs[1:]:
      config = triton.config_of(fields)
      self.assertIsNone(
        constraints.config_error(config, shape, architecture), fields
      )

  @parameterized.parameters("a100", "h200", "rtx5090", "mi355x")
  @pytest.mark.lab
  def test_the_default_comes_first_and_every_reason_is_told(self, name):
    found = listing.of_problem(DECODE, gpu(name))
    self.assertEqual(listing.of_problem(DECODE, gpu(name)), found)
    self.assertEqual(found.candidates[0], found.default)
    self.assertEqual(found.default.config, ())
    keys = [candidate.key for candidate in found.candidates]
    self.assertLen({*keys}, len(keys))
    self.assertIn("xla", keys)
    for pruned in found.pruned:
      self.assertIn(pruned.rule, listing.RULES)
      self.assertNotEmpty(pruned.reason)
      self.assertGreater(pruned.count, 0)
    for candidate in found.candidates:
      self.assertEqual(listing.candidate_of(candidate.to_json()), candidate)

  @pytest.mark.lab
  def test_the_margin_prunes(self):
    counts = []
    for margin in (4.0, 2.0, 1.1):
      found = triton_space.space(SQUARE, gpu("h100"), margin)
      reason = f"at least {margin:g} times the best estimate"
      (count,) = (p.count for p in found.pruned if p.reason == reason)
      counts.append(count)
    self.assertEqual(counts, sorted({*counts}))

  @pytest.mark.lab
  def test_within_a_launch_tiles_like_the_default_come_first(self):
    # All of these take less than 2 us, by a model without latency.
    given = problem(None, jp.MXFP8, m=16, n=512, k=256)
    found = triton_space.space(given, gpu("h100"), operation.MARGIN)
    _, default = planned(given, gpu("h100"))
    first = triton.config_of(found.configs[1])
    names = ("path", "split_k", "block_k", "block_m", "block_n")
    for name in names:
      self.assertEqual(getattr(first, name), getattr(default, name), name)

  @pytest.mark.lab
  def test_implementations_that_are_named_are_listed_with_the_default(self):
    for given, target, named, expected in (
      (DECODE, "h100", "xla", {"triton", "xla"}),
      (SQUARE, "mi300x", "triton", {"triton"}),
    ):
      found = listing.of_problem(given, gpu(target), implementations=(named,))
      names = {c.implementation for c in found.candidates}
      self.assertEqual(names, expected)

  @pytest.mark.lab
  def test_a_gpu_without_published_figures_is_said(self):
    target = dataclasses.replace(gpu("h100"), name="some prototype")
    found = listing.of_problem(SQUARE, target)
    self.assertIn("no roofline: some prototype", found.notes[0])
    self.assertGreater(len(found.candidates), 10)


@unittest.skipIf(
  targets.detect_target("cpu").cpu_kernels is None, "no C++ kernels here"
)
class CpuTest(parameterized.TestCase):
  @parameterized.parameters(
    (jp.MXFP8, jp.MXFP8, 8), (jp.MXFP4, jp.NVFP4, 300), (None, jp.NVFP4, 1)
  )
  def test_engines_are_candidates_or_pruned_with_a_reason(self, lhs, rhs, m):
    target = targets.detect_target("cpu")
    given = problem(lhs, rhs, m=m)
    found = listing.of_problem(given, target)
    self.assertEqual(found.default.key, "cpu")
    self.assertEqual(found.candidates[0], found.default)
    told = [
      dict(config).get("engine")
      for config in (
        *(c.config for c in found.candidates),
        *(p.example for p in found.pruned),
      )
    ]
    for engine in cpu.ENGINES[1:]:
      self.assertEqual(told.count(engine), 1, engine)
    rules = [p for p in found.pruned if p.rule == "dominated"]
    self.assertLen(rules, 1)
    self.assertEqual(
      dict(rules[0].example)["engine"],
      cpu.engine_by_rule(given, target),
    )
    for candidate in found.candidates:
      if candidate.implementation == "cpu" and candidate.config:
        self.assertIsNone(cpu.fields_error(candidate.config, given, target))


class DominatedTest(parameterized.TestCase):
  """A config that dominates another one does not do more work."""

  def test_smaller_tiles_do_the_same_with_fewer_values(self):
    target = gpu("h100")
    given = problem(m=20, n=40, k=160)
    shape, default = planned(given, target)
    for m, n, k, split in itertools.product(
      (16, 32, 64), (16, 32, 64, 128), (32, 64, 128, 256, 512), (1, 2)
    ):
      config = dataclasses.replace(
        default, path="upcast", block_m=m, block_n=n, block_k=k, split_k=split
      )
      why = triton_space._waste(config, shape)
      halves = {
        "half of block_m covers all rows": {"block_m": m // 2},
        "half of block_n covers all rows": {"block_n": n // 2},
        "half of block_k covers all of k": {"block_k": k // 2},
      }
      if why in halves:
        other = dataclasses.replace(config, **halves[why])
        one, two = (
          configs.Tiling(shape=shape, config=c) for c in (config, other)
        )
        self.assertEqual(one.programs, two.programs)
        self.assertEqual(one.steps, two.steps)
      elif why:
        self.assertLess(math.ceil(shape.k / k) / split, 2)
        self.assertEqual(split, 2)
      else:
        self.assertLess(m // 2, max(shape.m, 16))
        self.assertLess(n // 2, max(shape.n, 16))


class ModelTest(parameterized.TestCase):
  def model(self, given, name="h100"):
    target = gpu(name)
    shape, config = planned(given, target)
    return triton_space.model_of(given, shape, target), config

  def test_a_row_is_bound_by_reading_the_weights(self):
    model, config = self.model(DECODE)
    # 4096 x 4096 of four bits, and a scale for each 16: 132 cores take the
    # programs in rounds, of 5 times a core's share of 3.35 TB/s each.
    config = dataclasses.replace(
      config, block_m=16, block_n=32, block_k=128, split_k=1
    )
    num_bytes = 4096 * 4096 * (0.5 + 1 / 16) + 4096 * 2 + 4096 * 2
    self.assertAlmostEqual(
      model.seconds(config) / (num_bytes / 3.35e12), 1.0, places=6
    )
    one = dataclasses.replace(config, block_n=256)  # 16 programs, one round
    tile = 4096 * (16 * 2 + 256 * (0.5 + 1 / 16))
    self.assertAlmostEqual(
      model.seconds(one) / (tile / (5 * 3.35e12 / 132)), 1.0, places=6
    )

  def test_many_rows_are_bound_by_multiplying_whole_tiles(self):
    model, config = self.model(SQUARE)
    config = dataclasses.replace(config, block_m=128, block_n=128, split_k=1)
    # 1024 tiles are 8 rounds of 132 cores.
    rounds = math.ceil(32 * 32 / 132)
    seconds = rounds * 2 * 128 * 128 * 4096 / (989e12 / 132)
    self.assertAlmostEqual(model.seconds(config) / seconds, 1.0, places=6)

  def test_splitting_k_costs_partial_sums_and_a_launch(self):
    # k is short, so that tiles take equally long with a split and without.
    model, config = self.model(problem(k=256))
    config = dataclasses.replace(config, block_m=128, block_n=128, block_k=128)
    once = dataclasses.replace(config, split_k=1)
    twice = dataclasses.replace(config, split_k=2)
    partial = 2 * 2 * 4096 * 4096 * 4 / 3.35e12
    cost = model.seconds(twice) - model.seconds(once)
    self.assertAlmostEqual(cost / (partial + 2e-6), 1.0, places=6)

  @parameterized.parameters(("h100", FP8, "fp8"), ("b200", SQUARE, "native"))
  def test_faster_instructions_multiply_at_their_rate(self, name, given, path):
    model, config = self.model(given, name)
    self.assertEqual(config.path, path)
    config = dataclasses.replace(config, block_m=128, block_n=128, split_k=1)
    upcast = dataclasses.replace(config, path="upcast")
    self.assertAlmostEqual(
      model.seconds(upcast) / model.seconds(config), 2.0, delta=0.1
    )

  def test_split_floats_multiply_in_pieces(self):
    given = problem(None, jp.NVFP4)
    lhs = dataclasses.replace(given.lhs, dtype=np.dtype(np.float32))
    f32, config = self.model(dataclasses.replace(given, lhs=lhs))
    bf16, _ = self.model(given)
    config = dataclasses.replace(config, block_m=128, block_n=128)
    self.assertAlmostEqual(f32.seconds(config) / bf16.seconds(config), 3.0)
