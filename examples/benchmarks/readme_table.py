# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prints the tables of measured figures from a file of results.

  python examples/benchmarks/readme_table.py new.json
  python examples/benchmarks/readme_table.py    # all that the pages link

`summary` is the table in README.md: milliseconds, a format a column. `lines` is
the table in docs/benchmarks/cpu.md: every row of the run, with peers. A run
with libraries as peers, whose file ends on `_peers`, has `peers_lines`. The
runs of GPUs have `gpu_tables`, the tables in docs/benchmarks/gpu.md.

Files of `results` are named by device, instruction set and cores, as
cpu_epyc_avx512_2_cores.json, or as gpu_h100_dots.json. A run whose ceilings are
limits, also of quantizing, has a column with the part of the limit that is
reached.
"""

import pathlib
import re
import statistics
import sys

from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.report import results

DIRECTORY = pathlib.Path(__file__).resolve().parent
README = DIRECTORY.parents[1] / "README.md"
PAGE = DIRECTORY.parents[1] / "docs" / "benchmarks" / "cpu.md"
GPU_PAGE = PAGE.with_name("gpu.md")
# The rows of README.md: name in the run -> name on the page.
SUMMARY = {
  "1x4096x4096": "1 x 4096 x 4096",
  "16x4096x4096": "16 x 4096 x 4096",
  "128x4096x4096": "128 x 4096 x 4096",
  "1024x1024x1024": "1024 x 1024 x 1024",
  "2048x2048x2048": "2048 x 2048 x 2048",
  "decoder:4x2048x5632": "decoder step, 4 layers",
}
PLAIN = ("f32", "bf16")
FORMATS = ("mxfp8", "mxfp4", "nvfp4")
PEERS = {
  "lax.scaled_dot": "`lax.scaled_dot`",
  "f32": "f32 on ready weights",
  "bf16": "bf16 on ready weights",
  "by xla": "XLA operations",
  "warm copy": "warm copy",
  "fresh copy": "copy into fresh memory",
}
# Only later runs have these peers.
OPTIONAL_PEERS = ("fresh copy",)
IN_SCAN = " in scan"


def linked(*pages):
  """Returns the files of results that the pages link."""
  names = re.findall(
    r"\((?:\.\./)*examples/benchmarks/(results/\S+\.json)\)",
    "".join(page.read_text() for page in pages),
  )
  return [DIRECTORY / name for name in dict.fromkeys(names)]


def number(value):
  return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def peers_of(run):
  """Those with a column."""
  names = {variant.name for row in run.rows for variant in row.variants}
  return [p for p in PEERS if p in names or p not in OPTIONAL_PEERS]


def cells(row, chosen, peers, has_limit):
  """Milliseconds of what is chosen, each peer's median ratio to it, limit."""
  ratios = {
    r.other: r.ratio.median for r in row.ratios if r.ours == chosen.name
  }

  def ratio(peer):
    # In a scan or without one, whichever is faster.
    found = [ratios[p] for p in (peer, peer + IN_SCAN) if p in ratios]
    return number(min(found)) if found else ""

  found = [number(chosen.time.median), *map(ratio, peers)]
  if has_limit:
    found.append(f"{100 * chosen.roof_fraction:.0f}")
  return found


def sides(row):
  """Names of the formats of lhs and rhs, or of a plain side's dtype."""
  (pair,) = workloads.parse_pairs(row.formats)
  if pair.lhs == pair.rhs:
    return pair.name, pair.name
  rhs = pair.rhs.name if pair.rhs else ""
  return pair.name.removesuffix(f"x{rhs}"), rhs


