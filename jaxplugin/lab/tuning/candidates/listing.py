# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Candidates of a problem, and what is known not to be worth measuring."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import Literal

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.lab.tuning.candidates import spaces
from jaxplugin.lab.tuning.operations import known
from jaxplugin.lab.tuning.operations import tuned
from jaxplugin.printing import console
from jaxplugin.tables import records
from jaxplugin.tables import resolution

# Why a candidate is not measured: it breaks a rule or does not fit; another one
# does the same with less; the roofline model says that it is slow; it went
# wrong before.
Rule = Literal["resources", "dominated", "roofline", "denied"]
RULES: Final[tuple[Rule, ...]] = (
  "resources",
  "dominated",
  "roofline",
  "denied",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
  """One way of computing a problem.

  Attributes:
    implementation: its backend's name.
    config: how the backend computes it; empty where its rule decides.
  """

  implementation: str
  config: records.Fields = ()

  @property
  def key(self) -> str:
    """The one text of it: "triton block_k=64 block_m=16 ..."."""
    words = (f"{name}={_word(value)}" for name, value in self.config)
    return " ".join((self.implementation, *words))

  def to_json(self) -> dict[str, Any]:
    return {"implementation": self.implementation, "config": dict(self.config)}


def table(
  candidates: Sequence[Candidate],
  cells: Sequence[Mapping[str, str]],
  figures: Collection[str] = (),
) -> Iterator[console.Part]:
  """Returns a table of candidates with the fields in which they differ.

  Args:
    candidates: a row for each.
    cells: other cells of each row, by title, which come first.
    figures: titles of those that are figures.
  """
  values: dict[str, list[str]] = {}
  for candidate in candidates:
    for name, value in candidate.config:
      values.setdefault(name, []).append(_word(value))
  number = sum(bool(candidate.config) for candidate in candidates)
  shared = {
    name: words[0]
    for name, words in values.items()
    if len(words) == number and len({*words}) == 1 and number > 1
  }
  fields = [name for name in values if name not in shared]
  if shared:
    words = " ".join(f"{name}={word}" for name, word in shared.items())
    yield f"    every config: {words}"
  titles = list(dict.fromkeys(title for row in cells for title in row))
  # A title wraps between its words.
  headers = [name.replace("_", " ") for name in fields]
  yield console.table(
    [*titles, *headers],
    [
      [row.get(title, "") for title in titles]
      + [_word(dict(candidate.config).get(name, "")) for name in fields]
      for candidate, row in zip(candidates, cells, strict=True)
    ],
    names=headers,
    figures=figures,
    indent=4,
  )


def candidate_of(value: Mapping[str, Any]) -> Candidate:
  """The inverse of `Candidate.to_json`."""
  return Candidate(
    implementation=value["implementation"],
    config=records.fields_of("config", value["config"]),
  )


def _word(value: records.Scalar) -> str:
  return str(value).lower() if isinstance(value, bool) else str(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
  """What may be measured for a problem on a target, and what need not.

  Attributes:
    problem, target: of what.
    default: what is chosen without any table; it is never pruned.
    candidates: all that are worth measuring, the default first.
    pruned: what is not, by rule and reason.
    refused: implementations that do not serve, each with its reason.
    notes: of the model.
  """

  problem: tuned.Problem
  target: targets.Target
  default: Candidate
  candidates: tuple[Candidate, ...]
  pruned: tuple[spaces.Pruned, ...]
  refused: tuple[decisions.Unsupported, ...]
  notes: tuple[str, ...] = ()

  def without(self, denied: Mapping[str, str]) -> Listing:
    """Without candidates that went wrong before.

    Args:
      denied: reasons by `Candidate.key`.
    """
    kept, pruned = [], list(self.pruned)
    for candidate in self.candidates:
      reason = denied.get(candidate.key)
      # There must be something to compare with.
      if reason is None or candidate == self.default:
        kept.append(candidate)
      else:
        pruned.append(
          spaces.Pruned(
            rule="denied",
            reason=reason,
            implementation=candidate.implementation,
            example=candidate.config,
          )
        )
    return dataclasses.replace(
      self, candidates=tuple(kept), pruned=tuple(pruned)
    )

  def counts(self) -> dict[str, int]:
    """How many configs each rule pruned."""
    found = collections.Counter[str]()
    for pruned in self.pruned:
      found[pruned.rule] += pruned.count
    return {rule: found[rule] for rule in RULES if found[rule]}

  def parts(self) -> Iterator[console.Part]:
    """Returns the report: candidates, refused backends, and pruned configs."""
    yield f"{self.problem} on {self.target}"
    total = len(self.candidates)
    yield f"  {total} candidate{'s' if total > 1 else ''}:"
    cells = [{"backend": self._title(one)} for one in self.candidates]
    yield from table(self.candidates, cells)
    for refusal in self.refused:
      yield f"  not {refusal.implementation}: {refusal.reason}"
    for note in self.notes:
      yield f"  {note}"
    for pruned in self.pruned:
      yield f"  pruned, {pruned}"

  def _title(self, candidate: Candidate) -> str:
    is_default = candidate == self.default
    return candidate.implementation + (" (default)" if is_default else "")

  def to_json(self) -> dict[str, Any]:
    return {
      "problem": str(self.problem),
      "target": str(self.target),
      "default": self.default.to_json(),
      "candidates": [candidate.to_json() for candidate in self.candidates],
      "refused": [dataclasses.asdict(refusal) for refusal in self.refused],
      "notes": list(self.notes),
      "pruned": [pruned.to_json() for pruned in self.pruned],
    }


def of_problem(
  problem: tuned.Problem,
  target: targets.Target,
  *,
  limits: spaces.Limits = spaces.LIMITS,
  implementations: Iterable[str] | None = None,
) -> Listing:
  """The candidates of a problem. No table is asked, and nothing is timed.

  Args:
    problem: what to compute.
    target: where; it need not be here.
    limits: of the model.
    implementations: of which; None is all. The default's is always there.
  """
  alone = resolution.Overlay(is_alone=True)
  operation = known.of(problem)
  decision = operation.choose(problem, target, alone)
  wanted = None if implementations is None else {*implementations}
  kept: list[Candidate] = []
  pruned: list[spaces.Pruned] = []
  refused: list[decisions.Unsupported] = []
  notes: list[str] = []
  default = Candidate(implementation=decision.implementation)
  for name, backend in operation.operation.backends().items():
    refusal = backend.supports(problem, target)
    if refusal is not None:
      refused.append(decisions.Unsupported(refusal.reason, name))
      continue
    if wanted is not None and name not in wanted | {default.implementation}:
      continue
    if backend.tunable is None or backend.tunable.source(target) is None:
      why = "its sources are unknown, so no table can contain it"
      refused.append(decisions.Unsupported(why, name))
      continue
    space = operation.spaces.get(name, spaces.only)(problem, target, limits)
    for config in space.configs:
      # Of what this process has, not of the device.
      error = None
      if backend.lowering_refusal(target) is None:
        error = backend.config_error(config, problem, target)
      if error is None:
        kept.append(Candidate(implementation=name, config=config))
        continue
      pruned.append(
        spaces.Pruned(
          rule="resources", reason=error, implementation=name, example=config
        )
      )
    pruned += space.pruned
    notes += space.notes
  # The default is its implementation as its rule has it.
  kept.sort(key=lambda candidate: candidate != default)
  assert kept[0] == default
  return Listing(
    problem=problem,
    target=target,
    default=default,
    candidates=tuple(kept),
    pruned=tuple(pruned),
    refused=tuple(refused),
    notes=tuple(notes),
  )
