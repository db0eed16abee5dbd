# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`tune`: writes tuning tables of the fastest backends and configs."""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import IO, Final

from jaxplugin.cli import arguments, files, functions
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.explanation import diagnostics
from jaxplugin.lab.bench import devices, workloads
from jaxplugin.lab.tuning import listing, machine, session, store, workload
from jaxplugin.lab.tuning.operations import operation, registry
from jaxplugin.printing import console, progress
from jaxplugin.tables import resolution

_FAILED: Final = 1
_GB: Final = 1_000_000_000
_MAX_GB: Final = 1e6  # more than any machine has

# Options that have an effect only with, and only without --dry-run.
_OF_DRY_RUNS: Final = ("target", "cudnn", "ptxas", "compile")
_OF_TABLES: Final = ("output", "again", "retry", "budget")

_DEFAULTS: Final = machine.TrialOptions()


def _add_arguments(command: argparse.ArgumentParser) -> None:
  work = command.add_argument_group("workload")
  arguments.add_values(
    work,
    {
      "--shapes LIST": "sizes MxNxK and names of sets, as bench takes them",
      "--m LIST": "rows of each dot, in place of the set's",
      "--formats LIST": "formats, or pairs of them as bf16xnvfp4; default:"
      f" {workloads.FORMATS}",
      "--operations LIST": f"some of {', '.join(registry.BY_NAME)}; default:"
      " all",
      "--module MODULE_OR_FUNCTION": "the block-scaled dots of"
      f" package.module:function, or of {arguments.FILE_HELP}",
    },
  )
  work.add_argument(
    "--out",
    type=arguments.short_dtypes,
    choices=tuple(workloads.PLAIN_DTYPES),
    help="dtype of results, and of arrays to quantize; default: f32 on a CPU,"
    " bf16 on a GPU",
  )
  functions.add_arguments(work)
  arguments.add_strict(work)
  _add_device(command.add_argument_group("device"))
  _add_limits(command.add_argument_group("candidates and timing"))
  out = command.add_argument_group("results")
  arguments.add_output(
    out,
    "output file for the table of one operation, or a folder that exists;"
    " default: the user's folder, which every program reads",
    metavar="TABLE",
  )
  arguments.add_switches(
    out,
    {
      "--again": "measure rows again that the table has",
      "--retry": "try candidates again that failed before",
    },
  )
  arguments.add_json(out)


def _add_device(device: argparse._ActionsContainer) -> None:
  devices.add_arguments(device)
  text = "with --dry-run: a device that need not be attached"
  text += f" ({', '.join(targets.KNOWN_NAMES)})"
  arguments.add_values(device, {"--target NAME": text})
  arguments.add_cudnn(device)
  arguments.add_ptxas(device)


def _add_limits(limits: argparse._ActionsContainer) -> None:
  arguments.add_switches(
    limits,
    {
      "--dry-run": "measure nothing; list candidates, and which are pruned and"
      " why",
      "--compile": "with --dry-run: compile Triton's candidates, and print"
      " which fail or spill registers",
    },
  )
  text = f"some of {', '.join(backends.NAMES)}; default: all"
  text += " that support the problem"
  arguments.add_values(limits, {"--implementations LIST": text})
  arguments.add_values(
    limits,
    {
      "--margin TIMES": "prune candidates whose estimate is this many times the"
      " least one; default: %(default)g",
      "--deadline S": "seconds to compile and check a candidate; default:"
      " %(default)g",
      "--seconds S": "seconds that a process times a problem; default:"
      " %(default)g",
      "--memory GB": "GB that a process may use; default: %(default)g",
      "--budget S": "seconds for all problems; the next run does the rest",
    },
    type=float,
    margin=operation.MARGIN,
    deadline=_DEFAULTS.seconds,
    seconds=_DEFAULTS.timing_seconds,
    memory=_DEFAULTS.memory_bytes / _GB,
  )
  cores = 2
  if hasattr(os, "sched_getaffinity"):
    cores = len(os.sched_getaffinity(0))
  arguments.add_values(
    limits,
    {
      "--workers N": "candidates to compile at once; default: one for each"
      " core",
      "--rounds N": "upper limit of rounds in a process; default: %(default)g",
      "--processes N": "processes that time a problem, one after the other;"
      " default: %(default)g",
    },
    type=arguments.size(1),
    workers=cores,
    rounds=_DEFAULTS.rounds,
    processes=_DEFAULTS.processes,
  )


