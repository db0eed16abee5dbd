# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests that `explain` lists what runs if transformations are nested."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import jaxplugin as jp

_GROUPS = np.array([2, 2, 2, 2], np.int32)


def scanned(f):
  def function(p, x):
    body = lambda c, _: (f(p, c) * 1e-2, None)
    return jax.lax.scan(body, x, length=2)[0]

  return function


def looped(f):
  def function(p, x):
    body = lambda c: (c[0] + 1, f(p, c[1]))
    return jax.lax.while_loop(lambda c: c[0] < 2, body, (0, x))[1]

  return function


def listed(f):
  return lambda p, x: jax.lax.map(lambda x: f(p, x), x[None])[0]


def mapped(f):
  return lambda p, x: jax.vmap(f, (None, 0))(p, x[None])[0]


def differentiated(f):
  return lambda p, x: jax.jvp(lambda x: f(p, x), [x], [x])[0]


_TRANSFORMATIONS = {
  "none": lambda f: f,
  "jit": jax.jit,
  "checkpoint": jax.checkpoint,
  "scan": scanned,
  "while": looped,
  "map": listed,
  "vmap": mapped,
  "jvp": differentiated,
}
_QUANTIZE = lambda f: jp.quantize_dots(f, "mxfp8")


def accepted_layers(p, x):
  y = jax.nn.gelu(x @ p[0]) @ p[1]
  return y @ (x.T @ x)  # stays


def ragged_layers(p, x):
  weights = jp.dequantize(p[1]).swapaxes(1, 2)
  return jax.lax.ragged_dot(x @ p[0], weights, _GROUPS)


class NestingTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.x = rng.standard_normal((8, 32)).astype(np.float32)
    self.kernel = rng.standard_normal((32, 32)).astype(np.float32)
    w_q = jp.quantize(self.kernel, "mxfp8")
    self.accepted = jp.QuantizedWeight(w_q, (32, 32), (0,))
    experts = rng.standard_normal((4, 32, 32)).astype(np.float32)
    self.experts = jp.quantize(experts, "mxfp8")

  def sites(self, f, *args, match=".*(left|took 0|found no|none of its)"):
    """Returns the sites, and the number of plain matmuls."""
    with warnings.catch_warnings():
      warnings.filterwarnings("error", match, jp.NotQuantizedWarning)
      found = jp.explain(f, *args).sites
    plain = str(jax.make_jaxpr(f)(*args)).count(" dot_general[")
    return found, plain

  @parameterized.product(place=("inside", "between", "outside"))
  def test_accepted_matmuls_are_not_left(self, place):
    for name, transformation in _TRANSFORMATIONS.items():
      with self.subTest(name):
        inside, between, outside = (
          transformation if place == x else (lambda f: f)
          for x in ("inside", "between", "outside")
        )
        f = jp.accept_quantized(inside(accepted_layers))
        f = outside(_QUANTIZE(between(f)))
        found, plain = self.sites(f, (self.accepted, self.kernel), self.x)
        self.assertEqual(
          [site.is_taken for site in found], [True, False, False]
        )
        if name != "jvp":
          self.assertEqual(plain, 2)

  @parameterized.product(name=[*_TRANSFORMATIONS], place=("inside", "outside"))
  def test_a_weight_that_is_accepted_outside_is_not_left(self, name, place):
    def f(p, x, w):
      layers = lambda p, x: jax.nn.gelu(x @ p) @ w
      inside = _TRANSFORMATIONS[name]
      if place == "inside":
        return _QUANTIZE(inside(layers))(p, x)
      return inside(_QUANTIZE(layers))(p, x)

    f = jp.accept_quantized(f)
    found, plain = self.sites(f, self.kernel, self.x, self.accepted)
    self.assertEqual([site.is_taken for site in found], [True])
    if name != "jvp":
      self.assertEqual(plain, 0)

  @parameterized.parameters(*_TRANSFORMATIONS)
  def test_a_function_of_only_accepted_weights_does_not_warn(self, name):
    def f(w, x):
      return _TRANSFORMATIONS[name](_QUANTIZE(lambda p, x: x @ w))(x, x)

    found, _ = self.sites(jp.accept_quantized(f), self.accepted, self.x)
    self.assertEmpty(found)

  def test_a_matmul_that_stays_is_left_after_all(self):
    q = _QUANTIZE(lambda p, x, w, v: x @ p @ w @ v)
    f = jp.accept_quantized(jax.jit(q))
    with self.assertWarnsRegex(jp.NotQuantizedWarning, "left 1 matmul"):
      jp.explain(f, self.kernel, self.x, self.accepted, self.kernel)

  @parameterized.product(
    transformations=(
      (jp.accelerate, _QUANTIZE),
      (_QUANTIZE, jp.accelerate),
    ),
    name=("none", "jit", "scan"),
  )
  def test_accelerated_ragged_dots_are_not_left(self, transformations, name):
    f = _TRANSFORMATIONS[name](ragged_layers)
    for transformation in transformations:
      f = transformation(f)
    for _ in range(2):  # the second time, JAX has traced the function before
      found, _ = self.sites(f, (self.kernel, self.experts), self.x)
      self.assertEqual([site.is_taken for site in found], [True])

  def test_warnings_name_the_line_that_calls_a_function_of_numpy(self):
    f = jp.accept_quantized(lambda p, x: jnp.inner(x, p))
    place = r"dot_general at \S*nesting_test.py:\d+ "
    with self.assertWarnsRegex(jp.NotQuantizedWarning, place):
      jax.make_jaxpr(f)(self.accepted, self.x)

  def test_a_matmul_in_a_loop_of_jax_has_its_own_line(self):
    def layer(p, x):
      return x @ p

    def loops(p, x):
      x = jax.lax.map(lambda x: layer(p, x), x[None])[0]
      return jax.lax.fori_loop(0, 2, lambda i, x: layer(p, x), x)

    found = jp.explain(_QUANTIZE(loops), jnp.ones((64, 64)), jnp.ones((8, 64)))
    for site in found.sites:
      self.assertRegex(site.source, "layer")


if __name__ == "__main__":
  absltest.main()
