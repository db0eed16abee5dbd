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
  """Returns size / divisor, rounded up."""
  # JAX can prove that a symbolic result is the size of a slice with a stride.
  return (size - 1) // divisor + 1


def round_up(size: Any, multiple: int) -> Any:
  """Returns the smallest multiple of `multiple` that is at least `size`."""
  # In this form JAX can prove that a symbolic result is a multiple.
  return (size + multiple - 1) // multiple * multiple


def pad_axis(x: jax.Array, axis: int, size: Any) -> jax.Array:
  """Pads an axis to `size` with zeros; E8M0 has no zero and gets 2^-127."""
  axis %= x.ndim
  missing = size - x.shape[axis]
  if isinstance(missing, int) and missing == 0:
    return x
  zero_code = jnp.zeros((), x.dtype)
  if x.dtype == formats.E8M0:  # byte 0 is its smallest number
    zero_code = lax.bitcast_convert_type(jnp.zeros((), jnp.uint8), x.dtype)
  widths: list[Any] = [(0, 0, 0)] * x.ndim
  widths[axis] = (0, missing, 0)
  return lax.pad(x, zero_code, widths)
