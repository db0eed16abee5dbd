# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The triton implementation: its numbers, run by Triton's interpreter.

There need be no GPU: `jax_triton.triton_call` is replaced by a callback that
runs the very kernels on the very arrays, on the CPU. What differs on a GPU is
the compiler's work and the hardware's arithmetic.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import math
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import deviceless
from jaxplugin import dot_suite
from jaxplugin import formats
from jaxplugin import lowering
from jaxplugin import reference
from jaxplugin import scaled_array
from jaxplugin import target as target_lib
from jaxplugin import testing as contract
from jaxplugin import triton_library
from jaxplugin.backends import triton
from jaxplugin.kernels import configs

needs_triton = absltest.skipIf(
  importlib.util.find_spec("triton") is None, "triton is not installed"
)


def cannot_interpret():
  """Why Triton's interpreter cannot run kernels here; "" where it can."""
  if importlib.util.find_spec("triton") is None:
    return "triton is not installed"
  from jaxplugin.kernels import interpret

  return interpret.unsupported() or ""


needs_interpreter = absltest.skipIf(
  bool(cannot_interpret()), cannot_interpret()
)
CPU = target_lib.named_target("cpu")
# XLA's threads, which callbacks run on, flush f32 subnormals; a thread that
# Python starts before does not.
THREAD = concurrent.futures.ThreadPoolExecutor(1)
THREAD.submit(int).result()


def interpreted(launch, inputs, target):
  """`triton._call` in Triton's interpreter."""
  del target
  from jaxplugin.kernels import block_scaled_matmul
  from jaxplugin.kernels import interpret

  dtype = triton._DTYPES[launch.output_dtype]
  # E4M3 has no NumPy layout that a callback may rely on: bytes.
  is_e4m3 = [x.dtype == formats.E4M3 for x in inputs]
  inputs = [
    jax.lax.bitcast_convert_type(x, jnp.uint8) if e4m3 else x
    for x, e4m3 in zip(inputs, is_e4m3, strict=True)
  ]

  def on_host(*inputs):
    inputs = [np.array(x) for x in inputs]
    out = np.full(launch.output_shape, np.nan, dtype)
    interpret.launch(
      block_scaled_matmul.KERNELS[launch.kernel],
      launch.grid,
      *launch.described(
        [
          x.view(formats.E4M3) if e4m3 else x
          for x, e4m3 in zip(inputs, is_e4m3, strict=True)
        ]
      ),
      out,
      **configs.portable(dict(launch.constexprs)),
    )
    return out

  def in_thread(*inputs):
    return THREAD.submit(on_host, *inputs).result()

  result = jax.ShapeDtypeStruct(launch.output_shape, dtype)
  return jax.pure_callback(in_thread, result, *inputs)


class TritonDotSuite(dot_suite.DotSuite):
  """The contract's suite; what triton refuses goes to xla."""

  implementation = "triton"
  cases_per_test = 2
  subnormal_spacing = 2.0**-133  # of bf16
  target = target_lib.named_target("h200")

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(triton, "_call", interpreted))
    self.enter_context(
      mock.patch.object(
        lowering, "resolve_target", lambda override, _: override or CPU
      )
    )

  def dot(self, *args, **kwargs):
    with jp.use_target(self.target):
      try:
        return jp.block_scaled_dot(*args, implementation="triton", **kwargs)
      except NotImplementedError as error:
        if "needs sizes of at least 1" not in str(error):
          raise
    return jp.block_scaled_dot(*args, implementation="xla", **kwargs)


@needs_interpreter
class HopperDotTest(TritonDotSuite):
  """Dequantizes in registers."""


@needs_interpreter
class BlackwellDotTest(TritonDotSuite):
  """Leaves it to the matrix instruction where that takes the formats."""

  target = target_lib.named_target("b200")
  kinds = (
    *((a, b) for a in formats.FORMATS[:3] for b in formats.FORMATS[:3]),
    (jp.NVFP4, jp.NVFP4),
  )


del TritonDotSuite


class RecordedTest(parameterized.TestCase):
  """Keeps what is launched, in the interpreter, of the whole lowering."""

  def setUp(self):
    super().setUp()
    self.launched = []

    def recorded(launch, inputs, target):
      self.launched.append(launch)
      return interpreted(launch, inputs, target)

    self.enter_context(mock.patch.object(triton, "_call", recorded))
    self.enter_context(
      mock.patch.object(
        lowering, "resolve_target", lambda override, _: override or CPU
      )
    )

  def names(self):
    return " ".join(launch.name for launch in self.launched)


