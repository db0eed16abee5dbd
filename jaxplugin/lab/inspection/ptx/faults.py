# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults of executed PTX. Messages end with the line and its text."""

from __future__ import annotations


class Fault(Exception):
  """A kernel has undefined behavior."""


class OutOfBounds(Fault):
  """An access of bytes outside of all arrays, or outside of shared memory."""


class Misaligned(Fault):
  """An address that is not a multiple of the access's size."""


class Race(Fault):
  """Two accesses of one byte, one of them a write, without a barrier."""


class InFlight(Fault):
  """Use of bytes or registers of an asynchronous instruction in flight."""


class MissingFence(Fault):
  """A read of a write by another proxy or unit, without a fence."""


class Barrier(Fault):
  """Use of an mbarrier that does not exist, or an access of its bytes."""


class TensorMemory(Fault):
  """Tensor memory that is not allocated, or not deallocated."""


class Undefined(Fault):
  """A result that depends on undefined bits."""


class Divergence(Fault):
  """Threads that do not execute a collective instruction together."""


class Endless(Fault):
  """A block that executes too many instructions."""


class NotModelled(NotImplementedError):
  """PTX that the executor does not model."""
