# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands of decoders, with weights in the layouts of all variants."""

from __future__ import annotations

import functools
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.peers import decoder_model
from jaxplugin.lab.bench.peers import operand_sets
from jaxplugin.lab.bench.peers import verification

# Number of weights that are checked for each matmul.
_MAX_WEIGHTS: Final = 1 << 18


@functools.partial(jax.jit, static_argnames=("shape", "layers", "format"))
def _weights(
  key: jax.Array,
  shape: tuple[int, int],
  layers: int,
  format: formats.BlockFormat,
) -> scaled_array.ScaledArray:
  """Returns quantized, normally distributed weights.

  Their standard deviation keeps the magnitude of activations. Layer i has the
  rows of the first layer, rolled by i.
  """
  x = jax.random.normal(key, shape, jnp.float32) * shape[1] ** -0.5
  stack = jnp.stack([jnp.roll(x, i, axis=0) for i in range(layers)])
  return quantization.quantize(stack, format, batch_dims=1)


class DecoderOperands:
  """Sets of operands of a decoder's step.

  Each set has different activations. All sets share the key and value caches.
  All sets also share the weights if these are more than 2.5 times as large as
  the last-level cache. Otherwise, each set has different weights.

  Attributes:
    sizes: sizes of the decoder.
    format: format of the weights.
  """

  def __init__(
    self,
    row: workloads.BenchRow,
    format: formats.BlockFormat,
    cache_bytes: int,
  ):
    self.sizes = decoder_model.DecoderSizes.of(row)
    self.format = format
    self._cache_bytes = cache_bytes
    keys = jax.random.split(jax.random.key(0), 3)
    self._x_key, self._caches_key, self._weights_key = keys
    self._made: dict[Any, Any] = {}

  def x(self, i: int) -> jax.Array:
    """Returns f32[m, channels]."""
    key = jax.random.fold_in(self._x_key, i)
    shape = self.sizes.rows, self.sizes.channels
    return self._once(("x", i), lambda: jax.random.normal(key, shape))

  def caches(self) -> dict[str, jax.Array]:
    """Returns `decoder_model.CACHES`, f32[layers, m, groups, length, d]."""
    shape = self.sizes.layers, *self.sizes.cache
    keys = jax.random.split(self._caches_key, len(decoder_model.CACHES))
    return self._once(
      "caches",
      lambda: {
        name: jax.random.normal(key, shape)
        for name, key in zip(decoder_model.CACHES, keys, strict=True)
      },
    )

  def quantized(self, i: int) -> dict[str, scaled_array.ScaledArray]:
    """Returns stacks (layers, n, k) of `decoder_model.PRODUCTS`."""
    copy = self._copy_of(i)
    key = jax.random.fold_in(self._weights_key, copy)
    keys = jax.random.split(key, len(decoder_model.PRODUCTS))
    shapes = self.sizes.weights
    return self._once(
      ("quantized", copy),
      lambda: {
        name: _weights(key, shapes[name], self.sizes.layers, self.format)
        for name, key in zip(decoder_model.PRODUCTS, keys, strict=True)
      },
    )

  def ready(self, i: int, dtype: Any) -> dict[str, jax.Array]:
    """Returns the dequantized stacks, rounded to `dtype`."""
    dtype = np.dtype(dtype)
    return self._once(
      (dtype.name, self._copy_of(i)),
      lambda: {
        n: quantization.dequantize(w, dtype)
        for n, w in self.quantized(i).items()
      },
    )

  def arranged(self, i: int, name: Any, make: Any) -> Any:
    """Returns `make()` for set i, cached by `name` and the set's weights."""
    return self._once((name, self._copy_of(i)), make)

  def sampled(
    self, i: int, layer: int, product: str, ready: str
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns a sample of columns, and their weights f64[columns, k].

    Args:
      i: the set.
      layer: the layer.
      product: one of `decoder_model.PRODUCTS`.
      ready: dtype of dequantized weights; "" if weights are quantized.
    """

    def make() -> tuple[np.ndarray, np.ndarray]:
      stacks = self.ready(i, ready) if ready else self.quantized(i)
      w: Any = stacks[product][layer]
      n, k = w.shape
      columns = verification.some(n, max(2, _MAX_WEIGHTS // k))
      return columns, verification.f64(w, columns)

    return self.arranged(i, ("sampled", layer, product, ready), make)

  def _copy_of(self, i: int) -> int:
    sizes = self.sizes
    values = sizes.layers * sum(n * k for n, k in sizes.weights.values())
    smallest = values // self.format.values_encoding.values_per_byte
    past = smallest > (1 + operand_sets.PAST_CACHE) * self._cache_bytes
    return 0 if past else i

  def _once(self, key: Any, make: Any) -> Any:
    if key not in self._made:
      self._made[key] = make()
    return self._made[key]
