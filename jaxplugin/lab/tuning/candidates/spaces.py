# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The configs of one implementation for one problem, kept and pruned."""

from __future__ import annotations

import dataclasses
from typing import Any
from typing import Final

from jaxplugin.core import targets
from jaxplugin.dot import problems
from jaxplugin.tables import records

_RULE: Final[records.Fields] = ()  # the config that stands for "by rule"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """How much is pruned by what a model says.

  Attributes:
    margin: a tile is pruned where its estimate is this many times the least.
    tiles: that are kept.
    ways: configs of one tile that are kept.
  """

  margin: float = 2.0
  tiles: int = 8
  ways: int = 4


LIMITS: Final = Limits()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pruned:
  """Configs that are not measured, for one reason.

  Attributes:
    rule: of `listing.RULES`.
    reason: why, in words.
    implementation: whose configs.
    count: how many.
    example: one of them.
  """

  rule: str
  reason: str
  implementation: str
  count: int = 1
  example: records.Fields = ()

  def __str__(self) -> str:
    words = " ".join(f"{n}={str(v).lower()}" for n, v in self.example)
    number = "config" if self.count == 1 else "configs"
    of = f" ({words})" if self.count == 1 and words else ""
    return (
      f"{self.rule}: {self.count} {self.implementation} {number}{of}:"
      f" {self.reason}"
    )

  def to_json(self) -> dict[str, Any]:
    return {**dataclasses.asdict(self), "example": dict(self.example)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
  """What one implementation has for a problem.

  Attributes:
    configs: what is worth measuring, the one of its rule first.
    pruned: what is not.
    notes: about the model, in words.
  """

  configs: tuple[records.Fields, ...]
  pruned: tuple[Pruned, ...] = ()
  notes: tuple[str, ...] = ()


def only(
  problem: problems.DotProblem, target: targets.Target, limits: Limits
) -> Space:
  """The space of an implementation that cannot be configured."""
  del problem, target, limits
  return Space(configs=(_RULE,))
