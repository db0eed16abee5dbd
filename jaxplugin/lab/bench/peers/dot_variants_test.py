# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which variants there are of a product on a device, and what they take."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import dot
from jaxplugin.core import decisions, targets
from jaxplugin.dot import primitive
from jaxplugin.lab.bench.peers import dot_variants, verification
from jaxplugin.runtime import triton_library
from jaxplugin.testing import bench_results


def made(shape, pair, target, dtype=jnp.bfloat16):
  row, pair = bench_results.parsed(shape, pair)
  return dot_variants.DotVariants(row, pair, np.dtype(dtype), target)


def ours(pair, target, names=None, shape="5x96x256"):
  found = made(shape, pair, target).ours(names)
  return {variant.name: variant for variant in found}


class OursTest(parameterized.TestCase):
  def can_lower(self, calls=None, descriptors=None):
    """What this process can lower; each is a reason why it cannot."""
    for name, reason in (
      ("lowering_refusal", calls),
      ("descriptors_refusal", descriptors),
    ):
      refusal = reason and decisions.Unsupported(reason)
      self.enter_context(
        mock.patch.object(
          triton_library, name, lambda *_, refusal=refusal: refusal
        )
      )

  @parameterized.parameters(
    # Last words of names: "triton prepared tma" has "triton tma".
    ("h200", "bf16xmxfp4", "triton prepared tma xla"),
    ("h200", "bf16xmxfp8", "triton tma xla"),
    ("b200 9.13", "nvfp4", "cudnn prepared triton prepared tma xla"),
    ("rtx5090", "mxfp8", "triton prepared tma xla"),
    ("a100", "mxfp8", "triton xla"),  # has no TMA
    ("b200", "mxfp8xmxfp4", "triton prepared xla"),  # FP4 is padded
    ("mi300x", "mxfp8", "xla"),
    ("cpu", "nvfp4", "xla"),
    # `precision="fastest"` changes the kernels. a100 has no FP8 instructions.
    ("h100", "fp8_1x128xfp8_128x128", "triton fastest tma xla"),
    ("a100", "fp8_1x128xfp8_128x128", "triton xla"),
  )
  @pytest.mark.sample(5)
  def test_variants_are_those_that_differ_on_a_device(
    self, device, pair, expected
  ):
    self.can_lower()
    name, *cudnn = device.split()
    target = targets.named_target(name, cudnn=cudnn[0] if cudnn else None)
    found = ours(pair, target, shape="128x256x256")
    self.assertEqual([n.split()[-1] for n in found], expected.split())
    first, *others = found.values()
    self.assertTrue(first.is_chosen)
    self.assertFalse(any(variant.is_chosen for variant in others))

  @parameterized.parameters({"calls": "no"}, {"descriptors": "no"})
  @pytest.mark.lab
  def test_descriptors_are_not_timed_where_they_cannot_be_lowered(self, **why):
    self.can_lower(**why)
    found = ours("mxfp8", targets.named_target("h200"))
    self.assertIn("triton", found)
    self.assertNotIn("triton tma", found)

  def test_descriptors_are_what_the_kernels_of_the_variant_use(self):
    self.can_lower()
    found = ours("bf16xmxfp4", targets.named_target("h200"), ["triton"])
    for name, used in (("triton", False), ("triton tma", True)):
      variant = found[name]
      with jp.use_target(targets.named_target("h200")):
        jaxpr = jax.make_jaxpr(variant.function)(*variant.operands(0))
      (eqn,) = primitive.equations(jaxpr.jaxpr)
      decision = primitive.decide(eqn, None).decision
      self.assertEqual(decision.implementation, "triton")
      self.assertEqual("_tma" in decision.notes[0], used)

  @parameterized.parameters(
    (128, jnp.bfloat16, "9.13", True),
    (5, jnp.bfloat16, "9.13", False),  # by the kernel with a masked tile
    (128, jnp.bfloat16, "9.12", False),  # by a separate multiply in f32
    (128, jnp.float16, "9.13", False),
    (128, jnp.float32, "9.13", False),
  )
  @pytest.mark.sample(1)
  def test_global_scale_that_cudnn_rounds_is_right_and_only_there(
    self, m, dtype, cudnn, is_rounded
  ):
    target = targets.named_target("b200", cudnn=cudnn)
    one = made(f"{m}x128x256", "nvfp4", target, dtype)
    # Just above the middle between 1 and 1 + 2^-7, its neighbours in bf16.
    scale = np.float32(1 + 2.0**-8 + 2.0**-20)
    lhs, rhs = (
      jp.ScaledArray(x.values, x.scale, jnp.float32(number), jp.NVFP4)
      for x, number in zip(one.data.operands(0), (scale, 2.0**-12), strict=True)
    )
    one.data = mock.Mock(operands=lambda i, ready="": (lhs, rhs))
    cudnn_variant = one.ours(["cudnn"])[0]
    a, b = (verification.f64(x, np.arange(x.shape[0])) for x in (lhs, rhs))
    exact = a @ b.T / np.float64(scale)
    # The result of a kernel that multiplies by bf16(scale), then casts once.
    rounded = (exact * float(scale.astype(jnp.bfloat16))).astype(dtype)
    error = np.abs(rounded.astype(np.float64) / (exact * scale) - 1).max()
    self.assertGreater(error, (1.8 if dtype == jnp.bfloat16 else 0.9) * 2.0**-8)
    if is_rounded:
      self.assertLess(cudnn_variant.check(0, rounded), 2**16)
    else:
      with self.assertRaises(verification.WrongResultError):
        cudnn_variant.check(0, rounded)

  @parameterized.parameters("h200", "b200")
  @pytest.mark.lab
  def test_prepared_weights_are_the_same_weights(self, device):
    found = ours("nvfp4", targets.named_target(device), ["triton"])
    plain, prepared = found["triton"], found["triton prepared"]
    lhs, rhs = prepared.operands(0)
    _, plain_rhs = plain.operands(0)
    differs = [
      a.shape != b.shape or a.dtype != b.dtype
      for a, b in zip(
        jax.tree.leaves(rhs), jax.tree.leaves(plain_rhs), strict=True
      )
    ]
    self.assertTrue(any(differs))
    result = dot.block_scaled_dot(lhs, rhs, preferred_element_type=jnp.bfloat16)
    prepared.check(0, result)
    with self.assertRaises(verification.WrongResultError):
      prepared.check(0, result * 1.05)


