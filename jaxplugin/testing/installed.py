# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Decorators that skip tests if an optional package or a GPU is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Final

import jax
from absl.testing import absltest

from jaxplugin.core import targets
from jaxplugin.runtime import triton_library


def needs(*modules: str) -> Callable[[Any], Any]:
  """Returns a decorator of tests and classes that need all these modules."""
  missing = [m for m in modules if importlib.util.find_spec(m) is None]
  return absltest.skipIf(bool(missing), f"not installed: {', '.join(missing)}")


needs_triton: Final = needs("triton")
# XLA's compiler for GPUs, of Triton's kernels too.
needs_gpu_compilers: Final = needs("triton", "jax_cuda13_plugin")


def needs_gpu(test: Any) -> Any:
  """Decorates a test of Triton kernels that needs a GPU."""
  reason = _why_no_gpu()
  return absltest.skipIf(bool(reason), reason)(test)


def _why_no_gpu() -> str:
  """Why triton cannot be tried here; empty where it can."""
  if jax.default_backend() != "gpu":
    return f"needs a GPU, JAX's default backend is {jax.default_backend()}"
  target = targets.detect_target()
  refusal = triton_library.refusal(target)
  refusal = refusal or triton_library.lowering_refusal(target)
  return "" if refusal is None else f"{refusal.reason} ({target})"
