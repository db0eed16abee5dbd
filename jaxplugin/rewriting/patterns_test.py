# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Norms and activations of libraries are found, and matmuls fused with them."""

import dataclasses
import functools
import math

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx
from jax import lax
from jax.scipy import special, stats
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.quantization import prologues
from jaxplugin.rewriting import patterns
from jaxplugin.testing.models import normal

SHAPE = (2, 32, 64)
SIZE = SHAPE[-1]
RMS, RMS_ROWS = "rms_norm", "rms_norm with weight"
LAYER, LAYER_ROWS = "layer_norm with weight", "layer_norm with weight, bias"
SILU, GELU = "silu_and_mul with up", "gelu_and_mul with up"


def mean(x):
  return jnp.mean(x, -1, keepdims=True)


def linen(module):
  params = {"scale": normal(SIZE), "bias": normal(SIZE) / 8}
  names = (
    ("scale", "bias") if getattr(module, "use_bias", False) else ("scale",)
  )
  return lambda x, w, u: module.apply(
    {"params": {name: params[name] for name in names}}, x
  )


def of_nnx(cls, dtype):
  module = cls(SIZE, dtype=dtype, rngs=nnx.Rngs(0))
  return lambda x, w, u: module(x)


def llama(x, w, u=None):
  h = x.astype(jnp.float32)
  h = h * lax.rsqrt(mean(h * h) + 1e-6)
  return w * h.astype(x.dtype)


def gemma(x, w, u=None):
  h = x.astype(jnp.float32)
  return (h / jnp.sqrt(mean(jnp.square(h)) + 1e-6) * (1 + w)).astype(x.dtype)


def by_hand(x, w, u):
  c = x - mean(x)
  return w * (c * lax.rsqrt(mean(c * c) + 1e-5)) + u[0, 0]


