# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Plants bugs in compiled kernels' PTX, to see that they are caught."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from collections.abc import Sequence
from collections.abc import Set
from typing import Any
from typing import Final

import numpy as np
from absl.testing import parameterized

from jaxplugin.lab.inspection.ptx import faults
from jaxplugin.testing import contract
from jaxplugin.testing.kernels import executed
from jaxplugin.testing.kernels import executed_cases
from jaxplugin.testing.kernels import gpu_operands

WRONG: Final = "wrong values"
_NOTHING: Final = "nothing"
_MOST_INSTRUCTIONS: Final = 100_000  # of a block; a mutated loop may not end


@dataclasses.dataclass(frozen=True)
class Mutation:
  """A kind of bug.

  Attributes:
    pattern: what is looked for.
    into: what is put in its place: a template, or of the match.
    caught_as: names of faults, and `WRONG`.
    without_effect: how many of the places may be.
  """

  pattern: str
  into: str | Callable[[re.Match[str]], str]
  caught_as: Set[str]
  without_effect: int


@dataclasses.dataclass(frozen=True)
class Original:
  """A product of one launch, to be mutated.

  Attributes:
    architecture, lhs, rhs: by name.
    sizes: m, n and k.
  """

  architecture: str
  lhs: str
  rhs: str
  sizes: tuple[int, int, int]


@functools.cache
def _planned(original: Original) -> tuple[Any, str, str, Any]:
  """The product, its launch's kernel and PTX, and what it must compute."""
  rng = np.random.default_rng(3)
  make = gpu_operands.make_operand
  m, n, k = original.sizes
  lhs = executed.dense(make(rng, original.lhs, (1, m, k)))
  rhs = executed.dense(make(rng, original.rhs, (1, n, k)))
  product = executed.product(original.architecture, lhs, rhs)
  (launch,) = product.launches
  # Comments hold no instruction.
  ptx = re.sub(r"//[^\n]*", "", product.compiled(launch).assembly)
  return product, launch.kernel, ptx, contract.dot(lhs.exact, rhs.exact)


def ptx(original: Original) -> str:
  """Returns the PTX of the original kernel."""
  return _planned(original)[2]


def outcome(original: Original, text: str) -> str:
  """The kind of fault that PTX has in its place; or what its values are."""
  product, kernel, _, (exact, magnitude) = _planned(original)
  try:
    result, _ = product.run(
      ptx={kernel: text}, most_instructions=_MOST_INSTRUCTIONS
    )
  except (faults.Fault, faults.NotModelled) as fault:
    return type(fault).__name__
  try:
    bound = executed_cases.truncated_bound(original.sizes[-1]) * magnitude
    contract.assert_within(result, exact, bound, result.dtype)
  except AssertionError:
    return WRONG
  return _NOTHING


def _spread(items: Sequence[Any], count: int) -> list[Any]:
  """At most `count` of them, the first and the last among them."""
  places = np.linspace(0, len(items) - 1, min(count, len(items)))
  return [items[int(place)] for place in places]


class Case(parameterized.TestCase):
  """Plants bugs, and sees them caught."""

  def check(
    self, original: Original, mutation: Mutation, most_places: int
  ) -> None:
    """Each place of a kind, up to so many, is caught, as it must be."""
    text = ptx(original)
    places = list(re.finditer(mutation.pattern, text))
    if not places:
      return
    found = []
    for place in _spread(places, most_places):
      into = mutation.into
      new = into(place) if callable(into) else place.expand(into)
      mutated = text[: place.start()] + new + text[place.end() :]
      found.append(outcome(original, mutated))
    caught = [kind for kind in found if kind != _NOTHING]
    self.assertContainsSubset(caught, mutation.caught_as, found)
    without_effect = len(found) - len(caught)
    self.assertLessEqual(without_effect, mutation.without_effect, found)
    self.assertNotEmpty(caught)

  def check_original(self, original: Original) -> None:
    """Nothing is seen where nothing is planted."""
    self.assertEqual(outcome(original, ptx(original)), _NOTHING)
