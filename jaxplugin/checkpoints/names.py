# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of tensors: globs that match them, near ones, and printing them."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable
from typing import Any, Final

from jaxplugin.core import error_context

WEIGHT: Final = ".weight"
_NEAR: Final = 3


def globs(who: str, what: str, given: Any) -> tuple[str, ...]:
  """Returns the globs of an argument: one string, or several.

  Raises:
    TypeError: If it is neither.
  """
  if isinstance(given, str):
    return (given,)
  try:
    found = error_context.as_tuple(given)
  except TypeError:
    found = (None,)
  if not all(isinstance(x, str) for x in found):
    raise TypeError(
      f"{who}: {what} must be a glob or a list of globs, got"
      f" {error_context.shown(given)}"
    )
  return found


def matches(patterns: Iterable[str], name: str) -> bool:
  """Returns whether a glob matches a name, with or without ".weight"."""
  return any(
    fnmatch.fnmatchcase(x, pattern)
    for pattern in patterns
    for x in (name, base(name))
  )


def near(
  name: str, names: Iterable[str], least_ratio: float = 0.6
) -> list[str]:
  """Returns names that contain a name, or else resemble it.

  `difflib` computes the ratio, 1 for equal names.
  """
  names = list(names)
  containing = [x for x in names if name and name in x]
  found = sorted(containing, key=len) or difflib.get_close_matches(
    name, names, _NEAR, least_ratio
  )
  return found[:_NEAR]


def base(name: str) -> str:
  """Returns a weight's name without ".weight"."""
  return name.removesuffix(WEIGHT)


def prefix(name: str) -> str:
  """Returns the prefix of a weight's other parts.

  It is "up." for "up.weight", and "experts.up_proj_" for "experts.up_proj".
  """
  return f"{base(name)}." if name.endswith(WEIGHT) else f"{name}_"


def module_of(weight: str) -> str:
  """Returns the name of a weight's module."""
  if weight.endswith(WEIGHT):
    return base(weight)
  return weight.rpartition(".")[0] or weight


def printable(name: object) -> str:
  """Returns a name with control characters escaped."""
  return repr(str(name))[1:-1]


def starred(name: str) -> str:
  """Returns a printable name with * for its numbers."""
  return re.sub(r"\d+", "*", printable(name))
