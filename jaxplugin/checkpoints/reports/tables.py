# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of what a checkpoint holds."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from jaxplugin.checkpoints import names
from jaxplugin.checkpoints import recognition

_TITLES = ("layout", "format", "shape", "bytes", "count", "name")

_Key = tuple[str, str, str, str]  # layout, format, shape and name


def table(entries: Iterable[recognition.Entry]) -> list[str]:
  """Returns lines: layout, format, shape, bytes and name of like entries."""
  bytes_of: collections.Counter[_Key] = collections.Counter()
  count_of: collections.Counter[_Key] = collections.Counter()
  for entry in entries:
    key = (
      entry.layout or "-",
      entry.type_name,
      str(list(entry.shape)),
      names.starred(entry.name),
    )
    bytes_of[key] += entry.nbytes
    count_of[key] += 1
  rows = [_TITLES]
  for key, count in count_of.items():
    layout, format, shape, name = key
    rows.append((layout, format, shape, f"{bytes_of[key]:,}", str(count), name))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for row in rows:
    cells = [x.ljust(w) for x, w in zip(row[:3], widths[:3], strict=True)]
    cells += [x.rjust(w) for x, w in zip(row[3:5], widths[3:5], strict=True)]
    lines.append("  ".join([*cells, row[5]]))
  return [
    *lines,
    f"{sum(count_of.values())} names, {sum(bytes_of.values()):,} bytes",
  ]
