# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Modules read and written: StableHLO in every form that it comes in.

What can be read, and what `Source.write` makes of it:

  str, StableHLO text                       -> str, StableHLO text
  str, HLO text                             -> str, StableHLO text
  bytes, MLIR bytecode                      -> bytes, MLIR bytecode
  bytes, a StableHLO portable artifact      -> bytes, the same, same version
  bytes, any of the texts in UTF-8          -> bytes, StableHLO text in UTF-8
  `ir.Module`, `jax.stages.Lowered`         -> `ir.Module`
  `jax.export.Exported`                     -> `jax.export.Exported`

What was given is never changed. Text keeps its locations where it has some.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Iterator
from typing import Any
from typing import Final

import jax
import jax.export
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jaxplugin import jax_private

BYTECODE_MAGIC: Final = b"ML\xefR"
# The producer's name follows the magic and one byte of format version. MLIR
# itself says "MLIR", StableHLO's serializer its name and version.
_PORTABLE_PRODUCER: Final = re.compile(
  rb"ML\xefR[\x00-\xff]StableHLO_v(\d+\.\d+\.\d+)\x00"
)
_PARSE_BUFFER: Final = "-"  # how MLIR calls a string that it parses
_HLO_ERROR: Final = re.compile(r"was parsing (\d+):(\d+): error: (.*)")

TEXT: Final = "text"
BYTECODE: Final = "bytecode"
PORTABLE: Final = "portable"
FORMS: Final = (TEXT, BYTECODE, PORTABLE)


class ModuleError(ValueError):
  """A module that cannot be read or written; says where and why."""


@dataclasses.dataclass(kw_only=True)
class Source:
  """A module that was read.

  Attributes:
    module: a copy, free to be changed.
    given: what was read.
    name: its file, or another name, for messages.
    form: `TEXT`, `BYTECODE`, `PORTABLE`, or None for an object.
    version: of StableHLO, where the form is `PORTABLE`.
    has_locations: whether the module came with source locations.
  """

  module: ir.Module
  given: Any
  name: str
  form: str | None
  version: str | None = None
  has_locations: bool = True

  def write(self) -> Any:
    """`module` as the kind of thing that was given.

    Raises:
      ModuleError: a portable artifact's version lacks what the module uses.
    """
    given = self.given
    if isinstance(given, jax.export.Exported):
      # Verbatim is how JAX writes it as well, which allows for Shardy's ops.
      assert self.version is not None  # it holds a portable artifact
      data = _portable_artifact(self.module, self.version, self.name)
      return dataclasses.replace(given, mlir_module_serialized=data)
    if self.form is None:
      return self.module
    result = self.serialize(self.form)
    if isinstance(given, str):
      return result
    return result.encode() if isinstance(result, str) else result

  def unchanged(self) -> Any:
    """What was given; of `jax.stages.Lowered` its module."""
    is_lowered = isinstance(self.given, jax.stages.Lowered)
    return self.module if is_lowered else self.given

  def require_platform(self, platform: str) -> None:
    """Raises ValueError where an `Exported` is not for this platform alone."""
    if isinstance(self.given, jax.export.Exported):
      platforms = tuple(self.given.platforms)
      if platforms != (platform,):
        raise ValueError(
          f"{self.name}: an Exported must be for the target's platform"
          f" {platform!r} alone, got {platforms}; export it with"
          f" platforms=[{platform!r}]"
        )

  def serialize(self, form: str) -> str | bytes:
    """`module` in one of `FORMS`; raises ModuleError as `write` does."""
    if form == TEXT:
      operation = self.module.operation
      return operation.get_asm(enable_debug_info=self.has_locations)
    if form == BYTECODE:
      return _bytecode(self.module)
    version = self.version or stablehlo.get_current_version()
    return _portable_artifact(self.module, version, self.name)

  def location(self, operation: Any) -> str:
    """Where an operation comes from, "file:line:column", or "".

    That is the innermost place in a file that its location names. Of text
    without locations, it is the place in that text. Where no file is named it
    is the operation's name, which in HLO every instruction has.
    """
    place = _file_location(operation.location)
    if place is None:
      location = operation.location
      return location.name_str if isinstance(location, ir.NameLoc) else ""
    file = self.name if place.filename == _PARSE_BUFFER else place.filename
    column = f":{place.start_col}" if place.start_col else ""
    return f"{file}:{place.start_line}{column}"


def is_module(x: Any) -> bool:
  """Whether `x` is something that `read` reads, by its type."""
  kinds = (
    str,
    bytes,
    bytearray,
    memoryview,
    ir.Module,
    jax.stages.Lowered,
    jax.export.Exported,
  )
  return isinstance(x, kinds)


