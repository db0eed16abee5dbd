# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The suite of the dot: all that happens to a sum before the final cast.

Global scales, bias, activation and residual, and that there is one rounding.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import dot_cases

# f32 evaluation of an activation: gelu is 9 operations and a tanh good to 4
# units in the last place, none of them larger than its argument; silu is less.
EPILOGUE_BOUND: Final = 20 * 2.0**-24


class DotEpilogueTestCase(dot_cases.DotTestCase):
  """Global scale and epilogue are f32, in order, and rounded once."""

  # Global scales.

  @parameterized.product(
    given=((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)),
    dtype=contract.RESULT_DTYPES,
  )
  def test_global_scales_multiply(self, given, dtype):
    rng = np.random.default_rng(0)
    numbers = [
      np.float32(x) if g else None
      for x, g in zip((1.2345, 0.777, 3.21), given, strict=True)
    ]
    made = [
      self.operand(rng, jp.NVFP4, (rows, 64), storage="scaled_array")
      for rows in (3, 5)
    ]
    operands = [
      jp.ScaledArray(
        x.operand.values,
        x.operand.scale,
        None if g is None else jnp.float32(g),
        jp.NVFP4,
      )
      for x, g in zip(made, numbers, strict=False)
    ]
    exact, magnitude = contract.dot(made[0].exact, made[1].exact)
    factor = np.prod([np.float64(g) for g in numbers if g is not None])
    explicit = numbers[2]
    for passed in (
      explicit,
      None if explicit is None else float(explicit),
      None if explicit is None else jnp.full((1,), explicit),
    ):
      actual = self.dot(
        *operands,
        global_scale=passed,
        preferred_element_type=dtype,
        precision="highest",
      )
      contract.assert_dot(actual, exact * factor, magnitude * factor, dtype)

  @parameterized.product(
    amax=((1e-17, 1e-17), (1.0, 1e-33), (1e-35, 1e10), (1e25, 1e-30)),
    known=("none", "global scales", "all"),
  )
  def test_global_scales_whose_product_is_no_normal_number(self, amax, known):
    # The results are normal numbers all the same. What XLA knows of the scales
    # must not let it multiply them with each other.
    rng = np.random.default_rng(0)
    operands, exact = [], []
    for rows, largest in zip((3, 5), amax, strict=True):
      x = rng.normal(size=(rows, 64))
      x = jp.quantize((x * (largest / np.abs(x).max())).astype("f"), jp.NVFP4)
      operands.append(x)
      exact.append(contract.exact(x))
    lhs, rhs = operands
    scales = [np.asarray(x.global_scale) for x in operands]

    def dot(*leaves):
      arrays = [
        jp.ScaledArray(*leaves[i : i + 3], jp.NVFP4) for i in range(0, 6, 3)
      ]
      return self.dot(*arrays, precision="highest")

    if known == "none":
      actual = jax.jit(dot)(*jax.tree.leaves(operands))
    elif known == "all":
      actual = jax.jit(lambda: dot(*jax.tree.leaves(operands)))()
    else:
      actual = jax.jit(
        lambda a, b, c, d: dot(a, b, scales[0], c, d, scales[1])
      )(lhs.values, lhs.scale, rhs.values, rhs.scale)
    expected, magnitude = contract.dot(*exact)
    self.assertGreater(np.abs(expected).max(), 2.0**-126)
    contract.assert_dot(actual, expected, magnitude)

  @parameterized.parameters(
    # (result dtype, integer dot, global scale that the dtype would round to 1)
    # 257 * (1 + 2^-9) = 257.50 rounds to 258; 257 alone is a tie, to 256.
    (contract.BF16, 257, 1 + 2**-9, 258),
    # 2049 * (1 + 2^-12) = 2049.5 rounds to 2050; 2049 is a tie, to 2048.
    (contract.F16, 2049, 1 + 2**-12, 2050),
  )
  def test_global_scale_is_f32_with_a_16_bit_result(
    self, dtype, total, global_scale, expected
  ):
    self.assertEqual(np.float32(global_scale).astype(dtype), 1)
    lhs, rhs, scale = self._dot_of(total)
    for precision in (None, "highest", jax.lax.Precision.HIGHEST):
      if precision is None and not self.keeps_global_scale_f32:
        continue
      actual = self.dot(
        lhs,
        rhs,
        scale,
        scale,
        global_scale,
        preferred_element_type=dtype,
        precision=precision,
      )
      np.testing.assert_array_equal(
        np.asarray(actual, np.float64), [[expected]]
      )

  @parameterized.product(side=("lhs", "rhs", "both"), shape=((4, 1, 1), (4,)))
  def test_one_global_scale_per_batch_entry(self, side, shape):
    rng = np.random.default_rng(0)
    quantize = jax.vmap(lambda x: jp.quantize(x, jp.NVFP4))
    exact, operands = [], []
    for name, rows in (("lhs", 3), ("rhs", 5)):
      x = quantize(jax.device_put(rng.normal(size=(4, rows, 32))))
      self.assertEqual(x.global_scale.shape, (4, 1, 1))
      own = side in (name, "both")
      scale = np.asarray(x.global_scale).reshape(shape) if own else None
      operands.append(jp.ScaledArray(x.values, x.scale, scale, jp.NVFP4))
      exact.append(contract.exact(operands[-1]))
    actual = self.dot(*operands)
    contract.assert_dot(actual, *contract.dot(*exact))

  @parameterized.parameters(((2, 3), (5,)), ((2, 3, 1), (5, 1, 1)))
  def test_global_scales_follow_their_dimensions(self, lhs_shape, rhs_shape):
    # lhs (i, b, k) with a global scale for every (i, b), b the batch dimension;
    # rhs (n, b, k) with one for every n.
    rng = np.random.default_rng(0)
    lhs = self.operand(rng, jp.NVFP4, (2, 3, 32), storage="scaled_array")
    rhs = self.operand(rng, jp.NVFP4, (5, 3, 32), storage="scaled_array")
    lhs_global = rng.uniform(1, 2, (2, 3)).astype(np.float32)
    rhs_global = rng.uniform(1, 2, (5,)).astype(np.float32)
    numbers = (((2,), (2,)), ((1,), (1,)))
    operands = [
      jp.ScaledArray(
        x.operand.values, x.operand.scale, jax.device_put(g), jp.NVFP4
      )
      for x, g in (
        (lhs, lhs_global.reshape(lhs_shape)),
        (rhs, rhs_global.reshape(rhs_shape)),
      )
    ]
    actual = self.dot(*operands, dimension_numbers=numbers)
    expected, magnitude = contract.dot(
      lhs.exact * lhs_global[..., None].astype(np.float64),
      rhs.exact * rhs_global[:, None, None].astype(np.float64),
      numbers,
    )
    contract.assert_dot(actual, expected, magnitude)

  @parameterized.parameters(
    ((4, 1, 1),), ((1, 3, 1),), ((1, 1, 5),), ((4, 3, 5),), ((1, 1, 1),)
  )
  def test_global_scale_may_vary_over_the_result(self, shape):
    rng = np.random.default_rng(0)
    lhs = self.operand(rng, jp.MXFP8, (4, 3, 32))
    rhs = self.operand(rng, jp.MXFP8, (4, 5, 32))
    scale = np.exp2(rng.integers(-3, 4, shape)).astype(np.float32)
    actual = self.call(lhs, rhs, global_scale=jax.device_put(scale))
    exact, _ = contract.dot(lhs.exact, rhs.exact)
    contract.assert_exact(actual, exact * scale, contract.F32)

  # The epilogue.

  @parameterized.product(
    activation=(None, "relu", "gelu", "silu"),
    present=tuple(itertools.product((False, True), repeat=3)),
  )
  def test_epilogue_is_activation_of_biased_scaled_dot_plus_residual(
    self, activation, present
  ):
    rng = np.random.default_rng(0)
    has_global, has_bias, has_residual = present
    lhs = self.operand(rng, jp.MXFP4, (2, 7, 32))
    rhs = self.operand(rng, jp.MXFP4, (2, 5, 32))
    dot, _ = contract.dot(lhs.exact, rhs.exact)  # exact in f32 too
    global_scale = np.float32(0.0371) if has_global else None
    for dtype in self._some_dtypes(activation, present):
      # Every dtype for bias and residual as well, never the result's.
      others = [d for d in contract.RESULT_DTYPES if d != dtype]
      bias = residual = None
      if has_bias:
        bias = rng.normal(size=5).astype(others[0])
      if has_residual:
        residual = (3 * rng.normal(size=(2, 7, 5))).astype(others[1])
      actual = self.call(
        lhs,
        rhs,
        global_scale=global_scale,
        bias=None if bias is None else jax.device_put(bias),
        activation=activation,
        residual=None if residual is None else jax.device_put(residual),
        preferred_element_type=dtype,
      )
      expected = dot * (np.float64(global_scale) if has_global else 1)
      largest = np.abs(expected)
      if has_bias:
        largest = largest + np.abs(bias.astype(np.float64))
        expected = expected + bias.astype(np.float64)
      expected = activate(expected, activation)
      if has_residual:
        largest = largest + np.abs(residual.astype(np.float64))
        expected = expected + residual.astype(np.float64)
      bound = EPILOGUE_BOUND * largest
      contract.assert_within(actual, expected, bound, dtype)

  def _some_dtypes(self, activation, present) -> tuple[np.dtype, ...]:
    """Every dtype for the full epilogue, and one in turn for the others."""
    if all(present):
      return contract.RESULT_DTYPES
    turn = len(activation or "") + sum(b << i for i, b in enumerate(present))
    return (contract.RESULT_DTYPES[turn % 3],)

  def test_epilogue_of_nan_is_nan(self):
    lhs = np.zeros((2, 32), formats.E4M3)
    scale = np.array([[0xFF], [0x7F]], np.uint8).view(formats.E8M0)
    for activation in (None, "relu", "gelu", "silu"):
      actual = self.dot(
        *map(jax.device_put, (lhs, lhs[:1], scale, scale[1:])),
        activation=activation,
      )
      np.testing.assert_array_equal(
        np.asarray(actual), np.array([[np.nan], [0]], np.float32)
      )

  def test_bias_may_have_all_dimensions_of_rhs_or_the_last(self):
    rng = np.random.default_rng(0)
    lhs = self.operand(rng, jp.MXFP8, (3, 32))
    rhs = self.operand(rng, jp.MXFP8, (2, 5, 32))
    numbers = (((1,), (2,)), ((), ()))
    exact, _ = contract.dot(lhs.exact, rhs.exact, numbers)
    for shape in ((2, 5), (5,)):
      bias = rng.integers(-9, 9, shape).astype(np.float32)
      actual = self.call(
        lhs, rhs, dimension_numbers=numbers, bias=jax.device_put(bias)
      )
      contract.assert_exact(actual, exact + bias, contract.F32)

  # One rounding, to the result's dtype, at the very end.

  @parameterized.named_parameters(
    # bf16 has no 257. Rounded before the bias, the result would be 256 + 1,
    # 256.
    ("before_bias", 257, dict(bias=1.0), contract.BF16, 258),
    # 100000 is beyond f16.
    ("before_global_scale", 3200, dict(global_scale=32.0, residual=-60000.0),
      contract.F16, 42400),
    # bf16(1 + 2^-8 + 2^-13) is 1 + 2^-7, but 1 by way of f16.
    ("not_through_f16", 2**13 // 2**8 + 2**13 + 1, dict(global_scale=2.0**-13),
      contract.BF16, 1 + 2**-7),
    # f16(1 + 2^-11 + 2^-13) is 1 + 2^-10, but 1 by way of bf16.
    ("not_through_bf16", 2**13 + 2**2 + 1, dict(global_scale=2.0**-13),
      contract.F16, 1 + 2**-10),
  )  # fmt: skip
  def test_result_is_rounded_once(self, total, epilogue, dtype, expected):
    lhs, rhs, scale = self._dot_of(total)
    epilogue = dict(epilogue)
    for name in ("bias", "residual"):
      if name in epilogue:
        shape = (1,) if name == "bias" else (1, 1)
        epilogue[name] = jnp.full(shape, epilogue[name], jnp.float32)
    actual = self.dot(
      lhs, rhs, scale, scale, preferred_element_type=dtype, **epilogue
    )
    np.testing.assert_array_equal(np.asarray(actual, np.float64), [[expected]])

  def _dot_of(self, total: int) -> tuple[Any, Any, Any]:
    """MXFP8 (lhs, rhs, scale of both) whose exact product is `total`."""
    lhs, rhs = np.zeros((1, 32)), np.zeros((1, 32))
    for bit in range(total.bit_length()):
      if total >> bit & 1:
        lhs[0, bit] = 2.0 ** (bit // 2)
        rhs[0, bit] = 2.0 ** (bit - bit // 2)
    values = [x.astype(formats.E4M3) for x in (lhs, rhs)]
    exact = values[0].astype(np.float64) @ values[1].astype(np.float64).T
    np.testing.assert_array_equal(exact, [[total]])
    scale = jnp.ones((1, 1), formats.E8M0)
    return jax.device_put(values[0]), jax.device_put(values[1]), scale

  def test_f16_result_overflows_to_inf(self):
    lhs, rhs, scale = self._dot_of(65536)
    actual = self.dot(
      lhs, rhs, scale, scale, preferred_element_type=jnp.float16
    )
    np.testing.assert_array_equal(np.asarray(actual), [[np.float16(np.inf)]])


def activate(x: np.ndarray, activation: str | None) -> np.ndarray:
  """Returns an activation by its definition in f64."""
  if activation == "relu":
    return np.maximum(x, 0)
  if activation == "gelu":  # the tanh approximation
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + np.tanh(inner))
  if activation == "silu":
    with np.errstate(over="ignore"):
      return x / (1 + np.exp(-x))
  return x
