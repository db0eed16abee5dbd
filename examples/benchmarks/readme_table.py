# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prints the tables of measured figures from files of results.

  python examples/benchmarks/readme_table.py new.json
  python examples/benchmarks/readme_table.py    # all of CPUs that pages show

`summary` is the table in README.md: milliseconds, a format a column. `lines` is
the table in docs/benchmarks/cpu.md: every row of the run, with peers. A run
with libraries as peers, whose file ends on `_peers`, has `peers_lines`. Rows of
experts have `experts_lines`, in docs/benchmarks/experts.md. The runs of GPUs
have `gpu_tables`, in docs/benchmarks/gpu.md.

Files of `results` are named by device, instruction set and cores, as
cpu_epyc_zen5_avx512_2_cores.json, or as gpu_h100_dots.json. A run whose
ceilings are limits, also of quantizing, has a column with the part of the limit
that is reached.
"""

import json
import pathlib
import re
import statistics
import sys

from jaxplugin.lab.bench import results, workloads

DIRECTORY = pathlib.Path(__file__).resolve().parent
README = DIRECTORY.parents[1] / "README.md"
PAGE = DIRECTORY.parents[1] / "docs" / "benchmarks" / "cpu.md"
AVX2_PAGE = PAGE.with_name("cpu_avx2.md")
GPU_PAGE = PAGE.with_name("gpu.md")
EXPERTS_PAGE = PAGE.with_name("experts.md")
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
# Peers of experts. If a peer ran in f32 and in bf16, the faster one counts.
WAYS = {
  "dense dots": "dense dots",
  "loop": "a loop of f32 or bf16 dots",
  "scan": "`fori_loop`",
  "take": "`take` + einsum",
  "lax": "`lax.ragged_dot`",
  "dequantize": "dequantize + `lax.ragged_dot`",
}
# Only later runs have these peers.
OPTIONAL_PEERS = ("fresh copy",)
IN_SCAN = " in scan"


def linked(*pages):
  """Returns the files of `bench` that the pages link."""
  names = re.findall(
    r"\((?:\.\./)*examples/benchmarks/(results/\S+\.json)\)",
    "".join(page.read_text() for page in pages),
  )
  return _of_bench(DIRECTORY / name for name in dict.fromkeys(names))


def _of_bench(files):
  return [p for p in files if "schema" in json.loads(p.read_text())]


def experts_files():
  """Returns the files of CPUs that have rows of experts."""
  files = sorted((DIRECTORY / "results").glob("cpu_*.json"))
  return [
    path for path in _of_bench(files) if _of_kind(results.read(path), "experts")
  ]


def _of_kind(run, kind):
  return [row for row in run.rows if row.kind == kind]


def _table(header, rows, left=(0, 1)):
  """Returns a table whose columns `left` are aligned to the left."""
  rule = ("---" if i in left else "--:" for i in range(len(header)))
  return [
    f"| {' | '.join(header)} |".replace("|  |", "| |"),
    f"|{'|'.join(rule)}|",
    *(f"| {' | '.join(row)} |" for row in rows),
  ]


def _number(value):
  return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _limit(variant):
  return f"{100 * variant.roof_fraction:.0f}"


def _ratios(row, ours):
  """Returns the median ratio of each other variant."""
  return {name: ratio.median for name, ratio in row.ratios_to(ours).items()}


def _cells(row, chosen, peers, has_limit):
  """Milliseconds of what is chosen, each peer's median ratio to it, limit."""
  ratios = _ratios(row, chosen)

  def ratio(peer):
    # In a scan or without one, whichever is faster.
    found = [ratios[p] for p in (peer, peer + IN_SCAN) if p in ratios]
    return _number(min(found)) if found else ""

  limit = [_limit(chosen)] if has_limit else []
  return [_milliseconds(chosen.time.median), *map(ratio, peers), *limit]


def _sides(row):
  """Names of the formats of lhs and rhs, or of a plain side's dtype."""
  (pair,) = workloads.parse_pairs(row.formats)
  if pair.lhs == pair.rhs:
    return pair.name, pair.name
  rhs = pair.rhs.name if pair.rhs else ""
  return pair.name.removesuffix(f"x{rhs}"), rhs


