# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The JAX function that computes a call of a module, and its StableHLO.

`is_emitted` checks whether the call already equals that StableHLO.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir

from jaxplugin import dot, quantization
from jaxplugin.arrays import layouts, scaled_array
from jaxplugin.core import formats, targets
from jaxplugin.dot import backends, primitive, problems, sides
from jaxplugin.dropin import nn_operands, nn_scaled
from jaxplugin.operation import choice
from jaxplugin.stablehlo import module_calls, module_parsing, modules

# Beginnings of functions' names.
_KINDS: Final = {
  module_calls.QUANTIZE: "quantize",
  module_calls.DEQUANTIZE: "dequantize",
  module_calls.DOT: "block_scaled_dot",
  module_calls.SWIZZLED_DOT: "block_scaled_dot",
  module_calls.SCALED_DOT: "scaled_dot",
}
# Operations between an operand and the call that are idempotent: a selection
# between the operand's codes and constant codes (which masks the padding of a
# scale), and casts to codes and back.
_REPEATABLE: Final = (
  "stablehlo.bitcast_convert",
  "stablehlo.reshape",
  "stablehlo.select",
)
_RESHAPING: Final = ("stablehlo.reshape", "stablehlo.slice")
# Operations that may leave the values of an array unchanged.
_KEEPING: Final = ("stablehlo.convert", *_RESHAPING)
_LONGEST_CHAIN: Final = 100
# JAX's custom calls of a Python function, such as xla_ffi_python_cpu_callback.
_CALLBACK: Final = re.compile(r"xla_\w*python_\w*callback")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lowering:
  """How a call is computed on a target.

  Attributes:
    name: name of the function that computes the call.
    description: the computation in words.
    decided: decision for the call's dot; None if the call has no dot.
    dot: equation of the dot; None if the call has no dot.
    traced: the traced function.
    platform: platform to lower the function for.
  """

  name: str
  description: str
  decided: choice.DecidedCall | None
  dot: Any
  traced: Any
  platform: str

  def stablehlo(self) -> Any:
    """Returns an `ir.Module` whose @main is the function.

    Raises:
      NotImplementedError: If it calls Python, as `jax.debug.print` does.
    """
    lowered = self.traced.lower(lowering_platforms=(self.platform,))
    module = lowered.compiler_ir("stablehlo")
    for operation in modules.walk(module.operation):
      name = module_parsing.custom_call(operation)
      if _CALLBACK.fullmatch(name):
        raise NotImplementedError(
          "a module cannot hold a Python function, got a custom call of"
          f" {name} in {self.name}. Remove jax.debug.print and callbacks from"
          " the backend, or pass another implementation="
        )
    return module

  def refusal(self) -> str:
    """Returns why this process cannot lower the dot; "" if it can."""
    if self.decided is None or self.decided.decision is None:
      return ""
    backend = backends.table()[self.decided.decision.implementation]
    refusal = backend.lowering_refusal(self.decided.target)
    return "" if refusal is None else refusal.reason


def lower(
  call: module_calls.ModuleCall,
  target: targets.Target,
  implementation: str | None,
  scale_rounding: quantization.ScaleRounding,
) -> Lowering:
  """Traces the function that computes a call on a target.

  Args:
    implementation: backend of the dots; None chooses one.

  Raises:
    TypeError, ValueError, NotImplementedError: If the call cannot be computed
      on the target.
  """
  function = _function(call, implementation, scale_rounding)
  function.__name__ = _KINDS[call.name]  # names the operations in profiles
  with targets.use_target(target):
    # An unused argument (a scale of ones) must stay an argument of the call.
    traced = jax.jit(function, keep_unused=True).trace(*call.operands)
  outputs = jax.tree.leaves(traced.out_info)
  if [(x.shape, x.dtype) for x in outputs] != [
    (x.shape, x.dtype) for x in call.results
  ]:
    raise TypeError(
      f"its results must be {module_calls.shape_list(outputs)}, got"
      f" {module_calls.shape_list(call.results)}"
    )
  eqns = list(primitive.equations(traced.jaxpr.jaxpr))
  eqn = eqns[0] if eqns else None
  decided = None if eqn is None else primitive.decide(eqn, target)
  return Lowering(
    name=_function_name(call, decided),
    description=_description(call, decided),
    decided=decided,
    dot=eqn,
    traced=traced,
    platform=target.platform,
  )


