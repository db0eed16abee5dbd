# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parses modules in all forms, with errors that have the location and reason.

It imports jaxlib and not JAX, because the process that parses untrusted modules
(`module_process`) uses it.

jaxlib cannot convert all HLO text: StableHLO has no scaled-dot. `_convertible`
replaces it in the text by a custom call. `_as_composites` replaces that call in
the converted module by the composite "xla.scaled_dot". The decomposition
computes what XLA's expansion computes::

  lhs, rhs and scales to bf16; each scale repeated along every dimension to the
  size of its operand; dot_general(lhs * lhs_scale, rhs * rhs_scale) in f32

jaxlib needs attributes on a call that is a composite, and XLA's passes omit
them. `_convertible` adds empty attributes.

Source: XLA, scaled_dot_rewriter.{h,cc}, block_scaling_rewriter.cc.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import stablehlo

from jaxplugin.jaxext import jaxlib_private

BYTECODE_MAGIC: Final = b"ML\xefR"
# The name of the producer follows the magic and one byte of format version.
# MLIR writes "MLIR"; StableHLO's serializer writes its name and version.
_PORTABLE_PRODUCER: Final = re.compile(
  rb"ML\xefR[\x00-\xff]StableHLO_v(\d+\.\d+\.\d+)\x00"
)
PARSE_BUFFER: Final = "-"  # MLIR's file name for a string that it parses
# Locations can be shared, so their tree may have exponentially many nodes.
_MOST_PLACES: Final = 10_000
_HLO_ERROR: Final = re.compile(r"was parsing (\d+):(\d+): error: (.*)")
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


class ModuleError(ValueError):
  """A module cannot be read or written; the text has location and reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parsed:
  """A verified module.

  Attributes:
    module: the module.
    is_text: whether the module was StableHLO text. Operations without a source
      location then have their position in that text.
  """

  module: ir.Module
  is_text: bool = False


def is_bytecode(data: bytes) -> bool:
  """Returns whether `data` is MLIR bytecode, or a prefix of its magic."""
  return bool(data) and BYTECODE_MAGIC.startswith(data[: len(BYTECODE_MAGIC)])


def decode(data: bytes, name: str) -> str:
  """Decodes UTF-8; raises ModuleError if the data is not UTF-8."""
  try:
    return data.decode()
  except UnicodeDecodeError:
    raise ModuleError(
      f"{name}: neither MLIR bytecode, which starts with {BYTECODE_MAGIC!r},"
      f" nor UTF-8 text; it starts with {data[:8]!r}"
    ) from None


def portable_version(data: bytes) -> str | None:
  """Returns the StableHLO version of a portable artifact, or None."""
  match = _PORTABLE_PRODUCER.match(data)
  return None if match is None else match[1].decode()


def is_hlo(text: str) -> bool:
  """Returns whether the first line that is not a comment starts HLO."""
  for line in text.splitlines():
    line = line.strip()
    if line and not line.startswith("//"):
      return line.split(maxsplit=1)[0].rstrip(",") == "HloModule"
  return False


def parse(data: str | bytes, name: str, context: ir.Context) -> Parsed:
  """Parses and verifies text, HLO text, bytecode or a portable artifact.

  Raises:
    ModuleError: If the module does not parse, is truncated, or is not valid.
  """
  try:
    if isinstance(data, bytes):
      parsed = Parsed(module=_parse_bytecode(data, name, context))
    else:
      parsed = _parse_text(data, name, context)
    verify(parsed.module, name)
  except RuntimeError as error:  # from the bindings, for strings not in UTF-8
    message = " ".join(str(error).split())
    raise ModuleError(f"{name}: malformed: {message}") from None
  return parsed


def verify(module: ir.Module, name: str) -> None:
  """Raises ModuleError if MLIR's verifier rejects the module."""
  try:
    module.operation.verify()
  except ir.MLIRError as error:
    raise ModuleError(_first_diagnostic(error, name)) from None


def walk(operation: Any) -> Iterator[Any]:
  """Yields every operation below `operation`, at any depth, in order."""
  levels = [_children(operation)]
  while levels:
    child = next(levels[-1], None)
    if child is None:
      levels.pop()
    else:
      yield child
      levels.append(_children(child))


def _children(operation: Any) -> Iterator[Any]:
  for region in operation.regions:
    for block in region:
      for child in block:
        yield child.operation


def file_location(location: Any) -> Any:
  """Returns the innermost `FileLineColLoc` of a location, or None."""
  waiting = [location]
  for _ in range(_MOST_PLACES):
    if not waiting:
      break
    place = waiting.pop()
    if isinstance(place, ir.FileLineColLoc):
      return place
    if isinstance(place, ir.NameLoc):
      waiting.append(place.child_loc)
    elif isinstance(place, ir.CallSiteLoc):
      waiting += (place.caller, place.callee)
    elif isinstance(place, ir.FusedLoc):
      waiting += reversed(list(place.locations))
  return None


