# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The decoder is the transformer that its reference defines, cached or not."""

import dataclasses
import functools

import decoder
import decoder_reference
import decoder_weights
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp

CONFIG = decoder_reference.CONFIG
PARAMS = decoder_weights.random_params(CONFIG)
TOKENS = np.random.default_rng(1).integers(CONFIG.vocabulary, size=(2, 9))
SLOTS = 16
# Relative to the largest logit. A few f32 matmuls in sequence, with sums of up
# to 96 values, err by 1e-6. A wrong position, head or mask errs by more than
# 0.1.
F32_TOLERANCE = 1e-5
# Rows rounded to bf16, 2^-9 each, eight products deep.
BF16_TOLERANCE = 8 * 2.0**-9
# Keys and values rounded to float16, 2^-12 each, in two layers.
F16_TOLERANCE = 4 * 2.0**-12


def variant(name, given=None):
  model = decoder_weights.model(name, CONFIG, PARAMS)
  if given is None:
    return model
  how = decoder.Decoder(config=CONFIG, given=given)
  return decoder_weights.Model(name=name, decoder=how, params=model.params)


@jax.jit
def numbers(tree):
  """As plain arrays."""
  is_quantized = lambda x: isinstance(x, jp.ScaledArray)
  dequantize = lambda x: jp.dequantize(x) if is_quantized(x) else x
  return jax.tree.map(dequantize, tree, is_leaf=is_quantized)


def stacked(params):
  """Stacks layers that are separate arrays, or parts of such arrays."""
  if not isinstance(params["layers"], tuple):
    return params
  whole = lambda w: np.concatenate(w) if isinstance(w, tuple) else w
  layers = {
    name: np.stack([whole(layer[name]) for layer in params["layers"]])
    for name in params["layers"][0]
  }
  return params | {"layers": layers, "head": whole(params["head"])}


def reference(model, tokens):
  """f64[batch, tokens, vocabulary] with the numbers that weights stand for."""
  params = stacked(numbers(model.params))
  return np.stack(
    [decoder_reference.logits(CONFIG, params, row) for row in tokens]
  )


@functools.partial(jax.jit, static_argnums=0)
def run(how, params, tokens, cache):
  """Returns f32[batch, tokens, vocabulary] and the cache after the tokens."""
  x, cache = decoder.forward(how, params, tokens, cache)
  y = decoder.logits(how, params, x.reshape(-1, CONFIG.width))
  return y.reshape(*tokens.shape, -1), cache


def all_logits(model, tokens, parts, start=None, dtype="float32"):
  """The same by the decoder: of some tokens, then of some more, and so on."""
  start = np.zeros(len(tokens)) if start is None else start
  cache = model.new_cache(start, SLOTS, dtype)
  given = np.split(np.asarray(tokens), np.cumsum(parts)[:-1], axis=1)
  results = []
  for part in given:
    y, cache = run(model.decoder, model.params, part, cache)
    results.append(np.asarray(y))
  return np.concatenate(results, axis=1)


def relative(actual, expected):
  return np.abs(actual - expected).max() / np.abs(expected).max()


class ReferenceTest(parameterized.TestCase):
  # CacheTest runs the program of the first one, and DecodeTest unrolls layers.
  @parameterized.parameters("f32 scan", "f32", "f32 halves")
  @pytest.mark.sample(1)
  def test_plain_forms_are_the_transformer(self, name):
    model = variant(name)
    actual = all_logits(model, TOKENS, [9])
    expected = reference(variant("f32"), TOKENS)
    self.assertLess(relative(actual, expected), F32_TOLERANCE)

  @parameterized.parameters(*decoder_weights.FORMATS)
  @pytest.mark.sample(1)
  def test_quantized_weights_are_the_transformer_of_their_numbers(self, name):
    model = variant(name, "float32")
    expected = reference(model, TOKENS)
    actual = all_logits(model, TOKENS, [9])
    self.assertLess(relative(actual, expected), F32_TOLERANCE)
    # They are other numbers than f32's.
    self.assertGreater(
      relative(actual, reference(variant("f32"), TOKENS)), 0.02
    )

  def test_rows_in_bf16_err_by_their_rounding(self):
    model = variant("nvfp4")
    expected = reference(model, TOKENS)
    error = relative(all_logits(model, TOKENS, [9]), expected)
    self.assertLess(error, BF16_TOLERANCE)
    self.assertGreater(error, F32_TOLERANCE)  # they are rounded


