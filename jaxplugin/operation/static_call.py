# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`OperationCall`: the arrays and options that an operation is called with.

A primitive takes arrays as operands and hashable parameters. A call has both.
The form of a call is the call without its arrays: a hashable parameter.
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

_SIDE_ARRAYS: Final = {
  "lhs": ("lhs", "values"),
  "rhs": ("rhs", "values"),
  "lhs_scale": ("lhs", "scale"),
  "rhs_scale": ("rhs", "scale"),
}


class _Form(enum.Enum):
  """Placeholder of an array in `OperationCall.form`."""

  ARRAY = "array"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationCall:
  """The arrays and parameters of a call.

  Attributes:
    PRIMITIVE: JAX primitive of the call, set by each subclass.
    ARRAYS: {name: path} of each array, in the order of the primitive's
      operands, set by each subclass. A path is (field,) or (field, field of the
      field), where the outer field is a dataclass with a method `replace`.
  """

  PRIMITIVE: ClassVar[Any]
  ARRAYS: ClassVar[Mapping[str, tuple[str, ...]]]

  def replace(self, **changes: Any) -> Self:
    return dataclasses.replace(self, **changes)

  def arrays(self) -> dict[str, Any]:
    """Returns the arrays that are not None by name, in order of `ARRAYS`."""
    found = {
      name: functools.reduce(getattr, path, self)
      for name, path in self.ARRAYS.items()
    }
    return {name: x for name, x in found.items() if x is not None}

  def flatten(self) -> list[Any]:
    return list(self.arrays().values())

  def with_arrays(self, **arrays: Any) -> Self:
    """Returns the call with other arrays; None removes an array."""
    changes: dict[str, Any] = {}
    for name, x in arrays.items():
      field, *inner = self.ARRAYS[name]
      if inner:
        side = changes.get(field, getattr(self, field))
        x = side.replace(**{inner[0]: x})
      changes[field] = x
    return self.replace(**changes)

  def form(self) -> Self:
    """Returns the call with placeholders as arrays, which is hashable."""
    return self.with_arrays(**dict.fromkeys(self.arrays(), _Form.ARRAY))

  def named(self, flat: Iterable[Any]) -> dict[str, Any]:
    """Returns {name: item} for a list with an item for each array."""
    return dict(zip(self.arrays(), flat, strict=True))

  def filled(self, flat: Iterable[Any]) -> Self:
    """Returns this form with arrays in place of the placeholders."""
    return self.with_arrays(**self.named(flat))


def paths_of_two_sides(*others: str) -> dict[str, tuple[str, ...]]:
  """Returns `OperationCall.ARRAYS` of a call with lhs, rhs and other arrays."""
  return _SIDE_ARRAYS | {name: (name,) for name in others}
