# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantization and dequantization.

The exact array is known before quantization: each element is a value of the
format times a scale of the format, and each block contains the format's largest
value. Quantizing the exact array must return these values and scales. After a
prologue the codes are compared with those of XLA's operations.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import jax
import ml_dtypes
import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.core import formats, targets
from jaxplugin.lab.tuning.operations import operands, operation
from jaxplugin.quantization import (
  backends,
  dequantization,
  problems,
  prologues,
  quantize_primitive,
)
from jaxplugin.quantization.backends import xla
from jaxplugin.repro import oracle
from jaxplugin.runtime import lowering
from jaxplugin.tables import resolution

# Values that every element type has, besides its largest value.
_VALUES: Final = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)
_MAX_EXPONENT: Final = 4  # of scales
_WIDE: Final = 4096.0  # f16 overflows at this value times 2^_MAX_EXPONENT
_SCALES: Final = (0.5, 1.0, 1.5, 2.0)  # of E4M3
_GLOBAL_SCALE: Final = 0.125
_LARGEST_SCALE: Final = 448.0  # of E4M3, in the first block
_TAIL_BLOCKS: Final = 11
_TAIL_ROWS: Final = 67

_Either = problems.QuantizationProblem | problems.DequantizationProblem


def _module(target: targets.Target) -> lowering.Module:
  return lowering.Module(platforms=(target.platform,), is_partitioned=False)


def _shape_refusal(
  described: resolution.MeasuredOperation[Any], problem: _Either
) -> str:
  """Returns why a shape is not supported; "" if it is supported."""
  fields = described.fields_of(problem)
  if fields is None:
    return "no row of a table can describe it"
  if described.problem_of(fields) != problem:
    return "it has more dimensions than two"
  k, block_size = dict(fields).get("k"), problem.format.block_size
  if isinstance(k, int) and k % block_size:
    return f"k={k} is not a multiple of {block_size}"
  return ""


def _rows(problem: _Either) -> Any:
  """Returns (m, k, axis) of an array with two dimensions."""
  if isinstance(problem, problems.DequantizationProblem):
    shape, axis = problem.logical_shape, problem.axis
  else:
    shape, axis = problem.shape, problem.blockings[0].axis()
  return shape[1 - axis], shape[axis], axis


