# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a measurement overrides the order of the implementations.

One that reads the quantized bytes once is not always the fastest: where many
rows of lhs use every value of rhs again, dequantizing before the product may
be. From which size on is known from a benchmark alone; each entry says which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from jaxplugin.core import targets
from jaxplugin.dot import problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizeRule:
  """From some size on, `implementation` comes first if it serves.

  Attributes:
    implementation: which.
    measured: what showed it, in words: device, date, versions, figures.
    platform: of the targets it applies to.
    first_capability, last_capability: their compute capabilities, inclusive;
      None where they have none.
    min_m, min_n, min_k: it applies from these sizes on; a problem with symbolic
      sizes is never among them.
    formats: (lhs, rhs) names of formats, a plain operand's dtype, that it is
      known for; None is all.
  """

  implementation: str
  measured: str
  platform: str = "cuda"
  first_capability: tuple[int, int] | None = None
  last_capability: tuple[int, int] | None = None
  min_m: int = 1
  min_n: int = 1
  min_k: int = 1
  formats: tuple[tuple[str, str], ...] | None = None

  def applies(
    self, problem: problems.DotProblem, target: targets.Target
  ) -> bool:
    """Whether the measurement is about such a problem on such a device."""
    if target.platform != self.platform:
      return False
    capability = target.compute_capability
    if self.first_capability is not None and (
      capability is None or capability < self.first_capability
    ):
      return False
    if self.last_capability is not None and (
      capability is None or capability > self.last_capability
    ):
      return False
    if problem.m is None or problem.n is None or problem.k is None:
      return False
    if (
      problem.m < self.min_m or problem.n < self.min_n or problem.k < self.min_k
    ):
      return False
    pair = (str(problem.lhs), str(problem.rhs))
    return self.formats is None or pair in self.formats

  def __str__(self) -> str:
    sizes = (("m", self.min_m), ("n", self.min_n), ("k", self.min_k))
    least = " ".join(f"{name}>={size}" for name, size in sizes if size > 1)
    return f"{self.implementation} is faster {least or 'here'}: {self.measured}"


# None: `python -m jaxplugin bench` has not compared them on a GPU yet.
MEASURED: Final[tuple[SizeRule, ...]] = ()


def applicable(
  problem: problems.DotProblem,
  target: targets.Target,
  rules: Sequence[SizeRule],
) -> SizeRule | None:
  """The first of `rules` that applies, or None."""
  return next((rule for rule in rules if rule.applies(problem, target)), None)
