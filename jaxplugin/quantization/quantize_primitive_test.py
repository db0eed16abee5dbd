# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which modules call the kernels, also on meshes, and calls from threads.

api_mx_test.py, api_nvfp4_test.py and api_dequantize_test.py compare both with
NumPy, and backends/cpu_test.py compares them with each other.
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
