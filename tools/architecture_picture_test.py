# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The picture shows every package and its imports."""

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
    self.assertEqual(
      packages - {"kernels", "testing"}, {*architecture_picture.PACKAGES}
    )

  def test_imports_are_those_of_the_package(self):
    self.assertEqual(architecture_picture.imports("arrays"), ["core", "jaxext"])
    self.assertNotIn("dot", architecture_picture.imports("quantization"))


if __name__ == "__main__":
  absltest.main()
