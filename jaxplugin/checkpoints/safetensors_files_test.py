# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Any header is read correctly or refused."""

import json
import os
import random
import tracemalloc
from unittest import mock

import ml_dtypes
import numpy as np
import safetensors.numpy
from absl.testing import parameterized

from jaxplugin.checkpoints import errors, safetensors_files, stored
from jaxplugin.testing import checkpoint_files as files

CHANGES = 600
FEW_ITEMS = 50_000


entry, file_of = files.entry, files.file_of


def of_a(*fields, data=b"0"):
  """Returns a file with one tensor, "a"."""
  return file_of({"a": entry(*fields)}, data)


GOOD = {
  "__metadata__": {"format": "pt"},
  "a": entry("F32", [2, 3], 0, 24),
  "b": entry("F8_E4M3", [3], 24, 27),
  "none": entry("BF16", [0, 5], 27, 27),
  "c": entry("BF16", [], 27, 29),
}
DATA = np.arange(6, dtype=np.float32).tobytes() + b"\x38\x40\x7e\x80\x3f"


class ReadTest(files.CheckpointTestCase):
  def test_tensors_are_those_of_the_bytes(self):
    source = safetensors_files.open_file(self.write(file_of(GOOD, DATA)))
    self.assertEqual(source.metadata, {"format": "pt"})
    self.assertEqual([*source.tensors], ["a", "b", "none", "c"])
    read = {name: x.read() for name, x in source.tensors.items()}
    np.testing.assert_array_equal(
      read["a"], np.arange(6, dtype=np.float32).reshape(2, 3)
    )
    # E4M3: 1, 2 and the largest number, 448. In BF16, 0x3f80 is 1.
    self.assertEqual(read["b"].dtype, ml_dtypes.float8_e4m3fn)
    self.assertEqual(read["b"].astype(float).tolist(), [1, 2, 448])
    self.assertEqual(read["none"].shape, (0, 5))
    self.assertEqual((read["c"].shape, float(read["c"])), ((), 1.0))

  def test_metadata_of_null_is_none(self):
    header = {"__metadata__": None, "a": GOOD["a"]}  # as MLX writes it
    data = file_of(header, DATA[:24])
    source = safetensors_files.open_file(self.write(data))
    self.assertEqual(source.metadata, {})
    np.testing.assert_array_equal(
      source.tensors["a"].read(), safetensors.numpy.load(data)["a"]
    )

  def test_files_of_the_safetensors_package_are_read(self):
    rng = np.random.default_rng(0)
    raw = {
      "F32": (np.float32, (3, 5)),
      "F64": (np.float64, (2,)),
      "F16": (np.float16, (7,)),
      "BF16": (ml_dtypes.bfloat16, (4, 2)),
      "I64": (np.int64, (1, 2)),
      "U8": (np.uint8, (5, 1, 3)),
      "BOOL": (np.bool_, (4,)),
      "F8_E4M3": (ml_dtypes.float8_e4m3fn, (3, 3)),
      "F8_E5M2": (ml_dtypes.float8_e5m2, (3,)),
      "F8_E8M0": (ml_dtypes.float8_e8m0fnu, (2, 2)),
    }
    tensors = {
      name: rng.integers(0, 2, shape).astype(dtype)
      for name, (dtype, shape) in raw.items()
    }
    data = safetensors.numpy.save(tensors, {"by": "them"})
    source = safetensors_files.open_file(self.write(data))
    self.assertEqual(source.metadata, {"by": "them"})
    self.assertCountEqual(source.tensors, raw)
    for name, (dtype, _) in raw.items():
      tensor = source.tensors[name]
      self.assertEqual(tensor.type_name, name)
      self.assertEqual(tensor.read().dtype, dtype)
      self.assertEqual(tensor.read().tobytes(), tensors[name].tobytes())
      self.assertEqual(tensor.read().shape, tensors[name].shape)

  def test_fp4_is_packed_bytes(self):
    path = self.write(
      file_of({"w": entry("F4", [3, 4], 0, 6)}, bytes(range(6)))
    )
    tensor = safetensors_files.open_file(path).tensors["w"]
    self.assertEqual(tensor.read().tolist(), [[0, 1], [2, 3], [4, 5]])
    self.assertEqual(tensor.logical_shape, (3, 4))


