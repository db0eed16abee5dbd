# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prints README.md's table of measured figures from a file of results.

python examples/benchmarks/readme_table.py
"""

import pathlib

from jaxplugin.bench.report import results

DIRECTORY = pathlib.Path(__file__).resolve().parent
RESULTS = DIRECTORY / "results" / "cpu_epyc_avx2_2_cores.json"
PEERS = ("lax.scaled_dot", "f32", "bf16", "by xla", "warm copy")
HEADER = (
  "| | ms | `lax.scaled_dot` | f32 on ready weights | bf16 on ready weights"
  " | XLA operations | warm copy |",
  "|---|---|---|---|---|---|---|",
)


def number(value):
  return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def cells(row):
  """Milliseconds of what is chosen, and each peer's median ratio to it."""
  (chosen,) = (v for v in row.variants if v.is_chosen)
  ratios = {
    r.other: r.ratio.median for r in row.ratios if r.ours == chosen.name
  }
  peers = (number(ratios[p]) if p in ratios else "" for p in PEERS)
  return (number(chosen.time.median), *peers)


def lines(run):
  """The table: a line a shape, in each cell a figure for every format."""
  by_row = {}
  for row in run.rows:
    by_row.setdefault(row.row, []).append(cells(row))
  result = list(HEADER)
  for name, formats in by_row.items():
    columns = (
      " / ".join(filter(None, column)) for column in zip(*formats, strict=True)
    )
    result.append(f"| {name.replace(':', ' ')} | {' | '.join(columns)} |")
  return result


if __name__ == "__main__":
  print("\n".join(lines(results.read(str(RESULTS)))))
