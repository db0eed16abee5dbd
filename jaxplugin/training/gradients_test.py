# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`dot_general`: forward and backward against f64, and in its users' hands."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.testing.oracles import gradients_oracle as testing

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
      error, testing.BOUND * magnitude + rounding * np.abs(value) + 1e-300
    )


class DotGeneralTest(WithinTestCase):
  def check_products(self, case, function, formats, dgrad, wgrad):
    """Compares the result and both gradients with products of `formats`."""
    lhs_names, rhs_names = case
    out = testing.result_of(lhs_names, rhs_names)
    lhs, rhs, g = (
      testing.normal(seed, names)
      for seed, names in enumerate((lhs_names, rhs_names, out))
    )
    numbers = testing.numbers(lhs_names, rhs_names)

    products = testing.with_gradients(lambda l, r: function(l, r, numbers))
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
      self.assert_within(actual, testing.expected_product(*product))

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

  def test_preferred_element_type_is_the_results_dtype(self):
    function = jp.dot_general(jp.MXFP8, jp.MXFP8)
    bf16 = testing.normal(0, "mk", ml_dtypes.bfloat16)
    result = function(
      bf16,
      testing.normal(1, "kn", ml_dtypes.bfloat16),
      testing.numbers("mk", "kn"),
      preferred_element_type=jnp.float32,
    )
    self.assertEqual(result.dtype, jnp.float32)
    with self.assertRaisesRegex(TypeError, "preferred_element_type .*'foo'"):
      function(
        bf16, bf16, testing.numbers("mk", "nk"), preferred_element_type="foo"
      )

  @parameterized.parameters("bmk,kn->bmn", "bmk,bkn->bmn", "mk,nk->nm")
  @pytest.mark.sample(1)
  def test_einsum_takes_it(self, expression):
    operands, out = expression.split("->")
    lhs_names, rhs_names = operands.split(",")
    lhs, rhs = testing.normal(0, lhs_names), testing.normal(1, rhs_names)
    result = jnp.einsum(
      expression,
      lhs,
      rhs,
      _dot_general=jp.dot_general(jp.MXFP8, jp.MXFP8),
    )
    self.assert_within(
      result,
      testing.expected_product(
        lhs, lhs_names, rhs, rhs_names, out, jp.MXFP8, jp.MXFP8
      ),
    )

  def test_shard_map_sums_the_gradient_of_a_replicated_weight(self):
    if jax.device_count() < 2:
      self.skipTest(f"needs 2 devices, has {jax.device_count()}")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    spec = jax.sharding.PartitionSpec
    function = jp.dot_general(jp.MXFP8, jp.MXFP8)
    numbers = testing.numbers("mk", "kn")
    # Integers whose quantization, products and sums are all exact.
    x = np.random.default_rng(0).integers(-4, 5, (64, 32)).astype(np.float32)
    w = np.random.default_rng(1).integers(-4, 5, (32, 8)).astype(np.float32)

    @jax.shard_map(mesh=mesh, in_specs=(spec("d"), spec()), out_specs=spec())
    def loss(x, w):
      return jax.lax.psum(function(x, w, numbers).sum(), "d")

    grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    ones = np.ones((64, 8))
    np.testing.assert_array_equal(grads[0], ones @ w.T)
    np.testing.assert_array_equal(grads[1], x.T @ ones)

  def test_symbolic_contracting_size_is_padded(self):
    function = jp.dot_general(jp.MXFP8, jp.MXFP8)
    (k,) = jax.export.symbolic_shape("k")
    exported = jax.export.export(
      jax.jit(lambda x, w: function(x, w, testing.numbers("mk", "kn")))
    )(
      jax.ShapeDtypeStruct((4, k), jnp.float32),
      jax.ShapeDtypeStruct((k, 3), jnp.float32),
    )
    for size in (5, 32, 40):
      x, w = jnp.ones((4, size)), jnp.ones((size, 3))
      np.testing.assert_array_equal(exported.call(x, w), np.full((4, 3), size))

  def test_zero_sizes_give_zero_or_empty(self):
    function = jp.dot_general(jp.MXFP8, jp.MXFP8)
    numbers = testing.numbers("mk", "kn")
    result = function(jnp.zeros((3, 0)), jnp.zeros((0, 2)), numbers)
    np.testing.assert_array_equal(result, np.zeros((3, 2)))
    result = function(jnp.zeros((0, 8)), jnp.zeros((8, 2)), numbers)
    self.assertEqual(result.shape, (0, 2))

  def test_bad_arguments_are_refused_with_names_and_values(self):
    numbers = testing.numbers("mk", "kn")
    good = jp.dot_general(jp.MXFP8, jp.MXFP8)
    f32 = jnp.zeros((4, 8))
    dot = jp.dot_general
    type_errors = {
      "lhs_format must be a BlockFormat.*nvfp4.*got 8": lambda: dot(8, "mxfp8"),
      r"lhs_format must be .*got float32\[4, 8\]; dot_general returns": (
        lambda: dot(f32, f32.T)),
      r"rhs_format must be .*got ScaledArray.*jaxplugin\.block_scaled_dot": (
        lambda: dot("mxfp8", jp.quantize(f32, "mxfp8", pad=True))),
      "lhs_format or rhs_format.*None": lambda: dot(None, None),
      r"rhs must be float32.*int32\[8, 2\]": (
        lambda: good(f32, jnp.zeros((8, 2), jnp.int32), numbers)),
      "contracting sizes must agree.* 8 .* 9 ": (
        lambda: good(f32, jnp.zeros((9, 2)), numbers)),
      "^dot_general: dimension_numbers must be .* got 'mk'": (
        lambda: good(f32, f32.T, "mk")),
    }  # fmt: skip
    value_errors = {
      "dot_general: grad_format: .*'mxfp7'.*mxfp8, .*nvfp4": (
        lambda: dot("mxfp8", "mxfp8", grad_format="mxfp7")
      ),
      "scale_rounding.*'down'": (
        lambda: dot("mxfp8", "mxfp8", scale_rounding="down")
      ),
      "^dot_general: implementation.*'cuda'": (
        lambda: dot("mxfp8", "mxfp8", implementation="cuda")
      ),
      "^dot_general: precision must be .* got 'higest'": (
        lambda: good(f32, f32.T, numbers, precision="higest")
      ),
    }
    for error, rows in ((TypeError, type_errors), (ValueError, value_errors)):
      for pattern, call in rows.items():
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
    x, numbers = jnp.ones((32, 32)), testing.numbers("mk", "kn")

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
  y = testing.fake_quantize(y, y_names, backward, y_format)
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
    out = testing.result_of(lhs_names, rhs_names)
    lhs, lhs_tangent = (testing.normal(i, lhs_names) for i in (0, 2))
    rhs, rhs_tangent = (testing.normal(i, rhs_names) for i in (1, 3))
    numbers = testing.numbers(lhs_names, rhs_names)
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
    lhs, rhs = testing.normal(0, "mk", bf16), testing.normal(1, "kn", bf16)
    function = jp.dot_general(jp.MXFP8, jp.MXFP8)
    tangent = testing.normal(2, "mk", bf16)
    _, actual = jax.jvp(
      lambda x: function(x, rhs, MATMUL), (jnp.asarray(lhs),), (tangent,)
    )
    self.assertEqual(actual.dtype, jnp.bfloat16)
    self.assert_within(
      actual,
      expected_tangent(tangent, "mk", rhs, "kn", "mn", jp.MXFP8),
      rounding=testing.BF16_ROUNDING,
    )

  @pytest.mark.full
  def test_gradient_of_a_mapped_weight_is_the_sum(self):
    # The tangents are mapped, and then transposed.
    function = jp.dot_general(jp.MXFP8, jp.MXFP8)
    lhs, rhs = testing.normal(0, "bmk"), testing.normal(1, "kn")
    g = testing.normal(2, "bmn")
    dot = lambda x, rhs: function(x, rhs, MATMUL)
    _, vjp = jax.vjp(jax.vmap(dot, in_axes=(0, None)), lhs, rhs)
    lhs_grad, rhs_grad = vjp(jnp.asarray(g))
    for i, row in enumerate(g):
      expected = testing.expected_product(
        row, "mn", rhs, "kn", "mk", jp.MXFP8, jp.MXFP8
      )
      self.assert_within(lhs_grad[i], expected)
    terms = [
      testing.expected_product(x, "mk", y, "mn", "kn", jp.MXFP8, jp.MXFP8)
      for x, y in zip(lhs, g, strict=True)
    ]
    self.assert_within(rhs_grad, *terms)

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
    x, w = testing.normal(0, "mk"), testing.normal(1, "kn")
    loss = lambda x: (function(x, w, MATMUL) ** 2).sum()
    for second in (
      jax.jacfwd(jax.grad(loss)),
      jax.jacfwd(jax.jacfwd(loss)),
      jax.jacrev(jax.jacfwd(loss)),
    ):
      with self.assertRaisesRegex(NotImplementedError, "quantize_dgrad=False"):
        second(x)
