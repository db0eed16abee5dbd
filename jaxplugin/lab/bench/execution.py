# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls that are timed: compiled, checked, rotating over cold operands.

`call` times one call at a time, from Python until the result is there: what
user code pays for a product that is a program of its own.

`step` times a product inside a larger program: one jitted function of several
sets of operands does one after the other, its results all returned, and several
calls of it are under way before the last is waited for. On a GPU the time is
the device's as long as launching keeps up (`Timing.launch_fraction`). An
optimization barrier between steps keeps XLA from merging, reordering or
sharing them; XLA's CPU client, which runs independent operations at once, gets
a true dependency: the next lhs is picked from a stack by an index that is
computed from the last result.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxplugin.lab.bench.peers import operand_sets
from jaxplugin.lab.bench.peers import variants

Mode = Literal["call", "step"]

WARM_UP_SECONDS: Final = 0.1
_MIN_WARM_UP_CALLS: Final = 1  # each with an untimed one before it
# What one call of a program of steps, and one sample of several calls, are to
# take, so that launching is hidden; and the most that this may need.
_CALL_SECONDS: Final = 1e-3
_SAMPLE_SECONDS: Final = 4e-3
_MAX_STEPS: Final = 32
_MAX_REPEATS: Final = 16
# On a CPU, whose programs must not run at once either.
_MAX_CHAINED_STEPS: Final = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """How calls of a variant are made.

  Attributes:
    mode: "call" or "step".
    steps: sets of operands that one call takes.
    repeats: calls under way at once.
    groups: how many different groups of `steps` sets are rotated.
    is_chained: whether steps depend on each other's results (CPU).
  """

  mode: Mode = "call"
  steps: int = 1
  repeats: int = 1
  groups: int = 2
  is_chained: bool = False


class Timed:
  """A variant, ready to be timed.

  Attributes:
    plan: how.
    launch_seconds: of the last sample, until all calls were under way.
    seconds: of the last sample, until they were done.
  """

  def __init__(self, variant: variants.Variant, plan: Plan):
    self.variant = variant
    self.plan = plan
    self.launch_seconds = 0.0
    self.seconds = 0.0
    self._position = 0
    first = jax.tree.flatten(variant.operands(0))
    self._tree: Any = first[1]
    self._groups = [
      self._arguments(range(g * plan.steps, (g + 1) * plan.steps))
      for g in range(plan.groups)
    ]
    self._function: Any = (
      self._run_on_host if variant.on_host else jax.jit(self.traced)
    )

  def _arguments(self, sets: Sequence[int]) -> list[Any]:
    """What one call takes, flat: Python sees no ScaledArray while timing."""
    leaves = [jax.tree.leaves(self.variant.operands(i)) for i in sets]
    flat = [leaf for one in leaves for leaf in one]
    if self.plan.is_chained:
      flat.append(jnp.stack([one[0] for one in leaves]))
    return flat

  def _run_on_host(self, *leaves: Any) -> list[Any]:
    count = self._tree.num_leaves
    return [
      self.variant.function(
        *jax.tree.unflatten(self._tree, leaves[i * count : (i + 1) * count])
      )
      for i in range(self.plan.steps)
    ]

  def _wait(self, results: Any) -> None:
    if self.variant.wait is not None:
      self.variant.wait()
    elif not self.variant.on_host:
      jax.block_until_ready(results)

  def traced(self, *flat: Any) -> list[Any]:
    """All steps of one call, before `jit`; returns the result of each."""
    count = self._tree.num_leaves
    stack = flat[-1] if self.plan.is_chained else None
    results: list[Any] = []
    for i in range(self.plan.steps):
      leaves = list(flat[i * count : (i + 1) * count])
      if results:
        leaves[0] = _after(results[-1], leaves[0], stack, i)
      operands = jax.tree.unflatten(self._tree, leaves)
      results.append(self.variant.function(*operands))
    return results

  def arguments(self, group: int) -> list[Any]:
    """What one call takes, flat."""
    return self._groups[group]

  def run(self, group: int) -> list[Any]:
    """The results of one call, ready."""
    results = self._function(*self._groups[group])
    self._wait(results)
    return results

  def results(self) -> list[tuple[int, Any]]:
    """(set, result) of the first group's first and last set."""
    results = self.run(0)
    return [(i, results[i]) for i in sorted({0, self.plan.steps - 1})]

  def lower(self) -> Any:
    """The lowered function of one call."""
    return self._function.lower(*self._groups[0])

  def compile(self) -> int:
    """Compiles before the first call; returns bytes of XLA's temporaries."""
    if self.variant.on_host:
      return 0
    self._function = self.lower().compile()
    analysis = self._function.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)

  def warm_up(self, seconds: float = WARM_UP_SECONDS) -> None:
    start = time.perf_counter()
    calls = 0
    while calls < _MIN_WARM_UP_CALLS or time.perf_counter() - start < seconds:
      self.sample()
      calls += 1

  def single(self) -> float:
    """Milliseconds of the first group's call, with none before it."""
    start = time.perf_counter()
    self.run(0)
    self.launch_seconds = 0.0
    self.seconds = time.perf_counter() - start
    return self.seconds * 1e3 / self.plan.steps

  def sample(self, round: int = 0) -> float:
    """Milliseconds of one step.

    Timed after an untimed call with other operands: what ran before, above all
    a program that frees a large temporary, makes the next call slower, whatever
    it is (0.93 ms became 2.0 on a CPU).
    """
    del round  # the rotation goes on from sample to sample
    groups, count = self._groups, self.plan.repeats
    self.run(self._position % len(groups))
    first = self._position + 1
    self._position += 1 + count
    start = time.perf_counter()
    for i in range(first, first + count):
      results = self._function(*groups[i % len(groups)])
    launched = time.perf_counter()
    self._wait(results)
    end = time.perf_counter()
    self.launch_seconds = launched - start
    self.seconds = end - start
    return (end - start) * 1e3 / (count * self.plan.steps)


def _after(
  result: Any, leaf: jax.Array, stack: jax.Array | None, i: int
) -> jax.Array:
  """`leaf`, available only once `result` is."""
  first = jax.tree.leaves(result)[0]
  if stack is None:
    return lax.optimization_barrier((leaf, first))[0]
  # 0, but only the running program knows: results are finite.
  element = first.reshape(-1)[0].astype(jnp.float32)
  zero = jnp.isnan(element).astype(jnp.int32)
  return lax.dynamic_index_in_dim(stack, i + zero, keepdims=False)


def plan(
  num_bytes: int,
  cache_bytes: int,
  *,
  mode: Mode,
  is_chained: bool,
  step_seconds: float,
  max_bytes: int,
) -> Plan:
  """Decides how calls of a variant are made.

  Args:
    num_bytes: of one set of operands.
    cache_bytes: of the last-level cache.
    mode: "call" or "step".
    is_chained: as in `Plan`.
    step_seconds: what a step takes about, at least.
    max_bytes: what all sets together may take.
  """
  sets = operand_sets.copies(num_bytes, cache_bytes)
  if mode == "call":
    return Plan(groups=sets)
  wanted = max(2, min(_MAX_STEPS, int(_CALL_SECONDS / step_seconds)))
  repeats = int(_SAMPLE_SECONDS / (step_seconds * wanted))
  if is_chained:
    wanted, repeats = min(wanted, _MAX_CHAINED_STEPS), 1
  steps = max(1, min(wanted, max_bytes // num_bytes))
  return Plan(
    mode="step",
    steps=steps,
    groups=-(-sets // steps),
    repeats=max(1, min(_MAX_REPEATS, repeats)),
    is_chained=is_chained,
  )
