# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands of dots, with copies that together exceed the caches.

Operands are normally distributed numbers that the package quantizes. Checks
compute the expected result from the quantized operands.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.lab.bench import workloads

Operand = jax.Array | scaled_array.ScaledArray

# Size of the sets used between two uses of a set / size of the cache.
PAST_CACHE: Final = 1.5


def copies(num_bytes: int, cache_bytes: int) -> int:
  """Returns the number of sets of `num_bytes` to rotate, at least 2.

  The sets used between two uses of a set are larger than the cache.
  """
  return 2 + int(PAST_CACHE * cache_bytes / num_bytes)


@functools.partial(jax.jit, static_argnames=("rows", "k"))
def normal(key: jax.Array, rows: int, k: int) -> jax.Array:
  return jax.random.normal(key, (rows, k), jnp.float32)


@functools.partial(jax.jit, static_argnames=("format", "dtype"))
def another(
  x: jax.Array,
  shift: jax.Array,
  format: formats.BlockFormat | None,
  dtype: np.dtype,
) -> Operand:
  """Returns a copy of `x` with rolled rows, quantized or cast."""
  x = jnp.roll(x, shift, axis=0)
  return x.astype(dtype) if format is None else quantization.quantize(x, format)


class DotOperands:
  """Sets of operands of one dot. Each set is created at its first use."""

  def __init__(self, row: workloads.BenchRow, pair: workloads.Pair):
    self.row = row
    self.pair = pair
    keys = jax.random.split(jax.random.key(0), 2)
    self._lhs = normal(keys[0], row.m, row.k)
    self._rhs = normal(keys[1], row.n, row.k)
    self._sets: dict[tuple[int, str], tuple[Any, Any]] = {}

  def operands(self, i: int, ready: str = "") -> tuple[Any, Any]:
    """Returns lhs (m, k) and rhs (n, k), dequantized to `ready` unless ""."""
    pair = self.pair
    if (i, ready) not in self._sets:
      if ready:
        lhs, rhs = (dequantized(x, ready) for x in self.operands(i))
      else:
        lhs = another(self._lhs, i, pair.lhs, pair.plain)
        rhs = another(self._rhs, i, pair.rhs, pair.plain)
      self._sets[i, ready] = lhs, rhs
    return self._sets[i, ready]

  def floats(self, i: int) -> tuple[Any, Any]:
    """Returns the unquantized operands of `operands(i)`, in f32."""
    dtype = np.dtype(np.float32)
    lhs, rhs = (another(x, i, None, dtype) for x in (self._lhs, self._rhs))
    return lhs, rhs


def dequantized(x: Operand, dtype: str) -> jax.Array:
  if isinstance(x, scaled_array.ScaledArray):
    return quantization.dequantize(x, np.dtype(dtype))
  return x.astype(dtype)


def num_bytes(*operands: Any) -> int:
  """Returns the bytes of operands. In a ScaledArray, FP4 has half a byte."""
  return sum(
    x.nbytes if isinstance(x, scaled_array.ScaledArray) else x.size * x.itemsize
    for x in operands
  )
