# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts quantized values and scales to bytes for collectives.

Collectives do not support FP4, and XLA:CPU widens collectives of 8-bit floats
to 16 or 32 bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.core import formats


def packed(values: jax.Array, axis: int) -> jax.Array:
  """Packs two 4-bit values a byte along an axis; returns others unchanged."""
  if values.dtype not in formats.FOUR_BITS:
    return values
  return layouts.pack_fp4(values, axis=axis)


def to_bytes(x: jax.Array) -> jax.Array:
  """Views an array of one-byte elements as bytes.

  Only the xla implementation supports formats with wider elements. Such an
  array is returned unchanged.
  """
  return from_bytes(x, np.dtype(jnp.uint8))


def from_bytes(x: jax.Array, dtype: Any) -> jax.Array:
  """Undoes `to_bytes`."""
  if x.dtype == dtype or x.dtype.itemsize != np.dtype(dtype).itemsize:
    return x
  return lax.bitcast_convert_type(x, dtype)
