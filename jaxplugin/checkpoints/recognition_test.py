# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Files with quantized tensors are read correctly or refused.

Tables here decode the expected numbers in f64.
"""

import json
import pathlib
import tempfile
import warnings

import ml_dtypes
import numpy as np
import safetensors.numpy
from absl.testing import absltest

import jaxplugin as jp

F8 = np.dtype(ml_dtypes.float8_e4m3fn)
E8 = np.dtype(ml_dtypes.float8_e8m0fnu)
BF16 = np.dtype(ml_dtypes.bfloat16)
G = 2.0**-12
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])
K = 64
SECOND = np.float32(G)


def draw(low, high, *shape):
  return np.random.default_rng(shape).integers(low, high, shape, np.uint8)


def fp4(packed, high_first=False):
  pairs = [packed & 15, packed >> 4]
  pairs = np.stack(pairs[::-1] if high_first else pairs, -1)
  return E2M1[pairs.reshape(*packed.shape[:-1], -1)]


def repeated(scales, block):
  return np.repeat(scales, block, -1)


def e8m0(codes):
  return 2.0 ** (codes.astype(np.float64) - 127)


def tiled(scale):
  """Returns cuBLAS's tiles of 128 rows and 4 columns, padded with zeros."""
  rows, columns = (
    -(-x // y) for x, y in zip(scale.shape, (128, 4), strict=True)
  )
  flat = np.zeros(rows * columns * 512, np.uint8)
  for r, c in np.ndindex(*scale.shape):
    tile = r // 128 * columns + c // 4
    flat[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scale.view(
      np.uint8
    )[r, c]
  return flat.view(scale.dtype).reshape(128 * rows, 4 * columns)


def numbers_of(array):
  """Returns the numbers of a `ScaledArray` in f64."""
  codes = np.asarray(array.values).view(np.uint8)
  values = (
    fp4(codes) if array.format.is_fp4 else codes.view(F8).astype(np.float64)
  )
  n, k = values.shape[-2:]
  scale = np.asarray(array.scale)
  if array.scale_layout != "linear":
    columns = scale.shape[-1] // 4
    r, c = np.indices((n, k // array.format.block_size))
    at = (r // 128 * columns + c // 4) * 512
    at += r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    scale = scale.reshape(-1)[at]
  scales = np.asarray(scale.astype(np.float64))
  numbers = values * repeated(scales, array.format.block_size)
  if array.global_scale is not None:
    numbers = numbers * np.asarray(array.global_scale, np.float64)
  return numbers


def mark(**told):
  return np.frombuffer(json.dumps(told).encode(), np.uint8)


def header(layers, **more):
  told = {"format_version": "1.0", "layers": layers}
  return {"_quantization_metadata": json.dumps(told), **more}


class Case(absltest.TestCase):
  def load(self, tensors, metadata=None, config=None, **options):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    given = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    for name, x in tensors.items():  # ascontiguousarray gives scalars rank 1
      given[name] = given[name].reshape(np.shape(x))
    data = safetensors.numpy.save(given, metadata)
    (folder / "x.safetensors").write_bytes(data)
    if config is not None:
      (folder / "config.json").write_text(json.dumps(config))
    return jp.checkpoints.load(folder, **options)

  def quietly(self, *args, **options):
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      return self.load(*args, **options)

  def assert_read(self, found, name, layout, format, expected):
    entry = found.entries[name]
    self.assertEqual((entry.layout, str(entry.format)), (layout, format))
    self.assertEqual(entry.shape, expected.shape)
    array = found[name]
    self.assertEqual(array.shape, expected.shape)
    np.testing.assert_array_equal(numbers_of(array), expected)


def comfyui_nvfp4(n):
  """Returns tensors of "a.q" with rows padded to 16, and numbers [n, K]."""
  packed, scale = draw(0, 256, n, K // 2), draw(1, 0x7F, n, K // 16).view(F8)
  expected = fp4(packed, high_first=True)
  expected = expected * repeated(scale.astype(float), 16) * G
  tensors = {
    "a.q.weight": np.pad(packed, ((0, -n % 16), (0, 0))),
    "a.q.weight_scale": tiled(scale),
    "a.q.weight_scale_2": SECOND,
  }
  return tensors, expected


def comfyui_mxfp8():
  values, scale = draw(0, 0x7F, 128, 128).view(F8), draw(110, 140, 128, 4)
  expected = values.astype(float) * repeated(e8m0(scale), 32)
  return {"a.q.weight": values, "a.q.weight_scale": tiled(scale)}, expected


class ComfyuiTest(Case):
  def test_marks(self):
    for n in (128, 96):
      tensors, expected = comfyui_nvfp4(n)
      told = {"format": "nvfp4"}
      for what, more, metadata in (
        ("tensor", {"a.q.comfy_quant": mark(**told, x=1)}, None),
        ("header", {}, header({"a.q": told})),
        ("word", {}, header({"a.q": "nvfp4"})),
        ("without its start", {}, header({"q": told})),
        ("both", {"a.q.comfy_quant": mark(**told)}, header({"a.q": told})),
      ):
        with self.subTest(what, n=n):
          found = self.quietly({**tensors, **more}, metadata)
          self.assertEqual([*found], ["a.q.weight"])
          self.assert_read(found, "a.q.weight", "comfyui", "nvfp4", expected)
    tensors, _ = comfyui_nvfp4(128)
    shorter = {name.removeprefix("a."): x for name, x in tensors.items()}
    found = self.load({**tensors, **shorter}, header({"q": told}))
    self.assertEqual(found.entries["q.weight"].layout, "comfyui")
    self.assertNotEqual(found.entries["a.q.weight"].layout, "comfyui")
    tensors, expected = comfyui_mxfp8()
    tensors["a.q.comfy_quant"] = mark(format="mxfp8")
    for dtype in (np.uint8, E8):
      scale = tensors["a.q.weight_scale"].view(dtype)
      found = self.quietly({**tensors, "a.q.weight_scale": scale})
      self.assert_read(found, "a.q.weight", "comfyui", "mxfp8", expected)

  def test_padding_of_rows_is_known_by_the_mark_or_the_bias(self):
    tensors, expected = comfyui_nvfp4(90)
    told = {"format": "nvfp4"}
    for what, more, rows in (
      ("nothing", {"a.q.comfy_quant": mark(**told)}, 96),
      ("mark", {"a.q.comfy_quant": mark(**told, orig_shape=[90, K])}, 90),
      (
        "bias",
        {
          "a.q.comfy_quant": mark(**told),
          "a.q.bias": np.zeros(90, np.float32),
        },
        90,
      ),
      (
        "bias of another",
        {
          "a.q.comfy_quant": mark(**told),
          "a.q.bias": np.zeros(70, np.float32),
        },
        96,
      ),
    ):
      with self.subTest(what):
        found = self.quietly({**tensors, **more})
        want = np.pad(expected, ((0, rows - 90), (0, 0)))
        self.assert_read(found, "a.q.weight", "comfyui", "nvfp4", want)
    tensors["a.q.comfy_quant"] = mark(**told, orig_shape=[50, K])
    with self.assertRaisesRegex(jp.checkpoints.CheckpointError, "50 rows"):
      self.load(tensors)

  def test_rows_of_a_mark_that_no_padding_gives_are_refused(self):
    # A mark of 128 rows does not fit: 144 rows of scales need one more tile.
    for n, rows in ((96, 0), (96, -16), (144, 128), (96, 112)):
      tensors, _ = comfyui_nvfp4(n)
      tensors["a.q.comfy_quant"] = mark(format="nvfp4", orig_shape=[rows, K])
      tensors["norm.weight"] = np.ones(4, np.float32)
      with self.subTest(n=n, rows=rows):
        rule = f"'a.q.weight': its {n} rows must be {rows} rows padded"
        with self.assertRaisesRegex(jp.checkpoints.CheckpointError, rule):
          self.load(tensors)
        found = self.load(tensors, strict=False)
        self.assertEqual([*found.misfits], ["a.q.weight"])
        self.assertIn("norm.weight", found)

  def test_marks_that_are_refused_name_the_tensor_and_the_sign(self):
    tensors, _ = comfyui_nvfp4(128)
    scale = tensors["a.q.weight_scale"]
    for rule, more, metadata in (
      ("'a.q.comfy_quant' says .* rotated", {"convrot": True}, None),
      ("rotated", {"params": {"convrot": True}}, None),
      (
        "'a.q.comfy_quant' says .* 'int8_tensorwise'",
        {"format": "int8_tensorwise"},
        None,
      ),
      ("says that it is mxfp8, .* nvfp4", {"format": "mxfp8"}, None),
      ("header's .* rotated", None, {"a.q": {"format": "nvfp4", "convrot": 1}}),
      ("header's .* 'float8_e4m3fn'", None, {"a.q": "float8_e4m3fn"}),
    ):
      with self.subTest(rule):
        told = {"format": "nvfp4", **(more or {})}
        given = dict(tensors)
        if more is not None:
          given["a.q.comfy_quant"] = mark(**told)
        with self.assertRaisesRegex(
          jp.checkpoints.CheckpointError, f"x.safetensors.*'a.q.weight'.*{rule}"
        ):
          self.load(given, metadata and header(metadata))
    with self.assertRaisesRegex(jp.checkpoints.CheckpointError, "be JSON"):
      self.load({**tensors, "a.q.comfy_quant": np.uint8([123])})
    with self.assertRaisesRegex(
      jp.checkpoints.CheckpointError,
      "'a.q.comfy_quant': it must say the format",
    ):
      self.load({**tensors, "a.q.comfy_quant": mark(format=1)})
    with self.assertRaisesRegex(jp.checkpoints.CheckpointError, "layers must"):
      self.load(tensors, {"_quantization_metadata": "{}"})
    for rule, wrong in (
      ("tiles of 128 rows .* got uint8.128, 32. and", scale[:96]),
      ("'a.q.weight_scale', must be there", None),
    ):
      given = {**tensors, "a.q.comfy_quant": mark(format="nvfp4")}
      given["a.q.weight_scale"] = wrong
      if wrong is None:
        del given["a.q.weight_scale"]
      with self.assertRaisesRegex(jp.checkpoints.CheckpointError, rule):
        self.load(given)

  def test_pre_quant_scale_is_spoken_of(self):
    tensors, _ = comfyui_nvfp4(128)
    tensors["a.q.comfy_quant"] = mark(format="nvfp4")
    tensors["a.q.pre_quant_scale"] = np.ones(K, np.float32)
    with self.assertWarns(jp.checkpoints.PreQuantScaleWarning):
      found = self.load(tensors)
    entry = found.entries["a.q.weight"]
    self.assertEqual(entry.pre_quant_scale, "a.q.pre_quant_scale")

  def test_without_a_mark_the_report_says_so_and_layout_decides(self):
    """ModelOpt's tensors have the same names, dtypes and shapes."""
    tensors, tiles = comfyui_nvfp4(128)
    scale = tensors["a.q.weight_scale"]
    packed = tensors["a.q.weight"]
    linear = fp4(packed) * repeated(scale.astype(float), 16) * G
    swapped = packed << 4 | packed >> 4
    modelopt = {"producer": {"name": "modelopt"}, "quant_algo": "NVFP4"}
    ours = header(
      {"a.q": {"format": "nvfp4"}}, quantization_config=json.dumps(modelopt)
    )
    config = {"quantization_config": {**modelopt, "quant_method": "modelopt"}}
    several = "modelopt-swizzled or comfyui"
    for what, metadata, said, layout, others, read, expected in (
      ("nothing", None, None, None, several, "modelopt", linear),
      ("ModelOpt's header", ours, None, None, "-swizzled,", "modelopt", linear),
      ("config", None, config, None, "", "modelopt", linear),
      ("comfyui", None, None, "comfyui", "", "comfyui", tiles),
      ("over config", None, config, "comfyui", "", "comfyui", tiles),
      ("modelopt", None, None, "modelopt", "", "modelopt", linear),
      ("over the mark", header({"q": "nvfp4"}), None, "modelopt", "")
      + ("modelopt", linear),
    ):
      with self.subTest(what):
        options = {"layout": layout, "config": said}
        if others:
          with self.assertWarnsRegex(
            jp.checkpoints.LayoutWarning,
            f"1 weights, the first 'a.q.weight'.*{others}",
          ):
            found = self.load(tensors, metadata, **options)
          self.assertRegex(str(found), f"read as {read}, .*{others}")
        else:
          found = self.quietly(tensors, metadata, **options)
          self.assertNotIn("layout=", str(found))
        self.assert_read(found, "a.q.weight", read, "nvfp4", expected)
    with self.subTest("ModelOpt's nibbles and tiles"):
      found = self.quietly(
        {**tensors, "a.q.weight": swapped}, layout="modelopt-swizzled"
      )
      name = "modelopt-swizzled"
      self.assert_read(found, "a.q.weight", name, "nvfp4", tiles)
    with self.subTest("tiles alone"):
      tensors, tiles = comfyui_nvfp4(96)
      with self.assertWarnsRegex(jp.checkpoints.LayoutWarning, "as comfyui"):
        found = self.load(tensors)
      self.assert_read(found, "a.q.weight", "comfyui", "nvfp4", tiles)
      swapped = tensors["a.q.weight"] << 4 | tensors["a.q.weight"] >> 4
      found = self.quietly({**tensors, "a.q.weight": swapped}, ours)
      self.assert_read(found, "a.q.weight", name, "nvfp4", tiles)
    with self.subTest("MXFP8"):
      tensors, tiles = comfyui_mxfp8()
      with self.assertWarnsRegex(jp.checkpoints.LayoutWarning, "be comfyui,"):
        found = self.load(tensors)
      self.assertEqual(found.entries["a.q.weight"].layout, "modelopt")
      found = self.quietly(tensors, layout="comfyui")
      self.assert_read(found, "a.q.weight", "comfyui", "mxfp8", tiles)
    with self.assertRaisesRegex(ValueError, "comfyui, .* got 'comfy'"):
      self.load(tensors, layout="comfy")


PACKED, BLOCKS = draw(0, 256, 96, K // 2), draw(1, 0x7F, 96, K // 16).view(F8)
SHARED = draw(110, 140, 96, K // 32)
VALUES = draw(0, 0x7F, 96, K).view(F8)
NVFP4 = fp4(PACKED) * repeated(BLOCKS.astype(float), 16)
MXFP4 = fp4(PACKED) * repeated(e8m0(SHARED), 32)
MXFP8 = VALUES.astype(float) * repeated(e8m0(SHARED), 32)
PARTS = np.float32([G, 3 * G, 2 * G])
GROUPS = draw(1, 64, 96, K // 32).astype(np.float16)
NIBBLES = np.stack([PACKED & 15, PACKED >> 4], -1).reshape(96, K)
AFFINE = (NIBBLES + 2.0) * repeated(GROUPS.astype(float), 32)


class NamesTest(Case):
  def test_weights_that_are_read(self):
    of_32 = SHARED[::32]
    wide = VALUES.astype(float) * np.repeat(repeated(e8m0(of_32), 32), 32, 0)
    words = PACKED.view(np.uint32)
    halves = fp4(PACKED) * repeated(BLOCKS[:, ::2].astype(float), 32) * G
    fp8 = {
      "quantization_config": {"quant_method": "fp8"},
      "expert_dtype": "fp4",
    }
    mlx = {"quantization": {"mode": "mxfp4", "group_size": 32, "bits": 4}}
    second = {"w.weight_scale_2": SECOND}
    packed = {"w.weight": PACKED, "w.weight_scale": BLOCKS}
    for what, tensors, config, layout, format, expected in (
      (
        "DeepSeek-V4",
        {"w.weight": PACKED.view(np.int8), "w.scale": SHARED.view(E8)},
        fp8,
        *("deepseek", "mxfp4", MXFP4),
      ),
      (
        "DeepSeek-V4.1",
        {"w.weight": VALUES, "w.scale": of_32.view(E8)},
        fp8,
        *("deepseek", "mxfp8", wide),
      ),
      (
        "its scales by another name",
        {"w.weight": VALUES, "w.weight_scale": of_32.view(E8)},
        fp8,
        *("deepseek", "mxfp8", wide),
      ),
      (
        "MiniMax-M3",
        {"w.weight": VALUES, "w.weight_scale_inv": SHARED},
        {"quantization_config": {"quant_method": "mxfp8"}},
        *("deepseek", "mxfp8", MXFP8),
      ),
      (
        "MLX mxfp4",
        {"w.weight": words, "w.scales": SHARED},
        mlx,
        *("mlx", "mxfp4", MXFP4),
      ),
      (
        "MLX nvfp4",
        {"w.weight": words, "w.scales": BLOCKS.view(np.uint8)},
        None,
        *("mlx", "nvfp4", NVFP4),
      ),
      (
        "MLX mxfp8",
        {"w.weight": VALUES.view(np.uint32), "w.scales": SHARED},
        None,
        *("mlx", "mxfp8", MXFP8),
      ),
      (
        "F32 block scales",
        {**packed, "w.weight_scale": BLOCKS.astype(np.float32), **second},
        None,
        *("modelopt", "nvfp4", NVFP4 * G),
      ),
      (
        "groups of 32",
        {**packed, "w.weight_scale": BLOCKS[:, ::2], **second},
        None,
        *("modelopt", "nvfp4", halves),
      ),
      (
        "q, k and v in one",
        {**packed, "w.weight_scale_2": PARTS},
        None,
        *("modelopt", "nvfp4", NVFP4 * np.repeat(PARTS, 32)[:, None]),
      ),
      (
        "q, k and v in one, of compressed-tensors",
        {
          "w.weight_packed": PACKED,
          "w.weight_scale": BLOCKS,
          "w.weight_global_scale": np.float32([1 / G, 2 / G, 4 / G]),
        },
        None,
        *("compressed-tensors", "nvfp4"),
        NVFP4 * np.repeat([G, G / 2, G / 4], 32)[:, None],
      ),
    ):
      with self.subTest(what):
        found = self.quietly(tensors, config=config)
        self.assertEqual([*found], ["w.weight"])
        self.assert_read(found, "w.weight", layout, format, expected)

  def test_affine_weights_of_mlx(self):
    words = PACKED.view(np.uint32)
    tensors = {"w.weight": words, "w.scales": GROUPS, "w.biases": 2 * GROUPS}
    # The shapes are those of 4 bits, whatever other weights have.
    config = {"quantization": {"group_size": 32, "bits": 8}}
    found = self.quietly(tensors, config=config)
    self.assertEqual(found.entries["w.weight"].layout, "mlx")
    self.assertEqual(found.entries["w.weight"].format, jp.UINT4_32_MIN)
    got = np.asarray(jp.dequantize(found["w.weight"]))
    np.testing.assert_array_equal(got, AFFINE)

  def test_experts_with_a_global_scale_for_gate_and_up(self):
    parts = np.float32([[G, 2 * G], [G, 3 * G]])
    base = "mlp.experts.gate_up_proj"
    for is_turned in (False, True):
      turned = (lambda x: x.swapaxes(-1, -2)) if is_turned else (lambda x: x)
      found = self.quietly(
        {
          base: turned(np.stack([PACKED, PACKED])),
          f"{base}_weight_scale": turned(np.stack([BLOCKS, BLOCKS])),
          f"{base}_weight_scale_2": parts,
        }
      )
      array = found[base]
      got = np.asarray(array.dequantize(np.float32), np.float64)
      want = NVFP4 * np.repeat(parts.astype(float), 48, -1)[..., None]
      # One of the two products of the three f32 factors is rounded.
      np.testing.assert_allclose(got, turned(want), rtol=2.0**-23)

  def test_parts_that_are_missing_or_do_not_fit(self):
    packed = {"w.weight": PACKED, "w.weight_scale": BLOCKS}
    nvfp4 = {"quantization_config": {"quant_algo": "NVFP4"}}
    base = "experts.up"
    floats = BLOCKS.astype(np.float32)
    for rule, tensors, config in (
      (
        "'w.weight_scale', must be there.*'w.weight_scale_2' says .* NVFP4",
        {"w.weight": PACKED, "w.weight_scale_2": SECOND},
        None,
      ),
      (
        "'w.weight_scale', must be there.*'w.weight_global_scale' says",
        {"w.weight": PACKED, "w.weight_global_scale": SECOND},
        None,
      ),
      (
        "'experts.up_weight_scale', must be there",
        {base: PACKED[None], f"{base}_weight_scale_2": SECOND},
        None,
      ),
      (
        "'up_scales', must be there",
        {"up_blocks": PACKED.reshape(96, 2, 16)},
        None,
      ),
      (
        "w.weight_scale_2 must be .* the 96 rows, .* got float32.5",
        {**packed, "w.weight_scale_2": np.full(5, G, np.float32)},
        None,
      ),
      (
        "weight_scale_2 must be given",
        {**packed, "w.weight_scale": floats},
        nvfp4,
      ),
      (
        "w.scales', must be there|U32",
        {"w.weight": PACKED.view(np.uint32), "w.biases": floats},
        None,
      ),
      (
        "MLX's mxfp4 .* got uint32.96, 8. and uint8.96, 8",
        {"w.weight": PACKED.view(np.uint32), "w.scales": draw(0, 9, 96, 8)},
        None,
      ),
      (
        "scale 'w.global_scale' of MLX",
        {
          "w.weight": PACKED.view(np.uint32),
          "w.scales": BLOCKS.view(np.uint8),
          "w.global_scale": SECOND,
        },
        None,
      ),
    ):
      with (
        self.subTest(rule),
        self.assertRaisesRegex(
          jp.checkpoints.CheckpointError, f"x.safetensors: '.*{rule}"
        ),
      ):
        self.load(tensors, config=config)
    found = self.load(
      {**packed, "w.weight_scale": floats * 1.01, "w.weight_scale_2": SECOND}
    )
    with self.assertRaisesRegex(
      jp.checkpoints.CheckpointError, "'w.weight'.*representable in E4M3"
    ):
      found["w.weight"]


ONE = np.float32(1)
INT32 = np.zeros((8, K), np.int32)
INT8 = np.zeros((8, K), np.int8)
ROW = np.ones((8, 1), BF16)
F8_VALUES = np.ones((8, K), F8)

# Names in public checkpoints of unsupported formats, the values first.
UNSUPPORTED = (
  ("FP8.*with F32", ("w.weight", F8_VALUES), ("w.input_scale", ONE)),
  ("I8.*with F32", ("w.weight", INT8), ("w.scale", np.ones(8, np.float32))),
  ("INT8 of bitsandbytes", ("w.weight", INT8), ("w.SCB", ONE)),
  (
    "4 bits of bitsandbytes",
    ("w.weight", np.zeros((256, 1), np.uint8)),
    ("w.weight.absmax", ONE),
    ("w.weight.quant_map", ONE),
    ("w.weight.quant_state.bitsandbytes__nf4", np.zeros(9, np.uint8)),
  ),
  ("GPTQ or AWQ", ("w.qweight", INT32), ("w.qzeros", INT32)),
  ("Nunchaku", ("w.qweight", INT8), ("w.wscales", ROW)),
  (
    "affine mode",
    ("w.weight", INT32.astype(np.uint32)),
    ("w.scales", ROW),
    ("w.biases", ROW),
  ),
  (
    "U8.*with F32",  # ModelOpt's INT4 AWQ
    ("w.weight", np.zeros((4, K), np.uint8)),
    ("w.weight_scale", np.ones((8, 1), np.float32)),
  ),
  ("HQQ", ("w.W_q", np.zeros((8, K), np.uint8)), ("w.scale", ROW)),
  ("AQLM", ("w.codes", np.zeros((8, 8, 1), np.int8)), ("w.codebooks", ROW)),
  ("EXL3", ("w.trellis", INT32.astype(np.int16)), ("w.suh", ROW)),
)


class UnsupportedTest(Case):
  def test_quantized_tensors_that_are_not_read_are_named_with_their_signs(self):
    for family, values, *beside in UNSUPPORTED:
      with self.subTest(family, name=values[0]):
        tensors = {"norm.weight": ROW, **dict([values, *beside])}
        sign = beside[-1][0] if len(beside) == 1 else ""
        with self.assertRaisesRegex(
          jp.checkpoints.CheckpointError,
          f"x.safetensors: {values[0]!r}: it is quantized .*{sign}.*{family}",
        ):
          self.load(tensors)
        found = self.load(tensors, strict=False)
        self.assertNotIn(values[0], found)
        self.assertIn("norm.weight", found)
        self.assertEqual([*found.misfits], [values[0]])

  def test_configuration_is_a_sign(self):
    told = {"quantization_config": {"quant_method": "fp8"}}
    with self.assertRaisesRegex(
      jp.checkpoints.CheckpointError,
      "'w.weight': .*config.json says quant_method fp8, and it has no scale",
    ):
      self.load({"w.weight": F8_VALUES}, config=told)

  def test_types_of_torchao_that_are_not_read(self):
    told = {"_type": "Int4Tensor", "_data": {"block_size": 128}}
    tensors = {"w._weight_qdata": INT8, "w._weight_scale": ROW}
    with self.assertRaisesRegex(
      jp.checkpoints.CheckpointError,
      "'w._weight_qdata'.* Int4Tensor of torchao",
    ):
      self.load(tensors, {"w.weight": json.dumps(told)})

  def test_tensors_without_a_sign_pass_through(self):
    tensors = {
      "w.weight": F8_VALUES,
      "x.weight": np.zeros((4, 4), np.uint8),
      "attention.relative_position_index": np.zeros((4, 4), np.int32),
      "attention.logit_scale": ONE,
      "v.weight": ROW,
      "v.weight_scale": ONE,
      "mask": np.zeros((4, 4), np.uint8),
      "tid2eid": INT32,
    }
    found = self.quietly(tensors)
    self.assertCountEqual(found, tensors)
    self.assertEqual(found["w.weight"].tolist(), F8_VALUES.tolist())


class ActivationScaleTest(Case):
  def test_of_each_layout(self):
    packed = {"w.weight": PACKED, "w.weight_scale": BLOCKS}
    tensors, _ = comfyui_nvfp4(128)
    tensors["a.q.comfy_quant"] = mark(format="nvfp4")
    compressed = {
      "w.weight_packed": PACKED,
      "w.weight_scale": BLOCKS,
      "w.weight_global_scale": np.float32([1 / G]),
    }
    for what, given, name, weight, scale, want in (
      (
        *("modelopt", {**packed, "w.weight_scale_2": SECOND}),
        *("w.input_scale", "w.weight", np.float32(0.25), 0.25),
      ),
      (
        *("compressed-tensors", compressed, "w.input_global_scale"),
        *("w.weight", np.float32([64]), 1 / 64),
      ),
      (
        *("comfyui", tensors, "a.q.input_scale", "a.q.weight"),
        *(np.float32(0.5), 0.5),
      ),
    ):
      with self.subTest(what):
        found = self.quietly({**given, name: scale})
        self.assertIn(name, found)
        self.assertEqual(found.entries[weight].activation_scale, name)
        self.assertEqual(float(found.activation_scale(weight)), want)
        self.assertIsNone(self.quietly(given).activation_scale(weight))
        with self.assertRaises(KeyError):
          found.activation_scale("no")

  def test_scale_that_is_left_out_is_none(self):
    packed = {
      "w.weight": PACKED,
      "w.weight_scale": BLOCKS,
      "w.weight_scale_2": SECOND,
    }
    # Its name marks it as quantized in an unsupported format.
    refused = {
      "w.input_scale": np.ones(2, F8),
      "w.input_scale_absmax": np.ones(2, np.float32),
    }
    for given, options in (
      ({"w.input_scale": np.float32(0.25)}, {"skip": "*.input_scale"}),
      (refused, {"strict": False}),
    ):
      with self.subTest(options=options), warnings.catch_warnings():
        warnings.simplefilter("ignore", jp.checkpoints.LayoutWarning)
        found = self.load({**packed, **given}, **options)
        self.assertNotIn("w.input_scale", found)
        self.assertIsNone(found.activation_scale("w.weight"))
        for name in ("w.input_scale", "no"):
          with self.assertRaisesRegex(KeyError, f"it has no '{name}'"):
            found.activation_scale(name)


if __name__ == "__main__":
  absltest.main()
