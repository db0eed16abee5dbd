# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Unreadable tensors are listed with reasons, and the others are read."""

import json
import os
import warnings

import ml_dtypes
import numpy as np

import jaxplugin as jp
from jaxplugin.testing import checkpoint_files as files
from jaxplugin.testing import command_lines, installed

ERROR = jp.checkpoints.CheckpointError
# NVFP4: nibbles of 1.0 (code 2), and block scales of 1.0.
ONES = np.full((2, 16), 0x22, np.uint8)
SCALES = np.ones((2, 2), ml_dtypes.float8_e4m3fn)
G = np.float32(2.0**-12)
TORCHAO = '{"_type": "NVFP4Tensor", "_data": {"block_size": 32}}'


def modelopt(base):
  return {
    f"{base}.weight": ONES,
    f"{base}.weight_scale": SCALES,
    f"{base}.weight_scale_2": G,
  }


# Tensors that do not form a weight, with the message.
MISFITS = {
  "'bad.weight': .*weight_scale_2 must be given": {"bad.weight": ONES,
    "bad.weight_scale": SCALES},
  "'bad.weight': .*values and scales must be": {**modelopt("bad"),
    "bad.weight_scale": SCALES[:1]},
  "'bad.weight_packed': its scales, 'bad.weight_scale', must be there": {
    "bad.weight_packed": ONES},
  "'bad.weight_scale': its values, 'bad.weight' or 'bad.weight_packed', must": {
    "bad.weight_scale": SCALES, "bad.weight_scale_2": G},
  "'bad.weight_scale': its values, .* must be there": {
    "bad.weight_scale": np.ones((2, 1), np.float32)},
  "'bad.weight_scale_inv': its values, 'bad.weight', must be there": {
    "bad.weight_scale_inv": np.ones((2, 2), np.float32)},
  "'bad._weight_scale': its values, 'bad._weight_qdata', must be there": {
    "bad._weight_scale": SCALES},
  "'bad.scales': its values, 'bad.qweight' or 'bad.weight' or 'bad.blo": {
    "bad.scales": np.ones((2, 8), np.float16)},
  "'bad.qzeros': its values, 'bad.qweight', must be there": {
    "bad.qzeros": np.ones((2, 1), np.int32)},
  "'bad.gate_scales': its values, 'bad.gate_blocks', must be there": {
    "bad.gate_scales": np.ones((2, 4, 1), np.uint8)},
  "'bad.qweight': its scales, 'bad.scales', must be there": {
    "bad.qweight": np.ones((2, 8), np.int32)},
  "'bad.weight': its scales, 'bad.scales', must be there": {
    "bad.weight": np.ones((2, 8), np.uint32),
    "bad.biases": np.ones((2, 1), np.float16)},
  "'bad.weight': its scales, 'bad.weight_scale', must be there": {
    "bad.weight": np.ones((2, 32), ml_dtypes.float8_e4m3fn),
    "bad.input_scale": G},
  "'bad.weight_scale': its values, 'bad.weight', must be quantized, got F32": {
    **modelopt("bad"), "bad.weight": np.ones((2, 32), np.float32)},
  "'bad.weight_packed': .*weight_zero_point": {"bad.weight_packed": ONES,
    "bad.weight_scale": SCALES, "bad.weight_zero_point": ONES},
  "'bad.weight': .*svdquant_lora_a says .* one term of a sum .SVDQuant": {
    **modelopt("bad"), "bad.svdquant_lora_a": np.ones((1, 32), np.float32)},
  "'bad_blocks': .*blocks must be": {"bad_blocks": ONES, "bad_scales": ONES},
  "'bad._weight_qdata': NVFP4Tensor must have blocks of 16": {
    "bad._weight_qdata": ONES, "bad._weight_scale": SCALES},
}  # fmt: skip


class Case(files.CheckpointTestCase, command_lines.CommandLineTestCase):
  def index(self, folder, weight_map, name="model"):
    path = folder / f"{name}.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))

  def assert_ones(self, array):
    self.assert_numbers(array, np.full((2, 32), G))


