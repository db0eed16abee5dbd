# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The command trains what is missing, and says what came out."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
from unittest import mock

import pytest
import train
import training_runs
import training_statistics
import training_tasks
from absl.testing import absltest, parameterized

from jaxplugin.testing import folders

pytestmark = pytest.mark.full


def called(*arguments):
  """Returns the output of the command, without its progress bar."""
  output = io.StringIO()
  with (
    contextlib.redirect_stdout(output),
    contextlib.redirect_stderr(io.StringIO()),
  ):
    train.main(arguments)
  return output.getvalue()


class CommandTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = folders.new(self)
    self.path = self.folder / "characters_linen_quick.json"

  def called(self, *arguments):
    return called("--quick", "--results", str(self.folder), *arguments)

  def test_command_trains_goes_on_and_reports(self):
    output = self.called("--variants", "f32", "mxfp8", "--seeds", "1")
    self.assertIn("| mxfp8 | 1 |", output)
    self.assertIn("not significant", output)  # one seed shows nothing
    kept = json.loads(self.path.read_text())
    self.assertLen(kept["runs"], 2)
    self.assertEqual(kept["settings"]["steps"], 6)

    # Again, with one seed more: only that is trained.
    trained = []
    train_one = training_runs.train

    def spied(task, variant, seed, *args, **options):
      trained.append((variant, seed))
      return train_one(task, variant, seed, *args, **options)

    with mock.patch.object(training_runs, "train", spied):
      output = self.called("--variants", "f32", "--seeds", "2")
    self.assertEqual(trained, [("f32", 1)])
    self.assertIn("| f32 | 2 |", output)

    with mock.patch.object(training_runs, "train", side_effect=AssertionError):
      report = self.called("--report", "--against", "mxfp8")
    self.assertIn("minus mxfp8", report)
    picture = self.path.with_suffix(".png").read_bytes()
    self.assertEqual(picture[1:4], b"PNG")

  def test_nothing_to_compare_with_is_an_error_with_the_remedy(self):
    with self.assertRaisesRegex(SystemExit, "no run of f32 .* --variants f32"):
      self.called("--report")

  def test_unknown_variant_is_an_error_that_lists_the_known(self):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), self.assertRaises(SystemExit):
      train.main(["--variants", "int3"])
    self.assertIn("int3", errors.getvalue())
    self.assertIn("mxfp8", errors.getvalue())


COMMITTED = sorted(train.FOLDER.glob("*.json"))


class CommittedResultsTest(parameterized.TestCase):
  def test_results_of_the_guide_are_there(self):
    self.assertEqual(
      [path.stem for path in COMMITTED],
      ["characters_linen", "characters_nnx_one_line", "digits"],
    )

  @parameterized.parameters(*COMMITTED)
  def test_results_are_whole_and_of_the_default_settings(self, path):
    kept = json.loads(path.read_text("utf-8"))
    settings = kept["settings"]
    preset = training_tasks.PRESETS["default"]
    for name in ("steps", "rows", "context", "width", "blocks"):
      self.assertEqual(settings[name], getattr(preset, name), name)
    runs = [training_runs.Run(**run) for run in kept["runs"]]
    seeds = {
      variant: [r.seed for r in runs if r.variant == variant]
      for variant in training_statistics.variants(runs)
    }
    # Every variant has every seed: none is left out because of what it says.
    self.assertGreaterEqual(len(seeds["f32"]), preset.seeds)
    for variant, found in seeds.items():
      self.assertEqual(found, list(range(len(seeds["f32"]))), variant)
    for run in runs:
      self.assertLen(run.training, training_runs.POINTS)
      self.assertLen(run.validation, training_runs.VALIDATIONS)

  @parameterized.parameters(*COMMITTED)
  def test_guide_quotes_the_table_that_the_results_give(self, path):
    kept = json.loads(path.read_text("utf-8"))
    runs = [training_runs.Run(**run) for run in kept["runs"]]
    page = pathlib.Path(__file__).resolve().parents[2]
    page = page / "docs" / "benchmarks" / "training_results.md"
    guide = page.read_text("utf-8")
    self.assertIn(training_statistics.table(runs, "f32"), guide)
