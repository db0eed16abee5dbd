# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The triton implementation of the ragged dot.

Its suite, operands, gradients and refusals in Triton's interpreter, and what is
lowered and compiled for GPUs that are not attached.
"""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.arrays import layouts
from jaxplugin.core import targets
from jaxplugin.lab.compilation import deviceless
from jaxplugin.ragged import backends, calls
from jaxplugin.runtime import triton_library
from jaxplugin.testing import contract, installed, interpreted
from jaxplugin.testing.dot_suite import ragged_suite

needs_interpreter = interpreted.needs_interpreter


class TritonRaggedSuite(interpreted.RecordedTestCase, ragged_suite.RaggedSuite):
  """The contract's suite for a GPU that is not there.

  Attributes:
    target: that GPU.
    paths: of the kernels, in their names.
  """

  implementation = "triton"
  has_loop = True
  # Tiles are of other sizes where a group has all rows.
  if interpreted.products_depend_on_rows():
    loop_bound = contract.DOT_BOUND
  # Three GPUs together have more than 500 fuzzed matmuls.
  sizes_of_each = 6
  target = targets.named_target("h200")
  paths = ("upcast", "small_m", "native")

  def dot(self, *args, **options):
    with jp.use_target(self.target):
      return super().dot(*args, **options)

  def dense_dot(self, *args):
    with jp.use_target(self.target):
      return super().dense_dot(*args)

  def tearDown(self):
    if self.launched:
      paths = "|".join(self.paths)
      self.assertRegex(self.names(), f"block_scaled_ragged_({paths})")
    super().tearDown()


@needs_interpreter
@pytest.mark.full
class HopperTest(TritonRaggedSuite):
  """Dequantizes few rows' weights in registers, in another order of k."""

  paths = ("small_m", "upcast")


@needs_interpreter
@pytest.mark.sample(1)
class BlackwellTest(TritonRaggedSuite):
  """Leaves it to the matrix instruction where that takes the formats."""

  target = targets.named_target("b200")


@needs_interpreter
@pytest.mark.sample(1)
class AmpereTest(TritonRaggedSuite):
  """Dequantizes by integer operations."""

  sizes_of_each = 4
  target = targets.named_target("a100")
  paths = ("upcast",)


del TritonRaggedSuite


class PlainWeightsTest(absltest.TestCase):
  """A contraction's derivative and dgrad in high precision have such."""

  def test_contraction_across_plain_weights_is_xlas(self):
    for name in ("a100", "h100", "b200"):
      for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        with self.subTest(name, dtype=dtype):
          array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
          call = calls.plain(
            array(32, 64),
            array(2, 64, 32),
            jax.ShapeDtypeStruct((2,), jnp.int32),
            1,
            preferred_element_type=jnp.dtype(dtype),
          )
          decision = backends.choose(
            call.problem(), targets.named_target(name), None
          )
          self.assertEqual(decision.implementation, "xla")


class FastestPrecisionTest(absltest.TestCase):
  def test_plan_says_that_fastest_precision_changes_nothing(self):
    w = jp.quantize(jnp.ones((2, 64, 64)), "mxfp8")
    args = (jnp.ones((32, 64)), w, jnp.array([30, 2]))
    for precision, count in (("fastest", 1), (None, 0)):
      (found,) = jp.explain(
        functools.partial(jp.ragged_dot, precision=precision),
        *args,
        target=targets.named_target("h100"),
      )
      self.assertEqual(found.decision.implementation, "triton")
      notes = [note for note in found.decision.notes if "fastest" in note]
      self.assertLen(notes, count)


_GROUPS, _M, _N, _K = 4, 14, 48, 96
_SIZES = np.array([5, 0, 6, 1], np.int32)


def _operands(format, *, seed=0, n=_N, k=_K):
  """Rows of integers, weights whose sums are exact, and these in f64."""
  rng = np.random.default_rng(seed)
  x = rng.integers(-4, 5, (_M, k)).astype(np.float32)
  w_q, exact = ragged_suite.operand(rng, format, (_GROUPS, n, k), integers=True)
  return x, w_q, exact


