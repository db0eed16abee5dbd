# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run of the tuner: problems in, rows of a table out.

A row is written when it is done, so whatever ends the run costs one row. What
is chosen follows from the samples alone: the same samples give the same bytes.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Final
from typing import Literal

from jaxplugin.lab.bench import timing
from jaxplugin.lab.tuning import denials
from jaxplugin.lab.tuning import workload
from jaxplugin.lab.tuning.candidates import listing
from jaxplugin.lab.tuning.operations import known
from jaxplugin.lab.tuning.operations import tuned
from jaxplugin.lab.tuning.trials import machine
from jaxplugin.tables import records

Status = Literal["done", "kept", "failed"]

_US_PER_MS: Final = 1e3
# What says nothing of another run: it is only told.
_NOT_DENIED: Final = ("spills",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """What became of one problem.

  Attributes:
    item: which.
    status: "done", "kept" from an earlier run, or "failed".
    row: of the table; None where it failed.
    faults: by key, candidates that went wrong.
    notes: by key, what was not checked.
    reason: why it failed.
  """

  item: workload.Item
  status: Status
  row: records.Row | None = None
  faults: Mapping[str, machine.Fault] = dataclasses.field(default_factory=dict)
  notes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Store:
  """Where rows go, and how problems are called there.

  Attributes:
    fields: a problem in a table's words.
    known: the row that there is of a problem, or None.
    add: puts a row there, at once.
    denied: the file of candidates that went wrong; None keeps none.
    kernels: what an implementation's kernels were compiled from, and where.
  """

  fields: Callable[[tuned.Problem], records.Fields]
  known: Callable[[tuned.Problem], records.Row | None]
  add: Callable[[records.Row], None]
  denied: pathlib.Path | None
  kernels: Callable[[str], str]


Lister = Callable[[tuned.Problem], listing.Listing]


class Session:
  """Tunes problems one by one."""

  def __init__(
    self,
    device: machine.Machine,
    store: Store,
    list_candidates: Lister,
    *,
    is_retrying: bool = False,
  ):
    """Initializes it.

    Args:
      device: where candidates are tried.
      store: where rows go.
      list_candidates: of a problem.
      is_retrying: whether candidates that were denied are tried again.
    """
    self._device = device
    self._store = store
    self._list = list_candidates
    self._is_retrying = is_retrying

  def tune(
    self, item: workload.Item, progress: machine.Progress = lambda text: None
  ) -> Result:
    """One problem: its row is in the store when this returns.

    Raises:
      DenialsError, TableError: a file cannot be read or written.
    """
    problem = item.problem
    known = self._store.known(problem)
    if known is not None:
      return Result(item=item, status="kept", row=known)
    result = self._measure(item, progress)
    if result.row is not None:
      self._store.add(result.row)
    return result

  def _measure(self, item: workload.Item, progress: machine.Progress) -> Result:
    problem = item.problem
    why = known.of(problem).refusal(problem)
    if why:
      return Result(item=item, status="failed", reason=f"not tuned: {why}")
    listed = self._listed(problem)
    checked = self._device.check(problem, listed.candidates, progress)
    faults = dict(checked.faults)
    default = listed.default
    found = Result(item=item, status="failed", notes=checked.notes)
    if default.key not in faults:
      left = [c for c in listed.candidates if c.key not in faults]
      try:
        timed = self._device.time(problem, left, progress)
      except machine.TrialError as error:
        return dataclasses.replace(found, faults=faults, reason=str(error))
      faults |= timed.faults
    self._deny(problem, listed, faults)
    if default.key in faults:
      reason = f"the default {default.key} failed: {faults[default.key]}"
      return dataclasses.replace(found, faults=faults, reason=reason)
    row = row_of(self._store.fields(problem), listed, timed.samples)
    return dataclasses.replace(found, status="done", row=row, faults=faults)

  def _listed(self, problem: tuned.Problem) -> listing.Listing:
    listed = self._list(problem)
    if self._store.denied is None or self._is_retrying:
      return listed
    known = denials.read(self._store.denied)
    reasons: dict[str, str] = {}
    for candidate in listed.candidates:
      kernels = self._store.kernels(candidate.implementation)
      found = denials.of(known, kernels, str(problem))
      if candidate.key in found:
        reasons[candidate.key] = found[candidate.key]
    return listed.without(reasons)

  def _deny(
    self,
    problem: tuned.Problem,
    listed: listing.Listing,
    faults: Mapping[str, machine.Fault],
  ) -> None:
    if self._store.denied is None:
      return
    by_key = {c.key: c.implementation for c in listed.candidates}
    denials.add(
      self._store.denied,
      [
        denials.Denial(
          kernels=self._store.kernels(by_key[key]),
          problem=str(problem),
          candidate=key,
          kind=fault.kind,
          reason=fault.reason,
        )
        for key, fault in faults.items()
        # A default is always tried: there is nothing else to compare with.
        if fault.kind not in _NOT_DENIED and key != listed.default.key
      ],
    )


def row_of(
  fields: records.Fields,
  listed: listing.Listing,
  samples: Mapping[str, Sequence[float]],
) -> records.Row:
  """The row that samples make: a pure function of them.

  Args:
    fields: the problem in the table's words.
    listed: its candidates.
    samples: milliseconds of each that ran; the default's are among them.
  """
  measured = {
    candidate: _measured(candidate, samples[candidate.key])
    for candidate in listed.candidates
    if samples.get(candidate.key)
  }
  default = measured[listed.default]
  ordered = sorted(
    measured.values(),
    key=lambda c: (c.median_us, c.implementation, records.order(c.config)),
  )
  # The table keeps the fastest; the default is always there.
  others = [c for c in ordered if c is not default]
  kept = others[: records.MAX_CANDIDATES - 1]
  return records.row_of(fields, [default, *kept], default)


def _measured(
  candidate: listing.Candidate, samples: Sequence[float]
) -> records.Candidate:
  stats = timing.stats([_US_PER_MS * sample for sample in samples])
  return records.Candidate(
    implementation=candidate.implementation,
    config=candidate.config,
    median_us=stats.median,
    interval_us=(stats.q1, stats.q3),
  )
