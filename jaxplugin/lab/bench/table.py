# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Results as a summary, and as blocks of text of at most 120 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from jaxplugin.lab.bench import results, roofline, timing
from jaxplugin.printing import console

WIDTH: Final = 120
# Variants of the summary's columns, by the titles of the columns.
_PEERS: Final = {
  "x f32": "f32",
  "x bf16": "bf16",
  "x XLA": "by xla",
}
# The fastest peer that is as accurate as the backend.
_BEST: Final = ("best peer", "x peer")
_NAME: Final = 20
_CELL: Final = 19

# The title of a column, its width, and the text of a timed variant.
_Column = tuple[str, int, Callable[[Any], str]]

LEGEND: Final = """\
Times are medians and quartiles of one matmul or step. "x cpu": the time / the
time of cpu in the same round. GB/s: the bytes that a call must read and write,
with operands as stored. "of roof": the least time by the ceilings / the
median. The ceilings of a matmul are reading memory and its operations, which
are in integers for pairs of FP4. The ceiling of quantizing on a CPU is a copy
into mapped memory. A * marks the chosen backend. "error": norm of the error /
norm of the result, from f32 activations and the variant's dequantized
weights."""


def header(environment: dict[str, Any], ceilings: roofline.Ceilings) -> str:
  """Returns lines about the device, versions and ceilings."""
  versions = environment["versions"]
  named = [
    f"{name} {versions[name]}"
    for name in ("jaxplugin", "jax", "jaxlib", "triton", "jax-triton")
    if name in versions
  ]
  details = [
    environment["device"],
    f"{environment['cores']} cores" if environment["cores"] else "",
    environment["instruction_set"] or "",
    f"cuDNN {environment['cudnn']}" if environment["cudnn"] else "",
  ]
  return "\n".join(
    (
      ", ".join(filter(None, details)),
      ", ".join([*named, f"Python {environment['python']}"]),
      f"inputs rotated past a last-level cache of"
      f" {environment['cache_bytes'] / (1 << 20):.0f} MiB"
      f" ({environment['cache_source']})",
      _ceilings(ceilings),
    )
  )


def _ceilings(ceilings: roofline.Ceilings) -> str:
  copies = f"copy {ceilings.copy / 1e9:.1f}"
  if ceilings.warm:
    copies += f", warm {ceilings.warm / 1e9:.1f}"
    if ceilings.fresh:
      copies += f", huge pages {ceilings.fresh / 1e9:.1f}"
  rates = f"bf16 {ceilings.bf16 / 1e9:.0f} and f32 {ceilings.f32 / 1e9:.0f}"
  if ceilings.int8:
    rates += f" GFLOP/s, int8 {ceilings.int8 / 1e9:.0f} GOP/s"
  else:
    rates += " GFLOP/s"
  return (
    f"ceilings: read {ceilings.read / 1e9:.1f} GB/s, {copies} GB/s, {rates}"
  )


