# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A digest changes with everything that decides, or becomes None."""

import dataclasses
import os
from unittest import mock

from absl.testing import absltest, parameterized

from jaxplugin.core import targets
from jaxplugin.runtime import fingerprints
from jaxplugin.testing import folders

B200 = targets.named_target("b200", cudnn="9.13")
LATER_NS = 2**63  # later than any file of today
# The package's own sources may be younger than the test's process.
SOURCES = mock.patch.object(fingerprints, "_sources", lambda: "digest")


class FingerprintsTest(parameterized.TestCase):
  def folder(self):
    return folders.new(self)

  def test_what_is_asked_for_decides(self):
    with SOURCES:
      names = [
        fingerprints.of("dot", B200),
        fingerprints.of("ragged", B200),
        fingerprints.of("dot", targets.named_target("b200", cudnn="9.12")),
        fingerprints.of("dot", dataclasses.replace(B200, core_count=1)),
      ]
      self.assertEqual(names[0], fingerprints.of("dot", B200))
    self.assertNotIn(None, names)
    self.assertLen(set(names), len(names))

  def test_variables_decide_and_what_lies_where_they_say(self):
    assembler = self.folder() / "ptxas"
    names = []
    for content, time_ns in (("one", 1), ("three", 1), ("three", 2)):
      assembler.write_text(content)
      os.utime(assembler, ns=(0, time_ns * 10**9))
      variables = {"TRITON_PTXAS_PATH": str(assembler)}
      with SOURCES, mock.patch.dict(os.environ, variables):
        names.append(fingerprints.of("dot"))
    for variable in ("JAXPLUGIN_TUNING", "DISABLE_LLVM_OPT", "UNRELATED"):
      with SOURCES, mock.patch.dict(os.environ, {variable: "changed"}):
        names.append(fingerprints.of("dot"))
    with SOURCES:
      self.assertEqual(names.pop(), fingerprints.of("dot"))
    self.assertNotIn(None, names)
    self.assertLen(set(names), len(names))

  @parameterized.parameters("sources", "versions")
  def test_the_installation_decides(self, part):
    with SOURCES:
      before = fingerprints.of("dot")
    others = {"sources": ("_sources", lambda: "others")}
    others["versions"] = ("_versions", lambda: (("jax", "0.99"),))
    name, function = others[part]
    with SOURCES, mock.patch.object(fingerprints, name, function):
      self.assertNotEqual(fingerprints.of("dot"), before)

  def test_there_is_none_of_what_nobody_can_compare(self):
    with SOURCES:
      self.assertIsNone(fingerprints.of("dot", lambda: None))
    with mock.patch.object(fingerprints, "_sources", lambda: None):
      self.assertIsNone(fingerprints.of("dot"))


class SourcesTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = folders.new(self)
    (self.folder / "room").mkdir()
    (self.folder / "room" / "a.py").write_text("a = 1\n")
    (self.folder / "b.py").write_text("b = 1\n")

  def digest(self, before_ns=LATER_NS):
    return fingerprints.sources_digest((self.folder,), before_ns=before_ns)

  def test_contents_and_names_of_files_decide(self):
    digests = [self.digest()]
    (self.folder / "room" / "a.py").write_text("a = 2\n")
    digests.append(self.digest())
    (self.folder / "b.py").rename(self.folder / "c.py")
    digests.append(self.digest())
    self.assertNotIn(None, digests)
    self.assertLen(set(digests), len(digests))

  def test_tests_do_not_decide(self):
    before = self.digest()
    (self.folder / "a_test.py").write_text("")
    self.assertEqual(self.digest(), before)

  def test_there_is_none_where_a_file_is_younger_than_what_runs(self):
    oldest_ns = (self.folder / "room" / "a.py").stat().st_mtime_ns
    self.assertIsNone(self.digest(before_ns=oldest_ns - 1))

  def test_there_is_none_where_there_are_no_files(self):
    self.assertIsNone(
      fingerprints.sources_digest((self.folder / "no",), before_ns=LATER_NS)
    )

  def test_this_package_has_one(self):
    digest = fingerprints.sources_digest(
      fingerprints._FOLDERS, before_ns=LATER_NS
    )
    self.assertIsNotNone(digest)
