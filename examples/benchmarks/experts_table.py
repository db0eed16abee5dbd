# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prints the tables of mixtures of experts from files of results.

  python examples/benchmarks/experts_table.py results.json
  python examples/benchmarks/experts_table.py    # of all in `results`

A line has a product and a number of tokens, a cell what was found for weights
of each format. Of peers in f32 and bf16 the faster one counts.
"""

import json
import pathlib
import sys

import readme_table

from jaxplugin.bench.report import results

WAYS = {
  "dense dots": "dense dots",
  "loop": "a loop of f32 or bf16 dots",
  "scan": "`fori_loop`",
  "take": "`take` + einsum",
  "lax": "`lax.ragged_dot`",
  "dequantize": "dequantize + `lax.ragged_dot`",
}
HEADER = ["", "tokens", "ms", *WAYS.values(), "% of the limit"]


def files():
  """The files of `bench`'s results that have such rows."""
  found = sorted((readme_table.DIRECTORY / "results").glob("*.json"))
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
  """The table: a line a product, number of tokens, and dtype of rows."""
  by_line = {}
  for row in of_experts(run):
    lhs, rhs = readme_table.sides(row)
    name = (row.layer or row.row, row.m, lhs)
    by_line.setdefault(name, {})[rhs] = cells(row)
  result = [f"| {' | '.join(HEADER)} |".replace("|  |", "| |")]
  result.append("|---" * len(HEADER) + "|")
  for (layer, tokens, lhs), formats in by_line.items():
    absent = [""] * (len(HEADER) - 2)
    columns = zip(
      *(formats.get(f, absent) for f in readme_table.FORMATS), strict=True
    )
    found = " | ".join(map(readme_table.joined, columns))
    result.append(f"| {layer}, {lhs} x | {tokens} | {found} |")
  return result


if __name__ == "__main__":
  for path in map(pathlib.Path, sys.argv[1:] or files()):
    print("\n".join(lines(results.read(path))))
