# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles variants and times their calls, with rotating cold operands.

`call` times one call at a time, from Python until the result is ready. This is
the cost of a program with one dot.

`step` times a dot inside a larger program. One jitted function computes a step
for each of several sets of operands, and returns all results.

On a GPU, several calls are launched before the result of the last call is
awaited. The time is device time if launching keeps up
(`VariantResult.launch_fraction`). An optimization barrier between steps keeps
XLA from merging or reordering steps.

XLA's CPU client runs independent operations concurrently, so on a CPU each step
depends on the previous step: an index computed from the previous result selects
the next lhs from a stack.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxplugin.lab.bench.peers import operand_sets, variants

Mode = Literal["call", "step"]

WARM_UP_SECONDS: Final = 0.1
# Untimed calls before a sample. After 2 ms, two threads of a call sometimes
# shared a core, so 4 x 4096 x 4096 in float32 and MXFP4 took 1.12 ms. It took
# 0.59 ms after 10 ms, and 0.58 ms in a loop (two Zen 5 cores, 2026-11).
SETTLE_SECONDS: Final = 1e-2
# A sample is the median of the calls in this time, at least one. A tenth of the
# calls of 20 us take 50 to 78 us, because a thread wakes up (same machine).
TIMED_SECONDS: Final = 2e-3
# Durations of a call of several steps, and of a sample of several calls, that
# hide the time of launching.
_CALL_SECONDS: Final = 1e-3
_SAMPLE_SECONDS: Final = 4e-3
_MAX_STEPS: Final = 32
_MAX_REPEATS: Final = 16
# Limit on a CPU, where several calls must not run concurrently.
_MAX_CHAINED_STEPS: Final = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallPlan:
  """How a variant is called."""

  mode: Mode = "call"
  steps: int = 1  # number of sets of operands in one call
  repeats: int = 1  # number of calls in flight
  groups: int = 2  # number of groups of `steps` sets to rotate
  is_chained: bool = False  # whether each step depends on the previous result


class Timed:
  """A variant, ready to be timed.

  Attributes:
    plan: how the variant is called.
    launch_seconds: time to launch the last timed calls.
    seconds: time until the last timed calls were done.
  """

  def __init__(self, variant: variants.Variant, plan: CallPlan):
    self.variant = variant
    self.plan = plan
    self.launch_seconds = 0.0
    self.seconds = 0.0
    self._position = 0
    self._tree: Any = jax.tree.structure(variant.operands(0))
    self._groups = [
      self._arguments(range(g * plan.steps, (g + 1) * plan.steps))
      for g in range(plan.groups)
    ]
    is_traced = not variant.on_host
    self._function: Any = jax.jit(self.traced) if is_traced else self.traced

  def _arguments(self, sets: Sequence[int]) -> list[Any]:
    """Returns the flat arguments of one call, without any ScaledArray."""
    leaves = [jax.tree.leaves(self.variant.operands(i)) for i in sets]
    flat = [leaf for one in leaves for leaf in one]
    if self.plan.is_chained:
      flat.append(jnp.stack([one[0] for one in leaves]))
    return flat

  def traced(self, *flat: Any) -> list[Any]:
    """Returns the result of each step of one call."""
    count = self._tree.num_leaves
    stack = flat[-1] if self.plan.is_chained else None
    results: list[Any] = []
    for i in range(self.plan.steps):
      leaves = list(flat[i * count : (i + 1) * count])
      if results and not self.variant.on_host:
        leaves[0] = _after(results[-1], leaves[0], stack, i)
      operands = jax.tree.unflatten(self._tree, leaves)
      results.append(self.variant.function(*operands))
    return results

  def run(self, group: int) -> list[Any]:
    """Returns the results of one call when they are ready."""
    return jax.block_until_ready(self._function(*self._groups[group]))

  def results(self) -> list[tuple[int, Any]]:
    """Returns (set, result) for the first and last set of the first group."""
    results = self.run(0)
    return [(i, results[i]) for i in sorted({0, self.plan.steps - 1})]

  def lower(self) -> Any:
    """Returns the lowered function of one call."""
    return self._function.lower(*self._groups[0])

  def compile(self) -> int:
    """Compiles ahead of the first call. Returns bytes of XLA's temporaries."""
    if self.variant.on_host:
      return 0
    self._function = self.lower().compile()
    analysis = self._function.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)

  def warm_up(self) -> None:
    end = time.perf_counter() + WARM_UP_SECONDS
    self.sample()
    while time.perf_counter() < end:
      self.sample()

  def single(self) -> float:
    """Returns the milliseconds of a step, without an untimed call first."""
    start = time.perf_counter()
    self.run(0)
    self.launch_seconds = 0.0
    self.seconds = time.perf_counter() - start
    return self.seconds * 1e3 / self.plan.steps

  def sample(self) -> float:
    """Returns the median milliseconds of one step.

    Untimed calls with other operands precede the timed calls, because the
    previous program may slow down the next call. After a program that frees a
    large temporary, a call took 2.0 ms instead of 0.93 ms on a CPU.
    """
    groups, count = self._groups, self.plan.repeats

    def run(position: int) -> None:
      self.run(position % len(groups))

    def timed(position: int) -> float:
      start = time.perf_counter()
      for i in range(position, position + count):
        results = self._function(*groups[i % len(groups)])
      launched = time.perf_counter()
      jax.block_until_ready(results)
      end = time.perf_counter()
      self.launch_seconds = launched - start
      self.seconds = end - start
      return self.seconds

    seconds, self._position = settled(run, timed, self._position, count)
    return seconds * 1e3 / (count * self.plan.steps)


