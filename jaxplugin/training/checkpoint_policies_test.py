# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How many dots the backward pass computes again, policy by policy."""

import contextlib
import io
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.testing import transformations

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
  return transformations.count(name, jax.make_jaxpr(step)(X, X[0]).jaxpr)


class PolicyTest(parameterized.TestCase):
  @parameterized.parameters(
    (ours.dots_saveable, jaxs.dots_saveable, 6),
    (ours.dots_with_no_batch_dims_saveable,
      jaxs.dots_with_no_batch_dims_saveable, 7),
    (ours.for_block_scaled_dots(jaxs.nothing_saveable), jaxs.nothing_saveable,
      8),
    (ours.for_block_scaled_dots(jaxs.everything_saveable),
      jaxs.everything_saveable, 6),
  )  # fmt: skip
  @pytest.mark.sample(1)
  def test_as_many_dots_as_of_jaxs_own(self, policy, jax_policy, expected):
    quantized = jp.dot_general(jp.MXFP8, jp.MXFP8)
    lax_dot = jax.lax.dot_general
    self.assertEqual(num_dots("dot_general", lax_dot, jax_policy), expected)
    self.assertEqual(num_dots("block_scaled_dot", quantized, policy), expected)
    # JAX's own dots are treated as before.
    self.assertEqual(num_dots("dot_general", lax_dot, policy), expected)

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

  @parameterized.parameters((ours.dots_saveable, 1), (jaxs.dots_saveable, 2))
  def test_ragged_contractions_are_saved(self, policy, expected):
    sizes = np.array([32, 0], np.int32)
    numbers = jax.lax.RaggedDotDimensionNumbers(
      (((0,), (0,)), ((), ())), (0,), ()
    )
    loss = lambda x: jnp.sin(
      jp.ragged_dot_general(x, X[0], sizes, numbers)
    ).sum()
    step = jax.value_and_grad(jax.checkpoint(loss, policy=policy))
    jaxpr = jax.make_jaxpr(step)(X[1]).jaxpr
    self.assertEqual(
      transformations.count("block_scaled_ragged_contraction", jaxpr), expected
    )

  def test_equal_policies_are_equal(self):
    # They are keys of JAX's caches: unequal ones would compile at each call.
    make = lambda: ours.for_block_scaled_dots(jaxs.dots_saveable)
    self.assertEqual(make(), make())
    self.assertEqual(hash(make()), hash(make()))

  def test_operands_kept_quantized_are_not_made_again(self):
    loss = model(jp.dot_general(jp.MXFP8, jp.MXFP8))
    found = {}
    for name, policy in (
      ("nothing", jaxs.nothing_saveable),
      ("dots", ours.dots_saveable),
      ("quantized", ours.quantized_saveable),
      (
        "both",
        jaxs.save_from_both_policies(
          ours.dots_saveable, ours.quantized_saveable
        ),
      ),
    ):
      loss_again = jax.checkpoint(loss, policy=policy)
      step = jax.value_and_grad(loss_again, argnums=(0, 1))
      jaxpr, _ = jax.interpreters.partial_eval.dce_jaxpr(
        jax.make_jaxpr(step)(X, X[0]).jaxpr, [True] * 3
      )
      found[name] = (
        transformations.count("block_quantize", jaxpr),
        transformations.count("block_scaled_dot", jaxpr),
      )
    # Forward: both operands of two dots. Backward: the weight, which has no
    # saved copy, recomputed operands, and g of two dots.
    self.assertEqual(found["both"][0], 4 + 1 + 2)
    self.assertEqual(found["nothing"][0], 4 + 1 + 4 + 2)
    # The first dot's result is saved, so its weight is not quantized again.
    self.assertEqual(found["dots"][0], 4 + 1 + 3 + 2)
    # The argument of each sine has to be there: dots are made again.
    self.assertEqual(found["quantized"][1], 2 + 2 + 4)
    self.assertEqual(found["both"][1], 2 + 4)


class BytesTest(parameterized.TestCase):
  """Bytes of a layer's residuals, without its input."""

  # Tokens, features, and features of the result.
  SIZES = (96, 64, 128)

  def kept(self, recipe, weight):
    """Bytes of what is saved by name, for lhs and for rhs."""
    m, k, n = self.SIZES
    function = jp.dot_general(recipe=recipe, weight=weight)
    key = jax.random.key(0)
    layer = jax.checkpoint(
      lambda x, w: function(x, w, (((1,), (0,)), ((), ())), key=key),
      policy=ours.quantized_saveable,
    )
    x, w = (np.ones(shape, jnp.bfloat16) for shape in ((m, k), (k, n)))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
      jax.ad_checkpoint.print_saved_residuals(layer, x, w)
    found = {"lhs": 0, "rhs": 0}
    for line in printed.getvalue().splitlines():
      if "from a constant" in line and "key<" in line:
        continue  # the key, 8 bytes
      if "from the argument" in line:
        # A weight is alive anyway.
        self.assertIn({"lhs": "argument x", "rhs": "argument w"}[weight], line)
        continue
      dtype, sizes, side = re.fullmatch(
        r"(\w+)\[([\d,]*)\] named 'jaxplugin_quantized_(\w+)' .*", line
      ).groups()
      itemsize = {"u8": 1, "u32": 4}[dtype]
      found[side] += itemsize * math.prod(map(int, sizes.split(",")))
    return found

  @parameterized.parameters(
    # A byte a value and one for 32.
    (jp.training.MXFP8_RECIPE, 1 + 1 / 32, 0),
    # Half a byte a value, one for 16 or 32, and a global scale of 4.
    (jp.training.NVFP4_RECIPE, 1 / 2 + 1 / 16, 4),
    (jp.training.MXFP4_RECIPE, 1 / 2 + 1 / 32, 0),
  )
  @pytest.mark.sample(1)
  def test_bytes_of_a_layer(self, recipe, each, more):
    m, k, n = self.SIZES
    lhs, rhs = m * k * each + more, k * n * each + more
    # A weight has no saved copy.
    self.assertEqual(self.kept(recipe, "rhs"), {"lhs": lhs, "rhs": 0})
    self.assertEqual(self.kept(recipe, "lhs"), {"lhs": 0, "rhs": rhs})
    self.assertEqual(self.kept(recipe, None), {"lhs": lhs, "rhs": rhs})
    # bf16 would be 2 a value.
    self.assertLess(lhs, 0.52 * 2 * m * k)
