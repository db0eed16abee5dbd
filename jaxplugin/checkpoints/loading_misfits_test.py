# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Unreadable tensors are listed with reasons, and the others are read."""

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import struct
import tempfile

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin import __main__ as main

ERROR = jp.checkpoints.CheckpointError
# NVFP4: nibbles of 1.0 (code 2), and block scales of 1.0.
ONES = np.full((2, 16), 0x22, np.uint8)
SCALES = np.ones((2, 2), ml_dtypes.float8_e4m3fn)
G = np.float32(2.0**-12)


def modelopt(base):
  return {
    f"{base}.weight": ONES,
    f"{base}.weight_scale": SCALES,
    f"{base}.weight_scale_2": G,
  }


# Tensors that do not form a weight, with the message.
MISFITS = {
  "scale_2": (
    {"bad.weight": ONES, "bad.weight_scale": SCALES},
    "'bad.weight': .*weight_scale_2 must be given",
  ),
  "sizes": (
    {**modelopt("bad"), "bad.weight_scale": SCALES[:1].copy()},
    "'bad.weight': .*values and scales must be",
  ),
  "scales": (
    {"bad.weight_packed": ONES},
    "'bad.weight_packed': its scales, 'bad.weight_scale', must be there",
  ),
  "zero_point": (
    {
      "bad.weight_packed": ONES,
      "bad.weight_scale": SCALES,
      "bad.weight_zero_point": ONES,
    },
    "'bad.weight_packed': .*weight_zero_point",
  ),
  "svdquant": (
    {**modelopt("bad"), "bad.svdquant_lora_a": np.ones((1, 32), np.float32)},
    "'bad.weight': .*SVDQuant",
  ),
  "gpt_oss": (
    {"bad_blocks": ONES, "bad_scales": ONES},
    "'bad_blocks': .*blocks must be",
  ),
}


class Case(absltest.TestCase):
  def empty(self):
    """Returns a folder that is deleted after the test."""
    return pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

  def write(self, folder, name, tensors, metadata=None):
    given = {n: np.asarray(x) for n, x in tensors.items()}
    (folder / name).write_bytes(safetensors.numpy.save(given, metadata))

  def folder(self, tensors, metadata=None):
    folder = self.empty()
    self.write(folder, "x.safetensors", tensors, metadata)
    return folder

  def index(self, folder, weight_map, name="model"):
    path = folder / f"{name}.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    return path

  def command(self, *args):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      status = main.main(["checkpoint", *map(str, args)])
    return status, out.getvalue(), err.getvalue()

  def assert_ones(self, array):
    np.testing.assert_array_equal(
      np.asarray(jp.dequantize(array, jnp.float32)), np.full((2, 32), G)
    )


