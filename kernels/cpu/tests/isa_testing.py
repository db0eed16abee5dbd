# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks that no instruction set is slower than a lower one.

  python kernels/cpu/tests/isa_testing.py                 # all, in 10 minutes
  python kernels/cpu/tests/isa_testing.py --only 'f32 x ' # rows with this text

Each row is a call of a handler on one core. One process runs all instruction
sets of the machine interleaved. Before each timed call it makes an untimed call
of the same instruction set with other inputs. The inputs rotate and are larger
than the last-level cache. The program compares the CPU times of the fastest
calls, which other programs on the machine disturb least. The exit status is 1
if, after `ATTEMPTS` measurements, an instruction set takes more than `MARGIN`
times as long as the fastest lower one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

# The fastest calls of the same code differ by less than this, even if other
# programs use the machine's caches.
MARGIN: Final = 1.1
ATTEMPTS: Final = 8
TURNS: Final = 12
# Upper limit of the time of an attempt, after three turns.
SECONDS: Final = 2.0
ROTATED_BYTES: Final = 64 << 20
INPUTS_MAX: Final = 6

SHAPES: Final = (
  (1, 4096, 4096),
  (4, 4096, 4096),
  (16, 2048, 4096),
  (128, 2048, 2048),
  (512, 1024, 1024),
)
# MXFP6 is left out. It has the loops of MXFP8, with one more step when AVX2
# loads codes.
TIMED: Final = tuple(
  name for name in testing.QUANTIZED if not name.startswith("mxfp6")
)
PAIRS: Final = (
  *((name, name) for name in TIMED),
  ("mxfp8", "mxfp4"),
  ("nvfp4", "mxfp8"),
  *((plain, name) for plain in ("f32", "bf16", "f16") for name in TIMED),
)
QUANTIZED_SHAPE: Final = (2048, 4096)