class _TestCase(interpreted.RecordedTestCase):
  def setUp(self):
    super().setUp()
    # A call that another test made is not lowered again, and not recorded.
    jax.clear_caches()

  def dot(self, *args, name="h200", **options):
    target = targets.named_target(name)
    with jp.use_target(target):
      return jp.ragged_dot(*args, implementation="triton", **options)


@needs_interpreter
class PreparedTest(_TestCase):
  """Weights that `prepare_weights` rearranged."""

  @parameterized.product(
    prepared=(
      *(("a100", jp.MXFP4), ("h200", jp.NVFP4), ("b200", jp.MXFP8)),
      *(("h200", jp.MXFP4), ("b200", jp.NVFP4)),
    ),
    activation=(None, "swiglu"),
  )
  @pytest.mark.sample(2)
  def test_prepared_weights_give_what_others_give(self, prepared, activation):
    name, format = prepared
    x, w_q, _ = _operands(format)
    dot = functools.partial(self.dot, name=name, activation=activation)
    usual = dot(x, w_q, _SIZES)
    self.launched.clear()
    prepared = jp.prepare_weights(w_q, targets.named_target(name))
    np.testing.assert_array_equal(dot(x, prepared, _SIZES), usual)
    is_interleaved = format.is_fp4 and name != "b200"
    self.assertEqual("interleaved" in self.names(), is_interleaved)
    shape = dict(self.launched[0].constexprs)["TILING"].shape
    self.assertEqual(shape.rhs.is_swizzled, name == "b200")

  def test_weights_prepared_for_a_cpu_are_bytes(self):
    x, w_q, exact = _operands(jp.MXFP8)
    expected, _ = ragged_suite.oracle(x, exact, _SIZES)
    actual = self.dot(x, w_q.to_bytes(), _SIZES)
    np.testing.assert_array_equal(actual, expected)

  def test_swizzled_lhs_is_put_in_order(self):
    _, w_q, exact = _operands(jp.MXFP8)
    rng = np.random.default_rng(1)
    x_q, exact_x = ragged_suite.operand(rng, jp.MXFP8, (_M, _K), integers=True)
    swizzled = jp.ScaledArray(
      x_q.values,
      layouts.swizzle_scale(x_q.scale),
      None,
      jp.MXFP8,
      scale_layout=layouts.SWIZZLED,
    )
    expected, _ = ragged_suite.oracle(exact_x, exact, _SIZES)
    actual = self.dot(swizzled, w_q, _SIZES, name="b200")
    np.testing.assert_array_equal(actual, expected)
    self.assertIn("native", self.names())


