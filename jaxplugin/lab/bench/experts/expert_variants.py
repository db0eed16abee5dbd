# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The variants of a matmul of a mixture of experts.

Peers have f32 or bf16 weights, as in a checkpoint. Two peers have quantized
weights. "dequantize" dequantizes the weights for JAX's ragged dot. "dense dots"
does as much work by this package's dense dot: one dot multiplies with the
weights of all experts that have the same number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin import dot
from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import decisions
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot import reference
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.experts import expert_operands
from jaxplugin.lab.bench.peers import dot_variants
from jaxplugin.lab.bench.peers import operand_sets
from jaxplugin.lab.bench.peers import variants
from jaxplugin.lab.bench.peers import verification
from jaxplugin.ragged import api
from jaxplugin.ragged import backends
from jaxplugin.ragged import primitive

DENSE: Final = "dense dots"
DEQUANTIZE: Final = "dequantize"
# Ways to multiply floats. A peer's name is a way and "f32" or "bf16".
_READY: Final = ("lax", "loop", "scan", "take")
_PEERS: Final = ("f32", "bf16")
# Limit on the weights of one dtype. A machine must hold the weights of two
# dtypes, and XLA's copies of these weights.
_MAX_READY_BYTES: Final = 5 << 29


class ExpertVariants:
  """The variants of one ragged dot on one device."""

  def __init__(
    self, row: workloads.BenchRow, pair: workloads.Pair, target: targets.Target
  ):
    self.row = row
    self.pair = pair
    self.target = target
    self.data = expert_operands.ExpertOperands(row, pair)
    self._expected = functools.lru_cache(maxsize=8)(self.data.expected)

  def ours(self, names: Sequence[str] | None) -> list[variants.AnyVariant]:
    """Returns variants of backends. None is all that support the row."""
    jaxpr = jax.make_jaxpr(functools.partial(self._ragged, None))(
      *self._quantized(0)
    )
    (eqn,) = (e for e in jaxpr.eqns if e.primitive in primitive.PRIMITIVES)

    def make(
      backend: decisions.BackendRecord[Any], is_chosen: bool
    ) -> list[variants.Variant]:
      variant = self._variant(
        backend.name,
        "ours",
        functools.partial(self._ragged, backend.name),
        self._quantized,
        bound=verification.OURS_BOUND,
        is_chosen=is_chosen,
      )
      return [variant]

    decided = primitive.decide(eqn, self.target)
    return variants.ours(names, [decided], backends.BACKENDS, make)

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
      "loop": (
        functools.partial(by_loop, sizes=sizes),
        single,
      ),
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
    routing = self.data.routing(0)
    num_rows, used = row.m * row.top, len(routing.sizes)
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
