# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Views of quantizing and dequantizing for backends of other packages."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import jax
import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.core import decisions, formats, targets
from jaxplugin.plugins import registry
from jaxplugin.quantization import problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeProblem:
  """The properties of a `quantize` by which `Backend.supports` decides.

  Attributes:
    shape: shape of the floats. A symbolic size is not an int.
    dtype: dtype of the floats: float32, bfloat16 or float16.
    format: the block format.
    axis: the blocked dimension, not negative.
    scale_rounding: "up" or "floor", for scales that are powers of two.
    computes_global_scale: whether the backend computes the global scale, which
      otherwise is given if the format has one.

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> problem = jp.backends.QuantizeProblem(
    ...   shape=(4, 64), dtype=np.dtype("float32"), format=jp.NVFP4, axis=1
    ... )
    >>> print(problem)
    float32[4, 64] to nvfp4, axis 1
  """

  shape: tuple[Any, ...]
  dtype: np.dtype
  format: formats.BlockFormat
  axis: int
  scale_rounding: str = "up"
  computes_global_scale: bool = False

  def __str__(self) -> str:
    sizes = ", ".join(map(str, self.shape))
    return f"{self.dtype.name}[{sizes}] to {self.format}, axis {self.axis}"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuantizeCall:
  """One array that `Backend.emit` quantizes.

  `emit` returns (values, scale), or (values, scale, global_scale) if
  `problem.computes_global_scale`. Values are `problem.format.array_dtype` of
  `problem.shape`, and the scale is linear. Their bits must be those of
  `jp.quantize`.

  Attributes:
    problem: the problem that `supports` was given.
    target: the device that the call is lowered for.
    config: the config that a tuning table chose; empty by default.
    x: the floats.
    global_scale: f32[], or None.
  """

  problem: QuantizeProblem
  target: targets.Target
  config: dict[str, decisions.Scalar]
  x: jax.Array
  global_scale: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DequantizeProblem:
  """The properties of a `dequantize` by which `Backend.supports` decides.

  Attributes:
    shape: logical shape. A symbolic size is not an int.
    format: the block format.
    axis: the blocked dimension, not negative.
    dtype: dtype of the result.
    global_scale: "none", "scalar", or "array" if it varies.

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> problem = jp.backends.DequantizeProblem(
    ...   shape=(4, 64), format=jp.MXFP8, axis=1, dtype=np.dtype("float32")
    ... )
    >>> print(problem)
    mxfp8 to float32[4, 64], axis 1
  """

  shape: tuple[Any, ...]
  format: formats.BlockFormat
  axis: int
  dtype: np.dtype
  global_scale: str = "none"

  def __str__(self) -> str:
    sizes = ", ".join(map(str, self.shape))
    return f"{self.format} to {self.dtype.name}[{sizes}], axis {self.axis}"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DequantizeCall:
  """One array that `Backend.emit` dequantizes.

  `emit` returns `problem.dtype` of `problem.shape`: values times scale times
  global scale, in f32 and cast once.

  Attributes:
    problem: the problem that `supports` was given.
    target: the device that the call is lowered for.
    config: the config that a tuning table chose; empty by default.
    values: `problem.format.array_dtype` of `problem.shape`.
    scale: the linear block scales.
    global_scale: f32[], or f32 that broadcasts to the result, or None.
  """

  problem: DequantizeProblem
  target: targets.Target
  config: dict[str, decisions.Scalar]
  values: jax.Array
  scale: jax.Array
  global_scale: jax.Array | None


def _quantize_problem_of(
  problem: problems.QuantizationProblem,
) -> QuantizeProblem:
  (b,) = problem.blockings
  return QuantizeProblem(
    shape=b.shape(problem.shape),
    dtype=problem.dtype,
    format=problem.format,
    axis=b.axis(),
    scale_rounding=problem.scale_rounding,
    # `backends.emit` computes it from maxima.
    computes_global_scale=problem.computes_global_scale
    and problem.num_maxima is None,
  )


def _quantize_refusal(problem: problems.QuantizationProblem) -> str:
  if len(problem.blockings) > 1:
    return "backends of other packages quantize along one axis at a time"
  if problem.options != (problems.NO_OPTIONS,):
    return "backends of other packages quantize whole arrays, without options"
  if problem.prologue is not None:
    return "backends of other packages quantize x itself, without a prologue"
  if problem.pads_values:
    return "backends of other packages write as many rows as x has"
  return ""


def _quantize(
  adapter: registry.Adapter[problems.QuantizationProblem],
  config: dict[str, decisions.Scalar],
  x: jax.Array,
  global_scale: jax.Array | None,
  problem: problems.QuantizationProblem,
  target: targets.Target,
) -> list[jax.Array]:
  (b,) = problem.blockings
  view = QuantizeCall(
    problem=_quantize_problem_of(problem),
    target=target,
    config=config,
    x=b.apply(x),
    global_scale=global_scale,
  )
  found = adapter.emit(view)
  wanted = dataclasses.replace(
    problem, packed=False, scale_layout=layouts.LINEAR
  ).result_types()
  if (
    not isinstance(found, tuple)
    or [(getattr(y, "shape", None), getattr(y, "dtype", None)) for y in found]
    != wanted
  ):
    words = ", ".join(f"{d.name}{list(s)}" for s, d in wanted)
    raise adapter.wrong_result(f"({words})", found)
  values, scale, *rest = found
  if problem.packed:
    values = layouts.pack_fp4(values, axis=b.axis())
  if problem.scale_layout == layouts.SWIZZLED:
    scale = layouts.swizzle_scale(scale)
  return [values, scale, *rest]


def _dequantize_problem_of(
  problem: problems.DequantizationProblem,
) -> DequantizeProblem:
  kind = "none"
  if problem.global_shape is not None:
    kind = "array" if problem.global_shape else "scalar"
  return DequantizeProblem(
    shape=problem.logical_shape,
    format=problem.format,
    axis=problem.axis,
    dtype=problem.out_dtype,
    global_scale=kind,
  )


def _dequantize(
  adapter: registry.Adapter[problems.DequantizationProblem],
  config: dict[str, decisions.Scalar],
  values: jax.Array,
  scale: jax.Array,
  global_scale: jax.Array | None,
  problem: problems.DequantizationProblem,
  target: targets.Target,
) -> jax.Array:
  format = problem.format
  if format.has_pairs and values.dtype == formats.PACKED:
    values = layouts.unpack_fp4(
      values, axis=problem.axis, dtype=format.values_dtype
    )
  view = DequantizeCall(
    problem=_dequantize_problem_of(problem),
    target=target,
    config=config,
    values=layouts.from_bytes(values, format.array_dtype),
    scale=layouts.from_bytes(scale, format.scale_dtype),
    global_scale=global_scale,
  )
  return adapter.emit_array(view, problem.out_dtype, view.problem.shape)


QUANTIZE: Final = registry.Interface(
  operation="quantize",
  problem_of=_quantize_problem_of,
  emit=_quantize,
  refusal=_quantize_refusal,
)
DEQUANTIZE: Final = registry.Interface(
  operation="dequantize",
  problem_of=_dequantize_problem_of,
  emit=_dequantize,
)
