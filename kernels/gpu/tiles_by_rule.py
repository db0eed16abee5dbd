# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that choose the config of a matmul.

They do not import Triton. They are functions of plain values, and one rule
depends on the installed version of Triton.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Final

from jaxplugin.kernels.gpu import configs, constraints

from jaxplugin.kernels import architectures, toolkits

Architecture = architectures.Architecture
MatmulConfig = configs.MatmulConfig
MatmulShape = configs.MatmulShape

SMALL_M: Final = 64  # Up to this m, reading the weight bounds the time.
_WIDE_M: Final = 32  # rows up to which a tile may be wider in n than in k
# Shared memory for tiles of 128 x 128 x 128 in three stages.
_DEEP_TILE_BYTES: Final = 160 << 10

_MAX_SPLIT: Final = 16
_MIN_STEPS_OF_SPLIT: Final = 4
_MIN_STEPS_OF_SMALL: Final = 3  # for small_m
_FEW_SCALES: Final = 8
_FEW_ACCUMULATORS: Final = 16 * 128  # four warps with 128 registers a thread
_FEW_SUMS: Final = 64 * 64  # six programs of blocks of 32 share an SM
# Slowdown of a step if only so many programs run on a core, because few
# programs do not hide each other's latency. For small_m on sm_90, by the model
# in `jaxplugin/lab/inspection/simulation.py`.
_CYCLES_OF_FEW: Final = {1: 2.0, 2: 1.3, 3: 1.1}
# Cost of the second launch, which adds the parts, in multiplications of a core:
# 1.2 us at 2000 a cycle, by the same model. A small kernel starts 0.8 us after
# another one (NVIDIA/TransformerEngine, pull request 1716), and its result is
# ready after 700 cycles.
_PRODUCTS_OF_REDUCTION: Final = 1 << 22
# The same cost for other paths. Kernels for few rows multiply 300 to 600 a
# cycle.
_FEWER_PRODUCTS: Final = 1 << 20
_PART_BYTES: Final = 4
_NEARLY: Final = 1.06


def default_config(
  shape: MatmulShape,
  architecture: Architecture,
  *,
  core_count: int,
  use_descriptors: bool = False,
  path: configs.Path | None = None,
) -> MatmulConfig:
  """Returns the config that rules choose for `shape`.

  Args:
    shape: the matmul.
    architecture: the GPU.
    core_count: number of SMs or CUs, which determines the split of k.
    use_descriptors: `MatmulConfig.use_descriptors` of the result.
    path: path of the config; None chooses it.

  Raises:
    ValueError: If no config fits. The message is about the smallest config.
  """
  path = path or default_path(
    shape, architecture, use_descriptors=use_descriptors
  )
  tile = {
    "native": _native_tile,
    "small_m": _small_m_tile,
    "fp8": _fp8_tile,
    "int8": _int8_tile,
    "upcast": _upcast_tile,
  }[path](shape, architecture)
  tile = dataclasses.replace(tile, use_descriptors=use_descriptors)
  error = None
  for config in _smaller(tile):
    config = _with_split(config, shape, core_count)
    error = constraints.config_error(config, shape, architecture)
    if error is None:
      return config
  raise ValueError(f"no config computes {shape}: {error}")


def default_path(
  shape: MatmulShape, architecture: Architecture, *, use_descriptors: bool
) -> configs.Path:
  """Returns the path that `default_config` chooses."""
  if constraints.native_error(shape, architecture) is None:
    return "native"
  if (
    not use_descriptors and constraints.int8_error(shape, architecture) is None
  ):
    return "int8"
  if (
    shape.m <= SMALL_M
    and not use_descriptors
    # With mma.sync, Triton already orders k so that a lane reads adjacent
    # values. AMD's layouts differ.
    and (architecture.has_wgmma or architecture.has_tensor_memory)
    and constraints.small_m_error(shape) is None
  ):
    return "small_m"
  if (
    shape.m > SMALL_M
    and not use_descriptors
    and constraints.fp8_error(shape, architecture) is None
  ):
    return "fp8"
  return "upcast"


def _block(size: int, most: int) -> int:
  """Returns the power of two that covers `size`, at most `most`."""
  block = constraints.MIN_DOT_SIZE
  while block < min(size, most):
    block *= 2
  return block


def _native_tile(
  shape: MatmulShape, architecture: Architecture
) -> MatmulConfig:
  # The left operand of the instruction has 128 rows. It is the weight if lhs
  # has few. Steps of FP4 and of FP8 have the same number of bytes.
  both_fp4 = shape.lhs.is_packed and shape.rhs.is_packed
  k_is_minor = shape.lhs.k_is_minor and shape.rhs.k_is_minor
  swap = shape.m <= SMALL_M
  # With mma.sync, operands whose k is not minor are transposed in registers.
  narrow = 128 if k_is_minor or not architecture.multiplies_by_warp else 64
  block_k = 256 if both_fp4 and k_is_minor and architecture.is_nvidia else 128
  wide = (
    architecture.has_tensor_memory
    and shape.m > 128
    and shape.n > 128
    and (_compiles_few_scales() or not _has_few_scales(shape, block_k))
  )
  return MatmulConfig(
    path="native",
    block_m=_block(shape.m, 128),
    block_n=narrow if swap else _block(shape.n, 256 if wide else narrow),
    block_k=block_k,
    num_warps=8
    if architecture.is_nvidia and (wide or not architecture.has_tensor_memory)
    else 4,
    num_stages=4 if architecture.is_nvidia else 2,
    swap=swap,
  )