class MisfitsTest(Case):
  def test_other_tensors_are_read(self):
    for case, (tensors, rule) in MISFITS.items():
      with self.subTest(case):
        folder = self.folder({**modelopt("good"), **tensors})
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
        status, out, _ = self.command(folder)
        self.assertEqual(status, 1)
        self.assertIn("good.weight", out)
        self.assertRegex(" ".join(out.split()), rule)
        self.assertEqual(self.command(folder, "--skip", "bad*")[0], 0)

  def test_error_lists_all_misfits_once(self):
    tensors = dict(modelopt("good"))
    for i in range(3):
      tensors |= {f"l.{i}.up.weight": ONES, f"l.{i}.up.weight_scale": SCALES}
    tensors |= {"bad.weight_packed": ONES}
    with self.assertRaises(ERROR) as caught:
      jp.checkpoints.load(self.folder(tensors))
    first, *lines, last = str(caught.exception).splitlines()
    self.assertEqual(first, "4 tensors cannot be read:")
    self.assertIn("strict=False", last)
    bad, up = sorted(lines)
    self.assertRegex(bad, "'bad.weight_packed': its scales, 'bad.weight_scale'")
    self.assertRegex(up, r"'l.0.up.weight'.* \(and 2 more: l.\*.up.weight\)$")

  def test_nothing_that_can_be_read_is_an_error(self):
    folder = self.folder({"bad.weight_packed": ONES})
    with self.assertRaisesRegex(ERROR, "must be there too$"):
      jp.checkpoints.load(folder, strict=False)
    with self.assertRaisesRegex(
      ERROR, "must have tensors, got none but those that skip="
    ):
      jp.checkpoints.load(folder, skip=["*"])
    with self.assertRaisesRegex(ERROR, "must have tensors"):
      jp.checkpoints.load(self.folder({}))

  def test_weights_of_one_name_are_both_left_out(self):
    folder = self.folder(
      {
        **modelopt("good"),
        "up.weight_packed": ONES,
        "up.weight_scale": SCALES,
        "up.weight_global_scale": np.float32([1 / G]),
        "up.weight": G,
      }
    )
    found = jp.checkpoints.load(folder, strict=False)
    self.assertCountEqual(found.misfits, ["up.weight", "up.weight_packed"])
    self.assertNotIn("up.weight", found)
    self.assert_ones(found["good.weight"])

  def test_torchao_metadata_of_one_weight(self):
    tensors = {"a._weight_qdata": ONES, "a._weight_scale": SCALES}
    text = '{"_type": "NVFP4Tensor", "_data": {"block_size": 32}}'
    folder = self.folder({**modelopt("good"), **tensors}, {"a.weight": text})
    found = jp.checkpoints.load(folder, strict=False)
    self.assertEqual([*found.misfits], ["a._weight_qdata"])
    self.assert_ones(found["good.weight"])

  def test_gguf_metadata_in_safetensors_means_nothing(self):
    for count in ("3", "many"):
      folder = self.folder(modelopt("good"), {"split.count": count})
      self.assert_ones(jp.checkpoints.load(folder)["good.weight"])

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
    packed = {
      "a.weight_packed": ONES,
      "a.weight_scale": SCALES,
      "a.weight_global_scale": np.float32([1 / G]),
    }
    others = {**modelopt("b"), "c.weight": SCALES}
    folder = self.folder({**packed, **others})
    for skip in ("a", "a.weight", "a.weight_packed", ["a.*"], ("x", "[a]")):
      found = jp.checkpoints.load(folder, skip=skip)
      self.assertCountEqual(found, ["b.weight", "c.weight"])
    for skip in (3, [3], None):
      with self.assertRaisesRegex(TypeError, "skip must be a glob or a list"):
        jp.checkpoints.load(folder, skip=skip)

  def test_shard_that_is_missing(self):
    folder = self.empty()
    self.write(folder, "1.safetensors", modelopt("good"))
    lost = [f"l.{i}.{x}" for i in range(4) for x in ("weight", "bias")]
    weight_map = dict.fromkeys(modelopt("good"), "1.safetensors")
    weight_map |= dict.fromkeys(lost, "2.safetensors")
    self.index(folder, weight_map)
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


class NamesTest(Case):
  def test_unknown_names_have_near_ones(self):
    found = jp.checkpoints.load(self.folder(modelopt("l.0.up_proj")))
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
    calls = (jp.checkpoints.load,)
    calls += (
      lambda path: jp.checkpoints.quantize(path, folder / "x", "nvfp4"),
    )
    for name in (
      "no",
      "no.safetensors",
      "no.gguf",
      "no.safetensors.index.json",
    ):
      for call in calls:
        with self.assertRaisesRegex(
          FileNotFoundError, f"no such file or directory.*{name}"
        ):
          call(folder / name)
      status, _, err = self.command(folder / name)
      self.assertEqual(status, 2)
      self.assertEqual(
        err, f"error: {folder / name}: no such file or directory\n"
      )

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
    one, two = {"a": np.int8([1]), "c": np.int8([3])}, {"a": np.int8([2])}
    for case, files, indexes, chosen, unread in (
      ("files", {"1": one, "2": two}, {}, None, None),
      ("index_of_first", {"1": one, "2": two}, {"m": {"a": "1"}}, 1, ["2"]),
      ("index_of_second", {"1": one, "2": two}, {"m": {"a": "2"}}, 2, ["1"]),
      (
        "index_of_both",
        {"1": one, "2": {**two, "b": two["a"]}},
        {"m": {"a": "1", "b": "2"}},
        1,
        [],
      ),
      (
        "index_and_shard_without_the_name",
        {"1": one, "2": two},
        {"m": {"c": "1", "a": "2"}},
        2,
        [],
      ),
      (
        "two_indexes",
        {"1": one, "2": two},
        {"m": {"a": "1"}, "n": {"a": "2"}},
        None,
        None,
      ),
    ):
      with self.subTest(case):
        folder = self.empty()
        for name, tensors in files.items():
          self.write(folder, f"{name}.safetensors", tensors)
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

  def test_writer_refuses_it_too(self):
    folder = self.empty()
    for name in "12":
      self.write(
        folder, f"{name}.safetensors", {"a.weight": np.ones((16, 16), "f4")}
      )
    with self.assertRaisesRegex(
      ERROR, "2.safetensors and .* both have a tensor 'a.weight'"
    ):
      jp.checkpoints.quantize(folder, self.empty() / "out", "nvfp4")

  def test_error_counts_the_other_names(self):
    folder = self.empty()
    for name in "12":
      self.write(folder, f"{name}.safetensors", dict.fromkeys("abc", ONES))
    with self.assertRaisesRegex(ERROR, r"'a' \(and 2 more names\)"):
      jp.checkpoints.load(folder)