class MisfitsTest(Case):
  def test_other_tensors_are_read(self):
    for rule, tensors in MISFITS.items():
      with self.subTest(rule):
        tensors = {**modelopt("good"), **tensors}
        folder = self.folder(tensors, {"bad.weight": TORCHAO})
        with self.assertRaisesRegex(ERROR, f"(?s){rule}.*strict=False"):
          jp.checkpoints.load(folder)
        found = jp.checkpoints.load(folder, strict=False)
        self.assertLen(found.misfits, 1)
        (name,) = found.misfits
        self.assertRegex(found.misfits[name], rule)
        self.assertEqual(found.misfits[name].count(str(folder)), 1)
        self.assertNotIn(name, found)
        self.assertIn(found.misfits[name], str(found))
        with self.assertRaisesRegex(KeyError, f"was left out: .*{rule}"):
          found[name]
        self.assert_ones(found["good.weight"])
        self.assert_ones(found.read()["good.weight"])
        skipped = jp.checkpoints.load(folder, skip="bad*")
        self.assertEqual(skipped.misfits, {})
        self.assert_ones(skipped["good.weight"])
        status, out, _ = self.run_command("checkpoint", str(folder))
        self.assertEqual(status, 1)
        self.assertIn("good.weight", out)
        self.assertRegex(" ".join(out.split()), rule)
        skip = ("--skip", "bad*")
        self.assertEqual(
          self.run_command("checkpoint", str(folder), *skip)[0], 0
        )

  def test_error_lists_all_misfits_once(self):
    tensors = {**modelopt("good"), "bad.weight_packed": ONES}
    for i in range(3):
      tensors |= {f"l.{i}.up.weight": ONES, f"l.{i}.up.weight_scale": SCALES}
    with self.assertRaises(ERROR) as caught:
      self.load(tensors)
    first, *lines, last = str(caught.exception).splitlines()
    self.assertEqual(first, "4 tensors cannot be read:")
    self.assertIn("strict=False", last)
    bad, up = sorted(lines)
    self.assertRegex(bad, "'bad.weight_packed': its scales, 'bad.weight_scale'")
    self.assertRegex(up, r"'l.0.up.weight'.* \(and 2 more: l.\*.up.weight\)$")

  def test_nothing_that_can_be_read_is_an_error(self):
    folder = self.folder({"bad.weight_packed": ONES})
    with self.assertRaisesRegex(ERROR, "must be there too; add[^;]*$"):
      jp.checkpoints.load(folder, strict=False)
    with self.assertRaisesRegex(
      ERROR, "must have tensors, got none but those that skip="
    ):
      jp.checkpoints.load(folder, skip=["*"])
    with self.assertRaisesRegex(ERROR, "must have tensors"):
      self.load({})

  def test_weights_of_one_name_are_both_left_out(self):
    tensors = {
      **modelopt("good"),
      "up.weight_packed": ONES,
      "up.weight_scale": SCALES,
      "up.weight_global_scale": 1 / G,
      "up.weight": G,
    }
    found = self.load(tensors, strict=False)
    self.assertCountEqual(found.misfits, ["up.weight", "up.weight_packed"])
    self.assertNotIn("up.weight", found)
    self.assert_ones(found["good.weight"])

  def test_gguf_metadata_in_safetensors_means_nothing(self):
    for count in ("3", "many"):
      found = self.load(modelopt("good"), {"split.count": count})
      self.assert_ones(found["good.weight"])

  def test_global_scales_out_of_range_are_found_by_read(self):
    tensors = modelopt("good")
    for base in "ab":
      tensors |= {**modelopt(base), f"{base}.weight_scale_2": 1 / G}
    folder = self.folder(tensors)
    with self.assertRaisesRegex(
      ERROR, r"(?s)2 tensors.*'a.weight'.*'b.weight'.*strict=False"
    ) as caught:
      jp.checkpoints.load(folder).read(progress=False)
    self.assertEqual(str(caught.exception).count(str(folder)), 2)
    found = jp.checkpoints.load(folder, strict=False)
    tree = found.read(progress=False)
    self.assertEqual([*tree], ["good.weight"])
    self.assertCountEqual(found.misfits, ["a.weight", "b.weight"])

  def test_skipped_weights_take_their_parts_along(self):
    tensors = {
      "a.weight_packed": ONES,
      "a.weight_scale": SCALES,
      "a.weight_global_scale": 1 / G,
      **modelopt("b"),
      "c.weight": SCALES,
    }
    folder = self.folder(tensors)
    for skip in ("a", "a.weight", "a.weight_packed", ["a.*"], ("a", "[a]")):
      found = jp.checkpoints.load(folder, skip=skip)
      self.assertCountEqual(found, ["b.weight", "c.weight"])
    for skip in (3, [3], None):
      with self.assertRaisesRegex(TypeError, "skip must be a glob or a list"):
        jp.checkpoints.load(folder, skip=skip)

  def test_arguments_that_apply_to_nothing_are_warnings(self):
    folder = self.folder({**modelopt("l.0.up"), **modelopt("l.1.up")})
    near = r"; it has 'l.0.up.weight', 'l.1.up.weight'"
    for options, rule in (
      (
        {"skip": "*.1.upp*"},
        r"skip='\*.1.upp\*' matches no tensor; it has 'l",
      ),
      (
        {"skip": ["l.1.*", "up.weight"]},
        f"skip='up.weight' matches no.*{near}",
      ),
      (
        {"requantize": "int4_32"},
        "requantize='int4_32' changes no tensor, bec",
      ),
    ):
      with self.assertWarnsRegex(jp.checkpoints.PatternWarning, rule):
        jp.checkpoints.load(folder, **options)
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      jp.checkpoints.load(folder, skip="l.1.up")

  def test_shard_that_is_missing(self):
    folder = self.empty()
    self.file(modelopt("good"), path=folder / "1.safetensors")
    lost = [f"l.{i}.{x}" for i in range(4) for x in ("weight", "bias")]
    weight_map = dict.fromkeys(modelopt("good"), "1.safetensors")
    self.index(folder, weight_map | dict.fromkeys(lost, "2.safetensors"))
    with self.assertRaisesRegex(
      ERROR,
      r"(?s)8 tensors.*names 2.safetensors, which does not exist"
      r" \(and 7 more: l.\*.bias, l.\*.weight\)",
    ):
      jp.checkpoints.load(folder)
    found = jp.checkpoints.load(folder, strict=False)
    self.assertCountEqual(found.misfits, lost)
    self.assert_ones(found["good.weight"])
    self.assert_ones(jp.checkpoints.load(folder, skip="l.*")["good.weight"])

  def test_unknown_names_have_near_ones(self):
    found = self.load(modelopt("l.0.up_proj"))
    for name in ("up_proj", "l.0.up_proj", "l.0.up_prj.weight"):
      with self.assertRaisesRegex(KeyError, "it has 'l.0.up_proj.weight'$"):
        found[name]
      self.assertIsNone(found.get(name))
    with self.assertRaisesRegex(KeyError, "it has no 3; print the checkpoint"):
      found[3]

  def test_asking_for_a_name_reads_nothing(self):
    folder = self.folder(modelopt("a"))
    found = jp.checkpoints.load(folder)
    (folder / "x.safetensors").unlink()
    self.assertIn("a.weight", found)
    self.assertNotIn("a", found)


