# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizing and dequantizing.

Exact arrays are values that the format has times scales that it has, and each
block has the format's largest value: so these codes are what must come out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.core import decisions
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.jaxext import program
from jaxplugin.lab.tuning.operations import tuned
from jaxplugin.lab.tuning.trials import exactness
from jaxplugin.lab.tuning.trials import operands
from jaxplugin.quantization import backends
from jaxplugin.quantization import dequantize_primitive
from jaxplugin.quantization import problems
from jaxplugin.quantization import quantize_primitive
from jaxplugin.runtime import lowering
from jaxplugin.tables import records
from jaxplugin.tables import resolution

# What every element type has, beside its largest value.
_VALUES: Final = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)
_MAX_EXPONENT: Final = 4  # of scales
_WIDE: Final = 4096.0  # times 2^_MAX_EXPONENT f16 overflows
_SCALES: Final = (0.5, 1.0, 1.5, 2.0)  # of E4M3
_GLOBAL_SCALE: Final = 0.125
_LARGEST_SCALE: Final = 448.0  # of E4M3: NVFP4's first block has it
_BLOCKS: Final = 11  # of a tail
_ROWS: Final = 67


def _module(target: targets.Target) -> lowering.Module:
  return lowering.Module(platforms=(target.platform,), is_partitioned=False)


def _equation(jaxpr: Any, primitive: Any) -> Any:
  (found,) = (
    operation.eqn
    for operation in program.operations(jaxpr)
    if operation.eqn.primitive is primitive
  )
  return found


def _canonical(problem: Any, back: Any, fields: Any) -> str:
  """Why a problem is not of the one shape that its row has."""
  if fields is None:
    return "no row of a table can describe it"
  return "" if back(fields) == problem else "it has more dimensions than two"


def _flops(problem: Any) -> int:
  # One operation a value or so: memory bounds them.
  return math.prod(problem.shape)


# Quantizing.


def _choose(
  problem: problems.QuantizeProblem,
  target: targets.Target,
  overlay: resolution.Overlay | None,
) -> decisions.Decision:
  return backends.choose(problem, _module(target), target, overlay)


def _decided(jaxpr: Any) -> tuned.Decided:
  eqn = _equation(jaxpr, quantize_primitive.quantize_p)
  target = targets.current_target()
  avals = [v.aval for v in eqn.invars]
  _, told = quantize_primitive.explained(
    avals, eqn.params, _module(target), target
  )
  (problem,), (decision,) = told.problems, told.decisions
  return tuned.Decided(problem=problem, decision=decision)


def _refusal(problem: problems.QuantizeProblem) -> str:
  if len(problem.blockings) > 1:
    return "it is quantized along several dimensions"
  if problem.extras != problems.NO_EXTRAS:
    return f"the recipe's additions ({problem.extras}) are not checked"
  if problem.scale_layout != layouts.LINEAR:
    return "its scales are swizzled"
  operation = backends.QUANTIZE_OPERATION
  fields = operation.fields_of(problem)
  why = _canonical(problem, operation.problem_of, fields)
  return why or _blocks_refusal(fields, problem.format)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Codes:
  """A quantized array of rows of k, and what it stands for.

  Attributes:
    values: [m, k], of the format's element type.
    scale: [m, k / block], of the format's scale type.
    global_scale: 1 where the format has none.
    exact: f32[m, k].
  """

  values: np.ndarray
  scale: np.ndarray
  global_scale: float
  exact: np.ndarray


def _codes(
  rng: np.random.Generator, format: formats.BlockFormat, m: int, k: int
) -> _Codes:
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
    total = 1.0
  else:
    scale = rng.choice(np.asarray(_SCALES, np.float32), (m, blocks))
    scale[0, 0] = _LARGEST_SCALE
    total = _GLOBAL_SCALE
  exact = (values * scale[..., None]).reshape(m, k) * np.float32(total)
  return _Codes(
    values=values.reshape(m, k).astype(format.values_dtype),
    scale=scale.astype(format.scale_dtype),
    global_scale=total,
    exact=exact,
  )


def _rows(
  problem: problems.QuantizeProblem | problems.DequantizeProblem,
) -> Any:
  """(m, k, axis) of an array of two dimensions."""
  if isinstance(problem, problems.DequantizeProblem):
    shape, axis = problem.logical_shape, problem.axis
  else:
    shape, axis = problem.shape, problem.blockings[0].axis()
  return shape[1 - axis], shape[axis], axis


def _turned(x: np.ndarray, axis: int) -> np.ndarray:
  return x if axis == 1 else np.ascontiguousarray(x.T)


def _stored(
  codes: _Codes, format: formats.BlockFormat, axis: int, is_packed: bool
) -> np.ndarray:
  """Values as they are stored."""
  values = codes.values
  if is_packed:
    bits = values.view(np.uint8) & 0xF
    values = bits[:, ::2] | bits[:, 1::2] << 4
  elif format.is_fp6:
    values = values.view(np.uint8)
  return _turned(values, axis)


