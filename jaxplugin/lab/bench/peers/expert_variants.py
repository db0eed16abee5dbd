# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The variants of a matmul of a mixture of experts.

Peers have f32 or bf16 weights, as in a checkpoint. Two peers have quantized
weights. "dequantize" dequantizes the weights for JAX's ragged dot. "dense dots"
does as much work by this package's dense dot: one dot multiplies with the
weights of all experts that have the same number of rows.

A token has `top` different experts. They are chosen at random, with the same
seed in every run. Rows are sorted by expert, as for `ragged_dot`. Weights have
gigabytes, so all sets of operands share the weights. Consecutive sets use
different experts if enough experts exist, so that weights are not in the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin import dot, quantization
from jaxplugin.arrays import preparation, scaled_array
from jaxplugin.core import decisions, formats, targets
from jaxplugin.dot import reference
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.peers import (
  dot_variants,
  operand_sets,
  variants,
  verification,
)
from jaxplugin.ragged import api, backends, primitive

DENSE: Final = "dense dots"
DEQUANTIZE: Final = "dequantize"
# Ways to multiply floats. A peer's name is a way and "f32" or "bf16".
_READY: Final = ("lax", "loop", "scan", "take")
_PEERS: Final = ("f32", "bf16")
# Limit on the weights of one dtype. A machine must hold the weights of two
# dtypes, and XLA's copies of these weights.
_MAX_READY_BYTES: Final = 5 << 29
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
    parts = matrix(values, stored), matrix(scale, format.scale_dtype)
    return scaled_array.ScaledArray(*parts, global_scale, format)


# The weights of the last matmul are cached.
weights_of: Final = functools.lru_cache(maxsize=1)(ExpertWeights)


class ExpertOperands:
  """Sets of operands of one matmul. All sets share the weights."""

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

  def expected(self, i: int, dtype: Any = None) -> verification.ExpectedSample:
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
    return verification.ExpectedSample(
      rows=rows, columns=columns, exact=exact, magnitude=magnitude
    )


