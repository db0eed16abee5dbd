# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`products`: what is known of a value is what the value is."""

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.jaxext.tracing import interception_private
from jaxplugin.rewriting import facts


class _Recorder:
  """Notes a function's operations in a table, and replaces none."""

  def __init__(self):
    self.table = facts.ArrayProducts()

  def replace(self, operation):
    return None

  def rewrite(self, operation):
    return operation

  def note(self, operation, results):
    self.table.note(operation, results)

  def inside(self, operation, index):
    raise NotImplementedError

  def note_own(self, function, args):
    pass


def known(function, *args):
  """A function's result, and what is known of it; None for nothing."""
  recorder = _Recorder()
  out = interception_private.intercept(function, lambda args: recorder)(*args)
  product = recorder.table.of(out)
  is_itself = product is not None and any(
    factor.array is out for factor in product.factors
  )
  return out, None if is_itself else product


def value(product):
  factors = (f.laid_out(product.dims) for f in product.factors)
  factors = (x.astype(jnp.float32) for x in factors)
  return functools.reduce(operator.mul, factors)


def divisors(n):
  return [d for d in range(1, n + 1) if n % d == 0]


def random_step(rng, x, arrays):
  """One operation, as a function of a value and of arrays."""
  kind = rng.choice(
    ["reshape", "transpose", "broadcast", "mul", "cast", "jit", "tile"]
  )
  if kind == "reshape":
    sizes, left = [], math.prod(x.shape)
    while left > 1 and len(sizes) < 4:
      sizes.append(int(rng.choice(divisors(left))))
      left //= sizes[-1]
    return lambda y, _: y.reshape([*sizes, left])
  if kind == "transpose":
    order = rng.permutation(len(x.shape))
    return lambda y, _: y.transpose(order)
  if kind == "broadcast" and math.prod(x.shape) < 500:
    axis = int(rng.integers(len(x.shape) + 1))
    size = int(rng.choice([1, 2, 3]))
    return lambda y, _: jnp.repeat(jnp.expand_dims(y, axis), size, axis)
  if kind == "mul":
    keep = [bool(rng.integers(2)) for _ in x.shape]
    shape = [n if k else 1 for n, k in zip(x.shape, keep, strict=True)]
    i = len(arrays)
    arrays.append(jnp.asarray(rng.choice([0.5, 1, 2, 3], shape), jnp.float32))
    return lambda y, arrays: y * arrays[i]
  if kind == "jit":
    return lambda y, _: jax.jit(lambda y: (y[None] * 2).squeeze(0))(y)
  if kind == "tile" and math.prod(x.shape) < 500:
    reps = [int(rng.choice([1, 2])) for _ in x.shape]
    return lambda y, _: jnp.tile(y, reps)
  return lambda y, _: y.astype(jnp.bfloat16).astype(jnp.float32)


class ProductsTest(parameterized.TestCase):
  @pytest.mark.full
  def test_random_chains(self):
    is_known = [self.check_chain(seed) for seed in range(30)]
    # In the other chains the boundaries of dimensions do not nest.
    self.assertGreater(sum(is_known), 24)

  def check_chain(self, seed):
    """Whether something is known of a chain of operations, which is right."""
    rng = np.random.default_rng(seed)
    shape = [int(rng.choice([1, 2, 4, 6])) for _ in range(3)]
    start = jnp.asarray(rng.choice([-1, 0.5, 1, 2], shape), jnp.float8_e4m3fn)
    arrays, steps = [], [lambda y, _: y.astype(jnp.float32)]
    aval = jax.ShapeDtypeStruct(start.shape, jnp.float32)
    for _ in range(6):
      steps.append(random_step(rng, aval, arrays))
      aval = jax.eval_shape(steps[-1], aval, arrays)

    def chain(x):
      for step in steps:
        x = step(x, arrays)
      return x

    @jax.jit
    def both(x):
      out, product = known(chain, x)
      return out, None if product is None else value(product)

    out, found = both(start)
    if found is not None:
      np.testing.assert_array_equal(found, out, err_msg=str(seed))
    return found is not None

  def test_forgets_dead_values(self):
    recorder = _Recorder()
    function = lambda x: (x.reshape(2, -1).T * 2).sum()
    x = jnp.ones((4, 4))
    interception_private.intercept(function, lambda args: recorder)(x)
    self.assertEmpty(recorder.table._products._known)

  def test_square_of_one_array(self):
    x = jnp.arange(9.0).reshape(3, 3)
    out, product = known(lambda x: x * x.T, x)
    np.testing.assert_array_equal(value(product), out)

  def test_number_has_no_identity(self):
    values = facts.Values[str]()
    for number in (7, 7.0, np.float32(7)):
      values.put(number, "of a jitted function that is inlined")
      self.assertIsNone(values.get(number))

  def test_unknown(self):
    for function in (
      lambda x: x + 1,
      lambda x: x.reshape(3, 4).sum(0),
      lambda x: x.astype(jnp.int32),
      lambda x: x.reshape(4, 3).T.reshape(4, 3),
    ):
      _, product = known(function, jnp.arange(12.0))
      self.assertIsNone(product)

  @parameterized.parameters("mxfp8", "nvfp4", "mxfp4")
  @pytest.mark.sample(1)
  def test_dequantize(self, format):
    x = np.random.default_rng(0).normal(size=(2, 6, 64)).astype(np.float32)
    for w in (jp.quantize(x, format), jp.quantize(x, format).unpack()):
      out, product = known(lambda w: w.dequantize().reshape(12, 2, 32), w)
      factors = [f.laid_out(product.dims) for f in product.factors]
      self.assertLen(factors, 3 if w.global_scale is not None else 2)
      if w.is_packed:
        self.assertEqual(factors[0].shape, (12, 2, 16))
        self.assertEqual(factors[0].dtype, jnp.uint8)
      else:
        np.testing.assert_array_equal(value(product), out)
