# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Who an error speaks for: the function that the user called.

A function that is made of another one, as `linear` is of `block_scaled_dot`,
calls it inside of `speaking_for`, and the other one's errors name the first.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Iterator
from typing import Any
from typing import Final

_SPEAKER: Final = contextvars.ContextVar[str | None]("speaker", default=None)


def who(name: str) -> str:
  """The function to name in an error: `name`, or what calls it."""
  return _SPEAKER.get() or name


class NotQuantizedWarning(UserWarning):
  """A product that is computed without block scales, though asked for with.

  Its text says which one, why, and what to do. `quantize_dots`, `accelerate`,
  `accept_quantized` and `quantize_params` give it:

    warnings.simplefilter("error", jp.NotQuantizedWarning)
  """


@contextlib.contextmanager
def speaking_for(name: str) -> Iterator[None]:
  """Errors of calls inside are errors of `name`'s; the innermost one counts."""
  token = _SPEAKER.set(name)
  try:
    yield
  finally:
    _SPEAKER.reset(token)


def require_function(name: str, fn: Any) -> None:
  """Raises TypeError, of the function `name`, unless `fn` can be called."""
  if not callable(fn):
    raise TypeError(
      f"{who(name)}: fn must be a function, got {fn!r}; pass the function"
      " itself, not what it returns"
    )


_TRACE_LEVEL: Final = "different trace level"


@contextlib.contextmanager
def explaining_nnx(name: str, remedy: str) -> Iterator[None]:
  """Explains flax's errors that a variable of nnx is of another trace.

  Transforms of nnx write to variables of modules. flax refuses it if a
  transform of this package stands between them and the variables.

  Args:
    name: the function of this package.
    remedy: the order that works.
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
      f" were made outside of it, got {type(error).__name__}. {remedy}"
    ) from error
