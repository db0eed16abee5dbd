# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`info`: versions, devices, and what each implementation can do."""

from __future__ import annotations

import argparse
from typing import Final

from jaxplugin.cli import arguments
from jaxplugin.explanation import diagnostics

_TEXT: Final = "versions, devices, and what each implementation can do here"


def _add_arguments(command: argparse.ArgumentParser) -> None:
  del command  # it takes none


def _run(args: argparse.Namespace) -> int:
  del args
  print(diagnostics.info())
  return 0


COMMAND: Final = arguments.Command(
  name="info",
  help=_TEXT,
  description=f"Tells {_TEXT}.",
  add_arguments=_add_arguments,
  run=_run,
  uses_devices=True,
)
