# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""GGUF headers are read like the gguf package reads them, or are refused."""

import contextlib
import random
import struct
import sys

import ml_dtypes
import numpy as np

import jaxplugin as jp
from jaxplugin.checkpoints import errors, gguf_blocks, gguf_files
from jaxplugin.testing import checkpoint_files as files
from jaxplugin.testing import installed

CHANGES = 400
TOKENS = 262_144
# One call of a Python or C function for each token.
CALLS_PER_TOKEN = 1.01


def pack(codes, *numbers):
  return struct.pack(f"<{codes}", *numbers)


def string(x):
  data = x.encode() if isinstance(x, str) else x
  return pack("Q", len(data)) + data


def value(name, kind, data):
  return string(name) + pack("I", kind) + data


def tensor(name, sizes, number, offset):
  head = string(name) + pack("I", len(sizes))
  head += pack(f"{len(sizes)}Q", *sizes)
  return head + pack("IQ", number, offset)


def file_of(values=(), tensors=(), data=b"", version=3, counts=None):
  """Returns a file's bytes by docs/gguf.md of ggml."""
  counts = counts or (len(tensors), len(values))
  head = b"GGUF" + pack("IQQ", version, *counts)
  head += b"".join([*values, *tensors])
  return head + bytes(-len(head) % 32) + data


F32, Q8_0 = 0, 8
INT8, INT16, UINT32, INT32, BOOL, STRING, ARRAY, INT64 = 1, 3, 4, 5, 7, 8, 9, 11
ALIGNMENT, SPLIT_COUNT = "general.alignment", "split.count"
TWO = tensor("a", [2], F32, 0)
DATA = np.float32([1, 2]).tobytes()
POWER = "a positive power of two, got"
COUNT = "split.count must be an integer from 0"
ENDS = "ends in its header, .*; it is cut short: download it again"


def with_value(name, kind, data, *tensors):
  return file_of([value(name, kind, data)], tensors, DATA if tensors else b"")


BAD = {
  "nothing": (b"", "got 0 bytes"),
  "other": (b"GGML" + bytes(100), "begin with GGUF"),
  "version": (file_of(version=1), "version must be 2 or 3, got 1"),
  "big_endian": (file_of(version=3 << 24), "convert it to little-endian"),
  "counts": (file_of(counts=(2**64 - 1, 0)), ENDS),
  "values": (file_of(counts=(0, 2**64 - 1)), ENDS),
  "long_name": (file_of([pack("Q", 2**63) + b"a"]), ENDS),
  "long_array": (with_value("a", ARRAY, pack("IQ", UINT32, 2**62)), ENDS),
  "long_string": (
    with_value("a", ARRAY, pack("IQQ", STRING, 2, 2**64 - 1) + bytes(9)), ENDS),
  "nested": (with_value("a", ARRAY, pack("IQ", ARRAY, 1) * 99),
    "'a': arrays must be nested at most 16 deep"),
  "nested_type": (with_value("a", ARRAY, pack("IQIQ", ARRAY, 1, 99, 0)),
    "'a': metadata must have a known type, got 99"),
  "value_type": (with_value("a", 99, b""), "known type, got 99"),
  "utf8": (with_value(b"\xff", UINT32, bytes(4)), "must be UTF-8"),
  "value_twice": (file_of([value("a", UINT32, bytes(4))] * 2),
    "'a': metadata must have one value"),
  "alignment": (with_value(ALIGNMENT, UINT32, pack("I", 24)), f"{POWER} 24"),
  "alignment_0": (with_value(ALIGNMENT, UINT32, bytes(4)), f"{POWER} 0"),
  # bit_count ignores the sign. The tensors would begin in the header.
  "alignment_int32": (with_value(ALIGNMENT, INT32, pack("i", -32), TWO),
    f"{POWER} -32"),
  "alignment_int8": (with_value(ALIGNMENT, INT8, pack("b", -1), TWO),
    f"{POWER} -1"),
  "alignment_int64": (with_value(ALIGNMENT, INT64, pack("q", -(2**63))),
    f"{POWER} -9223372036854775808"),
  "alignment_bool": (with_value(ALIGNMENT, BOOL, b"\1", TWO), f"{POWER} True"),
  "split_count": (with_value(SPLIT_COUNT, INT16, pack("h", -1), TWO),
    f"{COUNT}, got -1"),
  "split_count_bool": (with_value(SPLIT_COUNT, BOOL, b"\1", TWO),
    f"{COUNT}, got True"),
  "tensor_twice": (file_of([], [TWO, TWO], DATA), "two tensors .* 'a'"),
  "rank": (file_of([], [tensor("a", [1] * 33, F32, 0)]), "at most 32, got 33"),
}  # fmt: skip
# A malformed tensor, and its message in a file with valid tensors.
MISFITS = {
  "type": (tensor("b", [2], 99, 0), "'b': its type must be known, got 99"),
  "cut": (
    tensor("b", [3], F32, 0),
    r"'b': F32\[3\] must end with the file, at 104, got an end at 108",
  ),
  "offset": (tensor("b", [2], F32, 2**63), "must end with the file"),
  # Negative offsets and sizes are read as unsigned numbers.
  "offset_below_0": (tensor("b", [0], F32, 2**64 - 32), "end with the file"),
  "size_below_0": (tensor("b", [2**64 - 1], F32, 0), "less than 2.63 bytes"),
  "wraps": (tensor("b", [2**32] * 2, F32, 0), "less than 2.63 bytes"),
  "blocks": (
    tensor("b", [33, 2], Q8_0, 0),
    r"whole blocks of 32, got shape \[2, 33\]",
  ),
}