@needs_interpreter
class DescribedTest(RecordedTest):
  """TMA descriptors, of operands that lie in any way with k minor."""

  @parameterized.parameters(
    ("h200", jp.MXFP8, jp.MXFP4),
    ("h200", None, jp.NVFP4),
    ("b200", jp.NVFP4, jp.NVFP4),
  )
  def test_bits_are_those_of_kernels_whose_threads_load(self, name, lhs, rhs):
    rng = np.random.default_rng(0)
    # (m, batch, k) and (batch, n, k); no size is a multiple of a tile.
    x, w = (
      rng.normal(size=shape).astype(np.float32)
      for shape in ((65, 3, 96), (3, 35, 96))
    )
    x = jnp.asarray(x, jnp.bfloat16) if lhs is None else jp.quantize(x, lhs)
    w = jp.quantize(w, rhs)

    def dot(target):
      with jp.use_target(target):
        return jp.block_scaled_dot(
          x,
          w,
          dimension_numbers=(((2,), (2,)), ((1,), (0,))),
          implementation="triton",
        )

    target = target_lib.named_target(name)
    usual = dot(target)
    self.assertNotIn("_tma", self.names())
    self.launched.clear()
    result = dot(triton_library.with_descriptors(target))
    self.assertIn("_tma", self.names())
    np.testing.assert_array_equal(result, usual)


@needs_interpreter
class BlocksTest(RecordedTest):
  """Sides that are blocked along different contracting dimensions."""

  @parameterized.product(name=("h200", "b200"), axes=((1, 2), (2, 1)))
  def test_short_blocks_are_padded_where_rhs_has_them(self, name, axes):
    rng = np.random.default_rng(0)
    sides = []
    for format, rows, axis in zip(
      (jp.MXFP4, jp.MXFP8), (3, 5), axes, strict=True
    ):
      case = contract.OperandCase(
        format=format, dtype=format.values_dtype, shape=(rows, 6, 20), axis=axis
      )
      sides.append(contract.make_operand(rng, case, integers=True))
    lhs, rhs = sides
    numbers = (((1, 2), (1, 2)), ((), ()))
    with jp.use_target(target_lib.named_target(name)):
      result = jp.block_scaled_dot(
        lhs.operand,
        rhs.operand,
        lhs.scale,
        rhs.scale,
        dimension_numbers=numbers,
        block_size=32,
        implementation="triton",
      )
    exact, _ = contract.dot(lhs.exact, rhs.exact, numbers)
    contract.assert_exact(result, exact, result.dtype)
    # The blocked dimension is padded to 32, and lhs dequantized.
    (launch,) = self.launched
    other = {1: 20, 2: 6}[axes[1]]
    self.assertEqual(dict(launch.constexprs)["K"], 32 * other)
    self.assertIn("_f32_mxfp8_", launch.name)


