# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The candidates of a problem, and the configs that are not measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from jaxplugin.core import decisions, targets
from jaxplugin.lab.tuning.operations import operation, registry
from jaxplugin.printing import console
from jaxplugin.tables import records

# Why a candidate is not measured:
#   resources  The candidate breaks a rule or exceeds a limit.
#   dominated  Another candidate does the same with less.
#   roofline   By the roofline model, other candidates are better.
#   denied     The candidate failed before.
RULES: Final = ("resources", "dominated", "roofline", "denied")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialCandidate:
  """A backend and a config that compute a problem."""

  implementation: str
  config: records.Fields = ()  # () is the backend's default

  @property
  def key(self) -> str:
    """A unique text: "triton block_k=64 block_m=16 ..."."""
    return f"{self.implementation} {operation.words(self.config)}".rstrip()

  def to_json(self) -> dict[str, Any]:
    return {"implementation": self.implementation, "config": dict(self.config)}


def table(
  candidates: Sequence[TrialCandidate],
  cells: Sequence[Mapping[str, str]],
  figures: Collection[str] = (),
) -> Iterator[console.Part]:
  """Yields a table of candidates, with the fields in which they differ.

  `cells` has the other cells of each row by title. `figures` are the titles of
  columns with numbers.
  """
  words: dict[str, list[str]] = {}
  for candidate in candidates:
    for field in candidate.config:
      words.setdefault(field[0], []).append(operation.words((field,)))
  number = sum(bool(candidate.config) for candidate in candidates)
  shared = {
    name: found[0]
    for name, found in words.items()
    if len(found) == number and len({*found}) == 1 and number > 1
  }
  if shared:
    yield f"    every config: {' '.join(shared.values())}"
  titles = list(dict.fromkeys(title for row in cells for title in row))
  yield console.table(
    [*titles, "config"],
    [
      [row.get(title, "") for title in titles]
      + [operation.words(x for x in each.config if x[0] not in shared)]
      for each, row in zip(candidates, cells, strict=True)
    ],
    names=("config",),
    figures=figures,
    indent=4,
  )


def candidate_of(value: Mapping[str, Any]) -> TrialCandidate:
  """Returns the candidate that `to_json` converted to `value`."""
  return TrialCandidate(
    implementation=value["implementation"],
    config=records.fields_of("config", value["config"]),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
  """The candidates of a problem on a target."""

  problem: operation.Problem
  target: targets.Target
  candidates: tuple[TrialCandidate, ...]  # The default comes first.
  pruned: tuple[operation.Pruned, ...]  # the other configs
  refused: tuple[decisions.Unsupported, ...]
  notes: tuple[str, ...] = ()  # sentences about the model

  @property
  def default(self) -> TrialCandidate:
    """The choice without tuning tables. It is never pruned."""
    return self.candidates[0]

  def without(self, denied: Mapping[str, str]) -> Listing:
    """Returns the listing without `denied` candidates: reasons by key."""
    kept, pruned = [], list(self.pruned)
    for candidate in self.candidates:
      reason = denied.get(candidate.key)
      # The default is kept, because other candidates are compared with it.
      if reason is None or candidate == self.default:
        kept.append(candidate)
      else:
        pruned.append(
          operation.Pruned(
            rule="denied",
            reason=reason,
            implementation=candidate.implementation,
            example=candidate.config,
          )
        )
    return dataclasses.replace(
      self, candidates=tuple(kept), pruned=tuple(pruned)
    )

  def parts(self) -> Iterator[console.Part]:
    """Yields the report: candidates, refused backends, and pruned configs."""
    yield f"{self.problem} on {self.target}"
    total = len(self.candidates)
    yield f"  {total} candidate{'s' if total > 1 else ''}:"
    cells = [{"backend": one.implementation} for one in self.candidates]
    cells[0]["backend"] += " (default)"
    yield from table(self.candidates, cells)
    for refusal in self.refused:
      yield f"  not {refusal.implementation}: {refusal.reason}"
    for note in self.notes:
      yield f"  {note}"
    for pruned in self.pruned:
      yield f"  pruned, {pruned}"

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
  problem: operation.Problem,
  target: targets.Target,
  *,
  margin: float = operation.MARGIN,
  implementations: Iterable[str] | None = None,
) -> Listing:
  """Returns the candidates of a problem. Reads no table and times nothing.

  The target need not be attached. `margin` replaces `operation.MARGIN`. Besides
  the default, only the backends `implementations` are listed; None is all.
  """
  tuned = registry.of(problem)
  decision = tuned.default(problem, target)
  wanted = None if implementations is None else {*implementations}
  kept: list[TrialCandidate] = []
  pruned: list[operation.Pruned] = []
  refused: list[decisions.Unsupported] = []
  notes: list[str] = []
  default = TrialCandidate(implementation=decision.implementation)
  for name, backend in tuned.operation.backends().items():
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
    if name in tuned.spaces:
      space = tuned.spaces[name](problem, target, margin)
    else:
      listed = backend.tunable.candidates
      others = () if listed is None else listed(problem, target)
      space = operation.Space(configs=((), *others))
    for config in space.configs:
      # `config_error` needs the libraries with which the backend is lowered.
      error = None
      if backend.lowering_refusal(target) is None:
        error = backend.config_error(config, problem, target)
      if error is None:
        kept.append(TrialCandidate(implementation=name, config=config))
        continue
      pruned.append(
        operation.Pruned(
          rule="resources", reason=error, implementation=name, example=config
        )
      )
    pruned += space.pruned
    notes += space.notes
  kept.sort(key=lambda candidate: candidate != default)
  assert kept[0] == default
  return Listing(
    problem=problem,
    target=target,
    candidates=tuple(kept),
    pruned=tuple(pruned),
    refused=tuple(refused),
    notes=tuple(notes),
  )
