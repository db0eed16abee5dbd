# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operators of plain arrays, which quantized arrays refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

_Class = TypeVar("_Class", bound=type)

_BINARY: Final = {
  "add": "+",
  "sub": "-",
  "mul": "*",
  "matmul": "@",
  "truediv": "/",
  "floordiv": "//",
  "mod": "%",
  "divmod": "divmod()",
  "pow": "**",
  "lshift": "<<",
  "rshift": ">>",
  "and": "&",
  "or": "|",
  "xor": "^",
}
_OTHERS: Final = {
  "neg": "-",
  "pos": "+",
  "abs": "abs()",
  "invert": "~",
  "lt": "<",
  "le": "<=",
  "gt": ">",
  "ge": ">=",
  "eq": "==",
  "ne": "!=",
}


def refuse(cls: _Class) -> _Class:
  """Adds the operators and NumPy's ufuncs that a class does not define.

  Each calls `self._refuse(name)`, which raises TypeError.
  """
  symbols = {**_BINARY, **_OTHERS, **{f"r{n}": s for n, s in _BINARY.items()}}
  for name, symbol in symbols.items():
    if f"__{name}__" not in vars(cls):
      setattr(cls, f"__{name}__", _refusing(symbol))
  if "__array_ufunc__" not in vars(cls):
    setattr(cls, "__array_ufunc__", refuse_ufunc)  # noqa: B010
  return cls


def refuse_ufunc(
  self: Any, ufunc: Any, method: str, *inputs: Any, **kwargs: Any
) -> Any:
  """Raises TypeError, as `__array_ufunc__`."""
  del method, inputs, kwargs
  return self._refuse(f"numpy.{ufunc.__name__}")


def _refusing(symbol: str) -> Callable[..., Any]:
  return lambda self, *others: self._refuse(symbol)
