# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `bench`: arguments in, tables and files out."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import Final

import jax
import numpy as np

from jaxplugin.bench import ceilings as ceilings_lib
from jaxplugin.bench import device as device_lib
from jaxplugin.bench import measurement
from jaxplugin.bench import rows as rows_lib
from jaxplugin.bench import startup
from jaxplugin.bench.peers import variants
from jaxplugin.bench.report import results
from jaxplugin.bench.report import table
from jaxplugin.dot import backends

_DEFAULT_SHAPES: Final = {"cpu": "cpu-table", "gpu": "gpu-table"}
_DEFAULT_FORMATS: Final = "mxfp8,mxfp4,nvfp4"
_DEFAULT_OUT: Final = {"cpu": "f32", "gpu": "bf16"}
_DEFAULT_MODE: Final[dict[str, Any]] = {"cpu": "call", "gpu": "step"}
_DEFAULT_ROUNDS: Final = 50
_DEFAULT_SECONDS: Final = 3.0
_QUICK_ROUNDS: Final = 7
_QUICK_SECONDS: Final = 0.5
_DEFAULT_THRESHOLD: Final = 0.05

FAILED: Final = 1

EPILOG: Final = f"""\
sets of shapes: {", ".join(rows_lib.SETS)}

The status is 1 when a result is wrong, an implementation fails, or --compare
finds a regression.

examples:
  python -m jaxplugin bench --quick
  python -m jaxplugin bench --shapes llama3-8b --m 1,16 --formats bf16xnvfp4
  python -m jaxplugin bench --json new.json --plot roofline.png
  python -m jaxplugin bench --show new.json
  python -m jaxplugin bench --compare old.json new.json --threshold 0.1
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
  """The arguments of `bench`."""
  what = command.add_argument_group("what")
  what.add_argument(
    "--platform",
    choices=device_lib.PLATFORMS,
    help="default: the device that JAX has",
  )
  what.add_argument(
    "--shapes",
    metavar="LIST",
    help="names of sets, sizes MxNxK, quantize:MxK, dequantize:MxK; default:"
    " the platform's table",
  )
  what.add_argument(
    "--m", metavar="LIST", help="rows of every product, instead of the set's"
  )
  what.add_argument(
    "--formats",
    metavar="LIST",
    default=_DEFAULT_FORMATS,
    help="formats, or pairs of them as bf16xnvfp4, mxfp8xmxfp4; default:"
    f" {_DEFAULT_FORMATS}",
  )
  what.add_argument(
    "--out",
    choices=tuple(rows_lib.PLAIN_DTYPES),
    help="dtype of products; default: f32 on a CPU, bf16 on a GPU",
  )
  what.add_argument(
    "--implementations",
    metavar="LIST",
    help=f"of {', '.join(backends.NAMES)}, {variants.CHOSEN};"
    " default: all that serve here",
  )
  what.add_argument(
    "--peers",
    metavar="LIST",
    default=",".join(variants.PEERS),
    help=f"of {', '.join(variants.PEERS)}, or none; default: all",
  )
  _add_limits(command.add_argument_group("how"))
  out = command.add_argument_group("results")
  out.add_argument("--json", metavar="FILE", help="where to keep the results")
  out.add_argument(
    "--plot",
    metavar="FILE",
    help="where to draw a roofline (.png, .svg, .pdf)",
  )
  out.add_argument(
    "--show",
    metavar="FILE",
    help="measures nothing; prints, and with --plot draws, what is in a file",
  )
  out.add_argument(
    "--compare",
    nargs=2,
    metavar=("BEFORE", "AFTER"),
    help="measures nothing; tells how ratios to peers changed from one file"
    " to another",
  )
  out.add_argument(
    "--threshold",
    type=float,
    default=_DEFAULT_THRESHOLD,
    metavar="PART",
    help="of a ratio, whose loss is a regression; default:"
    f" {_DEFAULT_THRESHOLD}",
  )


def _add_limits(how: argparse._ActionsContainer) -> None:
  how.add_argument(
    "--mode",
    choices=("call", "step"),
    help="time single calls from Python, or products inside a larger program;"
    " default: call on a CPU, step on a GPU",
  )
  how.add_argument(
    "--rounds",
    type=int,
    metavar="N",
    help=f"at most, a row; default: {_DEFAULT_ROUNDS}",
  )
  how.add_argument(
    "--seconds",
    type=float,
    metavar="S",
    help=f"of timing a row, about; default: {_DEFAULT_SECONDS:g}",
  )
  how.add_argument(
    "--budget",
    type=float,
    metavar="S",
    help="seconds for everything: rows for which there is no time are left out",
  )
  how.add_argument(
    "--quick",
    action="store_true",
    help="small shapes, few rounds: does everything run?",
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
  """What is asked for, with the defaults of the platform."""

  device: device_lib.Device
  rows: tuple[rows_lib.Row, ...]
  pairs: tuple[rows_lib.Pair, ...]
  options: measurement.Options
  sizes: ceilings_lib.Sizes
  deadline: float

  def work(self) -> list[tuple[rows_lib.Row, rows_lib.Pair]]:
    """Rows in the formats that each is to be measured in."""
    found = []
    for row in self.rows:
      for pair in self.pairs:
        # Only products have a plain side, or two formats.
        is_codec = pair.lhs == pair.rhs
        if row.kind == "dot" or (row.kind != "startup" and is_codec):
          rows_lib.check(row, pair)
          found.append((row, pair))
    return found


def run(args: argparse.Namespace) -> int:
  """Runs the command; returns the exit status.

  Raises:
    ValueError: an argument is not acceptable.
    OSError: a file cannot be read or written.
  """
  if args.compare is not None:
    return _compare(args)
  for path in (args.json, args.plot):
    _check_writable(path)
  plot = _plotter(args.plot)
  if args.show is not None:
    found = results.read(args.show)
    _show(found)
  else:
    request = _request(args)
    with jax.default_device(request.device.device):
      found = _measure(request, args)
  if plot is not None:
    plot(found, args.plot)
  bad = list(found.bad)
  for row, variant in bad:
    print(
      f"bench: {row.row} {row.formats}: {variant.name} is {variant.status}",
      file=sys.stderr,
    )
  return FAILED if bad else 0


def _show(found: results.Run) -> None:
  print(table.header(found.environment, found.ceilings))
  if found.startup is not None:
    print(f"\n{startup.text(found.startup)}")
  if found.rows:
    print(f"\n{table.LEGEND}")
  for row in found.rows:
    print(f"\n{table.block(row)}")
  _print_rest(found)


def _print_rest(found: results.Run) -> None:
  """What was not measured, and why."""
  unavailable = table.unavailable(found.rows)
  if unavailable:
    print(f"\n{unavailable}")
  if found.left_out:
    print(f"left out, no time: {', '.join(found.left_out)}")


def _check_writable(path: str | None) -> None:
  """Before minutes of measuring."""
  if path is None:
    return
  directory = pathlib.Path(path).resolve().parent
  if not os.access(directory, os.W_OK):
    raise ValueError(f"bench: cannot write {path}: no writable {directory}")


def _plotter(path: str | None) -> Callable[..., None] | None:
  if path is None:
    return None
  from jaxplugin.bench.report import plot  # matplotlib is optional, and slow

  plot.check(path)
  return plot.draw


def _request(args: argparse.Namespace) -> _Request:
  for name in ("rounds", "seconds", "budget"):
    value = getattr(args, name)
    if value is not None and not value > 0:
      raise ValueError(f"bench: --{name} must be above 0, got {value}")
  m = None if args.m is None else rows_lib.parse_sizes("--m", args.m)
  pairs = rows_lib.parse_pairs(args.formats)
  implementations = _names(
    "--implementations",
    args.implementations,
    (*backends.NAMES, variants.CHOSEN),
  )
  peers = _names("--peers", args.peers, variants.PEERS) or ()
  if args.shapes is not None:
    rows_lib.parse_rows(args.shapes, m)  # before a device is looked for
  device = device_lib.find(args.platform)
  platform = "gpu" if device.is_gpu else "cpu"
  shapes = args.shapes or ("quick" if args.quick else _DEFAULT_SHAPES[platform])
  sizes = ceilings_lib.GPU_SIZES if device.is_gpu else ceilings_lib.CPU_SIZES
  if args.quick:
    sizes = ceilings_lib.QUICK_SIZES
  rounds = _QUICK_ROUNDS if args.quick else _DEFAULT_ROUNDS
  seconds = _QUICK_SECONDS if args.quick else _DEFAULT_SECONDS
  out = args.out or _DEFAULT_OUT[platform]
  options = measurement.Options(
    mode=args.mode or _DEFAULT_MODE[platform],
    rounds=args.rounds or rounds,
    seconds=args.seconds or seconds,
    implementations=implementations,
    peers=peers,
    out_dtype=np.dtype(rows_lib.PLAIN_DTYPES[out]),
    read_side=sizes.side,
  )
  return _Request(
    device=device,
    rows=rows_lib.parse_rows(shapes, m),
    pairs=pairs,
    options=options,
    sizes=sizes,
    deadline=time.monotonic() + (args.budget or float("inf")),
  )


def _names(
  option: str, text: str | None, known: tuple[str, ...]
) -> tuple[str, ...] | None:
  if text is None:
    return None
  if text == "none":
    return ()
  names = tuple(item.strip() for item in text.split(","))
  for name in names:
    if name not in known:
      raise ValueError(
        f"bench: unknown {option} {name!r}; known: {', '.join(known)}"
      )
  return names


def _measure(request: _Request, args: argparse.Namespace) -> results.Run:
  """Measures and prints row by row; keeps what there is after each."""
  work = request.work()
  ceilings = None
  if work:
    ceilings = ceilings_lib.measure(request.device, request.sizes)
  found = results.Run(
    command=tuple(sys.argv[1:]),
    environment=device_lib.environment(request.device),
    ceilings=ceilings,
  )
  print(table.header(found.environment, ceilings))
  if any(row.kind == "startup" for row in request.rows):
    measured = startup.measure()
    found = dataclasses.replace(found, startup=measured)
    print(f"\n{startup.text(measured)}")
  if ceilings is not None:
    print(f"\n{table.LEGEND}")
    found = _measure_rows(request, args, found, ceilings)
  _print_rest(found)
  if args.json is not None:
    results.write(found, args.json)
  return found


def _measure_rows(
  request: _Request,
  args: argparse.Namespace,
  found: results.Run,
  ceilings: ceilings_lib.Ceilings,
) -> results.Run:
  work = request.work()
  with _progress(len(work)) as progress:
    measure = measurement.RowMeasurement(
      request.device, ceilings, request.options, progress.describe
    )
    longest = 0.0
    for row, pair in work:
      # A row takes about as long as the longest so far.
      if time.monotonic() + longest > request.deadline:
        name = f"{row} {pair}"
        found = dataclasses.replace(found, left_out=(*found.left_out, name))
        continue
      done = measure.measure(row, pair)
      longest = max(longest, done.seconds)
      found = dataclasses.replace(
        found, rows=(*found.rows, done), ceilings=measure.ceilings
      )
      progress.write(f"\n{table.block(done)}")
      progress.advance()
      if args.json is not None:
        results.write(found, args.json)
  return found


class _Progress:
  """Prints, and shows how far things are where tqdm is installed."""

  def __init__(self, bar: Any = None):
    self._bar = bar

  def describe(self, text: str) -> None:
    if self._bar is not None:
      self._bar.set_postfix_str(text)

  def write(self, text: str) -> None:
    if self._bar is not None:
      self._bar.clear()
    print(text, flush=True)
    if self._bar is not None:
      self._bar.refresh()

  def advance(self) -> None:
    if self._bar is not None:
      self._bar.update()


@contextlib.contextmanager
def _progress(total: int) -> Iterator[_Progress]:
  if not sys.stderr.isatty():
    yield _Progress()
    return
  try:
    import tqdm  # optional
  except ImportError:
    yield _Progress()
    return
  with tqdm.tqdm(
    total=total, unit="row", file=sys.stderr, leave=False, dynamic_ncols=True
  ) as bar:
    yield _Progress(bar)


def _compare(args: argparse.Namespace) -> int:
  if not 0 < args.threshold < 1:
    raise ValueError(
      f"bench: --threshold must be between 0 and 1, got {args.threshold}"
    )
  before, after = map(results.read, args.compare)
  for path, one in zip(args.compare, (before, after), strict=True):
    print(f"{path}: {one.environment['device']}, {one.environment['date']}")
  compared = results.compare(before, after, args.threshold)
  print(table.comparison(compared))
  return FAILED if compared.regressions else 0