Call = Callable[[int, int], Any]  # (isa, which input) -> a result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A timed call.

  Attributes:
    name: name of the row.
    make: prepares inputs, and returns the call and the number of inputs.
  """

  name: str
  make: Callable[[], tuple[Call, int]]


def rows() -> list[Row]:
  """Returns all rows in the order of printing."""
  found = []
  for m, n, k in SHAPES:
    for lhs, rhs in PAIRS:

      def make_dot(lhs=lhs, rhs=rhs, shape=(m, n, k)):
        return _dot(lhs, rhs, *shape)

      found.append(Row(name=f"{lhs} x {rhs} {m}x{n}x{k}", make=make_dot))
  for number, name in enumerate(TIMED):

    def make_quantize(number=number):
      return _quantize(number)

    def make_dequantize(name=name):
      return _dequantize(name)

    shape = "x".join(map(str, QUANTIZED_SHAPE))
    found.append(Row(name=f"quantize {name} {shape}", make=make_quantize))
    found.append(Row(name=f"dequantize {name} {shape}", make=make_dequantize))
  return found


def _side(name: str, rows: int, k: int, seed: int) -> testing.Side:
  rng = np.random.default_rng(seed)
  # Only 16 rows are random, which is faster. `_tiled` repeats them.
  side = testing.gaussians(name, (1, min(rows, 16), k), rng, 3)
  if testing.FORMATS[name][1] == testing.E4M3:
    # Normal positive scales, like those of quantize.
    scale = rng.integers(0x30, 0x48, side.scale.shape).astype(np.uint8)
    side.scale = scale.view(side.scale.dtype)
  return side


def _tiled(x: np.ndarray | None, rows: int) -> np.ndarray | None:
  if x is None:
    return None
  return np.tile(x, (1, -(-rows // x.shape[1]), 1))[:, :rows].copy()


def _packed(values: np.ndarray) -> np.ndarray:
  """Packs FP4 values, two per byte. Returns other values unchanged."""
  if values.dtype != testing.E2M1:
    return values
  codes = values.view(np.uint8) & 15
  return codes[..., 0::2] | codes[..., 1::2] << 4


def _count(bytes_each: int) -> int:
  return max(2, min(INPUTS_MAX, -(-ROTATED_BYTES // bytes_each)))


def _dot(lhs: str, rhs: str, m: int, n: int, k: int) -> tuple[Call, int]:
  blocks = [testing.FORMATS[name][2] for name in (lhs, rhs)]
  x = _side(lhs, m, k, 0)
  w = _side(rhs, n, k, 1)
  x_values, x_scale = (
    jnp.asarray(_tiled(_packed(x.values), m)),
    _tiled(x.scale, m),
  )
  weights = _tiled(_packed(w.values), n)
  w_scale = _tiled(w.scale, n)
  many = [jnp.asarray(weights) for _ in range(_count(weights.nbytes))]
  arrays = [None if s is None else jnp.asarray(s) for s in (x_scale, w_scale)]

  def function(isa):
    @jax.jit
    def call(values, lhs_scale, others, rhs_scale):
      return testing.dot(
        values,
        lhs_scale,
        others,
        rhs_scale,
        lhs_block_size=blocks[0],
        rhs_block_size=blocks[1],
        isa=isa,
        shape=(1, m, n),
      )

    return call

  functions = {isa: function(isa) for isa in testing.ISA_LEVELS.values()}

  def call(isa, at):
    return functions[isa](x_values, arrays[0], many[at], arrays[1])

  return call, len(many)


def _quantize(number: int) -> tuple[Call, int]:
  rng = np.random.default_rng(0)
  x = rng.standard_normal(QUANTIZED_SHAPE).astype(np.float32)
  many = [jnp.asarray(x) for _ in range(_count(x.nbytes))]
  functions = {
    isa: jax.jit(
      lambda x, isa=isa: testing.quantize(
        x, format=number, compute_global=int(number == 3), isa=isa
      )
    )
    for isa in testing.ISA_LEVELS.values()
  }
  return lambda isa, at: functions[isa](many[at]), len(many)


def _dequantize(name: str) -> tuple[Call, int]:
  rows, k = QUANTIZED_SHAPE
  block = testing.FORMATS[name][2]
  side = _side(name, rows, k, 0)
  values = _tiled(_packed(side.values), rows)[0]
  scale = jnp.asarray(_tiled(side.scale, rows)[0])
  many = [jnp.asarray(values) for _ in range(_count(values.nbytes))]
  functions = {
    isa: jax.jit(
      lambda x, scale, isa=isa: testing.dequantize(
        x, scale, k=k, block_size=block, isa=isa
      )
    )
    for isa in testing.ISA_LEVELS.values()
  }
  return lambda isa, at: functions[isa](many[at], scale), len(many)


def measure(call: Call, inputs: int, isas: dict[str, int]) -> dict[str, float]:
  """Returns the time of the fastest call of each instruction set, in ms."""
  for isa in isas.values():
    jax.block_until_ready(call(isa, 0))
  best = dict.fromkeys(isas, float("inf"))
  at = 0
  begin = time.process_time()
  for turn in range(TURNS):
    if turn >= 3 and time.process_time() - begin > SECONDS:
      break
    for name, isa in isas.items():
      jax.block_until_ready(call(isa, at % inputs))
      start = time.process_time()
      jax.block_until_ready(call(isa, (at + 1) % inputs))
      best[name] = min(best[name], 1e3 * (time.process_time() - start))
      at += 1
    # Without this, an equal number of instruction sets and inputs would give
    # each set always the same input. The time depends on an input's address, by
    # a tenth.
    at += 1
  return best


def slower_ones(best_ms: dict[str, float]) -> dict[str, float]:
  """Finds instruction sets that are slower than a lower one.

  Args:
    best_ms: time of each instruction set in ms, the lowest one first.

  Returns:
    The ratio of the set's time to the least time of a lower set, for each set
    for which it is above `MARGIN`.
  """
  found = {}
  least = float("inf")
  for name, ms in best_ms.items():
    if ms > MARGIN * least:
      found[name] = ms / least
    least = min(least, ms)
  return found


def settled(
  attempt: Callable[[], dict[str, float]],
) -> tuple[dict[str, float], dict[str, float]]:
  """Repeats an attempt while an instruction set is slower than a lower one.

  Returns the least times of up to `ATTEMPTS` attempts, and their
  `slower_ones`.
  """
  best = attempt()
  for _ in range(ATTEMPTS - 1):
    if not slower_ones(best):
      break
    again = attempt()
    best = {name: min(ms, again[name]) for name, ms in best.items()}
  return best, slower_ones(best)


def main(arguments: list[str]) -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument("--only", default="", help="rows that contain this text")
  given = parser.parse_args(arguments)
  # XLA's first use creates a thread for each core of this process. With one
  # core, one thread does all the work.
  cores = sorted(os.sched_getaffinity(0))
  os.sched_setaffinity(0, cores[-1:])
  if hasattr(testing.library(), "jaxplugin_cpu_emulates_avx512"):
    parser.error("the library emulates AVX-512: its times say nothing")
  isas = {name: testing.ISA_LEVELS[name] for name in testing.isa_levels()}
  count = failures = 0
  print("ms".ljust(36), *(name.rjust(11) for name in isas))
  for row in rows():
    if given.only not in row.name:
      continue
    call, inputs = row.make()
    best, slower = settled(lambda c=call, i=inputs: measure(c, i, isas))
    count += 1
    failures += bool(slower)
    notes = (f"{name} {ratio:.2f} times" for name, ratio in slower.items())
    columns = (f"{ms:11.3f}" for ms in best.values())
    print(row.name.ljust(36), *columns, *notes, flush=True)
  print(f"{failures} of {count} rows slower than a lower set")
  return int(failures != 0)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
