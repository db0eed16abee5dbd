# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders and files load with a model's names, arrays and reports."""

import contextlib
import io
import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import __main__ as main
from jaxplugin.testing import checkpoint_files as files

pytestmark = pytest.mark.smoke

ERROR = jp.checkpoints.CheckpointError
N, K = 4, 64
G = 2.0**-12
RNG = np.random.default_rng(0)
PACKED = RNG.integers(0, 256, (N, K // 2), np.uint8)
SCALES = RNG.integers(1, 0x7F, (N, K // 16), np.uint8).view(files.F8)
NUMBERS = files.fp4(PACKED) * np.repeat(files.fp8(SCALES), 16, -1) * G
NORM = np.arange(3, dtype=ml_dtypes.bfloat16)
UP = "model.layers.0.up.weight"
MODELOPT = {
  UP: PACKED,
  f"{UP}_scale": SCALES,
  f"{UP}_scale_2": np.float32(G),
  "model.layers.0.up.input_scale": np.float32(0.5),
  "model.norm.weight": NORM,
}


class FilesTest(files.CheckpointTestCase):
  def test_names_are_those_of_the_model(self):
    folder = self.folder(MODELOPT)
    config = {"quantization": {"quant_algo": "NVFP4"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(config))
    found = jp.checkpoints.load(folder)
    names = [UP, "model.layers.0.up.input_scale", "model.norm.weight"]
    self.assertCountEqual(found, names)
    self.assert_numbers(found[UP], NUMBERS)
    self.assertEqual(found["model.norm.weight"].tolist(), NORM.tolist())
    self.assertIn("hf_quant_config.json says quant_algo NVFP4", found.config)

  def test_parts_may_lie_in_several_files(self):
    folder, index = self.empty(), {}
    for i in (0, 1):
      half = dict([*MODELOPT.items()][i::2])
      self.file(half, path=folder / f"model-{i}.safetensors")
      index |= dict.fromkeys(half, f"model-{i}.safetensors")
    for _ in range(2):
      found = jp.checkpoints.load(folder)
      self.assert_numbers(found[UP], NUMBERS)
      self.assertLen(found, 3)
      text = json.dumps({"weight_map": index})
      (folder / "model.safetensors.index.json").write_text(text)

  def test_arrays_are_views_of_the_file(self):
    found = self.load(MODELOPT)
    x, y = (found[UP] for _ in range(2))
    self.assertTrue(np.shares_memory(x.values, y.values))
    self.assertTrue(np.shares_memory(x.scale, y.scale))
    self.assertFalse(x.values.flags.writeable)

  def test_read_gives_arrays_of_jax_and_tells_how_far_it_is(self):
    found = self.load(MODELOPT)
    seen = []
    tree = found.read(lambda done, total: seen.append((done, total)))
    total = sum(x.nbytes for x in MODELOPT.values())
    self.assertEqual(seen[-1], (total, total))
    self.assertLen(seen, 3)
    self.assertIsInstance(tree[UP].values, jax.Array)
    self.assert_numbers(tree[UP], NUMBERS)

  def test_global_scale_the_wrong_way_round_names_file_and_tensor(self):
    folder = self.folder({**MODELOPT, f"{UP}_scale_2": np.float32(1 / G)})
    found = jp.checkpoints.load(folder)
    with self.assertRaisesRegex(ERROR, f"x.safetensors: '{UP}'.*4096"):
      found[UP]
    found = jp.checkpoints.load(folder, global_scale_range=None)
    self.assert_numbers(found[UP], NUMBERS / G / G)

  @parameterized.parameters(None, 3)
  def test_path_must_be_one(self, path):
    with self.assertRaisesRegex(TypeError, f"load: path must .* got {path}"):
      jp.checkpoints.load(path)
    with self.assertRaisesRegex(TypeError, f"source must .* got {path}"):
      jp.checkpoints.quantize(path, "out", "mxfp8")

  def test_paths_that_are_no_checkpoint(self):
    with self.assertRaisesRegex(ERROR, "none of them"):
      jp.checkpoints.load(self.empty())
    with self.assertRaisesRegex(ERROR, "ends in"):
      jp.checkpoints.load(self.write(b"[]", "config.json"))


class ProgressTest(files.CheckpointTestCase):
  def drawn(self, progress, is_terminal):
    stderr = io.StringIO()
    stderr.isatty = lambda: is_terminal
    with contextlib.redirect_stderr(stderr):
      self.load(MODELOPT).read(progress)
    return stderr.getvalue()

  @parameterized.parameters((None, True), (True, True), (True, False))
  def test_bar_ends_full(self, progress, is_terminal):
    drawn = re.sub(
      r"\x1b\[[\d;?]*[A-Za-z]", "", self.drawn(progress, is_terminal)
    )
    self.assertRegex(drawn, r"100% .*bytes [\d.?]+")
    self.assertLessEqual(max(map(len, re.split(r"[\r\n]", drawn))), 80)

  @parameterized.parameters((None, False), (False, True))
  def test_no_bar_is_drawn(self, progress, is_terminal):
    self.assertEqual(self.drawn(progress, is_terminal), "")


class CommandTest(files.CheckpointTestCase):
  def test_command_shows_a_line_for_like_weights(self):
    folder = self.folder(
      {
        name.replace(".0.", f".{i}."): x
        for i in range(3)
        for name, x in MODELOPT.items()
      }
    )
    text = str(jp.checkpoints.load(folder))
    (line,) = [x for x in text.splitlines() if "up.weight" in x]
    size = PACKED.nbytes + SCALES.nbytes + 4
    self.assertEqual(
      line.split(),
      ["modelopt", "nvfp4", "[4,", "64]", f"{3 * size:,}", "3"]
      + ["model.layers.*.up.weight"],
    )
    self.assertIn("7 names", text)
    self.assertEqual(main.main(["checkpoint", str(folder)]), 0)
    self.assertEqual(main.main(["checkpoint", str(folder / "x.bin")]), 2)
