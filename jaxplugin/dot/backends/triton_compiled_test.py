# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The triton implementation: its calls, compiled by XLA and jax-triton.

By the compilers for GPUs, without a GPU; nothing runs.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import zlib
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec

import jaxplugin as jp
from jaxplugin.core import formats, targets
from jaxplugin.lab.compilation import deviceless
from jaxplugin.runtime import triton_library
from jaxplugin.testing import contract, dot_problems, installed

# No workspace of partial sums has the size of an operand.
M, N, K = 512, 704, 1664
E8M0, E4M3, E5M2, E2M1 = formats.E8M0, formats.E4M3, formats.E5M2, formats.E2M1

needs_jax_triton = absltest.skipIf(
  bool(triton_library._import_error()), "jax-triton cannot be imported"
)


def descriptors_refusal():
  """Why descriptors cannot be lowered here; "" where they can."""
  if triton_library._import_error():
    return "jax-triton cannot be imported"
  unsupported = triton_library.descriptors_refusal()
  return unsupported.reason if unsupported else ""


needs_descriptors = absltest.skipIf(
  bool(descriptors_refusal()), descriptors_refusal()
)


def spec(format, *shape, **options):
  """An abstract operand; one in bf16 if there is no format."""
  x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  if format is None:
    return x
  return jax.eval_shape(lambda x: jp.quantize(x, format, **options), x)


def own_format(values, scale, size):
  return contract.block_format(
    f"own {values} {scale} {size}", values, scale, size
  )