class CacheTest(parameterized.TestCase):
  @parameterized.parameters("f32 scan", "nvfp4", "mxfp8 pair")
  @pytest.mark.sample(1)
  def test_tokens_in_parts_are_as_one_long_prefill(self, name):
    model = variant(name, None if "pair" in name else "float32")
    whole = all_logits(model, TOKENS, [9])
    parts = all_logits(model, TOKENS, [7, 1, 1])
    # Quantized rows may tip to the next code where sums have another order.
    tolerance = 0.02 if "pair" in name else F32_TOLERANCE
    self.assertLess(relative(parts, whole), tolerance)

  @parameterized.parameters("nvfp4", "nvfp4 pair")
  @pytest.mark.sample(1)
  def test_a_row_does_not_depend_on_those_beside_it(self, name):
    model = variant(name)
    others = np.flip(TOKENS, axis=1)
    both = all_logits(model, np.concatenate([TOKENS, others]), [7, 1, 1])
    alone = all_logits(model, TOKENS[:1], [7, 1, 1])
    # Sums of another order, by another kernel, tip roundings of rows.
    self.assertLess(relative(both[:1], alone), 0.05)
    with_others = all_logits(model, np.concatenate([TOKENS] * 2), [7, 1, 1])
    np.testing.assert_array_equal(both[:2], with_others[:2])

  def test_what_stands_before_a_prompt_is_not_seen(self):
    model = variant("f32 scan")
    padded = np.pad(TOKENS[:1], ((0, 0), (3, 0)), constant_values=7)
    rows = np.concatenate([padded, np.arange(12)[None]])
    # Other tests compile programs for parts of these sizes.
    actual = all_logits(model, rows, [7, *[1] * 5], start=[3, 0])[:1, 3:]
    expected = reference(model, TOKENS[:1])
    self.assertLess(relative(actual, expected), F32_TOLERANCE)

  @parameterized.parameters("f32 scan", "f32")
  @pytest.mark.sample(1)
  def test_attention_reads_no_more_slots_than_its_window(self, name):
    model = variant(name)
    tokens = np.random.default_rng(2).integers(CONFIG.vocabulary, size=(1, 258))
    slots = 300  # windows of 256 and 300
    cache = model.new_cache([0], slots, "float32")
    # NaN in values of slots gives NaN even if they are masked.
    poison = jax.jit(lambda x: x.at[..., 256:, :].set(np.nan))
    cache = cache._replace(values=jax.tree.map(poison, cache.values))
    rows = []
    for part in np.split(tokens, (254, 255, 256, 257), axis=1):
      if int(cache.length) == 256:
        self.assertTrue(np.isfinite(np.concatenate(rows)).all())
        cure = lambda x: jax.device_put(np.nan_to_num(x))
        cache = cache._replace(values=jax.tree.map(cure, cache.values))
      y, cache = run(model.decoder, model.params, part, cache)
      rows.append(np.asarray(y[0]))
    actual = np.concatenate(rows)
    expected = reference(variant("f32"), tokens)[0]
    self.assertLess(relative(actual, expected), F32_TOLERANCE)

  def test_a_float16_cache_errs_by_its_rounding(self):
    model = variant("f32 scan")
    expected = reference(variant("f32"), TOKENS)
    actual = all_logits(model, TOKENS, [9], dtype="float16")
    error = relative(actual, expected)
    self.assertLess(error, F16_TOLERANCE)
    self.assertGreater(error, F32_TOLERANCE)  # it is rounded

  def test_a_prompt_in_padded_parts_gives_the_token_of_a_whole_one(self):
    model = variant("f32 scan")
    prefill = functools.partial(decoder.prefill, model.decoder, model.params)
    cache = model.new_cache([0, 0], SLOTS, "float32")
    padded = np.pad(TOKENS, ((0, 0), (0, 1)), constant_values=7)
    for part, count in ((padded[:, :5], 5), (padded[:, 5:], 4)):
      token, cache = prefill(jnp.asarray(part), cache=cache, count=count)
    self.assertEqual(int(cache.length), 9)
    # The padding's slot is written again, and not seen before.
    args = {"steps": 3, "cache": cache}
    tokens, _ = decoder.decode(model.decoder, model.params, token, **args)
    said = np.concatenate([token[None], tokens]).T
    text = np.concatenate([TOKENS, said[:, :-1]], axis=1)
    wanted = reference(variant("f32"), text)[:, 8:].argmax(axis=-1)
    np.testing.assert_array_equal(said, wanted)