BIG = 2**63
BAD = {
  "no_bytes": (b"", "at least 8 bytes, got 0"),
  "seven_bytes": (b"\0" * 7, "got 7"),
  "longer_than_the_file": (file_of("{}", length=3), "at most 2 .*got 3"),
  "2^63": (file_of("{}", length=BIG), f"got {BIG}"),
  "2^64-1": (file_of("{}", length=2**64 - 1), "got 1844674407370955"),
  "no_header": (file_of(""), "must be JSON"),
  "list": (file_of("[]"), "must be a JSON object, got list"),
  "no_utf8": (file_of(b'{"\xff": 1}'), "must be JSON in UTF-8"),
  "surrogate": (file_of('{"\\ud800": 1}'), "surrogates not allowed"),
  "deep": (file_of("[" * 100_000), "must be JSON"),
  "long_number": (file_of('{"a": ' + "9" * 5000 + "}"), "must be JSON"),
  "long_offset": (file_of('{"a": [' + "9" * 21 + "]}"),
    "a number has 21 digits"),
  "infinite": (file_of('{"a": 1e999}'), "must fit in 64 bits"),
  "nan": (file_of('{"a": NaN}'), "NaN is not allowed in JSON"),
  "twice": (file_of('{"a": 1, "a": 2}'), "the name 'a' is used twice"),
  "metadata_number": (file_of({"__metadata__": {"a": 1}}), "__metadata__"),
  "metadata_list": (file_of({"__metadata__": []}), "__metadata__"),
  "entry_list": (file_of({"a": []}), "'a': it must have"),
  "field_missing": (file_of({"a": {"dtype": "U8"}}), "'a': it must have"),
  "field_more": (file_of({"a": {**entry("U8", [0], 0, 0), "x": 1}}),
    "'a': it must have"),
  "dtype_list": (of_a(["U8"], [1], 0, 1), "dtype must"),
  "shape_negative": (of_a("U8", [-1], 0, 1), r"\[-1\]"),
  "shape_bool": (of_a("U8", [True], 0, 1), "shape must"),
  "shape_float": (of_a("U8", [1.0], 0, 1), "shape must"),
  "shape_text": (of_a("U8", "1", 0, 1), "shape must"),
  "shape_2^63": (of_a("U8", [BIG], 0, 1), "shape must"),
  "shape_wraps": (of_a("U8", [2**32, 2**32], 0, 0, data=b""),
    "less than 2.63 bits"),
  "shape_empty_and_big": (of_a("U8", [2**62, 2**62, 0], 0, 0, data=b""),
    "less than 2.63 bits"),
  "rank": (of_a("U8", [1] * 33, 0, 1), "at most 32"),
  "size": (of_a("F32", [2], 0, 4, data=b"0000"), "have 8 bytes"),
  "offsets_back": (of_a("U8", [1], 1, 0), "begin"),
  "offsets_negative": (of_a("U8", [1], -1, 0), "begin"),
  "offsets_three": (
    file_of({"a": {**entry("U8", [1], 0, 1), "data_offsets": [0, 1, 1]}}, b"0"),
    "data_offsets must be"),
  "offsets_2^63": (of_a("U8", [1], BIG, BIG + 1), "data_offsets must be"),
  "beyond_the_file": (of_a("U8", [9], 0, 9), "end with"),
  "bytes_left": (of_a("U8", [1], 0, 1, data=b"00"), "end with"),
  "hole": (
    file_of({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"000"),
    "'b': tensors must be contiguous"),
  "overlap": (
    file_of({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"000"),
    "'b': tensors must be contiguous"),
  "half_a_byte": (of_a("F4", [3], 0, 2, data=b"00"), "1.5 bytes"),
  "fp4_rows": (of_a("F4", [2, 3], 0, 3, data=b"000"), "must be whole bytes"),
}  # fmt: skip


class RefusedTest(files.CheckpointTestCase):
  @parameterized.named_parameters((name, *case) for name, case in BAD.items())
  def test_is_refused_by_its_rule(self, data, rule):
    path = self.write(data)
    with self.assertRaisesRegex(errors.CheckpointError, rule) as caught:
      safetensors_files.open_file(path)
    self.assertIn(str(path), str(caught.exception))

  def test_header_beyond_the_bound_is_refused_unread(self):
    path = self.write(file_of("{}", length=stored.MAX_JSON_BYTES + 1))
    with open(path, "r+b") as file:
      file.truncate(stored.MAX_JSON_BYTES + 100)  # a sparse file
    with self.assertRaisesRegex(errors.CheckpointError, "at most 100000000"):
      safetensors_files.open_file(path)

  @parameterized.named_parameters(
    ("objects", lambda n: "[" + "{}," * n + "0]"),
    ("lists", lambda n: "[" + "[]," * n + "0]"),
    ("names", lambda n: "{" + "".join(f'"{i}":0,' for i in range(n)) + "}"),
  )
  def test_header_of_very_many_parts_is_refused_unread(self, text):
    data = file_of(text(FEW_ITEMS + 1))
    path = self.write(data)
    with mock.patch.object(stored, "MAX_JSON_ITEMS", FEW_ITEMS):
      tracemalloc.start()
      self.addCleanup(tracemalloc.stop)
      with self.assertRaisesRegex(errors.CheckpointError, "at most 50000 obj"):
        safetensors_files.open_file(path)
    # At most twice the text, and 50 kB.
    self.assertLess(tracemalloc.get_traced_memory()[1], 2 * len(data) + 50_000)

  def test_signs_in_strings_are_no_parts(self):
    told = '[{"a": "b, c"}, \\\\]' * FEW_ITEMS
    path = self.write(file_of({**GOOD, "__metadata__": {"x": told}}, DATA))
    with mock.patch.object(stored, "MAX_JSON_ITEMS", FEW_ITEMS):
      source = safetensors_files.open_file(path)
    self.assertEqual(source.metadata["x"], told)

  def test_file_that_changed_since_is_refused(self):
    path = self.write(file_of(GOOD, DATA))
    source = safetensors_files.open_file(path)
    path.write_bytes(file_of(GOOD, DATA)[:-1])
    with self.assertRaisesRegex(errors.CheckpointError, "it had .* bytes"):
      source.tensors["a"].read()

  def test_any_change_is_refused_or_read_within_the_file(self):
    good = file_of(GOOD, DATA)
    choose = random.Random(5)
    refused = 0
    path = self.write(good)
    for i in range(CHANGES):
      data = bytearray(good)
      if i % 3 == 0:
        del data[choose.randrange(len(data)) :]
      else:
        at = choose.randrange(len(good) - len(DATA))
        data[at] = choose.choice([choose.randrange(256), *b'0,"9[]{}'])
      path.unlink()  # because its bytes may be mapped
      path.write_bytes(bytes(data))
      try:
        source = safetensors_files.open_file(path)
        arrays = [x.read() for x in source.tensors.values()]
      except errors.CheckpointError as error:
        refused += 1
        str(error).encode()
      else:
        refused += bool(source.misfits)
        if not source.misfits:
          self.assertEqual(sum(x.nbytes for x in arrays), len(DATA))
    self.assertBetween(refused, CHANGES // 2, CHANGES - 10)


class IndexTest(files.CheckpointTestCase):
  def index(self, weight_map, **files):
    folder = self.empty()
    for name, data in files.items():
      (folder / f"{name}.safetensors").write_bytes(data)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path

  def test_tensors_come_from_their_files(self):
    one = of_a("U8", [1], 0, 1, data=b"\x01")
    two = file_of(
      {
        "b": entry("U8", [1], 0, 1),
        "c": entry("U8", [1], 1, 2),
        "a": entry("U8", [1], 2, 3),
      },
      b"\x02\x03\x04",
    )
    path = self.index(
      {"b": "two.safetensors", "a": "one.safetensors"}, one=one, two=two
    )
    tensors = safetensors_files.open_index(path).tensors
    read = {name: int(x.read()[0]) for name, x in tensors.items()}
    # The index says which file has "a", and does not name "c".
    self.assertEqual(read, {"b": 2, "a": 1, "c": 3})

  @parameterized.parameters(
    *(
      ({"a": file}, "its own folder")
      for file in (
        *("../x.safetensors", "/etc/x.safetensors", "a/x.safetensors"),
        *("a\\x.safetensors", "x.bin", "", ".."),
      )
    ),
    (None, "object of strings"),
    ([], "object of strings"),
    ({"a": 1}, "object of strings"),
    ({}, "must name at least one tensor, got none"),
  )
  def test_other_maps_are_refused(self, weight_map, rule):
    path = self.index(weight_map)
    with self.assertRaisesRegex(errors.CheckpointError, rule):
      safetensors_files.open_index(path)

  def test_name_that_the_index_leaves_open_is_refused(self):
    file = of_a("U8", [1], 0, 1, data=b"\x01")
    other = file_of(
      {"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 1, 2)}, b"\x02\x03"
    )
    path = self.index(
      {"b": "two.safetensors", "x": "one.safetensors"}, one=file, two=other
    )
    with self.assertRaisesRegex(
      errors.CheckpointError,
      "one.safetensors and .*two.safetensors both have a tensor 'a'",
    ):
      safetensors_files.open_index(path)

  def test_tensors_that_cannot_be_read_are_listed(self):
    good = file_of(
      {
        "a": entry("U8", [1], 0, 1),
        "new": entry("F5", [9], 1, 7),
        "unnamed": entry("F5", [9], 7, 13),
      },
      b"\x01" + bytes(12),
    )
    files = {"a": "good", "new": "good", "z": "good", "m": "missing"}
    files |= {"cut": "cut", "pipe": "pipe", "folder": "folder"}
    path = self.index(
      {name: f"{file}.safetensors" for name, file in files.items()},
      good=good,
      cut=good[:-1],
    )
    os.mkfifo(path.parent / "pipe.safetensors")
    (path.parent / "folder.safetensors").mkdir()
    source = safetensors_files.open_index(path)
    self.assertEqual([*source.tensors], ["a"])
    self.assertEqual(source.tensors["a"].read().tolist(), [1])
    rules = {
      "new": "good.*'new': dtype must be one of .*, got 'F5'",
      "unnamed": "good.*'unnamed': dtype must be one of .*, got 'F5'",
      "z": "'z' must be in good.safetensors, which has no such tensor",
      "m": "names missing.safetensors, which does not exist",
      "cut": "cut.*must end with the file.*cut short: download it again",
      "pipe": "pipe.* must be a regular file, got a pipe",
      "folder": "folder.* must be a regular file, got a folder",
    }
    self.assertCountEqual(source.misfits, rules)
    for name, rule in rules.items():
      self.assertRegex(source.misfits[name], rule)
      self.assertEqual(source.misfits[name].count(str(path.parent)), 1)