def own_spec(format, rows):
  packing = 2 if format.is_fp4 else 1
  values = jnp.uint8 if format.is_fp4 else format.values_dtype
  return jp.ScaledArray(
    jax.ShapeDtypeStruct((rows, K // packing), values),
    jax.ShapeDtypeStruct((rows, K // format.block_size), format.scale_dtype),
    None,
    format,
  )


dot = functools.partial(jp.block_scaled_dot, implementation="triton")
bf16_dot = functools.partial(dot, preferred_element_type=jnp.bfloat16)


def optimized(function, *operands, target, **options):
  """Returns the text of the optimized module."""
  if isinstance(target, str):
    target = targets.named_target(target)
  wrapped = lambda x, w: function(x, w)
  return deviceless.compile(
    wrapped, *operands, target=target, **options
  ).as_text()


def sizes(shapes):
  return [math.prod(map(int, shape.split(","))) for shape in shapes]


def float_sizes(text):
  """Numbers of elements of the float arrays in optimized HLO."""
  return {*sizes(re.findall(r"\b(?:f32|bf16|f16)\[([\d,]+)\]", text))}


def moved(text, least):
  """Results of `transpose` and `copy` with at least so many elements."""
  copies = r"= \w+\[([\d,]+)\]\S* (?:transpose|copy|copy-start)\("
  return [size for size in sizes(re.findall(copies, text)) if size >= least]


@installed.needs_gpu_compilers
class OptimizedTest(parameterized.TestCase):
  """Operands are neither dequantized nor moved."""

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
    lhs, rhs = formats_
    text = optimized(bf16_dot, spec(lhs, M, K), spec(rhs, N, K), target=name)
    self.assertIn("triton_kernel_call", text)
    self.assertNotIn(N * K, float_sizes(text))
    if lhs is not None:
      self.assertNotIn(M * K, float_sizes(text))
    self.assertNotIn(" dot(", text)

  @pytest.mark.full
  def test_scales_that_no_known_format_has_are_not_dequantized(self):
    for format in (
      own_format(E4M3, E8M0, 64),
      own_format(E2M1, E8M0, 16),
      own_format(E4M3, E4M3, 32),
      own_format(E5M2, E5M2, 128),
    ):
      for name in ("h100", "b200"):
        with self.subTest(format.name, target=name):
          text = optimized(
            *(jp.block_scaled_dot, own_spec(format, M), own_spec(format, N)),
            target=name,
          )
          self.assertIn("triton_kernel_call", text)
          self.assertTrue(float_sizes(text).isdisjoint((M * K, N * K)))

  def test_it_would_be_seen_if_one_was(self):
    xla = functools.partial(jp.block_scaled_dot, implementation="xla")
    text = optimized(
      xla, spec(jp.MXFP8, M, K), spec(jp.MXFP8, N, K), target="h200"
    )
    self.assertContainsSubset({N * K, M * K}, float_sizes(text))

  @parameterized.product(name=("h200", "b200"), rhs=(jp.MXFP8, jp.NVFP4))
  @pytest.mark.sample(1)
  def test_weight_whose_n_is_minor_is_neither_transposed_nor_copied(
    self, name, rhs
  ):
    # FP4 comes packed along k: otherwise two nibbles of a byte are two columns.
    lhs = spec(None if rhs == jp.NVFP4 else rhs, M, K)
    function = functools.partial(
      bf16_dot, dimension_numbers=(((1,), (0,)), ((), ()))
    )
    text = optimized(function, lhs, spec(rhs, K, N, axis=0), target=name)
    self.assertIn("triton_kernel_call", text)
    self.assertEmpty(moved(text, K * N // 2))

  @pytest.mark.full
  def test_it_would_be_seen_if_a_weight_was_transposed(self):
    # Two dimensions of n with k between them cannot merge.
    function = functools.partial(
      dot, dimension_numbers=(((1,), (1,)), ((), ()))
    )
    weight = spec(jp.MXFP8, 2, K, N // 2, axis=1)
    text = optimized(function, spec(jp.MXFP8, M, K), weight, target="h200")
    self.assertNotEmpty(moved(text, K * N // 2))

  def test_sharded_calls_run_on_each_gpus_share(self):
    target = targets.named_target("h200")
    mesh = deviceless.mesh(target, (4,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("x"))
    rhs = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding
      ),
      spec(jp.MXFP8, N, K),
    )
    text = optimized(dot, spec(jp.MXFP8, M, K), rhs, target=target, mesh=mesh)
    self.assertRegex(text, rf"f32\[1,{M},{N // 4}\].*triton_kernel")
    self.assertNotIn("all-", text.split("ENTRY")[1])


def described(name):
  return triton_library.with_descriptors(targets.named_target(name))


def lowered(target, *operands, **options):
  function = functools.partial(bf16_dot, **options)
  with jp.use_target(target):
    return (
      jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
    )


def kernels(module):
  """Returns jax-triton's bytes of each kernel, which contain its PTX."""
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


class DescriptorsTest(parameterized.TestCase):
  """Kernels that use TMA descriptors; sizes whose strides allow them."""

  K = 1536

  def operands(self, lhs=jp.MXFP8, rhs=jp.MXFP8, m=M, k=K):
    return spec(lhs, m, k), spec(rhs, N, k)

  @parameterized.parameters(
    ("h200", jp.MXFP8, jp.MXFP8),
    ("b200", jp.NVFP4, jp.NVFP4),
    ("rtx5090", None, jp.MXFP4),
  )
  @needs_descriptors
  @pytest.mark.sample(1)
  def test_ptx_of_the_call_copies_tensors(self, name, lhs, rhs):
    lowering = lowered(described(name), *self.operands(lhs, rhs))
    matmul = kernels(lowering.compiler_ir("stablehlo"))[0]
    self.assertIn(b"cp.async.bulk.tensor.3d", matmul)
    self.assertIn(b"_tma", matmul)
    self.assertNotIn(b".local .align", matmul)

  @needs_descriptors
  def test_descriptors_say_how_operands_lie(self):
    jax_triton = importlib.import_module("jax_triton")
    made = self.enter_context(
      mock.patch.object(
        jax_triton, "TensorDescriptor", wraps=jax_triton.TensorDescriptor
      )
    )
    k = self.K
    # (m, batch, k) without a copy: rows are `batch` times further apart.
    lowered(
      *(described("h200"), spec(jp.MXFP4, M, 3, k), spec(jp.MXFP8, 3, N, k)),
      dimension_numbers=(((2,), (2,)), ((1,), (0,))),
    )
    for call, *expected in zip(
      made.call_args_list,
      ((M, 3, k // 2), (3, N, k)),
      ((3, M, k // 2), (3, N, k)),
      ((k // 2, 3 * k // 2, 1), (N * k, k, 1)),
      strict=True,
    ):
      found = call.args[0].shape, call.kwargs["shape"], call.kwargs["strides"]
      self.assertEqual(found, tuple(expected))

  @parameterized.parameters("h200", "b200")
  @needs_descriptors
  @installed.needs_gpu_compilers
  @pytest.mark.sample(1)
  def test_optimized_module_calls_the_kernel_on_the_arrays(self, name):
    text = optimized(bf16_dot, *self.operands(), target=described(name))
    # The very parameters: no copy, nothing padded, nothing dequantized.
    self.assertRegex(
      text,
      r"custom-call\(%x_values\S*, %\S+, %w_values\S*, .*"
      rf"f8e4m3fn\[{M},{self.K}\]\{{1,0\}}.*f8e4m3fn\[{N},{self.K}\]\{{1,0\}}",
    )
    self.assertNotIn(" dot(", text)
    self.assertNotIn(" copy(", text)

  @needs_jax_triton
  def test_jax_triton_without_descriptors_is_told_with_the_remedy(self):
    jax_triton = importlib.import_module("jax_triton")
    with (
      mock.patch.object(jax_triton, "__version__", "0.3.1"),
      self.assertRaisesRegex(
        NotImplementedError,
        "block_scaled_dot: implementation triton: TMA descriptors need"
        " jax-triton 0.4.0 or newer .* got jax-triton 0.3.1 .* install",
      ),
    ):
      lowered(described("h200"), *self.operands())

  @parameterized.parameters(
    ("h200", jp.MXFP8, jp.MXFP4, "block_scaled_upcast_mxfp8_mxfp4_.*_tma"),
    ("h200", None, jp.NVFP4, "block_scaled_upcast_bf16_nvfp4_.*_tma"),
    ("b200", jp.NVFP4, jp.NVFP4, "block_scaled_native_nvfp4_nvfp4_.*_tma"),
  )
  def test_explain_names_the_kernel(self, name, lhs, rhs, kernel):
    text = jp.explain(
      bf16_dot, *self.operands(lhs, rhs, m=8), target=described(name)
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
  def test_what_they_do_not_serve_is_refused(self, name, lhs, rhs, k, message):
    (decided,) = jp.explain(
      lambda x, w: jp.block_scaled_dot(x, w),
      *self.operands(lhs, rhs, k=k),
      target=described(name).with_library(targets.JAX_TRITON),
    )
    decision = decided.decision
    if message is None:
      self.assertEqual(decision.implementation, "triton")
    else:
      reason = dot_problems.reasons(decision)["triton"]
      self.assertRegex(reason, message)
