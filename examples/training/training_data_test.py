# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches are the data, decided by the seed, and apart from the validation."""

from __future__ import annotations

import importlib.util
import pydoc_data.topics
import re
import unittest

import numpy as np
import training_data
from absl.testing import absltest

STEPS, ROWS, CONTEXT = 3, 4, 20
NEEDS_DIGITS = unittest.skipUnless(
  importlib.util.find_spec("sklearn"), "scikit-learn is not installed"
)


def decode(codes):
  return "".join("\n" if code == 0 else chr(31 + code) for code in codes)


def text_batches(seed):
  return list(
    training_data.text_batches(seed, steps=STEPS, rows=ROWS, context=CONTEXT)
  )


class TextTest(absltest.TestCase):
  def test_codes_are_the_characters_and_what_is_not_ascii_a_question_mark(self):
    text = "a ~\n\t\N{EN DASH}é!"
    codes = training_data.encode(text)
    self.assertEqual(decode(codes), "a ~\n???!")
    self.assertTrue((codes < training_data.NUM_CHARACTERS).all())

  def test_text_is_the_documentation_of_python(self):
    whole = decode(np.concatenate(training_data.text()))
    topic = pydoc_data.topics.topics["while"]
    self.assertIn("repeated execution", topic)
    self.assertIn(re.sub(r"[^\n -~]", "?", topic), whole)
    self.assertLen(training_data.text().validation, -(-len(whole) // 10))

  def test_targets_are_the_characters_after_the_inputs_in_the_text(self):
    text = decode(training_data.text().training)
    for inputs, targets in text_batches(0):
      self.assertEqual(inputs.shape, (ROWS, CONTEXT))
      np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
      for row, target in zip(inputs, targets, strict=True):
        self.assertIn(decode([*row, target[-1]]), text)

  def test_validation_is_of_text_that_no_batch_has(self):
    validation = training_data.text_validation(rows=5, context=CONTEXT)
    held_out = decode(training_data.text().validation)
    for row, target in zip(*validation, strict=True):
      self.assertIn(decode([*row, target[-1]]), held_out)
    # From the first character on to the last one.
    self.assertTrue(held_out.startswith(decode(validation.inputs[0])))
    self.assertTrue(held_out.endswith(decode(validation.targets[-1])))

  def test_seed_decides_the_batches(self):
    first, again, other = text_batches(1), text_batches(1), text_batches(2)
    np.testing.assert_array_equal(first, again)
    self.assertFalse(np.array_equal(first, other))
    # Batches of one seed differ.
    self.assertFalse(np.array_equal(first[0], first[1]))

  def test_fingerprint_tells_data_apart(self):
    text = training_data.text()
    print_ = training_data.fingerprint(text)
    self.assertEqual(print_, training_data.fingerprint(text))
    changed = text.training.copy()
    changed[7] += 1
    other = text._replace(training=changed)
    self.assertNotEqual(print_, training_data.fingerprint(other))


@NEEDS_DIGITS
class DigitsTest(absltest.TestCase):
  def test_every_digit_is_in_one_part(self):
    import sklearn.datasets

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    training, validation = training_data.digits()
    self.assertLen(training.targets, 1438)
    self.assertLen(validation.targets, 359)
    found = np.concatenate([training.targets, validation.targets])
    np.testing.assert_array_equal(np.sort(found), np.sort(labels))
    # Undone, the pixels are those that scikit-learn has.
    pixels = np.concatenate([training.inputs, validation.inputs])
    order = np.random.default_rng(0).permutation(len(labels))
    mean = images[order[:1438]].mean(axis=0)
    deviation = images[order[:1438]].std()
    # Rounded to f32: 2^-24 of up to 3 deviations of 6.
    np.testing.assert_allclose(
      pixels * deviation + mean, images[order], atol=2e-6 * deviation
    )

  def test_epoch_has_each_digit_at_most_once_and_epochs_differ(self):
    rows = 100  # 14 batches an epoch, of 1438
    inputs = [
      b.inputs for b in training_data.digit_batches(3, steps=28, rows=rows)
    ]
    first, second = np.concatenate(inputs[:14]), np.concatenate(inputs[14:])
    distinct = np.unique(training_data.digits().training.inputs, axis=0)
    self.assertLen(distinct, 1438)
    self.assertLen(np.unique(first, axis=0), 1400)
    self.assertLen(np.unique(second, axis=0), 1400)
    self.assertFalse(np.array_equal(first, second))

  def test_images_keep_their_labels(self):
    images, labels = training_data.digits().training
    for inputs, targets in training_data.digit_batches(0, steps=2, rows=5):
      for image, target in zip(inputs, targets, strict=True):
        (place,) = np.flatnonzero((images == image).all(axis=1))
        self.assertEqual(target, labels[place])
