# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The fields of a row, which describe a problem of an operation.

An operation converts a problem to fields, and reads fields as a problem. A row
leaves a field out if it has its default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import numpy as np

from jaxplugin.core import formats
from jaxplugin.tables import records

# Dtypes of results and of unquantized operands, by their names in rows.
DTYPES: Final = {
  dtype.name: dtype
  for dtype in (np.dtype(np.float32), formats.BF16, np.dtype(np.float16))
}
FORMATS: Final = {format.name: format for format in formats.NAMED}


class RowFields:
  """The fields of a row that are not read yet.

  Methods raise ValueError with the name of the field and the rule.
  """

  def __init__(
    self, what: str, fields: records.Fields, required: Iterable[str]
  ):
    """Checks that the required fields exist.

    Args:
      what: the operation in messages, for example "the dot".
      fields: all fields of the row.
      required: names of required fields.
    """
    self._what = what
    self._left = dict(fields)
    missing = [name for name in required if name not in self._left]
    if missing:
      raise ValueError(f"a problem of {what} must have {', '.join(missing)}")

  def __contains__(self, name: str) -> bool:
    return name in self._left

  def size(self, name: str) -> int:
    """Reads a positive number."""
    if name not in self._left:
      raise ValueError(f"a problem of {self._what} must have {name}")
    value = self._left.pop(name)
    if type(value) is not int or value < 1:
      raise ValueError(f"{name} must be a positive number, got {value!r}")
    return value

  def flag(self, name: str) -> bool:
    """Reads a bool."""
    value = self._left.pop(name)
    if type(value) is not bool:
      raise ValueError(f"{name} must be true or false, got {value!r}")
    return value

  def text(self, name: str, allowed: Collection[str]) -> str:
    """Reads one of the allowed words."""
    value = self._left.pop(name)
    if not isinstance(value, str) or value not in allowed:
      raise ValueError(f"{name} must be one of {tuple(allowed)}, got {value!r}")
    return value

  def named(self, name: str, table: Mapping[str, Any]) -> Any:
    """Reads a name, and returns its value in the table."""
    return table[self.text(name, table)]

  def stored_dtype(self, name: str, format: formats.BlockFormat) -> np.dtype:
    """Reads the dtype of a format's values, by default its `array_dtype`."""
    if name not in self:
      return format.array_dtype
    return self.named(name, {x.name: x for x in format.storage_dtypes})

  def optional(
    self,
    defaults: Mapping[str, records.Scalar],
    words: Mapping[str, Collection[str]],
    sizes: Collection[str] = (),
  ) -> dict[str, Any]:
    """Reads fields that a row leaves out if they have their default.

    Args:
      defaults: the default of each field.
      words: allowed values of the fields that are texts.
      sizes: names of the fields that are numbers. All others are bools.
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
    """Checks that every field was read."""
    if self._left:
      raise ValueError(
        f"a problem of {self._what} has no {', '.join(self._left)}"
      )


def defaults_of(
  kind: type, without: Collection[str] = ()
) -> dict[str, records.Scalar]:
  """Returns the fields of a dataclass that have a default.

  Rows leave a field out if it has its default.

  Args:
    without: names of fields to leave out.
  """
  return {
    field.name: field.default
    for field in dataclasses.fields(kind)
    if field.default is not dataclasses.MISSING and field.name not in without
  }


def not_default(
  problem: Any, defaults: Mapping[str, records.Scalar]
) -> dict[str, records.Scalar]:
  """Returns the attributes of a problem that differ from their default."""
  values = {name: getattr(problem, name) for name in defaults}
  return {
    name: value for name, value in values.items() if value != defaults[name]
  }
