# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Text for values: equal values have the same text in every process.

The parameters of a call are encoded, so that equal calls have equal names. A
value that is not plain data has no encoding, because its address has no meaning
in another process and functions cannot be compared.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np


class NoEncodingError(TypeError):
  """A value is not plain data; for example a function or an array."""


def encode(value: Any) -> str:
  """Returns the text of a value. Different values have different texts.

  Args:
    value: None, a bool, number, string, bytes, dtype or enum; or a tuple, list,
      set, dict or dataclass of such values.

  Raises:
    NoEncodingError: If the value, or a value in it, is of another type.
  """
  kind = type(value)
  name = f"{kind.__module__}.{kind.__qualname__}"
  if value is None or kind in (bool, int, str, bytes):
    return repr(value)
  if kind is float:
    return value.hex()
  if isinstance(value, np.dtype):
    return f"dtype {value.name}"
  if isinstance(value, enum.Enum):
    return f"{name}.{value.name}"
  if kind in (tuple, list):
    return f"{kind.__name__}({','.join(map(encode, value))})"
  if kind in (set, frozenset):
    return f"{kind.__name__}({','.join(sorted(map(encode, value)))})"
  if kind is dict:
    items = (f"{encode(k)}:{encode(v)}" for k, v in value.items())
    return f"dict({','.join(sorted(items))})"
  if dataclasses.is_dataclass(kind):
    fields = (
      f"{field.name}={encode(getattr(value, field.name))}"
      for field in dataclasses.fields(value)
    )
    return f"{name}({','.join(fields)})"
  raise NoEncodingError(
    f"encode: must be plain data or a dataclass of it, got {name}"
  )
