# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A measured size rule overrides the order, where it applies and serves."""

import dataclasses

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.dot import problems
from jaxplugin.dot.backends import size_rules

H200 = jp.named_target("h200")
RULE = size_rules.SizeRule(
  implementation="xla",
  measured="made up for this test",
  first_capability=(8, 0),
  last_capability=(9, 0),
  min_m=4096,
  min_k=1024,
)


def problem(m=4096, k=4096, format=jp.MXFP8, **changes):
  operand = problems.OperandProblem(format=format, dtype=format.values_dtype)
  return problems.DotProblem(
    **{
      "batch": 1,
      "m": m,
      "n": 4096,
      "k": k,
      "lhs": operand,
      "rhs": operand,
      "out_dtype": formats.BF16,
      **changes,
    }
  )


class SizeRuleTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("at_the_threshold", {}, "h200", "xla"),
    ("one_row_below", {"m": 4095}, "h200", "triton"),
    ("short_k", {"k": 1023 // 32 * 32}, "h200", "triton"),
    ("first_capability", {}, "a100", "xla"),
    ("next_generation", {}, "b200", "triton"),
    ("other_platform", {}, "mi300x", "triton"),
  )
  def test_it_applies_from_its_sizes_on_its_devices(
    self, changes, name, expected
  ):
    target = dataclasses.replace(
      jp.named_target(name).with_library(targets.JAX_TRITON), cudnn_version=None
    )
    decision = backends.choose(problem(**changes), target, rules=(RULE,))
    self.assertEqual(decision.implementation, expected)

  def test_reason_and_refusal_tell_the_measurement(self):
    decision = backends.choose(problem(), H200, rules=(RULE,))
    self.assertIn("(measured)", decision.reason)
    reasons = {r.implementation: r.reason for r in decision.refusals}
    self.assertEqual(
      reasons["triton"],
      "serves, but xla is faster m>=4096 k>=1024: made up for this test",
    )

  def test_what_is_asked_for_comes_before_it(self):
    decision = backends.choose(problem(), H200, "triton", rules=(RULE,))
    self.assertEqual(decision.implementation, "triton")
    self.assertIn("asked for", decision.reason)

  def test_implementation_that_does_not_serve_is_passed_over(self):
    rule = dataclasses.replace(RULE, implementation="cudnn")
    decision = backends.choose(problem(), H200, rules=(rule,))
    self.assertEqual(decision.implementation, "triton")

  def test_it_is_for_its_formats_alone(self):
    rule = dataclasses.replace(RULE, formats=(("nvfp4", "nvfp4"),))
    for format, expected in ((jp.NVFP4, "xla"), (jp.MXFP8, "triton")):
      decision = backends.choose(problem(format=format), H200, rules=(rule,))
      self.assertEqual(decision.implementation, expected)

  def test_first_rule_that_applies_counts(self):
    other = dataclasses.replace(RULE, implementation="triton", min_m=8192)
    for m, expected in ((8192, "triton"), (4096, "xla")):
      decision = backends.choose(problem(m=m), H200, rules=(other, RULE))
      self.assertEqual(decision.implementation, expected)

  def test_symbolic_sizes_are_not_known_to_be_large(self):
    self.assertFalse(RULE.applies(problem(m=None), H200))

  def test_entries_name_implementations_and_say_what_was_measured(self):
    for rule in size_rules.MEASURED:
      backends.validate_name(rule.implementation)
      self.assertNotEmpty(rule.measured)

  def test_without_a_rule_the_order_decides(self):
    x = jp.quantize(np.ones((4096, 64), np.float32), jp.MXFP8)
    (dot,) = jp.explain(jp.block_scaled_dot, x, x, target=H200)
    self.assertEqual(dot.decision.implementation, "triton")


if __name__ == "__main__":
  absltest.main()
