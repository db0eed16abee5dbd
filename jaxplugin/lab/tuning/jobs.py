# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Jobs that a process of `pool` runs with candidates.

The argument of a job is JSON. The problem and the target are pickled, because
both processes run the same program.
"""

from __future__ import annotations

import base64
import functools
import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp

from jaxplugin.core import targets
from jaxplugin.explanation import diagnostics, estimates
from jaxplugin.lab.bench import devices, execution
from jaxplugin.lab.bench.peers import operand_sets, variants
from jaxplugin.lab.compilation import triton_dots
from jaxplugin.lab.tuning import listing, race
from jaxplugin.lab.tuning.operations import operands, operation, registry
from jaxplugin.repro import saving
from jaxplugin.tables import resolution

Tell = Callable[[Any], None]

_SEED: Final = 19
_RUNS: Final = 2  # of each check, to find results that are sometimes wrong
# Assumed time of a step on a device without published figures.
_STEP_SECONDS: Final = 1e-4


class UnexpectedDecisionError(Exception):
  """The program does not compute the candidate that the tuner asked for."""

  kind = "error"


def packed(value: Any) -> str:
  """Encodes a problem or a target for a job's argument."""
  return base64.b64encode(pickle.dumps(value)).decode()


def _unpacked(text: str) -> Any:
  return pickle.loads(base64.b64decode(text))


def compile(argument: dict[str, Any], tell: Tell) -> int:
  """Compiles the Triton kernels of a candidate, without a GPU.

  `argument` has "problem", "target" and "candidate". Returns the most bytes of
  registers that a kernel spills.
  """
  del tell
  problem = _unpacked(argument["problem"])
  target = _unpacked(argument["target"])
  candidate = listing.candidate_of(argument["candidate"])
  found = triton_dots.compile_dot(problem, target, candidate.config)
  return max(kernel.spill_bytes for kernel in found.kernels)


def check(argument: dict[str, Any], tell: Tell) -> list[str]:
  """Compiles and runs a candidate on exact operands.

  The operands have the problem's sizes, then sizes that no tile divides, then
  NaN in the padding of their scales. `argument` has "problem" and "candidate".

  Returns:
    The checks that were skipped, each with its reason.

  Raises:
    InexactResultError: If a result is wrong.
    UnexpectedDecisionError: If the program computes another candidate.
  """
  problem: operation.Problem = _unpacked(argument["problem"])
  candidate = listing.candidate_of(argument["candidate"])
  found = registry.of(problem)
  tail = found.tail(problem)
  target = targets.current_target()
  backend = found.operation.backends()[candidate.implementation]
  skipped = []
  for name, given in (
    ("sizes", problem),
    ("tails", tail),
    ("poison", found.poisoned(tail)),
  ):
    tell(name)
    if given is None:
      skipped.append(f"{name}: these operands have no padding")
      continue
    refused = backend.supports(given, target)
    if refused is None:
      why = backend.config_error(candidate.config, given, target)
    else:
      why = refused.reason
    if why and name != "sizes":
      skipped.append(f"{name}: {why}")
      continue
    _check_one(given, candidate)
  return skipped


def _check_one(
  problem: operation.Problem, candidate: listing.TrialCandidate
) -> None:
  found = registry.of(problem)
  arrays, expected = found.make(problem, _SEED)
  function = _pinned(problem, candidate)
  _check_decision(problem, candidate, function, arrays)
  compiled = jax.jit(function)
  for _ in range(_RUNS):
    try:
      found.check(compiled(arrays), expected, problem)
    except operands.InexactResultError as error:
      written = saving.write_failure("tuner", function, arrays)
      raise operands.InexactResultError(f"{error} {written}".strip()) from None


def _pinned(
  problem: operation.Problem, candidate: listing.TrialCandidate
) -> Callable[[Any], Any]:
  """Returns the problem's function, pinned to a candidate."""

  def call(arrays: Any) -> Any:
    with resolution.pinned(candidate.implementation, candidate.config):
      return registry.of(problem).compute(problem, arrays)

  return call


