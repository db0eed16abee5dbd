# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Decorators that skip tests if an optional package is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any
from typing import Final

from absl.testing import absltest


def needs(*modules: str) -> Callable[[Any], Any]:
  """Returns a decorator of tests and classes that need all these modules."""
  missing = [m for m in modules if importlib.util.find_spec(m) is None]
  return absltest.skipIf(bool(missing), f"not installed: {', '.join(missing)}")


needs_triton: Final = needs("triton")
# XLA's compiler for GPUs, of Triton's kernels too.
needs_gpu_compilers: Final = needs("triton", "jax_cuda13_plugin")