class PeerFormsTest(parameterized.TestCase):
  def forms(self, name, shape="1x96x256", pair="nvfp4"):
    cpu = targets.named_target("cpu")
    (peer,) = made(shape, pair, cpu, jnp.float32).peers([name])
    return {variant.form: variant for variant in peer}

  @parameterized.product(
    name=("f32", "bf16", "lax.scaled_dot"), pair=("nvfp4", "bf16xmxfp8")
  )
  @pytest.mark.lab
  def test_every_form_is_the_product(self, name, pair):
    forms = self.forms(name, pair=pair)
    self.assertLen(forms, 6 if name == "lax.scaled_dot" else 5)
    for form, variant in forms.items():
      with self.subTest(form):
        result = jax.jit(variant.function)(*variant.operands(1))
        variant.check(1, result)
        with self.assertRaises(verification.WrongResultError):
          variant.check(0, result)  # rows of set 0 are others

  @parameterized.parameters("f32xnvfp4", "f16xmxfp8")
  @pytest.mark.sample(1)
  def test_scaled_dot_may_round_a_plain_side_to_bf16(self, pair):
    variant = self.forms("lax.scaled_dot", pair=pair)["w (n, k)"]
    result = jax.jit(variant.function)(*variant.operands(1))
    variant.check(1, result)
    for wrong in (result * 1.05, variant.function(*variant.operands(0))):
      with self.assertRaises(verification.WrongResultError):
        variant.check(1, wrong)

  @parameterized.parameters(
    ("nvfp4", "int8"), ("mxfp4xnvfp4", "int8"), ("bf16xnvfp4", "floats"),
    ("mxfp8", "floats"), ("mxfp8xmxfp4", "floats"),
  )  # fmt: skip
  @pytest.mark.sample(1)
  def test_pairs_of_fp4_may_be_multiplied_in_integers(self, pair, arithmetic):
    for variant in ours(pair, targets.named_target("cpu")).values():
      self.assertEqual(variant.arithmetic, arithmetic)
    for name, expected in (("f32", "f32"), ("bf16", "floats")):
      for form in self.forms(name, pair=pair).values():
        self.assertEqual(form.arithmetic, expected)

  @parameterized.parameters("f32", "bf16", "lax.scaled_dot")
  def test_weights_stored_the_other_way_are_so_before_the_call(self, name):
    variant = self.forms(name)["w (k, n)"]
    _, rhs = variant.operands(0)
    self.assertEqual(rhs.shape, (256, 96))
    jaxpr = jax.make_jaxpr(variant.function)(*variant.operands(0))
    self.assertNotIn("transpose[", str(jaxpr))

  def test_padding_is_for_few_rows_and_sums_of_products_for_one(self):
    plain = {"w (n, k)", "w (k, n)"}
    padded = {f"{form}, 8 rows" for form in plain}
    for shape, forms in (
      ("1x96x256", plain | padded | {"sum of products"}),
      ("2x96x256", plain | padded),
      ("7x96x256", plain | padded),
      ("8x96x256", plain),
    ):
      self.assertEqual(self.forms("f32", shape).keys(), forms)