def _check_decision(
  problem: operation.Problem,
  candidate: listing.TrialCandidate,
  function: Callable[[Any], Any],
  arrays: Any,
) -> None:
  """Raises UnexpectedDecisionError unless the decision is the candidate."""
  explanation = diagnostics.explain(function, arrays)
  decided = [(one.problem, one.decision) for one in explanation]
  for one in explanation.quantizations:
    decided += zip(one.problems, one.decisions, strict=True)
  ((got_problem, decision),) = decided
  if got_problem != problem:
    raise UnexpectedDecisionError(
      f"operands must give the problem {problem!r}, got {got_problem!r}"
    )
  assert decision is not None
  found = listing.TrialCandidate(
    implementation=decision.implementation, config=decision.config
  )
  if found != candidate:
    raise UnexpectedDecisionError(
      f"the decision must be {candidate.key}, got {found.key}"
    )


def time_all(argument: dict[str, Any], tell: Tell) -> dict[str, Any]:
  """Times candidates in a race. Operands are not in the cache.

  Args:
    argument: "problem", "candidates", the default first; "samples": times of
      earlier processes for each candidate's key; "rounds", "all_rounds" and
      "seconds" of `race.run`; "announces": whether to call `tell` before each
      sample.
    tell: is called with a candidate's key before the candidate's warm-up.

  Returns:
    "samples": a list of milliseconds for each candidate's key; "failed": the
    reason for each key of a candidate that does not run.
  """
  problem: operation.Problem = _unpacked(argument["problem"])
  device = devices.find(None)
  sets = _Sets(problem, device)
  calls: dict[str, Callable[[], float]] = {}
  failed: dict[str, str] = {}
  for value in argument["candidates"]:
    candidate = listing.candidate_of(value)
    tell(candidate.key)
    try:
      one = execution.Timed(sets.variant(candidate), sets.plan)
      one.warm_up()
      calls[candidate.key] = one.sample
    # A candidate may raise any error. The other candidates are still timed.
    except Exception as error:
      failed[candidate.key] = f"{type(error).__name__}: {error}"
  return {"samples": run_race(argument, calls, tell), "failed": failed}


def run_race(
  argument: dict[str, Any],
  calls: Mapping[str, Callable[[], float]],
  tell: Tell,
  clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
  """Returns the new times of the candidates in `calls`, which can run.

  The other arguments are those of `time_all` and `race.run`.
  """
  default = listing.candidate_of(argument["candidates"][0]).key
  if default not in calls:
    return {}
  before = {key: argument["samples"][key] for key in calls}

  def sample(key: str) -> float:
    if argument["announces"]:
      tell(key)
    return calls[key]()

  samples = {key: [*taken] for key, taken in before.items()}
  race.run(
    {key: functools.partial(sample, key) for key in calls},
    samples,
    default,
    rounds=argument["rounds"],
    all_rounds=argument["all_rounds"],
    seconds=argument["seconds"],
    clock=clock,
  )
  return {key: taken[len(before[key]) :] for key, taken in samples.items()}


class _Sets:
  """Copies of a problem's operands. All copies together exceed the caches."""

  def __init__(self, problem: operation.Problem, device: devices.BenchDevice):
    self._problem = problem
    tuned = registry.of(problem)
    first, _ = tuned.make(problem, _SEED, False)
    self._sets = [jax.block_until_ready(first)]
    self._flops = tuned.flops(problem)
    results = jax.eval_shape(lambda x: tuned.compute(problem, x), first)
    written = estimates.bytes_of(jax.tree.leaves(results)) or 0
    self._num_bytes = int(written) + sum(
      operand_sets.num_bytes(leaf) for leaf in jax.tree.leaves(first)
    )
    mode: execution.Mode = "step" if device.is_gpu else "call"
    least = estimates.estimate(
      self._num_bytes, self._flops, "bf16", device.target
    )
    self.plan = execution.plan(
      self._num_bytes,
      device.cache_bytes,
      mode=mode,
      is_chained=False,
      step_seconds=least.seconds or _STEP_SECONDS,
      max_bytes=device.max_set_bytes,
    )

  def _operands(self, i: int) -> tuple[Any, ...]:
    while len(self._sets) <= i:
      copied = jax.tree.map(jnp.copy, self._sets[0])
      self._sets.append(jax.block_until_ready(copied))
    return (self._sets[i],)

  def variant(self, candidate: listing.TrialCandidate) -> variants.Variant:
    return variants.Variant(
      name=candidate.key,
      role="ours",
      function=_pinned(self._problem, candidate),
      operands=self._operands,
      check=lambda i, result: None,
      num_bytes=self._num_bytes,
      flops=self._flops,
    )
