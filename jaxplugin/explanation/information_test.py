# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`info`: versions, devices, and the formats that each backend supports."""

import importlib.metadata
import platform

from absl.testing import absltest

import jaxplugin as jp


class InfoTest(absltest.TestCase):
  def test_versions_and_target_are_printed(self):
    text = jp.info()
    self.assertIn(f"python: {platform.python_version()}", text)
    for package in ("jax", "jaxlib", "numpy"):
      self.assertIn(f"{package}: {importlib.metadata.version(package)}", text)
    self.assertIn(f"target: {jp.detect_target()}", text)

  def test_table_says_which_formats_a_backend_supports(self):
    with jp.use_target(jp.named_target("h100")):
      text = jp.info()
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    self.assertEqual(rows["backend"][:2], ["mxfp8", "mxfp8_e5m2"])
    self.assertEqual(rows["xla"], ["yes"] * 6)
    self.assertEqual(rows["cpu"], ["no"] * 6)
    self.assertIn("  not cpu: needs a CPU, the target's platform is cuda", text)

  def test_reason_names_its_formats_unless_it_is_about_all(self):
    with jp.use_target(jp.named_target("b200", cudnn="9.13")):
      text = jp.info()
    self.assertIn("\n  not cudnn mxfp8_e5m2: does not multiply E5M2", text)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    self.assertEqual(rows["cudnn"], ["yes", "no", "no", "yes", "no", "no"])


if __name__ == "__main__":
  absltest.main()
