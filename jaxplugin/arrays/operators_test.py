# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the operators that quantized arrays refuse."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax

import jaxplugin as jp

_BINARY = (
  operator.add, operator.sub, operator.mul, operator.truediv,
  operator.floordiv, operator.mod, operator.pow, operator.and_, operator.or_,
  operator.xor, operator.lshift, operator.rshift, operator.lt, operator.le,
  operator.gt, operator.ge, operator.eq, operator.ne, operator.iadd,
  operator.imul, divmod,
)  # fmt: skip
_UNARY = (
  operator.neg,
  operator.pos,
  abs,
  operator.invert,
  float,
  int,
  np.sin,
  np.sum,
)
_UFUNCS = (np.add, np.maximum, np.multiply.outer, np.logaddexp)
_REMEDY = r"needs? (a )?plain array.*(dequantize\(\)|\.primal)"
# NumPy's `array_equal` returns False if a conversion raises an error.
_FUNCTIONS = (
  np.asarray, np.ravel, lambda x: np.stack([x, x]),
  lambda x: np.array_equal(x, x), lambda x: np.where(x, 1, 0),
  jnp.asarray, jnp.abs, jnp.sum, jnp.ravel, jax.nn.relu, jax.typeof,
  lambda x: jnp.where(True, x, 0.0), lambda x: jnp.stack([x, x]),
  lambda x: jnp.concatenate([x, x]), lambda x: jnp.dot(x, x),
  lambda x: jnp.einsum("ij,ij->i", x, x), lambda x: jnp.array_equal(x, x),
  lax.exp, lambda x: lax.mul(x, x), lambda x: lax.concatenate([x, x], 0),
)  # fmt: skip


def quantized():
  values = jax.device_put(np.ones((4, 32), np.float32))
  w_q = jp.quantize(values, "mxfp8")
  weight = jp.QuantizedWeight(w_q, (32, 4), (0,))
  return [w_q, weight, jp.quantize_operand(values, "mxfp8")]


class OperatorsTest(parameterized.TestCase):
  def refuses(self, function, *args):
    names = [type(x).__name__ for x in args]
    with self.subTest(function=function.__name__, args=names):
      with self.assertRaises(TypeError) as raised:
        function(*args)
      self.assertRegex(str(raised.exception), _REMEDY)
      self.assertTrue(str(raised.exception).startswith(("Sca", "Quantized")))

  def test_operators_raise_with_the_remedy(self):
    array = np.ones((4, 32), np.float32)
    others = [array, array[0, 0], 2.0, jnp.asarray(array)]
    for x in quantized():
      for function in _UNARY:
        self.refuses(function, x)
      for function in _BINARY:
        self.refuses(function, x, x)
        for other in others:
          self.refuses(function, x, other)
          self.refuses(function, other, x)
      for function in _UFUNCS:
        self.refuses(function, x, array)
        self.refuses(function, array, x)

  def test_functions_of_numpy_and_jax_raise_with_the_remedy(self):
    for x in quantized():
      for number, function in enumerate(_FUNCTIONS):
        with self.subTest(function=number, x=type(x).__name__):
          with self.assertRaises((TypeError, ValueError)) as raised:
            function(x)
          error = raised.exception
          self.assertRegex(f"{error} {error.__cause__}", _REMEDY)
      self.assertFalse(hasattr(x, "astype"))
      for name, remedy in [
        ("astype", _REMEDY),
        ("at", "tree.map.*old.at"),
        ("other", "no attribute"),
      ]:
        with self.assertRaisesRegex(AttributeError, remedy):
          getattr(x, name)

  def test_conditions_and_keys_are_refused(self):
    for x in quantized():
      for function, remedy in [
        (bool, "is not None"),
        (hash, r"id\(x\)"),
        (lambda x: operator.setitem(x, 0, x), "index 0.*tree.map"),
      ]:
        with self.assertRaisesRegex(TypeError, f"(Quantized|Scaled).*{remedy}"):
          function(x)
    x, weight, _ = quantized()
    self.assertEqual([np.shape(x), len(x), np.ndim(weight)], [(4, 32), 4, 2])

  def test_numpy_matmul_multiplies(self):
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-8, 8, (3, 32)).astype(np.float32) for _ in "xw")
    w_q = jp.quantize(w, "mxfp8")
    for result in (x @ w_q.T, np.matmul(x, w_q.T)):
      np.testing.assert_array_equal(result, x @ w.T)
    with self.assertRaisesRegex(TypeError, "numpy.matmul needs a plain array"):
      np.matmul(x, w_q.T, out=x[:, :3])


if __name__ == "__main__":
  absltest.main()
