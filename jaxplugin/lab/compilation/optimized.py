# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts the kernels of a program that XLA's GPU compiler optimized."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any
from typing import Final

import jax

from jaxplugin.core import targets
from jaxplugin.jaxext import jax_private
from jaxplugin.lab.compilation import deviceless
from jaxplugin.lab.compilation import hlo_text
from jaxplugin.stablehlo import modules

_CALL_TARGET: Final = re.compile(r'custom_call_target="(.*?)"')
# XLA's error if the GPU's platform does not have a custom call's target.
_UNKNOWN_CALL: Final = re.compile(
  r"No (?:FFI handler registered for"
  r"|registered implementation for custom call to) (\S+)"
)
_KIND: Final = re.compile(r"\bkind=(\w+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimized:
  """A program that XLA's GPU compiler optimized; `str` returns a report.

  An instruction inside a loop is counted once.

  Attributes:
    name: the name of the program.
    target: the GPU.
    custom_calls: number of calls of each target: `__cudnn$blockScaledDot`, ...
    fusions: number of fusions of each kind: "kLoop", ...
    collectives: number of collectives of each opcode.
    others: number of other operations on the GPU, by opcode.
    argument_bytes, output_bytes, temp_bytes: memory of one device.
  """

  name: str
  target: targets.Target
  custom_calls: dict[str, int]
  fusions: dict[str, int]
  collectives: dict[str, int]
  others: dict[str, int]
  argument_bytes: int
  output_bytes: int
  temp_bytes: int
  _executable: Any

  @property
  def kernels(self) -> int:
    """The number of custom calls, fusions and other operations.

    The program may launch more kernels: a custom call may launch several, and
    a loop may run several times.
    """
    kinds = (self.custom_calls, self.fusions, self.others)
    return sum(sum(counts.values()) for counts in kinds)

  def hlo(self, *, elide: bool = False) -> str:
    """Returns the optimized HLO, without backend_config if `elide`."""
    return jax_private.executable_hlo(
      self._executable, print_backend_config=not elide
    )

  def __str__(self) -> str:
    lines = [
      f"{self.name} on {self.target}",
      f"kernels: {self.kernels}",
    ]
    for title, counts in (
      ("custom calls", self.custom_calls),
      ("fusions", self.fusions),
      ("other operations", self.others),
      ("collectives", self.collectives),
    ):
      if counts:
        items = [f"{count} {name}" for name, count in sorted(counts.items())]
        lines.append(f"{title}: {', '.join(items)}")
    lines.append(
      f"bytes: {self.argument_bytes} arguments, {self.output_bytes} results,"
      f" {self.temp_bytes} temporary"
    )
    return "\n".join(lines)

  def to_json(self) -> str:
    """Returns the figures as JSON."""
    fields = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
      if not field.name.startswith("_")
    }
    fields |= {"target": str(self.target), "kernels": self.kernels}
    return json.dumps(fields, indent=2)


def of_executable(
  name: str, target: targets.Target, executable: Any
) -> Optimized:
  """Returns the counts and memory sizes of jaxlib's executable."""
  text = jax_private.executable_hlo(
    executable, print_backend_config=False, include_layout_in_shapes=False
  )
  counts: dict[str, collections.Counter[str]] = {
    kind: collections.Counter()
    for kind in ("custom_calls", "fusions", "collectives", "others")
  }
  for opcode, line in _executed(text):
    collective = hlo_text.COLLECTIVE.match(opcode)
    if opcode == "custom-call":
      match = _CALL_TARGET.search(line)
      counts["custom_calls"][match[1] if match else "?"] += 1
    elif opcode == "fusion":
      match = _KIND.search(line)
      counts["fusions"][match[1] if match else "?"] += 1
    elif collective is not None:
      counts["collectives"][collective[1]] += 1
    elif opcode not in hlo_text.FREE and not opcode.endswith("-done"):
      counts["others"][opcode] += 1
  memory = executable.get_compiled_memory_stats()
  return Optimized(
    name=name,
    target=target,
    **{kind: dict(count) for kind, count in counts.items()},
    argument_bytes=memory.argument_size_in_bytes,
    output_bytes=memory.output_size_in_bytes,
    temp_bytes=memory.temp_size_in_bytes,
    _executable=executable,
  )


def of_module(
  source: modules.ParsedModule, target: targets.Target
) -> Optimized:
  """Compiles a module for a target, without rewriting its custom calls.

  Raises:
    ValueError, deviceless.DevicelessError: See `deviceless.mesh`.
    modules.ModuleError: If the module was lowered for another platform.
    jax.errors.JaxRuntimeError: If XLA cannot compile the module.
  """
  attributes = source.module.operation.attributes
  partitions = 1
  if "mhlo.num_partitions" in attributes:
    partitions = attributes["mhlo.num_partitions"].value
  try:
    executable = deviceless.compile_module(
      source.module, target=target, num_partitions=partitions
    )
  except jax.errors.JaxRuntimeError as error:
    unknown = _UNKNOWN_CALL.search(str(error))
    if unknown is None:
      raise
    raise modules.wrong_platform(source.name, unknown[1], target) from error
  return of_executable(source.name, target, executable)


def _executed(text: str) -> Iterator[tuple[str, str]]:
  """Yields (opcode, line) of reachable instructions outside of fusions."""
  program = hlo_text.parse(text)
  entries = [*program.entries]
  seen: set[str] = set()
  while entries:
    name = entries.pop()
    if name in seen or name not in program.computations:
      continue
    seen.add(name)
    for instruction in program.computations[name]:
      yield instruction.opcode, instruction.line
      if instruction.opcode in hlo_text.RUNNING:
        entries += instruction.runs
