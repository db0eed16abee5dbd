# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of the tensors of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Final

from jaxplugin.checkpoints import names
from jaxplugin.checkpoints import records
from jaxplugin.printing import console

_FIGURES: Final = ("shape", "bytes", "count")


@dataclasses.dataclass(kw_only=True)
class TensorGroup:
  """Tensors of one layout, format and shape whose names differ in numbers.

  Attributes:
    layout: the layout; "" for plain tensors.
    format: the format or dtype.
    shape: the shape of each tensor.
    name: their names, with * for numbers.
    bytes: bytes of all tensors.
    count: number of tensors.
  """

  layout: str
  format: str
  shape: tuple[int, ...]
  name: str
  bytes: int = 0
  count: int = 0


def rows(entries: Iterable[records.Entry]) -> list[TensorGroup]:
  """Returns a row for each group of similar tensors."""
  found: dict[tuple[object, ...], TensorGroup] = {}
  for entry in entries:
    row = TensorGroup(
      layout=entry.layout or "",
      format=entry.type_name,
      shape=tuple(entry.shape),
      name=names.starred(entry.name),
    )
    key = (row.layout, row.format, row.shape, row.name)
    row = found.setdefault(key, row)
    row.bytes += entry.nbytes
    row.count += 1
  return list(found.values())


def parts(found: Sequence[TensorGroup]) -> Iterator[console.Part]:
  """Yields a table of rows, and the totals."""
  yield console.table(
    ("layout", "format", "shape", "bytes", "count", "name"),
    [
      (
        row.layout or "-",
        row.format,
        str(list(row.shape)),
        f"{row.bytes:,}",
        str(row.count),
        row.name,
      )
      for row in found
    ],
    names=("name",),
    figures=_FIGURES,
  )
  count = sum(row.count for row in found)
  yield f"{count} names, {sum(row.bytes for row in found):,} bytes"
