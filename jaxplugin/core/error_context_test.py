# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors name the function that the user called."""

import dataclasses
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin.core import error_context


@dataclasses.dataclass
class _Layer:
  kernel: Any


class SpeakingTest(absltest.TestCase):
  def test_a_function_speaks_for_itself_unless_another_calls_it(self):
    self.assertEqual(error_context.who("dot"), "dot")
    with error_context.in_function("linear"):
      self.assertEqual(error_context.who("dot"), "linear")
    self.assertEqual(error_context.who("dot"), "dot")

  def test_the_innermost_caller_counts(self):
    with error_context.in_function("accelerate"):
      with error_context.in_function("scaled_matmul"):
        self.assertEqual(error_context.who("dot"), "scaled_matmul")
      self.assertEqual(error_context.who("dot"), "accelerate")

  def test_it_ends_with_an_exception(self):
    with self.assertRaises(ValueError), error_context.in_function("linear"):
      raise ValueError
    self.assertEqual(error_context.who("dot"), "dot")

  def test_other_threads_speak_for_themselves(self):
    heard = []
    with error_context.in_function("linear"):
      thread = threading.Thread(
        target=lambda: heard.append(error_context.who("a"))
      )
      thread.start()
      thread.join()
    self.assertEqual(heard, ["a"])


class ShownTest(absltest.TestCase):
  def test_arrays_are_dtype_and_shape_in_containers_too(self):
    x = np.full((4, 64), 7.0, np.float32)
    rows = (
      (x, "float32[4, 64]"),
      (jnp.asarray(x, jnp.bfloat16), "bfloat16[4, 64]"),
      ({"a": x, "b": [x]}, "{'a': float32[4, 64], 'b': [float32[4, 64]]}"),
      (np.float32(7), "float32(7.0)"),
      ([np.int64(3), np.True_], "[int64(3), bool(True)]"),
      (jp.quantize(x, "mxfp8"), "ScaledArray(mxfp8: values="),
      (jax.ShapeDtypeStruct((2,), np.int8), "ShapeDtypeStruct(shape=(2,)"),
      (jp.MXFP8, "mxfp8"),
      (_Layer(x), f"an object of type {__name__}._Layer"),
      (_Layer("small"), "_Layer(kernel='small')"),
      ("k", "'k'"),
      (None, "None"),
      (len, "<built-in function len>"),
    )
    for value, expected in rows:
      with self.subTest(expected):
        self.assertStartsWith(error_context.shown(value), expected)

  def test_long_values_are_cut(self):
    for value in (list(range(10**4)), "x" * 10**4, {i: i for i in range(999)}):
      self.assertLess(len(error_context.shown(value)), 400)


class MissingAttributeTest(absltest.TestCase):
  def test_names_of_other_modules_are_found_and_near_ones_proposed(self):
    rows = (
      (jp, "MXFP8_RECIPE", "it is jaxplugin.training.MXFP8_RECIPE"),
      (jp, "scaled_matmul", "it is jaxplugin.nn.scaled_matmul"),
      (jp, "mxfp8", "it is jaxplugin.MXFP8"),
      (jp, "Recipe", "it is jaxplugin.training.Recipe"),
      (jp.training, "NVFP4", "it is jaxplugin.NVFP4"),
      (jp.nn, "quantize_dots", "it is jaxplugin.quantize_dots"),
      (jp.checkpoints, "linear", "it is jaxplugin.linear"),
      (jp.backends, "explain", "it is jaxplugin.explain"),
      (jp.checkpoint_policies, "dots_savable", "dots_saveable"),
      (jp, "quantise", "did you mean jaxplugin.quantize or "),
      (jp, "zzzz", "'zzzz'"),
    )
    for module, name, expected in rows:
      with self.subTest(name), self.assertRaisesRegex(AttributeError, expected):
        getattr(module, name)

  def test_private_names_are_not_looked_for(self):
    self.assertFalse(hasattr(jp, "__wrapped__"))
    with self.assertRaisesRegex(AttributeError, "'_hidden'$"):
      _ = jp._hidden
