# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tuning tables of dots that match this machine's targets, for tests."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

from jaxplugin.core import formats, targets
from jaxplugin.dot import backends, problems
from jaxplugin.dot.backends import triton
from jaxplugin.kernels.gpu import configs
from jaxplugin.tables import records, resolution
from jaxplugin.testing import dot_problems
from jaxplugin.testing.measured import operation_tables

H200: Final = targets.named_target("h200")
OFF: Final = {resolution.VARIABLE: resolution.OFF}


def problem(
  m: int = 64,
  n: int = 4096,
  k: int = 4096,
  lhs: formats.BlockFormat | None = None,
  rhs: formats.BlockFormat | None = formats.MXFP4,
  **changes: Any,
) -> problems.DotProblem:
  """A decode-shaped product of bf16 rows and an MXFP4 weight."""
  fields = {"m": m, "n": n, "k": k, "out_dtype": formats.BF16, **changes}
  return dot_problems.problem(lhs, rhs, **fields)


def tiles(**changes: Any) -> records.Fields:
  """A config that no rule has."""
  config = configs.MatmulConfig(
    path="upcast", block_m=64, block_n=64, block_k=64, **changes
  )
  return triton.fields_of(config)


def row(problem_: problems.DotProblem, *ways: Any) -> records.Row:
  """The first of (implementation, time, config) is the default."""
  return operation_tables.row(backends.OPERATION, problem_, *ways)


def table(
  *rows: records.Row, target: targets.Target = H200, **changes: Any
) -> records.Table:
  """As if it had been measured here."""
  return operation_tables.table(backends.OPERATION, target, *rows, **changes)


def faster(config: records.Fields | None = None, m: int = 64) -> records.Row:
  """Where Triton with some tiles is faster than by its rule."""
  config = tiles() if config is None else config
  return row(problem(m=m), ("triton", 20.0, ()), ("triton", 10.0, config))


XLA_FASTER: Final = row(problem(), ("triton", 20.0, ()), ("xla", 10.0, ()))


def over(*tables: records.Table) -> resolution.Overlay:
  return resolution.Overlay(tables=tables)


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
  """Sets only these of the table's variables, and reads the files again."""
  with mock.patch.dict(os.environ, variables):
    if resolution.VARIABLE not in variables:
      os.environ.pop(resolution.VARIABLE, None)
    resolution.standing.cache_clear()
    resolution._warn_once.cache_clear()
    try:
      yield
    finally:
      resolution.standing.cache_clear()


def source_of(
  table_: records.Table, name: str, **changes: Any
) -> dict[str, Any]:
  """The table, of another source of an implementation."""
  sources = dict(table_.header.sources)
  sources[name] = dataclasses.replace(sources[name], **changes)
  return {"sources": tuple(sources.items())}
