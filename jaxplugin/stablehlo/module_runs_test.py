# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (modules in the text)
"""Numbers of runs of a module's operations."""

from absl.testing import absltest

from jaxplugin.jaxext import program
from jaxplugin.stablehlo import module_runs, modules

Run = program.ControlFlow
# @f runs twice unconditionally and once in a branch, @g twice in each @f, @h in
# a loop. Nothing calls @unused. @left and @right only call each other.
TEXT = """module {
  func.func public @main(%x: tensor<f32>, %p: tensor<i1>) -> tensor<f32> {
    %0 = stablehlo.sine %x : tensor<f32>
    %6 = call @f(%0) : (tensor<f32>) -> tensor<f32>
    %1 = call @f(%6) : (tensor<f32>) -> tensor<f32>
    %2 = "stablehlo.if"(%p) ({
      %3 = func.call @f(%1) : (tensor<f32>) -> tensor<f32>
      stablehlo.return %3 : tensor<f32>
    }, {
      stablehlo.return %1 : tensor<f32>
    }) : (tensor<i1>) -> tensor<f32>
    %4 = stablehlo.while(%a = %2) : tensor<f32>
    cond {
      stablehlo.return %p : tensor<i1>
    } do {
      %5 = stablehlo.composite "mine.tanh" %a {decomposition = @h} : (tensor<f32>) -> tensor<f32>
      stablehlo.return %5 : tensor<f32>
    }
    return %4 : tensor<f32>
  }
  func.func private @g(%x: tensor<f32>) -> tensor<f32> {
    %0 = stablehlo.cosine %x : tensor<f32>
    return %0 : tensor<f32>
  }
  func.func private @f(%x: tensor<f32>) -> tensor<f32> {
    %0 = call @g(%x) : (tensor<f32>) -> tensor<f32>
    %1 = call @g(%0) : (tensor<f32>) -> tensor<f32>
    return %1 : tensor<f32>
  }
  func.func private @h(%x: tensor<f32>) -> tensor<f32> {
    %0 = stablehlo.tanh %x : tensor<f32>
    return %0 : tensor<f32>
  }
  func.func private @unused(%x: tensor<f32>) -> tensor<f32> {
    %0 = stablehlo.sqrt %x : tensor<f32>
    return %0 : tensor<f32>
  }
  func.func private @left(%x: tensor<f32>) -> tensor<f32> {
    %0 = stablehlo.negate %x : tensor<f32>
    %1 = call @right(%0) : (tensor<f32>) -> tensor<f32>
    return %1 : tensor<f32>
  }
  func.func private @right(%x: tensor<f32>) -> tensor<f32> {
    %1 = call @left(%x) : (tensor<f32>) -> tensor<f32>
    return %1 : tensor<f32>
  }
}
"""


class RunsTest(absltest.TestCase):
  def test_calls_branches_and_loops(self):
    source = modules.read(TEXT)
    found = {
      operation.name.removeprefix("stablehlo."): dict(runs)
      for operation, runs in module_runs.runs_of(source)
    }
    branch = Run(is_conditional=True)
    self.assertEqual(found["sine"], {Run(): 1})
    self.assertEqual(found["cosine"], {Run(): 4, branch: 2})
    self.assertEqual(found["tanh"], {Run(trips=None): 1})
    self.assertEqual(found["sqrt"], {})
    self.assertEqual(found["negate"], {})

  def test_every_operation_is_there_once(self):
    source = modules.read(TEXT)
    self.assertEqual(
      [
        operation.name
        for operation, _ in module_runs.runs_of(source)
        if operation.name != "func.func"
      ],
      [
        operation.name
        for operation in modules.walk(source.module.operation)
        if operation.name != "func.func"
      ],
    )
