# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantized weights in the own code of models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp

# Relative error of a sum of products in f32, from the contract.
EPSILON: Final = 16 * 2.0**-24


def normal(*shape: int, dtype: Any = np.float32) -> jax.Array:
  """Returns random numbers with a seed that depends on the shape."""
  rng = np.random.default_rng(sum(shape))
  return jax.device_put(rng.normal(size=shape).astype(dtype))


def quantized(w: Any, format: str, axis: int | tuple[int, ...]) -> Any:
  """Returns a weight that matmuls contract along an axis or several."""
  (w_q,), _ = jp.quantize_params([w], format, where=lambda p: axis)
  return w_q


def dequantized(tree: Any) -> Any:
  """Returns a tree whose quantized weights are f32 arrays."""
  is_weight = lambda x: isinstance(x, (jp.ScaledArray, jp.QuantizedWeight))
  return jax.tree.map(
    lambda x: x.dequantize(jnp.float32) if is_weight(x) else x,
    tree,
    is_leaf=is_weight,
  )


def exact(tree: Any) -> Any:
  """Returns a tree of f64 arrays."""
  return jax.tree.map(lambda x: np.asarray(x, np.float64), dequantized(tree))


def accepted(fn: Callable[..., Any], **options: Any) -> Any:
  """Jits `accept_quantized` of a function; a warning is an error."""
  function = jax.jit(jp.accept_quantized(fn, **options))

  def call(*args: Any) -> Any:
    with warnings.catch_warnings():
      warnings.simplefilter("error", UserWarning)
      return function(*args)

  call.lower = function.lower  # type: ignore[attr-defined]
  return call


def compiled(function: Any, *args: Any) -> str:
  """Returns the optimized HLO of a jitted function."""
  return function.lower(*args).compile().as_text()


def count_calls(hlo: str) -> int:
  """Counts the custom calls of this package."""
  return hlo.count('custom_call_target="jaxplugin')


class AcceptedTest(parameterized.TestCase):
  """Tests of functions that accept quantized weights."""

  def assert_within(
    self, actual: Any, function: Callable[..., Any], *args: Any
  ) -> None:
    """Checks that a result is within the contract of NumPy's, in f64."""
    expected = function(*exact(args))
    bound = EPSILON * function(*map(np.abs, exact(args)))
    np.testing.assert_array_less(
      np.abs(np.asarray(actual, np.float64) - expected), bound + 1e-30
    )
