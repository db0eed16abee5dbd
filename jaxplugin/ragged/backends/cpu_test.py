# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The suite of the ragged dot for the cpu implementation, and int8 rows."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import ragged_suite

SIZES = np.array([5, 0, 4], np.int32)


@pytest.mark.sample(1)
class RaggedTest(ragged_suite.RaggedSuite):
  implementation = "cpu"
  has_loop = True


@absltest.skipIf(
  jp.detect_target("cpu").cpu_kernels is None, "needs CPU kernels"
)
class SquareBlocksTest(parameterized.TestCase):
  """A weight's scale of 128 x 128 blocks is read as it is."""

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.x = jax.device_put(rng.standard_normal((12, 160)))
    self.w = rng.standard_normal((3, 256, 160)).astype(np.float32)

  def scale_rows(self, function, *args):
    text = jax.jit(function).lower(*args).as_text()
    return re.findall("rhs_scale_rows = ([0-9]+)", text)

  @parameterized.product(
    format=(jp.FP8_128X128, jp.FP8_128X128_E8M0), prepared=(False, True)
  )
  def test_bits_are_those_of_repeated_scales(self, format, prepared):
    w = contract.quantized(self.w, format)
    given = jp.prepare_weights(w) if prepared else w
    args = self.x, given, SIZES
    self.assertEqual(self.scale_rows(jp.ragged_dot, *args), ["128"])
    np.testing.assert_array_equal(
      jax.jit(jp.ragged_dot)(*args), jp.ragged_dot(self.x, w.in_rows(), SIZES)
    )

  @parameterized.parameters(0, 1, 2)
  def test_mapped_arguments_keep_the_scales(self, mapped):
    w = contract.quantized(self.w, jp.FP8_128X128)
    args = [self.x, w, SIZES]
    args[mapped] = jax.tree.map(lambda x: np.stack([x, x[::-1]]), args[mapped])
    in_axes = [0 if i == mapped else None for i in range(3)]
    dot = jax.vmap(jp.ragged_dot, in_axes)
    self.assertEqual(self.scale_rows(dot, *args), ["128"])
    run = jax.jit(dot)
    wanted = run(args[0], args[1].in_rows(), args[2])
    np.testing.assert_array_equal(run(*args), wanted)

  def test_weights_of_partial_blocks_have_repeated_scales(self):
    w = contract.quantized(self.w[:, :200], jp.FP8_128X128)
    args = self.x, w, SIZES
    self.assertEqual(self.scale_rows(jp.ragged_dot, *args), [])
    np.testing.assert_array_equal(
      jp.ragged_dot(*args), jp.ragged_dot(self.x, w.in_rows(), SIZES)
    )

  def test_sharded_weights_have_repeated_scales(self):
    mesh = jax.make_mesh((2,), ("e",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("e")
    w = contract.quantized(self.w[:2], jp.FP8_128X128)
    sharded = jax.device_put(
      jax.tree.map(np.asarray, w), jax.sharding.NamedSharding(mesh, spec)
    )
    sizes = SIZES[:2]
    np.testing.assert_array_equal(
      jax.jit(jp.ragged_dot)(self.x, sharded, sizes),
      jp.ragged_dot(self.x, w.in_rows(), sizes),
    )


@absltest.skipIf(
  jp.detect_target("cpu").cpu_kernels in (None, "baseline", "baseline_neon"),
  "the baseline quantizes no rows",
)
class FastestPrecisionTest(parameterized.TestCase):
  """precision="fastest" converts rows inside of the call."""

  # With AVX-512 BF16 the second group is in bf16, the others in int8.
  SIZES = jnp.array([12, 3, 9])

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.x = jax.device_put(rng.standard_normal((27, 96)))
    w = jax.device_put(rng.standard_normal((3, 40, 96)))
    self.w = jp.quantize(w, "nvfp4", batch_dims=1)
    self.dot = functools.partial(
      jp.ragged_dot, precision="fastest", implementation="cpu"
    )

  def of_groups(self, x, **options):
    """Computes each group by `block_scaled_dot`. Other rows are zeros."""
    dot = functools.partial(
      jp.block_scaled_dot, precision="fastest", implementation="cpu", **options
    )

    @jax.jit
    def run(x, w):
      parts = dot(x[:12], w[0]), dot(x[12:15], w[1]), dot(x[15:24], w[2])
      return jnp.concatenate([*parts, jnp.zeros((3, 40))])

    return run(x, self.w)

  def test_groups_have_the_bits_of_their_dots(self):
    expected = self.of_groups(self.x)
    got = self.dot(self.x, self.w, self.SIZES)
    np.testing.assert_array_equal(got, expected)
    plain = jp.ragged_dot(self.x, self.w, self.SIZES)
    self.assertGreater(np.abs(got - plain).max(), 1e-3)
    for precision in (None, "highest", jax.lax.Precision.HIGHEST):
      same = jp.ragged_dot(self.x, self.w, self.SIZES, precision=precision)
      np.testing.assert_array_equal(same, plain)

  def test_general_form_keeps_the_precision(self):
    numbers = jax.lax.RaggedDotDimensionNumbers(
      (((1,), (2,)), ((), ())), (0,), (0,)
    )
    got = jp.ragged_dot_general(
      self.x, self.w, self.SIZES, numbers, precision="fastest"
    )
    np.testing.assert_array_equal(got, self.of_groups(self.x))

  def test_transformations_keep_the_precision(self):
    expected = self.of_groups(self.x)
    function = lambda x: self.dot(x, self.w, self.SIZES)
    mapped = jax.jit(jax.vmap(function))(np.stack([self.x, 2 * self.x]))
    # Twice as many rows may be summed in another order.
    np.testing.assert_allclose(
      mapped, [expected, 2 * expected], rtol=1e-6, atol=1e-5
    )
    plain = lambda x: jp.ragged_dot(x, self.w, self.SIZES).sum()

    @jax.jit
    def run(x):
      gradients = jax.grad(lambda x: function(x).sum())(x), jax.grad(plain)(x)
      return jax.jvp(function, (x,), (x,)), gradients

    (primal, tangent), gradients = run(self.x)
    np.testing.assert_array_equal(primal, expected)
    np.testing.assert_array_equal(tangent, expected)
    # The derivative is that of the floats.
    np.testing.assert_allclose(*gradients, rtol=1e-5)

  def test_surrogates_keep_the_precision(self):
    w = jp.dequantize(self.w)
    got = self.dot(
      self.x, jp.quantize(w, "mxfp4", derivative="straight_through"), self.SIZES
    )
    expected = self.dot(self.x, jp.quantize(w, "mxfp4"), self.SIZES)
    np.testing.assert_array_equal(got, expected)


class FastestNoteTest(absltest.TestCase):
  def test_explain_says_what_fastest_precision_changes(self):
    target = jp.named_target("cpu")
    target = dataclasses.replace(target, cpu_kernels="avx512_bf16")
    w = jp.quantize(jnp.ones((3, 16, 32)), "mxfp4")
    note = (
      'because of precision="fastest", except a few rows, which are rounded to'
      " bf16"
    )
    for precision, notes in (("fastest", [note]), (None, [])):
      dot = functools.partial(jp.ragged_dot, precision=precision)
      (found,) = jp.explain(dot, jnp.ones((12, 32)), w, SIZES, target=target)
      self.assertEqual(found.decision.implementation, "cpu")
      self.assertLen(found.decision.notes, len(notes))
      for have, want in zip(found.decision.notes, notes, strict=True):
        self.assertIn(want, have)
