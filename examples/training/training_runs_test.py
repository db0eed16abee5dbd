# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs repeat, are paired and learn, and each is stored once."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from unittest import mock

import digits_mlp
import jax
import numpy as np
import pytest
import training_data
import training_runs
import training_tasks
import training_variants
from absl.testing import absltest, parameterized

from jaxplugin.testing import folders

pytestmark = pytest.mark.full

PRESET = training_tasks.PRESETS["quick"]
CLASSES, ROWS = 10, 64


def made_up_batch(random):
  """Images around a mean for each class, which a model has to find."""
  means = np.random.default_rng(0).normal(size=(CLASSES, 64))
  labels = random.integers(CLASSES, size=ROWS).astype(np.int32)
  noise = random.normal(size=(ROWS, 64))
  return training_data.Batch((means[labels] + noise).astype("f"), labels)


def small_task(steps):
  """The MLP on made-up data: a task of milliseconds without scikit-learn."""

  def batches(seed):
    random = np.random.default_rng(seed)
    return (made_up_batch(random) for _ in range(steps))

  return training_tasks.Task(
    name="small",
    title="small",
    init=digits_mlp.init,
    logits=digits_mlp.logits,
    batches=batches,
    validation=made_up_batch(np.random.default_rng(99)),
    learning_rate=1e-3,
    data="00000000",
  )


def without_time(run):
  return dataclasses.replace(run, seconds=0)


class TrainTest(parameterized.TestCase):
  def test_seed_decides_a_run(self):
    first, again, other = (
      without_time(training_runs.train(small_task(9), "nvfp4", seed, 9)[0])
      for seed in (0, 0, 1)
    )
    self.assertEqual(first, again)
    self.assertNotEqual(first.training, other.training)

  def test_runs_of_a_seed_have_the_same_parameters_and_batches(self):
    seen = {}
    for variant in ("f32", "mxfp8"):
      task = small_task(3)
      seen[variant] = found = {"params": [], "batches": []}

      def logits(params, inputs, dot, key, task=task, found=found):
        def keep(params, inputs):
          found["params"].append(jax.tree.map(np.array, params))
          found["batches"].append(np.array(inputs))

        jax.debug.callback(keep, params, inputs, ordered=True)
        return task.logits(params, inputs, dot, key)

      training_runs.train(
        dataclasses.replace(task, logits=logits), variant, 5, 3
      )
      jax.effects_barrier()
    f32, mxfp8 = seen["f32"], seen["mxfp8"]
    np.testing.assert_array_equal(f32["batches"][:3], mxfp8["batches"][:3])
    first = (f32["params"][0], mxfp8["params"][0])
    jax.tree.map(np.testing.assert_array_equal, *first)
    # And it is not one variant that ran twice.
    weights = [found["params"][1][0]["weight"] for found in seen.values()]
    self.assertFalse(np.array_equal(*weights))

  @parameterized.parameters("linen", "nnx", "plain")
  def test_one_line_trains_as_products_for_each_layer_do(self, name):
    # mxfp8 has no keys, in which alone they differ: all bits are equal.
    steps = 2
    if name == "plain":
      task = small_task(steps)
    else:
      task = training_tasks.TASKS[name](PRESET)
    found = {
      is_one_line: training_runs.train(
        task, "mxfp8", 0, steps, is_one_line=is_one_line
      )
      for is_one_line in (False, True)
    }
    self.assertEqual(*(without_time(run) for run, _ in found.values()))
    jax.tree.map(
      np.testing.assert_array_equal, *(params for _, params in found.values())
    )
    # f32 has other ones: it is not that nothing was taken.
    _, f32 = training_runs.train(task, "f32", 0, steps)
    weights = (jax.tree.leaves(params) for params in (f32, found[True][1]))
    self.assertTrue(any(np.any(a != b) for a, b in zip(*weights, strict=True)))

  @parameterized.parameters(*training_variants.VARIANTS)
  def test_every_variant_learns_as_f32_does(self, variant):
    steps = 30
    fallen = {}
    for name in {"f32", variant}:
      run, _ = training_runs.train(small_task(steps), name, 0, steps)
      fallen[name] = run.training[0] - run.training[-1]
      self.assertLen(run.training, min(steps, training_runs.POINTS))
      self.assertLen(run.validation, training_runs.VALIDATIONS)
    self.assertGreater(fallen["f32"], 1)
    # FP4's own error leaves that much of what is learned in 30 steps; a
    # gradient of the wrong sign or of another layer leaves nothing.
    self.assertGreater(fallen[variant], 0.8 * fallen["f32"])

  def test_training_losses_are_means_of_all_steps(self):
    seen = []
    steps = 2 * training_runs.POINTS
    run, _ = training_runs.train(
      small_task(steps), "f32", 0, steps, lambda step, loss: seen.append(loss)
    )
    self.assertLen(seen, steps)
    expected = np.reshape(seen, (-1, 2)).mean(axis=1)
    # They are kept with five digits.
    np.testing.assert_allclose(run.training, expected, atol=6e-6)


class ResultsTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.path = folders.new(self) / "new" / "small.json"

  def results(self, **changed):
    preset = dataclasses.replace(PRESET, **changed)
    return training_runs.Results(self.path, small_task(3), preset)

  def run_of(self, variant, seed):
    return training_runs.Run(
      variant=variant,
      seed=seed,
      training=[2.0, 1.0],
      validation=[1.5],
      accuracy=0.5,
      seconds=0.1,
    )

  def test_what_is_written_is_read(self):
    results = self.results()
    for variant, seed in (("mxfp8", 0), ("f32", 1), ("f32", 0)):
      results.add(self.run_of(variant, seed))
    again = self.results()
    # In the order of variants, whatever that of the runs was.
    expected = [
      self.run_of("f32", 0),
      self.run_of("f32", 1),
      self.run_of("mxfp8", 0),
    ]
    self.assertEqual(again.runs, expected)
    self.assertTrue(again.has("f32", 1))
    self.assertFalse(again.has("mxfp8", 1))
    self.assertLen(json.loads(self.path.read_text())["runs"], 3)
    # A run is a line, so that a change shows what it changes.
    lines = self.path.read_text().splitlines()
    self.assertLen([line for line in lines if '"variant"' in line], 3)

  def test_file_of_other_settings_is_refused_with_what_differs(self):
    self.results().add(self.run_of("f32", 0))
    with self.assertRaises(training_runs.SettingsError) as raised:
      self.results(steps=77)
    message = str(raised.exception)
    self.assertIn("small.json", message)
    self.assertIn(f"'steps': ({PRESET.steps}, 77)", message)
    self.assertNotIn("width", message)
    self.assertIn("--results", message)

  def test_runs_by_one_line_and_by_layer_are_not_mixed(self):
    def one_line():
      return training_runs.Results(
        self.path, small_task(3), PRESET, is_one_line=True
      )

    self.results().add(self.run_of("f32", 0))
    with self.assertRaisesRegex(training_runs.SettingsError, "'by': .None, 'q"):
      one_line()
    self.path.unlink()
    one_line().add(self.run_of("f32", 0))
    with self.assertRaisesRegex(training_runs.SettingsError, "'by': .'quan"):
      self.results()

  def test_same_run_twice_is_refused(self):
    results = self.results()
    results.add(self.run_of("f32", 0))
    with self.assertRaisesRegex(ValueError, "f32, seed 0 "):
      results.add(self.run_of("f32", 0))

  def test_interrupted_write_leaves_the_file_as_it_was(self):
    results = self.results()
    results.add(self.run_of("f32", 0))
    before = self.path.read_text()
    with (
      mock.patch.object(pathlib.Path, "replace", side_effect=OSError("full")),
      self.assertRaises(OSError),
    ):
      results.add(self.run_of("f32", 1))
    self.assertEqual(self.path.read_text(), before)
