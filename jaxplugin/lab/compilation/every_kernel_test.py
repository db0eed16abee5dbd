# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton compiles the kernels of each operation for GPUs.

tools/oldest_triton.sh runs all rows with the oldest Triton that jax-triton
accepts.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.lab.compilation import deviceless
from jaxplugin.testing import prologue_cases, quantization_lowerings
from jaxplugin.testing.oracles import quantization_cases

pytestmark = [pytest.mark.lab, pytest.mark.sample(3)]

QUANTIZING = [
  (case.name, case.call, case.array)
  for is_full in (False, True)
  for _, case in quantization_cases.rows(is_full=is_full, for_triton=True)
]
PROLOGUES = [
  (f"{case.kernel}_{i}", case.call, case.args)
  for i, case in enumerate(prologue_cases.kernel_cases())
]
PAIRS = (
  *(("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("mxfp4", "mxfp4")),
  *(("mxfp8", "mxfp4"), ("mxfp6_e2m3", "mxfp6_e3m2")),
  *(("bfloat16", "mxfp8"), ("bfloat16", "nvfp4"), ("float32", "mxfp4")),
)
GPUS = ("a100", "h100", "b200", "rtx5090")
N, K, EXPERTS = 768, 512, 4


def array(kind, *shape):
  """Returns an abstract array of a dtype, or a quantized one of a format."""
  if hasattr(jnp, kind):
    return jax.ShapeDtypeStruct(shape, kind)
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  return jax.eval_shape(lambda x: jp.quantize(x, kind), x)


def compile(function, *args, gpu):
  text = deviceless.compile(
    function, *args, target=targets.named_target(gpu)
  ).as_text()
  assert "triton_kernel_call" in text, text


@quantization_lowerings.needs_compiler
class EveryKernelTest(parameterized.TestCase):
  @parameterized.named_parameters(*QUANTIZING, *PROLOGUES)
  def test_quantizing(self, call, make):
    args = make()
    compile(call, *(args if isinstance(args, tuple) else (args,)), gpu="h100")

  @parameterized.parameters(*itertools.product(GPUS, PAIRS, (5, 512)))
  def test_matmuls(self, gpu, pair, m):
    lhs, rhs = pair

    def dot(x, w):
      return jp.block_scaled_dot(x, w, implementation="triton")

    def ragged_dot(x, w, sizes):
      return jp.ragged_dot(x, w, sizes, implementation="triton")

    x = array(lhs, m, K)
    compile(dot, x, array(rhs, N, K), gpu=gpu)
    sizes = jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)
    compile(ragged_dot, x, array(rhs, EXPERTS, N, K), sizes, gpu=gpu)
