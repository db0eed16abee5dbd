# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parses JSON of untrusted files, with limits on size and memory."""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any
from typing import Final

from jaxplugin.checkpoints import errors
from jaxplugin.core import strict_json

# The safetensors package has the same limit for a header.
MAX_BYTES: Final = 100_000_000
# Limit on objects, lists and their items, counted by braces, brackets and
# commas. Python uses up to 200 bytes for an item of 3 bytes of text, so 400 MB.
# The header of a tensor has about ten.
MAX_ITEMS: Final = 2_000_000
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def parse_object(where: str, data: bytes | str) -> dict[str, Any]:
  """Returns a JSON object, whose names must be unique.

  Raises:
    CheckpointError: If it is not an object, or has more than `MAX_ITEMS` items.
  """
  items = _count_items(data)
  if items > MAX_ITEMS:
    raise errors.CheckpointError(
      f"{where}: it must have at most {MAX_ITEMS} objects, lists and commas,"
      f" got {items}"
    )
  try:
    result = strict_json.loads(data)
  except ValueError as error:
    raise errors.CheckpointError(
      f"{where}: it must be JSON in UTF-8: {error}"
    ) from None
  if not isinstance(result, dict):
    raise errors.CheckpointError(
      f"{where}: it must be a JSON object, got {type(result).__name__}"
    )
  return result


def _count_items(data: bytes | str) -> int:
  """Returns the number of braces, brackets and commas outside of strings.

  Those in strings count too if all together are few.
  """
  if isinstance(data, str):
    data = data.encode(errors="surrogatepass")
  items = sum(data.count(sign) for sign in (b"{", b"[", b","))
  if items <= MAX_ITEMS:
    return items
  # One string at a time, to save memory.
  for string in _STRING.finditer(data):
    text = string.group()
    items -= len(text) - len(text.translate(None, b"{[,"))
  return items


def read_object(path: pathlib.Path) -> dict[str, Any]:
  """Returns the JSON object of a file of at most `MAX_BYTES`.

  Raises:
    OSError: If the file cannot be read.
    CheckpointError: If it is longer, does not have a JSON object, or is not a
      regular file.
  """
  with errors.open_regular(path) as file:
    size = os.fstat(file.fileno()).st_size
    if size > MAX_BYTES:
      rule = f"it must have at most {MAX_BYTES} bytes, got {size}"
      raise errors.fault(path, rule)
    return parse_object(str(path), file.read(MAX_BYTES))
