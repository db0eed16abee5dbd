# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Norms and gated activations that Triton kernels compute before quantizing.

`kernels/gpu/quantization/prologues_test.py` compares the kernels' results with
f64, and their codes with those of the results.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from jaxplugin.core import blocking
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.quantization import backends
from jaxplugin.quantization import problems
from jaxplugin.quantization import quantize_primitive
from jaxplugin.quantization.backends import triton
from jaxplugin.runtime import lowering
from jaxplugin.testing import prologue_cases
from jaxplugin.testing import quantization_lowerings

H200 = targets.named_target("h200").with_library(targets.JAX_TRITON)
BF16 = jnp.bfloat16
SHAPE = (2, 64, 96)
P = jax.sharding.PartitionSpec
# Kernels and XLA's operations differ in the last bits of f32, so a value next
# to a tie has another code: the next one, in few places.
STEP = 2.0**-3
AMAX_ERROR = 16 * 2.0**-24  # roundings of the largest result
MOST_OTHER = 0.002


def along(*dims, merged=False):
  """Returns blockings along dimensions of SHAPE."""
  found = [blocking.Blocking.along(d, len(SHAPE), 32) for d in dims]
  if merged:
    found.append(blocking.Blocking(dims=(0, 1), lead=(2,), multiple=32))
  return tuple(found)


def produced(
  prologue, blockings=along(2), format=formats.MXFP8, given=None, **options
):
  """Returns a function of x and operands that quantizes a prologue's result."""

  def produce(x, more):
    found, amax, total = quantize_primitive.produce(
      x,
      None if given is None else jnp.float32(given),
      blockings=blockings,
      format=format,
      packed=False,
      prologue=prologue,
      more=more,
      **options,
    )
    return [each[:2] for each in found], amax, total

  return produce


def in_shards(function):
  """Returns the function on 8 devices that hold rows."""
  kinds = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((8,), ("rows",), axis_types=kinds)

  def sharded(x, more):
    specs = {
      name: P(None, "rows") if a.ndim > 1 else P() for name, a in more.items()
    }
    return jax.shard_map(
      function, mesh=mesh, in_specs=(P(None, "rows"), specs),
      out_specs=P(None, "rows"),
    )(x, more)  # fmt: skip

  return sharded


@quantization_lowerings.needs_triton
class PrologueTest(quantization_lowerings.InterpretedTestCase):
  def test_kernels_agree_with_operations(self):
    norm, gated = prologue_cases.CASES[1], prologue_cases.CASES[8]
    with_bias, with_up = prologue_cases.CASES[3], prologue_cases.CASES[7]
    keys = [jax.random.key(3)]
    both = along(2, merged=True)
    rows = [
      (norm, produced(norm, returns_amax=True), "rms_norm_mxfp8_amax"),
      (
        norm,
        produced(norm, format=formats.NVFP4, given=0.02),
        "rms_norm_nvfp4",
      ),
      (
        with_up,
        produced(with_up, both, formats.NVFP4),
        "both_gelu_and_mul_nvfp4",
      ),
      (norm, in_shards(produced(norm)), "rms_norm_mxfp8"),
      (with_bias, produced(with_bias), "layer_norm_mxfp8"),
      (with_up, produced(with_up, along(1)), "gelu_and_mul_mxfp8"),
      (gated, produced(gated, keys=keys), "swigluoai_mxfp8_stochastic"),
      (
        gated,
        produced(gated, both, returns_amax=True),
        "both_swigluoai_mxfp8_amax",
      ),
      # The operations compute the prologue.
      (norm, produced(norm, along(2, 1)), "both_mxfp8"),
    ]
    given = [prologue_cases.operands(p, SHAPE, BF16) for p, _, _ in rows]

    @jax.jit
    def by_operations(given):
      return [f(*args) for (_, f, _), args in zip(rows, given, strict=True)]

    with targets.use_target(quantization_lowerings.OPERATIONS):
      wanted = by_operations(given)
    self.assertEmpty(self.names)
    target = dataclasses.replace(H200, name=f"interpreted {self.id()}")
    for (prologue, function, name), args, want in zip(
      rows, given, wanted, strict=True
    ):
      with self.subTest(f"{name} of {prologue}"):
        self.names.clear()
        with targets.use_target(target):
          found, amax, total = jax.jit(function)(*args)
        launched = {each.rpartition("_")[0] for each in self.names}
        self.assertIn(f"quantize_{name}", launched)
        maxima = (
          {"finite_amax_both"} if name == "both_gelu_and_mul_nvfp4" else {}
        )
        self.assertEqual(launched, {f"quantize_{name}", *maxima})
        for got, expected in zip(found, want[0], strict=True):
          self.assert_near(got, expected)
        self.assertEqual(amax is not None, name.endswith("amax"))
        if amax is not None:
          largest = np.abs(prologue_cases.exact(prologue, *args)[0]).max()
          for found_amax in (amax, want[1]):
            np.testing.assert_allclose(found_amax, largest, rtol=AMAX_ERROR)
        if total is not None:
          np.testing.assert_array_equal(
            np.asarray(total, np.float32), np.asarray(want[2], np.float32)
          )
        self.assertEqual(total is None, "residual" not in args[1])

  def assert_near(self, got, expected):
    (values, scale), (wanted, wanted_scale) = (
      [np.asarray(a).astype(np.float32) for a in each]
      for each in (got, expected)
    )
    np.testing.assert_array_equal(scale, wanted_scale)
    self.assertLess(np.mean(values != wanted), MOST_OTHER)
    np.testing.assert_allclose(values, wanted, rtol=STEP, atol=0.5)


class ChoiceTest(parameterized.TestCase):
  def problem(self, index, blockings=along(2), shape=SHAPE, **fields):
    return problems.QuantizationProblem(
      shape=shape,
      dtype=np.dtype(BF16),
      blockings=blockings,
      prologue=prologue_cases.CASES[index],
      **{"format": formats.MXFP8, **fields},
    )

  @parameterized.parameters(
    ((1, along(1)), {}, "computes rms_norm with blocks along the last"),
    ((1, along(2, 1)), {}, "computes rms_norm with blocks along the last"),
    ((5, along(0)), {"shape": (32, 2, 32)}, "computes silu_and_mul with whole"),
    ((5, along(2)), {"shape": (2, 2, 33)}, "computes silu_and_mul with whole"),
    ((5, along(2, 0)), {"shape": (32, 2, 32)}, "computes silu_and_mul with"),
    ((5,), {"shape": (None, 2, 32)}, "needs static sizes for silu_and_mul"),
    ((1,), {"shape": (1, 1, 16416)}, "16 warps, got 16416 features"),
  )
  def test_refusals_say_why(self, args, fields, reason):
    refusal = triton.supports(self.problem(*args, **fields), H200)
    self.assertRegex(refusal.reason, reason)

  def test_decision_names_other_passes(self):
    module = lowering.Module(platforms=("cuda",))
    for problem, note in (
      (self.problem(1), ""),
      (self.problem(1, along(1)), "a separate XLA operation, because triton:"),
      (self.problem(1, format=formats.NVFP4), "twice, because a first pass"),
    ):
      (part,) = backends.decide(problem, module, H200)
      self.assertEqual(part.decision.implementation, "triton")
      is_separate = part.problem.prologue is None
      self.assertEqual(is_separate, "separate" in note)
      self.assertRegex(" ".join(part.decision.notes), note or "^$")
