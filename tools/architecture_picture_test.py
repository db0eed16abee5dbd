# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The picture shows every package and every import."""

import pathlib
import sys

import pytest
from absl.testing import absltest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import architecture_picture

pytestmark = pytest.mark.smoke

ROOT = architecture_picture.ROOT


class ArchitecturePictureTest(absltest.TestCase):
  def test_the_committed_picture_is_what_the_script_draws(self):
    drawn = architecture_picture.picture()
    self.assertEqual(architecture_picture.PICTURE.read_text(), drawn)

  def test_every_package_is_in_it(self):
    packages = {
      path.parent.name for path in (ROOT / "jaxplugin").glob("*/__init__.py")
    }
    packages |= {
      f"kernels/{path.parent.name}"
      for path in (ROOT / "kernels").glob("*/__init__.py")
    }
    drawn = [p for box in architecture_picture.BOXES for p in box]
    self.assertCountEqual(drawn, packages - {"kernels", "testing"})

  def test_imports_are_those_of_the_package(self):
    self.assertEqual(architecture_picture.imports("arrays"), ["core", "jaxext"])
    self.assertNotIn("dot", architecture_picture.imports("quantization"))

  def test_arrows_imply_every_import_and_point_down(self):
    boxes = architecture_picture.BOXES
    for i, box in enumerate(boxes):
      reached = set()
      pending = architecture_picture.arrows(box)
      while pending:
        other = pending.pop()
        self.assertGreater(boxes.index(other), i)
        reached.add(other)
        pending += architecture_picture.arrows(other)
      for package in box:
        for name in architecture_picture.imports(package):
          self.assertIn(name, {*box}.union(*reached))
