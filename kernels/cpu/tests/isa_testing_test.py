# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests which times isa_testing.py reports as slower, and its calls."""

from __future__ import annotations

import pathlib
import sys

import jax
import numpy as np
from absl.testing import absltest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import isa_testing
import testing


class IsaTestingTest(absltest.TestCase):
  def test_a_set_is_compared_with_the_fastest_below_it(self):
    ms = {"baseline": 9.0, "avx2": 2.0, "avx512": 2.19, "avx512_bf16": 2.25}
    self.assertEqual(isa_testing.slower_ones(ms), {"avx512_bf16": 2.25 / 2})
    ms = {"baseline": 3.0, "avx2": 4.0, "avx512": 3.2, "avx512_bf16": 1.0}
    self.assertEqual(isa_testing.slower_ones(ms), {"avx2": 4.0 / 3})

  def test_what_another_attempt_does_not_show_does_not_count(self):
    attempts = iter(({"a": 1.0, "b": 3.0}, {"a": 1.5, "b": 1.05}))
    best, slower = isa_testing.settled(lambda: next(attempts))
    self.assertEqual(best, {"a": 1.0, "b": 1.05})
    self.assertEmpty(slower)

  def test_what_every_attempt_shows_counts(self):
    best, slower = isa_testing.settled(lambda: {"a": 1.0, "b": 3.0})
    self.assertEqual(best, {"a": 1.0, "b": 3.0})
    self.assertEqual(slower, {"b": 3.0})

  def test_rows_are_dots_of_every_format_and_more(self):
    names = [row.name for row in isa_testing.rows()]
    self.assertLen(set(names), len(names))
    for name in isa_testing.TIMED:
      self.assertIn(f"{name} x {name} 1x4096x4096", names)
      self.assertIn(f"f32 x {name} 128x2048x2048", names)
      self.assertIn(f"quantize {name} 2048x4096", names)

  def test_a_row_is_a_call_of_the_instruction_set_it_names(self):
    """The results of all instruction sets are equal up to rounding."""
    call, inputs = isa_testing._dot("nvfp4", "mxfp8", 3, 40, 64)
    self.assertGreater(inputs, 1)
    results = [
      np.asarray(jax.block_until_ready(call(testing.ISA_LEVELS[name], 1)))
      for name in testing.isa_levels()
    ]
    for result in results:
      np.testing.assert_allclose(result, results[0], rtol=1e-3, atol=1e-3)
    ms = isa_testing.measure(call, inputs, {"baseline": 1})
    self.assertGreater(ms["baseline"], 0)
