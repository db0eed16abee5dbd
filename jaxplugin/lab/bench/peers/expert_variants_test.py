# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of mixtures of experts: routing, variants, checks, and slow peers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.lab.bench import execution, measurement, table
from jaxplugin.lab.bench.peers import expert_variants, verification
from jaxplugin.testing import acme_backend, bench_results

SHAPE = "experts:3x2of5x96x64"
_WAYS = ("lax", "loop", "scan", "take")


def _row(text):
  return bench_results.parsed(text)[0]


def _made(row, pair):
  """The variants of a row on a CPU."""
  return expert_variants.ExpertVariants(
    *bench_results.parsed(row, pair), jp.detect_target("cpu")
  )


class RoutingTest(parameterized.TestCase):
  def test_used_experts_rotate(self):
    row = _row("experts:1x4of32x96x64")
    sets = [expert_variants.routing(row, i) for i in range(8)]
    self.assertEqual({one.sizes for one in sets}, {(1, 1, 1, 1)})
    used = [expert for one in sets for expert in one.used]
    self.assertEqual(sorted(used), list(range(32)))
    self.assertEqual(expert_variants.routing(row, 8), sets[0])

  @parameterized.parameters(1, 8, 64, 512)
  def test_each_token_has_different_experts(self, tokens):
    row = _row(f"experts:{tokens}x4of32x96x64")
    one = expert_variants.routing(row, 3)
    self.assertEqual(one.group_sizes.sum(), 4 * tokens)
    self.assertLessEqual(max(one.sizes), tokens)
    counts = np.bincount(one.of_row, minlength=32)
    np.testing.assert_array_equal(counts, one.group_sizes)
    # An expert has 1/8 of the tokens on average; none has 6 deviations more.
    deviation = (tokens * 1 / 8 * 7 / 8) ** 0.5
    self.assertLess(max(one.sizes), tokens / 8 + 6 * deviation + 1)


