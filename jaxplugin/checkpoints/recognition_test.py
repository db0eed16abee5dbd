# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Files with quantized tensors are read correctly or refused.

Tables decode the expected numbers in f64.
"""

import json
import warnings

import numpy as np
import pytest

import jaxplugin as jp
from jaxplugin.testing import checkpoint_files as files

ERROR = jp.checkpoints.CheckpointError
F8, E8, BF16, weight = files.F8, files.E8, files.BF16, files.weight
G = 2.0**-12
K = 64
SECOND = np.float32(G)


def draw(low, high, *shape):
  return np.random.default_rng(shape).integers(low, high, shape, np.uint8)


def repeated(scales, block):
  return np.repeat(scales, block, -1)


def turned(x):
  return x.swapaxes(-1, -2)


def named(base, values, **parts):
  """Returns values under a name, and other parts with this prefix."""
  return {base: values, **{f"{base}_{name}": x for name, x in parts.items()}}


def mark(**fields):
  return np.frombuffer(json.dumps(fields).encode(), np.uint8)


def header(layers, **more):
  fields = {"format_version": "1.0", "layers": layers}
  return {"_quantization_metadata": json.dumps(fields), **more}


class Case(files.CheckpointTestCase):
  def assert_read(self, found, name, layout, format, expected):
    entry = found.entries[name]
    self.assertEqual((entry.layout, str(entry.format)), (layout, format))
    self.assertEqual(entry.shape, expected.shape)
    array = found[name]
    self.assertEqual(array.shape, expected.shape)
    np.testing.assert_array_equal(files.numbers_of(array), expected)

  def assert_refused(self, rule, tensors, metadata=None, config=None):
    with (
      self.subTest(rule),
      self.assertRaisesRegex(ERROR, f"x.safetensors: .*{rule}"),
    ):
      self.load(tensors, metadata, config)


def comfyui_nvfp4(n):
  """Returns tensors of "w" with rows padded to 16, and numbers [n, K]."""
  packed, scale = draw(0, 256, n, K // 2), draw(1, 0x7F, n, K // 16).view(F8)
  numbers = files.fp4(packed, high_first=True)
  numbers = numbers * repeated(files.fp8(scale), 16) * G
  padded = np.pad(packed, ((0, -n % 16), (0, 0)))
  scales = {"weight_scale": files.tiled(scale), "weight_scale_2": SECOND}
  return weight(padded, **scales), numbers


def comfyui_mxfp8():
  values, scale = draw(0, 0x7F, 128, 128).view(F8), draw(110, 140, 128, 4)
  numbers = files.fp8(values) * repeated(files.e8m0(scale), 32)
  return weight(values, weight_scale=files.tiled(scale)), numbers


class ComfyuiTest(Case):
  def test_marks(self):
    fields = {"format": "nvfp4"}
    for n in (128, 96):
      tensors, expected = comfyui_nvfp4(n)
      tensors = {f"a.{name}": x for name, x in tensors.items()}
      for what, more, metadata in (
        ("tensor", {"a.w.comfy_quant": mark(**fields, x=1)}, None),
        ("header", {}, header({"a.w": fields})),
        ("word", {}, header({"a.w": "nvfp4"})),
        ("without its start", {}, header({"w": fields})),
        ("both", {"a.w.comfy_quant": mark(**fields)}, header({"a.w": fields})),
      ):
        with self.subTest(what, n=n):
          found = self.quietly({**tensors, **more}, metadata)
          self.assertEqual([*found], ["a.w.weight"])
          self.assert_read(found, "a.w.weight", "comfyui", "nvfp4", expected)
    tensors, _ = comfyui_nvfp4(128)
    longer = {f"a.{name}": x for name, x in tensors.items()}
    with self.assertWarns(jp.checkpoints.LayoutWarning):
      found = self.load({**longer, **tensors}, header({"w": fields}))
    self.assertEqual(found.entries["w.weight"].layout, "comfyui")
    self.assertNotEqual(found.entries["a.w.weight"].layout, "comfyui")
    tensors, expected = comfyui_mxfp8()
    text = mark(format="mxfp8")
    for dtype in (np.uint8, E8):
      tensors["w.comfy_quant"] = text.view(dtype)
      scale = tensors["w.weight_scale"].view(dtype)
      found = self.quietly({**tensors, "w.weight_scale": scale})
      self.assert_read(found, "w.weight", "comfyui", "mxfp8", expected)

  def test_padding_of_rows_is_known_by_the_mark_or_the_bias(self):
    tensors, expected = comfyui_nvfp4(90)
    for what, shape, bias, rows in (
      ("nothing", {}, None, 96),
      ("mark", {"orig_shape": [90, K]}, None, 90),
      ("bias", {}, 90, 90),
      ("bias of another", {}, 70, 96),
    ):
      with self.subTest(what):
        more = {"w.comfy_quant": mark(format="nvfp4", **shape)}
        if bias is not None:
          more["w.bias"] = np.zeros(bias, np.float32)
        found = self.quietly({**tensors, **more})
        want = np.pad(expected, ((0, rows - 90), (0, 0)))
        self.assert_read(found, "w.weight", "comfyui", "nvfp4", want)

  def test_rows_of_a_mark_that_no_padding_gives_are_refused(self):
    # A mark of 128 rows does not fit: 144 rows of scales need one more tile.
    for n, rows in ((96, 0), (96, -16), (144, 128), (96, 112), (96, 50)):
      tensors, _ = comfyui_nvfp4(n)
      tensors["w.comfy_quant"] = mark(format="nvfp4", orig_shape=[rows, K])
      rule = f"'w.weight': its {n} rows must be {rows} rows padded"
      self.assert_refused(rule, tensors)

  def test_marks_that_are_refused_name_the_tensor_and_the_sign(self):
    tensors, _ = comfyui_nvfp4(128)
    for rule, more, layers in (
      ("'w.comfy_quant' says .* rotated", {"convrot": True}, None),
      ("rotated", {"params": {"convrot": True}}, None),
      (
        "'w.comfy_quant' says .* 'int8_tensorwise'",
        {"format": "int8_tensorwise"},
        None,
      ),
      ("says that it is mxfp8, .* nvfp4", {"format": "mxfp8"}, None),
      ("header's .* rotated", None, {"w": {"format": "nvfp4", "convrot": 1}}),
      ("header's .* 'float8_e4m3fn'", None, {"w": "float8_e4m3fn"}),
    ):
      given = dict(tensors)
      if more is not None:
        given["w.comfy_quant"] = mark(**{"format": "nvfp4", **more})
      rule = f"'w.weight'.*{rule}"
      self.assert_refused(rule, given, layers and header(layers))
    for rule, given in (
      ("be JSON", {"w.comfy_quant": np.uint8([123])}),
      ("'w.comfy_quant': it must say the format", {"w.comfy_quant": mark(f=1)}),
      (
        "tiles of 128 rows .* got uint8.128, 32. and",
        {
          "w.comfy_quant": mark(format="nvfp4"),
          "w.weight_scale": tensors["w.weight_scale"][:96],
        },
      ),
    ):
      self.assert_refused(rule, {**tensors, **given})
    lone = {"w.comfy_quant": mark(format="nvfp4")}
    lone["w.weight"] = tensors["w.weight"]
    self.assert_refused("'w.weight_scale', must be there", lone)
    with self.assertRaisesRegex(ERROR, "layers must"):
      self.load(tensors, {"_quantization_metadata": "{}"})

  def test_without_a_mark_the_report_says_so_and_layout_decides(self):
    """ModelOpt's tensors have the same names, dtypes and shapes."""
    tensors, tiles = comfyui_nvfp4(128)
    scale, packed = tensors["w.weight_scale"], tensors["w.weight"]
    linear = files.fp4(packed) * repeated(files.fp8(scale), 16) * G
    modelopt = {"producer": {"name": "modelopt"}, "quant_algo": "NVFP4"}
    ours = header(
      {"w": {"format": "nvfp4"}}, quantization_config=json.dumps(modelopt)
    )
    config = {"quantization_config": {**modelopt, "quant_method": "modelopt"}}
    several = "modelopt-swizzled or comfyui"
    marked = header({"w": "nvfp4"})
    for what, metadata, said, layout, others, read, expected in (
      ("nothing", None, None, None, several, "modelopt", linear),
      ("ModelOpt's header", ours, None, None, "-swizzled,", "modelopt", linear),
      ("config", None, config, None, "", "modelopt", linear),
      ("comfyui", None, None, "comfyui", "", "comfyui", tiles),
      ("over config", None, config, "comfyui", "", "comfyui", tiles),
      ("modelopt", None, None, "modelopt", "", "modelopt", linear),
      ("over the mark", marked, None, "modelopt", "", "modelopt", linear),
    ):
      with self.subTest(what):
        options = {"layout": layout, "config": said}
        if others:
          with self.assertWarnsRegex(
            jp.checkpoints.LayoutWarning,
            f"1 weights, the first 'w.weight'.*{others}",
          ):
            found = self.load(tensors, metadata, **options)
          self.assertRegex(str(found), f"read as {read}, .*{others}")
        else:
          found = self.quietly(tensors, metadata, **options)
          self.assertNotIn("layout=", str(found))
        self.assert_read(found, "w.weight", read, "nvfp4", expected)
    name = "modelopt-swizzled"
    with self.subTest("ModelOpt's nibbles and tiles"):
      swapped = {**tensors, "w.weight": packed << 4 | packed >> 4}
      found = self.quietly(swapped, layout=name)
      self.assert_read(found, "w.weight", name, "nvfp4", tiles)
    with self.subTest("tiles alone"):
      tensors, tiles = comfyui_nvfp4(96)
      with self.assertWarnsRegex(jp.checkpoints.LayoutWarning, "as comfyui"):
        found = self.load(tensors)
      self.assert_read(found, "w.weight", "comfyui", "nvfp4", tiles)
      swapped = tensors["w.weight"] << 4 | tensors["w.weight"] >> 4
      found = self.quietly({**tensors, "w.weight": swapped}, ours)
      self.assert_read(found, "w.weight", name, "nvfp4", tiles)
    with self.subTest("MXFP8"):
      tensors, tiles = comfyui_mxfp8()
      with self.assertWarnsRegex(jp.checkpoints.LayoutWarning, "be comfyui,"):
        found = self.load(tensors)
      self.assertEqual(found.entries["w.weight"].layout, "modelopt")
      found = self.quietly(tensors, layout="comfyui")
      self.assert_read(found, "w.weight", "comfyui", "mxfp8", tiles)
    with self.subTest("without rows"):
      empty = np.zeros((0, 64), F8), np.zeros((0, 2), np.uint8)
      found = self.quietly(weight(empty[0], weight_scale=empty[1]))
      self.assert_read(found, "w.weight", "modelopt", "mxfp8", empty[0])
    with self.assertRaisesRegex(ValueError, "comfyui, .* got 'comfy'"):
      self.load(tensors, layout="comfy")