class PathsTest(Case):
  def test_paths_that_are_not_there(self):
    folder = self.empty()
    for suffix in ("", ".safetensors", ".gguf", ".safetensors.index.json"):
      path = folder / f"no{suffix}"
      for call in (
        jp.checkpoints.load,
        lambda path: jp.checkpoints.quantize(path, folder / "x", "nvfp4"),
      ):
        with self.assertRaisesRegex(
          FileNotFoundError, f"no such file or directory.*{path.name}"
        ):
          call(path)
      status, _, err = self.run_command("checkpoint", str(path))
      self.assertEqual(status, 2)
      self.assertEqual(err, f"error: {path}: no such file or directory\n")

  def test_name_of_a_repository_has_its_remedy(self):
    for path in ("meta-llama/Llama-3.1-8B", "owner/name"):
      with self.assertRaisesRegex(FileNotFoundError, "snapshot_download"):
        jp.checkpoints.load(path)
    for path in ("owner/model.safetensors", "a/b/c", "name"):
      with self.assertRaisesRegex(FileNotFoundError, "directory: '"):
        jp.checkpoints.load(path)

  def test_pipes_and_folders_are_refused_and_not_waited_for(self):
    for suffix in ("safetensors", "gguf", "safetensors.index.json"):
      for make, kind in ((os.mkfifo, "a pipe"), (os.mkdir, "a folder")):
        folder = self.empty()
        path = folder / f"x.{suffix}"
        make(path)
        paths = [folder] if kind == "a folder" else [folder, path]
        for given in paths:
          with self.assertRaisesRegex(ERROR, f"regular file, got {kind}"):
            jp.checkpoints.load(given)
          if suffix != "gguf":
            with self.assertRaisesRegex(ERROR, f"regular file, got {kind}"):
              jp.checkpoints.quantize(given, folder / "out", "nvfp4")


