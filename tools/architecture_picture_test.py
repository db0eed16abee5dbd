# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The picture of the rooms shows the rooms that there are."""

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

  def test_every_room_is_in_it(self):
    rooms = {
      path.parent.name for path in (ROOT / "jaxplugin").glob("*/__init__.py")
    }
    rooms |= {
      f"kernels/{path.parent.name}"
      for path in (ROOT / "kernels").glob("*/__init__.py")
    }
    self.assertEqual(
      rooms - {"kernels", "testing"}, {*architecture_picture.ROOMS}
    )


if __name__ == "__main__":
  absltest.main()
