# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The configs of one backend for one problem: measured and pruned."""

from __future__ import annotations

import dataclasses
from typing import Any
from typing import Final

from jaxplugin.tables import records


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchLimits:
  """Limits on the candidates that a model keeps.

  Attributes:
    margin: a tile is pruned if its estimate is more than this many times the
      larger of the least estimate and the time of a launch.
    tiles: number of tiles to keep.
    ways: number of configs to keep for each tile.
  """

  margin: float = 2.0
  tiles: int = 8
  ways: int = 4


LIMITS: Final = SearchLimits()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pruned:
  """Configs that are not measured for the same reason.

  Attributes:
    rule: one of `listing.RULES`.
    reason: the reason, in words.
    implementation: the backend of the configs.
    count: number of configs.
    example: one of the configs.
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
  """The configs of one backend for a problem.

  Attributes:
    configs: the configs to measure. The first is (), the backend's default.
    pruned: the other configs.
    notes: sentences about the model.
  """

  configs: tuple[records.Fields, ...]
  pruned: tuple[Pruned, ...] = ()
  notes: tuple[str, ...] = ()
