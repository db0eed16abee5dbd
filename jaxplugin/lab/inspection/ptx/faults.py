# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Exceptions for executed PTX. Messages end with the line and its text."""

from __future__ import annotations


class Fault(Exception):
  """A kernel has undefined behavior."""


class OutOfBounds(Fault):
  """An access outside of shared memory, or outside of an array's rows."""


class Misaligned(Fault):
  """An address that is not a multiple of the access's size."""


class DataRace(Fault):
  """Two accesses to a byte or cell, one of them a write, without a barrier."""


class InFlight(Fault):
  """A use of data that an instruction in flight reads or writes."""


class MissingFence(Fault):
  """A read by wgmma or tcgen05.mma of data written without a fence."""


class Barrier(Fault):
  """A wrong use of an mbarrier, or an access to its bytes."""


class TensorMemory(Fault):
  """A wrong allocation of tensor memory, or an access that it forbids."""


class Undefined(Fault):
  """A use of undefined bits in a store, an address, a condition or a matmul."""


class Divergence(Fault):
  """Threads that do not execute a collective instruction together."""


class Endless(Fault):
  """A block that runs too long, or waits for something that never happens."""


class NotModelled(NotImplementedError):
  """PTX that the emulator does not model."""
