# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is timed beside each other for a product of experts.

Peers have weights that are ready, f32 or bf16 as a checkpoint has them; only
"dequantize" has quantized ones. "dense dots" are this package's own products of
the same work: as many rows with as many weights, of each number of rows one.
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

from jaxplugin import dot
from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot import reference
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.experts import expert_operands
from jaxplugin.lab.bench.experts import expert_products
from jaxplugin.lab.bench.peers import dot_variants
from jaxplugin.lab.bench.peers import operand_sets
from jaxplugin.lab.bench.peers import variants
from jaxplugin.lab.bench.peers import verification
from jaxplugin.ragged import api
from jaxplugin.ragged import backends
from jaxplugin.ragged import primitive
from jaxplugin.ragged import problems
from jaxplugin.ragged import traced

DENSE: Final = "dense dots"
DEQUANTIZE: Final = "dequantize"
# Of `lax.ragged_dot`; of others, which follow the peers "f32" and "bf16".
_READY: Final = ("lax", "loop", "scan", "take")
_PEERS: Final = ("f32", "bf16")
# Weights that are ready take at most so much; a shared machine has to hold
# those of two dtypes, and what XLA makes of them.
_MAX_READY_BYTES: Final = 5 << 29


class ExpertVariants:
  """The variants of one product of experts on one device."""

  def __init__(
    self, row: workloads.Row, pair: workloads.Pair, target: targets.Target
  ):
    self.row = row
    self.pair = pair
    self.target = target
    self.data = expert_operands.ExpertOperands(row, pair)
    self._expected = functools.lru_cache(maxsize=8)(self.data.expected)

  def ours(
    self, names: Sequence[str] | None
  ) -> list[variants.Variant | variants.Unavailable]:
    """Each implementation of `names`; None is every one that serves."""
    jaxpr = jax.make_jaxpr(functools.partial(self._ragged, None))(
      *self._quantized(0)
    )
    (eqn,) = (e for e in jaxpr.eqns if e.primitive is primitive.ragged_dot_p)
    decided = traced.decide(eqn, self.target)
    assert isinstance(decided.problem, problems.RaggedProblem)
    assert decided.decision is not None
    chosen = decided.decision.implementation
    wanted = list(backends.BACKENDS) if names is None else names
    wanted = [chosen if n == dot_variants.CHOSEN else n for n in wanted]
    found: list[variants.Variant | variants.Unavailable] = []
    for name in sorted(set(wanted), key=lambda n: (n != chosen, n)):
      reason = "ragged_dot has no such implementation"
      if name in backends.BACKENDS:
        refusal = backends.BACKENDS[name].supports(decided.problem, self.target)
        reason = "" if refusal is None else refusal.reason
      if not reason:
        function = functools.partial(self._ragged, name)
        found.append(
          self._variant(
            name,
            "ours",
            function,
            self._quantized,
            bound=verification.OURS_BOUND,
            is_chosen=name == chosen,
          )
        )
      elif names is not None:
        found.append(
          variants.Unavailable(name=name, role="ours", reason=reason)
        )
    return found

  def peers(
    self, names: Sequence[str]
  ) -> list[variants.Variant | variants.Unavailable]:
    """Those of "f32" and "bf16" in `names`, in every way to write them."""
    found: list[variants.Variant | variants.Unavailable] = [self._dense()]
    wanted = [name for name in _PEERS if name in names]
    if wanted:
      found.append(self._dequantizing())
    for name in wanted:
      dtype = workloads.PLAIN_DTYPES[name]
      row = self.row
      num_bytes = row.experts * row.n * row.k * dtype.itemsize
      if num_bytes > _MAX_READY_BYTES:
        reason = f"its weights take {num_bytes / 1e9:.1f} GB"
        found += [
          variants.Unavailable(name=f"{way} {name}", role="peer", reason=reason)
          for way in _READY
        ]
      else:
        found += self._ready(name, dtype)
    for name in names:
      if name not in _PEERS:
        reason = "is not run for experts"
        found.append(
          variants.Unavailable(name=name, role="peer", reason=reason)
        )
    return found

  def _ragged(
    self, implementation: str | None, rows: Any, weights: Any, sizes: Any
  ) -> jax.Array:
    return api.ragged_dot(rows, weights, sizes, implementation=implementation)

  def _quantized(self, i: int) -> tuple[Any, ...]:
    weights = self.data.weights.quantized(self.data.format)
    return self.data.rows(i), weights, self.data.sizes(i)

  def _dense(self) -> variants.Variant:
    """For each number of rows that experts have, one dot of all of these."""
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
    """What one writes with quantized weights and JAX's own ragged dot."""
    dtype = self.pair.plain if self.pair.lhs is None else np.dtype(np.float32)

    def function(rows: Any, weights: Any, sizes: Any) -> jax.Array:
      if isinstance(rows, scaled_array.ScaledArray):
        rows = quantization.dequantize(rows, dtype)
      floats = quantization.dequantize(weights, dtype)
      return expert_products.by_ragged_dot(rows, floats, sizes)

    # NVFP4's global scale leaves numbers that bf16 rounds.
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

  def _ready(self, name: str, dtype: np.dtype) -> list[variants.Variant]:
    """Each way to multiply floats of one dtype."""
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
      "lax": (expert_products.by_ragged_dot, sized),
      "loop": (
        functools.partial(expert_products.by_loop, sizes=sizes),
        single,
      ),
      "scan": (expert_products.by_scan, sized),
      "take": (expert_products.by_take, taken),
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
    """A variant; with `dtype`, of floats on both sides."""

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
    is_int8 = role == "ours" and self.pair.is_fp4
    return variants.Variant(
      name=name,
      role=role,
      function=function,
      operands=operands,
      check=check or expected,
      num_bytes=lhs + used * weight + num_rows * row.n * 4,
      flops=2 * num_rows * row.n * row.k,
      arithmetic="f32" if is_f32 else "int8" if is_int8 else "floats",
      **fields,
    )


def _first_rows(rows: Any, count: int) -> Any:
  """The first `count` of rows, floats or quantized along k."""
  if not isinstance(rows, scaled_array.ScaledArray):
    return rows[:count]
  return dot_variants.with_parts(rows, rows.values[:count], rows.scale[:count])
