# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""All constraints on shapes and configs of the matmul kernels.

They are pure functions of plain values and do not import Triton.
"""

from __future__ import annotations

from typing import Final

from jaxplugin.kernels.gpu import configs, matmul_plans

from jaxplugin.kernels import architectures, descriptors, formats

Architecture = architectures.Architecture
MatmulConfig = configs.MatmulConfig
MatmulShape = configs.MatmulShape

_DOT_SCALED_ELEMENTS: Final = ("e4m3", "e5m2", "e2m1")
MIN_DOT_SIZE: Final = 16  # rows and columns of Triton's smallest dot
_MAX_WARPS: Final = 16
MAX_INDEX: Final = 2**31 - 1
_BF16_BYTES: Final = 2
_F32_BYTES: Final = 4
_TENSOR_MEMORY_LANES: Final = 128
# A tile has whole scale blocks and whole steps of the matrix instruction.
LEAST_BLOCK_K: Final[dict[configs.Path, int]] = {
  "upcast": 32,
  "int8": 32,
  "small_m": 128,  # values of k that the kernel reorders
  "fp8": 128,  # values of k that matrix instructions sum
  # kind::mxf4nvf4 and v_mfma_scale multiply 64 k at once. With 128, the scales
  # of a row are whole 32-bit words, as tensor memory requires.
  "native": 128,
}
_MAX_INT8_K: Final = 2**17 - 1  # a sum of products of -128 fits in int32

# Limit on a thread's registers for accumulators. It has 255 in all.
_MAX_ACCUMULATOR_REGISTERS: Final = 128

# With descriptors, a tile in shared memory starts at a multiple of TMA's
# pattern of swizzled rows, and each stage has a barrier.
_TMA_TILE_ALIGNMENT: Final = 1024
_TMA_BARRIER_BYTES: Final = 16

# Barriers in shared memory that signal the completion of tcgen05.mma.
_MMA_BARRIERS_BYTES: Final = 16


def path_error(
  path: configs.Path, shape: MatmulShape, architecture: Architecture
) -> str | None:
  """Returns why a path does not support `shape`, or None."""
  if path == "native":
    return native_error(shape, architecture)
  if path == "fp8":
    return fp8_error(shape, architecture)
  if path == "int8":
    return int8_error(shape, architecture)
  return small_m_error(shape) if path == "small_m" else None


def native_error(shape: MatmulShape, architecture: Architecture) -> str | None:
  """Returns why the native path does not support `shape`, or None."""
  names = (shape.lhs.format, shape.rhs.format)
  # With a plain operand Triton would upcast the other one.
  if not (shape.lhs.is_quantized and shape.rhs.is_quantized):
    return f"both operands must have a block format, got {names}"
  if shape.lhs.is_interleaved or shape.rhs.is_interleaved:
    return "values must be in their usual order, got interleaved ones"
  if not architecture.has_scaled_dot:
    return f"{architecture.name} has no block-scaled matrix instruction"
  # Hardware supports FP6, but Triton's `dot_scaled` (3.9) does not.
  for kind in (shape.lhs, shape.rhs):
    if kind.element.name not in _DOT_SCALED_ELEMENTS:
      return f"Triton's tl.dot_scaled does not take {kind.element.name}"
    if kind.format not in formats.FORMATS:
      return (
        f"no block-scaled matrix instruction takes {kind.element.name} with"
        f" {kind.scale.name} scales of {kind.values_per_scale} values"
      )
  # One instruction has one block size.
  if (names[0] == "nvfp4") != (names[1] == "nvfp4"):
    return f"nvfp4 multiplies only nvfp4, got {names}"
  # Triton upcasts mixed FP4 and FP8 operands of mma.sync.
  if shape.lhs.bits != shape.rhs.bits and not architecture.mixes_fp4_and_fp8:
    return f"{architecture.name} multiplies FP4 only with FP4, got {names}"
  # AMD's instructions support only E8M0 scales.
  if "nvfp4" in names and not architecture.scales_by_e4m3:
    return f"{architecture.name} has no matrix instruction with E4M3 scales"
  return None


def fp8_error(shape: MatmulShape, architecture: Architecture) -> str | None:
  """Returns why the fp8 path does not support `shape`, or None."""
  if not shape.may_round_sums:
    return "sums of FP8 matrix instructions have fewer bits than f32"
  if not architecture.has_fp8_dot:
    return f"{architecture.name} has no FP8 matrix instruction without scales"
  return _sums_error(shape, formats.E4M3) or _blocks_error(shape, "fp8")


def int8_error(shape: MatmulShape, architecture: Architecture) -> str | None:
  """Returns why the int8 path does not support `shape`, or None."""
  if not architecture.has_int8_dot:
    return f"{architecture.name} has no INT8 matrix instruction"
  error = _sums_error(shape, formats.INT8)
  if error is None and shape.k > _MAX_INT8_K:
    return f"k must be at most {_MAX_INT8_K} for sums in int32, got {shape.k}"
  return error


def _sums_error(shape: MatmulShape, element: formats.Element) -> str | None:
  """Returns why `element`'s instruction cannot sum codes, or None if it can."""
  for name, kind in (("lhs", shape.lhs), ("rhs", shape.rhs)):
    if not kind.scales_sums or kind.element != element:
      type_name = element.name.upper()
      return f"{name} must be {type_name} with scales that multiply sums"
    if not kind.k_is_minor:
      return f"k must be the minor dimension of {name}, got {kind.strides}"
  return None