def of_variance(x, w, u):
  return (x - mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * w


def silu(x, w, u):
  return jax.nn.silu(x) * u


def gelu(x, w, u):
  return jax.nn.gelu(x, approximate=True) * u


def rows(groups):
  """Returns (name, function, key of its group) for `named_parameters`."""
  return [(n, f, key) for key, each in groups.items() for n, f in each.items()]


def joined(x, u):
  return jnp.concatenate([x, u], -1)


def split_silu(x):
  gate, up = jnp.split(x, 2, axis=-1)
  return silu(gate, None, up)


def sliced_gelu(x):
  return gelu(x[..., :SIZE], None, x[..., SIZE:])


def swigluoai(gate, up, alpha=1.702, limit=7.0):
  """The activation of gpt-oss, as its code computes it."""
  gate, up = jnp.clip(gate, None, limit), jnp.clip(up, -limit, limit)
  return gate * jax.nn.sigmoid(gate * alpha) * (up + 1)


def interleaved(x, *, bias=None, pairs=False):
  x = 4 * x if bias is None else 4 * x + bias
  if pairs:
    return swigluoai(*jnp.unstack(x.reshape(*x.shape[:-1], -1, 2), axis=-1))
  return swigluoai(x[..., ::2], x[..., 1::2])


ROOT = 2.0**0.5


def in_f32(function):
  """Returns a function of any float dtype from one that does not take bf16."""
  return lambda x: function(x.astype(jnp.float32)).astype(x.dtype)


exact_gelu = functools.partial(jax.nn.gelu, approximate=False)
# Ways to write the exact gelu of x.
EXACT_GELUS = {
  "of_jax": exact_gelu,
  "of_linen": lambda x: nn.gelu(x, approximate=False),
  "cdf": in_f32(lambda x: x * stats.norm.cdf(x)),
  "cdf_first": in_f32(lambda x: stats.norm.cdf(x, 0.0, 1.0) * x),
  "cdf_of_negative": in_f32(lambda x: x * (1 - stats.norm.cdf(-x))),
  "survival_function": in_f32(lambda x: x * (1 - stats.norm.sf(x))),
  "ndtr": in_f32(lambda x: x * special.ndtr(x)),
  "ndtr_of_products": in_f32(lambda x: special.ndtr(x) * 2 * x / 2),
  "quotient": lambda x: 0.5 * x * (1 + special.erf(x / ROOT)),
  "half_of_x": lambda x: x / 2 * (1 + lax.erf(x / ROOT)),
  "x_first": lambda x: x * 0.5 * (1.0 + lax.erf(x / math.sqrt(2.0))),
  "half_last": lambda x: x * (1 + lax.erf(x / ROOT)) * 0.5,
  "half_of_erf": lambda x: x * ((lax.erf(x / ROOT) + 1) / 2),
  "erf_first": lambda x: (lax.erf(x / ROOT) + 1.0) * 0.5 * x,
  "distributed": lambda x: x * (0.5 + 0.5 * lax.erf(x / ROOT)),
  "distributed_quotient": lambda x: (lax.erf(x / ROOT) / 2 + 0.5) * x,
  "negative": lambda x: 0.5 * x * (1 - lax.erf(-x / ROOT)),
  "product": lambda x: 0.5 * x * (1 + lax.erf(x * 0.7071067811865476)),
  "short_product": lambda x: 0.5 * x * (1 + lax.erf(0.70710678 * x)),
  "short_quotient": lambda x: 0.5 * x * (1 + lax.erf(x / 1.4142135)),
  "root_of_jax": lambda x: (
    0.5 * x * (1 + lax.erf(x / jnp.sqrt(2).astype(x.dtype)))
  ),
  "root_of_numpy": lambda x: (
    0.5 * x * (1 + lax.erf(x / np.sqrt(2.0).astype(x.dtype)))
  ),
  "rsqrt": lambda x: (
    0.5 * x * (1 + lax.erf(x * lax.rsqrt(jnp.array(2, x.dtype))))
  ),
  "power": lambda x: (
    0.5 * x * (1 + lax.erf(x * jnp.array(2, x.dtype) ** -0.5))
  ),
  "power_of_jax": lambda x: (
    0.5 * x * (1 + lax.erf(x / jnp.power(2.0, 0.5).astype(x.dtype)))
  ),
  "quotient_of_numbers": lambda x: (
    0.5 * x * (1 + lax.erf(x * (1 / jnp.sqrt(2.0)).astype(x.dtype)))
  ),
  "erfc": lambda x: 0.5 * x * lax.erfc(-x / ROOT),
  "erfc_of_negative_quotient": lambda x: 0.5 * x * special.erfc(-(x / ROOT)),
  "erfc_of_product": lambda x: x * lax.erfc(x * (-1 / ROOT)) / 2,
  "two_minus_erfc": lambda x: 0.5 * x * (2 - lax.erfc(x / ROOT)),
  "one_minus_erfc": lambda x: x * (1 - 0.5 * lax.erfc(x / ROOT)),
  # torch.export decomposes torch.nn.functional.gelu in this order, in f32.
  "torch": in_f32(lambda x: x * 0.5 * (lax.erf(x * 0.7071067811865476) + 1)),
  # torch.onnx exports these constants as arrays.
  "onnx": lambda x: (
    (x * (lax.erf(x / jnp.array(1.4142135381698608, x.dtype)) + 1.0))
    * jnp.array(0.5, x.dtype)
  ),
}


def matched(dtype):
  """Returns functions by the name of their prologue and its epsilon."""
  return {
    (RMS_ROWS, 1e-6): {
      "linen_rms": linen(nn.RMSNorm(dtype=dtype)),
      "nnx_rms": of_nnx(nnx.RMSNorm, dtype),
      "llama": llama,
      "jitted": jax.jit(llama),
      "checkpointed": jax.checkpoint(llama),
      "gemma": gemma,
      "own_rms": lambda x, w, u: jp.nn.rms_norm(x, w),
      "norm_of_norm": lambda x, w, u: llama(llama(x, w), w),
      "norm_of_silu": lambda x, w, u: llama(silu(x, w, u), w),
      "root_of_rows": lambda x, w, u: (
        x * lax.rsqrt(jnp.mean(x * x, -1) + 1e-6)[..., None] * w
      ),
      "reshaped": lambda x, w, u: llama(x, w).reshape(-1, SIZE),
    },
    (LAYER_ROWS, 1e-6): {
      "linen_layer": linen(nn.LayerNorm(dtype=dtype)),
      "nnx_layer": of_nnx(nnx.LayerNorm, dtype),
    },
    (LAYER, 1e-6): {
      "linen_slow_variance": linen(
        nn.LayerNorm(dtype=dtype, use_fast_variance=False, use_bias=False)
      ),
    },
    (LAYER_ROWS, 1e-5): {
      "own_layer": lambda x, w, u: jp.nn.layer_norm(x, w, w),
      "layer_by_hand": by_hand,
    },
    (RMS, 1e-6): {
      "without_weight": lambda x, w, u: llama(x, 1.0),
      "power": lambda x, w, u: x * (mean(x * x) + 1e-6) ** -0.5,
    },
    (LAYER, 1e-5): {"of_variance": of_variance},
    ("layer_norm", 1e-5): {
      "standardize": lambda x, w, u: jax.nn.standardize(x)
    },
    (SILU, 0): {
      "silu": silu,
      "silu_by_hand": lambda x, w, u: u * (x * jax.nn.sigmoid(x)),
      "silu_of_products": lambda x, w, u: silu(x * w, w, u * w),
      "silu_of_other_slices": lambda x, w, u: silu(x[..., 32:], w, x[..., :32]),
      "silu_with_one_bias": lambda x, w, u: silu(x + w, None, u),
      "silu_of_a_clipped_gate": lambda x, w, u: silu(
        jnp.minimum(x, 0.5), None, jnp.clip(u, -0.5, 0.5)
      ),
      "swish": lambda x, w, u: nn.swish(x) * u,
      "own_silu_and_mul": lambda x, w, u: jp.nn.silu_and_mul(x, u),
    },
    ("silu_and_mul with split halves", 0): {
      "silu_of_split": lambda x, w, u: split_silu(joined(x, u)),
      "silu_of_swapped_halves": lambda x, w, u: split_silu(
        joined(x, u)[..., ::-1]
      ),
      "split_and_reshaped": lambda x, w, u: split_silu(joined(x, u)).reshape(
        -1, SIZE
      ),
    },
    ("gelu_and_mul with split halves", 0): {
      "gelu_of_slices": lambda x, w, u: sliced_gelu(joined(x, u)),
      "own_gelu_and_mul": lambda x, w, u: jp.nn.gelu_and_mul(joined(x, u)),
    },
    ("swigluoai with up", 0): {
      "swigluoai": lambda x, w, u: swigluoai(4 * x, 4 * u),
      "swigluoai_of_another_limit": lambda x, w, u: swigluoai(
        x, u, alpha=-0.5, limit=1.0
      ),
      "swigluoai_of_clamp": lambda x, w, u: (
        (1 + lax.clamp(u.dtype.type(-0.5), u, u.dtype.type(0.5)))
        * (gate := jnp.minimum(0.5, x))
        * jax.nn.sigmoid(gate)
      ),
      "swigluoai_of_swapped_pairs": lambda x, w, u: swigluoai(
        *jnp.unstack(joined(x, u).reshape(2, 32, -1, 2), axis=-1)[::-1]
      ),
      "own_swigluoai": lambda x, w, u: jp.nn.swigluoai(x, u),
    },
    ("swigluoai with interleaved halves", 0): {
      "interleaved": lambda x, w, u: interleaved(joined(x, u)),
      "interleaved_pairs": lambda x, w, u: interleaved(
        joined(x, u), pairs=True
      ),
    },
    ("swigluoai with bias, interleaved halves", 0): {
      "interleaved_with_bias": lambda x, w, u: interleaved(
        joined(x, u), bias=jnp.concatenate([w, w + 1])
      ),
    },
    ("swigluoai with split halves", 0): {
      "swigluoai_of_split": lambda x, w, u: swigluoai(
        *jnp.split(joined(x, u), 2, -1)
      ),
      "swigluoai_of_paired_halves": lambda x, w, u: swigluoai(
        *jnp.unstack(joined(x, u).reshape(2, 32, 2, -1), axis=-2)
      ),
    },
    ("silu_and_mul with up, bias", 0): {
      "silu_with_bias": lambda x, w, u: silu(x + w, None, w * 2 + u)
    },
    ("silu", 0): {
      "only_silu": lambda x, w, u: jax.nn.silu(x),
      "only_silu_by_hand": lambda x, w, u: jax.nn.sigmoid(x) * x,
      "only_silu_of_a_number": lambda x, w, u: jax.nn.silu(2 * x),
    },
    ("gelu", 0): {
      "only_gelu": lambda x, w, u: nn.gelu(x),
      "gelu_of_haiku": lambda x, w, u: hk.transform(
        lambda x: hk.Sequential([hk.Flatten(2), jax.nn.gelu])(x)
      ).apply({}, None, x),
    },
    ("gelu with bias", 0): {
      "only_gelu_with_bias": lambda x, w, u: nn.gelu(
        (x + w).astype(jnp.float32)
      ).astype(x.dtype),
      "own_gelu": lambda x, w, u: jp.nn.gelu(x, bias=w),
    },
    ("relu", 0): {
      "relu": lambda x, w, u: jax.nn.relu(x),
      "relu_by_hand": lambda x, w, u: jnp.maximum(0, x),
      "relu_of_relu": lambda x, w, u: jax.nn.relu(jax.nn.relu(x) - 1),
    },
    ("relu with bias", 0): {
      "relu_with_bias": lambda x, w, u: jax.jit(nnx.relu)(w + x).reshape(
        -1, SIZE
      ),
      "own_relu": lambda x, w, u: jp.nn.relu(x, bias=w),
    },
    (GELU, 0): {
      "gelu": gelu,
      "gelu_by_hand": lambda x, w, u: (
        0.5
        * x
        * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x * x * x)))
        * u
      ),
    },
    ("silu with bias", 0): {"own_silu": lambda x, w, u: jp.nn.silu(x, bias=w)},
    ("exact_gelu with bias", 0): {
      "own_exact_gelu": lambda x, w, u: jp.nn.gelu(
        x, approximate=False, bias=w
      ),
      "exact_gelu": lambda x, w, u: exact_gelu(x + w),
    },
    ("exact_gelu_and_mul with up", 0): {
      "own_exact_gelu_and_mul": lambda x, w, u: jp.nn.gelu_and_mul(
        x, u, approximate=False
      ),
      "exact_gelu_and_mul": lambda x, w, u: nn.gelu(x, approximate=False) * u,
      "exact_gelu_of_products": lambda x, w, u: (
        u * x * (lax.erf(x.dtype.type(0.5**0.5) * x) + 1) / 2
      ),
    },
    ("exact_gelu", 0): {
      "exact_gelu_of_a_number": lambda x, w, u: exact_gelu(2 * x),
      **{
        f"exact_gelu_{name}": lambda x, w, u, f=f: f(x)
        for name, f in EXACT_GELUS.items()
      },
    },
  }


