# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Devices, caches and what files say of them."""

import pathlib

import jax
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.lab.bench import devices
from jaxplugin.testing import folders


class CacheTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"index0": "64K\n", "index2": "2048K\n", "index3": "32M\n"}, 32 << 20),
    # An unknown cache is assumed to be large.
    ({}, 64 << 20),
    ({"index0": "many"}, 64 << 20),
  )
  def test_largest_cache_of_the_system_counts(self, sizes, expected):
    root = folders.new(self)
    for name, text in sizes.items():
      (root / name).mkdir()
      (root / name / "size").write_text(text)
    source = str(root) if expected == 32 << 20 else "assumed"
    self.assertEqual(devices.cpu_cache_bytes(root), (expected, source))

  @parameterized.parameters(
    ("NVIDIA H200", 50 << 20, "the data sheet of h200"),
    ("NVIDIA GB200", 126 << 20, "the data sheet of gb200"),
    ("NVIDIA H100 80GB HBM3", 50 << 20, "the data sheet of h100"),
    ("NVIDIA A100-SXM4-80GB", 40 << 20, "the data sheet of a100"),
    ("NVIDIA X1", 256 << 20, "assumed"),
  )
  def test_gpus_are_known_by_name(self, name, size, source):
    target = targets.Target(name=name, platform="cuda")
    self.assertEqual(devices.gpu_cache_bytes(target), (size, source))

  def test_size_in_the_target_goes_first(self):
    target = targets.named_target("b200")
    self.assertEqual(devices.gpu_cache_bytes(target), (126 << 20, "the target"))


class FindTest(absltest.TestCase):
  def test_errors_name_the_command(self):
    with (
      absltest.mock.patch.object(devices, "PLATFORMS", ()),
      self.assertRaisesRegex(ValueError, "^tune: cannot measure on cpu"),
    ):
      devices.find("cpu", who="tune")


class EnvironmentTest(absltest.TestCase):
  def test_says_where_and_with_what(self):
    found = devices.environment(devices.find("cpu"))
    self.assertEqual(found["platform"], "cpu")
    self.assertEqual(found["versions"]["jax"], jax.__version__)
    self.assertTrue(found["device"])
    self.assertRegex(found["date"], r"^20\d\d-\d\d-\d\dT[\d:]+\+00:00$")
    if not (pathlib.Path(jp.__file__).parents[1] / ".git").exists():
      self.assertIsNone(found["commit"])
    else:
      self.assertRegex(found["commit"], r"^[0-9a-f]{40}\+?$")
