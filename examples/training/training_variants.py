# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The variants of the runs: the matmuls of linear layers.

A format's name is its recipe. "-no-..." is the recipe without one of its
parts, and "-bare" is the recipe without any of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

import jaxplugin as jp

# (lhs, rhs, dimension_numbers, precision, preferred_element_type, *, key)
DotGeneral = Callable[..., jax.Array]

# The variant that all others are compared with.
BASELINE: Final = "f32"


def f32(
  lhs: jax.Array,
  rhs: jax.Array,
  dimension_numbers: Any,
  precision: Any = None,
  preferred_element_type: Any = None,
  *,
  key: jax.Array | None = None,
) -> jax.Array:
  del key  # nothing is random
  return jax.lax.dot_general(
    lhs, rhs, dimension_numbers, precision, preferred_element_type
  )


def bf16(
  lhs: jax.Array,
  rhs: jax.Array,
  dimension_numbers: Any,
  precision: Any = None,
  preferred_element_type: Any = None,
  *,
  key: jax.Array | None = None,
) -> jax.Array:
  """Operands, result and gradients rounded to bf16; sums in f32."""
  del key, precision, preferred_element_type
  product = jax.lax.dot_general(
    lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16), dimension_numbers
  )
  return product.astype(lhs.dtype)


def _without(recipe: jp.training.Recipe, *parts: str) -> jp.training.Recipe:
  """The recipe with parts of it switched off, by their names."""
  off = {name: _OFF[name] for name in parts}
  return dataclasses.replace(recipe, **off)


_OFF: Final = {
  "weight_2d": False,
  "wgrad_hadamard": None,
  "dgrad_hadamard": None,
  "stochastic_rounding": False,
}
_NVFP4: Final = jp.training.NVFP4_RECIPE
_MXFP4: Final = jp.training.MXFP4_RECIPE

RECIPES: Final[dict[str, jp.training.Recipe]] = {
  "mxfp8": jp.training.MXFP8_RECIPE,
  "nvfp4": _NVFP4,
  "nvfp4-no-2d": _without(_NVFP4, "weight_2d"),
  "nvfp4-no-hadamard": _without(_NVFP4, "wgrad_hadamard"),
  "nvfp4-no-stochastic": _without(_NVFP4, "stochastic_rounding"),
  "nvfp4-bare": _without(
    _NVFP4, "weight_2d", "wgrad_hadamard", "stochastic_rounding"
  ),
  "nvfp4-mxfp8-grads": dataclasses.replace(
    _without(_NVFP4, "stochastic_rounding"), grad_format=jp.MXFP8
  ),
  "mxfp4": _MXFP4,
  "mxfp4-bare": _without(_MXFP4, *(name for name in _OFF)),
  "fp8-blocks": jp.training.FP8_BLOCK_RECIPE,
  "int8-rows": jp.training.INT8_RECIPE,
}

VARIANTS: Final[dict[str, DotGeneral]] = {"f32": f32, "bf16": bf16} | {
  name: jp.dot_general(recipe=recipe, weight="rhs")
  for name, recipe in RECIPES.items()
}
