# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`check="numbers"` reports NaNs, infinities and unusable global scales."""

import json
import tracemalloc
import warnings

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxplugin as jp
from jaxplugin.checkpoints import numbers
from jaxplugin.testing import checkpoint_files as files
from jaxplugin.testing import command_lines

ERROR = jp.checkpoints.CheckpointError
WARNING = jp.checkpoints.NumbersWarning
NVFP4, ZEROS = np.full((4, 32), 0x22, np.uint8), np.zeros((4, 32), np.uint8)
G = np.float32(2.0**-12)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
NAN = np.nan
# The array needs 16 MB by its header; the check uses much less memory.
BIG, FEW_BYTES = (1024, 8192), 1 << 21


def e4m3(*nans):
  """Returns block scales of 1, with NaN (0x7F or 0xFF) at some positions."""
  scale = np.full((4, 4), 0x38, np.uint8)
  for i, place in enumerate(nans):
    scale[place] = 0xFF if i else 0x7F
  return scale.view(ml_dtypes.float8_e4m3fn)


def e8m0(*nans):
  scale = np.full((4, 2), 127, np.uint8)
  for place in nans:
    scale[place] = 255
  return scale


def modelopt(values=NVFP4, scale=None, scale_2=G, base="a"):
  return {
    f"{base}.weight": values,
    f"{base}.weight_scale": e4m3() if scale is None else scale,
    f"{base}.weight_scale_2": np.float32(scale_2),
  }


def compressed(values=NVFP4, scale=None, global_scale=1 / G):
  return {
    "a.weight_packed": values,
    "a.weight_scale": e4m3() if scale is None else scale,
    "a.weight_global_scale": np.float32([global_scale]),
  }


def torchao(values=NVFP4, scale=None, per_tensor_scale=G):
  return {
    "a._weight_qdata": values,
    "a._weight_scale": e4m3() if scale is None else scale,
    "a._weight_per_tensor_scale": np.float32(per_tensor_scale),
  }


TORCHAO = {"a.weight": '{"_type": "NVFP4Tensor", "_data": {"block_size": 16}}'}
SWIZZLED = {
  "a.weight": '{"_type": "NVFP4Tensor", "_data": {"block_size": 16,'
  ' "is_swizzled_scales": true}}'
}
F8 = np.full((4, 64), 0x38, np.uint8).view(ml_dtypes.float8_e4m3fn)
F8_NAN = F8.copy()
F8_NAN[1, 2] = NAN


class Case(files.CheckpointTestCase, command_lines.CommandLineTestCase):
  def load_and_warnings(self, *args, **options):
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      found = self.load(*args, **options)
    return found, [str(x.message) for x in caught if x.category is WARNING]

  def assert_zeros(self, array):
    self.assert_numbers(array, np.zeros((4, 64)))


class NanScaleTest(Case):
  def test_reading_a_weight_names_tensor_and_block(self):
    tiles = files.tiled(e4m3((2, 3)))
    blocks = NVFP4.reshape(4, 2, 16)
    mxfp4 = {"a.weight": NVFP4, "a.weight_scale": e8m0((1, 1))}
    gpt_oss = {"a.weight_blocks": blocks, "a.weight_scales": e8m0((3, 0))}
    for case, tensors, metadata, count, total, block in (
      ("modelopt", modelopt(scale=e4m3((2, 1))), None, 1, 16, [2, 1]),
      ("over_zeros", modelopt(ZEROS, e4m3((2, 1))), None, 1, 16, [2, 1]),
      ("twice", compressed(scale=e4m3((3, 0), (1, 3))), None, 2, 16, [1, 3]),
      ("torchao", torchao(scale=e4m3((0, 2))), TORCHAO, 1, 16, [0, 2]),
      ("swizzled", torchao(scale=tiles), SWIZZLED, 1, 16, [2, 3]),
      ("mxfp4", mxfp4, None, 1, 8, [1, 1]),
      ("gpt_oss", gpt_oss, None, 1, 8, [3, 0]),
    ):
      with self.subTest(case):
        found, said = self.load_and_warnings(tensors, metadata)
        self.assertEqual(said, [])
        wanted = (
          rf"x.safetensors: 'a.weight': {count} of {total} block scales are"
          rf" NaN, the first is that of block \[{block[0]}, {block[1]}\]"
        )
        with self.assertWarnsRegex(WARNING, wanted) as caught:
          found["a.weight"]
        self.assertEqual(caught.filename, __file__)
        with self.assertWarnsRegex(WARNING, wanted) as caught:
          found.read(progress=False)
        self.assertEqual(caught.filename, __file__)

  def test_float_scales_that_are_infinite_are_named_too(self):
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
      for leaf, bad in (
        ("weight_scale", [1, NAN, np.inf, 1]),
        ("weight_scale_inv", [[1, 1], [-np.inf, 1]]),
      ):
        values = np.ones((4 if leaf == "weight_scale" else 130, 256), E4M3)
        scale = np.asarray(bad, dtype)
        tensors = {"a.weight": values, f"a.{leaf}": scale}
        found, said = self.load_and_warnings(tensors, check="numbers")
        self.assertRegex(said[0], "infinite scale, the first in block .1, 0")
        count = np.count_nonzero(~np.isfinite(scale.astype(float)))
        with self.assertWarnsRegex(
          WARNING,
          f"'a.weight': {count} of 4 block scales are NaN or infinite, the"
          r" first is that of block \[1, 0\].*give NaN or infinity",
        ):
          found["a.weight"]

  def test_good_weights_are_read_without_a_word(self):
    for tensors in (modelopt(), compressed(), {"a.weight": F8_NAN}):
      found, said = self.load_and_warnings(tensors)
      with warnings.catch_warnings():
        warnings.simplefilter("error", WARNING)
        found.read(progress=False)
      self.assertEqual(said, [])