@needs_interpreter
class DecodeTest(_TestCase):
  """Few rows, many groups."""

  @parameterized.product(m=(1, 3, 8), name=("h200", "a100", "b200"))
  @pytest.mark.sample(1)
  def test_exact(self, m, name):
    rng = np.random.default_rng(m)
    groups, n, k = 32, 40, 64
    w_q, exact = ragged_suite.operand(
      rng, jp.MXFP4, (groups, n, k), integers=True
    )
    x = rng.integers(-4, 5, (m, k)).astype(jnp.bfloat16)
    sizes = np.bincount(rng.integers(0, groups, m), minlength=groups)
    expected, _ = ragged_suite.oracle(x.astype(np.float64), exact, sizes)
    actual = self.dot(x, w_q, sizes.astype(np.int32), name=name)
    np.testing.assert_array_equal(actual, expected)
    # One launch, of at most a tile for each row: nothing is waited for.
    (launch,) = self.launched
    self.assertLessEqual(launch.grid, m * -(-n // 16))


@needs_interpreter
@pytest.mark.full
class GradientTest(_TestCase):
  """By the kernels too: that of lhs contracts across the blocks."""

  @parameterized.product(
    format=(jp.MXFP8, jp.MXFP8_E5M2, jp.MXFP6_E2M3, jp.MXFP4, jp.NVFP4),
    name=("h200", "b200"),
  )
  def test_of_rows_is_exact_on_integers(self, format, name):
    x, w_q, exact = _operands(format, n=35, k=96)
    rng = np.random.default_rng(1)
    g = rng.integers(-4, 5, (_M, 35)).astype(np.float32)
    f = lambda x: self.dot(x, w_q, _SIZES, name=name)
    with jp.use_target(targets.named_target(name)):
      _, pull = jax.vjp(f, x)
      (actual,) = pull(g)
    expected, _ = ragged_suite.oracle(g, exact.transpose(0, 2, 1), _SIZES)
    np.testing.assert_array_equal(actual, expected)
    self.assertIn("ragged_upcast_across", self.names())

  @parameterized.parameters("interleaved", "swizzled")
  def test_of_prepared_weights_read_them_as_they_are(self, how):
    name = "h200" if how == "interleaved" else "b200"
    x, w_q, exact = _operands(jp.NVFP4)
    w_q = jp.prepare_weights(w_q, targets.named_target(name))
    rng = np.random.default_rng(1)
    g = rng.integers(-4, 5, (_M, _N)).astype(np.float32)
    with jp.use_target(targets.named_target(name)):
      _, pull = jax.vjp(lambda x: self.dot(x, w_q, _SIZES, name=name), x)
      (actual,) = pull(g)
    expected, _ = ragged_suite.oracle(g, exact.transpose(0, 2, 1), _SIZES)
    np.testing.assert_array_equal(actual, expected)
    across = [launch for launch in self.launched if "across" in launch.name]
    self.assertLen(across, 1)
    rhs = dict(across[0].constexprs)["TILING"].shape.rhs
    self.assertTrue(getattr(rhs, f"is_{how}"))


class ChoiceTest(parameterized.TestCase):
  """Results of `explain`, and errors."""

  def explained(self, target, *, m=4, groups=32, format=jp.MXFP4, **options):
    shape = (groups, 5760, 2880)
    spec = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    w_q = jax.eval_shape(lambda w: jp.quantize(w, format), spec)
    (dot,) = jp.explain(
      functools.partial(jp.ragged_dot, **options),
      jax.ShapeDtypeStruct((m, 2880), jnp.bfloat16),
      w_q,
      jax.ShapeDtypeStruct((groups,), jnp.int32),
      target=target,
    )
    reasons = {r.implementation: r.reason for r in dot.decision.refusals}
    return dot.decision, reasons

  @parameterized.parameters(
    ("a100", 4, "ragged_upcast_bf16_mxfp4_16x128x128"),
    ("h200", 4, "ragged_small_m_bf16_mxfp4_16x128x128_split2"),
    ("h200", 16384, "ragged_upcast_bf16_mxfp4_128x128x64"),
    ("b200", 4, "ragged_small_m_bf16_mxfp4_16x256x128"),
  )
  def test_config_is_told(self, name, m, kernel):
    decision, reasons = self.explained(targets.named_target(name), m=m)
    self.assertEqual(decision.implementation, "triton")
    self.assertIn(kernel, " ".join(decision.notes))
    self.assertIn("finds its rows on the device", " ".join(decision.notes))
    self.assertIn("lower priority than triton", reasons["xla"])

  def test_refusals_are_told(self):
    h200 = targets.named_target("h200")
    for target, options, text in (
      (triton_library.with_descriptors(h200), {}, "do not use TMA descriptors"),
      (targets.named_target("mi300x"), {}, "only if one is attached"),
      (h200, {"groups": 5000}, "groups must be 1 to 4095, got 5000"),
      (
        h200.without_library(targets.JAX_TRITON, "it is away"),
        {},
        "it is away",
      ),
    ):
      decision, reasons = self.explained(target, **options)
      self.assertEqual(decision.implementation, "xla")
      self.assertIn(text, reasons["triton"])


GROUPS, M, N, K = 32, 8, 704, 1536
# What XLA has the host decide or wait for, and copies to it.
HOST = re.compile(
  r"\b(while|conditional|infeed|outfeed|send|recv|copy-start)\("
)

needs_triton = installed.needs_triton


def experts(format, name=None):
  """Stand-ins of weights, prepared for a target."""
  spec = jax.ShapeDtypeStruct((GROUPS, N, K), jnp.bfloat16)

  def make(w):
    w_q = jp.quantize(w, format)
    if name is None:
      return w_q
    return jp.prepare_weights(w_q, targets.named_target(name))

  return jax.eval_shape(make, spec)


def rows(dtype=jnp.bfloat16):
  return jax.ShapeDtypeStruct((M, K), dtype)


SIZES = jax.ShapeDtypeStruct((GROUPS,), jnp.int32)


@needs_triton
class LoweredTest(parameterized.TestCase):
  @parameterized.parameters("a100", "h200", "b200", "rtx5090")
  @pytest.mark.sample(1)
  def test_is_calls_of_kernels_alone(self, name):
    with jp.use_target(targets.named_target(name)):
      traced = jax.jit(
        functools.partial(jp.ragged_dot, activation="swigluoai")
      ).trace(rows(), experts(jp.MXFP4), SIZES)
      text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # The product, and the sums of its parts.
    self.assertEqual(text.count("@triton_kernel_call"), 2)
    self.assertNotRegex(text, r"stablehlo\.(while|dot_general|case)")

  def test_gradient_calls_kernels_too(self):
    def loss(x, w, sizes):
      return jnp.sum(jp.ragged_dot(x, w, sizes) ** 2)

    with jp.use_target(targets.named_target("h200")):
      traced = jax.jit(jax.grad(loss)).trace(rows(), experts(jp.MXFP4), SIZES)
      text = traced.lower(lowering_platforms=("cuda",)).as_text()
    self.assertGreaterEqual(text.count("@triton_kernel_call"), 2)
    self.assertNotRegex(text, r"stablehlo\.(while|dot_general|case)")
    # Nothing of all experts is dequantized.
    self.assertNotRegex(text, rf"tensor<{GROUPS}x{N}x{K}x(f|bf)")


@needs_triton
@installed.needs("jax_cuda13_plugin")
class OptimizedTest(parameterized.TestCase):
  """The lowering, compiled by XLA's GPU compiler without a GPU."""

  def compiled(self, name, lhs, rhs, **options):
    function = functools.partial(jp.ragged_dot, **options)
    target = targets.named_target(name)
    return deviceless.compile(
      function, lhs, rhs, SIZES, target=target
    ).as_text()

  @parameterized.parameters(
    ("h200", jp.MXFP4, None),
    ("h200", jp.MXFP8, None),
    ("h200", jp.NVFP4, "h200"),
    ("b200", jp.MXFP8, "b200"),
  )
  @pytest.mark.full
  def test_experts_are_read_where_they_lie(self, name, format, prepared_for):
    text = self.compiled(
      name,
      rows(),
      experts(format, prepared_for),
      implementation="triton",
      preferred_element_type=jnp.bfloat16,
      activation="swigluoai",
    )
    entry = text[text.index("ENTRY") :]
    self.assertIn("triton_kernel_call", entry)
    # No operation makes an array of all experts, of values or of scales.
    least = GROUPS * N * K // 32
    made = re.findall(
      r"= \w+\[([\d,]+)\]\S* (?!parameter|bitcast\b|get-tuple)\w", entry
    )
    sizes = [math.prod(map(int, shape.split(","))) for shape in made]
    self.assertNotEmpty(sizes)
    self.assertLess(max(sizes), least)
    self.assertNotRegex(text, HOST)

  @pytest.mark.full
  def test_it_would_be_seen_if_the_host_decided(self):
    text = self.compiled(
      "h200", rows(), experts(jp.MXFP8), implementation="xla"
    )
    self.assertRegex(text, HOST)