def _function(
  call: module_calls.ModuleCall,
  implementation: str | None,
  scale_rounding: quantization.ScaleRounding,
) -> Callable[..., Any]:
  """Returns the function that computes a call."""
  if call.name == module_calls.QUANTIZE:
    return _quantize(call, scale_rounding)
  if call.name == module_calls.DEQUANTIZE:
    return _dequantize(call)
  dots = {
    module_calls.DOT: _dot,
    module_calls.SWIZZLED_DOT: _swizzled_dot,
    module_calls.SCALED_DOT: _scaled_dot,
  }
  return dots[call.name](call, implementation)


def _quantize(
  call: module_calls.ModuleCall, scale_rounding: quantization.ScaleRounding
) -> Callable[..., Any]:
  format = _format_of(call)

  def function(x):
    # The call returns no global scale. With 1.0 block scales do not need one.
    global_scale = 1.0 if format.has_global_scale else None
    result = quantization.quantize(
      x,
      format,
      scale_rounding=scale_rounding if format.scale_is_power_of_two else "up",
      global_scale=global_scale,
      packed=False,
    )
    return result.values, result.scale

  return function


def _dequantize(call: module_calls.ModuleCall) -> Callable[..., Any]:
  format, dtype = _format_of(call), call.results[0].dtype

  def function(values, scale):
    array = scaled_array.ScaledArray(values, scale, None, format)
    return quantization.dequantize(array, dtype)

  return function


def _format_of(call: module_calls.ModuleCall) -> formats.BlockFormat:
  """Returns the block format of a quantize or dequantize call."""
  is_quantize = call.name == module_calls.QUANTIZE
  values, scale = call.results if is_quantize else call.operands
  floats = call.operands[0] if is_quantize else call.results[0]
  if floats.dtype not in formats.FLOAT_DTYPES:
    raise TypeError(
      "the unquantized array must be float32, bfloat16 or float16, got"
      f" {floats.dtype}"
    )
  for what, array in (("values", values), ("scale", scale)):
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise TypeError(f"{what} must be floating-point, got {array.dtype}")
  format = nn_operands.block_format(
    values.dtype, scale.dtype, call.block_sizes[0], False
  )
  if is_quantize and not _can_quantize_to(format):
    raise NotImplementedError(
      f"cannot quantize to {format}; known formats: {formats.pairs_table()},"
      " and others of 4- and 8-bit values and scales"
    )
  return format


def _can_quantize_to(format: formats.BlockFormat) -> bool:
  """Returns whether values and scales have encodings that quantize supports."""
  known = (formats.E4M3, formats.E5M2, formats.E2M1)
  scales = (formats.E8M0, formats.E4M3, formats.E5M2)
  return format.values_dtype in known and format.scale_dtype in scales


def _dot(
  call: module_calls.ModuleCall, implementation: str | None
) -> Callable[..., Any]:
  def function(lhs, rhs, lhs_scale, rhs_scale=None, global_scale=None):
    sizes = call.block_sizes[0], call.block_sizes[-1]
    lhs, lhs_scale, is_lhs_padded = _operand("lhs", lhs, lhs_scale, sizes[0])
    rhs, rhs_scale, is_rhs_padded = _operand("rhs", rhs, rhs_scale, sizes[1])
    return dot.block_scaled_dot(
      lhs,
      rhs,
      lhs_scale,
      rhs_scale,
      _as_f32(global_scale),
      block_size=sizes if is_lhs_padded or is_rhs_padded else None,
      preferred_element_type=_result_dtype(call),
      implementation=implementation,
    )

  return function


def _as_f32(global_scale: jax.Array | None) -> jax.Array | None:
  return None if global_scale is None else global_scale.astype(jnp.float32)


