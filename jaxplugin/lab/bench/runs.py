# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run of the benchmark: rows in, a file of results out."""

from __future__ import annotations

import dataclasses
import time

from jaxplugin.lab.bench import devices
from jaxplugin.lab.bench import measurement
from jaxplugin.lab.bench import roofline
from jaxplugin.lab.bench import startup
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.report import results
from jaxplugin.printing import progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """What a run is to measure.

  Attributes:
    device: where.
    rows: what.
    pairs: in which formats; None is what each row says.
    options: how.
    sizes: of what the ceilings are measured with.
    deadline: of `time.monotonic`; rows for which there is no time are left out.
    command: the arguments, for the file of results.
    output: the file of results, or None.
  """

  device: devices.Device
  rows: tuple[workloads.Row, ...]
  pairs: tuple[workloads.Pair, ...] | None
  options: measurement.Options
  sizes: roofline.Sizes
  deadline: float
  command: tuple[str, ...]
  output: str | None

  def work(self) -> list[tuple[workloads.Row, workloads.Pair]]:
    """Rows in the formats that each is to be measured in."""
    found = []
    for row in self.rows:
      pairs = self.pairs
      if pairs is None:
        pairs = workloads.parse_pairs(row.formats)
      for pair in pairs:
        # Only products have a plain side, or two formats.
        is_codec = pair.lhs == pair.rhs
        if row.is_product or (row.kind != "startup" and is_codec):
          workloads.check(row, pair)
          found.append((row, pair))
    return found


class Interrupted(KeyboardInterrupt):
  """Ctrl-C during a run; `run` has the rows that were measured."""

  def __init__(self, run: results.Run):
    super().__init__()
    self.run = run


def measure(request: Request) -> results.Run:
  """Measures row by row, and writes the file of results after each.

  Raises:
    Interrupted: If Ctrl-C ends the measurement of a row.
  """
  work = request.work()
  ceilings = None
  if work:
    ceilings = roofline.measure(request.device, request.sizes)
  found = results.Run(
    command=request.command,
    environment=devices.environment(request.device),
    ceilings=ceilings,
  )
  if any(row.kind == "startup" for row in request.rows):
    found = dataclasses.replace(found, startup=startup.measure())
  if ceilings is not None:
    found = _measure_rows(request, found, ceilings)
  if request.output is not None:
    results.write(found, request.output)
  return found


def _measure_rows(
  request: Request,
  found: results.Run,
  ceilings: roofline.Ceilings,
) -> results.Run:
  work = request.work()
  with progress.shown(total=len(work)) as line:
    measure = measurement.RowMeasurement(
      request.device, ceilings, request.options, line.describe
    )
    longest = 0.0
    for row, pair in work:
      # A row takes about as long as the longest so far.
      if time.monotonic() + longest > request.deadline:
        name = f"{row} {pair}"
        found = dataclasses.replace(found, left_out=(*found.left_out, name))
        continue
      try:
        done = measure.measure(row, pair)
      except KeyboardInterrupt:
        raise Interrupted(found) from None
      longest = max(longest, done.seconds)
      found = results.with_fractions(
        dataclasses.replace(
          found, rows=(*found.rows, done), ceilings=measure.ceilings
        )
      )
      line.advance()
      if request.output is not None:
        results.write(found, request.output)
  return found
