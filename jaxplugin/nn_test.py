# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`scaled_dot` and `scaled_matmul` against JAX's own, and NumPy in f64.

JAX's `lax.scaled_dot` runs on a CPU in every version; its `nn.scaled_matmul`
does since 0.12. The configs and `scaled_dot_general` have a test of their own.
"""

import functools
import inspect
import itertools

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import formats
from jaxplugin import nn
from jaxplugin import nn_testing
from jaxplugin import testing

BF16, F16, F32 = testing.BF16, testing.F16, testing.F32
E4M3, E5M2, E2M1 = formats.E4M3, formats.E5M2, formats.E2M1
E8M0 = formats.E8M0
INT8, INT32 = np.dtype(np.int8), np.dtype(np.int32)

NT_2D, NT_3D = nn_testing.NT_2D, nn_testing.NT_3D
Side, mx = nn_testing.Side, nn_testing.mx
rng_of, dequantized = nn_testing.rng_of, nn_testing.dequantized

# Dequantizing with an f32 scale, and a plain f32 operand, round once a side.
SCALE_ROUNDING_BOUND = 2 * 2.0**-24

# name, lhs, rhs, dimension_numbers, whether both sides are known formats.
SCALED_DOT_CASES = (
  ("mxfp8_2d_default", mx((3, 64), 1), mx((64, 5), 0), None, True),
  ("mxfp8_3d_default", mx((2, 3, 64), 2), mx((2, 64, 5), 1), None, True),
  (
    "nvfp4_4d_default",
    mx((2, 3, 1, 32), 3, E2M1, 16, E4M3),
    mx((2, 3, 32, 5), 2, E2M1, 16, E4M3),
    None,
    True,
  ),
  ("e5m2_nt", mx((3, 32), 1, E5M2), mx((5, 32), 1), NT_2D, True),
  (
    "mxfp4_by_mxfp8_batch_last",
    mx((32, 3, 2), 0, E2M1),
    mx((5, 32, 2), 1),
    (((0,), (1,)), ((2,), (2,))),
    True,
  ),
  (
    "batch_dims_swapped",
    mx((2, 3, 4, 32), 3),
    mx((3, 2, 5, 32), 3),
    (((3,), (3,)), ((1, 0), (0, 1))),
    True,
  ),
  (
    "scale_on_two_contracting_dims",
    Side((3, 4, 64), E4M3, (3, 2, 2), E8M0),
    Side((4, 64, 5), E4M3, (1, 2, 5), E8M0),
    (((1, 2), (0, 1)), ((), ())),
    True,
  ),
  ("block_8", mx((3, 24), 1, block=8), mx((5, 24), 1, block=8), NT_2D, False),
  (
    "blocks_of_3_and_32",
    mx((3, 96), 1, block=3),
    mx((5, 96), 1),
    NT_2D,
    False,
  ),
  (
    "mxfp4_with_blocks_of_16",
    mx((3, 32), 1, E2M1, 16),
    mx((5, 32), 1, E2M1, 16),
    NT_2D,
    False,
  ),
  (
    "per_row_scales",
    Side((2, 3, 40), E4M3, (2, 3, 1), F32),
    Side((2, 5, 40), E4M3, (2, 5, 1), F32),
    NT_3D,
    False,
  ),
  (
    "bf16_scale",
    mx((3, 64), 1, E4M3, 32, BF16),
    mx((5, 64), 1, E2M1, 8, F16),
    NT_2D,
    False,
  ),
  (
    "e4m3_scale_of_e4m3_values",
    mx((3, 64), 1, E4M3, 16, E4M3),
    mx((5, 64), 1, E4M3, 16, E5M2),
    NT_2D,
    False,
  ),
  (
    "integers",
    mx((3, 12), 1, INT32, 3, INT32),
    mx((5, 12), 1, INT8, 6, INT8),
    NT_2D,
    False,
  ),
  (
    "bool_and_uint8_are_integers",
    mx((3, 32), 1, np.dtype(np.bool_)),
    mx((5, 32), 1, np.dtype(np.uint8), 16, E4M3),
    NT_2D,
    False,
  ),
  (
    "int4",
    mx((3, 32), 1, np.dtype(ml_dtypes.int4)),
    mx((5, 32), 1, np.dtype(ml_dtypes.uint4)),
    NT_2D,
    False,
  ),
  (
    "scaled_floats",
    mx((3, 32), 1, F32, 16, F32),
    mx((5, 32), 1, BF16, 16, F32),
    NT_2D,
    False,
  ),
  (
    "other_fp8",
    mx((3, 32), 1, np.dtype(ml_dtypes.float8_e4m3fnuz)),
    mx((5, 32), 1, np.dtype(ml_dtypes.float8_e5m2fnuz)),
    NT_2D,
    False,
  ),
  ("lhs_unscaled", Side((3, 32), BF16), mx((5, 32), 1), NT_2D, True),
  ("rhs_unscaled_fp8", mx((3, 32), 1), Side((5, 32), E5M2), NT_2D, True),
  (
    "rhs_unscaled_f16",
    mx((3, 24), 1, block=8),
    Side((5, 24), F16),
    NT_2D,
    False,
  ),
  ("both_unscaled", Side((3, 20), E4M3), Side((5, 20), BF16), NT_2D, None),
  (
    "nothing_contracted",
    Side((2, 3), E4M3, (2, 3), E8M0),
    Side((2, 5), E4M3, (2, 5), F32),
    (((), ()), ((0,), (0,))),
    False,
  ),
)


def default_numbers(numbers, ndim):
  """What `jax.lax.scaled_dot` documents for `dimension_numbers=None`."""
  if numbers is not None:
    return numbers
  batch = tuple(range(ndim - 2))
  return (((ndim - 1,), (ndim - 2,)), (batch, batch))


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


class ScaledDotTest(parameterized.TestCase):
  @parameterized.named_parameters(
    *(
      (*case[:4], dtype)
      for case, dtype in zip(SCALED_DOT_CASES, itertools.cycle((BF16, F32)))
    )
  )
  def test_is_bit_equal_to_jax_and_f64_on_integers(
    self, lhs, rhs, numbers, dtype
  ):
    rng = rng_of(1)
    (lhs, lhs_scale), (rhs, rhs_scale) = lhs.make(rng), rhs.make(rng)
    arrays = [
      None if x is None else jnp.asarray(x)
      for x in (lhs, rhs, lhs_scale, rhs_scale)
    ]
    kwargs = {
      "lhs_scale": arrays[2],
      "rhs_scale": arrays[3],
      "dimension_numbers": numbers,
      "preferred_element_type": dtype,
    }
    result = nn.scaled_dot(*arrays[:2], **kwargs)
    exact, _ = testing.dot(
      dequantized(lhs, lhs_scale),
      dequantized(rhs, rhs_scale),
      default_numbers(numbers, lhs.ndim),
    )
    testing.assert_exact(result, exact, dtype)
    jaxs = jax.lax.scaled_dot(*arrays[:2], **kwargs)
    testing.assert_exact(jaxs, exact, dtype)  # the same test holds for JAX's

  @parameterized.named_parameters(
    *(
      (*case[:4], dtype)
      for case, dtype in zip(SCALED_DOT_CASES, itertools.cycle((BF16, F32)))
    )
  )
  def test_random_data_is_within_the_contract_of_f64(
    self, lhs, rhs, numbers, dtype
  ):
    rng = rng_of(2)
    lhs, lhs_scale = lhs.make(
      rng, nn_testing.random_values, nn_testing.random_scale
    )
    rhs, rhs_scale = rhs.make(
      rng, nn_testing.random_values, nn_testing.random_scale
    )
    exact, magnitude = testing.dot(
      dequantized(lhs, lhs_scale),
      dequantized(rhs, rhs_scale),
      default_numbers(numbers, lhs.ndim),
    )
    result = nn.scaled_dot(
      lhs,
      rhs,
      lhs_scale=lhs_scale,
      rhs_scale=rhs_scale,
      dimension_numbers=numbers,
      preferred_element_type=dtype,
    )
    bound = (testing.DOT_BOUND + SCALE_ROUNDING_BOUND) * magnitude
    testing.assert_within(result, exact, bound, dtype)

  @parameterized.named_parameters(*SCALED_DOT_CASES)
  def test_known_formats_are_recognized_and_others_are_not(
    self, lhs, rhs, numbers, is_known
  ):
    rng = rng_of(3)
    (lhs, lhs_scale), (rhs, rhs_scale) = lhs.make(rng), rhs.make(rng)
    configs = nn_testing.bound_configs(
      lambda a, b: nn.scaled_dot(
        a,
        b,
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale,
        dimension_numbers=numbers,
      ),
      lhs,
      rhs,
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

  def test_an_unscaled_f32_operand_is_not_rounded(self):
    # 1 + 2^-20 is 1 in bf16, where JAX's own function multiplies.
    lhs = np.full((1, 32), 1 + 2.0**-20, np.float32)
    rhs, rhs_scale = np.ones((1, 32), E4M3), np.ones((1, 1), E8M0)
    result = nn.scaled_dot(
      lhs,
      rhs,
      rhs_scale=rhs_scale,
      dimension_numbers=NT_2D,
      preferred_element_type=jnp.float32,
    )
    np.testing.assert_array_equal(result, [[32 * (1 + 2.0**-20)]])

  @parameterized.named_parameters(
    ("mxfp8", E4M3, E8M0, 32, 0xFF),
    ("nvfp4", E2M1, E4M3, 16, 0x7F),
    ("no_format", E4M3, E8M0, 8, 0xFF),
  )
  def test_a_nan_scale_makes_its_zeros_nan(
    self, dtype, scale_dtype, block, nan
  ):
    lhs, lhs_scale = mx((3, 64), 1, dtype, block, scale_dtype).make(rng_of(6))
    rhs, rhs_scale = mx((5, 64), 1, dtype, block, scale_dtype).make(rng_of(7))
    lhs[1, block : 2 * block] = 0
    lhs_scale.view(np.uint8)[1, 1] = nan
    result = nn.scaled_dot(
      lhs,
      rhs,
      lhs_scale=lhs_scale,
      rhs_scale=rhs_scale,
      dimension_numbers=NT_2D,
    )
    isnan = np.isnan(np.asarray(result, np.float32))
    np.testing.assert_array_equal(isnan, [[False] * 5, [True] * 5, [False] * 5])

  @parameterized.named_parameters(
    ("known_format", (3, 0), (3, 0), E8M0),
    ("no_format", (3, 0), (3, 0), BF16),
    ("unscaled", (3, 0), None, None),
  )
  def test_nothing_to_add_up_is_zero(self, shape, scale_shape, scale_dtype):
    x = jnp.zeros(shape, E4M3)
    scale = None if scale_shape is None else jnp.ones(scale_shape, scale_dtype)
    result = nn.scaled_dot(
      x, x, lhs_scale=scale, rhs_scale=scale, dimension_numbers=NT_2D
    )
    np.testing.assert_array_equal(result, np.zeros((3, 3), BF16), strict=True)

  @parameterized.parameters(8, 16)
  def test_only_nvfp4_refuses_negative_scales(self, block):
    lhs, lhs_scale = mx((3, 32), 1, E2M1, block, E4M3).make(rng_of(15))
    lhs_scale = (-lhs_scale.astype(np.float32)).astype(E4M3)
    dot = functools.partial(
      nn.scaled_dot,
      dimension_numbers=NT_2D,
      preferred_element_type=jnp.float32,
    )
    if block == 16:
      with self.assertRaisesRegex(ValueError, "lhs_scale of nvfp4 must not be"):
        dot(lhs, lhs, lhs_scale=lhs_scale)
      return
    x = dequantized(lhs, lhs_scale)
    exact, _ = testing.dot(x, lhs.astype(np.float64), NT_2D)
    testing.assert_exact(dot(lhs, lhs, lhs_scale=lhs_scale), exact, F32)

  def test_no_rows_give_no_rows(self):
    lhs, lhs_scale = mx((0, 24), 1, block=8).make(rng_of(8))
    rhs, rhs_scale = mx((24, 5), 0, block=8).make(rng_of(8))
    result = nn.scaled_dot(lhs, rhs, lhs_scale=lhs_scale, rhs_scale=rhs_scale)
    self.assertEqual(result.shape, (0, 5))

  @parameterized.parameters(
    *((8, pattern) for pattern in range(1, 16)), (32, 1), (32, 15)
  )
  def test_vmap_is_a_loop(self, block, pattern):
    in_axes = [0 if pattern & (1 << i) else None for i in range(4)]
    sides = mx((2, 3, 64), 2, block=block), mx((2, 5, 64), 2, block=block)
    arrays = []
    for i, is_mapped in enumerate(axis is not None for axis in in_axes):
      lead = (4,) if is_mapped else ()
      side = sides[i % 2]
      if i < 2:
        x = nn_testing.small_integers(rng_of(9, i), lead + side.shape, E4M3)
      else:
        x = nn_testing.small_scale(rng_of(9, i), lead + side.scale_shape, E8M0)
      arrays.append(x)

    def f(lhs, rhs, lhs_scale, rhs_scale):
      return nn.scaled_dot(
        lhs,
        rhs,
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale,
        dimension_numbers=NT_3D,
        preferred_element_type=jnp.float32,
      )

    result = jax.jit(jax.vmap(f, in_axes))(*map(jnp.asarray, arrays))
    for i in range(4):
      lhs, rhs, lhs_scale, rhs_scale = (
        x if axis is None else x[i]
        for x, axis in zip(arrays, in_axes, strict=True)
      )
      exact, _ = testing.dot(
        dequantized(lhs, lhs_scale), dequantized(rhs, rhs_scale), NT_3D
      )
      testing.assert_exact(result[i], exact, F32)

  @parameterized.parameters(8, 32)
  def test_rows_may_be_symbolic(self, block):
    (m,) = jax.export.symbolic_shape("m")
    rhs, rhs_scale = mx((5, 64), 1, block=block).make(rng_of(10))

    @jax.jit
    def f(lhs, lhs_scale):
      return nn.scaled_dot(
        lhs,
        rhs,
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale,
        dimension_numbers=NT_2D,
        preferred_element_type=jnp.float32,
      )

    exported = jax.export.export(f)(
      jax.ShapeDtypeStruct((m, 64), E4M3),
      jax.ShapeDtypeStruct((m, 64 // block), E8M0),
    )
    lhs, lhs_scale = mx((7, 64), 1, block=block).make(rng_of(11))
    exact, _ = testing.dot(
      dequantized(lhs, lhs_scale), dequantized(rhs, rhs_scale), NT_2D
    )
    testing.assert_exact(exported.call(lhs, lhs_scale), exact, F32)

  def test_a_known_format_may_have_a_symbolic_contracting_size(self):
    (blocks,) = jax.export.symbolic_shape("blocks")

    @jax.jit
    def f(x, scale):
      return nn.scaled_dot(
        x,
        x,
        lhs_scale=scale,
        rhs_scale=scale,
        dimension_numbers=NT_2D,
        preferred_element_type=jnp.float32,
      )

    exported = jax.export.export(f)(
      jax.ShapeDtypeStruct((3, 32 * blocks), E4M3),
      jax.ShapeDtypeStruct((3, blocks), E8M0),
    )
    x, scale = mx((3, 64), 1).make(rng_of(12))
    exact, _ = testing.dot(dequantized(x, scale), dequantized(x, scale), NT_2D)
    testing.assert_exact(exported.call(x, scale), exact, F32)

  @parameterized.named_parameters(
    ("blocks_of_8", mx((8, 128), 1, block=8), "x"),
    ("one_scale_a_row", Side((8, 128), E4M3, (8, 1), F32), None),
  )
  def test_a_sharded_contraction_is_exact(self, side, scale_axis):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x, scale = side.make(rng_of(14))
    put = lambda array, axis: jax.device_put(
      array, jax.NamedSharding(mesh, jax.P(None, axis))
    )

    @jax.jit
    def f(x, scale):
      return nn.scaled_dot(
        x,
        x,
        lhs_scale=scale,
        rhs_scale=scale,
        dimension_numbers=NT_2D,
        preferred_element_type=jnp.float32,
      )

    result = f(put(x, "x"), put(scale, scale_axis))
    exact, _ = testing.dot(dequantized(x, scale), dequantized(x, scale), NT_2D)
    testing.assert_exact(result, exact, F32)

  def test_differentiating_a_quantized_operand_names_the_way_to_train(self):
    rhs, rhs_scale = mx((32, 5), 0).make(rng_of(13))

    def loss(x):
      return nn.scaled_dot(x, rhs, rhs_scale=rhs_scale).sum()

    with self.assertRaisesRegex(NotImplementedError, "dot_general"):
      jax.grad(loss)(jnp.ones((3, 32), jnp.bfloat16))


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

  def test_the_mxfp8_example_of_jax(self):
    # 4 scales for 64 values are blocks of 16, so this is no MXFP8.
    dtype = jnp.float8_e4m3fn
    a = jax.random.normal(jax.random.PRNGKey(1), (3, 128, 64), dtype=dtype)
    b = jax.random.normal(jax.random.PRNGKey(2), (3, 128, 64), dtype=dtype)
    a_scales = jnp.ones((3, 128, 4), dtype=jnp.float8_e8m0fnu)
    b_scales = jnp.ones((3, 128, 4), dtype=jnp.float8_e8m0fnu)
    result = nn.scaled_matmul(a, b, a_scales, b_scales)
    exact, magnitude = testing.dot(
      np.asarray(a, np.float64), np.asarray(b, np.float64)
    )
    bound = testing.DOT_BOUND * magnitude
    testing.assert_within(result, exact, bound, F32)

  @parameterized.named_parameters(
    ("mxfp8", E4M3, E8M0, 32),
    ("mxfp8_e5m2", E5M2, E8M0, 32),
    ("mxfp4", E2M1, E8M0, 32),
    ("nvfp4", E2M1, E4M3, 16),
    ("blocks_of_1", E4M3, E8M0, 1),
    ("blocks_of_64", E4M3, E8M0, 64),
    ("bf16_scale", E4M3, BF16, 16),
    ("f32_scale", INT8, F32, 64),
  )
  def test_random_data_is_within_the_contract_of_f64(
    self, dtype, scale_dtype, block
  ):
    lhs, rhs, lhs_scale, rhs_scale = self.operands(dtype, scale_dtype, block)
    exact, magnitude = testing.dot(
      dequantized(lhs, lhs_scale), dequantized(rhs, rhs_scale)
    )
    result = nn.scaled_matmul(lhs, rhs, lhs_scale, rhs_scale)
    bound = (testing.DOT_BOUND + SCALE_ROUNDING_BOUND) * magnitude
    testing.assert_within(result, exact, bound, F32)
    if not nn_testing.JAX_NN_RUNS_ON_CPU:
      return
    arrays = map(jnp.asarray, (lhs, rhs, lhs_scale, rhs_scale))
    jaxs = np.asarray(jax.nn.scaled_matmul(*arrays))
    testing.assert_within(result, jaxs.astype(np.float64), 2 * bound, F32)

  def operands(self, dtype, scale_dtype, block):
    lhs, lhs_scale = mx((2, 3, 64), 2, dtype, block, scale_dtype).make(
      rng_of(20), nn_testing.random_values, nn_testing.random_scale
    )
    rhs, rhs_scale = mx((2, 5, 64), 2, dtype, block, scale_dtype).make(
      rng_of(21), nn_testing.random_values, nn_testing.random_scale
    )
    return lhs, rhs, lhs_scale, rhs_scale

  @parameterized.parameters(jnp.float32, jnp.bfloat16, jnp.float16)
  def test_is_bit_equal_to_jax_on_integers(self, dtype):
    if not nn_testing.JAX_NN_RUNS_ON_CPU:
      self.skipTest(nn_testing.NEEDS_JAX_NN)
    for block in (3, 16, 32):
      lhs, lhs_scale = mx((2, 3, 96), 2, block=block).make(rng_of(22))
      rhs, rhs_scale = mx((2, 5, 96), 2, block=block).make(rng_of(23))
      arrays = [jnp.asarray(x) for x in (lhs, rhs, lhs_scale, rhs_scale)]
      np.testing.assert_array_equal(
        nn.scaled_matmul(*arrays, preferred_element_type=dtype),
        jax.nn.scaled_matmul(*arrays, preferred_element_type=dtype),
        strict=True,
      )

  def test_an_f16_result_keeps_scales_that_f16_cannot_hold(self):
    lhs, lhs_scale = mx((1, 3, 32), 2).make(rng_of(24))
    rhs, rhs_scale = mx((1, 5, 32), 2).make(rng_of(25))
    lhs_scale = np.full_like(lhs_scale, 2.0**30)
    rhs_scale = np.full_like(rhs_scale, 2.0**-30)
    exact, _ = testing.dot(
      dequantized(lhs, lhs_scale), dequantized(rhs, rhs_scale)
    )
    result = nn.scaled_matmul(lhs, rhs, lhs_scale, rhs_scale, jnp.float16)
    testing.assert_exact(result, exact, F16)

  def test_jit_changes_no_bit(self):
    for block in (8, 32):
      operands = self.operands(E4M3, E8M0, block)
      np.testing.assert_array_equal(
        jax.jit(nn.scaled_matmul)(*operands), nn.scaled_matmul(*operands)
      )


class ImplementationTest(parameterized.TestCase):
  """Forced implementations, on the device that each is best at."""

  @parameterized.parameters("cudnn", "triton", "cpu")
  def test_what_is_no_format_is_refused_with_every_reason(self, name):
    dtypes = (E4M3, E8M0), (E2M1, E8M0), (E2M1, E4M3), (E4M3, BF16)
    for (dtype, scale_dtype), block in itertools.product(dtypes, (8, 64)):
      x, scale = mx((1, 3, 64), 2, dtype, block, scale_dtype).make(rng_of(30))
      message = (
        f"(?s)^scaled_matmul: implementation='{name}' cannot serve"
        f" {dtype.name} \\+ {scale_dtype.name} per {block} (?=.*\n  cudnn: )"
        "(?=.*\n  triton: )(?=.*\n  cpu: )(?=.*\n  xla: serves)"
      )
      with (
        jp.use_target(nn_testing.BEST_TARGETS[name]),
        self.assertRaisesRegex(NotImplementedError, message),
      ):
        nn.scaled_matmul(x, x, scale, scale, implementation=name)

  @parameterized.parameters("cudnn", "triton", "cpu")
  def test_an_unscaled_dot_is_refused(self, name):
    x = jnp.ones((3, 32), jnp.bfloat16)
    with (
      jp.use_target(nn_testing.BEST_TARGETS[name]),
      self.assertRaisesRegex(
        NotImplementedError, f"scaled_dot: implementation='{name}' cannot"
      ),
    ):
      nn.scaled_dot(x, x, dimension_numbers=NT_2D, implementation=name)

  @parameterized.parameters(8, 32)
  def test_xla_serves_everything(self, block):
    x, scale = mx((2, 3, 64), 2, block=block).make(rng_of(31))
    exact, _ = testing.dot(dequantized(x, scale), dequantized(x, scale))
    result = nn.scaled_matmul(x, x, scale, scale, implementation="xla")
    testing.assert_exact(result, exact, F32)
    numbers = NT_3D
    result = nn.scaled_dot(
      x,
      x,
      lhs_scale=scale,
      rhs_scale=scale,
      dimension_numbers=numbers,
      preferred_element_type=jnp.float32,
      implementation="xla",
    )
    testing.assert_exact(result, exact, F32)


def scaled_matmul_args(**changes):
  x, scale = ones(2, 3, 64), ones(2, 3, 2, dtype=E8M0)
  args = {"lhs": x, "rhs": x, "lhs_scales": scale, "rhs_scales": scale}
  return args | changes


def scaled_dot_args(**changes):
  x, scale = ones(2, 3, 64), ones(2, 3, 2, dtype=E8M0)
  args = {
    "lhs": x,
    "rhs": x,
    "lhs_scale": scale,
    "rhs_scale": scale,
    "dimension_numbers": NT_3D,
  }
  return args | changes


def ones(*shape, dtype=E4M3):
  return np.ones(shape, dtype)


# name, changes, error, message; JAX's type of error where JAX refuses as well.
MALFORMED_MATMULS = (
  (
    "rank_2",
    {"lhs": ones(3, 64)},
    ValueError,
    r"rank 3, .* got lhs \(3, 64\), rhs \(2, 3, 64\)",
  ),
  (
    "scale_rank",
    {"rhs_scales": ones(3, 2, dtype=E8M0)},
    ValueError,
    r"rank 3, .*rhs_scales \(3, 2\)",
  ),
  ("k", {"rhs": ones(2, 3, 32)}, ValueError, r"batch and k, .*\(2, 3, 32\)"),
  (
    "batch",
    {"rhs": ones(1, 3, 64)},
    ValueError,
    r"batch and k, .*\(1, 3, 64\)",
  ),
  (
    "num_blocks",
    {"rhs_scales": ones(2, 3, 4, dtype=E8M0)},
    ValueError,
    r"as many blocks, .*rhs_scales \(2, 3, 4\); scaled_dot",
  ),
  (
    "scale_rows",
    {"lhs_scales": ones(2, 4, 2, dtype=E8M0)},
    ValueError,
    r"rows of their operand, .*lhs_scales \(2, 4, 2\)",
  ),
  ("no_dtype", {"preferred_element_type": None}, ValueError, "got None"),
)
MALFORMED_MATMULS_HERE_ONLY = (
  (
    "k_is_no_multiple",
    {
      "lhs_scales": ones(2, 3, 5, dtype=E8M0),
      "rhs_scales": ones(2, 3, 5, dtype=E8M0),
    },
    TypeError,
    r"multiple of the number of blocks, got lhs \(2, 3, 64\).*\(2, 3, 5\)",
  ),
  (
    "no_blocks",
    {
      "lhs_scales": ones(2, 3, 0, dtype=E8M0),
      "rhs_scales": ones(2, 3, 0, dtype=E8M0),
    },
    TypeError,
    r"\(2, 3, 0\)",
  ),
  ("result_dtype", {"preferred_element_type": np.int32}, TypeError, "int32"),
  ("result_name", {"preferred_element_type": "f99"}, TypeError, "'f99'"),
  (
    "complex",
    {"lhs": ones(2, 3, 64, dtype=np.complex64)},
    TypeError,
    "lhs must have a real dtype, got complex64",
  ),
  (
    "complex_scale",
    {"rhs_scales": ones(2, 3, 2, dtype=np.complex64)},
    TypeError,
    "rhs_scale.* must have a real dtype, got complex64",
  ),
  ("list", {"lhs": [[[1.0]]]}, TypeError, r"lhs must be an array, got \[\[\[1"),
  ("none", {"rhs": None}, TypeError, "rhs must be an array, got None"),
  (
    "scaled_array",
    {"lhs": jp.quantize(jnp.ones((2, 3, 64)), jp.MXFP8)},
    TypeError,
    "lhs must be an array, got ScaledArray.*block_scaled_dot",
  ),
  (
    "unknown_implementation",
    {"implementation": "cuda"},
    ValueError,
    "implementation must be None or one of .*'xla'.*, got 'cuda'",
  ),
  (
    "negative_nvfp4_scale",
    {
      "lhs": ones(2, 3, 64, dtype=E2M1),
      "rhs": ones(2, 3, 64, dtype=E2M1),
      "lhs_scales": -ones(2, 3, 4, dtype=F32).astype(E4M3),
      "rhs_scales": ones(2, 3, 4, dtype=E4M3),
    },
    ValueError,
    "lhs_scale of nvfp4 must not be negative",
  ),
)
MALFORMED_DOTS = (
  (
    "operand_ranks",
    {"rhs": ones(3, 64), "rhs_scale": ones(3, 2, dtype=E8M0)},
    TypeError,
    r"same rank, got \(2, 3, 64\) and \(3, 64\)",
  ),
  (
    "scale_rank",
    {"lhs_scale": ones(3, 2, dtype=E8M0)},
    TypeError,
    r"lhs_scale \(3, 2\) for \(2, 3, 64\)",
  ),
  (
    "num_batch",
    {"dimension_numbers": (((2,), (2,)), ((0,), ()))},
    TypeError,
    r"as many batch dimensions .* got \(0,\) and \(\)",
  ),
  (
    "num_contracting",
    {"dimension_numbers": (((2,), (2, 1)), ((0,), (0,)))},
    TypeError,
    r"as many contracting dimensions .* got \(2,\) and \(2, 1\)",
  ),
  (
    "batch",
    {"rhs": ones(4, 3, 64), "rhs_scale": ones(4, 3, 2, dtype=E8M0)},
    TypeError,
    "batch sizes must agree, got 2 in dimension 0 of lhs .* and 4",
  ),
  (
    "k",
    {"rhs": ones(2, 3, 96), "rhs_scale": ones(2, 3, 3, dtype=E8M0)},
    TypeError,
    "contracting sizes must agree, got 64 .* and 96",
  ),
  (
    "scale_rows",
    {"lhs_scale": ones(2, 1, 2, dtype=E8M0)},
    TypeError,
    r"lhs_scale \(2, 1, 2\) for lhs \(2, 3, 64\)",
  ),
  (
    "k_is_no_multiple",
    {"rhs_scale": ones(2, 3, 5, dtype=E8M0)},
    TypeError,
    r"rhs_scale \(2, 3, 5\) for rhs \(2, 3, 64\)",
  ),
  (
    "blocks_of_1",
    {"rhs_scale": ones(2, 3, 64, dtype=E8M0)},
    TypeError,
    r"divided by 2 or more, got rhs_scale \(2, 3, 64\)",
  ),
  (
    "no_default_for_rank_1",
    {
      "lhs": ones(64),
      "rhs": ones(64),
      "lhs_scale": None,
      "rhs_scale": None,
      "dimension_numbers": None,
    },
    TypeError,
    r"rank 2 or more, .* got \(64,\) and \(64,\)",
  ),
  (
    "negative_dimension",
    {"dimension_numbers": (((-1,), (-1,)), ((0,), (0,)))},
    TypeError,
    r"dimensions \(-1, 0\) of lhs",
  ),
)
MALFORMED_DOTS_HERE_ONLY = (
  (
    "dimension_out_of_range",
    {"dimension_numbers": (((3,), (2,)), ((0,), (0,)))},
    TypeError,
    r"dimensions \(3, 0\) of lhs, which has rank 3",
  ),
  (
    "dimension_twice",
    {"dimension_numbers": (((2,), (2,)), ((2,), (2,)))},
    TypeError,
    r"a dimension of lhs twice: \(2, 2\)",
  ),
  (
    "no_numbers",
    {"dimension_numbers": ((2, 2), 0)},
    TypeError,
    r"dimension_numbers must be .*, got \(\(2, 2\), 0\)",
  ),
  ("result_dtype", {"preferred_element_type": np.int8}, TypeError, "int8"),
  (
    "no_scales",
    {"lhs_scale": ones(2, 3, 0, dtype=E8M0)},
    TypeError,
    r"lhs_scale \(2, 3, 0\)",
  ),
  ("list", {"lhs_scale": [1.0]}, TypeError, "lhs_scale must be an array"),
  (
    "unknown_implementation",
    {"implementation": "cuda"},
    ValueError,
    "implementation must be None or one of .*'xla'.*, got 'cuda'",
  ),
)


class MalformedCallTest(parameterized.TestCase):
  @parameterized.named_parameters(*MALFORMED_MATMULS)
  def test_scaled_matmul_raises_what_jax_raises(self, changes, error, message):
    args = scaled_matmul_args(**changes)
    with self.assertRaises(error) as jaxs:
      jax.eval_shape(lambda: jax.nn.scaled_matmul(**args))
    self.assertIs(type(jaxs.exception), error)
    self.check(nn.scaled_matmul, "scaled_matmul", args, error, message)

  @parameterized.named_parameters(*MALFORMED_MATMULS_HERE_ONLY)
  def test_scaled_matmul_refuses(self, changes, error, message):
    args = scaled_matmul_args(**changes)
    self.check(nn.scaled_matmul, "scaled_matmul", args, error, message)

  @parameterized.named_parameters(*MALFORMED_DOTS)
  def test_scaled_dot_raises_what_jax_raises(self, changes, error, message):
    args = scaled_dot_args(**changes)
    with self.assertRaises(error) as jaxs:
      jax.eval_shape(lambda: jax.lax.scaled_dot(**args))
    self.assertIs(type(jaxs.exception), error)
    self.check(nn.scaled_dot, "scaled_dot", args, error, message)

  @parameterized.named_parameters(*MALFORMED_DOTS_HERE_ONLY)
  def test_scaled_dot_refuses(self, changes, error, message):
    args = scaled_dot_args(**changes)
    self.check(nn.scaled_dot, "scaled_dot", args, error, message)

  def check(self, function, who, args, error, message):
    with self.assertRaisesRegex(error, f"(?s)^{who}: .*{message}"):
      function(**args)


if __name__ == "__main__":
  absltest.main()
