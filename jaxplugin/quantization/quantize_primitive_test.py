# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which modules call the kernels, also on meshes, and calls from threads.

`quantize_both` is `quantize` along each axis, bit by bit. api_bits_test.py
compares `quantize` and `dequantize` with NumPy, and backends/cpu_test.py
compares kernels with operations.
"""

import concurrent.futures
import functools
import threading

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import blocking, formats, targets
from jaxplugin.quantization import operands
from jaxplugin.testing import contract
from jaxplugin.testing import quantization_lowerings as lowerings

MXFP8, MXFP8_E5M2 = formats.MXFP8, formats.MXFP8_E5M2
MXFP4, NVFP4 = formats.MXFP4, formats.NVFP4
P = jax.sharding.PartitionSpec
X = lowerings.X
NUM_THREADS = 8
CALLS_PER_THREAD = 10


def blocked(x, format, blockings, global_scale=None):
  specs = tuple(
    operands.QuantizeSpec(format=format, along=along) for along in blockings
  )
  return operands.quantize_all(
    x, specs, (None,) * len(specs), global_scale, packed=False
  )


@lowerings.needs_library
class CallTest(parameterized.TestCase):
  @parameterized.parameters(MXFP8, MXFP8_E5M2, MXFP4)
  def test_dequantize_is_exact_below_the_normal_range(self, format):
    # Scale byte 0 is 2^-127: 1 is an f32 subnormal, which XLA:CPU flushes.
    one = np.ones((1, 32), format.values_dtype)
    scale = np.zeros((1, 1), np.uint8).view(format.scale_dtype)
    x = scaled_array.ScaledArray(
      jnp.asarray(one), jnp.asarray(scale), None, format
    )
    result = np.asarray(quantization.dequantize(x))
    np.testing.assert_array_equal(result, np.full((1, 32), 2.0**-127, "f4"))

  @pytest.mark.full
  def test_calls_from_many_threads_give_the_same_bits(self):
    calls = []
    for i, format in enumerate(formats.KNOWN):
      x = lowerings.numbers((40, 4096), np.float32, i)
      function = jax.jit(
        lambda x, f=format: (
          q := quantization.quantize(x, f),
          quantization.dequantize(q),
        )
      )
      calls.append(functools.partial(function, x))
    expected = [lowerings.by_operations(f)() for f in calls]
    barrier = threading.Barrier(NUM_THREADS)  # they also compile at once

    def run(seed):
      barrier.wait()
      order = np.random.default_rng(seed).permutation(
        np.arange(CALLS_PER_THREAD) % len(calls)
      )
      for i in order:
        contract.assert_same_bits(calls[i](), expected[i])

    with concurrent.futures.ThreadPoolExecutor(NUM_THREADS) as pool:
      list(pool.map(run, range(NUM_THREADS)))


def along_1(format):
  return lowerings.round_trip(format, axis=1)


def to_f64(x):
  return quantization.dequantize(quantization.quantize(x, MXFP8), jnp.float64)


def drawn(impl):
  """Returns `quantize` with a key of an implementation."""
  key = jax.random.key(0, impl=impl)
  return lambda x: quantization.quantize(x, MXFP8, key=key)


PER_16 = contract.block_format("mxfp8_per_16", formats.E4M3, formats.E8M0, 16)
NVFP4_TRIP = lowerings.round_trip(NVFP4)
BOTH, NEITHER = (1, 1), (0, 0)
# (name, function, array, calls of the kernels that quantize and dequantize,
# platforms of the module)
CALLS = (
  *((f.name, lowerings.round_trip(f), X, BOTH) for f in formats.KNOWN),
  ("bf16", lowerings.round_trip(MXFP8), X.astype(jnp.bfloat16), BOTH),
  ("rank_1", NVFP4_TRIP, X[0, 0], BOTH),
  # Kernels quantize only FP4 along another axis.
  ("mxfp8_axis_1", along_1(MXFP8), X.swapaxes(1, 2), NEITHER),
  ("mxfp8_e5m2_axis_1", along_1(MXFP8_E5M2), X.swapaxes(1, 2), NEITHER),
  ("mxfp4_axis_1", along_1(MXFP4), X.swapaxes(1, 2), (1, 0)),
  ("nvfp4_axis_1", along_1(NVFP4), X.swapaxes(1, 2), (1, 0)),
  *(
    (name, NVFP4_TRIP, X, NEITHER, (name,)) for name in ("cuda", "rocm", "tpu")
  ),
  ("each_platform_is_decided_for_itself", NVFP4_TRIP, X, BOTH, ("cpu", "cuda")),
  ("without_kernels", lowerings.by_operations(NVFP4_TRIP), X, NEITHER),
  ("threefry", drawn("threefry2x32"), X, (1, 0)),
  ("rbg", drawn("rbg"), X, NEITHER),
  ("no_rows", NVFP4_TRIP, np.zeros((0, 64), np.float32), NEITHER),
  ("no_columns", NVFP4_TRIP, np.zeros((4, 0), np.float32), NEITHER),
  ("format_of_a_user", lowerings.round_trip(PER_16), X, (0, 1)),
  ("f64_result", to_f64, X, (1, 0)),
  ("f64", lowerings.round_trip(MXFP8), X.astype(np.float64), BOTH),
)


class LoweringTest(parameterized.TestCase):
  @lowerings.needs_library
  @parameterized.named_parameters(*CALLS)
  @pytest.mark.sample(18)
  def test_module_calls_kernels(self, function, x, calls, platforms=("cpu",)):
    with jax.enable_x64(x.dtype == np.float64 or function is to_f64):
      text = lowerings.lowered_text(function, x, platforms=platforms)
    self.assertEqual(lowerings.kernel_calls(text), calls)
    self.assertEqual("custom_call @jaxplugin" in text, any(calls))

  @lowerings.needs_library
  def test_target_of_a_gpu_does_not_matter_on_the_cpu(self):
    with targets.use_target(targets.named_target("b200")):
      self.assertEqual(lowerings.calls(NVFP4_TRIP, X), BOTH)

  @parameterized.product(
    format=formats.FORMATS, shape=("a, 64*b", "a, 64", "8, 64")
  )
  @pytest.mark.sample(2)
  def test_exported_module_gets_operations(self, format, shape):
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.float32)
    function = jax.jit(lowerings.round_trip(format))
    exported = jax.export.export(function, platforms=("cpu",))(x)
    self.assertEqual(lowerings.kernel_calls(exported.mlir_module()), NEITHER)
    np.testing.assert_array_equal(exported.call(X[:, 0]), function(X[:, 0]))


class ShardingTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.mesh = jax.make_mesh(
      (4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )

  def put(self, mesh, spec):
    return jax.device_put(X, jax.sharding.NamedSharding(mesh, spec))

  @lowerings.needs_library
  @parameterized.product(format=formats.FORMATS, names=(("x", "y"), ("x",)))
  @pytest.mark.sample(2)
  def test_inside_of_shard_map_kernels_see_each_share(self, format, names):
    function = jax.jit(
      jax.shard_map(
        lowerings.round_trip(format),
        mesh=self.mesh,
        in_specs=P(*names),
        out_specs=P(*names),
        axis_names=set(names),
      )
    )
    x = self.put(self.mesh, P("x", "y"))
    compiled = function.lower(x).compile()
    for kernel in ("quantize", "dequantize"):
      target = f'custom_call_target="jaxplugin_{kernel}"'
      self.assertEqual(compiled.as_text().count(target), 1, kernel)
    # A global scale is of all that the manual axes leave together.
    columns = 2 if "y" in names else 1
    shares = [
      [lowerings.round_trip(format)(b) for b in np.split(a, columns, axis=1)]
      for a in np.split(X, 4)
    ]
    expected = [np.concatenate(rows, axis=1) for rows in shares]
    np.testing.assert_array_equal(compiled(x), np.concatenate(expected))

  def test_mesh_of_one_device_agrees(self):
    for kind in (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto):
      mesh = jax.make_mesh((1,), ("x",), axis_types=(kind,))
      with jax.set_mesh(mesh):
        result = jax.jit(lowerings.round_trip(NVFP4))(self.put(mesh, P("x")))
      np.testing.assert_array_equal(result, lowerings.round_trip(NVFP4)(X))

  def test_explicit_and_auto_axes_agree_with_one_device(self):
    kinds = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=kinds)
    x = np.float32(X)
    x[0, -1] = 100.0  # the largest value is in one shard
    function = jax.jit(
      lambda x: quantization.quantize(x, NVFP4, key=jax.random.key(0))
    )
    with jax.set_mesh(mesh):
      placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("x", "y")))
      result = function(placed)
    jax.tree.map(np.testing.assert_array_equal, result, function(x))


FLOOR = {"scale_rounding": "floor"}
assert_same_bits = contract.assert_same_bits


def each(x, format, *, axes=(-1, -2), **kwargs):
  return tuple(
    quantization.quantize(x, format, axis=axis, **kwargs) for axis in axes
  )


def numbers(shape, dtype=np.float32):
  """With NaN and Inf, and next to them the largest of the array.

  So blocks of one axis leave out of NVFP4's global scale what those of another
  do not.
  """
  x = np.random.default_rng(21).normal(size=shape)
  x[..., 3, 5], x[..., 3, 6] = np.nan, 60.0
  x[..., 40, 9], x[..., 45, 9] = -np.inf, -40.0
  x[..., 50, :] = 0.0
  x[..., 51, 2] = -0.0
  return jnp.asarray(x.astype(dtype))


class BitwiseTest(parameterized.TestCase):
  @parameterized.parameters(
    *(
      (format, {"axes": axes}, shape, dtype)
      for format in formats.FORMATS
      for shape, axes, dtype in (
        ((64, 96), (-1, -2), np.float32),
        ((64, 32), (0, 1), jnp.bfloat16),
        ((32, 64, 64), (0, 2), np.float16),
      )
    ),
    *((format, FLOOR, (64, 64), np.float32) for format in (MXFP8, MXFP4)),
    (NVFP4, {"global_scale": 0.37}, (64, 64), np.float32),
    (PER_16, {}, (80, 64), np.float32),  # no kernel has this format
  )
  @pytest.mark.sample(1)
  def test_quantize_both_is_quantize_along_each_axis(
    self, format, options, shape, dtype
  ):
    x = numbers(shape, dtype)
    result = quantization.quantize_both(x, format, **options)
    self.assertIsInstance(result, tuple)
    assert_same_bits(result, each(x, format, **options))
    axes = options.get("axes", (-1, -2))
    for q, axis in zip(result, axes, strict=True):
      self.assertEqual((q.shape, q.axis), (x.shape, axis % x.ndim))
    if options == FLOOR:
      up = each(x, format)
      self.assertTrue((result[0].scale != up[0].scale).any())
      self.assertTrue((result[1].scale != up[1].scale).any())
    if given := options.get("global_scale"):
      self.assertEqual(
        [q.global_scale for q in result], [np.float32(given)] * 2
      )

  def test_numbers_spoil_global_scales_of_each_axis_differently(self):
    row, column = quantization.quantize_both(numbers((64, 96)), NVFP4)
    # 60 is in the row's bad block, -40 in the column's.
    self.assertEqual(row.global_scale, np.float32(40) / np.float32(2688))
    self.assertEqual(column.global_scale, np.float32(60) / np.float32(2688))

  @parameterized.parameters(
    (MXFP8, (0, 64)), (NVFP4, (64, 0)), (NVFP4, (0, 32, 64))
  )
  @pytest.mark.sample(1)
  def test_empty_arrays_stay_empty(self, format, shape):
    x = jnp.zeros(shape)
    assert_same_bits(quantization.quantize_both(x, format), each(x, format))

  @parameterized.parameters(MXFP8, NVFP4)
  @pytest.mark.sample(1)
  def test_blockings_merge_and_pad_first(self, format):
    x = np.random.default_rng(22).normal(size=(3, 5, 40)).astype(np.float32)
    blockings = [
      blocking.Blocking(dims=(2,), lead=(0, 1), multiple=64),
      blocking.Blocking(dims=(0, 1), lead=(2,), multiple=32),
    ]
    first, second = blocked(x, format, blockings)
    padded = np.pad(x, ((0, 0), (0, 0), (0, 24)))
    quantize = functools.partial(
      quantization.quantize, format=format, packed=False
    )
    assert_same_bits(first, quantize(padded))
    merged = np.pad(x.transpose(2, 0, 1).reshape(40, 15), ((0, 0), (0, 17)))
    assert_same_bits(second, quantize(merged))


class TransformTest(parameterized.TestCase):
  @parameterized.parameters((MXFP8, "b, a, 64"), (NVFP4, "a*32, 64"))
  @pytest.mark.full
  def test_exported_module_serves_symbolic_sizes(self, format, shape):
    (*lead, rows, columns) = jax.export.symbolic_shape(shape)
    if lead:
      rows = 32 * rows
    x = jax.ShapeDtypeStruct((*lead, rows, columns), jnp.float32)
    exported = jax.export.export(
      jax.jit(lambda x: quantization.quantize_both(x, format)),
      platforms=("cpu", "cuda"),
    )(x)
    x = numbers((*(3 for _ in lead), 64, 64))
    assert_same_bits(exported.call(x), each(x, format))


class UnusedTest(parameterized.TestCase):
  """Results that nobody uses are not computed."""

  def kernel_calls(self, function):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return lowerings.calls(function, x)[0]

  @lowerings.needs_library
  def test_fp4_calls_a_kernel_for_each_axis_that_is_used(self):
    both = lambda x: quantization.quantize_both(x, MXFP4)
    self.assertEqual(self.kernel_calls(both), 2)
    for i in range(2):
      for leaf in ("values", "scale"):
        one = lambda x, i=i, leaf=leaf: getattr(both(x)[i], leaf)
        self.assertEqual(self.kernel_calls(one), 1)
    self.assertEqual(self.kernel_calls(lambda x: (both(x), x)[1]), 0)

  def test_the_one_that_is_used_has_its_own_global_scale(self):
    x, scales = numbers((64, 96)), np.float32([0.3, 7])
    blockings = [blocking.Blocking.along(d, 2, 16) for d in (1, 0)]
    for i, axis in enumerate((1, 0)):
      one = jax.jit(lambda x, g, i=i: blocked(x, NVFP4, blockings, g)[i])
      expected = quantization.quantize(
        x, NVFP4, axis=axis, global_scale=scales[i], packed=False
      )
      assert_same_bits(one(x, scales), expected)
