# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is done with candidates in a process of its own (`workers`).

A job takes JSON; a problem in it is pickled, as the process that asks and this
one are of one program.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp

from jaxplugin.explanation import estimates
from jaxplugin.lab.bench import devices
from jaxplugin.lab.bench import execution
from jaxplugin.lab.bench import timing
from jaxplugin.lab.bench.peers import operand_sets
from jaxplugin.lab.bench.peers import variants
from jaxplugin.lab.compilation import triton_dots
from jaxplugin.lab.tuning.candidates import listing
from jaxplugin.lab.tuning.operations import known
from jaxplugin.lab.tuning.operations import tuned
from jaxplugin.lab.tuning.trials import forcing

Tell = Callable[[Any], None]

_SEED: Final = 19
_RUNS: Final = 2  # of each check: what is wrong only sometimes
_MAX_SET_BYTES: Final = {"cpu": 1 << 30, "gpu": 8 << 30}
# Where a GPU's figures are not known: a call's program has several steps then.
_STEP_SECONDS: Final = 1e-4


def packed(value: Any) -> str:
  """A problem or a target, for a job's argument."""
  return base64.b64encode(pickle.dumps(value)).decode()


def _unpacked(text: str) -> Any:
  return pickle.loads(base64.b64decode(text))


def compile(argument: dict[str, Any], tell: Tell) -> dict[str, Any]:
  """Compiles the Triton kernels of a candidate; no GPU is needed.

  Args:
    argument: "problem", "target", "candidate".
    tell: not used.

  Returns:
    What they take: "registers", "spill_bytes", "shared_memory_bytes".
  """
  del tell
  problem = _unpacked(argument["problem"])
  target = _unpacked(argument["target"])
  candidate = listing.candidate_of(argument["candidate"])
  found = triton_dots.compile_dot(problem, target, candidate.config)
  return {
    "registers": max(kernel.registers for kernel in found.kernels),
    "spill_bytes": max(kernel.spill_bytes for kernel in found.kernels),
    "shared_memory_bytes": max(
      kernel.shared_memory_bytes for kernel in found.kernels
    ),
  }


def check(argument: dict[str, Any], tell: Tell) -> list[str]:
  """Compiles and runs a candidate on exact operands.

  Of the problem's own sizes, of sizes that are multiples of no tile, and with
  NaN in the padding of scales.

  Args:
    argument: "problem" and "candidate".
    tell: is told what is next.

  Returns:
    What could not be checked, and why.

  Raises:
    WrongResultError: a number is wrong.
  """
  problem: tuned.Problem = _unpacked(argument["problem"])
  candidate = listing.candidate_of(argument["candidate"])
  operation = known.of(problem)
  tail = operation.tail(problem)
  left = []
  for name, given in (
    ("sizes", problem),
    ("tails", tail),
    ("poison", operation.poisoned(tail)),
  ):
    tell(name)
    if given is None:
      left.append(f"{name}: these operands have no padding")
      continue
    why = forcing.refusal(given, candidate)
    if why and name != "sizes":
      left.append(f"{name}: {why}")
      continue
    _check_one(given, candidate)
  return left


def _check_one(problem: tuned.Problem, candidate: listing.Candidate) -> None:
  operation = known.of(problem)
  made = operation.make(problem, _SEED, True)
  assert made.expected is not None
  function = forcing.forced(problem, candidate)
  forcing.require(problem, candidate, function, made.arrays)
  compiled = jax.jit(function)
  for _ in range(_RUNS):
    operation.check(compiled(made.arrays), made.expected, problem)


def time(argument: dict[str, Any], tell: Tell) -> dict[str, Any]:
  """Times candidates in turns, each with operands that no cache holds.

  Args:
    argument: "problem", "candidates", "rounds", "seconds", "tells": whether to
      say what is next at each call.
    tell: is told.

  Returns:
    "samples": milliseconds by a candidate's key, a list for its rounds;
    "failed": reasons by the key of those that do not run.
  """
  problem: tuned.Problem = _unpacked(argument["problem"])
  device = devices.find(None)
  sets = _Sets(problem, device)
  timed: dict[str, execution.Timed] = {}
  failed: dict[str, str] = {}
  for value in argument["candidates"]:
    candidate = listing.candidate_of(value)
    tell(candidate.key)
    try:
      one = execution.Timed(sets.variant(candidate), sets.plan)
      one.warm_up()
      timed[candidate.key] = one
    # Whatever a candidate raises is told, and others go on.
    except Exception as error:
      failed[candidate.key] = f"{type(error).__name__}: {error}"

  def sample(key: str) -> Callable[[int], float]:
    def call(i: int) -> float:
      if argument["tells"]:
        tell(key)
      return timed[key].sample(i)

    return call

  samples = timing.in_turns(
    {key: sample(key) for key in timed},
    rounds=argument["rounds"],
    seconds=argument["seconds"],
  )
  return {
    "samples": {
      key: [s for s in taken if s is not None] for key, taken in samples.items()
    },
    "failed": failed,
  }


class _Sets:
  """Operands of one problem, as many copies as go past the caches."""

  def __init__(self, problem: tuned.Problem, device: devices.Device):
    self._problem = problem
    operation = known.of(problem)
    first = operation.make(problem, _SEED, False).arrays
    self._sets = [jax.block_until_ready(first)]
    self._flops = operation.flops(problem)
    results = jax.eval_shape(operation.function(problem), first)
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
      max_bytes=_MAX_SET_BYTES["gpu" if device.is_gpu else "cpu"],
    )

  def _operands(self, i: int) -> tuple[Any, ...]:
    while len(self._sets) <= i:
      copied = jax.tree.map(jnp.copy, self._sets[0])
      self._sets.append(jax.block_until_ready(copied))
    return (self._sets[i],)

  def variant(self, candidate: listing.Candidate) -> variants.Variant:
    return variants.Variant(
      name=candidate.key,
      role="ours",
      function=forcing.forced(self._problem, candidate),
      operands=self._operands,
      check=lambda i, result: None,
      num_bytes=self._num_bytes,
      flops=self._flops,
    )
