# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A chat says what its decoder says, over several turns."""

import contextlib
import io
import sys
from unittest import mock

import chat
import decoder
import decoder_reference
import decoder_weights
import jax
import jax.numpy as jnp
import numpy as np
import smollm
from absl.testing import absltest

CONFIG = decoder_reference.CONFIG
PARAMS = decoder_weights.random_params(CONFIG)
RNG = np.random.default_rng(1)
# Longer than a part, and not a multiple of one.
PROMPT = RNG.integers(CONFIG.vocabulary, size=chat.PART + 9).tolist()
# One number of slots for all tests, so that they share their programs. They
# have one window of attention.
SLOTS = 192
SECOND = RNG.integers(CONFIG.vocabulary, size=5).tolist()


class Tokenizer:
  """Tokens are bytes of UTF-8."""

  end = -1

  def token_to_id(self, token):
    assert token == smollm.END
    return self.end

  def encode(self, text):
    return mock.Mock(ids=[x % CONFIG.vocabulary for x in text.encode()])

  def decode(self, tokens):
    return bytes(tokens).decode(errors="replace")


def make(end=-1, **kwargs):
  tokenizer = Tokenizer()
  tokenizer.end = end
  checkpoint = smollm.Checkpoint(CONFIG, PARAMS, tokenizer)
  return chat.Chat(checkpoint, slots=SLOTS, **kwargs)


def likeliest(tokens, count):
  """Returns the next tokens by the reference in f64."""
  tokens = list(tokens)
  for _ in range(count):
    scores = decoder_reference.logits(CONFIG, PARAMS, np.array(tokens))
    tokens.append(int(scores[-1].argmax()))
  return tokens[-count:]


def said(conversation, prompt, count):
  list(conversation.read(prompt))
  return [x for x, _ in zip(conversation.answer(), range(count), strict=False)]


class ChatTest(absltest.TestCase):
  def test_answers_are_the_likeliest_tokens(self):
    conversation = make()
    conversation.compile()
    self.assertEqual(list(conversation.read(PROMPT)), [chat.PART, len(PROMPT)])
    tokens = [x for x, _ in zip(conversation.answer(), range(9), strict=False)]
    self.assertEqual(tokens, likeliest(PROMPT, 9))

  def test_a_second_turn_follows_the_end_of_the_first(self):
    answer = likeliest(PROMPT, 20)
    # The end lies within a call's tokens, so the call decodes beyond it.
    count = next(
      i
      for i in range(2, 20)
      if i % chat.STEPS == 2 and answer[i] not in answer[:i]
    )
    conversation = make(end=answer[count])
    self.assertEqual(said(conversation, PROMPT, 20), answer[:count])
    expected = likeliest(PROMPT + answer[:count] + SECOND, 6)
    self.assertEqual(said(conversation, SECOND, 6), expected)

  def test_an_answer_ends_when_the_cache_is_full(self):
    conversation = make()
    count = len(said(conversation, PROMPT, 1000))
    self.assertLessEqual(len(PROMPT) + count - 1, SLOTS)
    self.assertGreater(len(PROMPT) + count, SLOTS - chat.STEPS)
    with self.assertRaisesRegex(ValueError, f"got {chat.PART}; start a new"):
      said(conversation, SECOND, 1)

  def test_equal_seeds_sample_equal_answers(self):
    sampling = decoder.Sampling(temperature=5.0)
    answers = [
      said(make(sampling=sampling, seed=seed), PROMPT, 9) for seed in (0, 0, 1)
    ]
    self.assertEqual(answers[0], answers[1])
    self.assertNotEqual(answers[0], answers[2])

  def test_wrong_options_of_sampling_are_named(self):
    for options in (
      {"temperature": -1.0},
      {"temperature": float("nan")},
      {"top_k": 0},
      {"top_p": 0.0},
      {"top_p": 2.0},
    ):
      (name,), (value,) = options.keys(), options.values()
      with self.assertRaisesRegex(ValueError, f"{name} must be .* got {value}"):
        decoder.Sampling(**options)
      option = f"--{name.replace('_', '-')}={value}"
      argv = ["chat.py", "--question", "x", option]
      load = mock.Mock(return_value=smollm.Checkpoint(CONFIG, PARAMS, None))
      with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(smollm, "load", load),
        self.assertRaisesRegex(SystemExit, f"{name} must be"),
      ):
        chat.main()

  def test_more_likely_tokens_than_there_are_draws_among_all(self):
    sampling = decoder.Sampling(top_k=1000, top_p=1.0, temperature=1e-3)
    scores = jnp.zeros((1, 5)).at[0, 3].set(1.0)
    self.assertEqual(int(sampling(scores, jax.random.key(0))[0]), 3)

  def test_text_has_whole_characters(self):
    checkpoint = smollm.Checkpoint(CONFIG, PARAMS, Tokenizer())
    pieces = list(chat.pieces(checkpoint, "né!".encode()))
    self.assertEqual(pieces, ["n", "é", "!"])

  def test_the_command_prints_an_answer_and_its_speed(self):
    checkpoint = smollm.Checkpoint(CONFIG, PARAMS, Tokenizer())
    out, err = io.StringIO(), io.StringIO()
    argv = [
      "chat.py",
      "--question",
      "Why?",
      "--temperature=0",
      f"--slots={SLOTS}",
    ]
    with (
      mock.patch("sys.argv", argv),
      mock.patch.object(smollm, "load", return_value=checkpoint),
      contextlib.redirect_stdout(out),
      contextlib.redirect_stderr(err),
    ):
      chat.main()
    prompt = checkpoint.encode("Why?")
    self.assertIn(f"prompt: {len(prompt)} of {len(prompt)}", err.getvalue())
    self.assertRegex(err.getvalue(), r"answer: \d+ tokens, \d+ tokens/s")
    tokens = likeliest(prompt, 10)
    self.assertTrue(out.getvalue().startswith(bytes(tokens).decode()))
