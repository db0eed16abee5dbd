# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What tests of executed kernels have in common: operands, and the contract."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from absl.testing import parameterized

from jaxplugin.testing import contract
from jaxplugin.testing.kernels import executed, gpu_operands

# Sizes of products that are drawn at random.
_SIZES: Final = {
  "m": (1, 3, 16, 17, 33, 64, 65, 130),
  "n": (8, 96, 128, 136, 200, 300),
  "k": (32, 96, 288, 416, 512, 1056),
}
_INTERLEAVED: Final = ("mxfp4", "nvfp4")  # formats that may be


class Case(parameterized.TestCase):
  """Makes operands, and checks products of them."""

  def setUp(self) -> None:
    super().setUp()
    self.rng = np.random.default_rng(len(self.id()))

  def make(
    self, lhs: str, rhs: str, *, m: int, n: int, k: int, **storage: Any
  ) -> tuple[gpu_operands.Operand, gpu_operands.Operand]:
    """Dense operands; `storage` is of the right one."""
    make = gpu_operands.make_operand
    return (
      executed.dense(make(self.rng, lhs, (1, m, k))),
      executed.dense(make(self.rng, rhs, (1, n, k), **storage)),
    )

  def check(
    self,
    architecture: str,
    lhs: gpu_operands.Operand,
    rhs: gpu_operands.Operand,
    *,
    truncates: bool = True,
    **options: Any,
  ) -> executed.Product:
    """Returns the product, after a check of its result.

    The error is within the contract's bound. If `truncates`, the truncations of
    a large accumulator are added.
    """
    product = executed.product(architecture, lhs, rhs, **options)
    result, counts = product.run()
    exact, magnitude = contract.dot(lhs.exact, rhs.exact)
    bound = contract.DOT_BOUND
    if truncates:
      bound = contract.truncated_bound(lhs.exact.shape[-1])
    contract.assert_within(result, exact, bound * magnitude, result.dtype)
    self.assertGreater(counts["matrix products"], 0)
    return product

  def check_random(self, architecture: str, lhs: str, rhs: str) -> None:
    """Products of random sizes; of each order that rhs may be stored in."""
    orders = [False]
    if rhs in _INTERLEAVED and architecture != "sm_120":
      orders.append(True)
    for interleaved in orders:
      sizes = {x: int(self.rng.choice(sizes)) for x, sizes in _SIZES.items()}
      with self.subTest(**sizes, interleaved=interleaved):
        operands = self.make(lhs, rhs, **sizes, interleaved=interleaved)
        self.check(architecture, *operands)

  def check_epilogue(
    self,
    architecture: str,
    lhs: gpu_operands.Operand,
    rhs: gpu_operands.Operand,
    activation: str,
    out_dtype: str,
  ) -> None:
    """The product with all that an epilogue may have is near f64's."""
    exact, _ = contract.dot(lhs.exact, rhs.exact)
    n = exact.shape[-1]
    factor = np.float32(1 / np.abs(exact).max())  # both sides of activations
    bias = self.rng.normal(size=n).astype(np.float32)
    residual = self.rng.normal(size=exact.shape).astype(np.float32)
    epilogue = gpu_operands.Epilogue(
      global_scale=np.array([factor]),
      bias=bias,
      residual=residual,
      activation=activation,
    )
    product = executed.product(
      architecture, lhs, rhs, epilogue=epilogue, out_dtype=out_dtype
    )
    result, _ = product.run()
    expected, bound = gpu_operands.expected(lhs, rhs, epilogue)
    contract.assert_within(result, expected, bound, result.dtype)
