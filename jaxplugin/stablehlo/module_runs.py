# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How often the operations of a module run.

The counts start at the public functions, and follow calls and decompositions of
composites. A loop's trip count is unknown, so its body counts once.
"""

from __future__ import annotations

import collections
import contextlib
import graphlib
from collections.abc import Iterator
from typing import Any, Final

from jaxplugin.jaxext import program
from jaxplugin.stablehlo import module_calls, module_parsing, modules

# Operations with regions, and JAX's names of them.
_CONTROL: Final = {
  "stablehlo.while": "while",
  **dict.fromkeys(("stablehlo.if", "stablehlo.case"), "cond"),
}
_CALLEES: Final = {
  "func.call": "callee",
  "stablehlo.composite": "decomposition",
}


# Number of runs of an operation or a function, by the control flow around it.
Runs = collections.Counter[program.ControlFlow]
_ALWAYS: Final = program.ControlFlow()


def _within(
  run: program.ControlFlow, caller: program.ControlFlow
) -> program.ControlFlow:
  """Adds the control flow around a call of the operation's function."""
  return program.ControlFlow(
    trips=None if None in (run.trips, caller.trips) else 1,
    is_conditional=run.is_conditional or caller.is_conditional,
  )


def runs_of(source: modules.ParsedModule) -> Iterator[tuple[Any, Runs]]:
  """Yields every operation in the module's order with its number of runs.

  An operation in a private function without callers does not run.
  """
  functions = _runs_of_functions(source.module)
  for child in source.module.body:
    function = child.operation
    name = module_parsing.symbol(function)
    called = functions.get(name, collections.Counter({_ALWAYS: 1}))
    for operation, run in _walk_runs(function):
      runs: Runs = collections.Counter()
      for caller, count in called.items():
        runs[_within(run, caller)] += count
      yield operation, runs


def _runs_of_functions(module: Any) -> dict[str, Runs]:
  """Returns the number of runs of each function of a module, by name."""
  functions = {module_parsing.symbol(op): op.operation for op in module.body}
  functions.pop("", None)
  calls: dict[str, list[tuple[str, program.ControlFlow]]] = {
    name: [
      (callee, run)
      for operation, run in _walk_runs(function)
      if (callee := _callee(operation)) in functions
    ]
    for name, function in functions.items()
  }
  runs: dict[str, Runs] = {name: collections.Counter() for name in functions}
  for name, function in functions.items():
    if str(function.attributes.get("sym_visibility")) != '"private"':
      runs[name][_ALWAYS] += 1
  # A function is ready when all its callers are done; recursion never is.
  order: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
  for name, callees in calls.items():
    order.add(name)
    for callee, _ in callees:
      order.add(callee, name)
  with contextlib.suppress(graphlib.CycleError):
    order.prepare()
  while ready := order.get_ready():
    for name in ready:
      for callee, run in calls[name]:
        for caller, count in runs[name].items():
          runs[callee][_within(run, caller)] += count
    order.done(*ready)
  return runs


def _walk_runs(operation: Any) -> Iterator[tuple[Any, program.ControlFlow]]:
  """Yields what `modules.walk` yields, each with its control flow."""
  inside = {operation: _ALWAYS}
  for child in modules.walk(operation):
    around = inside[child.parent.operation]
    inside[child] = around.inside(_CONTROL.get(child.name, ""), {})
    yield child, around


def _callee(operation: Any) -> str:
  """Returns the function that an operation runs, or "".

  The result is "" for block-scaled composites, which `module_calls` reads.
  """
  attribute = _CALLEES.get(operation.name)
  if attribute is None or module_calls.call_name(operation) is not None:
    return ""
  return operation.attributes[attribute].value
