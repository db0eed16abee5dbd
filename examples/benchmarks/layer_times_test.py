# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A layer is timed in each format, and compared with bf16."""

import dataclasses

import layer_times
from absl.testing import absltest, parameterized

from jaxplugin.lab.planning import blocks

SMALL = dataclasses.replace(
  blocks.MODELS["small"], channels=256, hidden=512, heads=2, kv_heads=2
)


class LayerTimesTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_each_variant_has_a_time_and_the_error_of_its_format(self, trains):
    block = dataclasses.replace(SMALL, sequence=32)
    found = layer_times.measure(block, ["mxfp8"], trains=trains, rounds=2)
    self.assertEqual(list(found), ["bf16", "mxfp8", "mxfp8 fused"])
    self.assertEqual(found["bf16"]["error"], 0)
    for row in (found["mxfp8"], found["mxfp8 fused"]):
      # E4M3 has 4 significant bits, and the output adds results of 5 roundings.
      self.assertBetween(row["error"], 2.0**-8, 2.0**-3)
    ratio = found["mxfp8 fused"]["speedup_over_separate"]
    times = [found[name]["ms"] for name in ("mxfp8", "mxfp8 fused")]
    self.assertBetween(
      ratio["median"],
      times[0]["min"] / times[1]["max"],
      times[0]["max"] / times[1]["min"],
    )


if __name__ == "__main__":
  absltest.main()
