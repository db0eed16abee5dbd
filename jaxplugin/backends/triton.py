# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The triton implementation: the kernels of kernels/, through jax-triton.

They read the quantized bytes once, dequantize in registers or leave that to the
matrix instruction, and fuse the global scale and the epilogue. An operand is
read where it lies, with the strides that its layout gives, and copied only
where dimensions that must merge are not adjacent.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin import call
from jaxplugin import canonical
from jaxplugin import formats
from jaxplugin import interleaving
from jaxplugin import problem as problem_lib
from jaxplugin import reference
from jaxplugin import scaled_array
from jaxplugin import target as target_lib
from jaxplugin import triton_library
from jaxplugin.kernels import configs
from jaxplugin.kernels import tuning

NAME: Final = "triton"
REASON: Final = "Triton kernels that read the quantized bytes once"

_PLAIN_NAMES: Final = {
  np.dtype(np.float32): "f32",
  formats.BF16: "bf16",
  np.dtype(np.float16): "f16",
}
_DTYPES: Final = {name: dtype for dtype, name in _PLAIN_NAMES.items()}
# Whose kernels decode FP4 themselves, with the help of PTX; newer ones leave it
# to the matrix instruction, which wants the usual order.
_READ_INTERLEAVED: Final = ("sm_80", "sm_89", "sm_90")


def supports(
  problem: problem_lib.DotProblem, target: target_lib.Target
) -> problem_lib.Unsupported | None:
  """Serves static sizes and the package's formats, where a config fits."""
  return triton_library.refusal(target) or _problem_gate(problem, target)


def _problem_gate(
  problem: problem_lib.DotProblem, target: target_lib.Target
) -> problem_lib.Unsupported | None:
  for side in (problem.lhs, problem.rhs):
    if side.format is not None and not side.format.is_standard:
      return problem_lib.Unsupported(
        f"serves {', '.join(f.name for f in formats.FORMATS)} and plain floats,"
        f" got {side.format}"
      )
  if not problem.sizes_are_static:
    return problem_lib.Unsupported("needs static sizes, some are symbolic")
  if problem.is_empty:
    return problem_lib.Unsupported("needs sizes of at least 1")
  try:
    _default_config(_dense_shape(problem, target), target)
  except ValueError as error:
    return problem_lib.Unsupported(str(error))
  return None


def reads_interleaved(
  problem: problem_lib.DotProblem, target: target_lib.Target
) -> bool:
  """Whether the kernels read FP4 that is interleaved as it is."""
  architecture = triton_library.architecture_of(target)
  return (
    architecture is not None
    and architecture.name in _READ_INTERLEAVED
    and problem.num_contracting == 1
    and problem.k is not None
    and problem.k % interleaving.UNIT == 0
  )


def plan(
  problem: problem_lib.DotProblem, target: target_lib.Target
) -> problem_lib.Plan:
  """A global scale that is one number is fused; the kernels are named."""
  applications: dict[problem_lib.GlobalScale, problem_lib.Application] = {
    "none": "none",
    "scalar": "fused",
    "array": "separate",
  }
  _, dense = launches(problem, target)
  names = ", ".join(launch.name for launch in dense)
  return problem_lib.Plan(
    global_scale=applications[problem.global_scale],
    notes=(f"kernels: {names}",),
  )


def launches(
  problem: problem_lib.DotProblem, target: target_lib.Target
) -> tuple[configs.MatmulShape, tuple[configs.Launch, ...]]:
  """What is launched for a problem that is served, of dense operands."""
  shape = _dense_shape(problem, target)
  return shape, _launches(shape, target)


def _dense_shape(
  problem: problem_lib.DotProblem, target: target_lib.Target
) -> configs.MatmulShape:
  """The kernels' description of a problem, of operands without gaps."""
  assert problem.batch is not None and problem.m is not None
  assert problem.n is not None and problem.k is not None
  k = _even_k(problem.k, problem.lhs.format, problem.rhs.format)
  operands = [
    configs.operand(
      _kind(side.format, side.dtype),
      rows,
      k,
      k_is_minor=side.contracting_is_minor,
      swizzled=side.scale_layout == scaled_array.SWIZZLED,
      interleaved=side.is_interleaved and reads_interleaved(problem, target),
    )
    for side, rows in ((problem.lhs, problem.m), (problem.rhs, problem.n))
  ]
  return configs.MatmulShape(
    batch=problem.batch,
    m=problem.m,
    n=problem.n,
    k=k,
    lhs=operands[0],
    rhs=operands[1],
    out_dtype=_PLAIN_NAMES[problem.out_dtype],
    has_global_scale=problem.global_scale == "scalar",
    has_bias=problem.has_bias,
    activation=problem.activation or "none",
    has_residual=problem.has_residual,
  )