class GgufTest(Case):
  def setUp(self):
    super().setUp()
    if importlib.util.find_spec("gguf") is None:
      self.skipTest("the gguf package is not installed")

  def gguf(self, path, tensors, **values):
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for name, x in values.items():
      writer.add_uint16(name.replace("_", "."), x)
    for name, (x, kind) in tensors.items():
      kind = None if kind is None else gguf.GGMLQuantizationType[kind]
      writer.add_tensor(name, x, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

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
      tensors = {
        base: (self.nvfp4(), "NVFP4"),
        scale: (np.float32([G]), None),
      }
      self.gguf(path, tensors)
      found = jp.checkpoints.load(path)
      self.assertEqual([*found], [base])
      np.testing.assert_array_equal(
        np.asarray(jp.dequantize(found[base], jnp.float32)), want * G
      )
    tensors["up.scale"] = tensors["up.weight.scale"]
    self.gguf(path, tensors)
    with self.assertRaisesRegex(
      ERROR, "must be one tensor, got 'up.scale' and"
    ):
      jp.checkpoints.load(path)

  def test_lists_have_shapes_of_values(self):
    path = self.empty() / "x.gguf"
    self.gguf(
      path,
      {
        "q": (np.zeros((2, 54), np.uint8), "TQ1_0"),
        "n": (self.nvfp4(), "NVFP4"),
        "b": (np.zeros((2, 6), np.uint8), "BF16"),
      },
    )
    found = jp.checkpoints.load(path)
    self.assertEqual(
      {n: x.shape for n, x in found.entries.items()},
      {"q": (2, 256), "n": (2, 128), "b": (2, 3)},
    )

  def test_integers_of_both_widths_are_read(self):
    blocks = np.random.default_rng(0).integers(0, 64, (2, 34 * 18), np.uint8)
    path = self.empty() / "x.gguf"
    self.gguf(path, {"a": (blocks, "Q8_0"), "b": (blocks, "Q4_0")})
    found = jp.checkpoints.load(path)
    self.assertEqual(
      {n: (x.layout, x.format, x.shape) for n, x in found.entries.items()},
      {
        "a": ("gguf", jp.INT8_32, (2, 18 * 32)),
        "b": ("gguf", jp.INT4_32, (2, 34 * 32)),
      },
    )
    for name, format in (("a", jp.INT8_32), ("b", jp.INT4_32)):
      want = jp.checkpoints.from_gguf(blocks, format)
      np.testing.assert_array_equal(found[name].values, want.values)
      np.testing.assert_array_equal(found[name].scale, want.scale)

  def test_file_cut_short_and_types_without_a_format(self):
    path = self.empty() / "x.gguf"
    self.gguf(
      path,
      {
        "a": (np.float32([1, 2]), None),
        "q": (np.zeros((2, 54), np.uint8), "TQ1_0"),
        "last": (self.nvfp4(), "NVFP4"),
      },
    )
    found = jp.checkpoints.load(path)
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
    for i in range(2):
      self.gguf(
        folder / f"x-0000{i + 1}-of-00002.gguf",
        {f"t{i}": (np.float32([i]), None)},
        split_no=i,
        split_count=2,
      )
    found = jp.checkpoints.load(folder)
    self.assertEqual(
      {n: x.item() for n, x in found.items()}, {"t0": 0, "t1": 1}
    )
    path = folder / "x-00002-of-00002.gguf"
    with self.assertRaisesRegex(ERROR, "one of 2 files; pass a folder that"):
      jp.checkpoints.load(path)
    (folder / "x-00001-of-00002.gguf").unlink()
    with self.assertRaisesRegex(ERROR, "one of 2 files"):
      jp.checkpoints.load(folder)

  def test_folder_with_both_kinds_has_the_rule_printed(self):
    folder = self.folder({"a": np.int8([1])})
    self.gguf(folder / "a.gguf", {"a": (np.float32([2]), None)})
    found = jp.checkpoints.load(folder)
    self.assertEqual(found["a"].tolist(), [1])
    self.assertEqual(found.unread, ("a.gguf",))


class PackedTest(Case):
  def test_fp4_of_safetensors_is_listed_with_its_values_shape(self):
    header = {"a": {"dtype": "F4", "shape": [2, 6], "data_offsets": [0, 6]}}
    text = json.dumps(header).encode()
    path = self.empty() / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(6))
    found = jp.checkpoints.load(path)
    self.assertEqual(found.entries["a"].shape, (2, 6))
    self.assertEqual(found["a"].shape, (2, 3))


if __name__ == "__main__":
  absltest.main()
