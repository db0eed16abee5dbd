# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The drop-ins against JAX's own functions, and against NumPy in f64.

JAX's `lax.scaled_dot` runs on a CPU in every version; its `nn.scaled_matmul`
and `nn.scaled_dot_general` do since 0.12. Quantization, and products in the
layout of any einsum, are written a second time here, in NumPy.
"""

import dataclasses
import functools
import inspect
import itertools
import math

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from jax import lax

import jaxplugin as jp
from jaxplugin import formats
from jaxplugin import nn
from jaxplugin import testing

BF16, F16, F32 = testing.BF16, testing.F16, testing.F32
E4M3, E5M2, E2M1 = formats.E4M3, formats.E5M2, formats.E2M1
E8M0 = formats.E8M0
INT8, INT32 = np.dtype(np.int8), np.dtype(np.int32)

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
JAX_NN_RUNS_ON_CPU = JAX_VERSION >= (0, 12)
NEEDS_JAX_NN = (
  "jax.nn.scaled_matmul has a CPU lowering since jax 0.12, this is"
  f" {jax.__version__}"
)

# Dequantizing with an f32 scale, and a plain f32 operand, round once a side.
SCALE_ROUNDING_BOUND = 2 * 2.0**-24
# Two results, each within DOT_BOUND of the same exact number.
TWO_RESULTS_BOUND = 2 * testing.DOT_BOUND
# An f32 product of unquantized numbers: n terms, each product and each sum
# rounded once, in any order, are within n * 2^-24 * sum|a * b|.
F32_ROUNDING = 2.0**-24

FORMAT_OF_MODE = {
  "mxfp8": (E4M3, 32),
  "mxfp4": (E2M1, 32),
  "nvfp4": (E2M1, 16),
}
E4M3_MAX, E2M1_MAX = 448.0, 6.0
MAX_OF = {E4M3: E4M3_MAX, E5M2: 57344.0, E2M1: E2M1_MAX}


def rng_of(*seed):
  return np.random.default_rng([20261207, *seed])


# Block-scaled operands of any dtypes, in NumPy.


def repeated(scale, shape):
  """f64 scale, repeated in every dimension up to `shape`."""
  scale = scale.astype(np.float64)
  for axis, size in enumerate(shape):
    if scale.shape[axis]:
      scale = np.repeat(scale, size // scale.shape[axis], axis)
  return scale


def dequantized(values, scale):
  if scale is None:
    return values.astype(np.float64)
  with np.errstate(invalid="ignore"):
    return values.astype(np.float64) * repeated(scale, values.shape)


def small_integers(rng, shape, dtype):
  """-1, 0, 1 or 2; without sign 0, 1 or 2."""
  low = 0 if dtype.kind == "u" or dtype == np.bool_ else -1
  high = 2 if dtype == np.bool_ else 3
  return rng.integers(low, high, shape).astype(np.float32).astype(dtype)


def small_scale(rng, shape, dtype):
  """1 or 2: with `small_integers` and k <= 64, sums are exact even in f16."""
  return rng.integers(1, 3, shape).astype(np.float32).astype(dtype)


def random_values(rng, shape, dtype):
  if dtype in MAX_OF:
    return testing.finite_codes(rng, shape, dtype)
  if dtype.kind == "i":
    return rng.integers(-100, 101, shape).astype(dtype)
  return rng.normal(size=shape).astype(dtype)


def random_scale(rng, shape, dtype):
  if dtype == E8M0:
    return rng.integers(97, 158, shape, np.uint8).view(E8M0)
  if dtype.kind == "i":
    return rng.integers(1, 20, shape).astype(dtype)
  magnitude = np.exp2(rng.uniform(-6, 6, shape))
  return magnitude.astype(np.float32).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Side:
  """Shape and dtypes of an operand and of its scale (None: unscaled)."""

  shape: tuple
  dtype: np.dtype
  scale_shape: tuple | None = None
  scale_dtype: np.dtype | None = None

  def make(self, rng, values=small_integers, scale=small_scale):
    x = values(rng, self.shape, self.dtype)
    if self.scale_shape is None:
      return x, None
    return x, scale(rng, self.scale_shape, self.scale_dtype)


def mx(shape, axis, dtype=E4M3, block=32, scale_dtype=E8M0):
  scale = tuple(s // block if d == axis else s for d, s in enumerate(shape))
  return Side(shape, dtype, scale, scale_dtype)


NT_2D = (((1,), (1,)), ((), ()))
NT_3D = (((2,), (2,)), ((0,), (0,)))
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


def bound_configs(function, *args):
  """The `DotConfig`s of all block_scaled_dots that a function calls."""

  def visit(jaxpr):
    for eqn in jaxpr.eqns:
      if eqn.primitive.name == "block_scaled_dot":
        yield eqn.params["config"]
      for parameter in eqn.params.values():
        inner = getattr(parameter, "jaxpr", None)
        if hasattr(inner, "eqns"):
          yield from visit(inner)

  return list(visit(jax.make_jaxpr(function)(*args).jaxpr))


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
    lhs, lhs_scale = lhs.make(rng, random_values, random_scale)
    rhs, rhs_scale = rhs.make(rng, random_values, random_scale)
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
    configs = bound_configs(
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
        x = small_integers(rng_of(9, i), lead + side.shape, E4M3)
      else:
        x = small_scale(rng_of(9, i), lead + side.scale_shape, E8M0)
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
    if not JAX_NN_RUNS_ON_CPU:
      return
    arrays = map(jnp.asarray, (lhs, rhs, lhs_scale, rhs_scale))
    jaxs = np.asarray(jax.nn.scaled_matmul(*arrays))
    testing.assert_within(result, jaxs.astype(np.float64), 2 * bound, F32)

  def operands(self, dtype, scale_dtype, block):
    lhs, lhs_scale = mx((2, 3, 64), 2, dtype, block, scale_dtype).make(
      rng_of(20), random_values, random_scale
    )
    rhs, rhs_scale = mx((2, 5, 64), 2, dtype, block, scale_dtype).make(
      rng_of(21), random_values, random_scale
    )
    return lhs, rhs, lhs_scale, rhs_scale

  @parameterized.parameters(jnp.float32, jnp.bfloat16, jnp.float16)
  def test_is_bit_equal_to_jax_on_integers(self, dtype):
    if not JAX_NN_RUNS_ON_CPU:
      self.skipTest(NEEDS_JAX_NN)
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


BEST_TARGETS = {
  "cudnn": jp.named_target("b200", cudnn="9.13"),
  "triton": jp.named_target("b200", cudnn="9.13"),
  "cpu": jp.named_target("cpu"),
}


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
        jp.use_target(BEST_TARGETS[name]),
        self.assertRaisesRegex(NotImplementedError, message),
      ):
        nn.scaled_matmul(x, x, scale, scale, implementation=name)

  @parameterized.parameters("cudnn", "triton", "cpu")
  def test_an_unscaled_dot_is_refused(self, name):
    x = jnp.ones((3, 32), jnp.bfloat16)
    with jp.use_target(BEST_TARGETS[name]):
      with self.assertRaisesRegex(
        NotImplementedError, f"scaled_dot: implementation='{name}' cannot"
      ):
        nn.scaled_dot(x, x, dimension_numbers=NT_2D, implementation=name)
      with self.assertRaisesRegex(
        NotImplementedError, f"scaled_dot_general: .*'{name}'.*configs=None"
      ):
        nn.scaled_dot_general(x, x, NT_2D, implementation=name)

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

  def test_the_implementation_reaches_the_gradient(self):
    configs = [nn.get_scaled_dot_general_config("mxfp8")] * 3
    x = jnp.ones((3, 32))

    def loss(x, w):
      return nn.scaled_dot_general(
        x, w, NT_2D, configs=configs, implementation="xla"
      ).sum()

    found = bound_configs(jax.grad(loss, (0, 1)), x, x)
    self.assertEqual([c.implementation for c in found], ["xla"] * 3)


# Quantization and products of `scaled_dot_general`, in NumPy.


def quantize(x, mode, global_scale=None, dtype=None):
  """f64 values of `x`, blocked along its last axis and padded."""
  default_dtype, block = FORMAT_OF_MODE[mode]
  dtype = default_dtype if dtype is None else dtype
  size = x.shape[-1]
  widths = [(0, 0)] * (x.ndim - 1) + [(0, -size % block)]
  x = np.pad(np.asarray(x, np.float32), widths)
  blocks = x.reshape(*x.shape[:-1], -1, block)
  amax = np.abs(blocks).max(-1, keepdims=True)
  largest = np.float32(MAX_OF[dtype])
  if mode == "nvfp4":
    global_scale = np.float32(global_scale)
    scale = np.minimum(amax / largest / global_scale, np.float32(E4M3_MAX))
    scale = scale.astype(E4M3).astype(np.float32)
    step = np.where(scale == 0, np.float32(1), scale * global_scale)
    exact_step = scale.astype(np.float64) * float(global_scale)
  else:
    # The least power of two with largest * step >= amax.
    exponent = np.frexp(amax)[1] - np.frexp(largest)[1]
    step = np.ldexp(np.float32(1), exponent)
    step = np.where(amax > largest * step, 2 * step, step)
    step = np.where(amax == 0, np.float32(1), step)
    exact_step = step.astype(np.float64)
  values = np.clip(blocks / step, -largest, largest).astype(dtype)
  result = values.astype(np.float64) * exact_step
  return result.reshape(x.shape)[..., :size]


def product(lhs, rhs, names, quantize_lhs, quantize_rhs):
  """f64 einsum of quantized operands, and of their magnitudes.

  Quantization is along the contracted letters, in the order of lhs, as one.
  `names` is an einsum like "bmk,bnk->bmn".
  """
  (lhs_names, rhs_names), out = split(names)
  batch = [c for c in lhs_names if c in rhs_names and c in out]
  contracted = [c for c in lhs_names if c in rhs_names and c not in out]

  def flat(x, own, quantize):
    free = [c for c in own if c not in batch and c not in contracted]
    order = "".join(batch + free + contracted)
    x = np.einsum(f"{''.join(own)}->{order}", np.asarray(x, np.float64))
    lead = x.shape[: len(batch) + len(free)]
    x = quantize(x.reshape(*lead, math.prod(x.shape[len(lead) :])))
    return x, "".join(batch + free)

  lhs, lhs_lead = flat(lhs, lhs_names, quantize_lhs)
  rhs, rhs_lead = flat(rhs, rhs_names, quantize_rhs)
  equation = f"{lhs_lead}Z,{rhs_lead}Z->{out}"
  return (
    np.einsum(equation, lhs, rhs),
    np.einsum(equation, np.abs(lhs), np.abs(rhs)),
  )


def split(names):
  operands, out = names.split("->")
  return operands.split(","), out


def numbers_of(names):
  """`lax.dot_general`'s dimension numbers of an einsum."""
  (lhs, rhs), out = split(names)
  batch = [c for c in out if c in lhs and c in rhs]
  contracted = [c for c in lhs if c in rhs and c not in out]
  dims = lambda own, letters: tuple(own.index(c) for c in letters)
  return (
    (dims(lhs, contracted), dims(rhs, contracted)),
    (dims(lhs, batch), dims(rhs, batch)),
  )