def _run(args: argparse.Namespace) -> int:
  _check(args)
  # Processes that compile and time share the GPU's memory with this process.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  target = _target(args)
  # Ignores tables, because an outdated table would print a warning.
  with resolution.tuning(None):
    work = _workload(args, target)
    if args.operations is not None:
      operations = _names(args.operations)
      unknown = [name for name in operations if name not in registry.BY_NAME]
      if unknown:
        raise ValueError(
          f"tune: --operations must be of {', '.join(registry.BY_NAME)}, got"
          f" {', '.join(unknown)}"
        )
      work = workload.of_operations(work, operations)
    work = workload.one_a_bucket(work)
  for text in work.left_out:
    console.show([f"tune: left out: {text}"], sys.stderr)
  if not work.items:
    raise ValueError(
      "tune: found nothing to tune; pass other --shapes or --module"
    )
  if args.dry_run:
    return _dry_run(args, target, work)
  return _tune(args, target, work)


def _check(args: argparse.Namespace) -> None:
  if (args.shapes is None) == (args.module is None):
    raise ValueError("tune: pass either --shapes or --module")
  if args.module is not None:
    given = [n for n in ("m", "formats", "out") if getattr(args, n) is not None]
    if given:
      raise ValueError(f"tune: --{given[0]} needs --shapes")
  elif args.arg:
    raise ValueError("tune: --arg needs a function as --module")
  elif args.strict:
    raise ValueError("tune: --strict needs --module")
  for name in ("margin", "deadline", "seconds", "memory", "budget"):
    value = getattr(args, name)
    least = 1 if name == "margin" else 0
    if value is not None and not value > least:
      raise ValueError(f"tune: --{name} must be above {least}, got {value:g}")
  if args.memory >= _MAX_GB:
    raise ValueError(
      f"tune: --memory must be below {_MAX_GB:g}, got {args.memory:g}"
    )
  for name in _OF_DRY_RUNS if not args.dry_run else _OF_TABLES:
    if getattr(args, name):
      raise ValueError(
        f"tune: --{name} must be left out with --dry-run, which writes no"
        " table. Leave it out"
        if args.dry_run
        else f"tune: --{name} needs --dry-run, because only an attached device"
        " can be measured"
      )
  for name in ("platform", "isa"):
    if args.target is not None and getattr(args, name) is not None:
      raise ValueError(
        f"tune: --{name} must be left out with --target, which names a device"
        " that is not attached. Leave it out"
      )


def _target(args: argparse.Namespace) -> targets.Target:
  named = arguments.target(args)
  if named is not None:
    arguments.print_missing_cudnn(named)
    # A dry run needs only Triton, not jax-triton.
    return named.with_library(targets.JAX_TRITON)
  return devices.find(args.platform, isa=args.isa, who="tune").target


def _workload(
  args: argparse.Namespace, target: targets.Target
) -> workload.Workload:
  if args.module is not None:
    if functions.is_function(args.module):
      function = functions.function(args.module)
      return workload.of_explained(
        diagnostics.explain(function, *args.arg, target=target)
      )
    if args.arg:
      raise ValueError("tune: --arg needs a function, got a module")
    return workload.of_explained(
      diagnostics.explain_module(
        files.read(args.module), target, strict=args.strict
      )
    )
  m = None if args.m is None else workloads.parse_m(args.m)
  pairs = None
  if args.formats is not None:
    pairs = workloads.parse_pairs(arguments.short_dtypes(args.formats))
  return workload.of_shapes(
    workloads.parse_rows(args.shapes, m),
    pairs,
    workloads.out_dtype(args.out, is_gpu=target.platform != "cpu"),
    target,
  )


def _names(text: str) -> tuple[str, ...]:
  return tuple(name.strip() for name in text.split(","))


def _implementations(args: argparse.Namespace) -> tuple[str, ...] | None:
  if args.implementations is None:
    return None
  names = _names(args.implementations)
  for name in names:
    backends.validate_name(name)
  return names


def _tables(
  args: argparse.Namespace, target: targets.Target, work: workload.Workload
) -> dict[str, store.Store]:
  """Returns the table of each operation of the workload."""
  path = None if args.output is None else pathlib.Path(args.output)
  if path is not None:
    files.check_folder(str(path if path.is_dir() else path.parent))
  problems: dict[str, list[operation.Problem]] = {}
  for item in work.items:
    name = registry.name_of(item.problem)
    problems.setdefault(name, []).append(item.problem)
  if path is not None and len(problems) > 1 and not path.is_dir():
    raise ValueError(
      "tune: a table must have one operation, got"
      f" {' and '.join(problems)} for {path}; pass --operations, or an existing"
      " folder as -o"
    )
  asked = _implementations(args)
  found = {}
  for name, of_operation in problems.items():
    tuned = registry.BY_NAME[name]
    # Rows may also name the defaults.
    named = asked and {*asked} | {
      tuned.default(problem, target).implementation for problem in of_operation
    }
    found[name] = store.Store(
      target,
      path,
      operation=tuned.operation,
      rounds=_options(args).all_rounds,
      is_again=args.again,
      implementations=named,
    )
  return found


