# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Configurations are read as the tools write them."""

import json
import math

import numpy as np

import jaxplugin as jp
from jaxplugin.testing import checkpoint_files as files

WEIGHTS = {"up.weight": np.ones((32, 64), np.float32)}
# transformers writes this for models with Mamba 2.
LIMITS = {"time_step_limit": [0.0, math.inf], "x": math.nan}


class ConfigurationTest(files.CheckpointTestCase):
  def test_infinity_is_read_and_copied(self):
    source = self.folder(WEIGHTS, config=LIMITS)
    self.assertIn("Infinity", (source / "config.json").read_text())
    self.assertEqual([*jp.checkpoints.load(source)], ["up.weight"])
    done = jp.checkpoints.quantize(source, self.empty() / "x", "nvfp4")
    config = json.loads((done.path / "config.json").read_text())
    self.assertEqual(config["time_step_limit"], [0.0, math.inf])
    self.assertIn("NVFP4", jp.checkpoints.load(done.path).config)

  def test_error_names_the_file(self):
    source = self.folder(WEIGHTS)
    for text in ('{"a": 1, "a": 2}', "[]", "", "{", '{"a": 1e999}', "\ufeff{}"):
      with self.subTest(text):
        (source / "config.json").write_text(text, encoding="utf-8")
        with self.assertRaisesRegex(
          jp.checkpoints.CheckpointError, f"^{source}/config.json: it must be"
        ):
          jp.checkpoints.load(source)
