# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`dot_general`: forward and backward against f64, and in its users' hands."""

import collections
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.testing import quantization_lowerings, transformations
from jaxplugin.testing.oracles import gradients_oracle as oracle

MATMUL = (((1,), (0,)), ((), ()))

# Dimension numbers with every kind of difficulty, for operands whose sizes are
# named by letters: b batch, m and n free, k contracting.
CASES = (
  ("mk", "kn"),
  ("mk", "nk"),
  ("km", "nk"),
  ("bmk", "bnk"),
  ("mbk", "knb"),
  ("bmMk", "kNbn"),
  ("mkK", "KkNn"),
  ("kbKm", "nKbk"),
  ("Bbmk", "bBkn"),
  ("k", "kn"),
  ("mk", "k"),
)


class WithinTestCase(parameterized.TestCase):
  def assert_within(self, actual, *expected, rounding=0.0):
    """Asserts that a sum of products is within the contract's bound of each."""
    value, magnitude = (sum(terms) for terms in zip(*expected, strict=True))
    error = np.abs(np.asarray(actual, np.float64) - value)
    np.testing.assert_array_less(
      error, oracle.BOUND * magnitude + rounding * np.abs(value) + 1e-300
    )


class DotGeneralTest(WithinTestCase):
  def check_products(self, case, function, formats, dgrad, wgrad):
    """Compares the result and both gradients with products of `formats`."""
    lhs_names, rhs_names = case
    out = oracle.result_of(lhs_names, rhs_names)
    lhs, rhs, g = (
      oracle.normal(seed, names)
      for seed, names in enumerate((lhs_names, rhs_names, out))
    )
    numbers = oracle.numbers(lhs_names, rhs_names)

    products = oracle.with_gradients(lambda l, r: function(l, r, numbers))
    for actual, product in zip(
      products(lhs, rhs, g),
      (
        (lhs, lhs_names, rhs, rhs_names, out, *formats),
        (g, out, rhs, rhs_names, lhs_names, *dgrad),
        (g, out, lhs, lhs_names, rhs_names, *wgrad),
      ),
      strict=True,
    ):
      self.assertEqual(actual.dtype, np.float32)
      self.assert_within(actual, oracle.expected_product(*product))

  @parameterized.product(case=CASES, format=(jp.MXFP8, jp.NVFP4))
  @pytest.mark.sample(2)
  def test_forward_and_gradients_are_those_of_quantized_products(
    self, case, format
  ):
    function = jp.dot_general(format, format)
    self.check_products(case, function, *[(format, format)] * 3)

  @parameterized.product(
    formats=(
      (jp.MXFP8, jp.MXFP4, jp.MXFP8_E5M2),
      (None, jp.NVFP4, jp.MXFP8),
      (jp.MXFP8, None, None),
      (jp.NVFP4, jp.MXFP8, jp.MXFP4),
    ),
    quantize_dgrad=(True, False),
    quantize_wgrad=(True, False),
  )
  @pytest.mark.sample(2)
  def test_each_format_and_option_reaches_its_product(
    self, formats, quantize_dgrad, quantize_wgrad
  ):
    lhs_format, rhs_format, grad_format = formats
    function = jp.dot_general(
      lhs_format,
      rhs_format,
      grad_format=grad_format,
      quantize_dgrad=quantize_dgrad,
      quantize_wgrad=quantize_wgrad,
    )
    grad_format = grad_format or lhs_format or rhs_format
    self.check_products(
      ("mk", "kn"),
      functools.partial(function, precision="highest"),
      (lhs_format, rhs_format),
      (grad_format, rhs_format) if quantize_dgrad else (None, None),
      (grad_format, lhs_format) if quantize_wgrad else (None, None),
    )

  @quantization_lowerings.needs_library
  def test_rows_of_int8_are_rounded_where_numerics_md_says(self):
    shapes = (40, 300), (300, 72), (40, 72)
    x, w, g = (
      np.random.default_rng(i).standard_normal(shape).astype(np.float32)
      for i, shape in enumerate(shapes)
    )
    function = jp.dot_general("int8_row", "int8_row")
    products = lambda *args: oracle.with_gradients(
      lambda l, r: function(l, r, MATMUL)
    )(*args)
    kernels = products(x, w, g)
    operations = quantization_lowerings.by_operations(products)(x, w, g)

    def rows(x):
      scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
      return np.rint(x / scale).astype(np.float64), scale.astype(np.float64)

    for actual, summed_first, lhs, rhs in zip(
      kernels, operations, (x, g, x.T), (w.T, w, g.T), strict=True
    ):
      (lhs, lhs_scale), (rhs, rhs_scale) = rows(lhs), rows(rhs)
      scale = lhs_scale * rhs_scale.T
      exact = lhs @ rhs.T * scale
      self.assert_within(actual, (exact, np.abs(lhs) @ np.abs(rhs).T * scale))
      # Sums of codes are exact. Two scale factors multiply them.
      np.testing.assert_array_less(
        np.abs(summed_first - exact), 2.01 * 2.0**-24 * np.abs(exact) + 1e-300
      )

  def test_preferred_element_type_is_the_results_dtype(self):
    function = jp.dot_general(jp.MXFP8, jp.MXFP8)
    bf16 = oracle.normal(0, "mk", ml_dtypes.bfloat16)
    result = function(
      bf16,
      oracle.normal(1, "kn", ml_dtypes.bfloat16),
      oracle.numbers("mk", "kn"),
      preferred_element_type=jnp.float32,
    )
    self.assertEqual(result.dtype, jnp.float32)
    with self.assertRaisesRegex(TypeError, "preferred_element_type .*'foo'"):
      function(
        bf16, bf16, oracle.numbers("mk", "nk"), preferred_element_type="foo"
      )

  @parameterized.parameters("bmk,kn->bmn", "bmk,bkn->bmn", "mk,nk->nm")
  @pytest.mark.sample(1)
  def test_einsum_takes_it(self, expression):
    operands, out = expression.split("->")
    lhs_names, rhs_names = operands.split(",")
    lhs, rhs = oracle.normal(0, lhs_names), oracle.normal(1, rhs_names)
    result = jnp.einsum(
      expression,
      lhs,
      rhs,
      _dot_general=jp.dot_general(jp.MXFP8, jp.MXFP8),
    )
    self.assert_within(
      result,
      oracle.expected_product(
        lhs, lhs_names, rhs, rhs_names, out, jp.MXFP8, jp.MXFP8
      ),
    )

  def test_symbolic_contracting_size_is_padded(self):
    function = jp.dot_general(jp.MXFP8, jp.MXFP8)
    (k,) = jax.export.symbolic_shape("k")
    exported = jax.export.export(
      jax.jit(lambda x, w: function(x, w, oracle.numbers("mk", "kn")))
    )(
      jax.ShapeDtypeStruct((4, k), jnp.float32),
      jax.ShapeDtypeStruct((k, 3), jnp.float32),
    )
    for size in (5, 32, 40):
      x, w = np.ones((4, size), np.float32), np.ones((size, 3), np.float32)
      np.testing.assert_array_equal(exported.call(x, w), np.full((4, 3), size))

  def test_zero_sizes_give_zero_or_empty(self):
    function = jp.dot_general(jp.MXFP8, jp.MXFP8)
    numbers = oracle.numbers("mk", "kn")
    result = function(
      np.zeros((3, 0), np.float32), np.zeros((0, 2), np.float32), numbers
    )
    np.testing.assert_array_equal(result, np.zeros((3, 2)))
    result = function(
      np.zeros((0, 8), np.float32), np.zeros((8, 2), np.float32), numbers
    )
    self.assertEqual(result.shape, (0, 2))

  def test_bad_arguments_are_refused_with_names_and_values(self):
    numbers = oracle.numbers("mk", "kn")
    good = jp.dot_general(jp.MXFP8, jp.MXFP8)
    f32 = np.zeros((4, 8), np.float32)
    dot = jp.dot_general
    for error, pattern, call in (
      (TypeError, "lhs_format must be a BlockFormat.*nvfp4.*got 8",
        lambda: dot(8, "mxfp8")),
      (TypeError, r"lhs_format must be .*got float32\[4, 8\]; dot_general retu",
        lambda: dot(f32, f32.T)),
      (TypeError, r"rhs_format must be .*ScaledArray.*jaxplugin\.block_scaled_",
        lambda: dot("mxfp8", jp.quantize(f32, "mxfp8", pad=True))),
      (TypeError, "lhs_format or rhs_format.*None", lambda: dot(None, None)),
      (TypeError, r"rhs must be float32.*int32\[8, 2\]",
        lambda: good(f32, np.zeros((8, 2), jnp.int32), numbers)),
      (TypeError, "contracting sizes must agree.* 8 .* 9 ",
        lambda: good(f32, np.zeros((9, 2), np.float32), numbers)),
      (TypeError, "^dot_general: dimension_numbers must be .* got 'mk'",
        lambda: good(f32, f32.T, "mk")),
      (ValueError, "dot_general: grad_format: .*'mxfp7'.*mxfp8, .*nvfp4",
        lambda: dot("mxfp8", "mxfp8", grad_format="mxfp7")),
      (ValueError, "scale_rounding.*'down'",
        lambda: dot("mxfp8", "mxfp8", scale_rounding="down")),
      (ValueError, "^dot_general: implementation.*'cuda'",
        lambda: dot("mxfp8", "mxfp8", implementation="cuda")),
      (ValueError, "^dot_general: precision must be .* got 'higest'",
        lambda: good(f32, f32.T, numbers, precision="higest")),
    ):  # fmt: skip
      with self.subTest(pattern), self.assertRaisesRegex(error, pattern):
        call()

  def test_default_dtype_is_that_of_lax(self):
    numbers = (((1,), (0,)), ((), ()))
    of_experts = jax.lax.RaggedDotDimensionNumbers(
      (((1,), (1,)), ((), ())), (0,), (0,)
    )
    ours = jp.dot_general("mxfp8", "mxfp8")
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16)
    for lhs, rhs in itertools.product(dtypes, dtypes):
      with self.subTest(lhs=lhs, rhs=rhs):
        x = jax.ShapeDtypeStruct((4, 64), lhs)
        w = jax.ShapeDtypeStruct((64, 8), rhs)
        of = lambda f, *args: jax.eval_shape(f, *args).dtype
        theirs = lambda x, w: jax.lax.dot_general(x, w, numbers)
        self.assertEqual(
          of(lambda x, w: ours(x, w, numbers), x, w), of(theirs, x, w)
        )
        experts = jax.ShapeDtypeStruct((2, 64, 8), rhs)
        sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
        product = lambda *args: jp.training.ragged_dot_general(
          *args, of_experts, recipe=jp.training.MXFP8_RECIPE
        )
        self.assertEqual(
          of(product, x, experts, sizes),
          of(jax.lax.ragged_dot, x, experts, sizes),
        )

  @parameterized.parameters(
    ("mxfp8", "mxfp4", "mxfp8"),
    ("mxfp4", "mxfp8", "mxfp4"),
    (None, "mxfp8", "mxfp8"),
  )
  def test_gradients_have_the_format_of_lhs_unless_it_has_none(
    self, lhs_format, rhs_format, grad_format
  ):
    x, numbers = np.ones((32, 32), np.float32), oracle.numbers("mk", "kn")

    def traced(**options):
      dot = jp.dot_general(lhs_format, rhs_format, **options)
      loss = lambda lhs, rhs: dot(lhs, rhs, numbers).sum()
      return str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, x))

    self.assertEqual(traced(), traced(grad_format=grad_format))
    self.assertNotEqual(traced(), traced(grad_format="mxfp8_e5m2"))


