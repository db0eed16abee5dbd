# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Ends the command line without a traceback if Ctrl-C comes during imports.

`jaxplugin` and `python -m jaxplugin` import the package before `__main__`, and
Python prints a traceback for an interrupted import. Other programs are not
changed.
"""

from __future__ import annotations

import os
import signal
import sys


def is_command_line() -> bool:
  """Returns whether this process is the command line."""
  program = os.path.basename(sys.argv[0]) if sys.argv else ""
  # Python sets "-m" until it has found the module to run.
  return program == "jaxplugin" or (
    program == "-m" and "jaxplugin" in sys.orig_argv
  )


# A shell starts background processes with SIGINT ignored.
if (
  is_command_line()
  and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
  signal.signal(signal.SIGINT, signal.SIG_DFL)
