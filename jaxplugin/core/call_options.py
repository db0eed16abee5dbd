# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Options of calls that are traced inside of a context.

They limit memory and threads, and say what happens if no kernel fits a call.
Environment variables set the options of a whole process. `has_checks` is the
option of `debug_checks`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from types import EllipsisType
from typing import Any, Final, Literal, Self, get_args

from jaxplugin.core import error_context
from jaxplugin.jaxext import jax_private

OnFallback = Literal["allow", "warn", "raise"]
# Environment variables of the fields.
VARIABLES: Final = {
  "workspace_bytes": "JAXPLUGIN_WORKSPACE_BYTES",
  "on_fallback": "JAXPLUGIN_ON_FALLBACK",
  "threads": "JAXPLUGIN_THREADS",
}
_LEAST: Final = {"workspace_bytes": 0, "threads": 1}


class FallbackError(NotImplementedError):
  """The error of a call that XLA would dequantize, with "raise".

  `jp.options(on_fallback="raise")` has the example.
  """


class FallbackWarning(UserWarning):
  """The warning about a call that XLA dequantizes, with "warn".

  `jp.options(on_fallback="warn")` asks for it.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """The options of a call. A limit of None does not limit it.

  Attributes:
    workspace_bytes, on_fallback, threads: arguments of `options`.
  """

  workspace_bytes: int | None = None
  on_fallback: OnFallback = "allow"
  threads: int | None = None

  def replace(self, who: str, remedy: str = "", **changes: Any) -> Self:
    """Returns the options with other values.

    Args:
      who: the function and argument, or the variable, that an error names.
      remedy: how to set no limit and no check; "" if arguments set them.
      **changes: the values.

    Raises:
      TypeError, ValueError: If a value is wrong.
    """
    no_limit = remedy or "Pass None for no limit."
    no_check = remedy or 'Pass "allow" for no check.'
    for name, value in changes.items():
      if name == "on_fallback":
        known = get_args(OnFallback)
        if not error_context.is_one_of(value, known):
          raise ValueError(
            f"{who} must be one of {known}, got {error_context.shown(value)}."
            f" {no_check}"
          )
      elif value is not None and type(value) is not int:
        raise TypeError(
          f"{who} must be a whole number, got {error_context.shown(value)}."
          f" {no_limit}"
        )
      elif value is not None and value < _LEAST[name]:
        raise ValueError(
          f"{who} must be {_LEAST[name]} or more, got {value}. {no_limit}"
        )
    return dataclasses.replace(self, **changes)

  def __str__(self) -> str:
    """Returns the options that differ, as in "threads=2"."""
    return ", ".join(
      f"{field.name}={getattr(self, field.name)}"
      for field in dataclasses.fields(self)
      if getattr(self, field.name) != field.default
    )


NONE: Final = Options()
_context = jax_private.make_context(None)
# Whether `debug_checks` checks the results of dots that are traced now.
has_checks: Final = jax_private.make_context(False)


def options(
  *,
  workspace_bytes: int | None | EllipsisType = ...,
  on_fallback: OnFallback | EllipsisType = ...,
  threads: int | None | EllipsisType = ...,
) -> contextlib.AbstractContextManager[Options]:
  """Limits memory and threads of the calls traced inside of it.

  Each call records the options when it is traced. They are part of `jit`'s
  cache key, so a function is traced again under other options. An argument that
  is left out keeps the value of the enclosing context, or of the environment
  variable. Outside of `jit`, call a pullback of `jax.vjp` inside of it too.

  Args:
    workspace_bytes: upper limit in bytes of the partial sums that a GPU kernel
      writes to memory. A config that needs more is not used. None removes the
      limit.
    on_fallback: what happens to a matmul whose operands XLA dequantizes,
      because no kernel supports it: "allow", "warn" (`FallbackWarning` and a
      log line, once for each decision) or "raise" (`FallbackError`). A matmul
      with implementation="xla" is always allowed.
    threads: upper limit of the threads of each CPU kernel. None is all threads
      of XLA's pool, but at most the cores that the process may use.

  Returns:
    A context that yields the options in effect.

  Raises:
    TypeError: If a limit is neither a whole number nor None.
    ValueError: If a limit is too small, or on_fallback is another word.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> w = jp.quantize(jnp.ones((32, 64)), "mxfp8")
    >>> with jp.options(threads=1):
    ...   y = jp.linear(jnp.ones((2, 64)), w)
    >>> print(y[0, 0])
    64.0
  """
  given: dict[str, Any] = dict(
    workspace_bytes=workspace_bytes, on_fallback=on_fallback, threads=threads
  )
  changes = {name: x for name, x in given.items() if x is not ...}
  for name, value in changes.items():
    NONE.replace(f"options: {name}", **{name: value})  # raises at the call
  return _with_options(changes)


@contextlib.contextmanager
def _with_options(changes: Mapping[str, Any]) -> Iterator[Options]:
  found = dataclasses.replace(current(), **changes)
  with _context(found):
    yield found


def current() -> Options:
  """Returns the options of a call that is traced now."""
  return _context.value or _of_environment()


@functools.cache
def _of_environment() -> Options:
  found = NONE
  for name, variable in VARIABLES.items():
    if value := os.environ.get(variable):
      is_number = name in _LEAST and value.isdecimal()
      found = found.replace(
        f"jaxplugin: {variable}",
        "Unset the variable for no limit and no check.",
        **{name: int(value) if is_number else value},
      )
  return found
