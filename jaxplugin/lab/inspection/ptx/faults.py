# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What executed PTX may do wrong. Messages end with the line and its text."""

from __future__ import annotations


class Fault(Exception):
  """A kernel did what PTX leaves undefined."""


class OutOfBounds(Fault):
  """An access of bytes that belong to no array, or not to shared memory."""


class Misaligned(Fault):
  """An address that is no multiple of the access's size."""


class Race(Fault):
  """Two accesses of one byte, one a write, that no barrier separates."""


class InFlight(Fault):
  """Bytes or registers of an asynchronous instruction not waited for."""


class MissingFence(Fault):
  """No fence between one proxy's or unit's write and another's read."""


class Barrier(Fault):
  """An mbarrier where none is, or one where another access is."""


class TensorMemory(Fault):
  """Tensor memory that is not allocated, or that is never given back."""


class Undefined(Fault):
  """A result depends on bits that nothing has written."""


class Divergence(Fault):
  """Threads that must take an instruction together do not."""


class Endless(Fault):
  """A block takes more instructions than it may."""


class Unsupported(NotImplementedError):
  """PTX that is not modelled: a limit of the interpreter, no kernel's fault."""
