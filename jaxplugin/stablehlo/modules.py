# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes StableHLO and HLO modules in all forms.

`modules.read` accepts the form on the left. `Source.write` then returns the
form on the right:

  str, StableHLO text                       -> str, StableHLO text
  str, HLO text                             -> str, StableHLO text
  bytes, MLIR bytecode                      -> bytes, MLIR bytecode
  bytes, a StableHLO portable artifact      -> bytes, the same, same version
  bytes, any of the texts in UTF-8          -> bytes, StableHLO text in UTF-8
  `ir.Module`, `jax.stages.Lowered`         -> `ir.Module`
  `jax.export.Exported`                     -> `jax.export.Exported`

The caller's module is never changed. Text keeps its locations if it has any.
"""

from __future__ import annotations

import dataclasses
import io
import re
from typing import Any, Final

import jax
import jax.export
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jaxplugin.core import error_context, targets
from jaxplugin.jaxext import jax_private
from jaxplugin.stablehlo import module_parsing, module_process

TEXT: Final = "text"
BYTECODE: Final = "bytecode"
PORTABLE: Final = "portable"
_LONGEST_SHOWN: Final = 200  # bytes of a string that `Source.elide` keeps
FORMS: Final = (TEXT, BYTECODE, PORTABLE)
# The text of a module has spaces.
_PATH: Final = re.compile(r"\S+\.(mlir|mlirbc|hlo|txt|pb|stablehlo)")

ModuleError = module_parsing.ModuleError
verify = module_parsing.verify
walk = module_parsing.walk


@dataclasses.dataclass(kw_only=True)
class ParsedModule:
  """A module and the form in which it was passed.

  Attributes:
    module: a copy that may be changed.
    given: the caller's object.
    name: name in messages, such as the file's name.
    form: `TEXT`, `BYTECODE`, `PORTABLE`, or None for an object.
    version: StableHLO version if the form is `PORTABLE`, else None.
    has_locations: whether the module has source locations.
  """

  module: ir.Module
  given: Any
  name: str
  form: str | None
  version: str | None = None
  has_locations: bool = True

  def write(self) -> Any:
    """Returns `module` in the form that was passed.

    Raises:
      ModuleError: If the version of a portable artifact does not support an
        operation of the module.
    """
    given = self.given
    if isinstance(given, jax.export.Exported):
      # JAX also allows other dialects in the artifact, for Shardy's operations.
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
    """Returns the caller's object; for `jax.stages.Lowered` its module."""
    is_lowered = isinstance(self.given, jax.stages.Lowered)
    return self.module if is_lowered else self.given

  def require_platform(self, platform: str) -> None:
    """Raises ValueError unless an `Exported` is for this platform only."""
    if isinstance(self.given, jax.export.Exported):
      platforms = tuple(self.given.platforms)
      if platforms != (platform,):
        raise ValueError(
          f"{self.name}: an Exported must have only the target's platform,"
          f" {platform!r}, got {platforms}; export it with"
          f" platforms=[{platform!r}]"
        )

  def serialize(self, form: str) -> str | bytes:
    """Returns `module` in one of `FORMS`; raises the errors of `write`."""
    if form == TEXT:
      operation = self.module.operation
      return operation.get_asm(enable_debug_info=self.has_locations)
    if form == BYTECODE:
      return _bytecode(self.module)
    version = self.version or stablehlo.get_current_version()
    return _portable_artifact(self.module, version, self.name)

  def elide(self) -> None:
    """Replaces each long string in a backend_config by its length.

    The result is for readers and cannot be compiled.
    """
    for operation in walk(self.module.operation):
      attributes = operation.attributes
      for name in ("backend_config", "mhlo.backend_config"):
        if name in attributes:
          attributes[name] = _elided(attributes[name])

  def location(self, operation: Any) -> str:
    """Returns the source of an operation, "file:line:column", or "".

    It is the innermost position in a file that the operation's location names.
    Operations of text without locations have a position in that text. Without a
    file it is the operation's name, which each HLO instruction has.
    """
    place = module_parsing.file_location(operation.location)
    if place is None:
      location = operation.location
      return location.name_str if isinstance(location, ir.NameLoc) else ""
    file = place.filename
    file = self.name if file == module_parsing.PARSE_BUFFER else file
    column = f":{place.start_col}" if place.start_col else ""
    return f"{file}:{place.start_line}{column}"


