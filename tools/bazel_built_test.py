# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Under Bazel, tests use the library that Bazel built, not a checkout's."""

import os
import pathlib
import subprocess
import sys

from absl.testing import absltest
from jaxplugin.kernels.cpu import library
from jaxplugin.kernels.gpu import configs

import jaxplugin as jp
from jaxplugin.runtime import cpu_library

RUNFILES = os.environ.get("TEST_SRCDIR")


@absltest.skipIf(RUNFILES is None, "for Bazel only")
class BuiltTest(absltest.TestCase):
  def test_modules_are_the_runfiles(self):
    for module in (jp, cpu_library, configs, library):
      self.assertStartsWith(module.__file__, RUNFILES, module.__name__)

  def test_modules_of_a_new_process_are_the_runfiles(self):
    code = "import jaxplugin.kernels.cpu.library as m; print(m.__file__)"
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    self.assertStartsWith(out, RUNFILES)

  def test_kernels_are_no_package_of_their_own(self):
    self.assertNotIn("kernels", sys.modules)
    self.assertTrue(configs.__name__.startswith("jaxplugin."))

  def test_cpu_library_is_the_one_that_bazel_built(self):
    module = pathlib.Path(library.__file__)
    # The library lies next to the link, so it is a declared input of the test.
    self.assertTrue((module.parent / library.LIBRARY_NAME).exists())
    path = library.find()
    self.assertEqual(path.parent, module.resolve().parent)
    self.assertIn("bazel-out", path.parts)
    cpu_library.register()
    self.assertEqual(jp.detect_target("cpu").missing_libraries, ())