def selected(w, is_positive, size=jnp.abs):
  """Returns 0.5 + 0.5 * erf(w) as `ndtr`, with other functions of w."""
  z = size(w)
  tails = jnp.where(is_positive(w), 2 - lax.erfc(z), lax.erfc(z))
  return 0.5 * jnp.where(jnp.abs(w) < 0.7, 1 + lax.erf(w), tails)


def dropped(x):
  dropout = nn.Dropout(0.1, deterministic=False)
  return dropout.apply({}, x, rngs={"dropout": jax.random.key(0)})


def one_device():
  return jax.sharding.SingleDeviceSharding(jax.devices()[0])


# Functions by a part of the reason; None if nothing is like a pattern.
NEAR = {
  "its root is not that of a mean square": {
    "other_axis": lambda x, w, u: (
      x * lax.rsqrt(jnp.mean(x * x, -2, keepdims=True) + 1e-6)
    ),
    "sum": lambda x, w, u: (
      x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)
    ),
    "product_of_two": lambda x, w, u: x * lax.rsqrt(mean(x * u) + 1e-6) * w,
  },
  "mean is over dimensions [0, 1, 2]": {
    "all_axes": lambda x, w, u: x * lax.rsqrt(jnp.mean(x * x) + 1e-6)
  },
  "divided by 63, not by the 64 features": {
    "unbiased": lambda x, w, u: (
      (x - mean(x)) * lax.rsqrt(jnp.var(x, -1, ddof=1, keepdims=True) + 1e-5)
    ),
  },
  "the result is not x / sqrt": {
    "epsilon_after_root": lambda x, w, u: (
      x / (jnp.sqrt(mean(x * x)) + 1e-6) * w
    ),
    "square_of_another": lambda x, w, u: x * lax.rsqrt(mean(u * u) + 1e-6) * w,
    "subtraction_between": lambda x, w, u: llama(x, w) - u,
  },
  "its root is not that of a mean and one number": {
    "epsilon_of_rows": lambda x, w, u: x * lax.rsqrt(mean(x * x) + mean(u))
  },
  "the result is not (x - mean(x)) / sqrt": {
    "not_centered_above": lambda x, w, u: (
      x * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)
    ),
  },
  "something else than one bias for each feature is added to it": {
    "addition_between": lambda x, w, u: llama(x, w) + u
  },
  "a bias is added to an RMS norm": {
    "bias_without_mean": lambda x, w, u: llama(x, w) + w
  },
  "multiplied by something else than one weight": {
    "scaled": lambda x, w, u: 8 * llama(x, w),
    "weight_of_columns": lambda x, w, u: llama(x, u[:, :, :1]),
    "two_weights": lambda x, w, u: w * llama(x, u[:1, :1]),
  },
  "a reshape is between it and the matmul": {
    "columns_reshaped": lambda x, w, u: llama(x, w).reshape(2, 64, 32)
  },
  "a slice is between it and the matmul": {
    "slice_between": lambda x, w, u: llama(x, w)[:, -1:],
    "index_between": lambda x, w, u: llama(x, w)[:, -1],
    "slice_of_relu": lambda x, w, u: jax.nn.relu(x)[:, -1:],
  },
  "a gather is between it and the matmul": {
    "rows_taken": lambda x, w, u: llama(x, w)[:, jnp.array([3, 1])]
  },
  "a transpose is between it and the matmul": {
    "transpose_between": lambda x, w, u: silu(x, w, u).mT
  },
  "a stop_gradient is between it and the matmul": {
    "stop_gradient_between": lambda x, w, u: lax.stop_gradient(swigluoai(x, u))
  },
  "dropout or a mask is between it and the matmul": {
    "dropout_between": lambda x, w, u: dropped(llama(x, w)),
  },
  None: {
    "dropout_of_another": lambda x, w, u: dropped(llama(x, w) + u),
    "slice_of_another": lambda x, w, u: (llama(x, w) + u)[:, -1:],
    "quarter_of_erf": lambda x, w, u: x * (0.5 + 0.25 * lax.erf(x / ROOT)),
    "ndtr_with_swapped_tails": lambda x, w, u: (
      x * selected(x / ROOT, lambda w: w < 0)
    ),
    "ndtr_with_other_tails": lambda x, w, u: (
      x * selected(x / ROOT, lambda w: w > 1)
    ),
    "ndtr_of_two": lambda x, w, u: x * selected(x / ROOT, lambda w: u > 0),
    "ndtr_without_sizes": lambda x, w, u: (
      x * selected(x / ROOT, lambda w: w > 0, lambda w: w)
    ),
    "leaky_relu": lambda x, w, u: jax.nn.leaky_relu(x),
    "squared_relu": lambda x, w, u: jnp.square(jax.nn.relu(x)),
    "maximum_of_two": lambda x, w, u: jnp.maximum(x, u),
    "maximum_of_another_number": lambda x, w, u: jnp.maximum(x, 1),
    "relu_of_integers": lambda x, w, u: jnp.maximum(x.astype(int), 0).astype(
      x.dtype
    ),
    "tanh": lambda x, w, u: jnp.tanh(x) * u,
    "argument": lambda x, w, u: x,
  },
  "a sharding constraint is between it and the matmul": {
    "sharding_constraint": lambda x, w, u: lax.with_sharding_constraint(
      llama(x, w), one_device()
    ),
    "jit_with_shardings": lambda x, w, u: jax.jit(
      llama, out_shardings=one_device()
    )(x, w),
  },
  "not the tanh approx": {
    "gelu_of_another_constant": lambda x, w, u: (
      0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.044715 * x * x * x))) * u
    ),
    "softcap": lambda x, w, u: (1 + jnp.tanh(x)) * u,
  },
  "it is not gelu, of erf(0.707 * x)": {
    "erf_of_another_number": lambda x, w, u: x * (1 + lax.erf(0.7 * x)) / 2,
    "erf_of_a_product": lambda x, w, u: (
      x * (1 + lax.erf(np.float32(0.5**0.5) * x * u)) / 2
    ),
  },
  "it is not gelu, of erfc(-0.707 * x)": {
    "one_minus_erf": lambda x, w, u: 0.5 * x * (1 - lax.erf(x / ROOT)),
    "erfc_of_x": lambda x, w, u: 0.5 * x * lax.erfc(np.float32(0.5**0.5) * x),
  },
  "the result is not gelu(gate) * up": {
    "cdf_of_another_scale": lambda x, w, u: x * stats.norm.cdf(x, 0, 2),
    "cdf_of_another": lambda x, w, u: x * stats.norm.cdf(u),
    "survival_function": lambda x, w, u: x * stats.norm.sf(x),
    "erf_of_another": lambda x, w, u: (
      0.5 * x * (1 + lax.erf(u / np.float32(2**0.5)))
    ),
  },
  "it is x * sigmoid(alpha * x), not silu or gelu": {
    "only_quick_gelu": lambda x, w, u: x * jax.nn.sigmoid(1.702 * x)
  },
  "also multiplied by a number": {
    "exact_gelu_without_half": lambda x, w, u: (
      x * (1 + lax.erf(x / np.float32(2**0.5)))
    ),
    "gelu_without_half": lambda x, w, u: 2 * gelu(x, w, u),
    "half": lambda x, w, u: 0.5 * silu(x, w, u),
    "half_of_silu": lambda x, w, u: 0.5 * jax.nn.silu(x),
  },
  "a clip is between it and the matmul": {
    "relu6": lambda x, w, u: jax.nn.relu6(x)
  },
  "another value is added to it": {
    "another_added_to_silu": lambda x, w, u: jax.nn.silu(x) + u
  },
  "an operand has shape [1, 1, 64], not [2, 32, 64]": {
    "row_times_silu": lambda x, w, u: jax.nn.silu(x) * w
  },
  "a jitted or checkpointed function computes one of its operands": {
    "row_outside_of_jit": lambda x, w, u: jax.jit(lambda x: jax.nn.silu(x * 2))(
      x
    ),
  },
  "one of its factors is transposed, not all": {
    "transposed_factor": lambda x, w, u: jax.nn.silu(x).mT * u.mT
  },
  "two arrays are multiplied by the activation": {
    "two_factors": lambda x, w, u: jax.nn.silu(x) * u * jnp.tanh(u)
  },
  "the result is not gate * sigmoid(gate) * up": {
    "sigmoid_of_another": lambda x, w, u: x * jax.nn.sigmoid(u) * u[::-1],
    "glu": lambda x, w, u: jax.nn.sigmoid(x) * u,
  },
  "it is not gate * sigmoid(alpha * gate) * (up + 1) of min(gate, limit)": {
    "quick_gelu": lambda x, w, u: x * jax.nn.sigmoid(1.702 * x) * u,
    "gate_is_also_clipped_below": lambda x, w, u: swigluoai(
      jnp.maximum(x, -7), u
    ),
    "limits_differ": lambda x, w, u: swigluoai(jnp.minimum(x, 6), u),
    "up_plus_two": lambda x, w, u: (
      (g := jnp.minimum(x, 7))
      * jax.nn.sigmoid(1.702 * g)
      * (jnp.clip(u, -7, 7) + 2)
    ),
  },
  "the result is not gate * sigmoid(alpha * gate) * (up + 1)": {
    "up_is_clipped_above_only": lambda x, w, u: (
      jnp.minimum(x, 7)
      * jax.nn.sigmoid(1.702 * jnp.minimum(x, 7))
      * (jnp.minimum(u, 7) + 1)
    ),
    "sigmoid_of_the_unclipped_gate": lambda x, w, u: (
      jnp.minimum(x, 7) * jax.nn.sigmoid(1.702 * x) * (jnp.clip(u, -7, 7) + 1)
    ),
  },
}


