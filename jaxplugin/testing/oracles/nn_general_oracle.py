# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A reference of `scaled_dot_general` in NumPy.

It implements matmuls with any dimension numbers a second time. It also has the
operands and configs of the tests.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import nn
from jaxplugin.core import formats
from jaxplugin.testing import contract, nn_cases
from jaxplugin.testing.oracles import quantization_oracle

E5M2 = formats.E5M2
rng_of = nn_cases.rng_of

# An f32 product of unquantized numbers: n terms, each product and each sum
# rounded once, in any order, are within n * 2^-24 * sum|a * b|.
F32_ROUNDING = 2.0**-24

E4M3_MAX, E2M1_MAX = 448.0, 6.0
SIZES = {"a": 2, "b": 3, "k": 40, "l": 3, "m": 5, "n": 7, "p": 2, "q": 3}
MODES = ("mxfp8", "mxfp4", "nvfp4")
GLOBAL_SCALE = 2.0**-9


def quantize(x, mode, global_scale=None, dtype=None):
  """f64 values of `x`, blocked along its last axis and padded."""
  format = formats.by_name("mxfp8_e5m2" if dtype == E5M2 else mode)
  size = x.shape[-1]
  widths = [(0, 0)] * (x.ndim - 1) + [(0, -size % format.block_size)]
  x = np.pad(np.asarray(x, np.float32), widths)
  return quantization_oracle.rounded_to(x, format, global_scale)[..., :size]


def product(lhs, rhs, names, quantize_lhs, quantize_rhs):
  """f64 einsum of quantized operands, and of their magnitudes.

  Quantization is along the contracted letters, in the order of lhs, as one.
  `names` is an einsum like "bmk,bnk->bmn".
  """
  (lhs_names, rhs_names), out = split(names)
  batch = [c for c in lhs_names if c in rhs_names and c in out]
  contracted = [c for c in lhs_names if c in rhs_names and c not in out]

  def flat(x, own, quantize):
    free = [c for c in own if c not in batch and c not in contracted]
    order = "".join(batch + free + contracted)
    x = np.einsum(f"{''.join(own)}->{order}", np.asarray(x, np.float64))
    lead = x.shape[: len(batch) + len(free)]
    x = quantize(x.reshape(*lead, math.prod(x.shape[len(lead) :])))
    return x, "".join(batch + free)

  lhs, lhs_lead = flat(lhs, lhs_names, quantize_lhs)
  rhs, rhs_lead = flat(rhs, rhs_names, quantize_rhs)
  equation = f"{lhs_lead}Z,{rhs_lead}Z->{out}"
  return (
    np.einsum(equation, lhs, rhs),
    np.einsum(equation, np.abs(lhs), np.abs(rhs)),
  )


def split(names):
  operands, out = names.split("->")
  return operands.split(","), out


def numbers_of(names):
  """`lax.dot_general`'s dimension numbers of an einsum."""
  (lhs, rhs), out = split(names)
  batch = [c for c in out if c in lhs and c in rhs]
  contracted = [c for c in lhs if c in rhs and c not in out]
  dims = lambda own, letters: tuple(own.index(c) for c in letters)
  return (
    (dims(lhs, contracted), dims(rhs, contracted)),
    (dims(lhs, batch), dims(rhs, batch)),
  )


def floats(seed, names, dtype=np.float32):
  shape = tuple(SIZES[c] for c in names)
  return rng_of(seed).normal(size=shape).astype(dtype)


def config(mode, global_scale=GLOBAL_SCALE):
  if mode != "nvfp4":
    return nn.get_scaled_dot_general_config(mode)
  return nn.get_scaled_dot_general_config(mode, jnp.float32(global_scale))


def quantizer(mode, global_scale=GLOBAL_SCALE, dtype=None):
  return lambda x: quantize(x, mode, global_scale, dtype)


def assert_product(
  actual, lhs, rhs, quantize_lhs, quantize_rhs=None, names="mk,nk->mn"
):
  """Checks an f32 result; `quantize_rhs` is `quantize_lhs` by default."""
  exact, magnitude = product(
    lhs, rhs, names, quantize_lhs, quantize_rhs or quantize_lhs
  )
  bound = contract.DOT_BOUND * magnitude
  contract.assert_within(actual, exact, bound, contract.F32)


def dot(lhs, rhs, configs, names="mk,nk->mn", module=nn, **options):
  """Calls `module.scaled_dot_general` with the numbers of an einsum."""
  return module.scaled_dot_general(
    lhs, rhs, numbers_of(names), configs=configs, **options
  )


def dot_and_gradients(lhs, rhs, configs, *args, g=None, **options):
  """Returns the result of `dot`, and gradients for `g` or for the result."""
  function = lambda lhs, rhs: dot(lhs, rhs, configs, *args, **options)
  out, vjp = jax.vjp(function, lhs, rhs)
  return out, *vjp(out if g is None else g)


def expected_results(names, mode, arrays, global_scales):
  """f64 (exact, bound) of `scaled_dot_general` and of both gradients.

  Args:
    names: the einsum.
    mode: that of all three configs.
    arrays: lhs, rhs and the gradient of the result.
    global_scales: of lhs and of rhs.
  """
  lhs, rhs, g = arrays
  (lhs_names, rhs_names), out = split(names)
  q_lhs, q_rhs = (quantizer(mode, scale) for scale in global_scales)
  exact, magnitude = product(lhs, rhs, names, q_lhs, q_rhs)
  results = [(exact, contract.DOT_BOUND * magnitude)]
  for x, scale, other, q_other, equation in (
    (lhs, global_scales[0], rhs, q_rhs, f"{out},{rhs_names}->{lhs_names}"),
    (rhs, global_scales[1], lhs, q_lhs, f"{out},{lhs_names}->{rhs_names}"),
  ):
    if mode != "nvfp4":
      exact, magnitude = product(g, other, equation, quantizer(mode), q_other)
      results.append((exact, contract.DOT_BOUND * magnitude))
      continue
    # In high precision, and zero where x was clipped.
    same = lambda x: x
    exact, magnitude = product(g, other, equation, same, same)
    passes = np.abs(x.astype(np.float64)) <= scale * E2M1_MAX * E4M3_MAX
    num_terms = min(g.size, other.size)
    results.append(
      (exact * passes, num_terms * F32_ROUNDING * magnitude * passes)
    )
  return results
