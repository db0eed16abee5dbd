# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors name the function that the user called."""

import threading

from absl.testing import absltest

from jaxplugin.core import speaking


class SpeakingTest(absltest.TestCase):
  def test_a_function_speaks_for_itself_unless_another_calls_it(self):
    self.assertEqual(speaking.who("dot"), "dot")
    with speaking.speaking_for("linear"):
      self.assertEqual(speaking.who("dot"), "linear")
    self.assertEqual(speaking.who("dot"), "dot")

  def test_the_innermost_caller_counts(self):
    with speaking.speaking_for("accelerate"):
      with speaking.speaking_for("scaled_matmul"):
        self.assertEqual(speaking.who("dot"), "scaled_matmul")
      self.assertEqual(speaking.who("dot"), "accelerate")

  def test_it_ends_with_an_exception(self):
    with self.assertRaises(ValueError), speaking.speaking_for("linear"):
      raise ValueError
    self.assertEqual(speaking.who("dot"), "dot")

  def test_other_threads_speak_for_themselves(self):
    heard = []
    with speaking.speaking_for("linear"):
      thread = threading.Thread(target=lambda: heard.append(speaking.who("a")))
      thread.start()
      thread.join()
    self.assertEqual(heard, ["a"])


if __name__ == "__main__":
  absltest.main()
