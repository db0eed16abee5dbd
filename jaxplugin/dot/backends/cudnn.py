# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cudnn implementation: XLA's call of cuDNN's block-scaled matmul.

It emits one of two custom calls, which XLA knows without registration:

  __op$block_scaled_dot(lhs, rhs, lhs_scale, rhs_scale[, global_scale])
    linear scales; XLA pads rows to 128 and scale columns to 4 and transposes
    the scales to the 128x4 layout before each call of the kernel.
  __cudnn$blockScaledDot(same)
    the form that XLA converts the first one to: everything is padded, and the
    scales are in the 128x4 layout. The backend emits it if a scale is swizzled,
    so the scale of a static weight is never transposed again. If the source of
    the other side is known (`Side.source`), the source is quantized again,
    padded and swizzled, and XLA drops the first quantize kernels.

Both take [m, k] x [n, k] or [batch, m, k] x [batch, n, k], row-major, and a
global scale that is a scalar of the result's dtype.

Sources: XLA, block_scaling_rewriter.{h,cc}; openxla/xla#41201; cuDNN
documentation, "Block scaling".
"""

from __future__ import annotations

import json
import math
from typing import Final

import jax
import jax.ffi
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.core import blocking, decisions, formats, targets
from jaxplugin.dot import calls, epilogue, problems, reference, sides
from jaxplugin.quantization import quantize_primitive

DOT_TARGET: Final = "__op$block_scaled_dot"
SWIZZLED_DOT_TARGET: Final = "__cudnn$blockScaledDot"

# Requirements of XLA's block scaling rewriter.
MIN_VERSION: Final = targets.MIN_BLOCK_SCALED_CUDNN
MIN_VERSION_GLOBAL_SCALE: Final = (9, 13, 0)
MIN_COMPUTE_CAPABILITY: Final = targets.MIN_BLOCK_SCALED_CAPABILITY


# Results up to this size may be written in f32 to save one kernel launch: the 2
# extra bytes of each take less time, 1 us for 8 MB on a B200 (data sheet:
# 8 TB/s).
_FEW_RESULTS: Final = 1 << 22

_PLATFORMS: Final = ("cuda",)
_OWN_WORKSPACE: Final = (
  "XLA chooses the workspace of cuDNN, which workspace_bytes does not limit"
)
_PRODUCT_FIRST: Final = (
  "both global scales are multiplied to one number for the call: a product"
  " below 2^-126 becomes zero, and one beyond the range of float32 becomes"
  ' Inf; precision="highest" applies one after the other'
)


def _rank(target: targets.Target) -> int | None:
  return 10 if _device_gate(target) is None else None


def supports(
  problem: problems.DotProblem, target: targets.Target
) -> decisions.Unsupported | None:
  """Checks the requirements of XLA's rewriter, starting with the device."""
  return _device_gate(target) or _version_gate(target) or _problem_gate(problem)


def _device_gate(target: targets.Target) -> decisions.Unsupported | None:
  refusal = decisions.platform_refusal(target, *_PLATFORMS)
  if refusal is not None:
    return refusal
  dotted = targets.format_version
  capability = (
    f"needs compute capability {dotted(MIN_COMPUTE_CAPABILITY)} or higher, the"
    " target"
  )
  if target.compute_capability is None:
    return decisions.Unsupported(f"{capability}'s is not known")
  if target.compute_capability < MIN_COMPUTE_CAPABILITY:
    return decisions.Unsupported(
      f"{capability} has {dotted(target.compute_capability)}"
    )
  return None


def _version_gate(target: targets.Target) -> decisions.Unsupported | None:
  dotted = targets.format_version
  have = target.cudnn_version
  needs = f"needs cuDNN {dotted(MIN_VERSION)} or newer, the target has"
  if have is None:
    return decisions.Unsupported(f"{needs} none")
  if have < MIN_VERSION:
    return decisions.Unsupported(f"{needs} {dotted(have)}")
  # No release to 9.28 is known to be wrong: the bugs published for 9.18 to 9.24
  # are of grouped matmuls and attention (flashinfer-ai/flashinfer#3792,
  # NVIDIA/cudnn-frontend#414).
  return None


