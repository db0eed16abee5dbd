# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures compiling a partitioned training step for GPUs without a GPU.

  python tools/compile_time.py                          # 128 products, 8 GPUs
  python tools/compile_time.py --dots 16 --formats f32 nvfp4
  python tools/compile_time.py --axes explicit    # shardings in types
  python tools/compile_time.py --logs 64 --rounds 9     # the cost of logs

The step is a chain of matmuls, each with its own weight, and all their
gradients. The rows of all arrays are split over the GPUs. Each format is
compiled in a separate process. CPU seconds are those of the process and its
children, from lowering to the executable, with empty kernel caches. Other
programs can slow down a round, so formats take turns and the minimum of all
rounds counts.

For formats that quantize, the program also prints the bytes that a GPU moves to
quantize its part of an array along both axes, divided by the part's bytes. The
kernels of the compiled program read and write these bytes.

--logs measures something else: the time to trace and lower that many different
matmuls for the local CPU, without logs and with each level. The lines are
formatted, and dropped.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import logging
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

PLAIN: Final = {"f32": "float32", "bf16": "bfloat16"}
FORMATS: Final = (*PLAIN, "mxfp8", "nvfp4")
AXES: Final = ("auto", "explicit")
_KIB: Final = 1 << 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """Compile time and memory of a format.

  Attributes:
    format: name of the format.
    cpu_s: CPU seconds.
    peak_bytes: largest memory of the process.
    kernels: number of kernels that the program runs.
    moved: bytes moved to quantize along both axes, divided by the array's
      bytes; None for a format without quantization.
  """

  format: str
  cpu_s: float
  peak_bytes: int
  kernels: int
  moved: float | None


def measure(
  format: str, *, dots: int, devices: int, size: int, axes: str
) -> Compiled:
  """Compiles the step in this process.

  Args:
    format: one of `FORMATS`.
    dots: number of matmuls.
    devices: number of GPUs.
    size: size of each side of a weight, and number of rows of the activation.
    axes: type of the mesh axes, one of `AXES`.
  """
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType, Mesh, NamedSharding
  from jax.sharding import PartitionSpec as P

  import jaxplugin as jp
  from jaxplugin.lab.compilation import deviceless, traffic

  target = jp.named_target("b200")
  mesh = deviceless.mesh(target, (devices,), ("x",))
  mesh = Mesh(mesh.devices, ("x",), axis_types=(AxisType[axes.title()],))
  dtype = jnp.dtype(PLAIN.get(format, "bfloat16"))
  spec = jax.ShapeDtypeStruct(
    (size, size), dtype, sharding=NamedSharding(mesh, P("x"))
  )
  dot = jax.lax.dot_general
  if format not in PLAIN:
    dot = jp.dot_general(format, format)

  def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in ws:
      x = dot(x, w, (((1,), (0,)), ((), ()))).astype(dtype)
    return jnp.sum(x.astype(jnp.float32) ** 2)

  def compiled(function: Any, *specs: Any) -> Any:
    with jax.set_mesh(mesh):
      return deviceless.compile(function, *specs, target=target, mesh=mesh)

  start = _cpu_seconds()
  step = compiled(jax.grad(loss, (0, 1)), [spec] * dots, spec)
  cpu_s = _cpu_seconds() - start
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
  moved = None
  if format not in PLAIN:
    both = compiled(lambda x: jp.quantize_both(x, format), spec)
    share = size * size * dtype.itemsize / devices
    moved = traffic.num_bytes(traffic.of_compiled(both)) / share
  return Compiled(
    format=format,
    cpu_s=cpu_s,
    peak_bytes=peak,
    kernels=len(traffic.of_compiled(step)),
    moved=moved,
  )


def log_costs(dots: int, rounds: int) -> dict[str, float]:
  """Returns the least ms to lower a program of matmuls, by log level.

  Args:
    dots: number of matmuls, each of another size.
    rounds: number of times each level is measured. Levels take turns.
  """
  import jax
  import jax.numpy as jnp

  import jaxplugin as jp
  from jaxplugin.operation import logs

  x = jax.ShapeDtypeStruct((4, 64), jnp.float32)
  ws = [
    jax.eval_shape(lambda n=n: jp.quantize(jnp.ones((n, 64)), "mxfp8"))
    for n in range(8, 8 * (dots + 1), 8)
  ]
  logger = logging.getLogger("jaxplugin")
  logger.propagate = False
  handler = logging.StreamHandler(io.StringIO())
  found: dict[str, float] = {}
  for name in ["off", "INFO", "DEBUG"] * (rounds + 1):
    jax.clear_caches()
    logs._log_once.cache_clear()
    logger.handlers = [logging.NullHandler()] if name == "off" else [handler]
    logger.setLevel(logging.ERROR if name == "off" else name)
    start = time.perf_counter()
    jax.jit(lambda x, ws: [jp.linear(x, w) for w in ws]).lower(x, ws)
    time_ms = (time.perf_counter() - start) * 1e3
    found[name] = min(found.get(name, math.inf), time_ms)
  return found


def _cpu_seconds() -> float:
  """Returns CPU seconds of this process and of its children that have ended."""
  each = map(
    resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
  )
  return math.fsum(usage.ru_utime + usage.ru_stime for usage in each)


def table(found: Sequence[Compiled]) -> str:
  """Returns a table with a row for each format, and ratios to the first one."""
  lines = ["format    CPU s  ratio  peak GB  kernels  both axes"]
  for one in found:
    moved = "" if one.moved is None else f"{one.moved:8.2f}x"
    lines.append(
      f"{one.format:8} {one.cpu_s:6.1f} {one.cpu_s / found[0].cpu_s:5.1f}x"
      f" {one.peak_bytes / 1e9:8.2f} {one.kernels:8} {moved:>10}".rstrip()
    )
  return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--dots", type=int, default=128)
  parser.add_argument("--devices", type=int, default=8)
  parser.add_argument("--size", type=int, default=1024)
  parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
  parser.add_argument("--axes", choices=AXES, default=AXES[0])
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
  parser.add_argument("--logs", type=int, metavar="MATMULS")
  asked = parser.parse_args(arguments)
  if asked.rounds < 1:
    parser.error(f"--rounds must be at least 1, got {asked.rounds}")
  if asked.logs is not None:
    if asked.logs < 1:
      parser.error(f"--logs must be at least 1, got {asked.logs}")
    costs = log_costs(asked.logs, asked.rounds)
    for name, time_ms in costs.items():
      print(f"{name:6} {time_ms:8.1f} ms {time_ms / costs['off']:5.2f}x")
    return 0
  how = {
    "dots": asked.dots,
    "devices": asked.devices,
    "size": asked.size,
    "axes": asked.axes,
  }
  if asked.here:
    (format,) = asked.formats
    print(json.dumps(dataclasses.asdict(measure(format, **how))))
    return 0
  found: dict[str, Compiled] = {}
  for format in [*asked.formats] * asked.rounds:
    command = [sys.executable, __file__, "--here", "--formats", format]
    for name, chosen in how.items():
      command += [f"--{name}", str(chosen)]
    done = subprocess.run(
      command,
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
      stdout=subprocess.PIPE,
      text=True,
      check=False,
    )
    if done.returncode:
      return done.returncode
    compiled = Compiled(**json.loads(done.stdout.splitlines()[-1]))
    known = found.setdefault(format, compiled)
    found[format] = min(known, compiled, key=lambda one: one.cpu_s)
  print(table([*found.values()]))
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
