# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`out_format=` on a GPU: one kernel, and why there are two otherwise."""

import jax
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.arrays import scaled_array
from jaxplugin.core import targets
from jaxplugin.testing import contract, interpreted

H100 = jp.named_target("h100").with_library(targets.JAX_TRITON)
M, N, K, GROUPS = 14, 96, 128, 3
NVFP4 = {"global_scale": np.float32(0.01), "returns_amax": True}


def array(*shape):
  return np.random.default_rng(0).normal(size=shape).astype(np.float32)


X, W = array(2, M // 2, K), contract.quantized(array(N, K), "mxfp4")
EXPERTS = contract.quantized(array(GROUPS, N, K), "nvfp4")
SIZES = np.array([5, 0, 7], np.int32)
BIAS = array(N)


def dot(x=X, w=W, **options):
  return jp.block_scaled_dot(x, w, implementation="triton", **options)


def ragged_dot(x=X.reshape(M, K), **options):
  return jp.ragged_dot(x, EXPERTS, SIZES, implementation="triton", **options)


# (function, options, out_format, fields of its `OutFormat`).
CASES = {
  "dot": (dot, {"bias": BIAS, "activation": "gelu"}, "mxfp8", {}),
  "dot_packed": (dot, {}, "mxfp4", {"scale_rounding": "floor"}),
  "dot_amax": (dot, {"residual": array(2, M // 2, N)}, "nvfp4", NVFP4),
  "ragged": (ragged_dot, {"activation": "swiglu"}, "nvfp4", NVFP4),
}
LAYERS = scaled_array.replace(
  contract.quantized(array(2, N, K), "nvfp4"),
  global_scale=np.full((2, 1, 1), 0.5, np.float32),
)
VECTOR = contract.quantized(array(K), "mxfp4")
MATVEC = (((1,), (0,)), ((), ()))
# Reasons in `explain` if no kernel quantizes the result.
SEPARATE = {
  "global_scales": (
    lambda **options: dot(w=LAYERS, **options),
    "XLA operations compute a part of the epilogue",
  ),
  "no_columns": (
    lambda **o: dot(array(64, K), VECTOR, dimension_numbers=MATVEC, **o),
    "rhs has no dimension of the result, which is blocked",
  ),
}


class OutFormatTest(interpreted.RecordedTestCase):
  @parameterized.parameters(*CASES)
  @interpreted.needs_interpreter
  def test_one_kernel_gives_the_bits_of_quantize(self, key):
    function, options, format, fields = CASES[key]
    out = jp.OutFormat(format, **fields)

    @jax.jit
    def both():
      return function(**options), function(out_format=out, **options)

    with jp.use_target(H100):
      x, got = both()
    suffixes = [each.name.partition("_to_")[2] for each in self.launched]
    amax = "_amax" * out.returns_amax
    self.assertCountEqual(suffixes, ["", f"{format}{amax}"])
    if out.returns_amax:
      got, largest = got
      self.assertEqual(largest, np.abs(x).max())
    wanted = jp.quantize(
      x,
      format,
      scale_rounding=out.scale_rounding,
      global_scale=out.global_scale,
    )
    np.testing.assert_array_equal(got.values, wanted.values)
    np.testing.assert_array_equal(got.scale, wanted.scale)

  @parameterized.parameters(*SEPARATE)
  def test_explain_says_why_the_result_is_quantized_separately(self, key):
    function, reason = SEPARATE[key]
    explanation = jp.explain(lambda: function(out_format="mxfp8"), target=H100)
    self.assertIn(f"triton: {reason}", explanation.details())
