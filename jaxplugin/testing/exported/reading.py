# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What tests read in exported and compiled modules."""

from __future__ import annotations

import collections
import re
from typing import Any, Final

# What modules have beside kernels, as shardings and checks of sizes.
_OTHERS: Final = ("Sharding", "shape_assertion")
_CALL: Final = re.compile(r"custom_call @(\S+?)\(")
_COLLECTIVE: Final = re.compile(
  r"= (\S.*?) (all-gather|all-reduce|reduce-scatter|all-to-all"
  r"|collective-permute)(?:-start)?\("
)
_TYPE: Final = re.compile(r"\w+\[[\d,]*\]")


def calls_in(exported: Any) -> dict[str, int]:
  """How many custom calls of each target a `jax.export.Exported` has."""
  found = collections.Counter(_CALL.findall(exported.mlir_module()))
  return {name: n for name, n in found.items() if name not in _OTHERS}


def collectives(compiled: Any) -> list[tuple[str, str]]:
  """(kind, type), such as ("all-gather", "u8[8,32]"), of optimized HLO."""
  return sorted(
    (kind, type_)
    for types, kind in _COLLECTIVE.findall(compiled.as_text())
    for type_ in _TYPE.findall(types)  # several, where they are joined
  )


def kinds_moved(compiled: Any) -> set[tuple[str, str]]:
  """(kind, dtype), such as ("all-gather", "u8"), of optimized HLO."""
  return {(kind, type_.split("[")[0]) for kind, type_ in collectives(compiled)}
