# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Roofline estimates: bytes and FLOPs of an operation, and its least time.

Operands are read once and results are written once, at the vendor's published
bandwidth and FLOP rate. If quantizing computes a global scale, its operands are
read twice. No kernel reaches both rates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import numpy as np

from jaxplugin.core import formats, targets
from jaxplugin.dot import problems

Precision = Literal["bf16", "fp8", "fp4"]

_GIGA: Final = 1e9
_TERA: Final = 1e12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
  """Roofline estimate of one matmul or one quantization.

  Attributes:
    num_bytes: bytes that are read and written at least.
    flops: FLOPs; a multiplication and its addition count as two.
    seconds: least time by the target's published figures; None if the target
      has none.
    bound: the limit: "memory", "compute", or "" if unknown.
  """

  num_bytes: float
  flops: float
  seconds: float | None = None
  bound: Literal["memory", "compute", ""] = ""


# Dense FLOP/s with accumulation in f32, in units of 10^12, for bf16, for 8-bit
# and for 4-bit values. INT8 accumulates in int32, and has the rate of FP8 if a
# GPU has both. None if the vendor does not publish it, or if no kernel of this
# package uses these instructions on the device. NVIDIA: data sheets
# "A100 Tensor Core GPU", "L40S", "H100", "H200", "H20"; "Blackwell Architecture
# Technical Brief" (HGX B200) and HGX B300 data sheet, an eighth of eight GPUs;
# "RTX Blackwell GPU Architecture" white paper, table of the RTX 5090. Data
# sheets give figures with sparsity, which are twice these. AMD: data sheets of
# MI300X and MI355X.
_PEAKS: Final[dict[str, tuple[float | None, float | None, float | None]]] = {
  "a100": (312, 624, None),
  "l40s": (362, 733, None),
  "h100": (989, 1979, None),
  "h200": (989, 1979, None),
  "h20": (148, 296, None),
  "b200": (2250, 4500, 9000),
  "b300": (2250, 4500, 13125),
  "rtx5090": (209.5, 419, 1676),
  "gb10": (None, None, 500),
  "mi300x": (1307, None, None),
  "mi355x": (2517, 5033, 10066),
}
_COLUMNS: Final[tuple[Precision, ...]] = ("bf16", "fp8", "fp4")


def sheet_of(target: targets.Target) -> str | None:
  """Returns the name under which a GPU's published figures are stored.

  None if the GPU has no published figures. The whole name of the device must
  match. Other boards ("NVIDIA H100 PCIe", "NVIDIA GH200 480GB") and MIG
  instances contain the name of a listed GPU, but have other figures.
  """
  if not is_gpu(target):
    return None
  names = {targets.DEVICE_KINDS[name]: name for name in _PEAKS}
  return target.name if target.name in _PEAKS else names.get(target.name)


def is_gpu(target: targets.Target) -> bool:
  return target.platform in ("cuda", "rocm")


def precision_of(
  lhs: problems.SideProblem, rhs: problems.SideProblem, *, is_native: bool
) -> Precision:
  """Returns the precision in which matrix instructions multiply operands."""
  both = [side.format for side in (lhs, rhs)]
  if not is_native or None in both:
    return "bf16"
  return "fp4" if all(f is not None and f.is_fp4 for f in both) else "fp8"


def estimate(
  num_bytes: float,
  flops: float,
  precision: Precision | None,
  target: targets.Target,
) -> Estimate:
  """Returns the roofline estimate of one operation.

  Args:
    flops: FLOPs; a multiplication and its addition count as two.
    precision: precision of the matrix instructions; None if it is another one.
  """
  sheet = sheet_of(target)
  if sheet is None:
    return Estimate(num_bytes=num_bytes, flops=flops)
  bandwidth = targets.named_target(sheet).memory_bandwidth
  assert bandwidth is not None
  memory = num_bytes / bandwidth
  peaks = dict(zip(_COLUMNS, _PEAKS[sheet], strict=True))
  peak = None if precision is None else peaks[precision]
  compute = 0.0 if peak is None else flops / (peak * _TERA)
  return Estimate(
    num_bytes=num_bytes,
    flops=flops,
    seconds=max(memory, compute),
    bound="compute" if compute > memory else "memory",
  )


def of_arrays(
  read: Iterable[Any],
  written: Iterable[Any],
  target: targets.Target,
  *,
  reads: int = 1,
) -> Estimate | None:
  """Returns the estimate without FLOPs, or None if a size is symbolic."""
  in_bytes, out_bytes = bytes_of(read), bytes_of(written)
  if in_bytes is None or out_bytes is None:
    return None
  return estimate(reads * in_bytes + out_bytes, 0.0, None, target)


def bytes_of(avals: Iterable[Any]) -> float | None:
  """Returns the arrays' bytes, or None if a size is symbolic.

  An FP4 value counts as half a byte.
  """
  total = 0.0
  for aval in avals:
    if not all(isinstance(size, (int, np.integer)) for size in aval.shape):
      return None
    dtype = np.dtype(aval.dtype)
    size = 0.5 if dtype == formats.E2M1 else dtype.itemsize
    total += math.prod(aval.shape) * size
  return total


def in_words(num_bytes: float, flops: float, seconds: float) -> str:
  """Returns text such as "1.2 GB, 3.4 TFLOP, at least 5.6 us"."""
  parts = [_with_prefix(num_bytes, "B")]
  if flops:
    parts.append(_with_prefix(flops, "FLOP"))
  return ", ".join([*parts, f"at least {time_in_words(seconds)}"])


def _with_prefix(number: float, unit: str) -> str:
  prefixes = ((_TERA, "T"), (_GIGA, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
  return _in_units(number, [(size, f"{x}{unit}") for size, x in prefixes])


def time_in_words(seconds: float) -> str:
  """Returns "1.2 us" for 1.2e-6."""
  units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
  return _in_units(seconds, units)


def _in_units(number: float, units: Sequence[tuple[float, str]]) -> str:
  """Returns three digits in the first unit that they reach, or in the last."""
  rounded = float(f"{number:.3g}")
  size, unit = next((u for u in units if rounded >= u[0]), units[-1])
  return f"{rounded / size:.3g} {unit}"
