# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Times imports, and the tracing, lowering and compilation of a call."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp

from jaxplugin import dot
from jaxplugin import quantization
from jaxplugin.core import formats
from jaxplugin.lab.bench import timing

PHASES: Final = ("trace", "lower", "compile")
_ROUNDS: Final = 7
_IMPORT_ROUNDS: Final = 3
_SHAPE: Final = (128, 256)
_IMPORT_SECONDS: Final = 120

_IMPORT: Final = """
import sys, time
start = time.perf_counter()
import {module}
print(time.perf_counter() - start)
"""


def measure() -> dict[str, Any]:
  """Returns milliseconds, each as a dictionary of `timing.Stats`.

  Each round traces a new function that calls `jnp.dot`, then a new function
  that calls `block_scaled_dot`. The time of importing jaxplugin includes the
  time of importing JAX.

  Returns:
    {"jnp.dot": {"trace": ..., "lower": ..., "compile": ...},
    "block_scaled_dot": {...}, "import": {"jax": ..., "jaxplugin": ...}}.
  """
  x = jnp.ones(_SHAPE, jnp.float32)
  x_q = quantization.quantize(x, formats.MXFP8)
  calls: dict[str, tuple[Callable[..., Any], Any]] = {
    "jnp.dot": (lambda x, w: jnp.dot(x, w.T), x),
    "block_scaled_dot": (dot.block_scaled_dot, x_q),
  }
  samples = collections.defaultdict(list)
  for i in range(_ROUNDS + 1):
    for name, (function, operand) in calls.items():
      taken = _phases(function, operand, i)
      if i:  # JAX's caches are empty in the first round
        for phase, milliseconds in zip(PHASES, taken, strict=True):
          samples[name, phase].append(milliseconds)
  for _ in range(_IMPORT_ROUNDS):
    for module in ("jax", "jaxplugin"):
      samples["import", module].append(_import_ms(module))
  found: dict[str, dict[str, Any]] = {}
  for (name, part), times in samples.items():
    found.setdefault(name, {})[part] = dataclasses.asdict(timing.stats(times))
  return found


def _phases(
  function: Callable[..., Any], operand: Any, i: int
) -> tuple[float, float, float]:
  """Returns the milliseconds of each phase of a new function."""

  def fresh(x: Any, w: Any) -> Any:
    return function(x, w) + i  # a program that XLA has not cached

  start = time.perf_counter()
  traced = jax.jit(fresh).trace(operand, operand)
  after_trace = time.perf_counter()
  lowered = traced.lower()
  after_lower = time.perf_counter()
  lowered.compile()
  end = time.perf_counter()
  return (
    (after_trace - start) * 1e3,
    (after_lower - after_trace) * 1e3,
    (end - after_lower) * 1e3,
  )


def _import_ms(module: str) -> float:
  root = str(pathlib.Path(__file__).resolve().parents[3])
  path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
  done = subprocess.run(
    [sys.executable, "-c", _IMPORT.format(module=module)],
    env={**os.environ, "PYTHONPATH": path},
    capture_output=True,
    text=True,
    timeout=_IMPORT_SECONDS,
    check=False,
  )
  if done.returncode:
    raise RuntimeError(f"bench: cannot import {module}:\n{done.stderr}")
  return float(done.stdout.splitlines()[-1]) * 1e3


def text(found: dict[str, Any]) -> str:
  """Returns the medians as a table."""
  lines = [f"  {'ms':18}" + "".join(f"{phase:>10}" for phase in PHASES)]
  for name in ("jnp.dot", "block_scaled_dot"):
    medians = [found[name][phase]["median"] for phase in PHASES]
    lines.append(f"  {name:18}" + "".join(f"{m:>10.2f}" for m in medians))
  imports = found["import"]
  lines.append(
    f"  import jax {imports['jax']['median']:.0f} ms, import jaxplugin (with"
    f" it) {imports['jaxplugin']['median']:.0f} ms"
  )
  return "\n".join(lines)
