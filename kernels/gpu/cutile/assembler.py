# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles launches of the cuTile matmul, each in a process with a deadline.

The assembler is a separate program (`tileiras`). It does not end for some tiles
and numbers of CTAs. A worker, which is this file as a program, therefore
compiles one specification. After the deadline the worker and all processes that
it started are killed.

  python assembler.py < specification.json > cubin
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

PACKAGE: Final = "cuda-tile"
INSTALL: Final = "pip install 'cuda-tile[tileiras]'"
# Releases whose custom call is known (`cuda.tile.jax`): from the first to below
# the second.
VERSIONS: Final = ((1, 7), (1, 8))
DEADLINE_S: Final = 120.0

_WORKER_FAILED: Final = 3  # exit status; standard error has the reason


class AssemblerError(Exception):
  """A launch does not compile in time. The message has the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assembled:
  """A compiled kernel.

  Attributes:
    symbol: the kernel's name in the machine code.
    cubin: the machine code.
  """

  symbol: str
  cubin: bytes = dataclasses.field(repr=False)


def missing() -> str:
  """Returns why cuda-tile cannot compile, or "", without importing it."""
  try:
    version = importlib.metadata.version(PACKAGE)
  except importlib.metadata.PackageNotFoundError:
    return f"needs {PACKAGE}, which is not installed; {INSTALL}"
  found = tuple(int(x) for x in re.findall(r"\d+", version)[:2])
  first, last = VERSIONS
  if not first <= found < last:
    dotted = [".".join(map(str, x)) for x in VERSIONS]
    return (
      f"supports {PACKAGE} from {dotted[0]} to below {dotted[1]}, and"
      f" {version} is installed; pip install"
      f" '{PACKAGE}[tileiras]>={dotted[0]},<{dotted[1]}'"
    )
  return ""


def assemble(
  specification: Mapping[str, Any], *, deadline_s: float = DEADLINE_S
) -> Assembled:
  """Compiles `plans.CutileLaunch.specification`.

  Args:
    specification: the specification. A process compiles each one once.
    deadline_s: time limit in seconds.

  Raises:
    AssemblerError: If it does not compile in time.
  """
  text = json.dumps(specification, sort_keys=True)
  return _assemble(text, specification["name"], deadline_s)


@functools.cache
def _assemble(text: str, name: str, deadline_s: float) -> Assembled:
  worker = subprocess.Popen(
    [sys.executable, str(pathlib.Path(__file__).resolve())],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    start_new_session=True,  # `killpg` ends the whole process group
  )
  try:
    cubin, errors = worker.communicate(text.encode(), timeout=deadline_s)
  except subprocess.TimeoutExpired:
    raise AssemblerError(
      f"{name} did not compile within {deadline_s:g} seconds; another config"
      " may"
    ) from None
  finally:
    # The assembler may leave processes, and Ctrl-C may interrupt the wait.
    with contextlib.suppress(ProcessLookupError):
      os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    for pipe in (worker.stdin, worker.stdout, worker.stderr):
      assert pipe is not None
      pipe.close()
  if worker.returncode != 0 or not cubin:
    words = errors.decode(errors="replace").strip()
    raise AssemblerError(
      f"{name} does not compile: {words or f'exit {worker.returncode}'}"
    )
  return Assembled(symbol=name, cubin=cubin)


# In the worker, which imports neither JAX nor this package.


def _compile(specification: Mapping[str, Any]) -> bytes:
  import cuda.tile as ct
  from cuda.tile import compilation

  place = pathlib.Path(__file__).with_name("matmul_kernel.py")
  spec = importlib.util.spec_from_file_location("matmul_kernel", place)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)

  def constraint(argument: Any) -> Any:
    if isinstance(argument, int):
      return argument
    ndim = len(argument["stride_divisible_by"])
    return compilation.ArrayConstraint(
      getattr(ct, argument["dtype"]),
      ndim,
      index_dtype=ct.int32,
      stride_lower_bound_incl=0,
      alias_groups=(),
      may_alias_internally=False,
      stride_constant=(*(None,) * (ndim - 1), 1),
      stride_divisible_by=argument["stride_divisible_by"],
      shape_divisible_by=argument["shape_divisible_by"],
      base_addr_divisible_by=256,  # of XLA's arrays
    )

  signature = compilation.KernelSignature(
    [constraint(x) for x in specification["arguments"]],
    compilation.CallingConvention.cutile_python_v2(),
    symbol=specification["name"],
  )
  kernel = module.block_scaled_matmul.replace_hints(
    num_ctas=specification["num_ctas"]
  )
  buffer = io.BytesIO()
  compilation.export_kernel(
    kernel,
    [signature],
    buffer,
    gpu_code=specification["gpu_code"],
    output_format="cubin",
  )
  return buffer.getvalue()


def _main() -> int:
  # The folder of this file has modules of common names.
  sys.path[:] = [x for x in sys.path if x != str(pathlib.Path(__file__).parent)]
  try:
    cubin = _compile(json.load(sys.stdin))
  except Exception as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return _WORKER_FAILED
  sys.stdout.buffer.write(cubin)
  return 0


if __name__ == "__main__":
  sys.exit(_main())
