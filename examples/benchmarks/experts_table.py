# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prints the tables of mixtures of experts from files of results.

  python examples/benchmarks/experts_table.py results.json
  python examples/benchmarks/experts_table.py    # of all CPU runs in `results`

A row has a matmul, a number of tokens and the format of its weights. If a peer
ran in f32 and in bf16, the faster one counts.
"""

import json
import pathlib
import sys

import readme_table

from jaxplugin.lab.bench.report import results

WAYS = {
  "dense dots": "dense dots",
  "loop": "a loop of f32 or bf16 dots",
  "scan": "`fori_loop`",
  "take": "`take` + einsum",
  "lax": "`lax.ragged_dot`",
  "dequantize": "dequantize + `lax.ragged_dot`",
}
PAGE = readme_table.PAGE.with_name("experts.md")
HEADER = ["", "tokens", "weights", "ms", *WAYS.values(), "% of the limit"]


def files():
  """The files of `bench`'s results that have such rows."""
  found = sorted((readme_table.DIRECTORY / "results").glob("cpu_*.json"))
  of_bench = [
    path for path in found if "schema" in json.loads(path.read_text())
  ]
  return [path for path in of_bench if of_experts(results.read(path))]


def of_experts(run):
  """Its rows that have a table here."""
  return [row for row in run.rows if row.kind == "experts"]


def cells(row):
  """Milliseconds of what is chosen, ratios of peers, part of the limit."""
  chosen = next(v for v in row.variants if v.is_chosen and v.time)
  ratios = {
    r.other: r.ratio.median for r in row.ratios if r.ours == chosen.name
  }
  found = [readme_table.number(chosen.time.median)]
  for way in WAYS:
    of_way = [x for name, x in ratios.items() if name.startswith(way)]
    text = ""
    if of_way:
      ratio = min(of_way)
      text = readme_table.number(ratio)
      if way == "dense dots":
        text = f"{ratio:.2f}"
    found.append(text)
  return [*found, f"{100 * chosen.roof_fraction:.0f}"]


def lines(run):
  """Returns the table: a row a matmul, number of tokens, and formats."""
  by_line = {}
  for row in of_experts(run):
    lhs, rhs = readme_table.sides(row)
    name = (row.layer or row.row, row.m, lhs)
    by_line.setdefault(name, {})[rhs] = cells(row)
  result = [f"| {' | '.join(HEADER)} |".replace("|  |", "| |")]
  result.append("|---|--:|---" + "|--:" * (len(HEADER) - 3) + "|")
  for (layer, tokens, lhs), formats in by_line.items():
    for format in readme_table.FORMATS:
      if format in formats:
        found = " | ".join([format.upper(), *formats[format]])
        result.append(f"| {layer}, {lhs} x | {tokens} | {found} |")
  return result


if __name__ == "__main__":
  for path in map(pathlib.Path, sys.argv[1:] or files()):
    print("\n".join(lines(results.read(path))))
