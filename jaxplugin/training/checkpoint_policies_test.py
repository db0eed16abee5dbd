# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How many dots the backward pass computes again, policy by policy."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp

X = np.random.default_rng(0).normal(size=(2, 32, 32)).astype(np.float32)
BATCHED = (((2,), (2,)), ((0,), (0,)))
PLAIN = (((2,), (0,)), ((), ()))

ours = jp.checkpoint_policies
jaxs = jax.checkpoint_policies


def model(dot_general):
  """Two dots whose results the gradient needs: one without a batch, one with.

  Their gradients are four dots more.
  """

  def loss(x, w):
    x = jnp.sin(dot_general(x, w, PLAIN))
    return jnp.sin(dot_general(x, x, BATCHED)).sum()

  return loss


def num_dots(name, dot_general, policy, checkpoint=True):
  loss = model(dot_general)
  if checkpoint:
    loss = jax.checkpoint(loss, policy=policy)
  step = jax.value_and_grad(loss, argnums=(0, 1))
  return count(name, jax.make_jaxpr(step)(X, X[0]).jaxpr)


def count(name, jaxpr):
  """How often a primitive is in a jaxpr, and in those inside of it."""
  inner = (
    getattr(x, "jaxpr", x)
    for eqn in jaxpr.eqns
    for x in jax.tree.leaves(
      list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
    )
  )
  return sum(eqn.primitive.name == name for eqn in jaxpr.eqns) + sum(
    count(name, x) for x in inner if hasattr(x, "eqns")
  )


class PolicyTest(parameterized.TestCase):
  @parameterized.parameters(
    (ours.dots_saveable, jaxs.dots_saveable, 6),
    (
      ours.dots_with_no_batch_dims_saveable,
      jaxs.dots_with_no_batch_dims_saveable,
      7,
    ),
    (
      ours.for_block_scaled_dots(jaxs.nothing_saveable),
      jaxs.nothing_saveable,
      8,
    ),
    (
      ours.for_block_scaled_dots(jaxs.everything_saveable),
      jaxs.everything_saveable,
      6,
    ),
  )
  def test_as_many_dots_as_of_jaxs_own(self, policy, jax_policy, expected):
    quantized = jp.dot_general(jp.MXFP8, jp.MXFP8)
    lax_dot = jax.lax.dot_general
    self.assertEqual(num_dots("dot_general", lax_dot, jax_policy), expected)
    self.assertEqual(num_dots("block_scaled_dot", quantized, policy), expected)
    # JAX's own dots are treated as before.
    self.assertEqual(num_dots("dot_general", lax_dot, policy), expected)

  def test_jaxs_policies_do_not_know_our_dots(self):
    # Why there are others. Where JAX's know them they are needed no more.
    quantized = jp.dot_general(jp.MXFP8, jp.MXFP8)
    self.assertEqual(
      num_dots("block_scaled_dot", quantized, jaxs.dots_saveable), 8
    )
    self.assertEqual(
      num_dots("block_scaled_dot", quantized, None, checkpoint=False), 6
    )

  def test_no_bit_of_a_gradient_depends_on_the_policy(self):
    loss = model(jp.dot_general(jp.MXFP8, jp.MXFP8))
    plain = jax.jit(jax.grad(loss, argnums=(0, 1)))(X, X[0])
    saved = jax.checkpoint(loss, policy=ours.dots_saveable)
    actual = jax.jit(jax.grad(saved, argnums=(0, 1)))(X, X[0])
    for a, e in zip(actual, plain, strict=True):
      np.testing.assert_array_equal(a, e)

  def test_offloading_says_of_our_dots_what_jax_says_of_its_own(self):
    memories = ("device", "pinned_host")
    policy = ours.offload_dot_with_no_batch_dims(*memories)
    jax_policy = jaxs.offload_dot_with_no_batch_dims(*memories)
    asked = []

    def spy(prim, *args, **params):
      answer = policy(prim, *args, **params)
      if prim.name == "block_scaled_dot":
        numbers = params["call"].dimension_numbers
        expected = jax_policy(
          jax.lax.dot_general_p, *args, dimension_numbers=numbers
        )
        asked.append((answer, expected))
      return False

    quantized = jp.dot_general(jp.MXFP8, jp.MXFP8)
    num_dots("block_scaled_dot", quantized, spy)
    answers = {type(answer) for answer, _ in asked}
    self.assertLen(answers, 2)  # one offloaded, one not
    for answer, expected in asked:
      self.assertEqual(type(answer), type(expected))
      self.assertEqual(
        getattr(answer, "dst", None), getattr(expected, "dst", None)
      )

  def test_equal_policies_are_equal(self):
    # Keys of JAX's caches: a new one at each call would compile anew.
    make = lambda: ours.for_block_scaled_dots(jaxs.dots_saveable)
    self.assertEqual(make(), make())
    self.assertEqual(hash(make()), hash(make()))


if __name__ == "__main__":
  absltest.main()
