# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays that `dot_general` quantizes and saves, compared bit by bit.

The expected gradients are written out in `quantize` and `block_scaled_dot`.
"""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import quantization
from jaxplugin.core import blocking
from jaxplugin.dot import reference
from jaxplugin.testing import quantization_lowerings
from jaxplugin.testing import transformations
from jaxplugin.testing.oracles import gradients_oracle
from jaxplugin.training import products

MATMUL = (((1,), (0,)), ((), ()))
X = np.random.default_rng(0).normal(size=(40, 96)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(96, 72)).astype(np.float32)
G = np.random.default_rng(2).normal(size=(40, 72)).astype(np.float32)


def quantized(x, axis, format, multiple=32, **kwargs):
  """Padded along `axis` and quantized, each by itself."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, -x.shape[axis] % multiple)
  x = jnp.pad(x, widths)
  return x if format is None else jp.quantize(x, format, axis=axis, **kwargs)


def dot(lhs, lhs_axis, rhs, rhs_axis, dtype, batch=((), ()), **kwargs):
  return jp.block_scaled_dot(
    lhs,
    rhs,
    dimension_numbers=(((lhs_axis,), (rhs_axis,)), batch),
    preferred_element_type=dtype,
    **kwargs,
  )


def step(function, numbers):
  """The result and both gradients."""
  return gradients_oracle.with_gradients(lambda l, r: function(l, r, numbers))


def primitives(function, *args):
  """How often each primitive is in the jaxpr, and in those inside of it.

  What is not used is dropped first, as by `jax.jit`.
  """
  jaxpr = jax.jit(function).trace(*args).jaxpr.jaxpr
  jaxpr, _ = jax.interpreters.partial_eval.dce_jaxpr(
    jaxpr, [True] * len(jaxpr.outvars)
  )
  found = collections.Counter()
  for eqn in transformations.equations(jaxpr):
    name = eqn.primitive.name
    if name == "block_quantize":
      name += f" {len(eqn.params['problem'].blockings)}"
    found[name] += 1
  return found