class ExpertVariants:
  """The variants of one ragged dot on one device."""

  def __init__(
    self, row: workloads.BenchRow, pair: workloads.Pair, target: targets.Target
  ):
    self.row = row
    self.pair = pair
    self.target = target
    self.data = ExpertOperands(row, pair)
    self._expected = functools.lru_cache(maxsize=8)(self.data.expected)

  def ours(self, names: Sequence[str] | None) -> list[variants.AnyVariant]:
    """Returns variants of backends. None is all that support the row."""
    jaxpr = jax.make_jaxpr(functools.partial(self._ragged, None))(
      *self._quantized(0)
    )
    (eqn,) = (e for e in jaxpr.eqns if e.primitive in primitive.PRIMITIVES)

    def make(
      backend: decisions.BackendRecord[Any], is_chosen: bool
    ) -> Iterator[variants.Variant]:
      yield self._variant(
        backend.name,
        "ours",
        functools.partial(self._ragged, backend.name),
        self._quantized,
        bound=verification.OURS_BOUND,
        is_chosen=is_chosen,
      )

    decided = primitive.decide(eqn, self.target)
    return variants.ours(names, [decided], backends.OPERATION, make)

  def peers(self, names: Sequence[str]) -> list[variants.AnyVariant]:
    """Returns the peers.

    "dense dots" is always a peer. If "f32" or "bf16" is in `names`,
    "dequantize" and each way to multiply floats of that dtype are also peers.
    Other names are unavailable.
    """
    found: list[variants.AnyVariant] = [self._dense()]
    wanted = [name for name in _PEERS if name in names]
    if wanted:
      found.append(self._dequantizing())
    for name in wanted:
      found += self._ready(name)
    found += [
      variants.Unavailable(name=name, reason="is not run for experts")
      for name in names
      if name not in _PEERS
    ]
    return found

  def _ragged(
    self, implementation: str | None, rows: Any, weights: Any, sizes: Any
  ) -> jax.Array:
    return api.ragged_dot(rows, weights, sizes, implementation=implementation)

  def _quantized(self, i: int) -> tuple[Any, ...]:
    weights = self.data.weights.quantized(self.data.format)
    return self.data.rows(i), weights, self.data.sizes(i)

  def _dense(self) -> variants.Variant:
    """Returns "dense dots": one dot for each number of rows of an expert."""
    sizes, counts = np.unique(self.data.routing(0).sizes, return_counts=True)

    def function(rows: Any, weights: Sequence[Any]) -> list[jax.Array]:
      return [
        dot.block_scaled_dot(x, w) for x, w in zip(rows, weights, strict=True)
      ]

    def operands(i: int) -> tuple[Any, ...]:
      first = self.data.routing(i).first
      starts = first + np.cumsum([0, *counts])
      given = self.data.rows(i)
      return (
        [_first_rows(given, int(size)) for size in sizes],
        [
          self.data.weights.of(self.data.format, slice(start, start + count))
          for start, count in zip(starts[:-1], counts, strict=True)
        ],
      )

    def check(i: int, result: Any) -> float:
      pairs = zip(*operands(i), result, strict=True)
      return max(
        verification.check_dot(
          found,
          verification.expected_dot(x, w),
          bound=verification.OURS_BOUND,
        )
        for x, w, found in pairs
      )

    return self._variant(DENSE, "peer", function, operands, check=check)

  def _dequantizing(self) -> variants.Variant:
    """Returns the variant that dequantizes weights for JAX's ragged dot."""
    dtype = self.pair.plain if self.pair.lhs is None else np.dtype(np.float32)

    def function(rows: Any, weights: Any, sizes: Any) -> jax.Array:
      if isinstance(rows, scaled_array.ScaledArray):
        rows = quantization.dequantize(rows, dtype)
      floats = quantization.dequantize(weights, dtype)
      return by_ragged_dot(rows, floats, sizes)

    # An NVFP4 value times the global scale is rounded to bf16.
    is_bf16 = dtype == formats.BF16
    rounding = reference.rounding_error(formats.BF16) if is_bf16 else 0
    return self._variant(
      DEQUANTIZE,
      "peer",
      function,
      self._quantized,
      bound=verification.PEER_BOUND + rounding,
      same_as=f"{DEQUANTIZE} {dtype.name}",
    )

  def _ready(self, name: str) -> list[variants.AnyVariant]:
    """Returns each way to multiply floats of dtype "f32" or "bf16"."""
    row, dtype = self.row, workloads.PLAIN_DTYPES[name]
    num_bytes = row.experts * row.n * row.k * dtype.itemsize
    if num_bytes > _MAX_READY_BYTES:
      reason = f"its weights take {num_bytes / 1e9:.1f} GB"
      return [
        variants.Unavailable(name=f"{way} {name}", reason=reason)
        for way in _READY
      ]
    data = self.data
    stack = functools.cache(lambda: jax.device_put(data.weights.floats(dtype)))

    def sized(i: int) -> tuple[Any, ...]:
      return data.rows(i, dtype), stack(), data.sizes(i)

    def single(i: int) -> tuple[Any, ...]:
      floats = data.weights.floats(dtype)
      used = [jax.device_put(floats[e]) for e in data.routing(i).used]
      return data.rows(i, dtype), used

    def taken(i: int) -> tuple[Any, ...]:
      of_row = jnp.asarray(data.routing(i).of_row)
      return data.rows(i, dtype), stack(), of_row

    sizes = data.routing(0).sizes
    ways: dict[str, tuple[Callable[..., Any], Callable[[int], Any]]] = {
      "lax": (by_ragged_dot, sized),
      "loop": (functools.partial(by_loop, sizes=sizes), single),
      "scan": (by_scan, sized),
      "take": (by_take, taken),
    }
    assert tuple(ways) == _READY
    return [
      self._variant(
        f"{way} {name}",
        "peer",
        function,
        operands,
        dtype=dtype,
        same_as=f"{way} {name}",
      )
      for way, (function, operands) in ways.items()
    ]

  def _variant(
    self,
    name: str,
    role: variants.Role,
    function: Callable[..., Any],
    operands: Callable[[int], tuple[Any, ...]],
    *,
    bound: float = verification.PEER_BOUND,
    dtype: np.dtype | None = None,
    check: Callable[[int, Any], float] | None = None,
    **fields: Any,
  ) -> variants.Variant:
    """Returns a variant. If `dtype` is set, both operands are floats."""

    def expected(i: int, result: Any) -> float:
      return verification.check_dot(
        result, self._expected(i, dtype), bound=bound
      )

    row = self.row
    num_rows, used = row.m * row.top, len(self.data.routing(0).sizes)
    if dtype is None:
      lhs = operand_sets.num_bytes(self.data.rows(0))
      stack = self.data.weights.quantized(self.data.format)
      weight = operand_sets.num_bytes(stack) // row.experts
    else:
      lhs = num_rows * row.k * dtype.itemsize
      weight = row.n * row.k * dtype.itemsize
    is_f32 = dtype is not None and dtype == np.float32
    return variants.Variant(
      name=name,
      role=role,
      function=function,
      operands=operands,
      check=check or expected,
      num_bytes=lhs + used * weight + num_rows * row.n * 4,
      flops=2 * num_rows * row.n * row.k,
      arithmetic=variants.arithmetic_of(role, is_f32, self.pair.is_fp4),
      **fields,
    )


