# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rows of the benchmark: named sets, sizes of real layers, formats."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np

from jaxplugin.core import formats

Kind = Literal[
  "dot", "decoder", "training", "experts", "quantize", "dequantize"
]

FORMATS: Final = "mxfp8,mxfp4,nvfp4"
# Weight-only quantization.
ONE_SIDED: Final = "f32xmxfp8,f32xnvfp4,bf16xmxfp8,bf16xmxfp4,bf16xnvfp4"
# Weight-only quantization of experts, as in gpt-oss.
_EXPERTS_FORMATS: Final = (
  "bf16xmxfp8,bf16xmxfp4,bf16xnvfp4,f32xmxfp8,f32xmxfp4,f32xnvfp4"
)
# Fewer formats for a decoder's step, which takes half a minute to measure.
_ONE_SIDED_STEPS: Final = "f32xmxfp8,f32xnvfp4"
# Number of channels of an attention head.
HEAD_SIZE: Final = 64
# The text of each kind of row. The "x1" of a decoder with m = 1 is left out.
_SIZES: Final[dict[Kind, str]] = {
  "dot": "{m}x{n}x{k}",
  "decoder": "decoder:{layers}x{k}x{n}x{m}",
  "training": "training:{m}x{k}x{n}",
  "experts": "experts:{m}x{top}of{experts}x{n}x{k}",
  "quantize": "quantize:{m}x{k}",
  "dequantize": "dequantize:{m}x{k}",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchRow:
  """One comparison.

  Attributes:
    kind: the computation.
      "dot" multiplies (m, k) by (n, k).
      "decoder" is a step of `layers` layers, for one token of each of m
        sequences. A layer has k channels, and its MLP has n channels.
      "training" is the gradient of a block, for m tokens. The block has k
        channels, and its MLP has n channels.
      "experts" multiplies each of m tokens with `top` of `experts` weights
        (n, k).
      "quantize" and "dequantize" convert (m, k), and n is 0.
    m, n, k: sizes.
    layers: number of layers of a decoder.
    experts: number of experts.
    top: number of experts for each token.
    layer: the model and layer with these sizes.
    formats: the default formats.
  """

  kind: Kind
  m: int
  n: int = 0
  k: int
  layers: int = 0
  experts: int = 0
  top: int = 0
  layer: str = ""
  formats: str = FORMATS

  @property
  def is_product(self) -> bool:
    """Whether the row multiplies activations with weights."""
    return self.kind in ("dot", "decoder", "training", "experts")

  def __str__(self) -> str:
    text = _SIZES[self.kind].format(**dataclasses.asdict(self))
    return text.removesuffix("x1") if self.kind == "decoder" else text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
  """The formats of lhs and rhs. None is unquantized, of dtype `plain`."""

  name: str
  lhs: formats.BlockFormat | None
  rhs: formats.BlockFormat | None
  plain: np.dtype

  @property
  def block_size(self) -> int:
    """Size of the largest block that must be whole; 1 if all may be short."""
    sides = (side for side in (self.lhs, self.rhs) if side is not None)
    return max(1 if f.may_be_short else f.block_size for f in sides)

  @property
  def is_fp4(self) -> bool:
    """Whether both sides are FP4, whose products integers can hold."""
    return all(f is not None and f.is_fp4 for f in (self.lhs, self.rhs))

  def __str__(self) -> str:
    return self.name


PLAIN_DTYPES: Final = {
  "bf16": formats.BF16,
  "f16": np.dtype(np.float16),
  "f32": np.dtype(np.float32),
}

# (name, n, k) of the weights in one layer of each model, from the models'
# published configurations. Weights with the same input are concatenated.
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

# (experts, experts for each token, n and k of an expert's gate and up, n and k
# of its down), from the models' published configurations.
EXPERTS: Final = {
  "gpt-oss-20b": (32, 4, (5760, 2880), (2880, 2880)),
  "qwen3-30b": (128, 8, (1536, 2048), (2048, 768)),
  "mixtral-8x7b": (8, 2, (28672, 4096), (4096, 14336)),
}
_TOKENS: Final = (1, 8, 64, 512)


def _dots(*sizes: tuple[int, int, int]) -> tuple[BenchRow, ...]:
  return tuple(BenchRow(kind="dot", m=m, n=n, k=k) for m, n, k in sizes)


def _also(formats: str, *rows: BenchRow) -> tuple[BenchRow, ...]:
  """Returns the rows with additional formats."""
  return tuple(
    dataclasses.replace(row, formats=f"{row.formats},{formats}") for row in rows
  )


def _codec(size: int) -> tuple[BenchRow, ...]:
  return tuple(
    BenchRow(kind=kind, m=size, k=size) for kind in ("quantize", "dequantize")
  )


# Four layers with the widths of TinyLlama 1.1B (arXiv:2401.02385).
_DECODER: Final = BenchRow(
  kind="decoder", m=1, n=5632, k=2048, layers=4, layer="as TinyLlama's"
)
_TRAINING: Final = BenchRow(kind="training", m=512, n=2048, k=512)
_DECODE: Final = _dots(*((m, 8192, 8192) for m in (1, 4, 8, 16)))
SETS: Final[dict[str, tuple[BenchRow, ...]]] = {
  **{
    model: tuple(
      BenchRow(kind="dot", m=m, n=n, k=k, layer=f"{model} {name}")
      for name, n, k in layers
      for m in _LAYER_ROWS
    )
    for model, layers in LAYERS.items()
  },
  **{
    f"{model}-moe": tuple(
      BenchRow(
        kind="experts",
        m=m,
        n=n,
        k=k,
        experts=experts,
        top=top,
        layer=f"{model} {name}",
        formats=_EXPERTS_FORMATS,
      )
      for name, (n, k) in (("gate and up", gate_up), ("down", down))
      for m in _TOKENS
    )
    for model, (experts, top, gate_up, down) in EXPERTS.items()
  },
  "decode": _DECODE,
  "square": _dots(*((size,) * 3 for size in (1024, 2048, 4096))),
  "decoder": (_DECODER,),
  "training": (_TRAINING,),
  "quantize": _codec(4096),
  # The rows of the package's speed targets.
  "cpu-table": (
    *_also(ONE_SIDED, *_dots((1, 4096, 4096))),
    *_dots((1, 8192, 8192)),
    *_also(ONE_SIDED, *_dots((16, 4096, 4096))),
    *_dots((128, 4096, 4096), (1024, 1024, 1024), (2048, 2048, 2048)),
    *_also(_ONE_SIDED_STEPS, _DECODER),
    *_codec(4096),
  ),
  "gpu-table": (
    *_DECODE,
    *_dots(*((m, 8192, 8192) for m in (64, 128, 256, 512, 8192))),
    *_codec(8192),
  ),
  # A check that everything runs, in seconds.
  "quick": (*_dots((1, 1024, 1024), (64, 512, 512)), *_codec(1024)),
}


def parse_rows(
  text: str, m: Sequence[int] | None = None
) -> tuple[BenchRow, ...]:
  """Returns the rows of a comma-separated list of sets and sizes, each once.

  Args:
    text: names of `SETS`, and sizes in the syntax of `_SIZES`.
    m: replaces m of all rows except "quantize" and "dequantize".

  Raises:
    ValueError: If an item is not the name of a set or valid sizes, or if `m`
      would replace nothing.
  """
  rows: list[BenchRow] = []
  for item in _items("--shapes", text):
    rows += SETS[item] if item in SETS else [_parse_row(item)]
  if m is not None:
    if not any(row.is_product for row in rows):
      raise ValueError(
        f"--m must be left out for rows without a matmul, got {text!r}. Leave"
        " it out"
      )
    rows = [
      dataclasses.replace(row, m=size)
      for row in rows
      for size in (m if row.is_product else (row.m,))
    ]
  # Keeps the first of several rows that differ only in `layer` or `formats`.
  unique: dict[str, BenchRow] = {}
  for row in rows:
    unique.setdefault(str(row), row)
  return tuple(unique.values())


def _parse_row(item: str) -> BenchRow:
  for kind, text in _SIZES.items():
    pattern = re.sub(r"{(\w+)}", r"(?P<\1>\\d+)", text)
    found = re.fullmatch(pattern, item)
    if found is None and kind == "decoder":
      found = re.fullmatch(pattern, f"{item}x1")
    if found is not None:
      break
  else:
    raise ValueError(
      f"unknown shape {item!r}; known: {', '.join(SETS)}, sizes MxNxK"
      " (as 512x4096x4096), decoder:LAYERSxCHANNELSxHIDDEN,"
      " training:TOKENSxCHANNELSxHIDDEN, experts:TOKENSxTOPofEXPERTSxNxK,"
      " quantize:MxK and dequantize:MxK"
    )
  sizes: dict[str, Any] = {n: int(x) for n, x in found.groupdict().items()}
  if 0 in sizes.values():
    raise ValueError(f"sizes must be at least 1, got {item!r}")
  formats = _EXPERTS_FORMATS if kind == "experts" else FORMATS
  row = BenchRow(kind=kind, formats=formats, **sizes)
  if row.top > row.experts:
    raise ValueError(
      f"a token must have at most {row.experts} experts, got {item!r}"
    )
  if kind in ("decoder", "training") and row.k % HEAD_SIZE:
    what = "decoder" if kind == "decoder" else "block"
    raise ValueError(
      f"channels of a {what} must be a multiple of {HEAD_SIZE}, got"
      f" {row.k} in {item!r}"
    )
  return row


def parse_m(text: str) -> tuple[int, ...]:
  """Returns the positive integers of a comma-separated list, for `--m`."""
  items = _items("--m", text)
  if not all(item.isdecimal() and int(item) > 0 for item in items):
    raise ValueError(f"--m must be positive integers as 1,4,16, got {text!r}")
  return tuple(map(int, items))


def out_dtype(name: str | None, *, is_gpu: bool) -> np.dtype:
  """Returns the dtype of results; None is bf16 on a GPU and f32 on a CPU."""
  return PLAIN_DTYPES[name or ("bf16" if is_gpu else "f32")]


def parse_pairs(text: str) -> tuple[Pair, ...]:
  """Returns the pairs of formats of a comma-separated list.

  "nvfp4" is the format of both sides. "bf16xnvfp4" has an unquantized lhs.

  Raises:
    ValueError: If an item is not a pair of formats.
  """
  return tuple(dict.fromkeys(map(_parse_pair, _items("--formats", text))))


def pairs_of(
  rows: Sequence[BenchRow], pairs: Sequence[Pair] | None
) -> list[tuple[BenchRow, Pair]]:
  """Returns each row with each of `pairs`; None is the formats of each row.

  Only matmuls have an unquantized side, or two formats.

  Raises:
    ValueError: If a row does not support the formats.
  """
  found = [
    (row, pair)
    for row in rows
    for pair in (parse_pairs(row.formats) if pairs is None else pairs)
    if row.is_product or pair.lhs == pair.rhs
  ]
  if not found:
    raise ValueError(
      f"a format of {', '.join(map(str, rows))} must be of both sides, got"
      f" {', '.join(map(str, pairs or ()))}. Pass one such as nvfp4"
    )
  for row, pair in found:
    check(row, pair)
  return found


def _parse_pair(item: str) -> Pair:
  by_name = {format.name: format for format in formats.NAMED}
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
      f"unknown formats {item!r}; known: {', '.join(by_name)}, and pairs"
      " joined by x such as bf16xnvfp4, where one format may be"
      f" {', '.join(PLAIN_DTYPES)}"
    )
  plain = [side for side in sides if side in PLAIN_DTYPES]
  if len(plain) == 2:
    raise ValueError(f"one side must be quantized, got {item!r}")
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
    raise ValueError(f"{option} has an empty item: {text!r}")
  return items


def check(row: BenchRow, pair: Pair) -> None:
  """Raises ValueError if a row does not support the formats."""
  if row.kind in ("decoder", "experts") and pair.rhs is None:
    raise ValueError(f"weights of {row} must be quantized, got {pair}")
  if row.kind == "training" and pair.name not in FORMATS.split(","):
    raise ValueError(f"formats of {row} must be among {FORMATS}, got {pair}")
  sides = [side for side in (pair.lhs, pair.rhs) if side is not None]
  if row.kind != "dot" and not all(side.is_known for side in sides):
    known = ", ".join(format.name for format in formats.KNOWN)
    raise ValueError(f"formats of {row} must be among {known}, got {pair}")
  # A layer contracts its k channels, and the n channels of its MLP.
  for k in (row.k, row.n) if row.kind in ("decoder", "training") else (row.k,):
    if k % pair.block_size:
      raise ValueError(
        f"k of {row} must be a multiple of {pair.block_size} for"
        f" {pair}, got k={k}"
      )
