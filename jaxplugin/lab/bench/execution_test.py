# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How calls are made: rotation, steps, and their order."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from jaxplugin.core import targets
from jaxplugin.lab.bench import execution
from jaxplugin.lab.bench.peers import dot_variants, variants
from jaxplugin.lab.compilation import deviceless
from jaxplugin.testing import bench_results

STEPS = 3


def product(lhs, rhs):
  return lhs @ rhs.T


def made(function=product, operands=None, **fields):
  """A variant of plain products; set i differs from every other."""

  def default(i):
    rng = np.random.default_rng(i)
    return tuple(
      jax.device_put(rng.standard_normal(shape)) for shape in ((2, 8), (3, 8))
    )

  return variants.Variant(
    name="product",
    role="ours",
    function=function,
    operands=operands or default,
    check=lambda i, result: None,
    num_bytes=1,
    flops=1,
    **fields,
  )


class TimedTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_steps_compute_every_set(self, is_chained):
    variant = made()
    plan = execution.CallPlan(
      mode="step", steps=STEPS, groups=2, is_chained=is_chained
    )
    timed = execution.Timed(variant, plan)
    results = timed.run(1)
    self.assertLen(results, STEPS)
    # Those to check are of the first and the last step of the first group.
    checked = timed.results()
    self.assertEqual([i for i, _ in checked], [0, STEPS - 1])
    for i, result in [*enumerate(results, STEPS), *checked]:
      lhs, rhs = variant.operands(i)
      expected = np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64).T
      np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)

  def test_barriers_stand_between_steps(self):
    plan = execution.CallPlan(mode="step", steps=STEPS, groups=1)
    text = execution.Timed(made(), plan).lower().as_text()
    self.assertEqual(text.count("optimization_barrier"), STEPS - 1)

  def test_chained_step_waits_for_the_result_before_it(self):
    # A NaN in result 0 moves step 1 to the next lhs: so it read that result.
    variant = made()

    def operands(i):
      lhs, rhs = variant.operands(i)
      return (lhs * np.nan if i == 0 else lhs), rhs

    plan = execution.CallPlan(
      mode="step", steps=STEPS, groups=1, is_chained=True
    )
    results = execution.Timed(made(operands=operands), plan).run(0)
    expected = product(variant.operands(2)[0], variant.operands(1)[1])
    np.testing.assert_allclose(results[1], expected, rtol=1e-5, atol=1e-5)

  def test_sample_is_an_untimed_call_and_then_timed_ones(self):
    events = []
    ticks = itertools.count()  # seconds

    def clock():
      events.append("clock")
      return float(next(ticks))

    variant = made(
      function=lambda x: events.append(int(x[0])),
      operands=lambda i: (np.array([i]),),
      on_host=True,
    )
    timed = execution.Timed(
      variant, execution.CallPlan(steps=2, groups=3, repeats=2)
    )
    patch = absltest.mock.patch.object
    with (
      patch(execution, "SETTLE_SECONDS", 0.0),
      patch(execution, "TIMED_SECONDS", 0.0),
      patch(execution.time, "perf_counter", clock),
      patch(jax, "block_until_ready", lambda results: events.append("wait")),
    ):
      times = [timed.sample(), timed.sample()]
    # Each call has two steps, and the next of three groups. The clock is read
    # at the start, when both calls are launched, and at the end.
    untimed, launched = [0, 1, "wait"], [2, 3, 4, 5]
    self.assertEqual(
      events, [*untimed, "clock", *launched, "clock", "wait", "clock"] * 2
    )
    self.assertEqual(times, [2 * 1e3 / 4] * 2)
    self.assertEqual((timed.launch_seconds, timed.seconds), (1, 2))

  def test_median_of_timed_calls_after_untimed_calls(self):
    untimed, timed = [], []
    clock = itertools.count()  # seconds
    patch = absltest.mock.patch.object

    def time_of(position):
      timed.append(position)
      return {10: 5.0, 12: 2.0, 14: 1.0}[position]

    with (
      patch(execution, "SETTLE_SECONDS", 3.5),
      patch(execution, "TIMED_SECONDS", 2.5),
      patch(execution.time, "monotonic", lambda: float(next(clock))),
    ):
      median = execution.settled(untimed.append, time_of, 6, 2)
    self.assertEqual((untimed, timed), ([6, 7, 8, 9], [10, 12, 14]))
    self.assertEqual(median, (2.0, 16))


