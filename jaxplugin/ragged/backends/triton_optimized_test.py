# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The triton ragged dot lowered and compiled for GPUs that are not there."""

from __future__ import annotations

import functools
import importlib.util
import math
import re

import jax
import jax.export
import jax.numpy as jnp
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.lab.compilation import deviceless

GROUPS, M, N, K = 32, 8, 704, 1536
# What XLA has the host decide or wait for, and copies to it.
HOST = re.compile(
  r"\b(while|conditional|infeed|outfeed|send|recv|copy-start)\("
)

needs_triton = absltest.skipIf(
  importlib.util.find_spec("triton") is None, "triton is not installed"
)


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

  @pytest.mark.full
  def test_export_for_cuda_without_a_gpu(self):
    function = functools.partial(jp.ragged_dot, implementation="triton")
    with jp.use_target(targets.named_target("h200")):
      exported = jax.export.export(
        jax.jit(function),
        platforms=("cuda",),
        disabled_checks=[
          # The latter by jax-triton 0.4 and newer.
          jax.export.DisabledSafetyCheck.custom_call(target)
          for target in ("triton_kernel_call", "triton_kernel_call_ffi")
        ],
      )(rows(), experts(jp.MXFP4), SIZES)
    self.assertIn("triton_kernel_call", exported.mlir_module())

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
@absltest.skipIf(
  importlib.util.find_spec("jax_cuda13_plugin") is None,
  "jax-cuda13-plugin is not installed",
)
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
