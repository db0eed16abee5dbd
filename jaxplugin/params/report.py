# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The report of `quantize_params`: format, bytes and reason of each array."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from jaxplugin.core import formats


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayReport:
  """One array of a tree.

  Attributes:
    path: its name.
    shape: its shape in the model, whatever order it is stored in.
    dtype: name of its element type before quantization.
    format: its format; None if it stays unquantized.
    contracting: contracting dimensions of its matmul; empty if it stays
      unquantized.
    reason: why it stays unquantized; "" if it does not.
    bytes_before, bytes_after: size of the array.
  """

  path: str
  shape: tuple[int, ...]
  dtype: str
  format: formats.BlockFormat | None
  contracting: tuple[int, ...]
  reason: str
  bytes_before: int
  bytes_after: int


@dataclasses.dataclass(frozen=True)
class QuantizationReport:
  """A report of all arrays of a tree, in its order; `print` shows a table.

  Attributes:
    entries: one for each array, with its path, shape, format, reason and bytes.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> dense = {"kernel": jnp.ones((64, 128)), "bias": jnp.ones(128)}
    >>> params_q, report = jp.quantize_params({"dense": dense}, "mxfp8")
    >>> print(report.bytes_before, report.bytes_after)
    33280 8960
    >>> [entry.path for entry in report.quantized]
    ['dense/kernel']
  """

  entries: tuple[ArrayReport, ...]

  @property
  def quantized(self) -> tuple[ArrayReport, ...]:
    """The entries of quantized arrays."""
    return tuple(e for e in self.entries if e.format is not None)

  @property
  def left(self) -> tuple[ArrayReport, ...]:
    """The entries of arrays that stay unquantized."""
    return tuple(e for e in self.entries if e.format is None)

  @property
  def bytes_before(self) -> int:
    """The bytes of all arrays before quantization."""
    return sum(entry.bytes_before for entry in self.entries)

  @property
  def bytes_after(self) -> int:
    """The bytes of all arrays after quantization."""
    return sum(entry.bytes_after for entry in self.entries)

  def __str__(self) -> str:
    """Returns the table."""
    count = len(self.quantized)
    lines = [
      f"{count} of {len(self.entries)} arrays quantized:"
      f" {_bytes(self.bytes_before)} before, {_bytes(self.bytes_after)} after"
    ]
    for name, entries in (("quantized", self.quantized), ("left", self.left)):
      if entries:
        lines += ["", f"{name}:", *_table(entries)]
    return "\n".join(lines)


def _bytes(count: int) -> str:
  for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
    if count >= size:
      return f"{count / size:.1f} {unit}"
  return f"{count} bytes"


def _table(entries: Sequence[ArrayReport]) -> list[str]:
  """Returns a line for each entry, merged over numbers of layers."""
  groups: dict[tuple[str, ...], list[str]] = {}
  for entry in entries:
    what = entry.reason
    if entry.format is not None:
      what = f"{entry.format}, contracts {_dims(entry.contracting)}"
    path = re.sub(r"\d+", "*", entry.path)
    shape = f"{entry.dtype}{list(entry.shape)}"
    groups.setdefault((path, shape, what), []).append(entry.path)
  rows = [
    (path, f"x {len(paths)}", shape, what)
    if len(paths) > 1
    else (paths[0], "", shape, what)
    for (path, shape, what), paths in groups.items()
  ]
  widths = [max(len(row[i]) for row in rows) for i in range(3)]
  return [
    "  "
    + "  ".join(
      text.ljust(width) for text, width in zip(row, widths, strict=False)
    )
    + f"  {row[3]}"
    for row in rows
  ]


def _dims(contracting: Sequence[int]) -> str:
  word = "dimension" if len(contracting) == 1 else "dimensions"
  return f"{word} {', '.join(map(str, contracting))}"