def arrays(dtype):
  x, w = normal(*SHAPE, dtype=dtype), normal(SIZE, dtype=dtype)
  return x, w, normal(*SHAPE[::-1], dtype=dtype).T


class PatternsTest(parameterized.TestCase):
  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_norms_and_activations_of_libraries_are_found(self, dtype):
    functions = rows(matched(dtype))
    if dtype == jnp.bfloat16:  # The next test finds them.
      spelled = {f"exact_gelu_{name}" for name in EXACT_GELUS}
      functions = [row for row in functions if row[0] not in spelled]

    @jax.jit
    def compared(*args):
      results = {}
      for name, function, (wanted, epsilon) in functions:
        y = function(*args)
        found = patterns.find(y)
        self.assertEqual((found.name, found.reason), (wanted, ""), name)
        # bf16 code may round epsilon to bf16.
        np.testing.assert_allclose(
          found.call.prologue.epsilon, epsilon, rtol=2.0**-8
        )
        call = found.call.canonical(y.shape)
        own = prologues.compute(call.prologue, call.x, call.more)
        results[name] = (y, own[0])
      return results

    # Each row of a norm has magnitudes about 1. bf16 code rounds a few times.
    tolerance = 2.0**-18 if dtype == jnp.float32 else 2.0**-5
    for name, (y, own) in compared(*arrays(dtype)).items():
      np.testing.assert_allclose(
        own,
        np.asarray(y, np.float32),
        rtol=tolerance,
        atol=tolerance,
        err_msg=name,
      )

  @parameterized.parameters(jnp.float32, jnp.bfloat16, jnp.float16)
  def test_exact_gelu_is_found_with_factors_and_biases(self, dtype):
    forms = {
      "exact_gelu": lambda f, x, w, u: f(x),
      "exact_gelu with bias": lambda f, x, w, u: f(x + w),
      "exact_gelu_and_mul with up": lambda f, x, w, u: u * f(x),
      "exact_gelu_and_mul with up, bias": lambda f, x, w, u: (
        f(w + x) * (u + w)
      ),
    }

    def compared(*args):
      for spelling, function in EXACT_GELUS.items():
        for name, form in forms.items():
          found = patterns.find(form(function, *args))
          self.assertEqual((found.name, found.reason), (name, ""), spelling)
          self.assertFalse(found.has_custom_derivative)

    jax.make_jaxpr(compared)(*arrays(dtype))

  def test_long_computations_take_no_time(self):
    def of_many(x, w, s):
      for i in range(1500):
        x, s = (x * x, s * s) if i % 2 else (x + x, s + 1)
      return jnp.tanh(x) * s * w

    def product(x, w, s):
      y = of_many(x, w, s)
      return jax.nn.silu(y) * y * y * patterns_of(y)

    found = []
    patterns_of = lambda y: (found.append(patterns.find(y)), y)[1]
    args = *arrays(jnp.float32)[:2], jnp.float32(1)
    jax.make_jaxpr(lambda *args: patterns_of(product(*args)))(*args)
    self.assertIsNone(found[0])
    self.assertIsNone(found[1].call)

  def test_patterns_are_found_while_they_are_differentiated_and_mapped(self):
    found = []

    def loss(function, *args):
      found.append(patterns.find(y := function(*args)))
      return y.sum()

    args = arrays(jnp.float32)
    for _, function, (wanted, _) in rows(matched(jnp.float32)):
      f = functools.partial(loss, function)
      jax.make_jaxpr(jax.grad(f, argnums=(0, 1, 2)))(*args)
      self.assertEqual((found[-1].name, found[-1].reason), (wanted, ""))
    w = arrays(jnp.float32)[1]
    for shape in ((1, *SHAPE[1:]), (8, 4, SIZE)):
      f = lambda x, s=shape: found.append(
        patterns.find(llama(x[None], w).reshape(s))
      )
      jax.make_jaxpr(jax.vmap(f))(arrays(jnp.float32)[0])
      self.assertEqual(found[-1].call.x.shape, shape)

  @parameterized.named_parameters(*rows(NEAR))
  def test_near_misses_are_not_taken(self, function, reason):
    found = []
    jax.make_jaxpr(lambda *args: found.append(patterns.find(function(*args))))(
      *arrays(jnp.float32)
    )
    (result,) = found
    if reason is None:
      self.assertIsNone(result)
    else:
      self.assertIsNone(result.call)
      self.assertIn(reason, result.reason)


KEYS = ("gate", "up", "down")


def block(params, x):
  """A residual block of a Llama model, in the dtype of x."""
  h = llama(x, params["norm"])
  gate = h @ params["gate"]
  up = jnp.einsum("bsd,dh->bsh", h, params["up"])
  return x + (jax.nn.silu(gate) * up) @ params["down"]