SIZES = {"a": 2, "b": 3, "k": 40, "l": 3, "m": 5, "n": 7, "p": 2, "q": 3}
EINSUMS = (
  "bmk,bnk->bmn",
  "mk,kn->mn",
  "kmb,bkn->bmn",
  "abmk,bank->bamn",  # batch dimensions not in the order of lhs
  "mkl,lnk->mn",  # two contracting dimensions, in another order in rhs
  "mpk,qkn->mpqn",
  "mk,k->m",  # an operand's gradient is an outer product
  "k,k->",
  "bm,bn->bmn",  # nothing is contracted
)
MODES = ("mxfp8", "mxfp4", "nvfp4")
GLOBAL_SCALE = 2.0**-9
# name, einsum, mode, dtypes of lhs, of rhs and of the result.
DOT_GENERAL_CASES = tuple(
  (f"{names}_{mode}", names, mode, dtypes)
  for (names, mode), dtypes in zip(
    (
      *itertools.product(EINSUMS, ("mxfp8", "nvfp4")),
      *itertools.product((EINSUMS[2], EINSUMS[4]), ("mxfp4",)),
    ),
    itertools.cycle(
      ((F32, F32, F32), (BF16, BF16, BF16), (F16, BF16, F32), (BF16, F32, F16))
    ),
  )
)


