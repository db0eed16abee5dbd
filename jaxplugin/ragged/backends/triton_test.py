# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The suite of the ragged dot for the triton implementation, interpreted."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.ragged import backends
from jaxplugin.ragged import calls
from jaxplugin.testing import contract
from jaxplugin.testing import interpreted
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
