# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run has one ceiling of each kind, for all of its rows."""

import os
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
    return bench_results.row(
      results.with_fraction(found, self.ceilings),
      row=str(row),
      formats=pair.name,
    )


class RunTest(absltest.TestCase):
  def test_last_ceiling_counts_for_all_rows(self):
    folder = self.enter_context(tempfile.TemporaryDirectory())
    output = os.path.join(folder, "run.json")
    request = runs.Request(
      device=devices.find("cpu"),
      rows=tuple(workloads.parse_rows("1x32x32,1x64x64")),
      pairs=tuple(workloads.parse_pairs("mxfp8")),
      options=mock.create_autospec(measurement.BenchOptions, instance=True),
      sizes=roofline.QUICK_SIZES,
      deadline=time.monotonic() + 60,
      command=("bench",),
      output=output,
    )
    # At first 1e8 bytes are 2 ms, at 50e9 a second; at the end 0.5 ms.
    with (
      mock.patch.object(roofline, "measure", lambda *_: bench_results.CEILINGS),
      mock.patch.object(measurement, "RowMeasurement", RowMeasurement),
    ):
      found = runs.measure(request)
    self.assertEqual(found.ceilings.read, 200e9)
    for run in (found, results.read(pathlib.Path(output))):
      fractions = [row.variants[0].roof_fraction for row in run.rows]
      self.assertEqual(fractions, [0.5 / 4] * 2)


if __name__ == "__main__":
  absltest.main()
