# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The triton implementation: scales that no format of a name has.

Results are compared with products in f64 of what ml_dtypes decodes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.dot import problems
from jaxplugin.lab.compilation import deviceless
from jaxplugin.testing import interpreted

E8M0, E4M3, E5M2, E2M1 = formats.E8M0, formats.E4M3, formats.E5M2, formats.E2M1
NATIVE, UPCAST, SMALL_M = "native", "upcast", "small_m"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A format that has no name, and which kernel of a B200 multiplies it."""

  values: np.dtype
  scale: np.dtype
  size: int
  kernel: str
  k: int = 192

  @property
  def format(self) -> formats.BlockFormat:
    return formats.BlockFormat(
      name=f"own {self.values} {self.scale} {self.size}",
      values_dtype=self.values,
      scale_dtype=self.scale,
      block_size=self.size,
    )


CASES = {
  "E8M0 of 64": Case(values=E4M3, scale=E8M0, size=64, kernel=NATIVE),
  "E8M0 of 128": Case(values=E5M2, scale=E8M0, size=128, kernel=NATIVE, k=256),
  "FP4, E8M0 of 64": Case(values=E2M1, scale=E8M0, size=64, kernel=NATIVE),
  "MXFP4 of 16": Case(values=E2M1, scale=E8M0, size=16, kernel=SMALL_M),
  "MXFP8 of 16": Case(values=E4M3, scale=E8M0, size=16, kernel=SMALL_M),
  "E4M3 on E4M3": Case(values=E4M3, scale=E4M3, size=32, kernel=SMALL_M),
  "E4M3 on E5M2": Case(values=E5M2, scale=E4M3, size=64, kernel=SMALL_M),
  "E5M2 on E4M3": Case(values=E4M3, scale=E5M2, size=32, kernel=SMALL_M),
  "E5M2 on E5M2": Case(
    values=E5M2, scale=E5M2, size=128, kernel=SMALL_M, k=256
  ),
  "FP4, E4M3 of 32": Case(values=E2M1, scale=E4M3, size=32, kernel=SMALL_M),
  "FP4, E5M2 of 16": Case(values=E2M1, scale=E5M2, size=16, kernel=SMALL_M),
}


def operand(rng, case, rows):
  """Small integers under scales 1/4 to 4, and what they mean, f64."""
  numbers = rng.choice([-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6], (rows, case.k))
  values = numbers.astype(case.values)
  powers = 2.0 ** rng.integers(-2, 3, (rows, -(-case.k // case.size)))
  if case.scale == E4M3:  # others than powers of two, of either sign
    powers *= rng.choice([-1, 1, 1.5, 1.75], powers.shape)
  scale = powers.astype(np.float32).astype(case.scale)
  exact = (
    values.astype(np.float64)
    * np.repeat(scale.astype(np.float64), case.size, axis=1)[:, : case.k]
  )
  values, scale = jnp.asarray(values), jnp.asarray(scale)
  if case.values == E2M1:
    values = jp.pack_fp4(values)
  return jp.ScaledArray(values, scale, None, case.format), exact


@interpreted.needs_interpreter
class ScalesTest(interpreted.RecordedTestCase):
  def dot(self, x, w, name="b200", **options):
    self.launched.clear()
    target = targets.named_target(name).with_library(targets.JAX_TRITON)
    with jp.use_target(target):
      return jp.block_scaled_dot(x, w, implementation="triton", **options)

  @pytest.mark.full
  def test_products_of_integers_are_exact(self):
    for name, case in CASES.items():
      rng = np.random.default_rng(len(name))
      for target, rows in (("b200", 5), ("h100", 5), ("h100", 70)):
        with self.subTest(name, target=target, rows=rows):
          x, x_exact = operand(rng, case, rows)
          w, w_exact = operand(rng, case, 40)
          result = self.dot(x, w, target)
          np.testing.assert_array_equal(result, x_exact @ w_exact.T)
          kernel = case.kernel if target == "b200" else SMALL_M
          kernel = UPCAST if rows > 64 else kernel
          self.assertRegex(self.names(), f"^block_scaled_{kernel}_")

  def test_sides_of_two_scales(self):
    rng = np.random.default_rng(0)
    x, x_exact = operand(rng, CASES["E8M0 of 64"], 9)
    w, w_exact = operand(rng, CASES["E4M3 on E4M3"], 3)
    plain = rng.integers(-4, 5, (9, 192)).astype(np.float32)
    for lhs, exact in (
      (x, x_exact),
      (jp.quantize(plain, jp.MXFP8), plain),
      (jnp.asarray(plain, jnp.bfloat16), plain),
    ):
      np.testing.assert_array_equal(self.dot(lhs, w), exact @ w_exact.T)

  def test_infinite_scale_counts_once_where_steps_of_k_overlap(self):
    # Row i of w is 1 in block i alone, and block i has an infinite scale: the
    # last step of k takes some of the blocks again, times 0.
    blocks = 5
    w = np.kron(np.eye(blocks), np.ones(32)).astype(np.float32)
    scale = np.ones((blocks, blocks), np.float32)
    np.fill_diagonal(scale, np.inf)
    case = dataclasses.replace(CASES["E5M2 on E4M3"], k=32 * blocks)
    w = jp.ScaledArray(
      jnp.asarray(w + 1, E4M3), jnp.asarray(scale, E5M2), None, case.format
    )
    for rows in (3, 70):
      x = jnp.ones((rows, 32 * blocks), jnp.bfloat16)
      np.testing.assert_array_equal(self.dot(x, w, "h100"), np.inf)

  def test_scales_of_a_ragged_dot(self):
    rng = np.random.default_rng(1)
    case = CASES["E5M2 on E4M3"]
    w, exact = operand(rng, case, 2 * 24)
    w = jp.ScaledArray(
      w.values.reshape(2, 24, -1), w.scale.reshape(2, 24, -1), None, case.format
    )
    x = rng.integers(-4, 5, (7, case.k)).astype(np.float32)
    with jp.use_target(targets.named_target("h100")):
      result = jp.ragged_dot(
        jnp.asarray(x, jnp.bfloat16),
        w,
        jnp.array([3, 4]),
        implementation="triton",
      )
    exact = exact.reshape(2, 24, case.k)
    wanted = np.concatenate([x[:3] @ exact[0].T, x[3:] @ exact[1].T])
    np.testing.assert_array_equal(result, wanted)


class DecisionTest(absltest.TestCase):
  def choose(self, format, target):
    side = problems.OperandProblem(format=format, dtype=format.values_dtype)
    problem = problems.DotProblem(
      batch=1,
      m=128,
      n=256,
      k=512,
      lhs=side,
      rhs=side,
      out_dtype=np.dtype(np.float32),
    )
    return backends.choose(problem, targets.named_target(target))

  def test_gpus_read_them(self):
    for name, case in CASES.items():
      for target in ("a100", "h100", "b200", "rtx5090"):
        with self.subTest(name, target=target):
          decision = self.choose(case.format, target)
          self.assertEqual(decision.implementation, "triton", str(decision))
          notes = " ".join(decision.notes)
          is_repeated = case.size > 32
          self.assertEqual("is repeated" in notes, is_repeated, notes)

  def test_blocks_of_another_size_are_refused_with_the_reason(self):
    format = dataclasses.replace(CASES["E8M0 of 64"].format, block_size=24)
    decision = self.choose(format, "h100")
    self.assertEqual(decision.implementation, "xla")
    reasons = {r.implementation: r.reason for r in decision.refusals}
    self.assertIn("a multiple of 16 values", reasons["triton"])


@absltest.skipIf(
  importlib.util.find_spec("triton") is None
  or importlib.util.find_spec("jax_cuda13_plugin") is None,
  "triton or jax-cuda13-plugin is not installed",
)
class CompiledTest(absltest.TestCase):
  @pytest.mark.full
  def test_xla_dequantizes_nothing(self):
    m, n, k = 512, 704, 1664
    for name in ("E8M0 of 64", "MXFP4 of 16", "E4M3 on E4M3", "E5M2 on E5M2"):
      case = dataclasses.replace(CASES[name], k=k)
      packing = 2 if case.values == E2M1 else 1
      x, w = (
        jp.ScaledArray(
          jax.ShapeDtypeStruct(
            (rows, k // packing), jnp.uint8 if packing == 2 else case.values
          ),
          jax.ShapeDtypeStruct((rows, k // case.size), case.scale),
          None,
          case.format,
        )
        for rows in (m, n)
      )
      for target in ("h100", "b200"):
        with self.subTest(name, target=target):
          text = deviceless.compile(
            jp.block_scaled_dot, x, w, target=targets.named_target(target)
          ).as_text()
          self.assertIn("triton_kernel_call", text)
          shapes = re.findall(r"\b(?:f32|bf16|f16)\[([\d,]+)\]", text)
          sizes = {math.prod(map(int, s.split(","))) for s in shapes}
          self.assertTrue(sizes.isdisjoint((m * k, n * k)), sizes)


if __name__ == "__main__":
  absltest.main()