def _blocks_error(shape: MatmulShape, path: configs.Path) -> str | None:
  """Returns which blocks a path's least step would divide, or None."""
  least = LEAST_BLOCK_K[path]
  for name, size in scaled_blocks(shape).items():
    if size % least:
      return (
        f"blocks of {name} must have a multiple of {least} values, got {size}"
      )
  return None


def small_m_error(shape: MatmulShape) -> str | None:
  """Returns why the small_m kernel does not support `shape`, or None."""
  rhs = shape.rhs
  if not rhs.is_quantized:
    return f"rhs must have a block format, got {rhs.format}"
  # If k of lhs is not minor, Triton 3.9 finds no shared memory layout for the
  # reordered k ("Illegal shared layout").
  for name, strides in (("lhs", shape.lhs.strides), ("rhs", rhs.strides)):
    if strides[2] != 1:
      return f"k must be the minor dimension of {name}, got strides {strides}"
  error = _blocks_error(shape, "small_m")
  if error is not None:
    return error
  # FP4 and INT4 are loaded in words of eight values.
  if rhs.is_packed and shape.k % 8:
    return f"k must be a multiple of 8 for {rhs.format}, got {shape.k}"
  if rhs.is_interleaved:
    return None
  if rhs.is_packed and any(s % configs.WORD_BYTES for s in rhs.strides[:2]):
    return f"strides of rhs must be multiples of 4 bytes, got {rhs.strides}"
  return None


