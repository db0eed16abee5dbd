# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The comparison counts what it says, with models whose answers are known."""

import argparse

import compare_llama_cpp
import numpy as np
from absl.testing import absltest

VOCABULARY = 50


class Model:
  """Says token + step; logits have a peak at it."""

  def __init__(self, step=1, seconds=(1.0, 0.1), log=None):
    self.step = step
    self.seconds = seconds
    self.log = log

  def encode(self, question):
    return [len(question) % VOCABULARY]

  def tokenize(self, text):
    return [ord(x) % VOCABULARY for x in text]

  def greedy(self, prompt, count):
    steps = self.step * np.arange(1, count + 1)
    return ((prompt[-1] + steps) % VOCABULARY).tolist()

  def logits(self, tokens):
    said = (np.asarray(tokens) + self.step) % VOCABULARY
    return 10 * np.eye(VOCABULARY, dtype=np.float32)[said]

  def times(self, prompt, count):
    if self.log is not None:
      self.log.append((self.step, len(prompt), count))
    return self.seconds


class TextTest(absltest.TestCase):
  def test_equal_models_agree_and_others_do_not(self):
    models = {"llama.cpp": Model(), "same": Model(), "other": Model(step=2)}
    theirs, same, other = compare_llama_cpp.compare_texts(models, 30)
    self.assertEqual(theirs["equal_tokens"], [compare_llama_cpp.TOKENS] * 10)
    for name in ("equal_tokens", "agreement", "logits_errors", "perplexity"):
      self.assertEqual(theirs[name], same[name])
    self.assertEqual(same["agreement"], 1.0)
    self.assertEqual(same["logits_errors"], {"llama.cpp": 0.0})
    self.assertEqual(other["equal_tokens"], [0] * 10)
    self.assertEqual(other["agreement"], 0.0)
    # Each row has one 10 in another place.
    self.assertAlmostEqual(
      other["logits_errors"]["llama.cpp"], 2**0.5, places=6
    )
    lines = compare_llama_cpp.text_lines([theirs, other])
    self.assertEqual(
      lines[1].split()[:5], ["llama.cpp", "10", "of", "10", "100.0%"]
    )
    self.assertEqual(lines[2].split()[:5], ["other", "0", "of", "10", "0.0%"])

  def test_perplexity_is_the_inverse_of_the_mean_probability(self):
    tokens = [0, 1, 2]
    # The geometric mean of 1/4 and 1 is 1/2; the last row predicts nothing.
    logits = np.log([[0.5, 0.25, 0.25], [1e-30, 1e-30, 1.0], [1, 1, 1]])
    actual = compare_llama_cpp.perplexity(logits, tokens)
    self.assertAlmostEqual(actual, 2.0, places=6)
    # Logits that differ by a number have equal probabilities.
    actual = compare_llama_cpp.perplexity(logits + 700, tokens)
    self.assertAlmostEqual(actual, 2.0, places=6)


class SpeedTest(absltest.TestCase):
  def test_models_take_turns(self):
    log = []
    models = {"llama.cpp": Model(1, log=log), "ours": Model(2, log=log)}
    compare_llama_cpp.compare_speed(models, [(7, 5)], 3)
    untimed, timed = log[:2], log[2:]
    self.assertEqual([x for x, *_ in untimed], [1, 2])
    self.assertEqual([x for x, *_ in timed], [1, 2, 2, 1, 1, 2])
    self.assertEqual({x[1:] for x in timed}, {(7, 5)})

  def test_ratios_are_those_of_the_same_prompt(self):
    models = {
      "llama.cpp": Model(seconds=(0.3, 0.02)),
      "ours": Model(seconds=(0.1, 0.01)),
    }
    rows = compare_llama_cpp.compare_speed(models, [(7, 5), (9, 5)], 3)
    rows[2]["prompt_seconds"] = [0.5] * 3
    lines = [x.split() for x in compare_llama_cpp.speed_lines(rows)]
    self.assertEqual(
      lines[2], ["ours", "7", "100.0", "3.00", "5", "100.0", "2.00"]
    )
    self.assertEqual(
      lines[4], ["ours", "9", "100.0", "5.00", "5", "100.0", "2.00"]
    )


class ProcessTest(absltest.TestCase):
  def test_an_error_of_the_process_is_raised_here(self):
    args = argparse.Namespace(file="no.gguf", slots=64)
    process = compare_llama_cpp.Process(args, "stored, f32 rows", 1)
    with self.assertRaises(Exception) as error:
      process.logits([1])
    self.assertNotIsInstance(error.exception, EOFError)
    process.close()