class Case(files.CheckpointTestCase):
  def write(self, data):
    return super().write(data, "x.gguf")


class HeaderTest(Case):
  def test_bad_files_are_refused_by_their_rule(self):
    for name, (data, rule) in BAD.items():
      with self.subTest(name):
        path = self.write(data)
        with self.assertRaisesRegex(errors.CheckpointError, rule) as caught:
          gguf_files.open_file(path)
        self.assertEqual(str(caught.exception).count(str(path)), 1)

  def test_wrong_tensor_leaves_the_others_readable(self):
    for name, (wrong, rule) in MISFITS.items():
      with self.subTest(name):
        path = self.write(file_of([], [TWO, wrong], DATA))
        source = gguf_files.open_file(path)
        self.assertEqual(source.tensors["a"].read().tolist(), [1, 2])
        self.assertEqual([*source.misfits], ["b"])
        self.assertRegex(source.misfits["b"], rule)
        self.assertEqual(source.misfits["b"].count(str(path)), 1)

  def test_tensors_begin_at_the_alignment_that_metadata_says(self):
    alignment = value(ALIGNMENT, UINT32, pack("I", 128))
    head = file_of([alignment], [TWO])
    self.assertLess(len(head), 128)
    path = self.write(head + bytes(128 - len(head)) + DATA)
    tensors = gguf_files.open_file(path).tensors
    self.assertEqual(tensors["a"].read().tolist(), [1, 2])

  def test_arrays_may_be_nested(self):
    pair = pack("IQ", STRING, 2) + string("a") + string("")
    numbers = pack("IQ", INT16, 3) + bytes(6)
    nested = pack("IQ", ARRAY, 2) + pair + pack("IQ", ARRAY, 2) + pair + numbers
    good = with_value("a", ARRAY, nested, TWO)
    tensors = gguf_files.open_file(self.write(good)).tensors
    self.assertEqual(tensors["a"].read().tolist(), [1, 2])

  def test_merged_files_may_count_0_parts(self):
    """llama.cpp's gguf-split --merge writes this count."""
    count = value(SPLIT_COUNT, INT16, pack("h", 0))
    source = gguf_files.open_file(self.write(file_of([count], [TWO], DATA)))
    self.assertEqual(source.tensors["a"].read().tolist(), [1, 2])
    self.assertEqual(source.metadata, {SPLIT_COUNT: "0"})

  def test_any_change_is_refused_or_read_within_the_file(self):
    values = [
      value("s", STRING, string("llama")),
      value("t", ARRAY, pack("IQ", STRING, 2) + string("a") * 2),
    ]
    good = file_of(values, [TWO, tensor("q", [32, 2], Q8_0, 32)], bytes(100))
    choose = random.Random(6)
    refused = 0
    for i in range(CHANGES):
      data = bytearray(good)
      if i % 3:
        data[choose.randrange(len(good) - 100)] = choose.randrange(256)
      else:
        del data[choose.randrange(len(data)) :]
      path = self.write(bytes(data))
      with contextlib.suppress(errors.CheckpointError):
        str(jp.checkpoints.load(path, strict=False))
      try:
        source = gguf_files.open_file(path)
      except errors.CheckpointError:
        refused += 1
        continue
      for x in source.tensors.values():
        self.assertLessEqual(x.begin + x.nbytes, len(data))
      refused += bool(source.misfits)
    self.assertBetween(refused, CHANGES // 3, CHANGES - 10)

  def test_tokens_are_stepped_over(self):
    tokens = pack("IQ", STRING, TOKENS) + string("token") * TOKENS
    path = self.write(
      file_of([value("tokenizer.ggml.tokens", ARRAY, tokens)], [TWO], DATA)
    )
    calls = 0

    def count(frame, event, argument):
      nonlocal calls
      calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
      source = gguf_files.open_file(path)
    finally:
      sys.setprofile(None)
    self.assertEqual(source.tensors["a"].read().tolist(), [1, 2])
    self.assertLess(calls, CALLS_PER_TOKEN * TOKENS)


@installed.needs("gguf")
class PackageTest(Case):
  def test_types_are_those_of_the_package(self):
    import gguf

    self.assertEqual(
      gguf_blocks.ALL_TYPES,
      {
        int(kind): (kind.name, *sizes)
        for kind, sizes in gguf.GGML_QUANT_SIZES.items()
      },
    )

  def test_tensors_are_those_of_the_package(self):
    import gguf

    rng = np.random.default_rng(0)
    path = self.write(b"")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "", "ccc"])
    writer.add_token_scores([1.0, 2.0, 3.0])
    writer.add_custom_alignment(64)
    writer.add_bool("flag", True)
    writer.add_string("text", "über")
    kinds = gguf.GGMLQuantizationType
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
      data = rng.integers(0, 256, (2, 3, size), np.uint8)
      if kind in (kinds.F32, kinds.F16, kinds.F64):
        data = rng.random((2, 3)).astype(f"f{size}")
      elif block == 1 and kind != kinds.BF16:
        data = rng.integers(0, 99, (2, 3)).astype(f"i{size}")
      writer.add_tensor(f"{kind.name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = gguf_files.open_file(path)
    reader = gguf.GGUFReader(path)
    self.assertEqual([*source.tensors], [x.name for x in reader.tensors])
    for x in reader.tensors:
      own = source.tensors[x.name]
      with self.subTest(x.name):
        self.assertEqual(own.type_name, x.tensor_type.name)
        self.assertEqual(own.logical_shape, tuple(map(int, x.shape[::-1])))
        self.assertEqual((own.nbytes, own.begin), (x.n_bytes, x.data_offset))
        if own.type_name in (*gguf_blocks.TYPES, "F32", "F16", "F64", "I64"):
          np.testing.assert_array_equal(own.read(), x.data)
        elif own.type_name == "BF16":
          self.assertEqual(own.read().dtype, ml_dtypes.bfloat16)
          self.assertEqual(own.read().tobytes(), x.data.tobytes())
        elif own.dtype == np.uint8:
          with self.assertRaisesRegex(
            errors.CheckpointError, "has no format for"
          ):
            own.read()