def _compiles_few_scales() -> bool:
  """Returns whether Triton compiles `_has_few_scales` with 8 warps.

  Triton 3.6 and 3.7 fail in the pass TritonGPUAccelerateMatmul.
  """
  version = toolkits.triton_version()
  return version is None or version >= (3, 8)


def _has_few_scales(shape: MatmulShape, block_k: int) -> bool:
  """Returns whether a row of a step has few scales, in linear order."""
  return any(
    not side.is_swizzled and block_k // side.values_per_scale < _FEW_SCALES
    for side in (shape.lhs, shape.rhs)
  )


def _small_m_tile(
  shape: MatmulShape, architecture: Architecture
) -> MatmulConfig:
  in_one_piece = shape.lhs.pieces == 1
  has_short_values = in_one_piece and shape.rhs.is_packed
  decodes_both = has_short_values and shape.lhs.is_quantized
  block_m = _block(shape.m, SMALL_M)
  block_n, block_k, num_warps = 128, 128, 8
  if not in_one_piece:
    block_n = 64
  elif architecture.has_wgmma and block_m <= 32:
    # Three or four blocks of four warps share an SM. One block decodes while
    # others wait for memory, barriers and matrix instructions. For bf16 x NVFP4
    # with n = k = 8192 on an H200 the model in
    # `jaxplugin/lab/inspection/simulation.py` gives 9.3 us instead of 11.9 for
    # m = 16, and 10.6 us instead of 17.6 for m = 32.
    num_warps = 4
    if block_m == 32 and (not has_short_values or decodes_both):
      block_n = 64
    elif decodes_both and shape.n > 128:
      block_n, num_warps = 256, 8
  elif has_short_values and not architecture.has_wgmma:
    # Memory latency requires 4 stages of 16 KiB of FP4 for each of an SM's two
    # blocks. A tile that is wide in n reorders fewer values of lhs for each
    # value of rhs, but with many rows it has too many accumulators.
    wide = shape.m <= _WIDE_M and shape.n > 128
    block_n, block_k = (256, 128) if wide else (128, 256)
  return MatmulConfig(
    path="small_m",
    block_m=block_m,
    block_n=block_n,
    block_k=block_k,
    num_warps=num_warps,
    num_stages=4,
    swap=True,
  )


def _fp8_tile(shape: MatmulShape, architecture: Architecture) -> MatmulConfig:
  del architecture
  # Three programs share an SM. One scales sums while others multiply. For 8192
  # x 8192 x 8192 on sm_90, the model in
  # `jaxplugin/lab/inspection/simulation.py` gives 82 % of the FP8 peak if rhs
  # has square blocks of 128, 63 % with blocks of 1 x 128, and 97 % with one
  # scale for a row.
  return MatmulConfig(
    path="fp8",
    block_m=64,
    block_n=_block(shape.n, 128),
    block_k=128,
    num_warps=4,
    num_stages=3,
  )


def _int8_tile(shape: MatmulShape, architecture: Architecture) -> MatmulConfig:
  del architecture
  # With one scale for a row, the model in
  # `jaxplugin/lab/inspection/simulation.py` gives 99 % of the INT8 peak of
  # sm_90. With more scales, three programs share an SM: one scales sums while
  # others multiply.
  blocks = constraints.scaled_blocks(shape).values()
  is_few = shape.m <= SMALL_M
  block_k = math.gcd(128, *blocks)
  block_m = _block(shape.m, 64 if blocks else 128)
  block_n = _block(shape.n, 128)
  return MatmulConfig(
    path="int8",
    block_m=block_m,
    block_n=block_n,
    block_k=block_k,
    num_warps=4 if is_few or blocks else 8,
    num_stages=6 if block_k == 32 else 4 if is_few else 3,
    swap=is_few,
  )


