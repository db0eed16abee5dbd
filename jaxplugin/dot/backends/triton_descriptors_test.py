# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels that use TMA descriptors, through the whole lowering, with no GPU."""

from __future__ import annotations

import importlib
import importlib.util
import zlib
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.lab.compilation import deviceless
from jaxplugin.runtime import triton_library

M, N, K = 512, 704, 1536


def refusal():
  """Why descriptors cannot be lowered here; "" where they can."""
  if triton_library._import_error():
    return "jax-triton cannot be imported"
  unsupported = triton_library.descriptors_refusal()
  return unsupported.reason if unsupported else ""


needs_jax_triton = absltest.skipIf(
  bool(triton_library._import_error()), "jax-triton cannot be imported"
)
needs_descriptors = absltest.skipIf(bool(refusal()), refusal())
needs_gpu_compiler = absltest.skipIf(
  importlib.util.find_spec("jax_cuda13_plugin") is None,
  "jax-cuda13-plugin is not installed",
)


def described(name):
  return triton_library.with_descriptors(targets.named_target(name))


def quantized(format, *shape):
  """An abstract operand; a plain one where there is no format."""
  spec = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  if format is None:
    return spec
  return jax.eval_shape(lambda x: jp.quantize(x, format), spec)


def dot(x, w):
  return jp.block_scaled_dot(
    x, w, preferred_element_type=jnp.bfloat16, implementation="triton"
  )


def lowered(target, *operands):
  with jp.use_target(target):
    return jax.jit(dot).trace(*operands).lower(lowering_platforms=("cuda",))


def kernels(module):
  """What jax-triton made of each kernel, PTX within, as bytes."""
  found = []

  def visit(operation):
    if operation.name == "stablehlo.custom_call":
      config = operation.attributes["mhlo.backend_config"]
      found.append(zlib.decompress(config["opaque"].value_bytes))
    for region in operation.regions:
      for block in region:
        for inner in block:
          visit(inner.operation)

  visit(module.operation)
  return found


class LoweringTest(parameterized.TestCase):
  @parameterized.parameters(
    ("h200", jp.MXFP8, jp.MXFP8),
    ("b200", jp.NVFP4, jp.NVFP4),
    ("rtx5090", None, jp.MXFP4),
  )
  @needs_descriptors
  @pytest.mark.sample(1)
  def test_ptx_of_the_call_copies_tensors(self, name, lhs, rhs):
    lowering = lowered(
      described(name), quantized(lhs, M, K), quantized(rhs, N, K)
    )
    matmul = kernels(lowering.compiler_ir("stablehlo"))[0]
    self.assertIn(b"cp.async.bulk.tensor.3d", matmul)
    self.assertIn(b"_tma", matmul)
    self.assertNotIn(b".local .align", matmul)

  @needs_descriptors
  def test_descriptors_say_how_operands_lie(self):
    jax_triton = importlib.import_module("jax_triton")
    # (m, batch, k) without a copy: rows are `batch` times further apart.
    numbers = (((2,), (2,)), ((1,), (0,)))

    def f(x, w):
      return jp.block_scaled_dot(
        x, w, dimension_numbers=numbers, implementation="triton"
      )

    made = self.enter_context(
      mock.patch.object(
        jax_triton, "TensorDescriptor", wraps=jax_triton.TensorDescriptor
      )
    )
    operands = quantized(jp.MXFP4, M, 3, K), quantized(jp.MXFP8, 3, N, K)
    with jp.use_target(described("h200")):
      jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",))
    lhs, rhs = made.call_args_list
    self.assertEqual(lhs.args[0].shape, (M, 3, K // 2))
    self.assertEqual(lhs.kwargs["shape"], (3, M, K // 2))
    self.assertEqual(lhs.kwargs["strides"], (K // 2, 3 * K // 2, 1))
    self.assertEqual(rhs.args[0].shape, (3, N, K))
    self.assertEqual(rhs.kwargs["shape"], (3, N, K))
    self.assertEqual(rhs.kwargs["strides"], (N * K, K, 1))

  @parameterized.parameters("h200", "b200")
  @needs_descriptors
  @needs_gpu_compiler
  @pytest.mark.sample(1)
  def test_optimized_module_calls_the_kernel_on_the_arrays(self, name):
    operands = [quantized(jp.MXFP8, rows, K) for rows in (M, N)]
    text = deviceless.compile(dot, *operands, target=described(name)).as_text()
    # The very parameters: no copy, nothing padded, nothing dequantized.
    self.assertRegex(
      text,
      r"custom-call\(%x_values\S*, %\S+, %w_values\S*, .*"
      rf"f8e4m3fn\[{M},{K}\]\{{1,0\}}.*f8e4m3fn\[{N},{K}\]\{{1,0\}}",
    )
    self.assertNotIn(" dot(", text)
    self.assertNotIn(" copy(", text)

  @needs_jax_triton
  def test_jax_triton_without_descriptors_is_told_with_the_remedy(self):
    jax_triton = importlib.import_module("jax_triton")
    operands = [quantized(jp.MXFP8, rows, K) for rows in (M, N)]
    with (
      mock.patch.object(jax_triton, "__version__", "0.3.1"),
      self.assertRaisesRegex(
        NotImplementedError,
        "block_scaled_dot: implementation triton: TMA descriptors need"
        " jax-triton 0.4.0 or newer .* got jax-triton 0.3.1 .* install",
      ),
    ):
      lowered(described("h200"), *operands)


class ChoiceTest(parameterized.TestCase):
  @parameterized.parameters(
    ("h200", jp.MXFP8, jp.MXFP4, "block_scaled_upcast_mxfp8_mxfp4_.*_tma"),
    ("h200", None, jp.NVFP4, "block_scaled_upcast_bf16_nvfp4_.*_tma"),
    ("b200", jp.NVFP4, jp.NVFP4, "block_scaled_native_nvfp4_nvfp4_.*_tma"),
  )
  def test_explain_names_the_kernel(self, name, lhs, rhs, kernel):
    text = jp.explain(
      dot, quantized(lhs, 8, K), quantized(rhs, N, K), target=described(name)
    ).details()
    self.assertRegex(text, kernel)
    self.assertIn("with TMA descriptors", text)

  @parameterized.parameters(
    ("a100", jp.MXFP8, jp.MXFP8, K, "from sm_90 on, not sm_80"),
    ("mi355x", jp.MXFP8, jp.MXFP8, K, "from sm_90 on, not gfx950"),
    ("b200", jp.MXFP8, jp.MXFP4, K, "FP4 next to FP8"),
    ("h200", jp.MXFP8, jp.MXFP4, 1568, None),
    ("h200", jp.NVFP4, jp.NVFP4, 1552, "lhs: strides .* got 776"),
  )
  @pytest.mark.sample(2)
  def test_what_they_do_not_serve_is_refused(self, name, lhs, rhs, k, message):
    (decided,) = jp.explain(
      lambda x, w: jp.block_scaled_dot(x, w),
      quantized(lhs, M, k),
      quantized(rhs, N, k),
      target=described(name).with_library(targets.JAX_TRITON),
    )
    decision = decided.decision
    reasons = {r.implementation: r.reason for r in decision.refusals}
    if message is None:
      self.assertEqual(decision.implementation, "triton")
    else:
      self.assertRegex(reasons["triton"], message)


if __name__ == "__main__":
  absltest.main()
