# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`bench`: times backends next to their peers."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from typing import Any, Final

import jax

from jaxplugin.cli import arguments, files
from jaxplugin.dot import backends
from jaxplugin.lab.bench import (
  devices,
  measurement,
  results,
  roofline,
  table,
  workloads,
)
from jaxplugin.lab.bench.libraries import processes
from jaxplugin.lab.bench.peers import dot_variants, variants
from jaxplugin.printing import console, progress
from jaxplugin.ragged import backends as ragged_backends

_DEFAULT_SHAPES: Final = {"cpu": "cpu-table", "gpu": "gpu-table"}
_DEFAULT_MODE: Final[dict[str, Any]] = {"cpu": "call", "gpu": "step"}
_PEERS: Final = (*dot_variants.PEERS, *processes.NAMES)
_DEFAULT_ROUNDS: Final = 50
_DEFAULT_SECONDS: Final = 3.0
_QUICK_ROUNDS: Final = 7
_QUICK_SECONDS: Final = 0.5
_DEFAULT_THRESHOLD: Final = 0.05

# Options that read files of results, and others that these take.
_READERS: Final = {"compare": ("threshold",), "show": ("json", "verbose")}

_FAILED: Final = 1


def _add_arguments(command: argparse.ArgumentParser) -> None:
  work = command.add_argument_group("workload")
  devices.add_arguments(work)
  arguments.add_values(
    work,
    {
      "--shapes LIST": "names of sets, sizes MxNxK,"
      " decoder:LAYERSxCHANNELSxHIDDEN, training:TOKENSxCHANNELSxHIDDEN,"
      " experts:TOKENSxTOPofEXPERTSxNxK, quantize:MxK, dequantize:MxK; default:"
      " the platform's table",
      "--m LIST": "rows of each dot and decoder, in place of the set's",
      "--formats LIST": "formats, or pairs of them as bf16xnvfp4, mxfp8xmxfp4;"
      f" default: {workloads.FORMATS}, and for few rows of a CPU's table also"
      f" {workloads.ONE_SIDED}",
      "--implementations LIST": f"some of {', '.join(backends.NAMES)},"
      f" {variants.CHOSEN}; default: all that support the row, and the chosen"
      " one for decoders",
      "--peers LIST": f"some of {', '.join(_PEERS)}, or none;"
      f" {', '.join(processes.NAMES)} run in separate processes on a CPU, and"
      " only if they are named; default: all others",
    },
  )
  work.add_argument(
    "--out",
    type=arguments.short_dtypes,
    choices=tuple(workloads.PLAIN_DTYPES),
    help="dtype of the results; default: f32 on a CPU, bf16 on a GPU",
  )
  _add_limits(command.add_argument_group("timing"))
  out = command.add_argument_group("results")
  out.add_argument(
    "-v", "--verbose", action="store_true", help="print all variants"
  )
  out.add_argument(
    "--json",
    metavar="FILE",
    nargs="?",
    const=files.STANDARD,
    help="output file for the results as JSON; without FILE they are printed in"
    " place of the summary",
  )
  out.add_argument(
    "--append",
    action="store_true",
    help="keep the rows that the file of --json has, if this run does not"
    " measure them again",
  )
  text = "measure nothing; print the results of a file"
  arguments.add_values(out, {"--show FILE": text})
  out.add_argument(
    "--compare",
    nargs=2,
    metavar=("BEFORE", "AFTER"),
    help="measure nothing; print how ratios to peers changed between two files",
  )
  text = (
    "with --compare: a ratio that falls by more than this is a regression;"
    f" default: {_DEFAULT_THRESHOLD}"
  )
  arguments.add_values(out, {"--threshold FRACTION": text}, type=float)


def _add_limits(limits: argparse._ActionsContainer) -> None:
  limits.add_argument(
    "--mode",
    choices=("call", "step"),
    help="time single calls from Python, or dots inside a larger program;"
    " default: call on a CPU, step on a GPU",
  )
  text = f"upper limit for a row; default: {_DEFAULT_ROUNDS}"
  arguments.add_values(limits, {"--rounds N": text}, type=int)
  arguments.add_values(
    limits,
    {
      "--seconds S": f"time of a row in seconds; default: {_DEFAULT_SECONDS:g}",
      "--budget S": "time of all rows in seconds; rows that do not fit are left"
      " out",
    },
    type=float,
  )
  arguments.add_switches(limits, {"--quick": "small shapes and few rounds"})


def _run(args: argparse.Namespace) -> int:
  _check_unused(args)
  if args.compare is not None:
    return _compare(args)
  path = None if _prints_json(args) else args.json
  files.check_output("", path, force=True)
  if args.show is not None:
    found = results.read(args.show)
  else:
    found = _measure(args, path)
  _print(found, args)
  bad = list(found.bad)
  for row, variant in bad:
    print(
      f"bench: {row.row} {row.formats}: {variant.name} is {variant.status}",
      file=sys.stderr,
    )
  return _FAILED if bad else 0


def _check_unused(args: argparse.Namespace) -> None:
  """Raises ValueError if an option would have no effect."""
  for reader, used in _READERS.items():
    if getattr(args, reader) is None:
      continue
    for name, value in vars(args).items():
      is_given = value is not None and value is not False
      if is_given and name not in (reader, *used, "command", "parser"):
        raise ValueError(
          f"bench: --{name} must be left out with --{reader}, which measures"
          " nothing. Leave it out"
        )
    return
  if args.threshold is not None:
    raise ValueError("bench: --threshold needs --compare BEFORE AFTER")


