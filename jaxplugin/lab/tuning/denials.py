# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Candidates that went wrong, kept so that no later run tries them again.

A file of JSON, a line for each, sorted. What crashed, hung or gave wrong
numbers is known of the sources that its kernels were compiled from: with
others it is tried again.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable
from typing import Any
from typing import Final

from jaxplugin.core import strict_json
from jaxplugin.tables import writing

NAME: Final = "denied.jsonl"  # beside the table
_MAX_BYTES: Final = 4 << 20
_FIELDS: Final = ("candidate", "kernels", "kind", "problem", "reason")
_MAX_REASON: Final = 500


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Denial:
  """One candidate that went wrong.

  Attributes:
    kernels: what its kernels were compiled from, and for which device.
    problem: what it was to compute.
    candidate: `Candidate.key`.
    kind, reason: how it went wrong.
  """

  kernels: str
  problem: str
  candidate: str
  kind: str
  reason: str

  def to_text(self) -> str:
    return json.dumps(dataclasses.asdict(self), sort_keys=True)


class DenialsError(ValueError):
  """A file of denials cannot be read or written; the text says why."""


def read(path: pathlib.Path) -> tuple[Denial, ...]:
  """The denials of a file; none where there is no file.

  A line that is none is left out: nothing is lost but that its candidate is
  tried once more.

  Raises:
    DenialsError: the file cannot be read.
  """
  try:
    with open(path, "rb") as file:
      data = file.read(_MAX_BYTES)
  except FileNotFoundError:
    return ()
  except OSError as error:
    raise DenialsError(f"{path}: cannot be read: {error.strerror}") from None
  found = []
  for line in data.decode(errors="replace").splitlines():
    denial = _parse(line)
    if denial is not None:
      found.append(denial)
  return tuple(sorted({*found}))


def _parse(line: str) -> Denial | None:
  try:
    value: Any = strict_json.loads(line)
  except ValueError:
    return None
  if not isinstance(value, dict) or sorted(value) != [*_FIELDS]:
    return None
  if not all(isinstance(text, str) for text in value.values()):
    return None
  return Denial(**value)


def add(path: pathlib.Path, denials: Iterable[Denial]) -> None:
  """Puts denials into a file beside those that it has, in one step.

  Raises:
    DenialsError: it cannot be written; it is as it was.
  """
  new = [
    dataclasses.replace(denial, reason=denial.reason[:_MAX_REASON])
    for denial in denials
  ]
  if not new:
    return
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing.locked(path):
      # Of one candidate the last word counts.
      by_place = {_place(denial): denial for denial in (*read(path), *new)}
      lines = [denial.to_text() for denial in sorted(by_place.values())]
      writing.replace(path, "".join(f"{line}\n" for line in lines))
  except OSError as error:
    raise DenialsError(f"{path}: cannot be written: {error.strerror}") from None


def _place(denial: Denial) -> tuple[str, str, str]:
  return denial.kernels, denial.problem, denial.candidate


def of(denials: Iterable[Denial], kernels: str, problem: str) -> dict[str, str]:
  """Reasons by candidates, of one problem and one state of the kernels."""
  return {
    denial.candidate: f"{denial.kind} before: {denial.reason}"
    for denial in denials
    if denial.kernels == kernels and denial.problem == problem
  }
