# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts HLO text that jaxlib cannot convert to StableHLO.

StableHLO has no scaled-dot. `convertible` replaces it in the text by a custom
call. `as_composites` replaces that call in the converted module by the
composite "xla.scaled_dot". The decomposition computes what XLA's expansion
computes::

  lhs, rhs and scales to bf16; each scale repeated along every dimension to the
  size of its operand; dot_general(lhs * lhs_scale, rhs * rhs_scale) in f32

jaxlib needs attributes on a call that is a composite, and XLA's passes omit
them. `convertible` adds empty attributes.

Source: XLA, scaled_dot_rewriter.{h,cc}, block_scaling_rewriter.cc.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Final

from jaxlib.mlir import ir

_TARGET: Final = "jaxplugin.hlo_scaled_dot"
# The instruction, its operands, and its dimension numbers.
_SCALED_DOT: Final = re.compile(
  r"\bscaled-dot(\((?:[^()]|\([^()]*\))*\))"
  r"((?:\s*,\s*(?:lhs|rhs)_(?:batch|contracting)_dims=\{[\d,\s]*\})*)"
)
# Frontend attributes: names, and values that are words or strings.
_FRONTEND_ATTRIBUTES: Final = re.compile(
  r'frontend_attributes=\{((?:[^{}"]|"(?:[^"\\]|\\.)*")*)\}'
)
_COMPOSITE_NAME: Final = "composite.name="
_COMPOSITE_ATTRIBUTES: Final = "composite.attributes="
_DIMENSIONS: Final = re.compile(
  r"(lhs|rhs)_(batch|contracting)_dims=\{([\d,\s]*)\}"
)
_KINDS: Final = ("contracting", "batch")
_OPERANDS: Final = ("lhs", "rhs", "lhs_scale", "rhs_scale")

# Dimensions by ("lhs" or "rhs", "batch" or "contracting").
_Numbers = dict[tuple[str, str], list[int]]


def convertible(text: str) -> str:
  """Returns HLO text that jaxlib can convert.

  A custom call replaces each scaled-dot, and every composite has attributes.
  """

  def custom_call(match: re.Match[str]) -> str:
    numbers = " ".join(match[2].split())
    return (
      f'custom-call{match[1]}, custom_call_target="{_TARGET}",'
      f' backend_config="{numbers}"'
    )

  def with_attributes(match: re.Match[str]) -> str:
    if _COMPOSITE_NAME in match[1] and _COMPOSITE_ATTRIBUTES not in match[1]:
      return f'frontend_attributes={{{_COMPOSITE_ATTRIBUTES}"{{}}",{match[1]}}}'
    return match[0]

  text = _SCALED_DOT.sub(custom_call, text)
  return _FRONTEND_ATTRIBUTES.sub(with_attributes, text)


def as_composites(module: ir.Module, operations: Sequence[Any]) -> None:
  """Replaces the custom calls among `operations` of a module by composites.

  Raises:
    ValueError: If a scale does not divide its operand.
  """
  calls = [
    operation
    for operation in operations
    if operation.name == "stablehlo.custom_call"
    and operation.attributes["call_target_name"].value == _TARGET
  ]
  taken = {
    child.attributes["sym_name"].value
    for child in module.body
    if "sym_name" in child.attributes
  }
  names: dict[str, str] = {}  # decompositions' names, by text without a name
  for call in calls:
    numbers = _numbers(call.attributes["backend_config"].value)
    make = _decomposition(call, numbers)
    if make("") not in names:
      count = len(names)
      while (name := f"scaled_dot_decomposition_{count}") in taken:
        count += 1
      taken.add(name)
      names[make("")] = name
      # A function can only be parsed inside a module.
      parsed = ir.Module.parse(make(name), module.context)
      (function,) = parsed.body
      function.operation.detach_from_parent()
      module.body.append(function)
    _replace(call, numbers, names[make("")])


def _numbers(text: str) -> _Numbers:
  """Reads the dimension numbers of an instruction."""
  found: _Numbers = {
    (side, kind): [] for side in ("lhs", "rhs") for kind in _KINDS
  }
  for side, kind, dims in _DIMENSIONS.findall(text):
    found[side, kind] = [int(d) for d in dims.split(",") if d.strip()]
  return found


