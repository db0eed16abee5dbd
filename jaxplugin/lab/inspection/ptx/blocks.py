# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The state of one block: registers, active threads and work in flight.

A register is an array with one element per thread: uint8 to uint64, or bool for
a predicate. Arrays are never changed in place. The block tracks undefined bits:
bits that no instruction has written. `read` records the threads in which an
instruction reads undefined bits. `write` marks the results of these threads as
undefined.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from jaxplugin.lab.inspection.ptx import (
  faults,
  global_memory,
  parsing,
  shared_memory,
  tensor_memory,
)

MBARRIER_BYTES: Final = shared_memory.MBARRIER_BYTES
WARP: Final = shared_memory.WARP
DTYPES: Final = {
  1: np.dtype(bool),
  8: np.dtype(np.uint8),
  16: np.dtype(np.uint16),
  32: np.dtype(np.uint32),
  64: np.dtype(np.uint64),
}
_POISON: Final = 0xDEADBEEFDEADBEEF


def all_bits(bits: int) -> int:
  """Returns a number whose low `bits` bits are ones."""
  return (1 << bits) - 1


class Block:
  """One block of a launch.

  Attributes:
    kernel: the kernel.
    number: %ctaid.x.
    blocks: %nctaid.x.
    threads: number of threads.
    active: bool[threads], the threads that execute the current instruction.
    all_active: whether all threads are active.
    counts: counts of instructions and of their effects.
    copies: cp.async groups; the last one is open.
    products: wgmma groups; the last one is open.
    tensor: the tensor memory.
    mbarriers: `synchronization.Mbarrier` objects by address.
  """

  def __init__(
    self,
    kernel: parsing.PtxKernel,
    *,
    number: int,
    blocks: int,
    parameters: dict[str, int],
    global_memory: global_memory.GlobalMemory,
    shared_bytes: int,
    counts: collections.Counter[str],
  ):
    self.kernel, self.number, self.blocks = kernel, number, blocks
    self.parameters = parameters
    self.threads = kernel.threads
    self.counts = counts
    self.global_memory = global_memory
    self.shared = shared_memory.SharedMemory(
      shared_bytes, kernel.threads, counts
    )
    self.tensor = tensor_memory.TensorMemoryState(self.shared)
    self.mbarriers: dict[int, Any] = {}
    self.thread = np.arange(kernel.threads)
    self.active = np.ones(kernel.threads, bool)
    self.all_active = True
    self.live = np.ones(kernel.threads, bool)
    self.copies: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = [[]]
    self.products: list[list[tuple[dict[str, str], list[np.ndarray]]]] = [[]]
    # Maps registers that a wgmma in flight uses to "read" or "written".
    self.busy: dict[str, str] = {}
    # Registers written since the last wgmma.fence, in kernels with wgmma.
    self.since_fence: set[str] = set()
    self.tracks_fences = any(
      instruction.parts[0] == "wgmma" for instruction in kernel.instructions
    )
    self._values: dict[str, np.ndarray] = {}
    self._undefined: dict[str, np.ndarray] = {}
    self._constants: dict[tuple[int, int], np.ndarray] = {}
    self._doubtful: np.ndarray | None = None

  def begin(self, active: np.ndarray, all_active: bool) -> None:
    """Begins an instruction that the threads `active` execute."""
    self.active, self.all_active = active, all_active
    self._doubtful = None

  def lanes(self) -> np.ndarray:
    """Returns the numbers of the active threads."""
    return self.thread[self.active]

  def warps(self, instruction: parsing.Instruction) -> np.ndarray:
    """Returns the active warps; all lanes of each must be active."""
    active = self.active.reshape(-1, WARP)
    whole = active.all(axis=1)
    if (active.any(axis=1) != whole).any():
      raise faults.Divergence(
        f"{instruction.name}: not all lanes of a warp take it"
      )
    return np.flatnonzero(whole)

  def read(self, operand: parsing.Operand, bits: int) -> np.ndarray:
    """Returns an operand's value in each thread, as an unsigned integer."""
    if isinstance(operand, parsing.Register):
      value, undefined = self._state(operand)
      if undefined is not None:
        doubtful = undefined != 0
        if self._doubtful is not None:
          doubtful = doubtful | self._doubtful
        self._doubtful = doubtful
      if operand.name in self.busy and self.busy[operand.name] != "read":
        raise faults.InFlight(
          f"{operand.name} is the result of a wgmma not waited for"
        )
      # The register may be wider or narrower than the operand's type.
      return value if operand.bits == bits else value.astype(DTYPES[bits])
    if isinstance(operand, parsing.Immediate):
      return self._constant(operand.value, bits)
    if isinstance(operand, parsing.Symbol):
      return self._symbol(operand.name).astype(DTYPES[bits])
    raise faults.NotModelled(f"operand {operand}")

  def read_defined(self, operand: parsing.Operand, bits: int) -> np.ndarray:
    """Reads an operand, such as an address, that must not be undefined.

    Raises:
      faults.Undefined: If an active thread reads undefined bits.
    """
    value, undefined = self.read_bits(operand, bits)
    if (undefined[self.active] != 0).any():
      raise faults.Undefined(f"{_name(operand)} is used, but not written")
    return value

  def read_bits(
    self, operand: parsing.Operand, bits: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns an operand's value and undefined bits.

    Undefined bits do not make the results of the instruction undefined.
    """
    before = self._doubtful
    value = self.read(operand, bits)
    self._doubtful = before
    return value, self.undefined_bits(operand, bits)

  def undefined_bits(self, operand: parsing.Operand, bits: int) -> np.ndarray:
    """Returns the undefined bits of an operand in each thread."""
    if isinstance(operand, parsing.Register):
      _, found = self._state(operand)
      if found is not None:
        return found.astype(DTYPES[bits])
    return np.zeros(self.threads, DTYPES[bits])

  def _state(
    self, register: parsing.Register
  ) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns a register's value and undefined bits; None if there are none."""
    name, bits = register.name, register.bits
    if name not in self._values:
      ones = self._constant(all_bits(bits), bits)
      return self._constant(_POISON, bits), ones
    return self._values[name], self._undefined.get(name)

  @property
  def is_doubtful(self) -> bool:
    """Whether the instruction has read undefined bits."""
    return self._doubtful is not None

  def write(
    self,
    operand: parsing.Operand,
    value: np.ndarray,
    undefined: np.ndarray | None = None,
  ) -> None:
    """Sets a register of the active threads.

    Args:
      operand: a register, or `_`.
      value: unsigned integers, whose low bits are stored, or bool.
      undefined: the undefined bits of the value. By default all bits are
        undefined in threads that have read undefined bits.
    """
    if operand == parsing.DISCARD:
      return
    if not isinstance(operand, parsing.Register):
      raise faults.NotModelled(f"a result in {operand}")
    name, dtype = operand.name, DTYPES[operand.bits]
    if name in self.busy:
      raise faults.InFlight(
        f"{name} is written while a wgmma in flight uses it"
      )
    if self.tracks_fences:
      self.since_fence.add(name)
    value = np.ascontiguousarray(value, dtype)  # readers may view it as pairs
    doubt = None
    if self._doubtful is not None:
      if undefined is None:
        doubt = np.where(
          self._doubtful, dtype.type(all_bits(operand.bits)), dtype.type(0)
        )
      else:
        doubt = undefined.astype(dtype)
    if not self.all_active:
      old, old_doubt = self._state(operand)
      value = np.where(self.active, value, old)
      if doubt is not None or old_doubt is not None:
        none = np.zeros(self.threads, dtype)
        doubt = np.where(
          self.active,
          none if doubt is None else doubt,
          none if old_doubt is None else old_doubt,
        )
    self._values[name] = value
    if doubt is not None and doubt.any():
      self._undefined[name] = doubt
    elif self._undefined:
      self._undefined.pop(name, None)

  def rearrange(
    self,
    out: parsing.Operand,
    function: Callable[..., np.ndarray],
    operands: Sequence[parsing.Operand],
    bits: int,
    selectors: Sequence[parsing.Operand] = (),
  ) -> None:
    """Writes the result of a function that only moves bits, or clears them.

    The function is passed the operands and the selectors, which have 32 bits.
    It also maps the undefined bits of the operands to those of the result. An
    undefined selector makes the result undefined.
    """
    chosen = [self.read(x, 32) for x in selectors]
    value = function(*(self.read(x, bits) for x in operands), *chosen)
    undefined = None
    if self.is_doubtful:
      unknown = (self.undefined_bits(x, bits) for x in operands)
      undefined = function(*unknown, *chosen)
      for selector in selectors:
        defined = self.undefined_bits(selector, 32) == 0
        undefined = np.where(defined, undefined, ~undefined.dtype.type(0))
    self.write(out, value, undefined)

  def addresses(self, operand: parsing.Operand) -> np.ndarray:
    """Returns the addresses of an operand, int64[threads].

    Sums of 32-bit addresses wrap around.

    Raises:
      faults.Undefined: If the address of an active thread is undefined.
    """
    if not isinstance(operand, parsing.Address):
      raise faults.NotModelled(f"address {operand}")
    bits = (
      operand.base.bits if isinstance(operand.base, parsing.Register) else 64
    )
    base = self.read_defined(operand.base, bits)
    found: np.ndarray = base.astype(np.int64) + operand.offset
    return found & 0xFFFFFFFF if bits == 32 else found

  def _constant(self, value: int, bits: int) -> np.ndarray:
    key = (value, bits)
    if key not in self._constants:
      self._constants[key] = np.full(
        self.threads, value & all_bits(bits), DTYPES[bits]
      )
    return self._constants[key]

  def _symbol(self, name: str) -> np.ndarray:
    """Returns a special register, or the address of shared memory.

    Only dimension x of blocks has an extent.
    """
    found = {
      "%tid.x": self.thread,
      "%laneid": self.thread % WARP,
      "%ctaid.x": self._constant(self.number, 32),
      "%nctaid.x": self._constant(self.blocks, 32),
      "%ntid.x": self._constant(self.threads, 32),
    }.get(name)
    if found is not None:
      return found
    if name in ("%tid.y", "%tid.z", "%ctaid.y", "%ctaid.z", self.kernel.shared):
      return self._constant(0, 32)
    raise faults.NotModelled(f"operand {name}")


def _name(operand: parsing.Operand) -> str:
  return operand.name if isinstance(operand, parsing.Register) else str(operand)


# Executes an instruction.
Handler = Callable[[Block, parsing.Instruction], None]
