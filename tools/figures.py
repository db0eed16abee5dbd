# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of the documentation: docs/figures/*.svg.

  python tools/figures.py

Values, scales, byte orders and times come from the package and from committed
results. A test compares the files with them. tools/decision_picture.py draws
docs/figures/dispatch.svg.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Final

# No device is needed, so JAX does not look for one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

sys.path.insert(
  0, str(pathlib.Path(__file__).resolve().parents[1] / "examples/benchmarks")
)
import drawing
import jax.numpy as jnp
import numpy as np
import readme_table

import jaxplugin as jp
from jaxplugin.lab.bench import results

ROOT: Final = pathlib.Path(__file__).resolve().parents[1]
FIGURES: Final = ROOT / "docs" / "figures"
RESULTS: Final = (
  ROOT / "examples/benchmarks/results/cpu_epyc_zen5_avx512_2_cores.json"
)
SERVING_RESULTS: Final = (
  ROOT / "examples/benchmarks/results/cpu_epyc_avx512_2_cores_serving.json"
)
# The runs of `speed_serving`.
_THREADS, _PROMPT_TOKENS, _DECODED_TOKENS = 2, 140, 128
BASELINE: Final = ROOT / "examples/numerics/numerics_baseline.json"
# Key in the baseline -> label in the figure.
SQNR_DATA: Final = (
  ("Gaussian {}", "Gaussian data"),
  ("weights {} mean", "weights of a real model"),
  ("beside outliers {}", "values next to outliers"),
)
SQNR_FORMATS: Final = (
  *("mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "nvfp4", "mxfp4"),
)
_WIDTH: Final = 920
_MARGIN: Final = 24
# 32 values on a straight line, except one larger value.
_ROW: Final = np.array(
  [
    *(0.30, -0.10, 0.65, 0.05, -0.50, 0.20, 0.90, -0.35),
    *(0.15, -0.75, 0.40, 0.10, -0.20, 0.55, -0.05, 0.25),
    *(0.80, -2.90, 0.35, 1.60, -0.45, 0.10, 2.20, -0.70),
    *(0.20, -1.10, 0.60, 5.80, -0.30, 0.90, -0.15, 1.40),
  ],
  np.float32,
)


def _title(words: str, size: int = 20) -> str:
  return drawing.text(_MARGIN, 34, words, size=size, weight="bold")


def _note(y: float, words: str, *, x: float = _MARGIN, size: int = 13) -> str:
  return drawing.text(x, y, words, size=size, color=drawing.FAINT)


def _bold(x: float, y: float, words: str, size: int = 13) -> str:
  return drawing.text(x, y, words, size=size, weight="bold")


def _dot(x: str, y: str, radius: int, color: str) -> str:
  return f"<circle cx='{x}' cy='{y}' r='{radius}' fill='{color}'/>"


def _legend(x: int, y: int, color: str, words: str) -> list[str]:
  return [
    _dot(f"{x}", f"{y}", 6, color),
    drawing.text(x + 12, y + 5, words, size=12),
  ]


def _cell(i: int, top: float, words: str, *, fill: str, size: int) -> list[str]:
  """Returns the box of value i of a row, with its text."""
  width = (_WIDTH - 2 * _MARGIN) / _ROW.size
  x = _MARGIN + i * width
  return [
    drawing.box(x, top, width - 1, 26, fill=fill, stroke=drawing.LINE),
    drawing.text(
      x + (width - 1) / 2, top + 17, words, size=size, anchor="middle"
    ),
  ]


def _factor(
  x: float, top: float, width: float, words: str, color: str
) -> list[str]:
  """Returns the box of a scale factor, with its text."""
  return [
    drawing.box(x, top, width, 22, fill=color, radius=3),
    drawing.text(
      x + width / 2,
      top + 15,
      words,
      size=11,
      color=drawing.PAPER,
      anchor="middle",
    ),
  ]


def _row(top: float, name: str, array: Any, color: str) -> list[str]:
  """Returns a row of values with the scale factor of each block below it."""
  width = (_WIDTH - 2 * _MARGIN) / _ROW.size
  values = np.asarray(array.unpack().values, np.float32)
  scales = np.asarray(array.scale, np.float32)
  block = _ROW.size // scales.size
  parts = [_bold(_MARGIN, top, name)]
  for i, value in enumerate(values):
    shade = drawing.PALE if (i // block) % 2 == 0 else "#dbe7f0"
    # Adding 0.0 turns -0 into 0.
    parts += _cell(i, top + 10, f"{value + 0.0:g}", fill=shade, size=10)
  for i, scale in enumerate(scales):
    words = f"scale factor {scale:g} ({array.scale.dtype.name}), {block} values"
    x = _MARGIN + i * block * width
    parts += _factor(x, top + 40, block * width - 1, words, color)
  return parts


def blocks() -> str:
  """Returns the figure of values, scale factors and the global scale."""
  nvfp4 = jp.quantize(jnp.asarray(_ROW), jp.NVFP4)
  mxfp4 = jp.quantize(jnp.asarray(_ROW), jp.MXFP4)
  parts = [
    _title("Blocks and scale factors"),
    _bold(_MARGIN, 64, "32 numbers (float32)"),
  ]
  for i, value in enumerate(_ROW):
    parts += _cell(i, 74, f"{value:g}", fill="none", size=9)
  parts += _row(
    130,
    "NVFP4: 4-bit values, a scale factor per 16, one global scale",
    nvfp4,
    drawing.BLUE,
  )
  scale = np.asarray(nvfp4.global_scale).item()
  words = f"global scale {scale:.3g} (float32), all values of the array"
  width = _WIDTH - 2 * _MARGIN - 1
  parts += _factor(_MARGIN, 196, width, words, drawing.GREEN)
  parts += _row(
    250,
    "MXFP4: 4-bit values, a scale factor per 32 (a power of two)",
    mxfp4,
    drawing.VERMILION,
  )
  words = "dequantized value = value x scale factor (x global scale)"
  parts.append(_note(334, words))
  return drawing.document(
    "Blocks and scale factors",
    "A row of 32 numbers, quantized to NVFP4 and to MXFP4. NVFP4 has two"
    " blocks of 16 values with a scale factor each and one global scale."
    " MXFP4 has one block of 32 values with one scale factor.",
    _WIDTH,
    350,
    parts,
  )


def _operand(
  x: float, y: float, name: str, rows: str, columns: str, blocked: str
) -> list[str]:
  """Returns a matrix [rows, columns] whose blocks lie along `blocked`."""
  sizes = {"m": 84, "k": 108, "n": 60}
  width, height = sizes[columns], sizes[rows]
  along_rows = blocked == columns
  parts = []
  step = 12
  count = (height if along_rows else width) // step
  length = 36 if (width if along_rows else height) >= 72 else 30
  pieces = (width if along_rows else height) // length
  for i in range(count):
    for j in range(pieces):
      shade = "#8fc1e3" if j % 2 == 0 else "#d3e6f4"
      left, down = (
        (j * length, i * step) if along_rows else (i * step, j * length)
      )
      size = (length, step) if along_rows else (step, length)
      parts.append(
        drawing.box(x + left, y + down, size[0] - 1, size[1] - 1, fill=shade)
      )
  parts.append(_bold(x, y - 8, f"{name} [{rows}, {columns}]"))
  words = f"blocks along {blocked}"
  parts.append(_note(y + height + 16, words, x=x, size=11))
  return parts


def axes() -> str:
  """Returns the figure of the blocked axis in each of the three matmuls."""
  rows = (
    ("forward", "y = x @ w", ("x", "m", "k"), ("w", "k", "n"), "k"),
    ("dgrad", "dx = dy @ w.T", ("dy", "m", "n"), ("w", "k", "n"), "n"),
    ("wgrad", "dw = x.T @ dy", ("x", "m", "k"), ("dy", "m", "n"), "m"),
  )
  title = "Blocks lie along the contracting dimension"
  parts = [_title(title)]
  for i, (name, formula, lhs, rhs, contracting) in enumerate(rows):
    x = _MARGIN + i * 300
    parts.append(_bold(x, 70, name, size=15))
    parts.append(drawing.text(x, 90, formula))
    parts.append(_note(110, f"contracts {contracting}", x=x, size=12))
    parts += _operand(x, 146, *lhs, contracting)
    parts += _operand(x + 140, 146, *rhs, contracting)
  words = (
    "Each array takes part in two matmuls that contract different dimensions,"
    " so it is quantized twice."
  )
  parts.append(_note(312, words))
  return drawing.document(
    title,
    "Three matmuls of a layer y = x @ w. The forward matmul contracts k: x and"
    " w have blocks along k. dgrad contracts n: dy and w have blocks along n."
    " wgrad contracts m: x and dy have blocks along m.",
    _WIDTH,
    330,
    parts,
  )


def swizzle() -> str:
  """Returns the figure of the 128 x 4 tile of scale factors."""
  # Scale factor i of the linear tile, row i // 4 and column i % 4, is stored at
  # the position where i is found in the swizzled bytes. A byte holds half of i.
  index = np.arange(512, dtype=np.uint16).reshape(128, 4)
  low, high = (
    np.asarray(jp.swizzle_scale(jnp.asarray(part.astype(np.uint8)))).reshape(-1)
    for part in (index & 255, index >> 8)
  )
  order = low.astype(int) + 256 * high.astype(int)
  colors = (drawing.BLUE, drawing.ORANGE, drawing.GREEN, drawing.PURPLE)
  parts = [
    _title("A swizzled tile: 128 rows, 4 scale factors a row"),
    _bold(_MARGIN, 70, "linear: [128, 4]"),
    _bold(330, 70, "swizzled: 512 bytes, 16 a line"),
  ]
  for row in range(128):
    y = 84 + row * 3
    parts.append(drawing.box(_MARGIN + 80, y, 96, 2.6, fill=colors[row // 32]))
  for group in range(4):
    words = f"{32 * group} to {32 * group + 31}"
    parts.append(_note(134 + group * 96, words, size=12))
  for position, source in enumerate(order):
    row, column = divmod(int(source), 4)
    line, place = divmod(position, 16)
    x, y = 380 + place * 32, 84 + line * 12
    parts.append(drawing.box(x, y, 31, 11, fill=colors[row // 32]))
    parts.append(
      drawing.text(
        x + 15.5,
        y + 9,
        f"{row},{column}",
        size=8,
        color=drawing.INK if row // 32 % 2 else drawing.PAPER,
        anchor="middle",
      )
    )
  for line in (0, 15, 31):
    parts.append(
      drawing.text(
        372,
        84 + line * 12 + 9,
        f"byte {16 * line}",
        size=10,
        color=drawing.FAINT,
        anchor="end",
      )
    )
  words = "byte of (row, column) = 16 (row mod 32) + 4 (row div 32) + column"
  parts.append(_note(492, words))
  return drawing.document(
    "A swizzled tile of scale factors",
    "Scale factors of 128 rows and 4 columns become 32 lines of 16 bytes. A"
    " line holds the 4 scale factors of rows r, r + 32, r + 64 and r + 96.",
    _WIDTH,
    508,
    parts,
  )


def speed_cpu() -> str:
  """Returns the plot of README.md: speedup over the faster plain matmul."""
  times = readme_table.times(results.read(RESULTS))
  colors = {
    "mxfp8": drawing.BLUE,
    "mxfp4": drawing.VERMILION,
    "nvfp4": drawing.GREEN,
  }
  left, right, top, step, most = 200, 60, 96, 40, 7.0
  scale = (_WIDTH - left - right) / most
  height = top + len(times) * step + 46
  parts = [
    _title(
      "Quantized matmuls are fastest where reading weights is the limit", 18
    ),
    _note(
      56,
      "Speedup over the faster of XLA's f32 and bf16; 2 Zen 5 cores, medians",
      size=12,
    ),
  ]
  for i, (name, color) in enumerate(colors.items()):
    parts += _legend(left + i * 100, 75, color, name.upper())
  bottom = top + len(times) * step
  for tick in range(int(most) + 1):
    x = left + tick * scale
    color = drawing.INK if tick == 1 else drawing.LINE
    parts.append(drawing.line(x, top, x, bottom, color=color))
    parts.append(
      drawing.text(x, bottom + 20, f"{tick}x", size=12, anchor="middle")
    )
  words = []
  for i, (row, found) in enumerate(times.items()):
    y = top + i * step + step / 2
    name = readme_table.SUMMARY[row]
    parts.append(drawing.text(left - 12, y + 4, name, size=12, anchor="end"))
    plain = min(found[c] for c in readme_table.PLAIN)
    ratios = {c: plain / found[c] for c in colors}
    for place, (format, ratio) in enumerate(ratios.items()):
      x, center = left + ratio * scale, y + (place - 1) * 11
      parts.append(_dot(f"{x:.1f}", f"{center:g}", 5, colors[format]))
      parts.append(drawing.text(x + 9, center + 4, f"{ratio:.2f}", size=10))
    words.append(
      f"{name}: " + ", ".join(f"{c.upper()} {r:.2f}" for c, r in ratios.items())
    )
  return drawing.document(
    "Speedup of quantized matmuls on a CPU",
    "Speedup over the faster of XLA's f32 and bf16 on 2 Zen 5 cores. "
    + "; ".join(words)
    + ".",
    _WIDTH,
    height,
    parts,
  )


def serving_rates() -> dict[str, tuple[float, float]]:
  """Returns {model: tokens/s of the prompt and of decoding}, as medians."""
  return {
    row["name"]: (
      row["prompt_tokens"] / float(np.median(row["prompt_seconds"])),
      1 / float(np.median(row["token_seconds"])),
    )
    for run in json.loads(SERVING_RESULTS.read_text())["runs"]
    if run["what"] == "speed" and run["threads"] == _THREADS
    for row in run["rows"]
    if row["prompt_tokens"] == _PROMPT_TOKENS
    and row["decoded_tokens"] == _DECODED_TOKENS
  }


def speed_serving() -> str:
  """Returns the plot of README.md: tokens a second next to llama.cpp."""
  rates = serving_rates()
  panels = (
    f"reading a prompt of {_PROMPT_TOKENS} tokens",
    f"decoding {_DECODED_TOKENS} tokens after it",
  )
  left, width, top, step = 150, 300, 106, 30
  height = top + len(rates) * step + 16
  parts = [
    _title("SmolLM2-135M-Instruct from one GGUF file: tokens a second", 18),
    _note(
      56,
      f"{_THREADS} Zen 5 cores, medians; nvfp4, mxfp8 and mxfp4 are quantized"
      " again from the file's integers",
      size=12,
    ),
  ]
  for i, title in enumerate(panels):
    x = left + i * (width + 90)
    most = max(rate[i] for rate in rates.values())
    parts.append(drawing.text(x, top - 14, title, size=12))
    for j, (name, rate) in enumerate(rates.items()):
      y, length = top + j * step, rate[i] / most * width
      color = drawing.FAINT if name == "llama.cpp" else drawing.BLUE
      parts.append(drawing.box(x, y, length, step - 10, fill=color))
      parts.append(
        drawing.text(x + length + 6, y + 15, f"{rate[i]:.0f}", size=12)
      )
      if not i:
        parts.append(drawing.text(x - 12, y + 15, name, size=12, anchor="end"))
  words = [
    f"{name}: {prompt:.0f} and {decode:.0f}"
    for name, (prompt, decode) in rates.items()
  ]
  return drawing.document(
    "Tokens a second of SmolLM2-135M-Instruct",
    f"Tokens a second of {' and of '.join(panels)}. {'; '.join(words)}.",
    _WIDTH,
    height,
    parts,
  )


def sqnr_table() -> dict[str, dict[str, float]]:
  """Returns {format: {data: dB}} of the committed baseline of the notebooks."""
  found = json.loads(BASELINE.read_text())["formats"]
  return {
    format: {label: found[key.format(format)] for key, label in SQNR_DATA}
    for format in SQNR_FORMATS
  }


def sqnr() -> str:
  """Returns the figure of the signal-to-noise ratio of each format."""
  table = sqnr_table()
  colors = (drawing.BLUE, drawing.GREEN, drawing.VERMILION)
  left, right, top, step, most = 150, 60, 92, 34, 35
  scale = (_WIDTH - left - right) / most
  bottom = top + len(table) * step
  parts = [
    _title("Signal-to-noise ratio of each format"),
    _note(54, "SQNR in dB: more is better, and 6 dB halve the error", size=12),
  ]
  for i, (_, label) in enumerate(SQNR_DATA):
    parts += _legend(left + i * 220, 73, colors[i], label)
  for tick in range(0, most + 1, 5):
    x = left + tick * scale
    parts.append(drawing.line(x, top, x, bottom))
    parts.append(
      drawing.text(x, bottom + 18, f"{tick}", size=12, anchor="middle")
    )
  words = []
  for i, (format, found) in enumerate(table.items()):
    y = top + i * step + step / 2
    name = format.upper().replace("_", " ")
    parts.append(drawing.text(left - 12, y + 4, name, size=12, anchor="end"))
    for place, value in enumerate(found.values()):
      center = f"{y + 8 * (place - 1):g}"
      parts.append(
        _dot(f"{left + value * scale:.1f}", center, 5, colors[place])
      )
    words.append(
      f"{name}: " + ", ".join(f"{label} {v:.1f}" for label, v in found.items())
    )
  return drawing.document(
    "Signal-to-noise ratio of each format",
    "SQNR in dB. " + "; ".join(words) + ".",
    _WIDTH,
    bottom + 34,
    parts,
  )


DRAWN: Final[dict[str, Callable[[], str]]] = {
  "axes": axes,
  "blocks": blocks,
  "speed_cpu": speed_cpu,
  "speed_serving": speed_serving,
  "sqnr": sqnr,
  "swizzle": swizzle,
}


def path(name: str) -> pathlib.Path:
  return FIGURES / f"{name}.svg"


if __name__ == "__main__":
  for name, draw in DRAWN.items():
    path(name).write_text(draw())
    print(f"wrote {path(name)}")
