# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether an E4M3 scale has a negative code, looked for once an array.

Looking copies the scale to the host and waits for what computes it: 2.1 of the
2.9 ms of an eager NVFP4 dot of 1x4096x4096. An array of JAX never changes, so
the answer stays right as long as the array lives. One of NumPy may, and is
looked at each time.
"""

from __future__ import annotations

import weakref
from typing import Any
from typing import Final

import jax
import numpy as np

_LARGEST_ZERO: Final = 0x80  # codes above are negative, but for 0xFF, a NaN
_NEGATIVE_NAN: Final = 0xFF

# By id: an array of JAX has no hash. An entry goes when its array does.
_known: Final[dict[int, weakref.ref[Any]]] = {}


def has_negative_code(scale: Any) -> bool:
  """Whether any code of E4M3 `scale`, of known values, is below zero.

  Zeros and NaNs of either sign are not.
  """
  if is_known_positive(scale):
    return False
  found = bool(negative_codes(scale).any())
  if not found:
    remember_positive(scale)
  return found


def negative_codes(scale: Any) -> np.ndarray:
  """bool[scale.shape]: where codes are below zero."""
  codes = np.asarray(scale).view(np.uint8)
  return (codes > _LARGEST_ZERO) & (codes < _NEGATIVE_NAN)


def is_known_positive(scale: Any) -> bool:
  known = _known.get(id(scale))
  return known is not None and known() is scale


def remember_positive(scale: Any) -> None:
  """Notes that an array has no negative code, e.g. as `quantize` makes it."""
  if not isinstance(scale, jax.Array) or isinstance(scale, jax.core.Tracer):
    return
  key = id(scale)

  def forget(gone: weakref.ref[Any]) -> None:
    if _known.get(key) is gone:  # and not a later array's, at the same address
      del _known[key]

  _known[key] = weakref.ref(scale, forget)
