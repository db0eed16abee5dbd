# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that the kernels of a compiled program read and write.

  found = traffic.of_compiled(compiled)
  sum(kernel.num_bytes for kernel in found)

A kernel is a fusion, a custom call or another operation that XLA runs. Its
bytes are those of the optimized HLO, as if no cache existed:

* A kernel reads each of its arrays once, and writes each result once. Bitcasts
  and tuples are free.
* Of an array that a kernel only slices or gathers from, it reads the slices. Of
  an array that it updates in place, it writes the updates.
* A result that nothing uses is scratch memory of a custom call. It does not
  count.
* The body of a loop counts once for each trip. A loop without a known count
  counts once, and its kernels are marked. A conditional counts as the branch
  that moves the most bytes.
* A custom call that updates an operand in place counts as a copy.
* Collectives do not count. `planning.collectives` counts them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from jaxplugin.lab.compilation import hlo_text

Kind = Literal["matmul", "quantize", "weight", "producer", "other"]
Array = tuple[str, int]  # name of an instruction, and index of its result

_MATMULS: Final = ("convolution", "dot", "ragged-dot")
_MATMUL_TARGET: Final = re.compile(
  r'custom_call_target="(?:__cublas|__cudnn|__onednn|jaxplugin_\w*dot)'
)
# Names of calls in profiles (`logs.scope`): "mxfp8 x mxfp8 -> bfloat16 by cpu"
# and "bfloat16 to mxfp8 by cpu".
_MATMUL_SCOPE: Final = re.compile(r" x .+ by \w+(?:/|$)")
_QUANTIZE_SCOPE: Final = re.compile(r"\w+ to \w+ by \w+(?:/|$)")
# Not jax.random.normal, nor jnp.linalg.norm, whose scope is jit(norm).
_PRODUCER_SCOPE: Final = re.compile(
  r"(?i)(?<!jit\()norm(?!al)|silu|gelu|swiglu"
)
_WEIGHT: Final = re.compile(r"(?:weights|params)\b")
# Operations that use as much of their operand as others use of their result.
_MOVING: Final = ("bitcast", "convert", "copy", "reshape", "transpose")
_SLICING: Final = ("dynamic-slice", "gather", "slice")
# Number of the operand with updates of operand 0, which changes in place.
_UPDATING: Final = {"dynamic-update-slice": 1, "scatter": 2}
_IGNORED: Final = ("partition-id", "replica-id")
_INDEX: Final = re.compile(r"\bindex=(\d+)")
_NUMBER: Final = re.compile(r"\bparameter\((\d+)\)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
  """A kernel, and the bytes that it moves each time it runs.

  Attributes:
    name: name of the instruction.
    kind: "matmul" multiplies, or prepares an operand for a matmul's kernel.
      "quantize" quantizes or dequantizes, and may compute what it quantizes.
      "weight" quantizes an argument of the program that is named `weights` or
      `params`. "producer" is another kernel of a norm or activation.
    read, written: bytes in each run.
    quantizing: bytes of quantizing activations in each run. They are the
      kernel's quantized results and, if it only quantizes, the arrays that it
      reads. Such an array counts again if a kernel of another kind writes it.
      If a kernel computes a norm or activation in a second pass, after the
      global scale or the statistics of rows, its reads of the first pass's
      arrays and results count.
    times: how often the kernel runs.
    is_bound: whether `times` is a lower bound.
  """

  name: str
  kind: Kind
  read: float
  written: float
  quantizing: float = 0.0
  times: int = 1
  is_bound: bool = False

  @property
  def num_bytes(self) -> float:
    """Bytes read and written in all runs."""
    return (self.read + self.written) * self.times


def of_compiled(compiled: Any) -> tuple[Kernel, ...]:
  """Returns the kernels of `jax.stages.Compiled` or of jaxlib's executable."""
  return of_text(hlo_text.of_compiled(compiled))


def of_text(text: str) -> tuple[Kernel, ...]:
  """Returns the kernels of optimized HLO with metadata, in program order."""
  program = hlo_text.parse(text)
  computation = functools.cache(functools.partial(_Computation, program))

  def of_instruction(
    name: str, instruction: hlo_text.HloInstruction
  ) -> Iterable[Kernel]:
    opcode = instruction.opcode
    if (
      opcode in (*hlo_text.FREE, *_IGNORED)
      or opcode.endswith("-done")
      or hlo_text.COLLECTIVE.match(opcode)
    ):
      return ()
    return [computation(name).kernel(instruction)]

  return hlo_text.counted(program, of_instruction, num_bytes)


def num_bytes(kernels: Iterable[Kernel]) -> float:
  """Returns the bytes that kernels read and write in one run."""
  return sum(kernel.num_bytes for kernel in kernels)


def quantizing(kernels: Iterable[Kernel]) -> float:
  """Returns the bytes of quantizing activations in one run."""
  return sum(kernel.quantizing * kernel.times for kernel in kernels)


class _Computation:
  """One computation: its instructions by name, and which arrays they use."""

  def __init__(self, program: hlo_text.HloProgram, name: str):
    self.program = program
    self.instructions = {x.name: x for x in program.computations.get(name, ())}
    self.users: dict[str, list[hlo_text.HloInstruction]] = {}
    self._handed_over: set[Array] = set()
    for instruction in self.instructions.values():
      for operand in dict.fromkeys(instruction.operands):
        self.users.setdefault(operand, []).append(instruction)

  @functools.cached_property
  def root(self) -> hlo_text.HloInstruction:
    return next(x for x in self.instructions.values() if x.is_root)

  def called(self, fusion: hlo_text.HloInstruction) -> _Computation:
    return _Computation(self.program, fusion.runs[0])

  def parameters(self) -> dict[int, str]:
    """Names of the parameters, by number."""
    found = {
      name: _NUMBER.search(x.line)
      for name, x in self.instructions.items()
      if x.opcode == "parameter"
    }
    return {int(number[1]): name for name, number in found.items() if number}

  def array(self, name: str, index: int = 0) -> Array:
    """Returns the array that is a result, or part `index` of a tuple."""
    instruction = self.instructions[name]
    if instruction.opcode == "bitcast":
      return self.array(instruction.operands[0])
    if instruction.opcode == "get-tuple-element":
      found = _INDEX.search(instruction.line)
      assert found is not None
      return self.array(instruction.operands[0], int(found[1]))
    if instruction.opcode == "tuple":
      return self.array(instruction.operands[index])
    return name, index

  def fused(
    self, instruction: hlo_text.HloInstruction
  ) -> Iterator[hlo_text.HloInstruction]:
    """Yields an instruction and those that it fuses, if they are not free."""
    if instruction.opcode not in hlo_text.FREE:
      yield instruction
    if instruction.opcode == "fusion":
      inner = self.called(instruction)
      for each in inner.instructions.values():
        yield from inner.fused(each)

  @functools.cached_property
  def weights(self) -> frozenset[str]:
    """Names of results that depend on weights and constants only."""
    found: dict[str, bool] = {}  # False for constants
    for name, instruction in self.instructions.items():
      given = [found.get(x) for x in instruction.operands]
      if instruction.opcode == "parameter":
        if _WEIGHT.match(instruction.op_name):
          found[name] = True
      elif None not in given:
        found[name] = any(given)
    return frozenset(name for name, is_weight in found.items() if is_weight)

  def kind(self, instruction: hlo_text.HloInstruction) -> tuple[Kind, bool]:
    """Returns the kind of a kernel, and whether it computes a producer."""
    fused = [*self.fused(instruction)]
    names = [each.op_name for each in fused]
    has = lambda scope: any(map(scope.search, names))
    produces = has(_PRODUCER_SCOPE)
    if any(
      each.opcode in _MATMULS or _MATMUL_TARGET.search(each.line)
      for each in fused
    ):
      return "matmul", produces
    # XLA may fuse a reshape for quantizing into the kernel before it.
    moving = ("fusion", *_MOVING)
    computing = [each.op_name for each in fused if each.opcode not in moving]
    if any(map(_QUANTIZE_SCOPE.search, computing or names)):
      is_weight = instruction.name in self.weights
      return "weight" if is_weight else "quantize", produces
    if produces:
      return "producer", produces
    return "matmul" if has(_MATMUL_SCOPE) else "other", produces

  def reads(self, instruction: hlo_text.HloInstruction) -> dict[Array, float]:
    """Returns the bytes that a kernel reads of each array."""
    found: dict[Array, float] = {}
    is_fusion = instruction.opcode == "fusion"
    inner = self.called(instruction) if is_fusion else self
    names = inner.parameters() if is_fusion else {}
    for i, name in enumerate(instruction.operands):
      if self.instructions[name].opcode == "after-all":
        continue
      if is_fusion:
        share = inner.used(names[i])
      else:
        share = self._share(name, [instruction], is_fused=False)
      size = hlo_text.num_bytes(self.instructions[name].shape) * share
      array = self.array(name)
      found[array] = max(found.get(array, 0.0), size)
    return found

  def used(self, name: str) -> float:
    """Returns the share of an array that this fused computation reads."""
    if self.instructions[name].is_root:
      return 1.0
    return self._share(name, self.users.get(name, ()), is_fused=True)

  def _share(
    self,
    name: str,
    users: Iterable[hlo_text.HloInstruction],
    *,
    is_fused: bool,
  ) -> float:
    """Returns the share of an array that instructions read."""
    sizes = hlo_text.arrays(self.instructions[name].shape)
    count = max(sum(size for _, size in sizes), 1)
    share = 0.0
    for user in users:
      is_first = user.operands.count(name) == 1 and user.operands[0] == name
      if is_first and user.opcode in _SLICING:
        ((_, size),) = hlo_text.arrays(user.shape)
        share += size / count
      elif is_first and user.opcode in _UPDATING:
        continue
      elif is_fused and user.opcode in _MOVING:
        share += self.used(user.name)
      else:
        return 1.0
    return min(share, 1.0)

  def writes(self, instruction: hlo_text.HloInstruction) -> list[float]:
    """Returns the bytes of each result that a kernel writes."""
    shape = instruction.shape
    if instruction.opcode == "fusion":
      inner = self.called(instruction)
      root = inner.root
      names = root.operands if root.opcode == "tuple" else (root.name,)
      return [inner.written(name) for name in names]
    if instruction.opcode in _UPDATING:
      return [self.written(instruction.name)]
    if not shape.startswith("("):
      return [hlo_text.num_bytes(shape)]
    used = {
      self.array(x.name)[1]
      for x in self.users.get(instruction.name, ())
      if x.opcode == "get-tuple-element"
    }
    sizes = map(hlo_text.num_bytes, hlo_text.parts(shape))
    return [
      size if i in used or instruction.is_root else 0.0
      for i, size in enumerate(sizes)
    ]

  def written(self, name: str) -> float:
    """Returns the bytes that are written of a result."""
    instruction = self.instructions[name]
    if instruction.opcode == "bitcast":
      return self.written(instruction.operands[0])
    if instruction.opcode in _UPDATING:
      update = instruction.operands[_UPDATING[instruction.opcode]]
      return hlo_text.num_bytes(self.instructions[update].shape)
    return hlo_text.num_bytes(instruction.shape)

  def kernel(self, instruction: hlo_text.HloInstruction) -> Kernel:
    reads, writes = self.reads(instruction), self.writes(instruction)
    kind, produces = self.kind(instruction)
    quantizing = 0.0
    if kind == "quantize":
      sums = self._sums(instruction)
      quantizing = sum(
        size
        for size, is_sum in zip(writes, sums, strict=True)
        if not (produces and is_sum)
      )
      if not produces:
        quantizing += sum(reads.values())
        quantizing += sum(map(self._once_written, reads))
      else:
        before = self._of_first_pass(reads)
        quantizing += sum(reads[array] for array in before & reads.keys())
    return Kernel(
      name=instruction.name,
      kind=kind,
      read=sum(reads.values()),
      written=sum(writes),
      quantizing=quantizing,
    )

  def _sums(self, instruction: hlo_text.HloInstruction) -> list[bool]:
    """Returns for each result whether it may be a producer's sum."""
    given = [
      hlo_text.arrays(self.instructions[x].shape) for x in instruction.operands
    ]
    shapes = hlo_text.arrays(instruction.shape)
    return [[shape] in given for shape in shapes]

  def _of_first_pass(self, reads: Iterable[Array]) -> set[Array]:
    """Returns the arrays of quantize kernels that a second pass completes.

    A second pass reads more than the sum that the first one writes.
    """
    found: set[Array] = set()
    for name, index in reads:
      writer = self.instructions[name]
      if writer.opcode in (*hlo_text.FREE, *hlo_text.RUNNING):
        continue
      if self.kind(writer)[0] == "quantize" and not self._sums(writer)[index]:
        found.update(self.reads(writer))
        found.update(array for array in reads if array[0] == name)
    return found

  def _once_written(self, array: Array) -> float:
    """Returns the bytes that another kind of kernel writes; 0 the next time."""
    if array in self._handed_over:
      return 0.0
    self._handed_over.add(array)
    name, index = array
    instruction = self.instructions[name]
    if instruction.opcode in ("constant", "parameter", *hlo_text.RUNNING):
      return 0.0
    if self.kind(instruction)[0] == "quantize":
      return 0.0  # counted as its result
    return self.writes(instruction)[index]


def table(kernels: Sequence[Kernel]) -> Mapping[Kind, tuple[int, float]]:
  """Returns (number of runs, bytes) of each kind of kernel."""
  found: dict[Kind, tuple[int, float]] = {}
  for kernel in kernels:
    count, size = found.get(kernel.kind, (0, 0.0))
    found[kernel.kind] = count + kernel.times, size + kernel.num_bytes
  return found
