# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of bitsandbytes have the numbers of its `dequantize_4bit`."""

import hashlib
import json

import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.testing import checkpoint_files as files

N, K = 6, 512
NESTED_BLOCK = 16
OFFSET = 0.0317
NF4 = np.asarray(jp.NF4.codebook, np.float32)
# `get_4bit_type` of bitsandbytes' functional.py.
_FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3]
FP4 = np.float32([*_FP4, 0, *(-x for x in _FP4[1:])]) / np.float32(12)
# SHA-256 of the f32 that bitsandbytes 0.50.2 returns for the tensors of
# `tensors_of`: `cdequantize_blockwise_cpu_nf4_fp32` (or fp4), with scales by
# `cdequantize_blockwise_cpu_fp32` plus the offset if they are nested.
CASES = (
  ("nf4", 64, False,
    "614863e20b68720028bd14e34c2fcc54fa499828895bfbc5c566b5f5121a0b1b"),
  ("fp4", 32, False,
    "4bfc15bc0cdae627b1f1586c9ea4582c109289dd069de43c0988b3098cacfa6e"),
  ("nf4", 64, True,
    "3eb7dd6628cdc1b0f15e9b70073d4eaff104222539a306a7df33eea8428abfa5"),
)  # fmt: skip


def state_of(kind, size, **fields):
  given = {
    "quant_type": kind,
    "blocksize": size,
    "dtype": "bfloat16",
    "shape": [N, K],
  }
  return np.frombuffer(json.dumps(given | fields).encode(), np.uint8)


