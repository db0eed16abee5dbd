# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands of a mixture of experts: weights, tokens and routing.

A token has `top` different experts. They are chosen at random, with the same
seed in every run. Rows are sorted by expert, as for `ragged_dot`. Weights have
gigabytes, so all sets of operands share the weights. Consecutive sets use
different experts if enough experts exist, so that weights are not in the cache.
"""

from __future__ import annotations

import functools
from typing import Any
from typing import Final
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import quantization
from jaxplugin.arrays import preparation
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.peers import verification

_ALIGNMENT: Final = 64  # bytes; XLA copies less aligned arrays
# Limits on the rows and weights that are checked for each result.
_MAX_ROWS: Final = 8
_MAX_WEIGHTS: Final = 1 << 20


class Routing(NamedTuple):
  """The experts of the rows.

  The used experts are adjacent and sorted by their number of rows. The weights
  of experts with equally many rows are therefore one matrix, which "dense dots"
  of `ExpertVariants` needs.

  Attributes:
    first: index of the first used expert.
    sizes: number of rows of each used expert, ascending.
    experts: number of experts.
  """

  first: int
  sizes: tuple[int, ...]
  experts: int

  @property
  def used(self) -> range:
    return range(self.first, self.first + len(self.sizes))

  @property
  def group_sizes(self) -> np.ndarray:
    """i32[experts], the number of rows of each expert."""
    sizes = np.zeros(self.experts, np.int32)
    sizes[self.used] = self.sizes
    return sizes

  @property
  def of_row(self) -> np.ndarray:
    """i32[rows], the expert of each row."""
    return np.repeat(np.arange(self.experts, dtype=np.int32), self.group_sizes)


def routing(row: workloads.BenchRow, i: int) -> Routing:
  """Returns the routing of set i."""
  random = np.random.default_rng(0)
  chosen = [
    random.choice(row.experts, row.top, replace=False) for _ in range(row.m)
  ]
  sizes = np.bincount(np.concatenate(chosen), minlength=row.experts)
  sizes = np.sort(sizes[sizes > 0])
  places = row.experts // len(sizes)
  return Routing(
    first=i % places * len(sizes),
    sizes=tuple(map(int, sizes)),
    experts=row.experts,
  )


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """Returns an aligned array, which XLA:CPU reads without a copy.

  NumPy requests huge pages for the array, as `prepare_weights` does.
  """
  count = int(np.prod(shape))
  memory = np.empty(count + _ALIGNMENT, dtype)
  skipped = -memory.ctypes.data % _ALIGNMENT // memory.itemsize
  return memory[skipped : skipped + count].reshape(shape)


def _rolled(first: np.ndarray, experts: int) -> np.ndarray:
  """Returns [experts, n, ...]. Expert i has rows of `first`, rolled by i."""
  stack = _aligned((experts, *first.shape), first.dtype)
  for i, weight in enumerate(stack):
    weight[:] = np.roll(first, i, axis=0)
  return stack


class ExpertWeights:
  """The weights of one matmul, in the layouts of all variants.

  Weights are normally distributed numbers, rounded to bf16 as in an unquantized
  checkpoint.
  """

  def __init__(self, experts: int, n: int, k: int):
    self.experts = experts
    first = jax.random.normal(jax.random.key(0), (n, k), jnp.float32)
    self._first = first.astype(jnp.bfloat16)
    self._floats: dict[str, np.ndarray] = {}
    self._quantized: dict[str, Any] = {}
    self._unprepared: dict[str, tuple[np.ndarray, np.ndarray]] = {}

  def floats(self, dtype: Any) -> np.ndarray:
    """Returns [experts, n, k] of dtype "float32" or "bfloat16"."""
    dtype = np.dtype(dtype)
    if dtype.name not in self._floats:
      first = np.asarray(self._first.astype(dtype))
      self._floats[dtype.name] = _rolled(first, self.experts)
    return self._floats[dtype.name]

  def quantized(self, format: formats.BlockFormat) -> scaled_array.ScaledArray:
    """Returns all experts, prepared for this device."""
    if format.name not in self._quantized:
      first = quantization.quantize(self._first.astype(jnp.float32), format)
      global_scale = first.global_scale
      if global_scale is not None:
        global_scale = global_scale.reshape(1, 1, 1)
      values, scale = (
        jax.device_put(_rolled(np.asarray(x), self.experts))
        for x in (first.values, first.scale)
      )
      stack = scaled_array.ScaledArray(values, scale, global_scale, format)
      self._quantized[format.name] = preparation.prepare_weights(stack)
    return self._quantized[format.name]

  def _on_host(
    self, format: formats.BlockFormat
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values (FP4 packed) and scales of all experts, unprepared."""
    if format.name not in self._unprepared:
      stack = self.quantized(format)
      # Weights that are prepared for a CPU are bytes, and need no conversion.
      if not stack.is_bytes:
        stack = preparation.unprepare_weights(stack)
        stack = stack.pack() if format.has_pairs else stack
      parts = np.asarray(stack.values), np.asarray(stack.scale)
      self._unprepared[format.name] = parts
    return self._unprepared[format.name]

  def of(
    self, format: formats.BlockFormat, experts: slice, rows: Any = slice(None)
  ) -> scaled_array.ScaledArray:
    """Returns quantized rows of adjacent experts, as one matrix.

    A slice of all rows is not copied.
    """
    values, scale = self._on_host(format)
    stored = format.storage_dtypes[-1]

    def matrix(x: np.ndarray, dtype: np.dtype) -> jax.Array:
      part = x[experts, rows].view(dtype)
      return jax.device_put(part.reshape(-1, part.shape[-1]))

    global_scale = self.quantized(format).global_scale
    if global_scale is not None:
      global_scale = global_scale.reshape(1, 1)
    return scaled_array.ScaledArray(
      matrix(values, stored),
      matrix(scale, format.scale_dtype),
      global_scale,
      format,
    )