class BitwiseTest(parameterized.TestCase):
  def assert_same(self, actual, expected):
    for a, e in zip(actual, expected, strict=True):
      self.assertEqual(a.dtype, e.dtype)
      # NumPy knows no NaN of bf16.
      np.testing.assert_array_equal(*(x.astype(np.float32) for x in (a, e)))

  @parameterized.parameters(
    (jp.MXFP8, jp.NVFP4, jp.MXFP8_E5M2, jnp.bfloat16, "xla"),
    (jp.MXFP8, jp.MXFP8, None, np.float32, None),
    (jp.NVFP4, jp.NVFP4, jp.NVFP4, np.float32, "xla"),
    (None, jp.MXFP4, None, jnp.bfloat16, None),
    (jp.MXFP4, jp.MXFP4, None, np.float32, "xla", "floor"),
  )
  @pytest.mark.sample(2)
  def test_matmul_is_that_of_operands_quantized_one_by_one(
    self, lhs_format, rhs_format, grad_format, dtype, implementation,
    scale_rounding="up",
  ):  # fmt: skip
    x, w, g = (jnp.asarray(a, dtype) for a in (X, W, G))
    # Bad numbers in one row and column: NVFP4's global scales differ by axis.
    x = x.at[3, 5].set(np.nan).at[3, 6].set(60.0)
    g = g.at[7, 9].set(np.inf).at[8, 9].set(-50.0)
    function = jp.dot_general(
      lhs_format,
      rhs_format,
      grad_format=grad_format,
      scale_rounding=scale_rounding,
      implementation=implementation,
    )
    kwargs = {"implementation": implementation}
    grad_format = grad_format or lhs_format or rhs_format

    @jax.jit
    def expected(x, w, g):
      def q(x, axis, format):
        rounding = {} if format is None else {"scale_rounding": scale_rounding}
        return quantized(x, axis, format, **rounding)

      return (
        dot(q(x, 1, lhs_format), 1, q(w, 0, rhs_format), 0, dtype, **kwargs),
        dot(q(g, 1, grad_format), 1, q(w, 1, rhs_format), 1, dtype, **kwargs),
        dot(q(g, 0, grad_format), 0, q(x, 0, lhs_format), 0, dtype, **kwargs).T,
      )

    self.assert_same(step(function, MATMUL)(x, w, g), expected(x, w, g))

  def test_rows_of_a_batch_merge_backward(self):
    format = jp.MXFP8
    x = X.reshape(4, 10, 96)
    g = G.reshape(4, 10, 72)
    function = jp.dot_general(format, format, implementation="xla")
    numbers = (((2,), (0,)), ((), ()))
    kwargs = {"implementation": "xla"}

    @jax.jit
    def expected(x, w, g):
      q = lambda x, axis: quantized(x, axis, format, format.block_size)
      merged = lambda x: q(x.transpose(2, 0, 1).reshape(-1, 40), 1)
      return (
        dot(q(x, 2), 2, q(w, 0), 0, np.float32, **kwargs),
        dot(q(g, 2), 2, q(w, 1), 1, np.float32, **kwargs),
        dot(merged(g), 1, merged(x), 1, np.float32, **kwargs).T,
      )

    self.assert_same(step(function, numbers)(x, W, g), expected(x, W, g))

  @parameterized.parameters(jp.MXFP8, jp.NVFP4)
  @pytest.mark.full
  def test_rows_of_whole_blocks_keep_their_dimensions_and_bits(self, format):
    rng = np.random.default_rng(3)
    x, g = (rng.normal(size=(4, 64, n)).astype(np.float32) for n in (96, 72))
    x[2, 60, 7] = np.nan
    product = products.Product.of(
      (((0, 1), (0, 1)), ((), ())), (g.shape, x.shape), (format, format)
    )
    merged = blocking.Blocking(
      dims=(0, 1), lead=(2,), multiple=format.block_size
    )
    actual, expected = (
      quantization.quantize_blocked(x, format, [b], scale_rounding="up")[0]
      for b in (product.rhs, merged)
    )
    self.assertEqual(actual.shape, x.shape)
    for name in ("values", "scale"):
      have, want = (np.asarray(getattr(q, name)) for q in (actual, expected))
      have = have.transpose(2, 0, 1).reshape(want.shape)
      np.testing.assert_array_equal(have.view(np.uint8), want.view(np.uint8))
    # And a gradient is of such.
    x = np.nan_to_num(x)
    function = jp.dot_general(format, format)
    (*_, w_grad), (*_, flat) = (
      step(function, numbers)(*args)
      for numbers, args in (
        ((((2,), (0,)), ((), ())), (x, W, g)),
        (MATMUL, (x.reshape(256, 96), W, g.reshape(256, 72))),
      )
    )
    magnitude = 2 * np.abs(x.reshape(256, 96)).T @ np.abs(g.reshape(256, 72))
    error = np.abs(np.asarray(w_grad) - np.asarray(flat))
    np.testing.assert_array_less(error, reference.ERROR_BOUND * magnitude)

  def test_unused_gradient_changes_no_bit_of_the_other(self):
    function = jp.dot_general(jp.NVFP4, jp.NVFP4)
    loss = lambda x, w: jnp.sin(function(x, w, MATMUL)).sum()
    both = jax.jit(jax.grad(loss, argnums=(0, 1)))(X, W)
    for i in range(2):
      one = jax.jit(jax.grad(loss, argnums=i))(X, W)
      np.testing.assert_array_equal(one, both[i])