def read(given: Any, name: str | None = None) -> Source:
  """Reads a module in any of the forms above, and verifies it.

  Args:
    given: the module.
    name: how messages call it, such as its path.

  Raises:
    TypeError: it is no form of a module.
    ModuleError: it does not parse, is truncated, or is not valid.
  """
  if not is_module(given):
    raise TypeError(
      "module must be StableHLO or HLO text, MLIR bytecode, an ir.Module, a"
      f" jax.stages.Lowered or a jax.export.Exported, got {type(given)}"
    )
  name = name or f"<{type(given).__name__}>"
  if isinstance(given, jax.export.Exported):
    source = _read_bytecode(given.mlir_module_serialized, name)
    source = dataclasses.replace(source, given=given)
  elif isinstance(given, (ir.Module, jax.stages.Lowered)):
    module: Any = given
    if isinstance(given, jax.stages.Lowered):
      module = given.compiler_ir("stablehlo")
    source = Source(
      module=_parse(_bytecode(module), name, module.context),
      given=given,
      name=name,
      form=None,
    )
  elif isinstance(given, str):
    source = _read_text(given, name)
  else:
    data = bytes(given)
    if data and BYTECODE_MAGIC.startswith(data[: len(BYTECODE_MAGIC)]):
      source = _read_bytecode(data, name)
    else:
      source = _read_text(_decode(data, name), name)
    source = dataclasses.replace(source, given=given)
  verify(source.module, name)
  return source


def verify(module: ir.Module, name: str) -> None:
  """Raises ModuleError where MLIR's verifier finds fault with the module."""
  try:
    module.operation.verify()
  except ir.MLIRError as error:
    raise ModuleError(_first_diagnostic(error, name)) from None


def copy(module: ir.Module) -> ir.Module:
  """A copy in the same context."""
  return ir.Module.parse(_bytecode(module), module.context)


def imported(module: ir.Module, context: ir.Context) -> ir.Module:
  """A copy in another context."""
  return ir.Module.parse(_bytecode(module), context)


def walk(operation: Any) -> Iterator[Any]:
  """Every operation below this one, whatever region it is in, in order."""
  for region in operation.regions:
    for block in region:
      for child in block:
        yield child.operation
        yield from walk(child.operation)


def inline_calls(module: ir.Module) -> None:
  """Inlines the functions that @main calls, directly or not, into it.

  JAX lowers helpers of jax.numpy to functions of their own; MLIR's inliner
  does not know those dialects in jaxlib.
  """
  symbols = ir.SymbolTable(module.operation)
  main = symbols["main"].operation
  is_call = lambda operation: operation.name == "func.call"
  called = set()
  while calls := list(filter(is_call, walk(main))):
    for call in calls:
      name = call.attributes["callee"].value
      called.add(name)
      _inline(call, symbols[name])
  remaining = [op for op in module.body if op.operation != main]
  for function in remaining:
    name = function.attributes["sym_name"].value
    if name in called:
      symbols.erase(function)


def _inline(call: Any, function: Any) -> None:
  """Replaces a call by copies of the function's operations."""
  (block,) = function.regions[0].blocks
  values = dict(zip(block.arguments, call.operands, strict=True))
  *body, terminator = [child.operation for child in block]
  for operation in body:
    copied = operation.clone(ir.InsertionPoint(call)).operation
    for inner in (copied, *walk(copied)):
      for i, operand in enumerate(inner.operands):
        if operand in values:
          inner.operands[i] = values[operand]
    values.update(zip(operation.results, copied.results, strict=True))
  for result, value in zip(call.results, terminator.operands, strict=True):
    result.replace_all_uses_with(values[value])
  call.erase()


def _read_text(text: str, name: str) -> Source:
  if not text.strip():
    raise ModuleError(f"{name}: the module is empty")
  source = Source(
    module=None,
    given=text,
    name=name,
    form=TEXT,
  )
  if _is_hlo(text):
    source.module = _parse(_convert_hlo(text, name), name)
    return source
  source.module = _parse(text, name)
  source.has_locations = any(
    not isinstance(operation.location, ir.FileLineColLoc)
    or operation.location.filename != _PARSE_BUFFER
    for operation in walk(source.module.operation)
  )
  return source


def _read_bytecode(data: bytes, name: str) -> Source:
  if len(data) <= len(BYTECODE_MAGIC):
    raise ModuleError(f"{name}: the bytecode is truncated after {len(data)} B")
  # A portable artifact is bytecode of the VHLO dialect, which parses as well.
  # So whatever is wrong with its bytes is told by the parser, as exceptions.
  module = _parse(data, name)
  source = Source(module=module, given=data, name=name, form=BYTECODE)
  match = _PORTABLE_PRODUCER.match(data)
  if match is not None:
    source.form, source.version = PORTABLE, match[1].decode()
    source.module = _of_portable_artifact(data, name, module.context)
  return source


