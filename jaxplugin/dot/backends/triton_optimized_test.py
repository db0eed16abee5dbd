# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The triton implementation: what XLA's GPU compiler makes of its calls.

Without a GPU; nothing runs.
"""

from __future__ import annotations

import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.lab.compilation import deviceless

needs_triton = absltest.skipIf(
  importlib.util.find_spec("triton") is None, "triton is not installed"
)


@needs_triton
@absltest.skipIf(
  importlib.util.find_spec("jax_cuda13_plugin") is None,
  "jax-cuda13-plugin is not installed",
)
class OptimizedTest(parameterized.TestCase):
  """What XLA's GPU compiler, without a GPU, makes of the lowering."""

  # No workspace of partial sums has the size of an operand.
  M, N, K = 512, 704, 1664

  def float_sizes(self, text):
    """Numbers of elements of the float arrays in optimized HLO."""
    shapes = re.findall(r"\b(?:f32|bf16|f16)\[([\d,]+)\]", text)
    return {math.prod(map(int, shape.split(","))) for shape in shapes}

  def operand(self, format, rows):
    if format is None:
      return jax.ShapeDtypeStruct((rows, self.K), jnp.bfloat16)
    spec = jax.ShapeDtypeStruct((rows, self.K), jnp.bfloat16)
    return jax.eval_shape(lambda x: jp.quantize(x, format), spec)

  @parameterized.product(
    name=("h200", "b200"),
    formats_=(
      (jp.MXFP8, jp.MXFP8),
      (jp.NVFP4, jp.NVFP4),
      (None, jp.NVFP4),
      (jp.MXFP8, jp.MXFP4),
    ),
  )
  @pytest.mark.sample(1)
  def test_kernels_are_called_and_no_operand_is_dequantized(
    self, name, formats_
  ):
    def f(x, w):
      return jp.block_scaled_dot(
        x, w, preferred_element_type=jnp.bfloat16, implementation="triton"
      )

    lhs, rhs = (
      self.operand(formats_[0], self.M),
      self.operand(formats_[1], self.N),
    )
    target = targets.named_target(name)
    text = deviceless.compile(f, lhs, rhs, target=target).as_text()
    self.assertIn("triton_kernel_call", text)
    sizes = self.float_sizes(text)
    self.assertNotIn(self.N * self.K, sizes)
    if formats_[0] is not None:
      self.assertNotIn(self.M * self.K, sizes)
    self.assertNotIn(" dot(", text)

  @parameterized.product(name=("h200", "b200"), rhs=(jp.MXFP8, jp.NVFP4))
  @pytest.mark.sample(1)
  def test_weight_whose_n_is_minor_is_neither_transposed_nor_copied(
    self, name, rhs
  ):
    # FP4 comes packed along k: otherwise two nibbles of a byte are two columns.
    def f(x, w):
      return jp.block_scaled_dot(
        x,
        w,
        dimension_numbers=(((1,), (0,)), ((), ())),
        preferred_element_type=jnp.bfloat16,
        implementation="triton",
      )

    lhs = self.operand(None if rhs == jp.NVFP4 else rhs, self.M)
    weight = jax.ShapeDtypeStruct((self.K, self.N), jnp.bfloat16)
    weight = jax.eval_shape(lambda x: jp.quantize(x, rhs, axis=0), weight)
    target = targets.named_target(name)
    text = deviceless.compile(f, lhs, weight, target=target).as_text()
    self.assertIn("triton_kernel_call", text)
    self.assertEmpty(self.moved(text, self.K * self.N // 2))

  def moved(self, text, least):
    """Results of `transpose` and `copy` with at least so many elements."""
    found = re.findall(
      r"= \w+\[([\d,]+)\]\S* (?:transpose|copy|copy-start)\(", text
    )
    return [s for s in found if math.prod(map(int, s.split(","))) >= least]

  @pytest.mark.full
  def test_it_would_be_seen_if_a_weight_was_transposed(self):
    # Two dimensions of n with k between them cannot merge.
    def f(x, w):
      return jp.block_scaled_dot(
        x,
        w,
        dimension_numbers=(((1,), (1,)), ((), ())),
        implementation="triton",
      )

    lhs = self.operand(jp.MXFP8, self.M)
    weight = jax.ShapeDtypeStruct((2, self.K, self.N // 2), jnp.bfloat16)
    weight = jax.eval_shape(lambda x: jp.quantize(x, jp.MXFP8, axis=1), weight)
    target = targets.named_target("h200")
    text = deviceless.compile(f, lhs, weight, target=target).as_text()
    self.assertNotEmpty(self.moved(text, self.K * self.N // 2))

  def test_it_would_be_seen_if_one_was(self):
    def f(x, w):
      return jp.block_scaled_dot(x, w, implementation="xla")

    args = [self.operand(jp.MXFP8, rows) for rows in (self.M, self.N)]
    target = targets.named_target("h200")
    text = deviceless.compile(f, *args, target=target).as_text()
    self.assertContainsSubset(
      {self.N * self.K, self.M * self.K}, self.float_sizes(text)
    )

  def test_sharded_calls_run_on_each_gpus_share(self):
    target = targets.named_target("h200")
    mesh = deviceless.mesh(target, (4,), ("x",))

    def place(leaf, *axes):
      spec = jax.sharding.PartitionSpec(*axes)
      sharding = jax.sharding.NamedSharding(mesh, spec)
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    lhs, rhs = self.operand(jp.MXFP8, self.M), self.operand(jp.MXFP8, self.N)
    rhs = jax.tree_util.tree_map(lambda leaf: place(leaf, "x"), rhs)
    text = deviceless.compile(
      lambda x, w: jp.block_scaled_dot(x, w, implementation="triton"),
      lhs,
      rhs,
      target=target,
      mesh=mesh,
    ).as_text()
    self.assertRegex(text, rf"f32\[1,{self.M},{self.N // 4}\].*triton_kernel")
    self.assertNotIn("all-", text.split("ENTRY")[1])


if __name__ == "__main__":
  absltest.main()
