# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`repro`: compares the calls of a file of `jp.repro.save` with f64."""

from __future__ import annotations

import argparse
import contextlib
from typing import Final

import jax

from jaxplugin import repro
from jaxplugin.cli import arguments
from jaxplugin.repro import replaying

_WRONG: Final = 1


def _add_arguments(command: argparse.ArgumentParser) -> None:
  command.add_argument(
    "file", metavar="FILE", help="a file of jp.repro.save; of people you trust"
  )
  command.add_argument(
    "--seed",
    type=arguments.size(0),
    default=0,
    metavar="N",
    help="seed of data that the file does not have; default: 0",
  )
  arguments.add_json(command)


def _run(args: argparse.Namespace) -> int:
  # Works before JAX starts, and does not change the number of GPUs.
  needed = replaying.num_devices(args.file)
  if needed > 1:
    with contextlib.suppress(RuntimeError):
      jax.config.update("jax_num_cpu_devices", needed)
  found = repro.replay(args.file, seed=args.seed)
  arguments.print_result(found, found.lines(), as_json=args.json)
  return 0 if found.first_wrong is None else _WRONG


COMMAND: Final = arguments.Command(
  name="repro",
  group="inspect",
  help="find the first wrong call of a saved program",
  description="Computes each block-scaled call of a file by each implementation"
  " that this machine supports. Compares the results with f64, and prints the"
  " first call that is wrong.",
  epilog="jp.repro.save writes such a file. If JAXPLUGIN_REPRO_DIR names a"
  " folder, a file is also written when a kernel fails or a check finds a wrong"
  " result.",
  examples=("wrong.zip", "wrong.zip --seed 1"),
  failure="a call is wrong",
  add_arguments=_add_arguments,
  run=_run,
  uses_devices=True,
)
