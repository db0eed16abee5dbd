# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line in a test: what it prints, and its exit status."""

import contextlib
import io
import sys
from collections.abc import Iterator
from unittest import mock

from absl import logging
from absl.testing import parameterized

from jaxplugin import __main__ as main
from jaxplugin.testing import folders


@contextlib.contextmanager
def _log_level_of_a_process() -> Iterator[None]:
  """WARNING, as a command's own process has it; absltest's main sets INFO."""
  verbosity = logging.get_verbosity()
  logging.set_verbosity(logging.WARNING)
  try:
    yield
  finally:
    logging.set_verbosity(verbosity)


class CommandLineTestCase(parameterized.TestCase):
  """Runs commands in this process; `directory` is theirs."""

  def setUp(self):
    super().setUp()
    self.directory = folders.new(self)

  def write(self, name, data):
    path = self.directory / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)

  def run_command(self, *arguments, stdin=b""):
    """Returns the exit status, what went to stdout (text), and to stderr."""
    status, out, err = self.run_binary(*arguments, stdin=stdin)
    return status, out.decode(), err

  def run_binary(self, *arguments, stdin=b""):
    out = io.TextIOWrapper(io.BytesIO())
    err = io.StringIO()
    given = io.TextIOWrapper(io.BytesIO(stdin))
    with contextlib.ExitStack() as stack:
      stack.enter_context(contextlib.redirect_stdout(out))
      stack.enter_context(contextlib.redirect_stderr(err))
      stack.enter_context(mock.patch.object(sys, "stdin", given))
      stack.enter_context(_log_level_of_a_process())
      try:
        status = main.main(arguments)
      except SystemExit as stop:
        status = stop.code
    out.flush()
    return status, out.buffer.getvalue(), err.getvalue()

  def check_error(self, arguments, pattern, **options):
    """Asserts status 2, nothing on stdout, and one reason on stderr."""
    status, out, err = self.run_command(*arguments, **options)
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(" ".join(err.split()), pattern)
    self.assertNotIn("Traceback", err)
    return err
