# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How often the operations of a module run.

The counts start at the public functions, and follow calls and decompositions of
composites. A loop's trip count is unknown, so its body counts once.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any, Final

from jaxplugin.stablehlo import module_calls, module_parsing, modules

_LOOP: Final = "stablehlo.while"
_BRANCHES: Final = ("stablehlo.if", "stablehlo.case")
_CALLEES: Final = {
  "func.call": "callee",
  "stablehlo.composite": "decomposition",
}


@dataclasses.dataclass(frozen=True)
class Run:
  """The kind of control flow around an operation.

  Attributes:
    is_in_loop: whether it is in a loop, whose trip count is unknown.
    is_conditional: whether it is in a branch, which may not run.
  """

  is_in_loop: bool = False
  is_conditional: bool = False

  def inside(self, operation: Any) -> Run:
    """Returns the control flow around operations in an operation's regions."""
    around = Run(operation.name == _LOOP, operation.name in _BRANCHES)
    return self.within(around)

  def within(self, caller: Run) -> Run:
    """Adds the control flow around a call of the operation's function."""
    return Run(
      self.is_in_loop or caller.is_in_loop,
      self.is_conditional or caller.is_conditional,
    )


# Number of runs of an operation or a function, by control flow.
Runs = collections.Counter[Run]


def runs_of(source: modules.ParsedModule) -> Iterator[tuple[Any, Runs]]:
  """Yields every operation in the module's order with its number of runs.

  An operation in a private function without callers does not run.
  """
  functions = _runs_of_functions(source.module)
  for child in source.module.body:
    function = child.operation
    name = module_parsing.symbol(function)
    called = functions.get(name, collections.Counter({Run(): 1}))
    for operation, run in _walk_runs(function):
      runs: Runs = collections.Counter()
      for caller, count in called.items():
        runs[run.within(caller)] += count
      yield operation, runs


def _runs_of_functions(module: Any) -> dict[str, Runs]:
  """Returns the number of runs of each function of a module, by name."""
  functions = {module_parsing.symbol(op): op.operation for op in module.body}
  functions.pop("", None)
  calls: dict[str, list[tuple[str, Run]]] = {
    name: [
      (callee, run)
      for operation, run in _walk_runs(function)
      if (callee := _callee(operation)) in functions
    ]
    for name, function in functions.items()
  }
  waiting = collections.Counter(
    callee for callees in calls.values() for callee, _ in callees
  )
  runs: dict[str, Runs] = {name: collections.Counter() for name in functions}
  for name, function in functions.items():
    if str(function.attributes.get("sym_visibility")) != '"private"':
      runs[name][Run()] += 1
  # A function is ready when all its callers are done; recursion never is.
  ready = [name for name in functions if not waiting[name]]
  while ready:
    name = ready.pop()
    for callee, run in calls[name]:
      for caller, count in runs[name].items():
        runs[callee][run.within(caller)] += count
      waiting[callee] -= 1
      if not waiting[callee]:
        ready.append(callee)
  return runs


def _walk_runs(operation: Any) -> Iterator[tuple[Any, Run]]:
  """Yields what `modules.walk` yields, each with its control flow."""
  inside = {operation: Run().inside(operation)}
  for child in modules.walk(operation):
    around = inside[child.parent.operation]
    inside[child] = around.inside(child)
    yield child, around


def _callee(operation: Any) -> str:
  """Returns the function that an operation runs, or "".

  The result is "" for block-scaled composites, which `module_calls` reads.
  """
  attribute = _CALLEES.get(operation.name)
  if attribute is None or module_calls.call_name(operation) is not None:
    return ""
  return operation.attributes[attribute].value
