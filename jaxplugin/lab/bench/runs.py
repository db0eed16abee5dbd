# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run of the benchmark, from rows to a file of results."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence

from jaxplugin.lab.bench import devices
from jaxplugin.lab.bench import measurement
from jaxplugin.lab.bench import roofline
from jaxplugin.lab.bench import startup
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.report import results
from jaxplugin.printing import progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """The settings of a run.

  Attributes:
    device: the device.
    rows: the rows to measure.
    pairs: pairs of formats; None is the formats of each row.
    options: options of the measurement.
    sizes: sizes for measuring the ceilings.
    deadline: time of `time.monotonic` by which rows must end. Rows that would
      end later are left out.
    command: the arguments of the command, for the file of results.
    output: path of the file of results, or None.
    earlier: a run on the same machine, whose other rows the file keeps.
  """

  device: devices.BenchDevice
  rows: tuple[workloads.BenchRow, ...]
  pairs: tuple[workloads.Pair, ...] | None
  options: measurement.BenchOptions
  sizes: roofline.CeilingSizes
  deadline: float
  command: tuple[str, ...]
  output: str | None
  earlier: results.BenchRun | None = None

  def work(self) -> list[tuple[workloads.BenchRow, workloads.Pair]]:
    """Returns each row with each of its pairs of formats."""
    found = []
    for row in self.rows:
      pairs = self.pairs
      if pairs is None:
        pairs = workloads.parse_pairs(row.formats)
      for pair in pairs:
        # Only matmuls have an unquantized side, or two formats.
        is_codec = pair.lhs == pair.rhs
        if row.is_product or (row.kind != "startup" and is_codec):
          workloads.check(row, pair)
          found.append((row, pair))
    return found


class Interrupted(KeyboardInterrupt):
  """Ctrl-C ended a run. `run` has the measured rows."""

  def __init__(self, run: results.BenchRun):
    super().__init__()
    self.run = run


def measure(request: Request) -> results.BenchRun:
  """Measures each row, and writes the file of results after each row.

  Raises:
    Interrupted: If Ctrl-C ends the measurement of a row.
  """
  work = request.work()
  found = results.BenchRun(
    command=request.command,
    environment=devices.environment(request.device),
    ceilings=roofline.measure(request.device, request.sizes) if work else None,
  )
  if request.earlier is not None:
    found = results.joined(request.earlier, found)
  if any(row.kind == "startup" for row in request.rows):
    found = dataclasses.replace(found, startup=startup.measure())
  if found.ceilings is not None:
    found = _measure_rows(request, work, found, found.ceilings)
  if request.output is not None:
    results.write(found, request.output)
  return found


def _measure_rows(
  request: Request,
  work: Sequence[tuple[workloads.BenchRow, workloads.Pair]],
  found: results.BenchRun,
  ceilings: roofline.Ceilings,
) -> results.BenchRun:
  longest = 0.0
  with (
    progress.shown(total=len(work)) as line,
    contextlib.closing(
      measurement.RowMeasurement(
        request.device, ceilings, request.options, line.describe
      )
    ) as measuring,
  ):
    for row, pair in work:
      # Assumes that a row takes as long as the longest row so far.
      if time.monotonic() + longest > request.deadline:
        name = f"{row} {pair}"
        found = dataclasses.replace(found, left_out=(*found.left_out, name))
        continue
      try:
        done = measuring.measure(row, pair)
      except KeyboardInterrupt:
        raise Interrupted(found) from None
      longest = max(longest, done.seconds)
      found = results.with_fractions(
        dataclasses.replace(
          found, rows=(*found.without(done), done), ceilings=measuring.ceilings
        )
      )
      line.advance()
      if request.output is not None:
        results.write(found, request.output)
  return found