# Forward mode has one matrix with the backward pass.


def expected_tangent(x, x_names, y, y_names, out, y_format):
  """f64 product of a tangent of x, as it is, and y as x's gradient has it.

  Returns:
    The product, and sum|a * b|.
  """
  backward = [c for c in y_names if c not in x_names]  # what g and y contract
  y = oracle.fake_quantize(y, y_names, backward, y_format)
  x = np.asarray(x, np.float64)
  expression = f"{x_names},{y_names}->{out}"
  return (
    np.einsum(expression, x, y),
    np.einsum(expression, np.abs(x), np.abs(y)),
  )


class ForwardTest(WithinTestCase):
  @parameterized.parameters(
    ("mk", "kn", (jp.MXFP8, jp.MXFP8), {}),
    ("bmMk", "kNbn", (jp.NVFP4, jp.MXFP8), {}),
    ("kbKm", "nKbk", (None, jp.MXFP4), {"grad_format": jp.MXFP8_E5M2}),
    ("mkK", "KkNn", (jp.MXFP4, jp.NVFP4), {"quantize_dgrad": False}),
    ("mk", "k", (jp.MXFP8, jp.MXFP8), {"quantize_wgrad": False}),
  )
  @pytest.mark.full
  def test_tangent_is_a_product_with_what_the_backward_pass_has(
    self, lhs_names, rhs_names, formats, options
  ):
    out = oracle.result_of(lhs_names, rhs_names)
    lhs, lhs_tangent = (oracle.normal(i, lhs_names) for i in (0, 2))
    rhs, rhs_tangent = (oracle.normal(i, rhs_names) for i in (1, 3))
    numbers = oracle.numbers(lhs_names, rhs_names)
    function = jp.dot_general(*formats, **options)
    dot = lambda lhs, rhs: function(lhs, rhs, numbers)
    lhs_format = formats[0] if options.get("quantize_wgrad", True) else None
    rhs_format = formats[1] if options.get("quantize_dgrad", True) else None
    of_lhs = expected_tangent(
      lhs_tangent, lhs_names, rhs, rhs_names, out, rhs_format
    )
    of_rhs = expected_tangent(
      rhs_tangent, rhs_names, lhs, lhs_names, out, lhs_format
    )
    result, both = jax.jit(
      lambda primals, tangents: jax.jvp(dot, primals, tangents)
    )((lhs, rhs), (lhs_tangent, rhs_tangent))
    self.assert_within(both, of_lhs, of_rhs)
    np.testing.assert_array_equal(result, jax.jit(dot)(lhs, rhs))
    # A constant operand has no tangent.
    _, one = jax.jvp(lambda lhs: dot(lhs, rhs), (lhs,), (lhs_tangent,))
    self.assert_within(one, of_lhs)
    _, linear = jax.linearize(lambda rhs: dot(lhs, rhs), rhs)
    self.assert_within(linear(rhs_tangent), of_rhs)

  def test_tangents_of_bf16_are_of_bf16(self):
    bf16 = ml_dtypes.bfloat16
    lhs, rhs = oracle.normal(0, "mk", bf16), oracle.normal(1, "kn", bf16)
    function = jp.dot_general(jp.MXFP8, jp.MXFP8)
    tangent = oracle.normal(2, "mk", bf16)
    _, actual = jax.jvp(
      lambda x: function(x, rhs, MATMUL), (jnp.asarray(lhs),), (tangent,)
    )
    self.assertEqual(actual.dtype, jnp.bfloat16)
    self.assert_within(
      actual,
      expected_tangent(tangent, "mk", rhs, "kn", "mn", jp.MXFP8),
      rounding=oracle.BF16_ROUNDING,
    )

  def test_second_derivatives_of_products_in_high_precision(self):
    function = jp.dot_general(
      jp.MXFP8, jp.MXFP8, quantize_dgrad=False, quantize_wgrad=False
    )
    w = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    x = np.eye(2, 4, dtype=np.float32)
    loss = lambda x: (function(x, w, MATMUL) ** 2).sum() / 2
    # The gradient by x is y w', whose own, by x, is w w' for each row.
    expected = np.einsum("ab,ij->aibj", np.eye(2), w.astype(np.float64) @ w.T)
    for hessian in (
      jax.hessian(loss),
      jax.jacrev(jax.grad(loss)),
      jax.jacfwd(jax.jacfwd(loss)),
      jax.jacrev(jax.jacfwd(loss)),
    ):
      np.testing.assert_allclose(
        jax.jit(hessian)(x), expected, rtol=0, atol=1e-6
      )

  def test_second_derivative_of_quantized_products_is_refused(self):
    function = jp.dot_general(jp.MXFP8, jp.MXFP8)
    x, w = oracle.normal(0, "mk"), oracle.normal(1, "kn")
    loss = lambda x: (function(x, w, MATMUL) ** 2).sum()
    for second in (
      jax.jacfwd(jax.grad(loss)),
      jax.jacfwd(jax.jacfwd(loss)),
      jax.jacrev(jax.jacfwd(loss)),
    ):
      with self.assertRaisesRegex(NotImplementedError, "quantize_dgrad=False"):
        jax.jit(second).trace(x)


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
  return oracle.with_gradients(lambda l, r: function(l, r, numbers))


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
    x, w, g = (np.array(a, dtype) for a in (X, W, G))
    # Bad numbers in one row and column: NVFP4's global scales differ by axis.
    x[3, 5:7] = np.nan, 60
    g[7:9, 9] = np.inf, -50
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

  def test_unused_gradient_changes_no_bit_of_the_other(self):
    function = jp.dot_general(jp.NVFP4, jp.NVFP4)
    loss = lambda x, w: jnp.sin(function(x, w, MATMUL)).sum()
    both = jax.jit(jax.grad(loss, argnums=(0, 1)))(X, W)
    for i in range(2):
      one = jax.jit(jax.grad(loss, argnums=i))(X, W)
      np.testing.assert_array_equal(one, both[i])


