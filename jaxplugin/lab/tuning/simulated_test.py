# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton's configs from candidates to a table to the kernel that is lowered.

On a GPU that is simulated: its clock is fake, all else is real.
"""

import datetime
import importlib.util
import math
import pathlib
import random
import tempfile
from typing import Final
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.dot.backends import triton
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.compilation import triton_dots
from jaxplugin.lab.tuning import session
from jaxplugin.lab.tuning import store
from jaxplugin.lab.tuning import workload
from jaxplugin.lab.tuning.candidates import listing
from jaxplugin.lab.tuning.operations import operation
from jaxplugin.lab.tuning.trials import machine
from jaxplugin.runtime import triton_library
from jaxplugin.tables import reading

pytestmark = pytest.mark.full

TARGET: Final = targets.named_target("h100")
LIMITS: Final = operation.SearchLimits(tiles=3, ways=1)
M, N, K = 16, 512, 1024
ROUNDS = 9
NOISE = 0.01
# Of XLA's operations, and of each launch.
XLA_MS = 1.0
LAUNCH_MS = 0.002
MS_PER_INSTRUCTION = 1e-6


class SimulatedGpu:
  """A `machine.LocalMachine` of a named target.

  Its clock counts the compiled main loop's instructions, its steps, and rounds
  of programs over the cores. So a test sees whether each candidate's own kernel
  is measured.

  Attributes:
    times: milliseconds by key; given ones are not found by compiling.
    kernels: names of the kernels of each candidate that was compiled, by key.
  """

  def __init__(self, times=None):
    self._random = random.Random(0)
    self.times = dict(times or {})
    self.kernels = {}
    self.all_rounds = ROUNDS

  def prepare(self, problem, candidates):
    pass

  def check(self, problem, candidates, progress):
    faults = {}
    for candidate in candidates:
      if candidate.key in self.times:
        continue
      try:
        self.times[candidate.key] = self._milliseconds(problem, candidate)
      except RuntimeError as error:
        fault = machine.TrialFault(kind="error", reason=str(error))
        faults[candidate.key] = fault
    return machine.Trials(faults=faults)

  def _milliseconds(self, problem, candidate):
    if candidate.implementation != "triton":
      return XLA_MS
    compiled = triton_dots.compile_dot(problem, TARGET, candidate.config)
    self.kernels[candidate.key] = [k.name for k in compiled.launches]
    _, launches = triton.launches(problem, TARGET, candidate.config)
    tiling = dict(launches[0].constexprs)["TILING"]
    instructions = compiled.kernels[0].main_loop.instructions
    rounds = math.ceil(tiling.programs / TARGET.core_count)
    spent = instructions * tiling.steps * rounds * MS_PER_INSTRUCTION
    return spent + LAUNCH_MS * len(launches)

  def time(self, problem, candidates, progress):
    return machine.Trials(
      samples={
        candidate.key: tuple(
          self.times[candidate.key] * (1 + NOISE * self._random.random())
          for _ in range(ROUNDS)
        )
        for candidate in candidates
      }
    )


@absltest.skipIf(importlib.util.find_spec("triton") is None, "no triton")
class SimulatedGpuTest(absltest.TestCase):
  def tune(self, gpu):
    folder = self.enter_context(tempfile.TemporaryDirectory())
    kept = store.Store(
      TARGET,
      pathlib.Path(folder) / "table.json",
      operation=backends.OPERATION,
      rounds=ROUNDS,
      date=datetime.date(2026, 11, 23),
    )
    one = session.Session(
      gpu,
      kept,
      lambda problem: listing.of_problem(problem, TARGET, limits=LIMITS),
    )
    work = workload.of_shapes(
      workloads.parse_rows(f"{M}x{N}x{K}"),
      workloads.parse_pairs("bf16xmxfp8"),
      formats.BF16,
      TARGET,
    )
    (item,) = work.items
    return one.tune(item), kept.path

  def test_what_is_chosen_is_the_kernel_that_is_lowered(self):
    gpu = SimulatedGpu()
    result, path = self.tune(gpu)
    self.assertEqual(result.status, "done", result.reason)
    chosen = result.row.chosen
    self.assertEqual(chosen.implementation, "triton")
    medians = [candidate.median_us for candidate in result.row.candidates]
    self.assertEqual(chosen.median_us, min(medians))
    self.assertLess(chosen.median_us, max(medians) / 2)

    # The same samples again: the same bytes.
    _, other = self.tune(SimulatedGpu(gpu.times))
    self.assertEqual(other.read_bytes(), path.read_bytes())

    key = listing.TrialCandidate(
      implementation="triton", config=chosen.config
    ).key
    kernels = gpu.kernels[key]
    x = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
    w = jax.eval_shape(
      lambda w: jp.quantize(w, jp.MXFP8),
      jax.ShapeDtypeStruct((N, K), jnp.float32),
    )

    def call(x, w):
      return jp.block_scaled_dot(x, w, preferred_element_type=jnp.bfloat16)

    with jp.use_target(TARGET), jp.tuning(reading.read(path)):
      (told,) = jp.explain(call, x, w, target=TARGET)
      self.assertEqual(told.decision.config, chosen.config)
      self.assertEqual(told.decision.config_from, "overlay")
      self.assertEqual(told.decision.notes[0], f"kernels: {', '.join(kernels)}")
      if triton_library.lowering_refusal(TARGET) is not None:
        self.skipTest("jax-triton cannot be imported")
      traced = jax.jit(call).trace(x, w)
      with mock.patch.object(
        triton_library, "call", wraps=triton_library.call
      ) as launched:
        traced.lower(lowering_platforms=("cuda",))
    names = [call.args[1].name for call in launched.call_args_list]
    self.assertEqual(names, kernels)


if __name__ == "__main__":
  absltest.main()
