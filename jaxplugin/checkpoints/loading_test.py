# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders and files of each layout load with a model's names and numbers."""

import contextlib
import importlib.util
import io
import json
import pathlib
import random
import re
import tempfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import __main__ as main

pytestmark = pytest.mark.smoke

N, K = 4, 64
G = 2.0**-12

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def codes(*shape, seed=0):
  return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def numbers(packed, scales):
  """Returns FP4 values times scales, from a table of E2M1's magnitudes."""
  pairs = np.stack([packed & 15, packed >> 4], -1)
  pairs = pairs.reshape(*packed.shape[:-1], -1)
  values = np.where(pairs & 8, -1, 1) * E2M1[pairs & 7]
  return values * np.repeat(scales, values.shape[-1] // scales.shape[-1], -1)


PACKED = codes(N, K // 2)
E4M3 = np.float32(
  np.random.default_rng(1).choice([1, 1.5, 2.25, 0.75, 96], (N, K // 16))
)
E4M3_STORED = E4M3.astype(ml_dtypes.float8_e4m3fn)
E8M0 = (
  np.random.default_rng(2).integers(120, 130, (N, K // 32)).astype(np.uint8)
)
NVFP4 = numbers(PACKED, E4M3.astype(float))
MXFP4 = numbers(PACKED, 2.0 ** (E8M0.astype(float) - 127))
NORM = np.arange(3, dtype=ml_dtypes.bfloat16)

MODELOPT = {
  "model.layers.0.up.weight": PACKED,
  "model.layers.0.up.weight_scale": E4M3_STORED,
  "model.layers.0.up.weight_scale_2": np.float32(G),
  "model.layers.0.up.input_scale": np.float32(0.5),
  "model.norm.weight": NORM,
}
COMPRESSED = {
  "up.weight_packed": PACKED,
  "up.weight_scale": E4M3_STORED,
  "up.weight_global_scale": np.float32([1 / G]),
  "up.input_global_scale": np.float32([20]),
  "norm.weight": NORM,
}
GPT_OSS = {
  "experts.gate_up_proj_blocks": PACKED.reshape(1, N, K // 32, 16),
  "experts.gate_up_proj_scales": E8M0[None],
  "experts.gate_up_proj_bias": NORM,
}


class Case(parameterized.TestCase):
  def empty(self):
    """Returns a folder that is deleted after the test."""
    return pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

  def folder(self, *files, **configs):
    """Returns a folder of files that the safetensors package wrote."""
    folder = self.empty()
    for i, (tensors, metadata) in enumerate(files):
      given = {name: np.asarray(x) for name, x in tensors.items()}
      data = safetensors.numpy.save(given, metadata)
      (folder / f"model-{i}.safetensors").write_bytes(data)
    for name, config in configs.items():
      (folder / f"{name}.json").write_text(json.dumps(config))
    return folder

  def load(self, tensors, metadata=None, **configs):
    return jp.checkpoints.load(self.folder((tensors, metadata), **configs))

  def assert_numbers(self, array, expected):
    got = np.asarray(jp.dequantize(array, jnp.float32), np.float64)
    np.testing.assert_array_equal(got, expected)


class LayoutTest(Case):
  def test_modelopt(self):
    found = self.load(
      MODELOPT, hf_quant_config={"quantization": {"quant_algo": "NVFP4"}}
    )
    up = "model.layers.0.up"
    self.assertCountEqual(
      found, [f"{up}.weight", f"{up}.input_scale", "model.norm.weight"]
    )
    self.assert_numbers(found[f"{up}.weight"], NVFP4 * G)
    self.assertEqual(found[f"{up}.input_scale"], 0.5)
    self.assertEqual(found["model.norm.weight"].tolist(), NORM.tolist())
    self.assertIn("hf_quant_config.json says quant_algo NVFP4", found.config)

  @parameterized.parameters(False, True)
  def test_experts_of_modelopt_in_one_tensor(self, k_is_last):
    base = "model.layers.0.mlp.experts.gate_up_proj"
    turned = (lambda x: x) if k_is_last else (lambda x: x.swapaxes(-1, -2))
    found = self.load(
      {
        base: turned(np.stack([PACKED, PACKED[::-1]])).copy(),
        f"{base}_weight_scale": turned(
          np.stack([E4M3_STORED, E4M3_STORED[::-1]])
        ).copy(),
        f"{base}_weight_scale_2": np.float32([G, 2 * G]),
        f"{base}_input_scale": np.float32(0.5),
        f"{base}_bias": NORM,
      }
    )
    self.assertCountEqual(found, [base, f"{base}_input_scale", f"{base}_bias"])
    expected = turned(np.stack([NVFP4 * G, NVFP4[::-1] * 2 * G]))
    self.assertEqual(found.entries[base].shape, expected.shape)
    self.assert_numbers(found[base], expected)

  def test_pre_quant_scale_is_kept_and_spoken_of(self):
    up = "model.layers.0.up"
    awq = np.arange(K, dtype=np.float32)
    tensors = {**MODELOPT, f"{up}.pre_quant_scale": awq}
    with self.assertWarnsRegex(
      jp.checkpoints.PreQuantScaleWarning, "1 weights, .*0.up.pre_quant_scale"
    ):
      found = self.load(tensors)
    entry = found.entries[f"{up}.weight"]
    self.assertEqual(entry.pre_quant_scale, f"{up}.pre_quant_scale")
    np.testing.assert_array_equal(found[entry.pre_quant_scale], awq)
    self.assertIn("1 weights need inputs multiplied", str(found))
    self.assertNotIn("need inputs", str(self.load(MODELOPT)))

  def test_compressed_tensors(self):
    found = self.load(COMPRESSED)
    self.assertCountEqual(
      found, ["up.weight", "up.input_global_scale", "norm.weight"]
    )
    self.assert_numbers(found["up.weight"], NVFP4 * G)

  @parameterized.parameters("modelopt", "compressed-tensors")
  def test_mx_is_whose_the_config_says(self, method):
    found = self.load(
      {"up.weight": PACKED, "up.weight_scale": E8M0},
      config={"quantization_config": {"quant_method": method}},
    )
    self.assert_numbers(found["up.weight"], MXFP4)
    self.assertEqual(found.entries["up.weight"].layout, method)

  def test_mxfp8(self):
    values = np.float32([[1, -2, 0.5, 448] * 16] * N)
    found = self.load(
      {
        "up.weight": values.astype(ml_dtypes.float8_e4m3fn),
        "up.weight_scale": E8M0,
      }
    )
    scales = np.repeat(2.0 ** (E8M0.astype(float) - 127), 32, -1)
    self.assert_numbers(found["up.weight"], values * scales)

  @parameterized.parameters("_", ".")
  def test_gpt_oss_of_both_names(self, dot):
    found = self.load(
      {
        name.replace("proj_b", f"proj{dot}b").replace(
          "proj_s", f"proj{dot}s"
        ): x
        for name, x in GPT_OSS.items()
        if "bias" not in name
      }
    )
    self.assertEqual([*found], ["experts.gate_up_proj"])
    self.assert_numbers(found["experts.gate_up_proj"], MXFP4[None])

  @parameterized.parameters(False, True)
  def test_torchao(self, swizzled):
    scale = E4M3_STORED
    if swizzled:
      scale = np.asarray(jp.swizzle_scale(jnp.asarray(scale))).reshape(32, -1)
    told = {
      "_type": "NVFP4Tensor",
      "_data": {"block_size": 16, "is_swizzled_scales": swizzled},
      "_tensor_data_names": ["qdata", "scale", "per_tensor_scale"],
    }
    metadata = {
      "0.up.weight": json.dumps(told),
      "0.norm.weight": json.dumps({"_type": "Tensor"}),
      "tensor_names": json.dumps(["0.up.weight", "0.norm.weight"]),
    }
    found = self.load(
      {
        "0.up._weight_qdata": PACKED,
        "0.up._weight_scale": scale,
        "0.up._weight_per_tensor_scale": np.float32(G),
        "0.norm.weight": NORM,
      },
      metadata,
    )
    self.assertCountEqual(found, ["0.up.weight", "0.norm.weight"])
    self.assert_numbers(found["0.up.weight"], NVFP4 * G)

  def test_parts_may_lie_in_several_files(self):
    names = list(MODELOPT)
    halves = [{n: MODELOPT[n] for n in x} for x in (names[::2], names[1::2])]
    folder = self.folder(*((half, None) for half in halves))
    expected = [NVFP4 * G, 3]
    found = jp.checkpoints.load(folder)
    self.assert_numbers(found["model.layers.0.up.weight"], expected[0])
    self.assertLen(found, expected[1])
    index = {n: f"model-{i}.safetensors" for i in (0, 1) for n in halves[i]}
    (folder / "model.safetensors.index.json").write_text(
      json.dumps({"weight_map": index})
    )
    found = jp.checkpoints.load(folder)
    self.assert_numbers(found["model.layers.0.up.weight"], expected[0])

  def test_arrays_are_views_of_the_file(self):
    found = self.load(MODELOPT)
    x, y = (found["model.layers.0.up.weight"] for _ in range(2))
    self.assertTrue(np.shares_memory(x.values, y.values))
    self.assertTrue(np.shares_memory(x.scale, y.scale))

  def test_read_gives_arrays_of_jax_and_tells_how_far_it_is(self):
    found = self.load(MODELOPT)
    seen = []
    tree = found.read(lambda done, total: seen.append((done, total)))
    total = sum(x.nbytes for x in MODELOPT.values())
    self.assertEqual(seen[-1], (total, total))
    self.assertLen(seen, 3)
    weight = tree["model.layers.0.up.weight"]
    self.assertIsInstance(weight.values, jax.Array)
    self.assert_numbers(weight, NVFP4 * G)


class ProgressTest(Case):
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


class GgufTest(Case):
  def setUp(self):
    super().setUp()
    if importlib.util.find_spec("gguf") is None:
      self.skipTest("the gguf package is not installed")

  def write(self):
    import gguf

    path = self.empty() / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kinds = gguf.GGMLQuantizationType
    mx, nv = codes(N, 34, seed=3), codes(N, 36, seed=4)
    mx[:, [0, 17]] = 125
    nv[:, :4] = 0x38  # 1.0
    writer.add_tensor("blk.0.up.weight", mx, raw_dtype=kinds.MXFP4)
    writer.add_tensor("blk.0.down.weight", nv, raw_dtype=kinds.NVFP4)
    writer.add_tensor("blk.0.down.scale", np.float32([G]))
    writer.add_tensor("norm.weight", np.float32([1, 2, 3]))
    writer.add_tensor("q.weight", codes(N, 54), raw_dtype=kinds.TQ1_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    want = gguf.quants.dequantize
    return path, want(mx, kinds.MXFP4), want(nv, kinds.NVFP4) * G

  def test_weights_are_those_of_the_package(self):
    path, up, down = self.write()
    found = jp.checkpoints.load(path)
    self.assertCountEqual(
      found,
      ["blk.0.up.weight", "blk.0.down.weight", "norm.weight", "q.weight"],
    )
    self.assert_numbers(found["blk.0.up.weight"], up)
    self.assert_numbers(found["blk.0.down.weight"], down)
    self.assertEqual(found["norm.weight"].tolist(), [1, 2, 3])

  def test_type_without_a_format_is_an_error_when_it_is_read(self):
    found = jp.checkpoints.load(self.write()[0])
    with self.assertRaisesRegex(
      jp.checkpoints.CheckpointError, "no format for TQ1_0"
    ):
      found["q.weight"]
    self.assertIn("TQ1_0", str(found))

  def test_damaged_files_are_refused(self):
    path, *_ = self.write()
    good = path.read_bytes()
    choose = random.Random(6)
    for length in (0, 3, 24, len(good) // 2, len(good) - 100):
      path.unlink()  # because its bytes may be mapped
      path.write_bytes(good[:length])
      with self.assertRaises(jp.checkpoints.CheckpointError):
        jp.checkpoints.load(path)
    for _ in range(100):
      data = bytearray(good)
      data[choose.randrange(300)] = choose.randrange(256)
      path.unlink()  # because its bytes may be mapped
      path.write_bytes(bytes(data))
      with contextlib.suppress(jp.checkpoints.CheckpointError):
        str(jp.checkpoints.load(path))


class RefusedTest(Case):
  def assert_refused(self, rule, tensors, metadata=None):
    with self.assertRaisesRegex(jp.checkpoints.CheckpointError, rule):
      self.load(tensors, metadata)

  def test_weights_whose_parts_do_not_fit(self):
    scale = MODELOPT["model.layers.0.up.weight_scale"]
    for rule, tensors in (
      ("'up.weight_scale', must be there", {"up.weight_packed": PACKED}),
      (
        "up.weight.*values and scales must be",
        {"up.weight": PACKED, "up.weight_scale": scale[:, :3].copy()},
      ),
      (
        "weight_scale_2 must be given",
        {"up.weight": PACKED, "up.weight_scale": scale},
      ),
      (
        "weight_zero_point",
        {**COMPRESSED, "up.weight_zero_point": PACKED},
      ),
      (
        "blocks must be",
        {"a_blocks": PACKED, "a_scales": E8M0},
      ),
      ("two weights have the name", {**COMPRESSED, "up.weight": NORM}),
      (
        "pre_quant_scale'.*must have k=64 numbers, got shape .4",
        {
          **MODELOPT,
          "model.layers.0.up.pre_quant_scale": np.zeros(N, np.float32),
        },
      ),
      (
        "svdquant_lora_a says .* one term of a sum",
        {
          **MODELOPT,
          "model.layers.0.up.svdquant_lora_a": np.zeros((2, K), np.float32),
        },
      ),
      (
        "packed FP6 .* is not supported, got uint8.4, 48",
        {"up.weight_packed": codes(N, K * 3 // 4), "up.weight_scale": E8M0},
      ),
    ):
      self.assert_refused(rule, tensors)

  def test_fp6_of_its_own_dtype(self):
    header = {
      "a.weight": {
        "dtype": "F6_E2M3",
        "shape": [2, 32],
        "data_offsets": [0, 48],
      },
      "a.weight_scale": {
        "dtype": "F8_E8M0",
        "shape": [2, 1],
        "data_offsets": [48, 50],
      },
    }
    text = json.dumps(header).encode()
    path = self.empty() / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(50))
    with self.assertRaisesRegex(
      jp.checkpoints.CheckpointError, "a.weight.*packed FP6"
    ):
      jp.checkpoints.load(path)

  def test_torchao_metadata_that_does_not_fit(self):
    tensors = {"0._weight_qdata": PACKED, "0._weight_scale": E4M3_STORED}
    for rule, text in (
      ("must be JSON", "{"),
      ("blocks of 16", '{"_type": "NVFP4Tensor", "_data": {"block_size": 32}}'),
      ("blocks of 32", '{"_type": "MXTensor", "_data": []}'),
      (
        "true or false",
        '{"_type": "NVFP4Tensor", "_data": {"block_size": 16,'
        ' "is_swizzled_scales": 1}}',
      ),
    ):
      self.assert_refused(rule, tensors, {"0.weight": text})

  def test_global_scale_the_wrong_way_round_names_file_and_tensor(self):
    tensors = {
      **MODELOPT,
      "model.layers.0.up.weight_scale_2": np.float32(1 / G),
    }
    folder = self.folder((tensors, None))
    found = jp.checkpoints.load(folder)
    name = "model.layers.0.up.weight"
    with self.assertRaisesRegex(
      jp.checkpoints.CheckpointError, f"model-0.safetensors: '{name}'.*4096"
    ):
      found[name]
    found = jp.checkpoints.load(folder, global_scale_range=None)
    self.assert_numbers(found[name], NVFP4 / G)

  @parameterized.parameters(None, 3)
  def test_path_must_be_one(self, path):
    with self.assertRaisesRegex(TypeError, f"load: path must .* got {path}"):
      jp.checkpoints.load(path)
    with self.assertRaisesRegex(TypeError, f"source must .* got {path}"):
      jp.checkpoints.quantize(path, "out", "mxfp8")

  def test_paths_that_are_no_checkpoint(self):
    with self.assertRaisesRegex(jp.checkpoints.CheckpointError, "none of them"):
      jp.checkpoints.load(self.folder())
    folder = self.folder(config=[])
    with self.assertRaisesRegex(jp.checkpoints.CheckpointError, "ends in"):
      jp.checkpoints.load(folder / "config.json")
    with self.assertRaises(FileNotFoundError):
      jp.checkpoints.load(folder / "no.safetensors")
    folder = self.folder((COMPRESSED, None), (COMPRESSED, None))
    with self.assertRaisesRegex(
      jp.checkpoints.CheckpointError, "both have a tensor"
    ):
      jp.checkpoints.load(folder)


class CommandTest(Case):
  def test_command_shows_a_line_for_like_weights(self):
    tensors = {
      name.replace(".0.", f".{i}."): x
      for i in range(3)
      for name, x in MODELOPT.items()
    }
    folder = self.folder((tensors, None))
    with self.subTest("table"):
      text = str(jp.checkpoints.load(folder))
      (line,) = [x for x in text.splitlines() if "up.weight" in x]
      size = PACKED.nbytes + E4M3_STORED.nbytes + 4
      self.assertEqual(
        line.split(),
        ["modelopt", "nvfp4", "[4,", "64]", f"{3 * size:,}", "3"]
        + ["model.layers.*.up.weight"],
      )
      self.assertIn("7 names", text)
    self.assertEqual(main.main(["checkpoint", str(folder)]), 0)
    self.assertEqual(main.main(["checkpoint", str(folder / "x.bin")]), 2)


if __name__ == "__main__":
  absltest.main()