def _kind(format: formats.BlockFormat | None, dtype: np.dtype) -> str:
  return _PLAIN_NAMES[dtype] if format is None else format.name


def _even_k(k: int, *sides: formats.BlockFormat | None) -> int:
  """k, padded by one where FP4 could not be packed otherwise."""
  is_packed = any(side is not None and side.is_fp4 for side in sides)
  return k + k % 2 if is_packed else k


def _default_config(
  shape: configs.MatmulShape, target: target_lib.Target
) -> configs.MatmulConfig:
  architecture = triton_library.architecture_of(target)
  assert architecture is not None
  return tuning.default_config(
    shape, architecture, core_count=target.core_count or 1
  )


def _launches(
  shape: configs.MatmulShape, target: target_lib.Target
) -> tuple[configs.Launch, ...]:
  architecture = triton_library.architecture_of(target)
  assert architecture is not None
  return configs.plan(shape, _default_config(shape, target), architecture)


def emit(
  operands: call.Operands,
  config: call.DotConfig,
  problem: problem_lib.DotProblem,
  target: target_lib.Target,
) -> jax.Array:
  """The kernels' launches, and whatever of the epilogue they cannot take."""

  def run(
    operands: call.Operands,
    config: call.DotConfig,
    problem: problem_lib.DotProblem,
  ) -> jax.Array:
    return _dot(operands, config, problem, target)

  return canonical.with_epilogue(run, operands, config, problem)


def _dot(
  operands: call.Operands,
  config: call.DotConfig,
  problem: problem_lib.DotProblem,
  target: target_lib.Target,
) -> jax.Array:
  """Runs the launches on operands where they lie, as far as possible."""
  shape = call.result_shape(config, operands)
  lhs, rhs, k = _strided_operands(operands, config, problem)
  matmul = dataclasses.replace(
    _dense_shape(problem, target), lhs=lhs.kind, rhs=rhs.kind, k=k
  )
  arrays: dict[str, Any] = {
    "lhs": lhs.values,
    "lhs_scale": lhs.scale,
    "rhs": rhs.values,
    "rhs_scale": rhs.scale,
  }
  if operands.global_scale is not None:
    arrays["global_scale"] = operands.global_scale.reshape(1)
  if operands.bias is not None:
    num_n = len(call.rhs_free(config, operands.rhs.ndim))
    arrays["bias"] = canonical.bias_row(operands.bias, shape, num_n)
  if operands.residual is not None:
    arrays["residual"] = jnp.broadcast_to(operands.residual, shape)
  for launch in _launches(matmul, target):
    views = dict(launch.views)
    inputs = [_view(arrays[name], views.get(name)) for name in launch.inputs]
    arrays[launch.output] = _call(launch, inputs, target)
  return arrays["out"].reshape(shape)


def _view(x: jax.Array, view: str | None) -> jax.Array:
  """The array as a kernel takes it; scales as bytes, which Triton knows."""
  if view == "e4m3":
    return lax.bitcast_convert_type(x, formats.E4M3)
  if view == "u32":
    return x if x.dtype == interleaving.WORDS else interleaving.from_bytes(x)
  if view == "u8" or x.dtype not in _PLAIN_NAMES:
    return lax.bitcast_convert_type(x, jnp.uint8)
  return x


def _call(
  launch: configs.Launch, inputs: Sequence[jax.Array], target: target_lib.Target
) -> jax.Array:
  """Runs a launch.

  Raises:
    NotImplementedError: this process cannot lower it; says why.
  """
  refusal = triton_library.lowering_refusal(target)
  if refusal is not None:
    raise NotImplementedError(
      f"block_scaled_dot: implementation triton: {refusal.reason}; or pass"
      ' implementation="xla"'
    )
  kernels = importlib.import_module("jaxplugin.kernels.block_scaled_matmul")
  out = jax.ShapeDtypeStruct(launch.output_shape, _DTYPES[launch.output_dtype])
  (result,) = triton_library.call(
    kernels.KERNELS[launch.kernel],
    inputs,
    [out],
    dict(launch.constexprs),
    name=launch.name,
    grid=launch.grid,
    num_warps=launch.num_warps,
    num_stages=launch.num_stages,
    fp_fusion=True,
    target=target,
  )
  return result


# Operands where they lie.


class _Strided(NamedTuple):
  """An operand: its arrays of any rank, FP4 packed, and how to read them."""

  values: jax.Array
  scale: jax.Array | None
  kind: configs.OperandKind