@needs_interpreter
class PreparedTest(RecordedTest):
  """Weights that `prepare_weights` rearranged, through the whole lowering."""

  def weight(self, format, shape, seed=0):
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jp.quantize(x, format)

  def dot(self, x, w, name, **options):
    with jp.use_target(target_lib.named_target(name)):
      return jp.block_scaled_dot(x, w, implementation="triton", **options)

  @parameterized.product(
    # Order of k is the same on sm_80; small_m's own on sm_90, of a weight that
    # is prepared another one.
    name=("a100", "h200"),
    format=(jp.MXFP4, jp.NVFP4),
    shapes=(((3, 160), (35, 160)), ((2, 19, 96), (2, 33, 96))),
  )
  def test_prepared_weight_is_read_as_it_is(self, name, format, shapes):
    x_shape, w_shape = shapes
    rng = np.random.default_rng(1)
    x = rng.integers(-4, 5, x_shape).astype(jnp.bfloat16)
    w = self.weight(format, w_shape)
    prepared = jp.prepare_weights(w, target_lib.named_target(name))
    result = self.dot(x, prepared, name)
    self.assertIn(f"_bf16_{format.name}_interleaved_", self.names())
    expected = self.dot(x, w, name)
    if name == "a100":
      np.testing.assert_array_equal(result, expected)
    exact = reference.oracle_dequantize(
      np.asarray(w.values), np.asarray(w.scale), format
    )
    x = np.asarray(x, np.float64)
    last = x.ndim - 1
    batch = tuple(range(last - 1))
    numbers = (((last,), (last,)), (batch, batch))
    exact, magnitude = reference.oracle_dot(x, exact, numbers)
    if w.global_scale is not None:
      exact = exact * np.float64(w.global_scale)
      magnitude = magnitude * np.float64(w.global_scale)
    contract.assert_within(
      result, exact, contract.DOT_BOUND * magnitude, result.dtype
    )

  @parameterized.parameters((jp.MXFP8, 130), (jp.NVFP4, 5))
  def test_swizzled_scale_of_a_prepared_weight_changes_no_bit(
    self, format, rows
  ):
    w = self.weight(format, (140, 160))
    x = self.weight(format, (rows, 160), 1)
    prepared = jp.prepare_weights(w, target_lib.named_target("b200"))
    self.assertEqual(prepared.scale_layout, "swizzled_128x4")
    np.testing.assert_array_equal(
      self.dot(x, prepared, "b200"), self.dot(x, w, "b200")
    )
    first, second = (
      dict(launch.constexprs)["RHS_SCALE_STRIDES"] for launch in self.launched
    )
    self.assertEqual((len(first), len(second)), (2, 3))

  def test_epilogue_vmap_and_jit(self):
    w = self.weight(jp.MXFP4, (2, 33, 96))
    prepared = jp.prepare_weights(w, target_lib.named_target("a100"))
    x = np.random.default_rng(1).normal(size=(2, 3, 96)).astype(np.float32)
    bias = np.linspace(-1, 1, 33, dtype=np.float32)

    @jax.jit
    @jax.vmap
    def f(x, w):
      return self.dot(x, w, "a100", bias=bias, activation="silu")

    np.testing.assert_array_equal(f(x, prepared), f(x, w))
    self.assertIn("_f32_mxfp4_interleaved_", self.names())

  def test_lhs_may_be_the_prepared_one(self):
    w = self.weight(jp.MXFP4, (35, 96))
    x = self.weight(jp.MXFP8, (3, 96), 1)
    prepared = jp.prepare_weights(w, target_lib.named_target("a100"))
    np.testing.assert_array_equal(
      self.dot(prepared, x, "a100"), self.dot(w, x, "a100")
    )
    self.assertIn("_mxfp4_interleaved_mxfp8_", self.names())

  @parameterized.parameters("b200", "mi300x")
  def test_where_kernels_want_the_usual_order_it_is_put_back(self, name):
    w = self.weight(jp.NVFP4, (35, 96))
    x = self.weight(jp.NVFP4, (3, 96), 1)
    prepared = jp.prepare_weights(w, target_lib.named_target("h200"))
    np.testing.assert_array_equal(
      self.dot(x, prepared, name), self.dot(x, w, name)
    )
    self.assertNotIn("interleaved", self.names())
    self.assertLen(set(self.launched), len(self.launched) // 2)

  def test_several_contracting_dimensions_are_put_back(self):
    numbers = (((0, 2), (0, 2)), ((), ()))
    w = self.weight(jp.MXFP4, (2, 33, 96))
    x = self.weight(jp.MXFP4, (2, 3, 96), 1)
    prepared = jp.prepare_weights(w, target_lib.named_target("a100"))
    np.testing.assert_array_equal(
      self.dot(x, prepared, "a100", dimension_numbers=numbers),
      self.dot(x, w, "a100", dimension_numbers=numbers),
    )
    self.assertNotIn("interleaved", self.names())


@needs_triton
@absltest.skipIf(
  importlib.util.find_spec("jax_cuda13_plugin") is None,
  "jax-cuda13-plugin is not installed",
)
class OptimizedTest(parameterized.TestCase):
  """What XLA's GPU compiler, without a GPU, makes of the lowering."""

  # No workspace of partial sums has the size of an operand.
  M, N, K = 512, 704, 1536

  def float_sizes(self, text):
    """Numbers of elements of the float arrays in optimized HLO."""
    shapes = re.findall(r"\b(?:f32|bf16|f16)\[([\d,]+)\]", text)
    return {math.prod(map(int, shape.split(","))) for shape in shapes}

  def operand(self, format, rows):
    if format is None:
      return jax.ShapeDtypeStruct((rows, self.K), jnp.bfloat16)
    spec = jax.ShapeDtypeStruct((rows, self.K), jnp.bfloat16)
    return jax.eval_shape(lambda x: jp.quantize(x, format), spec)

  @parameterized.product(
    name=("h200", "b200"),
    formats_=(
      (jp.MXFP8, jp.MXFP8),
      (jp.NVFP4, jp.NVFP4),
      (None, jp.NVFP4),
      (jp.MXFP8, jp.MXFP4),
    ),
  )
  def test_kernels_are_called_and_no_operand_is_dequantized(
    self, name, formats_
  ):
    def f(x, w):
      return jp.block_scaled_dot(
        x, w, preferred_element_type=jnp.bfloat16, implementation="triton"
      )

    lhs, rhs = (
      self.operand(formats_[0], self.M),
      self.operand(formats_[1], self.N),
    )
    target = target_lib.named_target(name)
    text = deviceless.compile(f, lhs, rhs, target=target).as_text()
    self.assertIn("triton_kernel_call", text)
    sizes = self.float_sizes(text)
    self.assertNotIn(self.N * self.K, sizes)
    if formats_[0] is not None:
      self.assertNotIn(self.M * self.K, sizes)
    self.assertNotIn(" dot(", text)

  @parameterized.product(name=("h200", "b200"), rhs=(jp.MXFP8, jp.NVFP4))
  def test_weight_whose_n_is_minor_is_neither_transposed_nor_copied(
    self, name, rhs
  ):
    # FP4 comes packed along k: otherwise two nibbles of a byte are two columns.
    def f(x, w):
      return jp.block_scaled_dot(
        x,
        w,
        dimension_numbers=(((1,), (0,)), ((), ())),
        preferred_element_type=jnp.bfloat16,
        implementation="triton",
      )

    lhs = self.operand(None if rhs == jp.NVFP4 else rhs, self.M)
    weight = jax.ShapeDtypeStruct((self.K, self.N), jnp.bfloat16)
    weight = jax.eval_shape(
      lambda x: jp.quantize(x, rhs, axis=0).pack()
      if rhs.is_fp4
      else jp.quantize(x, rhs, axis=0),
      weight,
    )
    target = target_lib.named_target(name)
    text = deviceless.compile(f, lhs, weight, target=target).as_text()
    self.assertIn("triton_kernel_call", text)
    self.assertEmpty(self.moved(text, self.K * self.N // 2))

  def moved(self, text, least):
    """Results of `transpose` and `copy` with at least so many elements."""
    found = re.findall(
      r"= \w+\[([\d,]+)\]\S* (?:transpose|copy|copy-start)\(", text
    )
    return [s for s in found if math.prod(map(int, s.split(","))) >= least]

  def test_it_would_be_seen_if_a_weight_was_transposed(self):
    # Two dimensions of n with k between them cannot merge.
    def f(x, w):
      return jp.block_scaled_dot(
        x,
        w,
        dimension_numbers=(((1,), (1,)), ((), ())),
        implementation="triton",
      )

    lhs = self.operand(jp.MXFP8, self.M)
    weight = jax.ShapeDtypeStruct((2, self.K, self.N // 2), jnp.bfloat16)
    weight = jax.eval_shape(lambda x: jp.quantize(x, jp.MXFP8, axis=1), weight)
    target = target_lib.named_target("h200")
    text = deviceless.compile(f, lhs, weight, target=target).as_text()
    self.assertNotEmpty(self.moved(text, self.K * self.N // 2))

  def test_it_would_be_seen_if_one_was(self):
    def f(x, w):
      return jp.block_scaled_dot(x, w, implementation="xla")

    args = [self.operand(jp.MXFP8, rows) for rows in (self.M, self.N)]
    target = target_lib.named_target("h200")
    text = deviceless.compile(f, *args, target=target).as_text()
    self.assertContainsSubset(
      {self.N * self.K, self.M * self.K}, self.float_sizes(text)
    )

  def test_sharded_calls_run_on_each_gpus_share(self):
    target = target_lib.named_target("h200")
    mesh = deviceless.mesh(target, (4,), ("x",))

    def place(leaf, *axes):
      spec = jax.sharding.PartitionSpec(*axes)
      sharding = jax.sharding.NamedSharding(mesh, spec)
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    lhs, rhs = self.operand(jp.MXFP8, self.M), self.operand(jp.MXFP8, self.N)
    rhs = jax.tree_util.tree_map(lambda leaf: place(leaf, "x"), rhs)
    text = deviceless.compile(
      lambda x, w: jp.block_scaled_dot(x, w, implementation="triton"),
      lhs,
      rhs,
      target=target,
      mesh=mesh,
    ).as_text()
    self.assertRegex(text, rf"f32\[1,{self.M},{self.N // 4}\].*triton_kernel")
    self.assertNotIn("all-", text.split("ENTRY")[1])


class FactsTest(absltest.TestCase):
  """What kernels, which cannot import the package, state a second time."""

  def test_block_sizes_and_packing_are_those_of_the_formats(self):
    self.assertEqual(
      configs.VALUES_PER_SCALE, {f.name: f.block_size for f in formats.FORMATS}
    )
    packed = tuple(f.name for f in formats.FORMATS if f.is_fp4)
    self.assertEqual(configs.PACKED_FORMATS, packed)

  def test_tiles_of_swizzled_scales_are_the_packages(self):
    self.assertEqual(configs.SCALE_TILE_ROWS, scaled_array.SCALE_TILE_ROWS)
    columns = scaled_array.SCALE_TILE_COLUMNS
    self.assertEqual(configs.SCALE_TILE_COLUMNS, columns)

  def test_shared_memory_is_that_of_the_named_targets(self):
    for name in target_lib.TARGET_NAMES:
      target = target_lib.named_target(name)
      if target.platform != "cpu":
        own = dataclasses.replace(target, shared_memory_bytes=None)
        self.assertEqual(
          triton_library.architecture_of(own).shared_memory_bytes,
          target.shared_memory_bytes,
          name,
        )


class ErrorTest(parameterized.TestCase):
  def test_amd_gpu_that_is_not_there_is_told(self):
    x = jp.quantize(np.ones((16, 64), np.float32), jp.MXFP8)
    with jp.use_target(target_lib.named_target("mi300x")):
      traced = jax.jit(jp.block_scaled_dot).trace(x, x)
      with self.assertRaisesRegex(NotImplementedError, "AMD GPUs only where"):
        traced.lower(lowering_platforms=("rocm",))

  def test_missing_jax_triton_is_told(self):
    x = jp.quantize(np.ones((16, 64), np.float32), jp.MXFP8)
    triton_library._import_error.cache_clear()
    self.addCleanup(triton_library._import_error.cache_clear)
    with (
      mock.patch.dict(sys.modules, {"jax_triton": None}),
      jp.use_target(target_lib.named_target("h200")),
    ):
      traced = jax.jit(jp.block_scaled_dot).trace(x, x)
      with self.assertRaisesRegex(NotImplementedError, "needs jax-triton"):
        traced.lower(lowering_platforms=("cuda",))

  def test_target_with_too_little_memory_is_refused_with_the_numbers(self):
    target = dataclasses.replace(
      target_lib.named_target("h200"), shared_memory_bytes=1024
    )
    x = jp.quantize(np.ones((256, 256), np.float32), jp.MXFP8)
    (dot,) = jp.explain(jp.block_scaled_dot, x, x, target=target)
    self.assertEqual(dot.decision.implementation, "xla")
    reasons = {r.implementation: r.reason for r in dot.decision.refusals}
    # The least tile, twice 16 x 32: a byte a value, a scale a row, and bf16.
    needed = 2 * (16 * 32 + 16 + 2 * 16 * 32)
    self.assertEndsWith(
      reasons["triton"],
      f"may need {needed} bytes of shared memory, sm_90 has 1024",
    )

  def test_target_without_jax_triton_is_refused_with_the_reason(self):
    target = dataclasses.replace(
      target_lib.named_target("h200"), triton_error="it is away"
    )
    x = jp.quantize(np.ones((16, 64), np.float32), jp.MXFP8)
    (dot,) = jp.explain(jp.block_scaled_dot, x, x, target=target)
    self.assertEqual(dot.decision.implementation, "xla")
    reasons = {r.implementation: r.reason for r in dot.decision.refusals}
    self.assertEqual(reasons["triton"], "it is away")


if __name__ == "__main__":
  absltest.main()
