# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors of tables of measured choices."""


class TableError(ValueError):
  """A table breaks a rule, or its file cannot be read or written.

  The text names the file and the line, where there is one, and the rule.
  """


class TableWarning(UserWarning):
  """A table of the user's is not used; says which, and why."""