def _problem_gate(problem: problems.DotProblem) -> decisions.Unsupported | None:
  lhs, rhs = problem.lhs.format, problem.rhs.format
  if lhs is None or rhs is None:
    return decisions.Unsupported("needs both operands quantized")
  mx_pair = {lhs, rhs} <= {formats.MXFP8, formats.MXFP8_E5M2}
  if lhs == rhs == formats.MXFP8_E5M2:
    return decisions.Unsupported("does not multiply E5M2 by E5M2")
  if not mx_pair and not lhs == rhs == formats.NVFP4:
    return decisions.Unsupported(
      f"supports mxfp8 pairs and nvfp4 x nvfp4, got {lhs} x {rhs}"
    )
  if not problem.sizes_are_static:
    return decisions.Unsupported("needs static sizes")
  if problem.is_empty:
    return decisions.Unsupported("needs sizes of at least 1")
  if not problem.blocks_pair_up:
    return decisions.Unsupported(
      "needs both sides blocked along the same contracting dimension"
    )
  size = problem.k if problem.blocked_k is None else problem.blocked_k
  if size is not None and size % lhs.block_size:
    return decisions.Unsupported(
      f"needs k divisible by {lhs.block_size}, got k={size}"
    )
  return None


def plan(
  problem: problems.DotProblem, target: targets.Target
) -> decisions.Plan:
  """Returns how the global scale is applied, and what XLA pads."""
  notes = []
  relative_error = 0.0
  application: decisions.Application = "none"
  if problem.global_scale != "none":
    is_fused = _fuses_global_scale(problem, target)
    application = "fused" if is_fused else "separate"
    dtype = _call_dtype(problem, target)
    if is_fused and dtype != np.float32:
      relative_error = reference.rounding_error(dtype)
      notes.append(
        f"the global scale is rounded to {dtype.name} (relative error at most"
        f' 2^{math.log2(relative_error):.0f}); precision="highest" applies it'
        " in float32"
      )
    if is_fused and problem.has_global_power:
      notes.append(_PRODUCT_FIRST)
  if target.options.workspace_bytes is not None:
    notes.append(_OWN_WORKSPACE)
  return decisions.Plan(
    global_scale=application,
    padding=_padding(problem),
    notes=tuple(notes),
    relative_error=relative_error,
    is_native=True,
  )


def _fuses_global_scale(
  problem: problems.DotProblem, target: targets.Target
) -> bool:
  """Returns whether the global scale is the call's fifth operand."""
  # Older versions take a fifth operand and silently ignore it.
  if (target.cudnn_version or MIN_VERSION) < MIN_VERSION_GLOBAL_SCALE:
    return False
  if problem.global_scale != "scalar":
    return False
  if problem.has_global_power and problem.highest_precision:
    return False
  if problem.has_global_power and _is_cut_cheaply(problem):
    return False
  # The operand has the dtype of the call's result, which is f32 where an
  # epilogue follows. An f16 would lose more than precision: the product of two
  # NVFP4 global scales is often below its smallest number, 2^-24.
  if problem.has_epilogue or problem.out_dtype == np.float32:
    return True
  return problem.out_dtype == formats.BF16 and not problem.highest_precision


def _is_cut_cheaply(problem: problems.DotProblem) -> bool:
  """Returns whether a small result has padded rows or columns to slice off.

  The kernel that slices also multiplies by both global scales, so the custom
  call has no fifth operand and writes f32. A fifth operand would need one more
  kernel, to multiply the global scales.
  """
  sizes = (problem.batch, problem.m, problem.n)
  assert all(size is not None for size in sizes)
  batch, m, n = (int(size) for size in sizes if size is not None)
  tile = layouts.SCALE_TILE_ROWS
  padded = batch * blocking.round_up(m, tile) * blocking.round_up(n, tile)
  return padded != batch * m * n and padded <= _FEW_RESULTS


def _call_dtype(
  problem: problems.DotProblem, target: targets.Target
) -> np.dtype:
  """Returns the dtype of the custom call's result: f32 if f32 ops follow it."""
  is_last = not problem.has_epilogue and (
    problem.global_scale == "none" or _fuses_global_scale(problem, target)
  )
  return problem.out_dtype if is_last else np.dtype(np.float32)


def _padding(problem: problems.DotProblem) -> str:
  """Describes the kernel's padding for `explain`."""
  assert problem.lhs.format is not None and problem.k is not None
  parts = []
  for side, size in (("lhs", problem.m), ("rhs", problem.n)):
    assert size is not None
    padded = blocking.round_up(size, layouts.SCALE_TILE_ROWS)
    if padded != size:
      parts.append(f"{side} rows {size} to {padded}")
  columns = problem.k // problem.lhs.format.block_size
  padded = blocking.round_up(columns, layouts.SCALE_TILE_COLUMNS)
  if padded != columns:
    parts.append(f"scale columns {columns} to {padded}")
  return ", ".join(parts)


