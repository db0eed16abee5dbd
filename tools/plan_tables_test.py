# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of the scaling guide agree with `plan`."""

import importlib.util
import re

import plan_tables
from absl.testing import absltest

from jaxplugin.lab.compilation import traffic
from jaxplugin.lab.planning import collectives

needs_compiler = absltest.skipIf(
  importlib.util.find_spec("jax_cuda13_plugin") is None,
  "jax-cuda13-plugin is not installed",
)


class PlanTablesTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.texts = plan_tables.read()
    self.kept = plan_tables.kept()

  def test_each_command_was_run(self):
    self.assertNotEmpty(self.kept)
    self.assertEqual([*self.kept], plan_tables.commands(self.texts.values()))

  def test_tables_are_those_of_the_plans(self):
    for text in self.texts.values():
      self.assertEqual(
        text,
        plan_tables.written(text, self.kept),
        "run python tools/plan_tables.py --written",
      )

  def test_picture_is_that_of_its_plans(self):
    drawn = plan_tables.picture(self.kept[plan_tables.DRAWN])
    self.assertEqual(plan_tables.PICTURE.read_text(), drawn)
    self.assertIn(f"({plan_tables.PICTURE.name})", "".join(self.texts.values()))

  def test_bars_are_as_long_as_bytes(self):
    plans = self.kept[plan_tables.DRAWN]
    boxes = re.findall(
      r"<rect x='([\d.]+)' y='(\d+)' width='([\d.]+)' height='20'",
      plan_tables.picture(plans),
    )
    bars = {}
    for x, y, width in boxes:
      if float(x) > 16:  # not the legend
        bars[y] = bars.get(y, 0) + float(width)
    sizes = [plan.received for plan in plans]
    self.assertLen(bars, len(plans))
    for bar, size in zip(bars.values(), sizes, strict=True):
      self.assertAlmostEqual(bar / max(bars.values()), size / max(sizes), 2)

  def test_a_kept_plan_is_what_it_is_by_hand(self):
    """The gradient of each weight is scattered over fsdp once."""
    ((plain, *_),) = (v for c, v in self.kept.items() if "405b" in c)
    scattered = collectives.received(
      plain.collectives, axis="fsdp", kind="reduce-scatter"
    )
    d, f = 16384, 53248
    weights = (2 * d * d + 2 * d * 1024 + 3 * d * f) * 2
    self.assertEqual(scattered, weights / 8 * 127 / 128)

  def test_quantize_traffic_is_what_it_is_by_hand(self):
    """A fused norm or activation writes values and scales, and nothing else.

    Attention's result is written, read and quantized in both.
    """
    value = 1 + 1 / 32
    channels, hidden = 4096, 14336
    expected = {
      "mxfp8": (3 * channels + hidden) * (2 + 2 + value),
      "mxfp8 fused": (2 * channels + hidden) * value
      + channels * (2 + 2 + value),
    }
    kept = {c: p for c, p in self.kept.items() if "llama3-8b --traffic" in c}
    self.assertLen(kept, 3)
    for command, plans in kept.items():
      found = {
        (plan.name.endswith("backward"), plan.format): traffic.quantizing(
          plan.kernels
        )
        / 2048
        for plan in plans
      }
      for format, size in expected.items():
        self.assertAlmostEqual(found[False, format], size, 3)
      if "cpu" not in command:
        # In training, kernels of GPUs fuse two norms, the gradient of one, the
        # activation and both of its gradients. They read a norm's x again, and
        # write and read three f32 numbers of each row.
        norms = 2 * (channels * (2 + 2 - 2) - 2 * 3 * 4)
        saved = found[True, "mxfp8"] - found[True, "mxfp8 fused"]
        expected_saved = (3 * hidden + channels) * (2 + 2) + norms
        # For the gradient of a norm, XLA writes and reads up to 14 numbers of
        # each row.
        self.assertLessEqual(saved, expected_saved)
        self.assertLessEqual(expected_saved - saved, 14 * 4)
    # The goal.
    self.assertLessEqual(expected["mxfp8 fused"] / expected["mxfp8"], 0.35)

  @needs_compiler
  def test_a_plan_is_what_it_is_by_hand(self):
    """The weights are gathered and their gradients scattered."""
    command = "plan small --batch 8 --sequence 256 --layout fsdp=8"
    (found,) = plan_tables.run(f"{command} --formats bf16")
    weights = (4 * 1024**2 + 3 * 1024 * 4096) * 2
    self.assertEqual(found.received, 2 * weights * 7 / 8)
