# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions that use jaxlib's private modules, and do not import JAX.

The child of `module_process`, which only reads modules, imports jaxlib without
JAX, which takes a fifth of the time. `jax_private` has the functions that need
JAX.
"""

from __future__ import annotations

from typing import Any, Final

from jaxlib import _hlo, _jax, plugin_support
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, mhlo, mpmd, sdy, stablehlo

HloError: Final = _jax.JaxRuntimeError  # `jax.errors.JaxRuntimeError`


class _Context(ir.Context):
  def __init__(self) -> None:
    # `ir.Context.__init__` loads every dialect that jaxlib links.
    super(ir.Context, self).__init__()


def make_ir_context() -> Any:
  """Returns an `ir.Context` with JAX's dialects. It starts no threads."""
  registry = ir.DialectRegistry()
  _jax_mlir_ext.register_dialects(registry)
  context: Any = _Context()
  context.enable_multithreading(False)
  context.append_dialect_registry(registry)
  context.load_all_available_dialects()
  sdy.register_dialect(context)
  mpmd.register_dialect(context)
  mhlo.register_mhlo_dialect(context)
  chlo.register_dialect(context)
  stablehlo.register_dialect(context)
  return context


def stablehlo_of_hlo(text: str) -> bytes:
  """Converts HLO text to StableHLO in MLIR bytecode.

  Raises:
    HloError: If the text does not parse, or if an instruction has no StableHLO
      form.
  """
  module = _hlo.hlo_module_from_text(text)
  return _jax.mlir.hlo_to_stablehlo(module.as_serialized_hlo_module_proto())


def triton_handlers(platform: str) -> frozenset[str] | None:
  """Returns the FFI handlers for Triton kernels of jaxlib's plugin.

  Args:
    platform: "cuda" or "rocm".

  Returns:
    Their names, or None if no plugin of the platform is installed.
  """
  plugin = plugin_support.import_from_plugin(platform, "_triton")
  if plugin is None:
    return None
  # A plugin without FFI handlers does not have this function.
  registrations = getattr(plugin, "registrations", dict)
  return frozenset(registrations())
