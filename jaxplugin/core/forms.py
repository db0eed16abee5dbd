# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`Call`: what an operation is called with, as a primitive takes it.

A primitive takes arrays, and parameters that can be hashed. A call has both;
its form is the call without its arrays, which is such a parameter.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any
from typing import ClassVar
from typing import Final
from typing import Self

_OF_SIDES: Final = {
  "lhs": ("lhs", "values"),
  "rhs": ("rhs", "values"),
  "lhs_scale": ("lhs", "scale"),
  "rhs_scale": ("rhs", "scale"),
}


class _Form(enum.Enum):
  """What stands for an array in `Call.form`."""

  ARRAY = "array"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """The arrays of a call, and everything else about it.

  Attributes:
    ARRAYS: of a subclass: where each array is, by its name, in the order in
      which the primitive takes them: the names of a field, and, of one that is
      a dataclass itself, of a field of that, which has a `replace` too.
  """

  ARRAYS: ClassVar[Mapping[str, tuple[str, ...]]]

  def replace(self, **changes: Any) -> Self:
    return dataclasses.replace(self, **changes)

  def arrays(self) -> dict[str, Any]:
    """Those that are there, by their names in `ARRAYS`, in that order."""
    found = {
      name: functools.reduce(getattr, path, self)
      for name, path in self.ARRAYS.items()
    }
    return {name: x for name, x in found.items() if x is not None}

  def flatten(self) -> list[Any]:
    return list(self.arrays().values())

  def with_arrays(self, **arrays: Any) -> Self:
    """The same call with other arrays; None takes one out."""
    changes: dict[str, Any] = {}
    for name, x in arrays.items():
      field, *inner = self.ARRAYS[name]
      if inner:
        side = changes.get(field, getattr(self, field))
        x = side.replace(**{inner[0]: x})
      changes[field] = x
    return self.replace(**changes)

  def form(self) -> Self:
    """The call without its arrays: hashable, equal where all else is."""
    return self.with_arrays(**dict.fromkeys(self.arrays(), _Form.ARRAY))

  def named(self, flat: Iterable[Any]) -> dict[str, Any]:
    """Items that belong to the call's arrays, by their names."""
    return dict(zip(self.arrays(), flat, strict=True))

  def filled(self, flat: Iterable[Any]) -> Self:
    """The call of which this is the `form`, with these arrays."""
    return self.with_arrays(**self.named(flat))


def of_two_sides(*others: str) -> dict[str, tuple[str, ...]]:
  """`Call.ARRAYS` of a call of lhs and rhs, and of other arrays after them."""
  return _OF_SIDES | {name: (name,) for name in others}
