# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors and warnings about tuning tables."""


class TableError(ValueError):
  """A tuning table breaks a rule, or its file cannot be read or written.

  The text names the rule, and the file and its line if the table has one.
  """


class TableWarning(UserWarning):
  """A tuning table of the user that is not used; the text has the reason."""
