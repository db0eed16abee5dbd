# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads StableHLO files and compiles them."""

from __future__ import annotations

import pathlib
from typing import Any, Final

import jax
from jax.extend import core as extend_core
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from jaxplugin.core import targets
from jaxplugin.lab.compilation import deviceless
from jaxplugin.stablehlo import module_calls, modules

_MAIN: Final = "main"
_PLACED: Final = "file_main"  # the name of main inside another module

module_p = extend_core.Primitive("module_of_file")
module_p.multiple_results = True


def text_of(file: pathlib.Path) -> str:
  """Returns a file's text without comments, so no CHECK line matches itself."""
  lines = file.read_text().splitlines()
  return "\n".join("" if line.startswith("//") else line for line in lines)


def compile(text: str, target: targets.Target) -> jax.stages.Compiled:
  """Compiles a StableHLO module with XLA's GPU compiler, without a GPU.

  Raises:
    modules.ModuleError: If the text does not parse.
    ValueError: If the module has no function main.
  """
  types = _main(modules.read(text).module).type

  def call(*arrays):
    return module_p.bind(
      *arrays,
      text=text,
      results=tuple(map(module_calls.array_type, types.results)),
    )

  return deviceless.compile(
    call, *map(module_calls.array_type, types.inputs), target=target
  )


def _main(module: ir.Module) -> Any:
  for operation in module.body.operations:
    if isinstance(operation, func.FuncOp) and operation.name.value == _MAIN:
      return operation
  raise ValueError("the module has no function main")


@module_p.def_abstract_eval
def _abstract_eval(*arrays, text, results):
  del arrays, text
  return [jax.core.ShapedArray(x.shape, x.dtype) for x in results]


def _lower(ctx, *arrays, text, results):
  """Copies the file's functions into the module, and calls main."""
  del results
  context = ctx.module_context
  file = ir.Module.parse(text, context.context)
  types = _main(file).type
  with ir.InsertionPoint(context.module.body):
    for operation in file.body.operations:
      placed = operation.operation.clone()
      if operation.name.value == _MAIN:
        placed.attributes["sym_name"] = ir.StringAttr.get(_PLACED)
      placed.attributes["sym_visibility"] = ir.StringAttr.get("private")
      context.symbol_table.insert(placed)
  symbol = ir.FlatSymbolRefAttr.get(_PLACED)
  return func.CallOp(list(types.results), symbol, list(arrays)).results


mlir.register_lowering(module_p, _lower)
