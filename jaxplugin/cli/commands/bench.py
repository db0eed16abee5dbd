# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`bench`: how fast implementations are, beside their peers."""

from __future__ import annotations

from typing import Final

from jaxplugin.bench import command as bench
from jaxplugin.cli import arguments

COMMAND: Final = arguments.Command(
  name="bench",
  help="how fast implementations are here, beside their peers",
  description="Verifies, times and compares implementations and their peers.",
  epilog=bench.EPILOG,
  add_arguments=bench.add_arguments,
  run=bench.run,
  uses_devices=True,
)