def _first_rows(rows: Any, count: int) -> Any:
  """Returns the first `count` rows of floats or of a ScaledArray."""
  if not isinstance(rows, scaled_array.ScaledArray):
    return rows[:count]
  return dot_variants.with_parts(rows, rows.values[:count], rows.scale[:count])


_RAGGED: Final = lax.RaggedDotDimensionNumbers(
  dot_dimension_numbers=(((1,), (2,)), ((), ())),
  lhs_ragged_dimensions=[0],
  rhs_group_dimensions=[0],
)
# Limits on the number of rows of a step of "scan".
_MIN_TILE: Final = 8
_MAX_TILE: Final = 128


# Matmuls of peers. x is [rows, k], sorted by expert. w is [experts, n, k].
# sizes is i32[experts], the number of rows of each expert. Results are
# f32[rows, n].


def _precision(x: jax.Array) -> Any:
  return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
  """Contracts the last dimensions of x and w."""
  return lax.dot_general(
    x,
    w,
    dot_variants.LAST,
    precision=_precision(x),
    preferred_element_type=jnp.float32,
  )


def by_ragged_dot(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
  """Calls JAX's ragged dot, which multiplies all rows with all experts."""
  return lax.ragged_dot_general(
    x,
    w,
    sizes,
    _RAGGED,
    precision=_precision(x),
    preferred_element_type=jnp.float32,
  )


def by_loop(
  x: jax.Array, weights: Sequence[jax.Array], *, sizes: Sequence[int]
) -> jax.Array:
  """Computes a dot with the weights (n, k) of each used expert."""
  results, row = [], 0
  for w, size in zip(weights, sizes, strict=True):
    results.append(_dot(x[row : row + size], w))
    row += size
  return jnp.concatenate(results)


def by_scan(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
  """Loops over the used experts, with dynamic slices of rows and weights."""
  num_rows, experts = len(x), len(w)
  average = -(-num_rows // experts)
  tile = 1 << max(average - 1, 0).bit_length()
  tile = min(max(tile, _MIN_TILE), _MAX_TILE)
  ends = jnp.cumsum(sizes)
  starts = ends - sizes
  (used,) = jnp.nonzero(sizes, size=min(experts, num_rows))
  padded = jnp.pad(x, ((0, tile), (0, 0)))

  def expert(i: jax.Array, result: jax.Array) -> jax.Array:
    e = used[i]
    own = lax.dynamic_index_in_dim(w, e, keepdims=False)

    def step(j: jax.Array, result: jax.Array) -> jax.Array:
      row = starts[e] + j * tile
      new = _dot(lax.dynamic_slice_in_dim(padded, row, tile), own)
      old = lax.dynamic_slice_in_dim(result, row, tile)
      is_own = row + jnp.arange(tile) < ends[e]
      new = jnp.where(is_own[:, None], new, old)
      return lax.dynamic_update_slice_in_dim(result, new, row, 0)

    return lax.fori_loop(0, (sizes[e] + tile - 1) // tile, step, result)

  result = jnp.zeros((num_rows + tile, w.shape[1]), jnp.float32)
  return lax.fori_loop(0, jnp.sum(sizes > 0), expert, result)[:num_rows]


def by_take(x: jax.Array, w: jax.Array, of_row: jax.Array) -> jax.Array:
  """Multiplies each row with a copy of the weight `of_row`, i32[rows]."""
  return jnp.einsum(
    "rk,rnk->rn",
    x,
    jnp.take(w, of_row, axis=0),
    precision=_precision(x),
    preferred_element_type=jnp.float32,
  )
