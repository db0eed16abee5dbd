# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Files that the command line writes; `rewrite_test` has the rest."""

import errno
import os
import sys

from absl.testing import absltest, parameterized

from jaxplugin.cli import files
from jaxplugin.stablehlo import modules
from jaxplugin.testing import folders


class FilesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = folders.new(self)
    self.input = self.directory / "in.mlir"
    self.input.write_text("module {}")

  def test_name_of_the_file_is_the_name_of_the_module(self):
    source = files.read(str(self.input))
    self.assertEqual(source.name, str(self.input))
    self.assertEqual(source.given, b"module {}")

  def test_failed_write_leaves_things_as_they_were(self):
    for name, content in (("new", None), ("old", b"before")):
      output = self.directory / name
      if content is not None:
        output.write_bytes(content)
      with (
        absltest.mock.patch.object(
          os, "replace", side_effect=OSError(errno.ENOSPC, "disk full")
        ),
        self.assertRaisesRegex(OSError, f"disk full: '{output}'"),
      ):
        files.write("text", str(self.input), str(output), True)
      if content is None:
        self.assertFalse(output.exists())
      else:
        self.assertEqual(output.read_bytes(), content)
    names = sorted(path.name for path in self.directory.iterdir())
    self.assertEqual(names, ["in.mlir", "old"])

  def test_folder_of_outputs_must_be_writable(self):
    files.check_folder("")
    files.check_folder(str(self.directory / "new" / "newer"))
    for folder in (self.input, self.input / "new"):
      with self.assertRaisesRegex(NotADirectoryError, "in.mlir"):
        files.check_folder(str(folder))
    with absltest.mock.patch.object(os, "access", return_value=False):
      for output in (self.directory / "out", self.directory / "new"):
        with self.assertRaisesRegex(PermissionError, str(self.directory)):
          files.check_output(str(self.input), str(output), force=False)

  def test_permissions_of_what_is_replaced_stay(self):
    output = self.directory / "out"
    output.write_text("before")
    output.chmod(0o640)
    files.write(b"after", str(self.input), str(output), True)
    self.assertEqual(output.read_text(), "after")
    self.assertEqual(output.stat().st_mode & 0o777, 0o640)

  def test_result_in_place_of_a_link_has_the_permissions_of_its_target(self):
    target, link = self.directory / "target", self.directory / "link"
    target.write_text("target")
    target.chmod(0o640)
    link.symlink_to(target)
    files.write("after", str(self.input), str(link), True)
    self.assertFalse(link.is_symlink())
    self.assertEqual(link.stat().st_mode & 0o777, 0o640)
    self.assertEqual(target.read_text(), "target")

  def test_link_to_nothing_exists(self):
    output = self.directory / "link"
    output.symlink_to(self.directory / "nothing")
    with self.assertRaisesRegex(ValueError, "link exists"):
      files.write("text", str(self.input), str(output), False)
    self.assertFalse((self.directory / "nothing").exists())

  def test_name_without_a_directory_is_in_the_current_one(self):
    before = os.getcwd()
    os.chdir(self.directory)
    try:
      files.write("text", "in.mlir", "out", False)
    finally:
      os.chdir(before)
    self.assertEqual((self.directory / "out").read_text(), "text")

  def test_form_follows_the_content_and_not_the_name(self):
    data = modules.read("module {}").serialize("bytecode")
    path = self.directory / "text.mlir"
    path.write_bytes(data)
    self.assertEqual(files.read(str(path)).form, "bytecode")

  def test_what_is_no_regular_file_is_refused_at_once(self):
    pipe = self.directory / "pipe"
    os.mkfifo(pipe)  # nobody writes to it
    for path in (pipe, "/dev/zero", "/dev/null"):
      with self.assertRaisesRegex(ValueError, "not a regular file; .* pass -"):
        files.read(str(path))
    with self.assertRaises(IsADirectoryError) as caught:
      files.read(str(self.directory))
    self.assertEqual(caught.exception.filename, str(self.directory))

  def test_size_is_limited_where_the_end_is_not_known(self):
    text = b"module {}"
    with absltest.mock.patch.object(files, "MAX_BYTES", len(text)):
      self.input.write_bytes(text)
      files.read(str(self.input))
      self.input.write_bytes(text + b" ")
      with self.assertRaisesRegex(ValueError, "in.mlir: .*at most 9 bytes"):
        files.read(str(self.input))
      with (
        open("/dev/zero", "rb") as zeros,
        absltest.mock.patch.object(sys, "stdin", zeros),
        self.assertRaisesRegex(ValueError, "<stdin>: .*at most 9 bytes"),
      ):
        files.read("-")