def _strided_operands(
  operands: call.Operands,
  config: call.DotConfig,
  problem: problem_lib.DotProblem,
) -> tuple[_Strided, _Strided, int]:
  """Both operands, and k with what it was padded by."""
  lhs_format, rhs_format = config.lhs.format, config.rhs.format
  assert problem.k is not None
  is_even = _even_k(problem.k, lhs_format, rhs_format) == problem.k
  if len(config.lhs_contracting) > 1 or not is_even:
    # Blocks along one of several dimensions, or an odd number of FP4 values:
    # these are copied.
    dense = [_of_dense(x) for x in canonical.dense_operands(operands, config)]
    k = dense[0].values.shape[-1]
    return dense[0], dense[1], 2 * k if dense[0].kind.is_packed else k
  sides = (
    (
      config.lhs,
      operands.lhs,
      operands.lhs_scale,
      config.lhs_contracting,
      config.lhs_batch,
    ),
    (
      config.rhs,
      operands.rhs,
      operands.rhs_scale,
      config.rhs_contracting,
      config.rhs_batch,
    ),
  )
  lhs, rhs = (_strided(*side) for side in sides)
  return lhs, rhs, problem.k


def _of_dense(operand: canonical.Dense) -> _Strided:
  values = operand.values
  format = operand.format
  if format is not None and format.is_fp4:
    values = _packed(values)
  kind = configs.OperandKind(
    format=_kind(format, np.dtype(values.dtype)),
    strides=_dense_strides(values.shape),
    scale_strides=(
      None if operand.scale is None else _dense_strides(operand.scale.shape)
    ),
  )
  return _Strided(values, operand.scale, kind)


def _dense_strides(shape: Sequence[int]) -> tuple[int, int, int]:
  _, rows, columns = shape
  return rows * columns, columns, 1


def _packed(values: jax.Array) -> jax.Array:
  """FP4 as bytes along the last axis; on a GPU the same memory."""
  if values.dtype == formats.PACKED:
    return values
  return scaled_array.pack_fp4(values, axis=-1)


def _strided(
  operand: call.OperandConfig,
  values: jax.Array,
  scale: jax.Array | None,
  contracting: call.Dims,
  batch: call.Dims,
) -> _Strided:
  """An operand with one contracting dimension."""
  format = operand.format
  name = _kind(format, np.dtype(values.dtype))
  scale_strides = None
  if format is not None:
    assert scale is not None
    scale, scale_strides = _strided_scale(
      operand, values, scale, contracting, batch
    )
    if format.is_fp4 and values.dtype != formats.PACKED:
      if contracting != (values.ndim - 1,):
        # Two values a byte along k, which here is another dimension.
        values = canonical.merge(values, batch=batch, contracting=contracting)
        contracting, batch = (2,), (0,)
      values = _packed(values)
    if operand.is_interleaved:
      values = interleaving.from_bytes(values)
  strides = _strides(values.shape, batch, contracting)
  if strides is None:
    values = canonical.merge(values, batch=batch, contracting=contracting)
    strides = _dense_strides(values.shape)
  kind = configs.OperandKind(
    format=name,
    strides=strides,
    scale_strides=scale_strides,
    is_interleaved=operand.is_interleaved,
  )
  return _Strided(values, scale, kind)


def _strided_scale(
  operand: call.OperandConfig,
  values: jax.Array,
  scale: jax.Array,
  contracting: call.Dims,
  batch: call.Dims,
) -> tuple[jax.Array, tuple[int, ...]]:
  """A scale and its strides: of three indices, or of tiles where swizzled."""
  if canonical.stays_swizzled(operand, values, contracting, batch):
    tile_rows = scaled_array.SCALE_TILE_ROWS * scale.shape[-1]
    return scale, (math.prod(scale.shape[len(batch) :]), tile_rows)
  # Rows of several dimensions merge only without padding between them.
  merges = len(call.free_dims(scale.ndim, contracting, batch)) > 1
  strides = _strides(scale.shape, batch, contracting)
  if merges or strides is None or operand.scale_layout != scaled_array.LINEAR:
    scale = reference.exact_scale(operand, values, scale)
    strides = _strides(scale.shape, batch, contracting)
  if strides is None:
    scale = canonical.merge(scale, batch=batch, contracting=contracting)
    strides = _dense_strides(scale.shape)
  return scale, strides


def _strides(
  shape: Sequence[int], batch: call.Dims, contracting: call.Dims
) -> tuple[int, int, int] | None:
  """Strides of (batch, row, k) of a row-major array, if each has one."""
  free = call.free_dims(len(shape), contracting, batch)
  of_dim = [math.prod(shape[d + 1 :]) for d in range(len(shape))]

  def merged(dims: call.Dims, unit: int) -> int | None:
    dims = tuple(d for d in dims if shape[d] != 1)
    for outer, inner in itertools.pairwise(dims):
      if of_dim[outer] != of_dim[inner] * shape[inner]:
        return None
    return of_dim[dims[-1]] if dims else unit

  of_batch, of_row, of_k = (
    merged(batch, 0),
    merged(free, 0),
    merged(contracting, 1),
  )
  if of_batch is None or of_row is None or of_k is None:
    return None
  return of_batch, of_row, of_k
