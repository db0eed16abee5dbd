# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers of rows that give the same bits: docs/how_to/decode_loop.md."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.testing import interpreted

K = 1056
PAIRS = (
  (None, jp.MXFP8),
  (None, jp.NVFP4),
  (jp.MXFP8, jp.MXFP8),
  (jp.MXFP8, jp.MXFP4),
  (jp.MXFP4, jp.MXFP4),
  (jp.NVFP4, jp.NVFP4),
)
# From so many rows on one engine computes them, whatever they are
# (kernels/cpu/dot/rule.h). The others run only where a CPU has them.
SAME_FROM = {"avx2": 5, "avx512": 5, "avx512_bf16": 65, "amx_bf16": 24}


def quantized(x, format):
  if format is None:
    return jnp.asarray(x, jnp.bfloat16)
  # A computed global scale would depend on all rows.
  scale = 2.0**-8 if format == jp.NVFP4 else None
  return jp.quantize(x, format, global_scale=scale)


def assert_same_rows(dot, numbers, x):
  """Checks that rows have the same bits for each number of rows."""
  results = [np.asarray(dot(x[:m])) for m in numbers]
  for m, result in zip(numbers, results, strict=True):
    np.testing.assert_array_equal(results[-1][:m], result, f"m={m}")


def assert_same_places(dot, x):
  """Checks that a row has the same bits in each place."""
  order = np.random.default_rng(1).permutation(len(x))
  np.testing.assert_array_equal(np.asarray(dot(x))[order], dot(x[order]))


class CpuTest(absltest.TestCase):
  @pytest.mark.full
  def test_rows_have_the_same_bits_from_some_number_on(self):
    target = targets.detect_target("cpu")
    first = SAME_FROM.get(target.cpu_kernels)
    if first is None:
      self.skipTest(f"no claim about kernels {target.cpu_kernels}")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, K)).astype(np.float32)
    for lhs, rhs in PAIRS:
      # AVX2 adds up two FP4 sides in one order: sums of a block are integers.
      all_fp4 = lhs in (jp.MXFP4, jp.NVFP4) and rhs in (jp.MXFP4, jp.NVFP4)
      start = 1 if all_fp4 and target.cpu_kernels == "avx2" else first
      for n in (1, 40):
        w = quantized(rng.normal(size=(n, K)).astype(np.float32), rhs)
        dot = jax.jit(
          lambda x, w=w, lhs=lhs: jp.block_scaled_dot(
            quantized(x, lhs), w, implementation="cpu"
          )
        )
        with self.subTest(lhs=lhs, rhs=rhs, n=n):
          numbers = (start, start + 1, start + 32, 129, 300)
          assert_same_rows(dot, numbers, x)
          for m in (2, 3, 4, 300):
            assert_same_places(dot, x[:m])


@interpreted.needs_interpreter
class TritonTest(interpreted.RecordedTestCase):
  """Launches of the same name add up a row's products in the same order.

  Places are not compared: the interpreter's products are NumPy's, whose order
  depends on the place (`interpreted.products_depend_on_rows`).
  """

  @pytest.mark.full
  def test_rows_of_one_kernel_have_the_same_bits(self):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 288)).astype(np.float32)
    for lhs, rhs in ((None, jp.MXFP8), (jp.MXFP8, jp.MXFP4)):
      w = quantized(rng.normal(size=(40, 288)).astype(np.float32), rhs)
      rows = quantized(x, lhs)
      for numbers in ((1, 3, 16), (65, 90)):
        with (
          self.subTest(lhs=lhs, rhs=rhs, numbers=numbers),
          jp.use_target(targets.named_target("h100")),
        ):
          self.launched.clear()

          def dot(index, rows=rows, w=w):
            lhs = jax.tree.map(lambda a: a[index], rows)
            return jp.block_scaled_dot(lhs, w, implementation="triton")

          assert_same_rows(dot, numbers, np.arange(90))
          self.assertLen({launch.name for launch in self.launched}, 1)


if __name__ == "__main__":
  absltest.main()
