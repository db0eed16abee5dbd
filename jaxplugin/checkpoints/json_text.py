# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""JSON of files that nobody vouches for."""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any
from typing import Final

from jaxplugin.checkpoints import errors
from jaxplugin.core import strict_json

# What the safetensors package takes for a header, too.
MAX_BYTES: Final = 100_000_000
# Objects, lists and what they hold, by the signs before these: Python takes up
# to 200 bytes for one of 3 bytes of text, so 400 MB. A tensor has about ten.
MAX_ITEMS: Final = 2_000_000
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def parse_object(where: str, data: bytes | str) -> dict[str, Any]:
  """A JSON object, of plain names that are there once.

  Raises:
    CheckpointError: it is none, or has more than `MAX_ITEMS`; `where` names the
      file and the part.
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
  """The signs before objects, lists and what they hold; of strings, if few."""
  if isinstance(data, str):
    data = data.encode(errors="surrogatepass")
  items = sum(data.count(sign) for sign in (b"{", b"[", b","))
  if items <= MAX_ITEMS:
    return items
  # One string after another, so that they do not take memory together.
  for string in _STRING.finditer(data):
    text = string.group()
    items -= len(text) - len(text.translate(None, b"{[,"))
  return items


def read_object(path: pathlib.Path) -> dict[str, Any]:
  """The JSON object of a file of at most `MAX_BYTES`.

  Raises:
    OSError: the file cannot be read.
    CheckpointError: it is longer, holds no JSON object, or is not a regular
      file.
  """
  with errors.open_regular(path) as file:
    size = os.fstat(file.fileno()).st_size
    if size > MAX_BYTES:
      raise errors.CheckpointError(
        f"{path}: it must have at most {MAX_BYTES} bytes, got {size}"
      )
    return parse_object(str(path), file.read(MAX_BYTES))