def string(attribute: Any) -> str:
  """Returns the text of an `ir.StringAttr`, which need not be UTF-8."""
  return attribute.value_bytes.decode(errors="backslashreplace")


def custom_call(operation: Any) -> str:
  """Returns the target of a custom call; "" for other operations."""
  if operation.name != "stablehlo.custom_call":
    return ""
  return string(operation.attributes["call_target_name"])


def symbol(operation: Any) -> str:
  """Returns the symbol that an operation defines, or ""."""
  attributes = operation.attributes
  return string(attributes["sym_name"]) if "sym_name" in attributes else ""


def read_places(module: ir.Module) -> None:
  """Reads the file name of every location in a module.

  The bindings crash on a file name that is not UTF-8. This function makes that
  crash happen in the child process.
  """
  for operation in walk(module.operation):
    place = file_location(operation.location)
    if place is not None:
      _ = place.filename


def _parse_text(text: str, name: str, context: ir.Context) -> Parsed:
  if not text.strip():
    raise ModuleError(f"{name}: the module is empty")
  if is_hlo(text):
    text = _convertible(text)
    module = _parse(_convert_hlo(text, name), name, context)
    # jaxlib inlines the computations of loops and conditionals, and also leaves
    # each as a private function that nothing calls.
    with context:
      unused = passmanager.PassManager.parse("builtin.module(symbol-dce)")
      unused.run(module.operation)
    try:
      _as_composites(module, list(walk(module.operation)))
    except ValueError as error:
      raise ModuleError(f"{name}: {error}") from None
    return Parsed(module=module)
  return Parsed(module=_parse(text, name, context), is_text=True)


def _parse_bytecode(data: bytes, name: str, context: ir.Context) -> ir.Module:
  if len(data) <= len(BYTECODE_MAGIC):
    raise ModuleError(f"{name}: the bytecode is truncated after {len(data)} B")
  # A portable artifact is bytecode of the VHLO dialect. The parser reads it and
  # raises an exception if its bytes are malformed.
  module = _parse(data, name, context)
  if portable_version(data) is None:
    return module
  return _of_portable_artifact(data, name, context)


def _parse(data: str | bytes, name: str, context: ir.Context) -> ir.Module:
  try:
    return ir.Module.parse(data, context)
  except ir.MLIRError as error:
    raise ModuleError(_first_diagnostic(error, name)) from None


def _first_diagnostic(error: ir.MLIRError, name: str) -> str:
  """Returns MLIR's first diagnostic, with its file, line and column."""
  diagnostics = error.error_diagnostics
  if not diagnostics:
    return f"{name}: {error.message}"
  where = diagnostics[0].location
  # The Python class of a diagnostic's location is lost.
  place = file_location(ir.Location.from_attr(where.attr, where.context))
  message = diagnostics[0].message
  if place is None:
    return f"{name}: {message}"
  if place.filename != PARSE_BUFFER:
    return f"{name}: {message} (at {place.filename}:{place.start_line})"
  if place.start_line == 0:  # bytecode has no lines
    return f"{name}: malformed or truncated bytecode: {message}"
  return f"{name}:{place.start_line}:{place.start_col}: {message}"


def _of_portable_artifact(
  data: bytes, name: str, context: ir.Context
) -> ir.Module:
  with diagnostics_in_error(context, f"{name}: unreadable portable artifact"):
    return stablehlo.deserialize_portable_artifact(context, data)


@contextlib.contextmanager
def diagnostics_in_error(context: ir.Context, text: str) -> Iterator[None]:
  """Raises ModuleError in place of ValueError, with MLIR's diagnostics.

  MLIR would print them to stderr. They follow `text` in the message.
  """
  messages: list[str] = []

  def collect(diagnostic: Any) -> bool:
    messages.append(diagnostic.message)
    return True

  handler = context.attach_diagnostic_handler(collect)
  try:
    yield
  except ValueError as error:
    why = "; ".join(dict.fromkeys(messages)) or str(error)
    raise ModuleError(f"{text}: {why}") from None
  finally:
    handler.detach()


def _convert_hlo(text: str, name: str) -> bytes:
  try:
    return jaxlib_private.stablehlo_of_hlo(text)
  except jaxlib_private.HloError as error:
    match = _HLO_ERROR.search(str(error))
    if match is not None:
      line, column, message = match.groups()
      raise ModuleError(f"{name}:{line}:{column}: {message}") from None
    message = " ".join(str(error).split())
    raise ModuleError(f"{name}: HLO that cannot be converted: {message}") from (
      None
    )


# HLO text.


def _convertible(text: str) -> str:
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


def _as_composites(module: ir.Module, operations: Sequence[Any]) -> None:
  """Replaces the custom calls among `operations` of a module by composites.

  Raises:
    ValueError: If a scale does not divide its operand.
  """
  calls = [x for x in operations if custom_call(x) == _TARGET]
  taken = {symbol(child) for child in module.body}
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
