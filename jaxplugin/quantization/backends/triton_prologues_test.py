# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Norms and activations that Triton kernels compute before quantizing.

`kernels/gpu/quantization/prologues_test.py` compares the kernels' results with
f64, and their codes with those of the results.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from jaxplugin.core import formats, targets
from jaxplugin.quantization import backends, problems
from jaxplugin.quantization.backends import triton
from jaxplugin.runtime import lowering
from jaxplugin.testing import prologue_cases, quantization_lowerings

H200 = targets.named_target("h200").with_library(targets.JAX_TRITON)
SHAPE, along = prologue_cases.SHAPE, prologue_cases.along
P = jax.sharding.PartitionSpec


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
  def test_kernels_agree_with_quantize_of_the_result(self):
    cases = prologue_cases.kernel_cases()
    given = [case.args() for case in cases]
    exact = [
      prologue_cases.exact(case.prologue, *args)
      for case, args in zip(cases, given, strict=True)
    ]

    @jax.jit
    @quantization_lowerings.by_cpu
    def quantized(results):
      return [
        case.call(result, {}, prologue=None)
        for case, result in zip(cases, results, strict=True)
      ]

    codes = quantized([y.astype(np.float32) for y, _ in exact])
    self.assertEmpty(self.names)
    wanted = [
      (arrays, np.abs(y).max(), total)
      for (arrays, *_), (y, total) in zip(codes, exact, strict=True)
    ]
    index, plain = next(
      (i, case)
      for i, case in enumerate(cases)
      if case.kernel == "rms_norm_mxfp8"
    )
    cases = (*cases, dataclasses.replace(plain, call=in_shards(plain.call)))
    given.append(given[index])
    wanted.append(wanted[index])
    target = dataclasses.replace(H200, name=f"interpreted {self.id()}")
    for case, args, want in zip(cases, given, wanted, strict=True):
      with self.subTest(f"{case.kernel} of {case.prologue}"):
        self.names.clear()
        with targets.use_target(target):
          found = jax.jit(case.call)(*args)
        launched = {each.rpartition("_")[0] for each in self.names}
        self.assertEqual(launched, {f"quantize_{case.kernel}", *case.others})
        case.check(self, found, want, args)


class ChoiceTest(parameterized.TestCase):
  def problem(self, index, blockings=along(2), shape=SHAPE, **fields):
    return problems.QuantizationProblem(
      shape=shape,
      dtype=np.dtype(jnp.bfloat16),
      blockings=blockings,
      prologue=prologue_cases.CASES[index],
      **{"format": formats.MXFP8, **fields},
    )

  @parameterized.parameters(
    ((1, along(0)), {"shape": (32, 2, 32)}, "computes rms_norm with whole"),
    ((5, along(0)), {"shape": (32, 2, 32)}, "computes silu_and_mul with whole"),
    ((5, along(2)), {"shape": (2, 2, 33)}, "computes silu_and_mul with whole"),
    ((5, along(2, 0)), {"shape": (32, 2, 32)}, "computes silu_and_mul with"),
    ((5,), {"shape": (None, 2, 32)}, "needs static sizes for silu_and_mul"),
  )
  def test_refusals_say_why(self, args, fields, reason):
    refusal = triton.supports(self.problem(*args, **fields), H200)
    self.assertRegex(refusal.reason, reason)

  def test_decision_names_other_passes(self):
    module = lowering.Module(platforms=("cuda",))
    for problem, note in (
      (self.problem(1), ""),
      (
        self.problem(1, along(0), (32, 2, 32)),
        "a separate XLA operation, because triton:",
      ),
      (self.problem(1, along(1)), "^x is read once more, because a first pass"),
      (self.problem(1, shape=(1, 1, 16416)), "^x is read once more"),
      (self.problem(1, format=formats.NVFP4), "twice, because a first pass"),
    ):
      (part,) = backends.decide(problem, module, H200)
      self.assertEqual(part.decision.implementation, "triton")
      is_separate = part.problem.prologue is None
      self.assertEqual(is_separate, "separate" in note)
      self.assertRegex(" ".join(part.decision.notes), note or "^$")