def block_params(dtype=jnp.float32, layers=()):
  shapes = {"gate": (SIZE, 128), "up": (SIZE, 128), "down": (128, SIZE)}
  params = {n: normal(*layers, *s, dtype=dtype) / 8 for n, s in shapes.items()}
  return {"norm": 1 + normal(*layers, SIZE, dtype=dtype) / 8, **params}


def by_producers(weights, params, x):
  """The block by functions that quantize their results."""
  out = {"out_format": "mxfp8"}
  linear = functools.partial(jp.linear, preferred_element_type=x.dtype)
  h = jp.nn.rms_norm(x, params["norm"], epsilon=1e-6, **out)
  gate, up = linear(h, weights["gate"]), linear(h, weights["up"])
  return x + linear(jp.nn.silu_and_mul(gate, up, **out), weights["down"])


def fused(fn, **options):
  return jp.quantize_dots(fn, "mxfp8", fuse_activations=True, **options)


def accepted(fn, **options):
  options = {"activations": "mxfp8", "fuse_activations": True} | options
  return jp.accept_quantized(fn, **options)


def stored(params):
  where = lambda p: 0 if p.array.ndim == 2 else False
  return jp.quantize_params(params, "mxfp8", where=where)[0]


def outcomes(function, *args):
  return [(c.name, c.outcome) for c in jp.explain(function, *args).chains]


def prologues_of(function, *args):
  """Functions of prologues and blocked dimensions on a GPU."""
  h100 = jp.named_target("h100")
  found = jp.explain(function, *args, target=h100).quantizations
  return {
    (p.prologue.function, tuple(b.dims for b in p.blockings))
    for q in found
    for p in q.problems
    if getattr(p, "prologue", None)
  }


