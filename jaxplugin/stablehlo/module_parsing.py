# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parses modules in all forms, with errors that have the location and reason.

It imports jaxlib and not JAX, because the process that parses untrusted modules
(`module_child`) uses it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any
from typing import Final

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jaxplugin.jaxext import jaxlib_private
from jaxplugin.stablehlo import module_hlo

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

  Args:
    data: the module.
    name: name of the module in messages.
    context: context for the parsed module.

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
    text = module_hlo.convertible(text)
    module = _parse(_convert_hlo(text, name), name, context)
    try:
      module_hlo.as_composites(module, list(walk(module.operation)))
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
  with collected_diagnostics(context) as messages:
    try:
      return stablehlo.deserialize_portable_artifact(context, data)
    except ValueError as error:
      why = "; ".join(dict.fromkeys(messages)) or str(error)
      raise ModuleError(f"{name}: unreadable portable artifact: {why}") from (
        None
      )


@contextlib.contextmanager
def collected_diagnostics(context: ir.Context) -> Iterator[list[str]]:
  """Collects diagnostics that MLIR would print to stderr."""
  messages: list[str] = []

  def collect(diagnostic: Any) -> bool:
    messages.append(diagnostic.message)
    return True

  handler = context.attach_diagnostic_handler(collect)
  try:
    yield messages
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
