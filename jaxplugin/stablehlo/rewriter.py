# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`rewrite`: lowers the block-scaled calls of a StableHLO module."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Iterator
from typing import Any, Final

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, sdy, stablehlo

from jaxplugin import quantization
from jaxplugin.core import decisions, error_context, targets
from jaxplugin.dot import backends
from jaxplugin.kernels.cpu import library
from jaxplugin.operation import choice
from jaxplugin.quantization import arguments
from jaxplugin.runtime import triton_calls, triton_library
from jaxplugin.stablehlo import (
  module_calls,
  module_functions,
  module_parsing,
  modules,
)

# Errors of reading and lowering a call that cannot be lowered.
_REFUSALS: Final = (TypeError, ValueError, NotImplementedError)
# nanobind's error for a string that is not UTF-8.
_BINDINGS_ERROR: Final = re.compile(r"nanobind::.*str.*conversion error")
# JAX's name of the argument that selects the platform.
_PLATFORM_INDEX: Final = "_platform_index"


class RewriteWarning(UserWarning):
  """A call that `rewrite` leaves unchanged; the text has place and reason.

  The call is block-scaled, or launches a kernel whose architecture is unknown.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rewritten:
  """The outcome of one call. `str` is one line.

  Attributes:
    call: name of the call.
    source: file, line and column; empty if unknown.
    description: the computation; the operands' types if the call is refused.
    decided: the decision for the call's dot; None if it has no dot.
    dot: the equation of the call's dot; None if it has no dot.
    function: name of the function that replaces the call; empty if the call
      stays.
    error: why the call is refused and stays. It may have several lines.
    lowering_error: why this process cannot lower the decided call; only from
      `examine`.
  """

  call: str
  source: str
  description: str
  decided: choice.DecidedCall | None = None
  dot: Any = dataclasses.field(default=None, repr=False)
  function: str = ""
  error: str = ""
  lowering_error: str = ""

  def __str__(self) -> str:
    place = f"{self.source}: " if self.source else ""
    line = f"{place}{self.call}: {self.description}: "
    if self.error:
      return f"{line}not changed: {' '.join(self.error.split())}"
    if self.decided is not None:
      assert self.decided.decision is not None
      line += f"{self.decided.decision.implementation}, "
    if not self.function:
      return line + "needs no change"
    return line + f"now a call to @{self.function}"


def rewrite(
  module: Any,
  target: targets.Target,
  *,
  implementation: str | None = None,
  scale_rounding: quantization.ScaleRounding = "up",
  strict: bool = False,
  trusted: bool = False,
) -> Any:
  """Returns a StableHLO module with its block-scaled calls lowered.

  The calls are custom calls `__op$quantize`, `__op$dequantize`,
  `__op$block_scaled_dot` and `__cudnn$blockScaledDot`, and `xla.scaled_dot`
  composites, in any function or region. Each becomes a call of a private
  function that computes it on `target`: a dot by the backend that
  `block_scaled_dot` chooses. A second call for the target changes nothing.

  Everything else stays. docs/reference/custom_calls.md lists the calls, their
  numerics, attributes and shardings.

  Args:
    module: StableHLO or HLO text, bytecode, a portable artifact (bytes), an
      `ir.Module`, the result of `jax.jit(f).lower(...)`, or a
      `jax.export.Exported` for the target's platform. It is not changed.
    target: the device that runs the module. `jp.named_target("cpu")` gives XLA
      operations, and `jp.detect_target("cpu")` C++ kernels.
    implementation: a backend for all dots; None chooses one for each.
    scale_rounding: "up" or "floor", for E8M0 scales.
    strict: True raises if a call cannot be lowered.
    trusted: True parses the module in this process only. By default a child
      process parses first, because jaxlib crashes on some malformed modules.

  Returns:
    The same kind as `module`: text, bytes, an `ir.Module` or an `Exported`. HLO
    text becomes StableHLO. If nothing changes, `module` itself.

  Raises:
    jp.ModuleError: If the module is not valid, crashes the parser, or calls a
      kernel that was lowered for another device than `target`.
    TypeError, ValueError: If an argument is not valid.
    NotImplementedError: If `strict` and a call cannot be lowered; TypeError and
      ValueError are possible too.

  Warns:
    jp.RewriteWarning: If a call cannot be lowered and `strict` is False, or the
      architecture of a Triton kernel is unknown.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> x = jp.quantize(jnp.ones((2, 64)), "mxfp8")
    >>> def f(x, scale):
    ...   return jax.lax.scaled_dot(x, x.T, lhs_scale=scale, rhs_scale=scale.T)
    >>> lowered = jax.jit(f).lower(x.values, x.scale)
    >>> module = jp.rewrite(lowered, jp.named_target("h100"))
    >>> "xla.scaled_dot" in lowered.as_text(), "xla.scaled_dot" in str(module)
    (True, False)
  """
  error_context.require_bool("rewrite", "strict", strict)
  error_context.require_bool("rewrite", "trusted", trusted)
  source = modules.read(module, trusted=trusted)
  done = rewrite_source(
    source,
    target,
    implementation=implementation,
    scale_rounding=scale_rounding,
    strict=strict,
  )
  for item in done:
    if item.error:
      warnings.warn(f"rewrite: {item}", RewriteWarning, stacklevel=2)
  if any(item.function for item in done):
    return source.write()
  return source.unchanged()


def rewrite_source(
  source: modules.ParsedModule,
  target: targets.Target,
  *,
  implementation: str | None = None,
  scale_rounding: quantization.ScaleRounding = "up",
  strict: bool = False,
) -> list[Rewritten]:
  """Rewrites `source.module` in place; returns the outcome of each call."""
  rewriter = _Rewriter(source, target, implementation, scale_rounding)
  source.require_platform(target.platform)
  with readable(source):
    done = rewriter.rewrite_all(strict)
    rewriter.erase_unused_decompositions()
  modules.verify(source.module, source.name)
  return done


def examine(
  source: modules.ParsedModule,
  target: targets.Target,
  implementation: str | None = None,
  *,
  strict: bool = False,
) -> list[Rewritten]:
  """Returns the outcome of each call without rewriting the module.

  Deciding does not need the packages that lower a call. `lowering_error` has
  the reason if one of them is missing. `source` cannot be used afterwards.
  """
  rewriter = _Rewriter(source, target, implementation, "up", is_examining=True)
  with readable(source):
    return rewriter.rewrite_all(strict)


def check_kernels(source: modules.ParsedModule, target: targets.Target) -> None:
  """Checks that `target` runs the kernels that a module calls.

  Raises:
    ModuleError: If a kernel was lowered for another platform, or compiled for
      an architecture that `target` does not run.

  Warns:
    RewriteWarning: If the architecture of a kernel is unknown.
  """
  with readable(source):
    # An export for several platforms has the kernels of each in a branch.
    has_branches = any(
      _PLATFORM_INDEX in str(function.attributes["arg_attrs"])
      for function in source.module.body
      if "arg_attrs" in function.attributes
    )
    for operation in modules.walk(source.module.operation):
      name = module_parsing.custom_call(operation)
      if name in library.HANDLERS:
        platforms: tuple[str, ...] = ("cpu",)
      elif name in triton_calls.NAMES:
        platforms = triton_library.PLATFORMS
      else:
        continue
      place = source.location(operation)
      call = f"{name} at {place}" if place else name
      if target.platform not in platforms and not has_branches:
        raise modules.wrong_target(source.name, call, target)
      if "cpu" in (*platforms, target.platform):
        continue
      architecture = triton_calls.architecture(operation)
      if architecture is None:
        warnings.warn(
          f"{source.name}: kernels must be compiled for {target}, got a custom"
          f" call of {call}, whose payload has no PTX and so no architecture."
          " Lower the function again if it was lowered for another device",
          RewriteWarning,
          stacklevel=5,  # the caller of `rewrite`
        )
      elif not triton_calls.runs_on(architecture, target.compute_capability):
        raise modules.wrong_target(source.name, call, target, architecture)


@contextlib.contextmanager
def readable(source: modules.ParsedModule) -> Iterator[None]:
  """Raises `ModuleError` if Python cannot read a part of a module."""
  try:
    yield
  except RecursionError as error:
    raise modules.ModuleError(
      f"{source.name}: attributes, types or operations are nested too deeply to"
      " be read"
    ) from error
  except RuntimeError as error:
    if not _BINDINGS_ERROR.search(str(error)):
      raise
    raise modules.ModuleError(
      f"{source.name}: a name or a string is not UTF-8"
    ) from error


class _Rewriter:
  """The rewriting of one module."""

  def __init__(
    self,
    source: modules.ParsedModule,
    target: targets.Target,
    implementation: str | None,
    scale_rounding: quantization.ScaleRounding,
    *,
    is_examining: bool = False,
  ) -> None:
    targets.require("rewrite", target)
    backends.validate_name(implementation)
    arguments.validate_scale_rounding("rewrite", scale_rounding)
    check_kernels(source, target)
    self._source = source
    self._options = (target, implementation, scale_rounding)
    self._is_examining = is_examining
    self._lowerings: dict[
      module_calls.ModuleCall, module_functions.Lowering | Exception
    ] = {}
    # The emitted module of equal calls, in the context of `source.module`.
    self._emitted: dict[module_calls.ModuleCall, ir.Module] = {}
    # The function that was added for a call to a symbol table.
    self._functions: dict[tuple[module_calls.ModuleCall, Any], str] = {}
    self._decompositions: list[tuple[Any, str]] = []

  def rewrite_all(self, strict: bool) -> list[Rewritten]:
    """Rewrites every call of the module; `strict` raises for a refused one."""
    found = module_calls.find(self._source)
    return [self._rewrite_call(operation, strict) for operation in found]

  def _rewrite_call(self, operation: Any, strict: bool) -> Rewritten:
    try:
      return self._rewrite(operation)
    except _REFUSALS as error:
      if strict:
        who = f"rewrite: {module_calls.title(operation, self._source)}"
        if isinstance(error, decisions.RefusedError):
          raise error.with_function(who) from error
        raise type(error)(f"{who}: {error}") from error
      types = [str(operand.type) for operand in operation.operands]
      return Rewritten(
        call=str(module_calls.call_name(operation)),
        source=self._source.location(operation),
        description=f"({', '.join(types)})",
        error=str(error),
      )

  def _rewrite(self, operation: Any) -> Rewritten:
    """Replaces one call, or finds that it can stay."""
    with readable(self._source):
      call = module_calls.read(operation)
    shardings = _shardings(operation)
    lowering = self._lower(call)
    result = Rewritten(
      call=call.name,
      source=self._source.location(operation),
      description=lowering.description,
      decided=lowering.decided,
      dot=lowering.dot,
    )
    refusal = lowering.refusal()
    if refusal and self._is_examining:
      return dataclasses.replace(
        result, function=lowering.name, lowering_error=refusal
      )
    if call not in self._emitted:
      self._emitted[call] = _imported(
        lowering.stablehlo(), operation.context, lowering.name
      )
    emitted = self._emitted[call]
    if module_functions.is_emitted(operation, call, emitted):
      return result
    with operation.context, operation.location, ir.InsertionPoint(operation):
      table = _symbol_table(operation)
      if (call, table) not in self._functions:
        name = _add_functions(emitted, table, lowering.name)
        self._functions[call, table] = name
      name = self._functions[call, table]
      if call.name == module_calls.SCALED_DOT:
        decomposition = operation.attributes["decomposition"].value
        self._decompositions.append((table, decomposition))
      _replace(operation, name, shardings)
    return dataclasses.replace(result, function=name)

  def _lower(self, call: module_calls.ModuleCall) -> module_functions.Lowering:
    """Returns the lowering of a call; equal calls are traced once."""
    if call not in self._lowerings:
      try:
        self._lowerings[call] = module_functions.lower(call, *self._options)
      except _REFUSALS as error:
        self._lowerings[call] = error
    lowering = self._lowerings[call]
    if isinstance(lowering, Exception):
      raise lowering
    return lowering

  def erase_unused_decompositions(self) -> None:
    """Erases decompositions of the composites that were replaced."""
    for table, name in dict.fromkeys(self._decompositions):
      symbols = ir.SymbolTable(table)
      if name not in symbols or _is_used(table, name):
        continue
      if symbols[name].attributes["sym_visibility"].value == "private":
        symbols.erase(symbols[name])


def _imported(module: ir.Module, context: Any, name: str) -> ir.Module:
  """Imports an emitted module and inlines all its functions into @main.

  The locations of its operations keep JAX's names. Lines of this package are
  removed, because the module's author did not write them.
  """
  module = modules.imported(module, context)
  with context:
    modules.inline_calls(module)
    for operation in modules.walk(module.operation):
      place = operation.location
      label = place.name_str if isinstance(place, ir.NameLoc) else name
      operation.location = ir.Location.name(label)
  return module


def _symbol_table(operation: Any) -> Any:
  """Returns the module around an operation, which has its symbols."""
  while operation.name != "builtin.module":
    operation = operation.parent.operation
  return operation


def _add_functions(module: ir.Module, table: Any, name: str) -> str:
  """Adds copies of a module's functions to `table`; returns @main's new name.

  They become private, and get names that are free, starting with `name`.
  """
  module = modules.imported(module, module.context)
  taken = {
    module_parsing.symbol(operation)
    for whole in (table, module.operation)
    for operation in whole.regions[0].blocks[0]
  }
  names = {}
  functions = list(module.body)
  for function in functions:
    old = function.attributes["sym_name"].value
    wanted = name if old == "main" else f"{name}.{old}"
    names[old] = _free_name(wanted, taken)
    taken.add(names[old])
    ir.SymbolTable.replace_all_symbol_uses(old, names[old], module.operation)
    ir.SymbolTable.set_symbol_name(function, names[old])
    if isinstance(function, func.FuncOp):  # not a mesh
      ir.SymbolTable.set_visibility(function, "private")
  for function in functions:
    for attribute in ("arg_attrs", "res_attrs"):  # names, for @main only
      if attribute in function.attributes:
        del function.attributes[attribute]
    function.operation.detach_from_parent()
    table.regions[0].blocks[0].append(function)
  return names["main"]


def _free_name(wanted: str, taken: set[str]) -> str:
  name, count = wanted, 0
  while name in taken:
    name, count = f"{wanted}_{count}", count + 1
  return name


def _is_used(table: Any, name: str) -> bool:
  """Returns whether an operation in `table` refers to the symbol @name."""
  needle = ir.FlatSymbolRefAttr.get(name, table.context)
  return any(
    _mentions(attribute, needle)
    for operation in modules.walk(table)
    for _, attribute in operation.attributes.items()
  )


def _mentions(attribute: Any, needle: Any) -> bool:
  if isinstance(attribute, ir.ArrayAttr):
    return any(_mentions(item, needle) for item in attribute)
  if isinstance(attribute, ir.DictAttr):
    return any(_mentions(item.attr, needle) for item in attribute)
  return attribute == needle


def _replace(operation: Any, name: str, shardings: list[Any]) -> None:
  """Replaces a call by a call of @name, at the current insertion point."""
  types = module_calls.result_types(operation)
  replacement = func.CallOp(types, name, list(operation.operands))
  frontend = "mhlo.frontend_attributes"
  if frontend in operation.attributes:
    replacement.attributes[frontend] = operation.attributes[frontend]
  results = list(replacement.results)
  if shardings:
    results = [
      _constrained(result, sharding)
      for result, sharding in zip(results, shardings, strict=True)
    ]
  if module_calls.has_tuple(operation):
    for use in list(operation.results[0].uses):
      user = use.owner.operation
      if user.name == "stablehlo.get_tuple_element":
        index = user.attributes["index"].value
        user.results[0].replace_all_uses_with(results[index])
        user.erase()
    if list(operation.results[0].uses):
      results = [stablehlo.tuple(results)]
    else:
      results = []
  for old, new in zip(operation.results, results, strict=False):
    old.replace_all_uses_with(new)
  operation.erase()


# Shardings of a call's results.


def _shardings(operation: Any) -> list[Any]:
  """Returns a sharding for each result of a call; [] if the call has none.

  Raises:
    ValueError: If the number of shardings is not the number of results.
  """
  num_results = len(module_calls.result_types(operation))
  attributes = operation.attributes
  if "sdy.sharding" in attributes:
    shardings = list(
      sdy.TensorShardingPerValueAttr(attributes["sdy.sharding"]).shardings
    )
  elif "mhlo.sharding" in attributes:
    text = module_parsing.string(attributes["mhlo.sharding"])
    # A sharding that is not a tuple applies to all results.
    shardings = _split_sharding(text) or [text] * num_results
    shardings = [text] if num_results == 1 else shardings
  else:
    return []
  if len(shardings) != num_results:
    raise ValueError(
      f"its sharding must have a part for each of {num_results} results, so"
      f" that they can keep it, got {attributes}"
    )
  return shardings


def _split_sharding(text: str) -> list[str]:
  """Splits an HLO tuple sharding, "{{replicated}, {devices=[2]0,1}}"."""
  parts, depth, start = [], 0, 0
  for i, character in enumerate(text):
    if character == "{":
      depth += 1
      start = i if depth == 2 else start
    elif character == "}":
      depth -= 1
      if depth == 1:
        parts.append(text[start : i + 1])
  return parts


def _constrained(value: Any, sharding: Any) -> Any:
  """Returns a value with a sharding constraint in the form that JAX lowers."""
  if not isinstance(sharding, str):
    return sdy.ShardingConstraintOp(value, sharding).result
  call = stablehlo.CustomCallOp(
    [value.type],
    [value],
    call_target_name=ir.StringAttr.get("Sharding"),
    backend_config=ir.StringAttr.get(""),
    api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1),
  )
  call.operation.attributes["mhlo.sharding"] = ir.StringAttr.get(sharding)
  return call.operation.results[0]