def floats(seed, names, dtype=np.float32):
  shape = tuple(SIZES[c] for c in names)
  return rng_of(seed).normal(size=shape).astype(dtype)


def config(mode, global_scale=GLOBAL_SCALE):
  if mode != "nvfp4":
    return nn.get_scaled_dot_general_config(mode)
  return nn.get_scaled_dot_general_config(mode, jnp.float32(global_scale))


def quantizer(mode, global_scale=GLOBAL_SCALE, dtype=None):
  return lambda x: quantize(x, mode, global_scale, dtype)


def expected_results(names, mode, arrays, global_scales):
  """f64 (exact, bound) of `scaled_dot_general` and of both gradients.

  Args:
    names: the einsum.
    mode: that of all three configs.
    arrays: lhs, rhs and the gradient of the result.
    global_scales: of lhs and of rhs.
  """
  lhs, rhs, g = arrays
  (lhs_names, rhs_names), out = split(names)
  q_lhs, q_rhs = (quantizer(mode, scale) for scale in global_scales)
  exact, magnitude = product(lhs, rhs, names, q_lhs, q_rhs)
  results = [(exact, testing.DOT_BOUND * magnitude)]
  for x, scale, other, q_other, equation in (
    (lhs, global_scales[0], rhs, q_rhs, f"{out},{rhs_names}->{lhs_names}"),
    (rhs, global_scales[1], lhs, q_lhs, f"{out},{lhs_names}->{rhs_names}"),
  ):
    if mode != "nvfp4":
      exact, magnitude = product(g, other, equation, quantizer(mode), q_other)
      results.append((exact, testing.DOT_BOUND * magnitude))
      continue
    # In high precision, and zero where x was clipped.
    same = lambda x: x
    exact, magnitude = product(g, other, equation, same, same)
    passes = np.abs(x.astype(np.float64)) <= scale * E2M1_MAX * E4M3_MAX
    num_terms = min(g.size, other.size)
    results.append(
      (exact * passes, num_terms * F32_ROUNDING * magnitude * passes)
    )
  return results


