# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests that the CPU's custom calls quantize results of matmuls."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

import jaxplugin as jp

OUT = jp.OutFormat("mxfp8", returns_amax=True)
NVFP4 = jp.OutFormat("nvfp4", global_scale=0.05)
FLOOR = jp.OutFormat("mxfp4", scale_rounding="floor", packed=False)
SIZES = np.array([3, 0, 14, 9], np.int32)  # 4 of 30 rows are in no group


@dataclasses.dataclass(frozen=True)
class Row:
  """A matmul, and the number of custom calls that write its result."""

  name: str
  lhs: tuple[Any, ...]  # format and shape
  rhs: tuple[Any, ...]
  contracting: tuple[Any, Any] = ((1,), (1,))
  batch: tuple[Any, Any] = ((), ())
  out: Any = OUT
  is_fused: bool = True
  epilogue: tuple[str, ...] = ()
  group_sizes: np.ndarray | None = None
  activation: str | None = None

  def operands(self) -> list[Any]:
    rng = np.random.default_rng(0)
    return [
      jax.device_put(rng.standard_normal(shape))
      for _, *shape in (self.lhs, self.rhs)
    ]

  def quantized(self, lhs, rhs) -> list[Any]:
    return [
      jp.quantize(x, format) if format else x
      for x, (format, *_) in ((lhs, self.lhs), (rhs, self.rhs))
    ]

  def matmul(self, lhs, rhs, **options):
    if self.group_sizes is not None:
      activation = self.activation
      return jp.ragged_dot(
        lhs, rhs, self.group_sizes, activation=activation, **options
      )
    if "bias" in self.epilogue:
      options["bias"] = jnp.linspace(-1, 1, rhs.shape[0])
    if "residual" in self.epilogue:
      options["residual"] = jnp.ones((lhs.shape[0], rhs.shape[0]))
    return jp.block_scaled_dot(
      lhs,
      rhs,
      dimension_numbers=(self.contracting, self.batch),
      activation=self.activation,
      **options,
    )


MXFP8_ROWS, NVFP4_ROWS = ("mxfp8", 20, 64), ("nvfp4", 20, 64)
ROWS = (
  Row("one call", MXFP8_ROWS, ("mxfp8", 96, 64)),
  Row("packed", MXFP8_ROWS, ("mxfp4", 96, 64), out="mxfp4"),
  Row("epilogue", NVFP4_ROWS, ("nvfp4", 96, 64), out=NVFP4, activation="gelu",
      epilogue=("bias", "residual")),
  Row("rows of floats", (None, 5, 64), ("nvfp4", 64, 64), out=FLOOR),
  Row("bytes", MXFP8_ROWS, ("mxfp8", 64, 64), out="mxfp6_e2m3"),
  Row("batch", ("mxfp8", 2, 20, 64), ("mxfp8", 2, 32, 64), ((2,), (2,)),
      ((0,), (0,))),
  Row("two dimensions of n", MXFP8_ROWS, ("mxfp8", 3, 32, 64), ((1,), (2,))),
  Row("blocks along m", ("mxfp8", 64, 64), ("mxfp8", 64), ((1,), (0,)),
      is_fused=False),
  Row("integers", MXFP8_ROWS, ("mxfp8", 64, 64), out="int8_32",
      is_fused=False),
  Row("second pass", MXFP8_ROWS, ("mxfp8", 64, 64), out="nvfp4",
      is_fused=False),
  Row("groups", ("mxfp8", 30, 64), ("mxfp8", 4, 64, 64), group_sizes=SIZES),
  Row("gated groups", (None, 30, 64), ("mxfp4", 4, 64, 64), out=NVFP4,
      group_sizes=SIZES, activation="swiglu"),
)  # fmt: skip


@absltest.skipIf(
  jp.detect_target("cpu").cpu_kernels is None, "needs CPU kernels"
)
class QuantizedTest(absltest.TestCase):
  def test_bits_are_those_of_the_quantized_f32_result(self):
    # One program for all rows, because compiling takes most of the time.
    floats = [row.operands() for row in ROWS]
    operands = jax.jit(
      lambda floats: [
        row.quantized(*arrays) for row, arrays in zip(ROWS, floats, strict=True)
      ]
    )(floats)

    @jax.jit
    def fused(operands):
      return [
        row.matmul(*arrays, out_format=row.out)
        for row, arrays in zip(ROWS, operands, strict=True)
      ]

    @jax.jit
    def f32(operands):
      return [
        row.matmul(*arrays, preferred_element_type=jnp.float32)
        for row, arrays in zip(ROWS, operands, strict=True)
      ]

    outs = [
      jp.OutFormat(row.out) if isinstance(row.out, str) else row.out
      for row in ROWS
    ]

    @jax.jit
    def quantized(results):
      return [
        jp.quantize(
          y,
          out.format,
          scale_rounding=out.scale_rounding,
          global_scale=out.global_scale,
          packed=out.packed,
        )
        for out, y in zip(outs, results, strict=True)
      ]

    results = f32(operands)
    for row, out, got, y, expected in zip(
      ROWS, outs, fused(operands), results, quantized(results), strict=True
    ):
      with self.subTest(row.name):
        if out.returns_amax:
          got, amax = got
          self.assertEqual(amax, np.abs(np.asarray(y)).max())
        for array, right in zip(
          jax.tree.leaves(got), jax.tree.leaves(expected), strict=True
        ):
          np.testing.assert_array_equal(
            np.asarray(array).view(np.uint8), np.asarray(right).view(np.uint8)
          )

  def test_one_custom_call_computes_and_quantizes(self):
    for row in ROWS:
      with self.subTest(row.name):
        matmul = lambda *arrays, row=row: row.matmul(
          *arrays, out_format=row.out
        )
        types = jax.eval_shape(row.quantized, *row.operands())
        text = jax.jit(matmul).lower(*types).as_text()
        self.assertEqual(row.is_fused, "result_format" in text)
        if row.is_fused:
          self.assertNotIn("jaxplugin_quantize", text)


if __name__ == "__main__":
  absltest.main()