class CompiledStepsTest(parameterized.TestCase):
  """No compiler shares, merges or drops a step."""

  def timed(self, target, pair, implementation):
    row, pair = bench_results.parsed("8x256x512", pair)
    made = dot_variants.DotVariants(row, pair, np.dtype(jnp.float32), target)
    # Beside it there may be one with TMA descriptors.
    (variant,) = (
      v for v in made.ours((implementation,)) if v.name == implementation
    )
    is_cpu = target.platform == "cpu"
    return execution.Timed(
      variant,
      execution.CallPlan(mode="step", steps=STEPS, groups=1, is_chained=is_cpu),
    )

  @pytest.mark.lab
  def test_cpu_program_calls_the_kernel_once_a_step(self):
    target = targets.detect_target("cpu")
    if target.cpu_kernels is None:
      self.skipTest(target.missing(targets.CPU_KERNELS))
    text = self.timed(target, "nvfp4", "cpu").lower().compile().as_text()
    self.assertEqual(
      text.count('custom_call_target="jaxplugin_block_scaled_dot"'), STEPS
    )

  @pytest.mark.lab
  def test_gpu_program_calls_the_kernel_in_every_step(self):
    target = targets.named_target("h200")
    try:
      deviceless.mesh(target)
    except deviceless.DevicelessError as error:
      self.skipTest(str(error))
    counts = {}
    for steps in (1, STEPS):
      with absltest.mock.patch.dict(globals(), STEPS=steps):
        timed = self.timed(target, "bf16xmxfp8", "triton")
      hlo = deviceless.compile(
        timed.traced, *timed._groups[0], target=target
      ).as_text()
      counts[steps] = hlo.count('custom_call_target="triton_kernel_call')
    self.assertGreater(counts[1], 0)
    self.assertEqual(counts[STEPS], STEPS * counts[1])


class PlanTest(parameterized.TestCase):
  def plan(self, num_bytes, mode="step", **options):
    defaults = dict(
      cache_bytes=1000, is_chained=False, step_seconds=1e-4, max_bytes=10**9
    )
    return execution.plan(num_bytes, mode=mode, **{**defaults, **options})

  @parameterized.product(
    num_bytes=(1, 7, 300, 999, 1001, 10**7), mode=("call", "step")
  )
  def test_other_sets_between_two_uses_of_one_exceed_the_cache(
    self, num_bytes, mode
  ):
    plan = self.plan(num_bytes, mode)
    self.assertGreaterEqual(plan.steps * plan.groups, 2)
    others = plan.steps * plan.groups - 1
    self.assertGreater(others * num_bytes, 1000)

  @parameterized.parameters(
    (dict(mode="call"), dict(mode="call", steps=1, repeats=1)),
    # Short steps are many.
    (dict(step_seconds=1e-6), dict(steps=32)),
    (dict(step_seconds=1e-4), dict(steps=10)),
    (dict(step_seconds=1), dict(steps=2, repeats=1)),
    # Chained calls are few, and one at a time.
    (dict(step_seconds=1e-6, is_chained=True), dict(steps=8, repeats=1)),
    (dict(num_bytes=2000, step_seconds=1e-6, max_bytes=10_000), dict(steps=5)),
  )
  def test_steps_fill_a_call_within_limits(self, options, expected):
    plan = dataclasses.asdict(self.plan(**{"num_bytes": 10, **options}))
    self.assertEqual(plan, {**plan, **expected})
