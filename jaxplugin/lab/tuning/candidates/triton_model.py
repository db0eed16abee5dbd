# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The least time of a config of the Triton kernels: a roofline with tiles.

A matmul takes at least

  the time to read each operand from memory once and to write the result;
  the time in which the busiest core reads all tiles of its programs. A core
    reads from the cache at `CACHE_RATE` times its share of the memory's
    bandwidth;
  the time in which that core multiplies whole tiles, at its share of the
    published rate.

The model takes the largest of these, because they overlap. If k is split, it
adds the time to write and read the partial sums, and a launch. It ignores
latency, registers, and how well stages hide loads. So it ranks tiles, but not
numbers of warps or stages.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from jaxplugin.core import targets
from jaxplugin.dot import problems
from jaxplugin.explanation import estimates
from jaxplugin.kernels.gpu import configs
from jaxplugin.kernels.gpu import matmul_plans

# The cache of H100 and A100 delivers about 2 to 5 times the bandwidth of memory
# (arXiv:2402.13499). The higher number prunes less.
CACHE_RATE: Final = 5.0
LAUNCH_SECONDS: Final = 2e-6
_F32_BYTES: Final = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """The roofline of one problem on one GPU.

  Attributes:
    shape: the shape and formats of the matmul.
    bandwidth: bandwidth of memory, bytes per second.
    bf16, native: operations per second with operands decoded to bf16, and with
      quantized operands of the matrix instruction.
    core_count: number of cores of the GPU.
  """

  shape: configs.MatmulShape
  bandwidth: float
  bf16: float
  native: float
  core_count: int

  def seconds(self, config: configs.MatmulConfig) -> float:
    """Returns the least time of a config."""
    shape = self.shape
    tiling = configs.Tiling(**matmul_plans.for_path(shape, config))
    rounds = configs.cdiv(tiling.programs, self.core_count)
    depth = tiling.steps * config.block_k
    tile_bytes = depth * (
      config.block_m * _bytes_per_value(shape.lhs)
      + config.block_n * _bytes_per_value(shape.rhs)
    )
    rate = self.native if config.path == "native" else self.bf16
    flops = 2.0 * config.block_m * config.block_n * depth
    pieces = 1
    if config.path != "native":
      pieces = shape.lhs.pieces * shape.rhs.pieces
    core = max(
      tile_bytes / (CACHE_RATE * self.bandwidth / self.core_count),
      pieces * flops / (rate / self.core_count),
    )
    seconds = max(self._bytes() / self.bandwidth, rounds * core)
    if tiling.is_split:
      partial = config.split_k * shape.batch * shape.m * shape.n * _F32_BYTES
      seconds += LAUNCH_SECONDS + 2 * partial / self.bandwidth
    return seconds

  def _bytes(self) -> float:
    shape = self.shape
    operands = shape.k * (
      shape.m * _bytes_per_value(shape.lhs)
      + shape.n * _bytes_per_value(shape.rhs)
    )
    out = shape.m * shape.n * configs.PLAIN_BYTES[shape.out_dtype]
    return shape.batch * (operands + out)


def _bytes_per_value(kind: configs.OperandKind) -> float:
  scale = 1 / kind.values_per_scale if kind.is_quantized else 0
  return kind.bits / 8 + scale


def of_problem(
  problem: problems.DotProblem,
  shape: configs.MatmulShape,
  target: targets.Target,
) -> Model | None:
  """Returns the model; None if the GPU's figures are not published."""
  rates: list[float | None] = []
  for is_native in (False, True):
    precision = estimates.precision_of(
      problem.lhs, problem.rhs, is_native=is_native
    )
    # One operation takes 1 / peak seconds.
    least = estimates.estimate(0.0, 1.0, precision, target)
    if least.seconds is None or least.bound != "compute":
      rates.append(None)
    else:
      rates.append(1 / least.seconds)
  sheet = estimates.sheet_of(target)
  if sheet is None or target.core_count is None:
    return None
  bandwidth = targets.named_target(sheet).memory_bandwidth
  bf16, native = rates
  known = bf16 or native
  if bandwidth is None or known is None:
    return None
  return Model(
    shape=shape,
    bandwidth=bandwidth,
    bf16=bf16 or known,
    native=native or known,
    core_count=target.core_count,
  )
