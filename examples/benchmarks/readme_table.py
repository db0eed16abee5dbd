# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prints README.md's table of measured figures from a file of results.

  python examples/benchmarks/readme_table.py new.json
  python examples/benchmarks/readme_table.py    # of all that README links

Files of `results` are named by device, instruction set and cores, as
cpu_epyc_avx512_2_cores.json. Weights of the three formats stand in one cell;
so do, in lines of their own, those that plain floats are multiplied by. A run
whose ceilings are limits, also of quantizing, has a column that says how much
of them is reached.
"""

import pathlib
import re
import sys

from jaxplugin.bench import workloads
from jaxplugin.bench.report import results

DIRECTORY = pathlib.Path(__file__).resolve().parent
README = DIRECTORY.parents[1] / "README.md"
FORMATS = ("mxfp8", "mxfp4", "nvfp4")
PEERS = {
  "lax.scaled_dot": "`lax.scaled_dot`",
  "f32": "f32 on ready weights",
  "bf16": "bf16 on ready weights",
  "by xla": "XLA operations",
  "warm copy": "warm copy",
  "fresh copy": "copy into fresh memory",
}
# Of later runs only.
OPTIONAL_PEERS = ("fresh copy",)
IN_SCAN = " in scan"
ABSENT = "-"


def linked():
  """The files of results that README links."""
  names = re.findall(
    r"\(examples/benchmarks/(results/\S+\.json)\)", README.read_text()
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
  """Name of a line -> format of weights -> cells."""
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


def joined(column):
  """One cell of those of all formats; "" where none has anything."""
  return " / ".join(text or ABSENT for text in column) if any(column) else ""


def lines(run):
  """The table: a line a shape, in each cell a figure for every format."""
  has_limit = bool(run.ceilings.warm)
  peers = peers_of(run)
  header = ["", "ms", *(PEERS[p] for p in peers)]
  if has_limit:
    header.append("% of the limit")
  result = [f"| {' | '.join(header)} |".replace("|  |", "| |")]
  result.append("|---" * len(header) + "|")
  for name, formats in by_line(run, peers, has_limit).items():
    absent = [""] * (len(header) - 1)
    columns = zip(*(formats.get(f, absent) for f in FORMATS), strict=True)
    result.append(f"| {name} | {' | '.join(map(joined, columns))} |")
  return result


if __name__ == "__main__":
  for path in map(pathlib.Path, sys.argv[1:] or linked()):
    print("\n".join(lines(results.read(path))))
