# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""GGUF's blocks become arrays that have the bits of the gguf package."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.checkpoints import gguf_blocks
from jaxplugin.testing import checkpoint_files as files
from jaxplugin.testing import installed

INTEGERS = [x for x in gguf_blocks.TYPES if x not in ("MXFP4", "NVFP4")]
N, K = 5, 512
# Error of f32 sums in `block_scaled_dot`, see docs/concepts/numerics.md.
SUM_TOLERANCE = 16 * 2.0**-24


def blocks_of(name, *, finite=False):
  """Returns random bytes: every code and factor, and f16 with both signs."""
  kind = gguf_blocks.TYPES[name]
  rng = np.random.default_rng(len(name))
  blocks = rng.integers(0, 256, (N, K // kind.size, kind.nbytes), np.uint8)
  if finite:
    # Bytes 0x20 to 0x2F are f16 from 2^-7 to 2^-4, wherever they are.
    blocks = np.where(blocks & 1, blocks & 0x8F, blocks & 0xAF) | 0x20
  if name == "MXFP4":
    blocks[..., 0] %= 255  # the package reads 255 as a number
  if name == "NVFP4":
    blocks[..., :4] &= 0x7F
    blocks[0, :, 0] = 0x7F  # read as 0, not NaN
  return blocks.reshape(N, -1)


@installed.needs("gguf")
class BlocksTest(files.CheckpointTestCase):
  def package(self, blocks, name):
    import gguf

    with np.errstate(invalid="ignore", over="ignore"):
      kind = gguf.GGMLQuantizationType[name]
      return gguf.quants.dequantize(blocks, kind)

  def write(self, blocks):
    """Writes a file with a tensor "NAME.weight" for each type's name."""
    path = self.empty() / "x.gguf"
    tensors = {f"{name}.weight": (name, x) for name, x in blocks.items()}
    files.write_gguf(path, tensors)
    return path

  @parameterized.parameters(*gguf_blocks.TYPES)
  def test_bits_are_those_of_the_package(self, name):
    blocks = blocks_of(name)
    want = self.package(blocks, name)
    self.assertGreater(np.isfinite(want).mean(), 0.5)
    if jp.detect_target("cpu").cpu_kernels is None:  # XLA flushes subnormals
      want = np.where(np.abs(want) < np.finfo(np.float32).tiny, 0 * want, want)
    convert = jp.checkpoints.from_gguf
    arrays = [
      convert(blocks, name),
      jax.jit(lambda x: convert(x, name))(blocks),
    ]
    if name == "Q4_0":  # Each operation is a compilation.
      arrays.append(convert(jnp.asarray(blocks), name))
    for array in arrays:
      self.assertEqual(
        (array.format, array.shape), (gguf_blocks.TYPES[name].format, (N, K))
      )
      got = np.asarray(jp.dequantize(array, jnp.float32))
      np.testing.assert_array_equal(got, want)
      if not array.format.is_fp4:  # for FP4's -0 the package returns 0
        signs = [np.signbit(x[~np.isnan(want)]) for x in (got, want)]
        np.testing.assert_array_equal(*signs)

  @parameterized.parameters(*INTEGERS)
  def test_products_keep_the_contract(self, name):
    blocks = blocks_of(name, finite=True)
    w = self.package(blocks, name).astype(np.float64)
    array = jp.checkpoints.from_gguf(blocks, name)
    stored = np.abs(w)
    if array.format.offset_dtype is not None:
      # The bound has the stored values and the rest of the sum for each block.
      bare = jp.dequantize(array.without_offset(), jnp.float32)
      bare = np.asarray(bare, np.float64)
      stored = np.abs(bare) + np.abs(w - bare)
    x = np.random.default_rng(1).standard_normal((3, K)).astype(np.float32)
    got = np.asarray(jp.linear(x, array), np.float64)
    bound = SUM_TOLERANCE * (np.abs(x).astype(np.float64) @ stored.T)
    self.assertTrue((np.abs(got - x.astype(np.float64) @ w.T) <= bound).all())

  def test_files_are_read_and_requantized_on_request(self):
    blocks = {n: blocks_of(n, finite=True) for n in gguf_blocks.TYPES}
    path = self.write(blocks)
    exact = jp.checkpoints.load(path)
    less = jp.checkpoints.load(path, requantize="int4_32")
    for name in blocks:
      with self.subTest(name):
        full = f"{name}.weight"
        entry, array = exact.entries[full], exact[full]
        self.assertEqual((entry.layout, entry.shape), ("gguf", (N, K)))
        self.assertEqual(array.format, entry.format)
        x = self.package(blocks[name], name)
        np.testing.assert_array_equal(jp.dequantize(array), x)
        got = less[full]
        # These have as many bytes as in the file.
        if name in ("MXFP4", "NVFP4", "Q8_0", "Q4_0", "Q4_1"):
          self.assertEqual(got.format, entry.format)
          self.assertNotIn(full, less.losses)
          continue
        wanted = jp.quantize(x, "int4_32")
        np.testing.assert_array_equal(got.values, wanted.values)
        np.testing.assert_array_equal(got.scale, wanted.scale)
        y = np.asarray(jp.dequantize(wanted), np.float64)
        loss = np.linalg.norm(x - y) / np.linalg.norm(x.astype(np.float64))
        np.testing.assert_allclose(less.losses[full], loss, rtol=1e-5)
        self.assertIn(f"  {full}: {loss:.2g}"[:-1], str(less))
    with self.assertRaisesRegex(ValueError, "unknown block format 'int3'"):
      jp.checkpoints.load(path, requantize="int3")

  @parameterized.parameters(*gguf_blocks.TYPES)
  def test_weights_without_rows_keep_their_shape(self, name):
    kind = gguf_blocks.TYPES[name]
    for lead in ((0,), (3, 0), (0, 2)):
      blocks = np.zeros((*lead, 2 * kind.nbytes), np.uint8)
      convert = functools.partial(jp.checkpoints.from_gguf, format=name)
      shape = (*lead, 2 * kind.size)
      self.assertEqual(convert(blocks).shape, shape)
      self.assertEqual(jax.eval_shape(convert, blocks).shape, shape)
    array = jp.checkpoints.load(self.write({name: blocks}))[f"{name}.weight"]
    self.assertEqual(jp.dequantize(array).shape, shape)

  def test_scales_and_minima_that_are_not_finite_are_named(self):
    blocks = {x: blocks_of(x, finite=True) for x in ("Q4_1", "MXFP4")}
    inf = np.float16([np.inf]).view(np.uint8)
    blocks["Q4_1"][2, 20 * 3 + 2 : 20 * 3 + 4] = inf
    blocks["MXFP4"][2, 17 * 3] = 255  # 2^128 in the package, NaN in OCP MX
    path = self.write(blocks)
    for name, parts in (("Q4_1", "scales and minima"), ("MXFP4", "scales")):
      rule = rf"1 of 80 block {parts} are NaN.* block \[2, 3\]"
      with self.assertWarnsRegex(jp.checkpoints.NumbersWarning, rule):
        jp.checkpoints.load(path)[f"{name}.weight"]
    with self.assertWarns(jp.checkpoints.NumbersWarning):
      found = jp.checkpoints.load(path, check="numbers")
    self.assertEqual(found.numbers["Q4_1.weight"].inf_scales, 1)
    self.assertEqual(found.numbers["MXFP4.weight"].nan_scales, 1)

  def test_types_are_found_by_name_and_by_format(self):
    blocks = blocks_of("Q4_1")
    for given in ("Q4_1", "q4_1", jp.UINT4_32_MIN, "uint4_32_min"):
      array = jp.checkpoints.from_gguf(blocks, given)
      self.assertEqual(array.format, jp.UINT4_32_MIN)
    with self.assertRaisesRegex(ValueError, "that jaxplugin reads, .*'TQ1_0'"):
      jp.checkpoints.from_gguf(blocks, "TQ1_0")
    with self.assertRaisesRegex(
      TypeError, r"Q4_K must be uint8.* 144 \* k / 2"
    ):
      jp.checkpoints.from_gguf(blocks[:, :-1], "Q4_K")

  def test_nvfp4_scale_with_a_sign_is_refused(self):
    blocks = blocks_of("NVFP4")
    blocks[2, 3] |= 0x80
    with self.assertRaisesRegex(
      jp.checkpoints.CheckpointError, "bytes below 0x80"
    ):
      jp.checkpoints.from_gguf(blocks, "nvfp4")

  def test_other_shapes_and_formats_are_an_error(self):
    with self.assertRaisesRegex(TypeError, r"n, 17 \* k / 32\], got uint8\[5"):
      jp.checkpoints.from_gguf(np.zeros((5, 18), np.uint8), jp.MXFP4)
    with self.assertRaisesRegex(
      ValueError, "or the format of one, got 'mxfp8'"
    ):
      jp.checkpoints.from_gguf(np.zeros((5, 17), np.uint8), "mxfp8")
    with self.assertRaisesRegex(TypeError, "scale must be None for mxfp4"):
      jp.checkpoints.from_gguf(np.zeros((5, 17), np.uint8), "mxfp4", 1.0)