def sharded(function, count):
  mesh = jax.make_mesh(
    (1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  specs = (P("rows"), *[P()] * (count - 1))
  return jax.shard_map(
    function, mesh=mesh, in_specs=specs, out_specs=P("rows"), check_vma=False
  )


def with_rule(function):
  """Returns the function with its own derivative as a custom rule."""
  new = jax.custom_vjp(function)
  new.defvjp(functools.partial(jax.vjp, function), lambda vjp, g: vjp(g))
  return new


def scanned(function, x, **options):
  return lax.scan(function, x, length=2, **options)


def cast(x, dtype):
  """Returns x after a cast to another dtype and back."""
  return x.astype(dtype).astype(x.dtype)


def looped(function, x):
  """Returns the result of two trips of a `while` loop."""
  return lax.while_loop(
    lambda c: c[0] < 2, lambda c: (c[0] + 1, function(c[1])), (0, x)
  )[1]


SIGN = np.arange(32)[:, None] % 3 - 1
WITHIN = "silu: separate: the matmul is inside {}, and silu is not"
AROUND = "silu: separate: it is inside {}, and the matmul is not"
FUSED = "silu: fused"
# Functions of a weight [64, 64] and x [32, 64], by what is after silu.
BETWEEN = {
  "a cast": {
    "cast_to_f8": lambda w, x: cast(nn.silu(x), jnp.float8_e4m3fn) @ w,
    "cast_to_integers": lambda w, x: cast(nn.silu(x), int) @ w,
  },
  "a reshape": {
    "reshape_of_features": lambda w, x: nn.silu(x).reshape(-1, 32) @ w[:32]
  },
  "dropout or a mask": {
    "mask": lambda w, x: jnp.where(SIGN > 0, nn.silu(x), 0) @ w
  },
  "a select": {"select": lambda w, x: jnp.where(SIGN > 0, x, nn.silu(x)) @ w},
  "a concatenate": {
    "concatenate": lambda w, x: jnp.concatenate([x, nn.silu(x)]) @ w
  },
  "a pad": {"pad": lambda w, x: jnp.pad(nn.silu(x), ((0, 1), (0, 0))) @ w},
  "a reversal": {"reversal": lambda w, x: nn.silu(x)[::-1] @ w},
  "a broadcast": {"repeat": lambda w, x: jnp.repeat(nn.silu(x), 2, axis=0) @ w},
  "an update": {
    "update": lambda w, x: (
      lax.dynamic_update_slice(x, nn.silu(x[:1]), (0, 0)) @ w
    ),
    "rows_set": lambda w, x: x.at[jnp.arange(3)].set(nn.silu(x[:3])) @ w,
  },
  "a clip": {
    "clip": lambda w, x: jnp.clip(nn.silu(x), -1, 1) @ w,
    "clamp": lambda w, x: lax.clamp(-1.0, nn.silu(x), 1.0) @ w,
  },
  "an optimization barrier": {
    "barrier": lambda w, x: lax.optimization_barrier((x, nn.silu(x)))[1] @ w,
  },
  "an all-gather": {
    "all_gather": lambda w, x: sharded(
      lambda x, w: lax.all_gather(nn.silu(x), "rows", tiled=True) @ w, 2
    )(x, w),
  },
}
# Functions by the lines of `explain`.
OUTCOMES = {
  **{
    (f"silu: separate: {between} is between it and the matmul",): each
    for between, each in BETWEEN.items()
  },
  (FUSED,): {
    "alone": lambda w, x: nn.silu(x) @ w,
    "batch_added": lambda w, x: nn.silu(x)[None] @ w,
    "batch_dropped": lambda w, x: nn.silu(x[None])[0] @ w,
    "rows_in_jit": lambda w, x: jax.jit(nn.silu)(x) @ w,
    "in_checkpoint": lambda w, x: jax.checkpoint(lambda x, w: nn.silu(x) @ w)(
      x, w
    ),
    "in_scan": lambda w, x: scanned(lambda c, _: (nn.silu(c) @ w, 0), x),
    "in_while": lambda w, x: looped(lambda c: nn.silu(c) @ w, x),
    "in_cond": lambda w, x: lax.cond(
      x[0, 0] > 0, lambda x: nn.silu(x) @ w, lambda x: x, x
    ),
    "in_shard_map": lambda w, x: sharded(lambda x, w: nn.silu(x) @ w, 2)(x, w),
    "of_last_columns": lambda w, x: jax.vmap(
      lambda x: nn.silu(x) @ w, in_axes=1
    )(x[:, None]),
  },
  ("silu: fused; XLA also computes it for dot_general",): {
    "two_matmuls": lambda w, x: (lambda h: h @ w + h @ (2 * w))(nn.silu(x))
  },
  ("silu: fused; XLA also computes it for a result",): {
    "also_a_result": lambda w, x: (lambda h: (h @ w, h))(nn.silu(x))
  },
  (WITHIN.format("checkpoint"),): {
    "matmul_in_checkpoint": lambda w, x: jax.checkpoint(jnp.matmul)(
      nn.silu(x), w
    ),
  },
  (WITHIN.format("scan"), AROUND.format("scan")): {
    "carry": lambda w, x: (
      scanned(lambda c, _: (nn.silu(c @ w), 0), nn.silu(x))[0] @ w
    ),
  },
  (WITHIN.format("scan"),): {
    "slices_of_a_scan": lambda w, x: scanned(
      lambda c, h: (c, h @ w), x, xs=nn.silu(jnp.stack([x, x]))
    ),
    "constant_of_a_scan": lambda w, x: (
      lambda h: scanned(lambda c, _: (c, h @ w), x)
    )(nn.silu(x)),
    "rows_of_a_map": lambda w, x: lax.map(
      lambda row: row[None] @ w, nn.silu(x)
    ),
    "matmul_in_cond_in_scan": lambda w, x: (
      lambda h: scanned(
        lambda c, _: (c, lax.cond(c[0, 0] > 0, lambda: h @ w, lambda: c)), x
      )
    )(nn.silu(x)),
  },
  (WITHIN.format("jit"),): {
    "matmul_in_scan_in_jit": lambda w, x: jax.jit(
      lambda h: scanned(lambda c, _: (c, (h @ w)[None]), h)
    )(nn.silu(x)),
  },
  (WITHIN.format("while"), AROUND.format("while")): {
    "carry_of_while": lambda w, x: (
      looped(lambda c: nn.silu(c @ w), nn.silu(x)) @ w
    ),
  },
  (WITHIN.format("cond"),): {
    "matmul_in_cond": lambda w, x: lax.cond(
      x[0, 0] > 0, lambda h: h @ w, lambda h: h, nn.silu(x)
    ),
  },
  (AROUND.format("cond"),): {
    "silu_in_cond": lambda w, x: (
      lax.cond(x[0, 0] > 0, nn.silu, lambda x: x, x) @ w
    ),
  },
  (WITHIN.format("shard_map"),): {
    "matmul_in_shard_map": lambda w, x: sharded(jnp.matmul, 2)(nn.silu(x), w),
  },
  (AROUND.format("shard_map"),): {
    "silu_in_shard_map": lambda w, x: sharded(nn.silu, 1)(x) @ w
  },
  (WITHIN.format("custom_vjp_call"),): {
    "matmul_with_a_rule": lambda w, x: with_rule(jnp.matmul)(nn.silu(x), w)
  },
}
# Rows for `accept_quantized`.
ACCEPTED = (
  *("alone", "batch_added", "clip", "carry", "matmul_in_cond"),
  *("silu_in_cond", "matmul_in_shard_map", "silu_in_shard_map"),
  *("matmul_with_a_rule", "rows_of_a_map", "matmul_in_scan_in_jit"),
)
INSIDE = f"the matmul is inside {{}}, and {RMS_ROWS} is not"
# Functions of the block's parameters and x, by a part of the reason.
SEPARATE = {
  "a transpose is between it and the matmul": {
    "transposed": lambda p, x: llama(x, p["norm"]).mT @ p["norm"][:32],
  },
  INSIDE.format("checkpoint"): {
    "checkpointed": lambda p, x: (
      jax.checkpoint(jnp.matmul)(llama(x, p["norm"]), p["gate"])
    ),
  },
  INSIDE.format("jit"): {
    "jitted": lambda p, x: jax.jit(lambda x, w: x.reshape(-1, SIZE) @ w)(
      llama(x, p["norm"]), p["gate"]
    ),
  },
  None: {
    "a_row_is_added_in_jit": lambda p, x: (
      jax.jit(lambda x, y, w: (x + y.reshape(1, -1)) @ w)(
        llama(x, p["norm"]), np.ones(SIZE, np.float32), p["gate"]
      )
    ),
  },
  "added": {"added": lambda p, x: (llama(x, p["norm"]) + x) @ p["gate"]},
  "does not contract its last dimension": {
    "contracts_rows": lambda p, x: jnp.einsum(
      "bsd,sh->bdh", llama(x, p["norm"]), p["gate"][:32]
    ),
  },
}


class FusedMatmulsTest(parameterized.TestCase):
  @parameterized.named_parameters(*rows(OUTCOMES))
  def test_explain_names_the_reason(self, function, wanted):
    chains = jp.explain(fused(function), normal(SIZE, SIZE), normal(32, SIZE))
    found = [f"{c.name}: {c.outcome}" for c in chains.chains]
    self.assertEqual(found, [*wanted])

  @parameterized.named_parameters(
    row for row in rows(OUTCOMES) if row[0] in ACCEPTED
  )
  def test_explain_of_accept_quantized_names_the_reason(self, function, wanted):
    step = accepted(lambda p, x: function(p["w"], x))
    w_q = stored({"w": normal(SIZE, SIZE)})
    chains = jp.explain(step, w_q, normal(32, SIZE)).chains
    found = [f"{c.name}: {c.outcome}" for c in chains]
    self.assertEqual(found, [*wanted])

  def test_reshaped_rows_have_the_bits_of_producers(self):
    w, x = normal(SIZE, 32), normal(32, SIZE)
    w_q = jp.quantize(w.T, "mxfp8")
    wanted = jp.linear(jp.nn.silu(x, out_format="mxfp8"), w_q)
    for function in (
      lambda w, x: (jax.nn.silu(x)[None] @ w)[0],
      lambda w, x: jax.nn.silu(x[None])[0] @ w,
      lambda w, x: (jax.nn.silu(x)[:, None] @ w)[:, 0],
    ):
      np.testing.assert_array_equal(fused(function)(w, x), wanted)

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_result_has_the_bits_of_producers(self, dtype):
    params, x = block_params(dtype), normal(*SHAPE, dtype=dtype)

    @jax.jit
    def all_of_them(params, params_q, x):
      weights = {n: jp.quantize(params[n].T, "mxfp8") for n in KEYS}
      return (
        by_producers(weights, params, x),
        accepted(block)(params_q, x),
        fused(block)(params, x),
        jax.checkpoint(fused(block))(params, x),
        jax.vmap(fused(block), (None, 0))(params, x[:, None])[:, 0],
        lax.scan(lambda x, _: (fused(block)(params, x), None), x, length=1)[0],
        fused(lambda p, x: jax.vmap(functools.partial(block, p))(x[:, None]))(
          params, x
        )[:, 0],
      )

    first, *others = all_of_them(params, stored(params), x)
    for i, y in enumerate(others):
      np.testing.assert_array_equal(first, y, err_msg=str(i))

  @parameterized.parameters(
    ("silu", {}),
    ("gelu", {}),
    ("gelu", {"approximate": False}),
    ("relu", {}),
  )
  def test_activation_without_factors_has_the_bits_of_producers(
    self, name, options
  ):
    params = {
      "first": normal(SIZE, 128) / 8,
      "second": normal(128, SIZE) / 8,
      "bias": normal(128),
    }
    x = normal(*SHAPE, dtype=jnp.bfloat16)

    def model(p, x):
      x = jnp.tanh(x) @ p["first"] + p["bias"]
      return getattr(jax.nn, name)(x, **options) @ p["second"]

    @jax.jit
    def all_of_them(params, params_q, x):
      weights = {
        n: jp.quantize(params[n].T, "mxfp8") for n in params if "b" not in n
      }
      h_q = jp.quantize(jnp.tanh(x), "mxfp8")
      h = jp.linear(h_q, weights["first"], preferred_element_type=jnp.float32)
      h = getattr(jp.nn, name)(
        h, **options, bias=params["bias"], out_format="mxfp8"
      )
      return (
        jp.linear(h, weights["second"], preferred_element_type=jnp.float32),
        accepted(model)(params_q, x),
        fused(model)(params, x),
        jax.checkpoint(fused(model))(params, x),
        fused(lambda p, x: jax.vmap(functools.partial(model, p))(x))(params, x),
      )

    first, *others = all_of_them(params, stored(params), x)
    for i, y in enumerate(others):
      np.testing.assert_array_equal(first, y, err_msg=str(i))
    functions = (fused(model), params), (accepted(model), stored(params))
    for function, given in functions:
      self.assertEqual(
        outcomes(function, given, x),
        [(f"{'exact_' * bool(options)}{name} with bias", "fused")],
      )

  def test_layers_of_a_scan_are_fused_with_one_call_for_each_norm(self):
    params, x = block_params(layers=(2,)), normal(*SHAPE)

    def model(params, x):
      return lax.scan(lambda x, p: (block(p, x), None), x, params)[0]

    text = jax.jit(fused(model)).lower(params, x).compile().as_text()
    self.assertNotIn("rsqrt(", text)
    self.assertNotIn("exponential(", text)
    # One for both matmuls after the norm, and one for the last matmul.
    self.assertEqual(text.count('custom_call_target="jaxplugin_quantize"'), 2)

  def test_gradients_are_those_of_the_model_in_f64(self):
    # The loss is linear in the matmuls' results, and the backward matmuls are
    # not quantized, so quantizing changes no gradient.
    recipe = jp.training.Recipe(
      activation_format="mxfp8",
      weight_format="mxfp8",
      grad_format=None,
      quantize_dgrad=False,
      quantize_wgrad=False,
    )
    params, x, gate = block_params(), normal(*SHAPE), normal(2, 32, 128)
    ones = normal(2, 32, SIZE), normal(2, 32, 128)

    def loss(params, x, gate, ones, norm=llama):
      gated = (jax.nn.silu(gate) * gate[::-1, :, ::-1]) @ params["down"]
      normed = norm(x, params["norm"]) @ params["gate"]
      return (gated * ones[0]).sum() + (normed * ones[1]).sum()

    def exact_loss(*args):
      norm = lambda x, w: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
      return loss(*args, norm=lambda x, w: w * norm(x, w))

    def gradient(function):
      return jax.jit(jax.grad(function, (0, 1, 2)))

    step = jp.quantize_dots(loss, recipe, fuse_activations=True)
    got = gradient(step)(params, x, gate, ones)
    self.assertEqual(
      [o for _, o in outcomes(jax.grad(step), params, x, gate, ones)],
      ["fused; XLA also computes it for dot_general"] * 2,
    )
    with jax.enable_x64(True):
      exact = jax.tree.map(
        lambda a: jnp.asarray(np.asarray(a, np.float64)),
        (params, x, gate, ones),
      )
      want = gradient(exact_loss)(*exact)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(
        a, b, rtol=0, atol=1e-5 * abs(np.asarray(b)).max()
      )

  @parameterized.parameters("silu_and_mul", "rms_norm")
  def test_backward_pass_quantizes_prologues_along_both_axes(self, name):
    gate, up, w = normal(64, 128), normal(128, 64).T, normal(128, 32)
    ones = normal(64, 32)
    is_norm = name == "rms_norm"

    def loss(w, gate, up):
      y = llama(gate, up[0]) if is_norm else jax.nn.silu(gate) * up
      return ((y @ w) * ones).sum()

    # With the value, because the gradient of w does not use the forward matmul.
    step = jax.value_and_grad(fused(loss))
    self.assertIn((name, ((1,), (0,))), prologues_of(step, w, gate, up))
    _, got = jax.jit(step)(w, gate, up)
    y, up = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    if is_norm:
      y = y / np.sqrt(np.mean(y * y, -1, keepdims=True) + 1e-6) * up[0]
    else:
      y = y / (1 + np.exp(-y)) * up
    y, g = (
      np.asarray(jp.dequantize(jp.quantize(a, "mxfp8", axis=0)), np.float64)
      for a in (y.astype(np.float32), ones)
    )
    # A code next to a tie may differ: 2^-4 of one of 64 terms.
    np.testing.assert_allclose(got, y.T @ g, rtol=0, atol=0.02 * abs(got).max())
    self.assertLess(np.linalg.norm(got - y.T @ g), 1e-3 * np.linalg.norm(got))

  def test_prologue_before_a_backward_pass_is_computed_once(self):
    params, x = block_params(), normal(*SHAPE)
    step = jax.value_and_grad(fused(lambda p, x: block(p, x).sum()))
    self.assertEqual({note for _, note in outcomes(step, params, x)}, {"fused"})
    if jp.detect_target("cpu").cpu_kernels is None:
      return
    text = jax.jit(step).lower(params, x).as_text()
    # The norm of two matmuls, the activation, and its two gradients.
    self.assertEqual(text.count("along = 3"), 4)

  def test_prologue_of_transformed_values_is_not_fused(self):
    params, x = block_params(), normal(*SHAPE)
    loss = lambda params, x: block(params, x).sum()
    recipe = dataclasses.replace(
      jp.training.NVFP4_RECIPE, stochastic_rounding=False
    )
    function = jp.quantize_dots(loss, recipe, fuse_activations=True)
    for _, outcome in outcomes(function, params, x):
      self.assertRegex(
        outcome,
        "^fused; not in training, because the backward pass needs its values",
      )
    step = jax.grad(function)
    self.assertEmpty(prologues_of(step, params, x))
    for _, outcome in outcomes(step, params, x):
      self.assertStartsWith(
        outcome, "separate: the backward pass needs its values Hadamard"
      )

  def test_explain_names_other_readers_of_the_activations(self):
    def model(params, x, is_read):
      h = llama(x, params["norm"])
      gated = jax.nn.silu(h @ params["gate"]) * (h @ params["up"])
      result = gated @ params["down"]
      return (result + h, gated) if is_read else result

    params, x = block_params(), normal(*SHAPE)
    for is_read in (False, True):
      function = functools.partial(fused(model), is_read=is_read)
      (_, norm), _, (_, silu) = outcomes(function, params, x)
      self.assertEqual("XLA also computes it for add" in norm, is_read)
      self.assertEqual("XLA also computes it for a result" in silu, is_read)

  def test_number_in_the_gate_of_silu_is_a_part_of_it(self):
    w, x = normal(SIZE, 32), normal(32, SIZE)
    for scale in (lambda h: 0.125 * h, lambda h: h * 2):
      gated = lambda w, x, s=scale: (jax.nn.silu(s(x)) * (x + 1.5)) @ w
      ((_, outcome),) = outcomes(fused(gated), w, x)
      self.assertEqual(outcome, "fused")
      expected = jp.nn.silu_and_mul(scale(x), x + 1.5, out_format="mxfp8")
      np.testing.assert_array_equal(
        jax.jit(fused(gated))(w, x),
        jax.jit(lambda x, w: jp.linear(x, jp.quantize(w.T, "mxfp8")))(
          expected, w
        ),
      )

  @parameterized.parameters((1, False), (1, True), (2, True))
  def test_bias_may_be_on_either_side_of_few_rows(self, rows, is_first):
    def model(p, x):
      y = jax.nn.standardize(x) * p["scale"]
      return (p["bias"] + y if is_first else y + p["bias"]) @ p["w"]

    p = {"scale": normal(SIZE), "bias": normal(SIZE), "w": normal(SIZE, 32)}
    ((name, outcome),) = outcomes(fused(model), p, normal(rows, SIZE))
    self.assertEqual(name, "layer_norm with weight, bias")
    self.assertStartsWith(outcome, "fused")

  def test_chains_of_quantized_weights_have_the_layers_of_quantize_dots(self):
    class Block(nn.Module):
      @nn.compact
      def __call__(self, x, _):
        x = nn.Dense(SIZE, use_bias=False, name="up")(nn.RMSNorm()(x))
        w = self.param("w", nn.initializers.ones, (SIZE, SIZE))
        return jax.nn.standardize(x) @ w, None

    class Model(nn.Module):
      @nn.compact
      def __call__(self, x):
        x, _ = nn.remat(Block)(name="first")(x, None)
        layers = nn.scan(
          Block, variable_axes={"params": 0}, split_rngs={"params": True},
          length=2,
        )  # fmt: skip
        return layers(name="layers")(x, None)[0]

    def chains(function, params):
      found = jp.explain(function, params, jnp.ones((SIZE, SIZE))).chains
      return [(c.layer, c.source, c.name) for c in found]

    def plain(params, x):
      with jax.named_scope("scope"):
        x = model.apply({"params": params["model"]}, x)
      return jax.jit(jnp.matmul)(llama(x, jnp.ones(SIZE)), params["last"])

    model = Model()
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((64, 64)))
    params = {"model": shapes["params"], "last": normal(SIZE, SIZE)}
    params = jax.tree.map(lambda x: jnp.ones(x.shape), params)
    params_q, _ = jp.quantize_params(
      params,
      "mxfp8",
      where=lambda p: "scale" not in p.path and len(p.shape) - 2,
    )
    layers = chains(jp.quantize_dots(plain, "mxfp8"), params)
    self.assertEqual(
      chains(jp.accept_quantized(plain, activations="mxfp8"), params_q), layers
    )
    self.assertEqual(
      [layer for layer, _, _ in layers],
      [
        *["scope/Model/first/up", "scope/Model/first"],
        *["scope/Model/layers/up", "scope/Model/layers", "last"],
      ],
    )

  def test_norm_of_one_row_is_fused(self):
    w, x, weight = normal(SIZE, 32), normal(SIZE), normal(SIZE)
    model = fused(lambda w, x: llama(x, weight) @ w)
    ((name, outcome),) = outcomes(model, w, x)
    self.assertEqual(name, "rms_norm with weight")
    self.assertStartsWith(outcome, "fused")
    rows = jp.nn.rms_norm(x[None], weight, epsilon=1e-6, out_format="mxfp8")
    np.testing.assert_array_equal(
      jax.jit(model)(w, x),
      jax.jit(lambda x, w: jp.linear(x, jp.quantize(w.T, "mxfp8")))(rows, w)[0],
    )

  @parameterized.parameters((1, 1), (2, 1), (2, 2))
  def test_other_mapped_axes_are_the_reason(self, ndim, axis):
    w, weight = normal(SIZE, 32), normal(SIZE)
    x = jnp.moveaxis(normal(*[8] * ndim, SIZE), 0, axis)
    for norm in (llama, lambda x, weight: jax.nn.standardize(x) * weight):
      row = lambda x, w, n=norm: n(x, weight) @ w
      model = lambda w, x, r=row: jax.vmap(r, (axis, None))(x, w)
      ((_, outcome),) = outcomes(fused(model), w, x)
      self.assertRegex(
        outcome, "^separate: .* mean .*; vmap with in_axes=0 keeps the features"
      )

  def test_negative_epsilon_is_not_fused(self):
    w, x = normal(SIZE, 32), normal(32, SIZE)
    mean = lambda x: jnp.mean(x * x, -1, keepdims=True)
    norm = lambda w, x: (x * lax.rsqrt(mean(x) + -1e-3)) @ w
    ((_, outcome),) = outcomes(fused(norm), w, x)
    self.assertIn("its epsilon is negative or not finite", outcome)

  def test_products_without_weights_inside_of_jit_have_no_line(self):
    w, x = normal(SIZE, 32), normal(32, SIZE)

    def attention(w, x):
      return jax.jit(lambda h: h @ h.T)(llama(x, jnp.ones(SIZE))) + w.sum()

    self.assertEmpty(outcomes(fused(attention), w, x))

  def test_default_is_separate(self):
    params, x = block_params(jnp.bfloat16), normal(*SHAPE, dtype=jnp.bfloat16)
    plain = jp.quantize_dots(block, "mxfp8")
    self.assertEqual(
      outcomes(plain, params, x),
      [(RMS_ROWS, "separate: pass fuse_activations=True to quantize_dots")] * 2
      + [(SILU, "separate: pass fuse_activations=True to quantize_dots")],
    )
    self.assertEmpty(prologues_of(plain, params, x))
    text = jp.explain(plain, params, x).details()
    self.assertIn("\nnorms and activations before matmuls:\n", text)
    self.assertIn(f"{RMS_ROWS} before bfloat16[2, 32, 64] x", text)

  @parameterized.named_parameters(*rows(SEPARATE))
  def test_other_matmuls_are_separate(self, function, reason):
    self.check_separate(function, reason, "mxfp8")

  def test_recipes_that_cannot_fuse_are_separate(self):
    norm = lambda p, x: llama(x, p["norm"]) @ p["gate"]
    columns = lambda p, x: (llama(x[..., :48], p["norm"][:48]) @ p["gate"][:48])
    weights_only = jp.training.Recipe(
      activation_format=None, weight_format="mxfp8", grad_format=None
    )
    for function, reason, recipe in (
      (norm, "does not quantize activations", weights_only),
      (columns, "not whole blocks", jp.training.MXFP8_RECIPE),
    ):
      self.check_separate(function, reason, recipe)

  def check_separate(self, function, reason, recipe):
    params, x = block_params(), normal(*SHAPE)
    function = jp.quantize_dots(
      function, recipe, where=lambda site: True, fuse_activations=True
    )
    self.assertEmpty(prologues_of(function, params, x))
    found = [outcome for _, outcome in outcomes(function, params, x)]
    if reason is None:
      self.assertEmpty(found)
    else:
      self.assertLen(found, 1)
      self.assertStartsWith(found[0], "separate: ")
      self.assertIn(reason, found[0])

  @parameterized.parameters(
    ("fp8_128x128", "the matmul needs square blocks of fp8_128x128"),
    ("uint4_128", "no kernel fuses it with zero points, minima or a codebook"),
  )
  def test_formats_without_a_prologue_are_separate(self, format, reason):
    x, w = normal(3, 128), normal(128, 128)
    w_q, _ = jp.quantize_params({"kernel": w}, "mxfp8")
    model = lambda p, x: llama(x, jnp.ones(128)) @ p["kernel"]
    outcome, ys = [], []
    for fuse in (False, True):
      function = accepted(model, activations=format, fuse_activations=fuse)
      ys.append(jax.jit(function)(w_q, x))
      outcome += outcomes(function, w_q, x)
    self.assertEqual(outcome, [(RMS, f"separate: {reason}")] * 2)
    np.testing.assert_array_equal(*ys)

  def test_norm_outside_of_a_checkpoint_is_separate_in_accept_quantized(self):
    function = accepted(
      lambda p, x: jax.checkpoint(jnp.dot)(llama(x, p["norm"]), p["gate"])
    )
    text = f"separate: the matmul is inside checkpoint, and {RMS_ROWS} is not"
    found = outcomes(function, stored(block_params()), normal(*SHAPE))
    self.assertEqual(found, [(RMS_ROWS, text)])

  def test_arguments_are_validated(self):
    with self.assertRaisesRegex(TypeError, "fuse_activations must be True or"):
      jp.quantize_dots(block, "mxfp8", fuse_activations=1)
    with self.assertRaisesRegex(ValueError, "activations must be a format if"):
      jp.accept_quantized(block, fuse_activations=True)