def config_error(
  config: MatmulConfig, shape: MatmulShape, architecture: Architecture
) -> str | None:
  """Returns why `config` cannot compute `shape`, or None if it can."""
  blocks = (config.block_m, config.block_n, config.block_k)
  # There is nothing to launch for an empty result.
  if min(shape.batch, shape.m, shape.n) < 1 or shape.k < 0:
    return f"sizes must be positive, got {shape}"
  # Indices within a matrix are 32-bit, up to one tile beyond its end. Offsets
  # are 64-bit.
  if max(shape.m, shape.n, shape.k) + max(blocks) > MAX_INDEX:
    return f"m, n and k must be below 2^31, got {shape}"
  if shape.reads_m:
    error = _reads_m_error(config, shape)
    if error is not None:
      return error
  # A mask selects whole bytes, which are pairs of values.
  for kind in (shape.lhs, shape.rhs):
    if shape.k % 2 and kind.is_packed:
      name = {"e2m1": "FP4", "int4": "INT4"}[kind.element.name]
      return f"k must be even for {name}, got {shape.k}"
  if shape.lhs.is_interleaved or shape.rhs.is_interleaved:
    error = _interleaving_error(shape, architecture)
    if error is not None:
      return error
  # Sizes of Triton tensors are powers of two.
  for size in (*blocks, config.num_warps):
    if size < 1 or size & (size - 1):
      return f"blocks and num_warps must be powers of two, got {config}"
  if not 1 <= config.num_warps <= _MAX_WARPS:
    return f"num_warps must be 1 to {_MAX_WARPS}, got {config.num_warps}"
  if min(config.split_k, config.group_m, config.num_stages) < 1:
    return f"split_k, group_m and num_stages must be positive, got {config}"
  if min(config.block_m, config.block_n) < MIN_DOT_SIZE:
    return f"block_m and block_n must be at least {MIN_DOT_SIZE}, got {config}"
  error = _step_error(config, shape)
  if error is not None:
    return error
  least = LEAST_BLOCK_K[config.path]
  if config.block_k < least:
    return f"block_k must be at least {least}, got {config.block_k}"
  # The grid has one dimension.
  if configs.Tiling(shape=shape, config=config).programs > MAX_INDEX:
    return f"more than 2^31 programs: {shape}, {config}"
  error = path_error(config.path, shape, architecture)
  if error is None and config.use_descriptors:
    error = _use_of_descriptors_error(config, shape, architecture)
  return error or _resource_error(config, shape, architecture)


def _reads_m_error(config: MatmulConfig, shape: MatmulShape) -> str | None:
  """Returns why a kernel cannot read m from an array, or None if it can."""
  if shape.batch != 1:
    return f"the batch must be 1 if kernels read m, got {shape.batch}"
  if shape.lhs.is_swizzled or shape.lhs.rows_per_scale > 1:
    return "lhs must have a linear scale for each row if kernels read m"
  if not shape.lhs.k_is_minor:
    return "k must be the minor dimension of lhs if kernels read m"
  if config.use_descriptors:
    return "TMA descriptors have a fixed m, so kernels cannot read it"
  return None


def _step_error(config: MatmulConfig, shape: MatmulShape) -> str | None:
  """Returns which scales would multiply sums of two blocks, or None."""
  for side, kind, rows in (
    ("lhs", shape.lhs, config.block_m),
    ("rhs", shape.rhs, config.block_n),
  ):
    if kind.rows_per_scale > 1 and kind.rows_per_scale % rows:
      return (
        f"tiles of {side} must divide the {kind.rows_per_scale} rows of a"
        f" square block, got {rows} rows"
      )
  for name, size in scaled_blocks(shape).items():
    if size % 32:
      return (
        f"blocks of {name} must have a multiple of 32 values, or all of k, got"
        f" {size}"
      )
    if size % config.block_k:
      return (
        f"block_k must divide the {size} values of a block of {name}, got"
        f" {config.block_k}"
      )
  return None


def scaled_blocks(shape: MatmulShape) -> dict[str, int]:
  """Returns the block sizes of operands whose scales multiply sums of steps.

  The result omits blocks that span a whole row.
  """
  return {
    name: kind.values_per_scale
    for name, kind in (("lhs", shape.lhs), ("rhs", shape.rhs))
    if kind.scales_sums and kind.values_per_scale < shape.k
  }


def _use_of_descriptors_error(
  config: MatmulConfig, shape: MatmulShape, architecture: Architecture
) -> str | None:
  """Returns why TMA cannot copy the values, or None if it can."""
  if not architecture.has_tma:
    return (
      "TMA descriptors need an NVIDIA GPU from sm_90 on, not"
      f" {architecture.name}"
    )
  # Its threads load values in a lane-specific order of k.
  if config.path == "small_m":
    return "the small_m kernel loads values by threads, not TMA descriptors"
  # TMA would have to pad FP4 next to FP8 to bytes, which jax-triton 0.4.1 does
  # not support ("fp4_padded TMA descriptors are not supported").
  if config.path == "native" and shape.lhs.bits != shape.rhs.bits:
    names = (shape.lhs.format, shape.rhs.format)
    return (
      "jax-triton has no TMA descriptors of FP4 next to FP8 for the"
      f" block-scaled matrix instruction, got {names}"
    )
  operands = (("lhs", shape.lhs), ("rhs", shape.rhs))
  for (name, kind), descriptor in zip(
    operands, matmul_plans.operand_descriptors(shape, config), strict=True
  ):
    error = descriptors.descriptor_error(descriptor, kind.element_bytes)
    if error is not None:
      return f"TMA descriptor of {name}: {error}"
  return None