class CheckTest(Case):
  def test_counts_are_those_of_each_tensor(self):
    plain = np.zeros((3, 5), np.float32)
    plain[0, 1], plain[2, 2], plain[2, 3] = NAN, np.inf, -np.inf
    long = np.zeros(2**16 + 1, np.float32)  # one more than a chunk
    long[-1] = NAN
    three = {"nan_values": 1, "inf_values": 2}
    places = e4m3((1, 2), (3, 3))
    odd = {"a.weight": F8_NAN, "a.weight_scale": e8m0((2, 0))}
    for case, tensors, counts, block in (
      ("good", modelopt(), {}, None),
      ("f32", {"a": plain}, three, None),
      ("bf16", {"a": plain.astype(ml_dtypes.bfloat16)}, three, None),
      ("f16", {"a": plain.astype("f2")}, three, None),
      ("f64", {"a": plain.astype("f8")}, three, None),
      ("e5m2", {"a": plain.astype(ml_dtypes.float8_e5m2)}, three, None),
      ("last", {"a": long}, {"nan_values": 1}, None),
      ("complex", {"a": plain.astype("c8")}, three, None),
      ("no_floats", {"a": np.int8([-1]), "b": np.ones(3, bool)}, {}, None),
      ("scales", modelopt(scale=places), {"nan_scales": 2}, (1, 2)),
      ("mxfp8", odd, {"nan_values": 1, "nan_scales": 1}, (2, 0)),
      ("zero", modelopt(ZEROS, None, 0), {"zero_global_scales": 1}, None),
      ("inf", compressed(ZEROS, None, np.inf), {"inf_global_scales": 1}, None),
      ("nan", modelopt(ZEROS, None, NAN), {"nan_global_scales": 1}, None),
    ):
      with self.subTest(case):
        found, said = self.load_and_warnings(tensors, check="numbers")
        got = list(found.numbers.values())
        wanted = numbers.Numbers(**counts, block=block)
        self.assertEqual(got, [wanted] if counts else [])
        self.assertLen(said, len(got))
        self.assertIn(
          f"numbers: {'1 tensors' if got else 'no NaN'}", str(found)
        )
        if got:
          self.assertIn(str(wanted), said[0])
          self.assertIn(f"  {next(iter(found.numbers))}: {wanted}", str(found))

  def test_weights_that_cannot_be_read_are_told(self):
    inexact = np.full((4, 4), 1.01, np.float32)  # in E4M3
    found, said = self.load_and_warnings(
      {
        **modelopt(scale_2=0),
        **modelopt(scale_2=1 / G, base="b"),
        **modelopt(scale=inexact, base="c"),
        **modelopt(scale=e4m3((0, 0)), base="d"),  # its NaN can be read
      },
      check="numbers",
    )
    self.assertEqual(found.numbers["a.weight"].zero_global_scales, 1)
    for name in ("a.weight", "b.weight"):
      self.assertIn("weight_scale_2 multiplies", found.numbers[name].refusal)
    self.assertIn("representable in E4M3", found.numbers["c.weight"].refusal)
    self.assertRegex(said[0], "4 tensors .* the first 'a.weight'")
    self.assertIn("load: no, 3 tensors cannot be read", str(found))
    self.assertFalse(json.loads(found.to_json())["loads"])

  def test_global_scale_of_comfyui_is_counted(self):
    rows = 16  # a multiple of ComfyUI's padding
    scale = np.full((rows, 4), 0x38, np.uint8).view(ml_dtypes.float8_e4m3fn)
    found, _ = self.load_and_warnings(
      modelopt(np.zeros((rows, 32), np.uint8), files.tiled(scale), 0),
      check="numbers",
      layout="comfyui",
    )
    self.assertEqual(found.numbers["a.weight"].zero_global_scales, 1)

  def test_nothing_is_counted_unasked(self):
    self.assertIsNone(self.load(modelopt()).numbers)
    with self.assertRaisesRegex(ValueError, "None or \"numbers\", got 'nan'"):
      self.load(modelopt(), check="nan")

  def test_tensors_are_streamed(self):
    x = np.zeros(BIG, np.float16)
    x[-1, -1] = NAN
    path = self.file({"a": x})
    tracemalloc.start()
    self.addCleanup(tracemalloc.stop)
    with self.assertWarns(WARNING):
      found = jp.checkpoints.load(path, check="numbers")
    self.assertLess(tracemalloc.get_traced_memory()[1], FEW_BYTES)
    self.assertEqual(found.numbers["a"].nan_values, 1)

  def test_command_prints_counts_and_fails(self):
    for tensors, status in ((modelopt(), 0), (modelopt(scale=e4m3((1, 2))), 1)):
      path = str(self.file(tensors))
      got, out, err = self.run_command("checkpoint", path, "--check", "numbers")
      self.assertEqual((got, err), (status, ""))
      wanted = "  a.weight: 1 NaN scale, the first in block [1, 2]"
      self.assertEqual(wanted in out, bool(status))


