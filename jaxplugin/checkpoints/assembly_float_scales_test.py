# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""FP8 and integers with float scales are read from the files of each tool.

Expected numbers are value * scale in f64, which hold every product exactly.
"""

import jax
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.checkpoints import assembly
from jaxplugin.testing import checkpoint_files as files

F8, E8, BF16, weight = files.F8, files.E8, files.BF16, files.weight
E5, F16, F32 = map(np.dtype, (ml_dtypes.float8_e5m2, "f2", "f4"))
INT8, INT4 = np.dtype("i1"), np.dtype(ml_dtypes.int4)
# A size that is a multiple of 64 and not of 128, as in published models.
N, K = 192, 576
ERROR = jp.checkpoints.CheckpointError
RNG = np.random.default_rng(0)
FP8 = (RNG.standard_normal((N, K)) * 8).astype(F8)
BYTES = RNG.integers(-128, 128, (N, K), np.int8)


def scales(*shape, dtype=F32):
  return (RNG.random(shape, F32) + 0.5).astype(dtype)


def expand(scale, size, axis, count):
  return np.repeat(scale.astype(float), size, axis).take(range(count), axis)


TENSOR, ROWS, GROUPS = scales(1), scales(N, 1, dtype=BF16), scales(N, 5)
SQUARES = scales(2, 5)
SQUARE_NUMBERS = expand(expand(SQUARES, 128, 0, N), 128, 1, K)
HALVES = scales(N, K // 32, dtype=F16)
BF16_SQUARES = expand(expand(SQUARES.astype(BF16), 128, 0, N), 128, 1, K)
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FLOATS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
INTEGERS = {"quant_method": "compressed-tensors", "format": "int-quantized"}
STACK = np.stack([FP8, FP8])


# The file's tensors and quantization_config; layout, format and scales.
FILES = {
  "DeepSeek-V3, GLM": (*(weight(FP8, weight_scale_inv=SQUARES), BLOCKS),
    *("deepseek", "fp8_128x128", SQUARE_NUMBERS)),
  "Qwen, with bf16 scales": (
    *(weight(FP8, weight_scale_inv=SQUARES.astype(BF16)), BLOCKS),
    *("deepseek", "fp8_128x128", BF16_SQUARES)),
  "DeepSeek-V3.1, f32 powers of two": (
    weight(FP8, weight_scale_inv=np.float32([[0.5] * 5] * 2)),
    {"quant_method": "fp8", "scale_fmt": "ue8m0"},
    *("deepseek", "fp8_128x128", 0.5)),
  "experts of transformers": (
    *({"w": STACK, "w_scale_inv": np.stack([SQUARES, SQUARES])}, BLOCKS),
    *("deepseek", "fp8_128x128", SQUARE_NUMBERS)),
  "experts with one scale each": (
    *({"w": STACK, "w_scale_inv": np.float32([0.5, 3])}, {}),
    *("deepseek", "fp8_row", np.float32([0.5, 3])[:, None, None])),
  "float-quantized, block": (*(weight(FP8, weight_scale=SQUARES), FLOATS),
    *("compressed-tensors", "fp8_128x128", SQUARE_NUMBERS)),
  "float-quantized, channel": (*(weight(FP8, weight_scale=ROWS), FLOATS),
    *("compressed-tensors", "fp8_row", ROWS.astype(float))),
  "float-quantized, tensor": (*(weight(FP8, weight_scale=TENSOR), FLOATS),
    *("compressed-tensors", "fp8_row", TENSOR.astype(float))),
  "float-quantized, group": (*(weight(FP8, weight_scale=GROUPS), FLOATS),
    *("compressed-tensors", "fp8_1x128", expand(GROUPS, 128, 1, K))),
  "int-quantized, channel": (*(weight(BYTES, weight_scale=ROWS), INTEGERS),
    *("compressed-tensors", "int8_row", ROWS.astype(float))),
  "int-quantized, tensor": (*(weight(BYTES, weight_scale=TENSOR), INTEGERS),
    *("compressed-tensors", "int8_row", TENSOR.astype(float))),
  "int-quantized, group": (*(weight(BYTES, weight_scale=HALVES), INTEGERS),
    *("compressed-tensors", "int8_32", expand(HALVES, 32, 1, K))),
  "ModelOpt FP8": (weight(FP8, weight_scale=TENSOR.reshape(())),
    {"quant_method": "modelopt", "quant_algo": "FP8"},
    *("modelopt", "fp8_row", TENSOR.astype(float))),
  "fbgemm_fp8 of transformers": (weight(FP8, weight_scale=ROWS.astype(F32)),
    {"quant_method": "fbgemm_fp8"},
    *("compressed-tensors", "fp8_row", ROWS.astype(float))),
  "ComfyUI's older FP8": (*(weight(FP8, scale_weight=TENSOR.reshape(())), {}),
    *("comfyui", "fp8_row", TENSOR.astype(float))),
}  # fmt: skip


class FilesTest(files.CheckpointTestCase):
  @parameterized.named_parameters(*((name, *x) for name, x in FILES.items()))
  def test_numbers_are_values_times_scales(
    self, tensors, config, layout, format, scale
  ):
    found = self.quietly(tensors, config={"quantization_config": config})
    (name,) = found  # the scales are parts of the weight
    entry, array = found.entries[name], found[name]
    self.assertEqual((entry.layout, str(entry.format)), (layout, format))
    values = next(iter(tensors.values()))
    self.assertEqual(entry.shape, values.shape)
    self.assertEqual(array.shape, values.shape)
    self.assert_numbers(array, values.astype(float) * scale)

  def test_activation_and_cache_scales_keep_their_names(self):
    half = np.float32(0.5)
    found = self.load(
      {
        "q.weight": FP8,
        "q.weight_scale": TENSOR,
        "q.input_scale": half,
        "attn.k_scale": half,
        "attn.v_scale": half,
      },
      config={"quantization_config": INTEGERS},
    )
    names = ["q.weight", "q.input_scale", "attn.k_scale", "attn.v_scale"]
    self.assertCountEqual(found, names)
    # compressed-tensors' other activation scale, of NVFP4, divides.
    self.assertEqual(float(found.activation_scale("q.weight")), 0.5)

  def test_refused_by_name(self):
    zero = np.zeros(1, np.int8)
    for rule, scales_of in (
      (r"a square block of 128, 64, 32, got float32\[2\] for float8",
        {"weight_scale": scales(2)}),
      ("'w.weight_zero_point': zero points must be int8 .* got int8.* for fl",
        {"weight_scale": TENSOR, "weight_zero_point": zero}),
      ("'w.weight': it is quantized .*weight_scale_2",
        {"weight_scale": TENSOR, "weight_scale_2": TENSOR}),
    ):  # fmt: skip
      with self.subTest(rule), self.assertRaisesRegex(ERROR, rule):
        self.load(weight(FP8, **scales_of))


class ShapesTest(absltest.TestCase):
  def test_shape_of_scales_decides_the_format(self):
    for dtype, shape, scale, name in (
      (F8, (N, K), scales(N), "fp8_row"),
      (F8, (3, N, K), scales(3), "fp8_row"),
      (F8, (3, N, K), scales(3, 1, 1), "fp8_row"),
      (F8, (3, N, K), scales(3, N, dtype=F16), "fp8_row"),
      (F8, (N, K), scales(2, 5).astype(E8), "fp8_128x128_e8m0"),
      (F8, (N, K), scales(N, 18).astype(E8), "mxfp8"),
      (F8, (N, K), scales(1, 1), "fp8_row"),
      (F8, (64, 100), scales(1, 1), "fp8_128x128"),
      (F8, (N, K), scales(3, 9), "fp8_64x64_float32"),
      (E5, (N, K), scales(N, 1), "fp8_e5m2_row_float32"),
      (INT8, (N, K), scales(N, 18), "int8_1x32_float32"),
      (INT4, (N, 1024), scales(N, 8, dtype=F16), "int4_128"),
      (INT4, (N, 1024), scales(N, 8, dtype=BF16), "int4_128_bf16"),
      (INT4, (N, 128), scales(N, 1, dtype=F16), "int4_128"),
      (INT4, (N, 32), scales(N, 1, dtype=F16), "int4_32"),
      (INT4, (N, K), scales(N, 5, dtype=F16), "int4_128"),
      (F8, (N, K), scales(N, 9), "fp8_1x64_float32"),
      (INT4, (N, 1024), scales(N, 32, dtype=F16), "int4_32"),
      (INT4, (N, 1024), scales(N, 16, dtype=F16), "int4_1x64_float16"),
      (INT4, (N, 1024), scales(N, 1), "int4_row_float32"),
    ):
      with self.subTest(f"{dtype} {shape} {scale.shape} {scale.dtype}"):
        found = assembly.find_scaled_format("f", dtype, shape, scale)
        self.assertEqual(str(found), name)

  def test_other_shapes_and_dtypes_are_an_error(self):
    for dtype, shape, scale in (
      (F8, (N,), scales(1)),
      (F8, (N, K), scales(2)),
      (F8, (N, K), scales(N, 7)),
      (F8, (N, K), scales(2, 18)),
      (F8, (N, K), scales(1).astype(np.float64)),
      (F8, (N, 0), scales(1)),
      (INT4, (N, K), scales(2, 5)),
    ):
      with (
        self.subTest(f"{dtype} {shape} {scale.shape}"),
        self.assertRaisesRegex(TypeError, "f: scales must be floats"),
      ):
        assembly.find_scaled_format("f", dtype, shape, scale)

  def test_traced_arrays_are_converted(self):
    convert = jp.checkpoints.from_compressed_tensors
    for scale in (TENSOR, ROWS, GROUPS, SQUARES):
      traced = jax.jit(convert)(FP8, scale)
      array = convert(FP8, scale)
      self.assertEqual(traced.format, array.format)
      np.testing.assert_array_equal(traced.scale, array.scale)
      self.assertTrue(np.shares_memory(array.values, FP8))
