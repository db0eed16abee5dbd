# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether the processes of one run choose by the same tables.

Processes of a run compile one program each, and where their kernels differ so
may what they wait for from each other: a run that never ends. So the first
process that decides says by which tables, and every other one compares before
it decides for the first time. Nobody waits: whoever comes first is the first.
"""

from __future__ import annotations

import functools
from typing import Final

import jax

from jaxplugin.jaxext import jax_private
from jaxplugin.tables import resolution

_KEY: Final = "jaxplugin/tables"


class TablesDifferError(RuntimeError):
  """Another process of the same run has other tuning tables.

  Processes that choose different kernels may wait for each other forever. Set
  JAXPLUGIN_TUNING to the same file in all processes.
  """


def tuning_digest() -> str:
  """Returns the SHA-256 of the tuning tables that a choice here uses.

  These are the tables of an enclosing `tuning`, the user's, and the packaged
  ones. Processes with equal digests, equal devices and equal installations make
  equal choices.

  Returns:
    64 hexadecimal digits, a digest of the contents.

  Example:
    >>> import jaxplugin as jp
    >>> with jp.tuning(None):
    ...   print(len(jp.tuning_digest()))
    64
  """
  return resolution.stack(resolution.overlay()).digest


@functools.cache
def check() -> None:
  """Compares the user's and the packaged tables with the other processes'.

  Once a process. Does nothing in a run of one process, or where processes do
  not know of each other (`jax.distributed.initialize`).

  Raises:
    TablesDifferError: the first process to decide has other tables.
  """
  if jax.process_count() == 1:
    return
  own = resolution.standing()
  first = jax_private.first_published(
    _KEY, f"{jax.process_index()} {own.digest}"
  )
  if first is None:
    return
  index, _, theirs = first.partition(" ")
  if theirs != own.digest:
    names = ", ".join(named.name for named in own.tables) or "none"
    raise TablesDifferError(
      f"tables of measured choices: process {jax.process_index()} and process"
      f" {index} have different ones (digests {own.digest[:16]} and"
      f" {theirs[:16]}; this process has {names}). Processes with different"
      f" choices can deadlock. Set {resolution.VARIABLE} to the same file in"
      f" all processes, or to {resolution.OFF}"
    )
