# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`dot_general` in NumPy f64.

Dimensions have letters: b and B are batch, k and K are contracted, all others
are free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import quantization
from jaxplugin.core import formats

# The contract: 16 roundings of f32 in units of sum|a * b|.
BOUND: Final = 16 * 2.0**-24
# bf16 has 8 significant bits, so rounding to it is off by 2^-8 at most.
BF16_ROUNDING: Final = 2.0**-8

SIZES: Final = {
  "b": 2,
  "B": 3,
  "m": 5,
  "M": 3,
  "n": 7,
  "N": 2,
  "k": 40,
  "K": 3,
}

Format = formats.BlockFormat | None


def with_gradients(dot):
  """A jitted function of (lhs, rhs, g): the result, and both gradients."""

  @jax.jit
  def run(lhs, rhs, g):
    result, vjp = jax.vjp(dot, lhs, rhs)
    return result, *vjp(g)

  return run


def fixed_point(seed, *shape, bits=10):
  """Normal numbers, of 2^-bits: sums of a group are exact in f32."""
  x = np.random.default_rng(seed).normal(size=shape)
  return (np.round(x * 2**bits) / 2**bits).astype(np.float32)


def numbers(lhs: str, rhs: str) -> Any:
  """Dimension numbers of an einsum whose result is batch, lhs, rhs."""
  batch = [c for c in lhs if c in rhs and c in "bB"]
  contracting = [c for c in lhs if c in rhs and c in "kK"]
  where = lambda side, names: tuple(side.index(c) for c in names)
  return (
    (where(lhs, contracting), where(rhs, contracting)),
    (where(lhs, batch), where(rhs, batch)),
  )


def result_of(lhs: str, rhs: str) -> str:
  """The letters of the result."""
  batch = [c for c in lhs if c in rhs and c in "bB"]
  free = [c for c in lhs if c not in rhs] + [c for c in rhs if c not in lhs]
  return "".join(batch + free)


def normal(seed: int, names: str, dtype: Any = np.float32) -> np.ndarray:
  """Normal numbers, of the sizes of the letters."""
  shape = [SIZES[c] for c in names]
  return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def fake_quantize(
  x: Any, names: str, contracting: Sequence[str], format: Format
) -> np.ndarray:
  """f64 dequantized quantization of `x` along merged `contracting` letters.

  The padding is written out here: a separate reading of what `dot_general`
  says it does (merge in the order of the contracting letters, pad, quantize).
  """
  if format is None:
    return np.asarray(x, np.float64)
  free = [c for c in names if c not in contracting]
  order = [names.index(c) for c in (*free, *contracting)]
  moved = np.asarray(x, np.float32).transpose(order)
  flat = moved.reshape(*moved.shape[: len(free)], -1)
  size = flat.shape[-1]
  widths = [(0, 0)] * (flat.ndim - 1) + [(0, -size % format.block_size)]
  quantized = quantization.quantize(
    jax.device_put(np.pad(flat, widths)), format, packed=False
  )
  values = np.asarray(quantized.values).astype(np.float64)
  scale = np.asarray(quantized.scale).astype(np.float64)
  result = values * np.repeat(scale, format.block_size, axis=-1)
  if quantized.global_scale is not None:
    result = result * np.asarray(quantized.global_scale).item()
  result = result[..., :size].reshape(moved.shape)
  return result.transpose(np.argsort(order))


def expected_product(
  x: Any,
  x_names: str,
  y: Any,
  y_names: str,
  out: str,
  x_format: Format,
  y_format: Format,
) -> tuple[np.ndarray, np.ndarray]:
  """f64 product of quantized operands, and sum|a * b|."""
  contracting = [c for c in x_names if c in y_names and c not in out]
  x = fake_quantize(x, x_names, contracting, x_format)
  y = fake_quantize(y, y_names, contracting, y_format)
  expression = f"{x_names},{y_names}->{out}"
  return (
    np.einsum(expression, x, y),
    np.einsum(expression, np.abs(x), np.abs(y)),
  )


def _letters(dimension_numbers: Any, ndims: tuple[int, int]) -> tuple[str, ...]:
  """Letters of both operands and of the result, of any dimension numbers."""
  contracting, batch = dimension_numbers
  fresh = iter("acdefghijlmnopqrstuvwxyz")
  sides = []
  for k, b, ndim in zip(contracting, batch, ndims, strict=True):
    names = {d: "KLM"[i] for i, d in enumerate(k)}
    names |= {d: "BCD"[i] for i, d in enumerate(b)}
    sides.append([names.get(d) or next(fresh) for d in range(ndim)])
  free = [c for side in sides for c in side if c.islower()]
  out = "BCD"[: len(batch[0])] + "".join(free)
  return "".join(sides[0]), "".join(sides[1]), out


def reference_dot_general(
  lhs_format: Format, rhs_format: Format
) -> Callable[..., jax.Array]:
  """`jaxplugin.dot_general` and its gradients by NumPy, in f64.

  g is quantized to lhs_format, or rhs_format where that is None. It goes where
  `lax.dot_general` goes, but not under `jax.jit`.
  """
  grad_format = lhs_format or rhs_format

  def product(
    x: Any, y: Any, names: tuple[str, ...], dtype: Any, *formats: Format
  ) -> jax.Array:
    x_names, y_names, out_names = names
    value, _ = expected_product(x, x_names, y, y_names, out_names, *formats)
    return jnp.asarray(value.astype(dtype))

  @functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
  def multiply(lhs: Any, rhs: Any, names: Any, dtype: Any) -> jax.Array:
    return product(lhs, rhs, names, dtype, lhs_format, rhs_format)

  def forward(lhs: Any, rhs: Any, names: Any, dtype: Any) -> tuple[Any, Any]:
    return multiply(lhs, rhs, names, dtype), (lhs, rhs)

  def backward(names: Any, dtype: Any, kept: Any, g: Any) -> tuple[Any, Any]:
    del dtype
    lhs, rhs = kept
    lhs_names, rhs_names, out = names
    return (
      product(
        g, rhs, (out, rhs_names, lhs_names), lhs.dtype, grad_format, rhs_format
      ),
      product(
        g, lhs, (out, lhs_names, rhs_names), rhs.dtype, grad_format, lhs_format
      ),
    )

  multiply.defvjp(forward, backward)

  def dot_general(
    lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **kwargs: Any
  ) -> jax.Array:
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    dtype = jax.eval_shape(
      lambda x, y: jax.lax.dot_general(
        x, y, dimension_numbers, *args, **kwargs
      ),
      lhs,
      rhs,
    ).dtype
    names = _letters(dimension_numbers, (lhs.ndim, rhs.ndim))
    return multiply(lhs, rhs, names, dtype)

  return dot_general