class SamplingTest(parameterized.TestCase):
  # Probabilities 1/2, 1/4, 1/8, 1/8, at temperature 1.
  SCORES = np.log(np.float32([1 / 8, 1 / 2, 1 / 8, 1 / 4]))

  @parameterized.parameters(
    ({"top_k": 4, "top_p": 1.0}, (1 / 8, 1 / 2, 1 / 8, 1 / 4)),
    ({"top_k": 2, "top_p": 1.0}, (0, 2 / 3, 0, 1 / 3)),
    ({"top_k": 4, "top_p": 0.6}, (0, 2 / 3, 0, 1 / 3)),
    ({"top_k": 4, "top_p": 0.4}, (0, 1, 0, 0)),
    ({"top_k": 2, "top_p": 1.0, "temperature": 0.5}, (0, 4 / 5, 0, 1 / 5)),
  )
  def test_tokens_are_drawn_with_their_probabilities(self, fields, expected):
    sampling = decoder.Sampling(**{"temperature": 1.0} | fields)
    count = 4000
    scores = np.tile(self.SCORES, (count, 1))
    tokens = sampling(scores, jax.random.key(0))
    share = np.bincount(tokens, minlength=4) / count
    # Five standard deviations of a share.
    np.testing.assert_allclose(share, expected, atol=5 * 0.5 / count**0.5)
    np.testing.assert_array_equal(share[np.equal(expected, 0)], 0)

  def test_a_decoder_that_samples_needs_a_key(self):
    model = variant("f32 scan")
    how = dataclasses.replace(model.decoder, sampling=decoder.Sampling(top_k=4))
    cache, prompt = model.new_cache([0], SLOTS), jnp.asarray(TOKENS[:1])
    with self.assertRaisesRegex(ValueError, "key must be"):
      decoder.prefill(how, model.params, prompt, cache=cache)


class DecodeTest(parameterized.TestCase):
  @parameterized.parameters("f32", "f32 scan", "mxfp4")
  @pytest.mark.sample(1)
  def test_tokens_are_the_likeliest_ones(self, name):
    model = variant(name, "float32")
    cache = model.new_cache([0, 0], SLOTS, "float32")
    prompt = jnp.asarray(TOKENS[:, :5])
    token, cache = decoder.prefill(
      model.decoder, model.params, prompt, cache=cache
    )
    parts = [np.asarray(token)[None]]
    for _ in range(2):
      tokens, cache = decoder.decode(
        model.decoder, model.params, token, steps=3, cache=cache
      )
      parts.append(np.asarray(tokens))
      token = tokens[-1]
    self.assertEqual(int(cache.length), 5 + 2 * 3)
    said = np.concatenate(parts).T
    # The reference's next token after each prefix of the decoder's text.
    text = np.concatenate([TOKENS[:, :5], said[:, :-1]], axis=1)
    expected = reference(model, text)[:, 4:].argmax(axis=-1)
    np.testing.assert_array_equal(said, expected)

  def test_the_first_of_the_largest_is_taken(self):
    scores = jnp.array([[1.0, 3, 3, 2], [-jnp.inf, -1, -2, -1], [0, 0, 0, 0]])
    np.testing.assert_array_equal(decoder.likeliest(scores), [1, 1, 0])

  def test_the_cache_is_given_away(self):
    model = variant("f32 scan")
    cache = model.new_cache([0, 0], SLOTS, "float32")
    prompt = jnp.asarray(TOKENS[:, :5])
    decoder.prefill(model.decoder, model.params, prompt, cache=cache, count=5)
    self.assertTrue(cache.keys.is_deleted())


class ErrorTest(absltest.TestCase):
  def test_sizes_that_do_not_fit(self):
    with self.assertRaisesRegex(ValueError, "heads=3, groups=2"):
      decoder.Config(
        vocabulary=1,
        width=64,
        layers=1,
        heads=3,
        groups=2,
        head_size=32,
        hidden=32,
      )
    with self.assertRaisesRegex(ValueError, "got 'int4'"):
      decoder_weights.model("int4", CONFIG, PARAMS)
