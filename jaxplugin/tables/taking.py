# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A problem out of a row's fields: each is taken once, and none is left over.

Each function of a `Taken` raises ValueError, which says which field, and what
it must be.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any
from typing import Final

import numpy as np

from jaxplugin.core import formats
from jaxplugin.tables import records

# Of results and plain operands, by the names that rows have.
DTYPES: Final = {
  dtype.name: dtype
  for dtype in (np.dtype(np.float32), formats.BF16, np.dtype(np.float16))
}
FORMATS: Final = {format.name: format for format in formats.KNOWN}


class Taken:
  """The fields that are left."""

  def __init__(
    self, what: str, fields: records.Fields, required: Iterable[str]
  ):
    """Initializes it.

    Args:
      what: whose problem it is, "the dot".
      fields: all of them.
      required: names that must be there.
    """
    self._what = what
    self._left = dict(fields)
    missing = [name for name in required if name not in self._left]
    if missing:
      raise ValueError(f"a problem of {what} must have {', '.join(missing)}")

  def __contains__(self, name: str) -> bool:
    return name in self._left

  def size(self, name: str) -> int:
    """A positive number."""
    value = self._left.pop(name)
    if type(value) is not int or value < 1:
      raise ValueError(f"{name} must be a positive number, got {value!r}")
    return value

  def flag(self, name: str) -> bool:
    """True or false."""
    value = self._left.pop(name)
    if type(value) is not bool:
      raise ValueError(f"{name} must be true or false, got {value!r}")
    return value

  def text(self, name: str, allowed: Collection[str]) -> str:
    """One of some words."""
    value = self._left.pop(name)
    if not isinstance(value, str) or value not in allowed:
      raise ValueError(f"{name} must be one of {tuple(allowed)}, got {value!r}")
    return value

  def optional(
    self,
    defaults: Mapping[str, records.Scalar],
    words: Mapping[str, Collection[str]],
    sizes: Collection[str] = (),
  ) -> dict[str, Any]:
    """Fields that are left out where they have their default.

    Args:
      defaults: by name, of each of them.
      words: what those may be that are texts.
      sizes: which are numbers; all others are true or false.
    """
    found: dict[str, Any] = {}
    for name, default in defaults.items():
      if name not in self:
        found[name] = default
      elif name in words:
        found[name] = self.text(name, words[name])
      else:
        found[name] = self.size(name) if name in sizes else self.flag(name)
    return found

  def finish(self) -> None:
    """Nothing may be left."""
    if self._left:
      raise ValueError(
        f"a problem of {self._what} has no {', '.join(self._left)}"
      )


def not_default(
  problem: Any, defaults: Mapping[str, records.Scalar]
) -> dict[str, records.Scalar]:
  """Attributes of a problem that are not as most problems have them."""
  values = {name: getattr(problem, name) for name in defaults}
  return {
    name: value for name, value in values.items() if value != defaults[name]
  }
