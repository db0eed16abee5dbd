# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prologues in f64, and quantizing after them."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from jaxplugin.core import blocking, formats, targets
from jaxplugin.quantization import api, prologues, quantize_primitive
from jaxplugin.testing import prologue_cases, quantization_lowerings

SHAPE = (3, 5, 64)
# f32 roundings of one value: a mean, rsqrt or sigmoid, and four products.
RELATIVE = 16 * 2.0**-24


def codes(quantized):
  return [np.asarray(leaf).view(np.uint8) for leaf in quantized[:2]]


class PrologueTest(parameterized.TestCase):
  def test_norms_of_rows_with_squares_beyond_f32_are_near_f64(self):
    x, weight = np.random.default_rng(0).standard_normal((2, 4, 64), np.float32)
    rows = [x[:2] * size for size in (1e30, 1e-30, 1e-18, 2.0**40)]
    cases = [
      prologues.Prologue(function=function, operands=("weight",), epsilon=e)
      for function in prologues.NORMS
      for e in (0.0, 1e-35, 1e-6, 1e12)
    ]
    operands = {"weight": weight[0]}

    @jax.jit
    def run(x):
      return [prologues.compute(p, x, operands)[0] for p in cases]

    x = np.concatenate(rows).astype(np.float32)
    for prologue, y in zip(cases, run(x), strict=True):
      exact, _ = prologue_cases.exact(prologue, x, operands)
      bound = RELATIVE * np.abs(exact).max(-1, keepdims=True)
      with self.subTest(f"{prologue.function}, {prologue.epsilon}"):
        self.assertLessEqual((np.abs(y - exact) - bound).max(), 0)

  def test_relu_of_zeros_and_nan_is_that_of_jax(self):
    x = np.float32([-0.0, 0, np.nan, -np.inf, np.inf, -1, 2])
    more = {"cotangent": np.full_like(x, np.inf)}
    relu = prologues.Prologue(function="relu")
    gradient = prologues.Prologue(
      function="relu", operands=("cotangent",), gradient="x"
    )
    y, pull = jax.vjp(jax.nn.relu, x)
    (found,) = prologues.compute(relu, x, {})
    np.testing.assert_array_equal(found, y)
    (found,) = prologues.compute(gradient, x, more)
    np.testing.assert_array_equal(found, *pull(more["cotangent"]))

  @parameterized.parameters(
    (jnp.float32, prologue_cases.ALL),
    (jnp.bfloat16, prologue_cases.ALL[::2]),
    (jnp.float16, prologue_cases.ALL[1::2]),
  )
  def test_result_is_near_f64_and_codes_are_those_of_the_result(
    self, dtype, cases
  ):
    given = [prologue_cases.operands(p, SHAPE, dtype) for p in cases]

    def quantized(x, prologue, more):
      return quantize_primitive.produce(
        x,
        None,
        blockings=(blocking.Blocking.along(2, 3, 32),),
        format=formats.MXFP8,
        packed=False,
        prologue=prologue,
        more=more,
      )

    @jax.jit
    def both(given):
      found = []
      for prologue, (x, more) in zip(cases, given, strict=True):
        y, *sums = prologues.compute(prologue, x, more)
        result = total = None
        if dtype != jnp.float32:  # so each prologue is quantized once
          (result,), *_, total = quantized(x, prologue, more)
        found.append((y, sums, result, total))
      return found

    # Kernels compute `y` with other roundings. Their own tests compare codes.
    with targets.use_target(quantization_lowerings.OPERATIONS):
      results = both(given)
    for prologue, (x, more), (y, sums, result, total) in zip(
      cases, given, results, strict=True
    ):
      with self.subTest(str(prologue)):
        exact, exact_sum = prologue_cases.exact(prologue, x, more)
        error = np.abs(np.asarray(y) - exact)
        bound = RELATIVE * np.abs(exact).max(-1, keepdims=True)
        self.assertLessEqual((error - bound).max(), 0)
        if result is not None:
          wanted = api.quantize(y, "mxfp8")
          for got, want in zip(
            codes(result), codes((wanted.values, wanted.scale)), strict=True
          ):
            np.testing.assert_array_equal(got, want)
          self.assertEqual(total is None, not prologue.returns_sum)
        if prologue.is_norm_gradient:
          exact_sum = np.asarray(y).astype(dtype)
        for found in (*sums, *([] if total is None else [total])):
          np.testing.assert_array_equal(
            np.asarray(found).astype(np.float32), exact_sum.astype(np.float32)
          )
