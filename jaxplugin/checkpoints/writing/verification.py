# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads a written checkpoint and compares it with its source."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from collections.abc import Sequence
from typing import Final

import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import assembly
from jaxplugin.checkpoints import errors
from jaxplugin.checkpoints import numbers
from jaxplugin.checkpoints import recognition
from jaxplugin.checkpoints import records
from jaxplugin.checkpoints import safetensors_files
from jaxplugin.checkpoints import stored
from jaxplugin.checkpoints.writing import sources
from jaxplugin.checkpoints.writing import weights
from jaxplugin.quantization import dequantization

_CHUNK: Final = 1 << 16


def verify(
  who: str,
  folder: pathlib.Path,
  source: sources.SourceCheckpoint,
  decisions: Sequence[records.TensorDecision],
  quantizer: weights.Quantizer,
  add: Callable[[int], None],
) -> tuple[dict[str, float], tuple[str, ...]]:
  """Returns errors by names of weights, and names of weights with NaNs.

  It quantizes each weight of the source again, and reports its bytes.

  Raises:
    CheckpointError: If a bit differs, or a file breaks a rule.
  """
  written = recognition.recognize(
    stored.joined(
      {
        name: sources.unmapped(safetensors_files.open_file(folder / name))
        for name in source.shards
      }
    ),
    quantizer.layout.name,
  )
  norms: dict[str, float] = {}
  nonfinite: list[str] = []
  for decision in decisions:
    name = decision.tensor.name
    entry = written.get(name)
    if entry is None or (entry.layout is None) != (decision.weight is None):
      raise errors.CheckpointError(
        f"{who}: {name!r} was not read back from {folder}"
      )
    if decision.weight is None:
      _require_same_bytes(decision.tensor, entry.parts[0])
    else:
      found = entry.make(assembly.GLOBAL_SCALE_RANGE)
      _require_same(decision.tensor, found, quantizer.quantize(decision))
      x = decision.tensor.read()
      if numbers.first_nonfinite(x) is None:
        norms[name] = _error(decision, found, x)
      else:
        nonfinite.append(name)
    add(decision.tensor.nbytes)
  return norms, tuple(nonfinite)


def _require_same_bytes(
  tensor: stored.StoredTensor, other: stored.StoredTensor
) -> None:
  same = (tensor.type_name, tensor.shape) == (other.type_name, other.shape)
  for start in range(0, tensor.nbytes, _CHUNK):
    size = min(_CHUNK, tensor.nbytes - start)
    same = same and np.array_equal(
      safetensors_files.read_bytes(tensor, start, size),
      safetensors_files.read_bytes(other, start, size),
    )
  if not same:
    raise stored.fault(other, f"it differs from that of {tensor.file}")


def _require_same(
  tensor: stored.StoredTensor,
  found: scaled_array.ScaledArray,
  wanted: scaled_array.ScaledArray,
) -> None:
  for part in ("values", "scale", "global_scale", "offset"):
    x, y = getattr(found, part), getattr(wanted, part)
    if x is None and y is None:
      continue
    if part == "scale" and found.scale_layout == layouts.SWIZZLED:
      y = layouts.swizzle_scale(jnp.asarray(y))
    x, y = np.asarray(x), np.asarray(y)
    is_same = x.dtype == y.dtype and x.size == y.size
    if not is_same or x.tobytes() != y.tobytes():
      raise stored.fault(
        tensor, f"its {part} on the disk differs from the result of jp.quantize"
      )


def _error(
  decision: records.TensorDecision,
  found: scaled_array.ScaledArray,
  x: np.ndarray,
) -> float:
  """Returns the norm of the error over the norm of the weight, in f64."""
  y = np.asarray(dequantization.dequantize(found, jnp.float32))
  weight = decision.weight
  assert weight is not None
  ends = (np.asarray(part).shape[-1] for part in (found.values, found.scale))
  if weight.axis == -2 and len({*ends}) == 2:  # the layout has k last
    x = x.swapaxes(-1, -2)
  x, y = x.reshape(-1), y.reshape(-1)
  squares = difference = 0.0
  for start in range(0, x.size, _CHUNK):
    a = x[start : start + _CHUNK].astype(np.float64)
    b = y[start : start + _CHUNK].astype(np.float64)
    squares += float(a @ a)
    difference += float((a - b) @ (a - b))
  return math.sqrt(difference / squares) if squares else 0.0
