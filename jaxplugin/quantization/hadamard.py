# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The random Hadamard transform of groups of values along a dimension.

A group x of n values, with n a power of two, becomes

  y = H (s * x) / sqrt(n)

with a vector s of signs and Sylvester's Hadamard matrix, H[i, j] =
(-1)^popcount(i & j). H diag(s) / sqrt(n) is orthogonal. It spreads an outlier
over its group. If both operands of a matmul are transformed along the
contracting dimension, the transforms cancel.

The signs are the same for all groups, tensors and steps: s[i] is -1 if bit i of
the binary fraction of pi is 1.

Source: "Pretraining Large Language Models with NVFP4", arXiv 2509.25149.
"""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.jaxext import mesh_axes

SIZES: Final = tuple(1 << i for i in range(1, 9))

# First 256 bits of the binary fraction of pi.
_PI_FRACTION: Final = (
  "243f6a8885a308d313198a2e03707344a4093822299f31d0082efa98ec4e6c89"
)


def signs(size: int) -> np.ndarray:
  """Returns the signs s as f32[size]."""
  bits = np.unpackbits(np.frombuffer(bytes.fromhex(_PI_FRACTION), np.uint8))
  return np.where(bits[:size] == 1, np.float32(-1), np.float32(1))


def factor(size: int) -> np.float32:
  """Returns 1 / sqrt(size), rounded to f32."""
  return np.float32(1 / np.sqrt(size))


def transform(x: jax.Array, axis: int, size: int) -> jax.Array:
  """Transforms each group of `size` values of `x` along `axis`.

  It computes log2(size) rounds of f32 butterflies, the sums and differences of
  values that are 1, 2, 4, ... apart. It then multiplies by `factor(size)`. The
  order of operations is fixed, so that every platform computes the same bits,
  unless an intermediate is an f32 subnormal.

  Args:
    x: floats[..., k, ...], with k a multiple of size.
    size: group size, one of `SIZES`.

  Returns:
    f32 of the shape of x.
  """
  shape = x.shape
  lead, trail = shape[:axis], shape[axis + 1 :]
  x = mesh_axes.divided(x, axis, size)
  count = shape[axis] // size
  groups = x.astype(jnp.float32).reshape(*lead, count, size, *trail)
  ones = (1,) * len(trail)
  groups *= signs(size).reshape(*(1,) * axis, 1, size, *ones)
  whole = groups.shape
  distance = 1
  while distance < size:
    # The reshape splits only the group size, because the number of groups may
    # be sharded over explicit axes.
    pairs = groups.reshape(
      *whole[: axis + 1], size // (2 * distance), 2, distance, *trail
    )
    first, second = (
      jax.lax.index_in_dim(pairs, i, axis + 2, keepdims=False) for i in (0, 1)
    )
    groups = jnp.stack([first + second, first - second], axis + 2)
    groups = groups.reshape(whole)
    distance *= 2
  return groups.reshape(shape) * factor(size)