class OneNameInTwoFilesTest(Case):
  def test_one_is_chosen_by_the_rule_or_it_is_an_error(self):
    for case, more, indexes, chosen, unread in (
      ("files", {}, {}, None, ""),
      ("index_of_first", {}, {"m": {"a": "1"}}, 1, "2"),
      ("index_of_second", {}, {"m": {"a": "2"}}, 2, "1"),
      ("of_both", {"b": np.int8([2])}, {"m": {"a": "1", "b": "2"}}, 1, ""),
      ("shard_without_the_name", {}, {"m": {"c": "1", "a": "2"}}, 2, ""),
      ("two_indexes", {}, {"m": {"a": "1"}, "n": {"a": "2"}}, None, ""),
    ):
      with self.subTest(case):
        folder = self.empty()
        one, two = {"a": np.int8([1]), "c": np.int8([3])}, {"a": np.int8([2])}
        self.file(one, path=folder / "1.safetensors")
        self.file({**two, **more}, path=folder / "2.safetensors")
        for name, weight_map in indexes.items():
          weight_map = {n: f"{f}.safetensors" for n, f in weight_map.items()}
          self.index(folder, weight_map, name)
        if chosen is None:
          with self.assertRaisesRegex(
            ERROR, "2.safetensors and .* both have a tensor 'a'.*|pass the path"
          ):
            jp.checkpoints.load(folder)
          continue
        found = jp.checkpoints.load(folder)
        self.assertEqual(found["a"].tolist(), [chosen])
        self.assertEqual(
          found.unread, tuple(f"{x}.safetensors" for x in unread)
        )
        for name in unread:
          self.assertIn(f"not read: {name}.safetensors", str(found))

  def test_writer_refuses_it_too_and_counts_the_other_names(self):
    folder = self.empty()
    for name in "12":
      tensors = dict.fromkeys("abc", np.ones((16, 16), np.float32))
      self.file(tensors, path=folder / f"{name}.safetensors")
    rule = r"2.safetensors and .* both have a tensor 'a' \(and 2 more names\)"
    with self.assertRaisesRegex(ERROR, rule):
      jp.checkpoints.load(folder)
    with self.assertRaisesRegex(ERROR, rule):
      jp.checkpoints.quantize(folder, self.empty() / "out", "nvfp4")