@functools.lru_cache(maxsize=1)
def weights_of(experts: int, n: int, k: int) -> ExpertWeights:
  """Returns the weights of one matmul. The last result is cached."""
  return ExpertWeights(experts, n, k)


class ExpertOperands:
  """Sets of operands of one matmul.

  Attributes:
    row, pair: the sizes and the formats.
    weights: the weights, which all sets share.
  """

  def __init__(self, row: workloads.BenchRow, pair: workloads.Pair):
    assert pair.rhs is not None  # workloads.check
    self.row = row
    self.pair = pair
    self.weights = weights_of(row.experts, row.n, row.k)
    self.format = pair.rhs
    shape = row.m * row.top, row.k
    self._rows = jax.random.normal(jax.random.key(1), shape, jnp.float32)

  def routing(self, i: int) -> Routing:
    return routing(self.row, i)

  def sizes(self, i: int) -> jax.Array:
    """Returns i32[experts]."""
    return jnp.asarray(self.routing(i).group_sizes)

  def rows(self, i: int, dtype: Any = None) -> Any:
    """Returns [rows, k] in the pair's format, or as floats of `dtype`."""
    rows = jnp.roll(self._rows, i, axis=0)
    if dtype is not None:
      return rows.astype(dtype)
    if self.pair.lhs is None:
      return rows.astype(self.pair.plain)
    return quantization.quantize(rows, self.pair.lhs)

  def expected(self, i: int, dtype: Any = None) -> verification.Expected:
    """Returns a sample of the result of set i, in f64.

    Both operands are floats of `dtype`, or in the pair's formats.
    """
    given = self.rows(i, dtype)
    rows = verification.some(given.shape[0], _MAX_ROWS)
    columns = verification.some(
      self.row.n, max(2, _MAX_WEIGHTS // self.row.k // len(rows))
    )
    a = verification.f64(given, rows)
    exact, magnitude = np.empty((2, len(rows), len(columns)))
    of_row = self.routing(i).of_row
    for j, row in enumerate(rows):
      expert = int(of_row[row])
      if dtype is not None:
        b = self.weights.floats(dtype)[expert, columns].astype(np.float64)
      else:
        chosen = slice(expert, expert + 1)
        weight = self.weights.of(self.format, chosen, columns)
        b = verification.f64(weight, np.arange(len(columns)))
      exact[j], magnitude[j] = b @ a[j], np.abs(b) @ np.abs(a[j])
    return verification.Expected(
      rows=rows, columns=columns, exact=exact, magnitude=magnitude
    )
