# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operators and functions of plain arrays, which quantized arrays refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

import jax

from jaxplugin.core import error_context
from jaxplugin.jaxext import jax_private

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
  "float": "float()",
  "int": "int()",
  "complex": "complex()",
  "array": "this function",
  "jax_array": "this function",
}
_UPDATE: Final = (
  "To replace a part, such as a slot of a cache, update each leaf:"
  " jax.tree.map(lambda old, new: old.at[index].set(new), array, quantized)"
)
# Functions of NumPy that read a shape, or call a method.
_NUMPY: Final = ("shape", "ndim", "size", "transpose")


def refuse(cls: _Class) -> _Class:
  """Adds the operators and conversions that a class does not define.

  Each calls `self._refuse(name)`, which raises TypeError. So do the functions
  of NumPy and JAX that are passed such an object.
  """
  symbols = {**_BINARY, **_OTHERS, **{f"r{n}": s for n, s in _BINARY.items()}}
  methods = {f"__{n}__": _refusing(symbol) for n, symbol in symbols.items()}
  methods["__array_ufunc__"] = refuse_ufunc
  methods["__array_function__"] = _call_numpy
  methods["__getattr__"] = _missing
  methods["__setitem__"] = _assign
  for name, method in methods.items():
    if name not in vars(cls):
      setattr(cls, name, method)
  cls.__bool__ = _condition  # type: ignore[attr-defined]
  cls.__hash__ = _key  # type: ignore[assignment]
  jax_private.refuse_operand(cls, lambda x: x._refuse("this function"))
  return cls


def refuse_ufunc(
  self: Any, ufunc: Any, method: str, *inputs: Any, **kwargs: Any
) -> Any:
  """Raises TypeError, as `__array_ufunc__`."""
  del method, inputs, kwargs
  return self._refuse(f"numpy.{ufunc.__name__}")


def _call_numpy(
  self: Any, function: Any, types: Any, args: Any, kwargs: Any
) -> Any:
  """Raises TypeError, as `__array_function__`, except for `_NUMPY`.

  Without it, `np.array_equal` returns False.
  """
  del types
  if function.__name__ in _NUMPY:
    return function.__wrapped__(*args, **kwargs)
  return self._refuse(f"numpy.{function.__name__}")


def _refusing(symbol: str) -> Callable[..., Any]:
  return lambda self, *others, **options: self._refuse(symbol)


def _missing(self: Any, name: str) -> Any:
  """Raises AttributeError, with a remedy for attributes of `jax.Array`."""
  if (
    name.startswith("_")
    or hasattr(type(self), name)
    or not hasattr(jax.Array, name)
  ):
    return object.__getattribute__(self, name)
  try:
    return self._refuse(f".{name}")
  except TypeError as error:
    hint = f". {_UPDATE}" if name == "at" else ""
    raise AttributeError(f"{error}{hint}") from None


def _assign(self: Any, index: Any, value: Any) -> NoReturn:
  del value
  raise TypeError(
    f"{type(self).__name__}: arrays must not be changed in place, got an"
    f" assignment to index {error_context.shown(index)}. {_UPDATE}"
  )


def _condition(self: Any) -> NoReturn:
  raise TypeError(
    f"{type(self).__name__}: a condition must be True or False, got {self!r};"
    " write x is not None, or reduce the plain array with jnp.any or jnp.all"
  )


def _key(self: Any) -> NoReturn:
  raise TypeError(
    f"{type(self).__name__}: a key of a dict and a static argument of jax.jit"
    f" must be hashable, got {self!r}; use id(x) as the key, and pass x to"
    " jax.jit as an argument that is not static"
  )