@installed.needs("gguf")
class GgufTest(Case):
  def nvfp4(self):
    blocks = np.random.default_rng(0).integers(0, 256, (2, 72), np.uint8)
    blocks[:, :4] = blocks[:, 36:40] = 0x38  # scales of 1.0
    return blocks

  def test_global_scale_has_either_name(self):
    import gguf

    want = gguf.quants.dequantize(self.nvfp4(), gguf.GGMLQuantizationType.NVFP4)
    for base, scale in (
      ("up.weight", "up.scale"),
      ("up.weight", "up.weight.scale"),
      ("up", "up.scale"),
      ("up", "up.weight.scale"),
    ):
      path = self.empty() / "x.gguf"
      tensors = {base: ("NVFP4", self.nvfp4()), scale: np.float32([G])}
      files.write_gguf(path, tensors)
      found = jp.checkpoints.load(path)
      self.assertEqual([*found], [base])
      self.assert_numbers(found[base], want * G)
    tensors["up.scale"] = tensors["up.weight.scale"]
    files.write_gguf(path, tensors)
    with self.assertRaisesRegex(
      ERROR, "must be one tensor, got 'up.scale' and"
    ):
      jp.checkpoints.load(path)

  def test_file_cut_short_and_types_without_a_format(self):
    path = self.empty() / "x.gguf"
    tensors = {
      "a": np.float32([1, 2]),
      "b": ("BF16", np.zeros((2, 6), np.uint8)),
      "q": ("TQ1_0", np.zeros((2, 54), np.uint8)),
      "last": ("NVFP4", self.nvfp4()),
    }
    files.write_gguf(path, tensors)
    found = jp.checkpoints.load(path)
    self.assertEqual(
      {n: x.shape for n, x in found.entries.items()},
      {"a": (2,), "b": (2, 3), "q": (2, 256), "last": (2, 128)},
    )
    self.assertIn("TQ1_0", str(found))
    with self.assertRaisesRegex(
      ERROR, "'q': jaxplugin has no format for TQ1_0"
    ) as caught:
      found["q"]
    self.assertEqual(str(caught.exception).count(str(path)), 1)
    data = path.read_bytes()
    path.unlink()  # because its bytes may be mapped
    path.write_bytes(data[: -self.nvfp4().nbytes])
    with self.assertRaisesRegex(
      ERROR, r"'last': NVFP4\[2, 128\] .*cut short"
    ) as caught:
      jp.checkpoints.load(path)
    self.assertEqual(str(caught.exception).count(str(path)), 1)
    found = jp.checkpoints.load(path, strict=False)
    self.assertCountEqual(found.misfits, ["q", "last"])
    self.assertEqual(found.read(progress=False)["a"].tolist(), [1, 2])

  def test_file_of_several_is_read_with_the_others(self):
    folder = self.empty()
    paths = [folder / f"x-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, path in enumerate(paths):
      tensors = {f"t{i}": np.float32([i])}
      files.write_gguf(path, tensors, split_no=i, split_count=2)
    for path in (folder, *paths):
      found = jp.checkpoints.load(path)
      self.assertEqual(
        {n: x.item() for n, x in found.items()}, {"t0": 0, "t1": 1}
      )
    files.write_gguf(other := folder / "mmproj.gguf", {"v": np.float32([2])})
    with self.assertRaisesRegex(
      ERROR, "got mmproj.gguf, .*; pass the path of the"
    ):
      jp.checkpoints.load(folder)
    self.assertEqual([*jp.checkpoints.load(paths[0])], ["t0", "t1"])
    self.assertEqual([*jp.checkpoints.load(other)], ["v"])
    renamed = paths[0].rename(folder / "x.gguf")
    with self.assertRaisesRegex(ERROR, "must be NAME-00001-of-00002.gguf and"):
      jp.checkpoints.load(renamed)
    renamed.unlink()
    other.unlink()
    for path in (folder, paths[1]):
      with self.assertRaisesRegex(ERROR, f"{paths[0]}: it is one of 2 files"):
        jp.checkpoints.load(path)

  def test_folder_with_both_kinds_has_the_rule_printed(self):
    folder = self.folder({"a": np.int8([1])})
    files.write_gguf(folder / "a.gguf", {"a": np.float32([2])})
    found = jp.checkpoints.load(folder)
    self.assertEqual(found["a"].tolist(), [1])
    self.assertEqual(found.unread, ("a.gguf",))
