# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The suite of the dot: what must change no bit of a result.

How operands are stored, garbage in padding, constants that XLA may fold, jit.
"""

from __future__ import annotations

from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import dot_cases

FORMATS: Final = formats.FORMATS


def same_bits(x: Any, y: Any) -> bool:
  x, y = np.asarray(x), np.asarray(y)
  return (
    x.dtype == y.dtype and x.shape == y.shape and (x.tobytes() == y.tobytes())
  )


class DotBitsTestCase(dot_cases.DotTestCase):
  """The same operands give the same bits, however and whenever they come."""

  @parameterized.product(format=FORMATS, k=(64, 50))
  def test_garbage_in_scale_padding_changes_no_bit(self, format, k):
    rng = np.random.default_rng(k)
    lhs = self.operand(rng, format, (2, 5, k), integers=False)
    rhs = self.operand(rng, format, (2, 7, k), integers=False)
    block = format.block_size
    clean = self.call(lhs, rhs, block_size=block)
    self.assertTrue(np.isfinite(clean).all())
    for code in (0xFF, 0x7F, 0x00, 0x7E):
      widths = ((0, 0), (0, 3), (0, 2))
      poisoned = [
        jnp.asarray(
          np.pad(
            np.asarray(x.scale).view(np.uint8), widths, constant_values=code
          ).view(format.scale_dtype)
        )
        for x in (lhs, rhs)
      ]
      padded = self.dot(lhs.operand, rhs.operand, *poisoned, block_size=block)
      self.assertTrue(same_bits(clean, padded), f"padding with {code:#x}")

  def test_negative_codes_in_nvfp4_scale_padding_are_not_refused(self):
    # Garbage may look like a negative scale; only real scales are checked.
    rng = np.random.default_rng(0)
    lhs = self.operand(rng, jp.NVFP4, (3, 32))
    rhs = self.operand(rng, jp.NVFP4, (5, 32))
    scale = np.full((8, 4), 0xB8, np.uint8)
    scale[:3, :2] = np.asarray(lhs.scale).view(np.uint8)
    actual = self.dot(
      lhs.operand,
      rhs.operand,
      jnp.asarray(scale.view(formats.E4M3)),
      rhs.scale,
      block_size=16,
    )
    exact, _ = contract.dot(lhs.exact, rhs.exact)
    contract.assert_exact(actual, exact, contract.F32)

  @parameterized.product(format=FORMATS, storage=("scaled_array", "swizzled"))
  def test_storage_changes_no_bit(self, format, storage):
    rows = 130  # more than a tile of the swizzled layout, as 5 columns are
    shape = (rows, 5 * 32)
    rng = np.random.default_rng(rows)
    raw = self.operand(rng, format, shape, integers=False)
    other = self.operand(
      np.random.default_rng(rows),
      format,
      shape,
      integers=False,
      storage=storage,
    )
    rhs = self.operand(rng, format, (3, 160), integers=False)
    expected = self.call(raw, rhs)
    self.assertTrue(same_bits(expected, self.call(other, rhs)))
    if format.is_fp4:
      packed = self.operand(
        np.random.default_rng(rows),
        format,
        shape,
        integers=False,
        storage=f"packed_{storage}",
      )
      self.assertTrue(same_bits(expected, self.call(packed, rhs)))

  @parameterized.parameters(
    (jp.MXFP8, jp.MXFP8),
    (jp.MXFP4, jp.MXFP8_E5M2),
    (jp.MXFP8, jp.NVFP4),
    (jp.NVFP4, jp.NVFP4),
  )
  def test_scales_folded_as_constants_change_no_bit(self, lhs, rhs):
    # XLA may fold constant scales together; byte 0 must survive it.
    rng = np.random.default_rng(0)
    x = self.operand(rng, lhs, (4, 32))
    w = self.operand(rng, rhs, (4, 32))
    x_scale, w_scale = np.asarray(x.scale).copy(), np.asarray(w.scale).copy()
    x_values, w_values = x.operand, w.operand
    if lhs.scale_is_power_of_two and rhs.scale_is_power_of_two:
      x_scale.view(np.uint8)[...] = 0
      w_scale.view(np.uint8)[...] = 254
      x_values = jnp.full((4, 32), 2, lhs.values_dtype)
      w_values = jnp.ones((4, 32), rhs.values_dtype)
    exact, _ = contract.dot(
      contract.dequantize(np.asarray(x_values), x_scale, lhs, 1),
      contract.dequantize(np.asarray(w_values), w_scale, rhs, 1),
    )
    x_scale, w_scale = jnp.asarray(x_scale), jnp.asarray(w_scale)

    def all_constant():
      return self.dot(x_values, w_values, x_scale, w_scale)

    def constant_scales(a, b):
      return self.dot(a, b, x_scale, w_scale)

    def constant_weight(a, s):
      return self.dot(a, w_values, s, w_scale)

    contract.assert_exact(all_constant(), exact, contract.F32)
    contract.assert_exact(jax.jit(all_constant)(), exact, contract.F32)
    contract.assert_exact(
      jax.jit(constant_scales)(x_values, w_values), exact, contract.F32
    )
    contract.assert_exact(
      jax.jit(constant_weight)(x_values, x_scale), exact, contract.F32
    )

  @parameterized.parameters(*dot_cases.KINDS[::3])
  def test_jit_and_eager_and_repeated_calls_give_the_same_bits(self, lhs, rhs):
    rng = np.random.default_rng(0)
    x = self.operand(rng, lhs, (2, 9, 96), integers=False)
    w = self.operand(rng, rhs, (2, 7, 96), integers=False)
    bias = jnp.asarray(rng.normal(size=7), jnp.float32)

    def f(x, w, x_scale, w_scale, bias):
      return self.dot(x, w, x_scale, w_scale, 0.3, bias=bias, activation="silu")

    args = (x.operand, w.operand, x.scale, w.scale, bias)
    eager = f(*args)
    self.assertTrue(np.isfinite(eager).all())
    self.assertTrue(same_bits(eager, f(*args)))
    self.assertTrue(same_bits(eager, jax.jit(f)(*args)))
