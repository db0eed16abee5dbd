# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_both` by one Triton kernel: which modules call it, and when.

triton_test.py compares the bits.
"""

import collections
import dataclasses
import math
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin import quantization
from jaxplugin.core import blocking, formats, targets
from jaxplugin.lab.compilation import deviceless
from jaxplugin.quantization import problems
from jaxplugin.quantization.backends import triton
from jaxplugin.testing import quantization_lowerings as lowerings
from jaxplugin.testing import triton_ir
from jaxplugin.training import api

MXFP8, MXFP4, NVFP4 = formats.MXFP8, formats.MXFP4, formats.NVFP4
P = jax.sharding.PartitionSpec
H200 = lowerings.H200


X = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
W = jax.ShapeDtypeStruct((256, 384), jnp.bfloat16)


@lowerings.needs_jax_triton
class LoweringTest(triton_ir.WithoutPtx):
  """Which modules call the kernel."""

  def calls(self, function, *args, target=H200, platforms=("cuda",)):
    with targets.use_target(target):
      text = lowerings.lowered_text(
        function, *(args or (X,)), platforms=platforms
      )
    return text.count("@triton_kernel_call")

  @parameterized.parameters("a100", "b200")
  @pytest.mark.full
  def test_one_kernel_for_mx_and_two_for_nvfp4(self, name):
    target = targets.named_target(name)
    for format, expected in ((MXFP8, 1), (MXFP4, 1), (NVFP4, 2)):
      both = lambda x, f=format: quantization.quantize_both(x, f)
      self.assertEqual(self.calls(both, target=target), expected)

  def test_each_platform_and_each_device_has_its_kernel(self):
    both = lambda x: quantization.quantize_both(x, MXFP8)
    self.assertEqual(self.calls(both, platforms=("cuda", "cpu")), 1)
    mesh = jax.make_mesh(
      (8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    sharding = jax.sharding.NamedSharding(mesh, P("x"))
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)
    self.assertEqual(self.calls(both, x), 1)


@lowerings.needs_compiler
@pytest.mark.full
class GradientStepTest(triton_ir.WithoutPtx):
  """Kernels that XLA's GPU compiler, without a GPU, has in a training step."""

  def kernels(self, function, *args, target):
    text = deviceless.compile(function, *args, target=target).as_text()
    entry = text[text.index("\nENTRY") :]
    opcodes = re.findall(r"^  (?:ROOT )?%\S+ = .*? ([a-z-]+)\(", entry, re.M)
    # A quantize kernel writes bytes, and of NVFP4 a global scale before them;
    # `finite_amax` uint32; a product does not.
    outputs = re.findall(
      r"= \(?(.*?)\)? custom-call\(.*triton_kernel_call", entry
    )
    dtypes = [tuple(re.findall(r"([a-z]+\d+)\[", o)) for o in outputs]
    return collections.Counter(dtypes), opcodes

  def step(
    self, format, batched=False, argnums=(0, 1), implementation="triton"
  ):
    function = api.dot_general(format, format, implementation=implementation)
    numbers = (((2 if batched else 1,), (0,)), ((), ()))

    def loss(x, w):
      return (function(x, w, numbers).astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, argnums=argnums)

  @parameterized.parameters(("h200", True), ("b200", False))
  def test_mxfp8_quantizes_with_4_kernels_instead_of_6(self, name, batched):
    x = X
    if batched:
      x = jax.ShapeDtypeStruct((2, 256, 256), X.dtype)
    kernels, opcodes = self.kernels(
      self.step(MXFP8, batched), x, W, target=targets.named_target(name)
    )
    # x and the incoming gradient are quantized along both axes at once. w has
    # no residual and is quantized along one axis in each pass.
    self.assertEqual(kernels.pop(("u8",) * 4), 2)
    self.assertEqual(kernels.pop(("u8",) * 2), 2)
    self.assertEmpty([k for k in kernels if k[0] not in ("bf16", "f32")])
    # Nothing that was quantized is moved: beside the kernels there are the
    # loss and its cast.
    self.assertNotIn("copy", opcodes)
    self.assertNotIn("transpose", opcodes)
    self.assertLessEqual(opcodes.count("fusion"), 2)

  @parameterized.parameters(
    ("h200", "9.13", True, "triton"),
    ("h200", "9.13", False, "triton"),
    ("b200", None, False, "triton"),
    ("b200", "9.13", True, "cudnn"),
    ("b200", "9.13", False, "cudnn"),
  )
  def test_values_packed_along_rows_are_not_transposed(
    self, name, version, batched, how
  ):
    x = jax.ShapeDtypeStruct((2, 256, 256), X.dtype) if batched else X
    target = targets.named_target(name, cudnn=version)
    step = self.step(NVFP4, batched=batched, implementation=how)
    text = deviceless.compile(step, x, W, target=target).as_text()
    # Neither from the kernel to what is kept, nor from there to the product;
    # and the product that is a weight's gradient is not either. Scales, an
    # eighth of the bytes, are where cuDNN takes tiles of them.
    moved = re.findall(
      r"= (?:f4e2m1fn|u8|bf16|f32)\[([\d,]+)\].*? (?:transpose|copy)\(", text
    )
    sizes = [math.prod(map(int, dims.split(","))) for dims in moved]
    self.assertEmpty([n for n in sizes if n >= math.prod(W.shape) // 2])


class ChoiceTest(parameterized.TestCase):
  def problem(self, *dims, shape=(4, 64, 96), **kwargs):
    every = range(len(shape))
    return problems.QuantizationProblem(
      shape=shape,
      dtype=np.dtype(kwargs.pop("dtype", jnp.bfloat16)),
      format=MXFP8,
      blockings=tuple(
        blocking.Blocking(
          dims=d, lead=tuple(i for i in every if i not in d), multiple=32
        )
        for d in dims
      ),
      **kwargs,
    )

  @parameterized.parameters(
    (((2,), (1,)),), (((1,), (2,)),), (((0, 1), (2,)),), (((0,), (1, 2)),),
    (((2,), (0,)),),
  )  # fmt: skip
  def test_last_dimensions_and_those_before_them_are_served(self, dims):
    self.assertIsNone(triton.supports(self.problem(*dims), H200))

  @parameterized.parameters(
    (((2,), (0,)), 80), (((1, 0), (2,)),), (((2,), ()),),
    (((2,), (1,), (0,)),), (((2,), (2,)),),
  )  # fmt: skip
  def test_other_dimensions_are_refused(self, dims, columns=96):
    problem = self.problem(*dims, shape=(4, 64, columns))
    refusal = triton.supports(problem, H200)
    self.assertIn("got", refusal.reason)
    self.assertIn(str(list(dims)), refusal.reason)

  def test_order_that_would_move_the_rest_is_refused(self):
    problem = self.problem((0, 1), (2,), shape=(2, 3, 4))
    moved = blocking.Blocking(dims=(1, 2), lead=(3, 0), multiple=32)
    of_columns = blocking.Blocking(dims=(3,), lead=(0, 1, 2), multiple=32)
    problem = dataclasses.replace(
      problem, shape=(2, 3, 4, 5), blockings=(moved, of_columns)
    )
    refusal = triton.supports(problem, H200)
    self.assertRegex(refusal.reason, "needs the blocked dimensions")
