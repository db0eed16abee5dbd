# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What became of each tensor, as a table."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Mapping

from jaxplugin.checkpoints import names as naming
from jaxplugin.checkpoints.writing import selection
from jaxplugin.core import formats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized:
  """What `quantize` did, or would do; `str` is a table.

  Attributes:
    path: the target.
    layout: whose layout it has.
    format: that of its weights.
    decisions: what becomes of each tensor of the source.
    shared: names of weights that share a global scale.
    copied: other files that are copied.
    left: other files that are not.
    is_written: whether it was.
    errors: of each verified weight, the norm of its error over its own; None
      where nothing was verified.
    nonfinite: weights with NaNs or infinities in the source, which are written
      under allow_nonfinite and never are verified. Their bits were compared.
  """

  path: pathlib.Path
  layout: str
  format: formats.BlockFormat
  decisions: tuple[selection.Decision, ...]
  shared: tuple[tuple[str, ...], ...] = ()
  copied: tuple[pathlib.PurePath, ...] = ()
  left: tuple[pathlib.PurePath, ...] = ()
  is_written: bool = False
  errors: Mapping[str, float] | None = None
  nonfinite: tuple[str, ...] = ()

  @property
  def nbytes_before(self) -> int:
    """Bytes of the source's tensors."""
    return sum(x.tensor.nbytes for x in self.decisions)

  @property
  def nbytes(self) -> int:
    """Bytes of the target's."""
    return sum(x.nbytes for x in self.decisions)

  def __str__(self) -> str:
    """What tensors become, their shapes, bytes, numbers and names, and why."""
    lines = [f"{self.path}: {self.layout}, {self.format}"]
    lines += _aligned([_TITLES, *self._rows()])
    lines.append(self._summary())
    lines += [
      f"one global scale: {', '.join(names)} ({count} times)"
      for names, count in _likes(self.shared).items()
    ]
    if self.copied:
      lines.append(f"copied: {', '.join(map(naming.printable, self.copied))}")
    if self.left:
      lines.append(f"not copied: {', '.join(map(naming.printable, self.left))}")
    if self.errors:
      lines.append(f"verified: {len(self.errors)} weights, bit by bit")
    if self.nonfinite:
      bad = ", ".join(map(naming.printable, self.nonfinite))
      lines.append(f"not verified, as they have NaNs or infinities: {bad}")
    if not self.is_written:
      lines.append("nothing was written")
    return "\n".join(lines)

  def _rows(self) -> list[tuple[str, ...]]:
    """A row for like tensors."""
    rows: dict[tuple[str, ...], list[selection.Decision]] = {}
    for decision in self.decisions:
      kind = str(self.format) if decision.weight else decision.tensor.type_name
      key = (
        kind,
        str(list(decision.tensor.logical_shape)),
        naming.starred(decision.tensor.name),
        decision.reason,
      )
      rows.setdefault(key, []).append(decision)
    return [
      (
        kind,
        shape,
        f"{sum(x.tensor.nbytes for x in its):,}",
        f"{sum(x.nbytes for x in its):,}",
        str(len(its)),
        self._error(its),
        name,
        reason,
      )
      for (kind, shape, name, reason), its in rows.items()
    ]

  def _error(self, its: list[selection.Decision]) -> str:
    found = [
      self.errors[x.tensor.name]
      for x in its
      if self.errors is not None and x.tensor.name in self.errors
    ]
    return f"{max(found):.4f}" if found else "-"

  def _summary(self) -> str:
    count = sum(x.weight is not None for x in self.decisions)
    before, after = self.nbytes_before, self.nbytes
    return (
      f"{count} of {len(self.decisions)} tensors to {self.format}:"
      f" {before:,} bytes become {after:,}, {before - after:,} fewer"
    )


_TITLES = (
  *("to", "shape", "bytes", "then", "count", "error", "name", "why it stays"),
)
_NUMBERS = (2, 3, 4, 5)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return [
    "  ".join(
      cell.rjust(width) if i in _NUMBERS else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  ]


def _likes(
  groups: tuple[tuple[str, ...], ...],
) -> dict[tuple[str, ...], int]:
  return dict(
    collections.Counter(tuple(map(naming.starred, names)) for names in groups)
  )