def block(row: results.RowResult) -> str:
  """Returns a table of one row, with a line for each variant."""
  title = f"{row.row}  {row.formats} -> {row.out}"
  if row.layer:
    title += f"  ({row.layer})"
  marks = max((len(_mark(v)) for v in row.variants), default=0)
  columns = [*_columns(row)]
  width = WIDTH - 2 - _NAME - marks - sum(width for _, width, _ in columns)
  columns += _ratio_columns(row)[: width // _CELL]
  names = "".join(f"{name:>{width}}" for name, width, _ in columns)
  lines = [title, f"  {'':{_NAME}}{names}"]
  for variant in row.variants:
    if variant.time is not None:
      name = variant.name + ("*" if variant.is_chosen else "")
      cells = "".join(f"{text(variant):>{width}}" for _, width, text in columns)
      lines.append(f"  {name:{_NAME}}{cells}{_mark(variant)}")
  lines += _best_peers(row)
  lines += _forms(row)
  lines += _problems(row)
  return "\n".join(line.rstrip() for line in lines)


def _columns(row: results.RowResult) -> Iterator[_Column]:
  """Yields the columns to the left of the ratios."""
  yield "median ms", 10, lambda v: number(v.time.median)
  yield (
    "quartiles",
    16,
    lambda v: f"{number(v.time.q1, 3)}-{number(v.time.q3, 3)}",
  )
  if any(v.other_time for v in row.variants):
    mode = next(v.mode for v in row.variants if v.mode)
    yield (
      "step ms" if mode == "call" else "call ms",
      9,
      lambda v: number(v.other_time.median) if v.other_time else "",
    )
  yield "GB/s", 7, lambda v: f"{v.gb_per_s:.1f}"
  if any(v.flops for v in row.variants):
    yield "GFLOP/s", 9, lambda v: f"{v.gflop_per_s:.0f}" if v.flops else ""
  yield "of roof", 9, lambda v: f"{100 * v.roof_fraction:.0f} %"
  if any(v.relative_error is not None for v in row.variants):
    yield (
      "error",
      9,
      lambda v: "" if v.relative_error is None else f"{v.relative_error:.1e}",
    )


def _ratio_columns(row: results.RowResult) -> list[_Column]:
  """Returns a column of ratios for each timed variant of ours."""

  def column(ours: results.VariantResult) -> _Column:
    ratios = {name: _ratio(r) for name, r in row.ratios_to(ours).items()}
    title = f"x {ours.name}"[: _CELL - 1]
    return title, _CELL, lambda v: ratios.get(v.name, "")

  timed = [v for v in row.variants if v.time is not None]
  return [column(v) for v in timed if v.role == "ours"]


def _mark(variant: results.VariantResult) -> str:
  mark = " launch-bound?" if variant.is_launch_bound else ""
  is_one = variant.time is not None and variant.time.count == 1
  return mark + (" one call" if is_one else "")


def _best_peers(row: results.RowResult) -> Iterator[str]:
  """Yields the best peer of each variant of ours."""
  for ours in row.variants:
    best = row.best_peer(ours) if ours.role == "ours" else None
    if best is not None:
      yield from _wrapped(
        f"best peer as accurate as {ours.name}: {best}, x"
        f" {_ratio(row.ratios_to(ours)[best])}"
      )


def _forms(row: results.RowResult) -> Iterator[str]:
  """Yields lines with the fastest form of each peer that has several forms."""
  forms = [f"{v.name}: {v.form}" for v in row.variants if v.form and v.time]
  if forms:
    yield from _wrapped(f"fastest forms: {', '.join(forms)}")


def _problems(row: results.RowResult) -> Iterator[str]:
  for variant in row.variants:
    if variant.status in ("wrong", "failed"):
      text = f"{variant.name} {variant.status.upper()}: {variant.reason}"
      yield from _wrapped(text)


def _ratio(ratio: timing.Stats) -> str:
  parts = ratio.median, ratio.q1, ratio.q3
  median, q1, q3 = (
    f"{x:.{2 if x < 9.995 else 1 if x < 100 else 0}f}" for x in parts
  )
  return f"{median} ({q1}-{q3})"


def number(x: float, digits: int = 4) -> str:
  """Formats significant digits, without an exponent."""
  if x == 0:
    return "0"
  text = f"{x:.{digits}g}"
  if "e" in text:
    return f"{x:.0f}" if x > 1 else f"{x:.6f}"
  return text


def details(run: results.BenchRun) -> str:
  """Returns a block for each row, and the variants that did not run."""
  top = header(run.environment, run.ceilings).splitlines()
  parts = ["\n".join(line for row in top for line in _wrapped(row, ""))]
  if run.rows:
    parts.append(LEGEND)
  parts += map(block, run.rows)
  if missing := unavailable(run.rows):
    parts.append(missing)
  if run.left_out:
    left_out = f"left out, no time: {', '.join(run.left_out)}"
    parts.append("\n".join(_wrapped(left_out, "")))
  return "\n\n".join(parts)


def unavailable(rows: Sequence[results.RowResult]) -> str:
  """Returns the variants that did not run, with reasons and rows."""
  where: dict[tuple[str, str], list[str]] = {}
  for row in rows:
    for variant in row.variants:
      if variant.status == "unavailable":
        reason = " ".join(variant.reason.split())
        name = f"{row.row} {row.formats}"
        where.setdefault((variant.name, reason), []).append(name)
  lines = []
  for (name, reason), places in where.items():
    scope = "" if len(places) == len(rows) else f" ({_few(places)})"
    lines += _wrapped(f"{name}{scope}: {textwrap.shorten(reason, 300)}")
  return "\n".join(["not run:", *lines]) if lines else ""


def _few(places: Sequence[str]) -> str:
  more = f" and {len(places) - 2} more" if len(places) > 3 else ""
  return ", ".join(places[: 2 if more else 3]) + more


def comparison(compared: results.RunComparison) -> Iterator[console.Part]:
  """Yields a table with a row for each ratio, the largest losses first."""
  yield console.table(
    ["ratio", "before", "after", "change", ""],
    [
      [
        f"{c.row} {c.formats}: {c.other} / {c.ours}",
        number(c.before, 3),
        number(c.after, 3),
        f"{100 * (c.factor - 1):+.1f} %",
        ("REGRESSED", "bold red") if c in compared.regressions else "",
      ]
      for c in sorted(compared.changes, key=lambda c: c.factor)
    ],
    names=["ratio"],
    figures=["before", "after", "change"],
  )
  yield from (f"only in the first: {name}" for name in compared.missing)
  yield (
    f"{len(compared.regressions)} of {len(compared.changes)} ratios regressed"
    f" by more than {100 * compared.threshold:g} %"
  )


def summary(run: results.BenchRun) -> Iterator[console.Part]:
  """Yields a table that has the chosen backend and peers of each row."""
  yield header(run.environment, run.ceilings)
  rows = [_summary_row(row) for row in run.rows]
  best = [name for name in _BEST if any(name in row for row in rows)]
  # The best peer may be f32 or bf16. Columns of both would leave no space.
  peers = [
    name for name in _PEERS if not best and any(name in row for row in rows)
  ]
  titles = ["row", "formats", "backend", "ms", *peers, *best, "of roof"]
  if rows:
    yield ""
    yield console.table(
      titles,
      [[row.get(title, "") for title in titles] for row in rows],
      names=["row", "formats", "best peer"],
      figures=["ms", *peers, *best[1:], "of roof"],
    )
    speedup = "x f32: how many times as fast as f32."
    if best:
      speedup = (
        "best peer: the fastest one as accurate. x peer: how many times as fast"
        " as it."
      )
    yield (
      f"ms: median time. {speedup} of roof: the least time by the ceilings /"
      " the median. --verbose prints all variants."
    )
  if run.left_out:
    yield f"left out, no time: {', '.join(run.left_out)}"


def _summary_row(row: results.RowResult) -> dict[str, console.Cell]:
  cells: dict[str, console.Cell] = {"row": row.row, "formats": row.formats}
  ours = [v for v in row.variants if v.role == "ours"]
  bad = [v for v in ours if v.status in ("wrong", "failed")]
  if bad:
    cells["backend"] = (f"{bad[0].name} {bad[0].status.upper()}", "bold red")
    return cells
  timed = [(v.is_chosen, -v.time.median, v) for v in ours if v.time is not None]
  if not timed:
    return cells
  *_, best = max(timed, key=lambda item: item[:2])
  assert best.time is not None
  ratios = row.ratios_to(best)
  peers = dict(_PEERS)
  accurate = row.best_peer(best)
  if accurate is not None:
    cells["best peer"] = peers["x peer"] = accurate
  return {
    **cells,
    "backend": (best.name, "green"),
    "ms": number(best.time.median, 3),
    "of roof": f"{100 * best.roof_fraction:.0f} %",
    **{
      title: f"{number(ratios[peer].median, 2)}x"
      for title, peer in peers.items()
      if peer in ratios
    },
  }


def _wrapped(text: str, indent: str = "  ") -> list[str]:
  return textwrap.wrap(
    text, WIDTH, initial_indent=indent, subsequent_indent="    "
  )