def tensors_of(kind="nf4", size=64, nested=False, **changes):
  """Returns the tensors of "w.weight"; None in `changes` leaves one out."""
  i, j = np.arange(N * K // 2, dtype=np.uint32), np.arange(N * K // size)
  packed = (i * np.uint32(2654435761) >> 8 & 255).astype(np.uint8)
  more = {}
  absmax = (0.01 + 0.003 * (j * 7 % 11)).astype(np.float32)
  fields = {}
  if nested:
    absmax = (j * 37 % 256).astype(np.uint8)
    groups = -(-j.size // NESTED_BLOCK)
    more = {
      "nested_absmax": np.float32([0.0123 * (1 + x) for x in range(groups)]),
      "nested_quant_map": np.sort(np.sin(np.arange(256))).astype(np.float32),
    }
    fields = {"nested_blocksize": NESTED_BLOCK, "nested_offset": OFFSET}
    fields["nested_dtype"] = "float32"
  parts = {
    "": packed[:, None],
    "absmax": absmax,
    "quant_map": FP4 if kind == "fp4" else NF4,
    **more,
    "state": state_of(kind, size, **fields),
    **changes,
  }
  parts[f"quant_state.bitsandbytes__{kind}"] = parts.pop("state")
  return {
    f"w.weight.{name}".removesuffix("."): x
    for name, x in parts.items()
    if x is not None
  }


class BitsandbytesTest(files.CheckpointTestCase):
  @parameterized.parameters(*CASES)
  def test_bits_are_those_of_bitsandbytes(self, kind, size, nested, digest):
    tensors = tensors_of(kind, size, nested)
    found = self.quietly({**tensors, "w.bias": np.ones(N, np.float32)})
    self.assertCountEqual(found, ["w.weight", "w.bias"])
    array, entry = found["w.weight"], found.entries["w.weight"]
    self.assertEqual((entry.layout, array.shape), ("bitsandbytes", (N, K)))
    self.assertEqual(array.format, entry.format)
    name = "nf4" if kind == "nf4" else "fp4_32"
    self.assertEqual(array.format.name, name)
    got = np.asarray(array.dequantize())
    self.assertEqual(hashlib.sha256(got.tobytes()).hexdigest(), digest)
    self.assertEqual(entry.nbytes, sum(x.nbytes for x in tensors.values()))

  def test_storage_of_another_dtype_has_the_same_bytes(self):
    tensors = tensors_of()
    other = tensors["w.weight"].reshape(-1).view(files.BF16)[:, None]
    found = [
      self.quietly(tensors | {"w.weight": x})["w.weight"]
      for x in (tensors["w.weight"], other)
    ]
    np.testing.assert_array_equal(found[0].values, found[1].values)

  def test_result_of_quantize_is_read_back(self):
    x = np.random.default_rng(0).normal(size=(N, K)).astype(np.float32)
    want = jp.quantize(x, "nf4")
    codes = np.asarray(want.values) ^ 0x88
    codes = (codes << 4 | codes >> 4).reshape(-1, 1)
    absmax = np.asarray(want.scale).reshape(-1)
    tensors = tensors_of(**{"": codes, "absmax": absmax})
    got = self.quietly(tensors)["w.weight"]
    np.testing.assert_array_equal(got.values, want.values)
    np.testing.assert_array_equal(got.scale, want.scale)

  @parameterized.parameters(
    (dict(absmax=None), "'w.weight': its scales, 'w.weight.absmax', must be"),
    (dict(quant_map=None), "'w.weight.quant_map', must be there"),
    (dict(state=None), "'w.weight.quant_state.bitsandbytes__nf4' or __fp4 m"),
    (dict(absmax=np.ones(47, np.float32)),
      r"'w.weight.absmax': .*float32\[48\], got float32\[47\]"),
    (dict(absmax=np.ones(48, np.uint8)), r"absmax': .*float32.*got uint8"),
    (dict(quant_map=NF4[:15]), r"quant_map': .*float32\[16\], got .*\[15\]"),
    (dict(quant_map=NF4 * np.float32(np.nan)), "quant_map': .*16 finite"),
    ({"": np.zeros((1535, 1), np.uint8)}, "weight': .* 1536 bytes.*got 1535"),
    (dict(state=np.zeros(9, np.uint8)), "bitsandbytes__nf4'.* must be JSON"),
    (dict(state=state_of("fp4", 64)), "quant_type must be 'nf4', got 'fp4'"),
    (dict(state=state_of("nf4", 0)), "blocksize must be an even number, got 0"),
    (dict(state=state_of("nf4", "64")), "blocksize must be .*, got '64'"),
    (dict(state=state_of("nf4", 64, shape=None)), "shape must be .*got None"),
    (dict(state=state_of("nf4", 64, shape=[0, 64])), r"shape .*got \[0, 64\]"),
    (dict(state=state_of("nf4", 64, shape=[32, 96])),
      "'w.weight': its rows must have whole blocks of 64, got k=96"),
    (dict(nested=True, nested_absmax=None), "'w.weight.nested_absmax', must"),
    (dict(nested=True, nested_absmax=np.ones(2, np.float32)),
      r"nested_absmax': .*float32\[3\], got float32\[2\]"),
    (dict(nested=True, nested_quant_map=np.ones(255, np.float32)),
      r"nested_quant_map': .*\[256\], got float32\[255\]"),
    (dict(nested=True, absmax=np.ones(48, np.float32)),
      r"absmax': .*uint8\[48\], got float32"),
    (dict(nested=True, state=state_of("nf4", 64, nested_blocksize=16,
      nested_offset="x")), "nested_offset must be a finite number, got 'x'"),
  )  # fmt: skip
  def test_damaged_file_is_refused_by_name(self, changes, rule):
    with self.assertRaisesRegex(jp.checkpoints.CheckpointError, rule):
      self.load(tensors_of(**changes))

  def test_int8_has_the_row_maximum_divided_by_127(self):
    rng = np.random.default_rng(1)
    values = rng.integers(-127, 128, (N, K)).astype(np.int8)
    amax = rng.uniform(0.1, 2, N).astype(np.float32)
    order = np.uint8(0)
    found = self.quietly(
      {"w.weight": values, "w.SCB": amax, "w.weight_format": order}
    )
    self.assertEqual([*found], ["w.weight"])
    array = found["w.weight"]
    self.assertEqual(array.format, jp.INT8_ROW)
    scale = np.float32(amax.astype(np.float64) / 127)
    expected = values * scale[:, None]
    np.testing.assert_array_equal(array.dequantize(), expected)

  @parameterized.parameters(
    ({"w.weight_format": np.uint8(1)}, "weight_format': it must be 0, for row"),
    ({"w.SCB": np.ones(N + 1, np.float32)}, r"SCB': .*\[6\], got float32\[7\]"),
    ({"w.weight": np.ones((N, K), np.uint8)}, r"'w.weight': .*int8\[n, k\]"),
  )
  def test_damaged_int8_is_refused_by_name(self, changes, rule):
    tensors = {"w.weight": np.ones((N, K), np.int8)}
    tensors |= {"w.SCB": np.ones(N, np.float32)}
    with self.assertRaisesRegex(jp.checkpoints.CheckpointError, rule):
      self.load(tensors | changes)
