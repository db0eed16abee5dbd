# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The variants of quantizing and dequantizing an array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.peers import operand_sets
from jaxplugin.lab.bench.peers import variants
from jaxplugin.lab.bench.peers import verification
from jaxplugin.quantization import operations


class CodecVariants:
  """The variants of quantizing f32, or of dequantizing to f32."""

  def __init__(self, row: workloads.BenchRow, format: formats.BlockFormat):
    self.row = row
    self.format = format
    self.data = operand_sets.CodecOperands(row, format)

  def all(self) -> list[variants.Variant | variants.Unavailable]:
    """Returns variants: the package's function, the same in XLA, and a copy."""
    copy = variants.Variant(
      name="copy",
      role="ceiling",
      function=lambda x: x + 1,
      operands=lambda i: (self.data.floats(i),),
      check=self._check_copy,
      num_bytes=2 * self.data.floats(0).nbytes,
      flops=0,
    )
    default: Any
    portable: Any
    if self.row.kind == "quantize":
      default, portable = self._quantize, self._quantize_portably
    else:
      default, portable = self._dequantize, self._dequantize_portably
    name = self.row.kind
    return [
      self._variant(f"jp.{name}", default, is_chosen=True),
      self._variant("by xla", portable),
      copy,
    ]

  def _variant(
    self, name: str, function: Callable[..., Any], is_chosen: bool = False
  ) -> variants.Variant:
    is_quantize = self.row.kind == "quantize"
    array = self.data.quantized(0)
    floats = self.row.m * self.row.k * np.dtype(np.float32).itemsize
    reads = 2 if is_quantize and self.format.has_global_scale else 1
    data = self.data
    return variants.Variant(
      name=name,
      role="ours",
      function=function,
      operands=lambda i: (
        data.floats(i) if is_quantize else data.quantized(i),
      ),
      check=self._check,
      # The global scale depends on all of x, so x is read twice.
      num_bytes=operand_sets.num_bytes(array) + floats * reads,
      flops=0,
      is_chosen=is_chosen,
    )

  def _quantize(self, x: jax.Array) -> scaled_array.ScaledArray:
    return quantization.quantize(x, self.format)

  def _quantize_portably(self, x: jax.Array) -> scaled_array.ScaledArray:
    values, scale, global_scale = operations.quantize(
      x, None, None, self.format, 1, "up", packed=self.format.is_fp4
    )
    return scaled_array.ScaledArray(values, scale, global_scale, self.format)

  def _dequantize(self, x: scaled_array.ScaledArray) -> jax.Array:
    return quantization.dequantize(x)

  def _dequantize_portably(self, x: scaled_array.ScaledArray) -> jax.Array:
    return operations.dequantize(
      x.values, x.scale, x.global_scale, x.format, 1, np.dtype(np.float32)
    )

  def _check(self, i: int, result: Any) -> None:
    if self.row.kind == "quantize":
      verification.check_quantized(result, self.data.floats(i))
    else:
      verification.check_dequantized(result, self.data.quantized(i))

  def _check_copy(self, i: int, result: Any) -> None:
    expected = np.asarray(self.data.floats(i)) + np.float32(1)
    if not np.array_equal(np.asarray(result), expected):
      raise verification.WrongResultError("copy differs from x + 1")