def _lister(args: argparse.Namespace, target: targets.Target) -> session.Lister:
  return functools.partial(
    listing.of_problem,
    target=target,
    margin=args.margin,
    implementations=_implementations(args),
  )


def _options(args: argparse.Namespace) -> machine.TrialOptions:
  return machine.TrialOptions(
    workers=args.workers,
    seconds=args.deadline,
    memory_bytes=int(args.memory * _GB),
    rounds=args.rounds,
    timing_seconds=args.seconds,
    processes=args.processes,
  )


def _dry_run(
  args: argparse.Namespace, target: targets.Target, work: workload.Workload
) -> int:
  list_candidates = _lister(args, target)
  found = []
  with (
    machine.LocalMachine(target, _options(args)) as local,
    progress.shown(total=len(work.items)) as line,
  ):
    for item in work.items:
      listed = list_candidates(item.problem)
      faults = {}
      if args.compile:
        trials = local.compile(item.problem, listed.candidates, line.describe)
        faults = {key: str(fault) for key, fault in trials.faults.items()}
      found.append({**listed.to_json(), "faults": faults})
      if not args.json:
        console.show(listed.parts())
        console.show(f"  cannot be chosen: {k}: {f}" for k, f in faults.items())
      line.advance()
  if args.json:
    print(json.dumps(found, indent=2))
  return 0


def _tune(
  args: argparse.Namespace, target: targets.Target, work: workload.Workload
) -> int:
  tables = _tables(args, target, work)
  end = time.monotonic() + (args.budget or float("inf"))
  results: list[session.Result] = []
  if not args.json:
    console.show(
      [*(str(kept.path) for kept in tables.values()), session.LEGEND]
    )
  try:
    with (
      machine.LocalMachine(target, _options(args)) as local,
      progress.shown(total=len(work.items)) as line,
    ):
      sessions = {
        name: session.Session(
          local, kept, _lister(args, target), is_retrying=args.retry
        )
        for name, kept in tables.items()
      }
      for result in session.tune_all(
        work.items,
        lambda item: sessions[registry.name_of(item.problem)],
        line.describe,
        is_over=lambda: time.monotonic() > end,
      ):
        results.append(result)
        if not args.json:
          console.show(session.parts(result))
        line.advance()
  except KeyboardInterrupt:
    # Counts rows in the files, because `results` may lack the last row.
    done = sum(
      tables[registry.name_of(item.problem)].row(item.problem) is not None
      for item in work.items
    )
    print(
      f"tune: interrupted; {done} of {len(work.items)} rows are in"
      f" {', '.join(str(kept.path) for kept in tables.values())}, the same"
      " command continues",
      file=sys.stderr,
    )
    raise
  if args.json:
    print(json.dumps([session.to_json(result) for result in results], indent=2))
  return _finish(work, results, sys.stderr if args.json else sys.stdout)


def _finish(
  work: workload.Workload,
  results: Sequence[session.Result],
  stream: IO[str],
) -> int:
  lines = [*session.summary(results)]
  left = len(work.items) - len(results)
  if left:
    lines.append(f"no time for {left} problems; the same command continues")
  console.show(lines, stream)
  failed = [result for result in results if result.status == "failed"]
  for result in failed:
    print(f"tune: {result.item.problem}: {result.reason}", file=sys.stderr)
  return _FAILED if failed else 0


COMMAND: Final = arguments.Command(
  help="write tuning tables of the fastest kernels",
  description="Measures which backend and config computes each matmul and each"
  " quantization fastest on this device. Programs read the tables when they"
  " are lowered.",
  epilog=f"""\
Lowering a program times nothing: it reads the tables. Another process
compiles each candidate and checks it, on integers whose sum is exact, before
it is timed. The default wins unless another candidate is faster with 95 %
confidence. Each row is written when it is done; the same command continues
after an interruption.

sets of shapes: {", ".join(workloads.SETS)}""",
  examples=(
    "--shapes 1x4096x4096,16x4096x4096 --formats mxfp8",
    "--module step.mlir",
    "--module my.model:mlp --arg 'bfloat16[16,4096]' \\\n"
    "    --arg 'nvfp4[14336,4096]'",
    "--shapes llama3-8b --target h100 --dry-run",
  ),
  failure="a problem could not be tuned",
  add_arguments=_add_arguments,
  run=_run,
  uses_devices=True,
)