def _replace(call: Any, numbers: _Numbers, name: str) -> None:
  dims = [[numbers[side, kind] for side in ("lhs", "rhs")] for kind in _KINDS]
  context = call.context
  attributes = {
    "name": ir.StringAttr.get("xla.scaled_dot", context),
    "composite_attributes": ir.Attribute.parse(
      f"{{dimension_numbers = {dims}}}", context
    ),
    "decomposition": ir.FlatSymbolRefAttr.get(name, context),
  }
  for kept in ("mhlo.sharding", "mhlo.frontend_attributes"):
    if kept in call.attributes:
      attributes[kept] = call.attributes[kept]
  composite = ir.Operation.create(
    "stablehlo.composite",
    results=[result.type for result in call.results],
    operands=list(call.operands),
    attributes=attributes,
    loc=call.location,
    ip=ir.InsertionPoint(call),
  )
  call.results[0].replace_all_uses_with(composite.results[0])
  call.erase()


def _decomposition(call: Any, numbers: _Numbers) -> Callable[[str], str]:
  """Returns a function from a name to the text of a call's decomposition."""
  types = [operand.type for operand in call.operands]
  result = call.results[0].type
  arguments = ", ".join(
    f"%{name}: {kind}" for name, kind in zip(_OPERANDS, types, strict=True)
  )
  lines = []
  for i, side in enumerate(("lhs", "rhs")):
    lines += _dequantized(side, types[i], types[i + 2])
  lhs, rhs = (_tensor(types[i].shape, "bf16") for i in (0, 1))
  batch, contracting = (
    f"{numbers['lhs', kind]} x {numbers['rhs', kind]}"
    for kind in ("batch", "contracting")
  )
  wide = _tensor(result.shape, "f32")
  lines += [
    f"%dot = stablehlo.dot_general %lhs_dq, %rhs_dq, batching_dims = {batch},"
    f" contracting_dims = {contracting} : ({lhs}, {rhs}) -> {wide}",
    f"%result = stablehlo.convert %dot : ({wide}) -> {result}",
    f"return %result : {result}",
  ]
  body = "\n".join(lines)
  return lambda name: (
    f'func.func private @"{name}"({arguments}) -> {result} {{\n{body}\n}}'
  )


def _dequantized(side: str, values: Any, scale: Any) -> list[str]:
  """Returns lines that compute %lhs_dq or %rhs_dq in bf16."""
  shape, scale_shape = list(values.shape), list(scale.shape)
  if not scale_shape:  # a scalar scale for the whole operand
    scale_shape = [1] * len(shape)
  if len(shape) != len(scale_shape) or any(
    count == 0 or size % count
    for size, count in zip(shape, scale_shape, strict=False)
  ):
    raise ValueError(
      f"the scale of a scaled-dot must divide its operand, got {values} with"
      f" {scale}"
    )
  split = [
    part
    for size, count in zip(shape, scale_shape, strict=True)
    for part in (count, size // count)
  ]
  wide, wide_scale, full, blocks = (
    _tensor(dims, "bf16") for dims in (shape, scale.shape, shape, split)
  )
  dims = [2 * i for i in range(len(scale.shape))]
  return [
    f"%{side}_cv = stablehlo.convert %{side} : ({values}) -> {wide}",
    f"%{side}_sc = stablehlo.convert %{side}_scale : ({scale}) -> {wide_scale}",
    f"%{side}_bc = stablehlo.broadcast_in_dim %{side}_sc, dims = {dims} :"
    f" ({wide_scale}) -> {blocks}",
    f"%{side}_rs = stablehlo.reshape %{side}_bc : ({blocks}) -> {full}",
    f"%{side}_dq = stablehlo.multiply %{side}_cv, %{side}_rs : {wide}",
  ]


def _tensor(shape: Sequence[int], element: str) -> str:
  return f"tensor<{'x'.join([*map(str, shape), element])}>"
