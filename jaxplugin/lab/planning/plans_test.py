# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A quantized block moves fewer bytes than a bf16 one in each layout.

docs/how_to/plan_collectives.md has larger models.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.lab.planning import blocks, collectives, layouts, plans
from jaxplugin.testing import installed

B200 = jp.named_target("b200", cudnn="9.13")
needs_compiler = installed.needs("jax_cuda13_plugin")
# Which of a layer's sums XLA joins before devices exchange them, in bf16 too.
joins_sums = absltest.skipIf(
  jax.__version_info__ >= (0, 12),
  "XLA of jax 0.12 joins fewer sums over devices, bf16's and others",
)
# MB of bf16 by layout, each by hand: weights are 16.8 million, tokens 2.1
# million values, 2 bytes each. W and T are these in MB.
W, T = (4 * 1024**2 + 3 * 1024 * 4096) * 2 / 1e6, 2048 * 1024 * 2 / 1e6
BY_HAND = {
  "fsdp=8": 2 * W * 7 / 8,
  "tp=8": 4 * 2 * T * 7 / 8,
  "tp=8,sp": 8 * T * 7 / 8,
}
# An amax of a tensor, and nothing beside.
RELATIVE_TOLERANCE = 1e-3
# Units of bf16's bytes.
MOST = {"mxfp8": 1.1, "nvfp4": 0.9}
# Units of all bytes. Programs that look through an array find a number each:
# 0.15 % in jax 0.10.2, 0.28 % in 0.12, which splits some arrays less.
MOST_OF_MAXIMA = 5e-3


def of_block(block, layout, format, **options):
  layout = layouts.parse(layout)
  program = plans.of_block(block, layout, format, B200, **options)
  return plans.measured(
    program, name="small", layout=layout, format=format, target=B200
  )


@functools.cache
def plan(layout, format):
  model = blocks.MODELS["small"]
  block = dataclasses.replace(model, batch=8, sequence=256)
  return of_block(block, layout, format)


class PlanTestCase(parameterized.TestCase):
  def check_plain(self, layout):
    found = plan(layout, plans.PLAIN).received / 1e6
    self.assertGreaterEqual(found, BY_HAND[layout] * (1 - 1e-6))
    self.assertLess(found, BY_HAND[layout] * (1 + RELATIVE_TOLERANCE))

  def check_quantized(self, layout, format, most):
    found = plan(layout, format)
    ratio = found.received / plan(layout, plans.PLAIN).received
    self.assertLessEqual(ratio, most, found)
    for dtype in ("s32", "f32"):
      size = collectives.received(found.collectives, dtype=dtype)
      self.assertLess(size, 1e3, (dtype, found))
    # Numbers of which the largest is a tensor's amax, up to some hundred each.
    size = collectives.received(found.collectives, dtype="u32")
    self.assertLess(size, MOST_OF_MAXIMA * found.received, found)


class FormatsTest(absltest.TestCase):
  def test_recipes_and_formats_train_and_serve_on_one_device(self):
    sizes = dict(channels=64, hidden=128, heads=2, kv_heads=2, head_size=32)
    block = blocks.TransformerBlock(**sizes, sequence=32)
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:1], ("x",))
    for format in (plans.PLAIN, "nvfp4", f"nvfp4{plans.RECIPE}"):
      for trains in (False, True):
        with self.subTest(format, trains=trains):
          step, args, _ = plans.on_one_device(
            block, format, mesh, fuses=True, trains=trains
          )
          results = jax.tree.leaves(jax.eval_shape(step, *args))
          self.assertEqual(results[0].shape, block.rows)
          self.assertLen(results, 1 + 8 * trains)


@needs_compiler
class RowTest(PlanTestCase):
  @pytest.mark.lab
  def test_tensor_parallel_and_sequence_parallel(self):
    self.check_plain("tp=8,sp")
    self.check_quantized("tp=8,sp", "mxfp8", MOST["mxfp8"])

  @pytest.mark.lab
  def test_sums_of_microbatches(self):
    block = dataclasses.replace(blocks.MODELS["small"], batch=32, sequence=256)
    in_each, once = (
      collectives.received(
        of_block(
          block,
          "fsdp=8",
          plans.PLAIN,
          microbatches=4,
          is_summed_once=is_summed_once,
        ).collectives,
        kind="reduce-scatter",
      )
      for is_summed_once in (False, True)
    )
    # Gradients in bf16 in each microbatch, and one sum in f32.
    self.assertAlmostEqual(in_each / (4 * W * 1e6 * 7 / 8), 1, places=3)
    self.assertAlmostEqual(once / (2 * W * 1e6 * 7 / 8), 1, places=3)


@needs_compiler
@pytest.mark.full
class RowsTest(PlanTestCase):
  """The slow ones."""

  def test_bf16_is_what_it_is_by_hand(self):
    self.check_plain("fsdp=8")

  @joins_sums
  def test_sums_of_bf16_are_what_they_are_by_hand(self):
    self.check_plain("tp=8")

  @parameterized.parameters(
    ("fsdp=8", "mxfp8"),
    ("fsdp=4,tp=2", "mxfp8"),
    ("tp=8,sp", "nvfp4"),
    ("fsdp=2,tp=4,sp", "nvfp4"),
  )
  def test_quantized_moves_less(self, layout, format):
    self.check_quantized(layout, format, MOST[format])

  @joins_sums
  def test_sums_over_devices_are_as_bf16s(self):
    self.check_quantized("tp=8", "mxfp8", 1 + RELATIVE_TOLERANCE)