class CountTest(parameterized.TestCase):
  """How often what is quantized, once what is not used is dropped."""

  def count(self, function, *args):
    found = primitives(function, *args)
    return tuple(
      found[name] for name in ("block_quantize 1", "block_quantize 2")
    )

  def loss(self, *formats, **kwargs):
    function = jp.dot_general(*formats, **kwargs)
    return lambda x, w: jnp.sin(function(x, w, MATMUL)).sum()

  @parameterized.parameters(
    # lhs and incoming gradient along both, weights in each pass by themselves,
    # as no copy of them is kept.
    ((jp.MXFP8, jp.NVFP4), {}, (2, 2)),
    # A plain operand is not quantized.
    ((None, jp.MXFP8), {}, (2, 1)),
    ((jp.MXFP8, None), {}, (0, 2)),
    # w forward only, and g for the other product only.
    ((jp.MXFP8, jp.MXFP8), {"quantize_dgrad": False}, (2, 1)),
    ((jp.MXFP8, jp.MXFP8), {"quantize_wgrad": False}, (4, 0)),
    (
      (jp.MXFP8, jp.MXFP8),
      {"quantize_dgrad": False, "quantize_wgrad": False},
      (2, 0),
    ),
  )
  def test_each_is_quantized_once_along_all_it_is_needed(
    self, formats, kwargs, expected
  ):
    grad = jax.grad(self.loss(*formats, **kwargs), argnums=(0, 1))
    self.assertEqual(self.count(grad, X, W), expected)

  def test_forward_quantizes_along_one_dimension(self):
    self.assertEqual(self.count(self.loss(jp.MXFP8, jp.MXFP8), X, W), (2, 0))

  def test_gradient_of_one_operand_quantizes_only_for_it(self):
    loss = self.loss(jp.MXFP8, jp.MXFP8)
    # x (forward), g (backward), and w in each pass; w, g, and x along both.
    for argnums, expected in ((0, (4, 0)), (1, (2, 1))):
      grad = jax.grad(loss, argnums=argnums)
      self.assertEqual(self.count(grad, X, W), expected)

  def test_remat_quantizes_forward_once_and_again_backward(self):
    loss = self.loss(jp.MXFP8, jp.MXFP8)
    grad = jax.value_and_grad(jax.checkpoint(loss), argnums=(0, 1))
    # Forward x and w along one each. Backward that is done again, for the
    # argument of sin, x along both, w for the other product, and g.
    self.assertEqual(self.count(grad, X, W), (4, 2))


class KeptTest(parameterized.TestCase):
  """What lives from the forward to the backward pass."""

  def kept(self, *formats, numbers=MATMUL, arrays=(X, W), **kwargs):
    function = jp.dot_general(*formats, **kwargs)
    _, vjp = jax.vjp(lambda x, w: function(x, w, numbers), *arrays)
    return sorted(
      (x.dtype.name, x.shape) for x in jax.tree.leaves(vjp) if x.ndim
    )

  def test_activations_quantized_and_weights_as_they_are(self):
    self.assertEqual(
      self.kept(jp.MXFP8, jp.MXFP4),
      [("float32", (96, 72)), ("uint8", (2, 96)), ("uint8", (64, 96))],
    )
    # An operand with batch dimensions may be activations.
    batched = (((2,), (1,)), ((0,), (0,)))
    self.assertEqual(
      self.kept(jp.MXFP8, jp.MXFP4, numbers=batched, arrays=(X[None], W[None])),
      [
        ("uint8", (1, 2, 96)),
        ("uint8", (1, 64, 96)),
        ("uint8", (1, 96, 3)),  # scales of what contracts 72, padded to 96
        ("uint8", (1, 96, 48)),  # two of FP4 a byte
      ],
    )

  def test_operands_of_products_in_high_precision_as_they_are(self):
    self.assertEqual(
      self.kept(jp.MXFP8, jp.MXFP8, quantize_wgrad=False),
      [("float32", (40, 96)), ("float32", (96, 72))],
    )
    self.assertEqual(self.kept(None, jp.MXFP8)[0], ("float32", (40, 96)))


@quantization_lowerings.needs_library
class KernelsTest(parameterized.TestCase):
  def test_cpu_kernels_quantize_and_nothing_copies_codes(self):
    x, w = jnp.ones((2, 32, 64)), jnp.ones((64, 96))
    function = jp.dot_general(recipe="mxfp8", weight="rhs")

    def loss(x, w):
      return (function(x, w, (((2,), (0,)), ((), ()))) ** 2).sum()

    text = jax.jit(jax.grad(loss, (0, 1))).lower(x, w).compile().as_text()
    # x and g along both dimensions; w once in each direction.
    called = re.findall(r'custom_call_target="jaxplugin_(\w+)"', text)
    self.assertEqual(
      collections.Counter(called),
      {"quantize_operand": 3, "quantize": 3, "block_scaled_dot": 3},
    )
    # Only the forward copy crosses to the backward pass, as bytes.
    moves = r"= f8e\w+\[\S+ (?:fusion|copy|transpose|convert)\("
    self.assertNotRegex(text, moves)