def _build(
  problem: problems.QuantizeProblem, seed: int, is_exact: bool
) -> operands.Made:
  m, k, axis = _rows(problem)
  format = problem.format
  codes = _codes(np.random.default_rng(seed), format, m, k)
  x = _turned(codes.exact, axis).astype(problem.dtype)
  arrays: dict[str, Any] = {"x": jnp.asarray(x)}
  if problem.has_global_scale:
    arrays["global_scale"] = jnp.float32(codes.global_scale)
  expected: list[Any] | None = None
  if is_exact:
    expected = [
      _stored(codes, format, axis, problem.packed),
      _turned(codes.scale, axis),
    ]
    if format.has_global_scale:
      expected.append(np.float32(codes.global_scale))
  return operands.Made(arrays=arrays, expected=expected)


def _function(
  problem: problems.QuantizeProblem,
) -> Callable[[dict[str, Any]], list[jax.Array]]:
  def call(arrays: dict[str, Any]) -> list[jax.Array]:
    (quantized,) = quantize_primitive.quantize(
      arrays["x"],
      arrays.get("global_scale"),
      blockings=problem.blockings,
      format=problem.format,
      scale_rounding=problem.scale_rounding,
      packed=problem.packed,
      for_products=problem.for_products,
      scale_layout=problem.scale_layout,
    )
    return [x for x in quantized if x is not None]

  return call


def _check(result: list[jax.Array], expected: Any, problem: Any) -> None:
  for found, exact in zip(result, expected, strict=True):
    exactness.check_bits(found, exact, problem)


def _tail(problem: problems.QuantizeProblem) -> problems.QuantizeProblem:
  m, _, axis = _rows(problem)
  m, k = _odd(m), _BLOCKS * problem.format.block_size
  return dataclasses.replace(problem, shape=(m, k) if axis else (k, m))


def _odd(m: int) -> int:
  m = min(m, _ROWS)
  return m if m % 2 else max(m - 1, 1)


QUANTIZE: Final = tuned.Tuned(
  operation=backends.QUANTIZE_OPERATION,
  choose=_choose,
  decided=_decided,
  refusal=_refusal,
  build=_build,
  function=_function,
  check=_check,
  flops=_flops,
  tail=_tail,
)


# Dequantizing.


def _choose_dequantize(
  problem: problems.DequantizeProblem,
  target: targets.Target,
  overlay: resolution.Overlay | None,
) -> decisions.Decision:
  module = _module(target)
  return backends.decide_dequantize(problem, module, target, overlay)


def _decided_dequantize(jaxpr: Any) -> tuned.Decided:
  eqn = _equation(jaxpr, dequantize_primitive.dequantize_p)
  target = targets.current_target()
  avals = [v.aval for v in eqn.invars]
  _, told = dequantize_primitive.explained(
    avals, eqn.params, _module(target), target
  )
  (problem,), (decision,) = told.problems, told.decisions
  return tuned.Decided(problem=problem, decision=decision)


def _dequantize_refusal(problem: problems.DequantizeProblem) -> str:
  operation = backends.DEQUANTIZE_OPERATION
  fields = operation.fields_of(problem)
  why = _canonical(problem, operation.problem_of, fields)
  return why or _blocks_refusal(fields, problem.format)


def _blocks_refusal(
  fields: records.Fields | None, format: formats.BlockFormat
) -> str:
  k = dict(fields or ()).get("k")
  if isinstance(k, int) and k % format.block_size:
    return f"k={k} is not a multiple of {format.block_size}"
  return ""


def _build_dequantize(
  problem: problems.DequantizeProblem, seed: int, is_exact: bool
) -> operands.Made:
  m, k, axis = _rows(problem)
  format = problem.format
  codes = _codes(np.random.default_rng(seed), format, m, k)
  is_packed = format.is_fp4 and problem.dtype == formats.PACKED
  arrays: dict[str, Any] = {
    "values": jnp.asarray(_stored(codes, format, axis, is_packed)),
    "scale": jnp.asarray(_turned(codes.scale, axis)),
  }
  exact = codes.exact / np.float32(codes.global_scale)
  if problem.global_shape is not None:
    arrays["global_scale"] = jnp.float32(codes.global_scale)
    exact = codes.exact
  expected = None
  if is_exact:
    expected = _turned(exact, axis).astype(problem.out_dtype)
  return operands.Made(arrays=arrays, expected=expected)


def _dequantize_function(
  problem: problems.DequantizeProblem,
) -> Callable[[dict[str, Any]], jax.Array]:
  def call(arrays: dict[str, Any]) -> jax.Array:
    return dequantize_primitive.dequantize(
      arrays["values"],
      arrays["scale"],
      arrays.get("global_scale"),
      problem.format,
      problem.axis,
      problem.out_dtype,
    )

  return call


def _dequantize_tail(
  problem: problems.DequantizeProblem,
) -> problems.DequantizeProblem:
  m, k, axis = _rows(problem)
  stored = problem.shape[axis] * _BLOCKS * problem.format.block_size // k
  m = _odd(m)
  return dataclasses.replace(
    problem, shape=(m, stored) if axis else (stored, m)
  )


DEQUANTIZE: Final = tuned.Tuned(
  operation=backends.DEQUANTIZE_OPERATION,
  choose=_choose_dequantize,
  decided=_decided_dequantize,
  refusal=_dequantize_refusal,
  build=_build_dequantize,
  function=_dequantize_function,
  check=exactness.check,
  flops=_flops,
  tail=_dequantize_tail,
)
