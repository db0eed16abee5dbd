# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The variants of quantizing and dequantizing an array."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.peers import operand_sets, variants, verification
from jaxplugin.quantization import operations, problems

_F32 = np.dtype(np.float32)


def make(
  row: workloads.BenchRow, format: formats.BlockFormat
) -> list[variants.Variant]:
  """Returns variants: the package's function, the same in XLA, and a copy."""
  first = operand_sets.normal(jax.random.key(0), row.m, row.k)
  floats: Callable[[int], Any] = functools.cache(
    lambda i: operand_sets.another(first, i, None, _F32)
  )
  quantized = functools.cache(
    lambda i: quantization.quantize(floats(i), format)
  )
  is_quantize = row.kind == "quantize"

  def check(i: int, result: Any) -> None:
    if is_quantize:
      verification.check_quantized(result, floats(i))
    else:
      verification.check_dequantized(result, quantized(i))

  def check_copy(i: int, result: Any) -> None:
    expected = np.asarray(floats(i)) + np.float32(1)
    if not np.array_equal(np.asarray(result), expected):
      raise verification.WrongResultError("copy differs from x + 1")

  function: Callable[[Any], Any] = quantization.dequantize
  portable: Callable[[Any], Any] = _dequantize_portably
  if is_quantize:
    function = functools.partial(quantization.quantize, format=format)
    portable = functools.partial(_quantize_portably, format=format)
  # The global scale depends on all of x, so x is read twice.
  reads = 2 if is_quantize and format.has_global_scale else 1
  ours = variants.Variant(
    name=f"jp.{row.kind}",
    role="ours",
    function=function,
    operands=lambda i: (floats(i) if is_quantize else quantized(i),),
    check=check,
    num_bytes=operand_sets.num_bytes(quantized(0)) + floats(0).nbytes * reads,
    is_chosen=True,
  )
  copy = variants.Variant(
    name="copy",
    role="ceiling",
    function=lambda x: x + 1,
    operands=lambda i: (floats(i),),
    check=check_copy,
    num_bytes=2 * floats(0).nbytes,
  )
  by_xla = dataclasses.replace(
    ours, name="by xla", function=portable, is_chosen=False
  )
  return [ours, by_xla, copy]


def _quantize_portably(
  x: jax.Array, format: formats.BlockFormat
) -> scaled_array.ScaledArray:
  problem = problems.QuantizationProblem.along(
    1, shape=x.shape, dtype=x.dtype, format=format, packed=format.is_fp4
  )
  values, scale, global_scale = operations.quantize(x, None, None, problem)
  return scaled_array.ScaledArray(values, scale, global_scale, format)


def _dequantize_portably(x: scaled_array.ScaledArray) -> jax.Array:
  problem = problems.DequantizationProblem(
    shape=x.values.shape,
    dtype=x.values.dtype,
    format=x.format,
    axis=1,
    out_dtype=_F32,
  )
  return operations.dequantize(
    x.values, x.scale, x.global_scale, problem=problem
  )