def _interleaving_error(
  shape: MatmulShape, architecture: Architecture
) -> str | None:
  # 16 values share two words.
  if shape.k % configs.INTERLEAVED_UNIT:
    return (
      f"k must be a multiple of {configs.INTERLEAVED_UNIT} if values are"
      f" interleaved, got {shape.k}"
    )
  # Decoding interleaved values needs inline PTX.
  if not architecture.is_nvidia:
    return f"interleaved values need an NVIDIA GPU, not {architecture.name}"
  return None


def _resource_error(
  config: MatmulConfig, shape: MatmulShape, architecture: Architecture
) -> str | None:
  """Returns which of shared memory, tensor memory or registers is exceeded."""
  name = architecture.name
  tile = config.block_m * config.block_n
  if architecture.has_tensor_memory:
    # A 32-bit column holds 128 accumulators. Scales and decoded operands may
    # need as many columns again. Beyond the limit Triton emits a trap.
    columns = 2 * max(tile // _TENSOR_MEMORY_LANES, config.block_m)
    if columns > architecture.tensor_memory_columns:
      return (
        f"{config} may need {columns} columns of tensor memory, {name} has"
        f" {architecture.tensor_memory_columns}"
      )
  shared = shared_memory_bound(config, shape, architecture)
  if shared > architecture.shared_memory_bytes:
    return (
      f"{config} may need {shared} bytes of shared memory, {name} has"
      f" {architecture.shared_memory_bytes}"
    )
  threads = config.num_warps * architecture.warp_size
  # Accumulators are in registers, also when they leave tensor memory.
  if tile > threads * _MAX_ACCUMULATOR_REGISTERS:
    return (
      f"{config} has {tile // threads} accumulators a thread, at most"
      f" {_MAX_ACCUMULATOR_REGISTERS} leave registers for the rest"
    )
  return None


def shared_memory_bound(
  config: MatmulConfig, shape: MatmulShape, architecture: Architecture
) -> int:
  """Returns an upper bound on the matmul kernel's bytes of shared memory.

  It holds the stages of the loads and the decoded operands. After the main loop
  the accumulators use the same memory before they are stored.
  """
  loaded = 0
  decoded = 0
  for kind, rows in ((shape.lhs, config.block_m), (shape.rhs, config.block_n)):
    values = rows * config.block_k
    bits = kind.bits
    if config.path == "native" and shape.lhs.bits != shape.rhs.bits:
      bits = 8  # FP4 next to FP8 is padded to bytes.
    loaded += values * bits // 8
    if config.use_descriptors:
      loaded += -loaded % _TMA_TILE_ALIGNMENT + _TMA_BARRIER_BYTES
    if kind.scales_values:
      loaded += values // kind.values_per_scale
    if config.path not in ("native", "fp8", "int8"):
      decoded += values * _BF16_BYTES * kind.pieces
  buffers = config.num_stages
  if not architecture.is_nvidia:
    if config.path == "native":
      loaded += loaded // 16  # Padding of rows avoids bank conflicts.
    else:
      buffers = max(buffers - 1, 1)  # The first stage stays in registers.
  barriers = _MMA_BARRIERS_BYTES if architecture.has_tensor_memory else 0
  accumulators = config.block_m * config.block_n * _F32_BYTES
  return max(buffers * loaded + decoded + barriers, accumulators)