def _upcast_tile(
  shape: MatmulShape, architecture: Architecture
) -> MatmulConfig:
  # The decoded left operand of the matrix instruction may stay in registers.
  # It is the quantized operand, or rhs if lhs has few rows.
  swap = not shape.lhs.is_quantized or shape.m <= SMALL_M
  pieces = max(shape.lhs.pieces, shape.rhs.pieces)
  block_k = 32 if pieces > 1 else 128 if shape.m <= SMALL_M else 64
  num_warps = 8 if architecture.is_nvidia else 4
  num_stages = 3 if architecture.is_nvidia else 2
  block_m = _block(shape.m, 128 if pieces == 1 else 64)
  block_n = _block(shape.n, 128 if pieces == 1 else 64)
  blocks = constraints.scaled_blocks(shape).values()
  if blocks and pieces == 1:
    # Each step multiplies all accumulators, so longer steps are faster. By the
    # model in `jaxplugin/lab/inspection/simulation.py`, 8192 x 8192 x 8192 in
    # blocks of 128 takes 24 % less time on sm_90 than with steps of 64.
    if architecture.shared_memory_bytes >= _DEEP_TILE_BYTES:
      block_k = 128
    block_k = math.gcd(block_k, *blocks)
    is_few = shape.m <= SMALL_M and architecture.is_nvidia
    if block_k == 32 and (is_few or architecture.has_wgmma):
      # A step has few bytes. Four warps are 30 % faster by the same model, but
      # Triton 3.9 does not compile them for tensor memory.
      num_warps = 8 if architecture.has_tensor_memory else 4
      num_stages = 6
    if (
      block_k == 32 and architecture.has_wgmma and block_m * block_n > _FEW_SUMS
    ):
      # Three or more programs share an SM. One scales sums while others decode.
      # Tiles of 128 x 128 take 40 to 60 % more time by the same model.
      if swap:
        block_n = min(block_n, 64)
      else:
        block_m = min(block_m, 64)
  return MatmulConfig(
    path="upcast",
    block_m=block_m,
    block_n=block_n,
    block_k=block_k,
    num_warps=num_warps,
    num_stages=num_stages,
    swap=swap,
  )


def _smaller(config: MatmulConfig) -> Iterator[MatmulConfig]:
  """Yields `config` and smaller ones: stages, then k, then rows and columns."""
  while True:
    for num_stages in range(config.num_stages, 0, -1):
      yield dataclasses.replace(config, num_stages=num_stages)
    if config.block_k > constraints.LEAST_BLOCK_K[config.path]:
      config = dataclasses.replace(config, block_k=config.block_k // 2)
    elif max(config.block_m, config.block_n) > constraints.MIN_DOT_SIZE:
      axis = "block_n" if config.block_n >= config.block_m else "block_m"
      config = dataclasses.replace(config, **{axis: getattr(config, axis) // 2})
    else:
      return


def most_programs(
  config: MatmulConfig, shape: MatmulShape, core_count: int
) -> int:
  """Returns the number of programs that run at a time."""
  return _programs_per_core(config, shape) * core_count


def _programs_per_core(config: MatmulConfig, shape: MatmulShape) -> int:
  """Returns the number of programs that fit on a core at a time."""
  if config.block_k == 32 and constraints.scaled_blocks(shape):
    return 6 if config.block_m * config.block_n <= _FEW_SUMS else 3
  if config.path != "small_m" or config.num_warps > 4:
    return 2
  has_few = config.block_m * config.block_n <= _FEW_ACCUMULATORS
  has_few_bytes = shape.rhs.is_packed or config.block_n <= 64
  return 4 if has_few and has_few_bytes else 3


def _with_split(
  config: MatmulConfig, shape: MatmulShape, core_count: int
) -> MatmulConfig:
  """Returns `config` with a split of k if programs are too few for the GPU.

  It compares splits whose programs all run at once, by the work of the busiest
  core. This work includes the launch that adds up the parts, and the core's
  share of writing and reading the parts. Among nearly equal splits it takes the
  one with the fewest idle cores at the end, then the one with the fewest parts.
  """
  if shape.is_for_any_m:
    return config  # The parts of all rows could fill the memory.
  tiling = configs.Tiling(shape=shape, config=config)
  programs, steps = tiling.programs, tiling.steps
  sides = ((shape.lhs, config.block_m), (shape.rhs, config.block_n))
  bytes_of_step = sum(
    kind.bits * rows * config.block_k // 8 for kind, rows in sides
  )
  is_small = config.path == "small_m"
  least_steps = _MIN_STEPS_OF_SMALL if is_small else _MIN_STEPS_OF_SPLIT
  bytes_of_part = _PART_BYTES * shape.batch * shape.m * shape.n / core_count
  most = most_programs(config, shape, core_count)

  def cost(split: int) -> float:
    of_core = configs.cdiv(split * programs, core_count)
    overlap = _CYCLES_OF_FEW.get(of_core, 1.0)
    cost = of_core * configs.cdiv(steps, split) * overlap
    if split > 1:
      products = _PRODUCTS_OF_REDUCTION if is_small else _FEWER_PRODUCTS
      cost += products / tiling.products_of_step
      cost += split * bytes_of_part / bytes_of_step
    return cost

  splits = [
    split
    for split in range(1, _MAX_SPLIT + 1)
    if split == 1
    or (split * programs <= most and configs.cdiv(steps, split) >= least_steps)
  ]
  best = min(map(cost, splits))

  def idle(split: int) -> float:
    of_core = configs.cdiv(split * programs, core_count)
    return of_core * core_count / (split * programs)

  nearly = [split for split in splits if cost(split) <= _NEARLY * best]
  split = min(nearly, key=idle)
  return dataclasses.replace(config, split_k=split)