def lines(run):
  """Returns the table of a run: a row a shape and a format of its weights."""
  has_limit = bool(run.ceilings.warm)
  names = {variant.name for row in run.rows for variant in row.variants}
  peers = [p for p in PEERS if p in names or p not in OPTIONAL_PEERS]
  header = ["", "weights", "ms", *(PEERS[p] for p in peers)]
  if has_limit:
    header.append("% of the limit")
  lines_of = {}  # name -> format of weights -> cells
  for row in run.rows:
    lhs, rhs = _sides(row)
    if rhs not in FORMATS or (lhs not in workloads.PLAIN_DTYPES and lhs != rhs):
      continue
    name = row.row.replace(":", " ") + ("" if lhs == rhs else f", {lhs} x")
    for chosen in (v for v in row.variants if v.is_chosen and v.time):
      scan = ", in a scan" if chosen.name.endswith(IN_SCAN) else ""
      line = lines_of.setdefault((name + scan,), {})
      line[rhs] = _cells(row, chosen, peers, has_limit)
  return _table(header, _by_format(lines_of))


def _by_format(lines_of):
  """Yields rows from {cells left of the format: {format: further cells}}."""
  for left, formats in lines_of.items():
    for format in FORMATS:
      if format in formats:
        yield [*left, format.upper(), *formats[format]]


def experts_lines(run):
  """Returns the table: a row a matmul, number of tokens, and formats."""
  lines_of = {}
  for row in _of_kind(run, "experts"):
    chosen = next(v for v in row.variants if v.is_chosen and v.time)
    ratios = _ratios(row, chosen)
    cells = [_number(chosen.time.median)]
    for way in WAYS:
      found = [x for name, x in ratios.items() if name.startswith(way)]
      text = "{:.2f}".format if way == "dense dots" else _number
      cells.append(text(min(found)) if found else "")
    lhs, rhs = _sides(row)
    left = f"{row.layer or row.row}, {lhs} x", str(row.m)
    lines_of.setdefault(left, {})[rhs] = [*cells, _limit(chosen)]
  header = ["", "tokens", "weights", "ms", *WAYS.values(), "% of the limit"]
  return _table(header, _by_format(lines_of), left=(0, 2))


def times(run):
  """Returns {row: {column: ms}} of the rows and columns of README.md.

  A plain column has the median over the rows of the three formats. Rows that
  the run does not have in each column are left out.
  """
  found = {}
  for name in SUMMARY:
    measured = {}
    for row in run.rows:
      if row.row != name or row.formats not in FORMATS:
        continue
      for v in row.variants:
        column = row.formats if v.is_chosen else v.name
        if v.time:
          measured.setdefault(column, []).append(v.time.median)
    if {*PLAIN, *FORMATS} <= {*measured}:
      found[name] = {
        **{plain: statistics.median(measured[plain]) for plain in PLAIN},
        **{format: min(measured[format]) for format in FORMATS},
      }
  return found


def _milliseconds(value):
  """Returns two significant digits, or three from 10 ms on."""
  return f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def summary(run):
  """Returns the table of README.md: a figure a cell."""
  columns = [*PLAIN, *FORMATS]
  names = [c if c in PLAIN else c.upper() for c in columns]
  rows = (
    [SUMMARY[row], *(_milliseconds(found[c]) for c in columns)]
    for row, found in times(run).items()
  )
  return _table(["rows x n x k", *names], rows, left=(0,))


