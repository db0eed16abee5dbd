# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Microbatches with operands quantized once: the same bits, and timed."""

from unittest import mock

import microbatches
import pytest
from absl.testing import absltest

import jaxplugin as jp

pytestmark = pytest.mark.full


class MicrobatchesTest(absltest.TestCase):
  def test_each_variant_is_compared_and_timed(self):
    sizes = microbatches.Sizes(
      layers=2, width=32, hidden=64, tokens=32, microbatches=2
    )
    found = microbatches.measure("mxfp8", sizes, rounds=2)
    self.assertEqual(tuple(found), microbatches.VARIANTS)
    for row in found.values():
      self.assertGreater(row["ms"]["min"], 0)
      self.assertGreater(row["each_over_this"]["min"], 0)
    self.assertEqual(found["each"]["each_over_this"]["median"], 1)

  def test_another_result_is_no_measurement(self):
    sizes = microbatches.Sizes(
      layers=1, width=32, hidden=32, tokens=32, microbatches=1
    )
    step = microbatches.step

    def wrong(variant, recipe, params, batches):
      if variant == "weights":
        recipe = jp.training.MXFP4_RECIPE
      return step(variant, recipe, params, batches)

    patched = mock.patch.object(microbatches, "step", wrong)
    with patched, self.assertRaises(AssertionError):
      microbatches.measure("mxfp8", sizes, rounds=1)
