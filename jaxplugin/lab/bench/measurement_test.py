# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which form of a peer is measured, and the results of several rows."""

import dataclasses
import time

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from jaxplugin.lab.bench import execution, measurement, results, workloads
from jaxplugin.lab.bench.peers import variants, verification
from jaxplugin.testing import bench_results


def form(name, *, seconds=0.0, error=None):
  """A form that takes `seconds`, or whose call or check raises `error`."""

  def function(x):
    if isinstance(error, RuntimeError):
      raise error
    time.sleep(seconds)
    return x

  def check(i, result):
    if isinstance(error, verification.WrongResultError):
      raise error

  return variants.Variant(
    name="peer",
    role="peer",
    function=function,
    operands=lambda i: (np.full(8, i),),
    check=check,
    num_bytes=64,
    flops=8,
    on_host=True,
    form=name,
  )


FAULT = RuntimeError("no such luck")
WRONG = verification.WrongResultError("0 is not 1")


class FormsTest(parameterized.TestCase):
  def measured(self, *forms):
    """The result of a peer that has these forms."""
    return self.measured_twice(*forms)[0].variants[0]

  def measured_twice(self, *forms, of_floats=False):
    """The results of a row in two formats."""
    same_as = "f32" if of_floats else ""
    peer = tuple(dataclasses.replace(one, same_as=same_as) for one in forms)
    return self.results_of(bench_results.measuring(("f32",), ()), peer)

  def results_of(self, measuring, variant):
    """Measures a row in two formats."""
    (row,) = workloads.parse_rows("32x32x32")
    with absltest.mock.patch.object(
      measuring, "_variants", lambda *_: [variant]
    ):
      return [
        measuring.measure(row, pair)
        for pair in workloads.parse_pairs("mxfp8,nvfp4")
      ]

  @pytest.mark.lab
  def test_fastest_form_is_measured_and_named(self):
    result = self.measured(
      form("slow", seconds=0.02), form("fast"), form("other", seconds=0.01)
    )
    self.assertEqual((result.form, result.status), ("fast", "ok"))
    self.assertLess(result.time.median, 5)

  @pytest.mark.lab
  def test_fastest_form_of_floats_is_found_once_a_row(self):
    for of_floats, times in ((True, 1), (False, 2)):
      checks = []
      slow = dataclasses.replace(
        form("slow", seconds=0.01), check=lambda i, y, to=checks: to.append(i)
      )
      for result in self.measured_twice(
        slow, form("fast"), of_floats=of_floats
      ):
        self.assertEqual(result.variants[0].form, "fast")
      self.assertLen(checks, times)

  def test_form_that_fails_in_a_timed_call_is_not_chosen(self):
    calls = []

    def function(x):
      calls.append(x)
      if len(calls) > 7:  # the check, the warm-up, two samples
        raise RuntimeError("made up")
      time.sleep(0.003)  # more than the time of untimed calls
      return x

    def result_of(*forms):
      calls.clear()
      with absltest.mock.patch.object(execution, "WARM_UP_SECONDS", 0.0):
        return self.measured(*forms)

    failing = dataclasses.replace(form("failing"), function=function)
    result = result_of(failing, form("slower", seconds=0.004))
    self.assertEqual((result.form, result.status), ("slower", "ok"))
    result = result_of(failing)
    self.assertEqual(result.status, "unavailable")
    self.assertEqual(result.reason, "RuntimeError: made up")
    self.assertIsNone(result.time)

  @pytest.mark.lab
  def test_form_that_is_slow_at_first_is_not_tried_again(self):
    times = {}

    def counted(name, seconds):
      def function(x):
        times[name] = times.get(name, 0) + 1
        time.sleep(seconds)
        return x

      return dataclasses.replace(form(name), function=function)

    self.measured(counted("slow", 0.1), counted("fast", 0.001))
    # To be checked and warmed up, and once more, untimed and timed; twice, as
    # two formats are measured.
    self.assertEqual(times["slow"], 2 * (1 + 2 + 2))
    self.assertGreater(times["fast"], 40)

  @parameterized.parameters(
    # A form that fails leaves the others.
    ([form("broken", error=FAULT), form("slow")], "ok", "slow", ""),
    (
      [form("broken", error=FAULT), form("too", error=FAULT)],
      *("unavailable", "broken", "RuntimeError: no such luck"),
    ),
    ([form("fast"), form("bad", error=WRONG)], "wrong", "bad", "0 is not 1"),
  )
  def test_result_of_a_peer_with_a_bad_form(self, forms, status, name, reason):
    result = self.measured(*forms)
    self.assertEqual(
      (result.status, result.form, result.reason), (status, name, reason)
    )
    self.assertEqual(result.time is None, status != "ok")

  @pytest.mark.lab
  def test_all_ways_to_read_are_timed_beside_rows_that_read(self):
    row_and_pair = bench_results.parsed("1x32x64")
    measuring = bench_results.measuring(("f32",), ())
    found = measuring._variants(*row_and_pair)
    names = [v.name for v in found if not isinstance(v, tuple)]
    for name in ("read", "read by numpy", "read huge pages"):
      self.assertIn(name, names)

  @pytest.mark.lab
  def test_product_of_floats_that_is_faster_raises_its_ceiling(self):
    for name, is_raised in (("f32", True), ("bf16", True), ("cpu", False)):
      measuring = bench_results.measuring(("f32",), ())
      fast = dataclasses.replace(form(""), name=name, flops=10**15)
      before = measuring.ceilings
      self.results_of(measuring, fast)
      fields = ("f32", "bf16", "read", "int8")
      raised = [
        field
        for field in fields
        if getattr(measuring.ceilings, field) > getattr(before, field)
      ]
      self.assertEqual(raised, [name] if is_raised else [])


