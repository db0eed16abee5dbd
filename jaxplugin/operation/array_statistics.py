# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Statistics of an array, and random arrays that have them.

They have exact values only for the least and the greatest number, the sum of
integers, and counts.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxplugin.core import formats

Statistics = dict[str, Any]


def describe(x: np.ndarray) -> Statistics:
  """Returns the statistics of an array, which JSON can represent.

  Floats, and the two parts of complex numbers: minimum, maximum, mean, standard
  deviation, counts of zeros, NaN, Inf and negative numbers, and of the
  exponents of the other magnitudes. Consecutive integers: the first one. Other
  integers of at most 8 bits: counts of each number. Others: minimum, maximum
  and sum.
  """
  x = np.asarray(x).reshape(-1)
  if x.dtype.kind == "c":
    x = x.view(x.real.dtype)
  if not _is_float(x.dtype):
    numbers = x.astype(np.int64)
    # Numbers of layers or positions must stay in order.
    if x.size > 1 and (np.diff(numbers) == 1).all():
      return {"start": int(numbers[0])}
    if x.dtype.itemsize == 1:
      values, counts = np.unique(numbers, return_counts=True)
      return {"counts": _pairs(values, counts)}
    return {
      "min": int(numbers.min(initial=2**62)) if x.size else 0,
      "max": int(numbers.max(initial=-(2**62))) if x.size else 0,
      "sum": int(numbers.sum()),
    }
  wide = x.astype(np.float64)
  finite = wide[np.isfinite(wide)]
  nonzero = finite[finite != 0]
  exponents, counts = np.unique(np.frexp(nonzero)[1] - 1, return_counts=True)
  some = finite if finite.size else np.zeros(1)
  return {
    "min": float(some.min()),
    "max": float(some.max()),
    "mean": float(np.nan_to_num(some.mean())),
    "std": float(np.nan_to_num(some.std())),
    "zeros": int(finite.size - nonzero.size),
    "negative": int(np.count_nonzero(nonzero < 0)),
    "nan": int(np.count_nonzero(np.isnan(wide))),
    "positive_inf": int(np.count_nonzero(np.isposinf(wide))),
    "negative_inf": int(np.count_nonzero(np.isneginf(wide))),
    "exponents": _pairs(exponents, counts),
  }


def generate(
  shape: tuple[int, ...],
  dtype: np.dtype,
  statistics: Statistics | None,
  rng: np.random.Generator,
) -> np.ndarray:
  """Returns a random array with given statistics, in random order.

  Args:
    statistics: result of `describe` for an array of this shape and dtype; None
      if unknown (`_unknown`).
  """
  if dtype.kind == "c":
    part = np.empty(0, dtype).real.dtype
    return generate((*shape, 2), part, statistics, rng).view(dtype)[..., 0]
  size = int(np.prod(shape, dtype=np.int64))
  if statistics is None:
    numbers = _unknown(size, dtype, rng)
  elif "start" in statistics:
    numbers = statistics["start"] + np.arange(size)
  elif "counts" in statistics:
    numbers = rng.permutation(_repeated(statistics["counts"]))
  elif "sum" in statistics:
    numbers = rng.permutation(_integers(size, statistics, rng))
  else:
    numbers = rng.permutation(_floats(statistics, rng))
  return numbers.astype(dtype).reshape(shape)


def _unknown(
  size: int, dtype: np.dtype, rng: np.random.Generator
) -> np.ndarray:
  """Returns normal numbers, small powers of two, any codes, or zeros."""
  if dtype == formats.E8M0:
    return np.exp2(rng.integers(-3, 4, size))
  if _is_float(dtype):
    return rng.normal(size=size)
  if dtype.itemsize > 1 or dtype.kind == "b":  # sizes of groups, for example
    return np.zeros(size, np.int64)
  limits = jnp.iinfo(dtype)
  return rng.integers(limits.min, limits.max, size, endpoint=True)


def _is_float(dtype: np.dtype) -> bool:
  return bool(jnp.issubdtype(dtype, jnp.floating))


def _pairs(values: np.ndarray, counts: np.ndarray) -> list[list[int]]:
  return np.stack([values, counts], axis=1).tolist() if values.size else []


def _repeated(pairs: list[list[int]]) -> np.ndarray:
  values, counts = np.array(pairs, np.int64).reshape(-1, 2).T
  return np.repeat(values, counts)


def _integers(
  size: int, statistics: Statistics, rng: np.random.Generator
) -> np.ndarray:
  """Returns integers with the minimum, maximum and sum of the statistics."""
  low, high = statistics["min"], statistics["max"]
  numbers = rng.integers(low, high, size, np.int64, endpoint=True)
  numbers[:2] = (high, low)[:size]
  # Sizes of groups, for example, must keep their sum.
  missing = statistics["sum"] - int(numbers.sum())
  others = numbers[2:]
  room = high - others if missing > 0 else others - low
  before = np.cumsum(room) - room
  others += np.sign(missing) * np.clip(abs(missing) - before, 0, room)
  return numbers


def _floats(statistics: Statistics, rng: np.random.Generator) -> np.ndarray:
  exponents = _repeated(statistics["exponents"])
  numbers = np.ldexp(rng.uniform(1, 2, exponents.size), exponents)
  numbers = rng.permutation(numbers)
  numbers[: statistics["negative"]] *= -1
  low, high = statistics["min"], statistics["max"]
  numbers = np.clip(numbers, low, high)
  if numbers.size and high:  # 0 is among the zeros below
    numbers[np.argmax(numbers)] = high
  if numbers.size and low:
    numbers[np.argmin(numbers)] = low
  special = (
    (0.0, "zeros"),
    (np.nan, "nan"),
    (np.inf, "positive_inf"),
    (-np.inf, "negative_inf"),
  )
  rest = [np.full(statistics[name], value) for value, name in special]
  return np.concatenate([numbers, *rest])
