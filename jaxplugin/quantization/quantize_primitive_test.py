# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels and operations agree, and each is where it belongs.

api_mx_test.py, api_nvfp4_test.py and api_dequantize_test.py compare with NumPy.
These tests compare one lowering with the other: `OPERATIONS` is a CPU without
kernels.
"""

import concurrent.futures
import functools
import threading

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.testing import contract
from jaxplugin.testing import quantization_lowerings as lowerings

MXFP8, MXFP8_E5M2 = formats.MXFP8, formats.MXFP8_E5M2
MXFP4, NVFP4 = formats.MXFP4, formats.NVFP4
P = jax.sharding.PartitionSpec
X = lowerings.X
NUM_THREADS = 8
CALLS_PER_THREAD = 10
F32_MIN_NORMAL = 2.0**-126

# Positive f32 numbers: ordinary ones, both sides of 2^-64 (below which tensors
# are quantized as if multiplied by 2^64), subnormals, and the largest.
GLOBAL_SCALES = (1.0, 0.37, 2.0**-63, 2.0**-65, 1e-40, 2.0**-149, 3.4e38)


def random_floats(rng, shape, kind):
  """f32: bit patterns of every kind, or numbers in a few binades, or zeros."""
  if kind == "bits":  # NaN and Inf of either sign, subnormals
    bits = rng.integers(0, 2**32, shape, np.uint32)
    x = bits.view(np.float32)
    # So many are not finite that most blocks would be spoiled.
    keep = np.isfinite(x) | (rng.random(shape) < 0.1)
    return np.where(keep, x, np.float32(1.5))
  if kind == "subnormals":
    bits = rng.integers(0, 2**24, shape, np.uint32)
    sign = rng.integers(0, 2, shape, np.uint32) << 31
    return (bits | sign).view(np.float32)
  if kind == "zeros":
    x = np.where(rng.random(shape) < 0.5, 0.0, -0.0)
    return np.where(rng.random(shape) < 0.02, 1e-3, x).astype(np.float32)
  exponent = rng.integers(-120, 120) - rng.integers(0, 12, shape)
  return np.ldexp(rng.normal(size=shape), exponent).astype(np.float32)


def random_shape(rng, format):
  shape = list(rng.integers(1, 6, rng.integers(1, 4)))
  axis = int(rng.integers(len(shape)))
  shape[axis] = format.block_size * int(rng.integers(1, 20))
  return tuple(map(int, shape)), axis


@lowerings.needs_library
class BitwiseTest(parameterized.TestCase):
  @parameterized.product(
    format=formats.KNOWN,
    kind=("bits", "subnormals", "zeros", "binades"),
    scale_rounding=("up", "floor"),
  )
  @pytest.mark.full
  def test_quantize_gives_the_same_bits_for_random_arrays(
    self, format, kind, scale_rounding
  ):
    seed = formats.KNOWN.index(format)
    # A format always has the same shapes, so XLA compiles most operations once.
    shapes = np.random.default_rng([7, seed])
    rng = np.random.default_rng([8, seed, len(kind)])
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
      shape, axis = random_shape(shapes, format)
      with np.errstate(over="ignore", invalid="ignore"):
        x = jnp.asarray(random_floats(rng, shape, kind).astype(dtype))
      # The kernels' own axis, and the one drawn.
      for a, arg in ((axis, x), (-1, jnp.moveaxis(x, axis, -1))):
        quantize = functools.partial(
          quantization.quantize,
          format=format,
          axis=a,
          scale_rounding=scale_rounding,
        )
        lowerings.assert_same_as_operations(quantize, arg)

  @parameterized.product(
    global_scale=GLOBAL_SCALES, kind=("bits", "subnormals", "binades")
  )
  @pytest.mark.sample(1)
  def test_quantize_gives_the_same_bits_under_a_given_global_scale(
    self, global_scale, kind
  ):
    rng = np.random.default_rng([9, len(kind)])
    ones = random_floats(rng, (3, 160), kind)
    for x in (ones, ones * np.float32(min(global_scale, 1.0))):
      quantize = lambda x: quantization.quantize(
        x, NVFP4, global_scale=global_scale
      )
      lowerings.assert_same_as_operations(quantize, x)

  @parameterized.parameters(0.0, -0.0, -1.0, np.nan, np.inf)
  @pytest.mark.sample(1)
  def test_traced_global_scale_that_is_no_scale_gives_the_same_bits(self, g):
    x = random_floats(np.random.default_rng(10), (2, 64), "binades")
    quantize = jax.jit(
      lambda x, g: quantization.quantize(x, NVFP4, global_scale=g)
    )
    lowerings.assert_same_as_operations(quantize, x, g)

  @parameterized.product(
    format=formats.KNOWN,
    dtype=("float32", "bfloat16", "float16"),
    global_scale=(None, 0.37, 1e-3, "leading"),
  )
  @pytest.mark.sample(1)
  def test_dequantize_gives_the_same_bits_where_they_are_normal(
    self, format, dtype, global_scale
  ):
    rng = np.random.default_rng(11)
    values = rng.integers(0, 2**format.value_bits, (3, 5, 96)).astype(np.uint8)
    scale = rng.integers(0, 256, (3, 5, 96 // format.block_size))
    if global_scale == "leading":
      global_scale = jnp.asarray([0.5, 3.0, 1e-3], jnp.float32)
    x = scaled_array.ScaledArray(
      jnp.asarray(values.view(format.array_dtype)),
      jnp.asarray(scale.astype(np.uint8).view(format.scale_dtype)),
      global_scale,
      format,
    )
    dequantize = lambda x: quantization.dequantize(x, dtype)
    for stored in (x, x.pack()):
      self.assertEqual(lowerings.calls(dequantize, stored), (0, 1))
      self.assertEqual(dequantize(stored).dtype, dtype)
      actual, expected = (
        np.asarray(f(stored)).astype(np.float32)
        for f in (dequantize, lowerings.by_operations(dequantize))
      )
      # Below it XLA:CPU flushes, the kernels do not.
      smallest = max(
        F32_MIN_NORMAL, float(jnp.finfo(jnp.dtype(dtype)).smallest_normal)
      )
      compared = ~(np.abs(actual) < smallest)
      self.assertGreater(compared.mean(), 0.2)
      np.testing.assert_array_equal(actual[compared], expected[compared])
      tiny = np.abs(expected[~compared])
      self.assertTrue((tiny <= smallest).all())

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
    rng = np.random.default_rng(12)
    calls = []
    for format in formats.KNOWN:
      x = random_floats(rng, (40, 4096), "binades")
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


PER_16 = formats.BlockFormat(
  name="mxfp8_per_16",
  values_dtype=formats.E4M3,
  scale_dtype=formats.E8M0,
  block_size=16,
)
NVFP4_TRIP = lowerings.round_trip(NVFP4)
BOTH, NEITHER = (1, 1), (0, 0)
# (name, function, array, calls of the kernels that quantize and dequantize,
# platforms of the module)
CALLS = (
  *((f.name, lowerings.round_trip(f), X, BOTH) for f in formats.KNOWN),
  ("bf16", lowerings.round_trip(MXFP8), X.astype(jnp.bfloat16), BOTH),
  ("rank_1", NVFP4_TRIP, X[0, 0], BOTH),
  # Along another axis only FP4 is quantized by kernels.
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

  @lowerings.needs_library
  def test_f64_is_rounded_to_f32_before_a_kernel(self):
    with jax.enable_x64(True):
      x = X.astype(np.float64) * (1 + 2.0**-40)
      actual = quantization.quantize(x, MXFP8)
    expected = quantization.quantize(x.astype(np.float32), MXFP8)
    contract.assert_same_bits(actual, expected)


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


if __name__ == "__main__":
  absltest.main()
