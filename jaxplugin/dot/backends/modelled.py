# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A time model that finds dots which are faster if dequantized first.

GPUs without block-scaled matrix instructions decode operands in registers. In
the fused kernel every tile of the result decodes its rows and columns again.
Dequantizing first decodes each operand once, and cuBLAS then computes a bf16
matmul faster than these kernels do. If m exceeds `FEW_ROWS`, the model compares
both times. It proposes the xla backend if the fused kernel takes `MARGIN` times
as long. Tuning tables, which are measured, take precedence.

  fused   = rounds * steps * cycles / clock
  unfused = dequantized / reads + copied / copies + kernels * launch
            + 2 * batch * m * n * k / rate

A GPU runs `resident` blocks on each core, and in a round each block computes a
tile of 128 x 128. With fewer tiles than blocks, k is split and the round counts
as a fraction. The number of tiles along m is a fraction too, because tiles may
have fewer rows. A step is 64 values of k. `dequantized` are the bytes that
dequantization to bf16 reads and writes, and `copied` those of other kernels
besides the matmul. `reads` and `copies` are their measured bandwidths.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Final

from jaxplugin.core import decisions, formats, targets
from jaxplugin.dot import problems
from jaxplugin.kernels import formats as kernel_formats

# Up to this m the kernels for few rows run, which are not modelled.
FEW_ROWS: Final = 64
# Required speedup, because the model's error exceeds a few percent.
MARGIN: Final = 1.1

_TILE: Final = 128  # rows and columns
_STEP: Final = 64  # of k
_LAUNCH_S: Final = 2.5e-6
_SCALE_BYTES: Final = 1
_BF16_BYTES: Final = 2
_F32_BYTES: Final = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
  """Facts about an architecture.

  Attributes:
    matmul_flops: measured flops of a cuBLAS bf16 matmul per second and core.
    copy_share: measured bandwidth of a copy, as a share of the data sheet's.
    dequantize_share: the same share of XLA's dequantization, by the bits of a
      value.
    clock_hz: clock of the cores.
    resident: blocks of the fused kernel that run on a core at a time.
    cycles: cycles of one step of a tile, by (number of quantized sides, bits of
      the widest quantized value); the smallest count among the formats of a
      key.
    cycles_of_rows: the same for two E4M3 sides with one scale for each row.
      None if unknown.
  """

  matmul_flops: float
  copy_share: float
  dequantize_share: Mapping[int, float]
  clock_hz: float
  resident: int
  cycles: Mapping[tuple[int, int], int]
  cycles_of_rows: int | None = None


