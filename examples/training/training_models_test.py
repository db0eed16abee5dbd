# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""linen's and nnx's transformer are one function; the MLP is its formula."""

from __future__ import annotations

import dataclasses

import digits_mlp
import jax
import numpy as np
import pytest
import training_tasks
import training_variants
from absl.testing import absltest, parameterized

PRESET = dataclasses.replace(training_tasks.PRESETS["quick"], blocks=2)
# f32, in the same operations, which XLA may fuse otherwise: a few units in the
# last place of logits of about 1.
SAME = 1e-5


class Recorder:
  """f32 products; keeps their operands' shapes and their keys."""

  def __init__(self):
    self.shapes = []
    self.keys = []

  def __call__(self, lhs, rhs, *args, key=None, **kwargs):
    self.shapes.append((lhs.shape, rhs.shape))
    self.keys.append(key)
    return training_variants.f32(lhs, rhs, *args, **kwargs)


def random_params(task, seed=0):
  """Returns random numbers in place of `task.init`, which compiles slowly."""
  rng = np.random.default_rng(seed)
  draw = lambda x: rng.normal(0.1, 0.3, x.shape).astype(x.dtype)
  return jax.tree.map(draw, jax.eval_shape(task.init, jax.random.key(0)))


class TransformerTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.tasks = {
      name: training_tasks.TASKS[name](PRESET) for name in ("linen", "nnx")
    }
    self.inputs = next(self.tasks["linen"].batches(0)).inputs

  def test_linen_and_nnx_are_the_same_function_of_the_same_parameters(self):
    linen, nnx = self.tasks["linen"], self.tasks["nnx"]

    @jax.jit
    def logits(params):
      return [
        task.logits(params, self.inputs, training_variants.f32, None)
        for task in (linen, nnx)
      ]

    # Parameters of either one, which differ: names and shapes are the same.
    for seed, task in enumerate((linen, nnx)):
      results = logits(random_params(task, seed))
      self.assertGreater(np.std(results[0]), 0.1)
      np.testing.assert_allclose(*results, atol=SAME, rtol=0)

  @parameterized.parameters("linen", "nnx")
  @pytest.mark.sample(1)
  def test_every_linear_layer_of_blocks_gets_a_key_of_its_own(self, name):
    task, record = self.tasks[name], Recorder()

    @jax.jit
    def keys_of_layers(key):
      task.logits(task.init(key), self.inputs, record, key)
      return [jax.random.key_data(key) for key in record.keys]

    keys = keys_of_layers(jax.random.key(7))
    width = PRESET.width
    x = (PRESET.rows, PRESET.context)
    layers = [
      ((*x, n_in), (n_in, n_out))
      for n_in, n_out in (
        (width, 3 * width),
        (width, width),
        (width, 4 * width),
        (4 * width, width),
      )
    ]
    # Neither attention's products nor the last layer are among them.
    self.assertEqual(record.shapes, layers * PRESET.blocks)
    self.assertLen({tuple(map(int, k)) for k in keys}, len(record.shapes))

  @parameterized.parameters("linen", "nnx")
  def test_no_key_is_handed_down_in_a_forward_pass_without_one(self, name):
    task, record = self.tasks[name], Recorder()
    logits = lambda p: task.logits(p, self.inputs, record, None)
    jax.eval_shape(logits, random_params(task))
    self.assertEqual(set(record.keys), {None})

  @parameterized.parameters("linen", "nnx")
  def test_guess_depends_on_what_came_before_alone(self, name):
    task, place = self.tasks[name], 9
    params = random_params(task)
    logits = jax.jit(
      lambda x: task.logits(params, x, training_variants.f32, None)
    )
    changed = self.inputs.copy()
    changed[:, place] = (changed[:, place] + 1) % 96
    before, after = (np.asarray(logits(x)) for x in (self.inputs, changed))
    np.testing.assert_array_equal(before[:, :place], after[:, :place])
    differs = (before != after).any(axis=-1)
    self.assertTrue(differs[:, place:].all())


class MlpTest(absltest.TestCase):
  def test_logits_are_their_formula_in_f64(self):
    params = jax.jit(digits_mlp.init)(jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    actual = digits_mlp.logits(params, x, training_variants.f32, None)
    expected = x.astype(np.float64)
    for index, layer in enumerate(params):
      weight, bias = (np.asarray(layer[n], float) for n in ("weight", "bias"))
      expected = expected @ weight + bias
      if index < len(params) - 1:
        expected = np.maximum(expected, 0)
    # f32 sums of 256 products, three times over.
    np.testing.assert_allclose(actual, expected, atol=2e-5)

  def test_hidden_layers_get_keys_and_the_last_one_stays_in_f32(self):
    record = Recorder()

    @jax.jit
    def keys_of_layers(key):
      params = digits_mlp.init(key)
      digits_mlp.logits(params, np.ones((3, 64), "f"), record, key)
      return [jax.random.key_data(key) for key in record.keys]

    first, second = keys_of_layers(jax.random.key(1))
    self.assertEqual(
      record.shapes, [((3, 64), (64, 256)), ((3, 256), (256, 256))]
    )
    self.assertFalse(np.array_equal(first, second))
