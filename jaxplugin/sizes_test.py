# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Each dimension of each operation may be 0 or 1, forward and backward.

`OPERATIONS` lists them as functions of the sizes (batch or groups, m, n, k).
They are traced, so nothing compiles. `PRODUCTS` are run, and their values and
gradients checked.
"""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax import lax

import jaxplugin as jp

SIZES = {"b": 2, "m": 32, "n": 32, "k": 64}
RECIPES = {
  "mxfp8": jp.training.MXFP8_RECIPE,
  "nvfp4": jp.training.NVFP4_RECIPE,
  "mxfp4": jp.training.MXFP4_RECIPE,
}
BATCHED = (((2,), (2,)), ((0,), (0,)))
ALONG_LAST = (((1,), (1,)), ((), ()))
CONTRACTION = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
KEY = jax.random.key(0)


def ones(*shape):
  return jnp.ones(shape, jnp.float32)


def gradients(f, *args):
  """Returns the result of `f`, and the gradients of its sum."""
  value, transposed = jax.vjp(f, *args)
  return value, *transposed(jnp.ones_like(value))


def through(x, **options):
  return jp.quantize(x, jp.NVFP4, derivative="straight_through", **options)


def group_sizes(b, m):
  return jnp.full((b,), m // 2 if b else 0, jnp.int32)


def quantize(b, m, n, k):
  x = ones(b, m, k)
  return (
    *gradients(lambda x: jp.dequantize(through(x)), x),
    jp.quantize(x, jp.NVFP4, key=KEY),
    jp.quantize(x, jp.NVFP4, batch_dims=1, scale_layout="swizzled_128x4"),
    jp.quantize_both(ones(b, 32 * m, k), jp.MXFP8),
  )


def arrays(b, m, n, k):
  x_q = jp.quantize(ones(b, m, k), jp.NVFP4, batch_dims=1)
  unpacked = jp.quantize(x_q.dequantize(), jp.NVFP4, packed=False)
  return (
    x_q.transpose((1, 0, 2)).dequantize(),
    jp.concatenate([x_q, x_q]),
    jp.stack([x_q, x_q]),
    jp.unprepare_weights(jp.prepare_weights(x_q)),
    jp.unpack_fp4(jp.pack_fp4(unpacked.values)),
  )


def dot(b, m, n, k):
  f = functools.partial(jp.block_scaled_dot, dimension_numbers=BATCHED)
  x, w = ones(b, m, k), ones(b, n, k)
  return (
    *gradients(lambda x, w: f(through(x), through(w)), x, w),
    *gradients(lambda x: f(x, through(w)), x),
  )


def linear(b, m, n, k):
  w_q = jp.quantize(ones(n, k), jp.NVFP4)
  f = lambda x, bias: jp.linear(x, w_q, bias, "gelu")
  return gradients(f, ones(b, m, k), ones(n))


def layer(b, m, n, k):
  stack = jp.quantize(ones(max(b, 1), n, k), jp.NVFP4, batch_dims=1)
  number = group_sizes(1, 0)[0]
  return gradients(lambda x: jp.linear(x, stack, layer=number), ones(b, m, k))


def ragged(b, m, n, k):
  sizes = group_sizes(b, m)
  w_q = jp.quantize(ones(b, n, k), jp.NVFP4, batch_dims=1)
  f = lambda x, bias: jp.ragged_dot(x, w_q, sizes, bias=bias)
  g = lambda x, w: jp.ragged_dot(through(x), through(w, batch_dims=1), sizes)
  rows = lambda x: jp.ragged_dot(x, w_q, sizes)
  return (
    *gradients(f, ones(m, k), ones(b, n)),
    *gradients(g, ones(m, k), ones(b, n, k)),
    *gradients(jax.vmap(rows), ones(2, m, k)),
    jp.ragged_dot(through(ones(m, k)), w_q, sizes),
  )


def contraction(b, m, n, k):
  sizes = group_sizes(b, m)
  f = lambda x, y: jp.ragged_dot_general(x, y, sizes, CONTRACTION)
  rows, aligned = jp.align_groups(ones(m, k), sizes, 32)
  columns, _ = jp.align_groups(ones(m, n), sizes, 32)
  blocked = [jp.quantize(x, jp.NVFP4, axis=0) for x in (columns, rows)]
  return (
    *gradients(f, ones(m, n), ones(m, k)),
    jax.vmap(f, (0, None))(ones(2, m, n), ones(m, k)),
    jp.ragged_dot_general(*blocked, aligned, CONTRACTION),
  )


def scaled_dot_general(b, m, n, k):
  configs = [jp.nn.get_scaled_dot_general_config("nvfp4") for _ in range(3)]
  f = lambda x, w: jp.nn.scaled_dot_general(x, w, BATCHED, configs=configs)
  return gradients(f, ones(b, m, k), ones(b, n, k))


def scaled_matmul(b, m, n, k):
  x_q, w_q = (jp.quantize(ones(b, d, k), jp.MXFP8) for d in (m, n))
  return jp.nn.scaled_matmul(x_q.values, w_q.values, x_q.scale, w_q.scale)


def accelerate(b, m, n, k):
  sizes = group_sizes(b, m)
  w_q = jp.quantize(ones(b, n, k), jp.NVFP4, batch_dims=1)
  f = lambda x, w_q: lax.ragged_dot(x, w_q.dequantize().swapaxes(1, 2), sizes)
  return gradients(lambda x: jp.accelerate(f)(x, w_q), ones(m, k))


def quantize_dots(b, m, n, k):
  def loss(w, x):
    # Sizes 0 and 1 are not multiples of a block: these products are left.
    return lax.scan(lambda c, w: (c, x @ w), 0, w)[1].sum()

  quantized = jp.quantize_dots(loss, RECIPES["nvfp4"], key=KEY)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", jp.NotQuantizedWarning)
    return jax.grad(quantized, (0, 1))(ones(b, k, n), ones(m, k))


def recipe(name):
  f = jp.dot_general(recipe=RECIPES[name], weight="rhs")

  def traced(b, m, n, k):
    batched = functools.partial(f, dimension_numbers=BATCHED, key=KEY)
    rows = functools.partial(f, dimension_numbers=ALONG_LAST, key=KEY)
    x, w = ones(m, k), ones(n, k)
    w_q = jp.quantize_operand(w, RECIPES[name], contracting=1)
    return (
      *gradients(batched, ones(b, m, k), ones(b, n, k)),
      *gradients(rows, x, w),
      jax.grad(lambda x: rows(x, w_q).sum())(x),
    )

  return traced


def ragged_recipe(name):
  def traced(b, m, n, k):
    f = lambda x, w: jp.training.ragged_dot_general(
      x, w, group_sizes(b, m), recipe=RECIPES[name], key=KEY
    )
    return gradients(f, ones(m, k), ones(b, n, k))

  return traced


OPERATIONS = {
  f.__name__: f
  for f in (
    *(quantize, arrays, dot, linear, layer, ragged, contraction),
    *(scaled_dot_general, scaled_matmul, accelerate, quantize_dots),
  )
} | {
  f"{kind.__name__}_{name}": kind(name)
  for kind, name in itertools.product((recipe, ragged_recipe), RECIPES)
}


# One dimension of 0, all with 1, and all with 0.
SIZES_TRIED = (
  *(SIZES | {name: 0} for name in SIZES),
  {"b": 1, "m": 1, "n": 1, "k": 64},
  dict.fromkeys(SIZES, 0),
)


def straight_through(x, w):
  return jp.block_scaled_dot(through(x), through(w))


def of_recipe(name):
  f = jp.dot_general(recipe=RECIPES[name], weight="rhs")
  return lambda x, w: f(x, w, ALONG_LAST, key=KEY)


def experts(x, w):
  sizes = jnp.full(len(w), len(x) // len(w), jnp.int32)
  return jp.training.ragged_dot_general(
    x, w, sizes, recipe=RECIPES["nvfp4"], key=KEY
  )


# name: the function of (m, k) and (n, k), and shapes of both.
PRODUCTS = {
  "dot": (
    straight_through,
    [((m, 64), (n, 64)) for m, n in ((0, 32), (1, 0), (1, 1))],
  ),
  "batched": (
    straight_through,
    [((0, 8, 64), (0, 8, 64)), ((1, 0, 64), (1, 1, 64))],
  ),
  **{
    name: (of_recipe(name), [((0, 64), (32, 64)), ((32, 64), (0, 64))])
    for name in RECIPES
  },
  "experts": (experts, [((0, 64), (2, 32, 64)), ((64, 64), (1, 32, 64))]),
}


class ProductsTest(parameterized.TestCase):
  @parameterized.named_parameters((name, name) for name in PRODUCTS)
  @pytest.mark.full
  def test_values_and_gradients(self, name):
    f, shapes = PRODUCTS[name]
    for lhs_shape, rhs_shape in shapes:
      with self.subTest(f"{lhs_shape}x{rhs_shape}"):
        loss = lambda x, w: f(x, w).sum()
        lhs, rhs = ones(*lhs_shape), ones(*rhs_shape)
        value, (dx, dw) = jax.value_and_grad(loss, (0, 1))(lhs, rhs)
        *batch, rows, k = lhs_shape
        columns = rhs_shape[-2]
        sums = np.prod(batch, dtype=int) * rows * columns
        # Quantizing all ones loses at most a rounding of each scale.
        np.testing.assert_allclose(value, sums * k, rtol=1e-6)
        np.testing.assert_allclose(dx, np.full(lhs_shape, columns), rtol=1e-6)
        np.testing.assert_allclose(dw, np.full(rhs_shape, rows), rtol=1e-6)


class SizesTest(parameterized.TestCase):
  @parameterized.named_parameters((name, name) for name in OPERATIONS)
  @pytest.mark.sample(12)
  def test_traces(self, name):
    for sizes in SIZES_TRIED:
      with self.subTest(sizes):
        # A new function for each: JAX does not trace equal ones again.
        jax.eval_shape(lambda s=sizes: OPERATIONS[name](**s))

  @parameterized.named_parameters(
    ("no_groups", {"b": 0}),
    ("no_columns", {"n": 0}),
    ("nothing_contracted", {"k": 0}),
    ("no_rows", {"m": 0}),
  )
  @pytest.mark.sample(1)
  def test_sums_of_nothing_are_zero(self, sizes):
    sizes = SIZES | sizes
    b, m, n, k = sizes.values()
    w_q = jp.quantize(ones(b, n, k), jp.NVFP4, batch_dims=1)
    for implementation in (None, "xla"):
      f = lambda x, i=implementation: jp.ragged_dot(
        x, w_q, group_sizes(b, m), implementation=i
      )
      got = gradients(jax.vmap(f), ones(2, m, k))
      # All rows are in groups of m / 2, which the last group ends.
      count = k if b else 0, n if b else 0
      for x, shape, want in zip(got, ((m, n), (m, k)), count, strict=True):
        np.testing.assert_array_equal(x, np.full((2, *shape), want, np.float32))
