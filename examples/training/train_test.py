# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The training example learns in each format."""

import math

import numpy as np
import train
from absl.testing import absltest

NUM_STEPS = 30


class TrainTest(absltest.TestCase):
  def test_loss_falls_in_each_format_as_it_does_in_f32(self):
    losses = {}
    for name in ("f32", "mxfp8", "nvfp4, gradients mxfp8"):
      losses[name] = train.train(train.DOTS[name], NUM_STEPS)
    for name, values in losses.items():
      with self.subTest(name):
        # To guess among all characters alike costs log(128) = 4.85.
        self.assertGreater(values[0], 0.9 * math.log(train.NUM_CHARACTERS))
        fallen = values[0] - np.mean(values[-5:])
        expected = losses["f32"][0] - np.mean(losses["f32"][-5:])
        self.assertGreater(expected, 1)
        self.assertGreater(fallen, 0.9 * expected)
    # It is not f32 that ran.
    self.assertNotEqual(losses["mxfp8"], losses["f32"])

  def test_batches_are_the_text(self):
    text = train.TEXT.read_text()
    for context, target in train.batches(2):
      self.assertEqual(context.shape, (train.BATCH, train.CONTEXT))
      window = "".join(map(chr, [*np.asarray(context[0]), int(target[0])]))
      self.assertIn(window, text)


if __name__ == "__main__":
  absltest.main()
