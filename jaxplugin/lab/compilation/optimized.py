# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What XLA's GPU compiler makes of a module or a function, in figures."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any
from typing import Final

from jaxplugin.core import targets
from jaxplugin.jaxext import jax_private
from jaxplugin.lab.compilation import deviceless
from jaxplugin.lab.compilation import hlo_text
from jaxplugin.stablehlo import modules

_CALL_TARGET: Final = re.compile(r'custom_call_target="(.*?)"')
_KIND: Final = re.compile(r"\bkind=(\w+)")
# What is no work on the GPU, or is that of the computation it runs.
_FREE: Final = frozenset(
  {
    "after-all",
    "async-start",
    "bitcast",
    "call",
    "conditional",
    "constant",
    "get-tuple-element",
    "parameter",
    "tuple",
    "while",
  }
)
_COLLECTIVE: Final = re.compile(
  r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
  r"|collective-broadcast|ragged-all-to-all)(-start)?$"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimized:
  """A program as XLA's GPU compiler leaves it; `str` is a report.

  Counts are of instructions, each once, however often a loop runs it.

  Attributes:
    name: of the program.
    target: for which GPU.
    custom_calls: how many of each target, such as `__cudnn$blockScaledDot`.
    fusions: how many of each kind, such as "kLoop".
    collectives: how many of each.
    others: how many of each other operation that is work on the GPU.
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
    """Custom calls, fusions and other operations: what is launched, at least.

    One custom call may launch several kernels.
    """
    kinds = (self.custom_calls, self.fusions, self.others)
    return sum(sum(counts.values()) for counts in kinds)

  def hlo(self, *, elide: bool = False) -> str:
    """The optimized HLO; `elide` leaves every backend_config out."""
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
    """The same figures as JSON."""
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
  """The figures of jaxlib's executable, or of a `Compiled`'s."""
  text = jax_private.executable_hlo(
    executable, print_backend_config=False, include_layout_in_shapes=False
  )
  counts: dict[str, collections.Counter[str]] = {
    kind: collections.Counter()
    for kind in ("custom_calls", "fusions", "collectives", "others")
  }
  for opcode, line in _executed(text):
    collective = _COLLECTIVE.match(opcode)
    if opcode == "custom-call":
      match = _CALL_TARGET.search(line)
      counts["custom_calls"][match[1] if match else "?"] += 1
    elif opcode == "fusion":
      match = _KIND.search(line)
      counts["fusions"][match[1] if match else "?"] += 1
    elif collective is not None:
      counts["collectives"][collective[1]] += 1
    elif opcode not in _FREE and not opcode.endswith("-done"):
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


def of_module(source: modules.Source, target: targets.Target) -> Optimized:
  """Compiles a module, which keeps its own calls, for one target.

  Raises:
    ValueError, deviceless.DevicelessError: as `deviceless.mesh`.
    jax.errors.JaxRuntimeError: XLA refuses the module.
  """
  attributes = source.module.operation.attributes
  partitions = 1
  if "mhlo.num_partitions" in attributes:
    partitions = attributes["mhlo.num_partitions"].value
  executable = deviceless.compile_module(
    source.module, target=target, num_partitions=partitions
  )
  return of_executable(source.name, target, executable)


def _executed(text: str) -> Iterator[tuple[str, str]]:
  """(opcode, line) of the instructions that run, but those inside fusions."""
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