class ConfigTest(parameterized.TestCase):
  @parameterized.parameters(*MODES)
  def test_fields_are_those_of_jax(self, mode):
    if mode == "mxfp4" and JAX_VERSION < (0, 11):
      self.skipTest(f"jax {jax.__version__} has no mode mxfp4")
    for args in ((mode,), (mode, jnp.array([0.5], jnp.float32))):
      if mode == "mxfp4" and len(args) == 2:
        continue
      ours = nn.get_scaled_dot_general_config(*args)
      jaxs = jax.nn.get_scaled_dot_general_config(*args)
      self.assertEqual(
        [f.name for f in dataclasses.fields(ours)],
        [f.name for f in dataclasses.fields(jaxs)],
      )
      for name in ("mode", "block_size", "infer_only"):
        self.assertEqual(getattr(ours, name), getattr(jaxs, name))
      for name in ("data_type", "scale_type"):
        self.assertEqual(
          jnp.dtype(getattr(ours, name)), jnp.dtype(getattr(jaxs, name))
        )
      if jaxs.global_scale is None:
        self.assertIsNone(ours.global_scale)
      else:
        np.testing.assert_array_equal(
          ours.global_scale, jaxs.global_scale, strict=True
        )

  def test_an_unknown_mode_lists_the_known_ones(self):
    with self.assertRaisesRegex(ValueError, "mxfp8, mxfp4, nvfp4, got 'fp8'"):
      nn.get_scaled_dot_general_config("fp8")

  def test_mxfp4_refuses_a_global_scale(self):
    with self.assertRaisesRegex(ValueError, "mxfp4 has no global scale"):
      nn.get_scaled_dot_general_config("mxfp4", jnp.float32(0.5))

  @parameterized.parameters("mxfp8", "nvfp4")
  def test_configs_of_jax_give_the_same_bits(self, mode):
    names = "bmk,bnk->bmn"
    lhs, rhs = floats(40, "bmk"), floats(41, "bnk")
    scale = jnp.array([0.5], jnp.float32)
    results = []
    for module in (nn, jax.nn):
      configs = [module.get_scaled_dot_general_config(mode, scale)] * 3

      def f(lhs, rhs, configs=configs):
        return nn.scaled_dot_general(
          lhs, rhs, numbers_of(names), configs=configs
        )

      out, vjp = jax.vjp(f, lhs, rhs)
      results.append((out, *vjp(out)))
    jax.tree.map(np.testing.assert_array_equal, *results)

  def test_a_config_is_an_argument_of_a_jitted_function(self):
    lhs, rhs = floats(42, "mk"), floats(43, "nk")
    configs = [config("nvfp4", 0.25)] * 3

    @jax.jit
    def f(lhs, rhs, configs):
      return nn.scaled_dot_general(lhs, rhs, NT_2D, configs=configs)

    exact, magnitude = product(
      lhs, rhs, "mk,nk->mn", quantizer("nvfp4", 0.25), quantizer("nvfp4", 0.25)
    )
    testing.assert_within(
      f(lhs, rhs, configs), exact, testing.DOT_BOUND * magnitude, F32
    )