# sm_80: 265 TFLOP/s and 1.75 TB/s of an A100. XLA's dequantization was not
# measured, so its share is that of a copy. Cycles are simulated by `python -m
# jaxplugin kernels --target a100 -m 4096 -n 8192 -k 8192` (ptxas 13.4).
#
# sm_90: measured on an H100 SXM, jax 0.11.2, triton 3.6.0, 2026-11-26, in
# examples/benchmarks/results/gpu_h100_*.json. Rates are those of the peers
# "bf16" (8192 x 8192 x 8192) and "copy". Dequantization is the difference of
# "xla" and "bf16" with m = 1. Cycles follow from the times of "triton" with m =
# 512 and 8192. The H200 is assumed to have the same shares. The unfused time of
# sides with one scale for each row was not measured.
MACHINES: Final[Mapping[tuple[int, int], Machine]] = {
  (8, 0): Machine(
    matmul_flops=265e12 / 108,
    copy_share=1.75 / 2.039,
    dequantize_share={4: 1.75 / 2.039, 8: 1.75 / 2.039},
    clock_hz=1.41e9,
    resident=1,
    cycles={(1, 4): 2267, (1, 8): 3647, (2, 4): 2872, (2, 8): 3990},
  ),
  (9, 0): Machine(
    matmul_flops=733e12 / 132,
    copy_share=2.94 / 3.35,
    dequantize_share={4: 1.54 / 3.35, 8: 2.15 / 3.35},
    clock_hz=1.755e9,
    resident=2,
    cycles={(1, 4): 1278, (1, 8): 1409, (2, 4): 1540, (2, 8): 2091},
    cycles_of_rows=1265,
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
  """Modelled times of a matmul, in seconds.

  Attributes:
    fused: time of a kernel that decodes operands while it multiplies.
    unfused: time of dequantizing and of a bf16 matmul.
  """

  fused: float
  unfused: float


def proposal(
  problem: problems.DotProblem, target: targets.Target
) -> decisions.Measured | None:
  """Proposes the xla backend if the model finds it faster."""
  times = model(problem, target)
  if times is None or times.fused < MARGIN * times.unfused:
    return None
  return decisions.Measured(
    implementation="xla",
    origin=decisions.MODEL,
    why=(
      "modelled, not measured: dequantize and a bf16 matmul"
      f" {times.unfused * 1e6:.0f} us, a fused kernel {times.fused * 1e6:.0f}"
      " us"
    ),
  )


def model(problem: problems.DotProblem, target: targets.Target) -> Times | None:
  """Returns both times, or None if the model does not cover the problem."""
  if target.platform != "cuda" or target.compute_capability is None:
    return None
  machine = MACHINES.get(target.compute_capability)
  cores, bandwidth = target.core_count, target.memory_bandwidth
  if machine is None or cores is None or bandwidth is None:
    return None
  if not _is_modelled(problem):
    return None
  assert problem.batch is not None and problem.m is not None
  assert problem.n is not None and problem.k is not None
  sides = (problem.lhs, problem.rhs)
  quantized = [side.format for side in sides if side.format is not None]
  widths = {f.value_bits for f in quantized}
  cycles = machine.cycles.get((len(quantized), max(widths)))
  if _scales_rows(problem):
    cycles = machine.cycles_of_rows
  if cycles is None or not widths <= machine.dequantize_share.keys():
    return None
  tiles = problem.batch * problem.m / _TILE * -(-problem.n // _TILE)
  rounds = tiles / (cores * machine.resident)
  rounds = rounds if rounds < 1 else math.ceil(rounds)
  steps = machine.resident * -(-problem.k // _STEP)
  seconds, kernels = _unfused_copies(problem, machine, bandwidth)
  products = problem.batch * problem.m * problem.n * problem.k
  return Times(
    fused=rounds * steps * cycles / machine.clock_hz,
    unfused=seconds
    + kernels * _LAUNCH_S
    + 2 * products / (cores * machine.matmul_flops),
  )


def _is_modelled(problem: problems.DotProblem) -> bool:
  """Requires one contracting dimension, bf16 sides and linear scales."""
  if not problem.sizes_are_static or problem.is_empty:
    return False
  sides = (problem.lhs, problem.rhs)
  return (
    problem.m is not None
    and problem.m > FEW_ROWS
    and problem.num_contracting == 1
    and problem.blocks_pair_up
    and any(side.format is not None for side in sides)
    and all(
      side.dtype == formats.BF16
      if side.format is None
      else side.scale_layout == "linear"
      and (
        _scales_rows(problem)
        or _is_decoded(side.format, problem.fastest_precision)
      )
      for side in sides
    )
  )


def _scales_rows(problem: problems.DotProblem) -> bool:
  """Returns whether both sides are E4M3 with one scale for each row.

  The xla backend multiplies their codes in bf16, and the sums by the scales.
  With precision="fastest", kernels multiply codes without decoding.
  """
  return not problem.fastest_precision and all(
    side.format is not None
    and side.format.values_dtype == formats.E4M3
    and side.format.scales_codes
    and not side.format.scale_is_power_of_two
    and problem.k is not None
    and side.format.block_size >= problem.k
    for side in (problem.lhs, problem.rhs)
  )


def _is_decoded(format: formats.BlockFormat, fastest_precision: bool) -> bool:
  """Returns whether kernels decode a format as one with modelled cycles.

  They read E8M0 blocks of 128 as blocks of 32 with repeated scales. With
  precision="fastest" they may multiply these blocks without decoding.
  """
  if format.is_known:
    return True
  found = kernel_formats.readable(
    format.values_encoding, format.scale_encoding, format.block_size
  )
  return (
    not fastest_precision
    and found is not None
    and found[0].name in kernel_formats.FORMATS
  )


def _unfused_copies(
  problem: problems.DotProblem, machine: Machine, bandwidth: float
) -> tuple[float, int]:
  """Returns seconds and number of the kernels that run besides the matmul."""
  assert problem.batch is not None and problem.m is not None
  assert problem.n is not None and problem.k is not None
  copies = machine.copy_share * bandwidth
  seconds, kernels = 0.0, 0
  for side, rows in ((problem.lhs, problem.m), (problem.rhs, problem.n)):
    if side.format is None:
      continue
    bits = side.format.value_bits
    values = problem.batch * rows * problem.k
    a_value = bits / 8 + _SCALE_BYTES / side.format.block_size + _BF16_BYTES
    seconds += values * a_value / (machine.dequantize_share[bits] * bandwidth)
    if side.is_interleaved:  # another kernel deinterleaves it first
      seconds += values * 2 * bits / 8 / copies
    kernels += 1 + side.is_interleaved
  if (
    problem.global_scale != "none"
    or problem.has_epilogue
    or _scales_rows(problem)
  ):
    a_result = 2 * _F32_BYTES + problem.out_dtype.itemsize
    seconds += problem.batch * problem.m * problem.n * a_result / copies
    kernels += 1
  return seconds, kernels
