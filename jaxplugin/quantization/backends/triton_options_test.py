# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What recipes add, by Triton kernels: which problems, and which modules.

triton_test.py compares the bits with XLA's operations, and operands_test.py
compares these with the formulas in NumPy.
"""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.lab.compilation import deviceless
from jaxplugin.quantization import operands, problems
from jaxplugin.quantization.backends import triton
from jaxplugin.runtime import triton_library
from jaxplugin.testing import quantization_lowerings as lowerings
from jaxplugin.testing import triton_ir
from jaxplugin.testing.oracles import quantization_cases

MXFP4, NVFP4 = jp.MXFP4, jp.NVFP4
H200 = targets.named_target("h200")
CHOSEN = {"four_over_six": True}


spec_of = quantization_cases.manner


def problem_of(spec, shape, **fields):
  return problems.QuantizationProblem(
    shape=shape,
    dtype=np.dtype(np.float32),
    format=spec.format,
    blockings=(spec.along,),
    **{"options": (spec.options,)} | fields,
  )


def step(recipe):
  """Loss and gradient of a layer with a recipe."""

  def loss(x, w, key):
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    dot = jp.dot_general(recipe=recipe, weight="rhs")
    return dot(x, w, numbers, key=key).sum()

  return jax.value_and_grad(loss, (0, 1))


def changed(recipe, **fields):
  return dataclasses.replace(recipe, **fields)


RECIPES = {
  "mxfp8": jp.training.MXFP8_RECIPE,
  "nvfp4": jp.training.NVFP4_RECIPE,
  "mxfp4": jp.training.MXFP4_RECIPE,
  "mxfp8_square": changed(jp.training.MXFP8_RECIPE, weight_2d=True),
  "nvfp4_chosen": changed(jp.training.NVFP4_RECIPE, four_over_six=True),
  "nvfp4_up": changed(jp.training.NVFP4_RECIPE, grad_scale_up=True),
  "nvfp4_dgrad": changed(
    jp.training.NVFP4_RECIPE, weight_2d=False, dgrad_hadamard=16
  ),
  "mxfp4_64": changed(
    jp.training.MXFP4_RECIPE, wgrad_hadamard=64, dgrad_hadamard=64
  ),
}


class RecipeTest(parameterized.TestCase):
  @parameterized.product(recipe=tuple(RECIPES), name=("h200", "mi355x"))
  @pytest.mark.sample(2)
  def test_every_operand_is_served(self, recipe, name):
    x = jax.ShapeDtypeStruct((4, 256, 128), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((128, 96), jnp.bfloat16)
    target = targets.named_target(name).with_library(targets.JAX_TRITON)
    with mock.patch.object(triton_library, "lowering_refusal", lambda _: None):
      found = jp.explain(
        step(RECIPES[recipe]), x, w, jax.random.key(0), target=target
      )
    quantized = [q for q in found.quantizations if q.operation != "dequantize"]
    # Weights have no residual and are quantized in each pass.
    self.assertLen(quantized, 4)
    for each in quantized:
      self.assertEqual(each.implementation, "triton", each)
    # Activations and gradients, from one read each.
    both = [q for q in quantized if q.operation == "quantize_both"]
    self.assertLen(both, 2)
    text = str([q.description for q in quantized])
    for field, words in (
      ("stochastic_rounding", "rounded stochastically"),
      ("weight_2d", "in square blocks"),
      ("four_over_six", "scaled to 6 or 4"),
      ("wgrad_hadamard", "transformed in groups"),
    ):
      has_field = bool(getattr(RECIPES[recipe], field))
      self.assertEqual(words in text, has_field, words)

  @parameterized.parameters(
    ({"hadamard": 128}, "transforms groups of up to 64 in registers, got 128"),
    (
      {"is_stochastic": True, "key_impl": "rbg"},
      "draws random bits of a threefry2x32 key, got rbg",
    ),
    (
      {
        "is_stochastic": True,
        "key_impl": "threefry2x32",
        "is_partitionable": False,
      },
      "needs jax_threefry_partitionable .*it is off",
    ),
  )
  def test_refusals_say_why(self, fields, reason):
    problem = problem_of(
      spec_of(MXFP4, (1,)),
      (64, 128),
      options=(problems.RecipeOptions(**fields),),
    )
    self.assertRegex(triton.supports(problem, H200).reason, reason)

  @parameterized.parameters(((0, 2), 1), ((1, 0), 2))
  def test_squares_that_do_not_lie_last_are_refused(self, square, axis):
    found = spec_of(NVFP4, (axis,), 3, square=square)
    shape = (3, 40, 64)[:: 2 * axis - 3]
    refusal = triton.supports(problem_of(found, shape), H200)
    self.assertRegex(refusal.reason, "square blocks over the last")

  def test_choice_under_a_given_global_scale_is_refused(self):
    found = spec_of(NVFP4, (1,), **CHOSEN)
    problem = problem_of(found, (64, 128), has_global_scale=True)
    self.assertRegex(
      triton.supports(problem, H200).reason, "computes the global scale"
    )


X = jax.ShapeDtypeStruct((512, 768), jnp.bfloat16)


@lowerings.needs_compiler
class OptimizedTest(triton_ir.WithoutPtx):
  """Programs that XLA's GPU compiler emits without a GPU."""

  @parameterized.product(
    name=("h200", "b200"), case=((MXFP4, 1), (NVFP4, 2)), axis=(0, 1)
  )
  @pytest.mark.full
  def test_kernels_alone_read_x(self, name, case, axis):
    format, kernels = case
    fields = {} if format is MXFP4 else CHOSEN
    found = spec_of(format, (axis,), square=(1 - axis,), hadamard=16, **fields)

    def quantize(x, key):
      return operands.quantize(x, found, key)

    text = deviceless.compile(
      quantize,
      X,
      jax.eval_shape(lambda: jax.random.key(0)),
      target=targets.named_target(name),
    ).as_text()
    self.assertEqual(text.count(" custom-call("), kernels)
    # Nothing else touches what has the size of x; least of all random bits.
    self.assertNotRegex(text, r"bf16\[[0-9,]*\]\S* (?!parameter)[a-z-]+\(")
    self.assertNotIn("u32[512,768]", text)