class ScaledDotGeneralTest(parameterized.TestCase):
  @parameterized.named_parameters(*DOT_GENERAL_CASES)
  def test_result_and_gradients_are_those_of_f64(self, names, mode, dtypes):
    (lhs_names, rhs_names), out = split(names)
    lhs = floats(50, lhs_names, dtypes[0])
    rhs = floats(51, rhs_names, dtypes[1])
    g = floats(52, out, dtypes[2])
    lhs_scale, rhs_scale = 2.0**-12, 2.0**-11  # clip above 0.65625 and 1.3125
    configs = [config(mode, lhs_scale), config(mode, rhs_scale), config(mode)]

    @jax.jit
    def f(lhs, rhs, g):
      dot = functools.partial(
        nn.scaled_dot_general,
        dimension_numbers=numbers_of(names),
        preferred_element_type=dtypes[2],
        configs=configs,
      )
      result, vjp = jax.vjp(dot, lhs, rhs)
      return result, *vjp(g)

    results = f(lhs, rhs, g)
    expected = expected_results(
      names, mode, (lhs, rhs, g), (lhs_scale, rhs_scale)
    )
    if mode == "nvfp4":  # some are clipped and some are not
      for gradient, _ in expected[1:]:
        self.assertBetween((gradient == 0).mean(), 0.05, 0.95)
    for actual, (exact, bound), dtype in zip(
      results, expected, (dtypes[2], *dtypes[:2]), strict=True
    ):
      testing.assert_within(actual, exact, bound, dtype)

  def test_the_mask_passes_the_limit_and_stops_the_next_number(self):
    scale = np.float32(0.3)
    limit = scale * np.float32(E2M1_MAX) * np.float32(E4M3_MAX)
    above = np.nextafter(limit, np.float32(np.inf))
    row = np.array([limit, above, -limit, -above, np.nan, 1], np.float32)
    x = jnp.asarray(np.tile(row, (1, 3)))
    configs = [config("nvfp4", scale)] * 3

    def loss(x):
      ones = jnp.ones_like(x)
      out = nn.scaled_dot_general(x, ones, NT_2D, configs=configs)
      return jnp.where(jnp.isnan(out), 0, out).sum() + out.sum()

    gradient = jax.grad(loss)(x)
    np.testing.assert_array_equal(
      gradient != 0, np.tile([True, False, True, False, False, True], (1, 3))
    )

  def test_mixed_formats_share_a_product(self):
    lhs, rhs, g = floats(58, "mk"), floats(59, "nk"), floats(60, "mn")
    gradient_config = dataclasses.replace(
      nn.get_scaled_dot_general_config("mxfp8"), data_type=jnp.float8_e5m2
    )
    configs = [config("nvfp4"), config("mxfp8"), gradient_config]

    def f(lhs, rhs):
      return nn.scaled_dot_general(lhs, rhs, NT_2D, configs=configs)

    out, vjp = jax.vjp(f, lhs, rhs)
    as_gradient = quantizer("mxfp8", dtype=E5M2)
    for actual, expected in zip(
      (out, *vjp(jnp.asarray(g))),
      (
        product(lhs, rhs, "mk,nk->mn", quantizer("nvfp4"), quantizer("mxfp8")),
        product(g, rhs, "mn,nk->mk", as_gradient, quantizer("mxfp8")),
        product(g, lhs, "mn,mk->nk", as_gradient, quantizer("nvfp4")),
      ),
      strict=True,
    ):
      exact, magnitude = expected
      bound = testing.DOT_BOUND * magnitude
      testing.assert_within(actual, exact, bound, F32)

  def test_other_block_sizes_are_served(self):
    lhs, rhs = floats(61, "mk"), floats(62, "nk")
    half = dataclasses.replace(config("mxfp8"), block_size=16)
    result = nn.scaled_dot_general(lhs, rhs, NT_2D, configs=[half] * 3)

    def in_halves(x):
      x = np.pad(x, [(0, 0), (0, -x.shape[1] % 16)])
      return np.concatenate(
        [quantize(part, "mxfp8") for part in np.split(x, x.shape[1] // 16, 1)],
        1,
      )

    exact, magnitude = product(lhs, rhs, "mk,nk->mn", in_halves, in_halves)
    testing.assert_within(result, exact, testing.DOT_BOUND * magnitude, F32)

  @parameterized.parameters("mxfp8", "nvfp4")
  def test_the_order_of_contracting_pairs_changes_no_bit(self, mode):
    lhs, rhs = floats(65, "mkl"), floats(66, "lnk")
    configs = [config(mode)] * 3

    def f(numbers):
      def g(lhs, rhs):
        return nn.scaled_dot_general(lhs, rhs, numbers, configs=configs)

      out, vjp = jax.vjp(g, lhs, rhs)
      return out, *vjp(out)

    jax.tree.map(
      np.testing.assert_array_equal,
      f((((1, 2), (2, 0)), ((), ()))),
      f((((2, 1), (0, 2)), ((), ()))),
    )

  def test_without_configs_it_is_dot_general(self):
    lhs, rhs = floats(67, "bmk"), floats(68, "bnk")
    numbers = numbers_of("bmk,bnk->bmn")
    for dtype in (np.float32, jnp.bfloat16, None):
      np.testing.assert_array_equal(
        nn.scaled_dot_general(lhs, rhs, numbers, preferred_element_type=dtype),
        lax.dot_general(lhs, rhs, numbers, preferred_element_type=dtype),
        strict=True,
      )
    jaxs = jax.nn.scaled_dot_general(lhs, rhs, numbers)
    np.testing.assert_array_equal(
      nn.scaled_dot_general(lhs, rhs, numbers), jaxs, strict=True
    )

  def test_the_nvfp4_example_of_jax(self):
    global_scale = jnp.array([0.5], jnp.float32)
    configs = [nn.get_scaled_dot_general_config("nvfp4", global_scale)] * 3
    scaled_dot_general_fn = functools.partial(
      nn.scaled_dot_general, configs=configs
    )
    lhs = jax.random.normal(jax.random.PRNGKey(1), (3, 128, 64))
    rhs = jax.random.normal(jax.random.PRNGKey(2), (3, 128, 64))
    out = scaled_dot_general_fn(lhs, rhs, (((2,), (2,)), ((0,), (0,))))
    exact, magnitude = product(
      lhs, rhs, "bmk,bnk->bmn", quantizer("nvfp4", 0.5), quantizer("nvfp4", 0.5)
    )
    testing.assert_within(out, exact, testing.DOT_BOUND * magnitude, F32)

  @parameterized.product(names=("kmb,bkn->bmn", "mpk,qkn->mpqn"), mode=MODES)
  def test_result_and_gradients_are_those_of_jax(self, names, mode):
    if not JAX_NN_RUNS_ON_CPU:
      self.skipTest(NEEDS_JAX_NN)
    # JAX needs whole blocks along every dimension that some product contracts.
    sizes = {"b": 2, "k": 64, "m": 32, "n": 32, "p": 2, "q": 1}
    (lhs_names, rhs_names), out_names = split(names)
    rng = rng_of(70)
    lhs, rhs, g = (
      rng.normal(size=[sizes[c] for c in letters]).astype(np.float32)
      for letters in (lhs_names, rhs_names, out_names)
    )
    scale = jnp.array([0.5], jnp.float32) if mode == "nvfp4" else None
    configs = [jax.nn.get_scaled_dot_general_config(mode, scale)] * 3
    results = []
    for module in (nn, jax.nn):

      @jax.jit
      def f(lhs, rhs, g, module=module):
        dot = functools.partial(
          module.scaled_dot_general,
          dimension_numbers=numbers_of(names),
          configs=configs,
        )
        out, vjp = jax.vjp(dot, lhs, rhs)
        return out, *vjp(g)

      results.append(f(lhs, rhs, g))
    expected = expected_results(names, mode, (lhs, rhs, g), (0.5, 0.5))
    for ours, jaxs, (exact, bound) in zip(*results, expected, strict=True):
      testing.assert_within(ours, exact, bound, F32)
      testing.assert_within(jaxs, exact, bound, F32)

  @parameterized.parameters((), (1,))
  def test_a_traced_global_scale_has_a_zero_gradient(self, *shape):
    lhs, rhs = floats(71, "mk"), floats(72, "nk")
    names = "mk,nk->mn"

    @jax.jit
    def f(lhs, rhs, scale):
      configs = [nn.get_scaled_dot_general_config("nvfp4", scale)] * 3
      return nn.scaled_dot_general(lhs, rhs, NT_2D, configs=configs)

    scale = jnp.full(shape, GLOBAL_SCALE, jnp.float32)
    out, vjp = jax.vjp(f, lhs, rhs, scale)
    exact, magnitude = product(
      lhs, rhs, names, quantizer("nvfp4"), quantizer("nvfp4")
    )
    testing.assert_within(out, exact, testing.DOT_BOUND * magnitude, F32)
    np.testing.assert_array_equal(
      vjp(out)[2], np.zeros(shape, np.float32), strict=True
    )

  def test_the_global_scale_may_be_state_that_training_updates(self):
    rhs = floats(73, "nk")

    def step(scale, lhs):
      configs = [nn.get_scaled_dot_general_config("nvfp4", scale)] * 3
      loss = lambda x: nn.scaled_dot_general(
        x, rhs, NT_2D, configs=configs
      ).sum()
      gradient = jax.grad(loss)(lhs)
      return jnp.max(jnp.abs(lhs)).reshape(1) / (E2M1_MAX * E4M3_MAX), gradient

    steps = jnp.stack([floats(74, "mk"), floats(75, "mk"), floats(76, "mk")])
    first = jnp.array([1.0], jnp.float32)
    final, gradients = jax.lax.scan(step, first, steps)
    scale = first
    for lhs, gradient in zip(steps, gradients, strict=True):
      limit = np.float32(scale[0]) * np.float32(6) * np.float32(448)
      passes = np.abs(np.asarray(lhs)) <= limit
      expected = np.where(passes, rhs.astype(np.float64).sum(0), 0)
      bound = SIZES["n"] * F32_ROUNDING * np.abs(rhs).sum(0) * passes
      testing.assert_within(gradient, expected, bound, F32)
      scale = jnp.max(jnp.abs(lhs)).reshape(1) / (E2M1_MAX * E4M3_MAX)
    np.testing.assert_array_equal(final, scale)

  @parameterized.parameters(*MODES)
  def test_integers_are_multiplied_as_floats(self, mode):
    values = rng_of(77).integers(-9, 10, (2, 5, 40))
    lhs, rhs = values.astype(np.int32)
    exact, magnitude = product(
      lhs, rhs, "mk,nk->mn", quantizer(mode), quantizer(mode)
    )
    result = nn.scaled_dot_general(lhs, rhs, NT_2D, configs=[config(mode)] * 3)
    testing.assert_within(result, exact, testing.DOT_BOUND * magnitude, F32)

  @parameterized.parameters(*MODES)
  def test_empty_sizes_give_zero_or_nothing(self, mode):
    configs = [config(mode)] * 3
    numbers = numbers_of("km,kn->mn")

    @jax.jit
    def f(lhs, rhs):
      dot = lambda lhs, rhs: nn.scaled_dot_general(
        lhs, rhs, numbers, configs=configs
      )
      out, vjp = jax.vjp(dot, lhs, rhs)
      return out, *vjp(out)

    for m, n, k in ((3, 4, 0), (0, 4, 0), (0, 4, 5), (3, 0, 5)):
      results = f(jnp.ones((k, m)), jnp.ones((k, n)))
      for result, shape in zip(results, ((m, n), (k, m), (k, n)), strict=True):
        np.testing.assert_array_equal(
          result, np.zeros(shape, np.float32), strict=True
        )

  @parameterized.parameters(
    ("mxfp8", (0, 0, 0)),
    ("mxfp8", (0, None, None)),
    ("nvfp4", (0, 0, 0)),
    ("nvfp4", (None, 1, None)),
    ("nvfp4", (None, None, 0)),
  )
  def test_vmap_of_result_and_gradients_is_a_loop(self, mode, in_axes):
    lhs, rhs = floats(78, "bmk"), floats(79, "nbk")
    scales = np.array([0.5, 0.25, 2.0**-9], np.float32)
    arrays = [
      x if axis is not None else np.take(x, 0, own)
      for x, axis, own in zip(
        (lhs, rhs, scales), in_axes, (0, 1, 0), strict=True
      )
    ]
    in_axes = tuple(
      own if axis is not None else None
      for axis, own in zip(in_axes, (0, 1, 0), strict=True)
    )

    def f(lhs, rhs, scale):
      scale = scale if mode == "nvfp4" else None
      configs = [nn.get_scaled_dot_general_config(mode, scale)] * 3

      def dot(lhs, rhs):
        return nn.scaled_dot_general(lhs, rhs, NT_2D, configs=configs)

      out, vjp = jax.vjp(dot, lhs, rhs)
      return out, *vjp(jnp.ones_like(out))

    mapped = jax.jit(jax.vmap(f, in_axes))(*arrays)
    f = jax.jit(f)
    for i in range(3):
      one = f(
        *(
          jnp.asarray(x if axis is None else np.take(x, i, axis))
          for x, axis in zip(arrays, in_axes, strict=True)
        )
      )
      for a, b in zip(mapped, one, strict=True):
        # The order of adding may differ, the operands are the same: at most
        # 40 terms, each at most 10 * 10 (|x| < 5, quantized at most doubled).
        np.testing.assert_allclose(
          a[i], b, rtol=0, atol=TWO_RESULTS_BOUND * 40 * 100
        )

  @parameterized.parameters("mxfp8", "nvfp4")
  def test_gradients_inside_shard_map_are_summed_over_the_devices(self, mode):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    # One row a device: what is summed is the same with and without devices,
    # but for mxfp8, whose blocks of rows then are a device's own.
    lhs = jnp.asarray(rng_of(82).normal(size=(4, 40)), jnp.float32)
    rhs = jnp.asarray(floats(83, "nk"))
    configs = [config(mode, 2.0)] * 3

    def loss(lhs, rhs):
      return nn.scaled_dot_general(lhs, rhs, NT_2D, configs=configs).sum()

    def mapped(lhs, rhs):
      return jax.shard_map(
        lambda lhs, rhs: lax.psum(loss(lhs, rhs), "x"),
        mesh=mesh,
        in_specs=(jax.P("x"), jax.P()),
        out_specs=jax.P(),
      )(lhs, rhs)

    gradients = jax.jit(jax.grad(mapped, (0, 1)))(lhs, rhs)
    rows = [jax.grad(loss, (0, 1))(lhs[i : i + 1], rhs) for i in range(4)]
    np.testing.assert_array_equal(
      gradients[0], jnp.concatenate([row[0] for row in rows])
    )
    # A sum of 4, in an order of the devices' choosing.
    parts = np.stack([np.asarray(row[1], np.float64) for row in rows])
    bound = 4 * F32_ROUNDING * np.abs(parts).sum(0)
    testing.assert_within(gradients[1], parts.sum(0), bound, F32)

  @parameterized.parameters("mxfp8", "nvfp4")
  def test_every_size_may_be_symbolic(self, mode):
    m, k = jax.export.symbolic_shape("m, k")
    configs = [config(mode)] * 2
    f = lambda x, y: nn.scaled_dot_general(x, y, NT_2D, configs=configs)
    exported = jax.export.export(jax.jit(f))(
      jax.ShapeDtypeStruct((m, k), jnp.float32),
      jax.ShapeDtypeStruct((7, k), jnp.float32),
    )
    lhs, rhs = floats(84, "mk"), floats(85, "nk")
    exact, magnitude = product(
      lhs, rhs, "mk,nk->mn", quantizer(mode), quantizer(mode)
    )
    testing.assert_within(
      exported.call(lhs, rhs), exact, testing.DOT_BOUND * magnitude, F32
    )

  def test_two_configs_serve_inference_and_refuse_training(self):
    configs = [config("mxfp8")] * 2
    lhs, rhs = floats(80, "mk"), floats(81, "nk")
    f = lambda x: nn.scaled_dot_general(x, rhs, NT_2D, configs=configs).sum()
    with self.assertRaisesRegex(ValueError, "gradient, got two configs"):
      jax.grad(f)(lhs)


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


def changed(base="mxfp8", **changes):
  """A config of JAX with other fields; its class checks nothing."""
  made = jax.nn.get_scaled_dot_general_config(base)
  for name, value in changes.items():
    setattr(made, name, value)
  return made


MXFP8_CONFIG = changed()
# name, keyword arguments, error, message.
MALFORMED_DOT_GENERALS = (
  ("no_list", {"configs": MXFP8_CONFIG}, ValueError, "list of three"),
  ("one_config", {"configs": [MXFP8_CONFIG]}, ValueError, "list of three"),
  (
    "a_string",
    {"configs": ["mxfp8"] * 3},
    TypeError,
    r"configs\[0\] must be a config, got 'mxfp8', .* no mode, block_size",
  ),
  (
    "mode",
    {"configs": [MXFP8_CONFIG, changed(mode="fp8")]},
    ValueError,
    r"mode of configs\[1\] must be one of mxfp8, mxfp4, nvfp4, got 'fp8'",
  ),
  (
    "block_size",
    {"configs": [changed(block_size=0)] * 3},
    ValueError,
    r"block_size of configs\[0\] must be an integer of at least 2, got 0",
  ),
  (
    "block_size_type",
    {"configs": [changed(block_size=32.0)] * 3},
    ValueError,
    r"block_size of configs\[0\].* got 32.0",
  ),
  (
    "data_type",
    {"configs": [changed(data_type=jnp.int8)] * 3},
    ValueError,
    r"configs\[0\] of mode mxfp8 must have data_type float8_e4m3fn.*int8",
  ),
  (
    "data_type_name",
    {"configs": [changed(data_type="fp8")] * 3},
    ValueError,
    r"configs\[0\] of mode mxfp8 must have data_type .* got 'fp8'",
  ),
  (
    "scale_type",
    {"configs": [changed(scale_type=jnp.float8_e4m3fn)] * 3},
    ValueError,
    "scale_type float8_e8m0fnu, got .*float8_e4m3fn",
  ),
  (
    "global_scale_of_mx",
    {"configs": [MXFP8_CONFIG] * 2 + [changed(global_scale=jnp.ones(1))]},
    ValueError,
    r"configs\[2\] of mode mxfp8 must not have a global_scale",
  ),
  (
    "no_global_scale",
    {"configs": [changed("nvfp4", global_scale=None)] * 3},
    ValueError,
    r"configs\[0\] of mode nvfp4 must have a global_scale, got None",
  ),
  (
    "global_scale_shape",
    {"configs": [changed("nvfp4", global_scale=jnp.ones(2))] * 3},
    TypeError,
    r"one float32, f32\[\] or f32\[1\], got float32\[2\]",
  ),
  (
    "global_scale_dtype",
    {"configs": [changed("nvfp4", global_scale=jnp.ones(1, jnp.bfloat16))] * 3},
    TypeError,
    r"one float32, .* got bfloat16\[1\]",
  ),
  (
    "global_scale_zero",
    {"configs": [changed("nvfp4", global_scale=jnp.zeros(1))] * 3},
    ValueError,
    r"global_scale of configs\[0\] must be positive and finite, got 0.0",
  ),
  (
    "result_dtype",
    {"preferred_element_type": np.int32},
    TypeError,
    "preferred_element_type must be float32, bfloat16 or float16, got .*int32",
  ),
  ("no_result_dtype", {"preferred_element_type": None}, TypeError, "None"),
  ("no_numbers", {"dimension_numbers": None}, TypeError, "must not be None"),
  (
    "k",
    {"rhs": jnp.ones((2, 3, 40))},
    TypeError,
    "contracting sizes must agree, got 64 .* and 40",
  ),
  ("rank", {"rhs": jnp.ones(64)}, TypeError, "rhs, which has rank 1"),
  (
    "complex",
    {"lhs": jnp.ones((2, 3, 64), np.complex64)},
    TypeError,
    "lhs must have a real dtype, got complex64",
  ),
  ("list", {"lhs": [1.0]}, TypeError, "lhs must be an array"),
  (
    "implementation",
    {"implementation": "cuda"},
    ValueError,
    "implementation must be None or one of .*, got 'cuda'",
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

  @parameterized.named_parameters(*MALFORMED_DOT_GENERALS)
  def test_scaled_dot_general_refuses(self, changes, error, message):
    x = jnp.ones((2, 3, 64))
    args = {
      "lhs": x,
      "rhs": x,
      "dimension_numbers": NT_3D,
      "configs": [MXFP8_CONFIG] * 3,
    }
    args |= changes
    self.check(
      nn.scaled_dot_general, "scaled_dot_general", args, error, message
    )

  def check(self, function, who, args, error, message):
    with self.assertRaisesRegex(error, f"(?s)^{who}: .*{message}"):
      function(**args)


if __name__ == "__main__":
  absltest.main()
