# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The choice between the backends of an operation."""

import dataclasses

from absl.testing import absltest

from jaxplugin.core import decisions, targets
from jaxplugin.operation import choice
from jaxplugin.tables import resolution

CPU = targets.Target(name="cpu", platform="cpu")
CONFIG = (("rows", 4),)


def backend(name):
  return decisions.BackendRecord(
    name=name,
    summary="a test",
    rank=choice.rank_on(1, "cpu"),
    supports=lambda problem, target: None,
    emit=lambda config=name: config,
  )


OPERATION = resolution.MeasuredOperation(
  name="test",
  fields_of=lambda problem: None,
  problem_of=lambda fields: None,
  backends=lambda: {name: backend(name) for name in ("a", "b")},
)


class ChoiceTest(absltest.TestCase):
  def test_backend_of_a_decision_has_the_chosen_config(self):
    decision = decisions.Decision(
      implementation="b", reason="a table", config=CONFIG
    )
    self.assertEqual(choice.backend_of(OPERATION, decision).emit(), CONFIG)

  def test_backend_of_a_decision_without_a_config_is_the_one_of_the_table(self):
    decision = decisions.Decision(implementation="b", reason="the rule")
    self.assertEqual(choice.backend_of(OPERATION, decision).emit(), "b")

  def test_backend_is_ranked_only_on_its_platforms(self):
    rank = choice.rank_on(10, "cuda", "rocm")
    self.assertIsNone(rank(CPU))
    self.assertEqual(rank(dataclasses.replace(CPU, platform="rocm")), 10)
