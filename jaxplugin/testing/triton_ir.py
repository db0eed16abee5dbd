# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lowers calls of Triton kernels without compiling the kernels to PTX."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

from absl.testing import parameterized

from jaxplugin.runtime import triton_library

# jax-triton reuses a compiled kernel if all its options are the same. No plan
# has this number of stages, so other tests do not get kernels without PTX.
_STAGES: Final = 99


@contextlib.contextmanager
def without_ptx() -> Iterator[None]:
  """Makes Triton write a header instead of a kernel's PTX.

  Compiling a kernel takes up to a second, and a test of a module reads only the
  kernel's call. The kernel is still compiled to Triton's IR.
  """
  if importlib.util.find_spec("jax_triton") is None:
    yield
    return
  from triton.backends.nvidia import compiler

  call = triton_library._triton_call

  def triton_call(inputs: Any, *, launch: Any, **params: Any) -> Any:
    launch = dataclasses.replace(launch, num_stages=_STAGES)
    return call(inputs, launch=launch, **params)

  def make_ttgir(ttir: Any, metadata: dict[str, Any], *_: Any) -> Any:
    metadata |= {"name": "kernel", "shared": 0, "tmem_size": 0}
    metadata["tensordesc_meta"] = []
    return ttir

  def make_ptx(self: Any, ir: Any, metadata: Any, options: Any, sm: int) -> str:
    del self, ir, metadata, options
    return f".version 8.0\n.target {compiler.sm_arch_from_capability(sm)}\n"

  with (
    mock.patch.object(triton_library, "_triton_call", triton_call),
    mock.patch.multiple(
      compiler.CUDABackend,
      make_ttgir=staticmethod(make_ttgir),
      make_llir=lambda self, ttgir, *_: ttgir,
      make_ptx=make_ptx,
    ),
  ):
    yield


class WithoutPtx(parameterized.TestCase):
  """Runs the tests of a class inside `without_ptx`."""

  @classmethod
  def setUpClass(cls) -> None:
    super().setUpClass()
    cls.enterClassContext(without_ptx())
