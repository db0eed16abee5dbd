# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes rounded up, and arrays padded to them. Sizes may be symbolic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.core import formats


def are_static(sizes: Iterable[Any]) -> bool:
  """Returns whether all sizes are integers."""
  return all(isinstance(size, (int, np.integer)) for size in sizes)


def divide_up(size: Any, divisor: int) -> Any:
  """How many of `divisor` cover `size`."""
  return -(-size // divisor)


def round_up(size: Any, multiple: int) -> Any:
  """The first multiple of `multiple` that is not below `size`."""
  # Written so that a symbolic size comes to a provable multiple.
  return (size + multiple - 1) // multiple * multiple


def pad_axis(x: jax.Array, axis: int, size: Any) -> jax.Array:
  """Appends zeros, or for E8M0, which has none, 2^-127, up to `size`."""
  axis %= x.ndim
  missing = size - x.shape[axis]
  if isinstance(missing, int) and missing == 0:
    return x
  zero_code = jnp.zeros((), x.dtype)
  if x.dtype == formats.E8M0:  # it has no zero; byte 0 is its smallest
    zero_code = lax.bitcast_convert_type(jnp.zeros((), jnp.uint8), x.dtype)
  widths: list[Any] = [(0, 0, 0)] * x.ndim
  widths[axis] = (0, missing, 0)
  return lax.pad(x, zero_code, widths)