def _decode(data: bytes, name: str) -> str:
  try:
    return data.decode()
  except UnicodeDecodeError:
    raise ModuleError(
      f"{name}: neither MLIR bytecode, which starts with {BYTECODE_MAGIC!r},"
      f" nor UTF-8 text; it starts with {data[:8]!r}"
    ) from None


def _parse(
  data: str | bytes, name: str, context: ir.Context | None = None
) -> ir.Module:
  try:
    return ir.Module.parse(data, context or jax_private.make_ir_context())
  except ir.MLIRError as error:
    raise ModuleError(_first_diagnostic(error, name)) from None


def _first_diagnostic(error: ir.MLIRError, name: str) -> str:
  """What MLIR says first, with the file, line and column that it means."""
  diagnostics = error.error_diagnostics
  if not diagnostics:
    return f"{name}: {error.message}"
  where = diagnostics[0].location
  # A diagnostic's location has lost its class.
  place = _file_location(ir.Location.from_attr(where.attr, where.context))
  message = diagnostics[0].message
  if place is None:
    return f"{name}: {message}"
  if place.filename != _PARSE_BUFFER:
    return f"{name}: {message} (at {place.filename}:{place.start_line})"
  if place.start_line == 0:  # bytecode has no lines
    return f"{name}: malformed or truncated bytecode: {message}"
  return f"{name}:{place.start_line}:{place.start_col}: {message}"


def _file_location(location: Any) -> Any:
  """The innermost `FileLineColLoc` of a location; None if it has none."""
  if isinstance(location, ir.FileLineColLoc):
    return location
  inner: tuple[Any, ...] = ()
  if isinstance(location, ir.NameLoc):
    inner = (location.child_loc,)
  elif isinstance(location, ir.CallSiteLoc):
    inner = (location.callee, location.caller)
  elif isinstance(location, ir.FusedLoc):
    inner = tuple(location.locations)
  found = (_file_location(place) for place in inner)
  return next((place for place in found if place is not None), None)


def _bytecode(module: ir.Module) -> bytes:
  buffer = io.BytesIO()
  module.operation.write_bytecode(buffer)
  return buffer.getvalue()


def _of_portable_artifact(
  data: bytes, name: str, context: ir.Context
) -> ir.Module:
  with _collected_diagnostics(context) as messages:
    try:
      return stablehlo.deserialize_portable_artifact(context, data)
    except ValueError as error:
      why = "; ".join(dict.fromkeys(messages)) or str(error)
      raise ModuleError(f"{name}: unreadable portable artifact: {why}") from (
        None
      )


def _portable_artifact(module: ir.Module, version: str, name: str) -> bytes:
  with _collected_diagnostics(module.context) as messages:
    try:
      # Other dialects: Shardy's are written as they are, as by jax.export.
      return stablehlo.serialize_portable_artifact(module, version, True)
    except ValueError as error:
      why = "; ".join(dict.fromkeys(messages)) or str(error)
      raise ModuleError(
        f"{name}: cannot be written as StableHLO {version}: {why}"
      ) from None


class _collected_diagnostics:
  """Collects what MLIR would print to the process's stderr."""

  def __init__(self, context: ir.Context) -> None:
    self._context = context
    self._messages: list[str] = []

  def __enter__(self) -> list[str]:
    self._handler = self._context.attach_diagnostic_handler(self._collect)
    return self._messages

  def __exit__(self, *unused: Any) -> None:
    self._handler.detach()

  def _collect(self, diagnostic: Any) -> bool:
    self._messages.append(diagnostic.message)
    return True


def _is_hlo(text: str) -> bool:
  """Whether the first line that is no comment begins an HLO module."""
  for line in text.splitlines():
    line = line.strip()
    if line and not line.startswith("//"):
      return line.split(maxsplit=1)[0].rstrip(",") == "HloModule"
  return False


def _convert_hlo(text: str, name: str) -> bytes:
  try:
    return jax_private.stablehlo_of_hlo(text)
  except jax.errors.JaxRuntimeError as error:
    match = _HLO_ERROR.search(str(error))
    if match is not None:
      line, column, message = match.groups()
      raise ModuleError(f"{name}:{line}:{column}: {message}") from None
    message = " ".join(str(error).split())
    raise ModuleError(f"{name}: HLO that cannot be converted: {message}") from (
      None
    )
