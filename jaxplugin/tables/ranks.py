# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks that all processes of a run choose by the same tables.

Each process of a run compiles its own program. With different kernels, two
processes may wait for each other forever. The first process that decides
therefore publishes the digest of its tables. Every other process compares its
digest before its first decision. No process waits for another.
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
  """Compares this process's tables with those of the first process, once.

  The comparison includes the user's and the packaged tables. It is skipped if
  the run has one process, or if `jax.distributed.initialize` was not called.

  Raises:
    TablesDifferError: If the first process to decide has other tables.
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
