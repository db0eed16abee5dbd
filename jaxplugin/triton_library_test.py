# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which kernels serve a device, and which assembler may break them."""

import importlib.metadata
import warnings
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin import target as target_lib
from jaxplugin import triton_library


class TritonLibraryTest(parameterized.TestCase):
  @parameterized.parameters(
    ("13.2.78", True), ("13.3.33", False), (None, False)
  )
  def test_ptxas_that_breaks_hopper_is_warned_of(self, version, is_warned):
    triton_library._warn_of_old_ptxas.cache_clear()
    self.addCleanup(triton_library._warn_of_old_ptxas.cache_clear)

    def installed(package):
      self.assertEqual(package, "nvidia-cuda-nvcc")
      if version is None:
        raise importlib.metadata.PackageNotFoundError(package)
      return version

    self.enter_context(
      mock.patch.object(importlib.metadata, "version", installed)
    )
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      triton_library._warn_of_old_ptxas()
    self.assertLen(caught, int(is_warned))
    for warning in caught:
      self.assertIn("nvidia-cuda-nvcc 13.2.78", str(warning.message))
      self.assertIn("nvidia-cuda-nvcc>=13.3", str(warning.message))

  @parameterized.parameters(
    ((7, 5), None),
    ((8, 0), "sm_80"),
    ((8, 6), "sm_80"),
    ((8, 9), "sm_89"),
    ((9, 0), "sm_90"),
    ((10, 0), "sm_100"),
    ((10, 3), "sm_103"),
    ((11, 0), None),
    ((12, 0), "sm_120"),
    ((12, 1), "sm_121"),
  )
  def test_architecture_of_a_compute_capability(self, capability, expected):
    target = target_lib.Target(
      name="x",
      platform="cuda",
      compute_capability=capability,
      shared_memory_bytes=99 << 10,
    )
    architecture = triton_library.architecture_of(target)
    if expected is None:
      self.assertIsNone(architecture)
    else:
      self.assertEqual(architecture.name, expected)
      self.assertEqual(architecture.shared_memory_bytes, 99 << 10)


if __name__ == "__main__":
  absltest.main()
