# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`info`: versions, devices, and the formats that each backend supports."""

from __future__ import annotations

import argparse
from typing import Final

from jaxplugin.cli import arguments
from jaxplugin.explanation import information


def _run(args: argparse.Namespace) -> int:
  found = information.information()
  return arguments.print_result(found, found.parts(), as_json=args.json)


COMMAND: Final = arguments.Command(
  name="info",
  group="inspect",
  help="print versions, devices and the formats of each backend",
  description="Prints the versions of packages, JAX's devices, tuning tables,"
  " and the formats that each backend supports on this device.",
  examples=("", "--json"),
  add_arguments=arguments.add_json,
  run=_run,
  uses_devices=True,
)
