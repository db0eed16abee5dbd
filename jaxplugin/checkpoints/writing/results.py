# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The result of `quantize`: a table of tensors, and JSON."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Iterator
from collections.abc import Mapping

from jaxplugin.checkpoints import names as naming
from jaxplugin.checkpoints import records
from jaxplugin.core import formats
from jaxplugin.printing import console


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized:
  """The result of `quantize`: a decision for each tensor; `str` is a table.

  Attributes:
    path: the target.
    layout: the layout of the target.
    format: the format of its weights.
    decisions: whether and how each tensor of the source is quantized.
    shared: names of weights that share a global scale.
    copied: other files that are copied.
    left: other files that are not copied.
    is_written: whether the target was written.
    errors: norm of the error over the norm of the weight, by names of verified
      weights; None without verify.
    nonfinite: weights with NaNs or infinities. They are written under
      allow_nonfinite; their bits are compared, and they do not count as
      verified.

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> from safetensors import numpy as safetensors
    >>> weights = {"up.weight": np.ones((32, 64), np.float32)}
    >>> safetensors.save_file(weights, "model.safetensors")
    >>> done = jp.checkpoints.quantize(
    ...   "model.safetensors", "quantized.safetensors", "mxfp8", dry_run=True)
    >>> print(done.nbytes_before, done.nbytes, done.is_written)
    8192 2112 False
  """

  path: pathlib.Path
  layout: str
  format: formats.BlockFormat
  decisions: tuple[records.TensorDecision, ...]
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
    """Bytes of the target's tensors."""
    return sum(x.nbytes for x in self.decisions)

  def __str__(self) -> str:
    """Returns a table of tensors, and why some stay unquantized."""
    return console.text(self.parts())

  def parts(self) -> Iterator[console.Part]:
    """Yields the parts of the report that `str` prints."""
    yield f"{self.path}: {self.layout}, {self.format}"
    found = self._rows()
    header = ["format", "shape", "before", "after", "count", "name"]
    if self.errors:
      header.insert(-1, "error")
    yield console.table(
      header,
      [[row[title] for title in header] for row in found],
      names=("name",),
      figures=("shape", "before", "after", "count", "error"),
    )
    yield self._summary()
    for reason in dict.fromkeys(row["reason"] for row in found):
      names = [row["name"] for row in found if row["reason"] == reason]
      if reason:
        yield f"not quantized, {reason}: {', '.join(dict.fromkeys(names))}"
    for alike, count in _likes(self.shared).items():
      yield f"one global scale: {', '.join(alike)} ({count} times)"
    if self.copied:
      yield f"copied: {', '.join(map(naming.printable, self.copied))}"
    if self.left:
      yield f"not copied: {', '.join(map(naming.printable, self.left))}"
    if self.errors:
      yield f"verified: {len(self.errors)} weights, bit by bit"
    if self.nonfinite:
      bad = ", ".join(map(naming.printable, self.nonfinite))
      yield f"not verified, because of NaNs or infinities: {bad}"
    if not self.is_written:
      yield "nothing was written"

  def to_json(self) -> str:
    """Returns the report as JSON, with a row for each tensor."""
    return json.dumps(
      {
        "path": str(self.path),
        "layout": self.layout,
        "format": str(self.format),
        "bytes_before": self.nbytes_before,
        "bytes": self.nbytes,
        "tensors": [
          {
            "name": decision.tensor.name,
            "shape": decision.tensor.logical_shape,
            "format": self._format_of(decision),
            "bytes_before": decision.tensor.nbytes,
            "bytes": decision.nbytes,
            "reason": decision.reason,
            "error": (self.errors or {}).get(decision.tensor.name),
          }
          for decision in self.decisions
        ],
        "shared": self.shared,
        "copied": list(map(str, self.copied)),
        "not_copied": list(map(str, self.left)),
        "not_finite": self.nonfinite,
        "is_written": self.is_written,
      },
      indent=2,
    )

  def _format_of(self, decision: records.TensorDecision) -> str:
    return str(self.format) if decision.weight else decision.tensor.type_name

  def _rows(self) -> list[dict[str, str]]:
    """Returns a row for each group of similar tensors."""
    alike: dict[tuple[str, ...], list[records.TensorDecision]] = {}
    for decision in self.decisions:
      key = (
        self._format_of(decision),
        str(list(decision.tensor.logical_shape)),
        naming.starred(decision.tensor.name),
        decision.reason,
      )
      alike.setdefault(key, []).append(decision)
    return [
      {
        "format": format,
        "shape": shape,
        "before": _size(sum(x.tensor.nbytes for x in its)),
        "after": _size(sum(x.nbytes for x in its)),
        "count": str(len(its)),
        "error": self._error(its),
        "name": name,
        "reason": reason,
      }
      for (format, shape, name, reason), its in alike.items()
    ]

  def _error(self, its: list[records.TensorDecision]) -> str:
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


def _size(num_bytes: int) -> str:
  from rich import filesize

  return filesize.decimal(num_bytes)


def _likes(
  groups: tuple[tuple[str, ...], ...],
) -> dict[tuple[str, ...], int]:
  return dict(
    collections.Counter(tuple(map(naming.starred, names)) for names in groups)
  )
