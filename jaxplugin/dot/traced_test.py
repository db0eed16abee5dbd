# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Dots found in jaxprs, and decided about."""

import jax
import jax.numpy as jnp
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.dot import traced
from jaxplugin.testing import written_modules

X = jp.ScaledArray(
  written_modules.array((4, 64), "float8_e4m3fn"),
  written_modules.array((4, 2), "float8_e8m0fnu"),
  None,
  jp.MXFP8,
)


def dots(function):
  return list(traced.dots(jax.make_jaxpr(function)(X).jaxpr))


class DecisionsTest(parameterized.TestCase):
  def test_dots_are_found_in_every_kind_of_sub_jaxpr(self):
    square = lambda x: jp.block_scaled_dot(x, x)
    zeros = lambda x: jnp.zeros((4, 4))
    self.assertLen(dots(square), 1)
    self.assertLen(dots(jax.jit(square)), 1)
    self.assertLen(dots(jax.checkpoint(square)), 1)
    self.assertLen(dots(lambda x: jax.lax.cond(True, square, square, x)), 2)
    self.assertLen(
      dots(lambda x: jax.lax.map(lambda i: square(x), jnp.arange(3))), 1
    )
    self.assertEmpty(dots(zeros))

  def test_target_is_given_or_recorded_or_local(self):
    b200 = jp.named_target("b200", cudnn="9.12")
    square = lambda x: jp.block_scaled_dot(x, x)
    (eqn,) = dots(square)
    self.assertEqual(traced.decide(eqn, None).target, jp.detect_target())
    decided = traced.decide(eqn, b200)
    self.assertEqual(decided.target, b200)
    self.assertEqual(decided.decision.implementation, "cudnn")
    with jp.use_target(b200):
      (eqn,) = dots(square)
    self.assertEqual(traced.decide(eqn, None).target, b200)

  def test_forced_implementation_that_cannot_serve_is_an_error(self):
    b200 = jp.named_target("b200", cudnn="9.12")
    with jp.use_target(b200):
      (eqn,) = dots(lambda x: jp.block_scaled_dot(x, x, implementation="cudnn"))
    decided = traced.decide(eqn, jp.named_target("cpu"))
    self.assertIsNone(decided.decision)
    self.assertRegex(decided.error, r"(?s)does not support.*platform is cpu")
    self.assertEqual((decided.problem.m, decided.problem.k), (4, 64))


if __name__ == "__main__":
  absltest.main()