def by_line(run, peers, has_limit):
  """Returns {name of a line: {format of weights: cells}}."""
  lines_of = {}
  for row in run.rows:
    lhs, rhs = sides(row)
    if rhs not in FORMATS or (lhs not in workloads.PLAIN_DTYPES and lhs != rhs):
      continue
    name = row.row.replace(":", " ") + ("" if lhs == rhs else f", {lhs} x")
    for chosen in (v for v in row.variants if v.is_chosen and v.time):
      scan = ", in a scan" if chosen.name.endswith(IN_SCAN) else ""
      line = lines_of.setdefault(name + scan, {})
      line[rhs] = cells(row, chosen, peers, has_limit)
  return lines_of


def lines(run):
  """Returns the table of a run: a row a shape and a format of its weights."""
  has_limit = bool(run.ceilings.warm)
  peers = peers_of(run)
  header = ["", "weights", "ms", *(PEERS[p] for p in peers)]
  if has_limit:
    header.append("% of the limit")
  result = [f"| {' | '.join(header)} |".replace("|  |", "| |")]
  result.append("|---|---" + "|--:" * (len(header) - 2) + "|")
  for name, formats in by_line(run, peers, has_limit).items():
    for format in FORMATS:
      if format in formats:
        found = " | ".join([name, format.upper(), *formats[format]])
        result.append(f"| {found} |")
  return result


def times(run):
  """Returns {row: {column: ms}} of the rows and columns of README.md.

  A plain column has the median over the rows of the three formats.
  """
  found = {}
  for name in SUMMARY:
    rows = [r for r in run.rows if r.row == name and r.formats in FORMATS]
    columns = {}
    for plain in PLAIN:
      columns[plain] = statistics.median(
        v.time.median for r in rows for v in r.variants if v.name == plain
      )
    for format in FORMATS:
      (row,) = (r for r in rows if r.formats == format)
      columns[format] = min(
        v.time.median for v in row.variants if v.is_chosen and v.time
      )
    found[name] = columns
  return found


def milliseconds(value):
  """Returns two significant digits, or three from 10 ms on."""
  if value >= 10:
    return f"{value:.1f}"
  return f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def summary(run):
  """Returns the table of README.md: a figure a cell."""
  columns = [*PLAIN, *FORMATS]
  names = [c if c in PLAIN else c.upper() for c in columns]
  result = [f"| rows x n x k | {' | '.join(names)} |"]
  result.append("|---" + "|--:" * len(columns) + "|")
  for row, found in times(run).items():
    cells = " | ".join(milliseconds(found[c]) for c in columns)
    result.append(f"| {SUMMARY[row]} | {cells} |")
  return result


def peers_lines(run):
  """Returns the table of a run with libraries as peers.

  A line has the fastest of our variants with one error, the fastest peer that
  is as accurate, and the fastest library.
  """
  header = ["rows x n x k", "operands", "ms", "error"]
  header += ["peer as accurate", "ms", "error", "speedup"]
  header += ["fastest library", "ms", "error", "speedup"]
  result = [f"| {' | '.join(header)} |", "|---|---|--:|--:" * 3 + "|"]
  for row in run.rows:
    for ours in _distinct(row):
      cells = [row.row, _operands(row, ours), *_figures(ours)]
      best = results.best_peer(row, ours)
      if best is None:
        cells += [""] * 4
      else:
        cells += [best[0].name, *_figures(best[0]), _speedup(best[1])]
      cells += _fastest_library(row, ours)
      result.append(f"| {' | '.join(cells)} |")
  return result


def _distinct(row):
  """Yields the fastest of our variants with each error.

  Two errors are the same if they differ by less than a quarter. Operands that
  are quantized before the call are left out. So is precision="fastest" for
  formats in which it changes nothing.
  """
  ours = sorted(
    (v for v in row.variants if v.role == "ours" and v.time),
    key=lambda v: (v.name.endswith(" fastest"), v.time.median),
  )
  if lhs_is_quantized(row):
    ours = [v for v in ours if v.name.endswith(" with quantize")]
  kept = []
  for one in ours:
    errors = [k.relative_error / one.relative_error for k in kept]
    if all(not 0.8 < e < 1.25 for e in errors):
      kept.append(one)
  return sorted(kept, key=lambda v: v.relative_error)


