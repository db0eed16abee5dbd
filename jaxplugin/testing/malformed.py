# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A malformed call of `block_scaled_dot`: how it is written and made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

import jaxplugin as jp
from jaxplugin.core import formats

E8M0: Final = formats.E8M0
E4M3: Final = formats.E4M3
E2M1: Final = formats.E2M1
MODES: Final = ("eager", "eval_shape", "jit", "vmap")


def ones(shape: tuple[int, ...], dtype: Any) -> jax.Array:
  return jnp.asarray(np.ones(shape, np.float32).astype(dtype))


def mx(*shape: int) -> jax.Array:
  return ones(shape, E4M3)


def e8m0(*shape: int) -> jax.Array:
  return ones(shape, E8M0)


def fp4(*shape: int) -> jax.Array:
  return ones(shape, E2M1)


def e4m3(*shape: int) -> jax.Array:
  return ones(shape, E4M3)


def f32(*shape: int) -> jax.Array:
  return ones(shape, np.float32)


def mxfp8(*shape: int, axis: int = -1) -> jp.ScaledArray:
  scale = list(shape)
  scale[axis] //= 32
  return jp.ScaledArray(mx(*shape), e8m0(*scale), None, jp.MXFP8)


def unchecked(
  values: Any, scale: Any, global_scale: Any, format: jp.BlockFormat
) -> jp.ScaledArray:
  """A `ScaledArray` as a pytree operation may make it, never validated."""
  children = (values, scale, global_scale)
  return jp.ScaledArray.tree_unflatten((format, "linear"), children)


def swizzled(rows: int, k: int) -> jp.ScaledArray:
  scale = jp.swizzle_scale(e8m0(rows, k // 32))
  return jp.ScaledArray(
    mx(rows, k), scale, None, jp.MXFP8, scale_layout="swizzled_128x4"
  )


@dataclasses.dataclass(frozen=True)
class Malformed:
  """A call and what must be raised.

  Attributes:
    error: the exact type.
    fragments: what its message contains: the argument, and the values.
    arrays: keyword arguments that are traced. A well-formed call of
      lhs (4, 64) and rhs (6, 64), both MXFP8, fills in what is left out.
    static: keyword arguments that are not.
  """

  error: type[Exception]
  fragments: tuple[str, ...]
  arrays: dict[str, Any] = dataclasses.field(default_factory=dict)
  static: dict[str, Any] = dataclasses.field(default_factory=dict)


WELL_FORMED: Final[Callable[[], dict[str, Any]]] = lambda: {
  "lhs": mx(4, 64),
  "lhs_scale": e8m0(4, 2),
  "rhs": mx(6, 64),
  "rhs_scale": e8m0(6, 2),
}


def numbers_error(value: Any, *fragments: str, **arrays: Any) -> Malformed:
  return Malformed(
    TypeError,
    ("dimension_numbers", *fragments),
    arrays,
    {"dimension_numbers": value},
  )


def type_error(*fragments: str, **arrays: Any) -> Malformed:
  return Malformed(TypeError, fragments, arrays)


def static_error(
  error: type[Exception], *fragments: str, **static: Any
) -> Malformed:
  return Malformed(error, fragments, {}, static)


def run(malformed: Malformed, mode: str) -> None:
  arrays = {**WELL_FORMED(), **malformed.arrays}
  static = malformed.static
  arrays = {k: v for k, v in arrays.items() if k not in static}
  function = lambda arrays: jp.block_scaled_dot(**arrays, **static)
  if mode == "eager":
    function(arrays)
  elif mode == "eval_shape":
    jax.eval_shape(function, arrays)
  elif mode == "jit":
    jax.jit(function).trace(arrays)
  else:
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), arrays)
    jax.vmap(function)(stacked)
