# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The report of a run of the tuner."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Final

from jaxplugin.lab.tuning import session
from jaxplugin.lab.tuning.candidates import listing
from jaxplugin.printing import console
from jaxplugin.tables import records

LEGEND: Final = (
  "us: median, with its quartiles. ratio: to the time of the default. The"
  " chosen candidate has a *."
)


def parts(result: session.Result) -> Iterator[console.Part]:
  """Returns the report of a problem: what was measured, chosen and refused."""
  source = f" ({result.item.source})" if result.item.source else ""
  yield f"{result.item.problem}{source}"
  if result.status == "failed":
    yield f"  failed: {result.reason}"
  if result.row is not None:
    if result.status == "kept":
      yield "  is in the table; --again measures it again"
    yield from _row_parts(result.row)
  for key, fault in result.faults.items():
    yield f"  not chosen: {key}: {fault}"
  for note in _merged(result):
    yield f"  not checked: {note}"


def _row_parts(row: records.Row) -> Iterator[console.Part]:
  default = row.candidates[row.default]
  cells = []
  for candidate in row.candidates:
    low, high = candidate.interval_us
    suffix = " (default)" if candidate is default else ""
    cells.append(
      {
        "": "*" if candidate is row.chosen else "",
        "us": f"{candidate.median_us:.5g}",
        "quartiles": f"[{low:.5g}, {high:.5g}]",
        "ratio": f"{candidate.median_us / default.median_us:.3f}",
        "backend": candidate.implementation + suffix,
      }
    )
  yield from listing.table(
    [
      listing.TrialCandidate(implementation=x.implementation, config=x.config)
      for x in row.candidates
    ],
    cells,
    figures=("us", "quartiles", "ratio"),
  )


def to_json(result: session.Result) -> dict[str, Any]:
  """Returns a problem's result as a JSON object."""
  return {
    "problem": str(result.item.problem),
    "source": result.item.source,
    "status": result.status,
    "row": result.row and result.row.to_json(),
    "faults": {key: str(fault) for key, fault in result.faults.items()},
    "reason": result.reason,
  }


def _merged(result: session.Result) -> Iterator[str]:
  """Yields the notes of all candidates, each once."""
  seen = dict.fromkeys(
    note for notes in result.notes.values() for note in notes
  )
  yield from seen


def summary(results: Sequence[session.Result]) -> Iterator[str]:
  """Returns lines about all rows."""
  rows = [r.row for r in results if r.row is not None]
  other = [row for row in rows if row.chosen is not row.candidates[row.default]]
  if not rows:
    return
  yield (
    f"{len(rows)} rows; {len(other)} of them choose another candidate than"
    " the default"
  )
  for row in other:
    default = row.candidates[row.default].median_us
    size = " ".join(f"{n}={v}" for n, v in row.problem)
    yield f"  {default / row.chosen.median_us:.3f} times as fast: {size}"
