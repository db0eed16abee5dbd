# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of permissions, for who has all of them."""

from __future__ import annotations

import os
import unittest

_NOBODY = 65534


def become_nobody(test: unittest.TestCase) -> None:
  """Until the end of a test, root is a user who may do little.

  The test is skipped where there is no other user, as in some sandboxes.
  """
  if os.geteuid() != 0:
    return
  try:
    os.seteuid(_NOBODY)
  except OSError as error:
    test.skipTest(f"root cannot become another user here: {error}")
  test.addCleanup(os.seteuid, 0)
