# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is measured: rows by name, sizes of real layers, pairs of formats."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Final
from typing import Literal

import numpy as np

from jaxplugin.core import formats

Kind = Literal["dot", "quantize", "dequantize", "startup"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One comparison.

  Attributes:
    kind: "dot" multiplies (m, k) by (n, k); "quantize" and "dequantize" take
      (m, k), n is 0; "startup" has no sizes.
    m, n, k: sizes.
    layer: of what model it is, for people.
  """

  kind: Kind
  m: int = 0
  n: int = 0
  k: int = 0
  layer: str = ""

  def __str__(self) -> str:
    if self.kind == "dot":
      return f"{self.m}x{self.n}x{self.k}"
    if self.kind == "startup":
      return self.kind
    return f"{self.kind}:{self.m}x{self.k}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
  """The formats of lhs and rhs; None is a plain float, of dtype `plain`."""

  name: str
  lhs: formats.BlockFormat | None
  rhs: formats.BlockFormat | None
  plain: np.dtype

  @property
  def block_size(self) -> int:
    sizes = [f.block_size for f in (self.lhs, self.rhs) if f is not None]
    return max(sizes)

  def __str__(self) -> str:
    return self.name


PLAIN_DTYPES: Final = {
  "bf16": formats.BF16,
  "f16": np.dtype(np.float16),
  "f32": np.dtype(np.float32),
}

# (name, n, k) of the products with weights in one layer of each model, from
# the models' published configurations; projections that read one input are
# one product.
LAYERS: Final[dict[str, tuple[tuple[str, int, int], ...]]] = {
  "llama3-8b": (
    ("qkv", 6144, 4096),
    ("attention out", 4096, 4096),
    ("gate and up", 28672, 4096),
    ("down", 4096, 14336),
  ),
  "llama3-70b": (
    ("qkv", 10240, 8192),
    ("attention out", 8192, 8192),
    ("gate and up", 57344, 8192),
    ("down", 8192, 28672),
  ),
  "gpt-oss": (
    ("qkv", 5120, 2880),
    ("attention out", 2880, 4096),
    ("an expert's gate and up", 5760, 2880),
    ("an expert's down", 2880, 2880),
  ),
  "minilm": (
    ("query, key or value", 384, 384),
    ("up", 1536, 384),
    ("down", 384, 1536),
  ),
}
_LAYER_ROWS: Final = (1, 16, 128)


def _dots(*sizes: tuple[int, int, int], layer: str = "") -> tuple[Row, ...]:
  return tuple(Row(kind="dot", m=m, n=n, k=k, layer=layer) for m, n, k in sizes)


def _codec(size: int) -> tuple[Row, ...]:
  return tuple(
    Row(kind=kind, m=size, k=size) for kind in ("quantize", "dequantize")
  )


_DECODE: Final = _dots(*((m, 8192, 8192) for m in (1, 4, 8, 16)))
_STARTUP: Final = (Row(kind="startup"),)
SETS: Final[dict[str, tuple[Row, ...]]] = {
  **{
    model: tuple(
      Row(kind="dot", m=m, n=n, k=k, layer=f"{model} {name}")
      for name, n, k in layers
      for m in _LAYER_ROWS
    )
    for model, layers in LAYERS.items()
  },
  "decode": _DECODE,
  "square": _dots(*((size,) * 3 for size in (1024, 2048, 4096))),
  "quantize": _codec(4096),
  "startup": _STARTUP,
  # What the package's speed targets are stated for.
  "cpu-table": (
    *_dots(
      (1, 4096, 4096),
      (1, 8192, 8192),
      (16, 4096, 4096),
      (128, 4096, 4096),
      (1024, 1024, 1024),
      (2048, 2048, 2048),
    ),
    *_codec(4096),
  ),
  "gpu-table": (
    *_DECODE,
    *_dots(*((m, 8192, 8192) for m in (64, 128, 256, 512, 8192))),
    *_codec(8192),
  ),
  # Seconds, to see that everything runs.
  "quick": (*_dots((1, 1024, 1024), (64, 512, 512)), *_codec(1024)),
}

_DOT: Final = re.compile(r"(\d+)x(\d+)x(\d+)")
_CODEC: Final = re.compile(r"(quantize|dequantize):(\d+)x(\d+)")


def parse_rows(text: str, m: Sequence[int] | None = None) -> tuple[Row, ...]:
  """The rows that a comma-separated list of sets and sizes names, each once.

  Args:
    text: names of `SETS`, "MxNxK", "quantize:MxK", "dequantize:MxK".
    m: replaces m of every product.

  Raises:
    ValueError: an item is none of these; lists what is known.
  """
  rows: list[Row] = []
  for item in _items("--shapes", text):
    rows += SETS[item] if item in SETS else [_parse_row(item)]
  if m is not None:
    rows = [
      dataclasses.replace(row, m=size)
      for row in rows
      for size in (m if row.kind == "dot" else (row.m,))
    ]
  # Of rows that differ in their layer's name only, the first.
  unique: dict[str, Row] = {}
  for row in rows:
    unique.setdefault(str(row), row)
  return tuple(unique.values())


def _parse_row(item: str) -> Row:
  dot = _DOT.fullmatch(item)
  codec = _CODEC.fullmatch(item)
  if dot:
    m, n, k = map(int, dot.groups())
    row = Row(kind="dot", m=m, n=n, k=k)
  elif codec:
    m, k = int(codec[2]), int(codec[3])
    row = Row(kind=codec[1], m=m, k=k)  # type: ignore[arg-type]
  else:
    raise ValueError(
      f"bench: unknown shape {item!r}; known: {', '.join(SETS)}, sizes MxNxK"
      " (as 512x4096x4096), quantize:MxK and dequantize:MxK"
    )
  if 0 in (row.m, row.k) or (dot and row.n == 0):
    raise ValueError(f"bench: sizes must be at least 1, got {item!r}")
  return row


def parse_sizes(option: str, text: str) -> tuple[int, ...]:
  """Positive integers, separated by commas."""
  items = _items(option, text)
  if not all(item.isdecimal() and int(item) > 0 for item in items):
    raise ValueError(
      f"bench: {option} must be positive integers as 1,4,16, got {text!r}"
    )
  return tuple(map(int, items))


def parse_pairs(text: str) -> tuple[Pair, ...]:
  """The pairs of formats that a comma-separated list names.

  "nvfp4" is a pair of equal ones, "bf16xnvfp4" has a plain lhs.

  Raises:
    ValueError: an item is no pair; lists what is known.
  """
  return tuple(dict.fromkeys(map(_parse_pair, _items("--formats", text))))


def _parse_pair(item: str) -> Pair:
  by_name = {format.name: format for format in formats.KNOWN}
  known = {**dict.fromkeys(PLAIN_DTYPES), **by_name}
  sides = None
  if item in by_name:
    sides = item, item
  for match in re.finditer("x", item):
    halves = item[: match.start()], item[match.end() :]
    if halves[0] in known and halves[1] in known:
      sides = halves
  if sides is None:
    raise ValueError(
      f"bench: unknown formats {item!r}; known: {', '.join(by_name)}, and two"
      f" joined by x, of which one may be {', '.join(PLAIN_DTYPES)} (as"
      " bf16xnvfp4)"
    )
  plain = [side for side in sides if side in PLAIN_DTYPES]
  if len(plain) == 2:
    raise ValueError(f"bench: one side must be quantized, got {item!r}")
  name = sides[0] if sides[0] == sides[1] else "x".join(sides)
  return Pair(
    name=name,
    lhs=known[sides[0]],
    rhs=known[sides[1]],
    plain=PLAIN_DTYPES[plain[0]] if plain else formats.BF16,
  )


def _items(option: str, text: str) -> list[str]:
  items = [item.strip().lower() for item in text.split(",")]
  if not all(items):
    raise ValueError(f"bench: {option} has an empty item: {text!r}")
  return items


def check(row: Row, pair: Pair) -> None:
  """Raises ValueError where a row cannot have these formats."""
  if row.kind != "startup" and row.k % pair.block_size:
    raise ValueError(
      f"bench: k of {row} must be a multiple of {pair.block_size} for {pair},"
      f" got k={row.k}"
    )
