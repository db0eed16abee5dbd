# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Who an error speaks for: the function that the user called.

A function that is made of another one, as `linear` is of `block_scaled_dot`,
calls it inside of `speaking_for`, and the other one's errors name the first.
"""

from __future__ import annotations

import contextlib
import contextvars
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
