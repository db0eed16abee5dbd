# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors that are planted in results of dots, for tests of `debug_checks`.

An implementation's `emit` is replaced by one that changes elements of the right
result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from typing import Final
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.dot import backends
from jaxplugin.jaxext.partitioner import calls_private

M, N, K = 8, 16, 128
XLA: Final = backends.BACKENDS["xla"]


def _wrong(
  *indices: tuple[int, ...], value: float = np.nan
) -> Callable[..., Any]:
  """An `emit` that is wrong at some indices of the last two dimensions."""

  def emit(*args: Any) -> Any:
    result = XLA.emit(*args)
    for index in indices:
      result = result.at[..., *index].set(value)
    return result

  return emit


def quantized(
  rows: int, format: jp.BlockFormat = jp.MXFP8, seed: int = 0, k: int = K
) -> jp.ScaledArray:
  """Random numbers, [rows, k]."""
  x = np.random.default_rng([seed, rows]).normal(size=(rows, k))
  return jp.quantize(x.astype(np.float32), format)


def dot(x: Any, w: Any, **kwargs: Any) -> jax.Array:
  """By the implementation that errors are planted in."""
  return jp.block_scaled_dot(x, w, implementation="xla", **kwargs)


def run(function: Callable[..., Any], *args: Any) -> Any:
  """Traces afresh, inside of checks, and runs."""
  with jp.debug_checks():
    return jax.block_until_ready(jax.jit(lambda *args: function(*args))(*args))


class Case(parameterized.TestCase):
  def plant(
    self,
    *indices: tuple[int, ...],
    value: float = np.nan,
    backend: Any = XLA,
  ) -> None:
    """In the results of a backend."""
    self.replace_emit(_wrong(*indices, value=value), backend)

  def replace_emit(self, emit: Callable[..., Any], backend: Any = XLA) -> None:
    changed = dataclasses.replace(backend, emit=emit)
    self.enter_context(
      mock.patch.dict(backends.BACKENDS, {backend.name: changed})
    )
    # The name of a device's share does not say that a backend was replaced.
    calls_private.forget_shares()
    self.addCleanup(calls_private.forget_shares)
