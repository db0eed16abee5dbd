# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures compiling a partitioned training step for GPUs without a GPU.

  python tools/compile_time.py                          # 128 products, 8 GPUs
  python tools/compile_time.py --dots 16 --formats f32 nvfp4
  python tools/compile_time.py --axes explicit    # shardings in types

The step is a chain of matmuls, each with its own weight, and all their
gradients. The rows of all arrays are split over the GPUs. Each format is
compiled in a separate process. CPU seconds are those of the process and its
children, from lowering to the executable, with empty kernel caches. Other
programs can slow down a round, so formats take turns and the minimum of all
rounds counts.

For formats that quantize, the program also prints the bytes that a GPU moves to
quantize its part of an array along both axes, divided by the part's bytes. The
kernels of the compiled program read and write these bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any
from typing import Final

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
  from jax.sharding import AxisType
  from jax.sharding import Mesh
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  import jaxplugin as jp
  from jaxplugin.lab.compilation import deviceless
  from jaxplugin.testing.oracles import hlo_traffic

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
    kernels = hlo_traffic.kernels(both.as_text())
    moved = sum(num_bytes for _, num_bytes in kernels) / share
  return Compiled(
    format=format,
    cpu_s=cpu_s,
    peak_bytes=peak,
    kernels=len(hlo_traffic.kernels(step.as_text())),
    moved=moved,
  )


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
  asked = parser.parse_args(arguments)
  if asked.rounds < 1:
    parser.error(f"--rounds must be at least 1, got {asked.rounds}")
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
