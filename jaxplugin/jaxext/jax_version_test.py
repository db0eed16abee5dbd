# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Importing with an old JAX raises an error that names both versions."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

from absl.testing import absltest

import jaxplugin
from jaxplugin.jaxext import jax_version

ROOT = pathlib.Path(jaxplugin.__file__).resolve().parent.parent
OLD = ".".join(map(str, jax_version.OLDEST))


class JaxVersionTest(absltest.TestCase):
  def test_import_says_what_is_found_and_what_is_needed(self):
    with tempfile.TemporaryDirectory() as directory:
      package = pathlib.Path(directory) / "jax"
      package.mkdir()
      (package / "__init__.py").write_text(
        '__version__ = "0.4.38"\n__version_info__ = (0, 4, 38)\n'
      )
      # -S skips `site`, so that an installed JAX is not found.
      result = subprocess.run(
        [sys.executable, "-S", "-c", "import jaxplugin"],
        env={
          **os.environ,
          "PYTHONPATH": os.pathsep.join([directory, str(ROOT)]),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
      )
    self.assertEqual(result.returncode, 1)
    self.assertRegex(
      result.stderr.splitlines()[-1],
      rf"^ImportError: jaxplugin: needs jax {re.escape(OLD)} or newer, found"
      rf" 0\.4\.38 in {re.escape(str(package))}.*; run pip install .*>={OLD}'$",
    )

  def test_older_ones_are_refused_and_newer_ones_pass(self):
    for version in ((0, 10, 1), (0, 9, 99), (0, 10)):
      name = ".".join(map(str, version))
      with self.assertRaisesRegex(ImportError, f"found {name} in /there;"):
        jax_version.check(version, name, "/there")
    for version in (jax_version.OLDEST, (0, 10, 10), (1, 0, 0)):
      jax_version.check(version, "", None)

  def test_it_is_the_one_that_the_package_asks_pip_for(self):
    project = ROOT / "pyproject.toml"
    if not project.is_file():
      self.skipTest("an installed package has no pyproject.toml")
    self.assertIn(f'dependencies = ["jax>={OLD}"', project.read_text())
