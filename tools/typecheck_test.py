# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""mypy checks the files of a wheel, and errors name files of the checkout.

`make lint` runs mypy over the package itself.
"""

import pathlib
import tempfile

import typecheck
from absl.testing import absltest


class TypecheckTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

  def write(self, *names):
    for name in names:
      path = self.root / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(f"# {name}\n")

  def test_stage_has_the_kernels_inside_and_no_tests(self):
    self.write(
      "jaxplugin/dot.py",
      "jaxplugin/dot_test.py",
      "jaxplugin/testing/contract.py",
      "jaxplugin/lab/bench/plot.py",
      "jaxplugin/kernels/__init__.py",
      "jaxplugin/__pycache__/dot.py",
      "kernels/tiles.py",
      "kernels/tiles_test.json",
      "kernels/cpu/library.py",
      "kernels/cpu/tests/testing.py",
    )
    stage = self.root / "stage"
    typecheck.link(self.root / "jaxplugin", stage / "jaxplugin")
    typecheck.link(self.root / "kernels", stage / "jaxplugin" / "kernels")
    found = {
      path.relative_to(stage).as_posix(): path.read_text()
      for path in stage.rglob("*.*")
    }
    self.assertEqual(
      found,
      {
        "jaxplugin/dot.py": "# jaxplugin/dot.py\n",
        "jaxplugin/lab/bench/plot.py": "# jaxplugin/lab/bench/plot.py\n",
        "jaxplugin/kernels/__init__.py": "# jaxplugin/kernels/__init__.py\n",
        "jaxplugin/kernels/tiles.py": "# kernels/tiles.py\n",
        "jaxplugin/kernels/cpu/library.py": "# kernels/cpu/library.py\n",
      },
    )

  def test_findings_name_files_of_the_checkout(self):
    self.write("jaxplugin/dot.py", "jaxplugin/kernels/__init__.py")
    for line, expected in (
      (
        "jaxplugin/kernels/tiles.py:1: error: a",
        "kernels/tiles.py:1: error: a",
      ),
      ("jaxplugin/kernels/__init__.py:1: error: a", None),
      ("jaxplugin/dot.py:2: error: no jaxplugin/kernels/a.py", None),
    ):
      self.assertEqual(typecheck.in_checkout(line, self.root), expected or line)