def _operand(
  side: str, values: jax.Array, scale: jax.Array | None, block_size: int
) -> tuple[Any, jax.Array | None, bool]:
  """Converts values and a scale of any real dtype for `block_scaled_dot`.

  Returns:
    (operand, scale or None, whether that scale is padded)
  """
  if scale is None:
    plain = nn_operands.as_float(sides.WHO, side, values)
    if plain.dtype not in formats.FLOAT_DTYPES:
      plain = plain.astype(jnp.bfloat16)  # exact for 8 bits and fewer
    return plain, None, False
  exact = (*values.shape[:-1], -(-values.shape[-1] // block_size))
  known = formats.infer(values.dtype, scale.dtype)
  is_integer = values.dtype == np.uint8  # not packed FP4
  if known is not None and known.block_size == block_size and not is_integer:
    return values, scale, scale.shape != exact
  values = nn_operands.as_float(sides.WHO, side, values)
  scale = nn_operands.as_float(sides.WHO, f"{side}_scale", scale)
  scale = lax.slice(scale, (0,) * scale.ndim, exact)
  format = nn_operands.block_format(
    values.dtype, scale.dtype, block_size, False
  )
  return scaled_array.ScaledArray(values, scale, None, format), None, False


def _swizzled_dot(
  call: module_calls.ModuleCall, implementation: str | None
) -> Callable[..., Any]:
  def swizzled(side, values, scale):
    format = formats.infer(values.dtype, scale.dtype)
    if format is None or values.dtype == formats.PACKED:
      raise TypeError(
        f"{side} {values.dtype} with {side}_scale {scale.dtype} is not a block"
        f" format; known formats: {formats.pairs_table()}"
      )
    return scaled_array.ScaledArray(
      values, scale, None, format, scale_layout=layouts.SWIZZLED
    )

  def function(lhs, rhs, lhs_scale, rhs_scale, global_scale=None):
    result = dot.block_scaled_dot(
      swizzled("lhs", lhs, lhs_scale),
      swizzled("rhs", rhs, rhs_scale),
      global_scale=_as_f32(global_scale),
      preferred_element_type=_result_dtype(call),
      implementation=implementation,
    )
    workspace = call.results[1]
    return result, jnp.zeros(workspace.shape, workspace.dtype)

  return function


def _scaled_dot(
  call: module_calls.ModuleCall, implementation: str | None
) -> Callable[..., Any]:
  assert call.dimension_numbers is not None
  contracting, _ = call.dimension_numbers

  def function(lhs, rhs, lhs_scale, rhs_scale):
    lhs_scale, rhs_scale = (
      _repeated(scale, values.shape, dims) if has_scale else None
      for scale, values, dims, has_scale in zip(
        (lhs_scale, rhs_scale),
        (lhs, rhs),
        contracting,
        call.has_scale,
        strict=True,
      )
    )
    return nn_scaled.scaled_dot(
      lhs,
      rhs,
      lhs_scale=lhs_scale,
      rhs_scale=rhs_scale,
      dimension_numbers=call.dimension_numbers,
      preferred_element_type=_result_dtype(call),
      implementation=implementation,
    )

  return function


def _repeated(
  scale: jax.Array, shape: Sequence[int], contracting: Sequence[int]
) -> jax.Array:
  """Repeats a scale of two-dimensional blocks, so that each row has a scale.

  XLA's scaled dot accepts a scale that covers several rows. `jp.scaled_dot` and
  JAX need a scale for each row. This function does not change a scale that does
  not divide its operand; `jp.scaled_dot` then raises.
  """
  if len(scale.shape) != len(shape):
    return scale
  for dim, (size, count) in enumerate(zip(shape, scale.shape, strict=True)):
    if dim not in contracting and 0 < count < size and size % count == 0:
      scale = jnp.repeat(scale, size // count, axis=dim)
  return scale


def _result_dtype(call: module_calls.ModuleCall) -> np.dtype:
  dtype = call.results[0].dtype
  if dtype not in formats.FLOAT_DTYPES:
    raise TypeError(
      f"its result must be float32, bfloat16 or float16, got {dtype}"
    )
  return dtype


def _description(
  call: module_calls.ModuleCall, decided: choice.DecidedCall | None
) -> str:
  if call.name == module_calls.QUANTIZE:
    (x,) = call.operands
    return f"quantize {module_calls.shape_list([x])} to {_format_of(call)}"
  if call.name == module_calls.DEQUANTIZE:
    (x,) = call.results
    return f"dequantize {_format_of(call)} to {module_calls.shape_list([x])}"
  if decided is None:
    return f"plain dot of {module_calls.shape_list(call.operands[:2])}"
  return str(decided.problem)


def _function_name(
  call: module_calls.ModuleCall, decided: choice.DecidedCall | None
) -> str:
  """Returns a name such as block_scaled_dot.mxfp8_xla or quantize.nvfp4."""
  if call.name in (module_calls.QUANTIZE, module_calls.DEQUANTIZE):
    parts = [str(_format_of(call))]
  elif decided is None or decided.decision is None:
    parts = ["plain"]
  else:
    problem: problems.DotProblem = decided.problem
    sides = dict.fromkeys((str(problem.lhs), str(problem.rhs)))
    parts = [*sides, decided.decision.implementation]
  return f"{_KINDS[call.name]}.{re.sub(r'[^A-Za-z0-9]+', '_', '_'.join(parts))}"


# Whether a call already equals the call that would replace it. Without this
# check, each rewrite of a module would wrap cuDNN's calls again.


def is_emitted(
  operation: Any, call: module_calls.ModuleCall, emitted: ir.Module
) -> bool:
  """Returns whether `operation` already does everything that `emitted` does.

  Args:
    emitted: a module whose @main computes the call from its operands.

  Returns:
    Whether @main has one dot that equals the call and returns its result
    unchanged. Its operands must be unprepared, or already prepared in the
    module.
  """
  (block,) = ir.SymbolTable(emitted.operation)["main"].regions[0].blocks
  operations = [child.operation for child in block]
  dots = [op for op in operations if module_calls.call_name(op) is not None]
  if len(list(emitted.body)) != 1 or len(dots) != 1:
    return False
  (product,) = dots
  if not (
    module_calls.call_name(product) == call.name
    and module_calls.read(product) == call
    and module_calls.has_default_layouts(operation)
    and _origin(operations[-1].operands[0]) == product.results[0]
  ):
    return False
  return all(
    _is_prepared(needs, has, argument)
    for needs, has, argument in zip(
      product.operands, operation.operands, block.arguments, strict=True
    )
  )


def _is_prepared(needs: Any, has: Any, argument: Any) -> bool:
  """Returns whether an operand is already prepared as the emitted call needs.

  Args:
    needs: operand of the emitted call, or a value that it is computed from.
    has: operand of the existing call, or a value that it is computed from.
    argument: the argument of @main for the operand.
  """
  needs, has = _origin(needs), _origin(has)
  if _is_reshaped(needs, argument):
    # Any array is a reshape: of itself, reshaped back.
    return True
  one, other = _producer(needs), _producer(has)
  if one is None or other is None or _kind(one) != _kind(other):
    return False
  depends = [_depends_on(operand, argument) for operand in one.operands]
  if any(depends) and one.name not in _REPEATABLE:
    return False
  return all(
    _is_prepared(a, b, argument)
    for a, b in zip(one.operands, other.operands, strict=True)
  )


def _is_reshaped(value: Any, argument: Any) -> bool:
  """Returns whether a value is `argument`, or a reshape of it."""
  producer = _producer(value)
  while producer is not None and producer.name == "stablehlo.reshape":
    value = producer.operands[0]
    producer = _producer(value)
  return value == argument


def _kind(operation: Any) -> tuple[Any, ...]:
  """Returns an operation's name, attributes, types and regions."""
  attributes = {name: str(attr) for name, attr in operation.attributes.items()}
  types = [str(x.type) for x in (*operation.operands, *operation.results)]
  regions = [str(region.blocks[0]) for region in operation.regions]
  return operation.name, attributes, types, regions


def _producer(value: Any) -> Any:
  """Returns the operation that makes a value; None for a block argument."""
  owner = value.owner
  return None if isinstance(owner, ir.Block) else owner.operation


def _depends_on(value: Any, argument: Any) -> bool:
  if value == argument:
    return True
  producer = _producer(value)
  return producer is not None and any(
    _depends_on(operand, argument) for operand in producer.operands
  )


def _origin(value: Any) -> Any:
  """Returns the earliest value that is the same array with the same type.

  A chain longer than any emitted one is only followed from its end.
  """
  chain = [value]
  while len(chain) < _LONGEST_CHAIN:
    producer = _producer(chain[-1])
    if producer is None or producer.name not in _KEEPING:
      break
    chain.append(producer.operands[0])
  origins: dict[Any, Any] = {}  # origin of each value in the chain
  for link in reversed(chain):
    earlier = _same_array(link, origins)
    origins[link] = link if earlier is None else origins.get(earlier, earlier)
  return origins[value]


def _same_array(value: Any, origins: dict[Any, Any]) -> Any:
  """Returns the array from which `value` is copied without a change, or None.

  Such copies are reshapes, slices of a whole array, and casts of bf16 or f16 (a
  global scale) to f32 and back.
  """
  producer = _producer(value)
  if producer is not None and producer.name == "stablehlo.convert":
    wide = producer.operands[0]
    wide = origins.get(wide, wide)
    widening = _producer(wide)
    if widening is None or widening.name != "stablehlo.convert":
      return None
    narrow = widening.operands[0]
    names = [str(x.type.element_type) for x in (narrow, wide)]
    is_exact = names in (["bf16", "f32"], ["f16", "f32"])
    return narrow if is_exact and narrow.type == value.type else None
  for _ in range(_LONGEST_CHAIN):
    if producer is None or producer.name not in _RESHAPING:
      break
    before = producer.operands[0]
    if before.type == value.type:
      return before
    producer = _producer(before)
  return None