class DoublingMeasurement:
  """Each row takes 4 ms, and finds that memory is read twice as fast."""

  def __init__(self, device, ceilings, options, describe):
    del device, options, describe
    self.ceilings = ceilings

  def close(self):
    pass

  def measure(self, row, pair):
    read = 2 * self.ceilings.read
    self.ceilings = self.ceilings.raised("read", read)
    found = bench_results.variant("cpu", 4, flops=1)
    return bench_results.row(found, row=str(row), formats=pair.name)


class RowsTest(absltest.TestCase):
  """A run has one ceiling of each kind, for all of its rows."""

  def measured(self, shapes, found, deadline=np.inf):
    work = workloads.pairs_of(
      workloads.parse_rows(shapes), workloads.parse_pairs("mxfp8")
    )
    with absltest.mock.patch.object(
      measurement, "RowMeasurement", DoublingMeasurement
    ):
      *_, last = measurement.measure_rows(found, work, None, None, deadline)
    return last

  def fractions(self, run):
    return [row.variants[0].roof_fraction for row in run.rows]

  def test_last_ceiling_counts_for_all_rows(self):
    # At first 1e8 bytes are 2 ms, at 50e9 a second; at the end 0.5 ms.
    found = self.measured("1x32x32,1x64x64", bench_results.run())
    self.assertEqual(found.ceilings.read, 200e9)
    self.assertEqual(self.fractions(found), [0.5 / 4] * 2)

  def test_earlier_rows_are_kept_with_the_higher_ceilings(self):
    earlier = self.measured("1x32x32,1x64x64", bench_results.run())
    faster = dataclasses.replace(earlier.ceilings, read=400e9)
    earlier = dataclasses.replace(earlier, ceilings=faster)
    run = bench_results.run(ceilings=faster)
    run = self.measured("1x64x64,1x96x96", run)
    found = results.joined(earlier, run)
    names = [row.row for row in found.rows]
    self.assertEqual(names, ["1x32x32", "1x64x64", "1x96x96"])
    # Each row doubles the ceiling.
    self.assertEqual(found.ceilings.read, 1600e9)
    self.assertEqual(self.fractions(found), [0.0625 / 4] * 3)
