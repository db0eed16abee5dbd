# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton's configs from candidates to a table to the kernel that is lowered.

On a GPU that is simulated: its clock is fake, all else is real.
"""

import datetime
import pathlib
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
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.tuning import session
from jaxplugin.lab.tuning import store
from jaxplugin.lab.tuning import workload
from jaxplugin.lab.tuning.candidates import listing
from jaxplugin.lab.tuning.candidates import spaces
from jaxplugin.runtime import triton_library
from jaxplugin.tables import reading
from jaxplugin.testing.trials import simulated

pytestmark = pytest.mark.full

TARGET: Final = targets.named_target("h100")
LIMITS: Final = spaces.SearchLimits(tiles=3, ways=1)
M, N, K = 16, 512, 1024


class SimulatedGpuTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    try:
      import triton  # noqa: F401
    except ImportError as error:
      self.skipTest(f"no triton: {error}")
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(folder)

  def tune(self, name, gpu):
    kept = store.Store(
      TARGET,
      self.folder / name / "table.json",
      operation=backends.OPERATION,
      rounds=simulated.ROUNDS,
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
    gpu = simulated.SimulatedGpu(TARGET)
    result, path = self.tune("first", gpu)
    self.assertEqual(result.status, "done", result.reason)
    chosen = result.row.chosen
    self.assertEqual(chosen.implementation, "triton")
    medians = [candidate.median_us for candidate in result.row.candidates]
    self.assertEqual(chosen.median_us, min(medians))
    self.assertLess(chosen.median_us, max(medians) / 2)
    key = listing.TrialCandidate(
      implementation="triton", config=chosen.config
    ).key
    self.check_explained_and_lowered(path, chosen, gpu.kernels[key])

    # The same samples again: the same bytes.
    again = simulated.SimulatedGpu(TARGET, times=gpu.times)
    _, other = self.tune("second", again)
    self.assertEqual(other.read_bytes(), path.read_bytes())

  def check_explained_and_lowered(self, path, chosen, kernels):
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
