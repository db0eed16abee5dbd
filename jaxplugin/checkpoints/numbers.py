# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts NaNs, infinities and unusable global scales of tensors.

Arrays are views of a mapped file, and are read one chunk at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import assembly, errors, records

_CHUNK: Final = 1 << 16  # elements; a chunk fits in a core's cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
  """Counts of the numbers of a tensor that a matmul cannot use.

  Attributes:
    nan_scales, inf_scales: block scales, and minima of blocks, that are NaN,
      infinite.
    nan_values, inf_values: values, quantized or plain, that are NaN, infinite.
    nan_global_scales, zero_global_scales, inf_global_scales: global scales in
      the file that are NaN, 0, infinite.
    block: the index of the first of these block scales, in the linear scales;
      None if there is none.
    refusal: why the tensor cannot be read, "" if it can.
  """

  nan_scales: int = 0
  inf_scales: int = 0
  nan_values: int = 0
  inf_values: int = 0
  nan_global_scales: int = 0
  zero_global_scales: int = 0
  inf_global_scales: int = 0
  block: tuple[int, ...] | None = None
  refusal: str = ""

  def __bool__(self) -> bool:
    return self != Numbers()

  def __str__(self) -> str:
    """Returns the counts that are not 0."""
    words = []
    for name, word in _WORDS.items():
      if count := getattr(self, name):
        words.append(f"{count} {word}{'s' if count > 1 else ''}")
    if self.block is not None:
      count = bool(self.nan_scales) + bool(self.inf_scales)
      words.insert(count, f"the first in block {list(self.block)}")
    return ", ".join([*words, *([self.refusal] if self.refusal else [])])


_WORDS: Final = {
  "nan_scales": "NaN scale",
  "inf_scales": "infinite scale",
  "nan_values": "NaN value",
  "inf_values": "infinite value",
  "nan_global_scales": "NaN global scale",
  "zero_global_scales": "zero global scale",
  "inf_global_scales": "infinite global scale",
}


def count(entry: records.Entry, allowed: assembly.Range | None) -> Numbers:
  """Returns the counts of a tensor; reads all of it."""
  refusal = ""
  try:
    array = entry.make(allowed)
  except errors.REFUSALS as error:
    refusal = str(error)
    try:
      array = entry.make(None)
    except errors.REFUSALS:
      return Numbers(refusal=refusal)
  nan_scales, inf_scales, block = 0, 0, None
  values = array
  if isinstance(array, scaled_array.ScaledArray):
    nan_scales, inf_scales, block = nonfinite_scales(array)
    values = array.values
  nans, infinities = _nonfinite(np.asarray(values))
  of_global = np.zeros(0, np.float32)
  if entry.global_scale is not None:
    of_global = np.asarray(entry.global_scale.read(), np.float32)
  return Numbers(
    nan_scales=nan_scales,
    inf_scales=inf_scales,
    nan_values=nans,
    inf_values=infinities,
    nan_global_scales=int(np.count_nonzero(np.isnan(of_global))),
    zero_global_scales=int(np.count_nonzero(of_global == 0)),
    inf_global_scales=int(np.count_nonzero(np.isinf(of_global))),
    block=block,
    refusal=refusal,
  )


def nonfinite_scales(
  array: scaled_array.ScaledArray,
) -> tuple[int, int, tuple[int, ...] | None]:
  """Returns how many scales are NaN and infinite, and the first one's block.

  Minima of blocks count as scales.
  """
  offsets = () if array.offset is None else (np.asarray(array.offset),)
  if not any(map(any, map(_nonfinite, (np.asarray(array.scale), *offsets)))):
    return 0, 0, None
  # The linear scale has no padding.
  parts = (np.asarray(array.linear_scale()), *offsets)
  nans, infinities = map(sum, zip(*map(_nonfinite, parts), strict=True))
  blocks = [x for part in parts if (x := first_nonfinite(part)) is not None]
  return nans, infinities, blocks[0]


def first_nonfinite(x: np.ndarray) -> tuple[int, ...] | None:
  """Returns the index of the first NaN or infinity; None if there is none."""
  if not any(_nonfinite(x)):
    return None
  first = np.argmin(np.isfinite(x.astype(np.float32).reshape(-1)))
  return tuple(map(int, np.unravel_index(first, x.shape)))


def _nonfinite(x: np.ndarray) -> tuple[int, int]:
  """Returns how many of the numbers are NaN and how many are infinite."""
  if not jnp.issubdtype(x.dtype, jnp.inexact):
    return 0, 0
  flat = x.reshape(-1)
  nans = infinities = 0
  for start in range(0, flat.size, _CHUNK):
    chunk = flat[start : start + _CHUNK]
    if chunk.dtype.kind == "V":  # f32 is faster than types of ml_dtypes
      chunk = chunk.astype(np.float32)
    if not np.isfinite(chunk).all():
      nans += int(np.count_nonzero(np.isnan(chunk)))
      infinities += int(np.count_nonzero(np.isinf(chunk)))
  return nans, infinities