PACKED, BLOCKS = draw(0, 256, 96, K // 2), draw(1, 0x7F, 96, K // 16).view(F8)
SHARED = draw(110, 140, 96, K // 32)
VALUES = draw(0, 0x7F, 96, K).view(F8)
NVFP4 = files.fp4(PACKED) * repeated(files.fp8(BLOCKS), 16)
MXFP4 = files.fp4(PACKED) * repeated(files.e8m0(SHARED), 32)
MXFP8 = files.fp8(VALUES) * repeated(files.e8m0(SHARED), 32)
# One scale for 32 x 32 values, and NVFP4 in groups of 32.
SQUARES = SHARED[::32].view(E8)
WIDE = np.repeat(repeated(files.e8m0(SQUARES), 32), 32, 0) * files.fp8(VALUES)
HALVES = files.fp4(PACKED) * repeated(files.fp8(BLOCKS[:, ::2]), 32) * G
PARTS = np.float32([G, 3 * G, 2 * G])
WORDS = PACKED.view(np.uint32)
FLOATS = BLOCKS.astype(np.float32)
COMPRESSED = {
  "w.weight_packed": PACKED,
  "w.weight_scale": BLOCKS,
  "w.weight_global_scale": np.float32([1 / G]),
}
EXPERTS = (PACKED.reshape(1, 96, 2, 16), SHARED[None])
MODELOPT = weight(PACKED, weight_scale=BLOCKS, weight_scale_2=SECOND)


def mlx_affine(bits, size):
  """Returns tensors of "w" with codes of some bits, and numbers [96, 128]."""
  codes = draw(0, 2**bits, 96, 128)
  groups = draw(1, 64, 96, 128 // size).astype(np.float16)
  packed = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
  words = packed.view(np.uint32)
  tensors = weight(words, scales=groups, biases=2 * groups)
  return tensors, (codes + 2.0) * repeated(groups, size)


def config_of(**fields):
  return {"quantization_config": fields}


FP8 = {**config_of(quant_method="fp8"), "expert_dtype": "fp4"}
MLX = {"quantization": {"mode": "mxfp4", "group_size": 32, "bits": 4}}

# The file's tensors and config.json; the layout, the format and the numbers.
READ = {
  "ModelOpt": (*(MODELOPT, config_of(quant_method="modelopt")),
    *("modelopt", "nvfp4", NVFP4 * G)),
  "F32 block scales": ({**MODELOPT, "w.weight_scale": FLOATS},
    *(None, "modelopt", "nvfp4", NVFP4 * G)),
  "groups of 32": ({**MODELOPT, "w.weight_scale": BLOCKS[:, ::2]},
    *(None, "modelopt", "nvfp4", HALVES)),
  "q, k and v in one": ({**MODELOPT, "w.weight_scale_2": PARTS},
    *(None, "modelopt", "nvfp4", NVFP4 * np.repeat(PARTS, 32)[:, None])),
  "MXFP4 of ModelOpt": (weight(PACKED, weight_scale=SHARED),
    *(config_of(quant_method="modelopt"), "modelopt", "mxfp4", MXFP4)),
  "MXFP8 without a configuration": (weight(VALUES, weight_scale=SHARED),
    *(None, "modelopt", "mxfp8", MXFP8)),
  "compressed-tensors": (
    COMPRESSED, None, "compressed-tensors", "nvfp4", NVFP4 * G),
  "q, k and v in one, of compressed-tensors": (
    {**COMPRESSED, "w.weight_global_scale": np.float32([1, 2, 4]) / SECOND},
    *(None, "compressed-tensors", "nvfp4"),
    NVFP4 * np.repeat([G, G / 2, G / 4], 32)[:, None]),
  "MXFP4 of compressed-tensors": (weight(PACKED, weight_scale=SHARED),
    config_of(quant_method="compressed-tensors"),
    *("compressed-tensors", "mxfp4", MXFP4)),
  "gpt-oss": ({"w.weight_blocks": EXPERTS[0], "w.weight_scales": EXPERTS[1]},
    *(None, "gpt-oss", "mxfp4", MXFP4[None])),
  "original gpt-oss": (
    {"w.weight.blocks": EXPERTS[0], "w.weight.scales": EXPERTS[1]},
    *(None, "gpt-oss", "mxfp4", MXFP4[None])),
  "DeepSeek-V4": (weight(PACKED.view(np.int8), scale=SHARED.view(E8)),
    *(FP8, "deepseek", "mxfp4", MXFP4)),
  "DeepSeek-V4.1": (
    weight(VALUES, scale=SQUARES), FP8, "deepseek", "mxfp8", WIDE),
  "its scales by another name": (
    weight(VALUES, weight_scale=SQUARES), FP8, "deepseek", "mxfp8", WIDE),
  "MiniMax-M3": (weight(VALUES, weight_scale_inv=SHARED),
    *(config_of(quant_method="mxfp8"), "deepseek", "mxfp8", MXFP8)),
  "MLX mxfp4": (weight(WORDS, scales=SHARED), MLX, "mlx", "mxfp4", MXFP4),
  "MLX nvfp4": (weight(WORDS, scales=BLOCKS.view(np.uint8)),
    *(None, "mlx", "nvfp4", NVFP4)),
  "MLX mxfp8": (weight(VALUES.view(np.uint32), scales=SHARED),
    *(None, "mlx", "mxfp8", MXFP8)),
}  # fmt: skip

# Parts that are missing or do not fit.
REFUSED = {
  "'w.weight_scale', must be there.*'w.weight_scale_2' says .* NVFP4": weight(
    PACKED, weight_scale_2=SECOND),
  "'w.weight_scale', must be there.*'w.weight_global_scale' says": weight(
    PACKED, weight_global_scale=SECOND),
  "'experts.up_weight_scale', must be there": named("experts.up", PACKED[None],
    weight_scale_2=SECOND),
  "'up_scales', must be there": {"up_blocks": EXPERTS[0][0]},
  "w.weight_scale_2 must be .* the 96 rows, .* got float32.5": {**MODELOPT,
    "w.weight_scale_2": np.full(5, SECOND)},
  "w.weight_scale_2 must be .* the 96 rows, .* got int32.1": weight(PACKED,
    weight_scale=files.tiled(BLOCKS), weight_scale_2=np.int32([1])),
  "w.scales', must be there|U32": weight(WORDS, biases=FLOATS),
  "MLX's mxfp4 .* got uint32.96, 8. and uint8.96, 8": weight(WORDS,
    scales=draw(0, 9, 96, 8)),
  "scale 'w.global_scale' of MLX": weight(WORDS, scales=BLOCKS.view(np.uint8),
    global_scale=SECOND),
  "two weights have the name": {**COMPRESSED, "w.weight": SECOND},
  "pre_quant_scale'.*must have k=64 numbers, got shape .96": {**MODELOPT,
    "w.pre_quant_scale": np.zeros(96, np.float32)},
  "packed FP6 .* is not supported, got uint8.96, 48": {
    "w.weight_packed": draw(0, 256, 96, 48), "w.weight_scale": SHARED},
}  # fmt: skip


class NamesTest(Case):
  @pytest.mark.smoke
  def test_weights_that_are_read(self):
    for what, (tensors, config, *wanted) in READ.items():
      with self.subTest(what):
        found = self.quietly(tensors, config=config)
        self.assertEqual([*found], ["w.weight"])
        self.assert_read(found, "w.weight", *wanted)

  def test_torchao(self):
    for is_swizzled in (False, True):
      fields = {
        "_type": "NVFP4Tensor",
        "_data": {"block_size": 16, "is_swizzled_scales": is_swizzled},
      }
      metadata = {
        "0.w.weight": json.dumps(fields),
        "0.norm.weight": json.dumps({"_type": "Tensor"}),
      }
      tensors = {
        "0.w._weight_qdata": PACKED,
        "0.w._weight_scale": files.tiled(BLOCKS) if is_swizzled else BLOCKS,
        "0.w._weight_per_tensor_scale": SECOND,
        "0.norm.weight": SECOND,
      }
      found = self.load(tensors, metadata)
      self.assertCountEqual(found, ["0.w.weight", "0.norm.weight"])
      self.assert_read(found, "0.w.weight", "torchao", "nvfp4", NVFP4 * G)

  def test_affine_weights_of_mlx(self):
    """The settings of a layer replace those of the whole model."""
    model = {"group_size": 32, "bits": 4}
    mxfp4, wide = {**model, "mode": "mxfp4"}, {**model, "group_size": 64}
    for bits, size, config in (
      (4, 32, model),
      (4, 32, {**model, "mode": "affine", "w": True, "v": {"bits": 8}}),
      (4, 32, {"group_size": 32}),
      (4, 64, None),
      (8, 64, None),
      (4, 64, {**mxfp4, "w": {"group_size": 64, "bits": 4}}),
      (8, 64, {**mxfp4, "w": {"group_size": 64, "bits": 8}}),
      (8, 32, {**wide, "w": {"group_size": 32, "bits": 8}}),
      (4, 32, {**wide, "w": {"group_size": 32, "bits": 4}}),
      (4, 128, {**wide, "w": {"group_size": 128, "bits": 4}}),
      (8, 32, {"bits": 8}),
      (8, 128, {**wide, "w": {"bits": 8}}),
    ):
      with self.subTest(bits=bits, size=size, config=config):
        tensors, expected = mlx_affine(bits, size)
        said = config and {"quantization": config}
        found = self.quietly(tensors, config=said)
        self.assertEqual(found.entries["w.weight"].layout, "mlx")
        self.assert_numbers(found["w.weight"], expected)

  def test_configurations_that_do_not_fit_weights_of_mlx_are_refused(self):
    affine, _ = mlx_affine(8, 32)
    nvfp4 = weight(WORDS, scales=BLOCKS.view(np.uint8))
    sizes = {"bits": 8, "group_size": 32}
    for tensors, config, rule in (
      (affine, {**sizes, "bits": 4}, "its 32 words .* 4 groups, got .*: 4,"),
      (affine, {**sizes, "group_size": 64}, "its 32 words .*: 64"),
      (affine, {"group_size": 48}, "its 32 words .* got .*: 48"),
      (affine, {**sizes, "group_size": "x"}, "group_size .* integer, got 'x'"),
      (affine, {**sizes, "group_size": None}, "group_size .* got None"),
      (affine, {**sizes, "w": {**sizes, "bits": []}}, "bits .* got .."),
      (affine, {**sizes, "bits": 0}, "bits .* positive integer, got 0"),
      (affine, {**sizes, "bits": True}, "bits .* positive integer, got True"),
      (affine, {**sizes, "mode": "mxfp8"}, "mode .* 'affine', .* got 'mxfp8'"),
      (affine, {**sizes, "w": False}, "its layer must .* got False"),
      (affine, {**sizes, "w": "x"}, "its layer must .* got 'x'"),
      (nvfp4, MLX["quantization"], "mode .* 'nvfp4', .* got 'mxfp4'"),
      (nvfp4, {"bits": 4, "group_size": 32}, "16} in config.json, got .* 32}"),
    ):
      with self.subTest(rule, config=config):
        rule = f"'w.weight': .*{rule}"
        self.assert_refused(rule, tensors, config={"quantization": config})

  def test_experts_have_global_scales_for_each_or_for_gate_and_up(self):
    base = "mlp.experts.gate_up_proj"
    for parts in (
      np.float32([[G], [2 * G]]),
      np.float32([[G, 2 * G], [G, 3 * G]]),
    ):
      for turn in (lambda x: x, turned):
        tensors = named(
          base,
          turn(np.stack([PACKED, PACKED])),
          weight_scale=turn(np.stack([BLOCKS, BLOCKS])),
          weight_scale_2=parts.squeeze(),
          input_scale=np.float32(0.5),
          bias=SECOND,
        )
        found = self.quietly(tensors)
        names = [base, f"{base}_input_scale", f"{base}_bias"]
        self.assertCountEqual(found, names)
        rows = np.repeat(parts.astype(float), 96 // parts.shape[1], -1)
        want = turn(NVFP4 * rows[..., None])
        self.assertEqual(found.entries[base].shape, want.shape)
        got = np.asarray(found[base].dequantize(np.float32), np.float64)
        # One of the two products of the three f32 factors is rounded.
        np.testing.assert_allclose(got, want, rtol=2.0**-23)

  def test_parts_with_an_underscore_instead_of_a_dot(self):
    """Fused experts have such names."""
    experts = {
      "weight_scale": np.stack([BLOCKS, BLOCKS]),
      "weight_global_scale": np.float32([1, 2]) / SECOND,
    }
    values = np.stack([PACKED, PACKED])
    want = np.stack([NVFP4 * G, NVFP4 * G / 2])
    for name, tensors in {
      "e.w13": named("e.w13", values, **experts),
      "e.w13_weight": {
        "e.w13_weight_packed": values,
        **{f"e.w13_{x}": array for x, array in experts.items()},
      },
    }.items():
      with self.subTest(name):
        scale = np.ones(1, np.float32)
        found = self.quietly({**tensors, "e.w13_input_global_scale": scale})
        self.assertCountEqual(found, [name, "e.w13_input_global_scale"])
        self.assert_read(found, name, "compressed-tensors", "nvfp4", want)
        self.assertEqual(found.activation_scale(name), 1)
    words = PACKED.view(np.int32)  # the low nibble first, plus 8
    codes = np.stack([PACKED & 15, PACKED >> 4], -1).reshape(96, K)
    scale = np.full((96, 1), 0.5, np.float32)
    found = self.quietly(
      {"w13_weight_packed": words, "w13_weight_scale": scale}
    )
    self.assertEqual([*found], ["w13_weight"])
    got = np.asarray(jp.dequantize(found["w13_weight"]))
    np.testing.assert_array_equal(got, (codes.astype(float) - 8) / 2)
    tensors, expected = comfyui_nvfp4(128)
    tensors = {
      x.replace("w.weight", "w_weight").removesuffix("_weight"): y
      for x, y in tensors.items()
    }
    found = self.quietly(tensors, layout="comfyui")
    self.assert_read(found, "w", "comfyui", "nvfp4", expected)

  def test_pre_quant_scale_is_kept_and_spoken_of(self):
    comfyui = {**comfyui_nvfp4(128)[0], "w.comfy_quant": mark(format="nvfp4")}
    awq = np.arange(K, dtype=np.float32)
    for tensors in (MODELOPT, comfyui):
      with self.assertWarnsRegex(
        jp.checkpoints.PreQuantScaleWarning, "1 weights, .*w.pre_quant_scale"
      ):
        found = self.load({**tensors, "w.pre_quant_scale": awq})
      entry = found.entries["w.weight"]
      self.assertEqual(entry.pre_quant_scale, "w.pre_quant_scale")
      np.testing.assert_array_equal(found[entry.pre_quant_scale], awq)
      self.assertIn("1 weights need inputs multiplied", str(found))
      self.assertNotIn("need inputs", str(self.load(tensors)))

  def test_parts_that_are_missing_or_do_not_fit(self):
    for rule, tensors in REFUSED.items():
      self.assert_refused(rule, tensors)
    tensors = weight(PACKED, weight_scale=FLOATS)
    config = config_of(quant_algo="NVFP4")
    rule = "weight_scale_2 must be given"
    self.assert_refused(rule, tensors, config=config)
    found = self.load({**MODELOPT, "w.weight_scale": FLOATS * 1.01})
    with self.assertRaisesRegex(ERROR, "'w.weight'.*representable in E4M3"):
      found["w.weight"]

  def test_torchao_metadata_that_does_not_fit(self):
    tensors = {"0._weight_qdata": PACKED, "0._weight_scale": BLOCKS}
    for rule, fields in (
      ("must be JSON", "{"),
      ("blocks of 16", {"_type": "NVFP4Tensor", "_data": {"block_size": 32}}),
      ("blocks of 32", {"_type": "MXTensor", "_data": []}),
      (
        "true or false",
        {
          "_type": "NVFP4Tensor",
          "_data": {"block_size": 16, "is_swizzled_scales": 1},
        },
      ),
      (
        "'0._weight_qdata'.* Int4Tensor of torchao",
        {"_type": "Int4Tensor", "_data": {"block_size": 128}},
      ),
    ):
      text = fields if isinstance(fields, str) else json.dumps(fields)
      self.assert_refused(rule, tensors, {"0.weight": text})

  def test_fp6_of_its_own_dtype(self):
    fields = {
      "w.weight": files.entry("F6_E2M3", [2, 32], 0, 48),
      "w.weight_scale": files.entry("F8_E8M0", [2, 1], 48, 50),
    }
    path = self.write(files.file_of(fields, bytes(50)))
    with self.assertRaisesRegex(ERROR, "w.weight.*packed FP6"):
      jp.checkpoints.load(path)

  def test_packed_floats_without_a_scale_are_refused(self):
    for kind, size in (("F4", 32), ("F6_E2M3", 48), ("F6_E3M2", 48)):
      fields = {"w.weight": files.entry(kind, [2, 32], 0, size)}
      path = self.write(files.file_of(fields, bytes(size)))
      rule = rf"'w.weight': it is quantized \(it has no scale\): {kind}, "
      with self.assertRaisesRegex(ERROR, rule):
        jp.checkpoints.load(path)


ONE = np.float32(1)
INT32 = np.zeros((8, K), np.int32)
INT8 = np.zeros((8, K), np.int8)
ROW = np.ones((8, 1), BF16)
F8_VALUES = np.ones((8, K), F8)

# Names in public checkpoints of unsupported formats, the values first.
UNSUPPORTED = (
  ("I8.*with F32", ("w.weight", INT8), ("w.scale", np.ones(8, np.float32))),
  ("GPTQ or AWQ", ("w.qweight", INT8), ("w.qzeros", INT32)),
  ("Nunchaku", ("w.qweight", INT8), ("w.wscales", ROW)),
  ("affine mode", ("w.weight", INT32.astype(np.uint32)), ("w.scales", ROW),
    ("w.biases", ROW)),
  (
    "U8.*with F32",  # ModelOpt's INT4 AWQ
    ("w.weight", np.zeros((4, K), np.uint8)),
    ("w.weight_scale", np.ones((8, 1), np.float32)),
  ),
  # Names without a module, and of fused experts.
  ("GPTQ or AWQ", ("w13_qweight", INT32), ("w13_scales", ROW)),
  ("GPTQ or AWQ", ("qweight", INT32), ("scales", ROW)),
  ("U32.*with BF16", ("weight", INT32.astype(np.uint32)), ("scales", ROW)),
  ("INT8", ("weight", INT8), ("SCB", np.ones(8, np.float32))),
  ("HQQ", ("w.W_q", np.zeros((8, K), np.uint8)), ("w.scale", ROW)),
  ("AQLM", ("w.codes", np.zeros((8, 8, 1), np.int8)), ("w.codebooks", ROW)),
  ("EXL3", ("w.trellis", INT32.astype(np.int16)), ("w.suh", ROW)),
  ("Marlin", ("w.B", INT32), ("w.s", ROW)),
  ("quanto", ("w.weight._data", INT8), ("w.weight._scale", ROW)),
)  # fmt: skip


class UnsupportedTest(Case):
  def test_quantized_tensors_that_are_not_read_are_named_with_their_signs(self):
    for family, values, *beside in UNSUPPORTED:
      tensors = {"norm.weight": ROW, **dict([values, *beside])}
      sign = beside[-1][0] if len(beside) == 1 else ""
      rule = f"{values[0]!r}: it is quantized .*{sign}.*{family}"
      self.assert_refused(rule, tensors)
      found = self.load(tensors, strict=False)
      self.assertNotIn(values[0], found)
      self.assertIn("norm.weight", found)
      self.assertEqual([*found.misfits], [values[0]])

  def test_configuration_is_a_sign(self):
    rule = "'w.weight': .*config.json says quant_method aqlm, and it has no sc"
    config = config_of(quant_method="aqlm")
    self.assert_refused(rule, {"w.weight": F8_VALUES}, config=config)

  def test_missing_scales_have_the_name_that_the_layout_uses(self):
    for method, name in (
      ("fp8", "weight_scale_inv"),
      ("modelopt", "weight_scale"),
      ("compressed-tensors", "weight_scale"),
    ):
      rule = f"'w.weight': its scales, 'w.{name}', must be there too"
      config = config_of(quant_method=method)
      self.assert_refused(rule, {"w.weight": F8_VALUES}, config=config)
    for layout in jp.checkpoints.OPEN_LAYOUTS:
      path = self.file({"w.weight": np.zeros((4, 4), np.uint8), "v": ROW})
      with self.assertRaisesRegex(ERROR, "its scales, 'w.weight_scale', must"):
        jp.checkpoints.load(path, layout=layout)

  def test_tensors_without_a_sign_pass_through(self):
    tensors = {
      "w.weight": F8_VALUES,
      "x.weight": np.zeros((4, 4), np.uint8),
      "attention.relative_position_index": np.zeros((4, 4), np.int32),
      "attention.logit_scale": ONE,
      "v.weight": ROW,
      "v.weight_scale": ONE,
      "gaussians.scales": np.ones((9, 3), np.float32),
      "v.q_scales": ROW,
      "mask": np.zeros((4, 4), np.uint8),
      "tid2eid": INT32,
      "codes": INT32,
      "scale": ONE,
    }
    found = self.quietly(tensors)
    self.assertCountEqual(found, tensors)
    self.assertEqual(found["w.weight"].tolist(), F8_VALUES.tolist())


class ActivationScaleTest(Case):
  def test_of_each_layout(self):
    comfyui = {**comfyui_nvfp4(128)[0], "w.comfy_quant": mark(format="nvfp4")}
    for given, leaf, scale, want in (
      (MODELOPT, "input_scale", np.float32(0.25), 0.25),
      (COMPRESSED, "input_global_scale", np.float32([64]), 1 / 64),
      (comfyui, "input_scale", np.float32(0.5), 0.5),
    ):
      with self.subTest(leaf, want=want):
        name = f"w.{leaf}"
        found = self.quietly({**given, name: scale})
        self.assertEqual(found[name], scale)
        self.assertEqual(found.entries["w.weight"].activation_scale, name)
        self.assertEqual(float(found.activation_scale("w.weight")), want)
        self.assertIsNone(self.quietly(given).activation_scale("w.weight"))
        with self.assertRaises(KeyError):
          found.activation_scale("no")

  def test_scale_that_is_left_out_is_none(self):
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
        found = self.load({**MODELOPT, **given}, **options)
        self.assertNotIn("w.input_scale", found)
        self.assertIsNone(found.activation_scale("w.weight"))
        for name in ("w.input_scale", "no"):
          with self.assertRaisesRegex(KeyError, f"it has no '{name}'"):
            found.activation_scale(name)
