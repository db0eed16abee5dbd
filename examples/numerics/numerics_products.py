# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Products of the numerics notebooks: errors in units of the contract.

The contract: before the final cast, |error| <= 16 * 2^-24 * sum|a * b|, against
the exact product of the dequantized operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numerics_measure
import numpy as np

import jaxplugin as jp

UNIT: Final = 2.0**-24
BOUND_UNITS: Final = 16
IMPLEMENTATIONS: Final = ("cudnn", "triton", "cpu", "xla")


@functools.cache
def _quantize(format: jp.BlockFormat) -> Callable[..., jp.ScaledArray]:
  return jax.jit(functools.partial(jp.quantize, format=format))


def quantize(x: np.ndarray, format: jp.BlockFormat) -> jp.ScaledArray:
  """`jp.quantize` along the last axis, compiled."""
  return _quantize(format)(np.asarray(x, np.float32))


@functools.cache
def _product(implementation: str | None, dtype: Any) -> Callable[..., Any]:
  return jax.jit(
    functools.partial(
      jp.block_scaled_dot,
      preferred_element_type=dtype,
      implementation=implementation,
    )
  )


def product(
  lhs: jp.ScaledArray,
  rhs: jp.ScaledArray,
  implementation: str | None = None,
  dtype: Any = jnp.float32,
) -> np.ndarray:
  """`jp.block_scaled_dot` as dtype[m, n], compiled."""
  return np.asarray(_product(implementation, dtype)(lhs, rhs))


def exact(x: jp.ScaledArray) -> np.ndarray:
  """f64[rows, k]: what `x` means, from its codes, in NumPy and ml_dtypes."""
  # Bytes, where XLA has no dtype of the values.
  codes = np.asarray(x.unpack().values).view(x.format.values_dtype)
  values = codes.astype(np.float64)
  scale = np.asarray(x.scale).astype(np.float64)
  values = values * np.repeat(scale, x.format.block_size, axis=-1)
  if x.global_scale is None:
    return values
  return values * np.float64(x.global_scale)


def error_units(
  result: np.ndarray, lhs: np.ndarray, rhs: np.ndarray
) -> np.ndarray:
  """f64[m, n]: |result - lhs rhs^T| in units of 2^-24 * (|lhs| |rhs|^T).

  Args:
    result: [m, n], measured.
    lhs, rhs: f64[m, k] and f64[n, k], exact operands.
  """
  magnitude = np.abs(lhs) @ np.abs(rhs).T
  error = np.abs(np.asarray(result, np.float64) - lhs @ rhs.T)
  return np.divide(
    error, UNIT * magnitude, out=np.zeros_like(error), where=magnitude > 0
  )


def available(format: jp.BlockFormat) -> dict[str, str | None]:
  """Returns, for each implementation, None or why this machine lacks it."""
  spec = jax.eval_shape(
    functools.partial(jp.quantize, format=format),
    jax.ShapeDtypeStruct((128, 512), jnp.float32),
  )
  reasons: dict[str, str | None] = {}
  for name in IMPLEMENTATIONS:
    call = functools.partial(jp.block_scaled_dot, implementation=name)
    try:
      jax.eval_shape(call, spec, spec)
      reasons[name] = None
    except NotImplementedError as refusal:
      # The message has a line "  name: reason" for each implementation.
      lines = str(refusal).splitlines()
      own = [line for line in lines if line.startswith(f"  {name}: ")]
      reasons[name] = own[0].strip() if own else lines[0]
  return reasons


def dominated(shape: tuple[int, int], seed: int, position: int) -> np.ndarray:
  """f32[rows, k]: positive values near 1/1000, and a one in one column.

  In a product of two such, one term outweighs thousands of others.
  """
  x = np.abs(numerics_measure.gaussian(shape, seed)) * np.float32(1e-3)
  x[:, position] = 1
  return x


def lanes_dot(lhs: np.ndarray, rhs: np.ndarray, lanes: int) -> np.ndarray:
  """f32[m, n]: lhs rhs^T added up in f32 by `lanes` accumulators.

  Accumulator i adds the products i, i + lanes, i + 2 lanes and so on, in this
  order; then pairs of accumulators are added until one is left. Products are
  rounded to f32 too.

  Args:
    lhs, rhs: f32[m, k] and f32[n, k], k a multiple of `lanes`.
    lanes: a power of two.
  """
  m, k = lhs.shape
  sums = np.zeros((m, len(rhs), lanes), np.float32)
  for start in range(0, k, lanes):
    part = slice(start, start + lanes)
    sums += lhs[:, None, part] * rhs[None, :, part]
  while sums.shape[-1] > 1:
    half = sums.shape[-1] // 2
    sums = sums[..., :half] + sums[..., half:]
  return sums[..., 0]
