# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Strict parser for JSON of untrusted files."""

from __future__ import annotations

import json
import math
from typing import Any, Final, NoReturn

_MAX_DIGITS: Final = 20  # digits of 2^64


def loads(data: bytes | str, *, allow_nonfinite: bool = False) -> Any:
  """Returns the value of a JSON text in UTF-8.

  Args:
    allow_nonfinite: accepts NaN, Infinity and -Infinity, which Python writes.

  Raises:
    ValueError: If the text is not JSON (RFC 8259), which has neither NaN nor
      Infinity. Also if an object has a name twice or a name with half of a
      surrogate pair, if a number needs more than 64 bits, or if the nesting is
      too deep.
  """
  try:
    text = data.decode() if isinstance(data, bytes) else data
    return json.loads(
      text,
      object_pairs_hook=_unique,
      parse_constant=float if allow_nonfinite else _refuse,
      parse_float=_real,
      parse_int=_whole,
    )
  except RecursionError as error:
    raise ValueError(f"its brackets are nested too deeply: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found: dict[str, Any] = {}
  for name, value in pairs:
    if name in found:
      raise ValueError(f"the name {name!r} is used twice")
    name.encode()  # raises if it has half of a surrogate pair
    found[name] = value
  return found


def _refuse(word: str) -> NoReturn:
  raise ValueError(f"{word} is not allowed in JSON")


def _whole(digits: str) -> int:
  if len(digits) > _MAX_DIGITS:
    raise ValueError(f"a number has {len(digits)} digits")
  return int(digits)


def _real(digits: str) -> float:
  if math.isinf(number := float(digits)):
    raise ValueError("a number must fit in 64 bits")
  return number
