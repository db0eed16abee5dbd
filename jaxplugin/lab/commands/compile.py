# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`compile`: compiles a module or a function by XLA's GPU compiler."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from typing import Any, Final

import jax

from jaxplugin.cli import arguments, files, functions
from jaxplugin.core import targets
from jaxplugin.jaxext import jax_private
from jaxplugin.lab.compilation import deviceless, hlo_text
from jaxplugin.printing import console, progress
from jaxplugin.stablehlo import modules, rewriter

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
    modules.ModuleError: If the module was lowered for another device.
    jax.errors.JaxRuntimeError: If XLA cannot compile the module.
  """
  rewriter.check_kernels(source, target)
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
    raise modules.wrong_target(source.name, unknown[1], target) from error
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


def _add_arguments(command: argparse.ArgumentParser) -> None:
  command.add_argument(
    "source",
    metavar="MODULE_OR_FUNCTION",
    help="package.module:function, or " + arguments.FILE_HELP,
  )
  arguments.add_gpu(command, "an NVIDIA GPU", "cuda")
  text = "the cuDNN version to assume, e.g. 9.13; default: no cuDNN"
  arguments.add_values(command, {"--cudnn VERSION": text})
  functions.add_arguments(command)
  arguments.add_switches(
    command,
    {
      "--rewrite": "lower the calls of a module for the target first, as"
      " rewrite does"
    },
  )
  arguments.add_strict(command)
  arguments.add_output(
    command,
    "output file for the optimized HLO; for - it goes to standard output, and"
    " the figures to standard error; default: none",
  )
  arguments.add_switches(
    command,
    {
      "--elide": "write no backend_config",
      "--force": "overwrite OUT if it exists",
      "--json": "print the figures as JSON",
    },
  )


def _run(args: argparse.Namespace) -> int:
  target = targets.named_target(args.target, cudnn=args.cudnn)
  is_function = functions.is_function(args.source)
  if is_function and args.rewrite:
    raise ValueError("--rewrite needs a module, got a function")
  if args.strict and not args.rewrite:
    raise ValueError(
      "--strict needs --rewrite, which lowers the calls of a module"
    )
  for name in ("elide", "force"):
    if getattr(args, name) and args.output is None:
      raise ValueError(f"--{name} needs -o, which writes the optimized HLO")
  if not is_function and args.arg:
    raise ValueError("--arg needs a function, got a module")
  if is_function or args.rewrite:
    arguments.print_missing_cudnn(target)
  path = "" if is_function else args.source
  files.check_output(path, args.output, args.force)
  with progress.shown(f"compiling for {target.name}"):
    if is_function:
      function = functions.function(args.source)
      compiled = deviceless.compile(function, *args.arg, target=target)
      found = of_executable(args.source, target, compiled.runtime_executable())
    else:
      source = files.read(args.source)
      if args.rewrite:
        for item in rewriter.rewrite_source(source, target, strict=args.strict):
          if item.error:
            console.show([str(item)], sys.stderr)
      found = of_module(source, target)
  if args.output is not None:
    hlo = found.hlo(elide=args.elide)
    files.write(hlo, path, args.output, args.force)
  is_stdout = args.output == files.STANDARD
  stream = sys.stderr if is_stdout else sys.stdout
  return arguments.print_result(
    found, [str(found)], as_json=args.json, stream=stream
  )


COMMAND: Final = arguments.Command(
  help="compile a module or a function by XLA's GPU compiler",
  description="Compiles a module or a function by XLA's GPU compiler, for an"
  " NVIDIA GPU that need not be attached, and prints its custom calls, fusions,"
  " kernels and memory.",
  epilog="This needs jaxplugin[deviceless], but neither a GPU nor cuDNN. A"
  " function is imported, from the current directory first. It is called with"
  " abstract arrays, and its block-scaled dots are decided for the target. XLA"
  " lowers the calls of a module, except with --rewrite.",
  examples=(
    "model.mlir --target b200 --cudnn 9.13",
    "my.model:mlp --target b200 --cudnn 9.13 \\\n"
    "    --arg 'bfloat16[16,4096]' --arg 'nvfp4[14336,4096]' -o mlp.hlo",
  ),
  add_arguments=_add_arguments,
  run=_run,
)
