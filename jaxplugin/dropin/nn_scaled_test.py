# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`scaled_matmul` and `scaled_dot` against JAX's own, and NumPy in f64.

JAX's `scaled_matmul` runs on a CPU since 0.12. Here are also the signatures of
all drop-ins and the implementations that cannot be forced.
"""

import functools
import inspect
import itertools

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import nn
from jaxplugin.core import formats
from jaxplugin.testing import contract, nn_cases

BF16, F16, F32 = contract.BF16, contract.F16, contract.F32
E4M3, E5M2, E2M1 = formats.E4M3, formats.E5M2, formats.E2M1
E8M0 = formats.E8M0
NT_2D, NT_3D = nn_cases.NT_2D, nn_cases.NT_3D
Side, mx = nn_cases.Side, nn_cases.mx
rng_of, dequantized = nn_cases.rng_of, nn_cases.dequantized
scaled_dot = nn_cases.scaled_dot

INT8, INT32 = np.dtype(np.int8), np.dtype(np.int32)


class SignatureTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("scaled_matmul", nn.scaled_matmul, jax.nn.scaled_matmul),
    ("scaled_dot", nn.scaled_dot, jax.lax.scaled_dot),
    ("scaled_dot_general", nn.scaled_dot_general, jax.nn.scaled_dot_general),
    (
      "get_scaled_dot_general_config",
      nn.get_scaled_dot_general_config,
      jax.nn.get_scaled_dot_general_config,
    ),
  )
  def test_parameters_are_those_of_jax_and_implementation(self, ours, jaxs):
    def parameters(function):
      signature = inspect.signature(function)
      return [
        (p.name, p.kind, p.default) for p in signature.parameters.values()
      ]

    expected = parameters(jaxs)
    names = [name for name, _, _ in expected]
    is_config = ours is nn.get_scaled_dot_general_config
    if "implementation" not in names and not is_config:
      keyword = inspect.Parameter.KEYWORD_ONLY
      expected.append(("implementation", keyword, None))
    self.assertEqual(parameters(ours), expected)


class ScaledMatmulTest(parameterized.TestCase):
  def test_the_basic_example_of_jax(self):
    a = jnp.array([1, 2, 3]).reshape((1, 1, 3))
    b = jnp.array([4, 5, 6]).reshape((1, 1, 3))
    a_scales = jnp.array([0.5]).reshape((1, 1, 1))
    b_scales = jnp.array([0.5]).reshape((1, 1, 1))
    result = nn.scaled_matmul(a, b, a_scales, b_scales)
    np.testing.assert_array_equal(
      result, np.array([[[8.0]]], np.float32), strict=True
    )

  @parameterized.named_parameters(
    ("mxfp8", E4M3, E8M0, 32),
    ("mxfp8_e5m2", E5M2, E8M0, 32),
    ("mxfp4", E2M1, E8M0, 32),
    ("nvfp4", E2M1, E4M3, 16),
    ("blocks_of_1", E4M3, E8M0, 1),
    ("blocks_of_64", E4M3, E8M0, 64),
    ("bf16_scale", E4M3, BF16, 16),
    ("f32_scale", INT8, F32, 64),
    ("e8m0_blocks_of_16", E4M3, E8M0, 16),
  )
  @pytest.mark.sample(1)
  def test_random_data_is_within_the_contract_of_f64(
    self, dtype, scale_dtype, block
  ):
    lhs, rhs, lhs_scale, rhs_scale = self.operands(dtype, scale_dtype, block)
    exact, magnitude = contract.dot(
      dequantized(lhs, lhs_scale), dequantized(rhs, rhs_scale)
    )
    result = nn.scaled_matmul(lhs, rhs, lhs_scale, rhs_scale)
    bound = (contract.DOT_BOUND + nn_cases.SCALE_ROUNDING_BOUND) * magnitude
    contract.assert_within(result, exact, bound, F32)
    if not nn_cases.JAX_NN_RUNS_ON_CPU:
      return
    arrays = map(jnp.asarray, (lhs, rhs, lhs_scale, rhs_scale))
    jaxs = np.asarray(jax.nn.scaled_matmul(*arrays))
    contract.assert_within(result, jaxs.astype(np.float64), 2 * bound, F32)

  def operands(self, dtype, scale_dtype, block):
    (lhs, lhs_scale), (rhs, rhs_scale) = (
      mx((2, rows, 64), 2, dtype, block, scale_dtype).make(
        rng_of(20, rows), nn_cases.random_values, nn_cases.random_scale
      )
      for rows in (3, 5)
    )
    return lhs, rhs, lhs_scale, rhs_scale

  def test_an_f16_result_keeps_scales_that_f16_cannot_hold(self):
    lhs, lhs_scale = mx((1, 3, 32), 2).make(rng_of(24))
    rhs, rhs_scale = mx((1, 5, 32), 2).make(rng_of(25))
    lhs_scale = np.full_like(lhs_scale, 2.0**30)
    rhs_scale = np.full_like(rhs_scale, 2.0**-30)
    exact, _ = contract.dot(
      dequantized(lhs, lhs_scale), dequantized(rhs, rhs_scale)
    )
    result = nn.scaled_matmul(lhs, rhs, lhs_scale, rhs_scale, jnp.float16)
    contract.assert_exact(result, exact, F16)


class ImplementationTest(parameterized.TestCase):
  """Forced implementations, on the device that each is best at."""

  @parameterized.parameters("cudnn", "triton", "cpu")
  def test_unknown_format_is_refused_with_every_reason(self, name):
    dtypes = (E4M3, E8M0), (E2M1, E8M0), (E2M1, E4M3), (E4M3, BF16)
    for (dtype, scale_dtype), block in itertools.product(dtypes, (8, 64)):
      x, scale = mx((1, 3, 64), 2, dtype, block, scale_dtype).make(rng_of(30))
      message = (
        f"(?s)^scaled_matmul: implementation='{name}' does not support"
        f" {dtype.name} \\+ {scale_dtype.name} per {block} (?=.*\n  cudnn: )"
        "(?=.*\n  triton: )(?=.*\n  cpu: )(?=.*\n  xla: supported)"
      )
      with (
        jp.use_target(nn_cases.BEST_TARGETS[name]),
        self.assertRaisesRegex(NotImplementedError, message),
      ):
        nn.scaled_matmul(x, x, scale, scale, implementation=name)

  @parameterized.parameters("cudnn", "triton", "cpu")
  def test_a_dot_of_unquantized_operands_is_refused(self, name):
    x = jnp.ones((3, 32), jnp.bfloat16)
    for function, message in (
      (nn.scaled_dot, f"scaled_dot: implementation='{name}' does not"),
      (nn.scaled_dot_general, f"scaled_dot_general: .*'{name}'.*configs=None"),
    ):
      with (
        self.subTest(message),
        jp.use_target(nn_cases.BEST_TARGETS[name]),
        self.assertRaisesRegex(NotImplementedError, message),
      ):
        function(x, x, dimension_numbers=NT_2D, implementation=name)


def assert_exact(result, lhs, rhs, numbers=NT_2D):
  """Compares an f32 result with the f64 product of pairs (values, scale)."""
  exact, _ = contract.dot(dequantized(*lhs), dequantized(*rhs), numbers)
  contract.assert_exact(result, exact, F32)


def unknown(name, k, lhs, rhs):
  """Returns a case of formats that are not standard, [3, k] x [5, k]."""
  return name, mx((3, k), 1, *lhs), mx((5, k), 1, *rhs), NT_2D, False


# name, lhs, rhs, dimension_numbers, whether both sides are known formats.
SCALED_DOT_CASES = (
  ("mxfp8_2d_default", mx((3, 64), 1), mx((64, 5), 0), None, True),
  ("mxfp8_3d_default", mx((2, 3, 64), 2), mx((2, 64, 5), 1), None, True),
  ("nvfp4_4d_default", mx((2, 3, 1, 32), 3, E2M1, 16, E4M3),
    mx((2, 3, 32, 5), 2, E2M1, 16, E4M3), None, True),
  ("e5m2_nt", mx((3, 32), 1, E5M2), mx((5, 32), 1), NT_2D, True),
  ("mxfp4_by_mxfp8_batch_last", mx((32, 3, 2), 0, E2M1), mx((5, 32, 2), 1),
    (((0,), (1,)), ((2,), (2,))), True),
  ("batch_dims_swapped", mx((2, 3, 4, 32), 3), mx((3, 2, 5, 32), 3),
    (((3,), (3,)), ((1, 0), (0, 1))), True),
  ("scale_on_two_contracting_dims", Side((3, 4, 64), E4M3, (3, 2, 2), E8M0),
    Side((4, 64, 5), E4M3, (1, 2, 5), E8M0), (((1, 2), (0, 1)), ((), ())),
    True),
  unknown("block_8", 24, (E4M3, 8), (E4M3, 8)),
  unknown("blocks_of_3_and_32", 96, (E4M3, 3), ()),
  unknown("mxfp4_with_blocks_of_16", 32, (E2M1, 16), (E2M1, 16)),
  ("per_row_scales", Side((2, 3, 40), E4M3, (2, 3, 1), F32),
    Side((2, 5, 40), E4M3, (2, 5, 1), F32), NT_3D, False),
  unknown("bf16_scale", 64, (E4M3, 32, BF16), (E2M1, 8, F16)),
  unknown("e4m3_scale_of_e4m3_values", 64, (E4M3, 16, E4M3), (E4M3, 16, E5M2)),
  unknown("integers", 12, (INT32, 3, INT32), (INT8, 6, INT8)),
  unknown("bool_and_uint8_are_integers", 32, (np.dtype(np.bool_),),
    (np.dtype(np.uint8), 16, E4M3)),
  unknown("int4", 32, (np.dtype(ml_dtypes.int4),),
    (np.dtype(ml_dtypes.uint4),)),
  unknown("scaled_floats", 32, (F32, 16, F32), (BF16, 16, F32)),
  unknown("other_fp8", 32, (np.dtype(ml_dtypes.float8_e4m3fnuz),),
    (np.dtype(ml_dtypes.float8_e5m2fnuz),)),
  ("lhs_unscaled", Side((3, 32), BF16), mx((5, 32), 1), NT_2D, True),
  ("rhs_unscaled_fp8", mx((3, 32), 1), Side((5, 32), E5M2), NT_2D, True),
  ("rhs_unscaled_f16", mx((3, 24), 1, block=8), Side((5, 24), F16), NT_2D,
    False),
  ("both_unscaled", Side((3, 20), E4M3), Side((5, 20), BF16), NT_2D, None),
  ("no_values_of_a_format", mx((3, 0), 1), mx((5, 0), 1), NT_2D, None),
  ("no_values", mx((3, 0), 1, E4M3, 8, BF16), mx((5, 0), 1, E4M3, 8, BF16),
    NT_2D, None),
  ("no_unscaled_values", Side((3, 0), E4M3), Side((5, 0), E4M3), NT_2D, None),
  ("no_rows", mx((0, 24), 1, block=8), mx((5, 24), 1, block=8), NT_2D, False),
  ("nothing_contracted", Side((2, 3), E4M3, (2, 3), E8M0),
    Side((2, 5), E4M3, (2, 5), F32), (((), ()), ((0,), (0,))), False),
)  # fmt: skip


def default_numbers(numbers, ndim):
  """Returns the dimension numbers that `jax.lax.scaled_dot` documents."""
  if numbers is not None:
    return numbers
  batch = tuple(range(ndim - 2))
  return (((ndim - 1,), (ndim - 2,)), (batch, batch))


RESULT_DTYPES = [(BF16, F32)[i % 2] for i in range(len(SCALED_DOT_CASES))]


@functools.cache
def every_dot(function):
  """Returns one program of the dots of all cases."""

  def run(operands):
    return [
      scaled_dot(*sides, case[3], dtype, function)
      for case, dtype, sides in zip(
        SCALED_DOT_CASES, RESULT_DTYPES, operands, strict=True
      )
    ]

  return jax.jit(run)


class ScaledDotTest(parameterized.TestCase):
  def check_every_dot(self, function, *makers, bound=None):
    """Compares each result with f64: bits, unless there is a bound."""
    operands = [
      (lhs.make(rng := rng_of(1), *makers), rhs.make(rng, *makers))
      for _, lhs, rhs, *_ in SCALED_DOT_CASES
    ]
    for case, dtype, (lhs, rhs), result in zip(
      SCALED_DOT_CASES,
      RESULT_DTYPES,
      operands,
      every_dot(function)(operands),
      strict=True,
    ):
      numbers = default_numbers(case[3], lhs[0].ndim)
      exact, magnitude = contract.dot(
        dequantized(*lhs), dequantized(*rhs), numbers
      )
      with self.subTest(case[0]):
        if bound is None:
          contract.assert_exact(result, exact, dtype)
        else:
          contract.assert_within(result, exact, bound * magnitude, dtype)

  def test_integers_have_the_bits_of_f64(self):
    self.check_every_dot(nn.scaled_dot)

  @pytest.mark.full
  def test_integers_of_jaxs_function_have_them_too(self):
    def scaled_dot(lhs, *args, **kwargs):
      # JAX's function raises ZeroDivisionError for arrays without values.
      function = jax.lax.scaled_dot if lhs.size else nn.scaled_dot
      return function(lhs, *args, **kwargs)

    self.check_every_dot(scaled_dot)

  def test_random_data_is_within_the_contract_of_f64(self):
    self.check_every_dot(
      nn.scaled_dot,
      nn_cases.random_values,
      nn_cases.random_scale,
      bound=contract.DOT_BOUND + nn_cases.SCALE_ROUNDING_BOUND,
    )

  @parameterized.named_parameters(*SCALED_DOT_CASES)
  @pytest.mark.sample(16)
  def test_known_formats_are_recognized_and_others_are_not(
    self, lhs, rhs, numbers, is_known
  ):
    rng = rng_of(3)
    (lhs, lhs_scale), (rhs, rhs_scale) = lhs.make(rng), rhs.make(rng)
    configs = nn_cases.bound_configs(
      lambda a, b: scaled_dot((a, lhs_scale), (b, rhs_scale), numbers), lhs, rhs
    )
    if is_known is None:  # nothing is quantized
      self.assertEmpty(configs)
      return
    (config,) = configs
    used = [s.format for s in (config.lhs, config.rhs) if s.format is not None]
    self.assertLen(used, (lhs_scale is not None) + (rhs_scale is not None))
    self.assertEqual(all(f.is_standard for f in used), is_known)

  def test_the_default_result_is_bf16(self):
    lhs, lhs_scale = mx((3, 32), 1).make(rng_of(4))
    rhs, rhs_scale = mx((32, 5), 0).make(rng_of(5))
    kwargs = {"lhs_scale": lhs_scale, "rhs_scale": rhs_scale}
    result = nn.scaled_dot(lhs, rhs, **kwargs)
    self.assertEqual(result.dtype, jax.lax.scaled_dot(lhs, rhs, **kwargs).dtype)
    self.assertEqual(result.dtype, jnp.bfloat16)

  @parameterized.parameters(np.float32(1 + 2.0**-20), np.int16(257))
  def test_an_unscaled_operand_is_not_rounded(self, number):
    # In bf16, where JAX's own function multiplies, they are 1 and 256.
    lhs = np.full((1, 32), number)
    rhs, rhs_scale = np.ones((1, 32), E4M3), np.ones((1, 1), E8M0)
    result = scaled_dot((lhs, None), (rhs, rhs_scale))
    np.testing.assert_array_equal(result, [[32 * float(number)]])

  @parameterized.named_parameters(
    ("mxfp8", E4M3, E8M0, 32, 0xFF),
    ("nvfp4", E2M1, E4M3, 16, 0x7F),
    ("no_format", E4M3, E8M0, 8, 0xFF),
  )
  def test_a_nan_scale_makes_its_zeros_nan(
    self, dtype, scale_dtype, block, nan
  ):
    lhs, lhs_scale = mx((3, 64), 1, dtype, block, scale_dtype).make(rng_of(6))
    rhs = mx((5, 64), 1, dtype, block, scale_dtype).make(rng_of(7))
    lhs[1, block : 2 * block] = 0
    lhs_scale.view(np.uint8)[1, 1] = nan
    isnan = np.isnan(scaled_dot((lhs, lhs_scale), rhs))
    np.testing.assert_array_equal(isnan, [[False] * 5, [True] * 5, [False] * 5])

  @parameterized.parameters(8, 16)
  def test_only_nvfp4_refuses_negative_scales(self, block):
    lhs, lhs_scale = mx((3, 32), 1, E2M1, block, E4M3).make(rng_of(15))
    pair = lhs, (-lhs_scale.astype(np.float32)).astype(E4M3)
    if block == 16:
      with self.assertRaisesRegex(ValueError, "lhs_scale of nvfp4 must not be"):
        scaled_dot(pair, (lhs, None))
      return
    assert_exact(scaled_dot(pair, (lhs, None)), pair, (lhs, None))

  @parameterized.parameters(8, 32)
  @pytest.mark.sample(1)
  def test_rows_may_be_symbolic(self, block):
    (m,) = jax.export.symbolic_shape("m")
    rhs = mx((5, 64), 1, block=block).make(rng_of(10))
    f = jax.jit(lambda *lhs: scaled_dot(lhs, rhs))
    exported = jax.export.export(f)(
      jax.ShapeDtypeStruct((m, 64), E4M3),
      jax.ShapeDtypeStruct((m, 64 // block), E8M0),
    )
    lhs = mx((7, 64), 1, block=block).make(rng_of(11))
    assert_exact(exported.call(*lhs), lhs, rhs)

  def test_a_known_format_may_have_a_symbolic_contracting_size(self):
    (blocks,) = jax.export.symbolic_shape("blocks")
    exported = jax.export.export(jax.jit(lambda *x: scaled_dot(x, x)))(
      jax.ShapeDtypeStruct((3, 32 * blocks), E4M3),
      jax.ShapeDtypeStruct((3, blocks), E8M0),
    )
    x = mx((3, 64), 1).make(rng_of(12))
    assert_exact(exported.call(*x), x, x)

  @parameterized.named_parameters(
    ("blocks_of_8", mx((8, 128), 1, block=8), "x"),
    ("one_scale_a_row", Side((8, 128), E4M3, (8, 1), F32), None),
  )
  def test_a_sharded_contraction_is_exact(self, side, scale_axis):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x, scale = side.make(rng_of(14))
    put = lambda array, axis: jax.device_put(
      np.asarray(array), jax.NamedSharding(mesh, jax.P(None, axis))
    )
    f = jax.jit(lambda *x: scaled_dot(x, x))
    result = f(put(x, "x"), put(scale, scale_axis))
    assert_exact(result, (x, scale), (x, scale))
