# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Jobs that do for real what a bad candidate does.

It imports neither JAX nor the package: a process starts in a moment.
"""

import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import time


class WrongError(Exception):
  kind = "wrong"


def give(argument, tell):
  """Sends a note and returns the argument."""
  tell("given")
  return argument


def process(argument, tell):
  """The process that it runs in."""
  del argument, tell
  return os.getpid()


def niceness(argument, tell):
  del argument, tell
  return os.nice(0)


def imported(argument, tell):
  """Returns whether this process has imported a module."""
  del tell
  return argument in sys.modules


def crash(argument, tell):
  tell("about to crash")
  del argument
  os.kill(os.getpid(), signal.SIGSEGV)


def read_null(argument, tell):
  """Reads the address 0."""
  del argument, tell
  ctypes.string_at(0)


def leave(argument, tell):
  del tell
  os._exit(argument)


def hang(argument, tell):
  """Sleeps forever; with a path, so does a child. The file has both pids."""
  tell("sleeping")
  if argument:
    child = subprocess.Popen(
      [sys.executable, "-c", "import time; time.sleep(600)"]
    )
    pathlib.Path(argument).write_text(f"{os.getpid()} {child.pid}")
  time.sleep(600)


def spin(argument, tell):
  """Waits forever in C, where Python does not handle signals."""
  del argument, tell
  ctypes.CDLL(None).pause()


def send_notes(argument, tell):
  """Sends notes without a pause and without an end."""
  while True:
    tell(argument)


def allocate(argument, tell):
  """Allocates and writes memory without end."""
  del tell
  kept = []
  while True:
    kept.append(bytearray(argument))
    kept[-1][:: 1 << 12] = b"x" * len(range(0, argument, 1 << 12))


def wrong(argument, tell):
  del argument, tell
  raise WrongError("at (0, 1): got 3, exact 2")


def refuse(argument, tell):
  del tell
  raise ValueError(argument)


def sometimes(argument, tell):
  """Fails in the first call; `argument` is a file that counts them."""
  del tell
  path = pathlib.Path(argument)
  count = int(path.read_text()) if path.exists() else 0
  path.write_text(str(count + 1))
  if count == 0:
    raise RuntimeError("ptxas fatal: some days are like this")
  return count


def chatter(argument, tell):
  """Prints on both streams, as compilers do."""
  del tell
  for stream in (sys.stdout, sys.stderr):
    print(argument, file=stream, flush=True)
  os.write(1, b"raw\n")
  return "said"


# A candidate whose config says what it does, in the jobs of the tuner. "when"
# says in which of them.


def check(argument, tell):
  config = argument["candidate"]["config"]
  if config.get("when", "check") == "check":
    _do(config, tell)
  return []


def time_all(argument, tell):
  """Times of `us` microseconds, each round's a little other than the last."""
  samples, failed = {}, {}
  for candidate in argument["candidates"]:
    config = candidate["config"]
    words = (f"{name}={value}" for name, value in sorted(config.items()))
    key = " ".join((candidate["implementation"], *words))
    tell(key)
    if config.get("when") == "time":
      try:
        _do(config, tell)
      except Exception as error:
        failed[key] = str(error)
        continue
    noise = config.get("noise", 1)
    samples[key] = [
      (config.get("us", 1000) + noise * (i % 5)) / 1e3
      for i in range(argument["rounds"])
    ]
  return {"samples": samples, "failed": failed}


def _do(config, tell):
  what = config.get("do")
  if what == "crash":
    crash(None, tell)
  elif what == "wrong":
    wrong(None, tell)
  elif what == "refuse":
    refuse("no layout", tell)
  elif what == "sometimes":
    sometimes(config["counter"], tell)
