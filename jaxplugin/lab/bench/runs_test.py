# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run has one ceiling of each kind, for all of its rows."""

import dataclasses
import pathlib
import tempfile
import time
from unittest import mock

from absl.testing import absltest

from jaxplugin.lab.bench import devices
from jaxplugin.lab.bench import measurement
from jaxplugin.lab.bench import roofline
from jaxplugin.lab.bench import runs
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.report import results
from jaxplugin.testing import bench_results


class RowMeasurement:
  """Each row takes 4 ms, and finds that memory is read twice as fast."""

  def __init__(self, device, ceilings, options, progress):
    del device, options, progress
    self.ceilings = ceilings

  def close(self):
    pass

  def measure(self, row, pair):
    read = 2 * self.ceilings.read
    self.ceilings = self.ceilings.raised("read", read)
    found = bench_results.variant("cpu", 4, flops=1)
    return bench_results.row(found, row=str(row), formats=pair.name)


class RunTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.output = pathlib.Path(folder) / "run.json"

  def measured(self, shapes, earlier=None):
    request = runs.Request(
      device=devices.find("cpu"),
      rows=tuple(workloads.parse_rows(shapes)),
      pairs=tuple(workloads.parse_pairs("mxfp8")),
      options=mock.create_autospec(measurement.BenchOptions, instance=True),
      sizes=roofline.QUICK_SIZES,
      deadline=time.monotonic() + 60,
      command=("bench",),
      output=str(self.output),
      earlier=earlier,
    )
    with (
      mock.patch.object(roofline, "measure", lambda *_: bench_results.CEILINGS),
      mock.patch.object(measurement, "RowMeasurement", RowMeasurement),
    ):
      return runs.measure(request)

  def test_last_ceiling_counts_for_all_rows(self):
    # At first 1e8 bytes are 2 ms, at 50e9 a second; at the end 0.5 ms.
    found = self.measured("1x32x32,1x64x64")
    self.assertEqual(found.ceilings.read, 200e9)
    for run in (found, results.read(self.output)):
      fractions = [row.variants[0].roof_fraction for row in run.rows]
      self.assertEqual(fractions, [0.5 / 4] * 2)

  def test_earlier_rows_are_kept_with_the_higher_ceilings(self):
    first = self.measured("1x32x32,1x64x64")
    earlier = dataclasses.replace(
      first, ceilings=dataclasses.replace(first.ceilings, read=400e9)
    )
    self.measured("1x64x64,1x96x96", earlier)
    found = results.read(self.output)
    names = [row.row for row in found.rows]
    self.assertEqual(names, ["1x32x32", "1x64x64", "1x96x96"])
    # Each row doubles the ceiling.
    self.assertEqual(found.ceilings.read, 1600e9)
    fractions = [row.variants[0].roof_fraction for row in found.rows]
    self.assertEqual(fractions, [0.0625 / 4] * 3)

  def test_rows_of_another_machine_are_refused(self):
    first = self.measured("1x32x32")
    for name, value in (("device", "Another"), ("versions", {"jax": "0"})):
      earlier = dataclasses.replace(
        first, environment={**first.environment, name: value}
      )
      with self.assertRaisesRegex(
        results.ResultError, f"--append needs a file of the same {name}, got"
      ):
        self.measured("1x64x64", earlier)


if __name__ == "__main__":
  absltest.main()
