# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A file of SmolLM2's kind is read as stored, in one copy."""

import multiprocessing
import pathlib
import re

import gguf
import gguf_metadata
import numpy as np
import smollm
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin.testing import folders

WORDS = ["<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ", "Ċ", "Ã", "©"]
# Peak memory over the file's bytes, as docs state it.
MAX_MEMORY = 1.15


def write(
  path,
  *,
  layers=2,
  width=64,
  hidden=96,
  arch="llama",
  others=(),
  value="Q4_1",
  words=WORDS,
  has_last_norm=True,
):
  """Writes a model of random numbers, and returns them in f32 by name.

  It returns the first 128 rows of each weight. The other rows repeat them.
  """
  writer = gguf.GGUFWriter(path, arch)
  writer.add_embedding_length(width)
  writer.add_head_count(width // 32)
  writer.add_head_count_kv(width // 64)
  writer.add_block_count(layers)
  writer.add_feed_forward_length(hidden)
  writer.add_rope_freq_base(1e4)
  writer.add_layer_norm_rms_eps(1e-5)
  if words:
    writer.add_token_list(words)
  writer.add_token_merges(["a b"])
  writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1, 1])
  rng = np.random.default_rng(0)
  numbers = {}

  def matrix(name, n, k, kind):
    # Rows of large weights repeat, because quantizing takes long.
    w = rng.standard_normal((min(n, 128), k), np.float32)
    rows = gguf.quants.quantize(w, kind)
    data = np.tile(rows, (n // len(rows), 1))
    writer.add_tensor(name, data, raw_dtype=kind)
    numbers[name] = gguf.quants.dequantize(rows, kind)

  def norm(name):
    numbers[name] = rng.standard_normal(width, np.float32)
    writer.add_tensor(name, numbers[name])

  q4, q8 = (gguf.GGMLQuantizationType[x] for x in ("Q4_1", "Q8_0"))
  matrix("token_embd.weight", len(WORDS), width, q8)
  if has_last_norm:
    norm("output_norm.weight")
  for i in range(layers):
    for name in ("attn_q", "attn_output"):
      matrix(f"blk.{i}.{name}.weight", width, width, q4)
    matrix(f"blk.{i}.attn_k.weight", width // 2, width, q4)
    kind = gguf.GGMLQuantizationType[value]
    matrix(f"blk.{i}.attn_v.weight", width // 2, width, kind)
    for name in ("ffn_gate", "ffn_up"):
      matrix(f"blk.{i}.{name}.weight", hidden, width, q4)
    matrix(f"blk.{i}.ffn_down.weight", width, hidden, q4)
    for name in ("attn_norm", "ffn_norm"):
      norm(f"blk.{i}.{name}.weight")
  for name in others:
    norm(name)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return numbers


def peak_bytes(small, large):
  """Returns the peak memory of a process before and after it reads a file."""
  result = []
  for path in (small, large):
    smollm.load(path)
    # `ru_maxrss` would include the process that started this one.
    status = pathlib.Path("/proc/self/status").read_text()
    (peak,) = re.findall(r"VmHWM:\s*(\d+) kB", status)
    result.append(int(peak) << 10)
  return result


class PathTestCase(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.path = folders.new(self) / "model.gguf"


class LoadTest(PathTestCase):
  def test_weights_are_those_of_the_file(self):
    numbers = write(self.path)
    checkpoint = smollm.load(self.path)
    config, params = checkpoint.config, checkpoint.params
    self.assertEqual(
      (config.layers, config.heads, config.groups, config.head_size),
      (2, 2, 1, 32),
    )
    self.assertEqual(config.vocabulary, len(WORDS))
    layers = params["layers"]
    self.assertEqual(layers["down"].format, jp.UINT4_32_MIN)
    self.assertEqual(params["embed"].format, jp.INT8_32)
    self.assertIs(params["head"], params["embed"])
    plain = checkpoint.dequantized()
    for i in range(2):
      get = lambda name, i=i: numbers[f"blk.{i}.{name}.weight"]
      # Rows of a head are pairs of neighbours in the file, and halves here.
      q, k = (
        get(x).reshape(-1, 16, 2, 64).swapaxes(1, 2).reshape(-1, 64)
        for x in ("attn_q", "attn_k")
      )
      for name, parts in (
        ("qkv", (q, k, get("attn_v"))),
        ("out", (get("attn_output"),)),
        ("gate_up", (get("ffn_gate"), get("ffn_up"))),
        ("down", (get("ffn_down"),)),
        ("attention_norm", (get("attn_norm"),)),
        ("mlp_norm", (get("ffn_norm"),)),
      ):
        with self.subTest(name, layer=i):
          actual = plain["layers"][name][i]
          np.testing.assert_array_equal(actual, np.concatenate(parts))
    np.testing.assert_array_equal(plain["head"], numbers["token_embd.weight"])
    np.testing.assert_array_equal(
      plain["last_norm"], numbers["output_norm.weight"]
    )

  def test_the_tokenizer_is_that_of_the_file(self):
    write(self.path)
    checkpoint = smollm.load(self.path)
    tokens = checkpoint.tokenizer.encode("<|im_start|>aab b\né<|im_end|>").ids
    self.assertEqual(tokens, [0, 2, 4, 5, 3, 6, 7, 8, 1])
    self.assertEqual(checkpoint.decode([4, 5, 3, 1, 2]), "ab b")

  def test_reading_takes_little_more_memory_than_the_file(self):
    small, large = self.path, self.path.with_name("large.gguf")
    write(small)
    write(large, layers=6, width=1024, hidden=4096)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
      before, after = pool.apply(peak_bytes, (small, large))
    size = large.stat().st_size
    self.assertLess(after - before, MAX_MEMORY * size)
    self.assertGreater(after - before, 0.5 * size)

  def test_other_models_and_missing_parts_are_refused(self):
    others = ("rope_freqs.weight", "blk.0.attn_q.bias")
    for options, message in (
      ({"others": others}, "got .*blk.0.attn_q.bias, rope_freqs.weight"),
      ({"value": "Q8_0"}, "several types .* attn_q, attn_k"),
      ({"arch": "qwen2"}, "got .*architecture 'qwen2'"),
      ({"words": ()}, r"with no key tokenizer\.ggml\.tokens\. Read"),
      ({"words": ["end", *WORDS[2:], "c", "d"]}, "with no such token"),
      ({"has_last_norm": False}, r"with no tensors output_norm\.weight"),
    ):
      write(self.path, **options)
      with self.assertRaisesRegex(ValueError, message):
        smollm.load(self.path)


class MetadataTest(PathTestCase):
  def test_all_types_are_read(self):
    writer = gguf.GGUFWriter(self.path, "llama")
    values = {
      "uint8": 200,
      "int8": -100,
      "uint16": 60000,
      "int16": -30000,
      "uint32": 4_000_000_000,
      "int32": -2_000_000_000,
      "uint64": 2**63 + 1,
      "int64": -(2**62),
      "float32": 0.5,
      "float64": 0.1,
      "bool": True,
      "string": "é",
    }
    for name, value in values.items():
      getattr(writer, f"add_{name}")(name, value)
    arrays = {"strings": ["a", "", "é"], "numbers": [1, -2], "x": [0.5]}
    for name, value in arrays.items():
      writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = gguf_metadata.read(self.path)
    for name, value in values.items():
      self.assertEqual(fields[name], value)
    for name, value in arrays.items():
      self.assertEqual(list(fields[name]), value)

  def test_another_file_is_refused(self):
    self.path.write_bytes(b"GGML1234")
    with self.assertRaisesRegex(ValueError, "GGUF file, got .*b'GGML'"):
      gguf_metadata.read(self.path)
