# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A decoder's step: its variants compute it, and its check can fail."""

import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.lab.bench.peers import (
  decoder_model,
  decoder_variants,
  verification,
)
from jaxplugin.testing import bench_results

SHAPE = "decoder:2x64x96"
ONE_LAYER = "decoder:1x64x96"
CHOSEN = "cpu" if jp.detect_target("cpu").cpu_kernels else "xla"
NO_CACHE = 0
# LLVM takes most of the time of these tests.
QUICKLY = {"xla_backend_optimization_level": "0"}


def made(pair="nvfp4", shape=SHAPE, cache_bytes=1 << 30):
  row, pair = bench_results.parsed(shape, pair)
  target = jp.detect_target("cpu")
  return decoder_variants.DecoderVariants(row, pair, target, cache_bytes)


def peers_of(decoder):
  """Name and form -> variant."""
  return {
    (form.name, form.form): form
    for forms in decoder.peers(decoder_variants.PEERS)
    for form in forms
  }


def result_of(variant):
  operands = variant.operands(0)
  lowered = jax.jit(variant.function).lower(*operands)
  return lowered.compile(compiler_options=QUICKLY)(*operands)


class VariantsTest(parameterized.TestCase):
  def check_right_and_wrong(self, variant):
    result = result_of(variant)
    variant.check(0, result)
    with self.assertRaises(verification.WrongResultError):
      variant.check(1, result)

  @parameterized.parameters(
    ("mxfp8", SHAPE),
    ("nvfp4", SHAPE + "x3"),
    ("f32xnvfp4", SHAPE),
    ("bf16xmxfp4", SHAPE),
    ("mxfp6_e2m3", ONE_LAYER),
  )
  @pytest.mark.lab
  def test_ours_pass_and_another_sets_result_is_told(self, pair, shape):
    found = made(pair, shape).ours(None)
    self.assertEqual([v.name for v in found], [CHOSEN, f"{CHOSEN} in scan"])
    for variant in found:
      with self.subTest(variant.name):
        self.assertTrue(variant.is_chosen)
        self.check_right_and_wrong(variant)

  @pytest.mark.lab
  def test_every_form_of_a_peer_passes_and_another_sets_result_is_told(self):
    found = peers_of(made("nvfp4", ONE_LAYER))
    self.assertEqual(
      {name for name, _ in found},
      {"f32", "f32 in scan", "bf16", "lax.scaled_dot"},
    )
    self.assertLen(found, 3 * 3 + 2)
    for key, variant in found.items():
      if key[0] != "f32":  # the code of bf16 and of f32 in a scan
        with self.subTest(key):
          self.check_right_and_wrong(variant)

  @pytest.mark.lab
  def test_scaled_dot_rounds_a_plain_side(self):
    *_, peer = made("f32xmxfp8", ONE_LAYER).peers(["lax.scaled_dot"])
    self.check_right_and_wrong(peer[0])

  def test_peers_that_are_not_run_say_so(self):
    ggml, scaled_dot = made("mxfp6_e2m3").peers(["ggml", "lax.scaled_dot"])
    self.assertEqual(ggml.reason, "is not run for decoders")
    self.assertEqual(scaled_dot.reason, "XLA has no float6_e2m3fn")

  @pytest.mark.lab
  def test_sum_of_products_is_for_one_row(self):
    forms = {form for _, form in peers_of(made(shape=SHAPE + "x2"))}
    self.assertEqual(forms, {"w (n, k)", "w (k, n)"})

  @pytest.mark.lab
  def test_scan_and_arguments_of_their_own_are_what_they_say(self):
    decoder = made()
    peers = peers_of(decoder)
    for variant in (*decoder.ours(None), *peers.values()):
      _, layers = variant.operands(0)
      jaxpr = str(jax.make_jaxpr(variant.function)(*variant.operands(0)))
      is_scan = variant.name.endswith(" in scan")
      self.assertEqual("scan[" in jaxpr, is_scan, variant.name)
      self.assertEqual(isinstance(layers, dict), is_scan)

  @pytest.mark.lab
  def test_implementations_are_asked_for_by_name(self):
    triton, xla, in_scan = made().ours(["xla", "triton"])
    self.assertEqual((xla.name, in_scan.name), ("xla", "xla in scan"))
    self.assertIn("platform is cpu", triton.reason)
    xla.check(0, result_of(xla))

  @pytest.mark.lab
  def test_bytes_are_those_of_weights_caches_and_activations(self):
    decoder = made("mxfp8")
    found = peers_of(decoder)
    # One head, which does not share its keys and values.
    weights = 2 * (64 * (64 + 2 * 64) + 64 * 64 + 3 * 64 * 96)
    caches = 2 * 2 * 512 * 64 * 4
    rest = caches + 2 * 64 * 4
    self.assertEqual(found["f32", "w (n, k)"].num_bytes, 4 * weights + rest)
    self.assertEqual(found["bf16", "w (k, n)"].num_bytes, 2 * weights + rest)
    for ours in decoder.ours(None):
      self.assertEqual(ours.num_bytes, weights + weights // 32 + rest)
    attention = 2 * 2 * 64 * 513
    flops = decoder_model.flops(decoder.row)
    self.assertEqual(flops, 2 * (weights + attention))

  def test_weights_rotate_unless_they_are_past_the_cache(self):
    for cache_bytes, is_same in ((NO_CACHE, True), (1 << 30, False)):
      data = made(cache_bytes=cache_bytes).data
      first, second = (data.weights(i)["out"].values for i in (0, 1))
      self.assertEqual(np.array_equal(first, second), is_same)
      self.assertFalse(np.array_equal(data.x(0), data.x(1)))


class CheckTest(parameterized.TestCase):
  """An error in each part of a result is reported with its place."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    variant, _ = made("mxfp8").ours(None)
    cls.made = variant, *result_of(variant)

  def setUp(self):
    super().setUp()
    self.variant, y, seen = self.made
    self.y, self.seen = jax.tree.map(np.array, (y, seen))

  def check_told(self, pattern):
    with self.assertRaisesRegex(verification.WrongResultError, pattern):
      self.variant.check(0, (self.y, self.seen))

  def test_right_one_is_within_the_contract(self):
    error = self.variant.check(0, (self.y, self.seen))
    self.assertLess(error, verification.OURS_BOUND / verification.UNIT)

  @parameterized.product(
    layer=(0, 1), product=decoder_model.PRODUCTS, part=("input", "output")
  )
  def test_one_wrong_number_of_a_product_is_told(self, layer, product, part):
    array = self.seen[layer][product][part]
    # Well above the bound and far below what quantization errs by.
    array[0, 7] += 1e-3 * np.abs(array).max()
    what = f"what goes into {product}" if part == "input" else product
    self.check_told(rf"layer {layer}, {what}.*at \(0, 7\)")

  def test_wrong_end_and_nan_are_told(self):
    self.y[0, 5] *= 1 + 2.0**-12
    self.check_told(r"the result, at \(0, 5\)")
    self.seen[1]["down"]["input"][0, 3] = np.nan
    self.check_told("layer 1, what goes into down")


class ModelTest(absltest.TestCase):
  def test_heads_share_keys_and_values_in_groups_of_eight(self):
    rows = [
      bench_results.parsed(f"decoder:1x{64 * n}x32")[0] for n in (1, 8, 12, 32)
    ]
    self.assertEqual([decoder_model.groups(row) for row in rows], [1, 1, 1, 4])
