# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a call already is what would be emitted for it.

Without this, rewriting what was rewritten would wrap cuDNN's calls once more
each time.
"""

from __future__ import annotations

from typing import Any
from typing import Final

from jaxlib.mlir import ir

from jaxplugin.stablehlo import module_calls

# What may stand between an operand and the call, as doing it twice is doing it
# once: choosing between the operand's codes and constant ones (which masks the
# padding of a scale), and casts to the codes and back.
_REPEATABLE: Final = (
  "stablehlo.bitcast_convert",
  "stablehlo.reshape",
  "stablehlo.select",
)
_RESHAPING: Final = ("stablehlo.reshape", "stablehlo.slice")
# What may lead from an array back to the same array.
_KEEPING: Final = ("stablehlo.convert", *_RESHAPING)
_LONGEST_CHAIN: Final = 100


def is_emitted(
  operation: Any, call: module_calls.ModuleCall, emitted: ir.Module
) -> bool:
  """Whether `operation` is the only thing that `emitted` does with a call.

  Args:
    operation: the call.
    call: what was read from it.
    emitted: a module whose @main computes the call from its operands.

  Returns:
    Whether @main has one dot, the same call; gives its result as it is; and
    prepares its operands in no way, or in one that has been applied already.
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
  """Whether the existing operand is prepared as the emitted call needs it.

  Args:
    needs: operand of the emitted call, or a value that it is computed from.
    has: operand of the existing call, or a value that it is computed from.
    argument: the argument of @main for the operand.
  """
  needs, has = _origin(needs), _origin(has)
  if _is_reshaped(needs, argument):
    # Every array is a reshape of another one: of itself, reshaped back.
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
  """Whether a value is `argument` in some shape."""
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
  """The operation that makes a value; None for an argument of a block."""
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
  """The earliest value that is the same array, of the same type.

  Of a longer chain of operations than anyone emits, only its end is looked at.
  """
  chain = [value]
  while len(chain) < _LONGEST_CHAIN:
    producer = _producer(chain[-1])
    if producer is None or producer.name not in _KEEPING:
      break
    chain.append(producer.operands[0])
  origins: dict[Any, Any] = {}  # of each value in the chain
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