def lhs_is_quantized(row):
  return sides(row)[0] not in workloads.PLAIN_DTYPES


def _operands(row, ours):
  lhs, rhs = sides(row)
  if lhs_is_quantized(row):
    lhs = f"f32, in {lhs.upper()}"
  elif ours.name.endswith(" fastest"):
    lhs += ", in int8"
  return f"{lhs} x {rhs.upper()}"


def _figures(variant):
  """Milliseconds and relative error."""
  time = f"{variant.time.median:.3g}"
  return time, f"{variant.relative_error:.1e}".replace("e-0", "e-")


def _speedup(ratio):
  return f"{ratio.ratio.median:.2f}"


def _fastest_library(row, ours):
  """Returns cells of the fastest peer that is not XLA's."""
  names = {
    v.name: v
    for v in row.variants
    if v.role == "peer" and v.time and v.name not in PLAIN
  }
  ratio = min(
    (r for r in row.ratios if r.ours == ours.name and r.other in names),
    key=lambda r: r.ratio.median,
    default=None,
  )
  if ratio is None:
    return [""] * 4
  peer = names[ratio.other]
  return [peer.name, *_figures(peer), _speedup(ratio)]


def _gpu_table(run, kind, columns, ours):
  """Returns the table of a GPU's rows: {name of a variant: its column}.

  The speedup is the time of the last variant by that of `ours`. Variants that
  no row has get no column.
  """
  rows = sorted((r for r in run.rows if r.kind == kind), key=lambda r: r.m)
  if not rows:
    return []
  names = {v.name for row in rows for v in row.variants}
  columns = {name: columns[name] for name in columns if name in names}
  peer = list(columns)[-1]
  header = [*columns.values(), f"x {columns[peer]}", "% of the limit"]
  result = [f"| rows x n x k | operands | {' | '.join(header)} |"]
  result.append("|---|---" + "|--:" * len(header) + "|")
  for row in rows:
    by_name = {v.name: v for v in row.variants if v.time}
    cells = [
      f"{by_name[name].time.median * 1000:.0f}" if name in by_name else ""
      for name in columns
    ]
    ratio = next(
      r.ratio.median for r in row.ratios if (r.ours, r.other) == (ours, peer)
    )
    limit = f"{100 * by_name[ours].roof_fraction:.0f}"
    name = row.row.partition(":")[2] or row.row
    lhs, rhs = (
      side if side in workloads.PLAIN_DTYPES else side.upper()
      for side in sides(row)
    )
    operands = lhs if lhs == rhs else f"{lhs} x {rhs}"
    line = " | ".join([name, operands, *cells, f"{ratio:.2f}", limit])
    result.append(f"| {line} |")
  return result


def gpu_tables(run):
  """Returns the tables of a GPU's run, in microseconds."""
  dots = {
    "triton": "`triton`",
    "triton prepared": "`triton`, prepared",
    "triton fastest": "`triton`, fastest",
    "xla": "`xla`",
  }
  names = {variant.name for row in run.rows for variant in row.variants}
  ours = "triton fastest" if "triton fastest" in names else "triton"
  codecs = {"jp.quantize": "`jp.quantize`", "by xla": "XLA operations"}
  tables = (
    _gpu_table(run, "dot", {**dots, "bf16": "bf16"}, ours),
    _gpu_table(run, "experts", {**dots, "dense dots": "dots"}, "triton"),
    _gpu_table(run, "quantize", codecs, "jp.quantize"),
  )
  return [table for table in tables if table]


if __name__ == "__main__":
  for path in map(pathlib.Path, sys.argv[1:] or linked(README, PAGE)):
    found = results.read(path)
    if "_peers" in path.name:
      print("\n".join(peers_lines(found)))
    elif path.name.startswith("gpu"):
      print("\n\n".join("\n".join(table) for table in gpu_tables(found)))
    else:
      print("\n".join([*summary(found), "", *lines(found)]))
