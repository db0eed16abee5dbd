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
    rank=lambda target: 1,
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

  def test_kernels_are_tried_only_on_their_platforms(self):
    fields = {
      "summary": "a test",
      "supports": lambda problem, target: None,
      "emit": lambda: None,
    }
    table = decisions.table(
      choice.xla_backend(summary="a test", emit=lambda: None),
      choice.cpu_backend(**fields),
      choice.triton_backend(**fields),
    )
    for platform, names in (
      ("cpu", ("cpu", "xla")),
      ("rocm", ("triton", "xla")),
      ("tpu", ("xla",)),
    ):
      target = dataclasses.replace(CPU, platform=platform)
      self.assertEqual(decisions.order(table, target), names)
