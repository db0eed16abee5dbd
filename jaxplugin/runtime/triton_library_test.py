# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Targets that the Triton kernels support."""

import dataclasses
import importlib.util
from unittest import mock

from absl.testing import absltest, parameterized

from jaxplugin.core import targets
from jaxplugin.runtime import triton_library

needs_jax_triton = absltest.skipIf(
  bool(triton_library._import_error()), "jax-triton cannot be imported"
)


class TritonLibraryTest(parameterized.TestCase):
  @parameterized.parameters(
    ("0.4.0", "0.11.1", True),
    ("0.4.1.dev20261101", "0.12", True),
    ("1.0", "1.0", True),
    ("0.3.1", "0.11.2", False),
    ("0.4.1", "0.11.0", False),
  )
  @needs_jax_triton
  def test_descriptors_need_versions_that_have_them(
    self, jax_triton, jaxlib, serve
  ):
    for package, version in (("jax_triton", jax_triton), ("jaxlib", jaxlib)):
      module = importlib.import_module(package)
      self.enter_context(mock.patch.object(module, "__version__", version))
    refusal = triton_library.descriptors_refusal()
    if serve:
      self.assertIsNone(refusal)
    else:
      self.assertIn("need jax-triton 0.4.0 or newer", refusal.reason)
      self.assertIn(
        f"got jax-triton {jax_triton} with jaxlib {jaxlib};", refusal.reason
      )

  def test_target_that_is_to_have_descriptors_is_another_one(self):
    target = targets.named_target("b200", cudnn="9.13")
    described = triton_library.with_descriptors(target)
    self.assertTrue(triton_library.uses_descriptors(described))
    self.assertFalse(triton_library.uses_descriptors(target))
    # Otherwise `jit` would use the program of one for the other.
    self.assertNotEqual(described, target)
    self.assertEqual(described, triton_library.with_descriptors(described))
    self.assertEqual(dataclasses.asdict(described), dataclasses.asdict(target))
    self.assertEqual(str(described), f"{target}, with TMA descriptors")

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
    target = targets.Target(
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
