# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of measured choices that nobody measured, for tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxplugin.lab.bench import timing
from jaxplugin.tables import records


def header(**changes: Any) -> records.Header:
  made = records.Header(
    operation="block_scaled_dot",
    device=records.Device(
      platform="cuda", kind="NVIDIA H200", architecture="sm_90", core_count=132
    ),
    sources=(
      (
        "triton",
        records.Source(kernels="a" * 64, toolchain=(("triton", "3.9.0"),)),
      ),
      ("xla", records.Source(toolchain=(("jaxlib", "0.10.2"),))),
    ),
    measured=records.Measurement(
      clock="device", cache="cold", interval="quartiles", rounds=20
    ),
    date="2026-11-23",
    about=(("driver", "580.95"),),
  )
  return dataclasses.replace(made, **changes)


def candidate(
  implementation: str = "triton", median_us: float = 20.0, **config: Any
) -> records.Candidate:
  """Measured within a twentieth of its median."""
  return records.Candidate(
    implementation=implementation,
    config=records.fields_of("config", config),
    median_us=median_us,
    interval_us=(
      timing.significant(median_us * 0.95),
      timing.significant(median_us * 1.05),
    ),
  )


def row(
  m: int = 16, n: int = 4096, k: int = 4096, **others: Any
) -> records.Row:
  """Returns a row with Triton's candidate, the default, and XLA's, slower."""
  triton = candidate("triton", 20.0 + m / 8, block_m=16, path="small_m")
  xla = candidate("xla", 50.0 + m / 2)
  problem = {"lhs": "bfloat16", "rhs": "mxfp4", "m": m, "n": n, "k": k}
  return records.row_of(
    records.fields_of("problem", {**problem, **others}), (xla, triton), triton
  )


def table(*rows: records.Row, **changes: Any) -> records.Table:
  """A table of rows, by default of three problems."""
  rows = rows or (row(1), row(16), row(16, n=14336))
  return records.table_of(header(**changes), rows)
