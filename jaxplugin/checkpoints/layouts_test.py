# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's files have the byte layout of comfy-kitchen."""

import json
import pathlib
import tempfile

import ml_dtypes
import numpy as np
import safetensors.numpy
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin import __main__ as main
from jaxplugin.checkpoints import safetensors_files

K = 64
NAMES = ("a.q.weight", "a.k.weight")


class ComfyuiTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(
      self.enter_context(tempfile.TemporaryDirectory())
    )
    draw = np.random.default_rng(0).standard_normal
    self.weights = {
      name: (draw((n, K)) / 50).astype(ml_dtypes.bfloat16)
      for name, n in zip(NAMES, (128, 90), strict=True)
    }
    self.source = self.folder / "in.safetensors"
    safetensors.numpy.save_file(
      {**self.weights, "norm.weight": np.ones(K, np.float32)}, self.source
    )

  def test_bytes_are_those_of_the_layout(self):
    for format, unit, block in (("nvfp4", 16, 16), ("mxfp8", 32, 32)):
      with self.subTest(format):
        target = self.folder / f"{format}.safetensors"
        jp.checkpoints.quantize(
          self.source, target, format, layout="comfyui", verify=True
        )
        opened = safetensors_files.open_file(target)
        parts = {name: x.read() for name, x in opened.tensors.items()}
        layers = json.loads(opened.metadata["_quantization_metadata"])["layers"]
        self.assertCountEqual(layers, ["a.q", "a.k"])
        for name, weight in self.weights.items():
          base = name.removesuffix(".weight")
          told = json.loads(bytes(parts[f"{base}.comfy_quant"]))
          self.assertEqual(told["format"], format)
          self.assertEqual(told, layers[base])
          array = jp.quantize(weight, format)
          n = len(weight)
          rows = -(-n // unit) * unit
          values = np.asarray(array.values).view(np.uint8)
          if format == "nvfp4":  # high nibble first
            values = (values & 15) << 4 | values >> 4
            second = parts[f"{base}.weight_scale_2"]
            self.assertEqual(second.shape, ())
            self.assertEqual(second, np.asarray(array.global_scale).item())
          got = parts[name].view(np.uint8)
          self.assertEqual(len(got), rows)
          np.testing.assert_array_equal(got[:n], values)
          self.assertFalse(got[n:].any())
          scale = np.asarray(array.scale).view(np.uint8)
          self.assertEqual(scale.shape, (n, K // block))
          tiles = np.zeros((128, 4), np.uint8)
          for r, c in np.ndindex(*scale.shape):  # one tile of cuBLAS
            at = r % 32 * 16 + r // 32 * 4 + c
            tiles.reshape(-1)[at] = scale[r, c]
          got = parts[f"{base}.weight_scale"]
          word = opened.tensors[f"{base}.weight_scale"].type_name
          self.assertEqual(word, "F8_E4M3" if format == "nvfp4" else "U8")
          np.testing.assert_array_equal(got.view(np.uint8), tiles)
        found = jp.checkpoints.load(target)
        self.assertCountEqual(found, [*NAMES, "norm.weight"])
        for name, weight in self.weights.items():
          self.assertEqual(found.entries[name].layout, "comfyui")
          self.assertEqual(found[name].shape, weight.shape)

  def test_command(self):
    target = self.folder / "out.safetensors"
    arguments = [str(self.source), str(target), "--format", "mxfp8"]
    self.assertEqual(
      main.main(["quantize", *arguments, "--layout", "comfyui"]), 0
    )
    self.assertIn(
      "a.q.comfy_quant", safetensors_files.open_file(target).tensors
    )
    self.assertEqual(
      main.main(["checkpoint", str(target), "--layout", "comfyui"]), 0
    )

  def test_what_it_has_not_is_refused(self):
    with self.assertRaisesRegex(ValueError, "comfyui stores nvfp4, mxfp8, got"):
      jp.checkpoints.quantize(
        self.source, self.folder / "x.safetensors", "mxfp4", layout="comfyui"
      )


if __name__ == "__main__":
  absltest.main()
