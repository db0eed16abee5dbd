# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows, and made-up results, for the tests of the benchmark."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxplugin.lab.bench import (
  devices,
  measurement,
  results,
  roofline,
  timing,
  workloads,
)

CEILINGS = roofline.Ceilings(
  read=50e9, copy=20e9, bf16=900e9, f32=450e9, is_gpu=False
)
ENVIRONMENT = {
  "device": "A device",
  "cores": 2,
  "instruction_set": "avx2",
  "cudnn": None,
  "cache_bytes": 32 << 20,
  "cache_source": "somewhere",
  "python": "3.11.7",
  "versions": {"jaxplugin": "0.1.0", "jax": "0.10.2"},
  "date": "2026-11-21T12:00:00+00:00",
}


def parsed(
  row: str, pair: str = "mxfp8"
) -> tuple[workloads.BenchRow, workloads.Pair]:
  """A row and a pair of formats, from their texts."""
  (one,), (formats,) = workloads.parse_rows(row), workloads.parse_pairs(pair)
  return one, formats


def measuring(
  peers: tuple[str, ...], implementations: tuple[str, ...] | None = ("chosen",)
) -> measurement.RowMeasurement:
  """Measures rows on a CPU without a cache, in a short time."""
  options = measurement.BenchOptions(
    mode="call",
    rounds=3,
    seconds=0.1,
    implementations=implementations,
    peers=peers,
    out_dtype=np.dtype(np.float32),
    read_side=64,
  )
  device = dataclasses.replace(devices.find("cpu"), cache_bytes=0)
  return measurement.RowMeasurement(device, CEILINGS, options)


def variant(name: str, milliseconds: float, **fields) -> results.VariantResult:
  """A variant of a product of 2e9 operations on 1e8 bytes."""
  seconds = milliseconds / 1e3
  return dataclasses.replace(
    results.VariantResult(
      name=name,
      role="ours" if name in ("cpu", "xla", "triton") else "peer",
      mode="call",
      time=timing.stats([milliseconds * part for part in (0.9, 1, 1.2)]),
      num_bytes=10**8,
      flops=2 * 10**9,
      gb_per_s=0.1 / seconds,
      gflop_per_s=2 / seconds,
      roof_fraction=0.1 / 50 / seconds,
      error=1.5,
    ),
    **fields,
  )


def row(*variants: results.VariantResult, **fields) -> results.RowResult:
  """A row whose ratios are those of the medians."""
  timed = [v for v in variants if v.time is not None]
  return dataclasses.replace(
    results.RowResult(
      row="1x4096x4096",
      kind="dot",
      m=1,
      n=4096,
      k=4096,
      layer="",
      formats="mxfp8",
      out="float32",
      variants=tuple(variants),
      ratios=tuple(
        results.VariantRatio(
          ours=ours.name,
          other=other.name,
          ratio=timing.stats([other.time.median / ours.time.median]),
        )
        for ours in timed
        for other in timed
        if ours.role == "ours" and other is not ours
      ),
      seconds=1.0,
    ),
    **fields,
  )


def run(*rows: results.RowResult, **fields) -> results.BenchRun:
  return results.BenchRun(
    **{
      "command": ("bench",),
      "environment": ENVIRONMENT,
      "ceilings": CEILINGS,
      "rows": rows,
      **fields,
    }
  )
