# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Text that errors share: the function to name, and short forms of values.

A function that calls another public function, as `linear` calls
`block_scaled_dot`, does this inside `in_function`. Errors then name the
function that the user called. `shown` prints a value, with dtype and shape for
arrays.
"""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import operator
import os
import re
import reprlib
import sys
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, NoReturn, TypeGuard

import numpy as np

_FUNCTION: Final = contextvars.ContextVar[str | None]("function", default=None)

# The limit for the text of a value. Longer texts are cut or replaced.
_MAX_SHOWN: Final = 300
# The `repr` of an array, which has its contents.
_OF_ARRAY: Final = re.compile(r"\b[aA]rray\(")
# A part of flax's message.
_TRACE_LEVEL: Final = "different trace level"
_PUBLIC_MODULES: Final = (
  "jaxplugin",
  "jaxplugin.training",
  "jaxplugin.nn",
  "jaxplugin.checkpoints",
  "jaxplugin.training.checkpoint_policies",
  "jaxplugin.backends",
  "jaxplugin.repro",
)


def who(name: str) -> str:
  """Returns the function that errors name: `name`, or its caller."""
  return _FUNCTION.get() or name


class NotQuantizedWarning(UserWarning):
  """Warns that a matmul is computed without block scales.

  `quantize_dots`, `accelerate`, `accept_quantized` and `quantize_params` give
  it. Its text says which matmul, why, and what to do. To make it an error::

    warnings.simplefilter("error", jp.NotQuantizedWarning)
  """


@contextlib.contextmanager
def in_function(name: str) -> Iterator[None]:
  """Makes errors inside name the function `name`. The innermost name wins."""
  token = _FUNCTION.set(name)
  try:
    yield
  finally:
    _FUNCTION.reset(token)


def require_function(name: str, fn: Any) -> None:
  """Raises TypeError that names the function `name` if `fn` is not callable.

  A program that JAX has compiled cannot be traced.
  """
  if not callable(fn) or hasattr(fn, "runtime_executable"):
    raise TypeError(
      f"{who(name)}: fn must be a function, got {shown(fn)}; pass the function"
      " itself, not what it returns, and not compiled"
    )


class _Shown(reprlib.Repr):
  """A `repr` of bounded length that prints arrays as dtype and shape."""

  def __init__(self) -> None:
    super().__init__()
    self.maxstring = self.maxother = self.maxlong = _MAX_SHOWN

  def repr1(self, x: Any, level: int) -> str:
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    if type(x).__module__.partition(".")[0] == "jaxplugin":
      return self.repr_instance(x, level)
    if isinstance(x, np.generic):
      return f"{dtype}({x})"
    is_array = hasattr(x, "__array__") and dtype is not None
    if is_array and isinstance(shape, tuple):
      return f"{dtype}{list(shape)}"
    return super().repr1(x, level)

  def repr_instance(self, x: Any, level: int) -> str:
    try:
      text = repr(x)
    # `__repr__` of another package may raise anything. Our error is about `x`.
    except Exception:
      text = "\n"
    if "\n" in text or len(text) > _MAX_SHOWN or _OF_ARRAY.search(text):
      return f"an object of type {type(x).__module__}.{type(x).__qualname__}"
    return text


def shown(value: Any) -> str:
  """Returns a short text for a value that an error is about.

  Arrays, also in containers, become dtype and shape: `{'a': float32[4, 64]}`.
  """
  return _Shown().repr(value)


def as_integer(value: Any) -> int:
  """Returns a Python or NumPy integer as an int; else raises TypeError.

  A bool is not an integer.
  """
  if isinstance(value, bool):
    raise TypeError
  return operator.index(value)


def require_integer(who: str, name: str, value: Any) -> int:
  """Calls `as_integer`, and names the argument in its error."""
  try:
    return as_integer(value)
  except TypeError:
    raise TypeError(
      f"{who}: {name} must be an integer, got {shown(value)}"
    ) from None


def is_number(value: Any) -> TypeGuard[int | float]:
  """Returns whether a value is a Python number, and not a bool."""
  return isinstance(value, (int, float)) and not isinstance(value, bool)


def finite_f32(who: str, name: str, value: float) -> np.float32:
  """Converts a Python number; raises ValueError if f32 cannot hold it."""
  with np.errstate(over="ignore"):
    try:
      result = np.float32(value)
    except OverflowError:  # an int beyond f64's range
      result = np.float32(np.inf)
  if not np.isfinite(result):
    raise ValueError(
      f"{who}: {name} must be finite in float32, got {shown(value)}. Pass a"
      " float32 array if it must be NaN or Inf"
    )
  return result


def is_integer(value: Any) -> bool:
  """Returns whether a value is a Python or NumPy integer, and not a bool."""
  return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def as_tuple(values: Any) -> tuple[Any, ...]:
  """Returns the items of a value, or raises TypeError if it has none.

  In a trace of jax 0.12, iterating over an array raises AttributeError.
  """
  try:
    return tuple(values)
  except AttributeError:
    raise TypeError from None


def require_bool(who: str, name: str, value: Any) -> bool:
  """Returns a Python or NumPy bool as a bool; else raises TypeError."""
  if not isinstance(value, (bool, np.bool_)):
    raise TypeError(f"{who}: {name} must be True or False, got {shown(value)}")
  return bool(value)


def is_one_of(value: Any, choices: Collection[Any]) -> bool:
  """Returns whether a value is a string, bool or None among the choices.

  Arrays are not: `in` compares their elements.
  """
  is_choice = value is None or isinstance(value, (str, bool, np.bool_))
  return is_choice and value in choices


def require_path(who: str, name: str, value: Any) -> None:
  """Raises TypeError unless a value can be a path."""
  if not isinstance(value, (str, os.PathLike)):
    raise TypeError(
      f"{who}: {name} must be a path, a string or an os.PathLike, got"
      f" {shown(value)}"
    )


def public_module(module: str, names: Sequence[str]) -> None:
  """Makes `dir` of a module list `names`, and its errors suggest names."""

  def missing(name: str) -> NoReturn:
    raise _missing_attribute(module, name)

  vars(sys.modules[module]).update(
    __dir__=lambda: list(names), __getattr__=missing
  )


def _missing_attribute(module: str, name: str) -> AttributeError:
  """Returns the error for a name that a public module does not have.

  The message has the public module with that name, or similar names.
  """
  text = f"module {module!r} has no attribute {name!r}"
  if name.startswith("_"):
    return AttributeError(text)
  places: dict[str, list[str]] = {}
  for owner in dict.fromkeys((module, *_PUBLIC_MODULES)):
    for public in _public_names(owner):
      places.setdefault(public.lower(), []).append(f"{owner}.{public}")
  here = places.get(name.lower(), [])
  if here:
    return AttributeError(f"{text}; it is {' or '.join(here)}")
  close = difflib.get_close_matches(name.lower(), places, cutoff=0.75)
  if close:
    text += f"; did you mean {' or '.join(places[x][0] for x in close)}?"
  return AttributeError(text)


def _public_names(module: str) -> list[str]:
  """Returns the public names of an imported module of this package."""
  owner = sys.modules.get(module)
  return [
    name
    for name in dir(owner)
    if not name.startswith("_") and _is_offered(getattr(owner, name))
  ]


def _is_offered(value: Any) -> bool:
  if isinstance(value, types.ModuleType):
    return value.__name__ in _PUBLIC_MODULES
  # Constants of plain types have no module.
  origin = getattr(value, "__module__", None) or "jaxplugin"
  return str(origin).partition(".")[0] == "jaxplugin"


@contextlib.contextmanager
def explaining_nnx(name: str, remedy: str) -> Iterator[None]:
  """Explains flax's error that an nnx variable belongs to another trace.

  Transforms of nnx write to variables of modules. flax refuses this if a
  transform of this package is between the nnx transform and the variables.

  Args:
    name: the function of this package.
    remedy: text that gives the order that works.
  """
  try:
    yield
  except Exception as error:
    errors = sys.modules.get("flax.errors")
    if errors is None or _TRACE_LEVEL not in str(error):
      raise
    if not isinstance(error, (errors.TraceContextError, ValueError)):
      raise
    raise TypeError(
      f"{who(name)}: fn must not apply a transform of nnx to variables that"
      f" were created outside of it, got {type(error).__name__}. {remedy}"
    ) from error