def emit(
  call: calls.DotCall, problem: problems.DotProblem, target: targets.Target
) -> jax.Array:
  """Emits the custom call, and f32 ops for the rest of the epilogue."""
  shape = call.shape
  is_fused = _fuses_global_scale(problem, target)
  dtype = _call_dtype(problem, target)
  lhs, rhs = _canonical_sides(call, target)
  extra: tuple[jax.Array, ...] = ()
  if is_fused:
    number = call.global_scale
    if call.global_power is not None:
      number = number * call.global_power
    extra = (number.astype(dtype),)
  if layouts.SWIZZLED in (lhs.scale_layout, rhs.scale_layout):
    assert problem.m is not None and problem.n is not None
    result = _swizzled_dot(lhs, rhs, (problem.m, problem.n), extra, dtype)
  else:
    result = _linear_dot(lhs, rhs, extra, dtype)
  result = result.reshape(shape)
  if is_fused:
    call = call.replace(global_scale=None, global_power=None)
  return epilogue.apply(result, call)


def _canonical_sides(
  call: calls.DotCall, target: targets.Target
) -> tuple[sides.Side, sides.Side]:
  """Returns both sides in the shapes and layouts of the custom call.

  If each side has a swizzled scale or can be quantized again, the sides that
  can are quantized again into whole tiles.
  """
  both = (call.lhs, call.rhs)
  if all(side.stays_swizzled or _can_requantize(side) for side in both):
    lhs, rhs = (
      _in_whole_tiles(side, target)
      if _can_requantize(side)
      else _canonical(side)
      for side in both
    )
  else:
    lhs, rhs = map(_canonical, both)
  return lhs, rhs


def _can_requantize(side: sides.Side) -> bool:
  """Returns whether a side has a source that reshapes without a transpose."""
  in_order = (*side.batch, *side.free, *side.contracting)
  return (
    side.source is not None
    and len(side.contracting) == 1
    and in_order == tuple(range(side.ndim))
  )


def _in_whole_tiles(side: sides.Side, target: targets.Target) -> sides.Side:
  """Quantizes the source of a side to padded rows and a swizzled scale.

  The codes are the same as the side's. Requires `_can_requantize(side)`.
  """
  assert side.format is not None
  x, global_scale = side.merge(side.source), side.source_global_scale
  if global_scale is not None:
    global_scale = global_scale.reshape(())
  batch = (0,) if side.batch else ()
  if not batch:
    x = x[0]
  values, scale = quantize_primitive.quantize_in_whole_tiles(
    x, global_scale, side.format, target
  )
  return side.replace(
    values=values,
    scale=scale,
    scale_layout=layouts.SWIZZLED,
    axis=x.ndim - 1,
    contracting=(x.ndim - 1,),
    batch=batch,
  )


def _canonical(side: sides.Side) -> sides.Side:
  """Returns a side reshaped to [batch, rows, k] or [rows, k].

  A swizzled scale stays swizzled if possible. A linear scale may be padded, to
  at most 128 rows and 4 columns.
  """
  # A padded scale cannot be reshaped to merge dimensions.
  merges = len(side.contracting) + len(side.free) > 2
  is_swizzled = side.stays_swizzled
  if not is_swizzled and (merges or side.scale_layout == layouts.SWIZZLED):
    side = side.with_linear_scale()
  format, position = side.format, side.blocked_position
  assert format is not None and position is not None
  side = side.with_last(position)
  values = side.merge(side.values)
  if values.dtype == formats.PACKED and format.is_fp4:
    values = layouts.unpack_fp4(values, axis=-1)
  _, rows, k = values.shape
  scale = side.merge(side.scale)
  columns = k // format.block_size
  if not is_swizzled and scale.shape[1:] != (rows, columns):
    padded = (
      blocking.round_up(rows, layouts.SCALE_TILE_ROWS),
      blocking.round_up(columns, layouts.SCALE_TILE_COLUMNS),
    )
    limits = [
      min(*sizes) for sizes in zip(scale.shape[1:], padded, strict=True)
    ]
    scale = scale[:, : limits[0], : limits[1]]
  scale = _mask_columns(scale, columns, is_swizzled)
  if side.batch:
    return side.replace(
      values=values, scale=scale, axis=2, contracting=(2,), batch=(0,)
    )
  return side.replace(
    values=values[0], scale=scale[0], axis=1, contracting=(1,)
  )


