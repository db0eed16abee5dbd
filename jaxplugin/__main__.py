# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line: `jaxplugin`, or `python -m jaxplugin`."""

from __future__ import annotations

import argparse
import contextlib
import glob
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Final, TextIO

from jaxplugin.cli import arguments, checkpoints, inspection, rewrite
from jaxplugin.lab.commands import bench, compile, kernels, plan, tune
from jaxplugin.runtime import fingerprints

# By the headings of --help.
_GROUPS: Final[dict[str, dict[str, arguments.Command]]] = {
  "see what is chosen, and why": {
    "info": inspection.INFO,
    "explain": inspection.EXPLAIN,
    "repro": inspection.REPRO,
    "checkpoint": checkpoints.CHECKPOINT,
  },
  "compile for GPUs that need not be attached": {
    "rewrite": rewrite.COMMAND,
    "compile": compile.COMMAND,
    "kernels": kernels.COMMAND,
    "plan": plan.COMMAND,
  },
  "convert models": {"quantize": checkpoints.QUANTIZE},
  "measure this device": {"bench": bench.COMMAND, "tune": tune.COMMAND},
}
COMMANDS: Final = {
  name: command
  for commands in _GROUPS.values()
  for name, command in commands.items()
}
_EXAMPLES: Final = """\
examples:
  jaxplugin info
  jaxplugin explain --lhs bfloat16 --rhs nvfp4 -m 16 -n 4096 -k 4096
  jaxplugin rewrite model.mlir --target b200 --cudnn 9.13 -o b200.mlir
  jaxplugin quantize qwen3-8b qwen3-8b-nvfp4 --dry-run
  jaxplugin bench --quick"""

_PACKAGE: Final = os.path.join(os.path.dirname(__file__), "")
_BAD_ARGUMENTS: Final = 2
_INTERRUPTED: Final = 130  # 128 and SIGINT, the convention of shells
_NOTICE_SECONDS: Final = 2


def _parser() -> argparse.ArgumentParser:
  epilog = [
    "\n".join(
      [f"{heading}:", *(f"  {n:12}{c.help}" for n, c in commands.items())]
    )
    for heading, commands in _GROUPS.items()
  ]
  parser = arguments.Parser(
    prog=arguments.PROGRAM,
    usage="%(prog)s COMMAND ...",
    description="Block-scaled matrix multiplication for JAX. `jaxplugin"
    " COMMAND --help` describes a command; `python -m jaxplugin` is the same"
    " program.",
    epilog="\n\n".join([*epilog, _EXAMPLES]),
    formatter_class=arguments.HelpFormatter,
  )
  parser.add_argument(
    "--version", action="store_true", help="print the version, and exit"
  )
  parsers = parser.add_subparsers(
    dest="command", prog=arguments.PROGRAM, help=argparse.SUPPRESS
  )
  for name, command in COMMANDS.items():
    command.add_to(parsers, name)
  for each in (parser, *parsers.choices.values()):
    each.set_defaults(parser=each)
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; returns the exit status."""
  for name in ("stdout", "stderr"):  # None if the shell closed it: >&-
    if getattr(sys, name) is None:
      setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    stream = getattr(sys, name)
    if isinstance(stream, io.TextIOWrapper):
      # A name of a tensor may have letters that the terminal does not have.
      stream.reconfigure(errors="backslashreplace")
  status = 0
  with _interruptible() as interrupted, _short_warnings():
    try:
      status = _run(argv)
      sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
      _discard_unwritten()
    except (ValueError, TypeError, RuntimeError, OSError, Warning) as error:
      # Ctrl-C also ends child processes, and XLA reports the end of ptxas.
      if interrupted.is_set():
        return _INTERRUPTED
      # On one line, which editors and scripts read.
      with contextlib.suppress(OSError):
        print(f"error: {_message(error)}", file=sys.stderr)
      _discard_unwritten()
      return _BAD_ARGUMENTS
    except KeyboardInterrupt:
      return _INTERRUPTED
  return status


def _discard_unwritten() -> None:
  """Discards output that cannot be written.

  Otherwise Python tries again at its end, and exits with another status.
  """
  for stream in (sys.stdout, sys.stderr):
    try:
      stream.flush()
    except OSError:
      os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(argv: Sequence[str] | None) -> int:
  parser = _parser()
  args, unknown = parser.parse_known_args(argv)
  if unknown:  # `parse_args` would print the usage of the whole program
    args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
  if args.version:
    version = fingerprints.version("jaxplugin") or "not installed"
    print(f"{arguments.PROGRAM} {version}")
    return 0
  if args.command is None:
    parser.print_help()
    return 0
  command = COMMANDS[args.command]
  if not command.uses_devices or not has_nvidia_gpu():
    # Without it JAX logs a traceback where its CUDA plugin, but not cuDNN, is
    # installed. Other commands decide for devices that need not be there.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
  return command.run(args)


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
  """Prints warnings of this package on one line, without a line of source."""
  with warnings.catch_warnings():
    default = warnings.showwarning

    def show(
      message: Warning | str,
      category: type[Warning],
      filename: str,
      lineno: int,
      file: TextIO | None = None,
      line: str | None = None,
    ) -> None:
      is_own = category.__module__.partition(".")[0] == __package__
      if is_own or filename.startswith(_PACKAGE):
        print(f"warning: {message}", file=sys.stderr)
      else:
        default(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    yield


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
  """Yields an event that Ctrl-C sets. A second Ctrl-C ends the process.

  Python raises KeyboardInterrupt only after a call of XLA returns. A thread
  reads the signals meanwhile.
  """
  interrupted, done = threading.Event(), threading.Event()
  if threading.current_thread() is not threading.main_thread():
    yield interrupted
    return
  reader, writer = os.pipe()
  os.set_blocking(writer, False)

  def watch() -> None:
    while number := os.read(reader, 1):
      if number[0] != signal.SIGINT:
        continue
      if interrupted.is_set():
        os._exit(_INTERRUPTED)
      interrupted.set()
      threading.Thread(target=notify, daemon=True).start()
    os.close(reader)

  def notify() -> None:
    if not done.wait(_NOTICE_SECONDS):
      print(
        "interrupted: waiting for the current step. Press Ctrl-C again to"
        " stop at once.",
        file=sys.stderr,
      )

  threading.Thread(target=watch, daemon=True).start()
  before = signal.set_wakeup_fd(writer)
  try:
    yield interrupted
  finally:
    done.set()
    signal.set_wakeup_fd(before)
    os.close(writer)  # ends `watch`


def has_nvidia_gpu() -> bool:
  """Returns whether Linux (or WSL) has a device file of an NVIDIA GPU."""
  return any(glob.glob(path) for path in ("/dev/nvidia[0-9]*", "/dev/dxg"))


def _message(error: Exception) -> str:
  if isinstance(error, OSError) and error.strerror:
    name = "" if error.filename is None else f"{error.filename}: "
    return f"{name}{error.strerror}"
  return str(error)


if __name__ == "__main__":
  sys.exit(main())
