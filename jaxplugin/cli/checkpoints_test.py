# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands `quantize` and `checkpoint`."""

import json

import numpy as np
import safetensors.numpy

from jaxplugin.testing import command_lines

LONG = "model.layers.{}.self_attn.a_rather_long_name.q_proj.weight"


class CheckpointTest(command_lines.CommandLineTestCase):
  def setUp(self):
    super().setUp()
    weight = np.linspace(-1, 1, 64 * 96, dtype=np.float32).reshape(64, 96)
    tensors = {LONG.format(i): weight for i in range(12)}
    tensors["model.norm.weight"] = np.ones(96, np.float32)
    self.source = self.directory / "model"
    self.source.mkdir()
    path = self.source / "model.safetensors"
    safetensors.numpy.save_file(tensors, path)
    self.target = str(self.directory / "q")

  def quantize(self, *options):
    return self.run_command("quantize", str(self.source), self.target, *options)

  def test_table_has_sizes_and_the_reasons_stand_below(self):
    status, out, err = self.quantize("--dry-run")
    self.assertEqual((status, err), (0, ""))
    self.assertRegex(
      out, r"\nnvfp4 +\[64, 96\] +294.9 kB +41.5 kB +12  model\.layers\."
    )
    self.assertRegex(out, r"\nnot quantized, .*: model.norm.weight\n")
    self.assertEndsWith(out, "\nnothing was written\n")

  def test_json_has_every_tensor(self):
    status, out, _ = self.quantize("--json", "--verify")
    found = json.loads(out)
    self.assertEqual(status, 0)
    self.assertTrue(found["is_written"])
    self.assertLen(found["tensors"], 13)
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    self.assertEqual(by_name["model.norm.weight"]["format"], "F32")
    self.assertLess(by_name[LONG.format(3)]["error"], 0.2)
    self.assertEqual(by_name[LONG.format(3)]["shape"], [64, 96])

  def test_checkpoint_says_whether_it_loads(self):
    self.quantize()
    status, out, _ = self.run_command("checkpoint", self.target)
    self.assertEqual(status, 0)
    self.assertEndsWith(out, "\nloads with jp.checkpoints.load: yes\n")
    status, out, _ = self.run_command("checkpoint", self.target, "--json")
    found = json.loads(out)
    self.assertEqual((status, found["loads"]), (0, True))
    (row,) = [x for x in found["tensors"] if x["layout"] == "modelopt"]
    self.assertEqual((row["count"], row["shape"]), (12, [64, 96]))

  def test_checkpoint_that_does_not_load_has_status_1(self):
    path = self.directory / "bad.safetensors"
    tensors = {
      "a.weight_packed": np.zeros((4, 8), np.uint8),
      "a.weight_zero_point": np.zeros((4, 8), np.uint8),
    }
    safetensors.numpy.save_file(tensors, path)
    status, out, _ = self.run_command("checkpoint", str(path))
    self.assertEqual(status, 1)
    self.assertIn("\nloads with jp.checkpoints.load: no, 1 tensors", out)
    status, out, _ = self.run_command("checkpoint", str(path), "--json")
    self.assertEqual((status, json.loads(out)["loads"]), (1, False))
