# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A file of candidates that failed, which later runs do not try again.

The file has a line of JSON for each candidate, in sorted order. A candidate is
tried again if the sources of its kernels have changed.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable
from typing import Final

from jaxplugin.core import atomic_files
from jaxplugin.core import strict_json
from jaxplugin.tables import writing

NAME: Final = "denied.jsonl"  # in the folder of the table
_MAX_BYTES: Final = 4 << 20
_MAX_REASON: Final = 500


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Failure:
  """One candidate that failed.

  Attributes:
    kernels: a digest of the kernels' sources and of the device.
    problem: the problem, as text.
    candidate: `TrialCandidate.key`.
    kind, reason: the failure.
  """

  kernels: str
  problem: str
  candidate: str
  kind: str
  reason: str


class FailuresError(ValueError):
  """The file cannot be read or written. The message has the reason."""


def read(path: pathlib.Path) -> tuple[Failure, ...]:
  """Returns the failures in a file; () if the file does not exist.

  Lines that are not failures are skipped.

  Raises:
    FailuresError: If the file cannot be read.
  """
  try:
    with open(path, "rb") as file:
      data = file.read(_MAX_BYTES)
  except FileNotFoundError:
    return ()
  except OSError as error:
    raise FailuresError(f"{path}: cannot be read: {error.strerror}") from None
  lines = data.decode(errors="replace").splitlines()
  found = {failure for line in lines if (failure := _parse(line))}
  return tuple(sorted(found))


def _parse(line: str) -> Failure | None:
  try:
    failure = Failure(**strict_json.loads(line))
  except (ValueError, TypeError):  # TypeError: no object, or other fields
    return None
  values = dataclasses.astuple(failure)
  return failure if all(isinstance(x, str) for x in values) else None


def add(path: pathlib.Path, failures: Iterable[Failure]) -> None:
  """Adds failures to a file, which is replaced atomically.

  Raises:
    FailuresError: If the file cannot be written. The file is then unchanged.
  """
  new = [
    dataclasses.replace(failure, reason=failure.reason[:_MAX_REASON])
    for failure in failures
  ]
  if not new:
    return
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing.locked(path):
      # The last failure of a candidate replaces earlier ones.
      merged = {
        (failure.kernels, failure.problem, failure.candidate): failure
        for failure in (*read(path), *new)
      }
      with atomic_files.replacing(path) as file:
        for failure in sorted(merged.values()):
          line = json.dumps(dataclasses.asdict(failure), sort_keys=True)
          file.write(f"{line}\n".encode())
  except OSError as error:
    raise FailuresError(
      f"{path}: cannot be written: {error.strerror}"
    ) from None


def of(
  failures: Iterable[Failure], kernels: str, problem: str
) -> dict[str, str]:
  """Returns the reasons of failures with this problem and digest of kernels.

  The keys are candidates.
  """
  return {
    failure.candidate: f"{failure.kind} before: {failure.reason}"
    for failure in failures
    if failure.kernels == kernels and failure.problem == problem
  }