class VariantsTest(parameterized.TestCase):
  @parameterized.parameters(
    "bf16xmxfp8", "f32xmxfp4", "bf16xnvfp4", "nvfp4", "bf16xmxfp6_e2m3"
  )
  @pytest.mark.lab
  def test_right_products_pass_and_wrong_ones_are_found(self, formats):
    made = _made(SHAPE, formats)
    found = [*made.ours(["xla"]), *made.peers(["f32", "bf16"])]
    names = [f"{way} {dtype}" for dtype in ("f32", "bf16") for way in _WAYS]
    self.assertEqual(
      [v.name for v in found], ["xla", "dense dots", "dequantize", *names]
    )
    for variant in found:
      operands = variant.operands(1)
      result = jax.jit(variant.function)(*operands)
      variant.check(1, result)
      wrong = jax.tree.map(lambda x: x.at[-1, 0].add(0.5), result)
      with self.assertRaises(verification.WrongResultError, msg=variant.name):
        variant.check(1, wrong)
    rows, weights, sizes = found[0].operands(1)
    wrong = found[0].function(rows, weights, jnp.roll(sizes, 1))
    with self.assertRaises(verification.WrongResultError):
      found[0].check(1, wrong)

  @parameterized.parameters(
    ("h100", "bf16xmxfp4"), ("h100", "nvfp4"), ("b200", "bf16xnvfp4")
  )
  @pytest.mark.lab
  def test_weights_prepared_for_a_gpu_are_expected_in_the_usual_order(
    self, name, formats
  ):
    prepare = functools.partial(
      jp.prepare_weights, target=jp.named_target(name)
    )
    self.enter_context(
      absltest.mock.patch.object(
        expert_variants.preparation, "prepare_weights", prepare
      )
    )
    expert_variants.weights_of.cache_clear()
    self.addCleanup(expert_variants.weights_of.cache_clear)
    made = _made(SHAPE, formats)
    weights = made.data.weights.quantized(made.data.format)
    is_interleaved = weights.is_interleaved
    self.assertEqual(is_interleaved, name == "h100")
    self.assertEqual(weights.scale_layout == "linear", is_interleaved)
    for variant in [*made.ours(["xla"]), *made.peers([])]:
      result = jax.jit(variant.function)(*variant.operands(1))
      variant.check(1, result)
    columns = made.data.weights.of(made.data.format, slice(3, 4))
    np.testing.assert_array_equal(
      jp.dequantize(columns), jp.dequantize(weights)[3]
    )

  @pytest.mark.lab
  def test_bytes_are_those_of_used_experts(self):
    made = _made(SHAPE, "bf16xmxfp4")
    by_name = {v.name: v for v in made.ours(["xla"]) + made.peers(["bf16"])}
    used = len(expert_variants.routing(made.row, 0).sizes)
    rows, weight = 6 * 64 * 2 + 6 * 96 * 4, 96 * 64
    self.assertEqual(
      by_name["xla"].num_bytes, used * (weight // 2 + weight // 32) + rows
    )
    self.assertEqual(by_name["loop bf16"].num_bytes, used * weight * 2 + rows)
    self.assertEqual(by_name["dense dots"].flops, 2 * 6 * weight)

  def test_backends_of_other_packages_are_timed(self):
    def multiply(call):
      ends = jnp.cumsum(call.group_sizes)
      group = jnp.searchsorted(ends, jnp.arange(call.shape[0]), side="right")
      weights = call.rhs.dequantized()[group]
      rows = call.lhs.dequantized().astype(jnp.float32)
      return call.finish(jnp.einsum("mk,mnk->mn", rows, weights))

    acme_backend.register(self, multiply, first=True, operation="ragged_dot")
    for names in (["chosen"], None):
      first = _made(SHAPE, "bf16xmxfp4").ours(names)[0]
      self.assertEqual((first.name, first.is_chosen), ("acme", True))
      first.check(1, jax.jit(first.function)(*first.operands(1)))

  def test_weights_of_gigabytes_are_not_made_ready(self):
    row = _row("experts:1x2of8x28672x4096")
    made = expert_variants.ExpertVariants.__new__(
      expert_variants.ExpertVariants
    )
    made.row = row
    made._dense = made._dequantizing = lambda: None
    found = made.peers(["f32"])[2:]
    self.assertEqual([v.name for v in found], [f"{w} f32" for w in _WAYS])
    for variant in found:
      self.assertEqual(variant.reason, "its weights take 3.8 GB")


class MeasurementTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    patch = absltest.mock.patch.object(execution, "WARM_UP_SECONDS", 0.0)
    self.enter_context(patch)

  def measure(self, row, *formats):
    one = bench_results.measuring(("f32", "ggml"), ("chosen", "cudnn"))
    return [one.measure(*bench_results.parsed(row, pair)) for pair in formats]

  @pytest.mark.lab
  def test_row_is_measured_in_turns(self):
    (found,) = self.measure(SHAPE, "bf16xmxfp4")
    by_name = {v.name: v for v in found.variants}
    chosen = "cpu" if jp.detect_target("cpu").cpu_kernels else "xla"
    self.assertTrue(by_name[chosen].is_chosen)
    self.assertEqual(by_name["loop f32"].time.count, 3)
    self.assertEqual((found.kind, found.out), ("experts", "float32"))
    reasons = {n: v.reason for n, v in by_name.items() if v.reason}
    self.assertEqual(
      reasons,
      {
        "cudnn": "ragged_dot has no such implementation",
        "ggml": "is not run for experts",
      },
    )
    ratios = {(r.ours, r.other) for r in found.ratios}
    timed = [name for name, v in by_name.items() if v.time]
    self.assertEqual(ratios, {(chosen, n) for n in timed if n != chosen})

  @pytest.mark.lab
  def test_slow_peer_is_called_alone_and_for_all_formats(self):
    patch = absltest.mock.patch.object
    self.enter_context(patch(measurement, "_SLOW_SECONDS", 0.0))
    self.enter_context(patch(measurement, "_SLOW_TIMES", 0.0))
    first, second = self.measure(
      "experts:2x1of3x64x64", "bf16xmxfp4", "bf16xmxfp8"
    )
    before, after = (
      {v.name: v for v in found.variants} for found in (first, second)
    )
    self.assertEqual(before["scan f32"].time.count, 1)
    self.assertEqual(before["scan f32"].time, after["scan f32"].time)
    self.assertEqual(after["scan f32"].form, "timed with bf16xmxfp4")
    self.assertIn("one call", table.block(second))
    # This package's products are those of the formats.
    self.assertEqual(after["dense dots"].form, "")
    (ratio,) = (r.ratio for r in second.ratios if r.other == "scan f32")
    ours = next(v for v in second.variants if v.is_chosen)
    expected = after["scan f32"].time.median / ours.time.median
    self.assertAlmostEqual(ratio.median / expected, 1, places=4)

  @pytest.mark.lab
  def test_peer_that_needs_too_much_memory_is_told(self):
    self.enter_context(
      absltest.mock.patch.object(measurement, "_MAX_TEMPORARY_BYTES", -1)
    )
    (found,) = self.measure("experts:2x1of3x64x64", "bf16xmxfp4")
    peers = [v for v in found.variants if v.name.endswith(" f32")]
    self.assertLen(peers, 4)
    for peer in peers:
      self.assertEqual(peer.status, "unavailable")
      self.assertRegex(peer.reason, "MemoryError: needs 0.0 GB besides its op")
    self.assertEqual({v.status for v in found.variants if v.is_chosen}, {"ok"})