MXFP8 = (jp.MXFP8, jp.MXFP8)
BOTH_GRADIENTS = functools.partial(jax.grad, argnums=(0, 1))


class CountTest(parameterized.TestCase):
  """How often what is quantized, once what is not used is dropped."""

  @parameterized.parameters(
    # lhs and incoming gradient along both, weights in each pass by themselves,
    # as no copy of them is kept.
    (BOTH_GRADIENTS, (jp.MXFP8, jp.NVFP4), {}, (2, 2)),
    # A plain operand is not quantized.
    (BOTH_GRADIENTS, (None, jp.MXFP8), {}, (2, 1)),
    (BOTH_GRADIENTS, (jp.MXFP8, None), {}, (0, 2)),
    # w forward only, and g for the other product only.
    (BOTH_GRADIENTS, MXFP8, {"quantize_dgrad": False}, (2, 1)),
    (BOTH_GRADIENTS, MXFP8, {"quantize_wgrad": False}, (4, 0)),
    (BOTH_GRADIENTS, MXFP8,
      {"quantize_dgrad": False, "quantize_wgrad": False}, (2, 0)),
    # Forward, along one dimension.
    (lambda loss: loss, MXFP8, {}, (2, 0)),
    # x (forward), g (backward), and w in each pass; w, g, and x along both.
    (lambda loss: jax.grad(loss, 0), MXFP8, {}, (4, 0)),
    (lambda loss: jax.grad(loss, 1), MXFP8, {}, (2, 1)),
    # Forward x and w along one each. Backward that is done again, for the
    # argument of sin, x along both, w for the other product, and g.
    (lambda loss: jax.value_and_grad(jax.checkpoint(loss), (0, 1)), MXFP8, {},
      (4, 2)),
  )  # fmt: skip
  def test_each_is_quantized_once_along_all_it_is_needed(
    self, transform, formats, kwargs, expected
  ):
    function = jp.dot_general(*formats, **kwargs)
    loss = lambda x, w: jnp.sin(function(x, w, MATMUL)).sum()
    found = primitives(transform(loss), X, W)
    counts = [found[f"block_quantize {axes}"] for axes in (1, 2)]
    self.assertEqual(tuple(counts), expected)


class KeptTest(parameterized.TestCase):
  """What lives from the forward to the backward pass."""

  def kept(self, *formats, numbers=MATMUL, arrays=(X, W), **kwargs):
    function = jp.dot_general(*formats, **kwargs)
    dot = lambda x, w: function(x, w, numbers)
    vjp = jax.eval_shape(lambda x, w: jax.vjp(dot, x, w)[1], *arrays)
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
    x, w = np.ones((2, 32, 64), np.float32), np.ones((64, 96), np.float32)
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
