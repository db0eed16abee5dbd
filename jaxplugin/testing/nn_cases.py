# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""NumPy operands and targets for the tests of the `nn` drop-ins."""

import dataclasses

import jax
import numpy as np

import jaxplugin as jp
from jaxplugin import nn
from jaxplugin.core import formats
from jaxplugin.dot import reference
from jaxplugin.testing import contract, transformations

E4M3, E5M2, E2M1 = formats.E4M3, formats.E5M2, formats.E2M1
E8M0 = formats.E8M0

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
JAX_NN_RUNS_ON_CPU = JAX_VERSION >= (0, 12)

NT_2D = (((1,), (1,)), ((), ()))
NT_3D = (((2,), (2,)), ((0,), (0,)))

# Dequantizing with an f32 scale, and a plain f32 operand, round once a side.
SCALE_ROUNDING_BOUND = 2 * 2.0**-24

# The device that each implementation is best at.
BEST_TARGETS = {
  "cudnn": jp.named_target("b200", cudnn="9.13"),
  "triton": jp.named_target("b200", cudnn="9.13"),
  "cpu": jp.named_target("cpu"),
}


def rng_of(*seed):
  return np.random.default_rng([20261207, *seed])


# Block-scaled operands of any dtypes, in NumPy.


def repeated(scale, shape):
  """f64 scale, repeated in every dimension up to `shape`."""
  scale = scale.astype(np.float64)
  for axis, size in enumerate(shape):
    if scale.shape[axis]:
      scale = np.repeat(scale, size // scale.shape[axis], axis)
  return scale


def dequantized(values, scale):
  if scale is None:
    return values.astype(np.float64)
  with np.errstate(invalid="ignore"):
    return values.astype(np.float64) * repeated(scale, values.shape)


def small_integers(rng, shape, dtype):
  """-1, 0, 1 or 2; without sign 0, 1 or 2."""
  low = 0 if dtype.kind == "u" or dtype == np.bool_ else -1
  high = 2 if dtype == np.bool_ else 3
  return rng.integers(low, high, shape).astype(np.float32).astype(dtype)


def small_scale(rng, shape, dtype):
  """1 or 2: with `small_integers` and k <= 64, sums are exact even in f16."""
  return rng.integers(1, 3, shape).astype(np.float32).astype(dtype)


def random_values(rng, shape, dtype):
  if dtype in (E4M3, E5M2, E2M1):
    return reference.finite_codes(rng, shape, dtype)
  if dtype.kind == "i":
    return rng.integers(-100, 101, shape).astype(dtype)
  return rng.normal(size=shape).astype(dtype)


def random_scale(rng, shape, dtype):
  if dtype == E8M0:
    return rng.integers(97, 158, shape, np.uint8).view(E8M0)
  if dtype.kind == "i":
    return rng.integers(1, 20, shape).astype(dtype)
  magnitude = np.exp2(rng.uniform(-6, 6, shape))
  return magnitude.astype(np.float32).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Side:
  """Shape and dtypes of an operand and of its scale (None: unscaled)."""

  shape: tuple
  dtype: np.dtype
  scale_shape: tuple | None = None
  scale_dtype: np.dtype | None = None

  def make(self, rng, values=small_integers, scale=small_scale):
    x = values(rng, self.shape, self.dtype)
    if self.scale_shape is None:
      return x, None
    return x, scale(rng, self.scale_shape, self.scale_dtype)


def mx(shape, axis, dtype=E4M3, block=32, scale_dtype=E8M0):
  scale = tuple(s // block if d == axis else s for d, s in enumerate(shape))
  return Side(shape, dtype, scale, scale_dtype)


def scaled_dot(
  lhs, rhs, numbers=NT_2D, dtype=contract.F32, function=nn.scaled_dot, **options
):
  """Returns `function` of two pairs (values, scale)."""
  return function(
    *(lhs[0], rhs[0]),
    lhs_scale=lhs[1],
    rhs_scale=rhs[1],
    dimension_numbers=numbers,
    preferred_element_type=dtype,
    **options,
  )


def bound_configs(function, *args):
  """The forms of the calls of all block_scaled_dots that a function calls."""
  jaxpr = jax.make_jaxpr(function)(*args).jaxpr
  return [eqn.params["call"] for eqn in transformations.dots_of(jaxpr)]
