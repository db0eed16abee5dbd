# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models the cycles of a kernel's main loop. Nothing is measured.

`simulate` replays a loop's SASS with ptxas's schedule (`machine_code`) on a
quarter of an SM, whose scheduler issues one instruction per cycle. The model
has stall counts, scoreboards, barriers, groups of copies and wgmmas, occupied
pipes, and fixed latencies. It ignores cache misses, bandwidth outside of the
SM, bank conflicts, the instruction cache and clocks. Use the model to compare
versions of a kernel: absolute times may be off by a third.

The numbers come from the CUDA programming guide ("Throughput of
native arithmetic instructions"), from data sheets (products), and from Luo et
al., "Benchmarking and dissecting the NVIDIA Hopper GPU architecture", 2024
(latencies).
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Final

from jaxplugin.lab.inspection import machine_code

QUARTERS: Final = 4  # each has a scheduler, pipes and a tensor core
# The simulation ends when a warp has run this many iterations.
_TURNS: Final = 16
_WARM_UP_TURNS: Final = 4  # first iterations that `Simulation.cycles` omits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Core:
  """A quarter of an SM."""

  products: Mapping[str, int]  # multiplications per cycle, by opcode
  # Number of pipes for floats; the first also multiplies integers.
  fma_pipes: int = 2


_CONSUMER_BLACKWELL: Final = Core(
  products={"HMMA": 64, "QMMA": 128, "OMMA": 512}
)
# Architectures with tensor memory are missing: a tcgen05.mma has its size in a
# register, not in the opcode.
CORES: Final[Mapping[str, Core]] = {
  "sm_80": Core(products={"HMMA": 256, "IMMA": 512}, fma_pipes=1),
  "sm_89": Core(products={"HMMA": 128, "QMMA": 256, "IMMA": 256}),
  "sm_90": Core(
    products={"HMMA": 256, "HGMMA": 512, "QGMMA": 1024, "IGMMA": 1024}
  ),
  "sm_120": _CONSUMER_BLACKWELL,
  "sm_121": _CONSUMER_BLACKWELL,
}

_WGMMA: Final = re.compile(r"[HIQ]GMMA\.64x(\d+)x(\d+)\.")
_MMA: Final = re.compile(r"[HIQO]MMA(?:\.SF)?\.16(8)(8|16|32|64)\b")
_COUNT: Final = re.compile(r"(?:gsb0|SB0), 0x([0-9a-f]+)")

_PIPES: Final = {
  opcode: pipe
  for pipe, opcodes in {
    "integer": "LOP3 PRMT SHF IADD IADD3 VIADD SEL ISETP FSETP FSEL FMNMX"
    " FMNMX3 IMNMX VIMNMX VIMNMX3 VIADDMNMX F2FP F2IP LEA PLOP3 HSETP2 HSET2"
    " HMNMX2 SGXT BMSK IABS POPC P2R R2P MOV CS2R I2FP VOTE FSET",
    "fma": "FMUL FADD FFMA FMUL2 FADD2 FFMA2 HFMA2 HMUL2 HADD2",
    "multiply": "IMAD",
    "special": "MUFU F2F I2F F2I FRND",
    "memory": "LDG STG LDGSTS LDS STS LDSM STSM SHFL",
    "uniform": "UMOV UIADD3 USHF ULEA ULOP3 UISETP UIMAD USGXT USEL UPLOP3"
    " VOTEU UPRMT UBMSK UFLO UP2UR UR2UP UVIADD UVIMNMX UIMNMX UIADD UPOPC"
    " UIABS UCSEL",
    "matrix": "HMMA IMMA QMMA OMMA HGMMA IGMMA QGMMA",
    "": "BAR BRA NOP DEPBAR LDGDEPBAR WARPGROUP WARPSYNC BSYNC BSSY FENCE"
    " MEMBAR ERRBAR LDC LDCU ULDC R2UR S2R S2UR ELECT REDUX CALL EXIT",
  }.items()
  for opcode in opcodes.split()
}
# Cycles that a warp's instruction occupies a pipe. The special pipe executes
# conversions and MUFU.
_PIPE_CYCLES: Final = {
  "": 0,
  "integer": 2,
  "multiply": 2,
  "fma": 2,
  "special": 8,
  "uniform": 2,
}
# Cycles of a wgmma with few columns (an assumption; rankings do not change
# between 16 and 32), and cycles that it may issue before its pipe is free.
_LEAST_WGMMA_CYCLES: Final = 19
_WGMMA_QUEUE_CYCLES: Final = 48
# Latency of a load or copy from global memory. L2 takes 260 to 300 cycles, and
# memory 500 to 800.
LOAD_CYCLES: Final = 600
_SHARED_CYCLES: Final = 30  # latency of a load from shared memory
BARRIER_CYCLES: Final = 20  # from the last warp's arrival until warps continue
_VARIABLE_CYCLES: Final = 20  # latency without an access to memory
_SHUFFLE_CYCLES: Final = 24
_OPERANDS_READ_CYCLES: Final = 12
_STORE_CYCLES: Final = 10
_FENCE_CYCLES: Final = 20
_WGMMA_TAIL_CYCLES: Final = 32  # until the last results are in registers
_MEMORY_QUEUE_CYCLES: Final = 24
# An SM's L1 and shared memory move 128 bytes per cycle, 32 for each quarter. So
# one 4-byte word for each lane of a warp takes 4 cycles.
_CYCLES_A_WORD: Final = 4
_STAGGER_CYCLES: Final = 250  # between the starts of two blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
  """The model's result for one iteration of a loop."""

  blocks: int  # number of resident blocks
  cycles: float  # of one block, while all resident blocks run
  products: int  # multiplications of a block
  instructions_per_cycle: float  # that a scheduler issues
  matrix_share: float  # fraction of the cycles that matrix units are busy

  def cycles_of(self, products: int) -> float:
    """Returns an SM's cycles for `products`, while all resident blocks run."""
    return self.cycles / self.blocks * products / self.products


@dataclasses.dataclass
class _AsyncGroups:
  """Groups of a warp's asynchronous work, with their completion times."""

  done: list[float] = dataclasses.field(default_factory=list)
  open: float = 0

  def close(self) -> None:
    self.done.append(self.open)
    self.open = 0

  def all_but(self, count: int) -> float:
    """Returns when all closed groups except the last `count` are done."""
    return max(self.done[: len(self.done) - count], default=0)


@dataclasses.dataclass
class _Warp:
  block: int
  ready: float
  place: int = 0
  issued: float = -1
  is_at_barrier: bool = False
  scoreboards: list[float] = dataclasses.field(
    default_factory=lambda: [0.0] * machine_code.SCOREBOARDS
  )
  copies: _AsyncGroups = dataclasses.field(default_factory=_AsyncGroups)
  products: _AsyncGroups = dataclasses.field(default_factory=_AsyncGroups)
  turns: list[float] = dataclasses.field(default_factory=list)


def simulate(
  loop: Sequence[machine_code.MachineInstruction],
  core: Core,
  *,
  num_warps: int,
  blocks: int,
) -> Simulation:
  """Simulates a loop as straight-line code, without its inner branches.

  Args:
    loop: the body of a main loop with its schedule.
    core: an entry of `CORES`.
    num_warps: number of warps of a block, a multiple of four.
    blocks: number of blocks that run on an SM at once.

  Raises:
    ValueError: If the model does not support an instruction of the loop,
      `num_warps` is not a positive multiple of four, or `blocks` is below 1.
  """
  if num_warps % QUARTERS or min(num_warps, blocks) < 1:
    raise ValueError(
      "simulate: num_warps must be a positive multiple of 4 and blocks"
      f" positive, got {num_warps} and {blocks}"
    )
  unknown = sorted({x.opcode for x in loop if x.base not in _PIPES})
  if unknown:
    raise ValueError(
      f"simulate: the model does not support {', '.join(unknown)}"
    )
  warps = [
    _Warp(block=block, ready=block * _STAGGER_CYCLES + 3 * warp)
    for block in range(blocks)
    for warp in range(num_warps // QUARTERS)
  ]
  quarter = _Quarter(loop, core, warps)
  while all(len(warp.turns) < _TURNS for warp in warps):
    quarter.issue()
  counted = [warp.turns[_WARM_UP_TURNS - 1 :] for warp in warps]
  spans = [x[-1] - x[0] for x in counted if len(x) > 1]
  whole = sum(len(x) - 1 for x in counted)
  return Simulation(
    blocks=blocks,
    cycles=sum(spans) / whole,
    products=num_warps * sum(products_of(x) for x in loop),
    instructions_per_cycle=quarter.issued / quarter.now,
    matrix_share=quarter.matrix_cycles / quarter.now,
  )


def products_of(item: machine_code.MachineInstruction) -> int:
  """Returns the multiplications that an instruction does for one warp."""
  if wgmma := _WGMMA.match(item.opcode):
    return 64 * int(wgmma[1]) * int(wgmma[2]) // QUARTERS
  if mma := _MMA.match(item.opcode):
    return 16 * int(mma[1]) * int(mma[2])
  if item.is_matrix:
    raise ValueError(f"simulate: how large is the product of {item.opcode}?")
  return 0


class _Quarter:
  """The simulated state of a quarter of an SM."""

  def __init__(
    self,
    loop: Sequence[machine_code.MachineInstruction],
    core: Core,
    warps: Sequence[_Warp],
  ) -> None:
    self.loop = loop
    self.core = core
    self.warps = warps
    self.now = -1.0
    self.issued = 0
    self.matrix_cycles = 0.0
    self.free: dict[str, float] = collections.defaultdict(float)

  def issue(self) -> None:
    """Issues the instruction that is ready first.

    If several are ready, the warp that issued least recently goes first.
    """
    # All warps never wait at a barrier: the last to arrive ends the wait.
    self.now, _, number = min(
      (max(self._earliest(warp), self.now + 1), warp.issued, number)
      for number, warp in enumerate(self.warps)
      if not warp.is_at_barrier
    )
    warp = self.warps[number]
    self._issue(warp, self.loop[warp.place])

  def _earliest(self, warp: _Warp) -> float:
    """Returns when a warp's next instruction may issue."""
    item = self.loop[warp.place]
    limits = [warp.ready, *(warp.scoreboards[number] for number in item.waits)]
    if item.base == "DEPBAR":
      limits.append(warp.copies.all_but(_count(item)))
    if item.opcode.startswith("WARPGROUP.DEPBAR"):
      limits.append(warp.products.all_but(_count(item)))
    pipe = self._pipe(item)
    ahead = {
      "memory": _MEMORY_QUEUE_CYCLES,
      "matrix": _WGMMA_QUEUE_CYCLES if _is_wgmma(item) else 0,
    }
    limits.append(self.free[pipe] - ahead.get(pipe, 0))
    return max(limits)

  def _pipe(self, item: machine_code.MachineInstruction) -> str:
    pipe = _PIPES[item.base]
    if pipe == "multiply":
      return "fma 0"
    if pipe == "fma":
      pipes = [f"fma {number}" for number in range(self.core.fma_pipes)]
      return min(pipes, key=lambda name: self.free[name])
    return pipe

  def _occupied(self, item: machine_code.MachineInstruction) -> float:
    """Returns the cycles that an instruction occupies its pipe."""
    pipe = _PIPES[item.base]
    if pipe == "matrix":
      cycles = products_of(item) / self.core.products[item.base]
      least = _LEAST_WGMMA_CYCLES if _is_wgmma(item) else 0
      return max(cycles, least)
    if pipe == "memory":
      return _CYCLES_A_WORD * _words(item)
    return _PIPE_CYCLES[pipe]

  def _issue(self, warp: _Warp, item: machine_code.MachineInstruction) -> None:
    pipe = self._pipe(item)
    occupied = self._occupied(item)
    if occupied:
      self.free[pipe] = max(self.free[pipe], self.now) + occupied
    if pipe == "matrix":
      self.matrix_cycles += occupied
    done = self._done(item, pipe)
    if item.base == "LDGSTS":
      warp.copies.open = max(warp.copies.open, done)
    elif item.base == "LDGDEPBAR":
      warp.copies.close()
    elif _is_wgmma(item):
      end = self.free[pipe] + _WGMMA_TAIL_CYCLES
      warp.products.open = max(warp.products.open, end)
      if "gsb0" in item.operands:
        warp.products.close()
    if item.result_scoreboard is not None:
      held = warp.scoreboards[item.result_scoreboard]
      warp.scoreboards[item.result_scoreboard] = max(held, done)
    if item.operand_scoreboard is not None:
      held = warp.scoreboards[item.operand_scoreboard]
      read = self.now + _OPERANDS_READ_CYCLES
      warp.scoreboards[item.operand_scoreboard] = max(held, read)
    is_fence = item.base in ("FENCE", "MEMBAR")
    stall = _FENCE_CYCLES if is_fence else max(item.stall, 1)
    warp.ready = self.now + stall
    if item.base == "BAR" and ".SYNC" in item.opcode:
      self._arrive(warp)
    self.issued += 1
    warp.issued = self.now
    warp.place += 1
    if warp.place == len(self.loop):
      warp.place = 0
      warp.turns.append(self.now)

  def _done(self, item: machine_code.MachineInstruction, pipe: str) -> float:
    """Returns when an instruction's result is ready."""
    if item.base in ("LDG", "LDGSTS"):
      return self.now + LOAD_CYCLES
    if item.base in ("LDS", "LDSM"):
      return self.free[pipe] + _SHARED_CYCLES
    if pipe == "memory":
      is_shuffle = item.base == "SHFL"
      return self.free[pipe] + (
        _SHUFFLE_CYCLES if is_shuffle else _STORE_CYCLES
      )
    if pipe == "matrix":
      return self.free[pipe]
    return self.now + _VARIABLE_CYCLES

  def _arrive(self, warp: _Warp) -> None:
    warp.is_at_barrier = True
    others = [x for x in self.warps if x.block == warp.block]
    if all(x.is_at_barrier for x in others):
      for x in others:
        x.is_at_barrier = False
        x.ready = max(x.ready, self.now + BARRIER_CYCLES)


def _is_wgmma(item: machine_code.MachineInstruction) -> bool:
  return item.base in ("HGMMA", "IGMMA", "QGMMA")


def _count(item: machine_code.MachineInstruction) -> int:
  found = _COUNT.search(item.operands)
  if found is None:
    raise ValueError(
      f"simulate: the model does not support {item.opcode} {item.operands}"
    )
  return int(found[1], 16)


def _words(item: machine_code.MachineInstruction) -> int:
  """Returns the number of 32-bit words that each thread accesses."""
  if ".128" in item.opcode or item.opcode.endswith(".4"):
    return 4
  if ".64" in item.opcode or item.opcode.endswith(".2"):
    return 2
  return 1
