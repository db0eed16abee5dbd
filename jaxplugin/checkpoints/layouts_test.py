# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's files have the byte layout of comfy-kitchen."""

import json

import numpy as np

import jaxplugin as jp
from jaxplugin import __main__ as main
from jaxplugin.checkpoints import safetensors_files
from jaxplugin.testing import checkpoint_files as files

K = 64


class ComfyuiTest(files.CheckpointTestCase):
  def setUp(self):
    super().setUp()
    draw = np.random.default_rng(0).standard_normal
    self.weights = {
      f"a.{name}": (draw((n, K)) / 50).astype(files.BF16)
      for name, n in (("q", 128), ("k", 90))
    }
    weights = {f"{name}.weight": x for name, x in self.weights.items()}
    self.source = self.file({**weights, "norm.weight": np.ones(K, np.float32)})

  def test_bytes_are_those_of_the_layout(self):
    for format, unit, word in (("nvfp4", 16, "F8_E4M3"), ("mxfp8", 32, "U8")):
      with self.subTest(format):
        target = self.source.with_name(f"{format}.safetensors")
        jp.checkpoints.quantize(
          self.source, target, format, layout="comfyui", verify=True
        )
        opened = safetensors_files.open_file(target)
        parts = {name: x.read() for name, x in opened.tensors.items()}
        layers = json.loads(opened.metadata["_quantization_metadata"])["layers"]
        self.assertCountEqual(layers, self.weights)
        found = jp.checkpoints.load(target)
        self.assertLen(found, 3)
        for name, x in self.weights.items():
          self.assertEqual(layers[name]["format"], format)
          mark = json.loads(bytes(parts[f"{name}.comfy_quant"]))
          self.assertEqual(mark, layers[name])
          array = jp.quantize(x, format)
          values = np.asarray(array.values).view(np.uint8)
          name = f"{name}.weight"
          if format == "nvfp4":  # high nibble first
            values = (values & 15) << 4 | values >> 4
            second = parts[f"{name}_scale_2"]
            self.assertEqual(second.shape, ())
            self.assertEqual(second, np.asarray(array.global_scale).item())
          wanted = np.pad(values, ((0, -len(x) % unit), (0, 0)))
          np.testing.assert_array_equal(parts[name].view(np.uint8), wanted)
          tiles = files.tiled(np.asarray(array.scale).view(np.uint8))
          got = parts[f"{name}_scale"].view(np.uint8)
          np.testing.assert_array_equal(got, tiles)
          self.assertEqual(opened.tensors[f"{name}_scale"].type_name, word)
          self.assertEqual(found.entries[name].layout, "comfyui")
          self.assertEqual(found[name].shape, x.shape)

  def test_command(self):
    target = str(self.source.with_name("out.safetensors"))
    layout = ("--layout", "comfyui")
    arguments = ["quantize", str(self.source), target, "--format", "mxfp8"]
    self.assertEqual(main.main([*arguments, *layout]), 0)
    self.assertEqual(main.main(["checkpoint", target, *layout]), 0)
