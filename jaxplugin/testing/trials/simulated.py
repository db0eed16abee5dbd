# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A measuring device that is not there: times from the compiled kernels.

The clock is fake: instructions of the main loop, its steps, and rounds of
programs over the cores, in whatever units. It knows of a kernel what only its
compiled code says. So it proves that a candidate's own kernel is what is
measured, and says nothing of a real GPU.
"""

from __future__ import annotations

import math
import random

from jaxplugin.dot.backends import triton
from jaxplugin.lab.compilation import triton_dots
from jaxplugin.lab.tuning.trials import machine

ROUNDS = 9
_NOISE = 0.01
# Of XLA's operations, and of each launch.
_XLA_MS = 1.0
_LAUNCH_MS = 0.002
_MS_PER_INSTRUCTION = 1e-6


class SimulatedGpu:
  """A `machine.TrialDevice` of a named target.

  Attributes:
    times: milliseconds by key; given ones are not found by compiling.
    kernels: names of the kernels of each candidate that was compiled, by key.
  """

  def __init__(self, target, times=None):
    self._target = target
    self._random = random.Random(0)
    self.times = dict(times or {})
    self.kernels = {}

  def check(self, problem, candidates, progress):
    faults = {}
    for candidate in candidates:
      progress(candidate.key)
      if candidate.key in self.times:
        continue
      if candidate.implementation != "triton":
        self.times[candidate.key] = _XLA_MS
        continue
      try:
        compiled = triton_dots.compile_dot(
          problem, self._target, candidate.config
        )
      except RuntimeError as error:
        faults[candidate.key] = machine.TrialFault(
          kind="error", reason=str(error)
        )
        continue
      self.kernels[candidate.key] = [k.name for k in compiled.launches]
      self.times[candidate.key] = self._milliseconds(
        problem, candidate, compiled
      )
    return machine.Trials(faults=faults)

  def _milliseconds(self, problem, candidate, compiled):
    _, launches = triton.launches(problem, self._target, candidate.config)
    tiling = dict(launches[0].constexprs)["TILING"]
    instructions = compiled.kernels[0].main_loop.instructions
    rounds = math.ceil(tiling.programs / self._target.core_count)
    spent = instructions * tiling.steps * rounds * _MS_PER_INSTRUCTION
    return spent + _LAUNCH_MS * len(launches)

  def time(self, problem, candidates, progress):
    samples = {}
    for candidate in candidates:
      time_ms = self.times[candidate.key]
      samples[candidate.key] = tuple(
        time_ms * (1 + _NOISE * self._random.random()) for _ in range(ROUNDS)
      )
    return machine.Trials(samples=samples)
