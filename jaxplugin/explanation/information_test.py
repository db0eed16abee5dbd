# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`info`: versions, devices, and the formats that each backend supports."""

import importlib.metadata
import platform

from absl.testing import absltest

import jaxplugin as jp
from jaxplugin.core import formats


def backend_columns(text):
  """Returns the table of `jp.info`: by backend and format, "yes" or "no"."""
  lines = [line.split() for line in text.splitlines()]
  (header,) = (line for line in lines if line[:1] == ["format"])
  names = {format.name for format in formats.NAMED}
  rows = [line for line in lines if line[:1] and line[0] in names]
  return {
    backend: {row[0]: row[column] for row in rows}
    for column, backend in enumerate(header)
  }


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
    columns = backend_columns(text)
    self.assertEqual({*columns["xla"].values()}, {"yes"})
    self.assertEqual({*columns["cpu"].values()}, {"no"})
    self.assertEqual({*columns["xla"]}, {f.name for f in formats.NAMED})
    self.assertIn("  not cpu: needs a CPU, the target's platform is cuda", text)

  def test_reason_names_its_formats_unless_it_is_about_all(self):
    with jp.use_target(jp.named_target("b200", cudnn="9.13")):
      text = jp.info()
    self.assertIn("\n  not cudnn mxfp8_e5m2: does not multiply E5M2", text)
    cudnn = backend_columns(text)["cudnn"]
    supported = {name for name, answer in cudnn.items() if answer == "yes"}
    self.assertEqual(supported, {"mxfp8", "nvfp4"})
    self.assertRegex(
      text, r"\n  not cudnn mxfp4, .*int8_row.*: supports mxfp8 pairs and nvfp4"
    )