def wrong_target(
  name: str, call: str, target: targets.Target, architecture: str = ""
) -> ModuleError:
  """Returns the error for a module that was lowered for another device.

  Args:
    call: name of a custom call that the target cannot run, and its location.
    target: the device that the module is read for.
    architecture: architecture of the call's kernel; "" if the target's platform
      does not have the call.
  """
  reason = (
    f"a kernel for {architecture}, which {target} does not run"
    if architecture
    else "which that platform does not have"
  )
  is_named = target.name in targets.TARGET_NAMES
  device = (
    f"jp.named_target({target.name!r})"
    if is_named
    else f"jp.detect_target({target.platform!r})"
  )
  command = (
    " Or run `python -m jaxplugin compile PACKAGE.MODULE:FUNCTION --target"
    f" {target.name}`."
    if is_named and target.platform == "cuda"
    else ""
  )
  return ModuleError(
    f"{name}: the module must be lowered for the platform {target.platform!r}"
    f" of {target.name}, got a custom call of {call}, {reason}. Lower the"
    " function again: inside"
    f" jp.use_target({device}) call jax.jit(fn)"
    f".trace(*args).lower(lowering_platforms=({target.platform!r},)).as_text()."
    f"{command} Or rewrite a module that still has the block-scaled calls"
    " instead of kernels"
  )


def is_module(x: Any) -> bool:
  """Returns whether `read` accepts an object of the type of `x`."""
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


def read(
  given: Any, name: str | None = None, *, trusted: bool = False
) -> ParsedModule:
  """Reads a module in any of the forms above, and verifies it.

  jaxlib's parsers crash on some malformed modules. A child process therefore
  parses text and bytes first, and returns text that this process can parse.

  Args:
    name: name of the module in messages, such as its path.
    trusted: whether to parse it in this process at once, as for modules that
      jaxlib wrote.

  Raises:
    TypeError: If `given` is not a module.
    ModuleError: If the module does not parse, is truncated, is not valid, or
      takes more time or memory than a module of its size should.
  """
  if not is_module(given):
    raise TypeError(
      f"{error_context.who('rewrite')}: module must be StableHLO or HLO text,"
      " MLIR bytecode, an ir.Module, a jax.stages.Lowered or a"
      f" jax.export.Exported, got {type(given)}"
    )
  if isinstance(given, str) and _PATH.fullmatch(given):
    raise TypeError(
      f"module must be the text of a module, got the path {given!r}. Pass"
      f" pathlib.Path({given!r}).read_bytes()"
    )
  name = name or f"<{type(given).__name__}>"
  if isinstance(given, (ir.Module, jax.stages.Lowered)):
    module: Any = given
    if isinstance(given, jax.stages.Lowered):
      module = given.compiler_ir("stablehlo")
    parsed = module_parsing.parse(_bytecode(module), name, module.context)
    return ParsedModule(module=parsed.module, given=given, name=name, form=None)
  data: str | bytes
  if isinstance(given, jax.export.Exported):
    data = given.mlir_module_serialized
  elif isinstance(given, str):
    data = given
  else:
    data = bytes(given)
    if not module_parsing.is_bytecode(data):
      data = module_parsing.decode(data, name)
  source = _parsed(data, name, trusted)
  return dataclasses.replace(source, given=given)


def imported(module: ir.Module, context: ir.Context) -> ir.Module:
  """Returns a copy in a context."""
  return ir.Module.parse(_bytecode(module), context)


def inline_calls(module: ir.Module) -> None:
  """Inlines the functions that @main calls, directly or not, into it.

  JAX lowers helpers of jax.numpy to separate functions. jaxlib's MLIR inliner
  does not support these dialects.
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


def _elided(attribute: Any) -> Any:
  context = attribute.context
  if isinstance(attribute, ir.DictAttr):
    items = {item.name: _elided(item.attr) for item in attribute}
    return ir.DictAttr.get(items, context)
  if isinstance(attribute, ir.StringAttr):
    length = len(attribute.value_bytes)
    if length > _LONGEST_SHOWN:
      return ir.StringAttr.get(f"<{length} bytes>", context)
  return attribute


def _parsed(given: str | bytes, name: str, trusted: bool) -> ParsedModule:
  """Parses and verifies a module, in a child process first if untrusted."""
  data, version, form = given, None, TEXT
  if isinstance(given, bytes):
    version = module_parsing.portable_version(given)
    form = BYTECODE if version is None else PORTABLE
  if not trusted and module_process.is_available():
    data = module_process.checked(given, name)
  parsed = module_parsing.parse(data, name, jax_private.make_ir_context())
  source = ParsedModule(
    module=parsed.module, given=given, name=name, form=form, version=version
  )
  if data is given and parsed.is_text:
    source.has_locations = any(
      not isinstance(operation.location, ir.FileLineColLoc)
      or operation.location.filename != module_parsing.PARSE_BUFFER
      for operation in walk(source.module.operation)
    )
  return source


def _bytecode(module: ir.Module) -> bytes:
  buffer = io.BytesIO()
  module.operation.write_bytecode(buffer)
  return buffer.getvalue()


def _portable_artifact(module: ir.Module, version: str, name: str) -> bytes:
  text = f"{name}: cannot be written as StableHLO {version}"
  with module_parsing.diagnostics_in_error(module.context, text):
    # True allows other dialects, such as Shardy's, as jax.export does.
    return stablehlo.serialize_portable_artifact(module, version, True)
