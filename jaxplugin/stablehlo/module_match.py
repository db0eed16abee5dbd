# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks whether a call already equals the call that would replace it.

Without this check, each rewrite of a module would wrap cuDNN's calls again.
"""

from __future__ import annotations

from typing import Any
from typing import Final

from jaxlib.mlir import ir

from jaxplugin.stablehlo import module_calls

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


def is_emitted(
  operation: Any, call: module_calls.ModuleCall, emitted: ir.Module
) -> bool:
  """Returns whether `operation` already does everything that `emitted` does.

  Args:
    operation: the call.
    call: the result of reading the call.
    emitted: a module whose @main computes the call from its operands.

  Returns:
    Whether @main has one dot that equals the call and returns its result
    unchanged. Its operands must be unprepared, or already prepared in the
    module.
  """
  functions = list(emitted.body)
  (block,) = functions[0].regions[0].blocks
  operations = [child.operation for child in block]
  dots = [op for op in operations if module_calls.call_name(op) is not None]
  if len(functions) != 1 or len(dots) != 1:
    return False
  (dot,) = dots
  if not (
    module_calls.call_name(dot) == call.name
    and module_calls.read(dot) == call
    and module_calls.has_default_layouts(operation)
    and _origin(operations[-1].operands[0]) == dot.results[0]
  ):
    return False
  return all(
    _is_prepared(needs, has, argument)
    for needs, has, argument in zip(
      dot.operands, operation.operands, block.arguments, strict=True
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
  earlier = value
  for _ in range(_LONGEST_CHAIN):
    if producer is None or producer.name not in _RESHAPING:
      break
    before = producer.operands[0]
    if producer.name == "stablehlo.slice" and before.type != earlier.type:
      return None
    if before.type == value.type:
      return before
    earlier, producer = before, _producer(before)
  return None
