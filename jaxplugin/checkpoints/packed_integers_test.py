# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Words of 4-bit integers are read in the order of each tool.

Tests pack integers one at a time, by the loops of the tools' sources.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxplugin as jp
from jaxplugin.testing import checkpoint_files as files

ERROR = jp.checkpoints.CheckpointError
F16, BF16 = np.dtype(np.float16), files.BF16
N, K, GROUP = 24, 256, 128
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of columns, from the lowest bits
RNG = np.random.default_rng(0)
INTEGERS = RNG.integers(-8, 8, (N, K))
SCALES = (RNG.random((N, K // GROUP)) + 0.5).astype(F16)
NUMBERS = INTEGERS * np.repeat(SCALES.astype(float), GROUP, 1)


def words(codes, order=range(8), bits=4):
  """Packs codes along the last dimension, `order` from the lowest bits."""
  per_word = 32 // bits
  codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word)))
  packed = np.zeros((len(codes), codes.shape[1] // per_word), np.uint32)
  for place, column in zip(range(per_word), order, strict=True):
    packed |= codes[:, column::per_word].astype(np.uint32) << (bits * place)
  return packed.view(np.int32)


def zero_points(stored, count=N):
  return words(np.full((K // GROUP, count), stored))


ZEROS = RNG.integers(0, 16, (N, K // GROUP))  # of unsigned integers
ZEROS[:2] = 0  # GPTQ's subtraction borrows from the next ones
ASYMMETRIC = (INTEGERS + 8 - np.repeat(ZEROS, GROUP, 1)) * np.repeat(
  SCALES.astype(float), GROUP, 1
)

GPTQ = {
  "w.qweight": words(INTEGERS + 8).T,
  "w.scales": SCALES.T,
  "w.qzeros": zero_points(7),
  "w.g_idx": (np.arange(K) // GROUP).astype(np.int32),
}
AWQ = {
  "w.qweight": words(INTEGERS.T + 8, AWQ_ORDER),
  "w.scales": SCALES.T,
  "w.qzeros": zero_points(8),
}
GPTQ_V2 = {**GPTQ, "w.qzeros": zero_points(8)}
# As `convert_gptq_v2_to_v1_format_module` of GPTQModel 7.7 subtracts.
BORROWED = words(ZEROS.T) - np.int32(0x11111111)
ASYMMETRIC_GPTQ = {**GPTQ, "w.qzeros": BORROWED}
ASYMMETRIC_V2 = {**GPTQ, "w.qzeros": words(ZEROS.T)}
ASYMMETRIC_AWQ = {**AWQ, "w.qzeros": words(ZEROS.T, AWQ_ORDER)}
PACKED = {
  "w.weight_packed": words(INTEGERS + 8),
  "w.weight_scale": SCALES,
  "w.weight_shape": np.int64([N, K]),
}


ASYMMETRIC_PACKED = {**PACKED, "w.weight_zero_point": words(ZEROS.T).T}


class FilesTest(files.CheckpointTestCase):
  def test_numbers_are_integers_times_scales(self):
    v2 = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
    planar = {"method": "gptq", "format": "gptq_p"}
    wide = {"w.scales": SCALES.T.astype(BF16)}
    bf16 = np.repeat(SCALES.astype(BF16).astype(float), GROUP, 1)
    packed = "compressed-tensors"
    for what, tensors, config, layout, format, numbers in (
      ("GPTQ", GPTQ, {}, "gptq", "int4_128", NUMBERS),
      ("GPTQ v2", GPTQ_V2, v2, "gptq", "int4_128", NUMBERS),
      ("bf16", {**GPTQ, **wide}, {}, "gptq", "int4_128_bf16", INTEGERS * bf16),
      ("AWQ", AWQ, {}, "awq", "int4_128", NUMBERS),
      ("packed", PACKED, {}, packed, "int4_128", NUMBERS),
      ("zeros", ASYMMETRIC_GPTQ, {}, "gptq", "uint4_128", ASYMMETRIC),
      ("planar", GPTQ_V2, planar, "gptq", "int4_128", NUMBERS),
      ("v2 zeros", ASYMMETRIC_V2, v2, "gptq", "uint4_128", ASYMMETRIC),
      ("AWQ zeros", ASYMMETRIC_AWQ, {}, "awq", "uint4_128", ASYMMETRIC),
      ("packed zeros", ASYMMETRIC_PACKED, {}, packed, "uint4_128", ASYMMETRIC),
    ):
      with self.subTest(what):
        found = self.load(tensors, config={"quantization_config": config})
        self.assertEqual([*found], ["w.weight"])
        entry = found.entries["w.weight"]
        self.assertEqual((entry.layout, str(entry.format)), (layout, format))
        self.assertEqual(entry.shape, (N, K))
        self.assertEqual(found["w.weight"].format, entry.format)
        self.assert_numbers(found["w.weight"], numbers)

  def test_last_group_may_be_short(self):
    k = K - 64
    found = self.load(
      {
        "w.qweight": words(INTEGERS[:, :k] + 8).T,
        "w.scales": SCALES.T,
        "w.qzeros": zero_points(7),
        "w.g_idx": GPTQ["w.g_idx"][:k],
      }
    )
    self.assertEqual(found.entries["w.weight"].format, jp.INT4_128)
    self.assert_numbers(found["w.weight"], NUMBERS[:, :k])

  def test_shape_says_the_bits_and_cuts_the_last_word(self):
    for bits, k, columns, name in (
      (4, 90, 1, "int4_row_float16"),
      (8, 90, 1, "int8_row"),
      (4, 96, 3, "int4_32"),
      (8, 96, 3, "int8_32"),
    ):
      with self.subTest(f"{bits} {k}"):
        self.check_packed(bits, (N, columns), k=k, format=name)

  def test_refused_by_name_with_a_remedy(self):
    moved = np.roll(GPTQ["w.g_idx"], 1)
    eight = np.zeros((K // 4, N), np.int32)
    with self.assertRaisesRegex(ERROR, "'w.q.*g_idx must .*desc_act"):
      self.load({**GPTQ, "w.g_idx": moved})["w.weight"]
    for rule, given, part in (
      ("'w.qweight': .*4 bits.* quantize", GPTQ, {"w.qweight": eight}),
      ("'w.qweight': .*4 bits", GPTQ, {"w.qzeros": zero_points(7, 2 * N)}),
      ("'w.qweight': .*4 bits", AWQ, {"w.qzeros": zero_points(8, 2 * N)}),
      ("4 bits", GPTQ, {"w.scales": np.ones((), F16)}),
      *(("'w.qweight': .* qzeros .* int32.k / group, n / 8. .*, got .*"
        rf" {dtype}\[2, 3\]", given, {"w.qzeros": zero_points(7).astype(dtype)})
        for given in (GPTQ, AWQ) for dtype in ("float32", "int64", "uint8")),
      *((rf"'w.qweight': .* g_idx must .* int32.k., got .* {dtype}\[256\]",
        *(GPTQ, {"w.g_idx": GPTQ["w.g_idx"].astype(dtype)}))
        for dtype in ("float32", "int64")),
      ("4 bits", AWQ, {"w.qweight": AWQ["w.qweight"][:-1]}),
      (r"'w.qweight': .*zero points need .*, got float8_e8m0fnu\[24, 2\]",
        *(ASYMMETRIC_GPTQ, {"w.scales": np.ones((2, N), jnp.float8_e8m0fnu)})),
      (r"'w.weight_packed': .*zero points need .*, got float16\[1, 2\]",
        {"w.weight_scale": SCALES[:1], "w.weight_shape": np.int64([N, K])},
        {"w.weight_packed": np.zeros((N, K // 4), np.int32),
         "w.weight_zero_point": np.zeros((1, 2), np.int8)}),
      ("'w.weight_packed': it has a weight_g_idx .* without it",
        *(PACKED, {"w.weight_g_idx": GPTQ["w.g_idx"]})),
      ("'w.weight_packed': .*8 bits.* quantize",
        *(PACKED, {"w.weight_shape": np.int64([N, K // 2 - 8])})),
      ("'w.weight_shape': .* the 2 sizes", PACKED, {"w.weight_shape": SCALES}),
      ("'w.weight_shape': .* the 2 sizes .* got int64.3",
        *(PACKED, {"w.weight_shape": np.int64([N, K, 1])})),
      ("weight_packed must be", PACKED, {"w.weight_shape": np.int64([N, -K])}),
      ("'w.weight_packed': .* k must be even for 4 bits, got .24, 255.",
        *(PACKED, {"w.weight_shape": np.int64([N, K - 1])})),
      (r"'w.weight_packed': .*weight_zero_point must be int32\[3, 2\], or int8"
       r" .*, got int32\[2, 3\]",
        *(PACKED, {"w.weight_zero_point": AWQ["w.qzeros"]})),
      ("weight_packed must be", {"w.weight_scale": SCALES},
        {"w.weight_packed": np.int32([1])}),
    ):  # fmt: skip
      with self.subTest(rule, part=part), self.assertRaisesRegex(ERROR, rule):
        self.load({**given, **part})
    with self.assertRaisesRegex(
      ERROR, "must have 4 bits, got 8 in .* quantize"
    ):
      bare = {name: GPTQ[name] for name in ("w.qweight", "w.scales")}
      self.load(bare, config={"quantization_config": {"bits": 8}})

  def test_weights_without_rows_keep_their_shape(self):
    gptq = {name: x[..., :0] for name, x in GPTQ.items() if name != "w.g_idx"}
    awq = {name: x[..., :0] for name, x in AWQ.items()}
    packed = {
      **{name: x[:0] for name, x in PACKED.items()},
      "w.weight_shape": np.int64([0, K]),
    }
    for tensors, tool in (
      (gptq, "gptq"),
      (awq, "awq"),
      (packed, "compressed-tensors"),
    ):
      with self.subTest(tool):
        config = {"quantization_config": {"quant_method": tool}}
        found = self.load(tensors, config=config)
        self.assertEqual(found.entries["w.weight"].layout, tool)
        self.assertEqual(found["w.weight"].shape, (0, K))
        self.assertEqual(jp.dequantize(found["w.weight"]).shape, (0, K))
    for tensors in (GPTQ, AWQ):
      with self.assertRaisesRegex(ERROR, r"'w.qweight': .* int4\[24, 0\]"):
        self.load({name: x[:0] for name, x in tensors.items()})

  def check_packed(self, bits, shape, n=N, k=K, zeros=None, format=None):
    """Checks random integers [n, k] with scales of a shape.

    Args:
      zeros: "packed" zero points, "bytes" as the strategy "tensor" of
        compressed-tensors stores them, or None.
    """
    half, order = 1 << (bits - 1), range(32 // bits)
    integers = RNG.integers(-half, half, (n, k))
    scale = (RNG.random(shape) + 0.5).astype(F16)
    tensors = {
      "w.weight_packed": words(integers + half, order, bits),
      "w.weight_scale": scale,
      "w.weight_shape": np.int64([n, k]),
    }
    size = k // shape[-1]
    if zeros:
      points = RNG.integers(-half, half, shape)
      integers = integers - np.repeat(points, size, -1)
      packed = words(points.T + half, order, bits).T if points.ndim > 1 else 0
      stored = {"packed": packed, "bytes": points.astype(np.int8)}[zeros]
      tensors["w.weight_zero_point"] = stored
    found = self.load(tensors)
    if format:
      self.assertEqual(str(found.entries["w.weight"].format), format)
    numbers = integers * np.repeat(scale.astype(float), size, -1)
    self.assert_numbers(found["w.weight"], numbers)

  def test_zero_points_of_8_bits_of_odd_rows_and_not_packed(self):
    for bits, n, shape, zeros, format in (
      (4, 13, (13, K // 64), "packed", "uint4_1x64_zero_float16"),
      (8, 13, (13, K // 64), "packed", "int8_1x64_zero_float16"),
      (4, N, (1,), "bytes", None),
      (8, N, (1,), "bytes", None),
      (4, N, (N, 1), "bytes", None),
      (8, N, (N, 2), "bytes", None),
    ):
      with self.subTest(f"{bits} {shape}"):
        self.check_packed(bits, shape, n, zeros=zeros, format=format)

  def test_int_quantized_with_zero_points(self):
    integers = RNG.integers(-128, 128, (N, K)).astype(np.int8)
    zeros = RNG.integers(-128, 128, (N, 1)).astype(np.int8)
    scale = (RNG.random((N, 1)) + 0.5).astype(np.float32)
    tensors = {
      "w.weight": integers,
      "w.weight_scale": scale,
      "w.weight_zero_point": zeros,
    }
    found = self.load(tensors)
    format = found.entries["w.weight"].format
    self.assertEqual(format.offset_dtype, np.int8)
    self.assertEqual(found["w.weight"].format, format)
    wide = integers.astype(np.int32) - zeros
    self.assert_numbers(found["w.weight"], wide * scale)
    with self.assertRaisesRegex(
      ERROR, "'w.weight_zero_point': zero points must"
    ):
      self.load({**tensors, "w.weight_zero_point": zeros[:3]})


class ArraysTest(files.CheckpointTestCase):
  def test_arrays_of_jax_and_traced_ones_are_converted(self):
    gptq, awq = jp.checkpoints.from_gptq, jp.checkpoints.from_awq
    packed = jp.checkpoints.from_compressed_tensors
    for convert, tensors, count, numbers in (
      (gptq, GPTQ, 4, NUMBERS),
      (gptq, GPTQ, 2, NUMBERS),  # zero points may be left out
      (awq, AWQ, 3, NUMBERS),
      (packed, PACKED, 2, NUMBERS),
      (gptq, ASYMMETRIC_GPTQ, 4, ASYMMETRIC),
      (awq, ASYMMETRIC_AWQ, 3, ASYMMETRIC),
    ):
      given = [*tensors.values()][:count]
      self.assert_numbers(jax.jit(convert)(*given), numbers)
      self.assert_numbers(convert(*jax.device_put(given)), numbers)
    for convert, tensors in ((gptq, GPTQ), (awq, AWQ)):
      words, scales, zeros, *_ = tensors.values()
      empty = [x[..., :0] for x in (words, scales, zeros)]
      self.assertEqual(jax.eval_shape(convert, *empty).shape, (0, K))
      for dtype in ("float32", "int64"):
        with self.assertRaisesRegex(TypeError, rf"qzeros .* {dtype}\[2, 3\]"):
          convert(words, scales, zeros.astype(dtype))
    values, scale, _, zeros = ASYMMETRIC_PACKED.values()
    array = packed(values, scale, weight_zero_point=zeros)
    self.assert_numbers(array, ASYMMETRIC)
    with self.assertRaisesRegex(TypeError, "weight_zero_point must be None"):
      codes = np.zeros((N, K // 2), np.uint8)
      scale = np.zeros((N, K // 32), np.uint8)
      packed(codes, scale, weight_zero_point=zeros)