def _quantized(
  rng: np.random.Generator, problem: _Either, is_packed: bool
) -> tuple[np.ndarray, np.ndarray, np.float32, np.ndarray]:
  """Returns stored values, scale and global scale, and the exact array in f32.

  The global scale is 1 if the format has none.
  """
  format = problem.format
  m, k, axis = _rows(problem)
  blocks = k // format.block_size
  largest = float(ml_dtypes.finfo(format.values_dtype).max)
  values = rng.choice(np.asarray(_VALUES, np.float32), (m, blocks, k // blocks))
  place = rng.integers(0, format.block_size, (m, blocks, 1))
  np.put_along_axis(values, place, np.float32(largest), axis=2)
  if format.scale_is_power_of_two:
    # f16 must hold the largest value times the scale.
    most = _MAX_EXPONENT if largest < _WIDE else 0
    exponents = rng.integers(-_MAX_EXPONENT, most + 1, (m, blocks))
    scale = np.exp2(exponents).astype(np.float32)
    global_scale = np.float32(1)
  else:
    scale = rng.choice(np.asarray(_SCALES, np.float32), (m, blocks))
    scale[0, 0] = _LARGEST_SCALE
    global_scale = np.float32(_GLOBAL_SCALE)
  exact = (values * scale[..., None]).reshape(m, k) * global_scale
  stored = values.reshape(m, k).astype(format.values_dtype)
  if is_packed:
    bits = stored.view(np.uint8) & 0xF
    stored = bits[:, ::2] | bits[:, 1::2] << 4
  elif format.is_fp6:
    stored = stored.view(np.uint8)
  stored, scale, exact = (
    x if axis == 1 else np.ascontiguousarray(x.T)
    for x in (stored, scale.astype(format.scale_dtype), exact)
  )
  return stored, scale, global_scale, exact


def _tail(problem: Any) -> Any:
  m, k, axis = _rows(problem)
  m = min(m, _TAIL_ROWS)
  m = m if m % 2 else max(m - 1, 1)
  # A byte of the array to dequantize may hold several values.
  tail_k = _TAIL_BLOCKS * problem.format.block_size
  stored = problem.shape[axis] * tail_k // k
  return dataclasses.replace(
    problem, shape=(m, stored) if axis else (stored, m)
  )


def _flops(problem: _Either) -> int:
  return math.prod(problem.shape)  # about one for each value


def _refusal(problem: problems.QuantizationProblem) -> str:
  if len(problem.blockings) > 1:
    return "it is quantized along several dimensions"
  (options,) = problem.options
  if options != problems.NO_OPTIONS:
    return f"the recipe's additions ({options}) are not checked"
  if problem.scale_layout != layouts.LINEAR:
    return "its scales are swizzled"
  if (given := problem.prologue) is not None:  # Rows leave out its numbers.
    prologue = prologues.Prologue(
      function=given.function,
      operands=given.operands,
      halves=given.halves,
      gradient=given.gradient,
    )
    problem = dataclasses.replace(problem, prologue=prologue)
  return _shape_refusal(backends.QUANTIZE_OPERATION, problem)


def _build(
  problem: problems.QuantizationProblem,
  rng: np.random.Generator,
  is_exact: bool,
) -> tuple[dict[str, Any], Any]:
  if problem.prologue is not None:
    return _build_produced(problem, problem.prologue, rng, is_exact)
  values, scale, global_scale, exact = _quantized(rng, problem, problem.packed)
  arrays: dict[str, Any] = {"x": exact.astype(problem.dtype)}
  if problem.has_global_scale:
    arrays["global_scale"] = global_scale
  has_global_scale = problem.format.has_global_scale
  expected = [values, scale, *([global_scale] if has_global_scale else [])]
  return arrays, expected if is_exact else None


def _build_produced(
  problem: problems.QuantizationProblem,
  prologue: prologues.Prologue,
  rng: np.random.Generator,
  is_exact: bool,
) -> tuple[dict[str, Any], Any]:
  """Returns operands with a prologue, and the results of XLA's operations."""
  normal = lambda shape, dtype: np.asarray(rng.standard_normal(shape), dtype)
  arrays: dict[str, Any] = {
    "x": normal(prologue.x_shape(problem.shape), problem.dtype)
  }
  types = prologues.operand_types(prologue, problem.shape, problem.dtype)
  for name, (shape, dtype) in zip(prologue.operands, types, strict=True):
    arrays[name] = normal(shape, dtype)
  if problem.has_global_scale:
    arrays["global_scale"] = np.float32(_GLOBAL_SCALE)
  if not is_exact:
    return arrays, None
  expected = xla.quantize(
    arrays["x"], arrays.get("global_scale"), problem, more=arrays
  )
  return arrays, list(map(np.asarray, expected))


def _compute(
  problem: problems.QuantizationProblem, arrays: dict[str, Any]
) -> list[jax.Array]:
  (quantized,), *_, total = quantize_primitive.produce(
    arrays["x"],
    arrays.get("global_scale"),
    blockings=problem.blockings,
    format=problem.format,
    scale_rounding=problem.scale_rounding,
    packed=problem.packed,
    for_products=problem.for_products,
    scale_layout=problem.scale_layout,
    prologue=problem.prologue,
    more=arrays,
  )
  return [x for x in (*quantized, total) if x is not None]


def _check(result: list[jax.Array], expected: Any, problem: Any) -> None:
  if problem.prologue is None:
    ratio, text = oracle.same_bits(result, expected)
  else:
    ratio, text = oracle.near(result, expected, problem)
  if ratio > 1:
    raise operands.InexactResultError(f"{problem}: {text}")


QUANTIZE: Final = operation.TunedOperation(
  operation=backends.QUANTIZE_OPERATION,
  choose=lambda problem, target, overlay: backends.choose(
    problem, _module(target), target, overlay
  ),
  refusal=_refusal,
  build=_build,
  compute=_compute,
  check=_check,
  flops=_flops,
  tail=_tail,
)


def _build_dequantize(
  problem: problems.DequantizationProblem,
  rng: np.random.Generator,
  is_exact: bool,
) -> tuple[dict[str, Any], Any]:
  is_packed = problem.format.is_fp4 and problem.dtype == formats.PACKED
  values, scale, global_scale, exact = _quantized(rng, problem, is_packed)
  arrays: dict[str, Any] = {"values": values, "scale": scale}
  if problem.global_shape is None:
    exact = exact / global_scale
  else:
    arrays["global_scale"] = global_scale
  return arrays, exact.astype(problem.out_dtype) if is_exact else None


DEQUANTIZE: Final = operation.TunedOperation(
  operation=backends.DEQUANTIZE_OPERATION,
  choose=lambda problem, target, overlay: backends.decide_dequantize(
    problem, _module(target), target, overlay
  ),
  refusal=lambda problem: _shape_refusal(
    backends.DEQUANTIZE_OPERATION, problem
  ),
  build=_build_dequantize,
  compute=lambda problem, arrays: dequantization.dequantize_arrays(
    arrays["values"],
    arrays["scale"],
    arrays.get("global_scale"),
    problem.format,
    problem.axis,
    problem.out_dtype,
  ),
  flops=_flops,
  tail=_tail,
)