def _after(
  result: Any, leaf: jax.Array, stack: jax.Array | None, i: int
) -> jax.Array:
  """Returns `leaf` with a data dependency on `result`."""
  first = jax.tree.leaves(result)[0]
  if stack is None:
    return lax.optimization_barrier((leaf, first))[0]
  # `zero` is 0 because results are finite, but XLA cannot prove that.
  element = first.reshape(-1)[0].astype(jnp.float32)
  zero = jnp.isnan(element).astype(jnp.int32)
  return lax.dynamic_index_in_dim(stack, i + zero, keepdims=False)


def settled(
  run: Callable[[int], Any],
  timed: Callable[[int], float],
  position: int,
  calls: int = 1,
) -> tuple[float, int]:
  """Returns the median seconds of timed calls that follow untimed calls.

  Args:
    run: makes an untimed call with the operands at a position.
    timed: makes `calls` calls from a position on, and returns their seconds.
    position: the first position.

  Returns:
    The median, and the position after the last call.
  """

  def repeated(
    call: Callable[[int], Any], seconds: float, step: int
  ) -> list[Any]:
    nonlocal position
    results: list[Any] = []
    end = time.monotonic() + seconds
    while not results or time.monotonic() < end:
      results.append(call(position))
      position += step
    return results

  repeated(run, SETTLE_SECONDS, 1)
  seconds = repeated(timed, TIMED_SECONDS, calls)
  return statistics.median(seconds), position


def plan(
  num_bytes: int,
  cache_bytes: int,
  *,
  mode: Mode,
  is_chained: bool,
  step_seconds: float,
  max_bytes: int,
) -> CallPlan:
  """Returns how to call a variant whose set of operands has `num_bytes`.

  A step takes at least `step_seconds`, and the sets of one call may have
  `max_bytes`.
  """
  sets = operand_sets.copies(num_bytes, cache_bytes)
  if mode == "call":
    return CallPlan(groups=sets)
  wanted = max(2, min(_MAX_STEPS, int(_CALL_SECONDS / step_seconds)))
  repeats = int(_SAMPLE_SECONDS / (step_seconds * wanted))
  if is_chained:
    wanted, repeats = min(wanted, _MAX_CHAINED_STEPS), 1
  steps = max(1, min(wanted, max_bytes // num_bytes))
  return CallPlan(
    mode="step",
    steps=steps,
    groups=-(-sets // steps),
    repeats=max(1, min(_MAX_REPEATS, repeats)),
    is_chained=is_chained,
  )
