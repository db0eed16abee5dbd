#!/usr/bin/env python3
# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks and measures the packaged tuning tables.

  tools/packaged_tables.py            prints which tables are stale
  tools/packaged_tables.py --list     names the pieces, and their commands
  tools/packaged_tables.py --make     measures all pieces; on an idle machine
  tools/packaged_tables.py --make dots-avx2      measures one

A table is stale if it was measured with other kernels than those of this
checkout. Programs do not use a stale table, and say so. `--make` replaces stale
tables. The status is 1 if a table is stale.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from jaxplugin.lab.tuning import store
from jaxplugin.tables import reading, resolution
from jaxplugin.testing.measured import packaged

_TIMES: Final = ("--rounds", "15", "--seconds", "1")
# Only kernels of this package, so that the tables apply to any version of XLA.
_KERNELS: Final = ("--implementations", "cpu", *_TIMES)
_DOTS: Final = (
  *("--shapes", "1x4096x4096,16x4096x4096"),
  *("--formats", "mxfp8,bf16xmxfp4", *_KERNELS),
)

# Arguments of `tune` by piece. Each piece takes about a minute.
PIECES: Final[dict[str, tuple[str, ...]]] = {
  "dots": _DOTS,
  "dots-avx2": ("--isa", "avx2", *_DOTS),
  "quantizing": (
    *("--shapes", "quantize:512x4096,dequantize:512x4096"),
    *("--formats", "mxfp8,nvfp4", *_TIMES),
  ),
  "experts": (
    *("--shapes", "experts:8x4of32x2880x2880", "--formats", "bf16xmxfp4"),
    *_TIMES,
  ),
}


def _told(path: pathlib.Path) -> tuple[bool, str]:
  """Returns whether a table is stale, and a line about it."""
  table = reading.read(path)
  changed = packaged.staleness(table)
  header, rows = table.header, table.rows
  others = sum(row.chosen is not row.candidates[row.default] for row in rows)
  what = (
    f"{path.name}: {header.operation} on {header.device}, {header.date},"
    f" {len(rows)} rows; {others} choose another implementation than the rule"
  )
  return bool(changed), f"{what}: {f'STALE: {changed}' if changed else 'fits'}"


def check() -> int:
  """Prints a line for each table; returns 1 if one is stale."""
  told = [_told(path) for path in sorted(resolution.DATA.glob("*.json"))]
  for _, line in told:
    print(line)
  if any(is_stale for is_stale, _ in told):
    print("measure again, on an idle machine: tools/packaged_tables.py --make")
    return 1
  return 0


def make(names: Sequence[str]) -> int:
  """Measures pieces into the package's folder; returns the first bad status."""
  resolution.DATA.mkdir(exist_ok=True)
  for path in resolution.DATA.glob("*.json"):
    if packaged.staleness(reading.read(path)):
      print(f"{path.name} is stale, and removed")
      path.unlink()
  for name in names:
    command = [sys.executable, "-m", "jaxplugin", "tune", *PIECES[name]]
    print(f"{name}: {' '.join(command[1:])}", flush=True)
    done = subprocess.run([*command, "-o", str(resolution.DATA)], check=False)
    if done.returncode:
      return done.returncode
  for name in (
    *resolution.DATA.glob(".*.lock"),
    resolution.DATA / store.FAILURES_NAME,
  ):
    name.unlink(missing_ok=True)
  return 0


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns its exit status."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--list", action="store_true", help="name the pieces")
  parser.add_argument("--make", action="store_true", help="measure pieces")
  parser.add_argument("pieces", nargs="*", help="default: all")
  args = parser.parse_args(arguments)
  unknown = [name for name in args.pieces if name not in PIECES]
  if unknown or (args.pieces and not args.make):
    parser.error(f"pieces, of {', '.join(PIECES)}, are for --make: {unknown}")
  if args.list:
    for name, piece in PIECES.items():
      print(f"{name}: python -m jaxplugin tune {' '.join(piece)}")
    return 0
  return make(args.pieces or [*PIECES]) if args.make else check()


if __name__ == "__main__":
  sys.exit(main())