def _mask_columns(
  scale: jax.Array, columns: int, is_swizzled: bool
) -> jax.Array:
  """Sets the scale's padding columns to zero bytes.

  The kernel multiplies padding scales by zeros, so a NaN among them would reach
  the result. Padding rows may have any bytes, because their results are sliced
  off.
  """
  have = scale.shape[-1]
  if have == columns:
    return scale
  code = lax.bitcast_convert_type(scale, jnp.uint8)
  if is_swizzled:
    per_tile = layouts.SCALE_TILE_COLUMNS
    tiles = have // per_tile
    tile_shape = (-1, tiles, layouts.SCALE_TILE_ROWS, per_tile)
    column = np.arange(tiles)[:, None, None] * per_tile + np.arange(per_tile)
    code = jnp.where(column < columns, code.reshape(tile_shape), jnp.uint8(0))
    code = code.reshape(scale.shape)
  else:
    code = jnp.where(np.arange(have) < columns, code, jnp.uint8(0))
  return lax.bitcast_convert_type(code, scale.dtype)


def _linear_dot(
  lhs: sides.Side,
  rhs: sides.Side,
  extra: tuple[jax.Array, ...],
  dtype: np.dtype,
) -> jax.Array:
  """Emits `__op$block_scaled_dot`, which XLA pads and swizzles."""
  backend_config = None
  if lhs.scale_is_padded or rhs.scale_is_padded:
    # The shape of a padded scale does not determine the block size.
    assert lhs.format is not None
    backend_config = json.dumps(
      {"block_scaled_dot_backend_config": {"block_size": lhs.format.block_size}}
    )
  shape = (*lhs.values.shape[:-1], rhs.values.shape[-2])
  return jax.ffi.ffi_call(
    DOT_TARGET,
    jax.ShapeDtypeStruct(shape, dtype),
    custom_call_api_version=1,
    legacy_backend_config=backend_config,
  )(lhs.values, rhs.values, lhs.scale, rhs.scale, *extra)


def _swizzled_dot(
  lhs: sides.Side,
  rhs: sides.Side,
  sizes: tuple[int, int],
  extra: tuple[jax.Array, ...],
  dtype: np.dtype,
) -> jax.Array:
  """Emits `__cudnn$blockScaledDot`, on padded and swizzled operands.

  Args:
    lhs, rhs: sides whose values may have rows of zeros appended.
    sizes: rows of lhs and rhs without padding.
  """
  tile = layouts.SCALE_TILE_ROWS
  values, scales = [], []
  for side in (lhs, rhs):
    rows = side.values.shape[-2]
    padded = blocking.round_up(rows, tile)
    values.append(blocking.pad_axis(side.values, -2, padded))
    scale = side.scale
    if side.scale_layout == layouts.LINEAR:
      columns = side.scale_shape[-1]
      scale = layouts.swizzle_scale(scale[..., :rows, :columns])
    scales.append(scale)
  shape = (*values[0].shape[:-1], values[1].shape[-2])
  result, _ = jax.ffi.ffi_call(
    SWIZZLED_DOT_TARGET,
    (
      jax.ShapeDtypeStruct(shape, dtype),
      jax.ShapeDtypeStruct((0,), jnp.uint8),  # workspace, sized by XLA
    ),
    custom_call_api_version=1,
  )(*values, *scales, *extra)
  return result[..., : sizes[0], : sizes[1]]


def _reads(
  layout: str, problem: problems.DotProblem, target: targets.Target
) -> bool:
  del problem, target
  return layout == layouts.SWIZZLED


def _source(target: targets.Target) -> decisions.Source | None:
  """Returns the versions of XLA and of the cuDNN library."""
  if target.cudnn_version is None:
    return None
  version = targets.format_version(target.cudnn_version)
  return decisions.Source(
    toolchain=(("cudnn", version), ("jaxlib", jaxlib.__version__))
  )


BACKEND: Final[decisions.BackendRecord[problems.DotProblem]] = (
  decisions.BackendRecord(
    name="cudnn",
    summary="cuDNN's block-scaled matmul, called by XLA",
    platforms=_PLATFORMS,
    rank=_rank,
    supports=supports,
    plan=plan,
    emit=emit,
    reads=_reads,
    tunable=decisions.Tunable(source=_source),
  )
)