def peers_lines(run):
  """Returns the table of a run with libraries as peers.

  A line has the fastest of our variants with one error, the fastest peer that
  is as accurate, and the fastest library.
  """
  header = ["rows x n x k", "operands", "ms", "error"]
  header += ["peer as accurate", "ms", "error", "speedup"]
  header += ["fastest library", "ms", "error", "speedup"]
  rows = []
  for row in run.rows:
    for ours in _distinct(row):
      cells = [row.row, _operands(row, ours), *_figures(ours)]
      by_name = {v.name: v for v in row.variants if v.role == "peer" and v.time}
      ratios = _ratios(row, ours)
      libraries = [n for n in by_name if n not in PLAIN and n in ratios]
      for name in (
        row.best_peer(ours),
        min(libraries, key=ratios.get, default=None),
      ):
        if name is None:
          cells += [""] * 4
        else:
          figures = _figures(by_name[name])
          cells += [name, *figures, f"{ratios[name]:.2f}"]
      rows.append(cells)
  return _table(header, rows, left=(0, 1, 4, 8))


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
  if _lhs_is_quantized(row):
    ours = [v for v in ours if v.name.endswith(" with quantize")]
  kept = []
  for one in ours:
    errors = [k.relative_error / one.relative_error for k in kept]
    if all(not 0.8 < e < 1.25 for e in errors):
      kept.append(one)
  return sorted(kept, key=lambda v: v.relative_error)


def _lhs_is_quantized(row):
  return _sides(row)[0] not in workloads.PLAIN_DTYPES


def _operands(row, ours):
  lhs, rhs = _sides(row)
  if _lhs_is_quantized(row):
    lhs = f"f32, in {lhs.upper()}"
  elif ours.name.endswith(" fastest"):
    # A few rows are rounded to bf16. An int8 row has an error of 5e-3.
    lhs += ", in int8" if ours.relative_error > 3e-3 else ", in bf16"
  return f"{lhs} x {rhs.upper()}"


def _figures(variant):
  """Milliseconds and relative error."""
  time = f"{variant.time.median:.3g}"
  return time, f"{variant.relative_error:.1e}".replace("e-0", "e-")


def _gpu_table(run, kind, columns, ours):
  """Returns the table of a GPU's rows: {name of a variant: its column}.

  The speedup is the time of the last variant by that of `ours`. Variants that
  no row has get no column.
  """
  rows = sorted(_of_kind(run, kind), key=lambda row: row.m)
  names = {v.name for row in rows for v in row.variants}
  columns = {name: columns[name] for name in columns if name in names}
  peer = list(columns)[-1]
  header = [*columns.values(), f"x {columns[peer]}", "% of the limit"]
  lines = []
  for row in rows:
    by_name = {v.name: v for v in row.variants if v.time}
    cells = [
      f"{by_name[name].time.median * 1000:.0f}" if name in by_name else ""
      for name in columns
    ]
    ratio = _ratios(row, by_name[ours])[peer]
    name = row.row.partition(":")[2] or row.row
    lhs, rhs = (
      side if side in workloads.PLAIN_DTYPES else side.upper()
      for side in _sides(row)
    )
    operands = lhs if lhs == rhs else f"{lhs} x {rhs}"
    limit = _limit(by_name[ours])
    lines.append([name, operands, *cells, f"{ratio:.2f}", limit])
  return _table(["rows x n x k", "operands", *header], lines)


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
  return [
    _gpu_table(run, kind, columns, ours)
    for kind, columns, ours in (
      ("dot", {**dots, "bf16": "bf16"}, ours),
      ("experts", {**dots, "dense dots": "dots"}, "triton"),
      ("quantize", codecs, "jp.quantize"),
    )
    if _of_kind(run, kind)
  ]


def tables(path):
  """Returns the tables of a file, in the order of the pages."""
  run = results.read(path)
  if "_peers" in path.name:
    return [peers_lines(run)]
  if path.name.startswith("gpu"):
    return gpu_tables(run)
  if _of_kind(run, "experts"):
    return [experts_lines(run)]
  found = [*([summary(run)] if times(run) else []), lines(run)]
  if len(found[-1]) == 2:  # only its header
    raise results.ResultError(
      f"{path} must have a row whose weights are {', '.join(FORMATS)}"
    )
  return found


if __name__ == "__main__":
  shown = [*linked(README, PAGE, AVX2_PAGE), *experts_files()]
  for path in map(pathlib.Path, sys.argv[1:] or shown):
    try:
      print("\n\n".join("\n".join(table) for table in tables(path)))
    except results.ResultError as error:
      sys.exit(str(error))