class ZerosTest(Case):
  """Some files have unusable global scales for tensors of zeros."""

  def test_zeros_are_exact_in_every_layout(self):
    nans = e4m3(*((i, j) for i in range(4) for j in range(4)))
    for bad in (0, np.inf, NAN, np.float32(3e38)):
      for scale in (e4m3(), nans):
        for tensors, metadata in (
          (modelopt(ZEROS, scale, bad), None),
          (compressed(ZEROS, scale, bad), None),
          (torchao(ZEROS, scale, bad), TORCHAO),
          (torchao(ZEROS, files.tiled(scale), bad), SWIZZLED),
          (modelopt(ZEROS | 0x80, scale, bad), None),
        ):
          with self.subTest(f"{bad} {[*tensors]}"):
            found, _ = self.load_and_warnings(tensors, metadata)
            with warnings.catch_warnings():
              warnings.simplefilter("error", WARNING)
              array = found["a.weight"]
            self.assert_zeros(array)
            if bad != np.float32(3e38):
              any_scale, _ = self.load_and_warnings(
                tensors, metadata, global_scale_range=None
              )
              self.assert_zeros(any_scale["a.weight"])

  def test_values_that_are_not_zero_are_refused(self):
    for bad in (0, np.inf, NAN):
      for tensors, metadata in (
        (modelopt(scale_2=bad), None),
        (compressed(global_scale=bad), None),
        (torchao(per_tensor_scale=bad), TORCHAO),
      ):
        found, _ = self.load_and_warnings(tensors, metadata)
        with self.assertRaisesRegex(ERROR, "'a.*must be in"):
          found["a.weight"]

  def test_expert_that_saw_no_data_leaves_the_others(self):
    base = "experts.up"
    for bad in (0, np.inf, NAN):
      for shape in ((2,), (2, 1, 1)):
        scale = np.stack([e4m3(), e4m3((0, 0))])
        found, _ = self.load_and_warnings(
          {
            base: np.stack([NVFP4, ZEROS]),
            f"{base}_weight_scale": scale,
            f"{base}_weight_scale_2": np.float32([G, bad]).reshape(shape),
          }
        )
        got = np.asarray(jp.dequantize(found[base], jnp.float32))
        np.testing.assert_array_equal(got[0], np.full((4, 64), G))
        np.testing.assert_array_equal(got[1], np.zeros((4, 64)))

  def test_gguf(self):
    blocks = np.zeros((4, 36), np.uint8)
    for bad in (0, np.inf, NAN):
      array = jp.checkpoints.from_gguf(blocks, "nvfp4", np.float32([bad]))
      self.assert_zeros(array)
