# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Backends of another package, which is called acme."""

import unittest
from collections.abc import Callable
from typing import Any

import jaxplugin as jp


def create(emit: Callable[..., Any], **fields: Any) -> jp.Backend:
  """Returns a backend for CPUs; by default it supports every problem."""
  defaults = {
    "name": "acme",
    "api_version": 1,
    "platforms": ("cpu",),
    "supports": lambda problem, target: None,
  }
  return jp.Backend(**{**defaults, "emit": emit, **fields})


def register(
  test: unittest.TestCase,
  emit: Callable[..., Any],
  *,
  first: bool = False,
  **fields: Any,
) -> jp.Backend:
  """Registers a backend until the end of the test, and returns it."""
  result = jp.register_backend(create(emit, **fields), first=first)
  test.addCleanup(jp.backends.unregister_backend, result.name)
  return result