def _prints_json(args: argparse.Namespace) -> bool:
  return args.json == files.STANDARD


def _print(found: results.BenchRun, args: argparse.Namespace) -> None:
  if _prints_json(args):
    print(results.to_json(found), end="")
  elif args.verbose:
    print(table.details(found))
  else:
    console.show(table.summary(found))


def _measure(args: argparse.Namespace, path: str | None) -> results.BenchRun:
  """Measures each row, and writes the file of results after each row."""
  for name in ("rounds", "seconds", "budget"):
    value = getattr(args, name)
    if value is not None and not value > 0:
      raise ValueError(f"bench: --{name} must be above 0, got {value}")
  m = None if args.m is None else workloads.parse_m(args.m)
  pairs = None
  if args.formats is not None:
    pairs = workloads.parse_pairs(arguments.short_dtypes(args.formats))
  known = {**backends.table(), **ragged_backends.OPERATION.backends()}
  implementations = _names(
    "--implementations",
    args.implementations,
    (*known, variants.CHOSEN),
  )
  peers = _names("--peers", args.peers, _PEERS)
  if args.shapes is not None:
    workloads.parse_rows(args.shapes, m)  # raises before JAX starts
  device = devices.find(args.platform, isa=args.isa)
  platform = "gpu" if device.is_gpu else "cpu"
  shapes = args.shapes or ("quick" if args.quick else _DEFAULT_SHAPES[platform])
  sizes = roofline.GPU_SIZES if device.is_gpu else roofline.CPU_SIZES
  if args.quick:
    sizes = roofline.QUICK_SIZES
  rounds = _QUICK_ROUNDS if args.quick else _DEFAULT_ROUNDS
  seconds = _QUICK_SECONDS if args.quick else _DEFAULT_SECONDS
  work = workloads.pairs_of(workloads.parse_rows(shapes, m), pairs)
  if args.out is not None and all(row.kind != "dot" for row, _ in work):
    raise ValueError(
      "bench: --out must be left out without rows MxNxK, got --shapes"
      f" {shapes}. Leave it out"
    )
  earlier = _earlier(args, path)
  options = measurement.BenchOptions(
    mode=args.mode or _DEFAULT_MODE[platform],
    rounds=args.rounds or rounds,
    seconds=args.seconds or seconds,
    implementations=implementations,
    peers=dot_variants.PEERS if peers is None else peers,
    out_dtype=workloads.out_dtype(args.out, is_gpu=device.is_gpu),
    read_side=sizes.side,
  )
  deadline = time.monotonic() + (args.budget or float("inf"))
  with jax.default_device(device.device):
    with progress.shown("measuring the limits of this machine", prints=True):
      ceilings = roofline.measure(device, sizes)
    run = results.BenchRun(
      command=tuple(sys.argv[1:]),
      environment=devices.environment(device),
      ceilings=ceilings,
    )
    found = run if earlier is None else results.joined(earlier, run)
    run = dataclasses.replace(run, ceilings=found.ceilings)
    measured = measurement.measure_rows(run, work, device, options, deadline)
    try:
      for found in measured:
        if path is not None and args.append:
          found = results.append(found, path)
        elif path is not None:
          results.write(found, path)
    except KeyboardInterrupt:
      _print(found, args)
      print("bench: interrupted; other rows were not measured", file=sys.stderr)
      raise
  return found


def _earlier(
  args: argparse.Namespace, path: str | None
) -> results.BenchRun | None:
  """Returns the run whose rows the file of results keeps."""
  if not args.append:
    return None
  if path is None:
    raise ValueError("bench: --append needs a file, pass --json FILE")
  return results.read(path) if os.path.exists(path) else None


def _names(
  option: str, text: str | None, known: tuple[str, ...]
) -> tuple[str, ...] | None:
  if text is None:
    return None
  if text == "none" and option == "--peers":
    return ()
  names = tuple(item.strip() for item in text.split(","))
  for name in names:
    if name not in known:
      raise ValueError(
        f"bench: unknown {option} {name!r}; known: {', '.join(known)}"
      )
  return names


def _compare(args: argparse.Namespace) -> int:
  threshold = _DEFAULT_THRESHOLD if args.threshold is None else args.threshold
  if not 0 < threshold < 1:
    raise ValueError(
      f"bench: --threshold must be between 0 and 1, got {threshold}"
    )
  before, after = map(results.read, args.compare)
  for path, one in zip(args.compare, (before, after), strict=True):
    print(f"{path}: {one.environment['device']}, {one.environment['date']}")
  compared = results.compare(before, after, threshold)
  console.show(table.comparison(compared))
  return _FAILED if compared.regressions else 0


COMMAND: Final = arguments.Command(
  help="time backends next to their peers",
  description="Verifies, times and compares backends and their peers.",
  epilog=f"sets of shapes: {', '.join(workloads.SETS)}",
  examples=(
    "--quick",
    "--shapes llama3-8b --m 1,16 --formats bf16xnvfp4",
    "--json new.json",
    "--show new.json",
    "--compare old.json new.json --threshold 0.1",
  ),
  failure="a result is wrong, a backend fails or --compare finds a regression",
  add_arguments=_add_arguments,
  run=_run,
  uses_devices=True,
)
