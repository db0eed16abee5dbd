# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parsing of layouts, and the sizes that they split."""

import dataclasses
import math

from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

from jaxplugin.lab.planning import blocks, layouts


def make_block(model, **sizes):
  return dataclasses.replace(blocks.MODELS[model], **sizes)


class ParseTest(parameterized.TestCase):
  @parameterized.parameters(
    ("fsdp=128,tp=8,sp", (128, 8)),
    ("tp=2", (2,)),
    ("dp=2,fsdp=4,ep=2,tp=8,sp", (2, 4, 2, 8)),
  )
  def test_words_come_back(self, text, shape):
    layout = layouts.parse(text)
    self.assertEqual(str(layout), text)
    self.assertEqual(layout.shape, shape)
    self.assertEqual(str(layouts.parse(text.upper().replace(",", ", "))), text)

  @parameterized.parameters(
    ("", "got '' in ''"),
    ("fsdp=0", "got 'fsdp=0'"),
    ("pp=2", "sizes of dp, fsdp, ep, tp.*got 'pp=2'"),
    ("tp=2,tp=4", "got 'tp=4' in 'tp=2,tp=4'"),
    ("tp=2,sp,sp", "got 'sp'"),
    ("fsdp=8,sp", "sp splits the sequence over tp.*add tp=8"),
    ("sp", "sp splits the sequence over tp.*add tp=8"),
    ("free", "got 'free'"),
  )
  def test_other_words_are_refused(self, text, message):
    with self.assertRaisesRegex(ValueError, message):
      layouts.parse(text)


class SpecTest(absltest.TestCase):
  def test_axes_that_a_layout_has_split_arrays(self):
    layout = layouts.parse("dp=2,fsdp=4,tp=8,sp")
    self.assertEqual(layout.tokens(), P(("dp", "fsdp"), "tp", None))
    self.assertEqual(layout.hidden(), P(("dp", "fsdp"), None, "tp"))
    self.assertEqual(layout.weight(into_channels=False), P("fsdp", "tp"))
    self.assertEqual(layout.weight(into_channels=True), P("tp", "fsdp"))
    self.assertEqual(layout.size("dp", "tp", "ep"), 16)
    layout = layouts.parse("tp=8")
    self.assertEqual(layout.tokens(), P(None, None, None))
    self.assertEqual(layout.weight(into_channels=True), P("tp", None))
    layout = layouts.parse("fsdp=2,ep=4")
    self.assertEqual(
      layout.weight(into_channels=False, of_experts=True), P("ep", "fsdp", None)
    )


class CheckTest(parameterized.TestCase):
  @parameterized.parameters(
    ("small", "fsdp=16", "batch must be a multiple of the 16 .* got 8"),
    ("small", "tp=16", "heads must be a multiple of the 16 .* got 8"),
    ("small", "ep=2", "must not have ep for a model without experts"),
    ("gpt-oss-120b", "ep=3", "batch must be a multiple of the 3"),
    ("gpt-oss-120b", "fsdp=1,ep=5", "batch must be a multiple of the 5"),
    ("gpt-oss-120b", "ep=8", None),
    ("llama3-8b", "fsdp=8,tp=8,sp", None),
  )
  def test_sizes_must_be_multiples(self, model, layout, message):
    block = make_block(model, batch=8, sequence=256)
    if message is None:
      blocks.check(block, layouts.parse(layout))
    else:
      with self.assertRaisesRegex(ValueError, message):
        blocks.check(block, layouts.parse(layout))

  def test_experts_get_whole_rows(self):
    block = make_block("gpt-oss-120b", batch=4, sequence=24)
    with self.assertRaisesRegex(ValueError, "experts, 512, got 384"):
      blocks.check(block, layouts.parse("ep=4"))

  def test_parameters_are_the_models_own(self):
    """Billions of parameters of a model, with its two embeddings."""
    for name, vocabulary, billions in (
      ("llama3-8b", 2 * 128256 * 4096, 8.03),
      ("llama3-70b", 2 * 128256 * 8192, 70.6),
      ("llama3-405b", 2 * 128256 * 16384, 405.9),
      ("gpt-oss-120b", 2 * 201088 * 2880, 116.8),
    ):
      block = blocks.MODELS[name]
      count = vocabulary
      for shape in block.weights.values():
        count += block.layers * math.prod(shape)
      self.assertAlmostEqual(count / 1e9 / billions, 1, delta=2e-3, msg=name)
