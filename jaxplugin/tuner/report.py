# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run of the tuner says, for people."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
from typing import Final

from jaxplugin.tables import records
from jaxplugin.tuner import session
from jaxplugin.tuner.candidates import listing

LEGEND: Final = (
  "microseconds: median [quartiles], and the time beside the default's; what is"
  " chosen is marked by *"
)


def lines(result: session.Result) -> Iterator[str]:
  """One problem: what was measured, what went wrong, what is chosen."""
  source = f" ({result.item.source})" if result.item.source else ""
  yield f"{result.item.problem}{source}"
  if result.status == "failed":
    yield f"  failed: {result.reason}"
  if result.row is not None:
    if result.status == "kept":
      yield "  is in the table; --again measures it anew"
    yield from _row_lines(result.row)
  for key, fault in result.faults.items():
    yield f"  not chosen: {key}: {fault}"
  for note in _merged(result):
    yield f"  not checked: {note}"


def _row_lines(row: records.Row) -> Iterator[str]:
  default = row.candidates[row.default]
  chosen = row.chosen
  for candidate in row.candidates:
    low, high = candidate.interval_us
    ratio = candidate.median_us / default.median_us
    mark = "*" if candidate is chosen else " "
    said = " (the default)" if candidate is default else ""
    yield (
      f"  {mark} {candidate.median_us:10.5g} [{low:.5g}, {high:.5g}]"
      f" {ratio:6.3f}  {_key(candidate)}{said}"
    )


def _key(candidate: records.Candidate) -> str:
  return listing.Candidate(
    implementation=candidate.implementation, config=candidate.config
  ).key


def _merged(result: session.Result) -> Iterator[str]:
  """Notes of all candidates, each once."""
  seen = dict.fromkeys(
    note for notes in result.notes.values() for note in notes
  )
  yield from seen


def summary(results: Sequence[session.Result]) -> Iterator[str]:
  """What all rows together say."""
  rows = [r.row for r in results if r.row is not None]
  other = [row for row in rows if row.chosen is not row.candidates[row.default]]
  if not rows:
    return
  yield f"{len(rows)} rows, in {len(other)} another than the default is chosen"
  for row in other:
    default = row.candidates[row.default].median_us
    size = " ".join(f"{n}={v}" for n, v in row.problem)
    yield f"  {default / row.chosen.median_us:.3f} times as fast: {size}"
